// Timeline of a session: the drawn segments and marks agree with the events of every log.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { Timeline, timelineOf } from "../../../../src/banksman/server/web/model/timeline.js";
import { Spans, Timescale, heldSegments, ticks, waitingRows } from "../../../../src/banksman/server/web/model/timescale.js";
import { classOf, duration, durationShort, exitText, promptText } from "../../../../src/banksman/server/web/model/words.js";
import { cpuMilliseconds } from "../little.js";

const T0 = 1_700_000_000;

/** Return the events of lines of `[at, kind, turn, body]`; the seq is the index. */
function log(...lines) {
  return lines.map(([at, kind, turn = null, body = {}], index) => ({
    cursor: `1.${index + 1}`,
    session: "s",
    epoch: 1,
    seq: index + 1,
    at: T0 + at,
    turn,
    kind,
    body,
  }));
}
const queued = (at, turn, priority = 10, more = {}) => [
  at,
  "turn.queued",
  turn,
  { prompt: `do ${turn}`, priority, into: null, ...more },
];
const started = (at, turn, more = {}) => [at, "turn.started", turn, { attempt: 1, joined: [], ...more }];
const interrupted = (at, turn, cause = "interrupt", clock = null) => [at, "turn.interrupted", turn, { cause, clock }];
const ended = (at, turn, outcome = "done", more = {}) => [
  at,
  "turn.ended",
  turn,
  { outcome, by: "boundary", error: null, ...more },
];
const requeued = (at, turn, attempt = 2) => [at, "turn.requeued", turn, { attempt }];

/** Return the segments as words, in seconds since T0. */
const told = (turn) =>
  turn.segments.map((each) => `${each.phase} ${round(each.from - T0)}–${each.to === null ? "" : round(each.to - T0)}`);
const round = (value) => Math.round(value * 1000) / 1000;
const marks = (timeline, kind) => timeline.marks.filter((mark) => mark.kind === kind);

function fixture(name) {
  const lines = readFileSync(new URL(`fixtures/${name}`, import.meta.url), "utf8")
    .trim()
    .split("\n");
  return lines.map((line) => JSON.parse(line)).filter((event) => !["update", "sent", "recited"].includes(event.kind));
}

/** Check the invariants that hold for every log. */
function check(timeline) {
  for (const turn of timeline.turns) {
    let last = -Infinity;
    for (const [index, each] of turn.segments.entries()) {
      assert.ok(each.from >= last, `${turn.id}: a segment begins before the last one is over`);
      if (each.to === null) assert.equal(index, turn.segments.length - 1, `${turn.id}: only the last one may go on`);
      else assert.ok(each.to >= each.from, `${turn.id}: a segment ends before it begins`);
      last = each.to ?? Infinity;
    }
    if (turn.outcome !== null) assert.notEqual(turn.segments.at(-1)?.to, null, `${turn.id} has ended and goes on`);
  }
  for (const each of timeline.processes) assert.ok(each.to === null || each.to >= each.from);
  for (const mark of timeline.marks)
    assert.ok(mark.at >= timeline.from && mark.at <= timeline.to, `${mark.kind} is outside`);
}

test("a turn waits, runs and ends", () => {
  const line = timelineOf(log(queued(0, "a", 20), started(1, "a"), ended(3, "a")));
  check(line);
  const [turn] = line.turns;
  assert.deepEqual(told(turn), ["queued 0–1", "running 1–3"]);
  assert.deepEqual(
    [turn.prompt, turn.class, turn.outcome, turn.seq, turn.endSeq],
    ["do a", "interactive", "done", 1, 3],
  );
  assert.equal(line.isLive, false);
  assert.equal(line.overlaps, 0);
});

test("running and waiting turns have open segments", () => {
  const line = timelineOf(log(queued(0, "a"), started(1, "a"), queued(2, "b")));
  check(line);
  assert.deepEqual(line.turns.map(told), [["queued 0–1", "running 1–"], ["queued 2–"]]);
  assert.equal(line.isLive, true);
  assert.equal(line.isHeld, true);
});

