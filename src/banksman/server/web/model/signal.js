// Observable values: signals, derived values and effects.
//
// A subscriber is called immediately, and then once for all changes of one turn of the event loop
// (a microtask), so that ten changes cause one redraw. A subscriber that throws does not stop the
// others: the error is reported. A signal that changes during a flush is delivered in the same
// flush, for at most ROUNDS_MAX rounds. Otherwise two effects that trigger each other would block
// the tab forever.
// @ts-check

/** More rounds than any correct chain of derived values needs. */
const ROUNDS_MAX = 100;

/** @type {Set<Signal<any>>} Changed and not delivered yet. */
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
   * @returns {() => void} unsubscribes; a second call does nothing
   */
  subscribe(fn) {
    // A new object per subscription: one function may subscribe twice, and each subscription ends
    // separately.
    const subscriber = { fn };
    this._subscribers.add(subscriber);
    safely(fn, this._value);
    return () => void this._subscribers.delete(subscriber);
  }

  _tell() {
    for (const subscriber of [...this._subscribers]) {
      // An earlier subscriber may have ended this subscription during the flush.
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

/**
 * Deliver all changes now. Normally the microtask does it. Tests call it too, and so does code that
 * must draw immediately.
 */
export function flush() {
  for (let round = 0; changed.size; round += 1) {
    if (round === ROUNDS_MAX) {
      changed.clear();
      isAwaited = false;
      throw new Error("cannot deliver signals: they trigger each other endlessly");
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
 * A value computed from other signals and updated after each change of them. It subscribes to them
 * for their whole life. So create it once per signal, not once per read.
 * @template T
 * @param {Readable<any>[]} signals
 * @param {(...values: any[]) => T} fn
 * @returns {Readable<T>}
 */
export function derived(signals, fn) {
  let seen = signals.map((one) => one.value);
  const made = new Signal(fn(...seen));
  // Compute again only if an input differs. A new list would count as a change. A subscriber that
  // reads the value because of one change would then get another change.
  const again = () => {
    const now = signals.map((one) => one.value);
    if (now.every((value, index) => Object.is(value, seen[index]))) return;
    seen = now;
    made.value = fn(...now);
  };
  for (const one of signals) skippingFirst(one, again);
  return {
    // A read between a change and its delivery computes the current value.
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
 * Call `fn` immediately with all values, and once after any of them has changed.
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
  // Two inputs that change together cause one call.
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
