// The sessions whose frames are wanted: the set of each tab, and the union of all tabs.
//
// The stream carries the own events of every session. It carries frames (the output of the agent,
// most of the volume) only for sessions that a tab shows. A stale entry costs only bytes, so only a
// new session is a reason to reopen the stream.
// @ts-check

/**
 * As many as fit in a URL. Sessions beyond this get their frames by pages, when an own event
 * arrives.
 */
export const WATCHED_MAX = 200;

export class Watching {
  constructor() {
    /** @type {Map<string, string[]>} By tab; the tab that changed last is last. */
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

  /** @param {Set<string>} tabs the tabs that are alive */
  keep(tabs) {
    for (const tab of this._byTab.keys()) if (!tabs.has(tab)) this._byTab.delete(tab);
  }

  /** @returns {Set<string>} the newest sessions, if there are too many */
  all() {
    const found = new Set([...this._byTab.values()].flat().reverse());
    return new Set([...found].slice(0, WATCHED_MAX));
  }
}
