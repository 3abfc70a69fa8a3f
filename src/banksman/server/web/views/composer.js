// The composer: write to the agent, and stop it.
//
// No text is lost. The draft of each session is kept in this tab (sessionStorage). A sent prompt is
// shown immediately as on its way (pending.js), and is kept and sent until the server responds
// (sending.js). A refused prompt returns to the field, with the reason.
// @ts-check

import { el, isComposing, listen, replace } from "../dom.js";
import { mayPreempt } from "../model/caller.js";
import { effect } from "../model/signal.js";
import { Attachments } from "./attachments.js";
import { icon } from "./items/icons.js";
import { receiptText } from "./items/words.js";
import { Sending } from "./sending.js";

const PRIORITIES = [
  ["interactive", "Interactive"],
  ["normal", "Normal"],
  ["background", "Background"],
];
const WHEN_BUSY = [
  ["enqueue", "When busy: wait"],
  ["interrupt", "When busy: interrupt"],
  ["steer", "When busy: steer"],
  ["collect", "When busy: collect"],
  ["reject", "When busy: refuse"],
];

/**
 * @param {HTMLElement} parent
 * @param {any} context
 */
export function mountComposer(parent, context) {
  const composer = new Composer(parent, context);
  return () => composer.destroy();
}

class Composer {
  /**
   * @param {HTMLElement} parent
   * @param {any} context
   */
  constructor(parent, context) {
    this.context = context;
    this.key = `banksman.draft.${context.id}`;
    this.attachments = new Attachments({ changed: () => this.#changed(), say: context.say });
    this.#build(parent);
    this.#restore();
    this.sending = new Sending(context, {
      refused: (ask, error) => {
        this.#fail(error);
        this.#giveBack([ask]);
      },
      unanswered: (error) => this.#unanswered(error),
      answered: () => this.#fail(null),
      lost: (ask) => {
        this.#fail({
          detail: "The page was reloaded while this was being sent, and the log does not have it.",
          hint:
            ask.prompt === null
              ? "its pictures were too large to be kept: add them again"
              : "the page does not know who sent it: send it again if it is yours",
        });
        this.#giveBack([ask]);
      },
    });
    this.offs = [
      listen(this.text, "input", () => this.#changed()),
      listen(this.text, "keydown", (event) => this.#typed(event)),
      listen(this.text, "paste", (event) => this.attachments.take(event.clipboardData) && event.preventDefault()),
      listen(this.box, "dragover", (event) => this.#over(event)),
      listen(this.box, "dragleave", () => delete this.box.dataset.drop),
      listen(this.box, "drop", (event) => this.#dropped(event)),
      listen(this.priority, "change", () => this.#keep()),
      listen(this.onBusy, "change", () => this.#keep()),
      effect([context.session, context.running, context.caller.me], () => this.#state()),
      effect([context.caller.me], (/** @type {any} */ me) => this.#limit(me)),
      () => this.attachments.destroy(),
      () => this.sending.destroy(),
    ];
    this.#changed();
  }

  /** @param {HTMLElement} parent */
  #build(parent) {
    const select = (/** @type {string} */ label, /** @type {string[][]} */ options, /** @type {string} */ chosen) =>
      el(
        "select",
        { "aria-label": label, title: label },
        options.map(([value, words]) => el("option", { value, selected: value === chosen }, words)),
      );
    this.error = el("div", { class: "composer-error", role: "alert", hidden: true });
    this.text = el("textarea", { "aria-label": "Message", placeholder: "Ask the agent", rows: 1 });
    this.priority = select("Priority", PRIORITIES, "interactive");
    this.onBusy = select("When busy", WHEN_BUSY, "enqueue");
    this.interrupt = el(
      "button",
      {
        class: "button danger",
        type: "button",
        disabled: true,
        on: { click: () => this.stop() },
        "aria-label": "Interrupt",
        title: "Interrupt the running turn (i)",
      },
      icon("stop"),
      el("span", null, "Interrupt"),
    );
    this.send = el(
      "button",
      {
        class: "button primary",
        type: "button",
        "aria-label": "Send",
        title: "Send (Enter)",
        on: { click: () => this.ask() },
      },
      icon("send"),
      el("span", null, "Send"),
    );
    this.receipt = el("span", { class: "receipt", role: "status", dataset: { receipt: "" } });
    const file = el("input", {
      type: "file",
      accept: "image/png,image/jpeg,image/gif,image/webp",
      multiple: true,
      hidden: true,
      "aria-hidden": "true",
      tabIndex: -1,
      on: {
        change: () => {
          this.attachments.add([...file.files]);
          file.value = "";
        },
      },
    });
    this.box = el(
      "div",
      { class: "composer" },
      this.attachments.node,
      this.text,
      el(
        "div",
        { class: "tools" },
        el(
          "button",
          {
            class: "icon-button",
            type: "button",
            "aria-label": "Attach a picture",
            title: "Attach a picture (or paste it)",
            on: { click: () => file.click() },
          },
          icon("attach"),
        ),
        file,
        el("span", { class: "pick" }, this.priority),
        el("span", { class: "pick" }, this.onBusy),
        el("span", { class: "space" }),
        el("span", { class: "acts" }, this.interrupt, this.send),
      ),
    );
    this.node = el(
      "div",
      null,
      this.error,
      this.box,
      el(
        "div",
        { class: "below" },
        el(
          "span",
          { class: "hint", "aria-hidden": "true" },
          el("kbd", null, "Enter"),
          " sends, ",
          el("kbd", null, "Shift+Enter"),
          " starts a new line",
        ),
        this.receipt,
      ),
    );
    parent.append(this.node);
  }

  destroy() {
    for (const off of this.offs) off();
    this.node.remove();
  }

  // -- asking -------------------------------------------------------------------------------------

  ask() {
    const { context } = this;
    if (this.attachments.reading) {
      // The user pasted a picture and sent the prompt right away. Wait until the picture is read.
      this.attachments.read.then(() => this.ask());
      return;
    }
    const text = this.text.value.trim();
    const images = this.attachments.list;
    if (!text && !images.length) return;
    const blocks = images.map(({ data, mimeType }) => ({ type: "image", data, mimeType }));
    const prompt = images.length ? [...(text ? [{ type: "text", text }] : []), ...blocks] : text;
    this.#fail(null);
    // The draft is cleared after the outbox has the ask. A tab that ends in between has the text
    // twice, not lost.
    this.sending.add({ prompt, text, images, priority: this.priority.value, onBusy: this.onBusy.value });
    this.#fill({ text: "", images: [] });
    // The clicked button is disabled now. Further typing must go to the field, not to the page's
    // keys.
    this.text.focus();
    context.toEnd();
  }

  /**
   * Put refused or withdrawn asks back into the field. Text that was written in the meantime stays.
   * @param {{text: string, images: any[]}[]} asks
   */
  #giveBack(asks) {
    const texts = [...asks.map(({ text }) => text), this.text.value].filter(Boolean);
    this.#fill({ text: texts.join("\n"), images: [...asks.flatMap(({ images }) => images), ...this.attachments.list] });
    this.text.focus();
  }

  /** @param {any} error */
  #unanswered(error) {
    this.#fail({
      detail: error.detail,
      hint: "the message is kept and sent again until the server answers; it takes effect once",
      act: { label: "Stop sending", do: () => this.#giveBack(this.sending.takeBack()) },
    });
  }

  async stop() {
    const { context } = this;
    this.interrupt.disabled = true;
    this.#told("Interrupting…", null);
    try {
      const receipt = await context.actions.interrupt(
        context.id,
        context.running.value ?? context.session.value?.holder ?? null,
      );
      this.#told(receiptText(receipt), receipt);
    } catch (error) {
      this.#told("", null);
      this.#fail(error);
    } finally {
      this.#state();
    }
  }

  /**
   * @param {string} words
   * @param {{stopped: boolean}|null} receipt
   */
  #told(words, receipt) {
    this.receipt.textContent = words;
    if (receipt) this.receipt.dataset.stopped = String(receipt.stopped);
    else delete this.receipt.dataset.stopped;
  }

  /**
   * The log has the turn before the session list does. So the user can stop a turn as soon as its
   * text appears.
   */
  #state() {
    const session = this.context.session.value;
    const isRunning =
      Boolean(this.context.running.value || session?.holder) || ["running", "asks", "wedged"].includes(session?.state);
    this.interrupt.disabled = !isRunning || !this.context.caller.mayInterrupt(session?.holder_caller);
    this.text.placeholder =
      session?.state === "gone"
        ? "Ask again: this reopens the session, if possible"
        : isRunning
          ? "Ask the agent; the ask waits for its turn"
          : "Ask the agent";
  }

  /**
   * Offer only the priorities that the server accepts from this caller.
   * @param {import("../model/caller.js").Me|null} me
   */
  #limit(me) {
    const [urgent] = this.priority.options;
    urgent.disabled = urgent.hidden = !mayPreempt(me);
    if (urgent.disabled && urgent.selected) this.priority.value = "normal";
  }

  /** @param {any} error */
  #fail(error) {
    this.error.hidden = !error;
    if (!error) return;
    replace(
      this.error,
      icon("warning"),
      el("div", null, error.detail || error.message, error.hint ? el("span", { class: "hint" }, error.hint) : null),
      error.act
        ? el("button", { class: "button", type: "button", on: { click: () => this.#act(error.act) } }, error.act.label)
        : null,
      el(
        "button",
        {
          class: "icon-button",
          type: "button",
          "aria-label": "Dismiss",
          on: { click: () => this.#fail(null) },
        },
        icon("cross"),
      ),
    );
  }

  /** @param {{do: () => void}} act */
  #act(act) {
    this.#fail(null);
    act.do();
  }

  // -- writing ------------------------------------------------------------------------------------

  /** @param {KeyboardEvent} event */
  #typed(event) {
    // During an IME composition (Japanese, Chinese…) Enter ends the composition.
    if (event.key !== "Enter" || event.shiftKey || event.altKey || isComposing(event)) return;
    event.preventDefault();
    this.ask();
  }

  /** @param {DragEvent} event */
  #over(event) {
    if (![...(event.dataTransfer?.types ?? [])].includes("Files")) return;
    event.preventDefault();
    this.box.dataset.drop = "";
  }

  /** @param {DragEvent} event */
  #dropped(event) {
    delete this.box.dataset.drop;
    if (this.attachments.take(event.dataTransfer)) event.preventDefault();
  }

