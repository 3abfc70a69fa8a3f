// Requests that a user makes to a session, one function and one request each.
//
// They throw a `Problem` (with `detail` and `hint` for the user) or `Unreachable`. A request that
// creates something has an idempotency key, so a retry has no second effect. A request that names
// its object can be repeated safely too. An interrupt of "the turn that runs now" is sent once: a
// retry could stop the next turn.
// @ts-check
import { get, patch, post, randomId, remove } from "./api.js";

/** @param {string} session */
const at = (session) => `v1/sessions/${encodeURIComponent(session)}`;

/**
 * @param {string} session
 * @param {{prompt: string | object[], priority?: string | number, onBusy?: string, onPreempt?: string,
 *   key?: string}} given `key`: the key of an earlier attempt
 * @param {() => void} [check] runs right before each attempt and throws to prevent it
 * @returns {Promise<{turn: string, state: string}>}
 */
export function ask(session, { prompt, priority, onBusy, onPreempt, key = randomId() }, check) {
  const body = { prompt, priority, on_busy: onBusy, on_preempt: onPreempt };
  return post(`${at(session)}/turns`, body, { key, check });
}

/**
 * @param {string} session
 * @param {string | null} [turn] null: the turn that runs now
 * @returns {Promise<{stopped: boolean, by: string, kept: string | null, queued: string[]}>} the receipt
 */
export function interrupt(session, turn = null) {
  if (turn === null) return post(`${at(session)}/interrupt`);
  return post(`${at(session)}/turns/${encodeURIComponent(turn)}/interrupt`, {}, { isHarmlessTwice: true });
}

/**
 * Withdraw a waiting ask. This is an interrupt of it; the receipt says `withdrawn`.
 * @param {string} session
 * @param {string} turn
 */
export function cancel(session, turn) {
  return interrupt(session, turn);
}

/**
 * @param {string} session
 * @param {string} turn
 * @param {string | null} [before] null: to the head of its class
 */
export function moveUp(session, turn, before = null) {
  return post(`${at(session)}/turns/${encodeURIComponent(turn)}/move`, { before }, { isHarmlessTwice: true });
}

/**
 * @param {string} session
 * @param {string} question
 * @param {string} decision "allow", "deny", or the id of an option
 * @param {{message?: string, content?: object, remember?: boolean | string, updatedInput?: object}} [more]
 *   `updatedInput`: replaces the input of the tool; it also carries
 *   the answers to questions that the agent asks by a tool
 * @returns {Promise<{question: string, answer: string, by: string, message: string | null, first: boolean}>}
 */
export function answer(session, question, decision, { message, content, remember, updatedInput } = {}) {
  const body = { decision, message, content, remember, updated_input: updatedInput };
  return post(`${at(session)}/questions/${encodeURIComponent(question)}`, body, { isHarmlessTwice: true });
}

/**
 * @param {Record<string, any>} given agent, cwd, name and the other members of `POST /v1/sessions`
 */
export function open(given) {
  return post("v1/sessions", given, { key: randomId() });
}

/** @param {string} session */
export function close(session) {
  return remove(at(session));
}

/**
 * @param {string} session
 * @param {string | null} name null removes the name
 */
export function rename(session, name) {
  return patch(at(session), { name });
}

/** @param {string} session */
export function stderr(session) {
  return get(`${at(session)}/stderr`);
}

export function why(session) {
  return get(`${at(session)}/why`);
}

export async function agents() {
  return (await get("v1/agents")).agents;
}
