// Elect the tab that reads the stream, by a Web Lock.
//
// A browser allows six connections to one server, so ten tabs with a stream each would block. The
// browser gives the lock to one tab at a time, and to the next tab as soon as that tab ends, for
// any reason. A holder that does not act (browsers freeze hidden tabs) is deposed: another tab
// steals the lock, and the old holder learns it when it runs again.
//
// Each tab also holds a lock with its own name while it lives. The other tabs use these locks to
// see which tabs are alive.
// @ts-check

const TAB = "banksman-tab-";

export class Election {
  /**
   * @param {{locks: LockManager, name: string, tab: string, onElected: () => void, onDeposed: () => void}} given
   *   `onElected` and `onDeposed` are called alternately
   */
  constructor({ locks, name, tab, onElected, onDeposed }) {
    this._locks = locks;
    this._name = name;
    this._tab = tab;
    this._onElected = onElected;
    this._onDeposed = onDeposed;
    this._isOver = false;
    this.isLeader = false;
    /** @type {AbortController | null} The controller of the waiting request. */
    this._waiting = null;
    /** @type {(() => void) | null} */
    this._release = null;
    /** @type {object | null} Identifies the current `_run` loop. A loop that was replaced ends. */
    this._turn = null;
    /** @type {(() => void) | null} */
    this._releaseTab = null;
  }

  /**
   * Resolves when the other tabs can see that this tab is alive. A message sent earlier could be
   * dropped as the message of a dead tab.
   */
  async start() {
    await this._holdTab();
    this._run(false);
  }

  /** Stop for good. The next waiting tab is elected. */
  stop() {
    this._isOver = true;
    this._waiting?.abort();
    this._release?.();
    this._releaseTab?.();
  }

  /** Take the lock from its holder. */
  steal() {
    if (this._isOver || this.isLeader) return;
    this._waiting?.abort();
    this._run(true);
  }

  /** @returns {Promise<Set<string>>} the tabs that are alive */
  async living() {
    const { held } = await this._locks.query();
    const names = (held ?? []).map((lock) => lock.name ?? "").filter((name) => name.startsWith(TAB));
    return new Set(names.map((name) => name.slice(TAB.length)));
  }

  _holdTab() {
    return /** @type {Promise<void>} */ (
      new Promise((isHeld) => {
        const hold = () => {
          isHeld();
          return /** @type {Promise<void>} */ (
            new Promise((release) => {
              this._releaseTab = release;
            })
          );
        };
        this._locks.request(TAB + this._tab, hold).catch(() => isHeld());
      })
    );
  }

  /** @param {boolean} isStolen */
  async _run(isStolen) {
    const turn = (this._turn = {});
    for (let steal = isStolen; this._turn === turn && !this._isOver; steal = false) {
      const waiting = (this._waiting = new AbortController());
      try {
        // A request that steals does not wait, so there is nothing to abort.
        const how = steal ? { steal } : { signal: waiting.signal };
        await this._locks.request(this._name, how, () => this._lead(turn));
      } catch {
        // The lock was stolen, or the wait was aborted. The code below checks the state, so both
        // cases end there.
      }
      if (this._turn === turn) this._resign();
    }
  }

  /**
   * @param {object} turn
   * @returns {Promise<void>} pending while this tab leads
   */
  _lead(turn) {
    return new Promise((release) => {
      // The lock arrived after this tab began to steal it or to stop.
      if (this._isOver || this._turn !== turn) {
        release();
        return;
      }
      this._release = release;
      this.isLeader = true;
      this._onElected();
    });
  }

  _resign() {
    this._release = null;
    if (!this.isLeader) return;
    this.isLeader = false;
    this._onDeposed();
  }
}