test("a preemption names the more urgent ask, and the preempted turn waits again", () => {
  const line = timelineOf(
    log(
      queued(0, "chore", 0),
      started(0, "chore"),
      queued(1, "equal", 0),
      queued(1.5, "normal", 10),
      queued(2, "urgent", 20),
      interrupted(2, "chore", "preempt"),
      requeued(3, "chore"),
      started(3, "urgent"),
      ended(4, "urgent"),
      started(4, "normal"),
      ended(5, "normal"),
      started(5, "chore", { attempt: 2 }),
      ended(7, "chore"),
    ),
  );
  check(line);
  const chore = line.turn("chore");
  assert.deepEqual(told(chore), ["queued 0–0", "running 0–2", "interrupting 2–3", "queued 3–5", "running 5–7"]);
  assert.deepEqual(
    chore.segments.map((each) => each.attempt),
    [1, 1, 1, 2, 2],
  );
  assert.equal(chore.attempt, 2);
  const [mark] = marks(line, "preempt");
  assert.deepEqual([mark.turn, mark.from, mark.at - T0], ["chore", "urgent", 2]);
  assert.match(mark.label, /preempted by “do urgent”/);
  assert.equal(marks(line, "requeue").length, 1);
  assert.equal(line.overlaps, 0);
});

test("a preemption names the first of the most urgent asks, and no ask that is not more urgent", () => {
  const line = timelineOf(
    log(
      queued(0, "a", 10),
      started(0, "a"),
      queued(1, "first", 20),
      queued(1, "second", 20),
      interrupted(1, "a", "preempt"),
    ),
  );
  assert.equal(marks(line, "preempt")[0].from, "first");
  const nobody = timelineOf(
    log(queued(0, "a", 10), started(0, "a"), queued(1, "b", 10), interrupted(1, "a", "preempt")),
  );
  assert.equal(marks(nobody, "preempt")[0].from, null);
});

test("an interrupt, a clock, a close and a replacement have different marks", () => {
  const causes = ["interrupt", "clock", "close", "replace"];
  for (const cause of causes) {
    const line = timelineOf(
      log(
        queued(0, "a"),
        started(0, "a"),
        interrupted(1, "a", cause, cause === "clock" ? "progress" : null),
        ended(2, "a", "interrupted"),
      ),
    );
    check(line);
    assert.deepEqual(
      line.marks.map((mark) => mark.kind),
      [cause],
    );
    assert.equal(line.turns[0].segments.at(-1).cause, cause);
  }
  const clock = timelineOf(log(queued(0, "a"), started(0, "a"), interrupted(1, "a", "clock", "progress")));
  assert.match(clock.marks[0].label, /clock progress/);
  assert.equal(clock.turns[0].segments.at(-1).watchdog, "progress");
  // A cause that only a later version knows is still an interrupt.
  assert.equal(
    timelineOf(log(queued(0, "a"), started(0, "a"), interrupted(1, "a", "whim"))).marks[0].kind,
    "interrupt",
  );
});

test("an ask that is withdrawn while it waits has no running segment", () => {
  const line = timelineOf(
    log(queued(0, "a"), started(0, "a"), queued(1, "b"), ended(2, "b", "withdrawn", { by: "withdrawn" })),
  );
  check(line);
  assert.deepEqual(told(line.turn("b")), ["queued 1–2"]);
  assert.deepEqual(
    heldSegments(line).map(({ turn }) => turn.id),
    ["a"],
  );
});

test("collected asks run as one turn, and each has its own outcome", () => {
  const line = timelineOf(
    log(
      queued(0, "a"),
      queued(0.2, "b", 10, { into: "a" }),
      queued(0.4, "c", 10, { into: "a" }),
      started(1, "a", { joined: ["b", "c"] }),
      ended(3, "a"),
      ended(3, "b"),
      ended(3, "c"),
    ),
  );
  check(line);
  assert.deepEqual(line.turns.map(told), [["queued 0–1", "running 1–3"], ["queued 0.2–1"], ["queued 0.4–1"]]);
  assert.deepEqual(
    line.turns.map((turn) => [turn.into, turn.outcome]),
    [
      [null, "done"],
      ["a", "done"],
      ["a", "done"],
    ],
  );
  assert.equal(line.overlaps, 0);
});

