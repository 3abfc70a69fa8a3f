"""Messages about usage: the query, and its rows."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from banksman.server.api.messages.common_messages import CapUse, Query, Usage, Word, one_of

USAGE_BY = ("day", "session", "agent", "caller")
UsageBy = Annotated[str, one_of("UsageBy", USAGE_BY, "What the rows of a usage query are.")]


class ReadUsage(Query):
    """A query of the usage of the store.

    Attributes:
        by: Meaning of the rows.
        since: First day, as `YYYY-MM-DD` in UTC; null: from the beginning.
        until: Last day; null: until now.
    """

    by: UsageBy = "day"
    since: Word | None = None
    until: Word | None = None


class UsageRow(Struct):
    """Usage of one day, session, agent or caller.

    Attributes:
        key: The day, the id of the session, the agent or the caller; null: asks without a caller.
        usage: Its usage.
    """

    key: str | None
    usage: Usage


class UsageRows(Struct):
    """The usage of the store.

    Attributes:
        by: Meaning of the rows.
        rows: The rows, sorted by their key.
        budgets: Caps of the host and of its callers, and what is used of them today.
    """

    by: UsageBy
    rows: list[UsageRow]
    budgets: list[CapUse] = []
