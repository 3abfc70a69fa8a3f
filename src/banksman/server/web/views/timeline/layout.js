// Compute the layout of the picture: the parts that do not depend on the window, and the height of
// each lane. Pure.

import { Spans, Timescale, heldSegments, waitingRows } from "../../model/timescale.js";

export const HEIGHTS = { interactive: 28, normal: 22, background: 16 };
export const AXIS = 18;
export const ROW = 9;
export const MARKS = 18;
export const LANE = 28;
export const PROCESS = 14;
export const LABELS = 14;
// The approximate width of a character of the smallest type.
export const LABEL_CHARACTER = 5.8;

/** The parts that do not depend on the window: computed once for each state of the log. */
export function layoutOf(timeline) {
  const { waits, rows } = waitingRows(timeline);
  const held = heldSegments(timeline);
  held.forEach((each, index) => (each.next = held[index + 1]?.segment.from ?? null));
  const segment = (each) => each.segment.from;
  const segmentEnd = (each) => each.segment.to;
  const rowOf = new Map();
  for (const wait of waits) if (!rowOf.has(wait.turn.id)) rowOf.set(wait.turn.id, wait.row ?? 0);
  const at = (mark) => mark.at;
  const marks = [...timeline.marks].sort((one, other) => one.at - other.at);
  return {
    timeline,
    scale: new Timescale(timeline),
    rows: Math.max(1, rows),
    rowOf,
    waits: new Spans(waits, segment, segmentEnd),
    held: new Spans(held, segment, segmentEnd),
    processes: new Spans(
      timeline.processes,
      (each) => each.from,
      (each) => each.to,
    ),
    questions: new Spans(
      timeline.questions,
      (each) => each.from,
      (each) => each.to,
    ),
    marks: new Spans(marks, at, at),
  };
}

export function heightOf(rows) {
  return AXIS + rows * ROW + 2 + MARKS + LANE + 6 + PROCESS + LABELS;
}

/** The places of the lanes, for their names at the left. */
export function lanesOf(rows) {
  const waiting = AXIS;
  const marks = waiting + rows * ROW + 2;
  const held = marks + MARKS;
  const process = held + LANE + 6;
  return { waiting, marks, held, process, labels: process + PROCESS, bottom: process + PROCESS + LABELS };
}

/** The outline of a cut edge. */
export function zigzag(x, top, bottom) {
  let path = `M${x} ${top}`;
  for (let y = top, side = 1; y < bottom; y += 4, side = -side) path += `l${side * 3} ${Math.min(4, bottom - y)}`;
  return path;
}

export function straight(x, top, bottom) {
  return `M${x} ${top}V${bottom}`;
}
