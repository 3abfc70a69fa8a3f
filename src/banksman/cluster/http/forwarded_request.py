"""A request as bytes, to the host that has the session, and its answer back: one API, and no second protocol.

A front end takes a request apart, finds that another host has the session, and sends that host what it got: method,
path, the few headers that mean something there, and the body. The other one puts it through its own application, as if
it had come by a socket. Whoever may speak on the bus was let in by the bus, so there is no door; what callers may start
is for the policy of the host that starts it.

What came so is never sent on. A host that does not have the session any more says so (421), and whoever sent it looks
again who has it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message

from banksman.server.problems import MEDIA_TYPE, Problem

# An answer that is larger is none that a session gives: a page of events is read from the log, and never asked for.
ANSWER_BYTES_MAX = 64 << 20
# What means something at the other end, and what means something back here.
HEADERS_THERE = ("content-type", "idempotency-key")
HEADERS_BACK = ("content-type", "location", "retry-after")
# All that is asked of another host.
PATHS = ("/v1/sessions", "/v1/drain")
NOT_HERE = 421


class ForwardedRequest(msgspec.Struct, frozen=True):
    """`path`: as it was sent, with its query."""

    method: str
    path: str
    headers: dict[str, str] = {}
    body: bytes = b""

    def encoded(self) -> bytes:
        return msgspec.json.encode(self)


class ForwardedResponse(msgspec.Struct, frozen=True):
    status: int
    headers: dict[str, str] = {}
    body: bytes = b""

    def encoded(self) -> bytes:
        return msgspec.json.encode(self)

    @property
    def title(self) -> str:
        """Of a problem; of anything else, none."""
        if self.headers.get("content-type") != MEDIA_TYPE:
            return ""
        try:
            told: Any = msgspec.json.decode(self.body)
            return str(told["title"])
        except (msgspec.DecodeError, KeyError, TypeError):
            return ""


def request_of(data: bytes) -> ForwardedRequest:
    return msgspec.json.decode(data, type=ForwardedRequest)


def response_of(data: bytes) -> ForwardedResponse:
    """`Problem` for what is none: the other host is of another version, or it is no host."""
    try:
        return msgspec.json.decode(data, type=ForwardedResponse)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        hint = "its version may not fit ours: see /v1/hosts"
        raise Problem(
            502, "OddAnswer", "the host that has the session answered what cannot be read", hint=hint
        ) from exc


class _Caller:
    """In the place of a connection. Whoever asks over the bus cannot be seen to leave: it is answered within its time,
    or cancelled with the task that answers it."""

    def __init__(self) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_local = False


class Application:
    """The application of this process, for requests as bytes. Cancelled, what the request began is cancelled as with a
    client that goes."""

    def __init__(self, app: ASGIApp) -> None:
        """`app`: what is behind the door."""
        self._app = app

    async def __call__(self, data: bytes) -> bytes:
        try:
            request = request_of(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            return _problem(Problem(400, "BadRequest", f"this is no request: {exc}"))
        path, _, query = request.path.partition("?")
        if not any(path == known or path.startswith(f"{known}/") for known in PATHS) or not path.isascii():
            return _problem(Problem(403, "Forbidden", "this is not asked over the bus", hint="only about sessions"))
        return await self._put_through(request, path, query)

    async def _put_through(self, request: ForwardedRequest, path: str, query: str) -> bytes:
        caller = _Caller()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode("ascii"),
            "query_string": query.encode(),
            "root_path": "",
            # None that asks for a stream: those are for who reads the log itself.
            "headers": [
                (name.encode(), request.headers[name].encode("latin-1", "replace"))
                for name in HEADERS_THERE
                if name in request.headers
            ],
            "client": None,
            "server": None,
            "state": {"connection": caller, "client": "bus", "is_forwarded": True},
        }
        is_read = False

        async def receive() -> Message:
            nonlocal is_read
            if is_read:
                await caller.lost
            is_read = True
            return {"type": "http.request", "body": request.body, "more_body": False}

        collected = _Collected()
        await self._app(scope, receive, collected.send)
        return collected.answer()


class _Collected:
    """What an application sends, up to a bound."""

    def __init__(self) -> None:
        self._status = 500
        self._headers: dict[str, str] = {}
        self._pieces: list[bytes] = []
        self._size = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            found = {name.decode().lower(): value.decode("latin-1") for name, value in message.get("headers", ())}
            self._headers = {name: found[name] for name in HEADERS_BACK if name in found}
            return
        self._size += len(message.get("body", b""))
        if self._size <= ANSWER_BYTES_MAX:
            self._pieces.append(message.get("body", b""))

    def answer(self) -> bytes:
        if self._size > ANSWER_BYTES_MAX:
            detail = f"the answer has {self._size} bytes, and at most {ANSWER_BYTES_MAX} go from host to host"
            return _problem(Problem(500, "AnswerTooLarge", detail))
        return ForwardedResponse(self._status, self._headers, b"".join(self._pieces)).encoded()


def _problem(problem: Problem) -> bytes:
    return ForwardedResponse(problem.status, {"content-type": MEDIA_TYPE, **problem.headers}, problem.body()).encoded()