  /** @param {{text: string, images: any[]}} draft */
  #fill({ text, images }) {
    this.text.value = text;
    this.attachments.set(images);
    this.#changed();
  }

  #changed() {
    this.send.disabled = !this.text.value.trim() && !this.attachments.list.length;
    // Fit the height to the content. The style sheet limits it.
    this.text.style.height = "auto";
    this.text.style.height = `${this.text.scrollHeight}px`;
    this.#keep();
  }

  #keep() {
    const draft = {
      text: this.text.value,
      images: this.attachments.list,
      priority: this.priority.value,
      onBusy: this.onBusy.value,
    };
    try {
      sessionStorage.setItem(this.key, JSON.stringify(draft));
    } catch {
      try {
        // Pictures may exceed the storage of a tab. Keep the text alone.
        sessionStorage.setItem(this.key, JSON.stringify({ ...draft, images: [] }));
      } catch {
        // The browser has no storage.
      }
    }
  }

  #restore() {
    let draft = null;
    try {
      draft = JSON.parse(sessionStorage.getItem(this.key) ?? "null");
    } catch {
      draft = null;
    }
    if (!draft) return;
    this.text.value = String(draft.text ?? "");
    this.attachments.set(Array.isArray(draft.images) ? draft.images : []);
    if (PRIORITIES.some(([value]) => value === draft.priority)) this.priority.value = draft.priority;
    if (WHEN_BUSY.some(([value]) => value === draft.onBusy)) this.onBusy.value = draft.onBusy;
  }
}
