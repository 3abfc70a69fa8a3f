// The legend: each sign of the picture with its meaning.

import { el, svg } from "../../dom.js";

const bar = (kind, height, more = {}) =>
  svg(
    "svg",
    { width: 26, height: 18, "aria-hidden": "true", class: "timeline-sample" },
    svg(
      "g",
      { class: `timeline-bar timeline-${more.phase ?? "running"}` },
      svg("rect", { x: 1, y: 17 - height, width: 24, height, "data-class": kind }),
      more.phase === "interrupting"
        ? svg("rect", {
            x: 1,
            y: 17 - height,
            width: 24,
            height,
            fill: "url(#timeline-hatch)",
            class: "timeline-hatch",
          })
        : null,
      more.phase === "unknown"
        ? svg("rect", { x: 1, y: 17 - height, width: 24, height, fill: "url(#timeline-dots)", class: "timeline-hatch" })
        : null,
      more.end ? svg("path", { class: `timeline-end timeline-end-${more.end}`, d: more.d }) : null,
    ),
  );
const sign = (...children) =>
  svg("svg", { width: 26, height: 18, "aria-hidden": "true", class: "timeline-sample" }, ...children);

function entries() {
  return [
    [bar("interactive", 16), "interactive: the most urgent, the highest bar"],
    [bar("normal", 12), "normal"],
    [bar("background", 8), "background: every other class preempts it"],
    [
      sign(
        svg(
          "g",
          { class: "timeline-waits" },
          svg("rect", { x: 1, y: 7, width: 24, height: 5, "data-class": "normal" }),
        ),
      ),
      "an ask waits for the agent",
    ],
    [
      sign(
        svg(
          "g",
          { class: "timeline-arrows", "data-class": "interactive" },
          svg("circle", { cx: 13, cy: 4, r: 3.5 }),
          svg("path", { class: "timeline-arrow", d: "M13 4V12" }),
          svg("path", { class: "timeline-arrow-head", d: "M8.5 10h9l-4.5 8z" }),
        ),
      ),
      "preemption: a more urgent ask stops the running turn",
    ],
    [bar("normal", 14, { phase: "interrupting" }), "stopping, not ended yet"],
    [bar("background", 14, { end: "cut", d: "M25 2l-3 4 3 4-3 4 3 3" }), "cut: preempted, waits again"],
    [bar("normal", 14, { end: "stopped", d: "M23.5 3v14" }), "interrupted"],
    [bar("normal", 14, { end: "failed", d: "M23.5 3v14" }), "failed"],
    [bar("normal", 14, { phase: "unknown" }), "unknown: the host died"],
    [
      sign(
        svg(
          "g",
          { class: "timeline-marks" },
          svg("g", { class: "timeline-glyph-interrupt" }, svg("path", { d: "M9 5h8v8h-8z" })),
        ),
      ),
      "an interrupt",
    ],
    [
      sign(
        svg(
          "g",
          { class: "timeline-questions" },
          svg("path", { d: "M8 9H24M24 5v8" }),
          svg("circle", { cx: 8, cy: 9, r: 6 }),
          svg("text", { x: 8, y: 12.5 }, "?"),
        ),
      ),
      "a question, until it is answered",
    ],
    [
      sign(svg("g", { class: "timeline-processes" }, svg("rect", { x: 1, y: 4, width: 24, height: 11, rx: 2 }))),
      "the lifetime of a process; eof, term, kill: the rungs of the stop ladder",
    ],
    [
      sign(
        svg(
          "g",
          { class: "timeline-breaks" },
          svg("path", { d: "M8 1l3 4-6 4 6 4-3 4" }),
          svg("path", { d: "M18 1l3 4-6 4 6 4-3 4" }),
        ),
      ),
      "idle time with its length, drawn short",
    ],
  ];
}

export function legend() {
  return el(
    "details",
    { class: "timeline-legend" },
    el("summary", {}, "Legend"),
    el(
      "ul",
      {},
      entries().map(([sample, words]) => el("li", {}, sample, el("span", {}, words))),
    ),
  );
}
