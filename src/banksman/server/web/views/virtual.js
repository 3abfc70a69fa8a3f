// A virtual list: only the visible part of a long list is in the document.
//
// The visible items, and some more on both sides, are real nodes in the normal flow of a column.
// Two empty blocks of the right height replace everything above and below. Heights are measured
// (ResizeObserver), and estimated for items that were never drawn.
//
// The visible content does not move. While the user is at the end, the end is fixed: new items push
// the old ones up. Elsewhere the first visible item (the anchor) is fixed. Items may be inserted
// above it or change their height there: its place on the screen stays the same. Browsers do this
// only for nodes that they know. They do not know the empty blocks, so the browser's scroll
// anchoring is off.
//
// The heights of all items are summed again after a change. That is one addition per item, for at
// most as many items as the log's window has events.
// @ts-check

import { el, listen } from "../dom.js";

/** @typedef {{key: string, height?: number} & Record<string, any>} Row */
/** @typedef {{node: HTMLElement, update: (item: any) => void}} RowView */

/** The margin beyond the visible part, in pixels. */
const OVERSCAN = 800;
/** Within this distance of the end, the list counts as being at the end. */
const END_PIXELS = 24;
/**
 * Within this distance of an end of the loaded items, more are requested; in heights of the view.
 */
const NEAR = 2;
/**
 * An estimate may be wrong, and the next one too. After this many passes the next frame continues.
 */
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
    /** @type {Map<string, RowView>} the rows in the document, in order of the items */
    this.views = new Map();
    /** The offset of each item, plus one for the end. */
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

  /** Stay at the end from now on, until the user scrolls away. */
  toEnd() {
    this.isAtEnd = true;
    this.anchor = null;
    this.#place();
  }

  /**
   * @param {string} key
   * @param {number} top distance below the upper edge
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

  // -- positions ----------------------------------------------------------------------------------

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
   * The item at this height, by binary search.
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

  /** The scroll position to aim at, from the heights that are known before drawing. */
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
    // The anchor is nearly always at its old index, or further down by the number of inserted
    // items.
    const { first, last } = this.range;
    for (let i = first; i <= last && i < this.items.length; i += 1) if (this.items[i].key === key) return i;
    return this.items.findIndex((item) => item.key === key);
  }

  // -- drawing ------------------------------------------------------------------------------------

  /** Draw the visible items, and keep the fixed point in place. */
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
   * @returns {boolean} whether the drawn items had the expected height
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
   * @returns {{item: Row, node: HTMLElement}[]} the changed and the new ones
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
    // If the removed node had the focus, the list gets it. Otherwise the focus would move to the
    // top of the page.
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

  /** Remember the fixed point. */
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

  // -- browser events -----------------------------------------------------------------------------

  #scrolled() {
    const { scroller } = this;
    const left = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight;
    if (scroller.scrollTop < this.lastTop - 1 && left > 4) {
      // Scrolling by this module is noted immediately, so this was the user.
      this.isAtEnd = false;
      this.given.onLeave();
    } else if (left <= END_PIXELS) this.isAtEnd = true;
    if (Math.abs(scroller.scrollTop - this.lastTop) < 0.5) return this.given.onMove();
    // The new scroll position is the fixed point now. The drawn items may have other heights than
    // expected.
    this.#note();
    if (!this.anchor && !this.isAtEnd) this.#draw(scroller.scrollTop);
    this.#note();
    // A user who scrolls to the very top wants the first item, even if the estimate of its height
    // was too small.
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
