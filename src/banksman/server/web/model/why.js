// Describe in words what a session is doing, as `banksman why` does, from the same response of the
// server. Pure: `elapsed` is the age of the response, so that clocks count down between two
// responses.
//
// An account is a list of topics, each with its lines. A topic without lines is left out.

import { budgetText, capText, limitText, retryText, windowText } from "./provider.js";
import { clockTime } from "./words.js";

const QUESTION_CHARACTERS_MAX = 2000;
const COMMAND_CHARACTERS_MAX = 60;
const FRAME_CHARACTERS_MAX = 500;
// The process states of `ps`, in words.
const STATES = {
  R: "runs",
  S: "sleeps",
  D: "waits for the disk",
  T: "is stopped",
  t: "is traced",
  Z: "is a zombie",
  X: "is dead",
  I: "is idle",
};

const seconds = (value) => `${Math.max(0, value).toFixed(1)} s`;

/** Make any text fit in one line. */
export function asLine(text, most = Infinity) {
  const line = String(text)
    .replace(/\s+/gu, " ")
    .replace(/[\p{Cc}\p{Cf}]/gu, "")
    .trim();
  return line.length > most ? `${line.slice(0, most - 1)}…` : line;
}

/** @returns {[string, string[]][]} */
export function accountOf(why, elapsed = 0, now = Date.now() / 1000) {
  const topics = [
    ["session", [`${why.id}${why.name ? ` (${why.name})` : ""}, ${why.agent}`]],
    ["phase", [`${why.phase}${why.waits_for_place ? ", waits for a place in the process pool" : ""}`]],
    ["owner", why.owner ? [`process ${why.owner.pid} ${why.owner.address ? `at ${why.owner.address}` : "on this machine"}`] : []],
    ["host", why.host ? [why.host] : []],
    ["holder", holderLines(why)],
    ["agents", (why.fallback ?? []).map((each) => agentLine(each, why.agent, now))],
    ["retry", why.retry ? [`${retryText(why.retry, elapsed)}: ${asLine(why.retry.cause, 120)}`] : []],
    ["limits", [limitText(why, now), ...(why.limits ?? []).map(windowText)].filter(Boolean)],
    ["budget", [budgetText(why), ...(why.budget ?? []).map(capText)].filter(Boolean)],
    ["queue", queueLines(why, elapsed)],
    ["questions", questionLines(why)],
    ["clocks", (why.clocks ?? []).map((clock) => clockLine(clock, elapsed))],
    ["timers", Object.entries(why.timers ?? {}).map(([name, left]) => `${name}: in ${seconds(left - elapsed)}`)],
    ["requests", (why.requests ?? []).map((each) => requestLine(each, elapsed))],
    ["frames", [framesLine(why, elapsed), ...lastLines(why)]],
    ["cost", why.cost === null || why.cost === undefined ? [] : [`$${why.cost.toFixed(4)}`]],
    ["tree", treeLines(why.tree ?? [])],
  ];
  return topics;
}

/** The account as a terminal shows it. */
export function accountText(why, elapsed = 0) {
  const lines = [];
  for (const [name, said] of accountOf(why, elapsed)) {
    said.forEach((line, index) => lines.push(`${(index ? "" : name).padEnd(10)}${line.replace(/\s+$/u, "")}`));
  }
  return lines.join("\n");
}

function agentLine(agent, serving, now) {
  const limited = limitText({ limited_until: agent.limited_until, queue: [] }, now);
  const facts = [agent.name === serving ? "serves the session" : "", limited, agent.missing ? "not installed" : ""];
  return [agent.name, ...facts.filter(Boolean)].join(", ");
}

function holderLines(why) {
  const holds = why.holds?.length ? why.holds.map(holdLine) : why.hold ? [`hold ${why.hold}`] : [];
  if (!why.holder) return holds.length ? holds : ["none"];
  const by = why.holder_caller ? `, asked by ${why.holder_caller}` : "";
  const since = why.holder_since ? `, since ${clockTime(why.holder_since)}` : "";
  return [
    `${why.holder}${by}${since}`,
    ...(why.holder_prompt ? [`  ${asLine(why.holder_prompt, 200)}`] : []),
    ...holds,
  ];
}

function holdLine(hold) {
  const by = hold.caller ? ` of ${hold.caller}` : "";
  const at = hold.at === null ? ", waits in the queue" : `, since ${clockTime(hold.at)}`;
  return `hold ${hold.hold}${by}, priority ${hold.priority}${at}`;
}

