// One persistent connection: when it is suspected, when it is dropped, and the pause before a reconnect.
import assert from "node:assert/strict";
import { afterEach, beforeEach, test } from "node:test";
import { PAUSE_MILLISECONDS_MAX, Stream } from "../../../../src/banksman/server/web/net/stream.js";
import { Little, until } from "../little.js";

let server, streams, clock;
beforeEach(async () => {
  server = await new Little().start();
  streams = [];
  clock = 1_000_000;
});
afterEach(async () => {
  for (const one of streams) await one.stop();
  await server.stop();
});

function stream(more = {}) {
  const told = { states: [], batches: [], begun: [], pauses: [] };
  const one = new Stream({
    open: (position, signal) =>
      fetch(`${server.base}v1/events?frames_of=&after=${position ?? "now"}`, { signal }),
    position: null,
    onBegin: (begun) => told.begun.push(begun),
    onBatch: (batch) => told.batches.push(batch),
    onState: (state) => told.states.push(state),
    now: () => clock,
    random: () => 0,
    ...more,
  });
  streams.push(one);
  return Object.assign(one, { told });
}
const last = (one) => one.told.states.at(-1)?.state;

test("the start is reported before any event, and each batch continues the previous one", async () => {
  server.commit("s", "turn.queued");
  const one = stream();
  await until(() => last(one) === "live");
  assert.deepEqual(one.told.begun, [{ position: null, isContinued: false }]);
  server.commit("s", "turn.started");
  await until(() => one.told.batches.some((batch) => batch.events.length));
  const { batches } = one.told;
  batches.reduce((from, batch) => (assert.equal(batch.from, from), batch.position), null);
  assert.equal(one.position, "1-2");
});

test("a nudge reconnects a silent connection, but not a recent one", async () => {
  const one = stream();
  await until(() => last(one) === "live");
  clock += 5_000;
  one.nudge();
  server.commit("s", "turn.queued");
  await until(() => one.told.batches.some((batch) => batch.events.length));
  assert.equal(server.streamsOpened, 1);
  clock += 25_000;
  one.nudge();
  await until(() => one.told.begun.length === 2);
  assert.equal(one.told.begun.at(-1).isContinued, true);
});

test("a very old position is given up for the end", async () => {
  const one = stream();
  await until(() => last(one) === "live");
  clock += 3_600_000;
  one.nudge();
  await until(() => one.told.begun.length === 2);
  assert.equal(one.told.begun.at(-1).isContinued, false);
});

test("pauses grow up to their bound, and a live stream resets them", async () => {
  const one = stream({ open: () => Promise.reject(new TypeError("failed")) });
  const pauses = [];
  for (let i = 0; i < 12; i += 1) {
    await until(() => one.told.states.length === 2 + i);
    pauses.push(one.told.states.at(-1).retryAt - clock);
    assert.equal(last(one), "waiting");
    one._wake();
  }
  for (const [index, pause] of pauses.entries()) assert.ok(!index || pause >= pauses[index - 1], `${pauses}`);
  assert.ok(pauses[0] <= 250);
  assert.equal(pauses.at(-1), PAUSE_MILLISECONDS_MAX / 2); // With the smallest jitter.
});

test("an offline machine is reported as offline", async () => {
  const one = stream({ open: () => Promise.reject(new TypeError("failed")), isOnline: () => false });
  await until(() => last(one) === "offline");
});

test("a response of another program is not read", async () => {
  server.instead = () => [200, { hello: "I am a proxy" }];
  const one = stream();
  await until(() => last(one) === "waiting");
  assert.match(one.told.states.at(-1).detail, /not a Banksman server/);
});

test("a request to reopen waits while the stream is opening", async () => {
  let hold = () => {};
  server.instead = () => new Promise((done) => (hold = done));
  const one = stream();
  await until(() => server.requests.length === 1);
  for (let i = 0; i < 50; i += 1) one.reopen();
  server.instead = () => undefined;
  hold();
  await until(() => last(one) === "live");
  assert.equal(server.requests.length, 2);
  assert.equal(one.told.begun.length, 1);
});

test("no callback is called after the end", async () => {
  const one = stream();
  await until(() => last(one) === "live");
  const states = one.told.states.length;
  await one.stop();
  server.commit("s", "turn.queued");
  await until(() => server.streams.size === 0);
  assert.equal(one.told.states.length, states);
  assert.ok(!one.told.batches.some((batch) => batch.events.length));
});
