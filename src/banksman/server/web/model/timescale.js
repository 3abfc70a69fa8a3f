// From time to pixels, and who is drawn in which row: pure, so that a picture of thousands of turns is only arithmetic.
//
// A session works for seconds and is idle for hours. So a time in which nobody has the agent and nothing is told, if it
// is long, is drawn as a short break, with its length written in it: never wider than the shortest of them would be to
// scale, and never wider than it takes to be read. What is left is drawn to scale: two bars in one picture can be
// compared, whichever breaks are between them.
//
// `spans` are the times that are drawn, in order; between two of them is a break. A place in pixels is: the seconds of
// all spans before, times the scale, plus the breaks before.

/** Idle for longer is drawn as a break. */
export const GAP_SECONDS = 30;
export const BREAK_PIXELS = 40;
const BREAK_PIXELS_MIN = 1;
/** One that is narrower has no room for its length. */
export const BREAK_PIXELS_READ = 26;
/** More who wait at once are counted, and not drawn. */
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

  /** The picture ends here: now, while somebody has the agent; else soon after the last that happened. */
  until(now) {
    const last = this.spans.at(-1);
    const { timeline } = this;
    const grown = timeline.isHeld ? now : timeline.isLive ? Math.min(now, timeline.to + this.gapSeconds) : timeline.to;
    last.to = Math.max(timeline.to, grown);
    this.end = last.to;
    this.seconds = last.before + last.to - last.from;
    this.breaks = this.spans.length - 1;
  }

  /** How wide a break is, at so many pixels for a second. */
  breakWidth(scale) {
    return Math.max(BREAK_PIXELS_MIN, Math.min(this.breakPixels, this.gapSeconds * scale));
  }

  /** How wide everything is. */
  width(scale) {
    return this.seconds * scale + this.breaks * this.breakWidth(scale);
  }

  /** The scale at which everything is so wide. */
  fit(pixels) {
    return scaleFor(pixels, (scale) => this.width(scale));
  }

  /** The scale at which all from that time on is so wide, breaks included. */
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

  /** The time that is drawn there. */
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

  /** The last span that begins at that time or before. */
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

/** By halves: what is wider at a larger scale is so wide at one of them. */
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
      // One who waits, or of whom nobody knows, does nothing that could be drawn to scale.
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
 * Those who wait, one row each as long as they wait: the first row that is free, and has been for a moment, so that two
 * in a row are not taken for one. `row` is null where there were too many at once. In order of time.
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

/** All that was given the agent, in order of time: for the one lane in which nothing may overlap. */
export function heldSegments(timeline) {
  const held = [];
  for (const turn of timeline.turns) {
    for (const segment of turn.segments) if (segment.phase !== "queued") held.push({ turn, segment });
  }
  return held.sort((one, other) => one.segment.from - other.segment.from || one.segment.seq - other.segment.seq);
}

/** Things with a beginning and an end, in order of the beginning, of which those in a window are found by halves. */
export class Spans {
  /**
   * @param {any[]} items
   * @param {(item: any) => number} fromOf
   * @param {(item: any) => number|null} toOf null: it goes on
   */
  constructor(items, fromOf, toOf) {
    this.items = items;
    this._fromOf = fromOf;
    this._toOf = toOf;
    // The latest end of all up to here: before the first whose latest end is too early nothing has to be looked at.
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

/** The times that are written at the axis: round ones, and none nearer to another than that. */
export function ticks(scale, timescale, from, to, pixelsMin = 84) {
  const step = STEPS.find((each) => each * scale >= pixelsMin) ?? STEPS.at(-1);
  const found = [];
  for (const span of timescale.spans) {
    if (span.to < from || span.from > to) continue;
    const begin = Math.max(span.from, from);
    const end = Math.min(span.to, to);
    // Where the breaks are narrow, the spans are as well: then their beginnings are what there is to be written.
    if (timescale.breakWidth(scale) < BREAK_PIXELS_READ) found.push(span.from);
    else for (let at = Math.ceil(begin / step) * step; at <= end && found.length < 200; at += step) found.push(at);
  }
  return { step, times: found };
}
