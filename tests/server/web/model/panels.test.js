// Panels: texts and actions of why, queue and questions, as pure functions of the server's answers and the log.
import assert from "node:assert/strict";
import { test } from "node:test";

import {
  answeredText,
  choiceFor,
  choicesOf,
  entered,
  fieldsOf,
  fold,
  keysOf,
  saidAbout,
  titleOf,
} from "../../../../src/banksman/server/web/model/questions.js";
import { above, moved, rowsOf } from "../../../../src/banksman/server/web/model/queue.js";
import { accountOf, accountText, asLine, treeOf } from "../../../../src/banksman/server/web/model/why.js";

// -- why --------------------------------------------------------------------------------------------------------------
const WHY = {
  id: "s-1",
  name: "fix ci",
  agent: "claude",
  phase: "running",
  waits_for_place: true,
  owner: { pid: 7, address: "" },
  holder: "t-1",
  hold: null,
  holder_prompt: "Why is\nCI red?",
  queue: [{ turn: "t-2", priority: 10, seconds: 2, attempt: 2, prompt: "later", at: 5 }],
  questions: ["q-1", "q-2"],
  asked: [{ id: "q-1", tool: "Bash", wants: "permission", input: { command: "make", n: [1, null] } }],
  clocks: [
    { name: "progress", seconds: 60, left: 10, running: true },
    { name: "tool", seconds: 30, left: 20, running: false },
  ],
  timers: { "drain t-1": 3 },
  requests: [
    { id: "r", kind: "set_model", seconds: 1 },
    { id: "x", kind: "interrupt", seconds: null },
  ],
  counters: { frames_in: 3, bytes_in: 40, noise: 1 },
  seconds_since_in: 1,
  seconds_since_out: null,
  last_in: { at: 1, text: '{"a":\n1}' },
  last_out: null,
  cost: 0.5,
  tree: [],
};

test("why has the same text as the command line", () => {
  assert.equal(
    accountText(WHY),
    [
      "session   s-1 (fix ci), claude",
      "phase     running, waits for a place in the process pool",
      "owner     process 7 on this machine",
      "holder    t-1",
      "            Why is CI red?",
      "queue     t-2, priority 10, for 2.0 s, attempt 2: later",
      'questions q-1: Bash {"command": "make", "n": [1, null]}',
      "            banksman answer 'fix ci' q-1 allow|deny",
      "          q-2 waits for an answer",
      "clocks    progress: 10.0 s left of 60.0 s",
      "          tool: 20.0 s left of 30.0 s, paused",
      "timers    drain t-1: in 3.0 s",
      "requests  set_model r: not answered for 1.0 s",
      "          interrupt x: not answered",
      "frames    3 in (40 bytes, the last 1.0 s ago), 0 out (0 bytes), 1 noise",
      '          last in: {"a": 1}',
      "cost      $0.5000",
    ].join("\n"),
  );
});

test("clocks count between two responses, paused clocks do not, and none is negative", () => {
  const after = Object.fromEntries(accountOf(WHY, 4));
  assert.deepEqual(after.clocks, ["progress: 6.0 s left of 60.0 s", "tool: 20.0 s left of 30.0 s, paused"]);
  assert.deepEqual(after.timers, ["drain t-1: in 0.0 s"]);
  assert.match(after.queue[0], /for 6\.0 s/);
  assert.match(after.frames[0], /the last 5\.0 s ago/);
  assert.equal(
    accountOf({ ...WHY, clocks: [{ name: "a", seconds: 1, left: 1, running: true }] }, 9).find(
      ([name]) => name === "clocks",
    )[1][0],
    "a: 0.0 s left of 1.0 s",
  );
});

test("a session with little data has a short account", () => {
  const bare = {
    id: "s",
    name: null,
    agent: "codex",
    phase: "asleep",
    holder: null,
    hold: "h-1",
    queue: [],
    questions: [],
    clocks: [],
    timers: {},
    tree: [],
    owner: null,
    cost: null,
  };
  assert.equal(
    accountText(bare),
    "session   s, codex\nphase     asleep\nholder    hold h-1\nqueue     empty\nframes    0 in (0 bytes), 0 out (0 bytes)",
  );
});

test("the account names the holder of each hold and since when", () => {
  const holds = [
    { hold: "h-1", priority: 10, caller: "ann", at: 0 },
    { hold: "h-2", priority: 0, caller: null, at: null },
  ];
  const account = Object.fromEntries(accountOf({ ...WHY, holder: null, hold: "h-1", holds }, 0));
  assert.match(account.holder[0], /^hold h-1 of ann, priority 10, since \d\d:\d\d:\d\d$/u);
  assert.deepEqual(account.holder.slice(1), ["hold h-2, priority 0, waits in the queue"]);
});