function queueLines(why, elapsed) {
  if (!why.queue?.length) return ["empty"];
  return why.queue.map((each) => {
    const again = each.attempt === 1 ? "" : `, attempt ${each.attempt}`;
    const prompt = each.prompt ? `: ${asLine(each.prompt, 80)}` : "";
    const by = each.caller ? ` by ${each.caller}` : "";
    return `${each.turn}${by}, priority ${each.priority}, for ${seconds(each.seconds + elapsed)}${again}${prompt}`;
  });
}

function questionLines(why) {
  const asked = new Map((why.asked ?? []).map((each) => [each.id, each]));
  const session = why.name || why.id;
  return (why.questions ?? []).flatMap((id) => {
    const one = asked.get(id);
    if (one === undefined) return [`${id} waits for an answer`];
    const what = asLine(`${one.tool || one.wants} ${spaced(one.input)}`, QUESTION_CHARACTERS_MAX);
    return [`${id}: ${what}`, `  banksman answer ${quoted(session)} ${quoted(id)} allow|deny`];
  });
}

/** JSON with spaces, as the command line prints it. */
function spaced(value) {
  if (Array.isArray(value)) return `[${value.map(spaced).join(", ")}]`;
  if (value === null || typeof value !== "object") return JSON.stringify(value ?? null);
  const members = Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${spaced(each)}`);
  return `{${members.join(", ")}}`;
}

/** A word in shell quotes. */
function quoted(word) {
  return /^[\w@%+=:,./-]+$/u.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`;
}

export function clockLeft(clock, elapsed) {
  return Math.max(0, clock.running ? clock.left - elapsed : clock.left);
}

function clockLine(clock, elapsed) {
  const stands = clock.running ? "" : ", paused";
  return `${clock.name}: ${seconds(clockLeft(clock, elapsed))} left of ${seconds(clock.seconds)}${stands}`;
}

function requestLine(request, elapsed) {
  const since = request.seconds === null ? "" : ` for ${seconds(request.seconds + elapsed)}`;
  return `${request.kind} ${request.id}: not answered${since}`;
}

function framesLine(why, elapsed) {
  const counters = why.counters ?? {};
  const one = (way) => {
    const since = why[`seconds_since_${way}`];
    const last = since === null || since === undefined ? "" : `, the last ${seconds(since + elapsed)} ago`;
    return `${counters[`frames_${way}`] ?? 0} ${way} (${counters[`bytes_${way}`] ?? 0} bytes${last})`;
  };
  const lost = ["noise", "spilled", "dropped"]
    .filter((name) => counters[name])
    .map((name) => `, ${counters[name]} ${name}`)
    .join("");
  return `${one("in")}, ${one("out")}${lost}`;
}

function lastLines(why) {
  const said = [
    ["last in", why.last_in],
    ["last out", why.last_out],
  ].filter(([, each]) => each?.text);
  return said.map(([name, each]) => `${name}: ${asLine(each.text, FRAME_CHARACTERS_MAX)}`);
}

function treeLines(tree) {
  return treeOf(tree).map(({ depth, process }) => {
    const size =
      process.rss_bytes === null || process.rss_bytes === undefined
        ? ""
        : ` ${Math.round(process.rss_bytes / 1048576)} MiB`;
    const command = asLine(process.command, COMMAND_CHARACTERS_MAX);
    return `${"  ".repeat(depth)}${process.pid} ${process.state}${size} ${command}`;
  });
}

/**
 * Parents before their children, each with its depth. A process without a parent in the list is a
 * root.
 */
export function treeOf(tree) {
  const known = new Set(tree.map((each) => each.pid));
  const children = new Map();
  for (const each of tree) {
    const parent = known.has(each.parent) ? each.parent : null;
    children.set(parent, [...(children.get(parent) ?? []), each]);
  }
  const ahead = (children.get(null) ?? []).map((process) => ({ process, depth: 0 })).reverse();
  const found = [];
  while (ahead.length) {
    const one = ahead.pop();
    found.push(one);
    const below = children.get(one.process.pid) ?? [];
    // Delete the entry, so that a cycle ends. A reused pid could make one.
    children.delete(one.process.pid);
    for (const process of [...below].reverse()) ahead.push({ process, depth: one.depth + 1 });
  }
  return found;
}

export function stateText(state) {
  return STATES[String(state)[0]] ?? String(state);
}
