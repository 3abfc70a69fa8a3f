// The page's token: stored where only this origin can read it, and sent as a header.
//
// It is not a cookie: browsers send a cookie to every port of a host, so any program that listens
// on this machine would receive it. `localStorage` belongs to one origin, including the port, and
// its tabs share it. If the browser has it switched off, the token lasts as long as the tab.
// @ts-check

/** Two servers behind one proxy have the same origin and different prefixes. */
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
    // The storage is full or switched off. Only this tab has the token.
  }
}

export function forgetToken() {
  ours = null;
  try {
    storage()?.removeItem(KEY);
  } catch {
    // Only this tab had the token.
  }
}

/** @returns {string | null} the token that the next request carries */
export function currentToken() {
  return read();
}

/** Without a token, a proxy in front of the server may name the user. */
export function hasToken() {
  return read() !== null;
}

/**
 * Call a listener when another tab has logged in, or logged out.
 * @param {() => void} onLogin
 * @param {() => void} onLogout
 */
export function onTokenElsewhere(onLogin, onLogout) {
  addEventListener("storage", (event) => {
    if (event.key !== KEY) return;
    ours = event.newValue;
    if (event.newValue) onLogin();
    else onLogout();
  });
}

/**
 * `fetch` with the page's token. The server ignores cookies, but a proxy before it may know its
 * user by one.
 * @param {string} address
 * @param {RequestInit & {headers?: Record<string, string>}} [given]
 */
export function fetchWithToken(address, given = {}) {
  const token = read();
  const headers = token ? { ...given.headers, Authorization: `Bearer ${token}` } : given.headers;
  return fetch(address, { ...given, headers, credentials: "same-origin" });
}
