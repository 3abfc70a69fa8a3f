// Requests: which are retried, and the form of a refusal.
import assert from "node:assert/strict";
import { after, before, beforeEach, test } from "node:test";
import { Api, keyIn, Problem, Unreachable, withQuery } from "../../../../src/banksman/server/web/net/api.js";
import { keepToken } from "../../../../src/banksman/server/web/net/page_token.js";
import { Little } from "../little.js";

const server = new Little();
/** Pauses that the API would make; the tests record them instead of waiting. */
let paused = [];
const api = () => new Api({ base: server.base, pause: async (milliseconds) => void paused.push(milliseconds) });

before(() => server.start());
after(() => server.stop());
beforeEach(() => {
  server.requests = [];
  paused = [];
});

test("an error response is a problem with words for the user", async () => {
  const shown = { title: "QueueFull", detail: "too many wait", hint: "wait", ids: { session: "s" } };
  server.instead = () => [429, shown];
  await assert.rejects(api().post("v1/x", {}, { key: "k" }), (error) => {
    assert.ok(error instanceof Problem);
    assert.deepEqual({ ...shown, status: 429 }, pick(error, "title", "detail", "hint", "ids", "status"));
    assert.equal(error.message, "too many wait: wait");
    return true;
  });
  assert.equal(server.requests.length, 1);
});

test("an error of a proxy is a problem too", async () => {
  server.instead = () => [502, "<html>"];
  await assert.rejects(api().get("v1/x"), { name: "Problem", status: 502, hint: /proxy/ });
});

test("after a lost connection, a request is sent again with the same key and answered once", async () => {
  let lost = 0;
  server.instead = () => ((lost += 1) <= 2 ? "cut" : [202, { turn: "t" }]);
  assert.deepEqual(await api().post("v1/x", { prompt: "p" }, { key: "once" }), { turn: "t" });
  assert.equal(server.requests.length, 3);
  assert.deepEqual(new Set(server.requests.map((one) => one.headers["idempotency-key"])), new Set(["once"]));
  assert.deepEqual(new Set(server.requests.map((one) => one.body.prompt)), new Set(["p"]));
});

test("a server that shuts down is retried", async () => {
  let tries = 0;
  server.instead = () => ((tries += 1) === 1 ? [503, { detail: "going" }] : [202, {}]);
  await api().post("v1/x", {}, { key: "k" });
  assert.equal(tries, 2);
});

test("a request without a key is sent once", async () => {
  server.instead = () => "cut";
  await assert.rejects(api().post("v1/x"), Unreachable);
  await assert.rejects(api().get("v1/x"), Unreachable);
  // The browser itself may repeat a GET after a lost connection, but the API does not.
  assert.deepEqual(paused, []);
});

test("retries end, and the user gets an error", async () => {
  server.instead = () => "cut";
  await assert.rejects(api().post("v1/x", {}, { key: "k" }), { name: "Unreachable", status: 0, detail: /reached/ });
  assert.ok(paused.length >= 5);
  assert.ok(paused.reduce((sum, each) => sum + each) >= 10_000, "long enough for a server to restart");
});

test("a response without a body is null", async () => {
  server.instead = () => [200, undefined];
  assert.equal(await api().get("v1/x"), null);
});

test("login repeats the one-time code until the server answers, and keeps the page token", async () => {
  let tries = 0;
  const kept = [];
  server.instead = () => ((tries += 1) <= 3 ? "cut" : [200, { token: "of-the-page", expires: 1 }]);
  const page = new Api({ base: server.base, pause: async () => {}, keepToken: (token) => void kept.push(token) });
  assert.equal(await page.login({ code: "once" }), null);
  assert.deepEqual(server.requests.at(-1).body, { code: "once" });
  assert.deepEqual(kept, ["of-the-page"]);
  server.instead = () => [401, { detail: "cannot log in: the token is wrong" }];
  assert.equal((await page.login({ token: "wrong" }))?.status, 401);
  assert.deepEqual(kept, ["of-the-page"]);
});

test("every request carries the page token once there is one", async () => {
  server.instead = () => [200, {}];
  await api().get("v1/x");
  keepToken("of-the-page");
  await api().get("v1/x");
  const sent = server.requests.map((one) => one.headers.authorization);
  assert.deepEqual(sent, [undefined, "Bearer of-the-page"]);
});

test("only a fragment that begins with a code or a token logs in", () => {
  assert.deepEqual(keyIn("#code=a_b-c"), { code: "a_b-c" });
  assert.deepEqual(keyIn("#token=t"), { token: "t" });
  for (const other of ["", "#", "#code=", "#/s/code=x", "#/s/x&token=y", "#x=1&code=y"]) assert.equal(keyIn(other), null);
});

test("an aborted request is not reported as unreachable", async () => {
  const mine = new AbortController();
  server.instead = () => {
    mine.abort();
    return [200, {}];
  };
  await assert.rejects(api().get("v1/x", {}, { signal: mine.signal }), { name: "AbortError" });
});

test("a query leaves out null and undefined", () => {
  assert.equal(withQuery("v1/x", { a: 1, b: null, c: undefined, d: "ä&=", e: "" }), "v1/x?a=1&d=%C3%A4%26%3D&e=");
  assert.equal(withQuery("v1/x"), "v1/x");
});

const pick = (from, ...names) => Object.fromEntries(names.map((name) => [name, from[name]]));
