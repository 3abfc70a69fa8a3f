// What has happened in a session, as spans of time: pure, from our own events to something that can be drawn.
//
// It owns no clock and no node. Events go in, in the order of the log; out come turns with their segments, the lives of
// the processes, open questions, and marks for what happened at one moment.
//
// Time. An event says when it was, by the clock on the wall; and that clock may be set back. The order of the log is
// the truth, so a step back is taken out: from there on every time is shifted, and the spans stay in order. `offset` is
// what was added so far; what is shown to people (`at` of a mark, `clock` of a span) is what the event said.
//
// Who has the agent. An ask that was collected into another, or added to a turn that ran, has no running segment of its
// own: it names the turn it went `into`. So the running segments are exactly the turns that the agent was given, and
// `overlaps` counts those that began before the last one was over. That is to be none, and it is computed, not assumed.
//
// A window. Retention may have taken the beginning, and a host may have died in the middle. What has no known beginning
// begins with the first event (`isCut`); what nobody saw the end of has a segment `unknown` from the last sign of it to
// the moment at which it was settled.

import { TOLD, openPhase } from "./timeline_kinds.js";
import { duration } from "./words.js";

/** @typedef {{kind: string, at: number, seq: number, turn: string|null, body: any, epoch?: number}} Event */
/**
 * @typedef {{from: number, to: number|null, phase: "queued"|"running"|"interrupting"|"unknown", attempt: number,
 *   seq: number, clock: number, cause?: string, watchdog?: string|null}} Segment
 *   `to` null: it goes on.
 */
/**
 * @typedef {{id: string, prompt: string, priority: number, class: string, origin: string|null, into: string|null,
 *   attempt: number, segments: Segment[], outcome: string|null, by: string|null, error: string|null, seq: number,
 *   endSeq: number|null, isCut: boolean, cost: number|null}} Turn
 */
/**
 * @typedef {{number: number, pid: number|null, from: number, to: number|null, exit: string|null, isCut: boolean,
 *   isLost: boolean, seq: number, clock: number, rungs: {rung: string, at: number, clock: number}[]}} Process
 */
/** @typedef {{at: number, kind: string, label: string, seq: number, clock: number, turn?: string|null,
 *   from?: string|null, lane?: string}} Mark */
/** @typedef {{id: string, tool: string, wants: string, from: number, to: number|null, answer: string|null,
 *   by: string|null, seq: number, turn: string|null, clock: number}} Question */

// A clock that is corrected by less is not worth a mark.
const STEP_SECONDS_MIN = 1;

/** All of a log at once. */
export function timelineOf(events) {
  const timeline = new Timeline();
  timeline.add(events);
  return timeline;
}

export class Timeline {
  constructor() {
    /** @type {Turn[]} */ this.turns = [];
    /** @type {Process[]} */ this.processes = [];
    /** @type {Question[]} */ this.questions = [];
    /** @type {Mark[]} */ this.marks = [];
    /** @type {number[]} the time of each event that says something, in order */
    this.moments = [];
    this.from = 0;
    this.to = 0;
    this.offset = 0;
    /** @type {{at: number, offset: number}[]} */ this._steps = [];
    this.overlaps = 0;
    this.version = 0;
    /** @type {Map<string, Turn>} */ this._known = new Map();
    /** @type {Map<string, Question>} */ this._asked = new Map();
    /** @type {Map<string, {into: string, isSteered: boolean}>} */ this._shared = new Map();
    /** @type {Set<Turn>} those with a segment that goes on */ this._open = new Set();
    this._holder = null;
    this._count = 0;
    this._seq = 0;
    this._at = 0;
    // The time of the last event that was not told together with this one: the last sign of whoever died since.
    this._before = 0;
  }

  /** Whether something goes on, so that the picture grows with the clock. */
  get isLive() {
    return this._open.size > 0;
  }

  /** Whether somebody has the agent now. */
  get isHeld() {
    for (const turn of this._open) if (openPhase(turn) !== "queued") return true;
    return false;
  }

  /** What the clock on the wall said at a time of ours. */
  wall(time) {
    return time - (this._steps.findLast((step) => step.at <= time)?.offset ?? 0);
  }

