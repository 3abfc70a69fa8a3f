// Window of a session's log: dense, live and bounded for every order of events.
import assert from "node:assert/strict";
import { afterEach, beforeEach, test } from "node:test";
import { EVENTS_MAX, SessionLog } from "../../../../src/banksman/server/web/model/log.js";
import { OwnEvents } from "../../../../src/banksman/server/web/model/own.js";
import { Sessions } from "../../../../src/banksman/server/web/model/sessions.js";
import { signal } from "../../../../src/banksman/server/web/model/signal.js";
import { Api } from "../../../../src/banksman/server/web/net/api.js";
import { Little, until } from "../little.js";

/** A feed whose events come from the test, in the order that the test chooses. */
class Told {
  constructor() {
    this.connection = signal({ state: "live" });
    this.watched = [];
    for (const name of ["on", "onBegin", "onGap"]) {
      const all = new Set();
      this[`_${name}`] = all;
      this[name] = (fn) => (all.add(fn), () => all.delete(fn));
    }
  }
  watch(id) {
    this.watched.push(id);
    return () => void this.watched.splice(this.watched.indexOf(id), 1);
  }
  say(...events) {
    for (const fn of this._on) fn(events);
  }
  begin(begun = { isContinued: false }) {
    for (const fn of this._onBegin) fn(begun);
  }
  gap(gap) {
    for (const fn of this._onGap) fn(gap);
  }
}

let server, feed, api, opened;
beforeEach(async () => {
  server = await new Little().start();
  feed = new Told();
  api = new Api({ base: server.base });
  opened = [];
});
afterEach(async () => {
  for (const one of opened) one.close?.() ?? one.stop?.();
  await server.stop();
});
const get = (...words) => api.get(...words);
const keep = (one) => (opened.push(one), one);
const log = (id = "s") => keep(new SessionLog(id, { get, feed }));
const seqs = (one) => one.events.map((event) => event.seq);
const range = (first, last) => Array.from({ length: last - first + 1 }, (_, index) => first + index);
const many = (count, kind = "update") => Array(count).fill(kind);
const commitAndSay = (...kinds) => {
  const before = server.commits.length;
  server.commit("s", ...kinds);
  feed.say(...server.commits.slice(before));
};

test("the log opens with its tail and follows it live", async () => {
  server.commit("s", ...many(1000));
  const one = log();
  await one.open();
  assert.deepEqual(seqs(one), range(601, 1000));
  assert.equal(one.isLive.value, true);
  assert.equal(one.atStart, false);
  assert.equal(one.head, 1000);
  commitAndSay("update", "update");
  assert.deepEqual([one.last, one.head], [1002, 1002]);
});

test("an empty session, and a session with a few events", async () => {
  const empty = log("nothing");
  await empty.open();
  assert.deepEqual([empty.events.length, empty.atStart, empty.isLive.value], [0, true, true]);
  server.commit("s", "session.opened");
  const one = log();
  await one.open();
  assert.deepEqual([one.events.length, one.atStart], [1, true]);
});

test("the first event of an empty session is shown", async () => {
  const one = log();
  await one.open();
  commitAndSay("session.opened", "turn.queued");
  assert.deepEqual(seqs(one), [1, 2]);
});

test("a hole is read before any later event is shown", async () => {
  server.commit("s", ...many(10));
  const one = log();
  await one.open();
  const shown = [];
  one.version.subscribe(() => shown.push(one.last));
  server.commit("s", ...many(5));
  feed.say(server.commits.at(-1));
  assert.equal(one.last, 10);
  await until(() => one.last === 15);
  assert.deepEqual(seqs(one), range(1, 15));
  assert.deepEqual(shown, [10, 15]);
});

test("a duplicate event is dropped", async () => {
  server.commit("s", ...many(10));
  const one = log();
  await one.open();
  feed.say(...server.commits.slice(5));
  commitAndSay("update");
  feed.say(...server.commits.slice(5));
  assert.deepEqual(seqs(one), range(1, 11));
});

test("an event that arrives while the tail is read is appended after it", async () => {
  server.commit("s", ...many(10));
  const one = log();
  server.beforeSending = () => {
    server.beforeSending = () => {};
    commitAndSay("update", "update");
  };
  await one.open();
  assert.deepEqual(seqs(one), range(1, 12));
});

test("at the start of a stream the log reads up to the head, in as many pages as necessary", async () => {
  server.commit("s", ...many(10));
  const one = log();
  await one.open();
  server.commit("s", ...many(2500));
  feed.begin();
  await until(() => one.last === 2510);
  assert.deepEqual(seqs(one), range(1, 2510));
});

