import test from "node:test";
import assert from "node:assert/strict";
import { CallerOfPage, callerText, mayDo, mayInterrupt, mayPreempt } from "../../../../src/banksman/server/web/model/caller.js";

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
  const answers = [admin, asker, null, { ...asker }];
  let begin;
  const page = new CallerOfPage({
    get: async () => {
      const found = answers.shift();
      if (found === null) throw new Error("lost");
      return found;
    },
    feed: { onBegin: (fn) => ((begin = fn), () => {}) },
  });
  page.start();
  const seen = [];
  for (let round = 0; round < 4; round += 1) {
    begin();
    await new Promise((done) => setImmediate(done));
    seen.push(page.me.value);
  }
  assert.deepEqual(seen, [admin, asker, asker, asker]);
  assert.equal(page.may("answer"), false);
});
