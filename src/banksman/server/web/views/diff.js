// Draw the change of a file line by line, with the numbers of added and removed lines.
// model/diff.js compares. This module draws in portions, so that a change of a hundred thousand
// lines does not block the page.
// @ts-check

import { el, replace } from "../dom.js";
import { diffLines, folded, tally } from "../model/diff.js";
import { copyButton } from "./items/parts.js";

/** @typedef {import("../model/diff.js").DiffRow} DiffRow */

const ROWS_MAX = 200;
const MORE_ROWS = 2000;
/** Longer texts are cut to this length before they are compared. */
const CHARACTERS_MAX = 2_000_000;
const LINE_CHARACTERS_MAX = 2000;

/**
 * @param {{path: string, before: string|null, after: string|null}} change
 * @param {import("./items/parts.js").Kit} kit
 */
export function diffView({ path, before, after }, kit) {
  const lines = diffLines(cut(before), cut(after));
  const { added, removed } = tally(lines);
  const rows = folded(lines);
  const body = el("div", { class: "diff-lines", tabIndex: 0, role: "group", "aria-label": `Changes of ${path}` });
  const more = el("button", { class: "more", type: "button", on: { click: () => show((shown += MORE_ROWS)) } });
  let shown = ROWS_MAX;
  const show = (/** @type {number} */ count) => {
    replace(body, rows.slice(0, count).map(row));
    more.hidden = rows.length <= count;
    more.textContent = `Show ${Math.min(MORE_ROWS, rows.length - count)} more of ${rows.length} lines`;
  };
  show(shown);
  return el(
    "figure",
    { class: "diff" },
    el(
      "figcaption",
      null,
      el("span", { class: "path" }, path),
      counts(added, removed),
      copyButton("Copy the new text", () => after ?? "", kit),
    ),
    body,
    more,
  );
}

/**
 * @param {number} added
 * @param {number} removed
 */
export function counts(added, removed) {
  return el(
    "span",
    { class: "counts", title: `${added} added, ${removed} removed` },
    el("span", { class: "added" }, `+${added}`),
    el("span", { class: "removed" }, `−${removed}`),
  );
}

/** @param {DiffRow} one */
function row(one) {
  if (one.sign === "…") return el("div", { class: "diff-fold" }, `${one.count} unchanged lines`);
  const kind = one.sign === "+" ? "added" : one.sign === "-" ? "removed" : "same";
  const text = one.text.length > LINE_CHARACTERS_MAX ? `${one.text.slice(0, LINE_CHARACTERS_MAX)}…` : one.text;
  return el(
    "div",
    { class: `diff-line ${kind}` },
    el("span", { class: "sign" }, one.sign),
    el("span", { class: "said" }, text),
  );
}

/** @param {string|null} text */
function cut(text) {
  return text !== null && text.length > CHARACTERS_MAX ? text.slice(0, CHARACTERS_MAX) : text;
}

/**
 * The changes that a tool makes: from ACP's content, else from the input of Claude's tools.
 * @param {Record<string, any>} item
 * @returns {{path: string, before: string|null, after: string|null}[]}
 */
export function changesOf(item) {
  const found = item.content
    .filter((/** @type {any} */ part) => part.type === "diff")
    .map((/** @type {any} */ part) => ({
      path: String(part.path ?? ""),
      before: textOr(part.oldText),
      after: textOr(part.newText) ?? "",
    }));
  if (found.length) return found;
  const input = item.input;
  if (!input || typeof input !== "object" || typeof input.file_path !== "string") return [];
  const path = input.file_path;
  if (typeof input.new_string === "string")
    return [{ path, before: textOr(input.old_string), after: input.new_string }];
  if (typeof input.content === "string" && item.tool === "edit") return [{ path, before: null, after: input.content }];
  if (!Array.isArray(input.edits)) return [];
  return input.edits
    .filter((/** @type {any} */ edit) => typeof edit?.new_string === "string")
    .map((/** @type {any} */ edit) => ({ path, before: textOr(edit.old_string), after: edit.new_string }));
}

/** @param {any} value @returns {string|null} */
function textOr(value) {
  return typeof value === "string" ? value : null;
}
