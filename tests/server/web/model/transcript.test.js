// Transcript of events for a reader: the same for every split of the events, with stable keys.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { Transcript } from "../../../../src/banksman/server/web/model/transcript.js";
import { cpuMilliseconds } from "../little.js";

const SAMPLE = readFileSync(new URL("./fixtures/transcript.ndjson", import.meta.url), "utf8")
  .trim()
  .split("\n")
  .map((line) => JSON.parse(line));

/** A log for tests: each call appends the next event. */
class Log {
  constructor() {
    this.events = [];
  }
  add(kind, body = {}, turn = "t1") {
    const seq = this.events.length + 1;
    this.events.push({ seq, at: 1000 + seq, turn, kind, body });
    return this;
  }
  queued(turn, prompt, priority = 10) {
    return this.add("turn.queued", { prompt, priority, on_busy: "enqueue" }, turn);
  }
  started(turn, more = {}) {
    return this.add("turn.started", { attempt: 1, joined: [], ...more }, turn);
  }
  ended(turn, outcome = "done", more = {}) {
    return this.add(
      "turn.ended",
      { outcome, by: "boundary", text: null, error: null, usage: null, cost: null, structured: null, ...more },
      turn,
    );
  }
  update(...updates) {
    return this.add("update", { updates });
  }
  partial(...partial) {
    return this.add("update", { updates: [], partial });
  }
}

const said = (text, messageId = "m1") => ({
  sessionUpdate: "agent_message_chunk",
  content: { type: "text", text },
  messageId,
});
const thought = (text, messageId = "m1") => ({
  sessionUpdate: "agent_thought_chunk",
  content: { type: "text", text },
  messageId,
});
const call = (toolCallId, title, more = {}) => ({
  sessionUpdate: "tool_call",
  toolCallId,
  title,
  kind: "execute",
  status: "in_progress",
  rawInput: { command: title },
  ...more,
});
const result = (toolCallId, text, status = "completed") => ({
  sessionUpdate: "tool_call_update",
  toolCallId,
  status,
  content: [{ type: "content", content: { type: "text", text } }],
});

function read(events) {
  const transcript = new Transcript();
  transcript.reset(events);
  return transcript;
}

function shown(transcript) {
  return transcript.items.map((item) => `${item.kind}:${item.text ?? item.title ?? item.outcome ?? ""}`);
}

test("a real log gives the same items in one piece, event by event, and from the middle", () => {
  const whole = read(SAMPLE);
  assert.ok(whole.items.length > 15);
  const plain = ({ items, waiting, usage }) =>
    JSON.parse(JSON.stringify({ items, waiting, usage }, (name, value) => (name === "version" ? undefined : value)));
  const grown = new Transcript();
  for (const event of SAMPLE) grown.append([event]);
  assert.deepEqual(plain(grown), plain(whole));
  for (let cut = 1; cut < SAMPLE.length; cut += 1) {
    const middle = read(SAMPLE.slice(cut));
    middle.prepend(SAMPLE.slice(0, cut));
    assert.deepEqual(plain(middle), plain(whole), `cut at ${cut}`);
  }
});

test("every key is unique", () => {
  const log = new Log()
    .queued("t1", "a")
    .started("t1")
    .update(call("same", "x"))
    .ended("t1")
    .queued("t2", "b")
    .started("t2")
    .add("question.asked", { question: "q1", wants: "permission", tool: "Bash", input: {} })
    .add("question.asked", { question: "q1", wants: "permission", tool: "Bash", input: {} })
    .ended("t2");
  const keys = read(log.events).items.map((item) => item.key);
  assert.equal(new Set(keys).size, keys.length);
});

test("partials grow one item, and the complete block takes its place and its key", () => {
  const transcript = new Transcript();
  const log = new Log().queued("t1", "hello").started("t1").partial(said("Hel")).partial(said("lo"));
  transcript.append(log.events);
  const [growing] = transcript.items.filter((item) => item.kind === "text");
  assert.deepEqual([growing.text, growing.isPartial], ["Hello", true]);
  const { key } = growing;
  transcript.append(new Log().add("x").add("x").add("x").add("x").update(said("Hello, all.")).events.slice(-1));
  const texts = transcript.items.filter((item) => item.kind === "text");
  assert.deepEqual(
    texts.map((item) => [item.key, item.text, item.isPartial]),
    [[key, "Hello, all.", false]],
  );
});

