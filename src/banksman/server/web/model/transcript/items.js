// Items, and what they are made of: how one is named, changed and found again; and the members that events give them.
//
// A key is given once. Where two would have the same, the later one is named for its seq as well.
// @ts-check
import { textOf } from "../words.js";

/** @typedef {{seq: number, at: number, turn: string|null, kind: string, body: Record<string, any>}} LogEvent */
/**
 * What is shown. `version` grows with each change of an item that was there already.
 * @typedef {{key: string, kind: string, turn: string|null, seq: number, at: number, version: number}
 *   & Record<string, any>} Item
 */

export class Items {
  constructor() {
    /** @type {Item[]} */
    this.list = [];
    /** @type {Set<string>} */
    this.keys = new Set();
    /** Keys that must come again: by the kind and the seq of what they belonged to. @type {Map<string, string>} */
    this.hints = new Map();
    /** What is known of each turn. @type {Map<string, Record<string, any>>} */
    this.turns = new Map();
  }

  /**
   * @param {string} kind
   * @param {string} key
   * @param {LogEvent} event
   * @param {Record<string, any>} members
   * @returns {Item}
   */
  push(kind, key, event, members) {
    const item = this.make(kind, key, event, members);
    this.list.push(item);
    return item;
  }

  /**
   * @param {string} kind
   * @param {string} key
   * @param {LogEvent} event
   * @param {Record<string, any>} members
   * @returns {Item}
   */
  make(kind, key, event, members) {
    // Two of one key would be one node in two places. An agent may use an id twice.
    const own = this.keys.has(key) ? `${key}:${event.seq}` : key;
    this.keys.add(own);
    return { key: own, kind, turn: event.turn, seq: event.seq, at: event.at, version: 0, ...members };
  }

  /**
   * @param {Item} item
   * @param {Record<string, any>} members
   */
  change(item, members) {
    Object.assign(item, members);
    item.version += 1;
  }

  /**
   * The key of a text that begins here: the one that it had, if it was here before.
   * @param {string} kind
   * @param {LogEvent} event
   */
  keyOf(kind, event) {
    return this.hints.get(`${kind} ${event.seq}`) ?? `${kind}:${event.seq}`;
  }

  /**
   * A text that was known from this event on, and begins before: it keeps the key that it had.
   * @param {Item} item
   * @param {LogEvent} event
   */
  keepKey(item, event) {
    const key = this.hints.get(`${item.kind} ${event.seq}`);
    if (key === undefined || this.keys.has(key)) return;
    this.keys.add(key);
    item.key = key;
  }

  /**
   * What is known of a turn, with this added.
   * @param {string|null} id
   * @param {Record<string, any>} members
   */
  turn(id, members = {}) {
    const name = String(id);
    const turn = this.turns.get(name) ?? {};
    this.turns.set(name, Object.assign(turn, members));
    return turn;
  }
}

/**
 * The members of a tool that an update names; what it does not name stays.
 * @param {Record<string, any>} update
 */
export function toolMembers(update) {
  /** @type {Record<string, any>} */
  const members = {};
  if (typeof update.title === "string") members.title = update.title;
  if (typeof update.kind === "string") members.tool = update.kind;
  if (typeof update.status === "string") members.status = update.status;
  if (update.rawInput !== undefined && update.rawInput !== null) members.input = update.rawInput;
  if (update.rawOutput !== undefined && update.rawOutput !== null) members.output = update.rawOutput;
  if (Array.isArray(update.content))
    members.content = update.content.filter((part) => part && typeof part === "object");
  if (Array.isArray(update.locations)) members.locations = update.locations;
  return members;
}

/**
 * A prompt, from `turn.queued`; of none that is known it is null.
 * @param {Record<string, any>|undefined} body
 */
export function asked(body) {
  if (!body) return { prompt: null, text: "", images: [], priority: null, onBusy: null };
  const blocks = typeof body.prompt === "string" ? [{ type: "text", text: body.prompt }] : listOf(body.prompt);
  const said = blocks.map(saidIn);
  return {
    prompt: body.prompt,
    text: said.map((part) => part.text).join("\n"),
    images: said.flatMap((part) => part.images),
    priority: body.priority,
    onBusy: body.on_busy,
  };
}

/**
 * A content block of ACP: its words, and its pictures.
 * @param {any} content
 * @returns {{text: string, images: {data: string, mimeType: string}[]}}
 */
export function saidIn(content) {
  switch (content?.type) {
    case "text":
      return { text: textOf(content.text), images: [] };
    case "image":
      return {
        text: "",
        images: [{ data: textOf(content.data), mimeType: textOf(content.mimeType) }],
      };
    case "resource_link":
      return { text: `[${content.name ?? content.uri}](${content.uri})`, images: [] };
    case "resource":
      return { text: textOf(content.resource?.text ?? `[${textOf(content.resource?.uri) || "a resource"}]`), images: [] };
    default:
      return { text: "", images: [] };
  }
}

/**
 * @param {{content: string, status: string}[]} entries
 */
export function planText(entries) {
  return entries.map(({ content, status }) => `- [${status === "completed" ? "x" : " "}] ${content}`).join("\n");
}

/**
 * @param {string|null} cause
 * @param {number} attempt
 */
export function requeueText(cause, attempt) {
  const why = cause === "preempt" ? "Gave way to a more urgent ask" : "Stopped before it was done";
  return `${why}. It is queued again (attempt ${attempt}).`;
}

/** @param {any} value @returns {any[]} */
export function listOf(value) {
  return Array.isArray(value) ? value.filter((one) => one && typeof one === "object") : [];
}
