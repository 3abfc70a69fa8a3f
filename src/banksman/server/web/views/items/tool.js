// A tool call: one row, which opens to its input and its output.
// @ts-check

import { el, replace } from "../../dom.js";
import { diffLines, tally } from "../../model/diff.js";
import { changesOf, counts, diffView } from "../diff.js";
import { icon } from "./icons.js";
import { copyButton, fold, pictures, portioned, withoutAnsi } from "./parts.js";
import { duration } from "./words.js";
import { textOf } from "../../model/words.js";

const PORTION = 8000;
/** The changed lines are counted in the row only up to this length. */
const COUNTED_MAX = 40_000;
const STATUSES = new Map([
  ["pending", "waits"],
  ["in_progress", "runs"],
  ["completed", "done"],
  ["failed", "failed"],
  ["stopped", "cut short"],
]);
/** A shorter duration is not shown. */
const QUICK_SECONDS = 0.1;

/** @type {import("./item.js").Kind} */
export function toolItem(article, first, kit) {
  let now = first;
  const glyph = el("span", { class: "glyph" });
  const title = el("span", { class: "title" });
  const tail = el("span", { class: "tail" });
  const row = fold({
    key: first.key,
    kit,
    class: "tool",
    summary: [glyph, title, tail, icon("chevron")],
    inside: () => inside(now, kit),
  });
  article.append(row.node);
  let tool = "";
  return (item) => {
    now = item;
    article.dataset.status = item.status;
    if (tool !== item.tool || !tool) replace(glyph, icon((tool = item.tool)));
    drawTitle(title, item);
    replace(tail, changed(item), took(item), el("span", { class: "status" }, STATUSES.get(item.status) ?? item.status));
    if (row.isOpen) row.refresh();
  };
}

/**
 * "Bash: make test" consists of the tool's name and its subject.
 * @param {HTMLElement} node
 * @param {Record<string, any>} item
 */
function drawTitle(node, item) {
  const words = item.title ?? "A tool that was called before the first event shown here";
  const found = /^([\w.-]{1,40}): ([^]*)$/.exec(words);
  if (found) replace(node, el("b", null, found[1]), " ", el("span", { class: "about" }, found[2].replace(/\s+/g, " ")));
  else replace(node, el("b", null, words.replace(/\s+/g, " ")));
  node.title = words;
}

/** @param {Record<string, any>} item */
function took(item) {
  if (item.began === null || item.ended === null || item.ended - item.began < QUICK_SECONDS) return null;
  return el("span", { class: "took" }, duration(item.ended - item.began));
}

/** @param {Record<string, any>} item */
function changed(item) {
  if (item.tool !== "edit") return null;
  const changes = changesOf(item);
  const length = changes.reduce((sum, { before, after }) => sum + (before?.length ?? 0) + (after?.length ?? 0), 0);
  if (!changes.length || length > COUNTED_MAX) return null;
  const all = changes.map(({ before, after }) => tally(diffLines(before, after)));
  return counts(
    all.reduce((sum, one) => sum + one.added, 0),
    all.reduce((sum, one) => sum + one.removed, 0),
  );
}

/**
 * @param {Record<string, any>} item
 * @param {import("./parts.js").Kit} kit
 */
function inside(item, kit) {
  const changes = changesOf(item);
  const output = outputOf(item);
  const images = item.content
    .filter((/** @type {any} */ part) => part.type === "content" && part.content?.type === "image")
    .map((/** @type {any} */ part) => ({
      data: textOf(part.content.data),
      mimeType: textOf(part.content.mimeType),
    }));
  const given = changes.length ? "" : inputOf(item);
  const parts = [
    given ? block("Input", given, kit) : null,
    changes.map((change) => diffView(change, kit)),
    output ? block(item.status === "failed" ? "Error" : "Output", output, kit) : null,
    pictures(images),
  ];
  const isEmpty = !given && !changes.length && !output && !images.length;
  return isEmpty ? el("p", { class: "soft" }, item.ended === null ? "No output yet." : "No output.") : parts;
}

/**
 * @param {string} label
 * @param {string} text
 * @param {import("./parts.js").Kit} kit
 */
function block(label, text, kit) {
  return el(
    "figure",
    { class: "code", dataset: { part: label.toLowerCase() } },
    el(
      "figcaption",
      null,
      el("span", null, label),
      copyButton(`Copy the ${label.toLowerCase()}`, () => text, kit),
    ),
    portioned(text, PORTION, (shown) =>
      el("pre", { tabIndex: 0, role: "group", "aria-label": label }, el("code", null, shown)),
    ),
  );
}

/**
 * A command as typed in a shell; else the whole input as JSON.
 * @param {Record<string, any>} item
 */
function inputOf(item) {
  const { input } = item;
  if (input === null || input === undefined) return "";
  if (typeof input === "string") return input;
  const names = Object.keys(input);
  if (!names.length) return "";
  if (typeof input.command === "string" && names.every((name) => name === "command" || name === "description"))
    return input.command;
  if (Array.isArray(input.command) && names.length === 1) return input.command.join(" ");
  return names.length === 1 && typeof input[names[0]] === "string" ? input[names[0]] : JSON.stringify(input, null, 2);
}

/** @param {Record<string, any>} item */
function outputOf(item) {
  const texts = item.content
    .map((/** @type {any} */ part) => {
      if (part.type === "content")
        return part.content?.type === "text" ? textOf(part.content.text) : (part.content?.resource?.text ?? "");
      return part.type === "terminal" ? `[the terminal ${part.terminalId}]` : "";
    })
    .filter(Boolean);
  if (!texts.length && item.output !== null && item.output !== undefined) {
    texts.push(typeof item.output === "string" ? item.output : JSON.stringify(item.output, null, 2));
  }
  return withoutAnsi(texts.join("\n")).trimEnd();
}
