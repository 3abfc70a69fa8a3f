// The page as a whole: which session is open, and where each view goes.
//
// The URL names the session (`#/s/<id>`) or the view of the usage (`#/usage`), so that a reload, a
// bookmark and the back button work.
// Each opened session gets a context and its views. When another session is opened, all of them are
// destroyed. The list of sessions, the connection and the theme live as long as the page.
// @ts-check

import { el, listen, replace } from "../dom.js";
import { caller } from "../model/caller.js";
import { hosts } from "../model/hosts.js";
import { SessionLog } from "../model/log.js";
import { OwnEvents } from "../model/own.js";
import { sessions } from "../model/sessions.js";
import { effect, signal } from "../model/signal.js";
import * as actions from "../net/actions.js";
import { feed } from "../net/feed.js";
import { mountComposer } from "./composer.js";
import { mountHeader } from "./header.js";
import { mountKeys } from "./keys.js";
import { newSession } from "./opening.js";
import { mountPanel } from "./panel.js";
import { Pending } from "./pending.js";
import { mountQuestions } from "./questions.js";
import { mountSidebar } from "./sidebar.js";
import { startTheme } from "./theme.js";
import { mountTimeline } from "./timeline.js";
import { mountTranscript } from "./transcript.js";
import { mountUsage } from "./usage.js";
import { mountWelcome } from "./welcome.js";

const TOAST_MILLISECONDS = 5000;
const TOASTS_MAX = 3;
const USAGE = "#/usage";
/** These are already visible, so they are only announced to screen readers. */
const SPOKEN = new Set(["question", "note"]);

/**
 * Mount a view, and mount it again when the value changes.
 * @template T
 * @param {{subscribe: (fn: (value: T) => void) => () => void}} value
 * @param {(value: T) => () => void} mount
 */
function whenever(value, mount) {
  let unmount = () => {};
  const off = value.subscribe((now) => {
    unmount();
    unmount = mount(now);
  });
  return () => {
    off();
    unmount();
  };
}

/** @param {HTMLElement} parent */
export function mountApp(parent) {
  const app = new App(parent);
  app.start();
  return () => app.destroy();
}

class App {
  /** @param {HTMLElement} parent */
  constructor(parent) {
    this.parent = parent;
    /** @type {any} */
    this.context = null;
    /** @type {string|null|undefined} undefined: no session was opened yet */
    this.opened = undefined;
    /** The server wants a login. Nothing of the session is shown until then. */
    this.isOut = false;
    /** @type {(() => void)[]} cleanup functions of the page */
    this.offs = [];
    /** @type {(() => void)[]} cleanup functions of the open session */
    this.closings = [];
    this.toasts = el("div", { class: "toasts" });
    this.polite = el("div", { class: "sr-only", role: "status", "aria-live": "polite" });
    this.messages = el("section", { "aria-label": "Notices" }, this.toasts, this.polite);
    this.main = el("main", { class: "main", id: "main" });
    this.scrim = el("button", {
      class: "scrim",
      type: "button",
      "aria-label": "Close the open overlay",
      tabIndex: -1,
      on: { click: () => this.drawer(null) },
    });
    this.root = el("div", { class: "app" });
  }

