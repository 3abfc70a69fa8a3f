// Describe events beside the conversation in words: processes, settings, losses. One short sentence
// each. Events that do not matter to a user get no note.
// @ts-check

import { capText } from "./provider.js";
import { dayTime } from "./words.js";

/** @typedef {{icon: string, tone: "soft"|"warn"|"bad", text: string, detail?: string}} Note */

/** The rungs of the stop ladder in words. */
const RUNGS = new Map([
  ["eof", "its input was closed"],
  ["term", "TERM was sent to it"],
  ["kill", "it was killed"],
  ["linger", "its leftover processes got time to end"],
  ["rest", "TERM was sent to the rest of its tree"],
  ["keeper", "its keeper and all its processes were killed"],
  ["drain", "its output was read to the end"],
]);

/**
 * @param {{kind: string, body: Record<string, any>}} event
 * @returns {Note|null}
 */
export function noteOf({ kind, body }) {
  const tell = WORDS.get(kind);
  return tell ? tell(body ?? {}) : null;
}

/** @type {Map<string, (body: Record<string, any>) => Note|null>} */
const WORDS = new Map(
  Object.entries({
    "session.opened": ({ agent, cwd }) => soft("session", `Session opened with ${agent}${cwd ? ` in ${cwd}` : ""}.`),
    "session.closed": () => soft("session", "Session closed."),
    "session.left": ({ queued = [] }) =>
      soft("session", `The session left its host, with ${count(queued.length, "ask")} in the queue.`),
    "session.handed_over": () => soft("session", "The host was restarted. The agent works on, and waits for the next one."),
    "process.adopted": ({ process, pid }) =>
      soft("process", `The new host continues process ${process} (pid ${pid}).`),
    "session.shared": ({ shared = [], caller }) =>
      soft("session", `${caller ?? "The administrator"} shared the session with ${shared.join(", ") || "no other caller"}.`),
    "session.imported": () => soft("session", "The events above were imported."),
    "session.recovered": ({ unknown = [], queued = [], swept = [] }) => ({
      icon: "warning",
      tone: "warn",
      text: `The host died. ${count(unknown.length, "turn")} of unknown outcome, ${count(queued.length, "ask")} still waiting, ${count(swept.length, "process", "processes")} cleaned up.`,
    }),
    "session.context_lost": ({ error }) => ({
      icon: "warning",
      tone: "warn",
      text: "The agent lost the conversation and starts a new one.",
      detail: error,
    }),
    "session.context_restored": ({ missing }) =>
      missing
        ? {
            icon: "warning",
            tone: "warn",
            text: `Another host took the session over. The agent does not know the last ${count(missing, "turn")} of the conversation.`,
          }
        : soft("session", "Another host took the session over, and the agent knows the conversation."),
    "session.setting": ({ name, value }) =>
      soft(
        "setting",
        value === null ? `The ${words(name)} is the agent's default.` : `The ${words(name)} is now ${value}.`,
      ),
    "session.store_returned": ({ retries }) => ({
      icon: "warning",
      tone: "warn",
      text: `The store can be written again, after ${count(retries ?? 0, "try", "tries")}.`,
    }),
    "process.started": ({ process, pid }) => soft("process", `Process ${process} started (pid ${pid}).`),
    "process.exited": ({ process, code, signal, out_of_memory = false }) =>
      soft("process", `Process ${process} ended, ${exit(code, signal)}${out_of_memory ? ": out of memory" : ""}.`),
    "process.stopped": ({ process, ladder = [] }) =>
      soft("process", `Process ${process} was stopped: ${ladder.map(rung).join(", then ") || "immediately"}.`),
    "process.swept": ({ swept = [], survivors = [] }) =>
      survivors.length
        ? {
            icon: "warning",
            tone: "warn",
            text: `${count(survivors.length, "process", "processes")} could not be ended.`,
            detail: commands(survivors),
          }
        : swept.length
          ? soft(
              "process",
              `${count(swept.length, "leftover process", "leftover processes")} ended.`,
              commands(swept),
            )
          : null,
    "process.left": ({ left = [] }) =>
      soft(
        "process",
        `${count(left.length, "process", "processes")} of the interrupted turn ${left.length === 1 ? "keeps" : "keep"} running.`,
        commands(left),
      ),
    "process.retired": ({ process, reason }) =>
      soft("process", `Process ${process} is retired${reason ? `: ${words(reason)}` : ""}.`),
    "process.backed_off": ({ crashes, seconds }) => ({
      icon: "warning",
      tone: "warn",
      text: `It crashed ${crashes === 1 ? "once" : `${crashes} times`}. The next start waits ${round(seconds)} s.`,
    }),
    "clock.warning": ({ clock, left }) => ({
      icon: "clock",
      tone: "warn",
      text: `The clock “${words(clock)}” ends this turn in ${round(left)} s.`,
    }),
    "tasks.changed": ({ tasks = [] }) =>
      tasks.length
        ? soft(
            "process",
            `${count(tasks.length, "background task runs", "background tasks run")}.`,
            tasks.map((/** @type {any} */ task) => task.description || task.id).join("\n"),
          )
        : soft("process", "No background task runs any more."),
    "provider.retrying": ({ attempt, attempts_max, delay, cause, error, status }) => ({
      icon: "clock",
      tone: "warn",
      text: `The provider failed (${words(error)}${status ? `, ${status}` : ""}). The agent tries again${delay ? ` in ${round(delay)} s` : ""}, ${attempt} of ${attempts_max ?? "?"}.`,
      detail: cause,
    }),
    "limits.changed": ({ limited_until: until }) =>
      until
        ? { icon: "clock", tone: "warn", text: `The agent's account is limited until ${dayTime(until)}.` }
        : null,
    "session.fell_back": ({ from, to, why, limited_until: until }) => ({
      icon: "process",
      tone: "warn",
      text: `${to} serves the next turns, and not ${from} (${words(why)}${until ? ` until ${dayTime(until)}` : ""}).`,
    }),
    "budget.warning": (use) => ({ icon: "clock", tone: "warn", text: `Most of a budget is used: ${capText(use)}.` }),
    "budget.exceeded": (use) => ({ icon: "warning", tone: "warn", text: `Over budget: ${capText(use)}.` }),
    "budget.raised": () => soft("clock", "The budget was raised."),
  }),
);

/** @param {string} icon @param {string} text @param {string} [detail] @returns {Note} */
function soft(icon, text, detail) {
  return detail ? { icon, tone: "soft", text, detail } : { icon, tone: "soft", text };
}

/** @param {number} number @param {string} one @param {string} [many] */
function count(number, one, many = `${one}s`) {
  return `${number} ${number === 1 ? one : many}`;
}

/** @param {any} name */
function words(name) {
  return String(name).replaceAll("_", " ");
}

/** @param {any} number */
function round(number) {
  return Number(number) >= 10 ? Math.round(Number(number)) : Math.round(Number(number) * 10) / 10;
}

/** @param {number|null|undefined} code @param {number|string|null|undefined} signal */
function exit(code, signal) {
  if (signal !== null && signal !== undefined) return `by signal ${signal}`;
  return code === null || code === undefined ? "exit status unknown" : `code ${code}`;
}

/** @param {any} step */
function rung(step) {
  return RUNGS.get(step?.rung) ?? words(step?.rung ?? "stopped");
}

/** @param {any[]} processes */
function commands(processes) {
  return processes.map((one) => `${one.pid}  ${one.command ?? ""}${one.why ? `  (${one.why})` : ""}`).join("\n");
}
