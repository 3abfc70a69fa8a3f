"""Write queue of one session: calls run in order, appends are batched, one message is in flight.

All appends at the head of the queue go into one message, so a busier queue costs less per append.
The next message holds the appends that gather while one is in flight. Frames of the agent also wait
a few milliseconds for others. All queues of a log start together (`OperationBatch`), so that their
messages share a write to the journal and a write to the socket. A call that somebody waits for
starts them immediately.

A message is in the journal before it is published. It is published until its result is known or the
lease is lost (`publisher.py`). If that takes longer than a moment, waiting appends go to the
journal too (`journal_recovery.py`).

The queue decides about a call when its turn comes, and not when it is made: a claim may be ahead of
it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence

from banksman.cluster.log import message_codec
from banksman.cluster.log.blocked_appends import OVERDUE_SECONDS, BlockedAppends
from banksman.cluster.log.journal_file import JournalRow
from banksman.cluster.log.message_codec import MessageBody, MessagePlace
from banksman.cluster.log.publisher import (
    Advance,
    Call,
    Claim,
    Delete,
    Publisher,
    QueuedAppend,
    QueuedCall,
    QueuedLease,
    QueuedRelease,
    WriterCall,
)
from banksman.cluster.log.queue_context import QueueContext, QueueStart
from banksman.cluster.log.session_ownership import OwnedEpoch
from banksman.cluster.log.streams import token
from banksman.errors import BanksmanError, NotOwner, StoreDamaged, StoreError, Unreachable

log = logging.getLogger("banksman")


class SessionQueue:
    """The write queue of one session, and this host's ownership of it."""

    def __init__(self, session: str, writing: QueueContext) -> None:
        self._session = session
        self._with = writing
        self._calls: deque[Call] = deque()
        self._publishing = Publisher(writing.nats, writing.streams, writing.ownership)
        self._behind = BlockedAppends(writing.journal, writing.names.event(session))
        # Calls that were taken from the queue and have no answer yet. Each gets one, whatever
        # happens to the task.
        self._doing: Sequence[Call] = ()
        self.owned_epoch: OwnedEpoch | None = None
        self._task: asyncio.Task[None] | None = None
        # `_failure` counts failures under the current epoch. `told` is the last one that the writer
        # knows of.
        self._failure = 0
        self.told = 0
        self._is_releasing = False

    @property
    def is_idle(self) -> bool:
        return self._task is None and not self._calls

    def put(self, call: Call) -> None:
        """Add a call to the queue."""
        self._calls.append(call)
        self._behind.note(call)
        if self._task is None:
            is_append = isinstance(call, QueuedAppend)
            self._with.starts.add(
                QueueStart(self.start, call.size if is_append else 0, is_append and call.can_wait)
            )

    def start(self) -> None:
        """Perform the waiting calls, in a later pass of the event loop."""
        # No answer arrives inside the call that makes it, and all appends of one pass go into one
        # message.
        if self._task is None and self._calls:
            self._task = asyncio.get_running_loop().create_task(self._work())

    async def wait_idle(self) -> None:
        """Wait until the queue is empty. Waiting calls start immediately."""
        while not self.is_idle:
            self.start()
            assert self._task is not None
            await asyncio.wait((self._task,))

    @property
    def last_epoch(self) -> int:
        """The epoch of this session after all waiting calls."""
        epoch = 0 if self.owned_epoch is None else self.owned_epoch.epoch
        return epoch + sum(isinstance(call, Advance) for call in self._calls)

    @property
    def is_leaving(self) -> bool:
        """True while a release or a deletion waits or is in progress."""
        return (
            any(isinstance(call, QueuedRelease | Delete) for call in self._calls)
            or self._is_releasing
        )

    async def stop(self, error: StoreError) -> None:
        """Stop the queue, and fail every waiting call with `error`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        self.owned_epoch = None
        self._fail_all(error)

    def _fail_all(self, error: StoreError) -> None:
        """Fail all calls, in the order in which they were made."""
        self._calls.extendleft(reversed(self._doing))
        self._doing = ()
        while self._calls:
            call = self._calls.popleft()
            if isinstance(call, QueuedCall):
                if not call.answer.done():
                    call.answer.set_exception(error)
            else:
                call.error = call.error or error
                self._answer(call, call.error)

    def lose(self) -> None:
        """Give up ownership: another host claimed the session, or the lease is lost."""
        owned_epoch, self.owned_epoch = self.owned_epoch, None
        # The journal keeps the noted appends. Recovery stores them if no other host claims the
        # session first.
        self._behind.stop()
        if owned_epoch is not None:
            self._with.hears.on_owned_epoch(self._session, None)

    # -- calls, one after the other ---------------------------------------------------------------
    async def _work(self) -> None:
        """Perform the waiting calls until the queue is empty, or the rest may wait for more."""
        try:
            while self._calls:
                await self._next(self._calls[0])
                self._doing = ()
                if self._can_rest_wait:
                    break
        except Exception as exc:
            log.exception("session %s: log queue failed, a bug in Banksman", self._session)
            # Answer every caller: a queue that dies silently would leave their writers waiting
            # forever.
            self._fail_all(StoreError(f"a bug in Banksman: {exc!r:.200}", session=self._session))
        finally:
            self._task = None
            self._with.hears.on_idle(self._session)
        # Not after a cancellation: a stopped queue does not start again.
        if self._calls:
            self._with.starts.add(QueueStart(self.start, 0, can_wait=True))

    @property
    def _can_rest_wait(self) -> bool:
        """Whether the waiting calls are frames that do not fill a message."""
        size = events = 0
        for call in self._calls:
            if not isinstance(call, QueuedAppend) or not call.can_wait:
                return False
            size += call.size
            events += len(call.part.entries)
            if size >= message_codec.MESSAGE_BYTES_MAX or events >= message_codec.EVENTS_MAX:
                return False
        return True

    async def _next(self, call: Call) -> None:
        """Perform the call at the head of the queue."""
        match call:
            case QueuedAppend():
                await self._append()
            case QueuedCall():
                self._doing = (self._calls.popleft(),)
                await self._answer_asked(call)
            case QueuedRelease() if self.owned_epoch is None:
                self._doing = (self._calls.popleft(),)
                # This queue does not own the session, but the record may still name this host: an
                # earlier release was not acknowledged in time.
                if self._with.ownership.is_ours(self._session, call.epoch):
                    await self._release(call.epoch, message_codec.BEGINNING)
            case _:
                self._doing = (self._calls.popleft(),)
                error = self._refusal(call)
                if error is None:
                    try:
                        await self._do(call)
                    except (StoreError, NotOwner) as exc:
                        error = exc
                        self._lose_if_superseded(exc)
                if not isinstance(call, QueuedRelease):
                    self._answer(call, error)

    async def _do(self, call: WriterCall) -> None:
        owned_epoch = self.owned_epoch
        assert owned_epoch is not None
        ownership = self._with.ownership
        match call:
            case Advance():
                await ownership.advance(owned_epoch)
                if self.owned_epoch is owned_epoch:  # The session was not lost during the await.
                    self._with.hears.on_owned_epoch(self._session, owned_epoch)
            case QueuedLease(name=name):
                await ownership.lease(owned_epoch, name, self._with.hears.settle)
            case QueuedRelease():
                # Give up ownership before the release is sent: its result may stay unknown. An
                # append behind a release that took effect could race with the next owner.
                self.owned_epoch = None
                self._with.hears.on_owned_epoch(self._session, None)
                await self._release(owned_epoch.epoch, owned_epoch.place)
            case _:
                raise AssertionError(call)

    async def _release(self, epoch: int, place: MessagePlace) -> None:
        """Release the session by its record."""
        self._is_releasing = True
        try:
            await self._with.ownership.release(self._session, epoch, place)
        finally:
            self._is_releasing = False

    async def _answer_asked(self, call: QueuedCall) -> None:
        """Perform a claim or a deletion, and answer its caller."""
        if call.answer.cancelled():
            # Cancelled before it started. A claim would fence the current writer on this host for
            # nothing.
            return
        try:
            match call:
                case Claim(name=name, agent=agent):
                    value = await self._claim(name, agent)
                case Delete():
                    value = None
                    await self._with.hears.keep_usage(self._session)
                    await self._with.ownership.delete(self._session, self._forget_blobs)
                    self.owned_epoch = None
                    self._with.hears.on_deleted(self._session)
                case _:
                    raise AssertionError(call)
        except BanksmanError as exc:
            if not call.answer.done():
                call.answer.set_exception(exc)
            return
        if not call.answer.done():
            call.answer.set_result(value)
        elif isinstance(call, Claim) and self.owned_epoch is not None:
            # The caller of the claim was cancelled, so it would never release the session.
            self.put(QueuedRelease(self.owned_epoch.epoch, self.told, None))

    async def _forget_blobs(self) -> None:
        try:
            await self._with.hears.forget_blobs(self._session, None)
        except Unreachable:
            # Retry: only the events know the blob names, and they are kept until this succeeds.
            raise
        except StoreError as exc:
            log.warning("session %s: deleted, but its blobs remain: %s", self._session, exc)

    async def _claim(self, name: str | None, agent: str | None) -> int:
        owned_epoch = await self._with.ownership.claim(self._session, name, agent)
        # If the lease was lost during the claim, the record names the old id. The servers end that
        # lease, so the session becomes free without a release.
        if owned_epoch.host != self._with.leases.id:
            raise NotOwner("this host has just lost its lease", session=self._session)
        self.owned_epoch = owned_epoch
        self._failure = self.told = 0
        self._with.hears.on_owned_epoch(self._session, owned_epoch)
        self._with.hears.on_stored(self._session, owned_epoch.place, 0, MessageBody(()))
        return owned_epoch.epoch

    # -- answers ----------------------------------------------------------------------------------
    def _refusal(self, call: WriterCall) -> StoreError | NotOwner | None:
        """Return the error of a call that must not run; None if it may run."""
        if call.error is not None:
            return call.error
        owned_epoch = self.owned_epoch
        if owned_epoch is None or call.epoch != owned_epoch.epoch:
            current = 0 if owned_epoch is None else owned_epoch.epoch
            return NotOwner(
                f"cannot write session {self._session}: another writer owns it",
                hint="open the session again, or use it at its owner",
                session=self._session,
                epoch=call.epoch,
                current=current,
            )
        # An earlier call failed after the writer made this one. This call builds on the failed one.
        # A release builds on nothing, and always runs.
        if call.told < self._failure and not isinstance(call, QueuedRelease):
            message = f"cannot write session {self._session}: an earlier call was refused"
            return NotOwner(message, session=self._session, epoch=call.epoch)
        return None

    def _answer(self, call: WriterCall, error: StoreError | NotOwner | None) -> None:
        """Give a call its result, and record a failure so that calls that build on it fail too."""
        is_of_owner = self.owned_epoch is not None and call.epoch == self.owned_epoch.epoch
        # A refused lease fails no later call: the writer learns that another session has the lease,
        # and its appends do not build on it.
        is_lease_taken = isinstance(call, QueuedLease) and isinstance(error, NotOwner)
        if error is not None and is_of_owner and call.told >= self._failure and not is_lease_taken:
            self._failure += 1
        # Update `told` before the callback, so that the writer may make new calls inside its
        # `done`.
        if is_of_owner and error is not None:
            self.told = self._failure
        if call.done is None:
            return
        try:
            call.done(error)
        except Exception:
            # This is a bug of one writer. The other callers wait for their answers.
            log.exception("callback of a writer failed (session=%s)", self._session)

    def _lose_if_superseded(self, error: Exception) -> None:
        """Give up ownership if the error says that another writer owns this session.

        A refused conversation lease names the session that holds it, and changes nothing here.
        """
        if isinstance(error, NotOwner) and error.ids.get("session") == self._session:
            self.lose()

    # -- appends ----------------------------------------------------------------------------------
    async def _append(self) -> None:
        """Store the appends at the head of the queue as one message, and answer them."""
        self._doing = batch = self._take_batch()
        if not batch:
            call = self._calls.popleft()
            assert isinstance(call, QueuedAppend)
            self._answer(call, self._refusal(call) or self._misplaced(call))
            return
        error: StoreError | NotOwner | None = None
        if any(call.part.entries or call.snapshot is not None for call in batch):
            try:
                await self._store(batch)
            except (StoreError, NotOwner) as exc:
                error = exc
                if isinstance(exc, StoreError):
                    self._with.hears.on_failure()
        if isinstance(error, NotOwner):
            # Another host owns the session. Every waiting call is refused when its turn comes.
            self.lose()
        for call in batch:
            self._answer(call, error)

    def _take_batch(self) -> list[QueuedAppend]:
        """Take the consecutive appends at the head of the queue that fit into one message."""
        batch: list[QueuedAppend] = []
        owned_epoch = self.owned_epoch
        seq = 0 if owned_epoch is None else owned_epoch.seq
        size = events = 0
        while self._calls:
            call = self._calls[0]
            if (
                not isinstance(call, QueuedAppend)
                or self._refusal(call) is not None
                or call.expected_seq != seq
            ):
                break
            size += call.size
            events += len(call.part.entries)
            if batch and (
                size > message_codec.MESSAGE_BYTES_MAX or events > message_codec.EVENTS_MAX
            ):
                break
            batch.append(call)
            self._calls.popleft()
            seq += len(call.part.entries)
        return batch

    def _misplaced(self, call: QueuedAppend) -> NotOwner:
        """Build the error for an append whose expected seq is not the end of the session."""
        assert self.owned_epoch is not None
        return NotOwner(
            f"cannot append to session {self._session}: its last seq is not {call.expected_seq}",
            hint="open the session again, or use it at its owner",
            session=self._session,
            expected_seq=call.expected_seq,
            seq=self.owned_epoch.seq,
        )

    async def _store(self, batch: Sequence[QueuedAppend]) -> None:
        """Write one message to the journal and publish it."""
        owned_epoch = self.owned_epoch
        assert owned_epoch is not None
        before = owned_epoch.place
        parts = [call.part for call in batch if call.part.entries]
        count = sum(len(part.entries) for part in parts)
        seq, snapshot, snapshot_seq = before.last, None, 0
        for call in batch:
            seq += len(call.part.entries)
            if call.snapshot is not None:
                snapshot, snapshot_seq = call.snapshot, seq
        body = MessageBody(parts, snapshot, snapshot_seq)
        data = message_codec.encode(body)
        # The id ends in a nonce. An earlier message behind the same sequence may have been refused
        # and still arrive. Under an equal id the servers would deduplicate: they would drop this
        # message and report it as stored.
        id = f"{token(self._session)}.{owned_epoch.epoch}.{before.seq}.{next(self._with.nonces)}"
        blob = before.blob_after
        if len(data) > message_codec.MESSAGE_BYTES_MAX:
            blob = id
        header = message_codec.header(
            epoch=owned_epoch.epoch,
            first=before.last + 1,
            held=count,
            snapshot=before.snapshot if snapshot is None else None,
            at=parts[-1].at if parts else before.at,
            blob=blob,
        )
        row = JournalRow(self._with.names.event(self._session), id, before.seq, header, data)
        began = time.perf_counter()
        try:
            await self._with.journal.put(row)
        except StoreError:
            self._behind.forget()
            raise
        overdue = asyncio.get_running_loop().call_later(
            OVERDUE_SECONDS, self._fall_behind, owned_epoch, seq + 1
        )
        try:
            message_seq = await self._publishing.until_known(
                owned_epoch, row, lambda: self._is_ours(owned_epoch)
            )
        except NotOwner:
            leases = self._with.leases
            # With a valid lease another claim has superseded this epoch, or the writer's next claim
            # will. So the message is stored already, or refused for ever. After a lost lease it may
            # still be the next message: it stays in the journal (`journal_recovery.py`).
            if leases.id == owned_epoch.host and leases.is_held:
                self._with.journal.report(row)
                self._behind.report()
            raise
        except StoreDamaged:
            # The message that it follows is lost, or a foreign message is last there. In both cases
            # this message can never be stored.
            self._with.journal.report(row)
            self._behind.report()
            raise
        except StoreError:
            # The servers refused the message and no earlier attempt was sent, so it is not stored.
            # The writer gets that error, so the journal must not store the message later.
            self._with.journal.drop(id)
            self._behind.forget()
            raise
        finally:
            overdue.cancel()
        # Drop it only after the ack: a crash in between publishes it again under the same id, which
        # the servers deduplicate.
        self._with.journal.drop(id)
        self._behind.pass_by(seq)
        self._with.hears.on_published(time.perf_counter() - began)
        owned_epoch.place = message_codec.place(message_seq, header)
        self._with.hears.on_stored(self._session, owned_epoch.place, len(data), body)
        await self._with.hears.after_stored(self._session, owned_epoch.place, len(data))

    def _is_ours(self, owned_epoch: OwnedEpoch) -> bool:
        """Return whether this claim still holds, by the queue and by the clock of the lease."""
        return self.owned_epoch is owned_epoch and self._with.leases.is_held

    def _fall_behind(self, owned_epoch: OwnedEpoch, first: int) -> None:
        """Start to note waiting appends in the journal: the message in flight is overdue."""
        if self.owned_epoch is owned_epoch:
            self._behind.begin(owned_epoch.epoch, first, self._calls)
