// A question of the agent at its place in the transcript, with its answer. The user answers it
// above the composer.
// @ts-check

import { el, replace } from "../../dom.js";
import { icon } from "./icons.js";

const ANSWERS = new Map([
  ["allow", "Allowed"],
  ["deny", "Denied"],
  ["cancelled", "Cancelled"],
  ["withdrawn", "Withdrawn"],
]);
const WHO = new Map([
  ["answer", "by a person"],
  ["rule", "by a rule"],
  ["callback", "by a callback"],
  ["expiry", "because no answer came in time"],
  ["turn", "because its turn ended"],
  ["agent", "by the agent"],
  ["recovery", "because its host died"],
]);
const ABOUT = ["command", "file_path", "path", "url", "pattern", "query", "message"];

/** @type {import("./item.js").Kind} */
export function questionItem(article) {
  const line = el("p", { class: "question-line" });
  article.append(line);
  return (item) => {
    article.dataset.answer = item.answer ?? "open";
    const asked = item.wants === "permission" ? "Asks to use " : "Asks: ";
    const about = aboutOf(item);
    const outcome =
      item.answer === null
        ? el("span", { class: "answer" }, "waits for an answer")
        : el(
            "span",
            { class: "answer" },
            [
              ANSWERS.get(item.answer) ?? `Answered “${item.answer}”`,
              item.caller ? `by ${item.caller}` : WHO.get(item.by),
            ]
              .filter(Boolean)
              .join(" "),
          );
    replace(
      line,
      icon("question"),
      el(
        "span",
        { class: "asked" },
        asked,
        el("b", null, item.tool || item.wants || "something"),
        about ? [" ", el("code", null, about)] : null,
      ),
      outcome,
      item.message ? el("span", { class: "soft" }, `“${item.message}”`) : null,
    );
  };
}

/** @param {Record<string, any>} item */
function aboutOf(item) {
  const input = item.input ?? {};
  const name = ABOUT.find((one) => typeof input[one] === "string");
  return name ? String(input[name]).replace(/\s+/g, " ").slice(0, 160) : "";
}
