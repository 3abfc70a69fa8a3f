// The list of all sessions, searchable by name and state: sessions that need the user, working
// sessions, quiet sessions.
//
// Sessions that need the user are on top. Within a group the newest comes first, by opening time
// and not by last activity, so that the list does not move under the pointer while agents work.
// @ts-check

import { el, keyed, listen, replace } from "../dom.js";
import { budgetText, limitText } from "../model/provider.js";
import { effect, signal } from "../model/signal.js";
import { callerText } from "../model/caller.js";
import { logout } from "../net/api.js";
import { hasToken } from "../net/page_token.js";
import { mountHosts } from "./hosts.js";
import { icon, mark } from "./items/icons.js";
import { age, money, STATES } from "./items/words.js";

const AGES_MILLISECONDS = 5000;
const GROUPS = [
  { name: "Needs you", states: ["asks", "wedged", "not movable", "unreachable"] },
  { name: "At work", states: ["running", "queued"] },
  { name: "Quiet", states: ["idle", "elsewhere"] },
  { name: "Gone", states: ["gone"] },
];

/**
 * @param {HTMLElement} root
 * @param {any} shared
 */
export function mountSidebar(root, shared) {
  const find = signal("");
  const state = signal("");
  const place = signal(location.hash);
  const clock = signal(0);
  const input = el("input", {
    class: "input",
    type: "search",
    "aria-label": "Find a session",
    placeholder: "Find a session",
    autocomplete: "off",
    spellcheck: false,
    on: { input: () => (find.value = input.value.trim().toLowerCase()) },
  });
  const usage = el("a", { class: "icon-button", href: "#/usage", "aria-label": "Usage", title: "Usage" }, icon("usage"));
  const opening = el(
    "button",
    {
      class: "icon-button",
      type: "button",
      "aria-label": "New session",
      title: "New session (n)",
      on: { click: () => shared.newSession() },
    },
    icon("plus"),
  );
  const name = el("span");
  const leaving = el("button", { class: "button", type: "button", on: { click: () => void logout() } }, "Log out");
  const me = el("p", { class: "me", hidden: true }, name, leaving);
  const chips = el("div", { class: "chips", role: "group", "aria-label": "Show only" });
  const list = el("div", { class: "sessions" });
  const nav = el(
    "nav",
    { class: "sidebar", id: "sessions", "aria-label": "Sessions" },
    el(
      "div",
      { class: "sidebar-top" },
      el(
        "div",
        { class: "brand" },
        mark(),
        el("strong", null, "Banksman"),
        usage,
        opening,
      ),
      me,
      el("div", { class: "find" }, icon("search"), input, el("kbd", { "aria-hidden": "true" }, "/")),
      chips,
    ),
    list,
  );
  root.append(nav);
  const hosts = mountHosts(nav, shared);
  const draw = () => {
    const all = shared.sessions.list.value;
    drawChips(chips, all, state);
    const shown = all.filter(
      (/** @type {any} */ one) => isFound(one, find.value) && (!state.value || stateOf(one) === state.value),
    );
    const groups = GROUPS.map((group) => ({
      ...group,
      members: shown.filter((/** @type {any} */ one) => group.states.includes(stateOf(one))).reverse(),
    })).filter((group) => group.members.length);
    keyed(list, groups, (group) => group.name, makeGroup, drawGroup);
    drawEmpty(list, all.length, shown.length, shared);
  };

  /** @param {KeyboardEvent} event */
  const finding = (event) => {
    if (event.key === "Enter") /** @type {HTMLElement|null} */ (list.querySelector("[data-session]"))?.click();
    else if (event.key === "ArrowDown")
      /** @type {HTMLElement|null} */ (list.querySelector("[data-session]"))?.focus();
    else return;
    event.preventDefault();
  };

  const timer = setInterval(() => document.visibilityState === "visible" && (clock.value += 1), AGES_MILLISECONDS);
  const offs = [
    effect([shared.sessions.list, find, state, place, clock, shared.sessions.isKnown, shared.feed.connection], () =>
      draw(),
    ),
    effect([shared.caller.me], (now) => {
      name.textContent = now === null ? "" : `Logged in as ${callerText(now)}`;
      me.hidden = now === null;
      leaving.hidden = !hasToken();
      usage.hidden = !shared.caller.may("operate");
      opening.hidden = !shared.caller.may("open");
    }),
    listen(window, "hashchange", () => (place.value = location.hash)),
    listen(input, "keydown", (event) => finding(event)),
    listen(nav, "keydown", (event) => moving(event, nav)),
    () => clearInterval(timer),
    hosts,
  ];
  return () => {
    for (const off of offs) off();
    nav.remove();
  };
}

/** @param {any} session */
function stateOf(session) {
  // A server that is older than the page does not send `state`. The phase is close enough.
  return (
    session.state ??
    (session.questions?.length
      ? "asks"
      : session.phase === "idle"
        ? "idle"
        : session.phase === "closed"
          ? "gone"
          : "running")
  );
}