  turn(id) {
    return this._known.get(id) ?? null;
  }

  /** Take in what the log has after what was taken in before. What is not newer than that is known already. */
  add(events) {
    for (const event of events) {
      if (event.seq <= this._seq) continue;
      if (!Object.hasOwn(TOLD, event.kind)) continue;
      const tell = TOLD[event.kind];
      this._seq = event.seq;
      const now = this._time(event);
      tell(this, event, event.body ?? {}, now);
      this.moments.push(now);
      this.to = Math.max(this.to, now);
      this.version += 1;
    }
  }

  _time(event) {
    const at = Number.isFinite(event.at) ? event.at : this.to - this.offset;
    if (this._count === 0) this.from = this.to = this._before = this._at = at;
    this._count += 1;
    let time = at + this.offset;
    if (time < this.to) {
      const step = this.to - time;
      this.offset += step;
      time = this.to;
      this._steps.push({ at: time, offset: this.offset });
      if (step >= STEP_SECONDS_MIN) {
        this.mark(event, time, "clock_step", `the clock was set back by ${duration(step)}`);
      }
    }
    if (time > this._at) {
      this._before = this._at;
      this._at = time;
    }
    return time;
  }

  mark(event, at, kind, label, more = {}) {
    this.marks.push({ at, kind, label, seq: event.seq, clock: event.at, ...more });
  }

  /** The turn of that name; one that was queued before the window is made up, as far as it is known. */
  turnOf(event, now, { isCut = true } = {}) {
    let turn = this._known.get(event.turn);
    if (turn === undefined) {
      turn = {
        id: event.turn,
        prompt: "",
        priority: 0,
        class: "background",
        origin: null,
        into: null,
        attempt: 1,
        segments: [],
        outcome: null,
        by: null,
        error: null,
        seq: event.seq,
        endSeq: null,
        isCut,
        cost: null,
      };
      this._known.set(event.turn, turn);
      this.turns.push(turn);
    }
    return turn;
  }

  open(turn, event, now, phase, more = {}) {
    this.close(turn, now);
    turn.outcome = turn.endSeq = null;
    turn.segments.push({ from: now, to: null, phase, attempt: turn.attempt, seq: event.seq, clock: event.at, ...more });
    this._open.add(turn);
  }

  close(turn, now) {
    this._open.delete(turn);
    const last = turn.segments.at(-1);
    if (last !== undefined && last.to === null) last.to = Math.max(last.from, now);
  }

  /** Nobody saw its end: it is known up to the last sign, and settled now. */
  lose(turn, event, now) {
    const last = turn.segments.at(-1);
    if (last === undefined || last.to !== null || last.phase === "queued") return this.close(turn, now);
    this.close(turn, Math.min(this._before, now));
    if (now > last.to) {
      turn.segments.push({
        from: last.to,
        to: now,
        phase: "unknown",
        attempt: turn.attempt,
        seq: event.seq,
        clock: event.at,
      });
    }
  }

  /** It has the agent from now on. */
  grant(turn, event, now) {
    const holder = this._holder;
    const isOpen = holder !== null && holder !== turn && ["running", "interrupting"].includes(openPhase(holder));
    // What the agent began by itself is beside what it is asked: it is heard of late, and gives way.
    if (isOpen && turn.origin === null && holder.origin === null) this.overlaps += 1;
    if (turn.origin === null || !isOpen) this._holder = turn;
    this.open(turn, event, now, "running");
  }

  endProcess(process, now, exit, isLost = false) {
    process.to = Math.max(process.from, now);
    process.exit = exit;
    process.isLost = isLost;
  }

  processOf(event, number, now) {
    let process = this.processes.findLast((each) => each.number === number && each.to === null);
    process ??= this.processes.findLast((each) => each.number === number && each.to >= now - 60);
    if (process === undefined) {
      process = {
        number,
        pid: null,
        from: this.from,
        to: null,
        exit: null,
        isCut: true,
        isLost: false,
        seq: event.seq,
        clock: event.at,
        rungs: [],
      };
      this.processes.push(process);
    }
    return process;
  }
}
