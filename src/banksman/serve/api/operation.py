"""The server itself over HTTP: health, metrics, agents, stacks, login, drain, and what holds here."""

from __future__ import annotations

import os

from starlette.responses import Response

from banksman import __version__
from banksman.run.sessions import known
from banksman.serve.api.messages import operation as messages
from banksman.serve.api.routes import Answer, Call, Route
from banksman.serve.context import Context
from banksman.serve.problems import Problem
from banksman.serve.running import stacks


async def health(_: Call) -> Answer:
    """Says no more than that: everybody may ask."""
    return Answer(messages.Health("ok"))


async def show_metrics(call: Call) -> Answer:
    # Not before somebody asks: it takes as long to load as all the rest of a verb that has a host inside.
    from banksman.serve.running import metrics  # noqa: PLC0415

    context: Context = call.context
    return Answer(metrics.render(context.host, context.streams.counts), media_type=metrics.CONTENT_TYPE)


async def show_stacks(_: Call) -> Answer:
    return Answer(stacks.take())


async def server(call: Call) -> Answer:
    context: Context = call.context
    return Answer(
        messages.Server(
            version=__version__,
            pid=os.getpid(),
            started=context.started,
            draining=context.is_closing,
            store=context.store,
            settings=context.settings.shown(),
        )
    )


async def agents(_: Call) -> Answer:
    return Answer(messages.Agents([messages.Agent(**each.facts()) for each in known.look()]))


async def drain(call: Call) -> Answer:
    """Take nothing new, finish what runs, then end. Reading goes on until then."""
    body: messages.Drain = call.body
    call.context.drain(body.timeout)
    return Answer(messages.Draining(True), 202)


async def login(call: Call) -> Response:
    """For the page: the token once, for a cookie that a browser sends by itself and no script can read."""
    body: messages.Login = call.body
    door = call.context.door
    if not door.knows(body.token):
        raise Problem(
            401, "NotLetIn", "that is not the token", hint="take the URL that the server prints when it starts"
        )
    response = Response(status_code=204)
    response.set_cookie(**door.cookie(), secure=call.request.url.scheme == "https")
    return response


async def logout(call: Call) -> Response:
    response = Response(status_code=204)
    response.delete_cookie(call.context.door.cookie_name, path="/", httponly=True, samesite="strict")
    return response


ROUTES = (
    Route(method="GET", path="/healthz", handle=health, summary="Is it there?", answer=messages.Health, is_open=True),
    Route(
        method="GET",
        path="/metrics",
        handle=show_metrics,
        summary="Numbers for Prometheus.",
        answer=str,
        media_type="text/plain",
    ),
    Route(method="GET", path="/v1/server", handle=server, summary="What holds here.", answer=messages.Server),
    Route(
        method="GET",
        path="/v1/stacks",
        handle=show_stacks,
        summary="Where every task and every thread of the server stands.",
        answer=messages.Stacks,
    ),
    Route(
        method="GET",
        path="/v1/agents",
        handle=agents,
        summary="The agents that are known, and whether they are found here.",
        answer=messages.Agents,
    ),
    Route(
        method="POST",
        path="/v1/drain",
        handle=drain,
        summary="Finish what runs, then end.",
        body=messages.Drain,
        answer=messages.Draining,
        status=202,
    ),
    Route(
        method="POST",
        path="/v1/login",
        handle=login,
        summary="The token, for a cookie.",
        body=messages.Login,
        status=204,
        is_open=True,
    ),
    Route(method="POST", path="/v1/logout", handle=logout, summary="Forget the cookie.", status=204),
)
