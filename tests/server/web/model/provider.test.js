// Retries, usage limits and empty answers in words: pure functions of the server's answers and the log.
import assert from "node:assert/strict";
import { test } from "node:test";

import { noteOf } from "../../../../src/banksman/server/web/model/notes.js";
import { budgetText, capText, kindText, limitText, retryText, windowText } from "../../../../src/banksman/server/web/model/provider.js";
import { accountOf } from "../../../../src/banksman/server/web/model/why.js";
import { clockTime, dayTime } from "../../../../src/banksman/server/web/model/words.js";

const NOW = 1_800_000_000;
const UNTIL = NOW + 3600;
const at = clockTime(UNTIL).slice(0, 5);
const RETRY = { attempt: 3, attempts_max: 10, seconds: 12, cause: "overloaded\nagain", error: "overloaded", status: 529 };

test("a limit is told with its end and the waiting asks", () => {
  assert.equal(limitText({ limited_until: UNTIL, queue: [1, 2, 3] }, NOW), `limited until ${at}, 3 asks wait`);
  assert.equal(limitText({ limited_until: UNTIL, queue: [1] }, NOW), `limited until ${at}, 1 ask waits`);
  assert.equal(limitText({ limited_until: UNTIL }, NOW), `limited until ${at}`);
  const late = NOW + 5 * 86_400;
  assert.equal(limitText({ limited_until: late, queue: [] }, NOW), `limited until ${dayTime(late)}`);
});

test("no limit and a limit in the past are not told", () => {
  for (const until of [null, undefined, NOW, NOW - 1, "x"]) assert.equal(limitText({ limited_until: until }, NOW), "");
});

test("asks that wait longer than the limit are told", () => {
  assert.equal(limitText({ limited_until: null, waits_for_limit: true, queue: [1] }, NOW), "limited, 1 ask waits");
  assert.equal(limitText({ limited_until: UNTIL, waits_for_limit: true, queue: [] }, NOW), `limited until ${at}`);
});

test("a retry is told with its attempt, its delay and its cause", () => {
  assert.equal(retryText(RETRY), "retry 3 of 10 in 12 s: overloaded (529)");
  assert.equal(retryText(RETRY, 20), "retry 3 of 10: overloaded (529)");
  assert.equal(retryText({ attempt: 1, attempts_max: null, seconds: 0, error: "rate_limited" }), "retry 1: rate limited");
  assert.equal(kindText(undefined), "other");
});

test("why tells the retry, the limit and the windows", () => {
  const window = { name: "five_hour", used: 1, resets_at: UNTIL, exhausted: true };
  const why = { id: "s", agent: "claude", phase: "running", queue: [{ turn: "t", attempt: 1, seconds: 0 }] };
  const account = accountOf({ ...why, retry: RETRY, limited_until: UNTIL, limits: [window] }, 0, NOW);
  const told = Object.fromEntries(account);
  assert.deepEqual(told.retry, ["retry 3 of 10 in 12 s: overloaded (529): overloaded again"]);
  const resets = `five_hour, 100 % used, resets at ${dayTime(UNTIL)}`;
  assert.deepEqual(told.limits, [`limited until ${at}, 1 ask waits`, resets]);
  assert.equal(windowText({ name: "week", used: null, resets_at: null }), "week");
});

test("retries and limits have a note, and a limit that ends has none", () => {
  const note = noteOf({ kind: "provider.retrying", body: { ...RETRY, delay: 12 } });
  assert.equal(note.text, "The provider failed (overloaded, 529). The agent tries again in 12 s, 3 of 10.");
  assert.equal(note.detail, RETRY.cause);
  const limited = noteOf({ kind: "limits.changed", body: { windows: [], limited_until: UNTIL } });
  assert.equal(limited.text, `The agent's account is limited until ${dayTime(UNTIL)}.`);
  assert.equal(noteOf({ kind: "limits.changed", body: { windows: [], limited_until: null } }), null);
});

test("a fall-back has a note, and the account names the agents of the session", () => {
  const body = { from: "claude", to: "codex", why: "limited", limited_until: UNTIL };
  const note = noteOf({ kind: "session.fell_back", body });
  assert.equal(note.text, `codex serves the next turns, and not claude (limited until ${dayTime(UNTIL)}).`);
  const fallback = [
    { name: "claude", limited_until: UNTIL, missing: false },
    { name: "codex", limited_until: null, missing: false },
    { name: "gemini", limited_until: null, missing: true },
  ];
  const why = { id: "s", agent: "codex", phase: "idle", queue: [] };
  const told = Object.fromEntries(accountOf({ ...why, fallback }, 0, NOW));
  assert.equal(told.agents[0].startsWith("claude, limited until "), true);
  assert.deepEqual(told.agents.slice(1), ["codex, serves the session", "gemini, not installed"]);
});

test("a budget that is used up names its cap and the asks that wait", () => {
  const use = { scope: "session", unit: "tokens", used: 1200, cap: 1000, caller: null, reached: true };
  assert.equal(budgetText({ budget: [use], queue: [1, 2] }), "over budget: 1,200 of 1,000 tokens; 2 asks wait");
  assert.equal(budgetText({ budget: [{ ...use, reached: false }], queue: [1] }), "");
  assert.equal(budgetText({}), "");
  assert.equal(capText({ ...use, unit: "usd", used: 5.034, cap: 5 }), "5.03 of 5 US dollars (estimate)");
  assert.equal(capText({ ...use, scope: "caller", caller: "alice" }), "1,200 of 1,000 tokens of alice today");
});
