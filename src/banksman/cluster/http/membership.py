"""This process among the hosts that share its store: announced, asked, and left in good order.

Without such a store there is nothing to it. With one, a server is a front end: it asks the others, and takes sessions
itself as far as it has room.
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
    return settings.name or socket.gethostname()


@asynccontextmanager
async def of(context: Context, *, is_front: bool) -> AsyncGenerator[None]:
    """Until it is left; then nobody is answered any more. `is_front`: callers come in here."""
    settings = context.settings
    if not settings.is_clustered:
        yield
        return
    # Not before it is needed: whoever has a store of its own machine pays for none of it.
    from banksman.cluster.host import Member  # noqa: PLC0415

    cluster = context.host.cluster
    assert cluster is not None, "a store that many share has what binds them"
    assert context.application is not None
    card = HostReport(
        name=name_of(settings),
        labels=(*settings.labels, *([FRONT] if is_front else ())),
        # Those whose program is here. One that is installed later is announced after the next start.
        agents=tuple(agent.name for agent in known_agents.find_agents() if agent.path is not None),
        room=settings.room or 0,
    )
    # Before the first heartbeat goes out, which would call us by our machine. Room there is when somebody pulls.
    cluster.hosts.announce(card._replace(room=0))
    await context.host.ready()
    context.proxy = OwnerProxy(context.host, cluster, HostView(cluster.hosts, lambda: _now(context, card)))
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
    """What it says of us, as it is in this moment."""
    member = context.member
    return card._replace(
        used=sum(not session.is_closed for session in context.host.our_sessions()),
        is_draining=context.is_closing or (member is not None and member.is_draining),
    )
