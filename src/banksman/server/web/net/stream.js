// One event stream from the server, reconnected until it is stopped.
//
// The stream has a position in the order of the store's commits, and it resumes from there after
// each lost connection. It reports its state at every moment. Three rules make it correct:
//  - The stream starts when the server has responded, and it reports the start before any of its
//    events. Earlier commits can be read by pages, and later ones arrive by the stream.
//  - A timer only decides when a retry happens, never whether. Browsers throttle the timers of
//    hidden tabs. So everything that a timer does, a nudge does too (the tab is visible again, the
//    network is back, another tab asks).
//  - A request to reopen the stream, with other sessions, waits while the stream is opening. So a
//    hundred requests to reopen cause two connections, without a timer.
// @ts-check
import { Problem, problemOf } from "./api.js";
import { Parser } from "./sse.js";

/**
 * The server sends a message every 15 s. After more than two of these intervals the connection is
 * dead.
 */
export const SILENCE_MILLISECONDS_MAX = 40_000;
/** When the tab becomes visible, a silence of this length is reason enough for a new connection. */
const DOUBT_MILLISECONDS = 20_000;
/** An older position is given up: reading by pages, from the end, is faster than catching up. */
export const AWAY_MILLISECONDS_MAX = 60_000;
const OPENING_MILLISECONDS_MAX = 15_000;
const PAUSE_MILLISECONDS_FIRST = 250;
export const PAUSE_MILLISECONDS_MAX = 5_000;

/**
 * @typedef {{state: "connecting" | "live" | "waiting" | "offline" | "refused" | "ending", detail: string,
 *   retryAt: number | null}} State `retryAt`: the time of the next attempt, in milliseconds since 1970
 * @typedef {{events: any[], gaps: {session: string, first: number, last: number}[], from: string | null,
 *   position: string | null}} Batch the messages of one network read; `from`: the position before them
 */

/** @type {State} */
export const CONNECTING = { state: "connecting", detail: "Connecting…", retryAt: null };
/** @type {State} */
const LIVE = { state: "live", detail: "Live", retryAt: null };

export class Stream {
  /**
   * @param {{
   *   open: (position: string | null, signal: AbortSignal) => Promise<Response>,
   *   position: string | null,
   *   onBegin: (begun: {position: string | null, isContinued: boolean}) => void,
   *   onBatch: (batch: Batch) => void,
   *   onState: (state: State) => void,
   *   now?: () => number,
   *   random?: () => number,
   *   isOnline?: () => boolean,
   * }} given `position` null: start at the end of the log
   */
  constructor(given) {
    this._given = given;
    this._now = given.now ?? Date.now;
    this._random = given.random ?? Math.random;
    this._isOnline = given.isOnline ?? (() => globalThis.navigator?.onLine !== false);
    this.position = given.position;
    this._isOver = false;
    this._failures = 0;
    this._heardAt = 0;
    this._placedAt = this._now();
    /** @type {"opening" | "open" | "pausing"} */
    this._phase = "pausing";
    this._isStale = false;
    /** @type {AbortController | null} */
    this._connection = null;
    /** @type {(() => void) | null} */
    this._wake = null;
    this._ended = this._run();
  }

  /** Stop the stream. No callback is called after this. */
  stop() {
    this._isOver = true;
    this._connection?.abort();
    this._wake?.();
    return this._ended;
  }

  /** Reconnect from the current position, because the request must change. */
  reopen() {
    if (this._phase === "opening") this._isStale = true;
    else if (this._phase === "open") this._connection?.abort();
  }

  /**
   * Retry now if the stream pauses, and reconnect if the connection has been silent. Called when
   * the tab becomes visible or the network is back.
   */
  nudge() {
    if (this._phase === "pausing") {
      this._failures = 0;
      this._wake?.();
    } else if (this._now() - this._heardAt > DOUBT_MILLISECONDS) this._connection?.abort();
  }

  async _run() {
    this._say(CONNECTING);
    while (!this._isOver) {
      const pause = await this._connect();
      if (this._isOver) return;
      if (pause) await this._sleep(pause);
    }
  }

  /**
   * One connection, from its request to its end.
   * @returns {Promise<number>} milliseconds until the next
   */
  async _connect() {
    const connection = (this._connection = new AbortController());
    this._phase = "opening";
    this._isStale = false;
    this._heardAt = this._now();
    if (this._now() - this._placedAt > AWAY_MILLISECONDS_MAX) this.position = null;
    const stopWatching = this._watch(connection);
    try {
      const answer = await this._given.open(this.position, connection.signal);
      if (!answer.ok) return this._refused(await problemOf(answer));
      if (this._isStale || this._isOver) return 0;
      this._phase = "open";
      this._given.onBegin({ position: this.position, isContinued: this.position !== null });
      return await this._read(answer);
    } catch (error) {
      if (this._isOver) return 0;
      // This object aborted the connection, for a known reason.
      if (connection.signal.aborted && connection.signal.reason !== SILENT) return 0;
      return this._lost(error);
    } finally {
      stopWatching();
      connection.abort();
      this._phase = "pausing";
    }
  }

