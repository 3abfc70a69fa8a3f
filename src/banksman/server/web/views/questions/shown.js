// Draw the subject of a question in full: a command, a change to a file, or the input of another
// tool.
//
// The action comes first, in full, because the user decides by it. Long content scrolls. The
// agent's description comes after it, marked as the agent's words: nothing has checked that they
// are true. Everything is text.

import { el } from "../../dom.js";
import { diffLines } from "../../model/diff.js";
import { fieldsOf, hasDescription, isAskingTool, saidAbout } from "../../model/questions.js";
import { objectOf, textOf } from "../../model/words.js";

/** @returns {HTMLElement[]} */
export function shownOf(question) {
  const { input, details } = question;
  const { nodes, names } = drawnOf(question);
  const said = saidAbout(question).map((words) => saidBy(question, words));
  const shown = [...nodes];
  for (const each of Array.isArray(details.content) ? details.content : []) shown.push(...contentOf(objectOf(each)));
  // The agent chooses which members of the input a tool reads. So every member that was not drawn
  // is shown as JSON.
  const rest = Object.fromEntries(Object.entries(input).filter(([name]) => !names.has(name)));
  if (Object.keys(rest).length > 0) shown.push(code(JSON.stringify(rest, null, 2)));
  // For an input question these words ask for the input: they come before the form.
  return fieldsOf(question) === null ? [...shown, ...said] : [...said, ...shown];
}

function saidBy(question, words) {
  const isAsked = fieldsOf(question) !== null;
  return el(
    "p",
    { class: isAsked ? "question-said" : "question-said is-agents" },
    isAsked ? null : el("span", { class: "question-speaker" }, "The agent says: "),
    words,
  );
}

/**
 * The parts of the input that have a better form than JSON.
 * @returns {{nodes: HTMLElement[], names: Set<string>}} and the members that they show completely
 */
function drawnOf(question) {
  const { input } = question;
  const nodes = [];
  const names = new Set();
  const draw = (node, ...of) => {
    nodes.push(node);
    for (const name of of) names.add(name);
  };
  const isText = (name) => typeof input[name] === "string";
  const words = Array.isArray(input.command) ? input.command : [input.command];
  if (words.length > 0 && words.every((word) => typeof word === "string"))
    draw(code(`$ ${words.join(" ")}`, "question-command"), "command");
  // The description is shown with the agent's words.
  if (hasDescription(question)) names.add("description");
  const path = ["file_path", "path"].find(isText);
  if (path) draw(el("p", { class: "question-path" }, input[path]), path);
  if (isText("new_string") && (isText("old_string") || !("old_string" in input)))
    draw(difference(input.old_string ?? "", input.new_string), "old_string", "new_string");
  else if (isText("content")) draw(difference("", input.content), "content");
  if (Array.isArray(input.edits) && input.edits.every(isPlainEdit))
    for (const each of input.edits) draw(difference(each.old_string, each.new_string), "edits");
  if (isAskingTool(question)) names.add("questions"); // The form shows them.
  return { nodes, names };
}

/** Whether an edit replaces one text by another and has no other member. */
function isPlainEdit(edit) {
  const texts = Object.entries(objectOf(edit)).filter(([, value]) => typeof value === "string");
  return (
    texts.length === Object.keys(objectOf(edit)).length &&
    texts.map(([name]) => name).sort().join() === "new_string,old_string"
  );
}

/** ACP's content of a tool call. */
function contentOf(each) {
  if (each.type === "diff")
    return [el("p", { class: "question-path" }, textOf(each.path)), difference(each.oldText, each.newText)];
  const { text } = objectOf(each.content);
  return typeof text === "string" ? [code(text)] : [];
}

function code(text, name = "") {
  return el("pre", { class: `question-code ${name}`, tabIndex: 0, "aria-label": "Input of the tool" }, text);
}

function difference(before, after) {
  const lines = diffLines(textOf(before), textOf(after));
  return el(
    "pre",
    { class: "question-code question-diff", tabIndex: 0, "aria-label": "Proposed change" },
    lines.map(({ sign, text }) =>
      el("span", { class: sign === "+" ? "is-new" : sign === "-" ? "is-old" : "" }, `${sign} ${text}\n`),
    ),
  );
}
