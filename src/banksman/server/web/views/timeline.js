// The timeline: a strip that shows which turn had the agent when, and so that no two turns had it
// at the same time.
//
// This module owns the strip, its window on the log and its tooltip. model/timeline.js folds the
// events into spans, timescale.js places them, and timeline/drawing.js draws the visible ones. An
// idle page does no work: the strip redraws when the log or the window changes. It follows the
// clock only while a turn is open and the strip is visible (once a second with reduced motion).
//
// The window has three modes. `live`: the last turns up to now. `all`: everything. `free`: a range
// that the user has chosen by zooming or panning; nothing moves it.
//
// For screen readers the picture is one image with a sentence, and a visually hidden list describes
// the turns. The list also gives the keyboard access: arrows move from turn to turn, the picture
// marks the turn, Enter opens it.

import { el, listen, replace, set, svg } from "../dom.js";
import { Timeline } from "../model/timeline.js";
import { Drawing } from "./timeline/drawing.js";
import { watchGestures } from "./timeline/gestures.js";
import { heightOf, lanesOf, layoutOf } from "./timeline/layout.js";
import { legend } from "./timeline/legend.js";
import { summary, turnLine, turnTip } from "./timeline/words.js";

// The live view shows at most this many turns and seconds of work.
const LIVE_TURNS = 14;
const LIVE_SECONDS = 600;
const SCALE_MAX = 5000;
const ZOOM = 1.6;
const LISTED_MAX = 200;

/**
 * @param {HTMLElement} parent
 * @param {any} context
 */
export function mountTimeline(parent, context) {
  const strip = new Strip(context);
  parent.append(strip.section);
  const offs = [
    context.own.events.subscribe((events) => strip.take(events)),
    listen(document, "visibilitychange", () => strip.redraw()),
    () => strip.destroy(),
  ];
  return () => offs.forEach((off) => off());
}

class Strip {
  constructor(context) {
    this.context = context;
    this.timeline = new Timeline();
    this.layout = layoutOf(this.timeline);
    this.mode = "live";
    this.scale = 1;
    this.left = 0;
    this.width = 0;
    this.focused = null;
    this.frame = 0;
    this.timer = 0;
    // Identifies the events that were added, to tell whether the log has grown or was replaced.
    this.taken = { count: 0, first: undefined, last: undefined };
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
    this._build();
    this.observer = new ResizeObserver(() => this.redraw());
    this.observer.observe(this.section);
  }

  _build() {
    const button = (label, title, act) =>
      el("button", { type: "button", title, "aria-label": title, on: { click: act } }, label);
    this.summary = el("p", { class: "timeline-summary" });
    this.buttons = {
      all: el(
        "button",
        { type: "button", "aria-pressed": "false", title: "Show everything", on: { click: () => this.show("all") } },
        "All",
      ),
      live: el(
        "button",
        {
          type: "button",
          "aria-pressed": "true",
          title: "Follow live",
          on: { click: () => this.show("live") },
        },
        "Live",
      ),
    };
    this.svg = svg("svg", { role: "img", "aria-label": "Timeline" });
    this.view = el("div", { class: "timeline-view" }, this.svg);
    this.names = el("div", { class: "timeline-names", "aria-hidden": "true" });
    this.tip = el("div", { class: "timeline-tip", role: "tooltip", hidden: true });
    this.list = el("ol", { class: "timeline-list", "aria-label": "Turns, in order" });
    this.empty = el(
      "p",
      { class: "timeline-empty" },
      "No asks yet. The timeline shows which turn runs, which asks wait, and that no two turns run at the same time.",
    );
    this.section = el(
      "section",
      { class: "timeline", "aria-label": "Timeline" },
      el(
        "div",
        { class: "timeline-bar-top" },
        el("h2", {}, "Timeline"),
        this.summary,
        el(
          "div",
          { class: "timeline-tools", role: "group", "aria-label": "Zoom" },
          button("−", "Zoom out", () => this.zoom(1 / ZOOM)),
          button("+", "Zoom in", () => this.zoom(ZOOM)),
          this.buttons.all,
          this.buttons.live,
        ),
        legend(),
      ),
      el("div", { class: "timeline-body" }, this.names, this.view, this.tip, this.empty),
      this.list,
    );
    this.drawing = new Drawing(this.svg);
    this.offs = [
      watchGestures(this.view, {
        pan: (pixels) => this.pan(pixels),
        zoom: (factor, x) => this.zoom(factor, x),
        click: (event) => this._click(event),
      }),
      listen(this.view, "pointerover", (event) => this._hover(event)),
      listen(this.view, "pointerleave", () => this._hideTip()),
      listen(this.list, "keydown", (event) => this._key(event)),
      listen(this.list, "focusin", (event) => this._focus(event.target.closest("button")?.dataset.listed ?? null)),
      listen(this.list, "focusout", () => this._focus(null)),
    ];
  }

