// A sent prompt appears immediately and once, in whichever order the answer and the log report it.
import assert from "node:assert/strict";
import { test } from "node:test";
import { Pending } from "../../../../src/banksman/server/web/views/pending.js";

const asked = (ask, text) => ({ ask, prompt: text, text, images: [], priority: "normal" });
const queued = (key, prompt) => ({ kind: "turn.queued", turn: `t-${key}`, body: { key, prompt } });
const shown = (pending) => pending.list.value.map(({ ask }) => ask);

test("it is shown until the log tells of its key", () => {
  const pending = new Pending();
  pending.add(asked("k1", "a"));
  assert.deepEqual(shown(pending), ["k1"]);
  pending.settle([queued("k1", "a")]);
  assert.deepEqual(shown(pending), []);
});

test("what the log has told of already is not shown again, however late it is taken up", () => {
  const pending = new Pending();
  pending.settle([queued("k1", "a")]);
  pending.add(asked("k1", "a"));
  assert.deepEqual(shown(pending), []);
});

test("the same words twice are two, and each goes with its own key", () => {
  const pending = new Pending();
  pending.add(asked("k1", "again"));
  pending.add(asked("k2", "again"));
  pending.settle([queued("k2", "again")]);
  assert.deepEqual(shown(pending), ["k1"]);
});

test("somebody else's prompt is not ours, with a key or without, and what was refused is gone", () => {
  const pending = new Pending();
  pending.add(asked("k1", "mine"));
  pending.settle([queued("k9", "mine"), queued(null, "mine")]);
  assert.deepEqual(shown(pending), ["k1"]);
  pending.drop("k1");
  assert.deepEqual(shown(pending), []);
});

test("words that the log has otherwise than they were sent: the key says whose they are", () => {
  const pending = new Pending();
  pending.add(asked("k1", "a"));
  pending.settle([queued("k1", [{ type: "text", text: "a" }])]);
  assert.deepEqual(shown(pending), []);
});
