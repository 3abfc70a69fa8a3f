// Icons: strokes on a grid of sixteen, in the colour of the surrounding text. They only repeat the
// words beside them, so they are hidden from screen readers.
// @ts-check

import { svg } from "../../dom.js";

/** @type {Record<string, string>} */
const PATHS = {
  read: "M4 2h5l3 3v9H4zM9 2v3h3M6 8.5h4M6 11h4",
  edit: "M3 13l.7-3L10.5 3.2a1.2 1.2 0 0 1 1.7 0l.6.6a1.2 1.2 0 0 1 0 1.7L6 12.3zM9.2 4.5l2.3 2.3",
  search: "M7 2.8a4.2 4.2 0 1 1 0 8.4a4.2 4.2 0 0 1 0-8.4zM10.2 10.2L13.4 13.4",
  execute: "M2.5 3h11v10h-11zM5 6.2l2 1.8-2 1.8M8.5 10h2.5",
  fetch:
    "M8 2.2a5.8 5.8 0 1 1 0 11.6A5.8 5.8 0 0 1 8 2.2zM2.4 8h11.2M8 2.2c3.2 3.3 3.2 8.3 0 11.6M8 2.2c-3.2 3.3-3.2 8.3 0 11.6",
  think: "M8 2l1.4 4.6L14 8l-4.6 1.4L8 14l-1.4-4.6L2 8l4.6-1.4z",
  switch_mode: "M3 5.5h9.5M10 3l2.5 2.5L10 8M13 10.5H3.5M6 8l-2.5 2.5L6 13",
  delete: "M3 4.5h10M6 4.5V3h4v1.5M4.5 4.5l.6 8.7h5.8l.6-8.7",
  move: "M2.5 8h10.5M9.5 4.5L13 8l-3.5 3.5",
  other:
    "M8 5.5a2.5 2.5 0 1 1 0 5a2.5 2.5 0 0 1 0-5zM8 2v1.5M8 12.5V14M2 8h1.5M12.5 8H14M3.8 3.8l1 1M11.2 11.2l1 1M12.2 3.8l-1 1M4.8 11.2l-1 1",
  copy: "M5.5 5.5h8v8h-8zM10.5 5.5v-3h-8v8h3",
  check: "M3 8.5l3.2 3.2L13 4.8",
  cross: "M4 4l8 8M12 4l-8 8",
  menu: "M2.5 4h11M2.5 8h11M2.5 12h11",
  panel: "M2.5 3h11v10h-11zM10 3v10",
  sun: "M8 5a3 3 0 1 1 0 6a3 3 0 0 1 0-6zM8 1.5v1.3M8 13.2v1.3M1.5 8h1.3M13.2 8h1.3M3.4 3.4l.9.9M11.7 11.7l.9.9M12.6 3.4l-.9.9M4.3 11.7l-.9.9",
  moon: "M13 9.6A5.4 5.4 0 0 1 6.4 3a5.4 5.4 0 1 0 6.6 6.6z",
  plus: "M8 3v10M3 8h10",
  stop: "M4 4h8v8H4z",
  send: "M8 13V3.5M3.8 7.5L8 3.3l4.2 4.2",
  chevron: "M6 4l4 4-4 4",
  down: "M8 3v9.5M3.8 8.3L8 12.5l4.2-4.2",
  process: "M4.5 4.5h7v7h-7zM6.5 2v2.5M9.5 2v2.5M6.5 11.5V14M9.5 11.5V14M2 6.5h2.5M2 9.5h2.5M11.5 6.5H14M11.5 9.5H14",
  warning: "M8 2.5L14.2 13H1.8zM8 6.5v3M8 11.2v.1",
  clock: "M8 2.2a5.8 5.8 0 1 1 0 11.6A5.8 5.8 0 0 1 8 2.2zM8 4.8V8l2.3 1.6",
  again: "M12.8 5.2A5.4 5.4 0 1 0 13.4 9M13 2.2v3.2H9.8",
  session: "M2.5 3h11v8h-6l-3 2.5V11h-2z",
  setting: "M2.5 5h6M11.5 5h2M2.5 11h2M7.5 11h6M10 3.5v3M6 9.5v3",
  question: "M5.8 6a2.2 2.2 0 1 1 3.3 1.9c-.7.4-1.1.8-1.1 1.6M8 11.6v.1M8 2a6 6 0 1 1 0 12A6 6 0 0 1 8 2z",
  attach: "M12.6 7.4l-4.9 4.9a3 3 0 0 1-4.2-4.2l5.3-5.3a2 2 0 0 1 2.8 2.8L6.4 10.8a1 1 0 0 1-1.4-1.4l4.6-4.6",
  help: "M5.8 6a2.2 2.2 0 1 1 3.3 1.9c-.7.4-1.1.8-1.1 1.6M8 11.6v.1",
  usage: "M2.5 13.5h11M4 13V8.5M8 13V3M12 13V6",
  close: "M8 2.2v5.3M4.8 4.1a5 5 0 1 0 6.4 0",
};

/** @param {string} name */
export function icon(name) {
  const path = svg("path", { d: Object.hasOwn(PATHS, name) ? PATHS[name] : PATHS.other });
  return svg(
    "svg",
    {
      class: "icon",
      viewBox: "0 0 16 16",
      fill: "none",
      stroke: "currentColor",
      "stroke-width": "1.3",
      "stroke-linecap": "round",
      "stroke-linejoin": "round",
      "aria-hidden": "true",
      focusable: "false",
    },
    path,
  );
}

/** The logo: a banksman's vest, with its two bright bands. */
export function mark() {
  return svg(
    "svg",
    { class: "mark", viewBox: "0 0 24 24", "aria-hidden": "true", focusable: "false" },
    svg("path", { d: "M6 2h4l2 4 2-4h4l2.5 5v14a1 1 0 0 1-1 1h-15a1 1 0 0 1-1-1V7z", fill: "var(--accent)" }),
    svg("path", { d: "M10 2l2 4 2-4h1.6L12 9 8.4 2z", fill: "var(--surface)", opacity: ".9" }),
    svg("path", { d: "M3.5 12.2h17v2.2h-17zM3.5 17h17v2.2h-17z", fill: "var(--surface)", opacity: ".9" }),
  );
}
