// Server-sent events, split at every place where a network can split them.
import assert from "node:assert/strict";
import { test } from "node:test";
import { Parser, TooLong } from "../../../../src/banksman/server/web/net/sse.js";

const bytes = (text) => new TextEncoder().encode(text);
const said = (text) => new Parser().push(bytes(text));

const TEXT =
  "retry: 1000\n\n" +
  "retry: 1000\nid: 11\ndata: {}\n\n" +
  'id: 12\ndata: {"text":"größer – 🏗"}\n\n' +
  ": a comment\n" +
  "event: stream.live\ndata: {}\n\n" +
  "data: two\ndata: lines\r\n\r\n" +
  "event: x\r\ndata: y\r\n\r\n" +
  "id:13\rdata:without a space\r\r" +
  "data\n\n";
const MESSAGES = [
  { id: "11", event: null, data: "{}" },
  { id: "12", event: null, data: '{"text":"größer – 🏗"}' },
  { id: null, event: "stream.live", data: "{}" },
  { id: null, event: null, data: "two\nlines" },
  { id: null, event: "x", data: "y" },
  { id: "13", event: null, data: "without a space" },
  { id: null, event: null, data: "" },
];

test("messages are parsed as the specification says", () => {
  assert.deepEqual(said(TEXT), MESSAGES);
});

test("a chunk boundary at any byte changes nothing", () => {
  const all = bytes(TEXT);
  for (let at = 0; at <= all.length; at += 1) {
    const parser = new Parser();
    assert.deepEqual([...parser.push(all.slice(0, at)), ...parser.push(all.slice(at))], MESSAGES, `cut at ${at}`);
  }
});

test("parsing byte by byte gives the same result", () => {
  const parser = new Parser();
  const found = [...bytes(TEXT)].flatMap((byte) => parser.push(Uint8Array.of(byte)));
  assert.deepEqual(found, MESSAGES);
});

test("an incomplete message is not delivered", () => {
  assert.deepEqual(said("data: half"), []);
  assert.deepEqual(said("data: half\n"), []);
});

test("an id or an event without data is ignored, and does not affect the next message", () => {
  assert.deepEqual(said("id: 1\nevent: x\n\ndata: y\n\n"), [{ id: null, event: null, data: "y" }]);
});

test("a message beyond the bound is refused, and a smaller one is not", () => {
  const fits = "x".repeat(100 - "data:".length);
  assert.equal(new Parser(100).push(bytes(`data:${fits}\n\n`)).length, 1);
  assert.throws(() => new Parser(100).push(bytes(`data:${fits}x\n\n`)), TooLong);
  const parser = new Parser(100);
  assert.throws(() => {
    for (let i = 0; i < 101; i += 1) parser.push(bytes("x"));
  }, TooLong);
});

test("the bound applies to one message, not to the sum", () => {
  const parser = new Parser(100);
  for (let i = 0; i < 100; i += 1) assert.equal(parser.push(bytes("data: twenty letters\n\n")).length, 1);
});

test("many lines of one message are counted together", () => {
  assert.throws(() => new Parser(100).push(bytes("data: twenty letters\n".repeat(10))), TooLong);
});
