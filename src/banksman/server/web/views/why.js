// The why panel: what the session is doing, which turn has the agent, what waits, and which
// watchdog ends it; in the words of `banksman why`.
//
// It polls the server once a second, only while it is visible: the tab is in front, and the panel
// is open. Between two responses the clocks count in the page. If the server does not respond, the
// panel polls less and less often, and shows the age of its data.

import { el, keyed, listen, replace, set } from "../dom.js";
import { accountOf, accountText, asLine, clockLeft, stateText, treeOf } from "../model/why.js";
import { clockTime, duration } from "../model/words.js";
import { StderrPane } from "./stderr.js";

const POLL_SECONDS = 1;
const POLL_SECONDS_MAX = 30;
const TICK_MILLISECONDS = 250;

/**
 * @param {HTMLElement} parent
 * @param {any} context
 */
export function mountWhy(parent, context) {
  const panel = new WhyPanel(context);
  parent.append(panel.section);
  panel.begin();
  return () => panel.destroy();
}

class WhyPanel {
  constructor(context) {
    this.context = context;
    this.why = null;
    this.at = 0;
    this.wait = POLL_SECONDS;
    this.timer = 0;
    this.ticker = 0;
    this.isAsking = false;
    this.isOver = false;
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
    this.state = el("p", { class: "pane-state", role: "status" }, "Asking…");
    this.copy = el(
      "button",
      { type: "button", class: "pane-button", disabled: true, on: { click: () => this._copy() } },
      "Copy as text",
    );
    this.list = el("dl", { class: "why-list" });
    this.stderr = new StderrPane(context);
    this.section = el(
      "section",
      { class: "pane why", "aria-label": "Why" },
      el("div", { class: "pane-top" }, el("h2", { class: "sr-only" }, "Why"), this.state, this.copy),
      this.list,
      this.stderr.node,
    );
  }

  begin() {
    // Opening the panel, or returning to the tab, polls immediately.
    this.observer = new IntersectionObserver(() => this.wake());
    this.observer.observe(this.section);
    this.off = listen(document, "visibilitychange", () => this.wake());
    this.wake();
  }

  destroy() {
    this.isOver = true;
    this.observer.disconnect();
    this.off();
    clearTimeout(this.timer);
    clearInterval(this.ticker);
    this.stderr.see(false);
    this.section.remove();
  }

  get isSeen() {
    return (
      !this.isOver &&
      document.visibilityState === "visible" &&
      this.section.isConnected &&
      this.section.getClientRects().length > 0
    );
  }

  wake() {
    clearTimeout(this.timer);
    clearInterval(this.ticker);
    this.ticker = 0;
    this.stderr.see(this.isSeen);
    if (!this.isSeen) return;
    this.ticker = setInterval(() => this._show(), this.calm.matches ? 1000 : TICK_MILLISECONDS);
    this._ask();
  }

  async _ask() {
    if (this.isAsking) return;
    this.isAsking = true;
    try {
      const why = await this.context.actions.why(this.context.id);
      this.why = why;
      this.at = performance.now();
      this.wait = POLL_SECONDS;
      this.problem = null;
    } catch (error) {
      this.wait = Math.min(POLL_SECONDS_MAX, this.wait * 2);
      this.problem = {
        words: [error.detail ?? error.message, error.hint].filter(Boolean).join(": "),
        until: performance.now() + this.wait * 1000,
      };
    } finally {
      this.isAsking = false;
    }
    if (this.isOver) return;
    this._show();
    clearTimeout(this.timer);
    if (this.isSeen) this.timer = setTimeout(() => (this.isSeen ? this._ask() : this.wake()), this.wait * 1000);
  }

  get elapsed() {
    return (performance.now() - this.at) / 1000;
  }

