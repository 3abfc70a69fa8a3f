// Create and change DOM nodes. Text is always inserted as text.
//
// Nothing here parses HTML, and nothing runs its input. A handler must be a function. A property
// that parses (`innerHTML`, `srcdoc`) or runs (`onclick="…"`) its value is refused, and so is a URL
// that a click would run (`javascript:`). So the output of an agent can only be read. The
// Content-Security-Policy of the page (Trusted Types, no inline script) refuses the same things
// again in the browser.
// @ts-check
import { textOf } from "./model/words.js";

const SVG = "http://www.w3.org/2000/svg";
const REFUSED = new Set(["innerhtml", "outerhtml", "srcdoc", "insertadjacenthtml"]);
const ADDRESSES = new Set(["href", "src", "action", "formaction", "xlink:href", "data"]);
/** `blob:` and `data:image/` are images that the user pasted. */
const HARMLESS = /^(?:https?:|mailto:|blob:|data:image\/(?:png|jpeg|gif|webp);|[^:]*$|[/?#.])/i;

/** @typedef {Node | string | number | null | undefined | false | Child[]} Child */

/**
 * Create an element. `props`: `class`, `dataset`, `style` (an object), `on: {click: fn}`. Every
 * other name is set as a property if the element has it, else as an attribute. `null`, `undefined`
 * and (for attributes) `false` leave the name out.
 * @param {string} tag
 * @param {Record<string, any> | null} [props]
 * @param {...Child} children
 * @returns {any} an HTMLElement of that tag
 */
export function el(tag, props, ...children) {
  const element = document.createElement(tag);
  set(element, props ?? {}, false);
  append(element, children);
  return element;
}

/**
 * Create an SVG element. Every prop is an attribute there.
 * @param {string} tag
 * @param {Record<string, any> | null} [attrs]
 * @param {...Child} children
 * @returns {any}
 */
export function svg(tag, attrs, ...children) {
  const element = document.createElementNS(SVG, tag);
  set(element, attrs ?? {}, true);
  append(element, children);
  return element;
}

/**
 * Set props on an existing element, as `el` does.
 * @param {any} element
 * @param {Record<string, any>} props
 * @param {boolean} [onlyAttributes]
 */
export function set(element, props, onlyAttributes = element.namespaceURI === SVG) {
  for (const [name, value] of Object.entries(props)) {
    if (name === "class") element.setAttribute("class", value ?? "");
    else if (name === "dataset") setAll(element.dataset, value);
    else if (name === "style") Object.assign(element.style, value);
    else if (name === "on") for (const [type, fn] of Object.entries(value)) element.addEventListener(type, fn);
    else setOne(element, name, value, onlyAttributes);
  }
}

/**
 * @param {DOMStringMap} dataset
 * @param {Record<string, any>} values
 */
function setAll(dataset, values) {
  for (const [name, value] of Object.entries(values)) {
    if (value === null || value === undefined) delete dataset[name];
    else if (dataset[name] !== String(value)) dataset[name] = String(value);
  }
}

/**
 * @param {any} element
 * @param {string} name
 * @param {any} value
 * @param {boolean} onlyAttributes
 */
function setOne(element, name, value, onlyAttributes) {
  const plain = name.toLowerCase();
  if (REFUSED.has(plain) || plain.startsWith("on")) throw new Error(`cannot set ${name}: only text and functions can be set`);
  if (ADDRESSES.has(plain) && value && !HARMLESS.test(String(value).replace(/[\x00-\x20]/g, ""))) value = null;
  if (value === null || value === undefined) {
    element.removeAttribute(name);
    return;
  }
  if (!onlyAttributes && name in element && !name.includes("-") && !ADDRESSES.has(plain)) {
    try {
      if (element[name] !== value) element[name] = value;
      return;
    } catch {
      // The property is read-only, as `form` or `list` is. Set the attribute instead.
    }
  }
  // For aria-… attributes "false" is a value. It differs from a missing attribute.
  if (value === false && !name.startsWith("aria-")) element.removeAttribute(name);
  else element.setAttribute(name, value === true && !name.startsWith("aria-") ? "" : textOf(value));
}

/**
 * @param {Element} parent
 * @param {Child[]} children
 */
function append(parent, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) append(parent, child);
    else parent.append(child instanceof Node ? child : textOf(child));
  }
}

/**
 * Replace all children with these.
 * @param {Element} parent
 * @param {...Child} children
 */
export function replace(parent, ...children) {
  parent.replaceChildren();
  append(parent, children);
}

/**
 * Whether a key event belongs to an unfinished IME composition (Japanese, Chinese…). Safari ends
 * the composition before it reports the Enter key that ended it. That Enter has key code 229.
 * @param {KeyboardEvent} event
 */
export function isComposing(event) {
  return event.isComposing || event.keyCode === 229;
}

/** @type {WeakMap<Element, Map<any, Element>>} The node of each key, by parent. */
const byParent = new WeakMap();

/**
 * Make the children of `parent` match `items`, in order, with one node per key. A node whose key
 * still exists is kept and updated. It moves only if its place is wrong. The focused node never
 * leaves the document, because it would lose the focus. Other nodes of the parent stay, before
 * these.
 * @template T
 * @param {Element} parent
 * @param {T[]} items
 * @param {(item: T) => any} keyOf returns a unique key
 * @param {(item: T) => Element} make
 * @param {(node: any, item: T) => void} [update] is also called for a new node
 */
export function keyed(parent, items, keyOf, make, update) {
  const old = byParent.get(parent) ?? new Map();
  /** @type {Map<any, Element>} */
  const now = new Map();
  for (const item of items) {
    const key = keyOf(item);
    if (now.has(key)) throw new Error(`two items have the key ${String(key)}`);
    const kept = old.get(key);
    const node = kept?.parentNode === parent ? kept : make(item);
    now.set(key, node);
    update?.(node, item);
  }
  for (const [key, node] of old) if (now.get(key) !== node) node.remove();
  place(parent, [...now.values()]);
  byParent.set(parent, now);
}

/**
 * @param {Element} parent
 * @param {Element[]} nodes
 */
function place(parent, nodes) {
  const focused = nodes.findIndex((node) => node.contains(document.activeElement));
  // Work outwards from the focused node: it does not move, and the others are placed around it.
  for (let i = focused - 1; i >= 0; i -= 1) putBefore(parent, nodes[i], nodes[i + 1]);
  if (focused < 0) {
    /** @type {Element | null} */
    let next = null;
    for (let i = nodes.length - 1; i >= 0; i -= 1) {
      putBefore(parent, nodes[i], next);
      next = nodes[i];
    }
    return;
  }
  for (let i = focused + 1; i < nodes.length; i += 1) {
    if (nodes[i - 1].nextSibling !== nodes[i]) nodes[i - 1].after(nodes[i]);
  }
}

/**
 * @param {Element} parent
 * @param {Element} node
 * @param {Element | null} next
 */
function putBefore(parent, node, next) {
  if (node.parentNode !== parent || node.nextSibling !== next) parent.insertBefore(node, next);
}

/**
 * @param {EventTarget} target
 * @param {string} type
 * @param {(event: any) => void} fn
 * @param {AddEventListenerOptions} [options]
 * @returns {() => void} removes the listener
 */
export function listen(target, type, fn, options) {
  target.addEventListener(type, fn, options);
  return () => target.removeEventListener(type, fn, options);
}
