// The hosts that share a store, as the server reports them. Empty for a store of one machine.
//
// The log has no event for a host that starts or stops. So the list is read at each start of a
// stream, and periodically while the page is visible and the list is not empty. A store of one
// machine does not become a shared store while a server runs.
// @ts-check
import { get as getOne, Problem } from "../net/api.js";
import { feed as theFeed } from "../net/feed.js";
import { signal } from "./signal.js";

const LOOK_MILLISECONDS = 5000;

export class Hosts {
  /** @param {{get?: typeof getOne, feed?: typeof theFeed}} [given] replaced by tests */
  constructor({ get = getOne, feed = theFeed } = {}) {
    /** @type {{value: any[], subscribe: any}} */
    this.list = signal([]);
    this._get = get;
    this._feed = feed;
    this._isReading = false;
    /** @type {(() => void)[]} */
    this._offs = [];
  }

  start() {
    if (this._offs.length) return;
    const timer = setInterval(() => {
      const isLookedAt = globalThis.document?.visibilityState === "visible";
      if (isLookedAt && this.list.value.length) void this.refresh();
    }, LOOK_MILLISECONDS);
    this._offs = [this._feed.onBegin(() => void this.refresh()), () => clearInterval(timer)];
  }

  stop() {
    for (const off of this._offs.splice(0)) off();
  }

  /**
   * At most one read at a time. A failed read is ignored: the next one brings the current state.
   */
  async refresh() {
    if (this._isReading) return;
    this._isReading = true;
    try {
      this.list.value = (await this._get("v1/hosts")).hosts;
    } catch (error) {
      // A server that is older than the page has no hosts route.
      if (error instanceof Problem && error.status === 404) this.list.value = [];
    } finally {
      this._isReading = false;
    }
  }
}

export const hosts = new Hosts();

/**
 * Summarize all hosts in one line. Front ends take no sessions and are not counted.
 * @param {any[]} all
 */
export function summaryOf(all) {
  const taking = all.filter((host) => host.room > 0);
  const used = taking.reduce((sum, host) => sum + host.used, 0);
  const room = taking.reduce((sum, host) => sum + host.room, 0);
  const draining = taking.filter((host) => host.draining).length;
  const words = [`${taking.length} ${taking.length === 1 ? "host" : "hosts"}`, `${used} of ${room} places taken`];
  return [...words, draining ? `${draining} draining` : ""].filter(Boolean).join(", ");
}

/**
 * Describe the state of one host in a few words.
 * @param {any} host
 */
export function stateOf(host) {
  if (host.draining) return "draining";
  if (!host.room) return host.front === false ? "program" : "front end";
  return `${host.used} of ${host.room}`;
}
