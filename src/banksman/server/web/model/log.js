// A session's events: a window of its log without holes, which its end follows live if it is at the end.
//
// The log is dense: each event's seq is one more than the one before it. So a hole is seen, and is read by a page
// before anything after it is shown; and what comes twice is seen, and is dropped. Everything that changes the window
// goes one after another through one queue (`_do`), so that no two reads can put their events into each other.
//
// Live events come at any time. They wait until what is being read is there. If too many wait they are thrown away, and
// read again by pages: the log keeps them, we need not.
//
// The window is bounded. What is added at one end beyond that is dropped at the other, and read again when somebody
// scrolls there. Retention may have taken the oldest events for good: that is `gap`.
// @ts-check
import { get as getPage, Problem } from "../net/api.js";
import { feed as theFeed } from "../net/feed.js";
import { Gone, Patience } from "./reading.js";
import { signal } from "./signal.js";

export const EVENTS_MAX = 20_000;
/** When there are too many, so many more than one are dropped: to drop is to show everything anew. */
const DROPPED_AT_ONCE = 4_000;
const OPENED_WITH = 400;
const PAGE = 1000;
const PENDING_MAX = 5_000;
/** Who has missed more than this begins at the end, and reads the rest when it is scrolled to. */
const MISSED_MAX = 5_000;
/** Before this is the end of any log: the largest number that JSON and everybody agree on. */
const END = Number.MAX_SAFE_INTEGER;

export class SessionLog {
  /**
   * @param {string} id
   * @param {{get?: typeof getPage, feed?: typeof theFeed}} [given] for tests
   */
  constructor(id, { get = getPage, feed = theFeed } = {}) {
    this.id = id;
    /** @type {any[]} oldest first, each seq one more than that before it */
    this.events = [];
    this.version = signal(0);
    /** @type {{kind: "reset" | "append" | "prepend", count: number}} what was done since `version` was told last */
    this.change = { kind: "reset", count: 0 };
    /** The window ends where the log does, and follows it. */
    this.isLive = signal(false);
    /** There is nothing before the window. */
    this.atStart = false;
    /** The seq of the last event there is, as far as it is known. */
    this.head = 0;
    /** @type {{value: {first: number, last: number} | null, subscribe: any}} what retention took */
    this.gap = signal(null);
    /** @type {{value: Problem | null, subscribe: any}} why it cannot be read */
    this.problem = signal(null);
    this.isReading = signal(false);

    this._get = get;
    this._patience = new Patience();
    this._isOver = false;
    this._isOpen = false;
    this._mustReadUp = false;
    /** @type {any[]} live ones that wait */
    this._pending = [];
    /** @type {Promise<any>} the end of the queue */
    this._queue = Promise.resolve();
    this._queued = 0;
    this._isTold = true;
    this.version.subscribe(() => {
      this._isTold = true;
    });
    this._offs = [
      feed.on((events) => this._hear(events)),
      feed.onBegin(() => this._begin()),
      feed.onGap((gap) => gap.session === this.id && this._setGap(gap.last)),
      feed.watch(id),
    ];
  }

  get first() {
    return this.events.length ? this.events[0].seq : 0;
  }

  get last() {
    return this.events.length ? this.events[this.events.length - 1].seq : 0;
  }

  /** The last events, and from then on live. */
  open() {
    this._isOpen = true;
    return this._do(() => this._readTail());
  }

  goLive() {
    return this._do(async () => {
      if (!this.isLive.value) await this._readTail();
    });
  }

