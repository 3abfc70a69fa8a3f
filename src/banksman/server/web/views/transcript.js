// The transcript view: a session's log, readable from any place in it.
//
// It owns the model (model/transcript.js), the list of visible items (virtual.js), and the paging
// through the log. Near the top it loads older events; near the bottom of a window that is not live
// it loads newer ones. It adds events as they arrive and draws once per frame.
//
// Screen readers get new text when it is complete, from a separate live region. The list itself is
// silent, because scrolling adds and removes its nodes.
// @ts-check

import { el, listen, replace } from "../dom.js";
import { Transcript } from "../model/transcript.js";
import { icon } from "./items/icons.js";
import { itemView } from "./items/item.js";
import { ending } from "./items/words.js";
import { VirtualList } from "./virtual.js";

/** The longest announcement of one text to screen readers. */
const TOLD_CHARACTERS_MAX = 600;
/** Pages that are read only to fill the view, without scrolling: many events may make one item. */
const FILLING_MAX = 3;
const LINE_CHARACTERS = 95;
const GUESSES = new Map([
  ["prompt", 84],
  ["tool", 34],
  ["thought", 34],
  ["plan", 160],
  ["question", 36],
  ["ended", 44],
  ["note", 28],
  ["gap", 32],
]);

/**
 * @param {HTMLElement} parent
 * @param {any} context
 */
export function mountTranscript(parent, context) {
  const view = new TranscriptView(parent, context);
  context.jump = (/** @type {number} */ seq) => view.jump(seq);
  context.toStart = () => view.jump(1);
  context.toEnd = () => view.toEnd();
  context.transcript = view.model;
  return () => view.destroy();
}

class TranscriptView {
  /**
   * @param {HTMLElement} parent
   * @param {any} context
   */
  constructor(parent, context) {
    this.context = context;
    this.log = context.log;
    this.model = new Transcript();
    this.frame = 0;
    this.isNew = true;
    this.fillings = 0;
    this.hasScrolled = false;
    this.width = "";
    /** The number of items when the user left the end. @type {number|null} */
    this.countAtLeaving = null;
    /** @type {number|null} */
    this.target = null;
    /** @type {Set<string>} texts that are still growing; each is announced when it is complete */
    this.growing = new Set();
    this.kit = {
      open: new Map(),
      say: context.say,
      textOf: (/** @type {string} */ turn) => this.model.textOf(turn),
    };
    this.#build(parent);
    this.list = new VirtualList(this.scroller, {
      make: (item) => itemView(item, this.kit),
      guess,
      onNearTop: () => this.#older(),
      onNearBottom: () => this.#newer(),
      onMove: () => this.#moved(),
      onLeave: () => (this.hasScrolled = true),
    });
    this.offs = [
      this.log.version.subscribe(() => this.#take()),
      this.log.isLive.subscribe(() => this.#drawSoon()),
      this.log.gap.subscribe(() => this.#drawSoon()),
      this.log.isReading.subscribe((/** @type {boolean} */ is) => this.#reading(is)),
      this.log.problem.subscribe((/** @type {any} */ problem) => this.#problem(problem)),
      context.own.events.subscribe((/** @type {any[]} */ events) => this.#learn(events)),
      context.pending.list.subscribe(() => this.#drawSoon()),
      listen(this.scroller, "keydown", (event) => this.#key(event)),
    ];
  }

  /** @param {HTMLElement} parent */
  #build(parent) {
    this.loading = el("div", { class: "loading", "aria-hidden": "true" });
    this.notice = el("div", { class: "transcript-notice", hidden: true });
    // Screen readers must not read the nodes that scrolling adds. They read the region below.
    this.scroller = el("div", {
      class: "transcript",
      role: "log",
      "aria-label": "Transcript",
      "aria-live": "off",
      tabIndex: 0,
    });
    this.told = el("div", { class: "sr-only", "aria-live": "polite", dataset: { told: "" } });
    this.newest = el("button", {
      class: "newest",
      type: "button",
      hidden: true,
      on: { click: () => this.toEnd() },
    });
    this.frameNode = el(
      "div",
      { class: "transcript-frame" },
      this.loading,
      this.notice,
      this.scroller,
      this.newest,
      this.told,
    );
    parent.append(this.frameNode);
  }

  destroy() {
    cancelAnimationFrame(this.frame);
    for (const off of this.offs) off();
    this.list.destroy();
    this.frameNode.remove();
  }

  // -- new events ---------------------------------------------------------------------------------

  #take() {
    const { log, model } = this;
    const { kind, count } = log.change;
    if (this.isNew || kind === "reset") {
      model.reset(log.events);
      this.isNew = false;
    } else if (kind === "append") {
      const more = log.events.slice(log.events.length - count);
      model.append(more);
      this.context.pending.settle(more);
      this.#tell(more);
    } else if (kind === "prepend") model.prepend(log.events.slice(0, count));
    this.context.usage.value = model.usage;
    this.context.running.value = log.isLive.value ? model.running : null;
    this.#drawSoon();
  }

  /** @param {any[]} events */
  #learn(events) {
    this.model.learn(events);
    this.context.pending.settle(events);
    this.#drawSoon();
  }

  /**
   * Announce new text once it is complete.
   * @param {any[]} events
   */
  #tell(events) {
    for (const { kind, body } of events) {
      if (kind === "turn.ended" && body.outcome !== "done")
        this.#say(`The turn is over. ${ending({ outcome: body.outcome, by: body.by })}.`);
      for (const update of kind === "update" ? (body.updates ?? []) : []) {
        if (update.sessionUpdate === "agent_message_chunk" && update.content?.text) this.#say(update.content.text);
      }
    }
  }

  /** @param {string} text */
  #say(text) {
    const words = text.length > TOLD_CHARACTERS_MAX ? `${text.slice(0, TOLD_CHARACTERS_MAX)}…` : text;
    this.told.append(el("p", null, words));
    while (this.told.childElementCount > 5) this.told.firstElementChild?.remove();
  }

  #drawSoon() {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.#draw();
    });
  }

