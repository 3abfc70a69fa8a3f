// Usage of the store: a plot of the tokens per day, and a table by day, session, agent or caller.
// The server counts. The view reads once when it opens, and again for another choice.
// @ts-check

import { el, replace, svg } from "../dom.js";
import { barsOf, cellsOf, DAYS_MAX } from "../model/usage.js";
import { get as getOne } from "../net/api.js";

const CHOICES = ["day", "session", "agent", "caller"];
const HEADS = ["Turns", "Input", "Output", "Cache read", "Cache write", "Working", "Cost (estimate)"];
const WIDTH = 720;
const HEIGHT = 160;

/**
 * @param {HTMLElement} parent
 * @param {{get?: typeof getOne}} [given] replaced by tests
 */
export function mountUsage(parent, { get = getOne } = {}) {
  const plot = el("div", { class: "usage-plot" });
  const table = el("div", { class: "usage-table" });
  const problem = el("p", { class: "usage-problem", role: "status" });
  const buttons = CHOICES.map((by) =>
    el("button", { class: "pane-button", type: "button", "aria-pressed": "false", on: { click: () => show(by) } }, `By ${by}`),
  );
  const node = el(
    "section",
    { class: "usage", "aria-label": "Usage" },
    el("h1", null, "Usage"),
    el("p", null, "Tokens per day, in UTC. The cost is the agent’s own estimate. Deleted sessions stay counted."),
    plot,
    el("div", { class: "usage-choice", role: "group", "aria-label": "Rows" }, ...buttons),
    problem,
    table,
  );
  parent.append(node);
  let shown = 0;

  /** @param {string} by */
  async function show(by) {
    shown += 1;
    const number = shown;
    for (const [index, button] of buttons.entries()) button.setAttribute("aria-pressed", String(CHOICES[index] === by));
    try {
      const { rows } = await get(`v1/usage?by=${by}`);
      // Another choice was made meanwhile.
      if (number !== shown) return;
      problem.textContent = "";
      if (by === "day") replace(plot, drawPlot(barsOf(rows, new Date().toISOString().slice(0, 10))));
      replace(table, drawTable(by, rows));
    } catch (error) {
      if (number === shown) problem.textContent = `Cannot read the usage: ${/** @type {any} */ (error).message}`;
    }
  }

  void show("day");
  return () => {
    shown += 1;
    node.remove();
  };
}

/** @param {import("../model/usage.js").Bar[]} bars */
function drawPlot(bars) {
  const step = WIDTH / DAYS_MAX;
  const columns = bars.map(({ day, total, parts }, index) =>
    svg(
      "g",
      { "data-day": day },
      svg("title", null, `${day}: ${total.toLocaleString("en-US")} tokens`),
      // The whole column shows the title, also on a day without usage.
      svg("rect", { class: "usage-column", x: index * step, y: 0, width: step, height: HEIGHT }),
      ...parts.map(({ kind, from, to }) =>
        svg("rect", {
          class: `usage-bar usage-${kind}`,
          x: index * step + 2,
          y: HEIGHT * (1 - to),
          width: step - 4,
          height: Math.max(1, HEIGHT * (to - from)),
        }),
      ),
    ),
  );
  const total = bars.reduce((sum, bar) => sum + bar.total, 0).toLocaleString("en-US");
  return svg(
    "svg",
    { role: "img", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "aria-label": `${total} tokens in ${DAYS_MAX} days. The table has every day.` },
    ...columns,
  );
}

/**
 * @param {string} by
 * @param {import("../model/usage.js").Row[]} rows
 */
function drawTable(by, rows) {
  if (!rows.length) return el("p", { class: "pane-empty" }, "No turn has run yet.");
  const heads = [`${by[0].toUpperCase()}${by.slice(1)}`, ...HEADS];
  // The newest day comes first.
  const ordered = by === "day" ? [...rows].reverse() : rows;
  return el(
    "table",
    null,
    el("thead", null, el("tr", null, ...heads.map((head) => el("th", { scope: "col" }, head)))),
    el(
      "tbody",
      null,
      ...ordered.map(({ key, usage }) =>
        el("tr", null, el("th", { scope: "row" }, key ?? "–"), ...cellsOf(usage).map((cell) => el("td", null, cell))),
      ),
    ),
  );
}
