"""Server administration over HTTP: health, metrics, agents, stacks, settings, login, drain."""

from __future__ import annotations

import os

from starlette.responses import Response

from banksman import __version__
from banksman.errors import UsageError
from banksman.process.tree_hand_over import HOLD_SECONDS_MAX
from banksman.server.access.roles import Action
from banksman.server.api.messages import admin_messages as messages
from banksman.server.api.route import HttpAnswer, Route, RouteCall
from banksman.server.context import Context
from banksman.server.http.auth import CODE_SECONDS_MAX, bearer
from banksman.server.ops import readiness, server_hand_over, stack_dump
from banksman.server.ops.readiness import Unready
from banksman.server.problems import Problem
from banksman.sessions import known_agents

# `expires` of a login by a named token without an end: 9999-01-01 UTC. The member is an integer for
# all clients, and every common date library can show this one in any time zone.
NO_END = 253370764800


async def ready(call: RouteCall) -> HttpAnswer:
    """Readiness: 200 if the server should get new work, else 503 with the reason.

    The response holds nothing else, because the route needs no token.
    """
    if (reason := readiness.find(call.context)) is not None:
        raise reason.problem()
    return HttpAnswer(messages.Health("ok"))


async def health(call: RouteCall) -> HttpAnswer:
    """Readiness in the terms of earlier versions: two reasons, and no look at the disk."""
    reason = readiness.find(call.context)
    if reason in (Unready.DRAINING, Unready.HANDING_OVER):
        raise Unready.DRAINING.problem()
    if reason in (Unready.CLUSTER_UNREACHABLE, Unready.STORE_BROKEN):
        raise Unready.STORE_BROKEN.problem()
    return HttpAnswer(messages.Health("ok"))


async def live(_: RouteCall) -> HttpAnswer:
    """Liveness: the event loop runs.

    A restart would not fix the conditions for which `ready` fails.
    """
    return HttpAnswer(messages.Health("ok"))


