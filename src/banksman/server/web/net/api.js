// HTTP requests to the server, and its errors.
//
// Every URL is relative to the page, so that the page works behind a proxy's prefix. An error
// response is a `Problem` with words for the user. No response at all is `Unreachable`. Both have
// the same members, so one view can show both.
//
// A request that creates something carries an Idempotency-Key, made once. If the connection is
// lost, or the server says that it is shutting down, the same request is sent again with the same
// key. So it takes effect once. A request without a key is sent once: its result is unknown, and
// the user decides.
// @ts-check
import { fetchWithToken, forgetToken, keepToken } from "./page_token.js";

/**
 * Milliseconds before each retry of a request with a key. The sum is longer than a server restart.
 */
const PAUSES = [200, 400, 800, 1600, 3200, 5000];
/** A read is answered quickly or it is lost. A change may wait for a process to end. */
const READ_MILLISECONDS_MAX = 30_000;
const WRITE_MILLISECONDS_MAX = 120_000;

/** The server refused the request, with a reason. */
export class Problem extends Error {
  /** @param {{status?: number, title?: string, detail?: string, hint?: string, ids?: Record<string, any>}} shown */
  constructor({ status = 0, title = "", detail = "", hint = "", ids = {} }) {
    super(hint ? `${detail}: ${hint}` : detail);
    this.name = "Problem";
    this.status = status;
    this.title = title;
    this.detail = detail;
    this.hint = hint;
    this.ids = ids;
  }
}

/** No response. Whether the request took effect is unknown. */
export class Unreachable extends Problem {
  constructor(detail = "the server cannot be reached", hint = "check that the server is running; the page retries automatically") {
    super({ status: 0, title: "Unreachable", detail, hint });
    this.name = "Unreachable";
  }
}

/** @returns {string} a unique id. `crypto.randomUUID` is missing without TLS. */
export function randomId() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/**
 * @param {Record<string, any> | null} [query] null and undefined are left out
 * @returns {string}
 */
export function withQuery(path, query) {
  const words = Object.entries(query ?? {}).filter(([, value]) => value !== null && value !== undefined);
  const text = new URLSearchParams(words.map(([name, value]) => [name, String(value)])).toString();
  return text ? `${path}?${text}` : path;
}

/**
 * @param {Response} answer
 * @returns {Promise<Problem>}
 */
export async function problemOf(answer) {
  const shown = await answer.json().catch(() => null);
  if (shown && typeof shown.detail === "string") return new Problem({ ...shown, status: answer.status });
  // The response comes from a proxy between the page and the server, with another format.
  const detail = `the answer was ${answer.status} ${answer.statusText}`.trim();
  return new Problem({ status: answer.status, title: "NotOurs", detail, hint: "check for a proxy in front of the server" });
}

/** Client of the HTTP API. Tests pass `fetch` and `pause`; the page uses the instance below. */
export class Api {
  /**
   * @param {{fetch?: typeof fetch, base?: string, pause?: (milliseconds: number) => Promise<void>,
   *   keepToken?: (token: string) => void}} [given]
   */
  constructor(given = {}) {
    this._fetch = given.fetch ?? fetchWithToken;
    this._keepToken = given.keepToken ?? keepToken;
    this._base = given.base ?? "";
    this._pause = given.pause ?? ((milliseconds) => new Promise((done) => setTimeout(done, milliseconds)));
  }

  /**
   * @param {string} path
   * @param {Record<string, any>} [query]
   * @param {{signal?: AbortSignal}} [more]
   */
  get(path, query, { signal } = {}) {
    return this._once("GET", withQuery(path, query), { signal, milliseconds: READ_MILLISECONDS_MAX });
  }

  /**
   * @param {string} path
   * @param {any} [body]
   * @param {{key?: string, isHarmlessTwice?: boolean, check?: () => void}} [more]
   *   `isHarmlessTwice`: a retry needs no key. `check` runs right before each attempt and throws to
   *   prevent it; nothing can change between it and the request.
   */
  async post(path, body = {}, { key, isHarmlessTwice = false, check } = {}) {
    const send = () => {
      check?.();
      return this._once("POST", path, { body, key, milliseconds: WRITE_MILLISECONDS_MAX });
    };
    return key || isHarmlessTwice ? this._untilAnswered(send) : send();
  }

