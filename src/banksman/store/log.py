"""Protocol that every log engine implements: claims, appends, reads, waits and deletion.

The engines are `memory.py`, `sqlite/` and `cluster/log/`. Apart from the code that opens or
inspects a store, the package knows an engine only through this protocol. `log_values.py` has the
values that its methods take and return.

**Store and ownership.** A store holds sessions, and a session holds its events in order. A `Log` is
one host's handle on a store. Several hosts may have a handle on the same store.

Hosts claim *sessions*, never the store. A session has one owner at a time, and the owner writes
under an epoch, a fencing token. The rules:

- `claim` raises the epoch.
- The engine refuses every append under an older epoch with `NotOwner`, whatever the append holds.
- A host cannot claim a session whose owner is alive.
- A host can claim a session whose owner is dead, or that its owner released.
- A host may claim a session that it already owns. The claim fences off its earlier writer.

**Compare-and-set.** An append is atomic and names the seq that it expects to follow. Two writers
that both believe to be the owner cannot both succeed. The other data of a session (its snapshot,
its lease, its name) changes in the same way: the caller names the value that it believes to be
stored. So a caller with a stale view cannot overwrite a newer value.

**Completion.** `append`, `advance` and `lease` do not wait. The engine commits in groups and calls
`done` later, never inside the call. It passes None when the change is durable at the engine's
level, or the error that prevented the change. For one session the completions come in the order of
the calls.

After an append or an advance has failed, the calls queued behind it fail too, because they rest on
it. This ends when the writer receives the failure. A lease that fails because of the store (disk
full, a lock, a disk fault) has the same effect. A writer that receives this error restarts from the
events that were committed before, and must not find later ones. A lease that is refused because
another session holds the name fails no other call: only the writer's reaction to the answer rests
on that lease. A writer waits for the completion of an advance before it calls `advance` again.

**Visibility.** The calls that answer without waiting (`head`, `find`, `sessions`, `owned`) use the
knowledge of this handle. They may lag behind the changes of another handle, but they show these
changes in the order in which they were made. The awaited calls see every change that was
acknowledged before, by any handle. For events this holds at the end of the log, when a page is
empty.

**Reading.** A reader takes the committed events, then waits past the head. The log has no other way
to deliver an event, so no gap exists between stored events and new ones. Reading needs no claim. A
reader can follow one session in the order of seq, or the whole store in the order of commits, by
position.
"""

from __future__ import annotations

import datetime
import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from banksman.core.session.event import Entry, Event, Project
from banksman.errors import NotOwner
from banksman.histogram import Histogram
from banksman.store.log_values import (
    READ_EVENTS_MAX,
    Chunk,
    Done,
    Head,
    KnownSession,
    MultiSessionPage,
    Owner,
    Page,
    ProjectOf,
    Snapshot,
    TurnPlace,
    UsageBy,
    UsageRow,
)


class OwnershipListener(Protocol):
    """Callbacks to a host whose child processes must not outlive its ownership of their sessions.

    All times are `time.monotonic()`, which is one clock for all processes of a machine. The engine
    calls both methods in the event loop of the log.
    """

    def on_held(self, fence_at: float, dead_by: float) -> None:
        """Accept a renewal of the lease: the host needs to do nothing until `fence_at`.

        If no further call comes, the host begins to end its processes at `fence_at`. It has ended
        all of them by `dead_by`. The times of each call replace the earlier ones and never lie
        before them.
        """
        ...

    def on_lost(self, error: NotOwner, dead_by: float) -> None:
        """Accept the loss of every claim: every process must be dead by `dead_by`.

        A claim made after this call is valid again, under the times of the next `on_held`.
        """
        ...


class LogPhase(enum.Enum):
    """Lifecycle phase of an engine. Not every engine has every phase."""

    NEW, OPEN, CLOSING, CLOSED = range(4)


class LogTail(Protocol):
    """Notifications about the commits of one session, see `Log.tail`.

    `seq`: the last committed seq. `is_live`: False after the session was released or deleted, or
    the log was closed; from then on `seq` does not change.
    """

    @property
    def seq(self) -> int: ...
    @property
    def is_live(self) -> bool: ...
    def close(self) -> None:
        """Stop the notifications. Safe to call twice."""
        ...


