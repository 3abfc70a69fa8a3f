// Draw the signs: questions, preemptions, interrupts, and events of the processes and the session.

import { set, svg } from "../../dom.js";
import { AXIS, HEIGHTS, LABEL_CHARACTER, LANE, MARKS, ROW } from "./layout.js";
import { markTip, questionTip } from "./words.js";

const GLYPHS = {
  interrupt: "M-4-4h8v8h-8z",
  close: "M-4-4l8 8M4-4l-8 8",
  replace: "M0-5l5 5-5 5-5-5z",
  steer: "M-5 0h10M0-5v10",
  clock: "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0M0-3v3l2 2",
  warning: "M0-5l5 9h-10zM0-2v3",
  kept: "M-4-4h8v8h-8zM-2 0h4",
  retry: "M-4 0a4 4 0 1 0 4-4M0-6v4l-3-2z",
};
const LABELLED = {
  swept: "swept",
  survivor: "NOT ENDED",
  left: "left running",
  retired: "retired",
  backed_off: "backs off",
  opened: "opened",
  closed: "closed",
  recovered: "recovered",
  context_lost: "context lost",
  imported: "imported",
  store_returned: "store is back",
  setting: "setting",
  clock_step: "clock set back",
  limited: "limited",
};

export function drawQuestions(brush, layout) {
  const items = layout.questions.within(brush.from, brush.to).map((question) => ({
    question,
    x: brush.x(question.from),
    end: brush.x(question.to ?? brush.now),
    seq: question.seq,
    tip: () => questionTip(question, brush.now),
  }));
  brush.keyed(
    "questions",
    items,
    (each) => each.question.id,
    (each) =>
      svg(
        "g",
        { "data-mark": "question", "data-asked": each.question.id },
        svg("path"),
        svg("circle", { r: 6 }),
        svg("text"),
      ),
    (node, each) => {
      const [path, circle, text] = node.childNodes;
      const y = brush.lanes.marks + MARKS / 2;
      const end = Math.max(each.end, each.x + 1);
      set(node, { class: each.question.to === null ? "timeline-asks" : "" });
      set(path, { d: `M${each.x} ${y}H${end}M${end} ${y - 4}v8` });
      set(circle, { cx: each.x, cy: y });
      set(text, { x: each.x, y: y + 3.5 });
      brush.text(text, "?");
    },
  );
}

export function drawMarks(brush, layout) {
  const found = layout.marks.within(brush.from, brush.to);
  const y = brush.lanes.marks + MARKS / 2;
  const arrows = [];
  const glyphs = [];
  let last = -Infinity;
  for (const mark of found) {
    const x = brush.x(mark.at);
    const item = { mark, x, seq: mark.seq, tip: () => markTip(mark) };
    if (mark.kind === "preempt") arrows.push({ ...item, row: layout.rowOf.get(mark.from) ?? 0 });
    else if (Object.hasOwn(GLYPHS, mark.kind) && x - last >= 7) {
      glyphs.push(item);
      last = x;
    }
  }
  brush.keyed(
    "arrows",
    arrows,
    (each) => each.seq,
    () =>
      svg(
        "g",
        { "data-mark": "preempt" },
        svg("path", { class: "timeline-arrow" }),
        svg("path", { class: "timeline-arrow-head" }),
        svg("circle", { r: 3.5 }),
      ),
    (node, each) => {
      const [line, head, dot] = node.childNodes;
      const top = brush.lanes.waiting + each.row * ROW + 4.5;
      const bottom = brush.lanes.held + LANE - HEIGHTS[layout.timeline.turn(each.mark.turn)?.class ?? "normal"];
      set(line, { d: `M${each.x} ${top}V${bottom - 6}` });
      set(head, { d: `M${each.x - 4.5} ${bottom - 8}h9l-4.5 8z` });
      set(dot, { cx: each.x, cy: top });
      set(node, { "data-class": layout.timeline.turn(each.mark.from)?.class ?? "interactive" });
    },
  );
  brush.keyed(
    "marks",
    glyphs,
    (each) => `${each.seq} ${each.mark.kind}`,
    (each) =>
      svg(
        "g",
        { "data-mark": each.mark.kind, class: `timeline-glyph-${each.mark.kind}` },
        svg("rect", { x: -7, y: -7, width: 14, height: 14, class: "timeline-target" }),
        svg("path", { d: GLYPHS[each.mark.kind] }),
      ),
    (node, each) => set(node, { transform: `translate(${each.x} ${y})` }),
  );
}

/** Events of the processes and the session: a line, and its name if there is room. */
export function drawLabels(brush, layout) {
  const items = [];
  const seen = new Set();
  let end = -Infinity;
  for (const mark of layout.marks.within(brush.from, brush.to)) {
    const word = mark.kind === "rung" ? mark.label.split(": ").at(-1) : LABELLED[mark.kind];
    if (word === undefined) continue;
    const x = brush.x(mark.at);
    const place = `${Math.round(x)} ${word}`;
    if (seen.has(place)) continue;
    seen.add(place);
    const width = word.length * LABEL_CHARACTER;
    const hasRoom = x - width / 2 > end + 4;
    if (hasRoom) end = x + width / 2;
    items.push({ mark, x, word: hasRoom ? word : "", seq: mark.seq, tip: () => markTip(mark) });
  }
  const { width } = brush.view;
  brush.keyed(
    "labels",
    items,
    (each) => `${each.seq} ${each.mark.kind} ${each.mark.at}`,
    (each) =>
      svg("g", { "data-mark": each.mark.kind }, svg("rect", { class: "timeline-target" }), svg("path"), svg("text")),
    (node, each) => {
      const [target, path, text] = node.childNodes;
      const { lane, kind } = each.mark;
      const top = lane === "all" || kind === "clock_step" ? AXIS : brush.lanes.process - 2;
      const room = (each.word.length * LABEL_CHARACTER) / 2;
      set(node, { class: `timeline-label timeline-label-${kind}${lane === "all" ? " timeline-label-all" : ""}` });
      set(target, { x: each.x - 4, y: top, width: 8, height: brush.lanes.bottom - top });
      set(path, { d: `M${each.x} ${top}V${brush.lanes.labels + 2}` });
      set(text, { x: Math.max(room + 1, Math.min(each.x, width - room - 1)), y: brush.lanes.bottom - 3 });
      brush.text(text, each.word);
    },
  );
}
