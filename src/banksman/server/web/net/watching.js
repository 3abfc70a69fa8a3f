// Which sessions' frames anybody wants to see: each tab's wishes, and all of them together.
//
// Own kinds come of every session; frames (what the agent says, the most by far) only of those that a tab shows.
// A wish that is gone costs nothing but bytes, so that only a new one is reason to open the stream anew.
// @ts-check

/** As many as an address has room for. Whoever is beyond it still gets everything by pages, when an own kind comes. */
export const WATCHED_MAX = 200;

export class Watching {
  constructor() {
    /** @type {Map<string, string[]>} By tab; the one that has changed last is last. */
    this._byTab = new Map();
  }

  /**
   * @param {string} tab
   * @param {string[]} sessions
   */
  set(tab, sessions) {
    this._byTab.delete(tab);
    this._byTab.set(tab, [...sessions]);
  }

  /** @param {string} tab */
  drop(tab) {
    this._byTab.delete(tab);
  }

  /** @param {Set<string>} tabs who is left */
  keep(tabs) {
    for (const tab of this._byTab.keys()) if (!tabs.has(tab)) this._byTab.delete(tab);
  }

  /** @returns {Set<string>} the newest wishes, where there are too many */
  all() {
    const found = new Set([...this._byTab.values()].flat().reverse());
    return new Set([...found].slice(0, WATCHED_MAX));
  }
}
