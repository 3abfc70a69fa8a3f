// Which tab has the stream: the one that holds a lock of the browser.
//
// A browser allows six connections to one server, so ten tabs with a stream each would stand still. The lock is given
// by the browser to one tab at a time, and to the next one in the moment in which that tab is gone, however it went.
// A tab that holds it and does not act (browsers freeze tabs that nobody sees) is deposed: the lock can be stolen, and
// its old holder is told so when it acts again.
//
// Each tab also holds a lock of its own name for as long as it lives, by which the others know who is left.
// @ts-check

const TAB = "banksman-tab-";

export class Election {
  /**
   * @param {{locks: LockManager, name: string, tab: string, onElected: () => void, onDeposed: () => void}} given
   *   `onElected` and `onDeposed` take turns
   */
  constructor({ locks, name, tab, onElected, onDeposed }) {
    this._locks = locks;
    this._name = name;
    this._tab = tab;
    this._onElected = onElected;
    this._onDeposed = onDeposed;
    this._isOver = false;
    this.isLeader = false;
    /** @type {AbortController | null} Of the request that waits. */
    this._waiting = null;
    /** @type {(() => void) | null} */
    this._release = null;
    /** @type {object | null} Whose turn it is to wait and to hold: each has one, and one that was replaced ends. */
    this._turn = null;
    /** @type {(() => void) | null} */
    this._releaseTab = null;
  }

  /** Resolves when this tab is known to live. Whoever says hello before might be dropped as one that is gone. */
  async start() {
    await this._holdTab();
    this._run(false);
  }

  /** For good: whoever waits is elected. */
  stop() {
    this._isOver = true;
    this._waiting?.abort();
    this._release?.();
    this._releaseTab?.();
  }

  /** Takes the lock from whoever has it. */
  steal() {
    if (this._isOver || this.isLeader) return;
    this._waiting?.abort();
    this._run(true);
  }

  /** @returns {Promise<Set<string>>} the tabs that live */
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
        // A request that steals does not wait, so there is nothing to be aborted.
        const how = steal ? { steal } : { signal: waiting.signal };
        await this._locks.request(this._name, how, () => this._lead(turn));
      } catch {
        // Stolen from us, or we do not wait any more. Both are told by what is so below.
      }
      if (this._turn === turn) this._resign();
    }
  }

  /**
   * @param {object} turn
   * @returns {Promise<void>} which lasts as long as we lead
   */
  _lead(turn) {
    return new Promise((release) => {
      // Given to us when we had just turned to stealing, or to going.
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