test("collected asks wait again with the preempted turn", () => {
  const line = timelineOf(
    log(
      queued(0, "a", 0),
      queued(0.2, "b", 0, { into: "a" }),
      started(1, "a", { joined: ["b"] }),
      queued(2, "u", 20),
      interrupted(2, "a", "preempt"),
      requeued(3, "a"),
      started(3, "u"),
      ended(4, "u"),
      started(4, "a", { attempt: 2, joined: ["b"] }),
      ended(5, "a"),
      ended(5, "b"),
    ),
  );
  check(line);
  assert.deepEqual(told(line.turn("b")), ["queued 0.2–1", "queued 3–4"]);
  assert.equal(line.turn("b").into, "a");
});

test("a collected ask takes over when the first of them is withdrawn", () => {
  const line = timelineOf(
    log(
      queued(0, "a"),
      queued(0.2, "b", 10, { into: "a" }),
      ended(0.5, "a", "withdrawn", { by: "withdrawn" }),
      started(1, "b"),
      ended(2, "b"),
    ),
  );
  check(line);
  assert.deepEqual(line.turns.map(told), [["queued 0–0.5"], ["queued 0.2–1", "running 1–2"]]);
});

test("an ask added to a turn has no bar, unless it becomes a turn", () => {
  const steered = log(
    queued(0, "a"),
    started(0, "a"),
    queued(1, "b"),
    started(1, "b", { into: "a" }),
    ended(2, "b"),
    ended(3, "a"),
  );
  const line = timelineOf(steered);
  check(line);
  assert.deepEqual(told(line.turn("b")), ["queued 1–1"]);
  assert.deepEqual([line.turn("b").into, line.turn("b").outcome], ["a", "done"]);
  assert.equal(marks(line, "steer").length, 1);
  assert.equal(line.overlaps, 0);

  const given = timelineOf(
    log(
      queued(0, "a"),
      started(0, "a"),
      queued(1, "b"),
      started(1, "b", { into: "a" }),
      requeued(2, "b"),
      ended(3, "a"),
      started(3, "b", { attempt: 2 }),
    ),
  );
  check(given);
  assert.deepEqual(told(given.turn("b")), ["queued 1–1", "queued 2–3", "running 3–"]);
  assert.equal(given.turn("b").into, null);

  const coming = timelineOf(
    log(
      queued(0, "a"),
      started(0, "a"),
      queued(1, "b"),
      started(1, "b", { into: "a" }),
      ended(3, "a"),
      started(3, "b"),
      ended(4, "b"),
    ),
  );
  check(coming);
  assert.deepEqual(told(coming.turn("b")), ["queued 1–1", "running 3–4"]);
  assert.equal(coming.overlaps, 0);
});

test("an added ask does not return to the queue with its turn", () => {
  const line = timelineOf(
    log(
      queued(0, "a", 0),
      started(0, "a"),
      queued(1, "b", 0),
      started(1, "b", { into: "a" }),
      queued(2, "u", 20),
      interrupted(2, "a", "preempt"),
      ended(3, "b", "preempted"),
      requeued(3, "a"),
    ),
  );
  check(line);
  assert.deepEqual(told(line.turn("b")), ["queued 1–1"]);
});

test("an added ask that the agent takes next does not wait again", () => {
  const line = timelineOf(
    log(
      queued(0, "a", 0),
      started(0, "a"),
      queued(1, "b", 0),
      started(1, "b", { into: "a" }),
      queued(2, "u", 20),
      interrupted(2, "a", "preempt"),
      requeued(3, "a"),
      started(3, "b"),
    ),
  );
  check(line);
  assert.deepEqual(told(line.turn("b")), ["queued 1–1", "running 3–"]);
});

test("an added ask that was not taken belongs to no turn while it waits again", () => {
  const line = timelineOf(
    log(queued(0, "a"), started(0, "a"), queued(1, "b"), started(1, "b", { into: "a" }), requeued(2, "b")),
  );
  assert.equal(line.turn("b").into, null);
});

test("a contradictory log is drawn by its last event", () => {
  const line = timelineOf(log(queued(0, "a"), started(0, "a"), ended(1, "a"), started(2, "a", { attempt: 2 })));
  check(line);
  assert.deepEqual([line.turn("a").outcome, told(line.turn("a")).at(-1)], [null, "running 2–"]);
});

