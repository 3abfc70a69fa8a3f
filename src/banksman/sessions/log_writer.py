"""A session's hold on its log: its generation as a writer, its place in the log, and the lease of its conversation.

Appends are not waited for; their answers come back in order. After a failure those still on their way belong to a run
that is over, and what is said of them is not passed on: the next append begins again where the log is durable.

What the log says is folded as it is written, so that a snapshot of it can be written with the events that it is of.
Secrets are taken out here, before anything else: neither the log nor the fold ever has them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Protocol

from banksman.core.session import history as pasts
from banksman.core.session.event import Entry
from banksman.core.session.history import SessionHistory
from banksman.core.wire.redaction import Redactor
from banksman.core.wire.stream_redaction import StreamedRedactor
from banksman.errors import NotOwner, StoreError
from banksman.store.log import Log

_data_of = itemgetter(2)
# What may be on its way to the log before the agent is no longer read. The pipe then pushes back on the agent; nothing
# is dropped.
UNCOMMITTED_BYTES_MAX = 8 << 20
# Whoever opens a session folds at most about so many events: some milliseconds.
SNAPSHOT_EVENTS = 1000


class LogListener(Protocol):
    """Who is told what became of appends: the driver."""

    def on_committed(self, seq: int) -> None: ...
    def on_append_failed(self, error: StoreError | NotOwner) -> None: ...
    def on_answered(self) -> None:
        """After either, and also after an answer that says nothing any more."""
        ...


class LogWriter:
    """Of a session that was claimed, under this epoch, with this past; its conversation, if it has one, is leased."""

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
        self._agent = past.session.config.dialect.name
        self._hears = hears
        self._redactor = None if redactor is None else StreamedRedactor(redactor)
        self.epoch = epoch
        # What was appended, what of it is durable, and which run of appends is meant.
        self._past = self._durable = past
        self._durable_epoch = epoch
        self._run = 0
        # What is to be done when the epoch is raised, while that is on its way.
        self._then: Callable[[], None] | None = None
        self._uncommitted_bytes = 0
        # Since the last snapshot. One that is large, for all that waits in the queue, is written the less often: not
        # before as much was appended as it weighs.
        self._events_since = 0
        self._bytes_since = 0
        self._snapshot_bytes = 0
        # The conversation that is leased, and the one that was last asked for.
        self.conversation = self._wanted = past.session.conversation

    @property
    def is_behind(self) -> bool:
        return self._uncommitted_bytes > UNCOMMITTED_BYTES_MAX

    @property
    def has_caught_up(self) -> bool:
        return self._uncommitted_bytes <= UNCOMMITTED_BYTES_MAX // 2

    # -- appending ---------------------------------------------------------------------------------------------------
    def append(self, entries: Sequence[Entry]) -> None:
        if self._redactor is not None:
            entries = self._redactor.entries(entries)
        size = sum(map(len, map(_data_of, entries)))
        expected = self._past.session.head
        self._past = pasts.fold(self._past, entries)
        self._uncommitted_bytes += size
        done = partial(self._on_answer, self._run, self._past, self.epoch, size)
        snapshot = self._snapshot_if_due(len(entries), size)
        self._store.append(self._session, self.epoch, expected, time.time(), entries, done, snapshot)

    def _snapshot_if_due(self, events: int, size: int) -> bytes | None:
        self._events_since += events
        self._bytes_since += size
        if self._events_since < SNAPSHOT_EVENTS or self._bytes_since < self._snapshot_bytes:
            return None
        snapshot = pasts.encode(self._past)
        self._events_since = self._bytes_since = 0
        self._snapshot_bytes = len(snapshot)
        return snapshot

    def advance(self, then: Callable[[], None]) -> None:
        """A new process is a new generation: what an older one still has to say is refused. Our own epoch is raised,
        and never taken: whoever claimed the session in the meantime has it. `then` is called once it is ours."""
        is_on_its_way, self._then = self._then is not None, then
        if not is_on_its_way:  # Else the one before was not needed after all, and serves as well.
            before, self.epoch = self.epoch, self.epoch + 1
            done = partial(self._on_advanced, self._run, self._past, self.epoch)
            self._store.advance(self._session, before, done)

    def _on_advanced(self, run: int, past: SessionHistory, epoch: int, error: StoreError | NotOwner | None) -> None:
        then, self._then = self._then, None
        is_meant = run == self._run
        self._on_answer(run, past, epoch, 0, error)
        if is_meant and error is None and then is not None:
            then()

    def _on_answer(
        self, run: int, past: SessionHistory, epoch: int, size: int, error: StoreError | NotOwner | None
    ) -> None:
        self._uncommitted_bytes -= size
        if run == self._run:
            if error is None:
                is_more = past.session.head > self._durable.session.head
                self._durable, self._durable_epoch = past, epoch
                if is_more:
                    self._hears.on_committed(past.session.head)
            else:
                self._run += 1
                self._past, self.epoch = self._durable, self._durable_epoch
                self._events_since = SNAPSHOT_EVENTS  # A snapshot may have been lost with it.
                self._hears.on_append_failed(error)
        self._hears.on_answered()

    def release(self) -> None:
        """Nothing more will be said. What is on its way still is; if an epoch is, nobody knows yet which we have."""
        for epoch in sorted({self._durable_epoch, self.epoch}):
            self._store.release(self._session, epoch)

    # -- the conversation --------------------------------------------------------------------------------------------
    def lease(self, conversation: str | None, on_taken: Callable[[NotOwner], None]) -> None:
        """Two processes that drive one conversation both answer, and neither knows of the other: agents have no lock.
        So the log has one, for all of its sessions. `on_taken`: another has it, and what we had is still ours."""
        if conversation != self._wanted:
            self._wanted = conversation
            name = None if conversation is None else lease_name(self._agent, conversation)
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
        if self._wanted == conversation:
            self._wanted = self.conversation
        if run == self._run and isinstance(error, NotOwner) and error.ids.get("session") != self._session:
            on_taken(error)
        elif run == self._run:
            self._on_answer(run, self._past, self.epoch, 0, error)


def lease_name(agent: str, conversation: str) -> str:
    """By what the log knows a conversation of an agent's."""
    return f"{agent}:{conversation}"
