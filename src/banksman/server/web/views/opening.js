// The dialog that opens a session: agent and folder. Errors are shown in the dialog, and the typed
// text stays.
// @ts-check

import { el, listen, replace } from "../dom.js";
import { icon } from "./items/icons.js";

const KEY = "banksman.opening";

/** @param {any} context */
export function newSession(context) {
  const open = document.querySelector("dialog.opening");
  if (open) return;
  const form = new Opening(context);
  document.body.append(form.dialog);
  form.dialog.showModal();
  form.load();
}

class Opening {
  /** @param {any} context */
  constructor(context) {
    this.context = context;
    const last = recall();
    const field = (/** @type {string} */ label, /** @type {string} */ name, more = {}) => {
      const input = el("input", { class: "input", name, autocomplete: "off", spellcheck: false, ...more });
      return el("label", { class: "field" }, el("span", null, label), input);
    };
    this.agents = el(
      "div",
      { class: "agents", role: "radiogroup", "aria-label": "Agent" },
      el("p", { class: "note" }, "Looking for agents…"),
    );
    this.command = field("Command", "command", {
      class: "input mono",
      placeholder: "a command that speaks ACP, with its arguments",
    });
    this.error = el("div", { class: "composer-error", role: "alert", hidden: true });
    this.submit = el("button", { class: "button primary", type: "submit" }, "Open");
    this.form = el(
      "form",
      { method: "dialog", novalidate: true },
      el(
        "header",
        null,
        el("h2", { id: "opening-title" }, "New session"),
        el(
          "button",
          {
            class: "icon-button",
            type: "button",
            "aria-label": "Cancel",
            on: { click: () => this.dialog.close() },
          },
          icon("cross"),
        ),
      ),
      el("div", { class: "field" }, el("span", { "aria-hidden": "true" }, "Agent"), this.agents),
      this.command,
      field("Folder", "cwd", {
        class: "input mono",
        value: last.cwd ?? "",
        placeholder: "where the server was started",
      }),
      field("Name", "name", { maxLength: 255, placeholder: "to find the session again" }),
      el(
        "div",
        { class: "two" },
        field("Model", "model", { placeholder: "the agent's default" }),
        field("Permission mode", "permission_mode", { placeholder: "the agent's default" }),
      ),
      this.error,
      el(
        "footer",
        null,
        el("button", { class: "button", type: "button", on: { click: () => this.dialog.close() } }, "Cancel"),
        this.submit,
      ),
    );
    this.dialog = el("dialog", { class: "dialog opening", "aria-labelledby": "opening-title" }, this.form);
    this.chosen = last.agent ?? "claude";
    this.command.hidden = this.chosen !== "custom";
    listen(this.form, "submit", (event) => {
      event.preventDefault();
      this.open();
    });
    listen(this.dialog, "close", () => this.dialog.remove());
  }

  async load() {
    let agents;
    try {
      agents = await this.context.actions.agents();
    } catch (error) {
      replace(
        this.agents,
        el("p", { class: "note" }, `Cannot list the agents: ${/** @type {any} */ (error).message}`),
      );
      return;
    }
    // Installed agents come first.
    agents.sort(
      (/** @type {any} */ a, /** @type {any} */ b) =>
        Number(b.found) - Number(a.found) || Number(a.name === "custom") - Number(b.name === "custom"),
    );
    if (!agents.some((/** @type {any} */ one) => one.name === this.chosen)) this.chosen = agents[0]?.name ?? "";
    replace(
      this.agents,
      agents.map((/** @type {any} */ one) => this.#agent(one)),
    );
    this.agents.querySelector("input:checked")?.focus();
    this.choose(this.chosen);
  }

  /** @param {any} agent */
  #agent(agent) {
    const isCustom = agent.name === "custom";
    const words = agent.error
      ? "its profile is invalid"
      : isCustom
        ? "any program that speaks ACP"
        : agent.found
          ? (agent.path ?? "found")
          : "not installed";
    const input = el("input", {
      type: "radio",
      name: "agent",
      value: agent.name,
      checked: agent.name === this.chosen,
      on: { change: () => this.choose(agent.name) },
    });
    return el(
      "label",
      { title: agent.found || isCustom ? agent.note || words : agent.install || words },
      input,
      el("span", { class: "title" }, agent.title || agent.name),
      el("span", { class: "found", dataset: { found: String(Boolean(agent.found || isCustom)) } }, words),
    );
  }

  /** @param {string} name */
  choose(name) {
    this.chosen = name;
    this.command.hidden = name !== "custom";
  }

  async open() {
    const value = (/** @type {string} */ name) => this.form.elements[name].value.trim() || undefined;
    const given = {
      agent: this.chosen,
      cwd: value("cwd"),
      name: value("name"),
      model: value("model"),
      permission_mode: value("permission_mode"),
      command: this.chosen === "custom" ? value("command") : undefined,
    };
    this.submit.disabled = true;
    this.error.hidden = true;
    try {
      const session = await this.context.actions.open(given);
      keep({ agent: given.agent, cwd: given.cwd });
      this.dialog.close();
      this.context.sessions.refresh?.();
      this.context.open(session.id);
    } catch (error) {
      const { detail, hint, message } = /** @type {any} */ (error);
      replace(
        this.error,
        icon("warning"),
        el("div", null, detail || message, hint ? el("span", { class: "hint" }, hint) : null),
      );
      this.error.hidden = false;
    } finally {
      this.submit.disabled = false;
    }
  }
}

/** @returns {{agent?: string, cwd?: string}} */
function recall() {
  try {
    return JSON.parse(localStorage.getItem(KEY) ?? "{}") ?? {};
  } catch {
    return {};
  }
}

/** @param {object} last */
function keep(last) {
  try {
    localStorage.setItem(KEY, JSON.stringify(last));
  } catch {
    // The next opening of the dialog asks again.
  }
}
