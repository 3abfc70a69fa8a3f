"""What binds the hosts of many machines: who is there, how the owner of a session is asked, and who takes what is new.

Protocols only, for `run` and `serve`; `store/cluster/` has them on NATS. A store of one machine has no cluster.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol

# Gets what was asked, gives what is answered.
Answerer = Callable[[bytes], Awaitable[bytes]]


class HostSeen(NamedTuple):
    """A host, as it said last. `room`: how many sessions it takes, 0: none, it only serves readers and callers; `used`:
    how many it has. `seen`: when that was heard, `time.monotonic()` here."""

    id: str
    name: str
    pid: int
    labels: tuple[str, ...]
    agents: tuple[str, ...]
    room: int
    used: int
    version: str
    is_draining: bool
    since: float
    seen: float


class HostReport(NamedTuple):
    """What a host says of itself with every heartbeat."""

    name: str
    labels: tuple[str, ...] = ()
    agents: tuple[str, ...] = ()
    room: int = 0
    used: int = 0
    is_draining: bool = False


class Hosts(Protocol):
    lease_seconds: float

    @property
    def id(self) -> str:
        """Ours; another one after a fence."""
        ...

    @property
    def is_held(self) -> bool:
        """Whether our own lease stands: what we claim now is ours. False while the store cannot be reached."""
        ...

    def announce(self, card: HostReport) -> None:
        """Said with the next heartbeat, which goes out at once."""
        ...

    def all(self) -> list[HostSeen]:
        """Those whose lease stands, this one included, by their names."""
        ...

    def on_gone(self, callback: Callable[[str], None]) -> None:
        """Called with the id of a host whose lease has ended, on every host that hears of it."""
        ...

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Called when this host's own lease is lost, before any session is told."""
        ...


class OwnerRequests(Protocol):
    async def ask_owner(self, session: str, data: bytes, *, timeout: float) -> bytes:
        """`NoOwner`: nobody answers for it, and nothing was done; known in a millisecond. `Unanswered`: whether it was
        done is unknown."""
        ...

    async def answer_for(self, session: str, answerer: Answerer) -> None:
        """From here on: every question for the session's owner is ours."""
        ...

    async def leave(self, session: str) -> None:
        """Hear no new question for it. What was asked before is still answered: the one that closed it, for one."""
        ...

    async def fall_silent(self, session: str | None = None) -> None:
        """Answer for it no more, nor for what was asked and is not answered yet; None: for none."""
        ...

    def fall_silent_nowait(self, session: str | None = None) -> None:
        """The same. From here on nothing is answered, though the servers may not know of it yet."""
        ...


class Job(Protocol):
    """A session that wants a host. `kind`: open, or resume. `deliveries`: how often it was offered."""

    session: str
    kind: str
    request: bytes
    need: tuple[str, ...]
    epoch: int
    deliveries: int

    async def is_wanted(self) -> bool:
        """Whether whoever placed it still waits. From then on it waits for the answer, however long its patience was;
        if not, nobody will hear of it, and it is not to be begun. A resume is always wanted."""
        ...

    async def done(self, answer: bytes = b"") -> None:
        """It is placed, or not wanted any more. Whoever waits for it gets the answer."""
        ...

    async def again(self, seconds: float) -> None:
        """Not here, or not now: it is offered again, to whomever."""
        ...

    async def working(self) -> None:
        """It takes longer than a moment."""
        ...


class Placement(Protocol):
    async def place(self, session: str, need: Sequence[str], request: bytes, *, timeout: float) -> bytes:
        """Offer a new session to whoever satisfies the need: what that host answered, or nothing (b""): it was there
        already, and its owner can be asked. `NoOwner`: no host could take it in that time, and none will; `Unanswered`:
        unknown."""
        ...

    async def resume(self, session: str, need: Sequence[str], epoch: int) -> None:
        """Offer one that lost its owner of this epoch. However many say so, it is one job."""
        ...

    async def next(self, labels: Sequence[str]) -> Job:
        """Wait for a session that needs nothing but these."""
        ...


class Records(Protocol):
    """What is known of a session besides its log, for all to see."""

    async def look_for(self, id_or_name: str) -> None:
        """Whoever was told elsewhere that it is there finds it here (`Log.find`) when this returns."""
        ...

    async def note_stuck(self, session: str, why: str | None) -> None:
        """A host could not go on with it, and why; it is "not movable" until one can (None)."""
        ...

    def stuck_of(self, session: str) -> str | None:
        """Why it is not movable; None: nobody has said so."""
        ...


class Transcripts(Protocol):
    """What is kept of a session besides its log: one blob each, of some MiB, deleted with it. Nothing compares: who
    writes last is read, also if it is one that lost the session since. `StoreError`: it is unknown what holds."""

    async def put(self, session: str, data: bytes) -> None: ...
    async def get(self, session: str) -> bytes | None: ...
    async def forget(self, session: str) -> None: ...


class Cluster(Protocol):
    hosts: Hosts
    bus: OwnerRequests
    placement: Placement
    records: Records
    transcripts: Transcripts
