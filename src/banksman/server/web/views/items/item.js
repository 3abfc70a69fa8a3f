// One item of the transcript as a node: an article that can be focused, with what its kind shows inside.
//
// `itemView` makes it; `update` brings it up to date with a later version of the same item and keeps what a person has
// unfolded. A kind is a function that is given the article and returns what is to be done at each change.
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
    // The same item may come as another object: the log's window was folded anew.
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
