// Usage: the days of the plot without gaps, stacked by kind, and the cells of a row.
import assert from "node:assert/strict";
import { test } from "node:test";

import { barsOf, cellsOf, totalOf } from "../../../../src/banksman/server/web/model/usage.js";

const usage = (input, output, more = {}) => ({
  tokens: { input, output, cache_read: 0, cache_write: 0 },
  usd: null,
  working_seconds: 90,
  turns: 2,
  ...more,
});

test("bars cover the last days without gaps, relative to the highest", () => {
  const rows = [
    { key: "2026-02-27", usage: usage(10, 10) },
    { key: "2026-03-01", usage: usage(30, 10) },
    { key: "2025-01-01", usage: usage(9999, 0) },
  ];
  const bars = barsOf(rows, "2026-03-01", 4);
  assert.deepEqual(
    bars.map(({ day, total }) => [day, total]),
    [
      ["2026-02-26", 0],
      ["2026-02-27", 20],
      ["2026-02-28", 0],
      ["2026-03-01", 40],
    ],
  );
  assert.deepEqual(bars[3].parts, [
    { kind: "input", from: 0, to: 0.75 },
    { kind: "output", from: 0.75, to: 1 },
  ]);
  assert.deepEqual(bars[1].parts.at(-1), { kind: "output", from: 0.25, to: 0.5 });
});

test("bars of an empty store are empty", () => {
  assert.ok(barsOf([], "2026-03-01").every(({ parts, total }) => !parts.length && total === 0));
});

test("cells show counts, time and cost", () => {
  assert.deepEqual(cellsOf(usage(1234567, 1, { usd: 0.25 })), ["2", "1,234,567", "1", "0", "0", "2 min", "$0.2500"]);
  assert.equal(cellsOf(usage(1, 1)).at(-1), "–");
  assert.equal(totalOf(usage(2, 3)), 5);
});
