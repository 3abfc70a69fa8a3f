// One item of the transcript as a node: a focusable article with the content of its kind.
//
// `itemView` creates it. `update` applies a later version of the same item and keeps the folds that
// the user opened. A kind is a function that gets the article and returns the function for each
// change.
// @ts-check

import { el } from "../../dom.js";
import { endedItem, gapItem, noteItem } from "./notes.js";
import { planItem } from "./plan.js";
import { promptItem } from "./prompt.js";
import { questionItem } from "./question.js";
import { textItem, thoughtItem } from "./said.js";
import { toolItem } from "./tool.js";

/** @typedef {import("../../model/transcript.js").Item} Item */
/** @typedef {import("./parts.js").Kit} Kit */
/** @typedef {(article: HTMLElement, item: Item, kit: Kit) => (item: Item) => void} Kind */

/** @type {Record<string, Kind>} */
const KINDS = {
  prompt: promptItem,
  text: textItem,
  thought: thoughtItem,
  tool: toolItem,
  plan: planItem,
  question: questionItem,
  ended: endedItem,
  note: noteItem,
  gap: gapItem,
};
const NAMES = new Map([
  ["prompt", "Prompt"],
  ["text", "The agent said"],
  ["thought", "Thinking"],
  ["tool", "Tool"],
  ["plan", "Plan"],
  ["question", "Question"],
  ["ended", "End of the turn"],
  ["note", "Note"],
  ["gap", "Missing"],
]);

/**
 * @param {Item} item
 * @param {Kit} kit
 */
export function itemView(item, kit) {
  const article = el("article", {
    class: `item item-${item.kind}`,
    tabIndex: -1,
    "aria-label": NAMES.get(item.kind) ?? item.kind,
  });
  const draw = KINDS[item.kind](article, item, kit);
  let version = -1;
  /** @type {Item|null} */
  let shown = null;
  const update = (/** @type {Item} */ now) => {
    // The same item may arrive as another object, after a new fold of the log's window.
    if (shown === now && version === now.version) return;
    shown = now;
    version = now.version;
    Object.assign(article.dataset, { item: now.kind, seq: String(now.seq), key: now.key });
    if (now.turn) article.dataset.turn = now.turn;
    draw(now);
  };
  update(item);
  return { node: article, update };
}
