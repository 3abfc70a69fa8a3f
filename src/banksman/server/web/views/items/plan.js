// The agent's plan, as a list with its ticks.
// @ts-check

import { el, keyed, replace } from "../../dom.js";
import { planText } from "../../model/transcript/items.js";
import { icon } from "./icons.js";
import { copyButton } from "./parts.js";

const STATUSES = new Map([
  ["completed", "done"],
  ["in_progress", "in progress"],
  ["pending", "to do"],
]);

/** @type {import("./item.js").Kind} */
export function planItem(article, first, kit) {
  let now = first;
  const count = el("span", { class: "count" });
  const list = el("ol", { class: "plan" });
  article.append(
    el(
      "header",
      { class: "plan-head" },
      icon("check"),
      el("b", null, "Plan"),
      count,
      el("span", { class: "space" }),
      copyButton("Copy the plan", () => planText(now.entries), kit),
    ),
    list,
  );
  return (item) => {
    now = item;
    const done = item.entries.filter((/** @type {any} */ entry) => entry.status === "completed").length;
    count.textContent = `${done} of ${item.entries.length} done`;
    const entries = item.entries.map((/** @type {any} */ entry, /** @type {number} */ index) => ({
      ...entry,
      index,
    }));
    keyed(
      list,
      entries,
      (entry) => entry.index,
      () => el("li"),
      (node, entry) => {
        node.dataset.status = entry.status;
        const important = entry.priority === "high" ? el("span", { class: "high" }, "important") : null;
        replace(
          node,
          el(
            "span",
            { class: "tick", role: "img", "aria-label": STATUSES.get(entry.status) ?? entry.status },
            entry.status === "completed" ? icon("check") : null,
          ),
          el("span", null, entry.content),
          important,
        );
      },
    );
  };
}