  _show() {
    if (this.ticker !== 0 && !this.isSeen) return this.wake();
    this._showState();
    this.copy.disabled = this.why === null;
    if (this.why === null) return undefined;
    const topics = accountOf(this.why, this.elapsed).filter(([, lines]) => lines.length > 0);
    keyed(
      this.list,
      topics,
      ([name]) => name,
      ([name]) => el("div", { dataset: { topic: name } }, el("dt", {}, name), el("dd")),
      (node, [name, lines]) => {
        const make = {
          clocks: () => this._clocks(),
          tree: () => this._tree(),
          phase: () => this._phase(),
          frames: () => this._frames(lines),
        }[name];
        const shown = make
          ? make()
          : lines.map((line) => el("span", { class: line.startsWith("  ") ? "why-inner" : "" }, line.trim()));
        this._update(node.lastChild, shown);
      },
    );
    return undefined;
  }

  /** Only changed nodes are updated, so that text can be selected while clocks count. */
  _update(place, shown) {
    const old = [...place.children];
    const isSame = old.length === shown.length && shown.every((node, index) => node.isEqualNode(old[index]));
    if (isSame) return;
    if (old.length !== shown.length) return void replace(place, ...shown);
    shown.forEach((node, index) => node.isEqualNode(old[index]) || old[index].replaceWith(node));
  }

  _showState() {
    let words = "";
    if (this.problem) {
      const left = Math.max(0, Math.ceil((this.problem.until - performance.now()) / 1000));
      const age = this.why === null ? "" : ` The data is ${duration(this.elapsed)} old.`;
      words = `${this.problem.words}. Asked again in ${left} s.${age}`;
    }
    if (this.state.textContent !== words) this.state.textContent = words;
    set(this.section, { class: this.problem ? "pane why is-stale" : "pane why" });
  }

  _phase() {
    const place = this.why.waits_for_place ? " waits for a place in the process pool" : "";
    return [el("span", {}, el("strong", {}, this.why.phase), place)];
  }

  _clocks() {
    return this.why.clocks.map((clock) => {
      const left = clockLeft(clock, this.elapsed);
      const share = clock.seconds > 0 ? Math.min(1, left / clock.seconds) : 0;
      const words = `${duration(left)} left of ${duration(clock.seconds)}${clock.running ? "" : ", paused"}`;
      const fill = el("span", { class: "why-clock-fill", style: { width: `${(share * 100).toFixed(1)}%` } });
      return el(
        "span",
        { class: `why-clock${clock.running ? "" : " is-still"}${share < 0.25 && clock.running ? " is-short" : ""}` },
        el("span", {}, el("strong", {}, clock.name), ` ${words}`),
        el("span", { class: "why-clock-bar", "aria-hidden": "true" }, fill),
      );
    });
  }

  _frames(lines) {
    const last = [
      ["from the agent", this.why.last_in],
      ["to the agent", this.why.last_out],
    ].filter(([, each]) => each?.text);
    return [
      el("span", {}, lines[0]),
      ...last.map(([name, each]) =>
        el(
          "span",
          { class: "why-frame" },
          el("span", {}, `last ${name}${each.at ? `, ${clockTime(each.at, 1)}` : ""}`),
          el("code", {}, asLine(each.text, 500)),
        ),
      ),
    ];
  }

  _tree() {
    return treeOf(this.why.tree).map(({ depth, process }) =>
      el(
        "span",
        { class: "why-process", style: { paddingLeft: `${depth * 14}px` } },
        el("code", {}, String(process.pid)),
        el("span", { title: stateText(process.state) }, stateText(process.state)),
        el("span", {}, process.rss_bytes === null ? "" : `${Math.round(process.rss_bytes / 1048576)} MiB`),
        el("code", { class: "why-command", title: asLine(process.command) }, asLine(process.command, 200)),
      ),
    );
  }

  async _copy() {
    const text = accountText(this.why, this.elapsed);
    try {
      await navigator.clipboard.writeText(text);
      this.context.say("Copied.", "done");
    } catch {
      this.context.say("The browser does not let the page copy: select the text instead.", "error");
    }
  }
}