test("thinking and text grow separately, and text after a complete block is another item", () => {
  const log = new Log()
    .queued("t1", "x")
    .started("t1")
    .partial(thought("hm"))
    .partial(said("A"))
    .update(thought("hm hm"))
    .update(said("A."))
    .partial(said("B"))
    .update(said("B."));
  assert.deepEqual(shown(read(log.events)), ["prompt:x", "thought:hm hm", "text:A.", "text:B."]);
});

test("a complete message of another source does not change the partial of this one", () => {
  const log = new Log()
    .queued("t1", "x")
    .started("t1")
    .partial(said("mine", "m1"))
    .update(said("a subagent's", "m2"))
    .partial(said(" too", "m1"))
    .update(said("mine too", "m1"));
  assert.deepEqual(shown(read(log.events)), ["prompt:x", "text:mine too", "text:a subagent's"]);
});

test("incomplete partials stay when their turn ends", () => {
  const log = new Log().queued("t1", "x").started("t1").partial(said("half a sen")).ended("t1", "interrupted");
  const item = read(log.events).items.find(({ kind }) => kind === "text");
  assert.deepEqual([item.text, item.isPartial], ["half a sen", false]);
});

test("chunks of one message are one text, chunks of the next are another", () => {
  const log = new Log()
    .queued("t1", "x")
    .started("t1")
    .update(said("a"))
    .update(said("b"))
    .update(said("c", "m2"))
    .update(call("1", "make"))
    .update(said("d", "m2"));
  assert.deepEqual(shown(read(log.events)), ["prompt:x", "text:ab", "text:c", "tool:make", "text:d"]);
});

test("a text that begins before the window keeps its key when its beginning is added", () => {
  const log = new Log().queued("t1", "x").started("t1").update(said("one ")).update(said("two ")).update(said("three"));
  const transcript = read(log.events.slice(4));
  const { key, text } = transcript.items[0];
  assert.equal(text, "three");
  transcript.prepend(log.events.slice(3, 4));
  assert.deepEqual([transcript.items[0].key, transcript.items[0].text], [key, "two three"]);
  transcript.prepend(log.events.slice(2, 3));
  // The text is complete, and the events before it do not belong to it: the item stays the same.
  transcript.prepend(log.events.slice(0, 2));
  const item = transcript.items.find(({ kind }) => kind === "text");
  assert.deepEqual([item.key, item.text], [key, "one two three"]);
});

test("the end of a tool finds its beginning later, under the same key", () => {
  const log = new Log()
    .queued("t1", "x")
    .started("t1")
    .update(call("1", "make test"))
    .update(said("…"))
    .update(result("1", "ok"));
  const transcript = read(log.events.slice(4));
  assert.deepEqual([transcript.items[0].title, transcript.items[0].status], [null, "completed"]);
  const { key } = transcript.items[0];
  transcript.prepend(log.events.slice(0, 4));
  const tool = transcript.items.find(({ kind }) => kind === "tool");
  assert.deepEqual([tool.key, tool.title, tool.status, tool.ended - tool.began], [key, "make test", "completed", 2]);
  assert.deepEqual(shown(transcript), ["prompt:x", "tool:make test", "text:…"]);
});

test("a tool that still runs when its turn ends was cut short", () => {
  const log = new Log().queued("t1", "x").started("t1").update(call("1", "sleep")).ended("t1", "interrupted");
  assert.equal(read(log.events).items.find(({ kind }) => kind === "tool").status, "stopped");
});

