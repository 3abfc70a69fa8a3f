"""Server administration over HTTP: health, metrics, agents, stacks, settings, login, drain."""

from __future__ import annotations

import os

from starlette.responses import Response

from banksman import __version__
from banksman.runtime.host_stats import has_working_store
from banksman.server.api.messages import admin_messages as messages
from banksman.server.api.route import HttpAnswer, Route, RouteCall
from banksman.server.context import Context
from banksman.server.http.auth import CODE_SECONDS_MAX, bearer
from banksman.server.ops import stack_dump
from banksman.server.problems import Problem
from banksman.sessions import known_agents


async def health(call: RouteCall) -> HttpAnswer:
    """Readiness: 200 if the server takes new work and its store works, else 503 with the reason.

    The response holds nothing else, because the route needs no token.
    """
    context: Context = call.context
    if context.is_closing or (context.member is not None and context.member.is_draining):
        raise Problem(
            503,
            "Draining",
            "the server is shutting down and accepts no new work",
            hint="send new work to another server",
        )
    is_cut_off = context.proxy is not None and not context.proxy.cluster.hosts.is_held
    if is_cut_off or not has_working_store(context.host):
        hint = "see the server's log; /livez shows whether the server itself answers"
        raise Problem(503, "StoreBroken", "cannot read or write the store", hint=hint)
    return HttpAnswer(messages.Health("ok"))


async def live(_: RouteCall) -> HttpAnswer:
    """Liveness: the event loop runs.

    A restart would not fix the conditions for which `health` fails.
    """
    return HttpAnswer(messages.Health("ok"))


async def show_metrics(call: RouteCall) -> HttpAnswer:
    """Metrics for Prometheus."""
    # Import on the first request: this takes as long as the whole startup of a verb with an
    # embedded host.
    from banksman.server.ops import metrics  # noqa: PLC0415

    context: Context = call.context
    return HttpAnswer(
        metrics.render(context.host, context.streams.counts), media_type=metrics.CONTENT_TYPE
    )


async def show_stacks(_: RouteCall) -> HttpAnswer:
    """Stacks of all tasks and threads of the server."""
    return HttpAnswer(stack_dump.take())


async def server(call: RouteCall) -> HttpAnswer:
    """Server limits and settings."""
    context: Context = call.context
    return HttpAnswer(
        messages.Server(
            version=__version__,
            pid=os.getpid(),
            started=context.started,
            draining=context.is_closing,
            store=context.store,
            settings=context.settings.shown(),
        )
    )


async def agents(_: RouteCall) -> HttpAnswer:
    """List the agents, and whether they are installed."""
    return HttpAnswer(
        messages.Agents([messages.Agent(**each.facts()) for each in known_agents.find_agents()])
    )


async def drain(call: RouteCall) -> HttpAnswer:
    """Refuse new work, let running turns finish, then exit. Reads work until then."""
    body: messages.Drain = call.body
    call.context.drain(body.timeout)
    return HttpAnswer(messages.Draining(True), 202)


async def make_code(call: RouteCall) -> HttpAnswer:
    """Make a one-time code: `URL/#code=CODE` opens the page in a browser and logs it in."""
    context: Context = call.context
    if not context.url:
        raise Problem(409, "NoPage", "this host serves no web page", hint="run `banksman serve`")
    assert context.authentication is not None
    return HttpAnswer(
        messages.LoginCode(context.authentication.pages.make_code(), CODE_SECONDS_MAX, context.url),
        201,
    )


async def login(call: RouteCall) -> HttpAnswer:
    """Exchange a one-time code, or the server's token, for a page token."""
    body: messages.Login = call.body
    authentication = call.context.authentication
    if (body.code is None) == (body.token is None):
        hint = "see /openapi.json"
        raise Problem(
            400, "BadRequest", "cannot log in: pass exactly one of code and token", hint=hint
        )
    if body.code is not None and not authentication.pages.take_code(body.code):
        hint = "run `banksman page` for a new link"
        raise Problem(
            401, "NotLetIn", "cannot log in: this link was used already or has expired", hint=hint
        )
    if body.token is not None and not authentication.knows(body.token):
        raise Problem(
            401,
            "NotLetIn",
            "cannot log in: the token is wrong",
            hint="run `banksman page` for a link that needs no token",
        )
    return HttpAnswer(messages.LoggedIn(*authentication.pages.make()))


async def logout(call: RouteCall) -> Response:
    """Revoke the page token of this request, and end its streams.

    The server's token stays valid.
    """
    pages = call.context.authentication.pages
    given = bearer(call.request.headers)
    if pages.is_valid(given):
        pages.revoke(given)
        call.context.streams.revoke(given)
    return Response(status_code=204)


ROUTES = (
    Route(
        method="GET",
        path="/healthz",
        handle=health,
        summary=(
            "Readiness: 200 if the server takes new work and its store works, "
            "else 503 with the reason."
        ),
        answer=messages.Health,
        is_open=True,
    ),
    Route(
        method="GET",
        path="/livez",
        handle=live,
        summary="Liveness: 200 as long as the server answers at all.",
        answer=messages.Health,
        is_open=True,
    ),
    Route(
        method="GET",
        path="/metrics",
        handle=show_metrics,
        summary="Metrics for Prometheus.",
        answer=str,
        media_type="text/plain",
    ),
    Route(
        method="GET",
        path="/v1/server",
        handle=server,
        summary="Server limits and settings.",
        answer=messages.Server,
    ),
    Route(
        method="GET",
        path="/v1/stacks",
        handle=show_stacks,
        summary="Stacks of all tasks and threads of the server.",
        answer=messages.Stacks,
    ),
    Route(
        method="GET",
        path="/v1/agents",
        handle=agents,
        summary="List the agents, and whether they are installed.",
        answer=messages.Agents,
    ),
    Route(
        method="POST",
        path="/v1/drain",
        handle=drain,
        summary="Shut the server down when running turns have ended.",
        body=messages.Drain,
        answer=messages.Draining,
        status=202,
    ),
    Route(
        method="POST",
        path="/v1/login/code",
        handle=make_code,
        summary="Make a one-time code that logs a browser in.",
        answer=messages.LoginCode,
        status=201,
    ),
    Route(
        method="POST",
        path="/v1/login",
        handle=login,
        summary="Exchange a one-time code, or the token, for a page token.",
        body=messages.Login,
        answer=messages.LoggedIn,
        is_open=True,
    ),
    Route(
        method="POST", path="/v1/logout", handle=logout, summary="Revoke a page token.", status=204
    ),
)
