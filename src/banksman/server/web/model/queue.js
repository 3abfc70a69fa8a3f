// Who has the agent and who waits, in the order in which they will be served. Pure.
//
// The server says who waits, in the order of acceptance; served is the more urgent first, and within a class the first
// one. What somebody has just done here is shown before the server has said so (`wishes`): a cancel hides, a move
// moves. A wish is dropped as soon as the server's list has another version of it, so what is shown is never older than
// that.

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
  // A stable sort: within a class the order is the server's.
  return shown.sort((one, other) => other.priority - one.priority);
}

/** One before another of its class; before null: to the head of it. Anything else changes nothing. */
export function moved(rows, turn, before) {
  const row = rows.find((each) => each.turn === turn);
  if (row === undefined) return [...rows];
  const rest = rows.filter((each) => each !== row);
  const place = rest.findIndex((each) => each.priority === row.priority && (before === null || each.turn === before));
  if (place < 0) return [...rows];
  return [...rest.slice(0, place), row, ...rest.slice(place)];
}

/** Where a move up of one would put it: before whom; undefined: it is the first of its class. */
export function above(rows, turn) {
  const index = rows.findIndex((each) => each.turn === turn);
  const other = rows[index - 1];
  return index > 0 && other.priority === rows[index].priority ? other.turn : undefined;
}
