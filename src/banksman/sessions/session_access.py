"""Access to sessions: the caller that owns a session, and the callers that it is shared with.

The log has both (`session.opened`, `session.shared`), so they survive a restart and a take-over.
`AccessReader` remembers them for the sessions of a store. `server/access/` decides what they allow.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from banksman.core.session.event import (
    SESSION_CLOSED,
    SESSION_IMPORTED,
    SESSION_OPENED,
    SESSION_SHARED,
    Entry,
    entry,
)
from banksman.core.session.history import SessionHistory
from banksman.sessions import recovery
from banksman.sessions.held_session import is_held
from banksman.store.log import Log
from banksman.store.log_values import KnownSession

# How many sessions are remembered. A forgotten one is read from its log again.
REMEMBERED_MAX = 20_000
_CHANGES = (SESSION_OPENED, SESSION_SHARED, SESSION_IMPORTED)


class Access(NamedTuple):
    """`owner`: the caller that opened the session first; None if it had no name."""

    owner: str | None = None
    shared: frozenset[str] = frozenset()


class _Seen(NamedTuple):
    """The access to a session up to an event. `created` tells its history from a later one."""

    created: float
    seq: int
    access: Access


class AccessReader:
    """Reads the access to the sessions of a log, and remembers it."""

    def __init__(self, store: Log) -> None:
        self._store = store
        # The session that was used last is the last one.
        self._seen: OrderedDict[str, _Seen] = OrderedDict()
        # Sessions whose log could not be read, which was reported.
        self.unreadable: set[str] = set()

    async def of(self, known: KnownSession) -> Access:
        """Return the access to a listed session as of now."""
        seen = self._seen.get(known.id)
        if seen is not None and seen.created == known.created:
            seen = await self._newer(known.id, seen)
        else:
            seen = None
        if seen is None:
            past = await recovery.load_known(self._store, known)
            seen = _Seen(known.created, past.session.head, _access(past))
        self._seen[known.id] = seen
        self._seen.move_to_end(known.id)
        while len(self._seen) > REMEMBERED_MAX:
            self._seen.popitem(last=False)
        return seen.access

    async def _newer(self, session: str, seen: _Seen) -> _Seen | None:
        """Return the same access as of now; None if an event has changed it."""
        while self._store.head(session).seq > seen.seq:
            page = await self._store.read(session, seen.seq)
            is_changed = any(event.kind in _CHANGES for event in page.events)
            if page.gap is not None or is_changed or not page.events:
                return None
            seen = seen._replace(seq=page.events[-1].seq)
        return seen if self._store.head(session).seq == seen.seq else None


async def share(
    store: Log, known: KnownSession, shared: Sequence[Entry], closes: recovery.Closes | None = None
) -> bool:
    """Append `session.shared` to a session without a live owner, and release it.

    The session is not opened, so this needs nothing that its log does not keep. `shared`: the
    entry. `closes`: see `recovery.clean_up`. Returns False, and changes nothing, if its process may
    wait for the host that opens it.
    """
    past = await recovery.load_known(store, known)
    if past.held is not None or is_held(store.identity, known.id, past):
        return False
    if known.owner is not None and not known.owner.is_alive:
        await recovery.clean_up(store, known, closes)
    epoch = await recovery.claim(store, known.id)
    try:
        # A closed session stays closed: its last event says so.
        closed = [entry(None, SESSION_CLOSED)] if await recovery.is_closed(store, known) else []
        past = await recovery.load_known(store, known)
        await recovery.append(store, known.id, epoch, past.session.head, [*shared, *closed])
    finally:
        store.release(known.id, epoch)
    return True


def _access(past: SessionHistory) -> Access:
    opened = past.opened or {}
    return Access(opened.get("caller"), frozenset(opened.get("shared") or ()))
