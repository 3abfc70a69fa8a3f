// A window on the events of one session. It has no holes, and it follows the live end of the log.
//
// The log is dense: the seq of each event is one more than the seq before it. So a hole is visible,
// and a page fills it before any later event is shown. A duplicate is visible too, and is dropped.
// Every change of the window runs through one queue (`_do`), so that two reads cannot interleave
// their events.
//
// Live events arrive at any time. They wait until the current read is complete. If too many wait,
// they are dropped and read again by pages, because the log keeps them.
//
// The window is bounded. Beyond the bound, events added at one end push out events at the other
// end. These are read again when the user scrolls there. Retention may have deleted the oldest
// events for good: that is `gap`.
// @ts-check
import { get as getPage, Problem } from "../net/api.js";
import { feed as theFeed } from "../net/feed.js";
import { Gone, Patience } from "./reading.js";
import { signal } from "./signal.js";

export const EVENTS_MAX = 20_000;
/** The number of events dropped together when the window is full. Each drop redraws everything. */
const DROPPED_AT_ONCE = 4_000;
const OPENED_WITH = 400;
const PAGE = 1000;
const PENDING_MAX = 5_000;
/**
 * A reader that missed more than this restarts at the end, and reads the rest when the user
 * scrolls.
 */
const MISSED_MAX = 5_000;
/**
 * A seq after the end of any log: the largest integer that JSON and JavaScript represent exactly.
 */
const END = Number.MAX_SAFE_INTEGER;

export class SessionLog {
  /**
   * @param {string} id
   * @param {{get?: typeof getPage, feed?: typeof theFeed}} [given] replaced by tests
   */
  constructor(id, { get = getPage, feed = theFeed } = {}) {
    this.id = id;
    /** @type {any[]} oldest first; each seq is one more than the seq before it */
    this.events = [];
    this.version = signal(0);
    /**
     * @type {{kind: "reset" | "append" | "prepend", count: number}} the change since the last delivery of `version`
     */
    this.change = { kind: "reset", count: 0 };
    /** Whether the window ends at the end of the log and follows it. */
    this.isLive = signal(false);
    /** Whether the log has no events before the window. */
    this.atStart = false;
    /** The highest seq of the log that this reader knows of. */
    this.head = 0;
    /**
     * @type {{value: {first: number, last: number} | null, subscribe: any}} the seqs that retention deleted
     */
    this.gap = signal(null);
    /** @type {{value: Problem | null, subscribe: any}} why the log cannot be read */
    this.problem = signal(null);
    this.isReading = signal(false);

    this._get = get;
    this._patience = new Patience();
    this._isOver = false;
    this._isOpen = false;
    this._mustReadUp = false;
    /** @type {any[]} waiting live events */
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

  /** Read the last events, then follow the log live. */
  open() {
    this._isOpen = true;
    return this._do(() => this._readTail());
  }

  goLive() {
    return this._do(async () => {
      if (!this.isLive.value) await this._readTail();
    });
  }

  /** Read one more page before the window. */
  older() {
    return this._do(async () => {
      if (this.atStart || !this.events.length) return;
      const page = await this._page({ before: this.events[0].cursor });
      this._noteStart(page);
      // The page must end right before the window. Otherwise its events do not continue the window,
      // and the window counts as the start of the log.
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

  /** Read one more page after the window, unless it is live. */
  newer() {
    return this._do(async () => {
      if (!this.isLive.value) await this._readOn();
    });
  }

  /**
   * Move the window to this event, if the log still has it.
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

  // -- live events --------------------------------------------------------------------------------

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
    if (this._queued) return; // The running job appends them when it ends.
    if (!this._mustReadUp) {
      // The usual case, without a turn of the event loop: the next events, right after the window.
      this._append();
      if (!this._pending.length) return;
    }
    this._do(async () => {}).catch(() => {}); // The problem is shown. The next start of the stream retries.
  }

  /** Append the waiting events that continue the window. The rest comes after a hole. */
  _append() {
    const pending = this._pending;
    this._pending = [];
    if (!this.isLive.value) return; // The user reads elsewhere. These events are read when the user scrolls to them.
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

  /** After each job: read what is missing, then append what waits. */
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

  // -- reading ------------------------------------------------------------------------------------

  async _readTail() {
    // Events that arrive from now on wait. So a hole between this page and the first live event is
    // always seen.
    const page = await this._page({ before: END, limit: OPENED_WITH });
    this._noteStart(page);
    this._reset(page.events, true);
  }

  /** Read from the end of a live window to the head. */
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

  /** Read one page after a window that is not live. */
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

  /**
   * Read the page after the window. Returns null if the store has another history now; the window
   * was then read again from the start.
   */
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

  // -- the window ---------------------------------------------------------------------------------

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

  /** @param {any} page that may be the last one */
  _noteEnd(page) {
    if (this.last >= seqOf(page.head)) this.isLive.value = true;
  }

  /** @param {number} last the last seq that retention deleted */
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
   * Run jobs one after the other. A problem is shown, and thrown to the caller.
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
