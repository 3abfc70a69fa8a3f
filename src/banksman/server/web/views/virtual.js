// A long list of which only what can be seen is in the document.
//
// What is seen, and a bit more on both sides, are real nodes in the normal flow of a column; all above and all below
// them is two empty blocks of the right height. Heights are measured (ResizeObserver), and guessed for what was never
// seen.
//
// It promises that what one looks at stands still. While one is at the end, the end is what stands still: new things
// push the old ones up. Anywhere else it is the first item in view (the anchor): whatever is put in above it, or
// changes its height there, the place of the anchor on the screen is the same before and after. Browsers do this by
// themselves for what they know; they do not know our empty blocks, so their own anchoring is off.
//
// The heights of all items are added up anew after a change. That is one addition per item, of at most as many items as
// the log's window has events.
// @ts-check

import { el, listen } from "../dom.js";

/** @typedef {{key: string, height?: number} & Record<string, any>} Row */
/** @typedef {{node: HTMLElement, update: (item: any) => void}} RowView */

/** Beyond the edges of what is seen; in pixels. */
const OVERSCAN = 800;
/** So near the end is at the end. */
const END_PIXELS = 24;
/** Where one is so near an end of what is loaded, more is wanted; in heights of the view. */
const NEAR = 2;
/** A guess may be wrong, and the next one too; after so many the next frame goes on. */
const PASSES_MAX = 4;

