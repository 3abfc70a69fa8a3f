"""The application: every route behind the one door. And a line of the log for each request."""

from __future__ import annotations

import functools
import logging
import time
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.routing import Route as PathRoute
from starlette.routing import Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from banksman.cluster.http.forwarded_request import Application
from banksman.server import web
from banksman.server.api import admin_routes, command_routes, event_routes, host_routes, session_routes, turn_routes
from banksman.server.api.route import Endpoint, HttpAnswer, Route, RouteCall
from banksman.server.context import Context
from banksman.server.http.auth import AuthMiddleware, PageTokens, revoked_path
from banksman.server.http.connection import HEADERS_FOR_BROWSERS
from banksman.server.problems import Problem

log = logging.getLogger("banksman.serve")

ROUTES: tuple[Route, ...] = (
    *session_routes.ROUTES,
    *turn_routes.ROUTES,
    *event_routes.ROUTES,
    *command_routes.ROUTES,
    *host_routes.ROUTES,
    *admin_routes.ROUTES,
)


def make(context: Context, *, token: str, port: int) -> ASGIApp:
    @functools.cache
    def described() -> bytes:
        # Not before somebody asks: a verb with a host inside starts as fast as this does.
        from banksman.server.api import openapi  # noqa: PLC0415

        return msgspec.json.encode(openapi.describe(ROUTES))

    async def describe(_: RouteCall) -> HttpAnswer:
        return HttpAnswer(described())

    own = Route(method="GET", path="/openapi.json", handle=describe, summary="This.")
    by_path: dict[str, list[Route]] = {}
    for route in (*ROUTES, own, *web.ROUTES):
        by_path.setdefault(route.path, []).append(route)
    limit = context.settings.body_bytes_max
    router = Router(
        [PathRoute(path, Endpoint(routes, context, limit)) for path, routes in by_path.items()],
        # A path with a slash too many is another path.
        redirect_slashes=False,
        default=_nothing_here,
    )
    is_open = {route.path for routes in by_path.values() for route in routes if route.is_open}
    names = (*context.settings.hosts, context.settings.bind)
    pages = PageTokens(token, port, revoked_path())
    context.streams.is_revoked = pages.is_revoked
    authentication = context.authentication = AuthMiddleware(
        router, token=token, pages=pages, names=names, is_open=is_open.__contains__
    )
    context.application = Application(RequestLogger(router))
    return RequestLogger(authentication)


async def _nothing_here(scope: Scope, receive: Receive, send: Send) -> None:
    problem = Problem(404, "NotFound", "there is nothing at this path", hint="see /openapi.json")
    await problem.response()(scope, receive, send)


class RequestLogger:
    """Around everything: each request is one line when it is over, without its query, and a bug is told once."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # As it was sent. A name may have a slash in it, which is no border between two parts of the path.
        scope["path"] = scope["raw_path"].decode("ascii")
        began = time.monotonic()
        status = 0

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *HEADERS_FOR_BROWSERS]
            await send(message)

        try:
            await self._app(scope, receive, sent)
        except Exception:
            log.exception("! a request has failed: this is a bug", extra=_ids(scope))
            if not status:
                response: Response = Problem(500, "BugError", "a bug of Banksman's own", hint="see its log").response()
                await response(scope, receive, sent)
        finally:
            milliseconds = round((time.monotonic() - began) * 1000, 1)
            log.debug(
                "%s %s %d in %s ms",
                *(scope["method"], scope["path"], status, milliseconds),
                extra={**_ids(scope), "status": status, "milliseconds": milliseconds},
            )


def _ids(scope: Scope) -> dict[str, Any]:
    return {"method": scope["method"], "path": scope["path"]}
