// The picture: lanes of SVG, with only the visible part in the document.
//
// From top to bottom: the axis with the breaks; the waiting asks, a thin bar each; a row of marks;
// the lane of the turns that have the agent; the processes and their events. The height of a bar in
// that lane shows the urgency of its turn, so that the class is visible without colour. The bar is
// hatched from the moment of the interrupt on. A bar never reaches into the next one, however short
// it is: the picture must not show an overlap that did not happen.
//
// Nodes are kept by key between two drawings, so that a hovered node stays the same while it grows.

import { keyed, set, svg } from "../../dom.js";
import { BREAK_PIXELS_READ, ticks } from "../../model/timescale.js";
import { clockTime, dayTime, durationShort } from "../../model/words.js";
import { drawHeld, drawProcesses, drawWaits } from "./bars.js";
import { AXIS, LABELS, LANE, MARKS, PROCESS, lanesOf, straight, zigzag } from "./layout.js";
import { drawLabels, drawMarks, drawQuestions } from "./signs.js";
import { breakTip } from "./words.js";

// From the back to the front.
const GROUPS = "lanes breaks axis waits held questions processes labels arrows marks end".split(" ");

// For a longer range the time of day alone is ambiguous.
const DAY_SECONDS = 72_000;

export class Drawing {
  constructor(root) {
    this.root = root;
    // The tooltip of a node, and the target of a click.
    /** @type {WeakMap<Element, () => {title: string, lines: string[]}>} */
    this.tips = new WeakMap();
    this.seqs = new WeakMap();
    this.groups = {};
    this.pen = document.createElement("canvas").getContext("2d");
    this.pen.font = `11px ${getComputedStyle(document.documentElement).getPropertyValue("--sans") || "sans-serif"}`;
    for (const name of GROUPS) {
      this.groups[name] = svg("g", { class: `timeline-${name}` });
    }
    root.append(defs(), ...Object.values(this.groups));
  }

  /** @param {{layout: any, scale: number, left: number, width: number, now: number}} view */
  draw(view) {
    const { layout, scale, left, width, now } = view;
    this.view = view;
    this.lanes = lanesOf(layout.rows);
    this.from = layout.scale.time(left - 60, scale);
    this.to = layout.scale.time(left + width + 10, scale);
    this.now = now;
    set(this.root, { width, height: this.lanes.bottom, viewBox: `0 0 ${width} ${this.lanes.bottom}` });
    this._lanes(width);
    this._breaks(layout);
    drawWaits(this, layout);
    drawHeld(this, layout);
    drawQuestions(this, layout);
    drawMarks(this, layout);
    drawProcesses(this, layout);
    drawLabels(this, layout);
    this._axis(layout);
  }

  x(time) {
    const { layout, scale, left } = this.view;
    return layout.scale.x(time, scale) - left;
  }

  /** As much of the text as fits. */
  fitted(words, pixels) {
    if (pixels < 18) return "";
    const width = (some) => this.pen.measureText(some).width;
    if (width(words) <= pixels) return words;
    let most = Math.min(words.length, Math.floor(pixels / 3));
    while (most > 1 && width(`${words.slice(0, most)}…`) > pixels) most -= 1;
    return most > 1 ? `${words.slice(0, most)}…` : "";
  }

  text(node, words) {
    if (node.textContent !== words) node.textContent = words;
  }

  keyed(group, items, keyOf, make, update) {
    keyed(this.groups[group], items, keyOf, make, (node, item) => {
      update(node, item);
      if (item.tip) this.tips.set(node, item.tip);
      if (item.seq !== undefined) this.seqs.set(node, item.seq);
    });
  }

