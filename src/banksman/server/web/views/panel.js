// The side panel with two tabs, queue and why. Beside the session if there is room, else a drawer
// over it.
//
// Only the visible tab is mounted, because the why tab polls the server.
// @ts-check

import { el, listen, replace } from "../dom.js";
import { icon } from "./items/icons.js";
import { mountQueue } from "./queue.js";
import { mountWhy } from "./why.js";

const KEY = "banksman.panel";
const NARROW = "(max-width: 1180px)";
/** @type {Record<string, {label: string, mount: (parent: HTMLElement, context: any) => () => void}>} */
const TABS = { queue: { label: "Queue", mount: mountQueue }, why: { label: "Why", mount: mountWhy } };

/**
 * @param {HTMLElement} root
 * @param {any} shared
 */
export function mountPanel(root, shared) {
  const panel = new Panel(root, shared);
  shared.panel = panel;
  return panel;
}

class Panel {
  /**
   * @param {HTMLElement} root
   * @param {any} shared
   */
  constructor(root, shared) {
    this.root = root;
    this.shared = shared;
    this.narrow = matchMedia(NARROW);
    /** @type {any} */
    this.context = null;
    this.tab = "queue";
    /** @type {(() => void)|null} */
    this.unmount = null;
    this.isWide = recall() !== "closed";
    this.#build();
    root.append(this.node);
    listen(this.narrow, "change", () => this.#arrange());
    shared.drawerName.subscribe(() => this.#arrange());
    this.#arrange();
  }

  #build() {
    this.buttons = Object.entries(TABS).map(([name, { label }]) =>
      el(
        "button",
        {
          class: "tab",
          type: "button",
          role: "tab",
          id: `tab-${name}`,
          "aria-controls": "panel-body",
          on: {
            click: () => this.select(name),
            keydown: (/** @type {KeyboardEvent} */ event) => this.#key(event),
          },
          dataset: { tab: name },
        },
        label,
      ),
    );
    this.body = el("div", { class: "panel-body", id: "panel-body", role: "tabpanel" });
    this.node = el(
      "aside",
      { class: "panel", "aria-label": "Panel" },
      el(
        "div",
        { class: "tabs" },
        el("div", { role: "tablist", "aria-label": "What the panel shows" }, this.buttons),
        el("span", { class: "space" }),
        el(
          "button",
          {
            class: "icon-button",
            type: "button",
            "aria-label": "Close the panel",
            title: "Close the panel",
            on: { click: () => this.hide() },
          },
          icon("cross"),
        ),
      ),
      this.body,
    );
  }

  get isShown() {
    if (!this.context?.id) return false;
    return this.narrow.matches ? this.shared.drawerName.value === "panel" : this.isWide;
  }

  /** @param {any} context */
  use(context) {
    this.context = context;
    this.#arrange();
    return () => {
      this.context = null;
      this.#arrange();
    };
  }

  /** @param {string} [name] */
  show(name = this.tab) {
    if (this.narrow.matches) {
      if (this.shared.drawerName.value !== "panel") this.shared.drawer("panel");
    } else this.#keep(true);
    this.select(name);
    this.buttons.find((button) => button.dataset.tab === name)?.focus();
  }

  hide() {
    if (this.narrow.matches) this.shared.drawer(null);
    else this.#keep(false);
    this.#arrange();
  }

  toggle() {
    if (this.isShown) this.hide();
    else this.show();
  }

  /** @param {string} name */
  select(name) {
    if (this.tab !== name) {
      this.tab = name;
      this.unmount?.();
      this.unmount = null;
    }
    this.#arrange();
  }

  /** @param {boolean} isWide */
  #keep(isWide) {
    this.isWide = isWide;
    keep(isWide ? "open" : "closed");
  }

  #arrange() {
    this.root.dataset.panel = this.isShown && !this.narrow.matches ? "open" : "closed";
    for (const button of this.buttons) {
      const isSelected = button.dataset.tab === this.tab;
      button.setAttribute("aria-selected", String(isSelected));
      button.tabIndex = isSelected ? 0 : -1;
    }
    this.body.setAttribute("aria-labelledby", `tab-${this.tab}`);
    if (this.isShown && !this.unmount) {
      replace(this.body);
      const stop = TABS[this.tab].mount(this.body, this.context);
      this.unmount = () => {
        stop();
        replace(this.body);
      };
    } else if (!this.isShown && this.unmount) {
      this.unmount();
      this.unmount = null;
    }
    this.shared.panelShown?.(this.isShown);
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
    event.preventDefault();
    const names = Object.keys(TABS);
    const next = names[(names.indexOf(this.tab) + 1) % names.length];
    this.select(next);
    this.buttons.find((button) => button.dataset.tab === next)?.focus();
  }
}

function recall() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null;
  }
}

/** @param {string} value */
function keep(value) {
  try {
    localStorage.setItem(KEY, value);
  } catch {
    // No storage: the choice lasts as long as the page.
  }
}