test("a tree has parents before children, and a cycle ends", () => {
  const tree = [
    { pid: 3, parent: 2 },
    { pid: 1, parent: 0 },
    { pid: 2, parent: 1 },
    { pid: 4, parent: 1 },
  ];
  assert.deepEqual(
    treeOf(tree).map(({ depth, process }) => [process.pid, depth]),
    [
      [1, 0],
      [2, 1],
      [3, 2],
      [4, 1],
    ],
  );
  // A reused pid, below its own child.
  const circle = [
    { pid: 1, parent: 0 },
    { pid: 2, parent: 1 },
    { pid: 1, parent: 2 },
  ];
  assert.deepEqual(
    treeOf(circle).map(({ process }) => process.pid),
    [1, 2, 1],
  );
});

test("a line is one line, without terminal control characters", () => {
  assert.equal(asLine("a\n\tb\u001b[31mc\u202e"), "a b[31mc");
  assert.equal(asLine("x".repeat(9), 5), "xxxx…");
});

// -- queue ------------------------------------------------------------------------------------------------------------
const wait = (turn, priority, more = {}) => ({ turn, priority, seconds: 1, attempt: 1, prompt: turn, at: 10, ...more });
const SESSION = { queue: [wait("b1", 0), wait("n1", 10), wait("i1", 20), wait("n2", 10), wait("n3", 10)] };
const none = () => ({ cancelled: new Set(), moved: [] });
const names = (rows) => rows.map((row) => row.turn).join(" ");

test("the queue is sorted by urgency, then by arrival", () => {
  const rows = rowsOf(SESSION, () => null, none());
  assert.equal(names(rows), "i1 n1 n2 n3 b1");
  assert.deepEqual(
    rows.map((row) => row.class),
    ["interactive", "normal", "normal", "normal", "background"],
  );
  assert.deepEqual(
    rowsOf(null, () => null),
    [],
  );
});

test("a change by the user is shown before the server confirms it", () => {
  assert.equal(names(rowsOf(SESSION, () => null, { cancelled: new Set(["n1"]), moved: [] })), "i1 n2 n3 b1");
  assert.equal(
    names(rowsOf(SESSION, () => null, { cancelled: new Set(), moved: [{ turn: "n3", before: "n2" }] })),
    "i1 n1 n3 n2 b1",
  );
  assert.equal(
    names(rowsOf(SESSION, () => null, { cancelled: new Set(), moved: [{ turn: "n3", before: null }] })),
    "i1 n3 n1 n2 b1",
  );
});

test("no move leaves its class or passes its head", () => {
  const rows = rowsOf(SESSION, () => null, none());
  assert.equal(above(rows, "n2"), "n1");
  assert.equal(above(rows, "n1"), undefined);
  assert.equal(above(rows, "i1"), undefined);
  assert.equal(above(rows, "gone"), undefined);
  assert.equal(names(moved(rows, "b1", "n1")), names(rows));
  assert.equal(names(moved(rows, "gone", null)), names(rows));
});

test("a prompt that the server does not send comes from the log", () => {
  const queue = [{ turn: "t", priority: 10, seconds: 3, attempt: 1 }];
  const [row] = rowsOf({ queue }, () => ({ prompt: [{ type: "text", text: "from the log" }] }), none(), 100);
  assert.deepEqual([row.prompt, row.at], ["from the log", 97]);
});

// -- questions --------------------------------------------------------------------------------------------------------
const event = (seq, kind, body) => ({ seq, at: seq, turn: "t", kind, body });
const permission = (more = {}) => ({
  id: "q",
  wants: "permission",
  tool: "Bash",
  input: { command: "make" },
  details: {},
  ...more,
});

test("a question is open until it is answered", () => {
  const { open, answered } = fold([
    event(1, "question.asked", { question: "q-1", wants: "permission", tool: "Bash", input: {}, details: {} }),
    event(2, "question.asked", { question: "q-2", wants: "permission", tool: "Read", input: {}, details: {} }),
    event(3, "question.answered", { question: "q-1", answer: "allow", by: "rule", message: null }),
    event(4, "question.answered", { question: "q-0", answer: "allow", by: "rule" }),
    event(5, "question.kept", { question: "q-2" }),
  ]);
  assert.deepEqual(
    open.map((each) => each.id),
    ["q-2"],
  );
  assert.deepEqual([...answered.keys()], ["q-1"]);
  assert.equal(answeredText(answered.get("q-1")), "allowed by a rule");
});