test("a prompt is placed where its turn begins, and is separate until then", () => {
  const log = new Log().queued("t1", "first").started("t1").queued("t2", "second").update(said("answer"));
  const transcript = read(log.events);
  assert.deepEqual(shown(transcript), ["prompt:first", "text:answer"]);
  assert.deepEqual(
    transcript.waiting.map(({ text, state }) => [text, state]),
    [["second", "queued"]],
  );
  const { key } = transcript.waiting[0];
  transcript.append(log.ended("t1").started("t2").events.slice(4));
  assert.deepEqual(shown(transcript), ["prompt:first", "text:answer", "ended:done", "prompt:second"]);
  assert.equal(transcript.items[3].key, key);
  assert.deepEqual(transcript.waiting, []);
});

test("an edited prompt is shown as it is now, before and after it begins", () => {
  const log = new Log().queued("t1", "first").add("turn.edited", { prompt: "second", priority: null, caller: "bob" });
  const transcript = read(log.events);
  assert.deepEqual(
    transcript.waiting.map(({ text, priority }) => [text, priority]),
    [["second", 10]],
  );
  transcript.append(log.started("t1").events.slice(-1));
  assert.deepEqual(shown(transcript), ["prompt:second"]);
});

test("a withdrawn prompt is shown with its end, a preempted one waits again", () => {
  const withdrawn = read(new Log().queued("t1", "never").ended("t1", "withdrawn").events);
  assert.deepEqual([shown(withdrawn), withdrawn.waiting], [["prompt:never", "ended:withdrawn"], []]);
  const log = new Log()
    .queued("t1", "chore", 0)
    .started("t1")
    .add("turn.interrupted", { cause: "preempt", clock: null })
    .add("turn.requeued", { attempt: 2 });
  const transcript = read(log.events);
  assert.match(transcript.items.at(-1).text, /more urgent/);
  assert.deepEqual(
    transcript.waiting.map(({ text, attempt }) => [text, attempt]),
    [["chore", 2]],
  );
  transcript.append(log.started("t1", { attempt: 2 }).events.slice(-1));
  assert.deepEqual(
    transcript.items.filter(({ kind }) => kind === "prompt").map(({ key, attempt }) => [key, attempt]),
    [
      ["prompt:t1", 1],
      ["prompt:t1:2", 2],
    ],
  );
});

test("a prompt from before the window is learned from elsewhere", () => {
  const log = new Log().queued("t1", "long ago").started("t1").update(said("a"));
  const transcript = read(log.events.slice(1));
  assert.equal(transcript.items[0].prompt, null);
  transcript.learn(log.events.slice(0, 1));
  assert.deepEqual(shown(transcript), ["prompt:long ago", "text:a"]);
});

test("a turn has one plan, the newest, and the call that made it is hidden", () => {
  const plan = (...statuses) => ({
    sessionUpdate: "plan",
    entries: statuses.map((status, i) => ({ content: `step ${i}`, status })),
  });
  const log = new Log()
    .queued("t1", "x")
    .started("t1")
    .update(call("1", "TodoWrite"), plan("pending"))
    .update(said("a"))
    .update(call("2", "TodoWrite"), plan("completed"));
  const transcript = read(log.events);
  assert.deepEqual(
    transcript.items.map(({ kind }) => kind),
    ["prompt", "text", "plan"],
  );
  assert.equal(transcript.items[2].entries[0].status, "completed");
});

test("text that is sent only with the end is shown, and text that was sent before is not repeated", () => {
  assert.deepEqual(
    shown(read(new Log().queued("t1", "x").started("t1").ended("t1", "done", { text: "only here" }).events)),
    ["prompt:x", "text:only here", "ended:done"],
  );
  assert.deepEqual(
    shown(
      read(new Log().queued("t1", "x").started("t1").update(said("here")).ended("t1", "done", { text: "here" }).events),
    ),
    ["prompt:x", "text:here", "ended:done"],
  );
});

test("a question is answered where it was asked", () => {
  const log = new Log()
    .queued("t1", "x")
    .started("t1")
    .add("question.asked", {
      question: "q",
      wants: "permission",
      tool: "Bash",
      input: { command: "ls" },
      details: {},
    })
    .add("question.answered", { question: "q", answer: "allow", by: "rule", message: null });
  assert.deepEqual(
    read(log.events)
      .items.filter(({ kind }) => kind === "question")
      .map(({ answer, by }) => [answer, by]),
    [["allow", "rule"]],
  );
});

