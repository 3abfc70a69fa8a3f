// Values that tell who looks at them when they change.
//
// Whoever subscribes is called at once, and after that once for all changes of a turn of the loop (a microtask), so
// that ten changes in a row are drawn once. A call that fails keeps nobody else from theirs: it is reported, and the
// rest goes on. A signal that is changed while others are told is told in the same flush, at most ROUNDS_MAX times:
// two effects that set each other off would else hold the tab for ever.
// @ts-check

/** More rounds than any honest chain of derived values has. */
const ROUNDS_MAX = 100;

/** @type {Set<Signal<any>>} Changed, and not told yet. */
let changed = new Set();
let isAwaited = false;

/**
 * @template T
 * @typedef {{ readonly value: T, subscribe: (fn: (value: T) => void) => () => void }} Readable
 */

/** @template T */
class Signal {
  /** @param {T} value */
  constructor(value) {
    this._value = value;
    /** @type {Set<{fn: (value: T) => void}>} */
    this._subscribers = new Set();
  }

  get value() {
    return this._value;
  }

  set value(value) {
    if (Object.is(value, this._value)) return;
    this._value = value;
    tellLater(this);
  }

  /**
   * @param {(value: T) => void} fn
   * @returns {() => void} ends it; calling it twice is harmless
   */
  subscribe(fn) {
    // An object of its own: one function may be subscribed twice, and each ends by itself.
    const subscriber = { fn };
    this._subscribers.add(subscriber);
    safely(fn, this._value);
    return () => void this._subscribers.delete(subscriber);
  }

  _tell() {
    for (const subscriber of [...this._subscribers]) {
      // One that was ended by one before it is not called any more.
      if (this._subscribers.has(subscriber)) safely(subscriber.fn, this._value);
    }
  }
}

/** @param {Signal<any>} one */
function tellLater(one) {
  changed.add(one);
  if (isAwaited) return;
  isAwaited = true;
  queueMicrotask(flush);
}

/** Tells all that has changed, now. Normally the microtask does; tests and whoever must draw at once call it too. */
export function flush() {
  for (let round = 0; changed.size; round += 1) {
    if (round === ROUNDS_MAX) {
      changed.clear();
      isAwaited = false;
      throw new Error("signals set each other off without end");
    }
    const now = changed;
    changed = new Set();
    for (const one of now) one._tell();
  }
  isAwaited = false;
}

/**
 * @template T
 * @param {(value: T) => void} fn
 * @param {T} value
 */
function safely(fn, value) {
  try {
    fn(value);
  } catch (error) {
    (globalThis.reportError ?? console.error)(error);
  }
}

/**
 * @template T
 * @param {T} value
 * @returns {Signal<T>}
 */
export function signal(value) {
  return new Signal(value);
}

/**
 * A value made of others, kept up to date after each change of one of them. It follows them for as long as they live:
 * make one for what lives as long, and not one per look.
 * @template T
 * @param {Readable<any>[]} signals
 * @param {(...values: any[]) => T} fn
 * @returns {Readable<T>}
 */
export function derived(signals, fn) {
  let seen = signals.map((one) => one.value);
  const made = new Signal(fn(...seen));
  // Made again only where one of them is another: a list that was made anew would count as a change, and whoever reads
  // it for having been told of a change would be told of the next.
  const again = () => {
    const now = signals.map((one) => one.value);
    if (now.every((value, index) => Object.is(value, seen[index]))) return;
    seen = now;
    made.value = fn(...now);
  };
  for (const one of signals) skippingFirst(one, again);
  return {
    // Between a change and its telling nobody reads a value that is out of date.
    get value() {
      again();
      return made.value;
    },
    subscribe: (tell) => {
      again();
      return made.subscribe(tell);
    },
  };
}

/**
 * Calls `fn` at once with all values, and once after any of them has changed.
 * @param {Readable<any>[]} signals
 * @param {(...values: any[]) => void} fn
 * @returns {() => void}
 */
export function effect(signals, fn) {
  let isOver = false;
  let isDue = false;
  const run = () => {
    isDue = false;
    if (!isOver) safely(() => fn(...signals.map((one) => one.value)), undefined);
  };
  // Two of them that change together are one change.
  const later = () => {
    if (isDue) return;
    isDue = true;
    queueMicrotask(run);
  };
  const offs = signals.map((one) => skippingFirst(one, later));
  run();
  return () => {
    isOver = true;
    for (const off of offs) off();
  };
}

/**
 * @param {Readable<any>} one
 * @param {() => void} fn
 */
function skippingFirst(one, fn) {
  let isFirst = true;
  return one.subscribe(() => {
    if (isFirst) isFirst = false;
    else fn();
  });
}
