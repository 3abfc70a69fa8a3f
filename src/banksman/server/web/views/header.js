// The header of a session: its name (editable), its state, its cost. It also has the controls of
// the whole page: the connection state in words, and the theme.
// @ts-check

import { el, listen, replace } from "../dom.js";
import { budgetText, limitText } from "../model/provider.js";
import { effect, signal } from "../model/signal.js";
import { icon } from "./items/icons.js";
import { amount, money, STATES } from "./items/words.js";
import { openHelp } from "./keys.js";

/** From here on the model's context window is nearly full. */
const FULL = 0.8;

/**
 * @param {HTMLElement} parent
 * @param {any} context
 */
export function mountHeader(parent, context) {
  const title = el("h1");
  const state = el("span", { class: "state" });
  const facts = el("div", { class: "facts" });
  const connection = el(
    "div",
    { class: "connection", role: "status" },
    el("span", { class: "dot", "aria-hidden": "true" }),
    el("span"),
  );
  const buttons = buttonsOf(context);
  const header = el(
    "header",
    { class: "header" },
    buttons.sessions,
    el("div", { class: "who" }, el("div", { class: "line" }, title, state), facts),
    connection,
    el("div", { class: "buttons" }, buttons.rest),
  );
  parent.append(header);
  const name = nameOf(title, context);
  const clock = signal(0);
  const timer = setInterval(() => context.feed.connection.value.retryAt && (clock.value += 1), 500);
  const offs = [
    effect([context.session, context.maySteer], (session, maySteer) => {
      name.show(session);
      drawState(state, session);
      buttons.close.disabled = !session || session.state === "gone";
      buttons.close.hidden = !maySteer;
    }),
    effect([context.session, context.usage], (session, usage) => drawFacts(facts, session, usage)),
    effect([context.feed.connection, clock], (now) => drawConnection(connection, now)),
    effect([context.theme.now], (theme) => {
      const next = theme === "dark" ? "light" : "dark";
      replace(buttons.theme, icon(theme === "dark" ? "sun" : "moon"));
      buttons.theme.setAttribute("aria-label", `Theme: change to ${next}`);
      buttons.theme.title = `Change to the ${next} theme`;
    }),
    context.drawerName.subscribe((/** @type {string|null} */ open) =>
      buttons.sessions.setAttribute("aria-expanded", String(open === "sessions")),
    ),
    () => clearInterval(timer),
  ];
  context.panel &&
    (context.panel.shared.panelShown = (/** @type {boolean} */ is) =>
      buttons.panel.setAttribute("aria-expanded", String(is)));
  return () => {
    for (const off of offs) off();
    header.remove();
  };
}

/** @param {any} context */
function buttonsOf(context) {
  const button = (
    /** @type {string} */ label,
    /** @type {string} */ picture,
    /** @type {() => void} */ click,
    more = {},
  ) =>
    el(
      "button",
      { class: "icon-button", type: "button", "aria-label": label, title: label, on: { click }, ...more },
      icon(picture),
    );
  const sessions = button("Sessions", "menu", () => context.drawer("sessions"), {
    class: "icon-button only-narrow",
    "aria-expanded": "false",
    "aria-controls": "sessions",
  });
  const theme = button("Theme", "moon", () => context.theme.toggle());
  const help = button("Keys and help", "help", () => openHelp());
  const panel = button("Panel", "panel", () => context.panel?.toggle(), { "aria-expanded": "false" });
  const close = button("Close this session", "close", () => closing(context));
  const rest = context.id === null ? [help, theme] : [help, theme, close, panel];
  return { sessions, theme, help, panel, close, rest };
}

/** @param {any} context */
async function closing(context) {
  const session = context.session.value;
  const name = session?.name ?? context.id;
  const isBusy = session?.holder || session?.queue?.length;
  const words = isBusy
    ? `Close “${name}”? Its running turn is stopped, its queued asks are refused. Its log is kept.`
    : `Close “${name}”? Its process is ended. Its log is kept.`;
  if (!(await confirmed(words, "Close the session"))) return;
  try {
    await context.actions.close(context.id);
    context.say(`${name} was closed.`);
  } catch (error) {
    context.say(/** @type {any} */ (error).message, "error");
  }
}

/**
 * @param {string} words
 * @param {string} yes
 * @returns {Promise<boolean>}
 */
