// Send asks until the server responds, one after the other, in the order in which they were
// written.
//
// The result of a request without a response is unknown. So the ask is sent again with the same key
// until a response arrives, also after a reload and after a visit to another session. It is shown
// as on its way all that time. Only a refused or withdrawn ask returns to the composer.
//
// The browser may log in as another person meanwhile. So each ask has the name of its caller, and
// it is sent only while the server knows the page by that name. The ask of another caller is
// dropped. An ask without a name, of an older page, is only looked up in the log.
// @ts-check

import { outbox } from "../model/outbox.js";
import { randomId } from "../net/api.js";

/**
 * The longest pause between attempts while the server is away. A live connection ends the pause.
 */
const WAIT_MILLISECONDS_MAX = 5000;

/** The caller of the page may have changed: read it again before the next attempt. */
class Doubtful extends Error {}

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
    /** Keys of the asks that this view sends. @type {Set<string>} */
    this.keys = new Set();
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
    const { caller } = this.context;
    const ask = { key: randomId(), ...asked, by: caller.me.value?.name };
    const isKept = outbox.add(this.context.id, ask);
    if (!isKept && ask.images.length)
      this.context.say("This tab has no room to store the pictures: do not reload it before they are sent.", "info");
    this.#show(ask, { token: caller.token });
  }

  /** Stop sending all asks. An ask that has already arrived stays accepted. */
  takeBack() {
    const asks = outbox.of(this.context.id);
    for (const ask of asks) this.#forget(ask);
    this.wake();
    return asks;
  }

  /**
   * @param {import("../model/outbox.js").Ask} ask
   * @param {{token: string|null}|null} [login] the login under which a new ask was written
   */
  #show(ask, login = null) {
    const { prompt, text, images, priority } = ask;
    this.context.pending.add({ ask: ask.key, prompt: prompt ?? text, text, images, priority });
    if (prompt === null || (ask.by === undefined && !login)) return;
    this.keys.add(ask.key);
    this.last = this.last.then(() => this.#send(ask, login));
  }

  /**
   * @param {import("../model/outbox.js").Ask} ask
   * @param {{token: string|null}|null} login
   */
  async #send(ask, login) {
    const { context } = this;
    const { caller } = context;
    const isWanted = () => !this.isOver && outbox.of(context.id).some(({ key }) => key === ask.key);
    let { by } = ask;
    while (isWanted()) {
      try {
        const name = await caller.current();
        if (!isWanted()) return;
        // The page did not know its caller when the ask was written. With the same token it is this one.
        if (by === undefined && login?.token === caller.token) outbox.sign(context.id, ask.key, (by = name));
        if (by !== name) {
          this.#forget(ask);
          return;
        }
        await context.actions.ask(context.id, /** @type {any} */ (ask), () => {
          if (!caller.isCurrent) throw new Doubtful();
        });
        outbox.remove(context.id, ask.key);
        if (!this.isOver) this.given.answered();
        return;
      } catch (error) {
        // The view is closed, or the ask was withdrawn. The next visit to this session sends it
        // again and reports the result.
        if (!isWanted()) return;
        if (error instanceof Doubtful) continue;
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
      if (this.keys.has(ask.key)) continue;
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