  /** One page more before the window. */
  older() {
    return this._do(async () => {
      if (this.atStart || !this.events.length) return;
      const page = await this._page({ before: this.events[0].cursor });
      this._noteStart(page);
      // Nothing may have come in between but what is older: the window begins right after these, or they are not ours.
      const events = page.events.filter((event) => event.seq < this.first);
      if (!events.length || events[events.length - 1].seq !== this.first - 1) {
        this.atStart = true;
        this._touch("append", 0);
        return;
      }
      this.events = events.concat(this.events);
      this._touch("prepend", events.length);
      if (this.events.length > EVENTS_MAX) {
        this.events = this.events.slice(0, EVENTS_MAX - DROPPED_AT_ONCE);
        this.isLive.value = false;
        this._touch("reset", this.events.length);
      }
    });
  }

  /** One page more after the window, if it does not follow already. */
  newer() {
    return this._do(async () => {
      if (!this.isLive.value) await this._readOn();
    });
  }

  /**
   * The window is where this event is, if it is kept at all.
   * @param {number} seq
   */
  jump(seq) {
    return this._do(async () => {
      if (this.events.length && seq >= this.first && seq <= this.last) return;
      const half = PAGE / 2;
      const page = await this._page({ after: String(Math.max(0, seq - half)) });
      if (!page.events.length) return this._readTail();
      this._reset(page.events, false);
      if (page.gap) this._setGap(page.gap.last);
      this._noteEnd(page);
    });
  }

  close() {
    this._isOver = true;
    this._patience.stop();
    for (const off of this._offs.splice(0)) off();
    this._pending = [];
  }

  // -- what comes by itself -----------------------------------------------------------------------------------------

  /** @param {any[]} events of all sessions */
  _hear(events) {
    const ours = events.filter((event) => event.session === this.id);
    if (!ours.length || !this._isOpen) return;
    this.head = Math.max(this.head, ours[ours.length - 1].seq);
    this._pending.push(...ours);
    if (this._pending.length > PENDING_MAX) {
      this._pending = [];
      this._mustReadUp = true;
    }
    this._pump();
  }

  _begin() {
    this._patience.wake();
    if (!this._isOpen) return;
    this._mustReadUp = true;
    this._pump();
  }

  _pump() {
    if (this._queued) return; // Whoever is at it looks again at the end.
    if (!this._mustReadUp) {
      // The usual case, without a turn of the loop: the next ones, right after what is there.
      this._append();
      if (!this._pending.length) return;
    }
    this._do(async () => {}).catch(() => {}); // Its problem is shown; it is tried again at the next begin.
  }

  /** Takes what waits, as far as it goes on where the window ends. What is left is after a hole. */
  _append() {
    const pending = this._pending;
    this._pending = [];
    if (!this.isLive.value) return; // Somebody reads elsewhere: these are read when they are scrolled to.
    /** @type {any[]} */
    const more = [];
    let last = this.last;
    for (const [index, event] of pending.entries()) {
      if (event.seq <= last) continue;
      if (event.seq !== last + 1) {
        this._pending = pending.slice(index);
        break;
      }
      more.push(event);
      last = event.seq;
    }
    this._add(more);
  }

  /** After everything that was done: what is missing, and what waits. */
  async _catchUp() {
    while (!this._isOver && (this._mustReadUp || this._pending.length)) {
      if (this._mustReadUp) {
        this._mustReadUp = false;
        if (this.isLive.value) await this._readUp();
      }
      this._append();
      if (this._pending.length) this._mustReadUp = true;
    }
  }

  // -- reading ------------------------------------------------------------------------------------------------------

  async _readTail() {
    // What comes from now on waits, so that between this page and the first live one there can be no hole unseen.
    const page = await this._page({ before: END, limit: OPENED_WITH });
    this._noteStart(page);
    this._reset(page.events, true);
  }

  /** From a live window's end to the head. */
  async _readUp() {
    if (!this.events.length) return this._readTail();
    for (let page; ; ) {
      const { last } = this;
      page = await this._after();
      if (!page) return;
      if (page.gap || seqOf(page.head) - last > MISSED_MAX) return this._readTail();
      this._add(page.events.filter((event) => event.seq > this.last));
      if (this.last >= seqOf(page.head) || !page.events.length) return;
    }
  }