function confirmed(words, yes) {
  return new Promise((done) => {
    const dialog = el(
      "dialog",
      { class: "dialog", "aria-label": yes },
      el(
        "form",
        { method: "dialog" },
        el("p", null, words),
        el(
          "footer",
          null,
          el("button", { class: "button", value: "no" }, "Keep it open"),
          el("button", { class: "button danger", value: "yes" }, yes),
        ),
      ),
    );
    listen(dialog, "close", () => {
      dialog.remove();
      done(dialog.returnValue === "yes");
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

/**
 * The name. A click turns it into a field.
 * @param {HTMLElement} title
 * @param {any} context
 */
function nameOf(title, context) {
  let isEdited = false;
  /** @type {any} */
  let shown = null;
  const show = (/** @type {any} */ session) => {
    shown = session;
    if (isEdited) return;
    if (context.id === null) return replace(title, "Banksman");
    const words = session?.name ?? context.id;
    if (!context.maySteer.value) return replace(title, words);
    const button = title.querySelector("button");
    if (button?.textContent === words) return;
    replace(title, el("button", { type: "button", title: "Change the name", on: { click: edit } }, words));
  };
  const edit = () => {
    isEdited = true;
    const input = el("input", {
      class: "input",
      value: shown?.name ?? "",
      placeholder: context.id,
      maxLength: 255,
      "aria-label": "Name of the session",
    });
    const finish = async (/** @type {boolean} */ isKept) => {
      if (!isEdited) return;
      isEdited = false;
      const given = input.value.trim() || null;
      const before = shown;
      replace(title);
      show(isKept && shown ? { ...shown, name: given } : shown);
      if (!isKept || given === (before?.name ?? null)) return;
      try {
        await context.actions.rename(context.id, given);
        context.sessions.refresh?.();
      } catch (error) {
        show(before);
        context.say(/** @type {any} */ (error).message, "error");
      }
    };
    input.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.preventDefault();
      event.stopPropagation();
      finish(event.key === "Enter");
      title.querySelector("button")?.focus();
    });
    input.addEventListener("blur", () => finish(true));
    replace(title, input);
    input.select();
  };
  return { show };
}

/**
 * @param {HTMLElement} node
 * @param {any} session
 */
function drawState(node, session) {
  const state = session?.state;
  node.hidden = !state;
  if (!state) return;
  node.dataset.state = state;
  replace(
    node,
    el("span", { class: "dot", "aria-hidden": "true" }),
    el("span", { class: "state-word", dataset: { state } }, STATES.get(state) ?? state),
  );
}

/**
 * @param {HTMLElement} node
 * @param {any} session
 * @param {{used: number, size: number}|null} usage
 */
function drawFacts(node, session, usage) {
  if (!session) return replace(node);
  const limit = limitText(session, Date.now() / 1000);
  const over = budgetText(session);
  replace(
    node,
    el("span", { title: "Agent" }, session.agent),
    session.host ? el("span", { class: "host", title: "Host of the session" }, `on ${session.host}`) : null,
    limit ? el("span", { class: "limited", title: "Usage limit of the agent's account" }, limit) : null,
    over ? el("span", { class: "limited over-budget", title: "A budget is used up" }, over) : null,
    session.cost ? el("span", { title: "Cost so far" }, money(session.cost)) : null,
    usage ? meter(usage) : null,
    session.cwd ? el("span", { class: "cwd", title: session.cwd }, session.cwd) : null,
  );
}

/** @param {{used: number, size: number}} usage */
function meter({ used, size }) {
  if (!size)
    return el(
      "span",
      { title: "Input and output tokens, as the model counts them" },
      `${amount(used)} tokens`,
    );
  const share = Math.min(1, used / size);
  const bar = el("i");
  bar.style.width = `${Math.round(100 * share)}%`;
  return el(
    "span",
    { title: `${used} of ${size} tokens of the model's context window` },
    el("span", { class: "meter", dataset: { full: share >= FULL ? "" : null } }, bar),
    `${Math.round(100 * share)} % of ${amount(size)}`,
  );
}

/**
 * @param {HTMLElement} node
 * @param {{state: string, detail?: string, retryAt: number|null, isLeader: boolean}} now
 */
function drawConnection(node, now) {
  node.dataset.connection = now.state;
  const words = /** @type {HTMLElement} */ (node.lastElementChild);
  const text = connectionWords(now);
  // Unchanged text is not set again, so that screen readers do not repeat it.
  if (words.textContent !== text) words.textContent = text;
  node.title =
    now.detail ||
    (now.state === "live"
      ? `Events are shown live${now.isLeader ? "; this tab reads for all tabs" : ""}.`
      : text);
}

/** @param {{state: string, detail?: string, retryAt: number|null}} now */
function connectionWords({ state, detail, retryAt }) {
  // Unix time is in seconds. A larger number is in milliseconds.
  const at = retryAt === null || retryAt === undefined ? null : retryAt < 1e11 ? retryAt * 1000 : retryAt;
  const seconds = at === null ? 0 : Math.max(0, Math.ceil((at - Date.now()) / 1000));
  const again = seconds ? `trying again in ${seconds} s` : "trying again";
  switch (state) {
    case "live":
      return "live";
    case "connecting":
      return "connecting…";
    case "waiting":
      return `connection lost, ${again}`;
    case "offline":
      return "this machine is offline";
    case "refused":
      return detail ? `refused: ${detail}` : "refused by the server";
    case "ending":
      return `the server is shutting down, ${again}`;
    default:
      return state;
  }
}
