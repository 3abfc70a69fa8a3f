"""Type of an API route, and the ASGI endpoint that decodes, runs and answers its requests.

A route declares its method, path, body, query, response and handler. The table of routes is the
API: requests are decoded by it, and the OpenAPI description is generated from it. The routes are in
the `*_routes.py` modules, and `app.py` has the table.

On a shared store, the endpoint passes a request about another host's session to
`cluster/http/owner_proxy.py`, which forwards it. `OwnerFallback` says what to do if that host does
not answer.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import unquote

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from banksman.errors import BanksmanError, Unanswered, Unreachable, no_room
from banksman.server.access import authorization
from banksman.server.access.roles import ADMIN, Action, Caller
from banksman.server.api.messages.common_messages import Body, Query
from banksman.server.http.connection import BODY_SECONDS_MAX, SlicedResponse
from banksman.server.problems import Problem, away, problem_of

_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
_KEY = re.compile(r"[\x21-\x7e]{1,255}")
# Body limits for unauthenticated clients. A login is smaller, and is sent in one piece.
STRANGER_BODY_BYTES_MAX = 4 << 10
STRANGER_BODY_SECONDS_MAX = 10.0

# Beginning of the paths that name a session.
SESSION_PATH = "/v1/sessions/{id}"

Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]
B = TypeVar("B", bound=Body)
Q = TypeVar("Q", bound=Query)
R = TypeVar("R")


class OwnerFallback(enum.Enum):
    """How to handle a request about another host's session if that host does not answer.

    See cluster/http/owner_proxy.py.
    """

    # Answer from the log.
    READS = enum.auto()
    # Retry with the idempotency key: the request is done once.
    KEYED = enum.auto()
    # Retry if no host received it. The request names its target, so it means the same a moment
    # later.
    NAMED = enum.auto()
    # Never retry: the request refers to the present moment.
    NOW = enum.auto()
    # The request ends a session. A session without an owner and without waiting asks needs no owner
    # for it.
    ENDS = enum.auto()


class RouteCall(msgspec.Struct, frozen=True):
    """A decoded request.

    `context`: the server that received it. `data`: the raw body. `is_forwarded`: another host sent
    it here, because this host owns the session. `caller`: the sender, as authenticated.
    """

    context: Any
    request: Request
    path: Mapping[str, str]
    body: Any
    query: Any
    key: str | None
    data: bytes = b""
    is_forwarded: bool = False
    caller: Caller = ADMIN

    def header(self, name: str) -> str | None:
        return self.request.headers.get(name)


class HttpAnswer(msgspec.Struct, frozen=True):
    """A successful response: a value to encode as JSON, or raw bytes.

    `on_unsent`: called instead of sending if the client has disconnected. It gives back what was
    reserved for that client.
    """

    value: Any = None
    status: int = 200
    headers: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    media_type: str = "application/json"
    on_unsent: Callable[[], None] | None = None

    def response(self) -> Response:
        if self.value is None:
            return Response(status_code=self.status, headers=dict(self.headers))
        return SlicedResponse(
            self.encoded().value, self.status, dict(self.headers), self.media_type
        )

    @property
    def made(self) -> str:
        """The id of the created object, from its `Location`."""
        return self.headers["Location"].rpartition("/")[2]

    def encoded(self) -> HttpAnswer:
        """Return the same response with its value encoded, so that it can be sent repeatedly."""
        data = self.value
        if data is not None and not isinstance(data, bytes):
            data = msgspec.json.encode(data, enc_hook=str)
        return HttpAnswer(data, self.status, self.headers, self.media_type)


Result = HttpAnswer | Response | Asgi
Handle = Callable[[RouteCall], Coroutine[Any, Any, Result]]


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One operation of the API.

    `action`: what the route does, which decides the roles that may use it.
    `problems`: error statuses besides the common ones. `streams`: media types of endless responses,
    if `Accept` names one. `has_key`: the route takes an `Idempotency-Key`. `waits`: the handler
    changes nothing and may take long, so it is cancelled when the client disconnects. `to_owner`:
    the owner of the session must handle the request, with this fallback.
    """

    method: str
    path: str
    action: Action
    handle: Handle
    summary: str
    answer: Any = None
    status: int = 200
    body: type[Body] | None = None
    query: type[Query] | None = None
    problems: Sequence[int] = ()
    streams: Sequence[str] = ()
    has_key: bool = False
    waits: bool = False
    to_owner: OwnerFallback | None = None
    media_type: str = "application/json"

    @property
    def is_open(self) -> bool:
        """Whether the route needs no token."""
        return self.action is Action.OPEN_TO_ALL


