// Send asks until the server responds, one after the other, in the order in which they were
// written.
//
// The result of a request without a response is unknown. So the ask is sent again with the same key
// until a response arrives, also after a reload and after a visit to another session. It is shown
// as on its way all that time. Only a refused or withdrawn ask returns to the composer.
// @ts-check

import { outbox } from "../model/outbox.js";
import { randomId } from "../net/api.js";

/**
 * The longest pause between attempts while the server is away. A live connection ends the pause.
 */
const WAIT_MILLISECONDS_MAX = 5000;

export class Sending {
  /**
   * @param {any} context
   * @param {{refused: (ask: import("../model/outbox.js").Ask, error: any) => void, unanswered: (error: any) => void,
   *   answered: () => void, lost: (ask: import("../model/outbox.js").Ask) => void}} given
   */
  constructor(context, given) {
    this.context = context;
    this.given = given;
    this.isOver = false;
    /** @type {() => void} ends the wait for the server */
    this.wake = () => {};
    /** @type {Promise<void>} */
    this.last = Promise.resolve();
    for (const ask of outbox.of(context.id)) this.#show(ask);
    this.offs = [
      context.own.events.subscribe((/** @type {any[]} */ events) => outbox.settle(context.id, events)),
      context.own.isComplete.subscribe(() => this.#look()),
      context.feed.connection.subscribe(() => context.feed.connection.value.state === "live" && this.wake()),
    ];
  }

  destroy() {
    this.isOver = true;
    this.wake();
    for (const off of this.offs) off();
  }

  /** @param {{prompt: string|object[], text: string, images: any[], priority: string, onBusy: string}} asked */
  add(asked) {
    const ask = { key: randomId(), ...asked };
    const isKept = outbox.add(this.context.id, ask);
    if (!isKept && ask.images.length)
      this.context.say("This tab has no room to store the pictures: do not reload it before they are sent.", "info");
    this.#show(ask);
  }

  /** Stop sending all asks. An ask that has already arrived stays accepted. */
  takeBack() {
    const asks = outbox.of(this.context.id);
    for (const ask of asks) this.#forget(ask);
    this.wake();
    return asks;
  }

  /** @param {import("../model/outbox.js").Ask} ask */
  #show(ask) {
    const { prompt, text, images, priority } = ask;
    this.context.pending.add({ ask: ask.key, prompt: prompt ?? text, text, images, priority });
    if (prompt !== null) this.last = this.last.then(() => this.#send(ask));
  }

  /** @param {import("../model/outbox.js").Ask} ask */
  async #send(ask) {
    const { context } = this;
    const isWanted = () => !this.isOver && outbox.of(context.id).some(({ key }) => key === ask.key);
    while (isWanted()) {
      try {
        await context.actions.ask(context.id, /** @type {any} */ (ask));
        outbox.remove(context.id, ask.key);
        if (!this.isOver) this.given.answered();
        return;
      } catch (error) {
        // The view is closed, or the ask was withdrawn. The next visit to this session sends it
        // again and reports the result.
        if (!isWanted()) return;
        if (!isUnknown(error)) {
          this.#forget(ask);
          this.given.refused(ask, error);
          return;
        }
        this.given.unanswered(error);
        await this.#server();
      }
    }
  }

  #server() {
    return /** @type {Promise<void>} */ (
      new Promise((done) => {
        this.wake = done;
        setTimeout(done, WAIT_MILLISECONDS_MAX);
      })
    );
  }

  /**
   * For asks that cannot be sent again: once the whole log is known, it has the ask or it does not.
   */
  #look() {
    if (!this.context.own.isComplete.value) return;
    outbox.settle(this.context.id, this.context.own.events.value);
    for (const ask of outbox.of(this.context.id)) {
      if (ask.prompt !== null) continue;
      this.#forget(ask);
      this.given.lost(ask);
    }
  }

  /** @param {import("../model/outbox.js").Ask} ask */
  #forget(ask) {
    outbox.remove(this.context.id, ask.key);
    this.context.pending.drop(ask.key);
  }
}

/**
 * No response, or only one of a proxy in between: the request may have taken effect.
 * @param {any} error
 */
function isUnknown(error) {
  return error.status === 0 || error.status === 503 || (error.title === "NotOurs" && error.status >= 500);
}