test("two turns at the same time are counted as an overlap", () => {
  const line = timelineOf(
    log(queued(0, "a"), started(0, "a"), queued(0, "b"), started(1, "b"), ended(2, "a"), ended(3, "b")),
  );
  assert.equal(line.overlaps, 1);
});

test("a turn that the agent started is marked as such and does not overlap an ask", () => {
  const line = timelineOf(
    log(
      queued(0, "a"),
      started(0, "a"),
      started(1, "own-1", { origin: "task-notification" }),
      ended(2, "own-1"),
      ended(3, "a"),
    ),
  );
  check(line);
  const own = line.turn("own-1");
  assert.deepEqual([own.origin, own.isCut, told(own)], ["task-notification", false, ["running 1–2"]]);
  assert.match(own.prompt, /started by the agent/);
  assert.equal(line.overlaps, 0);
});

test("processes have a pid, an end, and the rungs of the ladder within their lifetime", () => {
  const line = timelineOf(
    log(
      [0, "process.started", null, { process: 1, pid: 41, born: null }],
      [
        9,
        "process.stopped",
        null,
        {
          process: 1,
          ladder: [
            { rung: "eof", at: T0 + 5 },
            { rung: "term", at: T0 + 7 },
            { rung: "kill", at: T0 + 99 },
          ],
        },
      ],
      [9, "process.exited", null, { process: 1, code: null, signal: 9 }],
      [12, "process.started", null, { process: 2, pid: 42, born: null }],
    ),
  );
  check(line);
  const [first, second] = line.processes;
  assert.deepEqual([first.pid, first.from - T0, first.to - T0, first.exit], [41, 0, 9, "signal 9"]);
  assert.deepEqual(
    first.rungs.map((each) => [each.rung, each.at - T0]),
    [
      ["eof", 5],
      ["term", 7],
      ["kill", 9],
    ],
  );
  assert.deepEqual(
    marks(line, "rung").map((mark) => mark.at - T0),
    [5, 7, 9],
  );
  assert.deepEqual([second.pid, second.to], [42, null]);
});

test("the ladder may be recorded after the exit", () => {
  const line = timelineOf(
    log(
      [0, "process.started", null, { process: 1, pid: 41 }],
      [8, "process.exited", null, { process: 1, code: 143, signal: null }],
      [9, "process.stopped", null, { process: 1, ladder: [{ rung: "term", at: T0 + 7 }] }],
    ),
  );
  check(line);
  assert.equal(line.processes.length, 1);
  assert.deepEqual(
    line.processes[0].rungs.map((each) => each.at - T0),
    [7],
  );
});

test("an exit without a start belongs to a process that is older than the window", () => {
  const line = timelineOf(
    log(
      [0, "session.opened", null, { agent: "claude" }],
      [4, "process.exited", null, { process: 7, code: 0, signal: null }],
    ),
  );
  check(line);
  const [process] = line.processes;
  assert.deepEqual(
    [process.number, process.pid, process.isCut, process.from - T0, process.to - T0, process.exit],
    [7, null, true, 0, 4, "code 0"],
  );
});

test("a turn without a recorded beginning begins with the window", () => {
  for (const [lines, expected] of [
    [[[0, "session.setting", null, { name: "model", value: "x" }], ended(4, "a")], ["running 0–4"]],
    [
      [[0, "session.setting", null, {}], interrupted(2, "a"), ended(4, "a", "interrupted")],
      ["running 0–2", "interrupting 2–4"],
    ],
    [[[0, "session.setting", null, {}], ended(4, "a", "withdrawn", { by: "withdrawn" })], ["queued 0–4"]],
    [[[0, "session.setting", null, {}], started(2, "a"), ended(4, "a")], ["running 2–4"]],
  ]) {
    const line = timelineOf(log(...lines));
    check(line);
    assert.deepEqual(told(line.turn("a")), expected);
    assert.equal(line.turn("a").isCut, true);
  }
});

