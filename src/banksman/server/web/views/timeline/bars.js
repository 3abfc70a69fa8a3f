// Draw the bars: waiting asks, turns that have the agent, and the lifetimes of the processes.
// `brush` is the drawing with its window.

import { set, svg } from "../../dom.js";
import { duration } from "../../model/words.js";
import { HEIGHTS, LABEL_CHARACTER, LANE, PROCESS, ROW, zigzag } from "./layout.js";
import { processTip, turnTip } from "./words.js";

// If this many bars are visible, bars that are narrower than this and as near to each other are
// drawn as one. Zooming in separates them.
const MANY = 300;
const NARROW_PIXELS = 3;

/** Whether a bar at this place would be hidden by bars that its row already has. */
function crowd(count) {
  const drawn = new Set();
  return (x, end, row = 0) => {
    if (count <= MANY || end - x >= NARROW_PIXELS) return false;
    const place = `${row} ${Math.floor(x / NARROW_PIXELS)}`;
    if (drawn.has(place)) return true;
    drawn.add(place);
    return false;
  };
}

export function drawWaits(brush, layout) {
  const items = [];
  const waits = layout.waits.within(brush.from, brush.to);
  const isLost = crowd(waits.length);
  for (const { turn, segment, row } of waits) {
    if (row === null) continue;
    const x = brush.x(segment.from);
    const end = brush.x(segment.to ?? brush.now);
    if (isLost(x, end, row)) continue;
    items.push({
      turn,
      segment,
      x,
      width: Math.max(2, end - x),
      y: brush.lanes.waiting + row * ROW + 2,
      seq: segment.seq,
      tip: () => turnTip(turn, segment, brush.now),
    });
  }
  brush.keyed(
    "waits",
    items,
    (each) => `${each.turn.id} ${each.segment.seq}`,
    () => svg("g", {}, svg("rect"), svg("path", { class: "timeline-wait-end" })),
    (node, each) => {
      const { turn, segment } = each;
      const [rect, end] = node.childNodes;
      set(rect, {
        x: each.x,
        y: each.y,
        width: each.width,
        height: 5,
        rx: 1,
        "data-turn": turn.id,
        "data-phase": "queued",
        "data-class": turn.class,
      });
      const isDropped =
        segment.to !== null && segment === turn.segments.at(-1) && turn.into === null && turn.outcome !== null;
      const right = each.x + each.width;
      set(end, { d: isDropped ? `M${right + 1} ${each.y - 1}l5 7m0-7l-5 7` : "" });
    },
  );
}

export function drawHeld(brush, layout) {
  const items = [];
  const held = layout.held.within(brush.from, brush.to);
  const isLost = crowd(held.length);
  for (const { turn, segment, next } of held) {
    const x = brush.x(segment.from);
    const end = brush.x(segment.to ?? brush.now);
    if (isLost(x, end)) continue;
    const room = next === null || turn.origin !== null ? Infinity : brush.x(next) - x;
    // A short bar is widened to be visible, up to the beginning of the next bar. A longer bar keeps
    // its length: if two turns did overlap, the picture must show it.
    const width = Math.max(end - x, Math.min(2, room), 0.75);
    items.push({ turn, segment, x, width, seq: segment.seq, tip: () => turnTip(turn, segment, brush.now) });
  }
  brush.keyed(
    "held",
    items,
    (each) => `${each.turn.id} ${each.segment.seq} ${each.segment.phase}`,
    () =>
      svg(
        "g",
        {},
        svg("rect"),
        svg("rect", { class: "timeline-hatch" }),
        svg("path", { class: "timeline-end" }),
        svg("text"),
      ),
    (node, each) => bar(brush, node, each),
  );
}

