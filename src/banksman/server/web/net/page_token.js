// The page's token: kept where only this origin can read it, and sent as a header.
//
// Not as a cookie: browsers send a cookie to every port of a host, so that any program that listens on this machine
// would receive it. `localStorage` belongs to one origin, port included, and is shared by its tabs. Where a browser has
// it switched off, the token lasts as long as the tab.
// @ts-check

/** Two servers behind one proxy have one origin, and differ by their prefix. */
const KEY = `banksman-token ${globalThis.location?.pathname ?? ""}`;

/** @type {string | null} */
let ours = null;

/** @returns {Storage | null} */
function storage() {
  try {
    return globalThis.localStorage ?? null;
  } catch {
    return null;
  }
}

/** @returns {string | null} */
function read() {
  try {
    return storage()?.getItem(KEY) ?? ours;
  } catch {
    return ours;
  }
}

/** @param {string} token */
export function keepToken(token) {
  ours = token;
  try {
    storage()?.setItem(KEY, token);
  } catch {
    // Storage is full or switched off: this tab has it.
  }
}

/**
 * Calls back when another tab has logged in.
 * @param {() => void} listener
 */
export function onTokenElsewhere(listener) {
  addEventListener("storage", (event) => {
    if (event.key === KEY && event.newValue) listener();
  });
}

/**
 * `fetch` with the page's token, and without cookies.
 * @param {string} address
 * @param {RequestInit & {headers?: Record<string, string>}} [given]
 */
export function fetchWithToken(address, given = {}) {
  const token = read();
  const headers = token ? { ...given.headers, Authorization: `Bearer ${token}` } : given.headers;
  return fetch(address, { ...given, headers, credentials: "omit" });
}