test("after a host died, its turn is known up to its last event and settled at the recovery", () => {
  const line = timelineOf(
    log(
      [0, "process.started", null, { process: 1, pid: 41 }],
      queued(0, "a"),
      started(1, "a"),
      queued(5, "b"),
      ended(3600, "a", "unknown", { by: "exit", error: "the host died" }),
      [3600, "session.recovered", null, { unknown: ["a"], queued: ["b"], swept: ["41 claude"] }],
      [3601, "process.started", null, { process: 2, pid: 77 }],
      started(3602, "b"),
    ),
  );
  check(line);
  assert.deepEqual(told(line.turn("a")), ["queued 0–1", "running 1–5", "unknown 5–3600"]);
  assert.equal(line.turn("a").outcome, "unknown");
  assert.deepEqual(told(line.turn("b")), ["queued 5–3602", "running 3602–"]);
  const [first] = line.processes;
  assert.deepEqual([first.to - T0, first.isLost], [5, true]);
  assert.match(marks(line, "recovered")[0].label, /1 of unknown outcome, 1 leftover/);
  assert.equal(line.overlaps, 0);
});

test("a process without an end in the log ends before the next one starts", () => {
  const line = timelineOf(
    log(
      [0, "process.started", null, { process: 1, pid: 41 }],
      [5, "session.setting", null, {}],
      [90, "process.started", null, { process: 2, pid: 42 }],
    ),
  );
  check(line);
  assert.deepEqual(
    line.processes.map((each) => [each.from - T0, each.to === null ? null : each.to - T0, each.isLost]),
    [
      [0, 5, true],
      [90, null, false],
    ],
  );
});

test("a clock that is set back does not reverse the picture", () => {
  const line = timelineOf(
    log(
      queued(0, "a"),
      started(10, "a"),
      ended(-3590, "a"),
      queued(-3588, "b"),
      started(-3588, "b"),
      ended(-3580, "b"),
    ),
  );
  check(line);
  assert.deepEqual(told(line.turn("a")), ["queued 0–10", "running 10–10"]);
  assert.deepEqual(told(line.turn("b")), ["queued 12–12", "running 12–20"]);
  assert.match(marks(line, "clock_step")[0].label, /set back by 1 h/);
  assert.equal(line.wall(T0 + 20), T0 - 3580);
  assert.equal(line.wall(T0 + 5), T0 + 5);
});

test("a small clock correction gets no mark", () => {
  const line = timelineOf(log(queued(0, "a"), started(1, "a"), ended(0.999, "a")));
  check(line);
  assert.equal(marks(line, "clock_step").length, 0);
});

test("the times of a ladder follow a clock that was set back", () => {
  const line = timelineOf(
    log(
      [0, "process.started", null, { process: 1, pid: 41 }],
      [100, "session.setting", null, {}],
      [-20, "session.setting", null, {}],
      [-10, "process.stopped", null, { process: 1, ladder: [{ rung: "term", at: T0 - 15 }] }],
    ),
  );
  check(line);
  assert.equal(round(line.processes[0].rungs[0].at - T0), 105);
});

test("a question is open until its answer", () => {
  const line = timelineOf(
    log(
      queued(0, "a"),
      started(0, "a"),
      [1, "question.asked", "a", { question: "q-1", wants: "permission", tool: "Bash", input: {} }],
      [2, "question.asked", "a", { question: "q-2", wants: "elicitation", tool: "" }],
      [4, "question.answered", "a", { question: "q-1", answer: "allow", by: "answer" }],
      [5, "question.answered", "a", { question: "q-9", answer: "allow", by: "answer" }],
    ),
  );
  check(line);
  assert.deepEqual(
    line.questions.map((each) => [each.tool, each.from - T0, each.to === null ? null : each.to - T0, each.answer]),
    [
      ["Bash", 1, 4, "allow"],
      ["elicitation", 2, null, null],
    ],
  );
});