  #draw() {
    const { log, model } = this;
    const items = model.items.slice();
    const gap = log.gap.value;
    if (gap && log.atStart && log.first > gap.last)
      items.unshift({ key: "gap", kind: "gap", turn: null, seq: gap.last, at: 0, version: gap.last, ...gap });
    if (log.isLive.value) items.push(...model.waiting, ...this.context.pending.list.value);
    this.list.setItems(items);
    this.#gutter();
    this.#notice(items.length);
    if (this.target !== null) this.#show(this.target);
  }

  /** The width of the scrollbar, so that the foot below can be as wide as the text. */
  #gutter() {
    const width = `${this.scroller.offsetWidth - this.scroller.clientWidth}px`;
    if (this.width === width) return;
    this.width = width;
    document.documentElement.style.setProperty("--gutter", width);
  }

  /** @param {number} count */
  #notice(count) {
    if (this.log.problem.value) return;
    const isEmpty = !count && !this.log.isReading.value && this.log.isLive.value;
    this.notice.hidden = !isEmpty;
    if (isEmpty) replace(this.notice, el("p", null, "No messages yet."));
  }

  /** @param {any} problem */
  #problem(problem) {
    this.notice.hidden = !problem;
    if (problem)
      replace(
        this.notice,
        el("p", null, problem.detail || problem.message),
        problem.hint ? el("p", { class: "soft" }, problem.hint) : null,
      );
  }

  /** @param {boolean} is */
  #reading(is) {
    this.loading.classList.toggle("is", is);
    this.scroller.setAttribute("aria-busy", String(is));
    if (!is) this.#drawSoon();
  }

  // -- paging through the log ---------------------------------------------------------------------

  #older() {
    const { log } = this;
    if (log.atStart || log.isReading.value || !log.events.length || this.target !== null) return;
    // Without scrolling, read only as much as may fill the view.
    if (!this.hasScrolled && this.fillings++ >= FILLING_MAX) return;
    log.older().catch(() => {});
  }

  #newer() {
    const { log } = this;
    if (log.isLive.value || log.isReading.value || !log.events.length || this.target !== null) return;
    log.newer().catch(() => {});
  }

  async toEnd() {
    this.countAtLeaving = null;
    if (!this.log.isLive.value) await this.log.goLive().catch(() => {});
    this.list.toEnd();
    this.#moved();
  }

  /** @param {number} seq */
  async jump(seq) {
    this.hasScrolled = true;
    this.target = seq;
    try {
      await this.log.jump(seq);
    } catch {
      this.target = null;
      return;
    }
    this.#drawSoon();
  }

  /**
   * Show the item that contains this event, or the last item before it.
   * @param {number} seq
   */
  #show(seq) {
    if (this.log.isReading.value) return;
    this.target = null;
    const { items } = this.list;
    const found = items.findLastIndex((item) => item.seq <= seq && item.state !== "queued" && item.state !== "pending");
    if (!items.length) return;
    const node = this.list.toKey(items[Math.max(0, found)].key, 48);
    if (!node) return;
    node.classList.add("found");
    setTimeout(() => node.classList.remove("found"), 1600);
  }

  #moved() {
    const { list, log } = this;
    const isAway = !list.isAtEnd || !log.isLive.value;
    if (!isAway) this.countAtLeaving = null;
    else this.countAtLeaving ??= list.items.length;
    const more = isAway && log.isLive.value ? Math.max(0, list.items.length - Number(this.countAtLeaving)) : 0;
    this.newest.hidden = !isAway || !list.items.length;
    const words = more ? `${more} new` : "Newest";
    if (this.newest.dataset.words === words) return;
    this.newest.dataset.words = words;
    replace(this.newest, icon("down"), words);
  }

  /**
   * Keys: move from item to item, and to both ends.
   * @param {KeyboardEvent} event
   */
  #key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const target = /** @type {HTMLElement} */ (event.target);
    if (target !== this.scroller && !target.matches("article")) return;
    if (event.key === "End") this.toEnd();
    else if (event.key === "Home") this.jump(1);
    else if (target.matches("article") && (event.key === "ArrowDown" || event.key === "ArrowUp")) {
      const next = /** @type {HTMLElement|null} */ (
        event.key === "ArrowDown" ? target.nextElementSibling : target.previousElementSibling
      );
      next?.focus();
    } else return;
    event.preventDefault();
  }
}

/** @param {Record<string, any>} item */
function guess(item) {
  if (item.kind === "text" || item.kind === "prompt")
    return (
      (item.kind === "text" ? 24 : 64) + 23 * Math.min(400, Math.ceil((item.text?.length ?? 0) / LINE_CHARACTERS) || 1)
    );
  return GUESSES.get(item.kind) ?? 40;
}
