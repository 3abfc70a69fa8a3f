// Map times to pixels, and assign rows to waiting asks. Pure arithmetic, so that thousands of turns
// draw fast.
//
// A session works for seconds and is idle for hours. So a long time without a turn and without
// events is drawn as a short break, with its length written in it. A break is never wider than the
// shortest one would be to scale, and never wider than its label needs. The rest is drawn to scale,
// so two bars in one picture can be compared across breaks.
//
// `spans` are the drawn times, in order. Between two of them is a break. The x of a time is the
// seconds of all spans before it, times the scale, plus the width of the breaks before it.

/** A longer idle time is drawn as a break. */
export const GAP_SECONDS = 30;
export const BREAK_PIXELS = 40;
const BREAK_PIXELS_MIN = 1;
/** A narrower break has no room for its label. */
export const BREAK_PIXELS_READ = 26;
/** If more asks wait at the same time, the rest is counted and not drawn. */
export const ROWS_MAX = 5;
const APART_SECONDS = 0.5;

/** @typedef {import("./timeline.js").Timeline} Timeline */

export class Timescale {
  /** @param {Timeline} timeline */
  constructor(timeline, { gapSeconds = GAP_SECONDS, breakPixels = BREAK_PIXELS } = {}) {
    this.timeline = timeline;
    this.gapSeconds = gapSeconds;
    this.breakPixels = breakPixels;
    /** @type {{from: number, to: number, before: number}[]} */
    this.spans = spansOf(timeline, gapSeconds);
    this.until(timeline.to);
  }

  /** The end of the picture: now, while a turn has the agent; else soon after the last event. */
  until(now) {
    const last = this.spans.at(-1);
    const { timeline } = this;
    const grown = timeline.isHeld ? now : timeline.isLive ? Math.min(now, timeline.to + this.gapSeconds) : timeline.to;
    last.to = Math.max(timeline.to, grown);
    this.end = last.to;
    this.seconds = last.before + last.to - last.from;
    this.breaks = this.spans.length - 1;
  }

  /** The width of a break, for a scale in pixels per second. */
  breakWidth(scale) {
    return Math.max(BREAK_PIXELS_MIN, Math.min(this.breakPixels, this.gapSeconds * scale));
  }

  /** The total width. */
  width(scale) {
    return this.seconds * scale + this.breaks * this.breakWidth(scale);
  }

  /** The scale at which the total width is `pixels`. */
  fit(pixels) {
    return scaleFor(pixels, (scale) => this.width(scale));
  }

  /** The scale at which the part from `time` on is `pixels` wide, including breaks. */
  fitFrom(time, pixels) {
    const index = this._index(time);
    const seconds = this.seconds - this._drawn(time, index);
    return scaleFor(pixels, (scale) => seconds * scale + (this.breaks - index) * this.breakWidth(scale));
  }

  x(time, scale) {
    const index = this._index(time);
    const span = this.spans[index];
    const over = time - span.to;
    const wide = this.breakWidth(scale);
    if (over <= 0 || index === this.spans.length - 1) return this._drawn(time, index) * scale + index * wide;
    const length = this.spans[index + 1].from - span.to;
    return (span.before + span.to - span.from) * scale + (index + over / length) * wide;
  }

  /** The time at a place. */
  time(x, scale) {
    const wide = this.breakWidth(scale);
    let low = 0;
    let high = this.spans.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.spans[middle].before * scale + middle * wide <= x) low = middle;
      else high = middle - 1;
    }
    const span = this.spans[low];
    const within = x - span.before * scale - low * wide;
    const pixels = (span.to - span.from) * scale;
    if (within <= pixels || low === this.spans.length - 1) return span.from + within / scale;
    return span.to + ((within - pixels) / wide) * (this.spans[low + 1].from - span.to);
  }

  _drawn(time, index) {
    const span = this.spans[index];
    return span.before + Math.min(time, index === this.spans.length - 1 ? time : span.to) - span.from;
  }

  /** The index of the last span that begins at that time or before. */
  _index(time) {
    let low = 0;
    let high = this.spans.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.spans[middle].from <= time) low = middle;
      else high = middle - 1;
    }
    return low;
  }
}

/** Bisect: the width grows with the scale. */
function scaleFor(pixels, widthAt) {
  let low = 1e-7;
  let high = 1e5;
  for (let round = 0; round < 60; round += 1) {
    const middle = Math.sqrt(low * high);
    if (widthAt(middle) > pixels) high = middle;
    else low = middle;
  }
  return low;
}