test("sweeps, survivors, losses and single events are marks", () => {
  const line = timelineOf(
    log(
      [0, "session.opened", null, { agent: "claude" }],
      [1, "process.swept", null, { process: 1, swept: [{ pid: 5, command: "sleep 9" }], survivors: [], drained: true }],
      [
        2,
        "process.swept",
        null,
        { process: 1, swept: [], survivors: [{ pid: 6, command: "x", why: "another user's" }], drained: true },
      ],
      [3, "process.left", null, { process: 1, left: [{ pid: 7, command: "y" }] }],
      [4, "process.retired", null, { process: 1, reason: "idle" }],
      [5, "process.backed_off", null, { crashes: 2, seconds: 4 }],
      [6, "session.context_lost", null, { conversation: "c", error: "gone" }],
      [7, "clock.warning", "a", { clock: "progress", seconds: 60, left: 30 }],
      [8, "queue.changed", "a", { before: null }],
      [9, "session.closed", null, {}],
    ),
  );
  check(line);
  assert.deepEqual(
    line.marks.map((mark) => mark.kind),
    ["opened", "swept", "survivor", "left", "retired", "backed_off", "context_lost", "warning", "moved", "closed"],
  );
  assert.match(line.marks[1].label, /5 sleep 9/);
  assert.match(line.marks[2].label, /another user's/);
});

test("holds are marks that name who held and who released", () => {
  const line = timelineOf(
    log(
      [0, "hold.granted", null, { hold: "h-1", priority: 10, caller: "ann" }],
      [1, "hold.ended", null, { hold: "h-1", by: "released", caller: "bob" }],
      [2, "hold.granted", null, { hold: "h-2", priority: 0 }],
      [3, "hold.ended", null, { hold: "h-2", by: "idle" }],
    ),
  );
  check(line);
  assert.deepEqual(
    line.marks.map((mark) => mark.label),
    ["held by ann: h-1", "hold released by bob: h-1", "held: h-2", "hold ended (idle): h-2"],
  );
});

test("unknown kinds and malformed bodies have no effect", () => {
  const before = log(queued(0, "a"), started(1, "a"));
  const odd = log([2, "turn.dreamt", "a", {}], [3, "constructor", null, {}], [3, "toString", null, {}]).map((each) => ({
    ...each,
    seq: each.seq + 2,
  }));
  const line = timelineOf([...before, ...odd]);
  check(line);
  assert.deepEqual(told(line.turn("a")), ["queued 0–1", "running 1–"]);
  assert.equal(line.to - T0, 1);

  const bodies = [undefined, {}, { prompt: 7, priority: "x", joined: 3, ladder: 9, swept: null, survivors: undefined }];
  for (const kind of [
    "turn.queued",
    "turn.started",
    "turn.interrupted",
    "turn.requeued",
    "turn.ended",
    "process.started",
    "process.exited",
    "process.stopped",
    "process.swept",
    "process.left",
    "process.retired",
    "process.backed_off",
    "question.asked",
    "question.answered",
    "question.kept",
    "queue.changed",
    "hold.granted",
    "hold.ended",
    "session.opened",
    "session.recovered",
    "session.context_lost",
    "session.setting",
    "clock.warning",
    "provider.retrying",
    "limits.changed",
    "session.fell_back",
  ]) {
    for (const body of bodies)
      check(
        timelineOf([
          { kind, seq: 1, at: T0, turn: "t", body },
          { kind, seq: 2, at: NaN, turn: "t", body },
        ]),
      );
  }
});

test("events are added once, and adding them in pieces gives the same result", () => {
  const events = fixture("night.ndjson");
  const whole = timelineOf(events);
  const pieces = new Timeline();
  for (let index = 0; index < events.length; index += 3) pieces.add(events.slice(Math.max(0, index - 2), index + 3));
  assert.deepEqual(pieces.turns, whole.turns);
  assert.deepEqual(pieces.marks, whole.marks);
  assert.deepEqual(pieces.processes, whole.processes);
});

test("real logs have no overlaps", () => {
  for (const name of ["session.ndjson", "night.ndjson"]) {
    const line = timelineOf(fixture(name));
    check(line);
    assert.equal(line.overlaps, 0, name);
    const held = heldSegments(line).filter(({ turn }) => turn.origin === null);
    for (const [index, { segment, turn }] of held.entries()) {
      const next = held[index + 1];
      if (next)
        assert.ok(
          segment.to !== null && segment.to <= next.segment.from,
          `${name}: ${turn.id} overlaps ${next.turn.id}`,
        );
    }
  }
});

test("any log is drawn, cut anywhere and with shuffled clocks", () => {
  const events = [
    ...fixture("session.ndjson"),
    ...fixture("night.ndjson").map((each) => ({ ...each, seq: each.seq + 1000 })),
  ];
  let seed = 7;
  const random = () => (seed = (seed * 1103515245 + 12345) % 2147483648) / 2147483648;
  for (let round_ = 0; round_ < 300; round_ += 1) {
    const begin = Math.floor(random() * events.length);
    const some = events
      .slice(begin)
      .filter(() => random() > 0.2)
      .map((each) => ({ ...each, at: each.at + (random() - 0.5) * 200 }));
    const line = timelineOf(some);
    try {
      check(line);
      const scale = new Timescale(line);
      for (const at of line.moments) assert.ok(Number.isFinite(scale.x(at, 10)));
    } catch (error) {
      error.message += ` (round ${round_}, begin ${begin})`;
      throw error;
    }
  }
});

test("thousands of turns are folded and laid out quickly", () => {
  const lines = [];
  for (let index = 0; index < 20_000; index += 1) {
    const at = index * 2;
    lines.push(queued(at, `t${index}`, (index % 3) * 10), started(at + 0.1, `t${index}`), ended(at + 1.5, `t${index}`));
  }
  const events = log(...lines);
  let line, scale, waits, spans;
  const took = cpuMilliseconds(() => {
    line = timelineOf(events);
    scale = new Timescale(line);
    ({ waits } = waitingRows(line));
    spans = new Spans(
      heldSegments(line),
      (each) => each.segment.from,
      (each) => each.segment.to,
    );
  });
  assert.equal(line.turns.length, 20_000);
  assert.equal(waits.length, 20_000);
  assert.ok(took < 2000, `it took ${took} ms`);
  const from = scale.time(0, 10);
  const found = spans.within(line.to - 10, line.to);
  assert.equal(from, line.from);
  assert.ok(found.length >= 5 && found.length <= 7);
});

// -- the scale --------------------------------------------------------------------------------------------------------
const IDLE = log(
  queued(0, "a"),
  started(0, "a"),
  ended(10, "a"),
  queued(1000, "b"),
  started(1000, "b"),
  ended(1005, "b"),
);

test("a long idle time is a break of a fixed width, and the rest is to scale", () => {
  const scale = new Timescale(timelineOf(IDLE), { breakPixels: 40 });
  assert.equal(scale.breaks, 1);
  assert.equal(scale.seconds, 15);
  assert.equal(scale.width(10), 190);
  assert.equal(scale.x(T0, 10), 0);
  assert.equal(scale.x(T0 + 10, 10), 100);
  assert.equal(round(scale.x(T0 + 505, 10)), 120);
  assert.equal(scale.x(T0 + 1000, 10), 140);
  assert.equal(scale.x(T0 + 1005, 10), 190);
  assert.equal(round(scale.fit(190)), 10);
  assert.equal(round(scale.fitFrom(T0 + 1000, 50)), 10);
  assert.equal(round(scale.fitFrom(T0 + 5, 140)), 10);
});

test("everything fits into any width, with any number of breaks", () => {
  const lines = [];
  for (let index = 0; index < 500; index += 1) {
    const at = index * 3600;
    lines.push(queued(at, `t${index}`), started(at, `t${index}`), ended(at + 5, `t${index}`));
  }
  const scale = new Timescale(timelineOf(log(...lines)));
  assert.equal(scale.breaks, 499);
  for (const pixels of [600, 1200, 4000]) assert.equal(Math.round(scale.width(scale.fit(pixels))), pixels);
  // A break is never wider than the shortest skipped pause would be to scale.
  assert.equal(scale.breakWidth(0.5), 15);
  assert.equal(scale.breakWidth(100), 40);
});

test("x and time are inverse functions", () => {
  const scale = new Timescale(timelineOf(IDLE));
  for (const at of [0, 3, 10, 200, 505, 999, 1000, 1002.5, 1005]) {
    assert.equal(round(scale.time(scale.x(T0 + at, 7), 7) - T0), at);
  }
});

test("a turn that runs for an hour is not a break, an ask that waits through the night is", () => {
  const long = timelineOf(log(queued(0, "a"), started(0, "a"), ended(3600, "a")));
  assert.equal(new Timescale(long).breaks, 0);
  const night = timelineOf(log(queued(0, "a"), started(40_000, "a"), ended(40_001, "a")));
  assert.equal(new Timescale(night).breaks, 1);
});

test("the picture grows only while a turn has the agent", () => {
  const runs = new Timescale(timelineOf(log(queued(0, "a"), started(0, "a"))));
  runs.until(T0 + 100);
  assert.equal(runs.seconds, 100);
  runs.until(T0 + 200);
  assert.equal(runs.seconds, 200);
  const waits = new Timescale(timelineOf(log(queued(0, "a"))));
  waits.until(T0 + 1000);
  assert.equal(waits.seconds, 30);
  const over = new Timescale(timelineOf(IDLE));
  over.until(T0 + 5000);
  assert.equal(over.seconds, 15);
});

test("an empty session has a scale too", () => {
  const scale = new Timescale(timelineOf([]));
  assert.equal(scale.width(10), 0);
  assert.ok(Number.isFinite(scale.fit(100)));
  assert.ok(Number.isFinite(scale.x(0, 10)));
});

test("waiting asks have a row each, and a free row is used again", () => {
  const line = timelineOf(log(queued(0, "a"), queued(1, "b"), queued(2, "c"), started(3, "a"), queued(4, "d")));
  const { waits, rows } = waitingRows(line);
  assert.deepEqual(
    waits.map(({ turn, row }) => [turn.id, row]),
    [
      ["a", 0],
      ["b", 1],
      ["c", 2],
      ["d", 0],
    ],
  );
  assert.equal(rows, 3);
  const many = timelineOf(log(...Array.from({ length: 8 }, (_, index) => queued(index, `t${index}`))));
  assert.deepEqual(
    waitingRows(many, 5).waits.map(({ row }) => row),
    [0, 1, 2, 3, 4, null, null, null],
  );
});

test("a window finds its items, and items that began long before it and are still open", () => {
  const items = [
    { from: 0, to: 100 },
    { from: 1, to: 2 },
    { from: 3, to: 4 },
    { from: 50, to: null },
    { from: 60, to: 61 },
  ];
  const spans = new Spans(
    items,
    (each) => each.from,
    (each) => each.to,
  );
  assert.deepEqual(spans.within(3.5, 10), [items[0], items[2]]);
  assert.deepEqual(spans.within(70, 80), [items[0], items[3]]);
  assert.deepEqual(spans.within(200, 300), [items[3]]);
  assert.deepEqual(spans.within(-5, -1), []);
});

test("the times of the axis are round and far enough apart", () => {
  const scale = new Timescale(timelineOf(IDLE));
  const { step, times } = ticks(10, scale, T0 + 3, T0 + 2000);
  assert.equal(step, 10);
  assert.deepEqual(
    times.map((at) => at - T0),
    [10, 1000],
  );
});

// -- words ------------------------------------------------------------------------------------------------------------
test("words: classes, prompts, exits and durations", () => {
  assert.deepEqual([-1, 0, 9, 10, 19, 20, 99].map(classOf), [
    "background",
    "background",
    "background",
    "normal",
    "normal",
    "interactive",
    "interactive",
  ]);
  assert.equal(
    promptText([
      { type: "text", text: "look" },
      { type: "image", data: "…" },
    ]),
    "look [image]",
  );
  assert.equal(promptText("x".repeat(500)).length, 400);
  assert.equal(promptText(null), "");
  assert.deepEqual(
    [exitText(0, null), exitText(null, 9), exitText(null, null)],
    ["code 0", "signal 9", "exit status unknown"],
  );
  assert.deepEqual([0, 0.05, 0.31, 4.26, 42, 60, 3599.9, 3600, 90_000].map(duration), [
    "0 ms",
    "50 ms",
    "0.3 s",
    "4.3 s",
    "42 s",
    "1 min",
    "1 h",
    "1 h",
    "1 d 1 h",
  ]);
  assert.deepEqual([0.05, 42, 90, 7300, 200_000].map(durationShort), ["50 ms", "42 s", "2 min", "2 h", "2 d"]);
});
