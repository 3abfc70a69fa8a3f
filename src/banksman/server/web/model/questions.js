// Which questions are open, which answers are possible, and which fields a form needs. Pure.
//
// A question is open from its `question.asked` to its `question.answered`. The possible answers
// depend on the question. A permission has the options that the agent offers, or the usual three.
// An input (an elicitation, or the questions of a tool that asks the user) has a form, with accept
// and decline.

import { objectOf, textOf } from "./words.js";

/** @typedef {{id: string, label: string, decision: string, remember?: boolean, allows: boolean,
 *   isLasting: boolean}} Choice */
/** @typedef {{name: string, label: string, help: string, kind: "text"|"number"|"boolean"|"one"|"many",
 *   isRequired: boolean,
 *   options: {value: any, label: string, help: string}[], initial: any, limits: Record<string, any>}} Field */

/**
 * @param {any[]} events own events of one session, in order
 * @returns {{open: any[], answered: Map<string, any>}}
 */
export function fold(events) {
  const open = new Map();
  const answered = new Map();
  for (const event of events) {
    const body = event.body ?? {};
    if (event.kind === "question.asked") {
      open.set(body.question, {
        id: body.question,
        turn: event.turn,
        seq: event.seq,
        at: event.at,
        wants: body.wants ?? "permission",
        tool: textOf(body.tool),
        input: objectOf(body.input),
        details: objectOf(body.details),
      });
    } else if (event.kind === "question.answered" && open.delete(body.question)) {
      answered.set(body.question, {
        answer: body.answer,
        by: body.by,
        message: body.message ?? null,
        option: body.option ?? null,
        seq: event.seq,
      });
    }
  }
  return { open: [...open.values()], answered };
}

const USUAL = [
  { id: "allow", label: "Allow", decision: "allow", allows: true, isLasting: false },
  {
    id: "allow-session",
    label: "Allow for this session",
    decision: "allow",
    remember: true,
    allows: true,
    isLasting: true,
  },
  { id: "deny", label: "Deny", decision: "deny", allows: false, isLasting: false },
];

/**
 * The possible answers, in display order.
 * @returns {Choice[]}
 */
export function choicesOf(question) {
  if (fieldsOf(question) !== null) {
    return [
      { id: "allow", label: "Answer", decision: "allow", allows: true, isLasting: false },
      { id: "deny", label: "Decline", decision: "deny", allows: false, isLasting: false },
    ];
  }
  const offered = (Array.isArray(question.details?.options) ? question.details.options : []).filter(
    (each) => typeof each?.optionId === "string",
  );
  if (offered.length === 0) return USUAL;
  const choices = offered.map((each) => ({
    id: each.optionId,
    label: textOf(each.name) || each.optionId,
    decision: each.optionId,
    allows: !textOf(each.kind).startsWith("reject"),
    isLasting: textOf(each.kind).endsWith("_always"),
  }));
  // The user must be able to refuse, even if the agent offered no option for it.
  if (choices.every((each) => each.allows)) choices.push(USUAL[2]);
  return choices;
}

/** The choice of a key: `a` and `d` are the plain yes and no, a digit is a place in the list. */
export function choiceFor(key, choices) {
  if (/^[1-9]$/u.test(key)) return choices[Number(key) - 1] ?? null;
  if (key !== "a" && key !== "d") return null;
  const fitting = choices.filter((each) => each.allows === (key === "a"));
  return fitting.find((each) => !each.isLasting) ?? fitting[0] ?? null;
}

/** The keys of a choice, for its button. */
export function keysOf(choice, choices) {
  const letter = ["a", "d"].find((key) => choiceFor(key, choices) === choice);
  const place = choices.indexOf(choice) + 1;
  return [letter, place <= 9 ? String(place) : undefined].filter(Boolean);
}

// -- forms ----------------------------------------------------------------------------------------
/** The fields to fill in. null: none, the question is a yes or a no. @returns {Field[]|null} */
export function fieldsOf(question) {
  const { details = {}, input = {} } = question;
  if (isAskingTool(question))
    return input.questions.map(objectOf).map((each) => asked(each, textOf(each.question ?? each.header ?? "?")));
  if (question.wants !== "elicitation") return null;
  if (Array.isArray(details.questions))
    return details.questions.map(objectOf).map((each) => asked(each, textOf(each.id ?? each.question ?? "?")));
  const schema = objectOf(details.requestedSchema ?? details.requested_schema);
  const required = new Set(Array.isArray(schema.required) ? schema.required : []);
  const properties = Object.entries(objectOf(schema.properties));
  return properties.map(([name, each]) => field(name, objectOf(each), required.has(name)));
}

