"""A web app that streams a turn to a browser by server-sent events (SSE).

It shows that a reader of the log can disconnect at any moment. The browser reconnects with the id
of the last event that it received (Last-Event-ID), and gets every later event exactly once.

Run `python web_stream.py [PORT]`, and open http://127.0.0.1:8000 in a browser.
Without Claude Code, set AGENT="python -m banksman.testing.fake_agent", which repeats each prompt.

You see the answer grow, then the outcome. Stop the app during a turn and start it again: the page
reconnects and shows the outcome of the turn. The app uses Starlette; `FastAPI` is a Starlette app
and takes the same routes and lifespan. The app checks neither a login nor the origin of requests.
"""

import contextlib
import json
import os
import sys
from collections.abc import AsyncGenerator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import banksman

AGENT = os.environ.get("AGENT", "claude")

PAGE = """<!doctype html><title>Banksman</title>
<form><input name=prompt autofocus size=60><button>Ask</button></form><pre></pre><p></p>
<script>
const [form, text, end] = ["form", "pre", "p"].map((name) => document.querySelector(name));
const words = (updates) => updates.map((update) => update.content?.text ?? "").join("");
form.onsubmit = async (submit) => {
  submit.preventDefault();
  const request = {method: "POST", body: JSON.stringify({prompt: form.prompt.value})};
  const asked = await (await fetch("/turns", request)).json();
  let whole = text.textContent = end.textContent = "";
  const stream = new EventSource(asked.events);
  stream.onmessage = ({data}) => {
    const {kind, body, partial} = JSON.parse(data);
    if (kind === "turn.ended") { end.textContent = body.outcome; stream.close(); }
    else if (partial.length) text.textContent += words(partial);  // Until the whole text follows.
    else if (body.updates?.length) text.textContent = whole += words(body.updates);
  };
};</script>"""


async def ask(request: Request) -> JSONResponse:
    """Accept a prompt, and return the address of its events."""
    session: banksman.Session = request.app.state.session
    start = await session.head()  # The events of the turn are all after this cursor.
    turn = await session.ask((await request.json())["prompt"], priority=banksman.INTERACTIVE)
    return JSONResponse({"events": f"/turns/{turn.id}/events?after={start}"}, status_code=202)


async def events(request: Request) -> Response:
    """Stream the events of one turn, after the browser's last event or from its beginning."""
    session: banksman.Session = request.app.state.session
    after = request.headers.get("Last-Event-ID") or request.query_params.get("after")

    async def stream() -> AsyncGenerator[str]:
        async with contextlib.aclosing(session.follow(after)) as log:
            async for event in log:
                if event.turn == request.path_params["turn"] and event.kind != "sent":
                    shown = {"kind": event.kind, "body": event.body, "partial": event.partial}
                    yield f"id: {event.cursor}\ndata: {json.dumps(shown)}\n\n"
                    if event.kind == "turn.ended":
                        return

    return StreamingResponse(stream(), media_type="text/event-stream")


@contextlib.asynccontextmanager
async def lifespan(app: Starlette) -> AsyncGenerator[None]:
    async with banksman.Host("sqlite:web_stream.db") as host:
        app.state.session = await host.open("claude", name="web", command=AGENT)
        yield


page = Route("/", HTMLResponse(PAGE))
routes = [page, Route("/turns", ask, methods=["POST"]), Route("/turns/{turn}/events", events)]
app = Starlette(routes=routes, lifespan=lifespan)

if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8000
    # The timeout: a stopped app does not wait for the streams of running turns.
    uvicorn.run(app, host="127.0.0.1", port=port, timeout_graceful_shutdown=1)
