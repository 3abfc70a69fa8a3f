// What was sent to a session and not answered yet, with the key it was sent with.
//
// Who sends something again under another key asks twice. So a key is kept with its prompt until there is an answer, or
// the log tells of the key: in this tab's storage, so that a reload sends the same, and in memory, which has room for
// every picture. If the storage has none, the words are kept without the prompt: it cannot be sent again then after a
// reload, only be looked for in the log.
// @ts-check

/** @typedef {{key: string, text: string, images: any[], prompt: string|object[]|null, priority: string,
 *   onBusy: string}} Ask `prompt` null: its pictures could not be kept, and it cannot be sent again */

const PREFIX = "banksman.sent.";

export class Outbox {
  /** @param {() => Storage} storage which may throw, where a browser keeps nothing */
  constructor(storage) {
    this.storage = storage;
    /** @type {Map<string, Ask[]>} by session */
    this.bySession = new Map();
  }

  /**
   * In the order in which they were sent.
   * @param {string} session
   * @returns {Ask[]}
   */
  of(session) {
    const known = this.bySession.get(session);
    if (known) return known;
    const read = this.#read(session);
    this.bySession.set(session, read);
    return read;
  }

  /**
   * @param {string} session
   * @param {Ask} ask
   * @returns {boolean} whether a reload would find all of it
   */
  add(session, ask) {
    this.bySession.set(session, [...this.of(session), ask]);
    return this.#write(session);
  }

  /**
   * @param {string} session
   * @param {string} key
   */
  remove(session, key) {
    const asks = this.of(session);
    const rest = asks.filter((ask) => ask.key !== key);
    if (rest.length === asks.length) return;
    this.bySession.set(session, rest);
    this.#write(session);
  }

  /**
   * The log has them.
   * @param {string} session
   * @param {any[]} events
   */
  settle(session, events) {
    if (!this.of(session).length) return;
    for (const { kind, body } of events) if (kind === "turn.queued" && body?.key) this.remove(session, body.key);
  }

  /**
   * @param {string} session
   * @returns {Ask[]}
   */
  #read(session) {
    try {
      const kept = JSON.parse(this.storage().getItem(PREFIX + session) ?? "[]");
      return Array.isArray(kept) ? kept.filter((ask) => typeof ask?.key === "string") : [];
    } catch {
      return [];
    }
  }

  /** @param {string} session */
  #write(session) {
    const asks = this.of(session);
    const bare = asks.map((ask) => (ask.images.length ? { ...ask, prompt: null, images: [] } : ask));
    for (const kept of [asks, bare]) {
      try {
        if (kept.length) this.storage().setItem(PREFIX + session, JSON.stringify(kept));
        else this.storage().removeItem(PREFIX + session);
        return kept === asks;
      } catch {
        // Too much for it, or a browser that keeps nothing.
      }
    }
    return false;
  }
}

export const outbox = new Outbox(() => sessionStorage);
