"""The newest messages of the sessions that somebody follows or writes: what all who are woken by one bell want.

Of each session it is one piece without a hole, up to its newest; whoever is behind it reads from the servers. So a
session's followers at one host cost the servers one read together, and its owner's cost none.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from banksman.core.event import Event, Project
from banksman.store.cluster import packing
from banksman.store.cluster.packing import Body, Place

SESSION_BYTES_MAX = 256 << 10
BYTES_MAX = 32 << 20
# What a message weighs besides its body.
MESSAGE_BYTES = 512


class _Piece:
    def __init__(self) -> None:
        self.messages: deque[tuple[Place, Body, int]] = deque()
        self.size = 0


class Recent:
    def __init__(self) -> None:
        self._pieces: OrderedDict[str, _Piece] = OrderedDict()
        self._size = 0

    def keep(self, session: str, place: Place, body: Body) -> None:
        """A message with events that is stored. One that does not follow what is kept begins anew; one that is older
        than the newest changes nothing."""
        if not place.held:
            return
        piece = self._pieces.setdefault(session, _Piece())
        self._pieces.move_to_end(session)
        if piece.messages:
            newest = piece.messages[-1][0]
            if place.seq <= newest.seq:
                return
            if place.first != newest.last + 1:
                self._drop(piece, len(piece.messages))
        size = MESSAGE_BYTES + sum(len(data) for part in body.parts for _, _, data in part.entries)
        piece.messages.append((place, body, size))
        piece.size += size
        self._size += size
        while piece.size > SESSION_BYTES_MAX and len(piece.messages) > 1:
            self._drop(piece, 1)
        while self._size > BYTES_MAX and len(self._pieces) > 1:
            _, oldest = self._pieces.popitem(last=False)
            self._drop(oldest, len(oldest.messages))

    def _drop(self, piece: _Piece, count: int) -> None:
        for _ in range(count):
            _, _, size = piece.messages.popleft()
            piece.size -= size
            self._size -= size

    def forget(self, session: str) -> None:
        piece = self._pieces.pop(session, None)
        if piece is not None:
            self._drop(piece, len(piece.messages))

    def events(self, session: str, seq: int, limit: int, project: Project | None) -> list[Event]:
        """From this one on, at most so many; none if it is not kept."""
        piece = self._pieces.get(session)
        if piece is None or not piece.messages or seq < piece.messages[0][0].first:
            return []
        made: list[Event] = []
        for place, body, _ in piece.messages:
            if place.last >= seq:
                page = packing.events(session, place.epoch, place.first, body, project)
                made += page[max(0, seq - place.first) :][: limit - len(made)]
                if len(made) >= limit:
                    break
        return made
