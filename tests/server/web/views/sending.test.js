// Unanswered asks are sent again until the server responds, and only by the caller who wrote them.
import assert from "node:assert/strict";
import { test } from "node:test";
import { CallerOfPage } from "../../../../src/banksman/server/web/model/caller.js";
import { outbox } from "../../../../src/banksman/server/web/model/outbox.js";
import { signal } from "../../../../src/banksman/server/web/model/signal.js";
import { Api, Unreachable } from "../../../../src/banksman/server/web/net/api.js";
import { Pending } from "../../../../src/banksman/server/web/views/pending.js";
import { Sending } from "../../../../src/banksman/server/web/views/sending.js";

const settled = () => new Promise((done) => setImmediate(done));
const written = { prompt: "p", text: "words", images: [], priority: "normal", onBusy: "enqueue" };
let sessions = 0;

/** A page of a browser that ann is logged in with, and whose server is there. */
class Page {
  constructor() {
    this.id = `session-${(sessions += 1)}`;
    /** The token is the name of its holder. */
    this.token = "ann";
    this.isAway = false;
    /** Resolves the answers to the reads of the caller, if they wait. */
    this.reads = null;
    /** The senders of the asks that have arrived. */
    this.sent = [];
    this.given = [];
    this.isComplete = signal(false);
    this.connection = signal({ state: "live" });
    this.caller = new CallerOfPage({
      get: () => this.#answer(this.token),
      feed: { onBegin: (fn) => (this.begin = fn), connection: this.connection },
      storage: () => {
        throw new Error("SecurityError");
      },
      reload: () => {},
      token: () => this.token,
    });
    this.caller.start();
  }

  async #answer(name) {
    if (this.isAway) throw new Unreachable();
    if (this.reads) await new Promise((done) => this.reads.push(done));
    return { name, role: "asker", actions: ["ask"] };
  }

  open() {
    const said = (name) => (ask) => this.given.push([name, ask?.text]);
    const api = new Api({ fetch: () => this.#post(), pause: () => new Promise((done) => (this.retry = done)) });
    const ask = (id, { key }, check) => api.post("turns", {}, { key, check });
    return new Sending(
      {
        id: this.id,
        caller: this.caller,
        pending: new Pending(),
        own: { events: signal([]), isComplete: this.isComplete },
        feed: { connection: this.connection },
        actions: { ask },
      },
      { refused: said("refused"), unanswered: said("unanswered"), answered: said("answered"), lost: said("lost") },
    );
  }

  async #post() {
    if (this.isAway) throw new TypeError("no server");
    this.sent.push(this.token);
    return new Response("{}");
  }
}

test("an ask waits for the server and for its caller, and is sent once", async () => {
  const page = new Page();
  await page.caller.current();
  page.isAway = true;
  const sending = page.open();
  sending.add(written);
  await settled();
  assert.deepEqual(page.sent, []);
  assert.equal(outbox.of(page.id)[0].by, "ann");
  page.isAway = false;
  page.retry();
  await settled();
  assert.deepEqual([page.sent, outbox.of(page.id)], [["ann"], []]);
  sending.destroy();
});

test("an unanswered ask is not sent with the token of the next person", async () => {
  const page = new Page();
  await page.caller.current();
  page.isAway = true;
  const before = page.open();
  before.add(written);
  await settled();
  // Ann's token is revoked: the login replaces the view, and ben logs in.
  before.destroy();
  page.token = "ben";
  page.isAway = false;
  page.reads = [];
  page.begin();
  const after = page.open();
  await settled();
  assert.deepEqual(page.sent, [], "the caller is not known yet");
  for (const answer of page.reads) answer();
  await settled();
  assert.deepEqual([page.sent, outbox.of(page.id), after.context.pending.list.value], [[], [], []]);
  after.destroy();
});

test("a retry in an open tab is not sent with the token of another tab's login", async () => {
  const page = new Page();
  await page.caller.current();
  page.isAway = true;
  const sending = page.open();
  sending.add(written);
  await settled();
  page.isAway = false;
  page.token = "ben";
  page.retry();
  await settled();
  assert.deepEqual([page.sent, outbox.of(page.id)], [[], []]);
  sending.destroy();
});

test("a retry after a new start of the stream reads the caller first", async () => {
  const page = new Page();
  await page.caller.current();
  page.isAway = true;
  const sending = page.open();
  sending.add(written);
  await settled();
  page.isAway = false;
  page.reads = [];
  page.begin();
  page.retry();
  await settled();
  assert.deepEqual(page.sent, []);
  for (const answer of page.reads) answer();
  await settled();
  assert.deepEqual(page.sent, ["ann"]);
  sending.destroy();
});

test("an ask that was written before its caller was known is sent with the same token only", async () => {
  for (const [next, sent] of [["ann", ["ann"]], ["ben", []]]) {
    const page = new Page();
    page.reads = [];
    const sending = page.open();
    sending.add(written);
    page.isComplete.value = true;
    await settled();
    assert.equal(outbox.of(page.id).length, 1);
    page.token = next;
    while (page.reads.length) {
      page.reads.shift()();
      await settled();
    }
    assert.deepEqual([page.sent, outbox.of(page.id)], [sent, []]);
    sending.destroy();
  }
});

test("an ask of an older page, without a name, is looked up and not sent", async () => {
  const page = new Page();
  outbox.add(page.id, { key: "k1", ...written });
  const sending = page.open();
  await settled();
  assert.equal(outbox.of(page.id).length, 1);
  page.isComplete.value = true;
  await settled();
  assert.deepEqual([page.sent, page.given, outbox.of(page.id)], [[], [["lost", "words"]], []]);
  sending.destroy();
});
