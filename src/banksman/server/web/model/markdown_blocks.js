// Parse Markdown into blocks: headings, paragraphs, lists, tables, quotes, code. Text in, tree out.
//
// The parser covers the Markdown that agents write: a part of CommonMark, with GitHub's tables.
// Safety comes before completeness. Nothing is HTML (a tag is text). Each line is read once per
// level of nesting. There are at most NESTED_MAX levels; deeper marks are text. Every top-level
// block keeps its source (`raw`), so that a growing text is redrawn only where it grew.
// @ts-check

import { inline } from "./markdown_inline.js";

/** @typedef {import("./markdown_inline.js").Inline} Inline */
/**
 * @typedef {{raw?: string} & (
 *   {type: "heading", level: number, children: Inline[]} | {type: "paragraph", children: Inline[]} | {type: "rule"}
 *   | {type: "code", language: string, text: string, isClosed: boolean} | {type: "quote", blocks: Block[]}
 *   | {type: "list", isOrdered: boolean, start: number, isTight: boolean, items: {checked: boolean|null, blocks: Block[]}[]}
 *   | {type: "table", align: string[], head: Inline[][], rows: Inline[][][]})} Block
 */

export const NESTED_MAX = 8;
/** A wider table is not parsed as a table. */
const COLUMNS_MAX = 64;
const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]|$)/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:[ \t]|$)/;
const QUOTE = /^ {0,3}>/;
const DELIMITER = /^[\s|:-]+$/;
/** Longer than any mark: patterns are tried against at most this much of a line. */
const MARK_CHARACTERS_MAX = 400;

/**
 * @param {string} text
 * @returns {Block[]}
 */
export function parse(text) {
  const lines = text.replaceAll("\r\n", "\n").replaceAll("\0", "\ufffd").split("\n");
  return new Blocks(lines, 0).read();
}

class Blocks {
  /**
   * @param {string[]} lines
   * @param {number} depth
   */
  constructor(lines, depth) {
    this.lines = lines;
    this.depth = depth;
    this.at = 0;
  }

  /** @returns {Block[]} */
  read() {
    /** @type {Block[]} */
    const blocks = [];
    while (this.at < this.lines.length) {
      if (isBlank(this.lines[this.at])) {
        this.at += 1;
        continue;
      }
      const from = this.at;
      const block = this.#block(this.lines[from]);
      if (this.depth === 0) block.raw = this.lines.slice(from, this.at).join("\n");
      blocks.push(block);
    }
    return blocks;
  }

