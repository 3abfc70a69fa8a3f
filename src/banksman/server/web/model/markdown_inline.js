// Parse Markdown inside a line: code, emphasis, links. Text in, tree out, without a document.
//
// The parser is linear for any input: one pass from left to right. A run of backticks finds its end
// in a table of all runs, not in the text. Possible openers are on a stack of at most OPEN_MAX. A
// link URL is given up at the first character that no URL has. Input that does not fit the grammar
// is text, so every input has a result.
// @ts-check

/**
 * @typedef {string | {type: "code", text: string} | {type: "break"} | {type: "strong"|"em"|"strike", children: Inline[]}
 *   | {type: "link", href: string, children: Inline[], isImage: boolean}} Inline
 */

/** Openers that wait for their end. Real texts stay below this; further openers become text. */
const OPEN_MAX = 32;
const ADDRESS_CHARACTERS_MAX = 2048;
const SPECIAL = /[\\`*_~[\]!<&\nhm]/g;
const ENTITIES = new Map([
  ["&amp;", "&"],
  ["&lt;", "<"],
  ["&gt;", ">"],
  ["&quot;", '"'],
  ["&#39;", "'"],
  ["&nbsp;", "\u00a0"],
]);
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}]/u;
/** The characters after which an underscore may begin an emphasis. */
const BEFORE_UNDERSCORE = /[\s([{"'*~\u2013\u2014>]/;
const ADDRESS = /^(?:https?:\/\/|mailto:)[^\s]/i;

/**
 * @param {string} text
 * @returns {Inline[]}
 */
export function inline(text) {
  return new Line(text).read();
}

/**
 * Whether a link may lead to this URL: only schemes that a browser opens and does not run.
 * @param {string} address
 */
export function isSafe(address) {
  return ADDRESS.test(address);
}

class Line {
  /** @param {string} text */
  constructor(text) {
    this.text = text;
    this.at = 0;
    /**
     * The current level and the levels around it.
     * @type {{mark: string, from: number, children: Inline[]}[]}
     */
    this.levels = [{ mark: "", from: 0, children: [] }];
    this.plain = "";
    /** Where runs of backticks begin, by length. Built at the first backtick. @type {Runs|null} */
    this.runs = null;
  }

  /** @returns {Inline[]} */
  read() {
    const { text } = this;
    while (this.at < text.length) {
      SPECIAL.lastIndex = this.at;
      const found = SPECIAL.exec(text);
      const next = found ? found.index : text.length;
      this.plain += text.slice(this.at, next);
      this.at = next;
      if (found) this.#special(found[0]);
    }
    // An opener that was never closed is text.
    while (this.levels.length > 1) this.#unopen();
    this.#flush();
    return this.levels[0].children;
  }

  /** @param {string} character */
  #special(character) {
    switch (character) {
      case "\\":
        return this.#escape();
      case "`":
        return this.#code();
      case "\n":
        return this.#break();
      case "*":
      case "_":
      case "~":
        return this.#emphasis(character);
      case "[":
        return this.#open("[", 1);
      case "!":
        return this.text[this.at + 1] === "[" ? this.#open("![", 2) : this.#literal(1);
      case "]":
        return this.#link();
      case "<":
        return this.#angle();
      case "&":
        return this.#entity();
      default:
        return this.#bare();
    }
  }

  /** @param {number} length */
  #literal(length) {
    this.plain += this.text.slice(this.at, this.at + length);
    this.at += length;
  }

  #flush() {
    if (!this.plain) return;
    /** @type {any} */ (this.levels.at(-1)).children.push(this.plain);
    this.plain = "";
  }

  /** @param {Inline} node */
  #add(node) {
    this.#flush();
    /** @type {any} */ (this.levels.at(-1)).children.push(node);
  }

  #escape() {
    const next = this.text[this.at + 1];
    if (next === "\n") {
      this.at += 2;
      this.#add({ type: "break" });
    } else if (next !== undefined && ESCAPABLE.test(next)) {
      this.plain += next;
      this.at += 2;
    } else this.#literal(1);
  }

  #break() {
    this.plain = this.plain.trimEnd();
    this.at += 1;
    this.#add({ type: "break" });
  }

  #code() {
    const { text } = this;
    let end = this.at;
    while (text[end] === "`") end += 1;
    const length = end - this.at;
    this.runs ??= backtickRuns(text);
    const runs = /** @type {{starts: number[], next: number}} */ (this.runs.get(length));
    // Each run is visited once. Runs before this position are never needed again, so the search is
    // linear.
    while (runs.next < runs.starts.length && runs.starts[runs.next] < end) runs.next += 1;
    const close = runs.starts[runs.next];
    if (close === undefined) return this.#literal(length);
    const inside = text.slice(end, close).replaceAll("\n", " ");
    const isPadded = inside.length > 2 && inside.startsWith(" ") && inside.endsWith(" ") && inside.trim() !== "";
    this.at = close + length;
    this.#add({ type: "code", text: isPadded ? inside.slice(1, -1) : inside });
  }

  /** @param {string} character */
  #emphasis(character) {
    const { text } = this;
    let end = this.at;
    while (text[end] === character) end += 1;
    const length = end - this.at;
    if (length > 3 || (character === "~" && length !== 2)) return this.#literal(length);
    const before = text[this.at - 1] ?? " ";
    const after = text[end] ?? " ";
    const opens = !isSpace(after);
    const closes = !isSpace(before);
    // snake_case_words and module.__init__ are words. This is stricter than CommonMark, because
    // agents write names all the time.
    if (character === "_" && WORD.test(after) && !BEFORE_UNDERSCORE.test(before)) return this.#literal(length);
    if (closes && this.#close(character.repeat(length))) return;
    if (closes && length === 3 && this.#closeBoth(character)) return;
    if (opens && (character !== "_" || BEFORE_UNDERSCORE.test(before))) this.#open(character.repeat(length), length);
    else this.#literal(length);
  }

  /**
   * @param {string} mark
   * @param {number} length
   */
  #open(mark, length) {
    if (this.levels.length > OPEN_MAX) return this.#literal(length);
    this.#flush();
    this.levels.push({ mark, from: this.at, children: [] });
    this.at += length;
  }

  /** Undo the innermost level: its mark and its content belong to the level around it. */
  #unopen() {
    this.#flush();
    const level = /** @type {any} */ (this.levels.pop());
    const outer = /** @type {any} */ (this.levels.at(-1));
    pushText(outer.children, level.mark);
    for (const child of level.children) {
      if (typeof child === "string") pushText(outer.children, child);
      else outer.children.push(child);
    }
  }

  /**
   * @param {string} mark
   * @returns {boolean} whether there was an opener to close
   */
  #close(mark) {
    const place = this.levels.findLastIndex((level) => level.mark === mark);
    // Emphasis does not reach out of the text of a link.
    const bracket = this.levels.findLastIndex((level) => level.mark.endsWith("["));
    if (place <= 0 || place < bracket) return false;
    while (this.levels.length - 1 > place) this.#unopen();
    this.#flush();
    const { children } = /** @type {any} */ (this.levels.pop());
    this.at += mark.length;
    this.#add(wrapped(mark, children));
    return true;
  }

  /**
   * `*one **two***`: three marks may close two separate openers.
   * @param {string} character
   */
  #closeBoth(character) {
    const inner = this.levels.at(-1)?.mark;
    const outer = this.levels.at(-2)?.mark;
    const marks = [character, character.repeat(2)];
    if (!inner || !outer || inner === outer || !marks.includes(inner) || !marks.includes(outer)) return false;
    return this.#close(inner) && this.#close(outer);
  }

  #link() {
    const place = this.levels.findLastIndex((level) => level.mark.endsWith("["));
    if (place <= 0) return this.#literal(1);
    const address = this.text[this.at + 1] === "(" ? addressAt(this.text, this.at + 2) : null;
    while (this.levels.length - 1 > place) this.#unopen();
    if (!address) {
      this.#unopen();
      return this.#literal(1);
    }
    this.#flush();
    const { mark, children } = /** @type {any} */ (this.levels.pop());
    this.at = address.end;
    this.#add({ type: "link", href: address.href, children, isImage: mark === "![" });
  }

  #angle() {
    if (!/^<(?:https?:\/\/|mailto:)/i.test(this.text.slice(this.at, this.at + 12))) return this.#literal(1);
    const slice = this.text.slice(this.at + 1, this.at + 1 + ADDRESS_CHARACTERS_MAX);
    const end = slice.search(/[\s<>]/);
    if (end < 0 || slice[end] !== ">") return this.#literal(1);
    const href = slice.slice(0, end);
    this.at += end + 2;
    this.#add({ type: "link", href, children: [href], isImage: false });
  }

  #entity() {
    for (const [name, character] of ENTITIES) {
      if (!this.text.startsWith(name, this.at)) continue;
      this.plain += character;
      this.at += name.length;
      return;
    }
    this.#literal(1);
  }

  /** A bare URL in the text. */
  #bare() {
    const { text } = this;
    const isBegun = WORD.test(text[this.at - 1] ?? " ");
    if (isBegun || !/^(?:https?:\/\/|mailto:)/i.test(text.slice(this.at, this.at + 9))) return this.#literal(1);
    const slice = text.slice(this.at, this.at + ADDRESS_CHARACTERS_MAX);
    const stop = slice.search(/[\s<>"`|\\^{}[\]*]/);
    let href = stop < 0 ? slice : slice.slice(0, stop);
    // Punctuation at the end of a sentence, or a bracket around the URL, is not part of it.
    href = withoutTail(href);
    if (!ADDRESS.test(href)) return this.#literal(1);
    this.at += href.length;
    this.#add({ type: "link", href, children: [href], isImage: false });
  }
}

