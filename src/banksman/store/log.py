"""The protocol of the log: what every engine promises, and all that the rest of the package knows of any.

A log holds, for each session, its events in order. A session has one writer at a time: `claim` raises the epoch, and an
append under an older one is refused (`NotOwner`), whatever it holds. An append is whole or not at all, and says which
seq it expects to follow: two writers that both believe to be the owner cannot both be right.

`append` does not wait. The engine commits in groups and calls `done` later, never inside `append`: with None when the
chunk is durable at the engine's level, or with the error that kept it out. For one session the answers come in the
order of the appends; after one has failed, those behind it fail too, since their expected seq is wrong.

Readers take what is committed, then wait past the head. There is no other way to hear of an event, so there is no gap
between what was stored and what comes next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from banksman.core.event import Entry, Event, Project
from banksman.errors import NotOwner, StoreError

Done = Callable[[StoreError | NotOwner | None], None]

# A page of events, at most, whatever the caller asks for: a reader must not hold a whole history in memory.
READ_EVENTS_MAX = 1000


class Head(NamedTuple):
    """A session's place: its writer's generation, its last committed seq, and the first one that is still kept."""

    epoch: int
    seq: int
    first: int


class Page(NamedTuple):
    """`events` follow `after`, but for the range `gap` (first, last) that retention took, if there is one."""

    events: Sequence[Event]
    gap: tuple[int, int] | None


class Log(Protocol):
    """One store. Every method belongs to the loop it was opened in.

    `is_durable` False: it lasts as long as its host, and whoever forgets a session should delete its history.
    """

    is_durable: bool

    def claim(self, session: str, held: int | None = None) -> int:
        """Become the writer: the new epoch. What the writer before still appends is refused from here on.

        `held`: the epoch that we hold, to raise our own; `NotOwner` if somebody has claimed the session since.
        """
        ...

    def lease(self, name: str, session: str) -> None:
        """Let this session, and no other, have what this name stands for: a conversation of an agent's. `NotOwner`,
        naming the holder, if another one has it. Whoever has it may take it again."""
        ...

    def release(self, name: str, session: str) -> None:
        """Give it back. What another session has is let be."""
        ...

    def append(  # noqa: PLR0917
        self, session: str, epoch: int, expected_seq: int, at: float, entries: Sequence[Entry], done: Done
    ) -> None:
        """Write `entries` as the events after `expected_seq`, at wall time `at`. See the module."""
        ...

    def head(self, session: str) -> Head:
        """Where a session is. One that was never claimed: epoch 0, seq 0."""
        ...

    async def read(
        self, session: str, after: int, limit: int = READ_EVENTS_MAX, project: Project | None = None
    ) -> Page:
        """The committed events after a seq, oldest first, at most `limit`. `project` is for the events to have: see
        `Event.body`."""
        ...

    async def wait_past(self, session: str, seq: int) -> None:
        """Until an event after `seq` is committed. Cancelling it leaves nothing behind."""
        ...

    def sessions(self) -> list[str]:
        """Every session that the log knows, oldest first."""
        ...

    def delete(self, session: str) -> None:
        """Forget a session's history for good. Its writer, if any, is refused from here on."""
        ...

    async def close(self) -> None:
        """Commit what was appended, then let go. Appends are refused from the first moment."""
        ...
