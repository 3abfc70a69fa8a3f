// Prompts that were sent and are not in the log yet. Each is shown immediately, and only once.
//
// Each is identified by its idempotency key, which the log has too. So the order of the log and the
// response does not matter, nor the number of retries, nor an equal prompt of another user.
// @ts-check

import { signal } from "../model/signal.js";

export class Pending {
  constructor() {
    /** @type {{value: any[], subscribe: any}} as items of the transcript */
    this.list = signal([]);
    /** Keys that the log has. @type {Set<string>} */
    this.told = new Set();
  }

  /**
   * @param {{ask: string, prompt: any, text: string, images: any[], priority: string}} asked `ask`: its key
   */
  add(asked) {
    if (this.told.has(asked.ask)) return;
    const now = Date.now() / 1000;
    const item = {
      key: `pending:${asked.ask}`,
      kind: "prompt",
      turn: null,
      seq: Number.MAX_SAFE_INTEGER,
      at: now,
      asked: now,
      version: 0,
      state: "pending",
      attempt: 1,
      ...asked,
    };
    this.list.value = [...this.list.value, item];
  }

  /** @param {string} ask */
  drop(ask) {
    this.list.value = this.list.value.filter((item) => item.ask !== ask);
  }

  /** @param {any[]} events of the log; events that were passed before have no effect */
  settle(events) {
    for (const { kind, body } of events) {
      if (kind !== "turn.queued" || !body?.key || this.told.has(body.key)) continue;
      this.told.add(body.key);
      if (this.list.value.some((item) => item.ask === body.key)) this.drop(body.key);
    }
  }
}
