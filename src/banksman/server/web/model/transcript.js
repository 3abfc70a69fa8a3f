// Fold the events of a session into readable items: prompts, text, thinking, tools, plans,
// questions, endings and notes.
//
// Pure: events in, items out. The same events give the same items, however they are split into
// calls. Events added in front (`prepend`) cause a new fold of everything, because the end of a
// tool may be in one part and its beginning in the other. Folding is linear and cheap, so
// correctness at the seam costs little.
//
// **Keys** are stable. An item keeps its key when its place changes, so that the view keeps its
// nodes, its scroll position and the folds that the user opened. A text that begins before the
// window keeps the key that it got when only its end was known.
//
// **Partials** are pieces of an incomplete block of the model. They grow an item at the end. The
// complete block repeats all of it, and takes the place and the key of that item. Partials that are
// never completed stay as they are when their turn ends.
//
// **Prompts** are placed where their turn begins, not where they were asked. So the answer to each
// prompt is right below it. Waiting prompts are separate, in `waiting`, for a view of the end of
// the log.
// @ts-check

import { noteOf } from "./notes.js";
import { asked, Items, planText, requeueText } from "./transcript/items.js";
import { Speech } from "./transcript/speech.js";

/** @typedef {import("./transcript/items.js").LogEvent} LogEvent */
/** @typedef {import("./transcript/items.js").Item} Item */

export class Transcript {
  constructor() {
    this.#prompts = new Map();
    this.reset([]);
  }

  /** @type {LogEvent[]} */ #events = [];
  /**
   * The bodies of `turn.queued`, also from outside of the window.
   * @type {Map<string, Record<string, any>>}
   */ #prompts;
  #items = new Items();
  #speech = new Speech(this.#items);
  /** Prompts that begin in the window and were asked before it. @type {Set<Item>} */ #unknown = new Set();
  /** @type {Map<string, Item>} */ #questions = new Map();
  /** @type {Map<string, Item>} */ #waiting = new Map();

  /** @param {LogEvent[]} events */
  reset(events) {
    this.#begin(new Map());
    this.append(events);
  }

  get items() {
    return this.#items.list;
  }

  /** The use of the model's context window, as last reported. */
  get usage() {
    return this.#speech.usage;
  }

  /** @param {LogEvent[]} events right after the last one */
  append(events) {
    for (const event of events) {
      this.#events.push(event);
      try {
        this.#take(event);
      } catch (error) {
        // The output of an agent may have any shape. An event that cannot be read must not hide the
        // events after it.
        console.warn("cannot show an event", event.seq, error);
        const words = `This page cannot show an event (${event.kind}, ${event.seq}).`;
        this.#items.push("note", `note:${event.seq}`, event, { text: words, icon: "warning", tone: "warn" });
      }
    }
  }