/** Whether the use of the tool *is* the question. It is allowed with the answers in its input. */
export function isAskingTool(question) {
  return (
    question.wants === "permission" && question.tool === "AskUserQuestion" && Array.isArray(question.input?.questions)
  );
}

function asked(each, name) {
  const options = (Array.isArray(each.options) ? each.options : []).map((one) => ({
    value: textOf(objectOf(one).label ?? one),
    label: textOf(objectOf(one).label ?? one),
    help: textOf(objectOf(one).description),
  }));
  const kind = options.length === 0 ? "text" : each.multiSelect ? "many" : "one";
  return {
    name,
    label: textOf(each.question ?? each.header ?? name),
    help: "",
    kind,
    isRequired: true,
    options,
    initial: undefined,
    limits: {},
  };
}

function field(name, schema, isRequired) {
  const type = Array.isArray(schema.type) ? schema.type.find((each) => each !== "null") : schema.type;
  const many = type === "array" ? objectOf(schema.items) : null;
  const options = optionsOf(many ?? schema);
  const kind = many
    ? "many"
    : options.length
      ? "one"
      : type === "boolean"
        ? "boolean"
        : type === "number" || type === "integer"
          ? "number"
          : "text";
  const { minimum, maximum, minLength, maxLength, pattern, format } = schema;
  return {
    name,
    label: textOf(schema.title ?? name),
    help: textOf(schema.description),
    kind,
    isRequired,
    options,
    initial: schema.default,
    limits: { minimum, maximum, minLength, maxLength, pattern, format, isWhole: type === "integer" },
  };
}

function optionsOf(schema) {
  const list = schema.oneOf ?? schema.anyOf;
  if (Array.isArray(list)) {
    return list
      .filter((each) => "const" in objectOf(each))
      .map((each) => ({
        value: each.const,
        label: textOf(each.title ?? each.const),
        help: textOf(each.description),
      }));
  }
  if (!Array.isArray(schema.enum)) return [];
  return schema.enum.map((value, index) => ({ value, label: textOf(schema.enumNames?.[index] ?? value), help: "" }));
}

/**
 * The entered values in the form that the answer needs: `content` of an elicitation, or the tool's
 * input with the answers.
 */
export function entered(question, values) {
  if (!isAskingTool(question)) return { content: values };
  const answers = Object.fromEntries(
    Object.entries(values).map(([name, value]) => [name, Array.isArray(value) ? value.join(", ") : textOf(value)]),
  );
  return { updatedInput: { ...question.input, answers } };
}

// -- words ----------------------------------------------------------------------------------------
export function titleOf(question) {
  const { details = {}, tool, wants } = question;
  if (wants === "elicitation") return `${tool ? `${tool} asks` : "The agent asks"}`;
  if (wants === "budget") return textOf(details.title) || "A budget is used up";
  if (isAskingTool(question)) return "The agent asks";
  const shown = textOf(details.display_name);
  // The agent chooses the display name of a tool. The real name is shown beside it.
  return `May the agent use ${shown && tool && shown !== tool ? `${shown} (${tool})` : shown || tool || "this tool"}?`;
}

/** Whether the input has a description in words beside its content. */
export function hasDescription(question) {
  const { input = {} } = question;
  return typeof input.description === "string" && Object.keys(input).length > 1;
}

/** The text around the input: a message, a reason, a title. */
export function saidAbout(question) {
  const { details = {}, input = {} } = question;
  const words = hasDescription(question) ? input.description : null;
  const said = [
    details.message,
    details.title,
    details.description,
    words,
    details.reason,
    details.decision_reason,
  ].filter((each) => typeof each === "string" && each !== "");
  return [...new Set(said)].filter((each) => each !== input.command);
}

const BY = {
  answer: "by another client",
  rule: "by a rule",
  expiry: "because no answer came in time",
  turn: "because its turn was stopped",
  agent: "by the agent itself",
  exit: "because the process that asked is gone",
  recovery: "because the process that asked is gone",
  callback: "by the program that runs the session",
  store: "because the log failed",
};

/** Describe the answer of a question that was visible here. */
export function answeredText(answered) {
  const word =
    { allow: "allowed", deny: "denied", cancelled: "cancelled", withdrawn: "withdrawn" }[answered.answer] ??
    answered.answer;
  const by = answered.caller ? `by ${answered.caller}` : (BY[answered.by] ?? `by ${answered.by}`);
  return `${word} ${by}${answered.message ? `: ${answered.message}` : ""}`;
}
