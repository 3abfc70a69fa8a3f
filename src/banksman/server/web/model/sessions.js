// All sessions, as the server lists them.
//
// The list is read at each start of a stream. After that, each own event of a session triggers a
// read of that session: one immediately, and one more if another event arrived in between. So a
// burst costs two requests and needs no timer. Each session has at most one read in flight, and
// none while the list is being read. So an older response cannot overtake a newer one.
//
// Parts of the list depend on time alone (no output for a minute: wedged). So the list is also read
// periodically while the page is visible.
// @ts-check
import { get as getOne, Problem } from "../net/api.js";
import { feed as theFeed } from "../net/feed.js";
import { isOwn } from "./kinds.js";
import { Gone, Patience } from "./reading.js";
import { derived, signal } from "./signal.js";

const TOGETHER_MAX = 4;
/** If more sessions than this have changed, reading the whole list costs less. */
const SINGLE_MAX = 20;
const LOOK_MILLISECONDS = 20_000;
/** More than a user reads. The server returns a thousand sessions per page. */
const PAGES_MAX = 10;

export class Sessions {
  /** @param {{get?: typeof getOne, feed?: typeof theFeed}} [given] replaced by tests */
  constructor({ get = getOne, feed = theFeed } = {}) {
    /** @type {{value: any[], subscribe: any}} oldest first */
    this.list = signal([]);
    /** The number of sessions with an open question. */
    this.questions = derived([this.list], (all) => all.filter((one) => one.state === "asks").length);
    /** Whether the list was read at least once. Until then an empty list means nothing. */
    this.isKnown = signal(false);
    /** @type {{value: Problem | null, subscribe: any}} */
    this.problem = signal(null);
    this._get = get;
    this._feed = feed;
    this._patience = new Patience();
    /** @type {Set<string>} sessions that have changed since they were read */
    this._changed = new Set();
    this._mustList = false;
    this._isReading = false;
    /** @type {(() => void)[]} */
    this._offs = [];
  }

  start() {
    if (this._offs.length) return;
    this._offs = [
      this._feed.on((events) => this._hear(events)),
      this._feed.onBegin(({ isContinued }) => {
        this._patience.wake();
        // A stream that resumed from its position has reported every change.
        if (!isContinued || !this.isKnown.value) this.refresh();
      }),
    ];
    const timer = setInterval(() => {
      const isLookedAt = globalThis.document?.visibilityState === "visible";
      if (isLookedAt && this._feed.connection.value.state === "live") this.refresh();
    }, LOOK_MILLISECONDS);
    this._offs.push(() => clearInterval(timer));
  }

  stop() {
    this._patience.stop();
    for (const off of this._offs.splice(0)) off();
  }

  /** @param {string} id */
  find(id) {
    return this.list.value.find((one) => one.id === id) ?? null;
  }

  /** Read the whole list again. */
  refresh() {
    this._mustList = true;
    this._pump();
  }

  /** @param {any[]} events */
  _hear(events) {
    for (const event of events) if (isOwn(event)) this._changed.add(event.session);
    this._pump();
  }

  async _pump() {
    if (this._isReading) return;
    this._isReading = true;
    try {
      while (this._mustList || this._changed.size) {
        if (this._mustList || this._changed.size > SINGLE_MAX) await this._readList();
        else await this._readSome([...this._changed].slice(0, TOGETHER_MAX));
      }
    } catch (error) {
      if (error instanceof Problem) this.problem.value = error;
      else if (!(error instanceof Gone)) throw error;
    } finally {
      this._isReading = false;
    }
  }

  async _readList() {
    this._mustList = false;
    this._changed.clear();
    /** @type {any[]} */
    const found = [];
    for (let after = null, pages = 0; pages < PAGES_MAX; pages += 1) {
      const page = await this._read("v1/sessions", after ? { after } : {});
      found.push(...page.sessions);
      after = page.next;
      if (!after) break;
    }
    this.list.value = found;
    this.isKnown.value = true;
  }

  /** @param {string[]} ids */
  async _readSome(ids) {
    for (const id of ids) this._changed.delete(id);
    const found = await Promise.all(
      ids.map((id) => this._read(`v1/sessions/${encodeURIComponent(id)}`).catch((error) => {
        if (error instanceof Problem && error.status === 404) return null; // The session was deleted.
        throw error;
      })),
    );
    const all = [...this.list.value];
    for (const [index, id] of ids.entries()) {
      const at = all.findIndex((one) => one.id === id);
      const one = found[index];
      if (at < 0 && one) all.push(one);
      else if (at >= 0 && one) all[at] = one;
      else if (at >= 0) all.splice(at, 1);
    }
    this.list.value = all;
  }

  /**
   * @param {string} path
   * @param {Record<string, any>} [query]
   */
  _read(path, query) {
    return this._patience.until(
      () => this._get(path, query),
      (problem) => {
        this.problem.value = problem;
      },
    );
  }
}

export const sessions = new Sessions();
