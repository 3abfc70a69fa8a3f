"""Sessions in which somebody still waits, though nobody has them: their host died, and no other was asked to go on.

Whoever accepted the asks is gone, and who waits for them may not ask again. A host that serves a store to others takes
them up by itself.
"""

from __future__ import annotations

from banksman.core.config import Config
from banksman.core.event import SESSION_CLOSED
from banksman.run.sessions import profiles, recovery
from banksman.store.log import Known, Log


async def is_waited_in(store: Log, known: Known) -> bool:
    """A session that was closed in good order has refused who waited, and needs no further look."""
    if known.owner is not None and known.owner.is_alive:
        return False
    # What is listed may be a moment old; what is read is not, and then the head is known.
    await store.read(known.id, known.seq, 1)
    page = await store.read(known.id, max(0, store.head(known.id).seq - 1), 1)
    if not page.events or page.events[-1].kind == SESSION_CLOSED:
        return False
    past = await recovery.load(store, known.id, Config(dialect=profiles.load_or_plain(known.agent).dialect))
    return bool(past.session.queue)
