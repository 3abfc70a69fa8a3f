// Outbox: a pending prompt keeps its key, also through a reload, until the log has it.
import assert from "node:assert/strict";
import { test } from "node:test";
import { Outbox } from "../../../../src/banksman/server/web/model/outbox.js";

/** Storage like a browser's: it keeps strings, up to a number of characters. */
class Kept {
  constructor(charactersMax = Infinity) {
    this.charactersMax = charactersMax;
    this.texts = new Map();
  }
  getItem(name) {
    return this.texts.get(name) ?? null;
  }
  setItem(name, text) {
    if (text.length > this.charactersMax) throw new Error("QuotaExceededError");
    this.texts.set(name, text);
  }
  removeItem(name) {
    this.texts.delete(name);
  }
}

const ask = (key, images = []) => ({ key, text: `words of ${key}`, images, prompt: "p", priority: "normal", onBusy: "enqueue" });
const keys = (outbox, session = "s") => outbox.of(session).map(({ key }) => key);

test("a reload finds the asks of its session, in order, with the same keys", () => {
  const kept = new Kept();
  const before = new Outbox(() => kept);
  assert.equal(before.add("s", ask("k1")), true);
  before.add("s", ask("k2"));
  const after = new Outbox(() => kept);
  assert.deepEqual(after.of("s"), [ask("k1"), ask("k2")]);
  assert.deepEqual(keys(after, "other"), []);
});

test("an ask that was answered or is in the log is not sent after a reload", () => {
  const kept = new Kept();
  const outbox = new Outbox(() => kept);
  for (const key of ["k1", "k2", "k3"]) outbox.add("s", ask(key));
  outbox.remove("s", "k1");
  outbox.settle("s", [{ kind: "turn.queued", body: { key: "k3" } }, { kind: "turn.queued", body: { key: null } }]);
  assert.deepEqual(keys(new Outbox(() => kept)), ["k2"]);
  outbox.remove("s", "k2");
  assert.equal(kept.texts.size, 0, "nothing is left");
});

test("if pictures are too large, only the text is stored, and this page still has everything", () => {
  const kept = new Kept(1000);
  const outbox = new Outbox(() => kept);
  const large = ask("k1", [{ data: "x".repeat(2000), mimeType: "image/png" }]);
  assert.equal(outbox.add("s", large), false);
  assert.deepEqual(outbox.of("s"), [large]);
  // Without its images it would be another prompt under the same key.
  assert.deepEqual(new Outbox(() => kept).of("s"), [{ ...large, images: [], prompt: null }]);
});

test("missing or corrupt browser storage is not an error", () => {
  const outbox = new Outbox(() => {
    throw new Error("SecurityError");
  });
  assert.equal(outbox.add("s", ask("k1")), false);
  assert.deepEqual(keys(outbox), ["k1"]);
  for (const text of ["{", "null", "7", '[null, {"key": 1}]']) {
    const kept = new Kept();
    kept.setItem("banksman.sent.s", text);
    assert.deepEqual(keys(new Outbox(() => kept)), [], text);
  }
});