  destroy() {
    this.offs.forEach((off) => off());
    this.observer.disconnect();
    cancelAnimationFrame(this.frame);
    clearTimeout(this.timer);
    this.section.remove();
  }

  /** Take the current log: it has grown, or it is another one. */
  take(events) {
    const { count, first, last } = this.taken;
    const isMore = count === 0 || (events[0]?.seq === first && events[count - 1]?.seq === last);
    if (!isMore) this.timeline = new Timeline();
    const before = isMore ? this.timeline.version : -1;
    this.timeline.add(isMore ? events.slice(count) : events);
    this.taken = { count: events.length, first: events[0]?.seq, last: events.at(-1)?.seq };
    if (this.timeline.version === before) return;
    this.layout = layoutOf(this.timeline);
    this.isListStale = true;
    this.redraw();
  }

  get now() {
    return Math.max(this.timeline.to, Date.now() / 1000 + this.timeline.offset);
  }

  // -- the window ---------------------------------------------------------------------------------
  show(mode) {
    this.mode = mode;
    this.redraw();
  }

  zoom(factor, x = this.width / 2) {
    const { scale: timescale } = this.layout;
    const time = timescale.time(this.left + x, this.scale);
    this.scale = Math.min(SCALE_MAX, Math.max(timescale.fit(this.width), this.scale * factor));
    this.left = timescale.x(time, this.scale) - x;
    this.mode = "free";
    this.redraw();
  }

  pan(pixels) {
    this.left += pixels;
    this.mode = "free";
    this.redraw();
  }

  _place() {
    const { scale: timescale } = this.layout;
    const room = this.width - 12;
    timescale.until(this.now);
    if (this.mode === "all") this.scale = Math.min(SCALE_MAX, timescale.fit(room));
    if (this.mode === "live") this.scale = Math.min(SCALE_MAX, timescale.fitFrom(this._liveFrom(), room));
    const whole = timescale.width(this.scale);
    if (this.mode !== "free") this.left = whole > room ? whole - room : 0;
    // A part of the picture always stays visible.
    this.left = Math.max(-this.width / 2, Math.min(this.left, whole - this.width / 2));
    if (whole <= room) this.left = Math.min(this.left, 0);
  }

  _liveFrom() {
    const { held, scale } = this.layout;
    const recent = held.items.at(-LIVE_TURNS);
    const first = recent === undefined ? this.timeline.from : recent.segment.from;
    const earliest = scale.time(Math.max(0, scale.width(1) - LIVE_SECONDS), 1);
    return Math.max(first, earliest);
  }

  // -- drawing ------------------------------------------------------------------------------------
  get isSeen() {
    return document.visibilityState === "visible" && this.section.clientWidth > 0;
  }

  redraw() {
    if (this.frame === 0) this.frame = requestAnimationFrame(() => this._draw());
  }

  _draw() {
    this.frame = 0;
    clearTimeout(this.timer);
    if (!this.isSeen) return;
    const hasTurns = this.timeline.version > 0;
    this.empty.hidden = hasTurns;
    this.view.hidden = this.names.hidden = !hasTurns;
    if (!hasTurns) {
      this.summary.textContent = "";
      return;
    }
    this.width = this.view.clientWidth;
    this._place();
    this.drawing.draw({ layout: this.layout, scale: this.scale, left: this.left, width: this.width, now: this.now });
    for (const [mode, button] of Object.entries(this.buttons))
      button.setAttribute("aria-pressed", String(this.mode === mode));
    this._say();
    this._mark();
    this._again();
  }

  /**
   * Redraw with the clock while a visible span grows. Growth of less than half a pixel is skipped.
   */
  _again() {
    const end = this.layout.scale.width(this.scale) - this.left;
    const grows = this.timeline.isHeld || (this.timeline.isLive && this.layout.scale.end >= this.now - 1);
    if (!grows || end > this.width + 50) return;
    const wait = this.calm.matches ? 1000 : Math.min(1000, Math.max(32, 500 / this.scale));
    this.timer = setTimeout(() => this.redraw(), wait);
  }

  _say() {
    if (!this.isListStale) return;
    this.isListStale = false;
    const said = summary(this.timeline);
    this.summary.textContent = said;
    this.svg.setAttribute("aria-label", `Timeline: ${said}. The list after it has every turn in words.`);
    const rows = this.layout.rows;
    const lanes = lanesOf(rows);
    const name = (top, words, short) => el("span", { style: { top: `${top}px` }, dataset: { short } }, words);
    replace(
      this.names,
      name(lanes.waiting, "waiting", "waits"),
      name(lanes.held + 8, "running", "runs"),
      name(lanes.process - 1, "process", "process"),
    );
    this.names.style.height = `${heightOf(rows)}px`;
    this._list();
  }

