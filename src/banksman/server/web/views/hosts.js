// The hosts that share the store, below the list of sessions: a summary line that opens to one row
// per host. Empty for a store of one machine.
// @ts-check

import { el, keyed } from "../dom.js";
import { stateOf, summaryOf } from "../model/hosts.js";
import { effect } from "../model/signal.js";

/**
 * @param {HTMLElement} parent
 * @param {any} shared
 */
export function mountHosts(parent, shared) {
  const summary = el("summary");
  const list = el("ul");
  const node = el("details", { class: "hosts", hidden: true, "aria-label": "Hosts" }, summary, list);
  parent.append(node);
  const off = effect([shared.hosts.list], (/** @type {any[]} */ all) => {
    node.hidden = !all.length;
    if (!all.length) return;
    const words = summaryOf(all);
    if (summary.textContent !== words) summary.textContent = words;
    keyed(list, all, (host) => host.id, makeRow, drawRow);
  });
  return () => {
    off();
    node.remove();
  };
}

/** @param {any} host */
function makeRow(host) {
  return el("li", { dataset: { host: host.id } }, el("span", { class: "name" }), el("span", { class: "room" }));
}

/**
 * @param {HTMLElement} row
 * @param {any} host
 */
function drawRow(row, host) {
  const [name, room] = row.children;
  if (name.textContent !== host.name) name.textContent = host.name;
  const state = stateOf(host);
  if (room.textContent !== state) room.textContent = state;
  row.title = [host.id, host.version, ...host.labels, ...host.agents].join(", ");
  if (host.draining) row.dataset.draining = "";
  else delete row.dataset.draining;
}
