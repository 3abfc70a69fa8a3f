// Prompts that were sent and that the log has not told of yet: so that what one has sent is seen at once, and seen
// once.
//
// Each is known by the key that it was sent with, which the log has too. So it does not matter whether the log or the
// answer tells of it first, nor how often it was sent, nor whether another has said the same.
// @ts-check

import { signal } from "../model/signal.js";

export class Pending {
  constructor() {
    /** @type {{value: any[], subscribe: any}} as items of the transcript */
    this.list = signal([]);
    /** Keys that the log has told of. @type {Set<string>} */
    this.told = new Set();
  }

  /** @param {{ask: string, prompt: any, text: string, images: any[], priority: string}} asked `ask`: its key */
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

  /** @param {any[]} events whichever the log has told of; those that came before are told again, and do nothing */
  settle(events) {
    for (const { kind, body } of events) {
      if (kind !== "turn.queued" || !body?.key || this.told.has(body.key)) continue;
      this.told.add(body.key);
      if (this.list.value.some((item) => item.ask === body.key)) this.drop(body.key);
    }
  }
}
