// Reading that must succeed in the end: what a model lacks is read until it is there, or nobody wants it any more.
//
// A page that cannot be read is tried again after a pause that grows, and at once when a stream begins, which is the
// sign that the server is there. What the server refuses (404, 422) is not tried again until then either: it is shown.
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
    /** @type {Set<() => void>} Of those who wait. Several may, for different things. */
    this._waiting = new Set();
  }

  /** Nobody wants it any more: whoever waits here gets `Gone`. */
  stop() {
    this._isOver = true;
    for (const wake of [...this._waiting]) wake();
  }

  /** The server is there. */
  wake() {
    this._wakes += 1;
    for (const wake of [...this._waiting]) wake();
  }

  /**
   * @template T
   * @param {() => Promise<T>} read
   * @param {(problem: Problem | null) => void} tell why it is not there yet; null: it is
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
      // What was on its way when the server came back may have failed for what was before.
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
 * Said by the server itself about what was asked: another try gets the same.
 * @param {Problem} problem
 */
function isFinal(problem) {
  return !(problem instanceof Unreachable) && ![401, 403, 408, 429, 500, 502, 503, 504].includes(problem.status);
}
