// Program that uses the types of openapi-typescript: `node typescript_client.ts URL TOKEN COMMAND`.
import createClient from "openapi-fetch";
import type { components, paths } from "./schema.d.ts";

declare const process: { argv: string[] };

type Schemas = components["schemas"];
const [, , url = "", token = "", command = "[]"] = process.argv;
const client = createClient<paths, "application/json" | "application/problem+json">({
  baseUrl: url,
  headers: { Authorization: `Bearer ${token}` },
});

function check(holds: boolean, what: unknown): asserts holds {
  if (!holds) throw new Error(JSON.stringify(what));
}

/** Yield each item of a stream, until the caller stops. */
async function* items(session: string): AsyncGenerator<Schemas["StreamItem"]> {
  const { response } = await client.GET("/v1/sessions/{id}/events", {
    params: { path: { id: session }, header: { Accept: "text/event-stream" } },
    parseAs: "stream",
  });
  check(response.body !== null, response.status);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (let { done, value } = await reader.read(); !done; { done, value } = await reader.read()) {
      rest += value;
      const blocks = rest.split("\n\n");
      rest = blocks.pop() ?? "";
      for (const block of blocks) {
        const data = block.split("\n").find((line) => line.startsWith("data: "));
        if (data !== undefined) yield JSON.parse(data.slice("data: ".length)) as Schemas["StreamItem"];
      }
    }
  } finally {
    await reader.cancel();
  }
}

/** Return the id of the first question in the event stream. */
async function followedQuestion(session: string): Promise<string> {
  for await (const item of items(session)) {
    switch (item.kind) {
      case "question.asked":
        return item.body.question; // The kind narrows the type: other bodies have no `question`.
      case "turn.ended":
        throw new Error(`${item.body.outcome}: ${item.body.error ?? ""}`);
      default:
    }
  }
  throw new Error("the stream ended");
}

// Only the required members.
const opened = await client.POST("/v1/sessions", { body: { command: JSON.parse(command) as string[] } });
check(opened.data !== undefined, opened.error);
const id = opened.data.id;

const ask: Schemas["Ask"] = { prompt: [{ type: "text", text: "go" }], priority: "interactive" };
const accepted = await client.POST("/v1/sessions/{id}/turns", {
  params: { path: { id }, header: { "Idempotency-Key": "once" } },
  body: ask,
});
check(accepted.data !== undefined, accepted.error);

const question = await followedQuestion(id);
const waiting = await client.GET("/v1/sessions/{id}/questions", { params: { path: { id } } });
check(waiting.data?.questions[0]?.question === question, waiting);
const answered = await client.POST("/v1/sessions/{id}/questions/{question}", {
  params: { path: { id, question } },
  body: { decision: "allow" },
});
check(answered.data?.answer === "allow", answered);

const turn = await client.GET("/v1/sessions/{id}/turns/{turn}", {
  params: { path: { id, turn: accepted.data.turn }, query: { wait: 60 } },
});
check(turn.data?.outcome?.kind === "done", turn);

// The type is that of a page, although the same path can return a stream.
const page = await client.GET("/v1/sessions/{id}/events", { params: { path: { id }, query: { limit: 1000 } } });
check(page.data !== undefined, page.error);
const ended = page.data.events.find((event) => event.kind === "turn.ended");
check(ended?.body.outcome === "done", page.data);

const missing = await client.GET("/v1/sessions/{id}", { params: { path: { id: "no-such-session" } } });
check(missing.error?.status === 404, missing);

// @ts-expect-error: the type lists the states of a session, and this is not in it.
const wrong: Schemas["SessionState"] = "sleepy";
void wrong;

console.log(turn.data.outcome.text);
