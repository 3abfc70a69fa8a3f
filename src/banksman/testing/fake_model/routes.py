"""What each request of one connection is answered with."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, cast

from banksman.testing.fake_model import http1
from banksman.testing.fake_model.apis import (
    TOKEN_CHARACTERS,
    Api,
    BadRequest,
    ModelCall,
    anthropic,
    chat,
    gemini,
    has_tools,
    responses,
)
from banksman.testing.fake_model.directives import BadDirective, Step
from banksman.testing.fake_model.http1 import ClientGone, Ending, ModelConnection, Stopped, Stuck
from banksman.testing.fake_model.play import Broken, Chooser, StepPlayer
from banksman.testing.fake_model.record import RequestRecords

# After an answer that ends the connection, the client may still be sending.
DRAIN_SECONDS_MAX = 2.0
# In whose shape those are refused who called none.
ANY_API = anthropic.API
DRAIN_BYTES_MAX = 2 * http1.BODY_BYTES_MAX
# An agent is given a base address of ours with or without something before the version, as its API is used to.
_PATHS = {
    "/v1/messages": anthropic.API,
    "/v1/responses": responses.API,
    "/v1/chat/completions": chat.API,
}
_GEMINI = re.compile(r"/v1(?:beta)?/models/[^/:]+:(?:generate|streamGenerate)Content\Z")
# The models that there are, for agents that ask. Any other name does as well.
# Two vendors answer at one path. Each field is in the shape of one of them, and the other's clients pass over it.
MODELS: dict[str, Any] = {
    "object": "list",
    "data": [
        {
            "type": "model",
            "object": "model",
            "id": name,
            "display_name": "Fake",
            "owned_by": "fake",
            "created_at": "2025-01-01T00:00:00Z",
            "created": 1735689600,
        }
        for name in (anthropic.MODEL, responses.MODEL)
    ],
    "first_id": anthropic.MODEL,
    "last_id": responses.MODEL,
    "has_more": False,
}
GEMINI_MODELS: dict[str, Any] = {
    "models": [
        {
            "name": "models/gemini-fake-1",
            "version": "1",
            "displayName": "Fake",
            "inputTokenLimit": 1_048_576,
            "outputTokenLimit": 65_536,
            "supportedGenerationMethods": ["generateContent", "countTokens"],
        }
    ]
}


@dataclass(frozen=True, slots=True)
class ModelServer:
    """What all connections share."""

    records: RequestRecords
    chooser: Chooser


def serve(connection: ModelConnection, server: ModelServer) -> None:
    """Answer requests until one of the two sides ends the connection; then close it."""
    ending = Ending.ORDERLY
    try:
        while _serve_one(connection, server):
            pass
    except Broken:
        ending = Ending.RESET
    except (ClientGone, Stopped, Stuck):
        pass  # The outcome of the request that this cut short, if there was one, tells it.
    finally:
        connection.close(ending)


def _serve_one(connection: ModelConnection, server: ModelServer) -> bool:
    """One request; False if there is no next one on this connection."""
    try:
        head = http1.read_head(connection)
        if head is None:
            return False
    except http1.HttpRefusal as exc:
        _refuse_and_drain(connection, http1.HttpReply(connection, None), exc)
        return False
    reply = http1.HttpReply(connection, head)
    try:
        raw = http1.read_body(connection, head)
    except http1.HttpRefusal as exc:
        reply.is_last = True
        api = _api_of(head.method, head.path)
        request = server.records.begin(
            method=head.method,
            path=head.path,
            headers=head.headers,
            api=api.name if api else None,
            body=None,
            step=None,
        )
        server.records.end(request, f"http_{exc.status}")
        _refuse_and_drain(connection, reply, exc, api)
        return False
    answer = _ModelAnswer(connection, server, head, reply)
    answer.give(raw)
    return not reply.is_last


def _refuse_and_drain(
    connection: ModelConnection, reply: http1.HttpReply, refusal: http1.HttpRefusal, api: Api | None = None
) -> None:
    reply.send(refusal.status, refusal.body(api or ANY_API))
    connection.drain(bytes_max=DRAIN_BYTES_MAX, timeout=DRAIN_SECONDS_MAX)


@dataclass(frozen=True, slots=True)
class _Understood:
    """What a request turned out to be: its API, its step if it plays one, or why it is refused."""

    api: Api | None
    body: Any
    step: Step | None = None
    refusal: http1.HttpRefusal | None = None


class _ModelAnswer:
    """The answer to one request that arrived in full."""

    def __init__(
        self, connection: ModelConnection, server: ModelServer, head: http1.HttpHead, reply: http1.HttpReply
    ) -> None:
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
            api=understood.api.name if understood.api else None,
            body=understood.body,
            step=None if step is None else tuple(directive.line for directive in step),
        )
        outcome = "failed"  # Never seen, unless there is a bug in here.
        try:
            outcome = self._answer(understood, input_tokens=len(raw) // TOKEN_CHARACTERS + 1)
        except Broken as exc:
            outcome = exc.outcome
            raise
        except ClientGone:
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
        except http1.HttpRefusal as exc:
            self._reply.send(exc.status, exc.body(understood.api or ANY_API))
            return f"http_{exc.status}"

    def _do(self, understood: _Understood, input_tokens: int) -> str:
        if understood.api is not None:
            call = ModelCall(self._head.path, understood.body, input_tokens)
            return StepPlayer(self._connection, self._reply, understood.api, call).play(understood.step or ())
        self._reply.send(200, _listing(self._head, input_tokens))
        return "done"


def _listing(head: http1.HttpHead, input_tokens: int) -> dict[str, Any]:
    """What agents ask for beside replies of the model."""
    match head.method, head.path:
        case "POST", path if path.endswith("/v1/messages/count_tokens"):
            return {"input_tokens": input_tokens}
        case "POST", path if path.endswith(":countTokens"):
            return {"totalTokens": input_tokens}
        case "POST", path if path.endswith("/v1/responses/compact"):
            return responses.compacted(ModelCall(path, {}, input_tokens))
        case "GET", path if path.endswith("/v1/models"):
            return MODELS
        case "GET", path if path.endswith("/v1beta/models"):
            return GEMINI_MODELS
        case "GET" | "HEAD", "/":
            # They look whether somebody is there at all.
            return {}
        case method, path:
            raise http1.HttpRefusal(404, f"there is no {method} {path}")


def _api_of(method: str, path: str) -> Api | None:
    """The API by which this request wants a reply of the model; None for every other request."""
    if method != "POST":
        return None
    if _GEMINI.search(path):
        return gemini.API
    return next((api for end, api in _PATHS.items() if path.endswith(end)), None)


def _understand(head: http1.HttpHead, raw: bytes, chooser: Chooser) -> _Understood:
    api = _api_of(head.method, head.path)
    body: Any = None
    try:
        body = json.loads(raw) if raw else None
    except (ValueError, RecursionError) as exc:
        if head.method == "POST":
            return _Understood(api, None, refusal=http1.HttpRefusal(400, f"the body is not JSON: {exc}"))
    if api is None:
        return _Understood(None, body)
    if not isinstance(body, dict):
        return _Understood(api, body, refusal=http1.HttpRefusal(400, "the body must be a JSON object"))
    fields = cast("dict[str, Any]", body)
    if not has_tools(fields):
        return _Understood(api, fields)
    try:
        return _Understood(api, fields, chooser.choose(api.read(fields)))
    except (BadRequest, BadDirective) as exc:
        return _Understood(api, fields, (), http1.HttpRefusal(400, str(exc)))