  /** @param {LogEvent[]} events right before the first one */
  prepend(events) {
    /** @type {Map<string, string>} */
    const hints = new Map();
    // Only the key of a text depends on its first event. The text may begin earlier than was known.
    for (const { kind, seq, key } of this.items) {
      if (kind === "text" || kind === "thought") hints.set(`${kind} ${seq}`, key);
    }
    const all = events.concat(this.#events);
    this.#begin(hints);
    this.append(all);
    this.#items.hints.clear();
  }

  /**
   * Add prompts that were asked before the window begins.
   * @param {LogEvent[]} events
   */
  learn(events) {
    for (const { kind, turn, body } of events) {
      if (kind === "turn.queued" && turn) this.#prompts.set(turn, body);
    }
    for (const item of this.#unknown) {
      if (!this.#prompts.has(String(item.turn))) continue;
      this.#items.change(item, asked(this.#prompts.get(String(item.turn))));
      this.#unknown.delete(item);
    }
  }

  /** Prompts that have not begun, in the order in which they were asked. */
  get waiting() {
    return [...this.#waiting.values()];
  }

  /** @param {string} turn whether its prompt is here, waiting or begun */
  has(turn) {
    return this.#waiting.has(turn) || this.#items.turns.has(turn);
  }

  /**
   * The prompt and the text of a turn, for copying.
   * @param {string} turn
   */
  textOf(turn) {
    const parts = [];
    for (const item of this.items) {
      if (item.turn !== turn) continue;
      if (item.kind === "prompt" && item.text) parts.push(item.text.replace(/^/gm, "> "));
      else if (item.kind === "text") parts.push(item.text);
      else if (item.kind === "tool") parts.push(`[${item.title}: ${item.status}]`);
      else if (item.kind === "plan") parts.push(planText(item.entries));
    }
    return parts.join("\n\n");
  }

  /** @param {Map<string, string>} hints */
  #begin(hints) {
    this.#events = [];
    this.#items = new Items();
    this.#items.hints = hints;
    this.#speech = new Speech(this.#items);
    /** The turn that has begun and is not over, as far as the window shows. @type {string|null} */
    this.running = null;
    for (const held of [this.#unknown, this.#questions, this.#waiting]) held.clear();
  }

  /** @param {LogEvent} event */
  #take(event) {
    switch (event.kind) {
      case "update":
        return this.#speech.take(event);
      case "turn.queued":
        return this.#queued(event);
      case "turn.edited":
        return this.#edited(event);
      case "turn.started":
        return this.#started(event);
      case "turn.interrupted":
        return void this.#items.turn(event.turn, {
          cause: event.body.cause,
          clock: event.body.clock,
          stoppedBy: event.body.caller ?? null,
        });
      case "turn.requeued":
        return this.#requeued(event);
      case "turn.ended":
        return this.#ended(event);
      case "question.asked":
        return this.#asked(event);
      case "question.answered":
        return this.#answered(event);
      case "stream.gap":
        return void this.#items.push("gap", `gap:${event.body.first}`, event, {
          first: event.body.first,
          last: event.body.last,
        });
      default: {
        const note = noteOf(event);
        if (note) this.#items.push("note", `note:${event.seq}`, event, note);
      }
    }
  }

  // -- prompts and endings ------------------------------------------------------------------------

  /** @param {LogEvent} event */
  #queued(event) {
    const id = String(event.turn);
    this.#prompts.set(id, event.body);
    this.#waiting.set(
      id,
      this.#items.make("prompt", `prompt:${id}`, event, {
        ...asked(event.body),
        state: "queued",
        attempt: 1,
        asked: event.at,
      }),
    );
  }

  /** @param {LogEvent} event */
  #edited(event) {
    const id = String(event.turn);
    const known = this.#prompts.get(id);
    if (!known) return;
    const { prompt, priority } = event.body;
    const body = { ...known, prompt: prompt ?? known.prompt, priority: priority ?? known.priority };
    this.#prompts.set(id, body);
    const item = this.#waiting.get(id);
    if (item) this.#items.change(item, asked(body));
  }

  /** @param {LogEvent} event */
  #started(event) {
    const { attempt = 1, joined = [], into = null, origin = null } = event.body;
    this.#items.turn(event.turn, { started: event.at, attempt, cause: null, stoppedBy: null, isWhole: true });
    if (!into) this.running = event.turn;
    this.#begun(event, String(event.turn), { state: "started", attempt, into, origin });
    for (const id of joined)
      this.#begun({ ...event, turn: id }, id, { state: "started", attempt, into: event.turn, origin: null });
  }

  /**
   * @param {LogEvent} event
   * @param {string} id
   * @param {Record<string, any>} members
   */
  #begun(event, id, members) {
    const waited = this.#waiting.get(id);
    if (!waited) {
      const known = this.#prompts.get(id);
      const key = members.attempt > 1 ? `prompt:${id}:${members.attempt}` : `prompt:${id}`;
      const item = this.#items.push("prompt", key, event, { ...asked(known), asked: null, ...members });
      if (!known && !members.origin) this.#unknown.add(item);
      return;
    }
    this.#waiting.delete(id);
    this.#items.change(waited, { ...members, seq: event.seq, at: event.at });
    this.items.push(waited);
  }

  /** @param {LogEvent} event */
  #requeued(event) {
    const id = String(event.turn);
    const attempt = event.body.attempt ?? 2;
    const { cause = null } = this.#items.turn(id);
    this.#closeTurn(id);
    this.#items.push("note", `note:${event.seq}`, event, {
      icon: "again",
      tone: "soft",
      text: requeueText(cause, attempt),
    });
    const again = this.#items.make("prompt", `prompt:${id}:${attempt}`, event, {
      ...asked(this.#prompts.get(id)),
      state: "queued",
      attempt,
      asked: event.at,
    });
    this.#waiting.set(id, again);
  }

  /** @param {LogEvent} event */
  #ended(event) {
    const id = String(event.turn);
    const { body } = event;
    if (this.#waiting.has(id)) this.#begun(event, id, { state: body.outcome, attempt: 1, into: null, origin: null });
    const turn = this.#items.turn(id);
    this.#closeTurn(id);
    // Some agents send their text only with the end of the turn.
    if (turn.isWhole && !turn.hasText && typeof body.text === "string" && body.text) {
      this.#items.push("text", `text:${event.seq}`, event, {
        text: body.text,
        images: [],
        isPartial: false,
        isWhole: true,
        message: null,
        last: event.seq,
      });
    }
    this.#items.push("ended", `ended:${id}`, event, {
      outcome: body.outcome,
      by: body.by ?? null,
      stopReason: body.stop_reason ?? null,
      error: body.error ?? null,
      failure: body.failure ?? null,
      isEmpty: body.outcome === "done" && body.used_tools === true && !hasAnswer(body, turn),
      clock: body.clock ?? turn.clock ?? null,
      cause: turn.cause ?? null,
      stoppedBy: body.stopped_by ?? turn.stoppedBy ?? null,
      usage: body.usage ?? null,
      cost: body.cost ?? null,
      spent: body.spent ?? null,
      total: body.cost_in_all ?? null,
      structured: body.structured ?? null,
      context: turn.context ?? null,
      seconds: turn.started ? Math.max(0, event.at - turn.started) : null,
    });
  }

  /** @param {string} id */
  #closeTurn(id) {
    if (this.running === id) this.running = null;
    this.#speech.close(id);
  }

  // -- questions ----------------------------------------------------------------------------------

  /** @param {LogEvent} event */
  #asked(event) {
    const { question, wants, tool, input, details } = event.body;
    this.#questions.set(
      question,
      this.#items.push("question", `question:${question}`, event, {
        question,
        wants,
        tool,
        input,
        details: details ?? {},
        answer: null,
        by: null,
        caller: null,
        message: null,
      }),
    );
  }

  /** @param {LogEvent} event */
  #answered(event) {
    const item = this.#questions.get(event.body.question);
    if (item)
      this.#items.change(item, {
        answer: event.body.answer,
        by: event.body.by,
        caller: event.body.caller ?? null,
        message: event.body.message ?? null,
        answered: event.at,
      });
  }
}

/**
 * Whether the turn has an answer: in its end, or in the text of its updates.
 * @param {Record<string, any>} body
 * @param {any} turn
 */
function hasAnswer(body, turn) {
  if (body.structured !== null && body.structured !== undefined) return true;
  return typeof body.text === "string" ? body.text.trim() !== "" : !turn.isWhole || turn.hasText;
}
