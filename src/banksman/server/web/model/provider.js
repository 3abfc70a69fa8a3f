// Describe retries, usage limits and empty answers in words. Pure functions of the server's answers.
// @ts-check

import { clockTime, dayTime, plural } from "./words.js";

const DAY_SECONDS = 86_400;

/**
 * Say until when the account of a session is limited, and how many asks wait. Empty: it is not limited.
 * @param {Record<string, any>} session
 * @param {number} now in seconds since 1970
 */
export function limitText(session, now) {
  const until = Number(session.limited_until) || 0;
  // The asks wait a little longer than the limit, or for a delay that the provider named.
  if (until <= now && !session.waits_for_limit) return "";
  const waiting = session.queue?.length ?? 0;
  const asks = waiting ? `, ${plural(waiting, "ask")} ${waiting === 1 ? "waits" : "wait"}` : "";
  return `limited${until > now ? ` until ${timeText(until, now)}` : ""}${asks}`;
}

/**
 * Say which budget holds a session back, and how many asks wait. Empty: none does.
 * @param {Record<string, any>} session
 */
export function budgetText(session) {
  const use = (session.budget ?? []).find((/** @type {any} */ each) => each.reached);
  if (!use) return "";
  const waiting = session.queue?.length ?? 0;
  const asks = waiting ? `; ${plural(waiting, "ask")} ${waiting === 1 ? "waits" : "wait"}` : "";
  return `over budget: ${capText(use)}${asks}`;
}

const UNITS = { usd: "US dollars (estimate)", working_seconds: "seconds of work" };

/** @param {Record<string, any>} use a cap, and what is used of it */
export function capText({ scope, unit, used, cap, caller }) {
  const of = scope === "host" ? " of today" : scope === "caller" ? ` of ${caller ?? "no caller"} today` : "";
  return `${amount(used)} of ${amount(cap)} ${UNITS[/** @type {"usd"} */ (unit)] ?? unit}${of}`;
}

/** @param {unknown} value */
function amount(value) {
  return Number(value).toLocaleString("en-US", { maximumFractionDigits: 2 });
}

/** @param {number} at @param {number} now */
function timeText(at, now) {
  return at - now < DAY_SECONDS ? clockTime(at).slice(0, 5) : dayTime(at);
}

/**
 * @param {Record<string, any>} retry
 * @param {number} elapsed the age of the server's answer in seconds
 */
export function retryText(retry, elapsed = 0) {
  const most = retry.attempts_max ? ` of ${retry.attempts_max}` : "";
  const left = Math.max(0, (Number(retry.seconds) || 0) - elapsed);
  const due = left ? ` in ${left.toFixed(0)} s` : "";
  return `retry ${retry.attempt}${most}${due}: ${kindText(retry.error)}${retry.status ? ` (${retry.status})` : ""}`;
}

/** @param {unknown} kind the kind of an error */
export function kindText(kind) {
  return String(kind ?? "other").replaceAll("_", " ");
}

/** @param {Record<string, any>} window */
export function windowText({ name, used, resets_at: resetsAt }) {
  const share = typeof used === "number" ? `, ${Math.round(100 * used)} % used` : "";
  return `${name}${share}${typeof resetsAt === "number" ? `, resets at ${dayTime(resetsAt)}` : ""}`;
}
