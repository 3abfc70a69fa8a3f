// Requests to the server, and what its refusals look like.
//
// Every address is relative to the page's own, so that the page works behind a proxy's prefix. A refusal comes as a
// `Problem` with words for a person; no answer at all comes as `Unreachable`. Both have the same members, so that
// whoever shows one can show the other.
//
// What creates something is sent with an Idempotency-Key that is made once. When the connection is lost, or the server
// says that it is going, the same is sent again with the same key, so it is done once however often it was sent. What
// has no key is sent once: nobody knows what became of it, and the person decides.
// @ts-check
import { fetchWithToken, keepToken } from "./page_token.js";

/** Milliseconds before each repetition of a request that has a key. Together longer than a server needs to restart. */
const PAUSES = [200, 400, 800, 1600, 3200, 5000];
/** A read is answered at once or it is lost. What changes something may wait for a process to end. */
const READ_MILLISECONDS_MAX = 30_000;
const WRITE_MILLISECONDS_MAX = 120_000;

/** The server has refused, and says why. */
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

/** Nobody has answered. Whether it was done is not known. */
export class Unreachable extends Problem {
  constructor(detail = "the server cannot be reached", hint = "check that the server is running; the page tries again by itself") {
    super({ status: 0, title: "Unreachable", detail, hint });
    this.name = "Unreachable";
  }
}

/** @returns {string} one that nobody else has made. `crypto.randomUUID` is missing where there is no TLS. */
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
  // Somebody between here and the server: a proxy has words of its own.
  const detail = `the answer was ${answer.status} ${answer.statusText}`.trim();
  return new Problem({ status: answer.status, title: "NotOurs", detail, hint: "check for a proxy in front of the server" });
}

/** With `fetch` and `pause` given, for tests; the page uses the one below. */
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
   * @param {{key?: string, isHarmlessTwice?: boolean}} [more] `isHarmlessTwice`: it needs no key to be sent again
   */
  async post(path, body = {}, { key, isHarmlessTwice = false } = {}) {
    const send = () => this._once("POST", path, { body, key, milliseconds: WRITE_MILLISECONDS_MAX });
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
        // 503 says that nothing was done, and that it may be tried again.
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
      // Who has taken it back is not told that nobody was there.
      if (error instanceof Problem || signal?.aborted) throw error;
      throw new Unreachable();
    }
  }

  /**
   * Exchanges a one-time code, or the server's token, for the page's token. Until the server answers: the code is not in
   * the address any more, so that it would be lost with us.
   * @param {{code: string} | {token: string}} given
   * @returns {Promise<Problem | null>} why it was not taken
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

/** @param {string} token the server's, as a person has typed it */
export function loginByToken(token) {
  return api.login({ token });
}

/**
 * @param {string} hash of an address
 * @returns {{code: string} | {token: string} | null} what it logs in with
 */
export function keyIn(hash) {
  const [name] = /^#(code|token)=/u.exec(hash)?.slice(1) ?? [];
  const value = name && new URLSearchParams(hash.slice(1)).get(name);
  return !value ? null : name === "code" ? { code: value } : { token: value };
}

/**
 * Takes the one-time code out of the address (`#code=`), which browsers send to nobody, and exchanges it. `#token=`
 * works too, but the server hands out no such address: browsers write addresses to their history.
 * @param {string} [back] the address to show instead; else this one without its fragment
 * @returns {Promise<boolean>} whether there was one
 */
export async function login(back = location.pathname + location.search) {
  const key = keyIn(location.hash);
  if (!key) return false;
  // First this: it must not stay in the history, whatever becomes of the rest.
  history.replaceState(null, "", back);
  // A key that is not taken needs no word here: the stream is refused, and the page says what to do.
  await api.login(key);
  return true;
}
