"""Usage of the store over HTTP, by day, session, agent or caller."""

from __future__ import annotations

from typing import cast

import msgspec

from banksman import CapUse, Usage
from banksman.server.access.roles import Action
from banksman.server.api.messages import usage_messages as messages
from banksman.server.api.messages.common_messages import CapUse as CapUseMessage
from banksman.server.api.messages.common_messages import Tokens as TokensMessage
from banksman.server.api.messages.common_messages import Usage as UsageMessage
from banksman.server.api.route import HttpAnswer, Route, RouteCall
from banksman.server.context import Context
from banksman.store.log_values import UsageBy


async def read(call: RouteCall) -> HttpAnswer:
    """Show the usage of the store. Deleted sessions stay counted."""
    context: Context = call.context
    query: messages.ReadUsage = call.query
    # The host checks the values.
    by = cast("UsageBy", query.by)
    found = await context.host.usage(by, since=query.since, until=query.until)
    rows = [messages.UsageRow(row.key, shown(row.usage)) for row in found]
    caps = [shown_cap(use) for use in context.host.budget_uses()]
    return HttpAnswer(messages.UsageRows(query.by, rows, caps))


def shown_cap(use: CapUse) -> CapUseMessage:
    """Convert the use of a cap to its message."""
    return CapUseMessage(use.scope, use.unit, use.used, use.cap, use.caller, use.is_reached)


def shown(usage: Usage) -> UsageMessage:
    return UsageMessage(
        tokens=TokensMessage(*msgspec.structs.astuple(usage.tokens)),
        usd=usage.usd,
        working_seconds=usage.working_seconds,
        turns=usage.turns,
    )


ROUTES = (
    Route(
        method="GET",
        path="/v1/usage",
        action=Action.OPERATE,
        handle=read,
        summary="Show the usage of the store by day, session, agent or caller.",
        query=messages.ReadUsage,
        answer=messages.UsageRows,
        problems=(422,),
        # The first query of a cluster member reads all histories.
        waits=True,
    ),
)
