"""Hosts over HTTP: list the hosts that share a store, and drain one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from banksman.cluster.http.forwarded_request import ForwardedRequest, ForwardedResponse
from banksman.cluster.http.host_view import FRONT
from banksman.cluster.http.owner_proxy import OwnerProxy, answered
from banksman.cluster.interfaces import HostSeen
from banksman.errors import BanksmanError, NotFound, UsageError
from banksman.server.access.roles import Action
from banksman.server.api.messages import admin_messages as messages
from banksman.server.api.messages.admin_messages import Drain
from banksman.server.api.route import HttpAnswer, Result, Route, RouteCall
from banksman.server.context import Context
from banksman.server.problems import Problem

# Prefix of a host's own address on the bus, beside those of its sessions.
HOST = "host:"
DRAIN_SECONDS_MAX = 10.0
# Limits for reading what a host's sessions need, which is in their logs. For sessions beyond them
# it stays unknown.
NEEDS_MAX = 64
NEEDS_SECONDS_MAX = 1.0


async def list_hosts(call: RouteCall) -> HttpAnswer:
    """List the hosts that share the store; empty if the store belongs to this machine alone."""
    context: Context = call.context
    if context.proxy is None:
        return HttpAnswer(messages.Hosts([]))
    hosts_view = context.proxy.hosts_view
    owners = {
        owner.address.partition("@")[0]
        for owner, _ in context.host.log.owned()
        if owner is not None
    }
    # A command-line client joins the bus for a moment only, and owns no sessions.
    hosts = [
        host for host in hosts_view.all() if host.room or FRONT in host.labels or host.id in owners
    ]
    return HttpAnswer(
        messages.Hosts(
            [
                shown(
                    host, is_here=host.id == hosts_view.own_id, is_silent=hosts_view.is_silent(host)
                )
                for host in hosts
            ]
        )
    )


async def drain(call: RouteCall) -> Result:
    """Shut a host down. Until it is gone, `GET /v1/hosts` shows the sessions that it still has."""
    context: Context = call.context
    body: Drain = call.body
    host = _host(context, call.path["id"])
    proxy = context.proxy
    assert proxy is not None
    if body.hand_over:
        hint = "drain it without a hand-over: its sessions continue on other hosts"
        raise UsageError("cannot hand over: the store belongs to a cluster", hint=hint)
    # Before the shutdown starts: a moment later the host has given up some of its sessions.
    outlook = await _outlook(context, proxy, host)
    if host.id == proxy.hosts_view.own_id:
        context.drain(body.timeout)
        return HttpAnswer(outlook, 202)
    request = ForwardedRequest(
        "POST", "/v1/drain", {"content-type": "application/json"}, msgspec.json.encode(body)
    )
    answer = await proxy.ask(f"{HOST}{host.id}", request, DRAIN_SECONDS_MAX)
    if isinstance(answer, ForwardedResponse):
        return HttpAnswer(outlook, 202) if answer.status == 202 else answered(answer)
    hint = "try again; if the host has died, other hosts take its sessions over when its lease ends"
    raise Problem(
        503,
        "Unreachable",
        f"cannot drain host {host.name}: it does not answer",
        hint=hint,
        ids={"host": host.id},
    )


async def _outlook(context: Context, proxy: OwnerProxy, host: HostSeen) -> messages.HostDraining:
    """Predict which hosts will take the sessions of this host."""
    owned = [
        known.id
        for known in context.host.log.sessions()
        if known.owner and known.owner.address.partition("@")[0] == host.id
    ]
    needs: dict[str, Sequence[str]] = {}

    async def look(session: str) -> None:
        with suppress(BanksmanError):
            needs[session] = await context.host.need_of(session)

    with suppress(TimeoutError):
        async with asyncio.timeout(NEEDS_SECONDS_MAX):
            await asyncio.gather(*map(look, owned[:NEEDS_MAX]))
    takers = proxy.hosts_view.takers([needs.get(session, ()) for session in owned], but=host.id)
    return messages.HostDraining(
        draining=True,
        sessions=len(owned),
        hosts=sorted({taker for taker in takers if taker is not None}),
        waiting=takers.count(None),
    )


def _host(context: Context, id_or_name: str) -> HostSeen:
    found = [] if context.proxy is None else context.proxy.hosts_view.find(id_or_name)
    if not found:
        raise NotFound(f"there is no host {id_or_name!r:.100}", hint="see /v1/hosts")
    if len(found) > 1:
        ids = ", ".join(host.id for host in found)
        raise Problem(
            409,
            "ManyHosts",
            f"several hosts have the name {id_or_name!r:.100}: {ids}",
            hint="use the id of the host",
        )
    return found[0]


def shown(host: HostSeen, *, is_here: bool, is_silent: bool = False) -> messages.Host:
    return messages.Host(
        id=host.id,
        name=host.name,
        pid=host.pid,
        labels=[label for label in host.labels if label != FRONT],
        agents=list(host.agents),
        room=host.room,
        used=host.used,
        version=host.version,
        draining=host.is_draining,
        since=host.since,
        here=is_here,
        silent=is_silent,
        front=FRONT in host.labels,
    )


ROUTES = (
    Route(
        method="GET",
        path="/v1/hosts",
        action=Action.OPERATE,
        handle=list_hosts,
        summary="List the hosts that share the store.",
        answer=messages.Hosts,
    ),
    Route(
        method="POST",
        path="/v1/hosts/{id}/drain",
        action=Action.OPERATE,
        handle=drain,
        summary="Shut a host down; other hosts take over its sessions.",
        body=Drain,
        answer=messages.HostDraining,
        status=202,
        problems=(409, 422, 502),
    ),
)
