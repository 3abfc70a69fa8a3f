// Shared parts of items: a copy button, a fold, a text in portions.
// @ts-check

import { el, replace } from "../../dom.js";
import { icon } from "./icons.js";
import { size } from "./words.js";

/**
 * The services of the view for an item. `open`: the folds that the user opened, by key. `say`:
 * announces a text to screen readers.
 * @typedef {{open: Map<string, boolean>, say: (text: string, kind?: string) => void, textOf: (turn: string) => string}} Kit
 */

/** How long a button shows that it has copied. */
const COPIED_MILLISECONDS = 1500;
/** Escape sequences of terminals, and invisible control characters. */
const ANSI =
  /\u001b(?:\[[0-?]{0,64}[ -/]{0,8}[@-~]|\][^\u0007\u001b]{0,512}(?:\u0007|\u001b\\)?|[@-Z\\-_])|[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f]/g;

/**
 * @param {string} label names the copied text
 * @param {() => string} text
 * @param {Kit} kit
 */
export function copyButton(label, text, kit) {
  const button = el(
    "button",
    { class: "icon-button copy", type: "button", title: label, "aria-label": label },
    icon("copy"),
  );
  button.addEventListener("click", async (/** @type {Event} */ event) => {
    event.stopPropagation();
    const isCopied = await copy(text());
    kit.say(isCopied ? "Copied." : "The browser does not let this page copy.", isCopied ? undefined : "error");
    if (!isCopied) return;
    replace(button, icon("check"));
    setTimeout(() => replace(button, icon("copy")), COPIED_MILLISECONDS);
  });
  return button;
}

/** @param {string} text */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyByHand(text);
  }
}

/**
 * Without TLS and without localhost, browsers have no clipboard API, only the old command.
 * @param {string} text
 */
function copyByHand(text) {
  const field = el("textarea", { value: text, class: "sr-only", "aria-hidden": "true" });
  const focused = /** @type {HTMLElement|null} */ (document.activeElement);
  document.body.append(field);
  field.select();
  let isDone = false;
  try {
    isDone = document.execCommand("copy");
  } catch {
    isDone = false;
  }
  field.remove();
  focused?.focus();
  return isDone;
}

/**
 * A row that opens. Its content is created when it opens, and removed when it closes.
 * @param {{key: string, kit: Kit, summary: any[], inside: () => any, class?: string, isOpen?: boolean}} given
 */
export function fold({ key, kit, summary, inside, class: name = "", isOpen = false }) {
  const body = el("div", { class: "fold-body" });
  const button = el("button", { class: "fold-row", type: "button" }, ...summary);
  const node = el("div", { class: `fold ${name}` }, button, body);
  const show = (/** @type {boolean} */ open) => {
    button.setAttribute("aria-expanded", String(open));
    node.classList.toggle("open", open);
    if (open) replace(body, inside());
    else replace(body);
  };
  button.addEventListener("click", () => {
    const open = button.getAttribute("aria-expanded") !== "true";
    kit.open.set(key, open);
    show(open);
  });
  show(kit.open.get(key) ?? isOpen);
  return {
    node,
    button,
    body,
    get isOpen() {
      return button.getAttribute("aria-expanded") === "true";
    },
    refresh: () => show(button.getAttribute("aria-expanded") === "true"),
  };
}

/**
 * Show text in portions: the first one immediately, the next ones on request. So text of any length
 * can be shown, and the page is never blocked.
 * @param {string} text
 * @param {number} portion
 * @param {(shown: string) => any} draw
 */
export function portioned(text, portion, draw) {
  if (text.length <= portion) return draw(text);
  let shown = portion;
  const place = el("div");
  const more = el("button", { class: "more", type: "button" });
  const show = () => {
    replace(place, draw(text.slice(0, shown)));
    const left = text.length - shown;
    more.hidden = left <= 0;
    more.textContent =
      left > 10 * portion
        ? `Show ${size(10 * portion)} more of ${size(text.length)}`
        : `Show all (${size(text.length)})`;
  };
  more.addEventListener("click", () => {
    shown = Math.min(text.length, shown + 10 * portion);
    show();
  });
  show();
  return el("div", { class: "portioned" }, place, more);
}

/** @param {string} text as a terminal would show it, without its colours */
export function withoutAnsi(text) {
  const plain = text.includes("\u001b") || /[\u0000-\u0008]/.test(text) ? text.replace(ANSI, "") : text;
  // A carriage return overwrites the line: keep the last version.
  return plain.includes("\r")
    ? plain
        .replaceAll("\r\n", "\n")
        .split("\n")
        .map((line) => line.slice(line.lastIndexOf("\r") + 1))
        .join("\n")
    : plain;
}

const IMAGES = new Set(["image/png", "image/jpeg", "image/gif", "image/webp"]);
const IMAGE_CHARACTERS_MAX = 16_000_000;

/**
 * Embedded pictures. None is loaded from a server.
 * @param {{data: string, mimeType: string}[]} images
 */
export function pictures(images) {
  if (!images?.length) return null;
  return el(
    "div",
    { class: "pictures" },
    images.map(({ data, mimeType }) => {
      const isShown =
        IMAGES.has(mimeType) && data.length < IMAGE_CHARACTERS_MAX && /^[A-Za-z0-9+/=\s]*$/.test(data.slice(0, 200));
      return isShown
        ? el("img", { src: `data:${mimeType};base64,${data}`, alt: "A picture", loading: "lazy" })
        : el("span", { class: "note-line" }, `[a picture: ${mimeType}]`);
    }),
  );
}
