// Share one event stream between all tabs: the leader tab reads it and broadcasts it to the others.
//
// Guarantees, and why they hold:
//  - No event is lost. Every batch carries the position before it. A tab with another position has
//    missed something (it was frozen, or the leader changed). It then begins again: every model
//    reads by pages up to the head, once. The same happens at each start of a stream. There is no
//    other repair.
//  - No event is shown twice. Each event has a seq, and the models drop duplicates.
//  - A deposed leader that does not know it yet is ignored. Each leader has a term, and the highest
//    term counts.
//  - Tabs detect a dead leader by a ping. A leader that is silent for too long gets a ping. Without
//    a reply it is deposed. Clocks are only compared, so a late timer delays this but does not make
//    it wrong.
// Without Web Locks (a page without TLS that is not on the loopback) each tab is its own leader.
// @ts-check
import { signal } from "../model/signal.js";
import { randomId, withQuery } from "./api.js";
import { Election } from "./leader.js";
import { fetchWithToken } from "./page_token.js";
import { AWAY_MILLISECONDS_MAX, CONNECTING, Stream } from "./stream.js";
import { Watching } from "./watching.js";

/** The stream carries a message at least every 15 s, and so does its leader. */
const LEADER_SILENCE_MILLISECONDS_MAX = 20_000;
/** The time for a leader's reply. A tab that is busy drawing must not be deposed. */
const ANSWER_MILLISECONDS_MAX = 4_000;
const LOOK_MILLISECONDS = 1_000;

/** @typedef {import("./stream.js").State & {isLeader: boolean}} Connection */

/** The environment of the page. Tests pass another one. */
function surroundings() {
  return {
    fetch: fetchWithToken,
    base: "",
    // Two servers may share one origin, behind two prefixes of a proxy.
    scope: new URL(".", document.baseURI).pathname,
    locks: navigator.locks,
    window: /** @type {EventTarget | null} */ (window),
    document: /** @type {(EventTarget & {visibilityState: string}) | null} */ (document),
    now: Date.now,
    look_milliseconds: LOOK_MILLISECONDS,
    answer_milliseconds_max: ANSWER_MILLISECONDS_MAX,
    leader_silence_milliseconds_max: LEADER_SILENCE_MILLISECONDS_MAX,
  };
}

export class Feed {
  /** @param {Partial<ReturnType<typeof surroundings>>} [given] complete if there is no page */
  constructor(given) {
    this._given = given;
    /** @type {{value: Connection, subscribe: (fn: (value: Connection) => void) => () => void}} */
    this.connection = signal({ ...CONNECTING, isLeader: false });
    this.tab = "";
    this._listeners = { events: new Set(), begin: new Set(), gaps: new Set() };
    /** @type {Map<string, number>} The number of watchers, by session. */
    this._wanted = new Map();
    this._isTelling = false;
    this._watching = new Watching();
    /** @type {Set<string>} The sessions whose frames the open stream carries. */
    this._opened = new Set();
    /** @type {Stream | null} */
    this._stream = null;
    /** @type {Election | null} */
    this._election = null;
    /** @type {BroadcastChannel | null} */
    this._channel = null;
    this._term = 0;
    /** @type {string | null} The position of this tab. */
    this._position = null;
    this._hasBegun = false;
    this._heardAt = 0;
    /** @type {number | null} Since when this tab waits for a reply of the leader. */
    this._askedAt = null;
    /** @type {(() => void)[]} */
    this._offs = [];
    this._isStarted = false;
  }

  // -- public methods -----------------------------------------------------------------------------

  start() {
    if (this._isStarted) return;
    this._isStarted = true;
    this._in = { ...(this._given ? null : surroundings()), ...this._given };
    this._listenToBrowser();
    this._join();
  }

  /** Leave the other tabs for good. */
  stop() {
    for (const off of this._offs.splice(0)) off();
    this._leave();
    this._isStarted = false;
  }

  /**
   * Request the frames of this session.
   * @param {string} session
   * @returns {() => void} ends the request
   */
  watch(session) {
    this._wanted.set(session, (this._wanted.get(session) ?? 0) + 1);
    this._tellWhatWeWatch();
    let isReleased = false;
    return () => {
      if (isReleased) return;
      isReleased = true;
      const left = (this._wanted.get(session) ?? 1) - 1;
      if (left) this._wanted.set(session, left);
      else this._wanted.delete(session);
      this._tellWhatWeWatch();
    };
  }

  /** @param {(events: any[]) => void} fn gets live events, in order */
  on(fn) {
    return listen(this._listeners.events, fn);
  }

  /**
   * `fn` is called when a stream has started or events were missed. It reads up to the head, once.
   * `isContinued`: the stream resumed from its position. Then no own event of any session was
   * missed. Frames may be missing for a session that was not watched before.
   * @param {(begun: {isContinued: boolean}) => void} fn
   */
  onBegin(fn) {
    return listen(this._listeners.begin, fn);
  }

