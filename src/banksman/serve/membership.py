"""This process among the hosts that share its store: announced, asked, and left in good order.

Without such a store there is nothing to it. With one, a server is a front end: it asks the others, and takes sessions
itself as far as it has room.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from banksman.run.sessions import known
from banksman.serve.context import Context
from banksman.serve.front import Front
from banksman.serve.settings import Settings


def name_of(settings: Settings) -> str:
    return settings.name or socket.gethostname()


@asynccontextmanager
async def of(context: Context) -> AsyncGenerator[None]:
    """Until it is left; then nobody is answered any more."""
    settings = context.settings
    if not settings.is_clustered:
        yield
        return
    # Not before it is needed: whoever has a store of its own machine pays for none of it.
    from banksman.run.cluster import Member  # noqa: PLC0415

    await context.host.ready()
    cluster = context.host.cluster
    assert cluster is not None, "a store that many share has what binds them"
    assert context.application is not None
    context.front = Front(context, cluster)
    async with Member(
        context.host,
        cluster,
        name=name_of(settings),
        labels=settings.labels,
        # Those whose program is here. One that is installed later is announced after the next start.
        agents=[agent.name for agent in known.look() if agent.path is not None],
        room=settings.room or 0,
        application=context.application,
        mirrors_transcripts=settings.mirror_transcripts,
    ) as member:
        context.member = member
        yield
