// Diff: it contains both texts, changes as few lines as possible, and is quick for every pair of texts.
import assert from "node:assert/strict";
import { test } from "node:test";
import { diffLines, EDITS_MAX, folded, tally } from "../../../../src/banksman/server/web/model/diff.js";
import { cpuMilliseconds } from "../little.js";

function sides(lines) {
  return [lines.filter(({ sign }) => sign !== "+"), lines.filter(({ sign }) => sign !== "-")].map((side) =>
    side.map(({ text }) => text).join("\n"),
  );
}

/** Return the length of the longest common subsequence, by the textbook algorithm. */
function common(a, b) {
  const table = Array.from({ length: a.length + 1 }, () => new Array(b.length + 1).fill(0));
  for (let i = 1; i <= a.length; i += 1) {
    for (let j = 1; j <= b.length; j += 1)
      table[i][j] = a[i - 1] === b[j - 1] ? table[i - 1][j - 1] + 1 : Math.max(table[i - 1][j], table[i][j - 1]);
  }
  return table[a.length][b.length];
}

test("a diff contains both texts, and no more changes than necessary", () => {
  let seed = 7;
  // The upper bits: the lower bits of this generator have a short period.
  const random = (most) => ((seed = (Math.imul(seed, 1103515245) + 12345) >>> 0) >>> 16) % most;
  const seen = new Set();
  for (let round = 0; round < 5000; round += 1) {
    const [a, b] = [0, 1].map(() => Array.from({ length: 1 + random(12) }, () => "abcd"[random(4)]));
    const lines = diffLines(a.join("\n"), b.join("\n"));
    seen.add(`${a}|${b}`);
    assert.deepEqual(sides(lines), [a.join("\n"), b.join("\n")], `${a} | ${b}`);
    assert.equal(tally(lines).added, b.length - common(a, b), `${a} | ${b}`);
  }
  assert.ok(seen.size > 4000, "these were not the same few pairs again and again");
});

test("a new file is all added, an emptied file all removed, equal texts have no change", () => {
  assert.deepEqual(tally(diffLines(null, "a\nb\n")), { added: 2, removed: 0 });
  assert.deepEqual(tally(diffLines("a\nb\n", "")), { added: 0, removed: 2 });
  assert.deepEqual(tally(diffLines("a\r\nb", "a\nb\n")), { added: 0, removed: 0 });
});

test("unchanged lines are folded, except for a few around each change", () => {
  const before = Array.from({ length: 100 }, (_, i) => `line ${i}`);
  const after = before.with(50, "other");
  const rows = folded(diffLines(before.join("\n"), after.join("\n")));
  assert.deepEqual(rows.map(({ sign }) => sign).join(""), "…   -+   …");
  assert.equal(rows[0].count + rows.at(-1).count, 100 - 1 - 6);
});

test("a diff of two long unrelated texts ends in time, and contains both", () => {
  const before = Array.from({ length: 60_000 }, (_, i) => `a${i}`).join("\n");
  const after = Array.from({ length: 60_000 }, (_, i) => `b${i}`).join("\n");
  let lines;
  assert.ok(cpuMilliseconds(() => (lines = diffLines(before, after))) < 3000);
  assert.deepEqual(sides(lines), [before, after]);
  const scattered = before
    .split("\n")
    .map((line, i) => (i % 5 ? line : `${line}!`))
    .join("\n");
  assert.ok(EDITS_MAX < 60_000 / 5);
  assert.deepEqual(sides(diffLines(before, scattered)), [before, scattered]);
});