test("a question without options has the usual three", () => {
  const choices = choicesOf(permission());
  assert.deepEqual(
    choices.map((each) => [each.label, each.decision, each.remember ?? false, keysOf(each, choices)]),
    [
      ["Allow", "allow", false, ["a", "1"]],
      ["Allow for this session", "allow", true, ["2"]],
      ["Deny", "deny", false, ["d", "3"]],
    ],
  );
});

test("the agent's options are offered, and keys a and d mean its plain ones", () => {
  const options = [
    { optionId: "always", name: "Always", kind: "allow_always" },
    { optionId: "once", name: "Once", kind: "allow_once" },
    { optionId: "never", name: "Never", kind: "reject_always" },
    { optionId: "no", name: "No", kind: "reject_once" },
    { name: "nonsense" },
  ];
  const choices = choicesOf(permission({ details: { options } }));
  assert.deepEqual(
    choices.map((each) => each.decision),
    ["always", "once", "never", "no"],
  );
  assert.equal(choiceFor("a", choices).decision, "once");
  assert.equal(choiceFor("d", choices).decision, "no");
  assert.equal(choiceFor("3", choices).decision, "never");
  for (const key of ["5", "0", "x", "Enter"]) assert.equal(choiceFor(key, choices), null);
});

test("a question can always be denied", () => {
  const choices = choicesOf(permission({ details: { options: [{ optionId: "go", name: "Go", kind: "allow_once" }] } }));
  assert.deepEqual(
    choices.map((each) => each.decision),
    ["go", "deny"],
  );
  assert.equal(choiceFor("d", choices).decision, "deny");
});

test("a schema becomes fields that a user can fill in", () => {
  const requestedSchema = {
    type: "object",
    required: ["name"],
    properties: {
      name: { type: "string", title: "Name", description: "yours", minLength: 1 },
      age: { type: ["integer", "null"], minimum: 0 },
      ok: { type: "boolean", default: true },
      colour: { type: "string", enum: ["r", "g"], enumNames: ["Red", "Green"] },
      size: { oneOf: [{ const: "s", title: "Small" }] },
      tags: { type: "array", items: { enum: ["x", "y"] } },
      odd: null,
    },
  };
  const fields = fieldsOf({ wants: "elicitation", tool: "github", details: { message: "?", requestedSchema } });
  assert.deepEqual(
    fields.map((each) => [each.name, each.kind, each.isRequired]),
    [
      ["name", "text", true],
      ["age", "number", false],
      ["ok", "boolean", false],
      ["colour", "one", false],
      ["size", "one", false],
      ["tags", "many", false],
      ["odd", "text", false],
    ],
  );
  assert.equal(fields[1].limits.isWhole, true);
  assert.deepEqual(
    fields[3].options.map((each) => each.label),
    ["Red", "Green"],
  );
  assert.deepEqual(fieldsOf({ wants: "elicitation", details: {} }), []);
  assert.deepEqual(entered({ wants: "elicitation", details: {} }, { name: "me" }), { content: { name: "me" } });
});

test("an agent that asks several questions has a field for each", () => {
  const questions = [
    { id: "which", question: "Which one?", options: [{ label: "A", description: "the first" }] },
    { id: "why", question: "Why?" },
  ];
  const fields = fieldsOf({ wants: "elicitation", tool: "requestUserInput", details: { questions } });
  assert.deepEqual(
    fields.map((each) => [each.name, each.kind, each.options.length]),
    [
      ["which", "one", 1],
      ["why", "text", 0],
    ],
  );
});

test("a tool that asks is allowed with the answers in its input", () => {
  const input = { questions: [{ question: "Which?", options: [{ label: "A" }, { label: "B" }], multiSelect: true }] };
  const question = permission({ tool: "AskUserQuestion", input });
  assert.deepEqual(
    fieldsOf(question).map((each) => [each.name, each.kind]),
    [["Which?", "many"]],
  );
  assert.deepEqual(
    choicesOf(question).map((each) => each.label),
    ["Answer", "Decline"],
  );
  assert.deepEqual(entered(question, { "Which?": ["A", "B"] }), {
    updatedInput: { ...input, answers: { "Which?": "A, B" } },
  });
});

test("a question in words", () => {
  assert.equal(titleOf(permission()), "May the agent use Bash?");
  assert.equal(titleOf({ wants: "elicitation", tool: "github", details: {} }), "github asks");
  assert.deepEqual(
    saidAbout(
      permission({
        input: { command: "make", description: "Build it" },
        details: { title: "make", reason: "needs the network" },
      }),
    ),
    ["Build it", "needs the network"],
  );
  assert.equal(answeredText({ answer: "deny", by: "answer", message: "not now" }), "denied by another client: not now");
  assert.equal(answeredText({ answer: "allow", by: "a stranger" }), "allowed by a stranger");
});
