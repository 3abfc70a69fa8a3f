// The quiet lines: events beside the conversation, the ending of a turn, deleted events.
// @ts-check

import { el, replace } from "../../dom.js";
import { icon } from "./icons.js";
import { copyButton } from "./parts.js";
import { amount, duration, ending, money, when, whenExactly } from "./words.js";
import { kindText } from "../../model/provider.js";
import { textOf } from "../../model/words.js";

/** @type {import("./item.js").Kind} */
export function noteItem(article) {
  return (item) => {
    article.dataset.tone = item.tone;
    replace(
      article,
      el(
        "p",
        { class: "note-line" },
        icon(item.icon),
        el("span", null, item.text),
        el("time", { title: whenExactly(item.at) }, when(item.at)),
      ),
      item.detail ? el("pre", { class: "note-detail" }, textOf(item.detail).slice(0, 4000)) : null,
    );
  };
}

/** @type {import("./item.js").Kind} */
export function gapItem(article) {
  return (item) => {
    replace(
      article,
      el(
        "p",
        { class: "note-line" },
        icon("clock"),
        el(
          "span",
          null,
          item.last > item.first
            ? `Events ${item.first} to ${item.last} are no longer kept.`
            : `Event ${item.first} is no longer kept.`,
        ),
      ),
    );
  };
}

/** @type {import("./item.js").Kind} */
export function endedItem(article, first, kit) {
  return (item) => {
    article.dataset.outcome = item.outcome;
    const copyTurn = item.turn ? copyButton("Copy the whole turn", () => kit.textOf(String(item.turn)), kit) : null;
    replace(
      article,
      el(
        "p",
        { class: "ended-line" },
        el("span", { class: "how" }, ending(item)),
        facts(item).map((text) => el("span", null, text)),
        copyTurn,
      ),
      item.error
        ? el(
            "p",
            { class: "ended-error", title: item.failure ? kindText(item.failure.kind) : null },
            [errorText(item.error), hintOf(item)].filter(Boolean).join("\n"),
          )
        : null,
      item.structured !== null
        ? el("pre", { class: "note-detail" }, JSON.stringify(item.structured, null, 2).slice(0, 20_000))
        : null,
    );
  };
}

/**
 * @param {Record<string, any>} item
 * @returns {string[]}
 */
function facts(item) {
  const found = [];
  if (item.isEmpty) found.push("no answer");
  if (item.failure && item.failure.kind !== "other") found.push(kindText(item.failure.kind));
  if (item.seconds !== null) found.push(duration(item.seconds));
  const { usage } = item;
  if (usage && typeof usage === "object") {
    const given = ["input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"].reduce(
      (sum, name) => sum + (Number(usage[name]) || 0),
      0,
    );
    const made = Number(usage.output_tokens) || 0;
    if (given || made) found.push(`${amount(given)} tokens in, ${amount(made)} out`);
  }
  if (item.cost) found.push(money(item.cost));
  if (item.context?.size) found.push(`${Math.round((100 * item.context.used) / item.context.size)} % of the window`);
  return found;
}

/** The hint of an error, unless its text has the hint already. @param {Record<string, any>} item */
function hintOf({ error, failure }) {
  const hint = failure?.hint;
  return typeof hint === "string" && !String(error).includes(hint) ? hint : "";
}

/** @param {any} error */
function errorText(error) {
  return typeof error === "string"
    ? error
    : [error?.message ?? error?.detail, error?.hint].filter(Boolean).join(": ") || JSON.stringify(error);
}
