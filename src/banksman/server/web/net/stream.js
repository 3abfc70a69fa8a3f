// One event stream to the server, kept up for as long as somebody wants it.
//
// It is a place in the order of the store's commits (the position), and it goes on from there however often the
// connection is lost. It says what it is doing at every moment. Three rules make it right:
//  - It has begun when the server has answered, and says so before anything that comes by it: what was committed before
//    can be read by pages, and what comes after comes by the stream.
//  - A timer only ever decides when it is tried again, and never whether: browsers slow the timers of a tab that nobody
//    sees, so everything that a timer would do is also done by a nudge (the tab is seen again, the network is back,
//    another tab asks).
//  - Whoever wants it opened anew, with other sessions, while it is being opened, waits for that: so a hundred wishes
//    are two requests, without a timer.
// @ts-check
import { Problem, problemOf } from "./api.js";
import { Parser } from "./sse.js";

/** The server says something every 15 s. Longer than two of these means that nobody is there. */
export const SILENCE_MILLISECONDS_MAX = 40_000;
/** Somebody looks: so long a silence is then reason enough to try another connection. */
const DOUBT_MILLISECONDS = 20_000;
/** A place that is so old is given up: all that was missed meanwhile is sooner read by pages, from its end. */
export const AWAY_MILLISECONDS_MAX = 60_000;
const OPENING_MILLISECONDS_MAX = 15_000;
const PAUSE_MILLISECONDS_FIRST = 250;
export const PAUSE_MILLISECONDS_MAX = 5_000;

/**
 * @typedef {{state: "connecting" | "live" | "waiting" | "offline" | "refused" | "ending", detail: string,
 *   retryAt: number | null}} State `retryAt`: when it is tried again, in milliseconds since 1970
 * @typedef {{events: any[], gaps: {session: string, first: number, last: number}[], from: string | null,
 *   position: string | null}} Batch what one piece of the network has brought; `from`: the position before it
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
   * }} given `position` null: at the end of what there is
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

  /** Ends it. Nothing is told after this. */
  stop() {
    this._isOver = true;
    this._connection?.abort();
    this._wake?.();
    return this._ended;
  }

  /** Opens it anew, from where it is, since something about it shall be otherwise. */
  reopen() {
    if (this._phase === "opening") this._isStale = true;
    else if (this._phase === "open") this._connection?.abort();
  }

  /** Somebody looks, or the network is back: what waits is done now, and what is doubtful is done again. */
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
      // We have let go of it ourselves, and know why.
      if (connection.signal.aborted && connection.signal.reason !== SILENT) return 0;
      return this._lost(error);
    } finally {
      stopWatching();
      connection.abort();
      this._phase = "pausing";
    }
  }

  /**
   * Lets go of a connection on which nothing is heard.
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
   * @returns {any} the server's last word, if it was one of them
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
    // Also when there is nothing in it: whoever listens hears that it lives, and where it is.
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
      // The store's history is another one: an older copy was put in its place. From its end, and all is read again.
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

  /** Longer each time, and not the same for all who have lost the same server. */
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
