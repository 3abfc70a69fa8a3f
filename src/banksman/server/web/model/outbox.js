// Asks that were sent to a session and have no response yet, each with its idempotency key.
//
// A retry under another key would be a second ask. So the key stays with its prompt until a
// response arrives or the log shows the key. The outbox is in the storage of this tab, so that a
// reload sends the same ask, and in memory, which has room for every picture. If the storage is
// full, only the text is kept, without the prompt. After a reload such an ask cannot be sent again,
// only looked up in the log.
// @ts-check

/**
 * @typedef {{key: string, text: string, images: any[], prompt: string|object[]|null, priority: string,
 *   onBusy: string, by?: string|null}} Ask `prompt` null: the storage had no room for its pictures; it
 *   cannot be sent again. `by`: the name of its caller; undefined: not known, or written by an older page
 */

const PREFIX = "banksman.sent.";

export class Outbox {
  /** @param {() => Storage} storage may throw if the browser has no storage */
  constructor(storage) {
    this.storage = storage;
    /** @type {Map<string, Ask[]>} by session */
    this.bySession = new Map();
  }

  /**
   * The asks of a session, in the order in which they were sent.
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
   * @returns {boolean} whether a reload would find the complete ask
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
   * Record the caller of an ask that was written before the caller was known.
   * @param {string} session
   * @param {string} key
   * @param {string|null} by
   */
  sign(session, key, by) {
    this.bySession.set(
      session,
      this.of(session).map((ask) => (ask.key === key ? { ...ask, by } : ask)),
    );
    this.#write(session);
  }

  /**
   * Remove the asks that the log shows.
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
        // The storage is full, or the browser has none.
      }
    }
    return false;
  }
}

export const outbox = new Outbox(() => sessionStorage);
