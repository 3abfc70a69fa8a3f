// The view without an open session: what Banksman is, the first steps, and the commands for a
// terminal.
// @ts-check

import { el, replace } from "../dom.js";
import { effect } from "../model/signal.js";
import { loginByToken } from "../net/api.js";
import { mark } from "./items/icons.js";
import { copyButton } from "./items/parts.js";

const COMMANDS = [
  'banksman run claude "What does this project do?"',
  "banksman open claude --name work",
  "banksman top",
];

/**
 * @param {HTMLElement} parent
 * @param {any} context
 */
export function mountWelcome(parent, context) {
  const place = el("div", { class: "welcome" });
  parent.append(place);
  let shown = "";
  const { list, isKnown } = context.sessions;
  return effect([list, isKnown, context.feed.connection, context.caller.me], (all, known, connection) => {
    // Before the list was read, it is unknown whether this is the first visit.
    const now = connection.state === "refused" ? "refused" : !known ? "nothing" : all.length ? "choose" : "first";
    const drawn = `${now} ${context.caller.may("open")}`;
    if (drawn === shown) return;
    shown = drawn;
    delete place.dataset.empty;
    if (now === "first") place.dataset.empty = "";
    replace(
      place,
      now === "nothing" ? null : now === "refused" ? refused(context) : now === "choose" ? choose(context) : first(context),
    );
  });
}

/**
 * The header shows the server's message. This view shows what to do.
 * @param {any} context
 */
function refused(context) {
  const kit = { open: new Map(), say: context.say, textOf: () => "" };
  const token = el("input", {
    type: "password",
    name: "token",
    autocomplete: "off",
    "aria-label": "The server's token",
    placeholder: "A token",
  });
  const problem = el("p", { role: "status" });
  const submit = async (/** @type {Event} */ event) => {
    event.preventDefault();
    const refusal = await loginByToken(token.value.trim());
    problem.textContent = refusal?.message ?? "";
    token.value = "";
    if (refusal === null) context.feed.nudge();
  };
  return el(
    "div",
    { role: "alert" },
    mark(),
    el("h1", null, "This browser is not logged in"),
    el("p", null, "Run this in a terminal, and open the link that it prints. A link logs one browser in, once."),
    el("div", { class: "try" }, commandLine("banksman page", kit)),
    el(
      "p",
      null,
      "Or paste a token: your own, from an administrator of the server, or the server's, which is in the file banksman/token of the state folder.",
    ),
    el(
      "form",
      { class: "actions", on: { submit } },
      token,
      el("button", { class: "button primary", type: "submit" }, "Log in"),
    ),
    problem,
  );
}

/**
 * @param {string} text
 * @param {any} kit
 */
function commandLine(text, kit) {
  return el(
    "div",
    null,
    el("code", { tabIndex: 0 }, text),
    copyButton("Copy the command", () => text, kit),
  );
}

/** @param {any} context */
function choose(context) {
  return el(
    "div",
    null,
    mark(),
    el("h1", null, "Choose a session"),
    el("p", null, "The list is at the left; sessions that need you are on top."),
    el("div", { class: "actions" }, open(context)),
  );
}

/** @param {any} context */
function first(context) {
  const kit = { open: new Map(), say: context.say, textOf: () => "" };
  return el(
    "div",
    null,
    mark(),
    el("h1", null, "No session is open yet"),
    el(
      "ol",
      null,
      el(
        "li",
        null,
        el(
          "p",
          null,
          "A session is one coding agent at work in one folder. Banksman keeps the session and its log, even if this page or the server ends.",
        ),
      ),
      el(
        "li",
        null,
        el(
          "p",
          null,
          "Several people and programs may ask at the same time: their asks run one at a time, by priority, and you see which ask waits and why.",
        ),
      ),
      el(
        "li",
        null,
        el(
          "p",
          null,
          "You can stop the agent at any moment. All processes that it has started end with it.",
        ),
      ),
    ),
    el("div", { class: "actions" }, open(context)),
    el("p", null, "Or from a terminal:"),
    el(
      "div",
      { class: "try" },
      COMMANDS.map((text) => commandLine(text, kit)),
    ),
  );
}

/** @param {any} context */
function open(context) {
  if (!context.caller.may("open")) return null;
  return el(
    "button",
    { class: "button primary", type: "button", on: { click: () => context.newSession() } },
    "Open a session",
  );
}
