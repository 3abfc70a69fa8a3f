// Handlers of each event kind for the timeline: the table by which model/timeline.js folds the log.
// Other kinds do not affect the timeline. Each handler takes the timeline, the event, its body, and
// the time at which it is drawn.

import { capText } from "./provider.js";
import { classOf, duration, exitText, promptText, textOf } from "./words.js";

/** The current phase of a turn. null: it is over, or it is a part of another turn. */
export function openPhase(turn) {
  const last = turn.segments.at(-1);
  return last !== undefined && last.to === null ? last.phase : null;
}

/** The handlers by event kind. */
export const TOLD = {
  "turn.queued": (line, event, body, now) => {
    const turn = line.turnOf(event, now, { isCut: false });
    turn.prompt = promptText(body.prompt);
    turn.priority = Number(body.priority) || 0;
    turn.class = classOf(turn.priority);
    turn.seq = event.seq;
    turn.caller = body.caller ?? null;
    // Collected: the ask waits with the ask that it joined, and begins with it.
    if (body.into) line._shared.set(turn.id, { into: body.into, isSteered: false });
    line.open(turn, event, now, "queued");
  },

  "turn.started": (line, event, body, now) => {
    const isNew = !line._known.has(event.turn);
    const turn = line.turnOf(event, now, { isCut: !body.origin });
    if (body.origin) {
      turn.origin = String(body.origin);
      if (isNew) turn.prompt = `started by the agent (${turn.origin})`;
    }
    turn.attempt = body.attempt ?? turn.attempt;
    if (body.into) {
      turn.into = body.into;
      line._shared.set(turn.id, { into: body.into, isSteered: true });
      line.close(turn, now);
      line.mark(event, now, "steer", `added to the running turn: ${turn.prompt}`, { turn: turn.id, lane: "holder" });
      return;
    }
    turn.into = null;
    line._shared.delete(turn.id);
    for (const id of Array.isArray(body.joined) ? body.joined : []) {
      const joined = line._known.get(id);
      if (joined === undefined) continue;
      joined.into = turn.id;
      line._shared.set(id, { into: turn.id, isSteered: false });
      line.close(joined, now);
    }
    line.grant(turn, event, now);
  },

  "turn.interrupted": (line, event, body, now) => {
    const turn = line.turnOf(event, now);
    const cause = String(body.cause ?? "interrupt");
    if (turn.segments.length === 0) line.open(turn, { ...event, at: line.from - line.offset }, line.from, "running");
    line.open(turn, event, now, "interrupting", { cause, watchdog: body.clock ?? null, caller: body.caller ?? null });
    const urgent = cause === "preempt" ? urgentBefore(line, turn) : null;
    line.mark(event, now, MARK_OF[cause] ?? "interrupt", interruptText(turn, cause, { ...body, urgent }), {
      turn: turn.id,
      from: urgent?.id ?? null,
      lane: "holder",
    });
  },

  "turn.requeued": (line, event, body, now) => {
    const turn = line.turnOf(event, now);
    turn.attempt = body.attempt ?? turn.attempt + 1;
    turn.into = null;
    line._shared.delete(turn.id);
    line.open(turn, event, now, "queued");
    line.mark(event, now, "requeue", `waits again, for attempt ${turn.attempt}: ${turn.prompt}`, {
      turn: turn.id,
      lane: "waiting",
    });
    for (const [id, shared] of [...line._shared]) {
      // Asks that were collected into this turn return to the queue with it. Asks that were added
      // while it ran have events of their own.
      const other = line._known.get(id);
      if (shared.into !== turn.id || shared.isSteered || other.into === null || other.outcome !== null) continue;
      other.into = null;
      other.attempt = turn.attempt;
      line.open(other, event, now, "queued");
    }
  },

  "turn.ended": (line, event, body, now) => {
    const turn = line.turnOf(event, now);
    if (turn.segments.length === 0) {
      line.open(
        turn,
        { ...event, at: line.from - line.offset },
        line.from,
        body.by === "withdrawn" ? "queued" : "running",
      );
    }
    turn.outcome = String(body.outcome ?? "unknown");
    turn.by = body.by ?? null;
    turn.error = body.error ?? null;
    turn.cost = body.cost ?? null;
    turn.endSeq = event.seq;
    if (turn.outcome === "unknown") line.lose(turn, event, now);
    else line.close(turn, now);
    line._shared.delete(turn.id);
    if (line._holder === turn) line._holder = null;
  },

  "queue.changed": (line, event, body, now) => {
    const turn = line._known.get(event.turn);
    const by = body.caller ? ` by ${body.caller}` : "";
    line.mark(event, now, "moved", `moved up in the queue${by}: ${turn?.prompt ?? event.turn}`, {
      turn: event.turn,
      lane: "waiting",
    });
  },

  "hold.granted": (line, event, body, now) => {
    line.mark(event, now, "hold", `held${body.caller ? ` by ${body.caller}` : ""}: ${body.hold}`, { lane: "waiting" });
  },

  "hold.ended": (line, event, body, now) => {
    const by = body.caller ? ` by ${body.caller}` : "";
    const words = body.by === "released" ? `released${by}` : `ended (${body.by})`;
    line.mark(event, now, "hold", `hold ${words}: ${body.hold}`, { lane: "waiting" });
  },

  "process.started": (line, event, body, now) => {
    for (const other of line.processes) {
      // Only one process runs at a time. An earlier process without an end in the log was lost with
      // its host.
      if (other.to === null)
        line.endProcess(other, Math.min(now, Math.max(other.from, line._before)), "exit status unknown", true);
    }
    line.processes.push({
      number: body.process ?? line.processes.length + 1,
      pid: body.pid ?? null,
      from: now,
      to: null,
      exit: null,
      isCut: false,
      isLost: false,
      seq: event.seq,
      clock: event.at,
      rungs: [],
    });
  },

  "process.exited": (line, event, body, now) => {
    line.endProcess(line.processOf(event, body.process, now), now, exitText(body.code, body.signal));
  },

  "process.stopped": (line, event, body, now) => {
    const process = line.processOf(event, body.process, now);
    for (const each of Array.isArray(body.ladder) ? body.ladder : []) {
      const at = Number.isFinite(each?.at) ? each.at + line.offset : now;
      const time = Math.max(process.from, Math.min(at, process.to ?? now));
      process.rungs.push({ rung: String(each?.rung ?? "?"), at: time, clock: each?.at ?? event.at });
      line.mark(event, time, "rung", `stop ladder of process ${process.pid ?? process.number}: ${each?.rung}`, {
        lane: "process",
        clock: each?.at ?? event.at,
      });
    }
  },

  "process.swept": (line, event, body, now) => {
    const swept = (body.swept ?? []).map((each) => `${each.pid} ${each.command}`);
    const left = (body.survivors ?? []).map((each) => `${each.pid} ${each.command} (${each.why})`);
    const said = [
      swept.length ? `leftover processes ended: ${swept.join(", ")}` : "",
      left.length ? `could not be ended: ${left.join(", ")}` : "",
      body.drained === false ? "its output was not read to the end" : "",
    ];
    line.mark(event, now, left.length ? "survivor" : "swept", said.filter(Boolean).join("; ") || "swept", {
      lane: "process",
    });
  },

  "process.left": (line, event, body, now) => {
    const left = (body.left ?? []).map((each) => `${each.pid} ${each.command}`);
    line.mark(event, now, "left", `left running, by policy: ${left.join(", ")}`, { lane: "process" });
  },

  "process.retired": (line, event, body, now) => {
    line.mark(event, now, "retired", `the process is retired: ${body.reason ?? "no longer needed"}`, {
      lane: "process",
    });
  },

  "process.backed_off": (line, event, body, now) => {
    line.mark(
      event,
      now,
      "backed_off",
      `crashed ${body.crashes} times: the next start is in ${duration(body.seconds ?? 0)}`,
      { lane: "process" },
    );
  },

  "question.asked": (line, event, body, now) => {
    const question = {
      id: String(body.question ?? event.seq),
      tool: textOf(body.tool) || textOf(body.wants) || "?",
      wants: textOf(body.wants),
      from: now,
      to: null,
      answer: null,
      by: null,
      seq: event.seq,
      turn: event.turn,
      clock: event.at,
    };
    line.questions.push(question);
    line._asked.set(question.id, question);
  },

  "question.answered": (line, _event, body, now) => {
    const question = line._asked.get(body.question);
    if (question === undefined) return;
    question.to = Math.max(question.from, now);
    question.answer = body.answer ?? null;
    question.by = body.caller ?? body.by ?? null;
  },

  "question.kept": (line, event, body, now) => {
    line.mark(event, now, "kept", `the question ${body.question} outlives its process`, {
      turn: event.turn,
      lane: "holder",
    });
  },

  "session.opened": (line, event, body, now) => {
    line.mark(event, now, "opened", `the session was opened${body.agent ? ` with ${body.agent}` : ""}${body.caller ? ` by ${body.caller}` : ""}`, {
      lane: "all",
    });
  },
  "session.imported": (line, event, _body, now) =>
    line.mark(event, now, "imported", "the earlier events were imported", { lane: "all" }),

  "session.recovered": (line, event, body, now) => {
    for (const process of line.processes) {
      if (process.to === null)
        line.endProcess(process, Math.max(process.from, Math.min(now, line._before)), "lost with its host", true);
    }
    const swept = (body.swept ?? []).length;
    const unknown = (body.unknown ?? []).length;
    const said = [
      unknown ? `${unknown} of unknown outcome` : "",
      swept ? `${swept} leftover processes ended` : "",
    ].filter(Boolean);
    line.mark(event, now, "recovered", `recovered: its host died${said.length ? ` (${said.join(", ")})` : ""}`, {
      lane: "all",
    });
  },

  "session.context_lost": (line, event, body, now) => {
    line.mark(event, now, "context_lost", `the agent lost the conversation: ${body.error ?? ""}`, {
      lane: "all",
    });
  },
  "session.store_returned": (line, event, _body, now) =>
    line.mark(event, now, "store_returned", "the store can be written again", { lane: "all" }),
  "session.setting": (line, event, body, now) =>
    line.mark(event, now, "setting", `${body.name}: ${body.value ?? "the agent's default"}`, { lane: "process" }),
  "session.closed": (line, event, body, now) =>
    line.mark(event, now, "closed", `the session was closed${body.caller ? ` by ${body.caller}` : ""}`, {
      lane: "all",
    }),

  "clock.warning": (line, event, body, now) => {
    line.mark(
      event,
      now,
      "warning",
      `clock ${body.clock}: ${duration(body.left ?? 0)} left of ${duration(body.seconds ?? 0)}`,
      {
        turn: event.turn,
        lane: "holder",
      },
    );
  },
  "provider.retrying": (line, event, body, now) => {
    line.mark(event, now, "retry", `retry ${textOf(body.attempt)}: ${textOf(body.cause)}`, {
      turn: event.turn,
      lane: "holder",
    });
  },
  "limits.changed": (line, event, body, now) => {
    if (body.limited_until) line.mark(event, now, "limited", "the agent's account is limited", { lane: "all" });
  },
  "session.fell_back": (line, event, body, now) => {
    line.mark(event, now, "limited", `${textOf(body.to)} serves, and not ${textOf(body.from)}`, { lane: "all" });
  },
  "budget.exceeded": (line, event, body, now) => {
    line.mark(event, now, "limited", `over budget: ${capText(body)}`, { lane: "all" });
  },
};

const MARK_OF = {
  preempt: "preempt",
  interrupt: "interrupt",
  clock: "clock",
  close: "close",
  replace: "replace",
  budget: "clock",
};

/**
 * The ask that preempted the turn: of the more urgent waiting asks, the one that is served next.
 */
function urgentBefore(line, turn) {
  let best = null;
  for (const other of line._open) {
    if (other === turn || openPhase(other) !== "queued" || other.priority <= turn.priority) continue;
    if (best === null || other.priority > best.priority) best = other;
  }
  return best;
}

function interruptText(turn, cause, { clock, caller, urgent }) {
  const what = turn.prompt || turn.id;
  switch (cause) {
    case "preempt":
      return `preempted${urgent ? ` by “${urgent.prompt || urgent.id}”` : ""}: ${what}`;
    case "clock":
      return `stopped by the clock ${clock ?? "?"}: ${what}`;
    case "close":
      return `stopped because the session is closed: ${what}`;
    case "replace":
      return `stopped because its process is replaced: ${what}`;
    default:
      return `interrupted${caller ? ` by ${caller}` : ""}: ${what}`;
  }
}