  _lanes(width) {
    const { held, process, waiting } = this.lanes;
    const rects = [
      { key: "waiting", y: waiting, height: held - MARKS - waiting },
      { key: "held", y: held, height: LANE },
      { key: "process", y: process, height: PROCESS },
    ];
    this.keyed(
      "lanes",
      rects,
      (each) => each.key,
      (each) => svg("rect", { class: `timeline-ground timeline-ground-${each.key}` }),
      (node, each) => set(node, { x: 0, y: each.y, width, height: each.height }),
    );
  }

  _breaks(layout) {
    const { spans } = layout.scale;
    const width = layout.scale.breakWidth(this.view.scale);
    const found = [];
    for (let index = 0; index + 1 < spans.length; index += 1) {
      const from = spans[index].to;
      const to = spans[index + 1].from;
      if (to < this.from || from > this.to) continue;
      const label = width < BREAK_PIXELS_READ ? "" : durationShort(to - from);
      found.push({ key: from, x: this.x(from), label, tip: () => breakTip(from, to) });
    }
    this.keyed(
      "breaks",
      found,
      (each) => each.key,
      () => svg("g", { "data-mark": "idle" }, svg("rect"), svg("path"), svg("path"), svg("text")),
      (node, each) => {
        const [rect, one, other, text] = node.childNodes;
        const bottom = this.lanes.bottom - LABELS;
        const inset = Math.min(3, width / 4);
        const line = width < 10 ? straight : zigzag;
        set(rect, { x: each.x + inset, y: AXIS - 4, width: width - 2 * inset, height: bottom - AXIS + 4 });
        set(one, { d: line(each.x + inset, AXIS - 4, bottom) });
        set(other, { d: width < 4 ? "" : line(each.x + width - inset, AXIS - 4, bottom) });
        set(text, { x: each.x + width / 2, y: 11 });
        this.text(text, each.label);
      },
    );
  }

  _axis(layout) {
    const { scale, width } = this.view;
    const { step, times } = ticks(scale, layout.scale, this.from, this.to);
    const digits = step < 0.1 ? 2 : step < 1 ? 1 : 0;
    const label = this.to - this.from > DAY_SECONDS ? dayTime : (unix) => clockTime(unix, digits);
    const wide = layout.scale.breakWidth(scale);
    const breaks = wide < BREAK_PIXELS_READ ? [] : layout.scale.spans.slice(1).map((span) => this.x(span.from));
    let end = -Infinity;
    const items = [];
    for (const at of times) {
      const x = this.x(at);
      const room = label === dayTime ? 38 : digits ? 34 : 26;
      const isOutside = x - room < Math.max(0, end + 6) || x + room > width;
      // A break has its length written here.
      if (isOutside || breaks.some((right) => x + room > right - wide && x - room < right)) continue;
      end = x + room;
      items.push({ key: at, x, label: label(layout.timeline.wall(at)) });
    }
    const isNow = layout.timeline.isHeld;
    this.keyed(
      "axis",
      items,
      (each) => each.key,
      () => svg("g", {}, svg("path"), svg("text")),
      (node, each) => {
        set(node.childNodes[0], { d: `M${each.x} ${AXIS - 4}V${this.lanes.bottom - LABELS}` });
        set(node.childNodes[1], { x: each.x, y: 11 });
        this.text(node.childNodes[1], each.label);
      },
    );
    this.groups.end.firstChild ?? this.groups.end.append(svg("path", { class: "timeline-now" }));
    const x = this.x(this.now);
    set(this.groups.end.firstChild, {
      d: isNow && x <= width + 1 ? `M${x} ${AXIS - 4}V${this.lanes.bottom - LABELS}` : "",
    });
  }
}

function defs() {
  const hatch = svg(
    "pattern",
    { id: "timeline-hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    svg("rect", { width: 2, height: 6 }),
  );
  const dots = svg(
    "pattern",
    { id: "timeline-dots", width: 6, height: 6, patternUnits: "userSpaceOnUse" },
    svg("circle", { cx: 3, cy: 3, r: 1 }),
  );
  return svg("defs", {}, hatch, dots);
}
