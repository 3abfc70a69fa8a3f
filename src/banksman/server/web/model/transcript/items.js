// The list of transcript items: create, change and find an item, and build its members from events.
//
// A key is used once. If two items would have the same key, the later one also gets its seq in the
// key.
// @ts-check
import { textOf } from "../words.js";

/** @typedef {{seq: number, at: number, turn: string|null, kind: string, body: Record<string, any>}} LogEvent */
/**
 * The shown items. `version` of an item grows with each change after its creation.
 * @typedef {{key: string, kind: string, turn: string|null, seq: number, at: number, version: number}
 *   & Record<string, any>} Item
 */

export class Items {
  constructor() {
    /** @type {Item[]} */
    this.list = [];
    /** @type {Set<string>} */
    this.keys = new Set();
    /**
     * Keys that a new fold must use again, by the kind and the seq of their items.
     * @type {Map<string, string>}
     */
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
    // Two items with one key would be one node in two places. An agent may use an id twice.
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
   * The key of a text that begins here: its earlier key, if it had one.
   * @param {string} kind
   * @param {LogEvent} event
   */
  keyOf(kind, event) {
    return this.hints.get(`${kind} ${event.seq}`) ?? `${kind}:${event.seq}`;
  }

  /**
   * A text was first known from this event on, and begins earlier. It keeps its earlier key.
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
   * The data of a turn, after adding these members.
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
 * The members of a tool that an update names. The other members stay.
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
 * A prompt, from the body of `turn.queued`. null if the body is unknown.
 * @param {Record<string, any>|undefined} body
 */
export function asked(body) {
  if (!body) return { prompt: null, text: "", images: [], priority: null, onBusy: null, caller: null };
  const blocks = typeof body.prompt === "string" ? [{ type: "text", text: body.prompt }] : listOf(body.prompt);
  const said = blocks.map(saidIn);
  return {
    prompt: body.prompt,
    text: said.map((part) => part.text).join("\n"),
    images: said.flatMap((part) => part.images),
    priority: body.priority,
    onBusy: body.on_busy,
    caller: body.caller ?? null,
  };
}

/**
 * The text and the pictures of an ACP content block.
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
  const why = cause === "preempt" ? "Preempted by a more urgent ask" : "Stopped before it was done";
  return `${why}. It is queued again (attempt ${attempt}).`;
}

/** @param {any} value @returns {any[]} */
export function listOf(value) {
  return Array.isArray(value) ? value.filter((one) => one && typeof one === "object") : [];
}