class Endpoint:
    """ASGI application for all routes of one path."""

    def __init__(self, routes: Sequence[Route], context: Any, body_bytes_max: int) -> None:
        self._routes = {route.method: route for route in routes}
        self._context = context
        self._body_bytes_max = body_bytes_max
        methods = {*self._routes, *(["HEAD"] if "GET" in self._routes else [])}
        self._allow = ", ".join(sorted(methods))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        method: str = scope["method"]
        route = self._routes.get("GET" if method == "HEAD" else method)
        response: Result
        try:
            if route is None:
                hint = f"use {self._allow}"
                raise Problem(
                    405,
                    "WrongMethod",
                    f"this path does not support {method}",
                    hint=hint,
                    headers={"Allow": self._allow},
                )
            call = await self._taken_apart(route, request)
            handling = _handled(route, call)
            response = await (_while_there(handling, request) if route.waits else handling)
        except Problem as problem:
            response = problem.response()
        except BanksmanError as exc:
            response = problem_of(exc, is_closing=self._context.is_closing).response()
        except ClientDisconnect:
            return
        except OSError as exc:
            if exc.errno not in _NO_ROOM:
                raise
            response = problem_of(no_room("answering the request", exc)).response()
        if (
            isinstance(response, HttpAnswer)
            and response.on_unsent is not None
            and request.state.connection.lost.done()
        ):
            # Check as late as possible: the response is written next. A client that disconnects
            # after that may have read it.
            response.on_unsent()
            return
        await (response.response() if isinstance(response, HttpAnswer) else response)(
            scope, receive, send
        )

    async def _taken_apart(self, route: Route, request: Request) -> RouteCall:
        path = {name: unquote(value) for name, value in request.path_params.items()}
        caller: Caller = request.state.caller
        id = path["id"] if route.path.startswith(SESSION_PATH) else None
        is_forwarded = getattr(request.state, "is_forwarded", False)
        if not is_forwarded:
            checked = await authorization.check_route(self._context, caller, route.action, id)
            if checked is not None:
                # A name may move to another session while the body arrives.
                id = path["id"] = checked.id
        key = request.headers.get("idempotency-key")
        if key is not None and _KEY.fullmatch(key) is None:
            hint = "use 1 to 255 visible ASCII characters"
            raise Problem(400, "BadKey", "invalid Idempotency-Key", hint=hint)
        data = b"" if route.body is None else await self._read(request)
        call = RouteCall(
            context=self._context,
            request=request,
            path=path,
            body=None if route.body is None else self._body(route.body, request, data),
            query=None if route.query is None else _query(route.query, request),
            key=key,
            data=data,
            is_forwarded=is_forwarded,
            caller=caller,
        )
        if not is_forwarded:
            await authorization.check_body(
                self._context, caller, route.action, call.body, id=id, key=key
            )
        return call

    def _body(self, kind: type[B], request: Request, data: bytes) -> B:
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if data and content_type != "application/json":
            hint = "send `Content-Type: application/json`"
            raise Problem(415, "NotJson", "the body must be JSON", hint=hint)
        try:
            return msgspec.json.decode(data or b"{}", type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            hint = "see /openapi.json"
            raise Problem(400, "BadRequest", f"invalid body: {exc}", hint=hint) from exc
        except RecursionError as exc:
            raise Problem(
                400, "BadRequest", "the body is nested too deeply", hint="see /openapi.json"
            ) from exc

    async def _read(self, request: Request) -> bytes:
        # Another host has authenticated a forwarded request.
        is_admitted = getattr(request.state, "is_admitted", True)
        size_max = (
            self._body_bytes_max
            if is_admitted
            else min(self._body_bytes_max, STRANGER_BODY_BYTES_MAX)
        )
        seconds_max = (
            BODY_SECONDS_MAX if is_admitted else min(BODY_SECONDS_MAX, STRANGER_BODY_SECONDS_MAX)
        )
        hint = "send less, or raise body_bytes_max in the settings"
        if not is_admitted:
            hint = "send a token, or a smaller body"
        too_large = Problem(
            413, "BodyTooLarge", f"the body is too large: at most {size_max} bytes", hint=hint
        )
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length) > size_max:
            raise too_large
        pieces: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(seconds_max):
                async for piece in request.stream():
                    size += len(piece)
                    if size > size_max:
                        raise too_large
                    pieces.append(piece)
        except TimeoutError as exc:
            raise Problem(
                408, "TooSlow", f"the body arrived too slowly: at most {seconds_max:g} s"
            ) from exc
        return b"".join(pieces)


async def _handled(route: Route, call: RouteCall) -> Result:
    """Handle the request here, or forward it to the session's owner."""
    proxy = call.context.proxy
    if proxy is not None and route.path.startswith("/v1/sessions/"):
        try:
            await proxy.know(call.path["id"])
        except Unreachable as exc:
            raise away(f"cannot look up session {call.path['id']!r:.100}", exc) from exc
    try:
        if route.to_owner is None or proxy is None:
            return await route.handle(call)
        return await proxy.answer(call, route)
    except Unanswered as exc:
        if route.method != "GET":
            raise
        raise away("cannot complete the read", exc) from exc


async def _while_there(work: Coroutine[Any, Any, R], request: Request) -> R:
    """Run the handler while the client is connected, and cancel it when the client disconnects.

    Nothing else would end it: a search, for example, is a process.
    """
    lost: asyncio.Future[None] = request.state.connection.lost
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task, lost), return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
        if not task.cancelled():
            # Retrieve the exception, so that asyncio does not log it if this wait was cancelled.
            task.exception()
    if task.cancelled():
        raise ClientDisconnect
    return task.result()


def _query(kind: type[Q], request: Request) -> Q:
    try:
        return msgspec.convert(dict(request.query_params), kind, strict=False)
    except msgspec.ValidationError as exc:
        raise Problem(400, "BadRequest", f"invalid query: {exc}", hint="see /openapi.json") from exc
