// What a person does to a session: one function for each, each one request.
//
// They throw a `Problem` (with `detail` and `hint`, for a person) or `Unreachable`. What creates something has a key,
// and is done once although it is sent again; so are those which name what they act on. An interrupt of "what runs now"
// is sent once: sent again it might stop what came after.
// @ts-check
import { get, patch, post, randomId, remove } from "./api.js";

/** @param {string} session */
const at = (session) => `v1/sessions/${encodeURIComponent(session)}`;

/**
 * @param {string} session
 * @param {{prompt: string | object[], priority?: string | number, onBusy?: string, onPreempt?: string,
 *   key?: string}} given `key`: of what may have been sent before
 * @returns {Promise<{turn: string, state: string}>}
 */
export function ask(session, { prompt, priority, onBusy, onPreempt, key = randomId() }) {
  const body = { prompt, priority, on_busy: onBusy, on_preempt: onPreempt };
  return post(`${at(session)}/turns`, body, { key });
}

/**
 * @param {string} session
 * @param {string | null} [turn] null: the one that runs now
 * @returns {Promise<{stopped: boolean, by: string, kept: string | null, queued: string[]}>} the receipt
 */
export function interrupt(session, turn = null) {
  if (turn === null) return post(`${at(session)}/interrupt`);
  return post(`${at(session)}/turns/${encodeURIComponent(turn)}/interrupt`, {}, { isHarmlessTwice: true });
}

/**
 * Takes back one that waits: the same as an interrupt of it, which says `withdrawn` then.
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
 *   `updatedInput`: what the tool is given instead, which is also how questions of the agent's own are answered
 * @returns {Promise<{question: string, answer: string, by: string, message: string | null, first: boolean}>}
 */
export function answer(session, question, decision, { message, content, remember, updatedInput } = {}) {
  const body = { decision, message, content, remember, updated_input: updatedInput };
  return post(`${at(session)}/questions/${encodeURIComponent(question)}`, body, { isHarmlessTwice: true });
}

/** @param {Record<string, any>} given agent, cwd, name and what else `POST /v1/sessions` takes */
export function open(given) {
  return post("v1/sessions", given, { key: randomId() });
}

/** @param {string} session */
export function close(session) {
  return remove(at(session));
}

/**
 * @param {string} session
 * @param {string | null} name null takes it away
 */
export function rename(session, name) {
  return patch(at(session), { name });
}

/** @param {string} session */
export function why(session) {
  return get(`${at(session)}/why`);
}

export async function agents() {
  return (await get("v1/agents")).agents;
}
