// A form for an input question: one control for each field of the question's schema.
//
// It returns values of the requested types, and leaves out optional empty fields. The browser
// validates (required, ranges, lengths) and shows the error at the field.

import { el } from "../../dom.js";

let count = 0;

/**
 * @param {import("../../model/questions.js").Field[]} fields
 * @returns {{node: HTMLElement, read: () => Record<string, any>|null}}
 *   `read` returns null if the form is invalid, and shows the error
 */
export function formOf(fields) {
  const made = fields.map(make);
  const node = el(
    "form",
    { class: "question-form", on: { submit: (event) => event.preventDefault() } },
    made.map((each) => each.node),
  );
  return {
    node,
    read() {
      if (!node.reportValidity()) return null;
      const values = {};
      for (const each of made) {
        const value = each.read();
        if (value !== undefined) values[each.name] = value;
      }
      return values;
    },
  };
}

function make(field) {
  const id = `field-${(count += 1)}`;
  const help = field.help ? el("span", { id: `${id}-help`, class: "question-help" }, field.help) : null;
  const props = { id, "aria-describedby": help ? `${id}-help` : null };
  const label = (control) =>
    el(
      "div",
      { class: "question-field" },
      el("label", { htmlFor: id }, field.label, field.isRequired ? " *" : ""),
      help,
      control,
    );
  switch (field.kind) {
    case "boolean": {
      const input = el("input", { ...props, type: "checkbox", checked: field.initial === true });
      const node = el(
        "div",
        { class: "question-field is-check" },
        input,
        el("label", { htmlFor: id }, field.label),
        help,
      );
      return { name: field.name, node, read: () => input.checked };
    }
    case "number": {
      const { minimum, maximum, isWhole } = field.limits;
      const input = el("input", {
        ...props,
        type: "number",
        required: field.isRequired,
        min: minimum ?? null,
        max: maximum ?? null,
        step: isWhole ? "1" : "any",
        value: field.initial ?? "",
      });
      return {
        name: field.name,
        node: label(input),
        read: () => (input.value === "" ? undefined : Number(input.value)),
      };
    }
    case "one":
    case "many":
      return choice(field, id, help);
    default: {
      const { minLength, maxLength, pattern, format } = field.limits;
      const type = { email: "email", uri: "url", date: "date", "date-time": "datetime-local" }[format] ?? "text";
      const input = el("input", {
        ...props,
        type,
        required: field.isRequired,
        minlength: minLength ?? null,
        maxlength: maxLength ?? null,
        pattern: pattern ?? null,
        value: field.initial ?? "",
      });
      const read = () =>
        input.value === "" && !field.isRequired
          ? undefined
          : type === "datetime-local"
            ? new Date(input.value).toISOString()
            : input.value;
      return { name: field.name, node: label(input), read };
    }
  }
}

/** Single or multiple choice. All options are visible, each with its description. */
function choice(field, id, help) {
  const isMany = field.kind === "many";
  const initial = isMany ? (Array.isArray(field.initial) ? field.initial : []) : [field.initial];
  const inputs = field.options.map((option, index) =>
    el("input", {
      type: isMany ? "checkbox" : "radio",
      name: id,
      id: `${id}-${index}`,
      checked: initial.includes(option.value),
      required: !isMany && field.isRequired,
    }),
  );
  const rows = field.options.map((option, index) =>
    el(
      "div",
      { class: "question-option" },
      inputs[index],
      el(
        "label",
        { htmlFor: `${id}-${index}` },
        option.label,
        option.help ? el("span", { class: "question-help" }, option.help) : null,
      ),
    ),
  );
  const node = el(
    "fieldset",
    { class: "question-field" },
    el("legend", {}, field.label, field.isRequired ? " *" : ""),
    help,
    rows,
  );
  const chosen = () => field.options.filter((_, index) => inputs[index].checked).map((option) => option.value);
  const read = () => (isMany ? chosen() : chosen()[0]);
  return { name: field.name, node, read };
}
