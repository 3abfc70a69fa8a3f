// Signals: a subscriber is called immediately, then once for all changes of one tick.
import assert from "node:assert/strict";
import { test } from "node:test";
import { derived, effect, flush, signal } from "../../../../src/banksman/server/web/model/signal.js";

const soon = () => new Promise((done) => setTimeout(done, 0));

test("a subscriber is called immediately, then once for many changes", async () => {
  const one = signal(1);
  const told = [];
  one.subscribe((value) => told.push(value));
  assert.deepEqual(told, [1]);
  one.value = 2;
  one.value = 3;
  assert.equal(one.value, 3);
  assert.deepEqual(told, [1]);
  await soon();
  assert.deepEqual(told, [1, 3]);
});

test("setting the same value is not a change", async () => {
  const one = signal("x");
  let calls = 0;
  one.subscribe(() => (calls += 1));
  one.value = "x";
  await soon();
  assert.equal(calls, 1);
});

test("an ended subscriber is not called, even if an earlier subscriber ended it", async () => {
  const one = signal(1);
  const told = [];
  let off = () => {};
  one.subscribe(() => off());
  off = one.subscribe((value) => told.push(value));
  one.value = 2;
  await soon();
  assert.deepEqual(told, [1]);
});

test("a subscriber that throws does not stop the others", async () => {
  const reported = [];
  globalThis.reportError = (error) => reported.push(error.message);
  const one = signal(1);
  const told = [];
  one.subscribe(() => {
    throw new Error("mine");
  });
  one.subscribe((value) => told.push(value));
  one.value = 2;
  await soon();
  assert.deepEqual(told, [1, 2]);
  assert.deepEqual(reported, ["mine", "mine"]);
});

test("a derived value is always current, and changes once when two inputs change", async () => {
  const a = signal(1);
  const b = signal(10);
  const sum = derived([a, b], (x, y) => x + y);
  const told = [];
  sum.subscribe((value) => told.push(value));
  a.value = 2;
  b.value = 20;
  assert.equal(sum.value, 22);
  await soon();
  assert.deepEqual(told, [11, 22]);
});

test("a derived list that its subscriber reads is delivered once", async () => {
  const a = signal([1, 2, 3]);
  const even = derived([a], (all) => all.filter((x) => x % 2 === 0));
  let calls = 0;
  effect([even], () => {
    calls += 1;
    assert.ok(Array.isArray(even.value));
  });
  a.value = [2, 4];
  for (let i = 0; i < 5; i += 1) await soon();
  assert.equal(calls, 2);
});

test("an effect runs immediately, once for many changes, and not after its end", async () => {
  const a = signal(1);
  const b = signal(1);
  const told = [];
  const off = effect([a, b], (x, y) => told.push([x, y]));
  a.value = 2;
  b.value = 2;
  await soon();
  assert.deepEqual(told, [[1, 1], [2, 2]]);
  a.value = 3;
  off();
  await soon();
  assert.equal(told.length, 2);
});

test("signals that trigger each other end with an error, and the next change is delivered", async () => {
  const a = signal(0);
  let isOn = true;
  a.subscribe((value) => {
    if (isOn) a.value = value + 1;
  });
  assert.throws(flush, /endlessly/);
  isOn = false;
  let told = 0;
  a.subscribe(() => (told += 1));
  a.value = -1;
  await soon();
  assert.equal(told, 2);
});