test("any output of an agent is folded without an exception", () => {
  const odd = [
    null,
    7,
    "x",
    [],
    {},
    { sessionUpdate: "agent_message_chunk" },
    { sessionUpdate: "agent_message_chunk", content: { type: "image" } },
    { sessionUpdate: "tool_call" },
    { sessionUpdate: "tool_call_update", toolCallId: {}, content: "x" },
    { sessionUpdate: "plan", entries: [null, 3, { content: null }] },
    { sessionUpdate: "__proto__" },
    { sessionUpdate: "usage_update", used: "many" },
    { sessionUpdate: "tool_call", toolCallId: "__proto__", title: { toString: 1 }, content: [null, 1, {}] },
  ];
  const log = new Log()
    .queued("__proto__", [{ type: "text", text: "a" }, null, { type: "image", data: 1 }])
    .started("__proto__")
    .update(...odd)
    .partial(...odd)
    .add("made.later", { x: 1 })
    .add("process.exited", {})
    .add("session.recovered", {})
    .ended("__proto__", "done");
  const transcript = read(log.events);
  transcript.prepend([]);
  assert.equal(transcript.items.at(-1).kind, "ended");
  assert.equal({}.polluted, undefined);
});

test("twenty thousand events are folded quickly", () => {
  const log = new Log();
  for (let turn = 0; turn < 400; turn += 1) {
    log.queued(`t${turn}`, `prompt ${turn}`).started(`t${turn}`);
    for (let i = 0; i < 20; i += 1)
      log
        .add("update", { updates: [call(`${turn}.${i}`, "x")] }, `t${turn}`)
        .add("update", { updates: [result(`${turn}.${i}`, "y")], partial: [said("z")] }, `t${turn}`);
    for (let i = 0; i < 7; i += 1) log.add("sent", {}, `t${turn}`);
    log.ended(`t${turn}`);
  }
  assert.ok(log.events.length > 19_000);
  let transcript;
  const took = cpuMilliseconds(() => (transcript = read(log.events)));
  assert.ok(transcript.items.length > 8_000);
  // It takes some ten milliseconds on an idle machine.
  assert.ok(took < 4000, `${took} ms`);
});

test("a malformed event does not hide the events after it", () => {
  // `String` throws for this object.
  const odd = { toString: "x", valueOf: "y" };
  const log = new Log()
    .queued("t1", "go")
    .started("t1")
    .update(said(odd))
    .update(call(odd, odd, { kind: odd }))
    .update({ sessionUpdate: "plan", entries: [{ content: odd }, null, odd] })
    .update({ sessionUpdate: "plan", entries: odd })
    .update({ sessionUpdate: "usage_update", used: odd, size: odd })
    .update(null, odd, { sessionUpdate: odd })
    .add("session.opened", { agent: odd })
    .add("update", null)
    .update(said("AFTER", "m2"))
    .ended("t1");
  const words = shown(read(log.events));
  assert.ok(words.includes("text:AFTER"), words.join("\n"));
  assert.ok(words.at(-1).startsWith("ended:"));
});

test("an ending has the cause of a failure, and says that a successful turn gave no answer", () => {
  const failure = { kind: "usage_limit", hint: "wait", limited_until: 5 };
  const ended = (...events) => read(events.flatMap((each) => each.events)).items.at(-1);
  assert.deepEqual(ended(new Log().started("t1").ended("t1", "failed", { error: "no", failure })).failure, failure);
  const done = (more, ...updates) =>
    ended(new Log().started("t1").update(call("c", "ls"), ...updates).ended("t1", "done", more));
  assert.equal(done({ used_tools: true, text: " " }).isEmpty, true);
  assert.equal(done({ used_tools: true }).isEmpty, true);
  assert.equal(done({ used_tools: true }, said("fine")).isEmpty, false);
  assert.equal(done({ used_tools: true, text: "fine" }).isEmpty, false);
  assert.equal(done({ used_tools: true, structured: {} }).isEmpty, false);
  // An event of an earlier version does not say whether a tool was used.
  assert.equal(done({ text: "" }).isEmpty, false);
});
