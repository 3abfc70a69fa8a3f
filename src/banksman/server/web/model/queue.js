// The turn that has the agent and the asks that wait, in the order of service. Pure.
//
// The server lists the waiting asks in the order of acceptance. The more urgent class is served
// first, and within a class the first one. The user's own changes (`wishes`) are shown before the
// server confirms them: a cancel hides a row, a move moves it. A wish is dropped as soon as the
// server's list has another version, so the display is never older than that list.

import { classOf, promptText } from "./words.js";

/** @typedef {{turn: string, prompt: string, priority: number, class: string, at: number|null, attempt: number}} Row */

/**
 * @param {any} session as the server has it
 * @param {(turn: string) => any} known what the log says about a turn; null: nothing
 * @param {{cancelled: Set<string>, moved: {turn: string, before: string|null}[]}} wishes
 * @param {number} now
 * @returns {Row[]}
 */
export function rowsOf(session, known, wishes = { cancelled: new Set(), moved: [] }, now = 0) {
  const rows = (session?.queue ?? []).map((each) => ({
    turn: each.turn,
    prompt: promptText(each.prompt ?? known(each.turn)?.prompt ?? ""),
    priority: each.priority,
    class: classOf(each.priority),
    at: each.at ?? (Number.isFinite(each.seconds) ? now - each.seconds : null),
    attempt: each.attempt,
  }));
  let shown = rows.filter((row) => !wishes.cancelled.has(row.turn));
  for (const { turn, before } of wishes.moved) shown = moved(shown, turn, before);
  // The sort is stable: within a class the server's order stays.
  return shown.sort((one, other) => other.priority - one.priority);
}

/**
 * Move a row before another row of its class. `before` null: to the head of the class. Any other
 * target changes nothing.
 */
export function moved(rows, turn, before) {
  const row = rows.find((each) => each.turn === turn);
  if (row === undefined) return [...rows];
  const rest = rows.filter((each) => each !== row);
  const place = rest.findIndex((each) => each.priority === row.priority && (before === null || each.turn === before));
  if (place < 0) return [...rows];
  return [...rest.slice(0, place), row, ...rest.slice(place)];
}

/** The row that a move up by one passes. undefined: the row is the first of its class. */
export function above(rows, turn) {
  const index = rows.findIndex((each) => each.turn === turn);
  const other = rows[index - 1];
  return index > 0 && other.priority === rows[index].priority ? other.turn : undefined;
}
