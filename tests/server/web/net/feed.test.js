// One stream for all tabs over real HTTP, with the locks and the channel that Node and browsers both have.
import assert from "node:assert/strict";
import { afterEach, beforeEach, test } from "node:test";
import { Worker } from "node:worker_threads";
import { Feed } from "../../../../src/banksman/server/web/net/feed.js";
import { Watching, WATCHED_MAX } from "../../../../src/banksman/server/web/net/watching.js";
import { Little, until } from "../little.js";

let server, tabs, scopes = 0, surroundings;
beforeEach(async () => {
  server = await new Little().start();
  tabs = [];
  surroundings = {
    base: server.base,
    scope: `/${process.pid}-${(scopes += 1)}/`,
    window: null,
    document: null,
    look_milliseconds: 20,
    answer_milliseconds_max: 300,
    leader_silence_milliseconds_max: 400,
  };
});
afterEach(async () => {
  for (const tab of tabs) tab.stop();
  await server.stop();
});

/** Start a tab that records its events. */
function tab(more = {}) {
  const feed = new Feed({ ...surroundings, fetch, locks: navigator.locks, now: Date.now, ...more });
  feed.seen = [];
  feed.begun = [];
  feed.on((events) => feed.seen.push(...events.map((event) => `${event.session} ${event.seq}`)));
  feed.onBegin((begun) => feed.begun.push(begun.isContinued));
  tabs.push(feed);
  feed.start();
  return feed;
}
const isLive = (feed) => feed.connection.value.state === "live";
const isLeader = (feed) => feed.connection.value.isLeader;
const leaders = (all) => all.filter(isLeader);

test("ten tabs have one stream, and each gets every event once, in order", async () => {
  const all = Array.from({ length: 10 }, () => tab());
  await until(() => all.every(isLive));
  await until(() => all.every((one) => one.begun.length));
  assert.equal(leaders(all).length, 1);
  for (let i = 0; i < 50; i += 1) server.commit("s", "turn.queued");
  await until(() => all.every((one) => one.seen.length >= 50));
  const expected = Array.from({ length: 50 }, (_, index) => `s ${index + 1}`);
  for (const one of all) assert.deepEqual(one.seen, expected);
  assert.equal(server.streams.size, 1);
  assert.equal(server.streamsOpened, 1);
});

test("when the leader ends, another tab resumes from its position", async () => {
  const all = [tab(), tab(), tab()];
  await until(() => all.every(isLive) && all.every((one) => one.begun.length));
  server.commit("s", "turn.queued");
  await until(() => all.every((one) => one.seen.length === 1));
  const [gone] = leaders(all);
  const left = all.filter((one) => one !== gone);
  gone.stop();
  server.commit("s", "turn.started", "turn.ended");
  await until(() => left.every((one) => one.seen.length === 3));
  for (const one of left) {
    assert.deepEqual(one.seen, ["s 1", "s 2", "s 3"]);
    assert.equal(one.begun.at(-1), true, "it went on, so nothing need be read again");
  }
  await until(() => server.streams.size === 1 && leaders(left).length === 1);
});

test("the stream has the frames that any tab watches, even if the leader does not", async () => {
  const one = tab();
  await until(() => isLive(one));
  const other = tab();
  await until(() => isLive(other));
  server.commit("s", "update", "turn.queued");
  await until(() => one.seen.length === 1);
  assert.deepEqual(one.seen, ["s 2"]);
  const release = other.watch("s");
  await until(() => [...server.streams].some((stream) => stream.frames.has("s")));
  server.commit("s", "update");
  server.commit("t", "update", "turn.queued");
  await until(() => other.seen.includes("t 2"));
  assert.deepEqual(other.seen, ["s 2", "s 3", "t 2"]);
  release();
});

test("a new leader asks the others for their sessions", async () => {
  const one = tab();
  await until(() => isLive(one));
  const second = tab();
  await until(() => isLive(second));
  second.watch("a");
  await until(() => [...server.streams].some((stream) => stream.frames.has("a")));
  const third = tab();
  await until(() => isLive(third));
  third.watch("b");
  // It came last, and does not know what the second tab watches.
  third._election.steal();
  await until(() => isLeader(third));
  one.stop();
  await until(() => server.streams.size === 1 && ["a", "b"].every((id) => [...server.streams][0].frames.has(id)));
});

test("a hundred changes of the watched sessions in a row cause few requests", async () => {
  const one = tab();
  await until(() => isLive(one));
  const opened = server.streamsOpened;
  let release = () => {};
  for (let i = 0; i < 100; i += 1) {
    release();
    release = one.watch(`s${i}`);
    await null;
  }
  await until(() => [...server.streams].some((stream) => stream.frames.has("s99")));
  assert.ok(server.streamsOpened - opened <= 5, `${server.streamsOpened - opened}`);
});

test("sessions that are not watched, or only by closed tabs, are dropped in time", async () => {
  const one = tab();
  await until(() => isLive(one));
  const other = tab();
  await until(() => isLive(other));
  other.watch("a");
  one.watch("b");
  await until(() => [...server.streams].some((stream) => stream.frames.has("a") && stream.frames.has("b")));
  other._post = () => {}; // It dies without a message.
  other.stop();
  await until(async () => (await navigator.locks.query()).held.filter((lock) => lock.name.startsWith("banksman-tab-")).length === 1);
  for (const stream of server.streams) stream.say("stream.heartbeat", { head: one._position });
  await until(() => [...server.streams].some((stream) => !stream.frames.has("a") && stream.frames.has("b")));
});

