// The caller of this page: the name and the role of its token, and what that role allows.
//
// The server decides every request. The page only hides what it would refuse. Until the server has
// answered, and with an unrestricted token, everything is shown. It is read again at each start of
// a stream, because another tab may have logged in with another token. If that is another person's,
// the page loads again, without the drafts of the person before.
// @ts-check
import { get as getOne } from "../net/api.js";
import { feed as theFeed } from "../net/feed.js";
import { currentToken } from "../net/page_token.js";
import { derived, effect, signal } from "./signal.js";

/** Roles that are limited neither to own sessions nor to own asks. */
const UNLIMITED = new Set(["operator", "admin"]);

/** Where this tab keeps the name of its caller. Drafts and unanswered asks are beside it. */
const KEY = "banksman.caller";
const OURS = "banksman.";

/** @typedef {{name: string|null, role: string, actions: string[]}} Me */

export class CallerOfPage {
  /**
   * @param {{get?: typeof getOne, feed?: typeof theFeed, storage?: () => Storage, reload?: () => void,
   *   token?: typeof currentToken}} [given] replaced by tests
   */
  constructor({
    get = getOne,
    feed = theFeed,
    storage = () => sessionStorage,
    reload = () => location.reload(),
    token = currentToken,
  } = {}) {
    /** null: not known yet. @type {{value: Me|null, subscribe: any}} */
    this.me = signal(null);
    this._get = get;
    this._feed = feed;
    this._storage = storage;
    this._reload = reload;
    this._token = token;
    /**
     * The answer of the last read; null: the caller may be another one.
     * @type {{name: string|null, token: string|null}|null}
     */
    this._seen = null;
    /** Replaced when the caller may have changed, so that the answer to an earlier read is ignored. */
    this._era = {};
    this._isStarted = false;
  }

  start() {
    if (this._isStarted) return;
    this._isStarted = true;
    this._feed.onBegin(() => {
      this.#doubt();
      void this.refresh();
    });
    // Without a token, a proxy may name another user after any loss of the connection.
    this._feed.connection.subscribe(({ state }) => state !== "live" && this.#doubt());
  }

  /** A failed read is ignored: the next start of a stream brings the answer. */
  async refresh() {
    try {
      await this.#read();
    } catch {
      // The view of the connection says what is wrong.
    }
  }

  /** The token that the next request carries. */
  get token() {
    return this._token();
  }

  /**
   * Whether the next request is certainly one of the caller that was read last: since that read no
   * stream has started or ended, and the browser has the same token.
   */
  get isCurrent() {
    return this._seen !== null && this._seen.token === this.token;
  }

  /**
   * Return the name of the caller of the next request. Reads it again if it may have changed.
   * Throws the problem of the read.
   * @returns {Promise<string|null>}
   */
  async current() {
    while (!this._seen || !this.isCurrent) await this.#read();
    return this._seen.name;
  }

  #doubt() {
    this._seen = null;
    this._era = {};
  }

  async #read() {
    const { token, _era: era } = this;
    const found = await this._get("v1/caller");
    if (token !== this.token || era !== this._era) return;
    this._seen = { name: found.name, token };
    if (this.#isAnother(found.name)) this._reload();
    else if (JSON.stringify(found) !== JSON.stringify(this.me.value)) this.me.value = found;
  }

  /**
   * Whether the tab had another caller. Then nothing of that caller stays in its storage.
   * @param {string|null} name
   */
  #isAnother(name) {
    const now = JSON.stringify(name);
    try {
      const storage = this._storage();
      const before = storage.getItem(KEY);
      if (before === now) return false;
      const keys = Array.from({ length: storage.length }, (_, index) => storage.key(index) ?? "");
      if (before !== null) for (const key of keys) if (key.startsWith(OURS)) storage.removeItem(key);
      storage.setItem(KEY, now);
      if (before !== null) return true;
    } catch {
      // The storage is full, or the browser has none.
    }
    return this.me.value !== null && this.me.value.name !== name;
  }

  /**
   * Whether the role allows an action, by its name in `actions` of `/v1/caller`.
   * @param {string} action
   */
  may(action) {
    return mayDo(this.me.value, action);
  }

  /** @param {string} action */
  allows(action) {
    return derived([this.me], (me) => mayDo(me, action));
  }

  /**
   * Whether the caller may rename, reorder and close this session, as a signal, and a function that
   * ends its reads. Only for a limited role the owner is read.
   * @param {string} id
   * @returns {[{value: boolean, subscribe: any}, () => void]}
   */
  steers(id) {
    /** undefined: not known. @type {{value: string|null|undefined, subscribe: any}} */
    const owner = signal(undefined);
    const read = async (/** @type {Me|null} */ me) => {
      if (me === null || UNLIMITED.has(me.role) || !mayDo(me, "steer")) return;
      try {
        owner.value = (await this._get(`v1/sessions/${encodeURIComponent(id)}/shared`)).owner;
      } catch {
        // The buttons stay hidden. The view of the session says what is wrong.
      }
    };
    return [derived([this.me, owner], maySteer), effect([this.me], (me) => void read(me))];
  }

  /**
   * Whether the caller may interrupt or withdraw the ask of `other`.
   * @param {string|null|undefined} other
   */
  mayInterrupt(other) {
    return mayInterrupt(this.me.value, other);
  }
}

/**
 * @param {Me|null} me
 * @param {string} action
 */
export function mayDo(me, action) {
  return me === null || me.actions.includes(action);
}

/**
 * @param {Me|null} me
 * @param {string|null|undefined} other the caller of the ask
 */
export function mayInterrupt(me, other) {
  if (me === null || UNLIMITED.has(me.role)) return true;
  return me.actions.includes("interrupt") && other === me.name;
}

/**
 * Whether the caller may rename, reorder and close a session. A limited role may do so with its own.
 * @param {Me|null} me
 * @param {string|null|undefined} owner undefined: not known yet
 */
export function maySteer(me, owner) {
  if (me === null || UNLIMITED.has(me.role)) return mayDo(me, "steer");
  return mayDo(me, "steer") && owner !== undefined && owner === me.name;
}

/**
 * Whether an ask of the caller may preempt others: its priority may be above "normal".
 * @param {Me|null} me
 */
export function mayPreempt(me) {
  return me === null || UNLIMITED.has(me.role);
}

/** @param {Me|null} me */
export function callerText(me) {
  return me === null ? "" : me.name === null ? me.role : `${me.name}, ${me.role}`;
}

export const caller = new CallerOfPage();
