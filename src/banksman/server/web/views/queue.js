// The queue panel: the turn that has the agent, and the waiting asks in the order of service.
//
// A change by the user is shown immediately and sent to the server. The server's reply then
// replaces it. So a late cancel, or a move that another user undid, corrects itself. An error is
// shown with its hint, and the row returns.

import { el, keyed, listen, set } from "../dom.js";
import { effect } from "../model/signal.js";
import { above, rowsOf } from "../model/queue.js";
import { classOf, clockTime, duration, promptText } from "../model/words.js";

// How long a wish is shown although the server's list does not have it yet.
const WISH_MILLISECONDS = 3000;

/**
 * @param {HTMLElement} parent
 * @param {any} context
 */
export function mountQueue(parent, context) {
  const panel = new QueuePanel(context);
  parent.append(panel.section);
  panel.begin();
  return () => panel.destroy();
}

class QueuePanel {
  constructor(context) {
    this.context = context;
    this.session = null;
    this.wishes = { cancelled: new Set(), moved: [] };
    this.cancelledAt = 0;
    this.busy = new Set();
    this.ticker = 0;
    this.holder = el("div", { class: "queue-holder" });
    this.list = el("ol", { class: "queue-list", "aria-label": "Waiting asks, next first" });
    this.heading = el("h3", {}, "Waiting, next first");
    this.count = el("p", { class: "pane-state" });
    this.section = el(
      "section",
      { class: "pane queue", "aria-label": "Queue" },
      el("div", { class: "pane-top" }, el("h2", { class: "sr-only" }, "Queue"), this.count),
      el("h3", {}, "Running"),
      this.holder,
      this.heading,
      this.list,
    );
  }

  begin() {
    this.offs = [
      effect([this.context.session], (session) => {
        // The server sent a new state: the wishes are part of it, or were refused.
        if (this.session !== session) this._settle(session);
        this.session = session;
        this.draw();
      }),
      this.context.own.events.subscribe(() => this.draw()),
      effect([this.context.caller.me, this.context.maySteer], () => this.draw()),
      listen(document, "visibilitychange", () => this.draw()),
    ];
    this.ticker = setInterval(() => this._tick(), 1000);
  }

  destroy() {
    clearInterval(this.ticker);
    this.offs.forEach((off) => off());
    this.section.remove();
  }

  /** What the log says about a turn. Lookups are rare, so it searches from the end. */
  known(turn) {
    const events = this.context.own.events.value;
    const asked = events.findLast((event) => event.turn === turn && event.kind === "turn.queued");
    const started = events.findLast((event) => event.turn === turn && event.kind === "turn.started");
    const stopped = events.findLast((event) => event.turn === turn && event.kind === "turn.interrupted");
    return {
      ...(asked?.body ?? {}),
      asked,
      started,
      stopped: stopped && started && stopped.seq > started.seq ? stopped : null,
    };
  }

  _settle(session) {
    const waiting = new Set((session?.queue ?? []).map((each) => each.turn));
    for (const turn of this.wishes.cancelled) {
      // The server may have sent this state before it got the request.
      const isOld = !this.busy.has(turn) && performance.now() - this.cancelledAt > WISH_MILLISECONDS;
      if (!waiting.has(turn) || isOld) this.wishes.cancelled.delete(turn);
    }
    this.wishes.moved = this.wishes.moved.filter(({ turn }) => this.busy.has(turn));
  }

  draw() {
    const { session } = this;
    const now = Date.now() / 1000;
    this._drawHolder(session, now);
    const rows = rowsOf(session, (turn) => this.known(turn), this.wishes, now);
    this.count.textContent =
      rows.length === 0 ? "No ask waits." : rows.length === 1 ? "1 ask waits." : `${rows.length} asks wait.`;
    this.list.hidden = this.heading.hidden = rows.length === 0;
    keyed(
      this.list,
      rows,
      (row) => row.turn,
      (row) => this._row(row),
      (node, row) => this._update(node, row, rows, now),
    );
    this._tick();
  }

  _drawHolder(session, now) {
    const turn = session?.holder ?? null;
    const holders = turn === null ? [] : [{ turn, ...this.known(turn) }];
    this.holder.classList.toggle("is-free", turn === null);
    const empty =
      turn === null ? [session?.hold ? `No turn runs; the hold ${session.hold} keeps the session.` : "No turn runs."] : [];
    keyed(
      this.holder,
      [...holders, ...empty.map((words) => ({ turn: "", words }))],
      (each) => each.turn || each.words,
      (each) => (each.words ? el("p", { class: "pane-empty" }, each.words) : this._holderRow(each)),
      (node, each) => {
        if (!each.turn) return;
        const parts = node.parts;
        const shown =
          promptText(each.prompt ?? "") || (each.started?.body?.origin ? "started by the agent" : each.turn);
        if (parts.prompt.textContent !== shown) parts.prompt.textContent = shown;
        const kind = classOf(Number(each.priority) || 0);
        set(node, { dataset: { class: kind } });
        parts.kind.textContent = kind;
        node.since = each.started?.at ?? now;
        node.words = each.stopped ? "is being stopped, runs for" : "runs for";
        parts.button.disabled = Boolean(each.stopped) || this.busy.has(each.turn);
        parts.button.hidden = !this.context.caller.mayInterrupt(each.caller);
        const by = each.caller ? `by ${each.caller}` : "";
        if (parts.by.textContent !== by) parts.by.textContent = by;
        parts.button.setAttribute("aria-label", `Interrupt ${called(shown)}`);
      },
    );
  }

