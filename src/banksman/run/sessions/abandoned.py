"""Sessions in which somebody still waits, though nobody has them: their host died, and no other was asked to go on.

Whoever accepted the asks is gone, and who waits for them may not ask again. A host that serves a store to others takes
them up by itself.
"""

from __future__ import annotations

from banksman.core import settling
from banksman.core.config import Config
from banksman.core.event import SESSION_CLOSED
from banksman.core.past import Past
from banksman.run.sessions import profiles, recovery
from banksman.store.log import Known, Log


async def is_waited_in(store: Log, known: Known) -> bool:
    past = await _found(store, known)
    return past is not None and bool(past.session.queue)


async def is_unsettled(store: Log, known: Known) -> bool:
    """The same; or a turn is open in it, of which nobody has said how it ended: who claimed it could not settle it."""
    past = await _found(store, known)
    return past is not None and (bool(past.session.queue) or bool(settling.settle(past)))


async def _found(store: Log, known: Known) -> Past | None:
    """A session that was closed in good order has refused who waited, and needs no further look: None."""
    if known.owner is not None and known.owner.is_alive:
        return None
    # What is listed may be a moment old; what is read is not, and then the head is known.
    await store.read(known.id, known.seq, 1)
    page = await store.read(known.id, max(0, store.head(known.id).seq - 1), 1)
    if not page.events or page.events[-1].kind == SESSION_CLOSED:
        return None
    return await recovery.load(store, known.id, Config(dialect=profiles.load_or_plain(known.agent).dialect))
