"""The hosts that share a store: who they are, and how one is told to go."""

from __future__ import annotations

import msgspec

from banksman.errors import NotFound
from banksman.serve.api import messages
from banksman.serve.api.routes import Answer, Call, Result, Route
from banksman.serve.context import Context
from banksman.serve.forwarding import Request, Response
from banksman.serve.front import answered
from banksman.serve.problems import Problem
from banksman.store.bus import HostSeen

# What a host is called on the bus, beside the sessions that it has.
HOST = "host:"
DRAIN_SECONDS_MAX = 10.0


async def list_hosts(call: Call) -> Answer:
    """None: the store is of this machine alone."""
    context: Context = call.context
    if context.front is None:
        return Answer(messages.Hosts([]))
    fleet = context.front.fleet
    return Answer(
        messages.Hosts(
            [shown(host, is_here=host.id == fleet.own_id, is_silent=fleet.is_silent(host)) for host in fleet.all()]
        )
    )


async def drain(call: Call) -> Result:
    """It says that it will; `GET /v1/hosts` shows what is left on it, until it is gone."""
    context: Context = call.context
    body: messages.Drain = call.body
    host = _host(context, call.path["id"])
    assert context.front is not None
    if host.id == context.front.fleet.own_id:
        context.drain(body.timeout)
        return Answer(messages.Draining(True), 202)
    request = Request("POST", "/v1/drain", {"content-type": "application/json"}, msgspec.json.encode(body))
    answer = await context.front.ask(f"{HOST}{host.id}", request, DRAIN_SECONDS_MAX)
    if isinstance(answer, Response):
        return answered(answer)
    hint = "try again; it may have gone already, or is silent: then its sessions are taken over when its lease ends"
    raise Problem(503, "Unreachable", f"{host.name} does not answer", hint=hint, ids={"host": host.id})


def _host(context: Context, id_or_name: str) -> HostSeen:
    found = [] if context.front is None else context.front.fleet.find(id_or_name)
    if not found:
        raise NotFound(f"there is no host {id_or_name!r:.100}", hint="see /v1/hosts")
    if len(found) > 1:
        ids = ", ".join(host.id for host in found)
        raise Problem(409, "ManyHosts", f"several hosts are called {id_or_name!r:.100}: {ids}", hint="say it by the id")
    return found[0]


def shown(host: HostSeen, *, is_here: bool, is_silent: bool = False) -> messages.Host:
    return messages.Host(
        id=host.id,
        name=host.name,
        pid=host.pid,
        labels=list(host.labels),
        agents=list(host.agents),
        room=host.room,
        used=host.used,
        version=host.version,
        draining=host.is_draining,
        since=host.since,
        here=is_here,
        silent=is_silent,
    )


ROUTES = (
    Route(
        method="GET",
        path="/v1/hosts",
        handle=list_hosts,
        summary="The hosts that share the store; none where it is of this machine alone.",
        answer=messages.Hosts,
    ),
    Route(
        method="POST",
        path="/v1/hosts/{id}/drain",
        handle=drain,
        summary="Let a host's sessions go on elsewhere, and end it. By its id or its name.",
        body=messages.Drain,
        answer=messages.Draining,
        status=202,
        problems=(409, 502),
    ),
)
