// Fold the output of the agent: text, thinking, tools, plans, usage. Partials grow an item; the
// complete block replaces it.
// @ts-check

import { listOf, saidIn, toolMembers } from "./items.js";
import { textOf } from "../words.js";

/** @typedef {import("./items.js").LogEvent} LogEvent */
/** @typedef {import("./items.js").Item} Item */

const SPOKEN = new Map([
  ["agent_message_chunk", "text"],
  ["agent_thought_chunk", "thought"],
]);
const OPEN_STATUSES = new Set(["pending", "in_progress"]);

export class Speech {
  /** @param {import("./items.js").Items} items */
  constructor(items) {
    this.items = items;
    /**
     * The use of the model's context window, as last reported.
     * @type {{used: number, size: number}|null}
     */
    this.usage = null;
  }

  /** @type {Map<string, Item>} */ #tools = new Map();
  /** Tools that have not ended. @type {Set<Item>} */ #running = new Set();
  /** By turn and kind. @type {Map<string, Item>} */ #partials = new Map();

  /** @param {LogEvent} event */
  take(event) {
    const updates = listOf(event.body.updates);
    const hasPlan = updates.some((update) => update.sessionUpdate === "plan");
    for (const update of updates) {
      const spoken = SPOKEN.get(update.sessionUpdate);
      if (spoken) this.#spoken(event, spoken, update);
      // The plan itself is shown. The call that made it would only repeat it.
      else if (update.sessionUpdate === "tool_call") this.#tool(event, update, hasPlan);
      else if (update.sessionUpdate === "tool_call_update") this.#tool(event, update, false);
      else if (update.sessionUpdate === "plan") this.#plan(event, update);
      else if (update.sessionUpdate === "usage_update") this.#used(event, update);
      else if (update.sessionUpdate === "current_mode_update") {
        this.items.push("note", `note:${event.seq}`, event, {
          icon: "setting",
          tone: "soft",
          text: `The agent's mode is now ${update.currentModeId}.`,
        });
      }
    }
    for (const update of listOf(event.body.partial)) {
      const spoken = SPOKEN.get(update.sessionUpdate);
      if (spoken) this.#partial(event, spoken, update);
    }
  }

  /**
   * @param {LogEvent} event
   * @param {string} kind
   * @param {Record<string, any>} update
   */
  #spoken(event, kind, update) {
    const said = saidIn(update.content);
    if (!said.text && !said.images.length) return;
    const message = update.messageId ?? null;
    if (kind === "text") this.items.turn(event.turn).hasText = true;
    const place = `${event.turn} ${kind}`;
    const partial = this.#partials.get(place);
    // A complete message of another source (a subagent) may arrive between the partials of this
    // one.
    if (partial && (partial.message === null || message === null || partial.message === message)) {
      this.#partials.delete(place);
      this.items.change(partial, { ...said, message, isPartial: false, isWhole: true, last: event.seq });
      return;
    }
    const open = this.items.list.at(-1);
    if (
      open &&
      open.kind === kind &&
      open.turn === event.turn &&
      open.message === message &&
      !open.isPartial &&
      !open.isWhole &&
      !open.isCut
    ) {
      this.items.keepKey(open, event);
      this.items.change(open, {
        text: open.text + said.text,
        images: [...open.images, ...said.images],
        last: event.seq,
      });
      return;
    }
    const key = this.items.keyOf(kind, event);
    this.items.push(kind, key, event, { ...said, message, isPartial: false, isWhole: false, last: event.seq });
  }

  /**
   * @param {LogEvent} event
   * @param {string} kind
   * @param {Record<string, any>} update
   */
  #partial(event, kind, update) {
    const { text } = saidIn(update.content);
    if (!text) return;
    const place = `${event.turn} ${kind}`;
    const item = this.#partials.get(place);
    if (item) {
      this.items.keepKey(item, event);
      this.items.change(item, { text: item.text + text, last: event.seq });
      return;
    }
    if (kind === "text") this.items.turn(event.turn).hasText = true;
    const key = this.items.keyOf(kind, event);
    const members = {
      text,
      images: [],
      message: update.messageId ?? null,
      isPartial: true,
      isWhole: false,
      last: event.seq,
    };
    this.#partials.set(place, this.items.push(kind, key, event, members));
  }

  /**
   * @param {LogEvent} event
   * @param {Record<string, any>} update
   * @param {boolean} isHidden
   */
  #tool(event, update, isHidden) {
    const id = textOf(update.toolCallId);
    const known = this.#tools.get(id);
    if (known) {
      const ended = update.status && !OPEN_STATUSES.has(update.status) ? event.at : known.ended;
      this.items.change(known, { ...toolMembers(update), ended });
      if (!OPEN_STATUSES.has(known.status)) this.#running.delete(known);
      return;
    }
    const isBegun = update.sessionUpdate === "tool_call";
    const ended = update.status && !OPEN_STATUSES.has(update.status) ? event.at : null;
    const blank = {
      call: id,
      title: null,
      tool: "other",
      status: "in_progress",
      input: null,
      content: [],
      output: null,
      locations: [],
    };
    const item = this.items.make("tool", `tool:${id}`, event, {
      ...blank,
      ...toolMembers(update),
      began: isBegun ? event.at : null,
      ended,
    });
    this.#tools.set(id, item);
    if (OPEN_STATUSES.has(item.status)) this.#running.add(item);
    if (!isHidden) this.items.list.push(item);
  }

  /**
   * The agent repeats the whole plan each time. So a turn has one plan: the newest, at its place.
   * @param {LogEvent} event
   * @param {Record<string, any>} update
   */
  #plan(event, update) {
    const entries = listOf(update.entries).map((entry) => ({
      content: textOf(entry.content),
      status: entry.status ?? "pending",
      priority: entry.priority ?? "medium",
    }));
    const { plan } = this.items.turn(event.turn);
    if (!plan) {
      this.items.turn(event.turn, { plan: this.items.push("plan", `plan:${event.turn}`, event, { entries }) });
      return;
    }
    const place = this.items.list.lastIndexOf(plan);
    if (place >= 0) this.items.list.splice(place, 1);
    this.items.change(plan, { entries, seq: event.seq, at: event.at });
    this.items.list.push(plan);
  }

  /**
   * @param {LogEvent} event
   * @param {Record<string, any>} update
   */
  #used(event, update) {
    if (!(update.used > 0)) return;
    this.usage = { used: update.used, size: update.size > 0 ? update.size : 0 };
    this.items.turn(event.turn).context = this.usage;
  }

  /**
   * Items that are still open when their turn ends stay as they are.
   * @param {string} turn
   */
  close(turn) {
    for (const [place, item] of this.#partials) {
      if (item.turn !== turn) continue;
      this.items.change(item, { isPartial: false, isCut: true });
      this.#partials.delete(place);
    }
    for (const tool of this.#running) {
      if (tool.turn !== turn) continue;
      this.items.change(tool, { status: "stopped" });
      this.#running.delete(tool);
    }
  }
}