  /**
   * @param {string} path
   * @param {any} body
   */
  patch(path, body) {
    return this._untilAnswered(() => this._once("PATCH", path, { body, milliseconds: WRITE_MILLISECONDS_MAX }));
  }

  /**
   * @param {string} path
   * @param {Record<string, any>} [query]
   */
  remove(path, query) {
    return this._once("DELETE", withQuery(path, query), { milliseconds: WRITE_MILLISECONDS_MAX });
  }

  /** @param {() => Promise<any>} send */
  async _untilAnswered(send) {
    for (const milliseconds of PAUSES) {
      try {
        return await send();
      } catch (error) {
        // 503 means that nothing was done, and that the client may retry.
        if (!(error instanceof Unreachable) && !(error instanceof Problem && error.status === 503)) throw error;
      }
      await this._pause(milliseconds);
    }
    return send();
  }

  /**
   * @param {string} method
   * @param {string} path
   * @param {{body?: any, key?: string, signal?: AbortSignal, milliseconds: number}} given
   */
  async _once(method, path, { body, key, signal, milliseconds }) {
    /** @type {Record<string, string>} */
    const headers = { Accept: "application/json" };
    if (body !== undefined) headers["Content-Type"] = "application/json";
    if (key) headers["Idempotency-Key"] = key;
    const deadline = AbortSignal.timeout(milliseconds);
    try {
      const answer = await this._fetch(this._base + path, {
        method,
        headers,
        body: body === undefined ? undefined : JSON.stringify(body),
        signal: signal ? AbortSignal.any([signal, deadline]) : deadline,
        cache: "no-store",
      });
      if (!answer.ok) throw await problemOf(answer);
      const text = await answer.text();
      return text ? JSON.parse(text) : null;
    } catch (error) {
      // A caller that aborted the request gets the abort, not `Unreachable`.
      if (error instanceof Problem || signal?.aborted) throw error;
      throw new Unreachable();
    }
  }

  /**
   * Exchange a one-time code, or the server's token, for the page's token. Retries until the server
   * responds: the code was removed from the URL, so it would be lost with this page.
   * @param {{code: string} | {token: string}} given
   * @returns {Promise<Problem | null>} why the server refused it
   */
  async login(given) {
    for (let tries = 0; ; tries += 1) {
      try {
        const { token } = await this._once("POST", "v1/login", { body: given, milliseconds: READ_MILLISECONDS_MAX });
        this._keepToken(token);
        return null;
      } catch (error) {
        if (!(error instanceof Unreachable)) return /** @type {Problem} */ (error);
      }
      await this._pause(PAUSES[Math.min(tries, PAUSES.length - 1)]);
    }
  }
}

const api = new Api();
export const get = api.get.bind(api);
export const post = api.post.bind(api);
export const patch = api.patch.bind(api);
export const remove = api.remove.bind(api);

/** @param {string} token the server's token, as the user typed it */
export function loginByToken(token) {
  return api.login({ token });
}

/** Forget the token of this browser. The server revokes a token that it has made for the page. */
export async function logout() {
  try {
    await post("v1/logout");
  } catch {
    // The browser forgets the token all the same.
  }
  forgetToken();
  location.reload();
}

/**
 * @param {string} hash the fragment of a URL
 * @returns {{code: string} | {token: string} | null} the credential in it
 */
export function keyIn(hash) {
  const [name] = /^#(code|token)=/u.exec(hash)?.slice(1) ?? [];
  const value = name && new URLSearchParams(hash.slice(1)).get(name);
  return !value ? null : name === "code" ? { code: value } : { token: value };
}

/**
 * Take the one-time code out of the fragment (`#code=`), which browsers do not send to any server,
 * and exchange it. `#token=` works too, but the server prints no such URL, because browsers write
 * URLs to their history.
 * @param {string} [back] the URL to show instead; else this one without its fragment
 * @returns {Promise<boolean>} whether there was a credential
 */
export async function login(back = location.pathname + location.search) {
  const key = keyIn(location.hash);
  if (!key) return false;
  // This comes first: the code must not stay in the history, even if the rest fails.
  history.replaceState(null, "", back);
  // A refused credential needs no message here: the stream is refused too, and the page then shows
  // what to do.
  await api.login(key);
  return true;
}
