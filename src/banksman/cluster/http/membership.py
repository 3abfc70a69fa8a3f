"""Join this server to the cluster of its store while it runs: set up its proxy and its member.

`cluster/host/member.py` does the work of a member, and `owner_proxy.py` forwards requests. A store
on one machine has no cluster, and this does nothing. On a shared store, a server with callers is a
front end: it forwards requests to other hosts. A server with room takes sessions itself.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from banksman.cluster.http.host_view import FRONT, HostView
from banksman.cluster.http.owner_proxy import OwnerProxy
from banksman.cluster.interfaces import HostReport
from banksman.server.context import Context
from banksman.server.server_settings import ServerSettings
from banksman.sessions import known_agents


def name_of(settings: ServerSettings) -> str:
    """Return the name of this host: the configured one, or that of the machine."""
    return settings.name or socket.gethostname()


@asynccontextmanager
async def of(context: Context, *, is_front: bool) -> AsyncGenerator[None]:
    """Join the cluster for the duration of the context.

    `is_front`: callers connect to this server.
    """
    settings = context.settings
    if not settings.is_clustered:
        yield
        return
    # Import it only when needed: a store on one machine does not pay for the cluster code.
    from banksman.cluster.host import Member  # noqa: PLC0415

    cluster = context.host.cluster
    assert cluster is not None, "a store that several hosts share has a cluster"
    assert context.application is not None
    card = HostReport(
        name=name_of(settings),
        labels=(*settings.labels, *([FRONT] if is_front else ())),
        # The agents that are installed here. One that is installed later is announced after a
        # restart.
        agents=tuple(known_agents.startable()),
        room=settings.room or 0,
    )
    # Announce the name before the first heartbeat, which would otherwise use that of the machine.
    # The room is 0 until the member pulls jobs.
    cluster.hosts.announce(card._replace(room=0))
    await context.host.ready()
    context.proxy = OwnerProxy(
        context.host, cluster, HostView(cluster.hosts, lambda: _now(context, card))
    )
    async with Member(
        context.host,
        cluster,
        name=card.name,
        labels=card.labels,
        agents=card.agents,
        room=card.room,
        application=context.application,
        mirrors_transcripts=settings.mirror_transcripts,
    ) as member:
        context.member = member
        yield


def _now(context: Context, card: HostReport) -> HostReport:
    """Return this host's report with its current state."""
    member = context.member
    return card._replace(
        used=sum(not session.is_closed for session in context.host.our_sessions()),
        is_draining=context.is_closing or (member is not None and member.is_draining),
    )
