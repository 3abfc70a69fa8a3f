// Compare two texts as a list of kept, removed and added lines.
//
// The common prefix and the common suffix are set aside. Myers' greedy algorithm compares the rest;
// it is fast for similar texts. It gives up after EDITS_MAX differences or STEPS_MAX compared
// lines. Everything in between is then shown as removed and added: correct, but longer than
// necessary. So the time is bounded, and EDITS_MAX squared bounds the memory, for any input.
// @ts-check

/** @typedef {{sign: " "|"-"|"+", text: string}} DiffLine */
/** @typedef {DiffLine | {sign: "…", count: number}} DiffRow */

export const EDITS_MAX = 500;
/** About ten milliseconds. */
const STEPS_MAX = 1_000_000;
/** Unchanged lines shown around each change. */
const AROUND = 3;

/**
 * @param {string|null|undefined} before null: there was no text
 * @param {string|null|undefined} after
 * @returns {DiffLine[]}
 */
export function diffLines(before, after) {
  const a = linesOf(before);
  const b = linesOf(after);
  let head = 0;
  while (head < a.length && head < b.length && a[head] === b[head]) head += 1;
  let tail = 0;
  while (tail < a.length - head && tail < b.length - head && a[a.length - 1 - tail] === b[b.length - 1 - tail])
    tail += 1;
  return [
    ...signed(" ", a.slice(0, head)),
    ...between(a.slice(head, a.length - tail), b.slice(head, b.length - tail)),
    ...signed(" ", a.slice(a.length - tail)),
  ];
}

/**
 * Count the added and the removed lines.
 * @param {DiffLine[]} lines
 */
export function tally(lines) {
  let added = 0;
  let removed = 0;
  for (const { sign } of lines) {
    if (sign === "+") added += 1;
    else if (sign === "-") removed += 1;
  }
  return { added, removed };
}

/**
 * Replace long unchanged runs with folds.
 * @param {DiffLine[]} lines
 * @returns {DiffRow[]}
 */
export function folded(lines) {
  /** @type {DiffRow[]} */
  const rows = [];
  for (let at = 0; at < lines.length;) {
    let end = at;
    while (end < lines.length && lines[end].sign === " ") end += 1;
    if (end === at) {
      rows.push(lines[at]);
      at += 1;
      continue;
    }
    const first = at === 0 ? 0 : AROUND;
    const last = end === lines.length ? 0 : AROUND;
    // A fold of one line takes as much room as the line.
    if (end - at > first + last + 1) {
      rows.push(
        ...lines.slice(at, at + first),
        { sign: "…", count: end - at - first - last },
        ...lines.slice(end - last, end),
      );
    } else rows.push(...lines.slice(at, end));
    at = end;
  }
  return rows;
}

/**
 * @param {string[]} a
 * @param {string[]} b
 * @returns {DiffLine[]}
 */
function between(a, b) {
  if (!a.length || !b.length) return [...signed("-", a), ...signed("+", b)];
  return walked(a, b) ?? [...signed("-", a), ...signed("+", b)];
}

/**
 * The furthest point on each diagonal. Each round adds one difference, until the end is reached.
 * @param {string[]} a
 * @param {string[]} b
 * @returns {DiffLine[]|null}
 */
function walked(a, b) {
  const most = Math.min(EDITS_MAX, a.length + b.length);
  const middle = most + 1;
  const furthest = new Int32Array(2 * most + 3);
  /** @type {Int32Array[]} */
  const rounds = [];
  let steps = 0;
  for (let edits = 0; edits <= most; edits += 1) {
    if (steps > STEPS_MAX) return null;
    rounds.push(furthest.slice(middle - edits - 1, middle + edits + 2));
    for (let k = -edits; k <= edits; k += 2) {
      const isDown = k === -edits || (k !== edits && furthest[middle + k - 1] < furthest[middle + k + 1]);
      let x = isDown ? furthest[middle + k + 1] : furthest[middle + k - 1] + 1;
      let y = x - k;
      while (x < a.length && y < b.length && a[x] === b[y]) {
        x += 1;
        y += 1;
        steps += 1;
      }
      furthest[middle + k] = x;
      if (x >= a.length && y >= b.length) return traced(a, b, rounds);
    }
  }
  return null;
}

/**
 * Walk back from the end to the beginning.
 * @param {string[]} a
 * @param {string[]} b
 * @param {Int32Array[]} rounds
 * @returns {DiffLine[]}
 */
function traced(a, b, rounds) {
  /** @type {DiffLine[]} */
  const lines = [];
  let x = a.length;
  let y = b.length;
  for (let edits = rounds.length - 1; edits > 0; edits -= 1) {
    const reached = (/** @type {number} */ k) => rounds[edits][k + edits + 1];
    const k = x - y;
    const isDown = k === -edits || (k !== edits && reached(k - 1) < reached(k + 1));
    const from = isDown ? reached(k + 1) : reached(k - 1);
    const fromY = from - (isDown ? k + 1 : k - 1);
    while (
      x > from &&
      y > fromY &&
      x > 0 &&
      y > 0 &&
      a[x - 1] === b[y - 1] &&
      (isDown ? y - 1 > fromY : x - 1 > from)
    ) {
      lines.push({ sign: " ", text: a[x - 1] });
      x -= 1;
      y -= 1;
    }
    if (isDown) lines.push({ sign: "+", text: b[(y -= 1)] });
    else lines.push({ sign: "-", text: a[(x -= 1)] });
  }
  while (x > 0) {
    lines.push({ sign: " ", text: a[x - 1] });
    x -= 1;
  }
  return lines.reverse();
}

/**
 * @template {" "|"-"|"+"} S
 * @param {S} sign
 * @param {string[]} lines
 * @returns {{sign: S, text: string}[]}
 */
function signed(sign, lines) {
  return lines.map((text) => ({ sign, text }));
}

/** @param {string|null|undefined} text */
function linesOf(text) {
  if (text === null || text === undefined || text === "") return [];
  const lines = text.replaceAll("\r\n", "\n").split("\n");
  // A newline ends a line. It does not begin another one.
  if (lines.at(-1) === "") lines.pop();
  return lines;
}