async def show_metrics(call: RouteCall) -> HttpAnswer:
    """Metrics for Prometheus."""
    # Import on the first request: this takes as long as the whole startup of a verb with an
    # embedded host.
    from banksman.server.ops import metrics  # noqa: PLC0415

    context: Context = call.context
    return HttpAnswer(
        metrics.render(
            *(context.host, context.streams.counts, context.webhooks, context.rate_limited),
            unready=readiness.reasons(context),
        ),
        media_type=metrics.CONTENT_TYPE,
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
    """Refuse new work, let running turns finish or hand them over, then exit.

    Reads work until then. A hand-over ends the event streams first.
    """
    context: Context = call.context
    body: messages.Drain = call.body
    context.drain(body.timeout, hold_of(context, body))
    return HttpAnswer(messages.Draining(True), 202)


async def upgrade(call: RouteCall) -> HttpAnswer:
    """Continue as another version: hand over what runs, and become that version.

    If it cannot take over, nothing happens, and the answer has the reason.
    """
    context: Context = call.context
    body: messages.Upgrade = call.body
    if context.upgrade is None:
        hint = "upgrade that program"
        raise UsageError("cannot upgrade: this server is part of another program", hint=hint)
    seconds = _hold(context, body.hold_seconds)
    command = ["banksman"] if body.command is None else context.policy.command(body.command)
    version = await context.upgrade.check(command)
    if not context.drain(hold_seconds=seconds):
        raise Problem(409, "Draining", "cannot upgrade: the server is shutting down already")
    context.upgrade.accept(command)
    return HttpAnswer(messages.Upgrading(version), 202)


def hold_of(context: Context, body: messages.Drain) -> float | None:
    """Return the hold of a requested hand-over; None if none is requested."""
    return _hold(context, body.hold_seconds) if body.hand_over else None


def _hold(context: Context, wanted: float | None) -> float:
    # Raises `UsageError` before the server begins to shut down.
    server_hand_over.scope_of(context.settings)
    seconds = context.settings.hold_seconds if wanted is None else wanted
    if not 0 < seconds <= HOLD_SECONDS_MAX:
        hint = f"pass more than 0 and at most {HOLD_SECONDS_MAX:.0f} seconds"
        raise UsageError(f"hold_seconds cannot be {seconds!r}", hint=hint)
    return seconds


async def make_code(call: RouteCall) -> HttpAnswer:
    """Make a one-time code: `URL/#code=CODE` opens the page in a browser and logs it in."""
    context: Context = call.context
    if not context.url:
        raise Problem(409, "NoPage", "this host serves no web page", hint="run `banksman serve`")
    authentication = context.authentication
    assert authentication is not None
    named: str | None = None
    if call.caller.name is not None:
        named = bearer(call.request.headers)
        holder = authentication.caller_of(named)
        if holder is None or holder.name != call.caller.name:
            hint = "open the page at the address of the proxy, which logs the browser in"
            raise Problem(409, "NoPage", "a user of a proxy needs no login link", hint=hint)
    code = authentication.pages.make_code(named)
    return HttpAnswer(messages.LoginCode(code, CODE_SECONDS_MAX, context.url), 201)


async def login(call: RouteCall) -> HttpAnswer:
    """Exchange a one-time code, or the server's token, for a page token.

    The login of a named caller gets the named token, which can be revoked.
    """
    body: messages.Login = call.body
    authentication = call.context.authentication
    if (body.code is None) == (body.token is None):
        hint = "see /openapi.json"
        raise Problem(
            400, "BadRequest", "cannot log in: pass exactly one of code and token", hint=hint
        )
    token = body.token
    if body.code is not None:
        found = authentication.pages.take_code(body.code)
        # The token of its maker may have been revoked meanwhile.
        if found is None or (found.named and authentication.caller_of(found.named) is None):
            hint = "run `banksman page` for a new link"
            message = "cannot log in: this link was used already or has expired"
            raise Problem(401, "NotLetIn", message, hint=hint)
        token = found.named
    if token is not None and (caller := authentication.caller_of(token)) is not None:
        expires = NO_END if caller.expires is None else int(caller.expires)
        return HttpAnswer(messages.LoggedIn(token, expires))
    if token is not None and not authentication.knows(token):
        raise Problem(
            401,
            "NotLetIn",
            "cannot log in: the token is wrong",
            hint="run `banksman page` for a link that needs no token",
        )
    return HttpAnswer(messages.LoggedIn(*authentication.pages.make()))


async def logout(call: RouteCall) -> Response:
    """Revoke the page token of this request, and end its streams.

    The server's token and named tokens stay valid.
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
        path="/readyz",
        action=Action.OPEN_TO_ALL,
        handle=ready,
        summary="Readiness: 200 if the server should get new work, else 503 with the reason.",
        answer=messages.Health,
    ),
    Route(
        method="GET",
        path="/healthz",
        action=Action.OPEN_TO_ALL,
        handle=health,
        summary=(
            "Readiness: 200 if the server takes new work and its store works, "
            "else 503 with the reason."
        ),
        answer=messages.Health,
    ),
    Route(
        method="GET",
        path="/livez",
        action=Action.OPEN_TO_ALL,
        handle=live,
        summary="Liveness: 200 as long as the server answers at all.",
        answer=messages.Health,
    ),
    Route(
        method="GET",
        path="/metrics",
        action=Action.METRICS,
        handle=show_metrics,
        summary="Metrics for Prometheus.",
        answer=str,
        media_type="text/plain",
    ),
    Route(
        method="GET",
        path="/v1/server",
        action=Action.OPERATE,
        handle=server,
        summary="Server limits and settings.",
        answer=messages.Server,
    ),
    Route(
        method="GET",
        path="/v1/stacks",
        action=Action.OPERATE,
        handle=show_stacks,
        summary="Stacks of all tasks and threads of the server.",
        answer=messages.Stacks,
    ),
    Route(
        method="GET",
        path="/v1/agents",
        action=Action.LIST,
        handle=agents,
        summary="List the agents, and whether they are installed.",
        answer=messages.Agents,
    ),
    Route(
        method="POST",
        path="/v1/drain",
        action=Action.OPERATE,
        handle=drain,
        summary="Shut the server down when running turns have ended, or hand them over.",
        body=messages.Drain,
        answer=messages.Draining,
        status=202,
        problems=(422,),
    ),
    Route(
        method="POST",
        path="/v1/upgrade",
        action=Action.OPERATE,
        handle=upgrade,
        summary="Continue as another version of Banksman, if that can take over.",
        body=messages.Upgrade,
        answer=messages.Upgrading,
        status=202,
        problems=(409, 422),
    ),
    Route(
        method="POST",
        path="/v1/login/code",
        action=Action.GRANT,
        handle=make_code,
        summary="Make a one-time code that logs a browser in.",
        answer=messages.LoginCode,
        status=201,
    ),
    Route(
        method="POST",
        path="/v1/login",
        action=Action.OPEN_TO_ALL,
        handle=login,
        summary="Exchange a one-time code, or the token, for a page token.",
        body=messages.Login,
        answer=messages.LoggedIn,
    ),
    Route(
        method="POST",
        path="/v1/logout",
        action=Action.LIST,
        handle=logout,
        summary="Revoke a page token.",
        status=204,
    ),
)
