// The timeline in words: tooltips, texts for screen readers, and the summary above the picture.
// Pure: a turn, a process or a mark in, lines of text out.

import { clockTime, duration, plural } from "../../model/words.js";

const OUTCOMES = {
  done: "done",
  interrupted: "interrupted",
  preempted: "preempted, and ended",
  withdrawn: "withdrawn while it waited",
  failed: "failed",
  refused: "refused",
  unknown: "unknown: its host died",
};
const CAUSES = {
  preempt: "by a preemption",
  interrupt: "by an interrupt",
  clock: "by a clock",
  close: "because the session was closed",
  replace: "because its process was replaced",
};
const NAMES = {
  preempt: "Preemption",
  interrupt: "Interrupt",
  clock: "Clock",
  close: "Stopped by the close",
  replace: "Process replaced",
  steer: "Added to the turn",
  warning: "Clock warning",
  rung: "Stop ladder",
  swept: "Swept",
  survivor: "Not ended",
  left: "Left running",
  retired: "Process retired",
  backed_off: "Backing off",
  opened: "Opened",
  closed: "Closed",
  recovered: "Recovered",
  context_lost: "Context lost",
  imported: "Imported",
  store_returned: "Store is back",
  setting: "Setting",
  moved: "Moved up",
  kept: "Question kept",
  clock_step: "Clock set back",
  requeue: "Waits again",
  retry: "Retry",
  limited: "Limited",
};

export function outcomeText(turn) {
  if (turn.outcome !== null) return OUTCOMES[turn.outcome] ?? turn.outcome;
  const last = turn.segments.at(-1);
  if (turn.into !== null) return "runs as a part of another turn";
  return { queued: "waits", running: "runs", interrupting: "is being stopped" }[last?.phase] ?? "";
}

/**
 * How long a turn waited, ran and was being stopped in total. `now`: the end of an open segment.
 */
export function times(turn, now) {
  const sums = { queued: 0, running: 0, interrupting: 0, unknown: 0 };
  for (const each of turn.segments) sums[each.phase] += Math.max(0, (each.to ?? now) - each.from);
  return sums;
}

function kindText(turn) {
  return turn.origin === null ? turn.class : "started by the agent";
}

export function turnTip(turn, segment, now) {
  const sums = times(turn, now);
  const first = turn.segments[0];
  const lines = [
    `${kindText(turn)}${turn.attempt > 1 ? `, attempt ${turn.attempt}` : ""} · ${outcomeText(turn)}`,
    `${turn.isCut ? "first seen" : "asked"} ${clockTime(first.clock, 3)}${turn.caller ? ` by ${turn.caller}` : ""}`,
    [
      sums.queued > 0.0005 ? `waited ${duration(sums.queued)}` : "did not wait",
      sums.running > 0 ? `ran ${duration(sums.running)}` : "",
      sums.interrupting > 0 ? `stopped within ${duration(sums.interrupting)}` : "",
      sums.unknown > 0 ? `unknown for ${duration(sums.unknown)}` : "",
    ]
      .filter(Boolean)
      .join(", "),
  ];
  if (segment?.phase === "interrupting") {
    const cause = segment.caller ? `by ${segment.caller}` : (CAUSES[segment.cause] ?? segment.cause ?? "");
    lines.push(
      `here: draining, stopped ${cause}${segment.watchdog ? ` (${segment.watchdog})` : ""}`,
      turn.by === null ? "not ended yet" : `ended by its ${turn.by}`,
    );
  } else if (segment?.phase === "queued") {
    lines.push(`here: waiting for ${duration((segment.to ?? now) - segment.from)}`);
  } else if (segment?.phase === "unknown") {
    lines.push("here: unknown. Its host died, and recovery settled it at this time");
  }
  if (turn.error) lines.push(String(turn.error).slice(0, 300));
  lines.push(`event ${segment?.seq ?? turn.seq} · click to read it`);
  return { title: turn.prompt || turn.id, lines };
}

export function processTip(process, now) {
  const life = duration((process.to ?? now) - process.from);
  return {
    title: `Process ${process.pid ?? process.number}`,
    lines: [
      process.isCut ? "older than this log" : `started ${clockTime(process.clock, 3)}`,
      process.to === null ? `running for ${life}` : `ran for ${life}`,
      process.to === null ? "" : `ended: ${process.exit}`,
      ...process.rungs.map((each) => `ladder: ${each.rung} at ${clockTime(each.clock, 3)}`),
      `event ${process.seq}`,
    ].filter(Boolean),
  };
}

export function markTip(mark) {
  return {
    title: NAMES[mark.kind] ?? mark.kind,
    lines: [mark.label, `${clockTime(mark.clock, 3)} · event ${mark.seq}`],
  };
}

export function questionTip(question, now) {
  const open = duration((question.to ?? now) - question.from);
  const lines = [
    question.to === null ? `open for ${open}` : `answered after ${open}: ${question.answer} (by ${question.by})`,
    `event ${question.seq}`,
  ];
  return { title: `Question: ${question.tool}`, lines };
}

export function breakTip(from, to) {
  return { title: `Idle for ${duration(to - from)}`, lines: ["Nothing happened here, so it is drawn short."] };
}

/** One line for screen readers. */
export function turnLine(turn, now) {
  const sums = times(turn, now);
  const said = [
    `“${turn.prompt.slice(0, 120) || turn.id}”`,
    turn.origin === null ? turn.class : "started by the agent",
    `asked ${clockTime(turn.segments[0]?.clock ?? 0)}${turn.caller ? ` by ${turn.caller}` : ""}`,
    `waited ${duration(sums.queued)}`,
    sums.running > 0 ? `ran ${duration(sums.running)}` : "",
    sums.interrupting > 0 ? `was stopped in ${duration(sums.interrupting)}` : "",
    outcomeText(turn),
    turn.attempt > 1 ? `attempt ${turn.attempt}` : "",
  ];
  return said.filter(Boolean).join(", ");
}

/** The rungs of the ladder that force a process to end. */
const FORCED = new Set(["term", "kill", "keeper"]);

/** Summarize the whole picture in a sentence or two. */
export function summary(timeline) {
  const turns = timeline.turns.length;
  if (turns === 0) return "No asks yet.";
  const gave = timeline.marks.filter((mark) => mark.kind === "preempt").length;
  const stopped = timeline.marks.filter((mark) =>
    ["interrupt", "clock", "close", "replace"].includes(mark.kind),
  ).length;
  // The end of input is a request to exit. Only a process that needs more than that counts as
  // stopped.
  const kills = timeline.processes.filter((each) => each.rungs.some(({ rung }) => FORCED.has(rung))).length;
  const said = [
    plural(turns, "turn"),
    timeline.overlaps === 0 ? "never two at the same time" : `${plural(timeline.overlaps, "overlap")}: please report it`,
    gave ? `${gave} preempted` : "",
    stopped ? `${stopped} stopped` : "",
    plural(timeline.processes.length, "process", "processes") + (kills ? `, ${kills} stopped by the ladder` : ""),
  ];
  return said.filter(Boolean).join(" · ");
}
