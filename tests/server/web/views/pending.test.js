// A sent prompt appears immediately and once, in whichever order the answer and the log report it.
import assert from "node:assert/strict";
import { test } from "node:test";
import { Pending } from "../../../../src/banksman/server/web/views/pending.js";

const asked = (ask, text) => ({ ask, prompt: text, text, images: [], priority: "normal" });
const queued = (key, prompt) => ({ kind: "turn.queued", turn: `t-${key}`, body: { key, prompt } });
const shown = (pending) => pending.list.value.map(({ ask }) => ask);

test("a sent prompt is shown until the log has its key", () => {
  const pending = new Pending();
  pending.add(asked("k1", "a"));
  assert.deepEqual(shown(pending), ["k1"]);
  pending.settle([queued("k1", "a")]);
  assert.deepEqual(shown(pending), []);
});

test("a prompt that is already in the log is not shown again, even if it is added late", () => {
  const pending = new Pending();
  pending.settle([queued("k1", "a")]);
  pending.add(asked("k1", "a"));
  assert.deepEqual(shown(pending), []);
});

test("two equal prompts are shown twice, and each is removed by its own key", () => {
  const pending = new Pending();
  pending.add(asked("k1", "again"));
  pending.add(asked("k2", "again"));
  pending.settle([queued("k2", "again")]);
  assert.deepEqual(shown(pending), ["k1"]);
});

test("another user's prompt removes nothing, with a key or without, and a refused prompt is removed", () => {
  const pending = new Pending();
  pending.add(asked("k1", "mine"));
  pending.settle([queued("k9", "mine"), queued(null, "mine")]);
  assert.deepEqual(shown(pending), ["k1"]);
  pending.drop("k1");
  assert.deepEqual(shown(pending), []);
});

test("a prompt that the log words differently is identified by its key", () => {
  const pending = new Pending();
  pending.add(asked("k1", "a"));
  pending.settle([queued("k1", [{ type: "text", text: "a" }])]);
  assert.deepEqual(shown(pending), []);
});