  /**
   * Abort a connection that is silent for too long.
   * @param {AbortController} connection
   */
  _watch(connection) {
    const look = () => {
      const silence = this._now() - this._heardAt;
      const most = this._phase === "opening" ? OPENING_MILLISECONDS_MAX : SILENCE_MILLISECONDS_MAX;
      if (silence >= most) connection.abort(SILENT);
    };
    const timer = setInterval(look, OPENING_MILLISECONDS_MAX / 3);
    return () => clearInterval(timer);
  }

  /** @param {Response} answer */
  async _read(answer) {
    if (!answer.body || !answer.headers.get("content-type")?.startsWith("text/event-stream")) {
      throw new Problem({ detail: "this is not a Banksman server", hint: "check for a proxy in front of it" });
    }
    const reader = answer.body.getReader();
    const parser = new Parser();
    for (;;) {
      const { done, value } = await reader.read();
      if (this._isOver) return 0;
      if (done) throw new Problem({ detail: "the connection is lost" });
      this._heardAt = this._now();
      const closing = this._take(parser.push(value));
      if (closing) {
        const seconds = Number(closing.retry_seconds) || 1;
        return this._failed("ending", "The server is shutting down; the page reconnects when it is back.", seconds * 1000);
      }
    }
  }

  /**
   * @param {import("./sse.js").Message[]} messages
   * @returns {any} the `stream.closing` message, if it was one of them
   */
  _take(messages) {
    if (!messages.length) return null;
    /** @type {Batch} */
    const batch = { events: [], gaps: [], from: this.position, position: this.position };
    let isLive = false;
    let closing = null;
    for (const { id, event, data } of messages) {
      const said = JSON.parse(data);
      if (event === null) {
        batch.events.push(said);
        batch.position = id ?? batch.position;
      } else if (event === "stream.gap") batch.gaps.push(said);
      else if (event === "stream.closing") closing = said;
      else batch.position = said.head ?? batch.position; // stream.live, stream.heartbeat
      isLive ||= event === "stream.live";
    }
    this.position = batch.position;
    this._placedAt = this._now();
    // Also for an empty batch: the listener learns that the stream is alive, and its position.
    this._given.onBatch(batch);
    if (isLive) {
      this._failures = 0;
      this._say(LIVE);
    }
    return closing;
  }

  /** @param {Problem} problem */
  _refused(problem) {
    if (problem.status === 410) {
      // The store has another history: an older copy replaced it. Start at its end, and read
      // everything again.
      this.position = null;
      return this._failed("connecting", "The server has another history; the page reads it again.", 1);
    }
    if (problem.status === 401 || problem.status === 403) {
      const detail = "Not logged in. Run banksman page in a terminal, and open the link that it prints.";
      return this._failed("refused", problem.status === 401 ? detail : problem.message, PAUSE_MILLISECONDS_MAX);
    }
    return this._lost(problem);
  }

  /** @param {unknown} error */
  _lost(error) {
    if (!this._isOnline()) return this._failed("offline", "This machine is offline; the page reconnects when it is back.");
    const why = error instanceof Problem ? error.message : "the server cannot be reached";
    return this._failed("waiting", `${why[0].toUpperCase()}${why.slice(1)}; trying again.`);
  }

  /**
   * @param {State["state"]} state
   * @param {string} detail
   * @param {number} [milliseconds]
   */
  _failed(state, detail, milliseconds = this._pause()) {
    this._say({ state, detail, retryAt: this._now() + milliseconds });
    return milliseconds;
  }

  /**
   * Exponential backoff with jitter, so that the clients of one server do not reconnect together.
   */
  _pause() {
    const most = Math.min(PAUSE_MILLISECONDS_MAX, PAUSE_MILLISECONDS_FIRST * 2 ** this._failures);
    this._failures = Math.min(this._failures + 1, 10);
    return most * (0.5 + this._random() / 2);
  }

  /** @param {number} milliseconds */
  _sleep(milliseconds) {
    return /** @type {Promise<void>} */ (
      new Promise((done) => {
        const timer = setTimeout(done, milliseconds);
        this._wake = () => {
          clearTimeout(timer);
          done();
        };
      }).finally(() => {
        this._wake = null;
      })
    );
  }

  /** @param {State} state */
  _say(state) {
    if (!this._isOver) this._given.onState(state);
  }
}

const SILENT = new Problem({ detail: "the server is silent" });
