"""Log writer of an owned session: appends, epoch, snapshots and the conversation's lease.

Appends are pipelined, and their results arrive in order. If too many bytes are not durable, the
writer is behind, and the driver stops reading the agent. The lease is a lock in the log on the
agent's conversation, so that no two sessions drive it. `log_reader.py` reads the log.

After a failure, the appends still in flight belong to a run that is over, and their results are
ignored. The next append starts at the last durable position.

The writer folds the events as it appends them, so that a snapshot can be stored with the events
that it covers. Secrets are removed first: neither the log nor the fold ever contains them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Protocol

from banksman.core.redaction.redactor import Redactor
from banksman.core.redaction.stream_redactor import StreamedRedactor
from banksman.core.session import history as pasts
from banksman.core.session.event import Entry
from banksman.core.session.history import SessionHistory
from banksman.errors import NotOwner, StoreError
from banksman.store.log import Log

_data_of = itemgetter(2)
# Limit on bytes that are not durable yet. Beyond it the driver stops reading the agent. The pipe
# then blocks the agent, and nothing is dropped.
UNCOMMITTED_BYTES_MAX = 8 << 20
# Opening a session folds at most about this many events, which takes some milliseconds.
SNAPSHOT_EVENTS = 1000


class LogListener(Protocol):
    """Callbacks for the results of appends. The driver implements them."""

    def on_committed(self, seq: int) -> None: ...
    def on_append_failed(self, error: StoreError | NotOwner) -> None: ...
    def on_backlog(self) -> None:
        """The writer is behind."""
        ...

    def on_answered(self) -> None:
        """An append was answered that the writer was still catching up with.

        Also called for answers of a run that is over.
        """
        ...


class LogWriter:
    """Log writer of a claimed session under one epoch.

    `past`: the history of the session. Its conversation, if it has one, is already leased.
    """

    def __init__(
        self,
        store: Log,
        session: str,
        past: SessionHistory,
        *,
        epoch: int,
        hears: LogListener,
        redactor: Redactor | None = None,
    ) -> None:
        self._store = store
        self._session = session
        self._hears = hears
        self._redactor = None if redactor is None else StreamedRedactor(redactor)
        self.epoch = epoch
        # The history with all appends but the last frames, and the seq of the last append. Then the
        # same for the durable part, and the number of the current run. Each failure starts a new
        # run.
        self._past = self._durable = past
        self._head = self._durable_head = past.session.head
        self._durable_epoch = epoch
        self._run = 0
        # Callback for the raised epoch, while `advance` is in flight.
        self._then: Callable[[], None] | None = None
        # Called before each append with the seq of its last event. Set for a session whose process
        # has a journal, which few have.
        self.on_append: Callable[[int], None] | None = None
        self._uncommitted_bytes = 0
        # Counted since the last snapshot. A snapshot can be large if many asks are queued. So the
        # next snapshot waits until the appends weigh as much as the last snapshot.
        self._events_since = 0
        self._bytes_since = 0
        self._snapshot_bytes = 0
        # The leased conversation, and the last requested conversation.
        self.conversation = self._wanted = past.session.conversation

    @property
    def store_identity(self) -> str:
        """See `Log.identity`."""
        return self._store.identity

    @property
    def head(self) -> int:
        """The seq of the last append."""
        return self._head

    @property
    def durable_head(self) -> int:
        """The seq of the last durable event."""
        return self._durable_head

    @property
    def is_behind(self) -> bool:
        """Whether the driver must stop reading the agent."""
        return self._uncommitted_bytes > UNCOMMITTED_BYTES_MAX

    @property
    def has_caught_up(self) -> bool:
        """Whether the driver may read the agent again."""
        return self._uncommitted_bytes <= UNCOMMITTED_BYTES_MAX // 2

    @property
    def redaction(self) -> Any:
        """Memory of the redactor about the streamed texts; None without secrets."""
        return None if self._redactor is None else self._redactor.memory

    def remember_redaction(self, memory: Any) -> None:
        """Continue where the redactor of another host has stopped."""
        if self._redactor is not None and memory is not None:
            self._redactor.remember(memory)

    # -- appending --------------------------------------------------------------------------------
    def append(self, entries: Sequence[Entry]) -> None:
        """Fold the entries into the history and append them, without waiting.

        The store applies a compare-and-set: it rejects the append if the epoch is stale (fencing)
        or if the head of the log is not `expected`.
        """
        if self._redactor is not None:
            entries = self._redactor.entries(entries)
        expected = self._head
        self._past = pasts.fold(self._whole_past(), entries)
        self._head = self._past.session.head
        self._append(entries, expected)

    def append_frames(self, entries: Sequence[Entry]) -> None:
        """Append frames of the agent. The history only counts them."""
        if self._redactor is not None:
            entries = self._redactor.entries(entries)
        expected = self._head
        self._head += len(entries)
        self._append(entries, expected)

    def _append(self, entries: Sequence[Entry], expected: int) -> None:
        size = sum(map(len, map(_data_of, entries)))
        self._uncommitted_bytes += size
        done = partial(self._on_answer, self._run, self._past, self._head, self.epoch, size)
        self._events_since += len(entries)
        self._bytes_since += size
        snapshot = self._snapshot_if_due() if self._events_since >= SNAPSHOT_EVENTS else None
        if self.on_append is not None:
            self.on_append(self._head)
        self._store.append(
            self._session, self.epoch, expected, time.time(), entries, done, snapshot
        )
        if self._uncommitted_bytes > UNCOMMITTED_BYTES_MAX:
            self._hears.on_backlog()

    def _snapshot_if_due(self) -> bytes | None:
        """Return a snapshot of a history with enough new events; None if it is not due yet."""
        if self._bytes_since < self._snapshot_bytes:
            return None
        if self._past.held is not None:
            return None  # The last event of this writer. No snapshot has it.
        snapshot = pasts.encode(self._whole_past())
        self._events_since = self._bytes_since = 0
        self._snapshot_bytes = len(snapshot)
        return snapshot

    def _whole_past(self) -> SessionHistory:
        """Return the history with all appends."""
        return pasts.skip(self._past, self._head - self._past.session.head)

    def advance(self, then: Callable[[], None]) -> None:
        """Raise the epoch for a new process, and call `then` when the log has confirmed it.

        Each process has its own epoch, so that late appends of an older process are rejected. The
        epoch is raised by compare-and-set from this writer's epoch. If another host has claimed the
        session meanwhile, the call fails and that host keeps the session.
        """
        is_on_its_way, self._then = self._then is not None, then
        # Otherwise an earlier call is in flight whose start was cancelled. Its new epoch serves
        # this start.
        if not is_on_its_way:
            before, self.epoch = self.epoch, self.epoch + 1
            done = partial(self._on_advanced, self._run, self._past, self._head, self.epoch)
            self._store.advance(self._session, before, done)

    def _on_advanced(
        self,
        run: int,
        past: SessionHistory,
        head: int,
        epoch: int,
        error: StoreError | NotOwner | None,
    ) -> None:
        then, self._then = self._then, None
        # Compared first, because `_on_answer` starts a new run after an error.
        is_meant = run == self._run
        self._on_answer(run, past, head, epoch, 0, error)
        if is_meant and error is None and then is not None:
            then()

    def _on_answer(  # noqa: PLR0917  Called once per append: keyword arguments would cost time.
        self,
        run: int,
        past: SessionHistory,
        head: int,
        epoch: int,
        size: int,
        error: StoreError | NotOwner | None,
    ) -> None:
        # As `has_caught_up`, without a call: this is the path of every token.
        was_behind = self._uncommitted_bytes > UNCOMMITTED_BYTES_MAX // 2
        self._uncommitted_bytes -= size
        if run == self._run:
            if error is None:
                is_more = head > self._durable_head
                self._durable, self._durable_head, self._durable_epoch = past, head, epoch
                if is_more:
                    self._hears.on_committed(head)
            else:
                # The appends in flight build on the failed append, so they cannot succeed. A new
                # run number makes this writer ignore their answers. The next append starts from the
                # durable state.
                self._run += 1
                self._past, self._head = self._durable, self._durable_head
                self.epoch = self._durable_epoch
                # The failed append may have carried a snapshot, so the next append carries one.
                self._events_since = SNAPSHOT_EVENTS
                self._hears.on_append_failed(error)
        if was_behind:
            self._hears.on_answered()

    def release(self) -> None:
        """Release the session after the last append.

        Appends in flight are still written. If `advance` is in flight, the current epoch is not
        known, so both epochs are released.
        """
        for epoch in sorted({self._durable_epoch, self.epoch}):
            self._store.release(self._session, epoch)

    # -- the conversation -------------------------------------------------------------------------
    def lease(
        self, agent: str, conversation: str | None, on_taken: Callable[[NotOwner], None]
    ) -> None:
        """Lease a conversation of an agent in the log, or give the lease up with None.

        Two processes that drive the same conversation would both answer without knowing of each
        other, because agents have no lock. So the log has a lock across all of its sessions.
        `on_taken`: called if another session holds the lease; the previous lease of this session is
        kept.
        """
        if conversation != self._wanted:
            self._wanted = conversation
            name = None if conversation is None else lease_name(agent, conversation)
            done = partial(self._on_leased, self._run, conversation, on_taken)
            self._store.lease(self._session, self.epoch, name, done)

    def _on_leased(
        self,
        run: int,
        conversation: str | None,
        on_taken: Callable[[NotOwner], None],
        error: StoreError | NotOwner | None,
    ) -> None:
        if error is None:
            self.conversation = conversation
            return
        # The request failed. The next `lease` call must send the request again.
        if self._wanted == conversation:
            self._wanted = self.conversation
        # `NotOwner` of another session: only the conversation is taken, and the session itself
        # continues. Any other error means that the session cannot be written, like a failed append.
        if (
            run == self._run
            and isinstance(error, NotOwner)
            and error.ids.get("session") != self._session
        ):
            on_taken(error)
        elif run == self._run:
            self._on_answer(run, self._past, self._head, self.epoch, 0, error)


def lease_name(agent: str, conversation: str) -> str:
    """Return the log's key for the lease of an agent's conversation."""
    return f"{agent}:{conversation}"
