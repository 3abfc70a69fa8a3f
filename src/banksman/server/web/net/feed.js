// One stream for all tabs: whoever leads reads it and passes it on, and the others hear it from there.
//
// What holds, and why:
//  - Nothing is lost. Every batch says from which position it goes on. Whoever stands elsewhere has missed something
//    (it was frozen, the leader has changed in between) and begins: all that hold state read up to the head by pages,
//    once. So it does at each begin of a stream. That is the one way in which anything is ever made good.
//  - Nothing comes twice to a person: an event has a seq, and who holds state drops what it has.
//  - A leader that was deposed, and does not know it yet, is not listened to: each has a term, and the highest counts.
//  - Whether somebody leads is found by asking: a leader that has said nothing for long is asked, and if it does not
//    answer either, deposed. Clocks are only compared, and a timer that is late makes this late and not wrong.
// Where there are no Web Locks (a page without TLS that is not on the loopback) each tab leads itself.
// @ts-check
import { signal } from "../model/signal.js";
import { randomId, withQuery } from "./api.js";
import { Election } from "./leader.js";
import { fetchWithToken } from "./page_token.js";
import { AWAY_MILLISECONDS_MAX, CONNECTING, Stream } from "./stream.js";
import { Watching } from "./watching.js";

/** A stream says something every 15 s, and so does its leader. */
const LEADER_SILENCE_MILLISECONDS_MAX = 20_000;
/** How long an answer of a leader may take. A tab that is busy drawing is no reason to depose it. */
const ANSWER_MILLISECONDS_MAX = 4_000;
const LOOK_MILLISECONDS = 1_000;

/** @typedef {import("./stream.js").State & {isLeader: boolean}} Connection */

/** What the page runs in; tests give their own. */
function surroundings() {
  return {
    fetch: fetchWithToken,
    base: "",
    // Two servers may be at one address, below two prefixes of a proxy.
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
  /** @param {Partial<ReturnType<typeof surroundings>>} [given] all of it, where there is no page */
  constructor(given) {
    this._given = given;
    /** @type {{value: Connection, subscribe: (fn: (value: Connection) => void) => () => void}} */
    this.connection = signal({ ...CONNECTING, isLeader: false });
    this.tab = "";
    this._listeners = { events: new Set(), begin: new Set(), gaps: new Set() };
    /** @type {Map<string, number>} How many want it, by session. */
    this._wanted = new Map();
    this._isTelling = false;
    this._watching = new Watching();
    /** @type {Set<string>} Whose frames the stream was opened for. */
    this._opened = new Set();
    /** @type {Stream | null} */
    this._stream = null;
    /** @type {Election | null} */
    this._election = null;
    /** @type {BroadcastChannel | null} */
    this._channel = null;
    this._term = 0;
    /** @type {string | null} Where this tab stands. */
    this._position = null;
    this._hasBegun = false;
    this._heardAt = 0;
    /** @type {number | null} Since when an answer of the leader is awaited. */
    this._askedAt = null;
    /** @type {(() => void)[]} */
    this._offs = [];
    this._isStarted = false;
  }

  // -- for everybody ------------------------------------------------------------------------------------------------

  start() {
    if (this._isStarted) return;
    this._isStarted = true;
    this._in = { ...(this._given ? null : surroundings()), ...this._given };
    this._listenToBrowser();
    this._join();
  }

  /** Leaves the others, for good. */
  stop() {
    for (const off of this._offs.splice(0)) off();
    this._leave();
    this._isStarted = false;
  }

  /**
   * This session's frames are wanted.
   * @param {string} session
   * @returns {() => void} they are no longer
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

  /** @param {(events: any[]) => void} fn gets what comes live, in order */
  on(fn) {
    return listen(this._listeners.events, fn);
  }

  /**
   * A stream has begun, or something was missed: read up to the head, once. `isContinued`: the stream went on where it
   * was, so that no own kind of any session was missed; frames of a session that was not watched before may be.
   * @param {(begun: {isContinued: boolean}) => void} fn
   */
  onBegin(fn) {
    return listen(this._listeners.begin, fn);
  }

  /** @param {(gap: {session: string, first: number, last: number}) => void} fn retention has taken these */
  onGap(fn) {
    return listen(this._listeners.gaps, fn);
  }

  /** Somebody looks, the network is back, or somebody was let in: what waits is tried now. */
  nudge() {
    if (this._stream) this._stream.nudge();
    else this._ask("nudge");
  }

  // -- coming and going ---------------------------------------------------------------------------------------------

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
    if (this._election !== election) return; // Gone again meanwhile.
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
    // A server on this machine is still there, and one elsewhere would be taken for live until the silence is too long.
    // Another connection tells which it is.
    on(window, "offline", () => this._stream?.reopen());
    on(document, "visibilitychange", () => document?.visibilityState === "visible" && this._comeBack());
    on(document, "resume", () => this._comeBack());
    // A page that is kept to be gone back to must not keep the lock, and is not heard by anybody.
    on(window, "pagehide", () => this._leave());
    on(window, "pageshow", (event) => event.persisted && !this._channel && !this._stream && this._join());
    const timer = setInterval(() => this._look(), this._in.look_milliseconds);
    this._offs.push(() => clearInterval(timer));
  }

  /** After sleep, or out of sight: nobody knows what was missed, and to read once costs little. */
  _comeBack() {
    this.nudge();
    if (this._hasBegun) this._begin({ isContinued: false });
  }

  // -- leading ------------------------------------------------------------------------------------------------------

  _lead() {
    this._term = Math.max(this._in.now(), this._term + 1);
    this._watching.set(this.tab, [...this._wanted.keys()]);
    this._askedAt = null;
    // Those that were here before us are asked; what they want comes while the stream is being opened.
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

  /** We lead no longer, and hear from now on. */
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

  /** @param {boolean} [isExact] also when there are only fewer than before */
  _openAnewIfNeeded(isExact = false) {
    const wanted = this._watching.all();
    const isNew = [...wanted].some((session) => !this._opened.has(session));
    if (this._stream && (isNew || (isExact && wanted.size < this._opened.size))) this._stream.reopen();
  }

  /** Now and then, when there is nothing else: whoever is gone watches nothing. */
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

  // -- hearing ------------------------------------------------------------------------------------------------------

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
    // While we lead, another can only be one that was deposed, or the one that has deposed us: that the lock tells.
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
    // Somebody was not listened to for a while, and something may have been said meanwhile.
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

  /** Is there a leader, and does it do what it should? */
  _look() {
    if (this._stream || !this._election) return;
    const now = this._in.now();
    const { retryAt } = this.connection.value;
    if (this._askedAt !== null) {
      if (now - this._askedAt <= this._in.answer_milliseconds_max) return;
      this._askedAt = now;
      this._election.steal();
    } else if (now - this._heardAt > this._in.leader_silence_milliseconds_max) this._ask("ping");
    // Its timers may be slowed down, and ours are not.
    else if (retryAt !== null && now > retryAt + LOOK_MILLISECONDS) this._ask("nudge");
  }

  /** @param {"ping" | "nudge"} type */
  _ask(type) {
    if (!this._channel) return;
    this._askedAt ??= this._in.now();
    this._post({ type, tab: this.tab });
  }

  // -- saying -------------------------------------------------------------------------------------------------------

  /** Once for all changes of a moment: to go from one session to the next is one. */
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
      // One that fails keeps nobody else from hearing.
      (globalThis.reportError ?? console.error)(error);
    }
  }
}

export const feed = new Feed();
