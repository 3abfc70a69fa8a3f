"""Sessions that another process of this machine has: who is asked about them instead, and what if it dies.

Whoever is refused because another has the session (`NotOwner`) is told where that one is. From there on it is asked
about this session, and followed, too: so its death is heard of, as any other loss of a connection. What it had accepted
from us is then in the log, and in nobody's hands. It is asked for once more, with the same key: that makes it the same
turn, and whoever is asked now takes the session over.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from banksman.cli.client.discovery import UNIX, ServerPlace, announced_at, at_socket
from banksman.errors import UsageError

_SESSION = re.compile(r"/v1/sessions/([^/]+)(/turns)?")


class OwnerRequest(NamedTuple):
    """`key`: it may be repeated."""

    method: str
    path: str
    query: Mapping[str, str | int | float | None] | None = None
    body: Mapping[str, Any] | None = None
    key: str | None = None

    @property
    def session(self) -> str | None:
        """The one that it is about, as its path has it."""
        found = _SESSION.match(self.path)
        return None if found is None else found[1]

    @property
    def is_ask(self) -> bool:
        found = _SESSION.fullmatch(self.path)
        return found is not None and found[2] is not None and self.method == "POST" and self.key is not None


class Owners:
    """Any thread may use it: each step is one of a dictionary's, and a request that finds out too late is repeated."""

    def __init__(self) -> None:
        self._places: dict[str, ServerPlace] = {}
        # The last thing that each was asked to do, as long as it is there; then it is nobody's.
        self._asks: dict[str, OwnerRequest] = {}
        self._orphans: dict[str, OwnerRequest] = {}

    def place(self, session: str | None) -> ServerPlace | None:
        return None if session is None else self._places.get(session)

    def remember(self, request: OwnerRequest, owner: ServerPlace) -> ServerPlace | None:
        """None: from here on. Else there is no session to remember it by, and this request alone goes there."""
        if request.session is None:
            return owner
        self._places[request.session] = owner
        return None

    def note_asked(self, request: OwnerRequest, place: ServerPlace) -> None:
        """It was accepted there."""
        session = request.session
        if session is not None and request.is_ask and self._places.get(session) == place:
            self._asks[session] = request

    def note_gone(self, place: ServerPlace) -> None:
        """Nobody answers there."""
        for session in [session for session, owner in list(self._places.items()) if owner == place]:
            self.forget(session)

    def forget(self, session: str | None) -> None:
        if session is None:
            return
        self._places.pop(session, None)
        ask = self._asks.pop(session, None)
        if ask is not None:
            self._orphans[session] = ask

    def take_orphan(self, session: str | None) -> OwnerRequest | None:
        """What is to be asked for once more. Whoever could not puts it back."""
        return None if session is None else self._orphans.pop(session, None)

    def put_back(self, orphan: OwnerRequest) -> None:
        assert orphan.session is not None
        self._orphans[orphan.session] = orphan


def owner_of(title: str, ids: Mapping[str, Any], asked: ServerPlace) -> ServerPlace | None:
    """Where the one is that has the session; None: this is no such refusal, or nothing says where.

    The address is what some host has written into the store, and may be anybody's. So nobody is sent our token there: a
    socket is asked whose it is, and of servers only the one that this user has started and that has said so is ours,
    whatever else calls itself localhost."""
    address = ids.get("address")
    if title != "NotOwner" or not isinstance(address, str) or not asked.is_local:
        return None
    if address.startswith(UNIX):
        try:
            owner = at_socket(address.removeprefix(UNIX))
        except UsageError:
            return None
    else:
        owner = announced_at(address)
    return owner if owner is not None and owner.url != asked.url else None
