// The end of what the agent's process has written to stderr, in the why panel.
//
// It has its own clock, because the text is larger than the rest of the panel: one request every few
// seconds, and less often if they fail. The server keeps 64 KiB, and the page shows the end of it.

import { el } from "../dom.js";

const POLL_SECONDS = 3;
const POLL_SECONDS_MAX = 60;
const CHARACTERS_MAX = 16384;

export class StderrPane {
  /**
   * @param {any} context
   */
  constructor(context) {
    this.context = context;
    this.wait = POLL_SECONDS;
    this.timer = 0;
    this.isAsking = false;
    this.isSeen = false;
    this.text = el("pre", { class: "why-stderr", tabindex: "0", "aria-label": "stderr of the agent" });
    this.node = el("details", { hidden: true }, el("summary", {}, "stderr of the agent"), this.text);
    this.node.open = true;
  }

  /** Begin or stop to ask. */
  see(isSeen) {
    this.isSeen = isSeen;
    clearTimeout(this.timer);
    if (isSeen) this._ask();
  }

  async _ask() {
    if (this.isAsking) return;
    this.isAsking = true;
    try {
      const { text } = await this.context.actions.stderr(this.context.id);
      this.wait = POLL_SECONDS;
      this._show(text);
    } catch {
      // The panel itself shows why the server does not respond. Another host may have the process.
      this.wait = Math.min(POLL_SECONDS_MAX, this.wait * 2);
    } finally {
      this.isAsking = false;
    }
    clearTimeout(this.timer);
    if (this.isSeen) this.timer = setTimeout(() => this._ask(), this.wait * 1000);
  }

  _show(whole) {
    const isCut = whole.length > CHARACTERS_MAX;
    const shown = isCut ? `[…]\n${whole.slice(-CHARACTERS_MAX)}` : whole;
    this.node.hidden = shown === "";
    if (this.text.textContent === shown) return;
    const { scrollTop, scrollHeight, clientHeight } = this.text;
    const isAtEnd = scrollTop + clientHeight >= scrollHeight - 4;
    this.text.textContent = shown;
    if (isAtEnd) this.text.scrollTop = this.text.scrollHeight;
  }
}