  /** One page after a window that is not live. */
  async _readOn() {
    const page = await this._after();
    if (!page) return;
    if (page.gap) return void this._reset(page.events, false);
    const events = page.events.filter((event) => event.seq > this.last);
    this.events = this.events.concat(events);
    this._touch("append", events.length);
    this._noteEnd(page);
    this._dropOldest();
  }

  /** The page after the window; null: the store's history is another one now, and the window was read anew. */
  async _after() {
    try {
      return await this._page({ after: this.events.length ? this.events[this.events.length - 1].cursor : "0" });
    } catch (error) {
      if (!(error instanceof Problem) || error.status !== 410) throw error;
      await this._readTail();
      return null;
    }
  }

  /** @param {Record<string, any>} query */
  async _page(query) {
    const path = `v1/sessions/${encodeURIComponent(this.id)}/events`;
    const page = await this._patience.until(
      () => this._get(path, { partial: 1, limit: PAGE, ...query }),
      (problem) => {
        this.problem.value = problem;
      },
    );
    this.head = Math.max(seqOf(page.head), this._pending.at(-1)?.seq ?? 0);
    return page;
  }

  // -- the window ---------------------------------------------------------------------------------------------------

  /**
   * @param {any[]} events
   * @param {boolean} isLive
   */
  _reset(events, isLive) {
    this.events = events;
    this.isLive.value = isLive;
    if (!isLive) this.atStart = this.first <= 1;
    this._touch("reset", events.length);
  }

  /** @param {any[]} events right after the window, which is live */
  _add(events) {
    if (!events.length) return;
    this.events.push(...events);
    this._touch("append", events.length);
    this._dropOldest();
  }

  _dropOldest() {
    if (this.events.length <= EVENTS_MAX) return;
    this.events = this.events.slice(this.events.length - EVENTS_MAX + DROPPED_AT_ONCE);
    this.atStart = false;
    this._touch("reset", this.events.length);
  }

  /** @param {any} page that was read with `before` */
  _noteStart(page) {
    const first = seqOf(page.first);
    const begin = page.events.length ? page.events[0].seq : 0;
    this.atStart = !page.events.length || begin <= Math.max(first, 1);
    if (first > 1) this._setGap(first - 1);
  }

  /** @param {any} page after which there may be nothing */
  _noteEnd(page) {
    if (this.last >= seqOf(page.head)) this.isLive.value = true;
  }

  /** @param {number} last the last one that retention took */
  _setGap(last) {
    if (last > (this.gap.value?.last ?? 0)) this.gap.value = { first: 1, last };
    if (this.events.length && this.first <= last + 1) this.atStart = true;
  }

  /**
   * @param {"reset" | "append" | "prepend"} kind
   * @param {number} count
   */
  _touch(kind, count) {
    if (this._isTold) this.change = { kind, count };
    else if (this.change.kind === kind && kind !== "reset") this.change = { kind, count: this.change.count + count };
    else this.change = { kind: "reset", count: this.events.length };
    this._isTold = false;
    this.version.value += 1;
  }

  /**
   * One after another. A problem is shown, and thrown to whoever has asked.
   * @param {() => Promise<any>} work
   */
  _do(work) {
    this._queued += 1;
    this.isReading.value = true;
    const done = this._queue.then(async () => {
      try {
        if (this._isOver) return;
        await work();
        await this._catchUp();
      } catch (error) {
        if (error instanceof Gone || this._isOver) return;
        if (error instanceof Problem) this.problem.value = error;
        throw error;
      } finally {
        this._queued -= 1;
        if (!this._queued) this.isReading.value = false;
      }
    });
    this._queue = done.catch(() => {});
    return done;
  }
}

/** @param {string | null | undefined} cursor "epoch.seq", or a bare seq */
export function seqOf(cursor) {
  return cursor ? Number(cursor.slice(cursor.indexOf(".") + 1)) : 0;
}
