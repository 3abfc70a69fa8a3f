// All of Banksman's own events of a session (asked, started, interrupted, answered…), without
// frames.
//
// The newest events are read first, then older ones, so that a long session appears immediately.
// The seqs have holes, because the frames between the events are left out. So a missing event
// cannot be seen here. The rule of the feed makes the list complete: at each start of a stream the
// pages after the last event are read, and live events wait until then.
// @ts-check
import { get as getPage, Problem } from "../net/api.js";
import { feed as theFeed } from "../net/feed.js";
import { isOwn } from "./kinds.js";
import { Gone, Patience } from "./reading.js";
import { signal } from "./signal.js";

/** Beyond this the oldest events are left out. One picture cannot show ten thousand turns. */
export const OWN_MAX = 20_000;
const PAGE = 1000;

export class OwnEvents {
  /**
   * @param {string} id
   * @param {{get?: typeof getPage, feed?: typeof theFeed}} [given] replaced by tests
   */
  constructor(id, { get = getPage, feed = theFeed } = {}) {
    this.id = id;
    /** @type {{value: any[], subscribe: any}} oldest first */
    this.events = signal([]);
    /** Whether every event that the log has is here, or OWN_MAX of them. */
    this.isComplete = signal(false);
    /** @type {{value: Problem | null, subscribe: any}} */
    this.problem = signal(null);
    this._get = get;
    this._patience = new Patience();
    this._isOver = false;
    /** @type {any[]} */
    this._pending = [];
    /**
     * @type {string | null} The log is read up to this cursor. Very many frames may follow the last own event.
     */
    this._place = null;
    this._mustReadUp = true;
    this._isReading = false;
    this._offs = [
      feed.on((events) => this._hear(events)),
      feed.onBegin(() => {
        this._mustReadUp = true;
        this._patience.wake();
        this._pump();
      }),
    ];
    this._pump();
  }

  close() {
    this._isOver = true;
    this._patience.stop();
    for (const off of this._offs.splice(0)) off();
  }

  /** @param {any[]} events */
  _hear(events) {
    const ours = events.filter((event) => event.session === this.id && isOwn(event));
    if (!ours.length) return;
    this._pending.push(...ours);
    // Too many wait. Drop them and read them again: the log keeps them.
    if (this._pending.length > OWN_MAX) {
      this._pending = [];
      this._mustReadUp = true;
    }
    if (!this._isReading) this._take();
  }

  _take() {
    const pending = this._pending;
    this._pending = [];
    this._append(pending);
  }

  /** @param {any[]} events in order; some may be here already */
  _append(events) {
    const all = this.events.value;
    let begin = all.length;
    while (begin && events.length && all[begin - 1].seq >= events[0].seq) begin -= 1;
    const known = new Set(all.slice(begin).map((event) => event.seq));
    const more = events.filter((event) => !known.has(event.seq));
    if (!more.length) return;
    const end = all.slice(begin).concat(more);
    if (known.size) end.sort((one, other) => one.seq - other.seq);
    this.events.value = all.slice(0, begin).concat(end).slice(-OWN_MAX);
  }

  async _pump() {
    if (this._isReading || this._isOver) return;
    this._isReading = true;
    try {
      while (this._mustReadUp || !this.isComplete.value) {
        if (this._mustReadUp) {
          this._mustReadUp = false;
          await this._readUp();
          this._take();
        } else await this._readOlder();
      }
    } catch (error) {
      if (error instanceof Problem) this.problem.value = error;
      else if (!(error instanceof Gone)) throw error;
    } finally {
      this._isReading = false;
    }
  }

  async _readUp() {
    if (this._place === null) {
      const { events } = await this._page({ before: Number.MAX_SAFE_INTEGER });
      this.events.value = events;
      this._place = events.at(-1)?.cursor ?? null;
      return;
    }
    try {
      for (;;) {
        const { events, next } = await this._page({ after: this._place });
        this._append(events);
        this._place = next;
        if (!events.length) return;
      }
    } catch (error) {
      if (!(error instanceof Problem) || error.status !== 410) throw error;
      // The store has another history now. Start from the beginning.
      this.events.value = [];
      this._place = null;
      this.isComplete.value = false;
      this._mustReadUp = true;
    }
  }

  async _readOlder() {
    const all = this.events.value;
    if (!all.length || all.length >= OWN_MAX || all[0].seq <= 1) {
      this.isComplete.value = true;
      return;
    }
    const { events } = await this._page({ before: all[0].cursor });
    const older = events.filter((event) => event.seq < all[0].seq);
    if (older.length) this.events.value = older.concat(this.events.value);
    else this.isComplete.value = true;
  }

  /** @param {Record<string, any>} query */
  _page(query) {
    const path = `v1/sessions/${encodeURIComponent(this.id)}/events`;
    return this._patience.until(
      () => this._get(path, { frames: 0, limit: PAGE, ...query }),
      (problem) => {
        this.problem.value = problem;
      },
    );
  }
}