class Log(Protocol):
    """One host's handle on a store. Every method belongs to the event loop in which it was opened.

    `is_durable`: False if the store lives only as long as its host. A caller that drops a session
    of a non-durable store should delete its history.
    """

    is_durable: bool

    @property
    def identity(self) -> str:
        """Tell this store from every other one on this machine, also from a copy of itself.

        Processes that wait for a host wait for a host of this store.
        """
        ...

    # -- readiness and the ownership listener -----------------------------------------------------
    async def ready(self) -> None:
        """Wait until the handle can answer.

        A remote engine first has to load the state of its store. Until then the calls that do not
        wait (`head`, `find`, `sessions`, `owned`) may raise `StoreError`. A store on this machine
        is ready immediately.
        """
        ...

    def guard(self, guard: OwnershipListener) -> None:
        """Register the listener for lease renewals and for the loss of ownership.

        Called once, before the first claim. In an engine whose ownership ends only by a release or
        a death (memory, a file), the listener gets no calls.
        """
        ...

    # -- ownership --------------------------------------------------------------------------------
    async def claim(
        self, session: str, *, name: str | None = None, agent: str | None = None
    ) -> int:
        """Become the session's writer and return the new epoch.

        Appends of earlier writers fail from now on.

        With `agent`, the call creates a missing session for that agent, under `name`. It raises
        `NameTaken` if another session has the name; the error's ids contain that session.

        Without `agent`, the session must exist, else the call raises `UsageError`. A caller that
        means a session it knows must not create a new one in its place after a deletion.

        An existing session keeps its name and its agent. The call raises `NotOwner`, with pid and
        address, if a live host owns the session. The engine never issues an epoch twice for a
        session id, not even across a deletion.
        """
        ...

    def advance(self, session: str, epoch: int, done: Done) -> None:
        """Raise the owner's epoch by one. Later calls use the new epoch.

        Completes with `NotOwner` if another host has claimed the session in the meantime. The calls
        under the new epoch then fail with it too.
        """
        ...

    def release(self, session: str, epoch: int) -> None:
        """Give up ownership and the lease, so that any host may claim the session.

        It takes effect after all earlier calls. With an epoch that is not the session's, it does
        nothing.
        """
        ...

    def lease(self, session: str, epoch: int, name: str | None, done: Done) -> None:
        """Reserve `name` for this session only. A name stands for one conversation of an agent.

        The session gives back its earlier lease. `name`: None only gives back. Completes with
        `NotOwner`, with the holder's id, if another session with a live owner holds the name. In
        that case the session keeps its earlier lease.
        """
        ...

    # -- writing ----------------------------------------------------------------------------------
    def append(  # noqa: PLR0917
        self,
        session: str,
        epoch: int,
        expected_seq: int,
        at: float,
        entries: Sequence[Entry],
        done: Done,
        snapshot: bytes | None = None,
    ) -> None:
        """Append `entries` as the events after `expected_seq`, at wall time `at`.

        `snapshot`: the fold of all events up to the last of these. It replaces the earlier snapshot
        in the same commit. The module docstring describes `done` and its order.
        """
        ...

    async def restore(
        self,
        session: str,
        *,
        name: str | None,
        agent: str,
        chunks: Callable[[], Iterable[Chunk]],
        snapshot: Snapshot | None = None,
    ) -> None:
        """Create a session from a history that was kept elsewhere.

        It is atomic, and no host owns the result.

        `chunks`: called in a thread of the engine; this call raises every exception of it. No other
        caller and no other host waits while the engine reads the chunks.

        Raises `UsageError` in these cases:

        - The session id exists.
        - The chunks have a gap, a falling epoch or a number beyond `NUMBER_MAX`.
        - The snapshot does not border on the events.

        Raises `NameTaken` if another session has the name.
        """
        ...

    # -- reading ----------------------------------------------------------------------------------
    def head(self, session: str) -> Head:
        """Return the session's head.

        A session that was never claimed has epoch 0, seq 0 and first 1.
        """
        ...

    async def read(
        self, session: str, after: int, limit: int = READ_EVENTS_MAX, project: Project | None = None
    ) -> Page:
        """Return at most `limit` committed events after a seq, oldest first.

        `project`: passed on to the events, see `Event.body`.
        """
        ...

    def recent(
        self, session: str, after: int, limit: int, project: Project | None = None
    ) -> list[Event] | None:
        """Return the committed events after a seq from memory, without a pause.

        None: the engine must read them in another way, or there are none yet. Use `read` then.
        """
        ...

    def tail(self, session: str, wake: Callable[[], None]) -> LogTail | None:
        """Open a tail of a session: `wake` is called at each commit.

        None: other hosts may write the session, because this handle has not claimed it. Use
        `wait_past` then. The caller closes the tail.
        """
        ...

    async def find_turn(self, session: str, turn: str) -> TurnPlace | None:
        """Find a turn by its id. None: no retained committed event belongs to this turn.

        The cost does not grow with the history, because each engine keeps an index. The engines
        document the cost of the first lookup in an old history.
        """
        ...

    async def snapshot(self, session: str) -> Snapshot | None:
        """Return the last snapshot that was appended, or None."""
        ...

    async def wait_past(self, session: str, seq: int, *, is_known: bool = False) -> None:
        """Wait until any host has committed an event after `seq`.

        Cancellation leaves nothing behind.

        The caller may wait for a session that does not exist yet. `is_known`: the session existed.
        If it is missing now, it was deleted, and the call raises `StoreError`. A check by the
        caller before the wait is not enough, because a deletion can come between the check and the
        wait.
        """
        ...

    async def read_many(
        self,
        after: str | None,
        limit: int = READ_EVENTS_MAX,
        *,
        sessions: Collection[str] | None = None,
        project_of: ProjectOf | None = None,
    ) -> MultiSessionPage:
        """Return at most `limit` committed events after a position, in commit order.

        `after`: None starts at the beginning. `sessions`: restricts the result to these sessions.
        Raises `UsageError` for a text that is not a position of this store. Raises `HistoryLost`
        for a position of a history that the store has lost.
        """
        ...

    async def wait_past_position(self, position: str) -> None:
        """Wait for a commit after the position, in any session.

        Cancellation leaves nothing behind.
        """
        ...

    # -- the sessions of the store ----------------------------------------------------------------
    def sessions(self, after: str | None = None, limit: int | None = None) -> list[KnownSession]:
        """List the sessions of the store, oldest first.

        `after`: list only the sessions after the one with this id; an unknown id gives an empty
        list. `limit`: the maximum number of sessions.
        """
        ...

    def owned(self) -> list[tuple[Owner | None, int]]:
        """Count the sessions of each owner, and the unowned ones, in one query.

        The number of queries does not depend on the number of sessions.
        """
        ...

    def find(self, id_or_name: str) -> KnownSession | None:
        """Find a session by its id, else by its name."""
        ...

    async def usage(
        self,
        by: UsageBy = "day",
        *,
        since: datetime.date | str | None = None,
        until: datetime.date | str | None = None,
    ) -> list[UsageRow]:
        """Return the usage of all turns in the store, by day, session, agent or caller.

        `since`, `until`: the first and the last day, in UTC. The rows are in the order of their
        keys.

        Usage belongs to the store, not to the history. It stays after a session is deleted, and
        after retention has removed its events. A restored session brings none: the store that it
        comes from has counted it.
        """
        ...

    async def rename(self, session: str, name: str | None, *, expected: str | None) -> None:
        """Set the session's name, or remove it with None, if its current name is `expected`.

        Raises `UsageError` if the current name differs or the session does not exist. Raises
        `NameTaken` if another session has the new name.
        """
        ...

    async def trim(self, session: str, before: int) -> int:
        """Remove events before a seq and return the first retained seq.

        The engine removes only whole chunks, and only events that the last snapshot covers. It may
        also remove events on its retention schedule, within the same limits.
        """
        ...

    async def delete(self, session: str) -> None:
        """Delete a session's history permanently.

        If this host owns the session, its writer's calls fail from now on. Raises `NotOwner` if
        another live host owns the session.
        """
        ...

    async def close(self) -> None:
        """Commit pending appends, release all owned sessions, and close.

        New appends fail immediately.
        """
        ...

    def abandon(self) -> None:
        """Close after the event loop was closed: like `close`, but without completions."""
        ...

    # -- health -----------------------------------------------------------------------------------
    def check(self) -> None:
        """Raise `StoreError` if the store cannot be read, or if writes to it would not last.

        The second case is a file that was moved or replaced. This is one lookup that neither writes
        nor waits. It does not detect other reasons why an append would fail.
        """
        ...

    def counters(self) -> Mapping[str, float]:
        """Return the write counters of this handle since it was opened.

        They stay readable after `close`.

        No counter ever falls. The counters:

        - `commits`
        - `events` and `bytes` that these commits appended
        - `failures`: commits that the store failed to write

        A refusal to a writer that is not the owner is not a failure.
        """
        ...

    @property
    def commit_times(self) -> Histogram:
        """The durations of the commits of this handle since it was opened."""
        ...