test("a lost connection resumes from the position, and every tab is notified of the start", async () => {
  const all = [tab(), tab()];
  await until(() => all.every(isLive) && all.every((one) => one.begun.length));
  server.commit("s", "turn.queued");
  await until(() => all.every((one) => one.seen.length === 1));
  const begun = all.map((one) => one.begun.length);
  server.cutStreams();
  server.commit("s", "turn.started");
  await until(() => all.every((one) => one.seen.length === 2));
  all.forEach((one, index) => assert.equal(one.begun.length, begun[index] + 1));
});

test("an unreachable server is reported, and a nudge retries immediately", async () => {
  const all = [tab(), tab()];
  await until(() => all.every(isLive));
  await server.stop();
  await until(() => all.every((one) => one.connection.value.state === "waiting"));
  for (const one of all) assert.match(one.connection.value.detail, /trying again/);
  await server.start();
  all.find((one) => !isLeader(one)).nudge();
  await until(() => all.every(isLive));
});

test("a refused client is shown what to do, and can log in later", async () => {
  server.instead = () => [401, { title: "NotLetIn", detail: "no token", hint: "…" }];
  const all = [tab(), tab()];
  await until(() => all.every((one) => one.connection.value.state === "refused"));
  for (const one of all) assert.match(one.connection.value.detail, /banksman page/);
  server.instead = () => undefined;
  // The user logged in by another tab than the one that has the stream.
  all.find((one) => !isLeader(one)).nudge();
  await until(() => all.every(isLive), "long before it would be tried again", 2000);
});

test("another history starts at its end, and everything is read again", async () => {
  const all = [tab(), tab()];
  await until(() => all.every(isLive) && all.every((one) => one.begun.length));
  server.forget();
  server.cutStreams();
  await until(() => all.every((one) => isLive(one) && one.begun.at(-1) === false && one.begun.length > 1));
  server.commit("s", "turn.queued");
  await until(() => all.every((one) => one.seen.length === 1));
});

test("a server that shuts down is reported", async () => {
  const one = tab();
  await until(() => isLive(one));
  const states = [];
  one.connection.subscribe(({ state }) => states.push(state));
  for (const stream of server.streams) {
    stream.say("stream.closing", { reason: "closing", retry_seconds: 0.05 });
    stream.response.end();
  }
  await until(() => states.includes("ending"));
  await until(() => isLive(one));
});

test("a late tab begins, and a tab that missed a batch begins again", async () => {
  const one = tab();
  await until(() => isLive(one));
  const other = tab();
  await until(() => isLive(other) && other.begun.length === 1);
  const hear = other._channel.onmessage;
  other._channel.onmessage = null; // Frozen.
  server.commit("s", "turn.queued");
  await until(() => one.seen.length === 1);
  await new Promise((done) => setTimeout(done, 20)); // It misses the forwarded event.
  other._channel.onmessage = hear;
  server.commit("s", "turn.started");
  await until(() => other.seen.includes("s 2"));
  assert.equal(other.begun.at(-1), false);
  assert.ok(other.begun.length >= 2);
});

test("without Web Locks each tab is its own leader", async () => {
  const all = [tab({ locks: undefined }), tab({ locks: undefined })];
  await until(() => all.every(isLive));
  server.commit("s", "turn.queued");
  await until(() => all.every((one) => one.seen.length === 1));
  assert.equal(server.streams.size, 2);
});

test("a frozen leader is deposed, and follows when it resumes", async () => {
  const shared = new SharedArrayBuffer(4);
  const worker = new Worker(new URL("tab.js", import.meta.url), { workerData: { shared, surroundings } });
  const said = { seen: [], connection: null, frozen: false };
  worker.on("message", (word) => {
    if (word.events) said.seen.push(...word.events.map((event) => `${event.session} ${event.seq}`));
    if (word.connection) said.connection = word.connection;
    if (word.frozen) said.frozen = true;
  });
  try {
    await until(() => said.connection?.state === "live" && said.connection.isLeader);
    const one = tab();
    await until(() => isLive(one));
    assert.equal(isLeader(one), false);
    worker.postMessage("freeze");
    await until(() => said.frozen);
    await until(() => isLeader(one) && isLive(one));
    server.commit("s", "turn.queued");
    await until(() => one.seen.length === 1);
    Atomics.store(new Int32Array(shared), 0, 1);
    Atomics.notify(new Int32Array(shared), 0);
    await until(() => said.connection.isLeader === false);
    server.commit("s", "turn.started");
    await until(() => said.seen.includes("s 2"));
    await until(() => server.streams.size === 1);
    assert.equal(isLeader(one), true);
    assert.deepEqual(one.seen, ["s 1", "s 2"]);
  } finally {
    Atomics.store(new Int32Array(shared), 0, 1);
    Atomics.notify(new Int32Array(shared), 0);
    worker.postMessage("stop");
    await worker.terminate();
  }
});

test("watched sessions: the newest, if there are too many", () => {
  const watching = new Watching();
  watching.set("old", Array.from({ length: WATCHED_MAX }, (_, index) => `s${index}`));
  watching.set("new", ["x"]);
  assert.equal(watching.all().size, WATCHED_MAX);
  assert.ok(watching.all().has("x"));
  watching.keep(new Set(["new"]));
  assert.deepEqual([...watching.all()], ["x"]);
  watching.drop("new");
  assert.equal(watching.all().size, 0);
});