test("a reader that missed very much restarts at the end", async () => {
  server.commit("s", ...many(10));
  const one = log();
  await one.open();
  server.commit("s", ...many(6000));
  feed.begin();
  await until(() => one.last === 6010);
  assert.equal(one.events.length, 400);
});

test("older pages lead to the beginning", async () => {
  server.commit("s", ...many(2500));
  const one = log();
  await one.open();
  const changes = [];
  one.version.subscribe(() => changes.push({ ...one.change }));
  await one.older();
  assert.deepEqual(seqs(one), range(1101, 2500));
  await one.older();
  await one.older();
  assert.deepEqual(seqs(one), range(1, 2500));
  assert.equal(one.atStart, true);
  await one.older();
  assert.deepEqual(changes.slice(1, 3), [{ kind: "prepend", count: 1000 }, { kind: "prepend", count: 1000 }]);
});

test("live events do not move a window in the past, and it can become live again", async () => {
  server.commit("s", ...many(5000));
  const one = log();
  await one.open();
  await one.jump(1000);
  assert.deepEqual(seqs(one), range(501, 1500));
  assert.equal(one.isLive.value, false);
  assert.equal(one.atStart, false);
  commitAndSay("update");
  assert.equal(one.last, 1500);
  assert.equal(one.head, 5001);
  for (let i = 0; i < 4; i += 1) await one.newer();
  assert.deepEqual(seqs(one), range(501, 5001));
  assert.equal(one.isLive.value, true);
  commitAndSay("update");
  assert.equal(one.last, 5002);
});

test("a jump to a loaded event moves nothing, to the beginning is at the start, beyond the end is live", async () => {
  server.commit("s", ...many(3000));
  const one = log();
  await one.open();
  await one.jump(2800);
  assert.equal(one.first, 2601);
  await one.jump(1);
  assert.deepEqual([one.first, one.atStart], [1, true]);
  await one.jump(9999);
  assert.deepEqual([one.last, one.isLive.value], [3000, true]);
  await one.jump(1);
  await one.goLive();
  assert.deepEqual([one.last, one.isLive.value], [3000, true]);
});

test("events appended beyond the bound push out the oldest, which are read again", async () => {
  server.commit("s", ...many(300));
  const one = log();
  await one.open();
  for (let i = 0; i < 41; i += 1) commitAndSay(...many(500));
  const head = 300 + 41 * 500;
  assert.equal(one.last, head);
  assert.ok(one.events.length <= EVENTS_MAX);
  assert.deepEqual(seqs(one), range(one.first, head));
  assert.equal(one.atStart, false);
  const { first } = one;
  await one.older();
  assert.deepEqual(seqs(one), range(first - 1000, head));
});

test("reading backwards beyond the bound pushes out the live end, which is read again", async () => {
  server.commit("s", ...many(EVENTS_MAX + 3000));
  const one = log();
  await one.open();
  for (let i = 0; i < 21 && one.isLive.value; i += 1) await one.older();
  assert.equal(one.isLive.value, false);
  assert.ok(one.events.length <= EVENTS_MAX);
  commitAndSay("update");
  for (let i = 0; i < 30 && !one.isLive.value; i += 1) await one.newer();
  assert.equal(one.last, server.commits.length);
  assert.deepEqual(seqs(one), range(one.first, one.last));
});

test("changes between two deliveries are delivered as one", async () => {
  server.commit("s", ...many(10));
  const one = log();
  await one.open();
  const changes = [];
  one.version.subscribe(() => changes.push({ ...one.change, total: one.events.length }));
  commitAndSay("update");
  commitAndSay("update", "update");
  await until(() => changes.length === 2);
  assert.deepEqual(changes[1], { kind: "append", count: 3, total: 13 });
});

test("too many waiting events are dropped and read again", async () => {
  server.commit("s", ...many(10));
  const one = log();
  let hold = () => {};
  const held = new Promise((done) => (hold = done));
  server.instead = () => held;
  const opening = one.open();
  await until(() => server.requests.length === 1);
  for (let i = 0; i < 12; i += 1) commitAndSay(...many(500));
  assert.ok(one._pending.length <= 5_000);
  server.instead = () => undefined;
  hold(undefined);
  await opening;
  assert.equal(one.last, 6010);
  assert.deepEqual(seqs(one), range(one.first, 6010));
});

test("an unreachable server is retried, and immediately when a stream starts", async () => {
  server.commit("s", ...many(10));
  const one = log();
  one._patience.pauseMilliseconds = 60_000;
  server.instead = () => "cut";
  const opening = one.open();
  await until(() => one.problem.value?.status === 0);
  server.instead = () => undefined;
  feed.begin();
  await until(() => one.last === 10);
  await opening;
  assert.equal(one.last, 10);
  assert.equal(one.problem.value, null);
});

