// Small server over real HTTP that can fail on demand: lose a connection between two bytes, answer late, or have
// another history than before. It implements the part of the API that the page's data needs. tests/server/web/browser
// checks the real server with the page in a real browser.
import { createServer } from "node:http";

const FRAMES = new Set(["update", "recited", "sent"]);

export class Little {
  constructor() {
    /** Every event of every session, in the order of commits. A position is an index in it. */
    this.commits = [];
    this._bySession = new Map();
    this.history = 1;
    /** Answered requests: `{path, query, headers, body}`. */
    this.requests = [];
    this.streams = new Set();
    this.streamsOpened = 0;
    this.first = new Map();
    /** Set to replace an answer: takes the request, returns `[status, body]` or nothing; may be async. */
    this.instead = () => undefined;
    /** Called when an answer is complete, before it is sent. */
    this.beforeSending = () => {};
    this.port = 0;
  }

  async start() {
    this._server = createServer((request, response) => void this._answer(request, response));
    await new Promise((done) => this._server.listen(this.port, "127.0.0.1", done));
    this.port = this._server.address().port;
    return this;
  }

  get base() {
    return `http://127.0.0.1:${this.port}/`;
  }

  async stop() {
    this._server.closeAllConnections();
    await new Promise((done) => this._server.close(done));
    this.streams.clear();
  }

  events(session) {
    return this._bySession.get(session) ?? [];
  }

  /** Forget everything, as when another store replaces this one. */
  forget() {
    this.commits = [];
    this._bySession.clear();
    this.history += 1;
  }

  /** Append events to one session, one commit each. */
  commit(session, ...kinds) {
    if (!this._bySession.has(session)) this._bySession.set(session, []);
    for (const kind of kinds) {
      const seq = this.events(session).length + 1;
      const cursor = `${this.history}.${seq}`;
      const body = FRAMES.has(kind) ? { updates: [] } : {};
      const event = { cursor, session, epoch: this.history, seq, at: seq, turn: null, kind, body };
      this.commits.push(event);
      this.events(session).push(event);
    }
    for (const stream of this.streams) stream.send();
  }

  /** Cut all streams as a network does. */
  cutStreams() {
    for (const stream of this.streams) stream.response.destroy();
    this.streams.clear();
  }

  async _answer(request, response) {
    const url = new URL(request.url, this.base);
    let text = "";
    for await (const piece of request) text += piece;
    const query = Object.fromEntries(url.searchParams);
    const asked = { method: request.method, path: url.pathname, query, headers: request.headers, body: text && JSON.parse(text) };
    this.requests.push(asked);
    const other = await this.instead(asked);
    if (other === "cut") return void response.destroy();
    if (other) return this._json(response, ...other);
    const found = /^\/v1\/sessions\/([^/]+)\/events$/.exec(url.pathname);
    if (url.pathname === "/v1/events") this._stream(query, response);
    else if (found) this._page(found[1], query, response);
    else if (url.pathname === "/v1/sessions") {
      const ids = [...new Set(this.commits.map((event) => event.session))];
      this._json(response, 200, { sessions: ids.map((id) => this.session(id)), next: null });
    } else if (url.pathname.startsWith("/v1/sessions/")) this._json(response, 200, this.session(url.pathname.split("/")[3]));
    else this._json(response, 404, { title: "NotFound", detail: "nothing here", hint: "" });
  }

  session(id) {
    const own = this.events(id).filter((event) => !FRAMES.has(event.kind));
    const state = own.at(-1)?.kind === "question.asked" ? "asks" : "idle";
    return { id, name: id, state, seq: this.events(id).length };
  }

  async _json(response, status, body) {
    await this.beforeSending();
    response.writeHead(status, { "Content-Type": "application/json" });
    response.end(JSON.stringify(body));
  }

  _page(session, query, response) {
    const all = this.events(session);
    const head = all.at(-1)?.cursor ?? null;
    const limit = Math.min(Number(query.limit ?? 100), 1000);
    const first = this.first.get(session) ?? 1;
    const isShown = (event) => event.seq >= first && (query.frames !== "0" || !FRAMES.has(event.kind));
    if (query.before !== undefined) {
      const before = seqOf(query.before);
      const events = all.filter((event) => isShown(event) && event.seq < before).slice(-limit);
      const kept = all.find((event) => event.seq >= first)?.cursor ?? null;
      return this._json(response, 200, { events, next: events.at(-1)?.cursor ?? null, head, first: kept });
    }
    const after = seqOf(query.after);
    if (query.after?.includes(".") && all[after - 1]?.cursor !== query.after) {
      return this._json(response, 410, { title: "HistoryLost", detail: "the store has no such event", hint: "" });
    }
    const events = all.filter((event) => isShown(event) && event.seq > after).slice(0, limit);
    const gap = after < first - 1 ? { gap: { first: after + 1, last: first - 1 } } : {};
    this._json(response, 200, { events, next: events.at(-1)?.cursor ?? query.after ?? null, head, ...gap });
  }

  _stream(query, response) {
    const end = `${this.history}-${this.commits.length}`;
    const after = !query.after || query.after === "now" ? end : query.after;
    const [history, place] = after.split("-").map(Number);
    if (history !== this.history || place > this.commits.length) {
      return this._json(response, 410, { title: "HistoryLost", detail: "another history", hint: "" });
    }
    const frames = new Set(query.frames_of.split(","));
    response.writeHead(200, { "Content-Type": "text/event-stream" });
    response.flushHeaders();
    const stream = { response, frames, place, send: () => {} };
    stream.send = () => {
      let text = "";
      for (; stream.place < this.commits.length; stream.place += 1) {
        const event = this.commits[stream.place];
        if (FRAMES.has(event.kind) && !frames.has(event.session)) continue;
        text += `id: ${this.history}-${stream.place + 1}\ndata: ${JSON.stringify(event)}\n\n`;
      }
      if (text) response.write(text);
    };
    stream.say = (kind, more = {}) => response.write(`event: ${kind}\ndata: ${JSON.stringify({ kind, ...more })}\n\n`);
    this.streams.add(stream);
    this.streamsOpened += 1;
    response.on("close", () => this.streams.delete(stream));
    response.write("retry: 1000\n");
    stream.send();
    stream.say("stream.live", { head: `${this.history}-${stream.place}` });
  }
}

function seqOf(cursor) {
  return cursor ? Number(cursor.slice(cursor.indexOf(".") + 1)) : 0;
}

/** Return the CPU milliseconds of a call, which do not depend on the load of the machine. */
export function cpuMilliseconds(work) {
  const before = process.cpuUsage();
  work();
  const { user, system } = process.cpuUsage(before);
  return (user + system) / 1000;
}

/** Poll until the condition holds. The deadline makes a failing test name its place. */
export async function until(isSo, what = isSo.toString(), milliseconds = 60_000) {
  const deadline = Date.now() + milliseconds;
  while (!(await isSo())) {
    if (Date.now() > deadline) throw new Error(`not within ${milliseconds} ms: ${what}`);
    await new Promise((done) => setTimeout(done, 2));
  }
}
