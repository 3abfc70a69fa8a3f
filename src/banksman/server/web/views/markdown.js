// Draw Markdown as nodes. The tree comes from model/markdown_blocks.js. Each kind of node has one
// element, with text inserted as text. A link leads only to http, https and mailto, shows its
// target in its title, and sends no referrer. Any other link stays text. A picture becomes a link:
// the page requests nothing that an agent names.
//
// A growing text is redrawn only from the first changed block on (`grow`), so that a selection
// above it stays and nothing flickers.
// @ts-check

import { el } from "../dom.js";
import { parse } from "../model/markdown_blocks.js";
import { isSafe } from "../model/markdown_inline.js";
import { copyButton } from "./items/parts.js";

/** @typedef {import("../model/markdown_blocks.js").Block} Block */
/** @typedef {import("../model/markdown_inline.js").Inline} Inline */
/** @typedef {import("./items/parts.js").Kit} Kit */

/** @typedef {{block: Block, node: Element}} Drawn */

/**
 * Make `parent` show this text.
 * @param {HTMLElement & {drawn?: Drawn[]}} parent
 * @param {string} text
 * @param {Kit} kit
 */
export function grow(parent, text, kit) {
  const drawn = parent.drawn ?? [];
  const blocks = parse(text);
  let same = 0;
  while (same < drawn.length && same < blocks.length && drawn[same].block.raw === blocks[same].raw) same += 1;
  // The block that is being written is nearly always the same block with more words.
  if (same < drawn.length && same < blocks.length && lengthen(drawn[same], blocks[same])) {
    drawn[same].block = blocks[same];
    same += 1;
  }
  for (const { node } of drawn.splice(same)) node.remove();
  for (const block of blocks.slice(same)) {
    const node = nodeOf(block, kit);
    parent.append(node);
    drawn.push({ block, node });
  }
  parent.drawn = drawn;
}

/**
 * Append the new part of a block, without creating the rest again.
 * @param {Drawn} drawn
 * @param {Block} now
 * @returns {boolean} whether that was possible
 */
function lengthen({ block, node }, now) {
  if (block.type === "code" && now.type === "code") {
    if (block.language !== now.language || !now.text.startsWith(block.text)) return false;
    const code = /** @type {Element} */ (node.querySelector("code"));
    if (code.firstChild) /** @type {Text} */ (code.firstChild).appendData(now.text.slice(block.text.length));
    else code.append(now.text);
    return true;
  }
  if (block.type !== "paragraph" || now.type !== "paragraph") return false;
  const old = block.children;
  let same = 0;
  while (same < old.length && same < now.children.length && isSame(old[same], now.children[same])) same += 1;
  const [before, after] = [old[same], now.children[same]];
  if (typeof before === "string" && typeof after === "string" && after.startsWith(before)) {
    /** @type {Text} */ (node.childNodes[same]).appendData(after.slice(before.length));
    same += 1;
  }
  while (node.childNodes.length > same) node.lastChild?.remove();
  node.append(...spans(now.children.slice(same)));
  return true;
}

/**
 * @param {Inline} one
 * @param {Inline} other
 */
function isSame(one, other) {
  return one === other || (typeof one === "object" && JSON.stringify(one) === JSON.stringify(other));
}

/**
 * @param {Block} block
 * @param {Kit} kit
 * @returns {Element}
 */
function nodeOf(block, kit) {
  switch (block.type) {
    // The page has its own headings. The headings of a text begin below their level.
    case "heading":
      return el(`h${Math.min(6, block.level + 2)}`, { class: `h${block.level}` }, spans(block.children));
    case "paragraph":
      return el("p", null, spans(block.children));
    case "rule":
      return el("hr");
    case "quote":
      return el(
        "blockquote",
        null,
        block.blocks.map((inner) => nodeOf(inner, kit)),
      );
    case "code":
      return codeBlock(block.text, block.language, kit);
    case "list":
      return list(block, kit);
    case "table":
      return table(block);
    default:
      throw new Error("no such block");
  }
}

/**
 * @param {string} text
 * @param {string} language
 * @param {Kit} kit
 */
export function codeBlock(text, language, kit) {
  const code = el("code", null, text);
  return el(
    "figure",
    { class: "code" },
    el(
      "figcaption",
      null,
      el("span", null, language || "text"),
      copyButton("Copy code", () => code.textContent, kit),
    ),
    // Scrollable content must be reachable by keyboard.
    el("pre", { tabIndex: 0, role: "group", "aria-label": language ? `Code, ${language}` : "Code" }, code),
  );
}

/**
 * @param {Extract<Block, {type: "list"}>} block
 * @param {Kit} kit
 */
function list(block, kit) {
  const props = block.isOrdered && block.start !== 1 ? { start: block.start } : null;
  return el(
    block.isOrdered ? "ol" : "ul",
    props,
    block.items.map(({ checked, blocks }) => {
      const inside = blocks.map((inner) =>
        block.isTight && inner.type === "paragraph"
          ? el("span", { class: "tight" }, spans(inner.children))
          : nodeOf(inner, kit),
      );
      if (checked === null) return el("li", null, inside);
      return el(
        "li",
        { class: "task" },
        el("span", {
          class: "box",
          role: "img",
          "aria-label": checked ? "done" : "not done",
          dataset: { checked },
        }),
        inside,
      );
    }),
  );
}

/** @param {Extract<Block, {type: "table"}>} block */
function table(block) {
  const cell = (/** @type {string} */ tag) => (/** @type {Inline[]} */ children, /** @type {number} */ column) =>
    el(tag, { class: `align-${block.align[column]}` }, spans(children));
  return el(
    "div",
    { class: "table", tabIndex: 0, role: "group", "aria-label": "Table" },
    el(
      "table",
      null,
      el("thead", null, el("tr", null, block.head.map(cell("th")))),
      el(
        "tbody",
        null,
        block.rows.map((row) => el("tr", null, row.map(cell("td")))),
      ),
    ),
  );
}

/**
 * @param {Inline[]} children
 * @returns {(Node|string)[]}
 */
function spans(children) {
  return children.map(span);
}

/**
 * @param {Inline} one
 * @returns {Node|string}
 */
function span(one) {
  if (typeof one === "string") return one;
  switch (one.type) {
    case "code":
      return el("code", null, one.text);
    case "break":
      return el("br");
    case "strong":
      return el("strong", null, spans(one.children));
    case "em":
      return el("em", null, spans(one.children));
    case "strike":
      return el("s", null, spans(one.children));
    case "link":
      return link(one);
    default:
      return "";
  }
}

/** @param {Extract<Inline, {type: "link"}>} one */
function link(one) {
  const inside = one.children.length ? spans(one.children) : [one.href];
  // Show the target of a refused link. Otherwise it looks like a mistake.
  if (!isSafe(one.href)) return el("span", { class: "no-link", title: one.href }, inside);
  const words = one.isImage ? ["Picture: ", ...inside] : inside;
  return el("a", { href: one.href, title: one.href, target: "_blank", rel: "noopener noreferrer" }, words);
}
