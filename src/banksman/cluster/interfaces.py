"""Protocols of a cluster: host leases, requests to owners, placement, records and transcripts.

`Records` looks up sessions, and has notes on sessions that no host can resume. `cluster/log/`
implements the protocols on NATS. Apart from the code that opens or checks a store, the package
depends on these protocols only. A store on one machine has no cluster.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol

# Takes the bytes of a request and returns the bytes of its answer.
Answerer = Callable[[bytes], Awaitable[bytes]]


class HostSeen(NamedTuple):
    """A host as its last heartbeat described it.

    `room`: how many sessions the host accepts; 0 means that it only serves readers and callers.
    `used`: how many sessions the host has. `seen`: when the heartbeat arrived, in this process's
    `time.monotonic()`.
    """

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
    """The description of itself that a host sends with every heartbeat."""

    name: str
    labels: tuple[str, ...] = ()
    agents: tuple[str, ...] = ()
    room: int = 0
    used: int = 0
    is_draining: bool = False


class ClusterHosts(Protocol):
    """The hosts of the cluster, and this host's lease among them."""

    lease_seconds: float

    @property
    def id(self) -> str:
        """The id of this host. It changes after a fence."""
        ...

    @property
    def is_held(self) -> bool:
        """Return whether this host's lease is valid, so that a claim made now counts.

        False while the store cannot be reached.
        """
        ...

    def announce(self, card: HostReport) -> None:
        """Set the content of the next heartbeat, and send that heartbeat immediately."""
        ...

    def all(self) -> list[HostSeen]:
        """Return the hosts with a valid lease, this one included, sorted by name."""
        ...

    def on_gone(self, callback: Callable[[str], None]) -> None:
        """Register a callback that gets the id of each host whose lease ended.

        Every host that learns of the end calls its callbacks.
        """
        ...

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Register a callback for the loss of this host's lease.

        It is called before any session learns of the loss.
        """
        ...


class OwnerRequests(Protocol):
    """Requests to the owner of a session, and the owner's side of them."""

    async def ask_owner(self, session: str, data: bytes, *, timeout: float) -> bytes:
        """Send a request to the owner of the session and return the answer.

        Raises `NoOwner` if no host answers for the session; then nothing was done, and the caller
        knows within a millisecond. Raises `Unanswered` if it is unknown whether the request was
        performed.
        """
        ...

    async def answer_for(self, session: str, answerer: Answerer) -> None:
        """Answer every request for the owner of this session from now on."""
        ...

    async def leave(self, session: str) -> None:
        """Accept no new request for the session.

        Requests that arrived earlier are still answered, for example the one that closed the
        session.
        """
        ...

    async def fall_silent(self, session: str | None = None) -> None:
        """Stop answering for the session, also requests in progress; None means all sessions."""
        ...

    def fall_silent_nowait(self, session: str | None = None) -> None:
        """Do the same without waiting.

        No answer leaves this process after the call, even if the servers learn of it later.
        """
        ...


class Job(Protocol):
    """A session that needs a host.

    `kind`: "open" or "resume". `deliveries`: how often the job was delivered to a host.
    """

    session: str
    kind: str
    request: bytes
    need: tuple[str, ...]
    epoch: int
    deliveries: int

    async def is_wanted(self) -> bool:
        """Return whether the caller that placed the job still waits for it.

        True commits the caller to wait for the answer, past its own timeout. False means that no
        caller reads the answer, so the host must not start the job. A resume is always wanted.
        """
        ...

    async def done(self, answer: bytes = b"") -> None:
        """Finish the job: it is placed, or not needed. A waiting caller gets the answer."""
        ...

    async def again(self, seconds: float) -> None:
        """Return the job to its queue. After `seconds` it is delivered again, to any host."""
        ...

    async def working(self) -> None:
        """Report that the job is still in progress, so that the queue does not deliver it again."""
        ...


class Placement(Protocol):
    """Queues of sessions that need a host."""

    async def place(
        self, session: str, need: Sequence[str], request: bytes, *, timeout: float
    ) -> bytes:
        """Offer a new session to the hosts that satisfy `need`, and return the answer of the taker.

        An empty answer (b"") means that the session already exists and its owner can be asked.
        Raises `NoOwner` if no host took the session in time, and none will. Raises `Unanswered` if
        that is unknown.
        """
        ...

    async def resume(self, session: str, need: Sequence[str], epoch: int) -> None:
        """Offer a session that lost its owner of this epoch.

        Any number of offers for one session are one job.
        """
        ...

    async def next(self, labels: Sequence[str]) -> Job:
        """Wait for a session whose need is a subset of `labels`."""
        ...


class Records(Protocol):
    """Shared records about sessions, beside their logs."""

    async def look_for(self, id_or_name: str) -> None:
        """Fetch the record of a session that another host already knows.

        When this returns, `Log.find` finds the session here too.
        """
        ...

    async def note_stuck(self, session: str, why: str | None) -> None:
        """Record why a host could not resume the session.

        The session is "not movable" until None clears the reason.
        """
        ...

    def stuck_of(self, session: str) -> str | None:
        """Return why the session is not movable, or None if no host has recorded a reason."""
        ...


class Transcripts(Protocol):
    """One blob of some MiB per session, deleted together with the session.

    Writes are not compared: the last write wins, even one of a host that has lost the session
    since. A `StoreError` leaves it unknown which version is stored.
    """

    async def put(self, session: str, data: bytes) -> None: ...
    async def get(self, session: str) -> bytes | None: ...
    async def forget(self, session: str) -> None: ...


class Cluster(Protocol):
    """The parts of a cluster that a store of many hosts provides."""

    hosts: ClusterHosts
    bus: OwnerRequests
    placement: Placement
    records: Records
    transcripts: Transcripts
