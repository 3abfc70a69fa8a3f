"""HTTP requests and responses as bytes between hosts, and the owner's side that runs a request.

`owner_proxy.py` is the sender: it looks up the owner, sends and retries. `Application` is the
owner's side. It accepts only the paths in `PATHS`, and limits the size of an answer.

There is no second protocol beside the HTTP API. A front end parses a request and finds that another
host owns the session. It sends the request to that host: method, path, the few relevant headers and
the body. The owner runs it through its own application, as if it came from a socket. NATS has
authenticated the sender, so there is no authentication here. The policy of the starting host
decides what callers may start.

A forwarded request is never forwarded again. A host that does not have the session answers 421, and
the sender looks up the owner again.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message

from banksman.server.access.roles import Caller, Role
from banksman.server.problems import MEDIA_TYPE, Problem

# No answer about a session is larger: pages of events are read from the log and never forwarded.
ANSWER_BYTES_MAX = 64 << 20
# Headers that matter to the owner, and headers that matter to the client.
HEADERS_THERE = ("content-type", "idempotency-key", "traceparent")
HEADERS_BACK = ("content-type", "location", "retry-after")
# The only paths that may be forwarded.
PATHS = ("/v1/sessions", "/v1/drain")
NOT_HERE = 421


class ForwardedRequest(msgspec.Struct, frozen=True):
    """An HTTP request in transit.

    `path`: as it was sent, with its query. `caller`: the name of its sender, which the front end
    has authenticated and authorized, and `role` its role. They are no headers, so that no client
    can set them.
    """

    method: str
    path: str
    headers: dict[str, str] = {}
    body: bytes = b""
    caller: str | None = None
    role: Role = Role.ADMIN

    def encoded(self) -> bytes:
        return msgspec.json.encode(self)


class ForwardedResponse(msgspec.Struct, frozen=True):
    """An HTTP response in transit."""

    status: int
    headers: dict[str, str] = {}
    body: bytes = b""

    def encoded(self) -> bytes:
        return msgspec.json.encode(self)

    @property
    def title(self) -> str:
        """The title of a problem; empty for any other response."""
        if self.headers.get("content-type") != MEDIA_TYPE:
            return ""
        try:
            told: Any = msgspec.json.decode(self.body)
            return str(told["title"])
        except (msgspec.DecodeError, KeyError, TypeError):
            return ""


def request_of(data: bytes) -> ForwardedRequest:
    """Decode a request."""
    return msgspec.json.decode(data, type=ForwardedRequest)


def response_of(data: bytes) -> ForwardedResponse:
    """Decode a response. Raises `Problem` if it is invalid: the other host runs another version."""
    try:
        return msgspec.json.decode(data, type=ForwardedResponse)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        hint = "compare the versions of the hosts: see /v1/hosts"
        raise Problem(
            502,
            "OddAnswer",
            "cannot decode the response of the host that owns the session",
            hint=hint,
        ) from exc


class _Caller:
    """Stand-in for the client's connection.

    A disconnect of the remote caller is not visible. The request is answered in time, or its task
    is cancelled.
    """

    def __init__(self) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_local = False


class Application:
    """The ASGI application of this process, for forwarded requests.

    Cancelling a call cancels the request, as a disconnect of its client does.
    """

    def __init__(self, app: ASGIApp) -> None:
        """Wrap `app`, the application behind the authentication middleware."""
        self._app = app

    async def __call__(self, data: bytes) -> bytes:
        try:
            request = request_of(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            return _problem(Problem(400, "BadRequest", f"invalid forwarded request: {exc}"))
        path, _, query = request.path.partition("?")
        if (
            not any(path == known or path.startswith(f"{known}/") for known in PATHS)
            or not path.isascii()
        ):
            return _problem(
                Problem(
                    403,
                    "Forbidden",
                    "this path cannot be forwarded",
                    hint="forward requests about sessions only",
                ),
            )
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
            # No header asks for a stream: stream readers read the log themselves.
            "headers": [
                (name.encode(), request.headers[name].encode("latin-1", "replace"))
                for name in HEADERS_THERE
                if name in request.headers
            ],
            "client": None,
            "server": None,
            "state": {
                "connection": caller,
                "client": "bus",
                "is_forwarded": True,
                "caller": Caller(request.caller, request.role),
            },
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
    """Collect the response of an application, up to a size limit."""

    def __init__(self) -> None:
        self._status = 500
        self._headers: dict[str, str] = {}
        self._pieces: list[bytes] = []
        self._size = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            found = {
                name.decode().lower(): value.decode("latin-1")
                for name, value in message.get("headers", ())
            }
            self._headers = {name: found[name] for name in HEADERS_BACK if name in found}
            return
        self._size += len(message.get("body", b""))
        if self._size <= ANSWER_BYTES_MAX:
            self._pieces.append(message.get("body", b""))

    def answer(self) -> bytes:
        if self._size > ANSWER_BYTES_MAX:
            size = f"{self._size} bytes, at most {ANSWER_BYTES_MAX}"
            detail = f"the response is too large to forward: {size}"
            return _problem(Problem(500, "AnswerTooLarge", detail))
        return ForwardedResponse(self._status, self._headers, b"".join(self._pieces)).encoded()


def _problem(problem: Problem) -> bytes:
    return ForwardedResponse(
        problem.status, {"content-type": MEDIA_TYPE, **problem.headers}, problem.body()
    ).encoded()
