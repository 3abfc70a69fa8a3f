"""A session's hold on its log: its generation as a writer, its place in the log, and the lease of its conversation.

Appends are not waited for; their answers come back in order. After a failure those still on their way belong to a run
that is over, and what is said of them is not passed on: the next append begins again where the log is durable.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import Protocol

from banksman.core.event import Entry
from banksman.errors import BanksmanError, NotOwner, StoreError
from banksman.store.log import Log

_data_of = itemgetter(2)
# What may be on its way to the log before the agent is no longer read. The pipe then pushes back on the agent; nothing
# is dropped.
UNCOMMITTED_BYTES_MAX = 8 << 20


class Hears(Protocol):
    """Who is told what became of appends: the driver."""

    def on_committed(self, seq: int) -> None: ...
    def on_append_failed(self, error: StoreError | NotOwner) -> None: ...
    def on_answered(self) -> None:
        """After either, and also after an answer that says nothing any more."""
        ...


class Tenure:
    """Claimed from the moment it is made: raises if another session has the conversation, or the log is closed."""

    def __init__(  # noqa: PLR0917
        self, store: Log, session: str, agent: str, head: int, conversation: str | None, hears: Hears
    ) -> None:
        self._store = store
        self._session = session
        self._agent = agent
        self._hears = hears
        # The last append, the last that is durable, and which run of appends is meant.
        self._appended = head
        self._committed = head
        self._run = 0
        self._unanswered = 0
        self._uncommitted_bytes = 0
        self.conversation: str | None = None
        # Before it is claimed: a conversation that another one drives is a reason not to begin at all.
        self.lease(conversation)
        try:
            self.epoch = store.claim(session)
        except BanksmanError:
            self.lease(None)  # Nobody will ever close what was not opened.
            raise

    @property
    def is_answered(self) -> bool:
        return not self._unanswered

    @property
    def is_behind(self) -> bool:
        return self._uncommitted_bytes > UNCOMMITTED_BYTES_MAX

    @property
    def has_caught_up(self) -> bool:
        return self._uncommitted_bytes <= UNCOMMITTED_BYTES_MAX // 2

    def raise_epoch(self) -> None:
        """A new process is a new generation: what an older one still has to say is refused. It is raised, not taken:
        whoever claimed the session in the meantime has it."""
        self.epoch = self._store.claim(self._session, self.epoch)

    # -- appending ---------------------------------------------------------------------------------------------------
    def append(self, entries: Sequence[Entry]) -> None:
        size = sum(map(len, map(_data_of, entries)))
        self._uncommitted_bytes += size
        expected = self._appended
        self._unanswered += 1
        self._appended += len(entries)
        done = partial(self._on_answer, self._run, self._appended, size)
        self._store.append(self._session, self.epoch, expected, time.time(), entries, done)

    def _on_answer(self, run: int, seq: int, size: int, error: StoreError | NotOwner | None) -> None:
        self._unanswered -= 1
        self._uncommitted_bytes -= size
        if run == self._run:
            if error is None:
                self._committed = seq
                self._hears.on_committed(seq)
            else:
                self._run += 1
                self._appended = self._committed
                self._hears.on_append_failed(error)
        self._hears.on_answered()

    # -- the conversation --------------------------------------------------------------------------------------------
    def lease(self, conversation: str | None) -> None:
        """Two processes that drive one conversation both answer, and neither knows of the other: agents have no lock.
        So the log has one, for all of its sessions. `NotOwner`: another has it, and what we had is still ours."""
        if conversation == self.conversation:
            return
        if conversation is not None:
            self._store.lease(self._name_of(conversation), self._session)
        if self.conversation is not None:
            self._store.release(self._name_of(self.conversation), self._session)
        self.conversation = conversation

    def _name_of(self, conversation: str) -> str:
        return f"{self._agent}:{conversation}"
