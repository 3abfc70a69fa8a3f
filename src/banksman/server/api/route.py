"""A route: which call of the API it is, what it takes, what it answers, and which function does it.

The table of routes is the API. Requests are taken apart by it, and the OpenAPI is made from it.
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
from banksman.server.api.messages.common_messages import Body, Query
from banksman.server.http.connection import BODY_SECONDS_MAX, SlicedResponse
from banksman.server.problems import Problem, away, problem_of

_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
_KEY = re.compile(r"[\x21-\x7e]{1,255}")
# What a client that has shown no token may send: a login is smaller, and is sent at once.
STRANGER_BODY_BYTES_MAX = 4 << 10
STRANGER_BODY_SECONDS_MAX = 10.0

Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]
B = TypeVar("B", bound=Body)
Q = TypeVar("Q", bound=Query)
R = TypeVar("R")


class OwnerFallback(enum.Enum):
    """What becomes of a request about a session that another host has, if that one does not answer: see
    cluster/http/owner_proxy.py.
    """

    # The log is asked instead.
    READS = enum.auto()
    # It is sent again with its key: it is done once.
    KEYED = enum.auto()
    # It is sent again if nobody got it: it names what it is about, and means the same a moment later.
    NAMED = enum.auto()
    # It means this moment, and is not sent again.
    NOW = enum.auto()
    # What nobody has needs no owner for it.
    ENDS = enum.auto()


class RouteCall(msgspec.Struct, frozen=True):
    """One request, taken apart. `context` is the server that it came to. `data`: its body, as it came. `is_forwarded`:
    another host has sent it here, since we have the session."""

    context: Any
    request: Request
    path: Mapping[str, str]
    body: Any
    query: Any
    key: str | None
    data: bytes = b""
    is_forwarded: bool = False

    def header(self, name: str) -> str | None:
        return self.request.headers.get(name)


class HttpAnswer(msgspec.Struct, frozen=True):
    """A success: a value to be shown as JSON, or bytes as they are. `on_unsent` is called instead of sending it if the
    client has disconnected by then: it gives back what was taken for that client."""

    value: Any = None
    status: int = 200
    headers: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    media_type: str = "application/json"
    on_unsent: Callable[[], None] | None = None

    def response(self) -> Response:
        if self.value is None:
            return Response(status_code=self.status, headers=dict(self.headers))
        return SlicedResponse(self.encoded().value, self.status, dict(self.headers), self.media_type)

    @property
    def made(self) -> str:
        """The id of what was made, by its address."""
        return self.headers["Location"].rpartition("/")[2]

    def encoded(self) -> HttpAnswer:
        """The same in bytes, to be sent to anybody."""
        data = self.value
        if data is not None and not isinstance(data, bytes):
            data = msgspec.json.encode(data, enc_hook=str)
        return HttpAnswer(data, self.status, self.headers, self.media_type)


Result = HttpAnswer | Response | Asgi
Handle = Callable[[RouteCall], Coroutine[Any, Any, Result]]


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """`problems`: the statuses it may answer besides those that every route may. `streams`: the media types that it
    answers without end, if `Accept` asks for one. `has_key`: it takes an `Idempotency-Key`. `waits`: it changes nothing
    and may take long, which is not for a client that is gone. `to_owner`: it is for the host that has the session."""

    method: str
    path: str
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
    is_open: bool = False
    media_type: str = "application/json"


class Endpoint:
    """All routes of one path, as an ASGI application."""

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
                hint = f"this path takes {self._allow}"
                raise Problem(
                    405, "WrongMethod", f"there is no {method} here", hint=hint, headers={"Allow": self._allow}
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
            response = problem_of(no_room("answer this", exc)).response()
        if isinstance(response, HttpAnswer) and response.on_unsent is not None and request.state.connection.lost.done():
            # As late as can be: the answer is written next. A client that goes after that may have read it.
            response.on_unsent()
            return
        await (response.response() if isinstance(response, HttpAnswer) else response)(scope, receive, send)

    async def _taken_apart(self, route: Route, request: Request) -> RouteCall:
        key = request.headers.get("idempotency-key")
        if key is not None and _KEY.fullmatch(key) is None:
            raise Problem(400, "BadKey", "this cannot be an Idempotency-Key", hint="1 to 255 visible ASCII characters")
        data = b"" if route.body is None else await self._read(request)
        return RouteCall(
            context=self._context,
            request=request,
            path={name: unquote(value) for name, value in request.path_params.items()},
            body=None if route.body is None else self._body(route.body, request, data),
            query=None if route.query is None else _query(route.query, request),
            key=key,
            data=data,
            is_forwarded=getattr(request.state, "is_forwarded", False),
        )

    def _body(self, kind: type[B], request: Request, data: bytes) -> B:
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if data and content_type != "application/json":
            raise Problem(415, "NotJson", "the body must be JSON", hint="Content-Type: application/json")
        try:
            return msgspec.json.decode(data or b"{}", type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise Problem(400, "BadRequest", f"the body is not as it must be: {exc}", hint="see /openapi.json") from exc
        except RecursionError as exc:
            raise Problem(400, "BadRequest", "the body is nested too deeply", hint="see /openapi.json") from exc

    async def _read(self, request: Request) -> bytes:
        is_admitted = getattr(request.state, "is_admitted", True)  # What another host sends on was let in there.
        size_max = self._body_bytes_max if is_admitted else min(self._body_bytes_max, STRANGER_BODY_BYTES_MAX)
        seconds_max = BODY_SECONDS_MAX if is_admitted else min(BODY_SECONDS_MAX, STRANGER_BODY_SECONDS_MAX)
        hint = "send less, or raise body_bytes_max in the settings" if is_admitted else "send a token, or less"
        too_large = Problem(413, "BodyTooLarge", f"a body has at most {size_max} bytes", hint=hint)
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
            raise Problem(408, "TooSlow", f"a body takes at most {seconds_max:g} s") from exc
        return b"".join(pieces)


async def _handled(route: Route, call: RouteCall) -> Result:
    """Here; or, where many hosts share the store, by whoever has the session."""
    proxy = call.context.proxy
    if proxy is not None and route.path.startswith("/v1/sessions/"):
        try:
            await proxy.know(call.path["id"])
        except Unreachable as exc:
            raise away(f"whether there is a session {call.path['id']!r:.100} is not known here now", exc) from exc
    try:
        if route.to_owner is None or proxy is None:
            return await route.handle(call)
        return await proxy.answer(call, route)
    except Unanswered as exc:
        if route.method != "GET":
            raise
        raise away("it cannot be read now", exc) from exc


async def _while_there(work: Coroutine[Any, Any, R], request: Request) -> R:
    """For as long as the client is. Nobody else would end what waits for it: a search, say, that is a process."""
    lost: asyncio.Future[None] = request.state.connection.lost
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task, lost), return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
        if not task.cancelled():
            task.exception()  # Looked at, also where we are cancelled ourselves and nobody hears of it.
    if task.cancelled():
        raise ClientDisconnect
    return task.result()


def _query(kind: type[Q], request: Request) -> Q:
    try:
        return msgspec.convert(dict(request.query_params), kind, strict=False)
    except msgspec.ValidationError as exc:
        raise Problem(400, "BadRequest", f"the query is not as it must be: {exc}", hint="see /openapi.json") from exc