/**
 * @param {any} session
 * @param {string} words
 */
function isFound(session, words) {
  return (
    !words ||
    [session.name, session.id, session.agent, session.cwd, session.host].some((one) => one?.toLowerCase().includes(words))
  );
}

/**
 * @param {HTMLElement} parent
 * @param {any[]} all
 * @param {{value: string}} state
 */
function drawChips(parent, all, state) {
  const counts = new Map();
  for (const one of all) counts.set(stateOf(one), (counts.get(stateOf(one)) ?? 0) + 1);
  const shown = ["", ...[...STATES.keys()].filter((name) => counts.has(name) || name === state.value)];
  // With only one state there is nothing to filter.
  const chips = shown.length > 2 || state.value ? shown : [];
  keyed(
    parent,
    chips,
    (name) => name,
    (name) =>
      el("button", {
        class: "chip",
        type: "button",
        dataset: { state: name || null },
        on: { click: () => (state.value = name === state.value ? "" : name) },
      }),
    (node, name) => {
      node.setAttribute("aria-pressed", String(state.value === name));
      const words = name ? STATES.get(name) : "all";
      replace(
        node,
        name ? el("span", { class: "dot" }) : null,
        words,
        el("span", { class: "count" }, String(name ? (counts.get(name) ?? 0) : all.length)),
      );
    },
  );
}

/** @param {any} group */
function makeGroup(group) {
  return el("section", { "aria-label": group.name }, el("h2", null, group.name), el("ul"));
}

/**
 * @param {HTMLElement} node
 * @param {any} group
 */
function drawGroup(node, group) {
  keyed(/** @type {Element} */ (node.lastElementChild), group.members, (one) => one.id, makeRow, drawRow);
}

/** @param {any} session */
function makeRow(session) {
  return el(
    "li",
    null,
    el(
      "a",
      { class: "session-row", href: `#/s/${encodeURIComponent(session.id)}`, dataset: { session: session.id } },
      el("span", { class: "dot", "aria-hidden": "true" }),
      el("span", { class: "name" }),
      el("span", { class: "age" }),
      el("span", { class: "about" }),
    ),
  );
}

/**
 * @param {HTMLElement} item
 * @param {any} session
 */
function drawRow(item, session) {
  const row = /** @type {HTMLElement} */ (item.firstElementChild);
  const state = stateOf(session);
  const name = session.name ?? session.id;
  const words = STATES.get(state) ?? state;
  const queued = session.queue?.length ?? 0;
  // The host of the session, if there are several hosts.
  const agent = session.host ? `${session.agent} on ${session.host}` : session.agent;
  const facts = [
    words,
    agent,
    limitText(session, Date.now() / 1000),
    budgetText(session),
    queued ? `${queued} queued` : "",
    session.cost ? money(session.cost) : "",
  ].filter(Boolean);
  row.dataset.state = state;
  // The accessible name is the session's name; the details follow as a description.
  row.setAttribute("aria-label", name);
  row.setAttribute("aria-description", facts.join(", "));
  row.title = `${name}: ${facts.join(", ")}${session.cwd ? `, in ${session.cwd}` : ""}`;
  if (location.hash === row.getAttribute("href")) row.setAttribute("aria-current", "page");
  else row.removeAttribute("aria-current");
  const [, nameNode, ageNode, about] = row.children;
  if (nameNode.textContent !== name) nameNode.textContent = name;
  const old = age(session.at);
  if (ageNode.textContent !== old) ageNode.textContent = old;
  const key = facts.join("|");
  if (row.dataset.facts === key) return;
  row.dataset.facts = key;
  replace(
    about,
    el("span", { class: "state-word", dataset: { state } }, words),
    facts.slice(2).map((text) => el("span", null, text)),
    el("span", { class: "agent" }, agent),
  );
}

/**
 * @param {HTMLElement} list
 * @param {number} all
 * @param {number} shown
 * @param {any} shared
 */
function drawEmpty(list, all, shown, shared) {
  list.querySelector(":scope > .empty")?.remove();
  if (shown) return;
  const isRefused = shared.feed.connection.value.state === "refused";
  const words = all
    ? "No session matches."
    : shared.sessions.isKnown.value
      ? "No session yet."
      : isRefused
        ? "Not logged in."
        : "Reading…";
  list.prepend(el("p", { class: "empty" }, words));
}

/**
 * Move the focus up and down in the list.
 * @param {KeyboardEvent} event
 * @param {HTMLElement} nav
 */
function moving(event, nav) {
  if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
  const rows = /** @type {HTMLElement[]} */ ([...nav.querySelectorAll("[data-session]")]);
  const at = rows.indexOf(/** @type {HTMLElement} */ (document.activeElement));
  if (at < 0) return;
  rows[at + (event.key === "ArrowDown" ? 1 : -1)]?.focus();
  event.preventDefault();
}