test("a stream that starts while a read fails causes another read", async () => {
  server.commit("s", ...many(10));
  const one = log();
  one._patience.pauseMilliseconds = 60_000;
  server.instead = () => {
    server.instead = () => undefined;
    feed.begin();
    return "cut";
  };
  one.open();
  await until(() => one.last === 10);
});

test("a missing session is reported as missing", async () => {
  const one = log();
  server.instead = () => [404, { title: "NotFound", detail: "there is no such session", hint: "" }];
  await assert.rejects(one.open(), { status: 404 });
  assert.equal(one.problem.value.status, 404);
});

test("another history is read from the start", async () => {
  server.commit("s", ...many(50));
  const one = log();
  await one.open();
  server.forget();
  server.commit("s", ...many(20));
  feed.begin();
  await until(() => one.last === 20);
  assert.deepEqual(new Set(one.events.map((event) => event.epoch)), new Set([2]));
});

test("deleted events are reported as a gap, and the gap is the start", async () => {
  server.commit("s", ...many(1000));
  server.first.set("s", 701);
  const one = log();
  await one.open();
  assert.deepEqual(seqs(one), range(701, 1000));
  assert.deepEqual([one.atStart, one.gap.value], [true, { first: 1, last: 700 }]);
  await one.jump(5);
  assert.equal(one.first, 701);
  feed.gap({ session: "s", first: 1, last: 800 });
  assert.deepEqual(one.gap.value, { first: 1, last: 800 });
});

test("a closed log requests nothing", async () => {
  const one = log();
  await one.open();
  assert.deepEqual(feed.watched, ["s"]);
  one.close();
  assert.deepEqual(feed.watched, []);
  feed.begin();
  commitAndSay("update");
  assert.equal(one.events.length, 0);
  const other = log();
  server.instead = () => "cut";
  const opening = other.open();
  await until(() => other.problem.value);
  other.close();
  await opening;
});

// -- own events -------------------------------------------------------------------------------------------------------

test("own events: newest first, complete in the end, and live without frames", async () => {
  for (let i = 0; i < 1500; i += 1) server.commit("s", "turn.queued", "update");
  const own = keep(new OwnEvents("s", { get, feed }));
  await until(() => own.events.value.length === 1000);
  await until(() => own.isComplete.value);
  assert.equal(own.events.value.length, 1500);
  commitAndSay("update", "turn.started", "sent");
  assert.equal(own.events.value.at(-1).kind, "turn.started");
  assert.equal(own.events.value.length, 1501);
});

test("own events: missed events are read at the next start of a stream, without duplicates", async () => {
  server.commit("s", "session.opened");
  const own = keep(new OwnEvents("s", { get, feed }));
  await until(() => own.isComplete.value);
  server.commit("s", ...many(20), "turn.queued", ...many(20), "turn.started");
  feed.say(server.commits.at(-1));
  feed.begin();
  feed.say(server.commits.at(-1));
  commitAndSay("turn.ended");
  await until(() => own.events.value.length === 4);
  const kinds = own.events.value.map((event) => event.kind);
  assert.deepEqual(kinds, ["session.opened", "turn.queued", "turn.started", "turn.ended"]);
});

// -- all sessions -----------------------------------------------------------------------------------------------------

test("sessions: the list at a start, one session at its events, a burst in few requests", async () => {
  server.commit("a", "session.opened");
  server.commit("b", "session.opened");
  const all = keep(new Sessions({ get, feed }));
  all.start();
  feed.begin();
  await until(() => all.list.value.length === 2);
  assert.equal(all.questions.value, 0);
  server.requests = [];
  server.commit("a", ...many(30, "turn.queued"), "question.asked");
  for (const event of server.commits.slice(2)) feed.say(event);
  await until(() => all.questions.value === 1);
  assert.ok(server.requests.length <= 2, `${server.requests.length}`);
  server.commit("c", "session.opened");
  feed.say(server.commits.at(-1));
  await until(() => all.find("c"));
  server.instead = ({ path }) => (path.endsWith("/b") ? [404, { detail: "gone" }] : undefined);
  feed.say({ session: "b", kind: "session.closed" });
  await until(() => !all.find("b"));
});

test("sessions: frames cause no read", async () => {
  server.commit("a", "session.opened");
  const all = keep(new Sessions({ get, feed }));
  all.start();
  feed.begin();
  await until(() => all.isKnown.value && !all._isReading);
  server.commit("a", "update");
  feed.say(server.commits.at(-1));
  assert.equal(all._isReading, false);
  feed.begin({ isContinued: true });
  assert.equal(all._isReading, false);
  server.commit("a", "turn.queued");
  feed.say(server.commits.at(-1));
  await until(() => all.find("a").seq === 3);
});

