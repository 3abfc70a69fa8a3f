"""Take-over of a session: claim it, read its log, settle open turns. Cleanup after dead hosts.

The procedure is the same for a session that was closed yesterday and a session whose host has just
died. The log itself says which turns were open and how they ended: see
core/session/crash_recovery.py.

The order matters:

1. Claim the session, so that no later event can follow the events that are read.
2. Wait for the processes of the dead host, or end them.
3. Only then may a turn become UNKNOWN and another process resume the conversation.

`DeadHostCleanup` settles all sessions of dead hosts in the background when a host starts. A caller
that opens one of these sessions does not wait for the cleanup, because the open settles the
session.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress

from banksman.core.session import history as pasts
from banksman.core.session.crash_recovery import settle
from banksman.core.session.event import SESSION_CLOSED, SESSION_HANDED_OVER, Entry
from banksman.core.session.history import SessionHistory
from banksman.core.session.session_config import Config
from banksman.errors import (
    BanksmanError,
    NotOwner,
    StoreDamaged,
    StoreError,
    StoreTooNew,
    UsageError,
)
from banksman.process import orphans
from banksman.sessions import crash_record, known_agents
from banksman.sessions.held_session import WaitingProcesses, is_held
from banksman.sessions.log_writer import lease_name
from banksman.store.log import Log
from banksman.store.log_values import Done, KnownSession
from banksman.tasks import OwnedTasks, for_each

log = logging.getLogger("banksman")

# Another host may hold the claim for the two commits of a settlement. The attempts cover that time
# with room to spare.
CLAIM_ATTEMPTS_MAX = 4
CLAIM_SECONDS_BETWEEN = 0.05
# Sessions that are settled or taken over at the same time. Most of the time is waiting, for
# processes to end or for commits, which they share.
SETTLING_MAX = 16
# Runs what a dead host has left to do for a closed session. Gets the session and its history.
Closes = Callable[[KnownSession, SessionHistory], Awaitable[None]]
# Prepares what a session works in. Nothing of its last owner is left.
Prepares = Callable[[SessionHistory], Awaitable[None]]
# Claims the process of a session. Gets the history, and the entries behind its own ones.
Adopts = Callable[[SessionHistory, Sequence[Entry]], Awaitable[Sequence[Entry]]]


async def load(store: Log, session: str, config: Config) -> SessionHistory:
    """Load the state of a session from its last snapshot and the events after it.

    Changes nothing and needs no claim.
    """
    # The snapshot is read first. Events that are appended meanwhile follow it, and the loop below
    # reads them.
    snapshot = await store.snapshot(session)
    past = pasts.beginning(config)
    if snapshot is not None:
        try:
            past = pasts.decode(snapshot.data, config)
        except StoreTooNew:
            if store.head(session).first > 1:
                raise  # Otherwise the log has all events, and every version can read them.
        except ValueError as exc:
            message = f"cannot read the snapshot of session {session}"
            raise StoreDamaged(message, session=session) from exc
        if past.session.head not in (0, snapshot.seq):
            message = f"cannot use the snapshot of session {session}: it is of other events"
            raise StoreDamaged(message, session=session)
    while (page := await store.read(session, past.session.head)).events:
        if page.gap is not None:
            first, last = page.gap
            raise StoreDamaged(
                f"the events {first} to {last} of session {session} are missing", session=session
            )
        # One bounded page at a time, so that other tasks of the loop run in between.
        try:
            past = pasts.fold_events(past, page.events)
        except (AssertionError, LookupError, TypeError, ValueError) as exc:
            # Written by another version, or edited by hand.
            first = page.events[0].seq
            message = (
                f"cannot load session {session}: invalid events from seq {first}: {exc!r:.200}"
            )
            hint = "use the version of Banksman that wrote them"
            raise StoreDamaged(message, hint=hint, session=session) from exc
    return past


async def load_known(store: Log, known: KnownSession) -> SessionHistory:
    """Load the state of a listed session, even if its agent has no profile."""
    return await load(
        store, known.id, Config(dialect=known_agents.load_or_plain(known.agent).dialect)
    )


async def take_over(
    store: Log,
    session: str,
    epoch: int,
    config: Config,
    then: Callable[[SessionHistory], Sequence[Entry]],
    *,
    resumes: str | None = None,
    brings: Callable[[SessionHistory], Awaitable[Sequence[Entry]]] | None = None,
    adopts: Adopts | None = None,
    prepares: Prepares | None = None,
) -> SessionHistory:
    """Prepare a claimed session for this host, and return its history.

    1. Lease the session's conversation, or the conversation that it `resumes`.
    2. If its process waits for this host and can be claimed, append the entries of `adopts`, of
       `then` and of `brings`, and continue. Nothing is settled.
    3. Otherwise end the remaining processes of the last owner, and await `prepares`.
    4. Settle the open turns, once.
    5. Append the settlement, the entries of `then` and the entries of `brings` in one commit.

    `NotOwner`: another session holds the lease of the conversation. `then`: returns the entries to
    append. `brings`: fetches the files that the session needs here and returns the entries that
    record it. `adopts`: gets those entries, claims the process, and returns the entries that record
    it; none if there is no process to claim.
    """
    # The caller holds the claim, so this log is final: the former owner is fenced off.
    past = await load(store, session, config)
    # The lease comes before the files and before the processes. Two sessions can have one
    # conversation (a fork, a resume), and only the holder may change what belongs to it.
    agent = past.session.config.dialect.name
    await _lease(store, session, epoch, agent, resumes or past.session.conversation)
    brought = () if brings is None else await brings(past)
    others = [*then(past), *brought]
    told = () if adopts is None else await adopts(past, others)
    if told:
        entries = [*told, *others]
        await append(store, session, epoch, past.session.head, entries)
        return pasts.fold(past, entries)
    return await _settle(store, session, epoch, past, others, prepares)


async def claim(store: Log, session: str) -> int:
    """Claim a session and return the new epoch.

    A cancelled call leaves nothing claimed. A host that only settles the session owns it for a
    moment and cannot serve requests for it. So the claim is retried a few times.
    """
    # The last attempt is outside of the loop, so that its error reaches the caller.
    for _ in range(CLAIM_ATTEMPTS_MAX - 1):
        with suppress(NotOwner):
            return await _claim(store, session, None, None)
        await asyncio.sleep(CLAIM_SECONDS_BETWEEN)
    return await _claim(store, session, None, None)


async def create(store: Log, session: str, name: str | None, agent: str) -> int:
    """Create and claim a new session.

    `UsageError`: the session already has events, and the claim is released. Another host may have
    created it without this host knowing.
    """
    # A claim creates a missing session and takes an existing one without a live owner. Only the
    # events tell the two apart. The check comes after the claim: before it another host could
    # still append.
    epoch = await _claim(store, session, name, agent)
    if store.head(session).seq:
        store.release(session, epoch)
        message = f"session {session!r} already exists"
        raise UsageError(message, hint="choose another id", session=session)
    return epoch


async def _claim(store: Log, session: str, name: str | None, agent: str | None) -> int:
    claiming = asyncio.ensure_future(store.claim(session, name=name, agent=agent))
    try:
        return await asyncio.shield(claiming)
    except asyncio.CancelledError:
        # The claim may succeed at any moment, and no other code would release it. A claim is a
        # commit. So wait for its result, even if this task is cancelled repeatedly, and then undo
        # it.
        while not claiming.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait((claiming,))
        assert claiming.done()
        if not claiming.cancelled() and claiming.exception() is None:
            # An empty session that this call created is deleted. Any other session is only
            # released.
            if agent is None or store.head(session).seq:
                store.release(session, claiming.result())
            else:
                with suppress(BanksmanError):
                    await store.delete(session)
        raise


async def clean_up(
    store: Log, known: KnownSession, closes: Closes | None = None, *, is_deleted: bool = False
) -> None:
    """Settle a session whose owner was dead, and release it.

    `closes`: called for a session that its owner had closed and not released. If it is cancelled,
    the session stays claimed, and the host that settles it after this one calls `closes` again.
    `is_deleted`: the session is about to be deleted, so `closes` is called for every session that
    was not closed, and the session is always released.

    The session's conversation is not leased. If another host claims the session first, that host
    settles it and this call does nothing.
    """
    # Remaining processes may take seconds to end. During that time the session must not be claimed,
    # so that another host can take it over. So wait for them before the claim. Without a claim this
    # host only waits and sends no signal.
    past = await load_known(store, known)
    if is_held(store.identity, known.id, past):
        return  # Its process works on, and waits for the host that opens the session.
    if past.process is not None:
        seconds = crash_record.seconds_elsewhere(store.identity, known.id)
        await orphans.wait(past.process.parts, orphans.KEEPER_SECONDS_MAX + seconds)
    # The wait may have taken seconds, and another host may have settled the session meanwhile.
    if not is_deleted and not is_left_alone(store, known):
        return
    # The check above only saves work. The claim decides: it refuses a session with a live owner.
    try:
        epoch = await _claim(store, known.id, None, None)
    except NotOwner:
        return
    is_undone = False
    try:
        # Loaded again after the claim. Only now is the log final.
        was_closed = await is_closed(store, known)
        past = await _settle(store, known.id, epoch, await load_known(store, known), ())
        if closes is not None and was_closed is not is_deleted:
            try:
                await closes(known, past)
            except asyncio.CancelledError:
                is_undone = not is_deleted
                raise
    finally:
        # Also after an error: a claim that stays would keep every other host from the session. A
        # claim whose `closes` is undone ends with this host, whose event loop ends.
        if not is_undone:
            store.release(known.id, epoch)


def is_left_alone(store: Log, known: KnownSession) -> bool:
    """Return whether the session has not been claimed since it was listed and its owner is dead."""
    # An equal epoch proves that no host has claimed the session: every claim raises it.
    now = store.find(known.id)
    return (
        now is not None
        and now.epoch == known.epoch
        and now.owner is not None
        and not now.owner.is_alive
    )


async def is_closed(store: Log, known: KnownSession) -> bool:
    """Return whether the last event of the session is its close."""
    # The listing may be stale. A read of the log also updates the head.
    await store.read(known.id, known.seq, 1)
    page = await store.read(known.id, max(0, store.head(known.id).seq - 1), 1)
    return not page.events or page.events[-1].kind == SESSION_CLOSED


async def _settle(  # noqa: PLR0917
    store: Log,
    session: str,
    epoch: int,
    past: SessionHistory,
    then: Sequence[Entry],
    prepares: Prepares | None = None,
) -> SessionHistory:
    # The processes must be gone before their turns become UNKNOWN. A process that still runs could
    # finish a turn.
    # `orphans.end` raises if a process cannot be ended. Then nothing is appended, the turns stay
    # open, and a later attempt settles them.
    assert epoch > 0, "only the holder of a claim settles"
    seconds = orphans.KEEPER_SECONDS_MAX + crash_record.seconds_elsewhere(store.identity, session)
    if past.held is not None:
        # A keeper that could not be asked for the process ends it when the hold is over.
        seconds += max(0.0, past.held.until - time.time())
    swept = [] if past.process is None else await orphans.end(past.process.parts, seconds)
    if prepares is not None:
        await prepares(past)
    # One commit for the settlement and for the entries of the new owner. A crash leaves both or
    # none, so a turn gets one end, and no owner starts behind an unsettled turn.
    head = past.session.head
    entries = [*settle(past, swept=swept), *then]
    if entries:
        await append(store, session, epoch, head, entries)
        past = pasts.fold(past, entries)
    # The history describes the log up to its end. The driver appends behind this seq.
    assert past.session.head == head + len(entries)
    return past


async def append(store: Log, session: str, epoch: int, seq: int, entries: Sequence[Entry]) -> None:
    # The expected seq is compared with the log. If the history was loaded from an older log, the
    # append is refused and nothing is settled by mistake.
    assert entries
    done, answered = _answer()
    store.append(session, epoch, seq, time.time(), entries, done)
    await answered


async def _lease(
    store: Log, session: str, epoch: int, agent: str, conversation: str | None
) -> None:
    # A session without a conversation has nothing that two agents could write to.
    if conversation is not None:
        done, answered = _answer()
        store.lease(session, epoch, lease_name(agent, conversation), done)
        await answered


def _answer() -> tuple[Done, asyncio.Future[None]]:
    """Return a callback for the log and a future that it resolves."""
    answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def done(error: StoreError | NotOwner | None) -> None:
        if answered.done():
            return  # The waiting caller was cancelled.
        if error is None:
            answered.set_result(None)
        else:
            answered.set_exception(error)

    return done, answered


# -- sessions of dead hosts ----------------------------------------------------------------------
async def has_waiting_asks(store: Log, known: KnownSession) -> bool:
    """Return whether an accepted ask is queued in a session without a live owner.

    The caller of that ask must not ask again. So a host that serves its store to others resumes the
    session without a request. The same holds for a session whose process waits for its next host.
    """
    past = await _found(store, known)
    return past is not None and (
        bool(past.session.queue)
        or past.held is not None
        or bool(crash_record.find(store.identity, known.id))
    )


async def has_held_process(waiting: WaitingProcesses, store: Log, known: KnownSession) -> bool:
    """Return whether the process of a session without a live owner waits for its next host.

    `waiting`: of this store. It is read once for all sessions.
    """
    if known.owner is not None and known.owner.is_alive:
        return False
    await store.read(known.id, known.seq, 1)
    page = await store.read(known.id, max(0, store.head(known.id).seq - 1), 1)
    if page.events and page.events[-1].kind == SESSION_HANDED_OVER:
        return True
    # A host that has released the session has logged what it does.
    if known.owner is not None and known.id in waiting.handed_over:
        return True
    return known.id in waiting.surviving


async def is_unsettled(store: Log, known: KnownSession) -> bool:
    """Return whether a session without a live owner has a queued ask or an open turn.

    An open turn has no end in the log, because the host that claimed the session could not settle
    it.
    """
    past = await _found(store, known)
    return past is not None and (bool(past.session.queue) or bool(settle(past)))


async def _found(store: Log, known: KnownSession) -> SessionHistory | None:
    """Return the history of a session without a live owner.

    Returns None if a live host owns the session, or if it was closed in good order. A closed
    session has already refused its queued asks.
    """
    if known.owner is not None and known.owner.is_alive:
        return None
    if await is_closed(store, known):
        return None
    return await load_known(store, known)


class DeadHostCleanup:
    """Background task that settles all sessions of dead hosts.

    Belongs to one event loop. `alone`: locks a session id, so that no other call on this host opens
    or claims the session during the settlement and `closes`. `closes`: see `clean_up`. It may take
    minutes, so only the session itself waits for it.
    """

    def __init__(
        self,
        store: Log,
        alone: Callable[[str], AbstractAsyncContextManager[None]],
        closes: Closes | None = None,
    ) -> None:
        self._store = store
        self._alone = alone
        self._closes = closes
        self._task: asyncio.Task[None] | None = None
        # One for each session that is being settled or closed.
        self._settling = OwnedTasks()

    def begin(self) -> None:
        """Start the task once. A failed task is started again by the next call."""
        # A cancelled task is not started again: `stop` has cancelled it, and the host closes.
        task = self._task
        if task is None or (task.done() and not task.cancelled() and task.exception() is not None):
            self._task = asyncio.get_running_loop().create_task(self._settle_all())
            self._task.add_done_callback(_note_failure)

    async def wait(self) -> None:
        """Wait until every session is settled."""
        self.begin()
        assert self._task is not None
        await asyncio.shield(self._task)

    async def stop(self) -> None:
        """Stop the task. Sessions that are not settled stay unchanged for the next host.

        Waits for each `closes` that has begun, like the close of a session: the close of the store
        releases the session, and no other host would call `closes` again.
        """
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
            assert self._task.done()
        # The store may be closed next, and no task must use it after that.
        await self._settling.wait()

    async def _settle_all(self) -> None:
        dead = [
            known
            for known in self._store.sessions()
            if known.owner is not None and not known.owner.is_alive
        ]
        await for_each(dead, self._settle, at_once=SETTLING_MAX)

    async def _settle(self, known: KnownSession) -> None:
        """Settle a session, and return when it is settled. `closes` continues."""
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = self._settling.start(self._settle_and_close(known, settled))
        try:
            # Unlike an `await`, this does not cancel the future.
            await asyncio.wait((settled,))
        finally:
            if not settled.done():
                task.cancel()

    async def _settle_and_close(self, known: KnownSession, settled: asyncio.Future[None]) -> None:
        async def closes(known: KnownSession, past: SessionHistory) -> None:
            _resolve(settled)
            if self._closes is not None:
                await self._closes(known, past)

        try:
            # The place first, then the lock of the session. A caller that opens the session does
            # not wait for a place.
            async with self._alone(known.id):
                # Otherwise the session was opened meanwhile, on this host or another.
                if is_left_alone(self._store, known):
                    await clean_up(self._store, known, closes)
        except Exception as exc:
            # A session that cannot be settled must not prevent the cleanup of the others. It stays
            # unchanged, and a caller that opens it gets the error.
            log.error("cannot settle session %s of a dead host: %s", known.id, exc)
        finally:
            _resolve(settled)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _note_failure(task: asyncio.Task[None]) -> None:
    """Log a failure, because the task may have no waiting caller."""
    if not task.cancelled() and (exc := task.exception()) is not None:
        log.warning("cannot settle the sessions of dead hosts: %s", exc)
