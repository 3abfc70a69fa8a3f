// Hosts that share a store: read when a stream begins, and summarized in a few words.
import assert from "node:assert/strict";
import { test } from "node:test";

import { Hosts, stateOf, summaryOf } from "../../../../src/banksman/server/web/model/hosts.js";
import { Problem } from "../../../../src/banksman/server/web/net/api.js";

const host = (name, more = {}) => ({ id: `h-${name}`, name, room: 4, used: 1, draining: false, ...more });

/** Return a feed that begins on a call of the test. */
function feedOf() {
  const begins = new Set();
  return {
    begin: () => begins.forEach((call) => call({ isContinued: false })),
    count: () => begins.size,
    onBegin: (call) => {
      begins.add(call);
      return () => begins.delete(call);
    },
  };
}

test("hosts are read when the stream starts, and not after the end", async () => {
  const feed = feedOf();
  const answers = [[host("a")], [host("a"), host("b")]];
  const hosts = new Hosts({ feed, get: async () => ({ hosts: answers.shift() }) });
  hosts.start();
  hosts.start();
  assert.equal(feed.count(), 1);
  for (const expected of [["a"], ["a", "b"]]) {
    const changed = new Promise((done) => hosts.list.subscribe(done));
    feed.begin();
    await changed;
    assert.deepEqual(hosts.list.value.map((each) => each.name), expected);
  }
  hosts.stop();
  assert.equal(feed.count(), 0);
});

test("an old server has no hosts, and a failed read keeps the last list", async () => {
  const problems = [null, new Error("the connection is lost"), new Problem({ status: 404, title: "NotFound" })];
  const get = async () => {
    const problem = problems.shift();
    if (problem) throw problem;
    return { hosts: [host("a")] };
  };
  const hosts = new Hosts({ feed: feedOf(), get });
  for (const expected of [1, 1, 0]) {
    await hosts.refresh();
    assert.equal(hosts.list.value.length, expected);
  }
});

test("the summary counts the hosts that take sessions, and their used places", () => {
  assert.equal(summaryOf([host("a"), host("front", { room: 0, used: 0 })]), "1 host, 1 of 4 places taken");
  assert.equal(
    summaryOf([host("a"), host("b", { used: 2, draining: true })]),
    "2 hosts, 3 of 8 places taken, 1 draining",
  );
});

test("a draining host says so, and a host without places is a front end", () => {
  assert.equal(stateOf(host("a")), "1 of 4");
  assert.equal(stateOf(host("a", { draining: true })), "draining");
  assert.equal(stateOf(host("a", { room: 0, front: true })), "front end");
  assert.equal(stateOf(host("a", { room: 0, front: false })), "program");
  assert.equal(stateOf(host("a", { room: 0, used: 0 })), "front end");
});