  /**
   * @param {(gap: {session: string, first: number, last: number}) => void} fn gets the seqs that retention deleted
   */
  onGap(fn) {
    return listen(this._listeners.gaps, fn);
  }

  /**
   * Retry now. Called when the tab becomes visible, when the network is back, and after a login.
   */
  nudge() {
    if (this._stream) this._stream.nudge();
    else this._ask("nudge");
  }

  // -- joining and leaving ------------------------------------------------------------------------

  async _join() {
    this.tab = randomId();
    this._heardAt = this._in.now();
    if (!this._in.locks) {
      this._lead();
      return;
    }
    const name = `banksman ${this._in.scope}`;
    this._channel = new BroadcastChannel(name);
    this._channel.onmessage = ({ data }) => this._hear(data);
    const election = (this._election = new Election({
      locks: this._in.locks,
      name,
      tab: this.tab,
      onElected: () => this._lead(),
      onDeposed: () => this._follow(),
    }));
    await election.start();
    if (this._election !== election) return; // The tab left during the await.
    this._askedAt = this._in.now();
    this._post({ type: "watching", tab: this.tab, sessions: [...this._wanted.keys()], isNew: true });
  }

  _leave() {
    this._post({ type: "bye", tab: this.tab });
    this._stream?.stop();
    this._stream = null;
    this._heardAt = this._in.now();
    const election = this._election;
    this._election = null;
    election?.stop();
    this._channel?.close();
    this._channel = null;
  }

  _listenToBrowser() {
    const { window, document } = this._in;
    const on = (target, type, fn) => {
      target?.addEventListener(type, fn);
      this._offs.push(() => target?.removeEventListener(type, fn));
    };
    on(window, "online", () => this.nudge());
    // A server on this machine is still reachable. A remote server would look live until the
    // silence limit. A new connection shows which case it is.
    on(window, "offline", () => this._stream?.reopen());
    on(document, "visibilitychange", () => document?.visibilityState === "visible" && this._comeBack());
    on(document, "resume", () => this._comeBack());
    // A page in the back/forward cache must not hold the lock, and gets no messages.
    on(window, "pagehide", () => this._leave());
    on(window, "pageshow", (event) => event.persisted && !this._channel && !this._stream && this._join());
    const timer = setInterval(() => this._look(), this._in.look_milliseconds);
    this._offs.push(() => clearInterval(timer));
  }

  /**
   * After sleep, or after being hidden, the tab may have missed messages. One read costs little.
   */
  _comeBack() {
    this.nudge();
    if (this._hasBegun) this._begin({ isContinued: false });
  }

  // -- the leader ---------------------------------------------------------------------------------

  _lead() {
    this._term = Math.max(this._in.now(), this._term + 1);
    this._watching.set(this.tab, [...this._wanted.keys()]);
    this._askedAt = null;
    // Ask the existing tabs for their sessions. The replies arrive while the stream opens.
    this._post({ type: "who", ...this._signed() });
    this._stream = new Stream({
      open: (position, aborted) => this._open(position, aborted),
      position: this._in.now() - this._heardAt > AWAY_MILLISECONDS_MAX ? null : this._position,
      onBegin: (begun) => {
        this._post({ type: "begin", ...begun, ...this._signed() });
        this._begin(begun);
      },
      onBatch: (batch) => {
        this._post({ type: "batch", ...batch, ...this._signed() });
        this._deliver(batch);
        if (!batch.events.length) this._sweep();
      },
      onState: (state) => {
        this._say({ ...state, isLeader: true });
        this._postState();
      },
      now: this._in.now,
    });
  }

  /** This tab has lost the leadership. It follows from now on. */
  _follow() {
    this._stream?.stop();
    this._stream = null;
    if (!this._election) return;
    this._heardAt = this._in.now();
    this._say({ ...this.connection.value, isLeader: false });
    this._post({ type: "watching", tab: this.tab, sessions: [...this._wanted.keys()], isNew: true });
  }

  /**
   * @param {string | null} position
   * @param {AbortSignal} aborted
   */
  _open(position, aborted) {
    this._opened = this._watching.all();
    const query = { partial: 1, frames_of: [...this._opened].sort().join(","), after: position ?? "now" };
    const path = this._in.base + withQuery("v1/events", query);
    return this._in.fetch(path, { headers: { Accept: "text/event-stream" }, signal: aborted, cache: "no-store" });
  }

  /** @param {boolean} [isExact] also reopen if the set only became smaller */
  _openAnewIfNeeded(isExact = false) {
    const wanted = this._watching.all();
    const isNew = [...wanted].some((session) => !this._opened.has(session));
    if (this._stream && (isNew || (isExact && wanted.size < this._opened.size))) this._stream.reopen();
  }