  _list() {
    const now = this.now;
    const turns = this.timeline.turns.slice(-LISTED_MAX);
    if (!turns.some((turn) => turn.id === this.focused)) this.focused = null;
    const current = this.focused ?? turns.at(-1)?.id;
    // A full rebuild would lose the focus, so the buttons are kept.
    const had = new Map([...this.list.querySelectorAll("button")].map((button) => [button.dataset.listed, button]));
    const items = turns.map((turn) => {
      const button =
        had.get(turn.id) ??
        el("button", {
          type: "button",
          dataset: { listed: turn.id },
          on: { click: () => this._jump(this.timeline.turn(turn.id)) },
        });
      set(button, { tabIndex: turn.id === current ? 0 : -1 });
      const line = turnLine(turn, now);
      if (button.textContent !== line) button.textContent = line;
      return button.parentElement ?? el("li", {}, button);
    });
    for (const [index, item] of items.entries())
      if (this.list.children[index] !== item) this.list.insertBefore(item, this.list.children[index] ?? null);
    while (this.list.children.length > items.length) this.list.lastChild.remove();
  }

  // -- the pointer --------------------------------------------------------------------------------
  _node(event) {
    const node = event.target.closest?.("svg g > g");
    return node && this.drawing.tips.has(node) ? node : null;
  }

  _hover(event) {
    const node = this._node(event);
    if (node === null) this._hideTip();
    else this._showTip(this.drawing.tips.get(node)(), node.getBoundingClientRect());
  }

  _click(event) {
    // Use the node under the pointer: with a pointer capture, the event names the view instead.
    const target = document.elementFromPoint(event.clientX, event.clientY);
    const node = target?.closest("svg g > g");
    const seq = node ? this.drawing.seqs.get(node) : undefined;
    if (seq !== undefined) this.context.jump(seq);
  }

  _showTip({ title, lines }, near) {
    replace(this.tip, el("strong", {}, title.slice(0, 300)), ...lines.map((line) => el("span", {}, line)));
    this.tip.hidden = false;
    const body = this.tip.parentElement.getBoundingClientRect();
    const middle = Math.max(near.left, body.left) / 2 + Math.min(near.right, body.right) / 2 - body.left;
    const half = this.tip.offsetWidth / 2;
    this.tip.style.left = `${Math.max(0, Math.min(middle - half, body.width - 2 * half))}px`;
    this.tip.style.top = `${near.bottom - body.top + 6}px`;
  }

  _hideTip() {
    if (this.focused === null) this.tip.hidden = true;
  }

  _jump(turn) {
    if (turn) this.context.jump(turn.segments.find((each) => each.phase === "running")?.seq ?? turn.seq);
  }

  // -- the keyboard -------------------------------------------------------------------------------
  _key(event) {
    const button = event.target.closest("button");
    if (!button || event.ctrlKey || event.metaKey || event.altKey) return;
    const item = button.parentElement;
    const to = {
      ArrowRight: item.nextSibling,
      ArrowDown: item.nextSibling,
      ArrowLeft: item.previousSibling,
      ArrowUp: item.previousSibling,
      Home: this.list.firstChild,
      End: this.list.lastChild,
    }[event.key];
    const zoom = { "+": ZOOM, "=": ZOOM, "-": 1 / ZOOM }[event.key];
    if (to === undefined && zoom === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    if (zoom !== undefined) this.zoom(zoom);
    else to?.firstChild.focus();
  }

  _focus(id) {
    this.focused = id;
    const turn = id === null ? null : this.timeline.turn(id);
    if (turn) {
      for (const button of this.list.querySelectorAll("button"))
        button.tabIndex = button.dataset.listed === id ? 0 : -1;
      this._reveal(turn);
    }
    this.redraw();
  }

  /** Scroll a turn into view if necessary. */
  _reveal(turn) {
    const first = turn.segments[0];
    const last = turn.segments.at(-1);
    const { scale: timescale } = this.layout;
    const from = timescale.x(first.from, this.scale) - this.left;
    const to = timescale.x(last.to ?? this.now, this.scale) - this.left;
    if (from >= 0 && to <= this.width) return;
    this.left += from - Math.max(20, (this.width - (to - from)) / 2);
    this.mode = "free";
  }

  /** Mark the turn that has the keyboard focus. */
  _mark() {
    for (const node of this.svg.querySelectorAll(".is-focused")) node.classList.remove("is-focused");
    const turn = this.focused === null ? null : this.timeline.turn(this.focused);
    if (!turn) {
      if (this.list.contains(document.activeElement) === false && !this.view.matches(":hover")) this.tip.hidden = true;
      return;
    }
    const bars = [...this.svg.querySelectorAll("[data-turn]")].filter((each) => each.dataset.turn === turn.id);
    for (const bar of bars) bar.classList.add("is-focused");
    if (bars.length) this._showTip(turnTip(turn, null, this.now), bars[0].getBoundingClientRect());
  }
}
