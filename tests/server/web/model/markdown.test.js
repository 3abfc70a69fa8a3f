// Untrusted Markdown: the parser handles what agents write, makes nothing executable, and is quick for every text.
import assert from "node:assert/strict";
import { test } from "node:test";
import { NESTED_MAX, parse } from "../../../../src/banksman/server/web/model/markdown_blocks.js";
import { inline, isSafe } from "../../../../src/banksman/server/web/model/markdown_inline.js";
import { cpuMilliseconds } from "../little.js";

/** Return the words of a tree, without its marks. */
function words(one) {
  if (typeof one === "string") return one;
  if (Array.isArray(one)) return one.map(words).join("");
  return one.text ?? words(one.children ?? one.blocks ?? one.items ?? (one.type === "break" ? "\n" : ""));
}

function kinds(text) {
  return parse(text).map((block) => block.type);
}

/** Return all node types in a tree: nothing else can reach the document. */
function types(tree) {
  const found = new Set();
  JSON.stringify(tree, (name, value) => (name === "type" && found.add(value), value));
  return [...found].sort();
}

test("the blocks that agents write are parsed", () => {
  assert.deepEqual(kinds("# a\n\nb\nc\n\n- d\n- e\n\n1. f\n\n> g\n\n---\n\n```js\nh\n```\n\n|i|j|\n|-|-|\n|k|l|"), [
    "heading",
    "paragraph",
    "list",
    "list",
    "quote",
    "rule",
    "code",
    "table",
  ]);
});

test("emphasis, code and links are parsed, and words with underscores are words", () => {
  assert.deepEqual(inline("a **b _c_** `d*e*` snake_case_word ~~f~~"), [
    "a ",
    { type: "strong", children: ["b ", { type: "em", children: ["c"] }] },
    " ",
    { type: "code", text: "d*e*" },
    " snake_case_word ",
    { type: "strike", children: ["f"] },
  ]);
  assert.deepEqual(inline("[x](https://a.example/b_(c))"), [
    { type: "link", href: "https://a.example/b_(c)", children: ["x"], isImage: false },
  ]);
  assert.deepEqual(inline("see https://a.example/b."), [
    "see ",
    { type: "link", href: "https://a.example/b", children: ["https://a.example/b"], isImage: false },
    ".",
  ]);
  assert.deepEqual(inline("*one **two***"), [
    { type: "em", children: ["one ", { type: "strong", children: ["two"] }] },
  ]);
  assert.deepEqual(inline("a.__init__ and b.__name__, x__y__z"), ["a.__init__ and b.__name__, x__y__z"]);
  assert.deepEqual(inline("_a_b_"), [{ type: "em", children: ["a_b"] }]);
  assert.deepEqual(inline("2 * 3 * 4 and **open"), ["2 * 3 * 4 and **open"]);
});

test("HTML is text", () => {
  for (const text of [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<a href='javascript:alert(1)'>x</a>",
    "&lt;b&gt;",
    "<!-- x -->",
  ]) {
    assert.deepEqual(types(parse(text)), ["paragraph"], text);
  }
  assert.equal(words(parse("&lt;script&gt;")), "<script>");
});

test("only URLs that a browser opens and does not run are links", () => {
  for (const address of ["https://a", "HTTP://a/b?c=d", "mailto:a@b"]) assert.ok(isSafe(address), address);
  for (const address of [
    "javascript:alert(1)",
    "JaVaScRiPt:alert(1)",
    " javascript:x",
    "java\tscript:x",
    "data:text/html,x",
    "data:image/svg+xml,x",
    "vbscript:x",
    "file:///etc/passwd",
    "blob:x",
    "//a.example",
    "/v1/drain",
    "#token=x",
    "",
    "https:",
    "x:https://a",
  ])
    assert.ok(!isSafe(address), address);
});

