// The agent's text as Markdown, and its thinking, folded.
//
// Growing text is updated in place, with a cursor at its end. A long text is redrawn at most a few
// times a second: parsing costs time by length, and no user reads faster.
// @ts-check

import { el, replace } from "../../dom.js";
import { grow } from "../markdown.js";
import { icon } from "./icons.js";
import { copyButton, fold, pictures } from "./parts.js";
import { size } from "./words.js";

/** The characters shown at first, and the characters that each request for more adds. */
const SHOWN_MAX = 40_000;
const MORE = 100_000;
/** From this length on, a growing text is drawn less often. */
const LONG = 10_000;
const LONG_MILLISECONDS = 200;

/** @type {import("./item.js").Kind} */
export function textItem(article, first, kit) {
  const text = said(kit);
  const images = el("div");
  let now = first;
  article.append(
    text.node,
    images,
    el(
      "div",
      { class: "item-buttons" },
      copyButton("Copy the text", () => now.text, kit),
    ),
  );
  return (item) => {
    now = item;
    article.classList.toggle("growing", item.isPartial);
    text.show(item.text, item.isPartial);
    if (item.images?.length !== images.childElementCount) replace(images, pictures(item.images));
  };
}

/** @type {import("./item.js").Kind} */
export function thoughtItem(article, first, kit) {
  let now = first;
  const text = said(kit);
  const glance = el("span", { class: "glance" });
  const label = el("span", { class: "label" }, "Thinking");
  const row = fold({
    key: first.key,
    kit,
    summary: [icon("think"), label, glance, icon("chevron")],
    inside: () => {
      text.show(now.text, now.isPartial);
      return [
        text.node,
        el(
          "div",
          { class: "item-buttons" },
          copyButton("Copy the thinking", () => now.text, kit),
        ),
      ];
    },
  });
  article.append(row.node);
  return (item) => {
    now = item;
    article.classList.toggle("growing", item.isPartial);
    label.textContent = item.isPartial ? "Thinking…" : "Thought";
    // While the agent thinks, show the end; afterwards the beginning.
    glance.textContent = (item.isPartial ? item.text.slice(-160) : item.text.slice(0, 160)).replace(/\s+/g, " ");
    if (row.isOpen) text.show(item.text, item.isPartial);
  };
}

/** @param {import("./parts.js").Kit} kit */
function said(kit) {
  const body = el("div", { class: "markdown" });
  const more = el("button", { class: "more", type: "button", hidden: true });
  const node = el("div", null, body, more);
  let most = SHOWN_MAX;
  let text = "";
  let timer = 0;
  let drawn = 0;
  const draw = () => {
    timer = 0;
    drawn = performance.now();
    grow(body, text.length > most ? text.slice(0, most) : text, kit);
    more.hidden = text.length <= most;
    more.textContent =
      text.length - most > MORE ? `Show ${size(MORE)} more of ${size(text.length)}` : `Show all (${size(text.length)})`;
  };
  more.addEventListener("click", () => {
    most += MORE;
    draw();
  });
  const show = (/** @type {string} */ given, /** @type {boolean} */ isGrowing) => {
    if (given === text && drawn) return;
    text = given;
    const isSoon = isGrowing && text.length > LONG && performance.now() - drawn < LONG_MILLISECONDS;
    if (isSoon) timer ||= window.setTimeout(draw, LONG_MILLISECONDS);
    else {
      clearTimeout(timer);
      draw();
    }
  };
  return { node, show };
}