  /** Drop the sessions of closed tabs. Runs when a batch has no events. */
  async _sweep() {
    const living = await this._election?.living();
    if (!living || !this._stream) return;
    living.add(this.tab);
    this._watching.keep(living);
    this._openAnewIfNeeded(true);
  }

  _signed() {
    return { term: this._term, leader: this.tab };
  }

  _postState() {
    const { connection, _position: position, _hasBegun: hasBegun } = this;
    this._post({ type: "state", connection: connection.value, position, hasBegun, ...this._signed() });
  }

  // -- messages from other tabs -------------------------------------------------------------------

  /** @param {any} said by another tab */
  _hear(said) {
    if (said.type === "watching") this._watching.set(said.tab, said.sessions);
    else if (said.type === "bye") this._watching.drop(said.tab);
    if (said.leader) this._hearLeader(said);
    else if (this._stream) this._hearFollower(said);
  }

  /** @param {any} said */
  _hearFollower(said) {
    if (said.type === "watching") this._openAnewIfNeeded();
    if (said.type === "nudge") this._stream?.nudge();
    if (said.isNew || said.type === "ping" || said.type === "nudge") this._postState();
  }

  /** @param {any} said */
  _hearLeader(said) {
    // While this tab leads, another leader is either deposed or has deposed this tab. The lock
    // reports the second case.
    if (said.term < this._term || this._stream) return;
    this._term = said.term;
    this._heardAt = this._in.now();
    this._askedAt = null;
    if (said.type === "who") this._tellWhatWeWatch();
    else if (said.type === "begin") this._begin({ isContinued: said.isContinued && said.position === this._position });
    else if (said.type === "batch") this._deliver(said);
    else if (said.type === "state") {
      this._say({ ...said.connection, isLeader: false });
      if (said.hasBegun && (!this._hasBegun || said.position !== this._position)) this._begin({ isContinued: false });
    }
    if ("position" in said) this._position = said.position;
  }

  /** @param {import("./stream.js").Batch} batch */
  _deliver(batch) {
    // This tab ignored or missed messages, and events may have been among them.
    if (!this._hasBegun || batch.from !== this._position) this._begin({ isContinued: false });
    this._position = batch.position;
    for (const gap of batch.gaps) tell(this._listeners.gaps, gap);
    if (batch.events.length) tell(this._listeners.events, batch.events);
  }

  /** @param {{isContinued: boolean}} begun */
  _begin({ isContinued }) {
    this._hasBegun = true;
    tell(this._listeners.begin, { isContinued });
  }

  /** Check that there is a leader and that it does its work. */
  _look() {
    if (this._stream || !this._election) return;
    const now = this._in.now();
    const { retryAt } = this.connection.value;
    if (this._askedAt !== null) {
      if (now - this._askedAt <= this._in.answer_milliseconds_max) return;
      this._askedAt = now;
      this._election.steal();
    } else if (now - this._heardAt > this._in.leader_silence_milliseconds_max) this._ask("ping");
    // The browser may throttle the leader's timers, but not those of this tab.
    else if (retryAt !== null && now > retryAt + LOOK_MILLISECONDS) this._ask("nudge");
  }

  /** @param {"ping" | "nudge"} type */
  _ask(type) {
    if (!this._channel) return;
    this._askedAt ??= this._in.now();
    this._post({ type, tab: this.tab });
  }

  // -- messages to other tabs ---------------------------------------------------------------------

  /**
   * Send once for all changes of a microtask: switching from one session to another is one change.
   */
  _tellWhatWeWatch() {
    if (this._isTelling) return;
    this._isTelling = true;
    queueMicrotask(() => {
      this._isTelling = false;
      const sessions = [...this._wanted.keys()];
      this._watching.set(this.tab, sessions);
      this._post({ type: "watching", tab: this.tab, sessions });
      this._openAnewIfNeeded();
    });
  }

  /** @param {any} said to all other tabs */
  _post(said) {
    this._channel?.postMessage(said);
  }

  /** @param {Connection} connection */
  _say(connection) {
    const now = this.connection.value;
    const isSame = Object.keys(connection).every((name) => connection[name] === now[name]);
    if (!isSame) this.connection.value = connection;
  }
}

/**
 * @param {Set<any>} listeners
 * @param {any} fn
 */
function listen(listeners, fn) {
  const listener = { fn };
  listeners.add(listener);
  return () => void listeners.delete(listener);
}

/**
 * @param {Set<{fn: (value: any) => void}>} listeners
 * @param {any} value
 */
function tell(listeners, value) {
  for (const listener of [...listeners]) {
    try {
      if (listeners.has(listener)) listener.fn(value);
    } catch (error) {
      // A listener that throws must not stop the others.
      (globalThis.reportError ?? console.error)(error);
    }
  }
}

export const feed = new Feed();