test("a picture is parsed with its URL and never loaded", () => {
  assert.deepEqual(inline("![alt](https://a.example/x.png)"), [
    { type: "link", href: "https://a.example/x.png", children: ["alt"], isImage: true },
  ]);
});

test("a fence ends only with its own mark", () => {
  const [code, after] = parse("````js\nh\n\n```\n> i\n````\nafter");
  assert.deepEqual([code.text, code.language, code.isClosed, words(after)], ["h\n\n```\n> i", "js", true, "after"]);
});

test("an unclosed fence reaches the end, and a block has its source", () => {
  const [before, code] = parse("a\n\n```py\nx = 1\n# b");
  assert.equal(before.raw, "a");
  assert.deepEqual(
    { ...code, raw: undefined },
    { type: "code", language: "py", text: "x = 1\n# b", isClosed: false, raw: undefined },
  );
});

test("a growing text keeps the source of every block but the last", () => {
  const text = "# a\n\nb **c** d\n\n- e\n- f\n\n```\ng\n\nh\n```\n\nend";
  for (let length = 1; length < text.length; length += 1) {
    const now = parse(text.slice(0, length)).map((block) => block.raw);
    const whole = parse(text).map((block) => block.raw);
    for (const [index, raw] of now.slice(0, -1).entries()) assert.equal(raw, whole[index], `${length}`);
  }
});

test("nesting is bounded, and deeper marks are text", () => {
  for (const text of [
    ">".repeat(2000) + " deep",
    Array.from({ length: 2000 }, (_, i) => `${"  ".repeat(i)}- x`).join("\n"),
    "- ".repeat(2000) + "deep",
  ]) {
    let depth = 0;
    const look = (blocks, level) => {
      depth = Math.max(depth, level);
      for (const block of blocks ?? [])
        for (const inner of [block.blocks, ...(block.items ?? []).map((item) => item.blocks)]) look(inner, level + 1);
    };
    look(parse(text), 0);
    assert.ok(depth <= NESTED_MAX + 1, `${depth}`);
  }
});

test("invalid tables are paragraphs, and cells may contain a bar", () => {
  assert.deepEqual(kinds("a | b\n--- | --- | ---"), ["paragraph"]);
  const [table] = parse("a | b\n:-: | --:\n1\\|2 | `x`\n3");
  assert.deepEqual([table.align, table.rows.length, words(table.rows[0][0])], [["center", "right"], 1, "1|2"]);
});

// A hundred times the time on an idle machine. A parser that is not linear takes minutes.
const MILLISECONDS_MAX = 10_000;
const HOSTILE = {
  "ten million backticks": "`".repeat(1e7),
  "runs of backticks of every length": Array.from({ length: 2500 }, (_, i) => "`".repeat(i + 1)).join("x"),
  "runs that never match": "`a``b```".repeat(2e5),
  "openers without end": "**a*b_c".repeat(5e4),
  brackets: "[".repeat(1e5),
  "links that never end": "[a](b ".repeat(5e4) + "[](".repeat(5e4),
  "angles and addresses": "<http://a".repeat(3e4) + "http://".repeat(1e5),
  "quotes in quotes": "> ".repeat(1e5),
  "lists in lists": "- ".repeat(1e5),
  "one long line of spaces": `${" ".repeat(1e6)}x`,
  bars: `${"|".repeat(1e5)}\n${"|-".repeat(1e5)}`,
  "tables in a row": "a|b\n-|-\n".repeat(1e5),
  "empty lines": "\n".repeat(1e5),
  "fences in fences": "```\n".repeat(5e4),
  backslashes: "\\".repeat(5e5),
  "marks of headings": "# ".repeat(1e5) + "#".repeat(1e5),
  entities: "&amp".repeat(1e5),
};
for (const [name, text] of Object.entries(HOSTILE)) {
  test(`bounded: ${name}`, () => {
    const took = cpuMilliseconds(() => parse(text));
    assert.ok(took < MILLISECONDS_MAX, `${Math.round(took)} ms for ${text.length}`);
  });
}
