"""What is asked of a session, in the order in which it was: each waits in its line (`session_queue.py`), and is
answered.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from banksman.cluster.log.message_codec import MessagePart
from banksman.errors import NotOwner, StoreError
from banksman.store.log import Done


@dataclass(slots=True, eq=False)
class WriterCall:
    """A call of a writer's. `told`: the last failure that its writer had been told of when it called: what rests on one
    that it does not know of yet must fail too."""

    epoch: int
    told: int
    done: Done | None
    # Decided already: the log was closed when it came.
    error: StoreError | NotOwner | None = None


@dataclass(slots=True, eq=False)
class QueuedAppend(WriterCall):
    expected_seq: int = 0
    part: MessagePart = field(default_factory=lambda: MessagePart(0.0, ()))
    snapshot: bytes | None = None

    @property
    def size(self) -> int:
        return sum(len(data) for _, _, data in self.part.entries) + len(self.snapshot or b"")


@dataclass(slots=True, eq=False)
class Advance(WriterCall):
    pass


@dataclass(slots=True, eq=False)
class QueuedLease(WriterCall):
    name: str | None = None


@dataclass(slots=True, eq=False)
class QueuedRelease(WriterCall):
    pass


@dataclass(slots=True, eq=False)
class QueuedCall:
    """A call that somebody waits for."""

    answer: asyncio.Future[Any]


@dataclass(slots=True, eq=False)
class Claim(QueuedCall):
    name: str | None
    agent: str | None


@dataclass(slots=True, eq=False)
class Delete(QueuedCall):
    pass


Call = QueuedAppend | Advance | QueuedLease | QueuedRelease | WriterCall | Claim | Delete