export class VirtualList {
  /**
   * @param {HTMLElement} scroller
   * @param {{make: (item: any) => RowView, guess: (item: any) => number, onNearTop: () => void, onNearBottom: () => void, onMove: () => void, onLeave: () => void}} given
   */
  constructor(scroller, given) {
    this.scroller = scroller;
    this.given = given;
    /** @type {Row[]} */
    this.items = [];
    this.isAtEnd = true;
    /** @type {Map<string, number>} */
    this.heights = new Map();
    /** @type {Map<string, RowView>} what is in the document, in order of the items */
    this.views = new Map();
    /** Where each item begins; one more than there are items. */
    this.offsets = new Float64Array(1);
    this.areOffsetsRight = false;
    /** @type {{key: string, top: number}|null} */
    this.anchor = null;
    this.lastTop = 0;
    this.range = { first: 0, last: 0 };
    this.above = el("div", { class: "virtual-space", "aria-hidden": "true" });
    this.column = el("div", { class: "virtual-column" });
    this.below = el("div", { class: "virtual-space", "aria-hidden": "true" });
    scroller.append(this.above, this.column, this.below);
    this.observer = new ResizeObserver((entries) => this.#resized(entries));
    this.observer.observe(scroller);
    this.off = listen(scroller, "scroll", () => this.#scrolled(), { passive: true });
  }

  destroy() {
    this.off();
    this.observer.disconnect();
  }

  /** @param {Row[]} items */
  setItems(items) {
    this.items = items;
    this.areOffsetsRight = false;
    this.#place();
  }

  /** From now on one is at the end, until one scrolls away. */
  toEnd() {
    this.isAtEnd = true;
    this.anchor = null;
    this.#place();
  }

  /**
   * @param {string} key
   * @param {number} top how far below the upper edge
   */
  toKey(key, top = 16) {
    this.isAtEnd = false;
    this.anchor = { key, top };
    this.#place();
    this.views.get(key)?.node.focus({ preventScroll: true });
    return this.views.get(key)?.node ?? null;
  }

  toStart() {
    if (this.items.length) this.toKey(this.items[0].key);
  }

  // -- where things are ----------------------------------------------------------------------------------------------

  #offsets() {
    if (this.areOffsetsRight) return this.offsets;
    const { items, heights } = this;
    if (this.offsets.length < items.length + 1) this.offsets = new Float64Array(Math.ceil((items.length + 1) * 1.5));
    let sum = 0;
    for (let i = 0; i < items.length; i += 1) {
      this.offsets[i] = sum;
      sum += items[i].height ??= heights.get(items[i].key) ?? this.given.guess(items[i]);
    }
    this.offsets[items.length] = sum;
    this.areOffsetsRight = true;
    return this.offsets;
  }

  /**
   * The item at this height, by halving.
   * @param {number} top
   */
  #indexAt(top) {
    const offsets = this.#offsets();
    let low = 0;
    let high = this.items.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (offsets[middle] <= top) low = middle;
      else high = middle - 1;
    }
    return Math.max(0, low);
  }

  /** Where the view should begin, by what is known before anything is drawn. */
  #target() {
    const offsets = this.#offsets();
    const total = offsets[this.items.length];
    if (this.isAtEnd) return Math.max(0, total - this.scroller.clientHeight);
    const { anchor } = this;
    const index = anchor ? this.#indexOf(anchor.key) : -1;
    return anchor && index >= 0 ? Math.max(0, offsets[index] - anchor.top) : this.scroller.scrollTop;
  }

  /** @param {string} key */
  #indexOf(key) {
    // Nearly always it is where it was, or further down by what was put in above.
    const { first, last } = this.range;
    for (let i = first; i <= last && i < this.items.length; i += 1) if (this.items[i].key === key) return i;
    return this.items.findIndex((item) => item.key === key);
  }

  // -- drawing -------------------------------------------------------------------------------------------------------

  /** Draws what belongs into view, and holds what must stand still. */
  #place() {
    for (let pass = 0; pass < PASSES_MAX; pass += 1) {
      const isRight = this.#draw(this.#target());
      this.#hold();
      if (isRight) break;
    }
    this.#note();
    this.given.onMove();
    this.#wantMore();
  }

  /**
   * @param {number} top
   * @returns {boolean} whether what was drawn was as high as it was thought
   */
  #draw(top) {
    const { items, scroller } = this;
    const first = this.#indexAt(top - OVERSCAN);
    const last = Math.min(items.length - 1, this.#indexAt(top + scroller.clientHeight + OVERSCAN));
    this.range = { first, last };
    const wanted = new Set();
    for (let i = first; i <= last; i += 1) wanted.add(items[i].key);
    for (const [key, view] of this.views) if (!wanted.has(key)) this.#drop(key, view);
    const fresh = this.#fill(first, last);
    const isRight = this.#measure(fresh);
    const offsets = this.#offsets();
    this.above.style.height = `${items.length ? offsets[first] : 0}px`;
    this.below.style.height = `${items.length ? offsets[items.length] - offsets[last + 1] : 0}px`;
    return isRight;
  }

  /**
   * @param {number} first
   * @param {number} last
   * @returns {{item: Row, node: HTMLElement}[]} those that were changed or made
   */
  #fill(first, last) {
    const drawn = [];
    /** @type {ChildNode|null} */
    let place = this.column.firstChild;
    for (let i = first; i <= last; i += 1) {
      const item = this.items[i];
      let view = this.views.get(item.key);
      if (view) view.update(item);
      else {
        view = this.given.make(item);
        this.views.set(item.key, view);
        this.observer.observe(view.node, { box: "border-box" });
      }
      if (place === view.node) place = place.nextSibling;
      else this.column.insertBefore(view.node, place);
      drawn.push({ item, node: view.node });
    }
    return drawn;
  }

  /** @param {{item: Row, node: HTMLElement}[]} drawn */
  #measure(drawn) {
    let isRight = true;
    for (const { item, node } of drawn) {
      const height = node.getBoundingClientRect().height;
      if (Math.abs((item.height ?? -1) - height) < 0.5) continue;
      item.height = height;
      this.heights.set(item.key, height);
      this.areOffsetsRight = false;
      isRight = false;
    }
    return isRight;
  }

  /**
   * @param {string} key
   * @param {RowView} view
   */
  #drop(key, view) {
    this.views.delete(key);
    this.observer.unobserve(view.node);
    // Whoever was in it with the keyboard is left in the list, and not at the top of the page.
    if (view.node.contains(document.activeElement)) this.scroller.focus({ preventScroll: true });
    view.node.remove();
  }

  #hold() {
    const { scroller } = this;
    if (this.isAtEnd) {
      scroller.scrollTop = scroller.scrollHeight;
      return;
    }
    const node = this.anchor && this.views.get(this.anchor.key)?.node;
    if (!node || !this.anchor) return;
    const off = node.getBoundingClientRect().top - scroller.getBoundingClientRect().top - this.anchor.top;
    if (Math.abs(off) > 0.5) scroller.scrollTop += off;
  }

  /** Remembers what is to stand still from now on. */
  #note() {
    const { scroller } = this;
    this.lastTop = scroller.scrollTop;
    this.anchor = null;
    if (this.isAtEnd) return;
    const edge = scroller.getBoundingClientRect().top;
    for (let i = this.range.first; i <= this.range.last && i < this.items.length; i += 1) {
      const rect = this.views.get(this.items[i].key)?.node.getBoundingClientRect();
      if (!rect || rect.bottom <= edge) continue;
      this.anchor = { key: this.items[i].key, top: rect.top - edge };
      return;
    }
  }

  // -- what comes by itself ------------------------------------------------------------------------------------------

  #scrolled() {
    const { scroller } = this;
    const left = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight;
    if (scroller.scrollTop < this.lastTop - 1 && left > 4) {
      // What we have moved ourselves is noted at once: this was somebody.
      this.isAtEnd = false;
      this.given.onLeave();
    } else if (left <= END_PIXELS) this.isAtEnd = true;
    if (Math.abs(scroller.scrollTop - this.lastTop) < 0.5) return this.given.onMove();
    // Where one has scrolled to is what stands still now; what is drawn for it may be of another height than it was thought.
    this.#note();
    if (!this.anchor && !this.isAtEnd) this.#draw(scroller.scrollTop);
    this.#note();
    // Whoever goes to the very top wants what is there, however much higher it is than was thought.
    if (scroller.scrollTop < 1 && this.items.length && !this.isAtEnd) this.anchor = { key: this.items[0].key, top: 0 };
    this.#place();
  }

  /** @param {ResizeObserverEntry[]} entries */
  #resized(entries) {
    let isChanged = false;
    for (const { target } of entries) {
      if (target === this.scroller) isChanged = true;
      else {
        const key = /** @type {HTMLElement} */ (target).dataset.key ?? "";
        const height = target.getBoundingClientRect().height;
        if (!this.views.has(key) || Math.abs((this.heights.get(key) ?? -1) - height) < 0.5) continue;
        isChanged = true;
      }
    }
    if (isChanged) this.#place();
  }

  #wantMore() {
    const { scroller } = this;
    const reach = NEAR * scroller.clientHeight;
    if (scroller.scrollTop < reach) this.given.onNearTop();
    if (scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < reach) this.given.onNearBottom();
  }
}
