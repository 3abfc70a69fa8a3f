// Retry a read until it succeeds or until its caller stops it.
//
// A failed read is retried after a growing pause, and immediately when a stream starts, because the
// server is then reachable. A read that the server refuses (404, 422) is shown, and is retried only
// when a stream starts.
// @ts-check
import { Problem, Unreachable } from "../net/api.js";

const PAUSE_MILLISECONDS_FIRST = 300;
const PAUSE_MILLISECONDS_MAX = 10_000;

export class Gone extends Error {}

export class Patience {
  constructor() {
    this.pauseMilliseconds = PAUSE_MILLISECONDS_FIRST;
    this._isOver = false;
    this._wakes = 0;
    /**
     * @type {Set<() => void>} The wake functions of the sleeping callers. Several may sleep at the same time.
     */
    this._waiting = new Set();
  }

  /** Stop all reads. A waiting caller gets `Gone`. */
  stop() {
    this._isOver = true;
    for (const wake of [...this._waiting]) wake();
  }

  /** The server is reachable: retry now. */
  wake() {
    this._wakes += 1;
    for (const wake of [...this._waiting]) wake();
  }

  /**
   * @template T
   * @param {() => Promise<T>} read
   * @param {(problem: Problem | null) => void} tell reports why the read has not succeeded; null: it has
   * @returns {Promise<T>}
   */
  async until(read, tell) {
    for (let pause = this.pauseMilliseconds; ; pause = Math.min(pause * 2, PAUSE_MILLISECONDS_MAX)) {
      if (this._isOver) throw new Gone();
      const wakes = this._wakes;
      try {
        const found = await read();
        if (this._isOver) throw new Gone();
        tell(null);
        return found;
      } catch (error) {
        if (!(error instanceof Problem) || isFinal(error)) throw error;
        if (this._isOver) throw new Gone();
        tell(error);
      }
      // A read that was in flight when the server came back may have failed for the old reason.
      if (this._wakes === wakes) await this._sleep(pause);
    }
  }

  /** @param {number} milliseconds */
  _sleep(milliseconds) {
    return /** @type {Promise<void>} */ (
      new Promise((done) => {
        const wake = () => {
          clearTimeout(timer);
          this._waiting.delete(wake);
          done();
        };
        const timer = setTimeout(wake, milliseconds);
        this._waiting.add(wake);
      })
    );
  }
}

/**
 * Whether the server itself refused this request. A retry gets the same response.
 * @param {Problem} problem
 */
function isFinal(problem) {
  return !(problem instanceof Unreachable) && ![401, 403, 408, 429, 500, 502, 503, 504].includes(problem.status);
}
