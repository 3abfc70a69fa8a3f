"""ASGI application: the table of all routes, authentication, and a log of the requests.

`make` builds two applications. Clients get the one behind `AuthMiddleware`. Other hosts get the one
without it: they have authenticated the requests that they forward. `RequestLogger` also adds the
headers for browsers, and answers an unhandled exception with 500.
"""

from __future__ import annotations

import functools
import logging
import time
from pathlib import Path
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.routing import Route as PathRoute
from starlette.routing import Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from banksman.cluster.http.forwarded_request import Application
from banksman.errors import UsageError
from banksman.server import web
from banksman.server.access.named_tokens import NamedTokens, default_path
from banksman.server.access.roles import Action
from banksman.server.access.trusted_proxy import TrustedProxies
from banksman.server.api import (
    access_routes,
    admin_routes,
    command_routes,
    event_routes,
    export_routes,
    hold_routes,
    host_routes,
    session_routes,
    turn_routes,
    usage_routes,
)
from banksman.server.api.route import Endpoint, HttpAnswer, Route, RouteCall
from banksman.server.context import Context
from banksman.server.http.auth import AuthMiddleware, PageTokens, revoked_path
from banksman.server.http.connection import HEADERS_FOR_BROWSERS
from banksman.server.http.rate_limit import RateLimit
from banksman.server.problems import Problem

log = logging.getLogger("banksman.serve")

ROUTES: tuple[Route, ...] = (
    *session_routes.ROUTES,
    *turn_routes.ROUTES,
    *hold_routes.ROUTES,
    *event_routes.ROUTES,
    *export_routes.ROUTES,
    *command_routes.ROUTES,
    *host_routes.ROUTES,
    *admin_routes.ROUTES,
    *usage_routes.ROUTES,
    *access_routes.ROUTES,
)


@functools.cache
def _described() -> bytes:
    # Imported on the first request: the import would slow the start of a verb with an embedded
    # host.
    from banksman.server.api import openapi  # noqa: PLC0415

    return msgspec.json.encode(openapi.describe(ROUTES))


async def _describe(_: RouteCall) -> HttpAnswer:
    return HttpAnswer(_described())


# Everything that a server answers: the API, its description and the page. A test tries each route
# as each role.
SERVED: tuple[Route, ...] = (
    *ROUTES,
    Route(
        method="GET",
        path="/openapi.json",
        action=Action.LIST,
        handle=_describe,
        summary="This.",
    ),
    *web.ROUTES,
)


def make(context: Context, *, token: str, port: int) -> ASGIApp:
    """Build the ASGI application of a server.

    `token`: the server's token. `port`: the port that page tokens are bound to.
    """

    by_path: dict[str, list[Route]] = {}
    for route in SERVED:
        by_path.setdefault(route.path, []).append(route)
    limit = context.settings.body_bytes_max
    router = Router(
        [PathRoute(path, Endpoint(routes, context, limit)) for path, routes in by_path.items()],
        # A path with an extra slash is a different path.
        redirect_slashes=False,
        default=_nothing_here,
    )
    is_open = {route.path for routes in by_path.values() for route in routes if route.is_open}
    names = (*context.settings.hosts, context.settings.bind)
    pages = PageTokens(token, port, revoked_path())
    context.streams.is_revoked = pages.is_revoked
    authentication = context.authentication = AuthMiddleware(
        router,
        token=token,
        pages=pages,
        names=names,
        is_open=is_open.__contains__,
        named=NamedTokens(_named_path()),
        rate_limit=_rate_limit(context),
        proxies=TrustedProxies(context.settings.trusted_proxies),
    )
    context.application = Application(_logged(context, router))
    return _logged(context, authentication)


def _logged(context: Context, app: ASGIApp) -> ASGIApp:
    logged = RequestLogger(app)
    if context.settings.otel_endpoint is None:
        return logged
    from banksman.server.ops.trace_logs import TracedRequests  # noqa: PLC0415

    return TracedRequests(logged)


def _rate_limit(context: Context) -> RateLimit | None:
    per_second = context.settings.requests_per_second
    return None if per_second is None else RateLimit(per_second, context.settings.burst)


def _named_path() -> Path | None:
    """Return the file of named tokens; None if the user has no home folder."""
    try:
        return default_path()
    except UsageError:
        return None


async def _nothing_here(scope: Scope, receive: Receive, send: Send) -> None:
    problem = Problem(404, "NotFound", "this path does not exist", hint="see /openapi.json")
    await problem.response()(scope, receive, send)


class RequestLogger:
    """Log each request as one line when it ends, and each unhandled exception once.

    The line leaves the query string out.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Route by the path as it was sent. A session name may contain an escaped slash, which does
        # not separate two parts of the path.
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
            log.exception(
                "request failed: unhandled exception, a bug in Banksman",
                extra=_ids(scope),
            )
            if not status:
                response: Response = Problem(
                    500,
                    "BugError",
                    "unhandled exception: a bug in Banksman",
                    hint="see the log of the server",
                ).response()
                await response(scope, receive, sent)
        finally:
            if log.isEnabledFor(logging.DEBUG):
                milliseconds = round((time.monotonic() - began) * 1000, 1)
                log.debug(
                    "%s %s %d in %s ms",
                    *(scope["method"], scope["path"], status, milliseconds),
                    extra={**_ids(scope), "status": status, "milliseconds": milliseconds},
                )


def _ids(scope: Scope) -> dict[str, Any]:
    return {"method": scope["method"], "path": scope["path"]}
