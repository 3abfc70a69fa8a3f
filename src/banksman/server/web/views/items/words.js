// Format values for the views: times, amounts, states, endings. Pure, except for the clock of "3
// min ago".
// @ts-check

import { duration } from "../../model/words.js";

/** Display names of the session states. */
export const STATES = new Map([
  ["running", "running"],
  ["asks", "waits for you"],
  ["queued", "queued"],
  ["idle", "idle"],
  ["wedged", "wedged"],
  ["not movable", "not movable"],
  ["unreachable", "unreachable"],
  ["gone", "gone"],
  ["elsewhere", "elsewhere"],
]);

/**
 * How long ago, in as few characters as possible.
 * @param {number|null|undefined} at unix time
 * @param {number} [now]
 */
export function age(at, now = Date.now() / 1000) {
  if (!at) return "";
  const seconds = Math.max(0, now - at);
  if (seconds < 5) return "now";
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86400)} d`;
}

/** @param {number|null|undefined} dollars */
export function money(dollars) {
  if (dollars === null || dollars === undefined) return "";
  if (dollars === 0) return "$0";
  if (dollars < 0.01) return `$${dollars.toPrecision(1)}`;
  return `$${dollars.toFixed(2)}`;
}

/** @param {number} number */
export function amount(number) {
  if (number < 1000) return String(number);
  if (number < 1e6) return `${(number / 1000).toFixed(number < 1e4 ? 1 : 0)}k`;
  return `${(number / 1e6).toFixed(1)}M`;
}

/** @param {number} bytes */
export function size(bytes) {
  if (bytes < 1000) return `${bytes} B`;
  return bytes < 1e6 ? `${Math.round(bytes / 1000)} kB` : `${(bytes / 1e6).toFixed(1)} MB`;
}

/**
 * The time of day, with the date if it was another day.
 * @param {number} at unix time
 */
export function when(at) {
  const date = new Date(at * 1000);
  const time = `${String(date.getHours()).padStart(2, "0")}:${String(date.getMinutes()).padStart(2, "0")}`;
  const isToday = date.toDateString() === new Date().toDateString();
  return isToday ? time : `${whenExactly(at).slice(0, 10)}, ${time}`;
}

/** @param {number} at */
export function whenExactly(at) {
  // Formatted by hand: the browser's formatter takes longer than the rest of an item.
  const date = new Date(at * 1000);
  const two = (/** @type {number} */ number) => String(number).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

const ENDINGS = new Map([
  ["done", "Done"],
  ["interrupted", "Interrupted"],
  ["preempted", "Preempted by a more urgent ask"],
  ["withdrawn", "Withdrawn before it began"],
  ["failed", "Failed"],
  ["refused", "Refused: nothing was sent"],
  ["unknown", "Outcome unknown: the host died"],
]);
const CAUSES = new Map([
  ["preempt", "for a more urgent ask"],
  ["close", "because the session was closed"],
  ["drain", "because the server was shutting down"],
]);
const STOPS = new Map([
  ["max_tokens", "the model's token limit was reached"],
  ["max_turn_requests", "the limit of requests was reached"],
  ["refusal", "the model refused"],
  ["cancelled", "it was cancelled"],
]);

/**
 * Describe the ending of a turn in a few words.
 * @param {Record<string, any>} item
 */
export function ending(item) {
  const parts = [ENDINGS.get(item.outcome) ?? String(item.outcome)];
  if (item.outcome === "interrupted" && item.by === "ladder") parts.push("its process had to be stopped");
  if (item.outcome === "interrupted" && CAUSES.has(item.cause)) parts.push(String(CAUSES.get(item.cause)));
  if (item.stoppedBy && (item.outcome === "interrupted" || item.outcome === "withdrawn")) parts.push(`by ${item.stoppedBy}`);
  if (item.clock) parts.push(`the clock “${String(item.clock).replaceAll("_", " ")}” ran out`);
  if (STOPS.has(item.stopReason)) parts.push(String(STOPS.get(item.stopReason)));
  return parts.join(", ");
}

/**
 * Describe the receipt of an interrupt.
 * @param {{stopped: boolean, by: string, queued: string[]}} receipt
 */
export function receiptText({ stopped, by, queued }) {
  const how =
    new Map([
      ["boundary", "The agent stopped"],
      ["ladder", "Stopped: the agent did not respond, so its process was ended"],
      ["exit", "Stopped: its process had already ended"],
      ["withdrawn", "Withdrawn before it began"],
      ["already_over", "The turn had already ended"],
    ]).get(by) ?? (stopped ? "Stopped" : "Not stopped");
  const count = queued?.length ?? 0;
  return `${how}; ${count ? `${count} still queued` : "the queue is empty"}.`;
}

export { duration };