function spansOf(timeline, gapSeconds) {
  const busy = timeline.moments.map((at) => [at, at]);
  for (const turn of timeline.turns) {
    for (const each of turn.segments) {
      // A waiting turn, or one in an unknown state, has no work that could be drawn to scale.
      if (each.phase === "running" || each.phase === "interrupting") busy.push([each.from, each.to ?? timeline.to]);
    }
  }
  busy.sort((one, other) => one[0] - other[0]);
  const spans = [{ from: timeline.from, to: timeline.from, before: 0 }];
  for (const [from, to] of busy) {
    const last = spans.at(-1);
    if (from - last.to > gapSeconds) {
      spans.push({ from, to, before: last.before + last.to - last.from });
    } else if (to > last.to) {
      last.to = to;
    }
  }
  return spans;
}

/**
 * Assign a row to each waiting ask for as long as it waits. It is the first row that has been free
 * for a moment, so that two asks in a row do not look like one. `row` is null if too many asks wait
 * at the same time. In order of time.
 * @param {Timeline} timeline
 */
export function waitingRows(timeline, rowsMax = ROWS_MAX) {
  const waits = [];
  for (const turn of timeline.turns) {
    for (const segment of turn.segments) if (segment.phase === "queued") waits.push({ turn, segment, row: null });
  }
  waits.sort((one, other) => one.segment.from - other.segment.from || one.segment.seq - other.segment.seq);
  const free = new Array(rowsMax).fill(-Infinity);
  let rows = 0;
  for (const wait of waits) {
    const { from } = wait.segment;
    let row = free.findIndex((until) => until + APART_SECONDS <= from);
    if (row < 0) row = free.findIndex((until) => until <= from);
    if (row < 0) continue;
    wait.row = row;
    free[row] = wait.segment.to ?? Infinity;
    rows = Math.max(rows, row + 1);
  }
  return { waits, rows };
}

/**
 * All segments that have the agent, in order of time: for the lane in which nothing may overlap.
 */
export function heldSegments(timeline) {
  const held = [];
  for (const turn of timeline.turns) {
    for (const segment of turn.segments) if (segment.phase !== "queued") held.push({ turn, segment });
  }
  return held.sort((one, other) => one.segment.from - other.segment.from || one.segment.seq - other.segment.seq);
}

/**
 * Items with a beginning and an end, sorted by beginning. A binary search finds the items of a
 * window.
 */
export class Spans {
  /**
   * @param {any[]} items
   * @param {(item: any) => number} fromOf
   * @param {(item: any) => number|null} toOf null: the item is still open
   */
  constructor(items, fromOf, toOf) {
    this.items = items;
    this._fromOf = fromOf;
    this._toOf = toOf;
    // The latest end of all items up to each index. A search can skip every item before the first
    // index whose latest end reaches the window.
    this._latest = [];
    let latest = -Infinity;
    for (const item of items) this._latest.push((latest = Math.max(latest, toOf(item) ?? Infinity)));
  }

  within(from, to) {
    let low = 0;
    let high = this.items.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this._fromOf(this.items[middle]) <= to) low = middle + 1;
      else high = middle;
    }
    const found = [];
    for (let index = low - 1; index >= 0 && this._latest[index] >= from; index -= 1) {
      if ((this._toOf(this.items[index]) ?? Infinity) >= from) found.push(this.items[index]);
    }
    return found.reverse();
  }
}

const STEPS = [
  0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200,
  14400, 43200, 86400,
];

/** The labels of the axis: round times, at least `pixelsMin` apart. */
export function ticks(scale, timescale, from, to, pixelsMin = 84) {
  const step = STEPS.find((each) => each * scale >= pixelsMin) ?? STEPS.at(-1);
  const found = [];
  for (const span of timescale.spans) {
    if (span.to < from || span.from > to) continue;
    const begin = Math.max(span.from, from);
    const end = Math.min(span.to, to);
    // If the breaks are narrow, the spans are narrow too. Label the beginnings of the spans
    // instead.
    if (timescale.breakWidth(scale) < BREAK_PIXELS_READ) found.push(span.from);
    else for (let at = Math.ceil(begin / step) * step; at <= end && found.length < 200; at += step) found.push(at);
  }
  return { step, times: found };
}