function bar(brush, node, { turn, segment, x, width }) {
  const [rect, hatch, end, text] = node.childNodes;
  const height = HEIGHTS[turn.class];
  const y = brush.lanes.held + LANE - height;
  const isLast = segment === turn.segments.at(-1);
  const isOver = segment.to !== null;
  const outcome = isLast ? turn.outcome : null;
  const isHatched = segment.phase === "interrupting";
  set(node, {
    class: `timeline-bar timeline-${segment.phase}${turn.origin === null ? "" : " timeline-own"}`,
  });
  set(rect, {
    x,
    y,
    width,
    height,
    "data-turn": turn.id,
    "data-class": turn.class,
    "data-phase": segment.phase,
    "data-outcome": outcome ?? "",
    "data-mark": isHatched ? "drain" : null,
  });
  set(
    hatch,
    isHatched || segment.phase === "unknown"
      ? { x, y, width, height, fill: `url(#timeline-${isHatched ? "hatch" : "dots"})` }
      : { width: 0, height: 0 },
  );
  const edge = isOver ? edgeOf(turn, segment, isLast) : "";
  set(end, { class: `timeline-end timeline-end-${edge}`, d: edgePath(edge, x + width, y, height) });
  const label = isHatched
    ? drainLabel(segment, brush.now)
    : segment.phase === "unknown"
      ? "unknown: its host died"
      : turn.prompt.split("\n", 1)[0];
  brush.text(text, brush.fitted(label, width - 8 - (edge ? 4 : 0)));
  // The beginning of a long bar may be out of view. Its label stays in view.
  set(text, { x: Math.max(x + 5, Math.min(5, x + width - 60)), y: y + height / 2 + 4 });
}

export function drawProcesses(brush, layout) {
  const items = layout.processes.within(brush.from, brush.to).map((process) => ({
    process,
    x: brush.x(process.from),
    end: brush.x(process.to ?? layout.scale.end),
    seq: process.seq,
    tip: () => processTip(process, brush.now),
  }));
  for (const [index, each] of items.entries())
    each.room = items[index + 1] === undefined ? Infinity : items[index + 1].x - each.x - 1;
  brush.keyed(
    "processes",
    items,
    (each) => each.process.seq,
    () => svg("g", {}, svg("rect"), svg("path"), svg("text")),
    (node, each) => {
      const { process } = each;
      const [rect, edge, text] = node.childNodes;
      const y = brush.lanes.process;
      const width = Math.max(each.end - each.x, Math.min(2, each.room), 0.75);
      const isBad = process.to !== null && process.exit !== "code 0";
      set(node, { class: process.isLost ? "timeline-lost" : "" });
      set(rect, {
        x: each.x,
        y: y + 1,
        width,
        height: PROCESS - 2,
        rx: 2,
        "data-process": process.number,
        "data-pid": process.pid ?? "",
        "data-exit": process.exit ?? "",
      });
      set(edge, { d: isBad ? `M${each.x + width - 1} ${y + 1}v${PROCESS - 2}` : "", class: "timeline-process-edge" });
      const begin = Math.max(each.x, 0);
      const how = process.to === null ? "" : `, ${process.exit}`;
      const name = `pid ${process.pid ?? "?"}`;
      const room = each.x + width - begin - 8;
      brush.text(
        text,
        `${name}${how}`.length * LABEL_CHARACTER <= room
          ? `${name}${how}`
          : name.length * LABEL_CHARACTER <= room
            ? name
            : "",
      );
      set(text, { x: begin + 4, y: y + PROCESS - 4 });
    },
  );
}

/** The shape of the right end of a bar: the outcome of the turn. */
function edgeOf(turn, segment, isLast) {
  if (!isLast) return turn.segments[turn.segments.indexOf(segment) + 1].phase === "queued" ? "cut" : "";
  return { failed: "failed", interrupted: "stopped", preempted: "cut", refused: "failed" }[turn.outcome] ?? "";
}

function edgePath(edge, x, y, height) {
  switch (edge) {
    case "cut":
      return zigzag(x, y - 1, y + height + 1);
    case "failed":
    case "stopped":
      return `M${x - 1.5} ${y}v${height}`;
    default:
      return "";
  }
}

function drainLabel(segment, now) {
  const seconds = (segment.to ?? now) - segment.from;
  return segment.to === null ? `stopping, for ${duration(seconds)}` : `stopped in ${duration(seconds)}`;
}
