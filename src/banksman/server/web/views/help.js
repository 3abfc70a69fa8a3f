// The help overlay: the list of keys, from the table that also handles them.

import { el } from "../dom.js";

/** @type {[string, string[], string][]} group, keys, action */
export const KEYS = [
  ["Go to", ["/"], "find a session"],
  ["Go to", ["j", "k"], "next and previous session"],
  ["Go to", ["c"], "write a message"],
  ["Go to", ["n"], "new session"],
  ["Go to", ["g", "G"], "start and end of the transcript"],
  ["Look", ["t"], "timeline; then ← and → from turn to turn, Enter to read it, + and − to zoom"],
  ["Look", ["w"], "why: what the session is doing and waiting for"],
  ["Look", ["q"], "queue: the running turn and the waiting asks"],
  ["Act", ["i"], "interrupt the running turn"],
  ["Act", ["a", "d"], "allow, deny: the first question, or the focused one"],
  ["Act", ["1", "…", "9"], "the options of a question"],
  ["Act", ["Enter"], "send the message; Shift+Enter is a new line"],
  ["Here", ["?"], "these keys"],
  ["Here", ["Esc"], "back: close, or leave the field"],
];

/** @returns {HTMLDialogElement} */
export function helpDialog() {
  const groups = [...new Set(KEYS.map(([group]) => group))];
  const close = el("button", { type: "button", class: "pane-button", on: { click: () => dialog.close() } }, "Close");
  const dialog = el(
    "dialog",
    { class: "help", "aria-labelledby": "help-title" },
    el("div", { class: "pane-top" }, el("h2", { id: "help-title" }, "Keys and help"), close),
    el("p", {}, "The keys work while no text field has the focus."),
    groups.map((group) =>
      el(
        "section",
        {},
        el("h3", {}, group),
        el(
          "dl",
          {},
          KEYS.filter(([each]) => each === group).map(([, keys, words]) =>
            el(
              "div",
              {},
              el(
                "dt",
                {},
                keys.map((key) => (key === "…" ? " … " : el("kbd", {}, key))),
              ),
              el("dd", {}, words),
            ),
          ),
        ),
      ),
    ),
  );
  // A click outside of the dialog closes it.
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close();
  });
  return dialog;
}