  _holderRow({ turn }) {
    const prompt = el("p", { class: "queue-prompt" });
    const kind = el("span", { class: "queue-class" });
    const since = el("span", { class: "queue-since" });
    const button = el(
      "button",
      { type: "button", class: "pane-button is-strong", on: { click: () => this._interrupt(turn) } },
      "Interrupt",
    );
    const by = el("span", { class: "queue-by" });
    const node = el(
      "div",
      { class: "queue-row", dataset: { holder: turn } },
      prompt,
      el("div", { class: "queue-line" }, kind, by, since, button),
    );
    node.parts = { prompt, kind, by, since, button };
    return node;
  }

  _row({ turn }) {
    const prompt = el("p", { class: "queue-prompt" });
    const kind = el("span", { class: "queue-class" });
    const since = el("span", { class: "queue-since" });
    const up = el(
      "button",
      { type: "button", class: "pane-button", on: { click: () => this._move(turn, false) } },
      "↑ Up",
    );
    const top = el(
      "button",
      { type: "button", class: "pane-button", on: { click: () => this._move(turn, true) } },
      "⤒ Top",
    );
    const cancel = el(
      "button",
      { type: "button", class: "pane-button", on: { click: () => this._cancel(turn) } },
      "Cancel",
    );
    const by = el("span", { class: "queue-by" });
    const node = el(
      "li",
      { class: "queue-row", dataset: { turn } },
      prompt,
      el("div", { class: "queue-line" }, kind, by, since, el("span", { class: "queue-actions" }, up, top, cancel)),
    );
    node.parts = { prompt, kind, by, since, up, top, cancel };
    return node;
  }

  _update(node, row, rows, now) {
    const { prompt, kind, by, up, top, cancel } = node.parts;
    const { caller, maySteer } = this.context;
    const asker = this.known(row.turn).caller ?? null;
    const byText = asker === null ? "" : `by ${asker}`;
    if (by.textContent !== byText) by.textContent = byText;
    set(up, { hidden: !maySteer.value });
    set(top, { hidden: !maySteer.value });
    set(cancel, { hidden: !caller.mayInterrupt(asker) });
    const words = row.prompt || row.turn;
    if (prompt.textContent !== words) prompt.textContent = words;
    kind.textContent = `${row.class}${row.attempt > 1 ? `, attempt ${row.attempt}` : ""}`;
    set(node, { dataset: { class: row.class } });
    node.since = row.at ?? now;
    node.words = row.at === null ? "" : "waits for";
    const isFirst = above(rows, row.turn) === undefined;
    const name = called(words);
    set(up, { disabled: isFirst, "aria-label": `Move up ${name}` });
    set(top, { disabled: isFirst, "aria-label": `Move to the top ${name}`, title: "To the top of its class" });
    set(cancel, { "aria-label": `Cancel ${name}` });
  }

  /** Update the waiting times, only while they are visible. */
  _tick() {
    if (document.visibilityState !== "visible" || this.section.getClientRects().length === 0) return;
    const now = Date.now() / 1000;
    for (const node of this.section.querySelectorAll(".queue-row")) {
      const words = node.words
        ? `${node.words} ${duration(Math.max(0, Math.floor(now - node.since)) || now - node.since)}`
        : "";
      if (node.parts.since.textContent !== words)
        set(node.parts.since, { textContent: words, title: `since ${clockTime(node.since)}` });
    }
  }

  async _interrupt(turn) {
    const receipt = await this._do(turn, () => this.context.actions.interrupt(this.context.id, turn));
    if (receipt)
      this.context.say(
        receipt.stopped ? `Stopped, by ${String(receipt.by).replace("_", " ")}.` : "The turn had already ended.",
        "done",
      );
  }

  async _cancel(turn) {
    const row = this.list.querySelector(`[data-turn="${CSS.escape(turn)}"]`);
    // After a cancel by keyboard, focus the next row.
    const next = row?.contains(document.activeElement) ? (row.nextElementSibling ?? row.previousElementSibling) : null;
    this.wishes.cancelled.add(turn);
    this.cancelledAt = performance.now();
    this.draw();
    next?.parts?.cancel.focus();
    const receipt = await this._do(turn, () => this.context.actions.cancel(this.context.id, turn));
    if (receipt && receipt.by === "already_over") this.context.say("The turn had already ended.", "done");
    else if (receipt) this.context.say("Withdrawn.", "done");
    else this.wishes.cancelled.delete(turn);
    this.draw();
  }

  async _move(turn, toTop) {
    const rows = rowsOf(this.session, (id) => this.known(id), this.wishes, 0);
    const before = above(rows, turn);
    if (before === undefined) return;
    const wish = { turn, before: toTop ? null : before };
    this.wishes.moved.push(wish);
    this.draw();
    const answer = await this._do(turn, () => this.context.actions.moveUp(this.context.id, turn, wish.before));
    // The response contains the current queue. It is newer than the page's copy.
    if (answer?.queue && this.session) this.session = { ...this.session, queue: answer.queue };
    this.wishes.moved = this.wishes.moved.filter((each) => each !== wish);
    this.draw();
  }

  async _do(turn, act) {
    this.busy.add(turn);
    try {
      return await act();
    } catch (error) {
      this.context.say([error.detail ?? error.message, error.hint].filter(Boolean).join(": "), "error");
      return null;
    } finally {
      this.busy.delete(turn);
    }
  }
}

/** The accessible name of a button, with the prompt that it acts on. */
function called(prompt) {
  return `“${prompt.trim().split("\n", 1)[0].slice(0, 60)}”`;
}
