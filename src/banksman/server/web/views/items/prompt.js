// A prompt: its urgency, its time and its state.
// @ts-check

import { el, replace } from "../../dom.js";
import { classOf, clockTime } from "../../model/words.js";
import { copyButton, pictures, portioned } from "./parts.js";
import { duration, when, whenExactly } from "./words.js";

const PORTION = 4000;
const ORIGINS = new Map([
  ["task-notification", "a background task has news"],
  ["auto-continuation", "it continues without a prompt"],
]);

/** @type {import("./item.js").Kind} */
export function promptItem(article, first, kit) {
  const head = el("header", { class: "prompt-head" });
  const body = el("div", { class: "prompt-text" });
  article.append(head, body);
  let text = /** @type {string|null} */ (null);
  return (item) => {
    article.dataset.state = item.state;
    replace(
      head,
      badge(item),
      ...facts(item),
      el("span", { class: "space" }),
      item.text ? copyButton("Copy the prompt", () => item.text, kit) : null,
    );
    if (text === item.text && item.prompt !== null) return;
    text = item.text;
    replace(body, words(item), pictures(item.images));
  };
}

/** @param {Record<string, any>} item */
function badge(item) {
  if (item.origin !== null && item.origin !== undefined)
    return el("span", { class: "badge", dataset: { class: "own" } }, "own");
  if (item.priority === null || item.priority === undefined) return null;
  const name = typeof item.priority === "number" ? classOf(item.priority) : item.priority;
  return el("span", { class: "badge", dataset: { class: name } }, name);
}

/** @param {Record<string, any>} item */
function facts(item) {
  const time = item.asked ?? item.at;
  // A waiting prompt shows its time in the text below, more precisely.
  const parts = item.state === "queued" ? [] : [el("time", { title: whenExactly(time) }, when(time))];
  const waited = item.asked && item.state !== "queued" && item.state !== "pending" ? item.at - item.asked : 0;
  if (item.caller) parts.unshift(el("span", { class: "caller" }, item.caller));
  if (item.state === "pending") parts.push(el("span", { class: "waiting" }, "sending…"));
  else if (item.state === "queued")
    parts.push(
      el(
        "span",
        { class: "waiting" },
        item.attempt > 1 ? `queued again, attempt ${item.attempt}` : `queued since ${clockTime(item.asked)}`,
      ),
    );
  else if (item.attempt > 1) parts.push(el("span", null, `asked again, attempt ${item.attempt}`));
  else if (waited >= 1) parts.push(el("span", null, `waited ${duration(waited)}`));
  if (item.into) parts.push(el("span", null, "joined the running turn"));
  return parts;
}

/** @param {Record<string, any>} item */
function words(item) {
  if (item.origin !== null && item.origin !== undefined)
    return el(
      "p",
      { class: "soft" },
      `The agent started a turn without an ask${ORIGINS.has(item.origin) ? `: ${ORIGINS.get(item.origin)}` : ""}.`,
    );
  if (item.prompt === null) return el("p", { class: "soft" }, "Asked before the first event shown here.");
  return portioned(item.text, PORTION, (shown) => el("p", null, shown));
}
