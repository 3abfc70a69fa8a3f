// Keyboard shortcuts: one listener and one table, inactive while the user types.
//
// A key never does more than its button: it presses the button, or focuses it. So an impossible
// action is disabled in one place, and its key does nothing. Keys with Ctrl, Alt or Meta belong to
// the browser.

import { listen } from "../dom.js";
import { helpDialog } from "./help.js";
import { answerByKey } from "./questions.js";

const WRITING =
  'input:not([type="checkbox"]):not([type="radio"]), textarea, select, [contenteditable=""], [contenteditable="true"]';

/**
 * @param {Document} root
 * @param {any} context
 */
export function mountKeys(root, context) {
  const help = helpDialog();
  root.body.append(help);
  const acts = actsOf(root, context, help);
  const off = listen(root, "keydown", (event) => {
    if (event.defaultPrevented || event.isComposing || event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.key === "Escape") return void back(root, event);
    // An open dialog gets the keys.
    if (isWriting(event.target) || root.querySelector("dialog[open]")) {
      if (event.key === "?" && help.open) help.close();
      return;
    }
    const done = Object.hasOwn(acts, event.key) ? acts[event.key]() !== false : answerByKey(event.key);
    if (done) event.preventDefault();
  });
  return () => {
    off();
    help.remove();
  };
}

/** Exported for the "?" button of a header. */
export function openHelp(root = document) {
  const help = root.querySelector("dialog.help");
  if (help && !help.open) help.showModal();
}

function isWriting(target) {
  return target instanceof Element && target.closest(WRITING) !== null;
}

function back(root, event) {
  // An open dialog handles Escape.
  if (root.querySelector("dialog[open]") || !isWriting(event.target)) return;
  event.target.blur();
  event.preventDefault();
}

function actsOf(root, context, help) {
  const focus = (selector) => {
    const found = [...root.querySelectorAll(selector)].find(isShown) ?? root.querySelector(selector);
    found?.focus();
    return found !== null;
  };
  const press = (name) => {
    const found = [...root.querySelectorAll("button, a, [role=tab]")].find(
      (each) => nameOf(each) === name && isShown(each) && !each.disabled,
    );
    found?.click();
    return found !== undefined;
  };
  return {
    "/": () => focus('input[aria-label="Find a session"]'),
    j: () => step(root, context, 1),
    k: () => step(root, context, -1),
    c: () => focus('textarea[aria-label="Message"]'),
    n: () => (context.newSession ? void context.newSession() : press("New session")),
    i: () => press("Interrupt"),
    t: () => focus('section[aria-label="Timeline"] ol button:not([tabindex="-1"])'),
    w: () => (context.showPanel ? void context.showPanel("why") : press("Why")),
    q: () => (context.showPanel ? void context.showPanel("queue") : press("Queue")),
    g: () => void (context.toStart ?? (() => context.jump(1)))(),
    G: () => void (context.toEnd ?? (() => context.log?.goLive()))(),
    "?": () => {
      help.showModal();
    },
  };
}

function nameOf(node) {
  return (node.getAttribute("aria-label") ?? node.dataset.name ?? node.textContent).trim();
}

function isShown(node) {
  return node.getClientRects().length > 0;
}

/** Open the next session of the visible list. */
function step(root, context, by) {
  const links = [...root.querySelectorAll('nav[aria-label="Sessions"] [data-session]')];
  if (links.length === 0) return false;
  const now = links.findIndex((link) => link.dataset.session === context.id);
  const index = now < 0 ? (by > 0 ? 0 : links.length - 1) : Math.max(0, Math.min(links.length - 1, now + by));
  if (index !== now) context.open(links[index].dataset.session);
  return true;
}
