import test from "node:test";
import assert from "node:assert/strict";
import { CallerOfPage, callerText, mayDo, mayInterrupt, mayPreempt, maySteer } from "../../../../src/banksman/server/web/model/caller.js";
import { signal } from "../../../../src/banksman/server/web/model/signal.js";

const asker = { name: "ann", role: "asker", actions: ["list", "read", "ask", "interrupt"] };
const admin = { name: null, role: "admin", actions: ["list", "ask", "answer", "interrupt"] };

test("everything is allowed until the caller is known", () => {
  assert.equal(mayDo(null, "answer"), true);
  assert.equal(mayInterrupt(null, "ann"), true);
  assert.equal(callerText(null), "");
});

test("a role allows its actions, and an asker only its own asks", () => {
  assert.equal(mayDo(asker, "answer"), false);
  assert.equal(mayDo(asker, "ask"), true);
  assert.deepEqual(["ann", "ben", null].map((other) => mayInterrupt(asker, other)), [true, false, false]);
  assert.deepEqual(["ann", null].map((other) => mayInterrupt(admin, other)), [true, true]);
  assert.deepEqual([null, asker, admin].map(mayPreempt), [true, false, true]);
  assert.equal(callerText(asker), "ann, asker");
  assert.equal(callerText(admin), "admin");
});

test("the caller is read at each start of a stream, and a failed read changes nothing", async () => {
  const before = { ...asker, role: "viewer", actions: ["list"] };
  const answers = [before, asker, null, { ...asker }];
  let begin;
  const page = new CallerOfPage({
    get: async () => {
      const found = answers.shift();
      if (found === null) throw new Error("lost");
      return found;
    },
    feed: { onBegin: (fn) => ((begin = fn), () => {}), connection: signal({ state: "live" }) },
  });
  page.start();
  const seen = [];
  for (let round = 0; round < 4; round += 1) {
    begin();
    await new Promise((done) => setImmediate(done));
    seen.push(page.me.value);
  }
  assert.deepEqual(seen, [before, asker, asker, asker]);
  assert.equal(page.may("answer"), false);
});

class Kept {
  constructor(texts = {}) {
    this.texts = new Map(Object.entries(texts));
  }
  get length() {
    return this.texts.size;
  }
  key(index) {
    return [...this.texts.keys()][index] ?? null;
  }
  getItem(name) {
    return this.texts.get(name) ?? null;
  }
  setItem(name, text) {
    this.texts.set(name, text);
  }
  removeItem(name) {
    this.texts.delete(name);
  }
}

async function reloads(storage, ...callers) {
  let count = 0;
  const get = async () => callers.shift();
  const page = new CallerOfPage({ get, storage, reload: () => (count += 1) });
  while (callers.length) await page.refresh();
  return count;
}

test("another person gets nothing that the one before has left in this tab", async () => {
  const left = { "banksman.draft.s": "draft", "banksman.sent.s": "asks", other: "of another page" };
  const kept = new Kept(left);
  assert.equal(await reloads(() => kept, asker, { ...asker, role: "viewer" }), 0);
  assert.deepEqual(Object.keys(left).filter((key) => kept.getItem(key) === left[key]), Object.keys(left));
  assert.equal(await reloads(() => kept, { ...asker, name: "ben" }), 1);
  assert.deepEqual([...kept.texts], [["other", "of another page"], ["banksman.caller", '"ben"']]);
  // The page that was loaded again stays.
  assert.equal(await reloads(() => kept, { ...asker, name: "ben" }), 0);
  assert.equal(await reloads(() => kept, admin), 1);
});

test("the caller of the next request is read again when it may have changed", async () => {
  const ben = { ...asker, name: "ben" };
  const settled = () => new Promise((done) => setImmediate(done));
  const connection = signal({ state: "live" });
  const reads = [];
  let token = "of ann";
  let begin;
  const page = new CallerOfPage({
    get: () => new Promise((answer) => reads.push(answer)),
    feed: { onBegin: (fn) => (begin = fn), connection },
    reload: () => {},
    token: () => token,
  });
  const current = async (...answers) => {
    const name = page.current();
    for (const answer of answers) {
      reads.shift()(answer);
      await settled();
    }
    return name;
  };
  page.start();
  assert.equal(page.isCurrent, false);
  assert.equal(await current(asker), "ann");
  assert.equal(page.isCurrent, true);
  assert.equal(await current(), "ann", "no read");
  token = "of ben";
  assert.equal(page.isCurrent, false);
  assert.equal(await current(ben), "ben");
  for (const state of ["waiting", "live"]) {
    connection.value = { state };
    await settled();
  }
  assert.equal(page.isCurrent, false);
  // A stream starts while the answer is on its way. The start has its own read.
  const name = page.current();
  begin();
  const [before, atBegin] = reads.splice(0);
  before(asker);
  await settled();
  assert.equal(page.isCurrent, false);
  atBegin(ben);
  reads.shift()(ben);
  assert.equal(await name, "ben");
});

test("without a storage another person gets a new page, too", async () => {
  const none = () => {
    throw new Error("SecurityError");
  };
  assert.equal(await reloads(none, asker, asker), 0);
  assert.equal(await reloads(none, asker, admin), 1);
});

test("an asker steers only its own sessions, and others as their role says", () => {
  const steering = { ...asker, actions: ["steer"] };
  assert.deepEqual(["ann", "ben", null, undefined].map((owner) => maySteer(steering, owner)), [true, false, false, false]);
  assert.equal(maySteer({ ...steering, actions: [] }, "ann"), false);
  assert.equal(maySteer({ ...steering, role: "operator" }, "ben"), true);
  assert.equal(maySteer(null, undefined), true);
});

test("the owner of a session is read for a limited role", async () => {
  const read = [];
  const page = new CallerOfPage({
    get: async (path) => {
      read.push(path);
      return { owner: "ann", shared: ["ben"] };
    },
    feed: {},
  });
  const [steers, end] = page.steers("a/b");
  const settled = () => new Promise((done) => setImmediate(done));
  const found = [];
  for (const me of [admin, { name: "ben", role: "asker", actions: ["steer"] }, { name: "ann", role: "asker", actions: ["steer"] }]) {
    page.me.value = me;
    await settled();
    found.push([me.name, steers.value, read.length]);
  }
  end();
  assert.deepEqual(found, [[null, false, 0], ["ben", false, 1], ["ann", true, 2]]);
  assert.equal(read[0], "v1/sessions/a%2Fb/shared");
});
