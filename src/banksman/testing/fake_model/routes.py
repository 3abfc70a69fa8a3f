"""What each request of one connection is answered with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, cast

from banksman.testing.fake_model import http1
from banksman.testing.fake_model.choice import Chooser
from banksman.testing.fake_model.message import TOKEN_CHARACTERS, Message
from banksman.testing.fake_model.play import Broken, Player
from banksman.testing.fake_model.prompt import BadRequest, has_tools
from banksman.testing.fake_model.record import Records
from banksman.testing.fake_model.script import BadDirective, Step
from banksman.testing.fake_model.wire import Connection, Ending, Gone, Stopped, Stuck

MODEL = "claude-fake-1"
MODELS: dict[str, Any] = {
    "data": [{"type": "model", "id": MODEL, "display_name": "Fake", "created_at": "2025-01-01T00:00:00Z"}],
    "first_id": MODEL,
    "last_id": MODEL,
    "has_more": False,
}
# After an answer that ends the connection, the client may still be sending.
DRAIN_SECONDS_MAX = 2.0
DRAIN_BYTES_MAX = 2 * http1.BODY_BYTES_MAX


@dataclass(frozen=True, slots=True)
class Server:
    """What all connections share."""

    records: Records
    chooser: Chooser


def serve(connection: Connection, server: Server) -> None:
    """Answer requests until one of the two sides ends the connection; then close it."""
    ending = Ending.ORDERLY
    try:
        while _serve_one(connection, server):
            pass
    except Broken:
        ending = Ending.RESET
    except (Gone, Stopped, Stuck):
        pass  # The outcome of the request that this cut short, if there was one, tells it.
    finally:
        connection.close(ending)


def _serve_one(connection: Connection, server: Server) -> bool:
    """One request; False if there is no next one on this connection."""
    try:
        head = http1.read_head(connection)
        if head is None:
            return False
    except http1.Refusal as exc:
        _refuse_and_drain(connection, http1.Reply(connection, None), exc)
        return False
    reply = http1.Reply(connection, head)
    try:
        raw = http1.read_body(connection, head)
    except http1.Refusal as exc:
        reply.is_last = True
        request = server.records.begin(method=head.method, path=head.path, headers=head.headers, body=None, step=None)
        server.records.end(request, f"http_{exc.status}")
        _refuse_and_drain(connection, reply, exc)
        return False
    answer = _Answer(connection, server, head, reply)
    answer.give(raw)
    return not reply.is_last


def _refuse_and_drain(connection: Connection, reply: http1.Reply, refusal: http1.Refusal) -> None:
    reply.send(refusal.status, refusal.body())
    connection.drain(bytes_max=DRAIN_BYTES_MAX, timeout=DRAIN_SECONDS_MAX)


@dataclass(frozen=True, slots=True)
class _Understood:
    """What a request turned out to be: its step if it plays one, or why it is refused."""

    body: Any
    step: Step | None = None
    refusal: http1.Refusal | None = None


class _Answer:
    """The answer to one request that arrived in full."""

    def __init__(self, connection: Connection, server: Server, head: http1.Head, reply: http1.Reply) -> None:
        self._connection = connection
        self._server = server
        self._head = head
        self._reply = reply

    def give(self, raw: bytes) -> None:
        """Answer, and record how it went, also when an exception ends the connection."""
        understood = _understand(self._head, raw, self._server.chooser)
        head, step = self._head, understood.step
        request = self._server.records.begin(
            method=head.method,
            path=head.path,
            headers=head.headers,
            body=understood.body,
            step=None if step is None else tuple(directive.line for directive in step),
        )
        outcome = "failed"  # Never seen, unless there is a bug in here.
        try:
            outcome = self._answer(understood, input_tokens=len(raw) // TOKEN_CHARACTERS + 1)
        except Broken as exc:
            outcome = exc.outcome
            raise
        except Gone:
            outcome = "client_gone"
            raise
        except Stuck:
            outcome = "client_stuck"
            raise
        except Stopped:
            outcome = "stopped"
            raise
        finally:
            self._server.records.end(request, outcome)

    def _answer(self, understood: _Understood, *, input_tokens: int) -> str:
        try:
            if understood.refusal is not None:
                raise understood.refusal
            return self._do(understood, input_tokens)
        except http1.Refusal as exc:
            self._reply.send(exc.status, exc.body())
            return f"http_{exc.status}"

    def _do(self, understood: _Understood, input_tokens: int) -> str:
        match self._head.method, self._head.path:
            case "POST", "/v1/messages":
                model, is_streamed = understood.body.get("model"), understood.body.get("stream") is True
                message = Message(model if isinstance(model, str) else MODEL, input_tokens=input_tokens)
                player = Player(self._connection, self._reply, message, is_streamed=is_streamed)
                return player.play(understood.step or ())
            case "POST", "/v1/messages/count_tokens":
                self._reply.send(200, {"input_tokens": input_tokens})
            case "GET", "/v1/models":
                self._reply.send(200, MODELS)
            case "GET" | "HEAD", "/":
                # Agents look whether somebody is there at all.
                self._reply.send(200, {})
            case method, path:
                raise http1.Refusal(404, f"there is no {method} {path}")
        return "done"


def _understand(head: http1.Head, raw: bytes, chooser: Chooser) -> _Understood:
    body: Any = None
    try:
        body = json.loads(raw) if raw else None
    except (ValueError, RecursionError) as exc:
        if head.method == "POST":
            return _Understood(None, refusal=http1.Refusal(400, f"the body is not JSON: {exc}"))
    if (head.method, head.path) != ("POST", "/v1/messages"):
        return _Understood(body)
    if not isinstance(body, dict):
        return _Understood(body, refusal=http1.Refusal(400, "the body must be a JSON object"))
    fields = cast("dict[str, Any]", body)
    if not has_tools(fields):
        return _Understood(fields)
    try:
        return _Understood(fields, chooser.choose(fields))
    except (BadRequest, BadDirective) as exc:
        return _Understood(fields, (), http1.Refusal(400, str(exc)))
