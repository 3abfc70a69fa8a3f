"""Request handling of the fake model: find the API of a request, answer it, record the outcome.

A model call plays its step (`play.py`). Other requests (model lists, token counts, compaction,
probes) are answered here. `record.py` keeps each request and its outcome for the test.
"""

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
# The error format for requests that use no known API.
ANY_API = anthropic.API
DRAIN_BYTES_MAX = 2 * http1.BODY_BYTES_MAX
# Paths are matched by their end: the base URL given to an agent may have a prefix before the
# version, as its API expects.
_PATHS = {
    "/v1/messages": anthropic.API,
    "/v1/responses": responses.API,
    "/v1/chat/completions": chat.API,
}
_GEMINI = re.compile(r"/v1(?:beta)?/models/[^/:]+:(?:generate|streamGenerate)Content\Z")
# The models that the server lists. It also accepts any other name. Two vendors use the same path,
# so each field has the format of one vendor, and the clients of the other ignore it.
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
    """State that all connections share."""

    records: RequestRecords
    chooser: Chooser


def serve(connection: ModelConnection, server: ModelServer) -> None:
    """Answer requests until the client or the server ends the connection, then close it."""
    ending = Ending.ORDERLY
    try:
        while _serve_one(connection, server):
            pass
    except Broken:
        ending = Ending.RESET
    except (ClientGone, Stopped, Stuck):
        pass  # The outcome of the interrupted request, if there was one, records the reason.
    finally:
        connection.close(ending)


def _serve_one(connection: ModelConnection, server: ModelServer) -> bool:
    """Serve one request; return False if the connection ends with it."""
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
    connection: ModelConnection,
    reply: http1.HttpReply,
    refusal: http1.HttpRefusal,
    api: Api | None = None,
) -> None:
    reply.send(refusal.status, refusal.body(api or ANY_API))
    connection.drain(bytes_max=DRAIN_BYTES_MAX, timeout=DRAIN_SECONDS_MAX)


@dataclass(frozen=True, slots=True)
class _Understood:
    """A parsed request: its API, its step if it plays one, or the reason for a refusal."""

    api: Api | None
    body: Any
    step: Step | None = None
    refusal: http1.HttpRefusal | None = None


class _ModelAnswer:
    """Answer to one request that arrived completely."""

    def __init__(
        self,
        connection: ModelConnection,
        server: ModelServer,
        head: http1.HttpHead,
        reply: http1.HttpReply,
    ) -> None:
        self._connection = connection
        self._server = server
        self._head = head
        self._reply = reply

    def give(self, raw: bytes) -> None:
        """Send the answer and record its outcome, even if an exception ends the connection."""
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
        outcome = "failed"  # Visible only if this module has a bug.
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
            self._reply.fields |= exc.headers
            self._reply.send(exc.status, exc.body(understood.api or ANY_API))
            return f"http_{exc.status}"

    def _do(self, understood: _Understood, input_tokens: int) -> str:
        if understood.api is not None:
            call = ModelCall(self._head.path, understood.body, input_tokens)
            return StepPlayer(self._connection, self._reply, understood.api, call).play(
                understood.step or ()
            )
        self._reply.send(200, _listing(self._head, input_tokens))
        return "done"


def _listing(head: http1.HttpHead, input_tokens: int) -> dict[str, Any]:
    """Answer a request that is not a model call."""
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
            # Agents probe whether the server is reachable.
            return {}
        case method, path:
            raise http1.HttpRefusal(404, f"there is no {method} {path}")


def _api_of(method: str, path: str) -> Api | None:
    """Return the API of a model call; None for every other request."""
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
            return _Understood(
                api, None, refusal=http1.HttpRefusal(400, f"the body is not JSON: {exc}")
            )
    if api is None:
        return _Understood(None, body)
    if not isinstance(body, dict):
        return _Understood(
            api, body, refusal=http1.HttpRefusal(400, "the body must be a JSON object")
        )
    fields = cast("dict[str, Any]", body)
    if not has_tools(fields):
        return _Understood(api, fields)
    try:
        return _Understood(api, fields, chooser.choose(api.read(fields)))
    except (BadRequest, BadDirective) as exc:
        return _Understood(api, fields, (), http1.HttpRefusal(400, str(exc)))