  start() {
    const { root } = this;
    const shared = {
      sessions,
      hosts,
      caller,
      feed,
      actions,
      say: (/** @type {string} */ text, /** @type {string} */ kind) => this.say(text, kind),
      open: (/** @type {string} */ id) => this.open(id),
      newSession: () => caller.may("open") && newSession(shared),
      drawer: (/** @type {string|null} */ name) => this.drawer(name),
      drawerName: signal(null),
      theme: startTheme(),
    };
    this.shared = shared;
    root.append(
      el(
        "a",
        { class: "skip", href: "#main", on: { click: (/** @type {Event} */ event) => this.#skip(event) } },
        "Go to the message",
      ),
    );
    this.offs.push(mountSidebar(root, shared));
    root.append(this.main, this.scrim);
    this.panel = mountPanel(root, shared);
    this.parent.append(root, this.messages);
    this.offs.push(
      listen(window, "hashchange", () => this.#route()),
      listen(document, "keydown", (event) => event.key === "Escape" && this.drawer(null)),
      effect([feed.connection], ({ state }) => this.#gate(state)),
      effect([sessions.list], () => this.#listed()),
      effect([sessions.questions, sessions.list], () => this.#title()),
      shared.drawerName.subscribe((name) => {
        if (name) root.dataset.drawer = name;
        else delete root.dataset.drawer;
      }),
    );
    this.#route();
  }

  destroy() {
    this.#close();
    for (const off of this.offs) off();
    this.root.remove();
    this.messages.remove();
  }

  /** @param {string} id */
  open(id) {
    this.drawer(null);
    const place = `#/s/${encodeURIComponent(id)}`;
    if (location.hash !== place) location.hash = place;
    else this.#route();
  }

  /** @param {string|null} name */
  drawer(name) {
    const { drawerName } = /** @type {any} */ (this.shared);
    const was = drawerName.value;
    drawerName.value = was === name ? null : name;
  }

  /**
   * Announce a text to screen readers, and show it for a moment.
   * @param {string} text
   * @param {string} [kind]
   */
  say(text, kind = "info") {
    this.polite.textContent = text;
    if (SPOKEN.has(kind)) return;
    const toast = el("div", { class: "toast", dataset: { kind } }, text);
    this.toasts.append(toast);
    while (this.toasts.childElementCount > TOASTS_MAX) this.toasts.firstElementChild?.remove();
    setTimeout(() => toast.remove(), TOAST_MILLISECONDS);
  }

  // -- the open session ---------------------------------------------------------------------------

  #route() {
    const found = /^#\/s\/([^/?]+)/.exec(location.hash);
    let id = null;
    try {
      id = found ? decodeURIComponent(found[1]) : null;
    } catch {
      id = null;
    }
    this.drawer(null);
    if (id !== this.opened || id === null) this.#show(id);
  }

  /**
   * Show the login instead of the session while the server refuses this browser.
   * @param {string} state of the connection. While the page tries again, nothing changes.
   */
  #gate(state) {
    const isOut = state === "refused" || (this.isOut && state !== "live");
    if (isOut === this.isOut) return;
    this.isOut = isOut;
    if (this.opened !== undefined) this.#show(this.opened);
  }

  /** A URL with a session's name is replaced by the URL with its id: events carry only the id. */
  #resolve() {
    const list = sessions.list.value;
    if (this.opened === null || list.some(({ id }) => id === this.opened)) return;
    const named = list.find(({ name }) => name === this.opened);
    if (named) location.replace(`#/s/${encodeURIComponent(named.id)}`);
  }

  /** @param {string|null} id */
  #show(id) {
    this.#close();
    this.opened = id;
    const shown = this.isOut ? null : id;
    const context = shown === null ? this.#nowhere() : this.#contextOf(shown);
    this.context = context;
    replace(this.main);
    this.closings.push(mountHeader(this.main, context));
    if (location.hash === USAGE && !this.isOut) this.closings.push(mountUsage(this.main));
    else if (shown === null) this.closings.push(mountWelcome(this.main, context));
    else this.#mount(context);
    this.closings.push(this.panel?.use(context) ?? (() => {}), mountKeys(document, context));
    this.root.dataset.open = shown === null ? "none" : "session";
    this.#title();
  }

  /** Show the page without a session. */
  #nowhere() {
    return {
      ...this.shared,
      session: signal(null),
      maySteer: caller.allows("steer"),
      id: null,
      log: null,
      own: null,
      usage: signal(null),
      jump: () => {},
      toEnd: () => {},
      toStart: () => {},
      showPanel: () => {},
    };
  }

  /** @param {string} id */
  #contextOf(id) {
    const log = new SessionLog(id);
    const own = new OwnEvents(id);
    const session = signal(sessions.list.value.find((one) => one.id === id) ?? null);
    const [maySteer, forget] = caller.steers(id);
    this.closings.push(
      () => log.close(),
      () => own.close(),
      forget,
    );
    const context = {
      ...this.shared,
      session,
      maySteer,
      id,
      log,
      own,
      usage: signal(null),
      running: signal(null),
      pending: new Pending(),
      jump: () => {},
      toEnd: () => {},
      toStart: () => {},
      showPanel: (/** @type {string} */ name) => this.panel?.show(name),
      hidePanel: () => this.panel?.hide(),
    };
    // The view of the session shows why it cannot be read.
    log.open().catch(() => {});
    return context;
  }

  /** @param {any} context */
  #mount(context) {
    const timeline = el("div", { class: "timeline-place" });
    const view = el("div", { class: "view" });
    const questions = el("div", { class: "questions-place" });
    const composer = el("div");
    const foot = el("div", { class: "foot" }, questions, composer);
    this.main.append(timeline, view, foot);
    this.closings.push(
      mountTimeline(timeline, context),
      mountTranscript(view, context),
      // Made again if the rights change: without the right, a card has no buttons.
      whenever(caller.allows("answer"), (mayAnswer) =>
        mountQuestions(questions, Object.assign(Object.create(context), { mayAnswer })),
      ),
      whenever(caller.allows("ask"), (may) => (may ? mountComposer(composer, context) : () => {})),
    );
  }

  #close() {
    for (const close of this.closings.splice(0).reverse()) close();
    this.context = null;
  }

  #listed() {
    this.root.dataset.some = String(sessions.list.value.length > 0);
    this.#resolve();
    if (!this.context?.id) return;
    const found = sessions.list.value.find((one) => one.id === this.opened) ?? null;
    if (found) this.context.session.value = found;
  }

  #title() {
    const count = sessions.questions.value;
    const session = sessions.list.value.find((one) => one.id === this.opened);
    const name = session ? `${session.name ?? session.id} · Banksman` : "Banksman";
    document.title = count ? `(${count}) ${name}` : name;
    // Only an installed page has a badge. Elsewhere the title shows the count.
    const badge = count ? navigator.setAppBadge?.(count) : navigator.clearAppBadge?.();
    badge?.catch(() => {});
  }

  /** @param {Event} event */
  #skip(event) {
    event.preventDefault();
    const target = /** @type {HTMLElement|null} */ (
      this.main.querySelector("textarea") ?? this.main.querySelector("button")
    );
    target?.focus();
  }
}
