// Fold the own events of a session into spans of time that can be drawn. Pure.
//
// This module has no clock and no nodes. Events go in, in the order of the log. The result is turns
// with their segments, the lifetimes of the processes, open questions, and marks for events without
// a duration.
//
// Time. An event carries the wall clock time, and that clock may be set back. The order of the log
// is authoritative, so a step back is removed: every later time is shifted, and the spans stay in
// order. `offset` is the sum of these shifts. Users see the time of the event (`at` of a mark,
// `clock` of a span).
//
// The turn that has the agent. An ask that was collected into another ask, or added to a running
// turn, has no running segment. It names that turn in `into`. So the running segments are exactly
// the turns that the agent received. `overlaps` counts the turns that began before the previous one
// ended. It must be zero, and it is computed, not assumed.
//
// The window. Retention may have deleted the beginning, and a host may have died in the middle. A
// span with an unknown beginning begins with the first event (`isCut`). A turn whose end was not
// recorded has a segment `unknown` from its last event to the moment at which it was settled.

import { TOLD, openPhase } from "./timeline_kinds.js";
import { duration } from "./words.js";

/** @typedef {{kind: string, at: number, seq: number, turn: string|null, body: any, epoch?: number}} Event */
/**
 * @typedef {{from: number, to: number|null, phase: "queued"|"running"|"interrupting"|"unknown", attempt: number,
 *   seq: number, clock: number, cause?: string, watchdog?: string|null}} Segment
 *   `to` null: the segment is still open.
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

// A smaller clock correction gets no mark.
const STEP_SECONDS_MIN = 1;

/** Fold a whole log. */
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
    /** @type {number[]} the time of each event that has a handler, in order */
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
    /** @type {Set<Turn>} turns with an open segment */ this._open = new Set();
    this._holder = null;
    this._count = 0;
    this._seq = 0;
    this._at = 0;
    // The time of the last event before the current group of events: the last sign of a host that
    // died since.
    this._before = 0;
  }

  /** Whether a span is open, so that the picture grows with the clock. */
  get isLive() {
    return this._open.size > 0;
  }

  /** Whether a turn has the agent now. */
  get isHeld() {
    for (const turn of this._open) if (openPhase(turn) !== "queued") return true;
    return false;
  }

  /** The wall clock time of a timeline time. */
  wall(time) {
    return time - (this._steps.findLast((step) => step.at <= time)?.offset ?? 0);
  }

  turn(id) {
    return this._known.get(id) ?? null;
  }

  /** Add the next events of the log. Events that were added before are skipped. */
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

  /**
   * The turn of an event. A turn that was queued before the window is created from the known data.
   */
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

  /** The end of the turn was not recorded: it is known up to its last event, and settled now. */
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

  /** Give the agent to the turn from now on. */
  grant(turn, event, now) {
    const holder = this._holder;
    const isOpen = holder !== null && holder !== turn && ["running", "interrupting"].includes(openPhase(holder));
    // A turn that the agent began is not an ask. The log records it late, and it ends for an ask.
    // So it does not count as an overlap.
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