/**
 * @typedef {Map<number, {starts: number[], next: number}>} Runs
 * @param {string} text
 * @returns {Runs}
 */
function backtickRuns(text) {
  /** @type {Runs} */
  const runs = new Map();
  let at = text.indexOf("`");
  while (at >= 0) {
    let end = at;
    while (text[end] === "`") end += 1;
    const known = runs.get(end - at);
    if (known) known.starts.push(at);
    else runs.set(end - at, { starts: [at], next: 0 });
    at = text.indexOf("`", end);
  }
  return runs;
}

/**
 * `address)` or `address "title")`.
 * @param {string} text
 * @param {number} at
 * @returns {{href: string, end: number}|null}
 */
function addressAt(text, at) {
  let depth = 0;
  let end = at;
  const most = Math.min(text.length, at + ADDRESS_CHARACTERS_MAX);
  for (; end < most; end += 1) {
    const character = text[end];
    if (character === "(" && (depth += 1) > 3) return null;
    if (character === ")" && (depth -= 1) < 0) break;
    if (isSpace(character)) break;
  }
  if (end >= most) return null;
  const href = text.slice(at, end).replace(/^<|>$/g, "");
  if (text[end] === ")") return { href, end: end + 1 };
  const title = /^\s{1,4}(?:"[^"\n]{0,300}"|'[^'\n]{0,300}')\s{0,4}\)/.exec(text.slice(end, end + 320));
  return title ? { href, end: end + title[0].length } : null;
}

/** @param {string} href */
function withoutTail(href) {
  let end = href.length;
  while (end > 0) {
    const last = href[end - 1];
    const isBracket = last === ")" && !href.slice(0, end - 1).includes("(");
    if (!isBracket && !".,;:!?'".includes(last)) break;
    end -= 1;
  }
  return href.slice(0, end);
}

/**
 * @param {string} mark
 * @param {Inline[]} children
 * @returns {Inline}
 */
function wrapped(mark, children) {
  if (mark[0] === "~") return { type: "strike", children };
  if (mark.length === 1) return { type: "em", children };
  if (mark.length === 2) return { type: "strong", children };
  return { type: "strong", children: [{ type: "em", children }] };
}

/**
 * @param {Inline[]} children
 * @param {string} text
 */
function pushText(children, text) {
  const last = children.at(-1);
  if (typeof last === "string") children[children.length - 1] = last + text;
  else if (text) children.push(text);
}

/** @param {string} character */
function isSpace(character) {
  return character === " " || character === "\n" || character === "\t" || character === "\u00a0";
}
