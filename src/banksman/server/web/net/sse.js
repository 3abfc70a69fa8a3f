// Parse server-sent events from bytes in chunks of any size.
//
// EventSource is not used, because its errors have no cause (a wrong token and a dead server look
// the same) and because it reconnects without control. The parser follows the specification (WHATWG
// HTML, 9.2.6): lines end with LF, CRLF or CR, a message ends with an empty line, and an incomplete
// message is discarded.
//
// The size of a message is bounded, because the response may come from another program: a proxy's
// page without a line end would fill the memory. Beyond the bound the parser throws, and its stream
// ends.
// @ts-check

/** Larger than any frame that the server accepts from an agent, encoded as JSON inside JSON. */
export const MESSAGE_CHARACTERS_MAX = 128 << 20;

/**
 * @typedef {{id: string | null, event: string | null, data: string}} Message `id` null: the message has no id.
 */

export class TooLong extends Error {}

export class Parser {
  /** @param {number} charactersMax of one message */
  constructor(charactersMax = MESSAGE_CHARACTERS_MAX) {
    this._charactersMax = charactersMax;
    this._decoder = new TextDecoder("utf-8");
    /** @type {string[]} The pieces of the incomplete line. They are joined once, at its end. */
    this._pieces = [];
    this._size = 0;
    this._endedWithCarriageReturn = false;
    this._clear();
  }

  _clear() {
    /** @type {string | null} */
    this._id = null;
    /** @type {string | null} */
    this._event = null;
    /** @type {string[]} */
    this._data = [];
    this._size = 0;
  }

  /**
   * @param {Uint8Array} bytes
   * @returns {Message[]} the messages that these bytes complete
   */
  push(bytes) {
    /** @type {Message[]} */
    const messages = [];
    let text = this._decoder.decode(bytes, { stream: true });
    // CR LF is one line end, even if a chunk boundary splits it.
    if (this._endedWithCarriageReturn && text) {
      this._endedWithCarriageReturn = false;
      if (text.startsWith("\n")) text = text.slice(1);
    }
    let begin = 0;
    const ends = /\r\n|\n|\r/g;
    for (let found = ends.exec(text); found; found = ends.exec(text)) {
      this._take(text.slice(begin, found.index));
      begin = ends.lastIndex;
      const line = this._pieces.length === 1 ? this._pieces[0] : this._pieces.join("");
      this._pieces = [];
      const message = this._line(line);
      if (message) messages.push(message);
    }
    if (text.endsWith("\r")) this._endedWithCarriageReturn = true;
    if (begin < text.length) this._take(text.slice(begin));
    return messages;
  }

  /** @param {string} piece */
  _take(piece) {
    this._size += piece.length;
    if (this._size > this._charactersMax) throw new TooLong(`a message is too long: at most ${this._charactersMax} characters`);
    this._pieces.push(piece);
  }

  /**
   * @param {string} line
   * @returns {Message | null}
   */
  _line(line) {
    if (line === "") return this._ended();
    // A comment begins with a colon. It is then a field with an empty name, which is ignored as
    // unknown.
    const colon = line.indexOf(":");
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(line[colon + 1] === " " ? colon + 2 : colon + 1);
    if (name === "data") this._data.push(value);
    else if (name === "event") this._event = value || null;
    else if (name === "id" && !value.includes("\0")) this._id = value;
    return null;
  }

  _ended() {
    const message = { id: this._id, event: this._event, data: this._data.join("\n") };
    const isEmpty = !this._data.length;
    this._clear();
    return isEmpty ? null : message;
  }
}
