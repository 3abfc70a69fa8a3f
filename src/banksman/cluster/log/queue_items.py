"""What is asked of a session, in the order in which it was: each waits in its line (`session_queue.py`), and is
answered.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from banksman.cluster.log.message_codec import Part
from banksman.errors import NotOwner, StoreError
from banksman.store.log import Done


@dataclass(slots=True, eq=False)
class Told:
    """A call of a writer's. `told`: the last failure that its writer had been told of when it called: what rests on one
    that it does not know of yet must fail too."""

    epoch: int
    told: int
    done: Done | None
    # Decided already: the log was closed when it came.
    error: StoreError | NotOwner | None = None


@dataclass(slots=True, eq=False)
class Append(Told):
    expected_seq: int = 0
    part: Part = field(default_factory=lambda: Part(0.0, ()))
    snapshot: bytes | None = None

    @property
    def size(self) -> int:
        return sum(len(data) for _, _, data in self.part.entries) + len(self.snapshot or b"")


@dataclass(slots=True, eq=False)
class Advance(Told):
    pass


@dataclass(slots=True, eq=False)
class Lease(Told):
    name: str | None = None


@dataclass(slots=True, eq=False)
class Release(Told):
    pass


@dataclass(slots=True, eq=False)
class Asked:
    """A call that somebody waits for."""

    answer: asyncio.Future[Any]


@dataclass(slots=True, eq=False)
class Claim(Asked):
    name: str | None
    agent: str | None


@dataclass(slots=True, eq=False)
class Delete(Asked):
    pass


Call = Append | Advance | Lease | Release | Told | Claim | Delete