  /**
   * @param {string} line
   * @returns {Block}
   */
  #block(line) {
    const head = line.slice(0, MARK_CHARACTERS_MAX);
    const fence = FENCE.exec(line.length < MARK_CHARACTERS_MAX ? line : head);
    if (
      fence &&
      !(fence[1][0] === "`" && line.indexOf("`", fence[0].length) >= 0 && line.trimStart().search(/[^`]/) >= 0)
    )
      return this.#code(fence[1]);
    const heading = HEADING.exec(head);
    if (heading) return this.#heading(line, heading[1].length);
    if (isRule(line)) return this.#rule();
    if (this.depth < NESTED_MAX) {
      if (QUOTE.test(head)) return this.#quote();
      const item = ITEM.exec(head);
      if (item) return this.#list(item[2]);
    }
    return this.#table(line) ?? this.#paragraph();
  }

  /** @returns {Block} */
  #rule() {
    this.at += 1;
    return { type: "rule" };
  }

  /**
   * @param {string} line
   * @param {number} level
   * @returns {Block}
   */
  #heading(line, level) {
    this.at += 1;
    let text = line.trim().slice(level).trim();
    let end = text.length;
    while (end > 0 && text[end - 1] === "#") end -= 1;
    // A space separates closing marks from the text. Without it they belong to the text, as in
    // "C#".
    if (end < text.length && (end === 0 || text[end - 1] === " ")) text = text.slice(0, end).trimEnd();
    return { type: "heading", level, children: inline(text) };
  }

  /**
   * @param {string} fence
   * @returns {Block}
   */
  #code(fence) {
    const first = this.lines[this.at];
    const indent = first.length - first.trimStart().length;
    const language = first.trim().slice(fence.length).trim().split(/\s/, 1)[0].slice(0, 40);
    const text = [];
    let isClosed = false;
    for (this.at += 1; this.at < this.lines.length && !isClosed; this.at += 1) {
      const line = this.lines[this.at];
      if (isFenceEnd(line, fence)) isClosed = true;
      else text.push(unindented(line, indent));
    }
    return { type: "code", language, text: text.join("\n"), isClosed };
  }

  /** @returns {Block} */
  #quote() {
    const inside = [];
    for (; this.at < this.lines.length; this.at += 1) {
      const line = this.lines[this.at];
      if (!QUOTE.test(line.slice(0, 4))) break;
      inside.push(line.slice(line.indexOf(">") + 1).replace(/^ /, ""));
    }
    return { type: "quote", blocks: new Blocks(inside, this.depth + 1).read() };
  }

  /**
   * @param {string} mark
   * @returns {Block}
   */
  #list(mark) {
    const isOrdered = mark.length > 1;
    const kind = mark.at(-1);
    /** @type {{checked: boolean|null, blocks: Block[]}[]} */
    const items = [];
    let isTight = true;
    while (this.at < this.lines.length) {
      const found = ITEM.exec(this.lines[this.at].slice(0, MARK_CHARACTERS_MAX));
      if (!found || found[2].at(-1) !== kind || found[2].length > 1 !== isOrdered || isRule(this.lines[this.at])) break;
      const { lines, isLoose } = this.#itemLines(found);
      isTight &&= !isLoose;
      const box = /^\[([ xX])\](?= )/.exec(lines[0]);
      if (box) lines[0] = lines[0].slice(4);
      items.push({ checked: box ? box[1] !== " " : null, blocks: new Blocks(lines, this.depth + 1).read() });
    }
    return { type: "list", isOrdered, start: isOrdered ? Number.parseInt(mark, 10) : 1, isTight, items };
  }

  /**
   * The lines of one item, without its mark and its indent.
   * @param {RegExpExecArray} found
   */
  #itemLines(found) {
    const first = this.lines[this.at];
    const marked = found[1].length + found[2].length;
    const rest = first.slice(marked);
    const spaces = rest.length - rest.trimStart().length;
    const indent = marked + (spaces >= 1 && spaces <= 4 ? spaces : 1);
    const lines = [rest.trimStart()];
    let blanks = 0;
    let isLoose = false;
    for (this.at += 1; this.at < this.lines.length; this.at += 1) {
      const line = this.lines[this.at];
      if (isBlank(line)) {
        blanks += 1;
        continue;
      }
      const depth = indentOf(line, indent);
      // Agents often indent the content of "1. …" by two. Any indent beyond the mark is accepted.
      const isInside = depth >= Math.min(indent, found[1].length + 2);
      if (!isInside && (blanks || startsBlock(line))) break;
      if (blanks) isLoose = true;
      for (; blanks; blanks -= 1) lines.push("");
      lines.push(unindented(line, indent));
    }
    // A blank line before the next item makes the list loose. A blank line after the last item does
    // not.
    if (blanks && this.at < this.lines.length && ITEM.test(this.lines[this.at].slice(0, MARK_CHARACTERS_MAX)))
      isLoose = true;
    return { lines, isLoose };
  }

  /**
   * @param {string} line
   * @returns {Block|null}
   */
  #table(line) {
    const under = this.lines[this.at + 1];
    if (
      under === undefined ||
      !line.includes("|") ||
      under.length > 4 * MARK_CHARACTERS_MAX ||
      !under.includes("-") ||
      !DELIMITER.test(under)
    )
      return null;
    const delimiters = cells(under);
    const head = cells(line);
    if (
      head.length !== delimiters.length ||
      head.length > COLUMNS_MAX ||
      !delimiters.every((cell) => /^:?-+:?$/.test(cell))
    )
      return null;
    const align = delimiters.map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "left"));
    const rows = [];
    for (this.at += 2; this.at < this.lines.length; this.at += 1) {
      const row = this.lines[this.at];
      if (isBlank(row) || !row.includes("|")) break;
      const found = cells(row).slice(0, head.length);
      while (found.length < head.length) found.push("");
      rows.push(found.map(inline));
    }
    return { type: "table", align, head: head.map(inline), rows };
  }

  /** @returns {Block} */
  #paragraph() {
    const from = this.at;
    for (this.at += 1; this.at < this.lines.length; this.at += 1) {
      const line = this.lines[this.at];
      if (isBlank(line) || (startsBlock(line) && this.depth < NESTED_MAX)) break;
      // A table needs no blank line before it.
      const under = this.lines[this.at + 1];
      if (
        line.includes("|") &&
        under !== undefined &&
        under.includes("|") &&
        under.includes("-") &&
        under.length < MARK_CHARACTERS_MAX &&
        DELIMITER.test(under)
      )
        break;
    }
    const text = this.lines
      .slice(from, this.at)
      .map((line) => line.trimStart())
      .join("\n")
      .trimEnd();
    return { type: "paragraph", children: inline(text) };
  }
}

/**
 * Three or more of one mark, and nothing else but spaces. A hand-written loop, because a regular
 * expression would backtrack too much.
 * @param {string} line
 */
function isRule(line) {
  const text = line.trim();
  const mark = text[0];
  if (mark !== "-" && mark !== "*" && mark !== "_") return false;
  let count = 0;
  for (const character of text) {
    if (character === mark) count += 1;
    else if (character !== " " && character !== "\t") return false;
  }
  return count >= 3;
}

/** @param {string} line */
function startsBlock(line) {
  const head = line.slice(0, MARK_CHARACTERS_MAX);
  return FENCE.test(head) || HEADING.test(head) || QUOTE.test(head) || ITEM.test(head) || isRule(line);
}

/**
 * @param {string} line
 * @param {string} fence
 */
function isFenceEnd(line, fence) {
  const mark = line.trim();
  if (mark.length < fence.length || mark[0] !== fence[0] || indentOf(line, 4) > 3) return false;
  for (let i = 0; i < mark.length; i += 1) if (mark[i] !== fence[0]) return false;
  return true;
}

/**
 * Split a row into cells. A bar inside of code or after a backslash does not separate cells; the
 * backslash rule is GitHub's.
 * @param {string} row
 */
function cells(row) {
  const text = row.trim();
  const found = [];
  let cell = "";
  for (let i = text.startsWith("|") ? 1 : 0; i < text.length; i += 1) {
    if (text[i] === "\\" && text[i + 1] === "|") {
      cell += "|";
      i += 1;
    } else if (text[i] === "|") {
      found.push(cell.trim());
      cell = "";
    } else cell += text[i];
  }
  if (cell.trim() || !text.endsWith("|")) found.push(cell.trim());
  return found;
}

/** @param {string} line */
function isBlank(line) {
  return line.trim() === "";
}

/**
 * The indent of a line, counted up to `most`.
 * @param {string} line
 * @param {number} most
 */
function indentOf(line, most) {
  let column = 0;
  for (let i = 0; i < line.length && column < most; i += 1) {
    if (line[i] === " ") column += 1;
    else if (line[i] === "\t") column += 4;
    else break;
  }
  return column;
}

/**
 * @param {string} line
 * @param {number} indent
 */
function unindented(line, indent) {
  let column = 0;
  let at = 0;
  while (at < line.length && column < indent && (line[at] === " " || line[at] === "\t")) {
    column += line[at] === "\t" ? 4 : 1;
    at += 1;
  }
  return line.slice(at);
}
