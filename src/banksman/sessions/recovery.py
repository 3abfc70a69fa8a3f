"""Take a session over: claim it, read its log, settle what was open. And find the sessions that dead hosts have left.

It is the same for a session that was closed yesterday and one whose host has just died, because the log itself says
what was open and how that ended: see core/session/crash_recovery.py.

The order matters. The session is claimed first, so that what is read is the last word. Then the processes of the dead
host are waited for, or ended. Only then may a turn be called UNKNOWN, and another process go on with the conversation.

`DeadHostCleanup` settles all sessions of dead hosts in the background, at the beginning of the next host's life. A
caller that opens such a session does not wait for that: to open it is to settle it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress

from banksman.core.session import history as pasts
from banksman.core.session.crash_recovery import settle
from banksman.core.session.event import SESSION_CLOSED, Entry
from banksman.core.session.history import SessionHistory
from banksman.core.session.session_config import Config
from banksman.errors import BanksmanError, NotOwner, StoreDamaged, StoreError, StoreTooNew, UsageError
from banksman.process import orphans
from banksman.sessions import known_agents
from banksman.sessions.log_writer import lease_name
from banksman.store.log import Done, KnownSession, Log

log = logging.getLogger("banksman")

# How long another host may need for the two commits of a settling, with room to spare.
CLAIM_ATTEMPTS_MAX = 4
CLAIM_SECONDS_BETWEEN = 0.05
# Sessions of dead hosts that are settled at a time. Most of it is waiting for processes to end.
SETTLING_MAX = 16


async def load(store: Log, session: str, config: Config) -> SessionHistory:
    """What its log says, from the last snapshot on. Changes nothing, and needs no claim."""
    snapshot = await store.snapshot(session)
    past = pasts.beginning(config)
    if snapshot is not None:
        try:
            past = pasts.decode(snapshot.data, config)
        except StoreTooNew:
            if store.head(session).first > 1:
                raise  # Else the events say it all, to any version.
        except ValueError as exc:
            raise StoreDamaged(f"the snapshot of session {session} cannot be read", session=session) from exc
        if past.session.head not in (0, snapshot.seq):
            raise StoreDamaged(f"the snapshot of session {session} is of other events", session=session)
    while (page := await store.read(session, past.session.head)).events:
        if page.gap is not None:
            first, last = page.gap
            raise StoreDamaged(f"the events {first} to {last} of session {session} are missing", session=session)
        # In bounded pieces, and others get their turn between them.
        try:
            past = pasts.fold_events(past, page.events)
        except (AssertionError, LookupError, TypeError, ValueError) as exc:
            # Of another version, or of a file that somebody has edited.
            message = f"the events from {page.events[0].seq} on of session {session} do not make sense: {exc!r:.200}"
            raise StoreDamaged(message, hint="use the Banksman that wrote them", session=session) from exc
    return past


async def load_known(store: Log, known: KnownSession) -> SessionHistory:
    """The same, of a session as a listing has it: its agent may be gone, or have no profile any more."""
    return await load(store, known.id, Config(dialect=known_agents.load_or_plain(known.agent).dialect))


async def take_over(
    store: Log,
    session: str,
    epoch: int,
    config: Config,
    then: Callable[[SessionHistory], Sequence[Entry]],
    *,
    resumes: str | None = None,
    brings: Callable[[SessionHistory], Awaitable[Sequence[Entry]]] | None = None,
) -> SessionHistory:
    """Of a session that was claimed under this epoch: its conversation, or the one that it `resumes`, is leased; what
    is left of its last host is ended; what was open is settled, once, and what is to be said `then` is written behind
    it, in one, with what was to be said of what it `brings` along. `NotOwner`: another session drives the
    conversation."""
    past = await load(store, session, config)
    await _lease(store, session, epoch, config, resumes or past.session.conversation)
    brought = () if brings is None else await brings(past)
    return await _settle(store, session, epoch, past, [*then(past), *brought])


async def claim(store: Log, session: str) -> int:
    """Cancelled, it leaves nothing claimed. A host that only settles it has it for a moment, and is not one that it
    could be asked of: that is waited for."""
    for _ in range(CLAIM_ATTEMPTS_MAX - 1):
        with suppress(NotOwner):
            return await _claim(store, session, None, None)
        await asyncio.sleep(CLAIM_SECONDS_BETWEEN)
    return await _claim(store, session, None, None)


async def create(store: Log, session: str, name: str | None, agent: str) -> int:
    """The same, of one that is new. `UsageError`, and it is let go of, if there is one with a past: that another host
    has made it may be news here."""
    epoch = await _claim(store, session, name, agent)
    if store.head(session).seq:
        store.release(session, epoch)
        raise UsageError(f"there is a session {session!r} already", hint="another id", session=session)
    return epoch


async def _claim(store: Log, session: str, name: str | None, agent: str | None) -> int:
    claiming = asyncio.ensure_future(store.claim(session, name=name, agent=agent))
    try:
        return await asyncio.shield(claiming)
    except asyncio.CancelledError:
        # It may be ours by now, or in a moment, and nobody would ever let go of it. A claim is a commit: it is waited
        # for, however often we are cancelled.
        while not claiming.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait((claiming,))
        if not claiming.cancelled() and claiming.exception() is None:
            if agent is None or store.head(session).seq:
                store.release(session, claiming.result())
            else:
                with suppress(BanksmanError):
                    await store.delete(session)
        raise


async def clean_up(store: Log, known: KnownSession) -> None:
    """Of a session whose host was dead when it was last seen: settle it, and let it be. Nobody is kept from its
    conversation. Whoever was faster has done it, or goes on with it."""
    # What is left of its processes may take seconds to end, in which whoever wants to go on with it should not be told
    # that it is ours. So they are waited for first; but nobody is signalled by who has not claimed it.
    past = await load_known(store, known)
    if past.process is not None:
        await orphans.wait(past.process.parts)
    if not is_left_alone(store, known):
        return
    try:
        epoch = await _claim(store, known.id, None, None)
    except NotOwner:
        return
    try:
        await _settle(store, known.id, epoch, await load_known(store, known), ())
    finally:
        store.release(known.id, epoch)


def is_left_alone(store: Log, known: KnownSession) -> bool:
    """Whether nobody has had it since it was seen, and its host is still dead."""
    now = store.find(known.id)
    return now is not None and now.epoch == known.epoch and now.owner is not None and not now.owner.is_alive


async def _settle(store: Log, session: str, epoch: int, past: SessionHistory, then: Sequence[Entry]) -> SessionHistory:
    swept = [] if past.process is None else await orphans.end(past.process.parts)
    entries = [*settle(past, swept=swept), *then]
    if entries:
        await append(store, session, epoch, past.session.head, entries)
        past = pasts.fold(past, entries)
    return past


async def append(store: Log, session: str, epoch: int, seq: int, entries: Sequence[Entry]) -> None:
    done, answered = _answer()
    store.append(session, epoch, seq, time.time(), entries, done)
    await answered


async def _lease(store: Log, session: str, epoch: int, config: Config, conversation: str | None) -> None:
    if conversation is not None:
        done, answered = _answer()
        store.lease(session, epoch, lease_name(config.dialect.name, conversation), done)
        await answered


def _answer() -> tuple[Done, asyncio.Future[None]]:
    """For an answer of the log that is waited for."""
    answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def done(error: StoreError | NotOwner | None) -> None:
        if answered.done():
            return  # Whoever waited was cancelled.
        if error is None:
            answered.set_result(None)
        else:
            answered.set_exception(error)

    return done, answered


# -- what dead hosts have left ---------------------------------------------------------------------------------------
async def has_waiting_asks(store: Log, known: KnownSession) -> bool:
    """Whether an accepted ask waits in a session that no live host has. Its caller may not ask again, so a host that
    serves its store to others goes on with the session by itself."""
    past = await _found(store, known)
    return past is not None and bool(past.session.queue)


async def is_unsettled(store: Log, known: KnownSession) -> bool:
    """The same; or a turn is open in it whose end is not in the log: the host that claimed it could not settle it."""
    past = await _found(store, known)
    return past is not None and (bool(past.session.queue) or bool(settle(past)))


async def _found(store: Log, known: KnownSession) -> SessionHistory | None:
    """What the log says of it; None: a live host has it, or it was closed in good order and has refused who waited."""
    if known.owner is not None and known.owner.is_alive:
        return None
    # What is listed may be a moment old; what is read is not, and then the head is known.
    await store.read(known.id, known.seq, 1)
    page = await store.read(known.id, max(0, store.head(known.id).seq - 1), 1)
    if not page.events or page.events[-1].kind == SESSION_CLOSED:
        return None
    return await load_known(store, known)


class DeadHostCleanup:
    """For one loop. `alone` is entered with the id of a session: nobody else here opens or claims it meanwhile."""

    def __init__(self, store: Log, alone: Callable[[str], AbstractAsyncContextManager[None]]) -> None:
        self._store = store
        self._alone = alone
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Once, unless it failed: then whoever comes next tries again."""
        task = self._task
        if task is None or (task.done() and not task.cancelled() and task.exception() is not None):
            self._task = asyncio.get_running_loop().create_task(self._settle_all())
            self._task.add_done_callback(_note_failure)

    async def wait(self) -> None:
        self.begin()
        assert self._task is not None
        await asyncio.shield(self._task)

    async def stop(self) -> None:
        """What is not settled is left as it is, for the next one."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def _settle_all(self) -> None:
        dead = [known for known in self._store.sessions() if known.owner is not None and not known.owner.is_alive]
        places = asyncio.Semaphore(SETTLING_MAX)

        async def settle(known: KnownSession) -> None:
            async with places, self._alone(known.id):
                await self._settle(known)

        async with asyncio.TaskGroup() as tasks:
            for known in dead:
                tasks.create_task(settle(known))

    async def _settle(self, known: KnownSession) -> None:
        if not is_left_alone(self._store, known):
            return  # It was opened meanwhile, here or elsewhere.
        try:
            await clean_up(self._store, known)
        except Exception as exc:
            # One session that cannot be settled must not keep the host from the others. It stays as it is, and whoever
            # opens it is told.
            log.error("! session %s of a dead host cannot be settled: %s", known.id, exc)


def _note_failure(task: asyncio.Task[None]) -> None:
    """Perhaps nobody waits for it."""
    if not task.cancelled() and (exc := task.exception()) is not None:
        log.warning("! what dead hosts have left cannot be settled now: %s", exc)
