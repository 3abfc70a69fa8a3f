"""Messages about access: the caller of a request, and whom a session is shared with."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from banksman.server.api.messages.common_messages import Body, CallerName

SHARED_MAX = 100


class Caller(Struct):
    """The caller of a request.

    Attributes:
        name: Name of its token; null for the server's own token and user.
        role: Role of its token.
        sessions: Patterns of session names that limit the token; empty: no limit.
        agents: Agents that limit the token; empty: no limit.
        actions: Actions that the role allows, as docs/security.md lists them.
    """

    name: str | None
    role: str
    sessions: list[str]
    agents: list[str]
    actions: list[str]


class Share(Body):
    """The callers of a session.

    Attributes:
        shared: Names of the callers that may use the session beside its owner.
    """

    shared: Annotated[list[CallerName], Meta(max_length=SHARED_MAX)]


class Shared(Struct):
    """Access to a session.

    Attributes:
        owner: The caller that has opened the session; null: the administrator, or a program.
        shared: Names of the callers that it is shared with.
    """

    owner: str | None
    shared: list[str]
