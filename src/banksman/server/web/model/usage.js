// Usage of the store: the rows of the server as bars of a plot and as cells of a table. Pure.
// @ts-check
import { durationShort } from "./words.js";

/** Days in the plot. */
export const DAYS_MAX = 30;
export const KINDS = /** @type {const} */ (["cache_read", "cache_write", "input", "output"]);

/**
 * @typedef {{tokens: Record<string, number>, usd: number|null, working_seconds: number, turns: number}} Usage
 * @typedef {{key: string|null, usage: Usage}} Row
 * @typedef {{day: string, total: number, parts: {kind: string, from: number, to: number}[]}} Bar
 */

/** @param {Usage} usage */
export function totalOf({ tokens }) {
  return KINDS.reduce((sum, kind) => sum + Math.max(0, tokens[kind] ?? 0), 0);
}

/**
 * The last days, without gaps, as stacked bars. Heights are fractions of the highest bar.
 * @param {Row[]} rows rows by day
 * @param {string} today as `YYYY-MM-DD`
 * @returns {Bar[]}
 */
export function barsOf(rows, today, count = DAYS_MAX) {
  const known = new Map(rows.map(({ key, usage }) => [key, usage]));
  const last = Date.parse(`${today}T00:00:00Z`);
  const days = Array.from({ length: count }, (_, index) =>
    new Date(last - (count - 1 - index) * 86_400_000).toISOString().slice(0, 10),
  );
  const highest = Math.max(1, ...days.map((day) => (known.has(day) ? totalOf(/** @type {any} */ (known.get(day))) : 0)));
  return days.map((day) => {
    const usage = known.get(day);
    const parts = [];
    let below = 0;
    for (const kind of usage ? KINDS : []) {
      const size = Math.max(0, usage?.tokens[kind] ?? 0);
      if (size) parts.push({ kind, from: below / highest, to: (below + size) / highest });
      below += size;
    }
    return { day, total: below, parts };
  });
}

/**
 * The cells of one row, after its key.
 * @param {Usage} usage
 */
export function cellsOf(usage) {
  const { tokens } = usage;
  const counts = [tokens.input, tokens.output, tokens.cache_read, tokens.cache_write];
  return [usage.turns, ...counts].map((count) => Number(count).toLocaleString("en-US")).concat([
    durationShort(usage.working_seconds),
    usage.usd === null ? "–" : `$${usage.usd.toFixed(4)}`,
  ]);
}
