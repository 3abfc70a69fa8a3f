"""The hosts of the cluster as this server sees them, and the state of sessions without an owner.

`HostView` says which host has a session and which could take one, and builds the errors if no host
can. `UnownedSessions` reads from the log whether asks wait in listed sessions without an owner.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from banksman import Host
from banksman.cluster.interfaces import ClusterHosts, HostReport, HostSeen
from banksman.errors import BanksmanError
from banksman.server.problems import Problem
from banksman.sessions import host_needs
from banksman.sessions.session import Session
from banksman.sessions.status import UNOWNED_PHASES, Status
from banksman.sessions.turn_status import WaitingAsk
from banksman.store.log_values import KnownSession

# The hosts that share a store: which of them has a session, and which could take one.
#
# For other hosts this is their last heartbeat. For this host it is the current state. Its own
# heartbeat arrives here a moment after it was sent, and a request in that moment must not see an
# old room.

# The label of a host that accepts callers. A host with neither room nor this label is a program
# that uses the store itself, or a short-lived command.
FRONT = "banksman=front"
# How many host names are remembered, for sessions that still name a dead host.
NAMES_MAX = 1000
# How long names are reused, so that a list does not look them up for each session.
NAMES_SECONDS = 1.0

# Limits for one list, which is a page of at most a thousand sessions. A command with an embedded
# host remembers nothing, and reads ten pages for ten thousand sessions. These limits make that
# three seconds, and not a minute.
LOOKS_MAX = 100
LOOK_SECONDS_MAX = 0.3
LOOKS_AT_ONCE_MAX = 16
# How many sessions have a remembered queue. Most queues are empty.
REMEMBERED_MAX = 20_000


class HostView:
    """The hosts of the cluster. `ourselves`: returns the current report of this host."""

    def __init__(self, hosts: ClusterHosts, ourselves: Callable[[], HostReport]) -> None:
        self._hosts = hosts
        self._ourselves = ourselves
        self._names: dict[str, str] = {}
        self._named_at = float("-inf")

    def all(self) -> list[HostSeen]:
        """Return the hosts with a valid lease; this one with its current state."""
        hosts = self._hosts.all()
        self._note_names(hosts)
        return [
            host if host.id != self._hosts.id else host._replace(**self._ourselves()._asdict())
            for host in hosts
        ]

    def _note_names(self, hosts: Iterable[HostSeen]) -> None:
        self._named_at = time.monotonic()
        self._names |= {host.id: host.name for host in hosts}
        while len(self._names) > NAMES_MAX:
            del self._names[next(iter(self._names))]

    def is_silent(self, host: HostSeen) -> bool:
        """Return whether a host's last heartbeat is older than a lease.

        With a working connection this host would have seen either a newer heartbeat or the end of
        the lease.
        """
        return time.monotonic() - host.seen > self._hosts.lease_seconds

    @property
    def own_id(self) -> str:
        return self._hosts.id

    def find(self, id_or_name: str) -> list[HostSeen]:
        """Return the host with this id, or the hosts with this name.

        Of hosts with the name, those that take sessions come first, then front ends. A program that
        only reads is named after its machine, like a host without a configured name. It may even be
        the one that asks.
        """
        hosts = self.all()
        by_id = [host for host in hosts if host.id == id_or_name]
        named = [host for host in hosts if host.name == id_or_name]
        return (
            by_id
            or [host for host in named if host.room]
            or [host for host in named if FRONT in host.labels]
        )

    def host_of(self, known: KnownSession | None) -> HostSeen | None:
        """Return the owner of a session, if its lease is valid. An address is `ID@MACHINE`."""
        if known is None or known.owner is None:
            return None
        id = known.owner.address.partition("@")[0]
        return next((host for host in self.all() if host.id == id), None)

    def name_of(self, known: KnownSession | None) -> str | None:
        """Return the name of a session's owner.

        For a host without a lease it is the last known name, or its machine.
        """
        if known is None or known.owner is None:
            return None
        id, _, machine = known.owner.address.partition("@")
        if id == self._hosts.id:
            return self._ourselves().name
        if id not in self._names or time.monotonic() >= self._named_at + NAMES_SECONDS:
            self._note_names(self._hosts.all())
        return self._names.get(id, machine)

    # -- this host --------------------------------------------------------------------------------
    def _me(self) -> HostSeen | None:
        return next((host for host in self.all() if host.id == self._hosts.id), None)

    def has_room(self) -> bool:
        """Return whether this host accepts another session."""
        me = self._me()
        return me is not None and not me.is_draining and me.used < me.room

    def can_take(self, need: Sequence[str]) -> bool:
        """Return whether this host accepts another session with this need."""
        me = self._me()
        return (
            me is not None
            and self.has_room()
            and not host_needs.lacking(need, me.labels, me.agents)
        )

    # -- destinations of sessions -----------------------------------------------------------------
    def takers(self, wanted: Sequence[Sequence[str]], *, but: str) -> list[str | None]:
        """Return, for each need, the name of a host that has room for it now, or None.

        `but`: the id of a host to leave out. This neither asks nor reserves anything.
        """
        free = {
            host: host.room - host.used
            for host in self.all()
            if host.id != but and not host.is_draining
        }
        fits = [
            [host for host in free if not host_needs.lacking(need, host.labels, host.agents)]
            for need in wanted
        ]
        found: list[str | None] = [None] * len(wanted)
        # Assign needs with few candidates first: the others have more choice.
        for index in sorted(range(len(wanted)), key=lambda index: len(fits[index])):
            taker = max(fits[index], key=free.__getitem__, default=None)
            if taker is not None and free[taker] > 0:
                free[taker] -= 1
                found[index] = taker.name
        return found

    # -- errors -----------------------------------------------------------------------------------
    def check_satisfiable(self, need: Sequence[str]) -> None:
        """Raise `Problem` if no host could ever satisfy the need.

        This is raised immediately, because waiting would not help. The operator has to start a
        host, or the caller has to ask for less.
        """
        hosts = [host for host in self.all() if host.room > 0]
        lacks = {host.name: host_needs.lacking(need, host.labels, host.agents) for host in hosts}
        if not hosts:
            hint = "start one with `banksman host --store …`, then try again"
            raise Problem(503, "NoHost", "no host takes sessions", hint=hint)
        if all(lacks.values()):
            told = "; ".join(
                f"{name} has no {', '.join(missing)}" for name, missing in sorted(lacks.items())
            )
            hint = _hint({word for missing in lacks.values() for word in missing})
            raise Problem(
                422, "NoSuchHost", f"no host has what the session needs: {told}", hint=hint
            )

    def no_room(self, need: Sequence[str]) -> Problem:
        """Build the error for a session that no host took in time."""
        fit = [
            host
            for host in self.all()
            if host.room and not host_needs.lacking(need, host.labels, host.agents)
        ]
        told = ", ".join(
            f"{host.name} has {host.used} of {host.room} sessions"
            f"{' and is draining' * host.is_draining}"
            for host in fit
        )
        hint = "close a session, or start another host, then try again: the session was not opened"
        return Problem(
            503,
            "NoRoom",
            f"no host took the session in time: {told or 'no suitable host is running'}",
            hint=hint,
        )


def _hint(missing: Collection[str]) -> str:
    """Return the hint for missing labels and agents.

    An agent is not a label: a host has it if its program is installed.
    """
    labels = [word for word in missing if not word.startswith(host_needs.agent_word(""))]
    agents = [word for word in missing if word not in labels]
    wanted = ["where that agent is installed"] * bool(agents) + [
        "that has the labels (--label)"
    ] * bool(labels)
    return f"start a host {' and '.join(wanted)}{', or ask for fewer labels' * bool(labels)}"


class UnownedSessions:
    """The queues of sessions without an owner. Belongs to the event loop of its host.

    At first sight they are gone. But an accepted ask survives the death of its host. So an ask may
    wait in a session that was left or lost, until a host resumes it. Only the log of the session
    shows that, and a store may have ten thousand closed sessions. So a list reads the logs of the
    sessions without an owner that changed last, a bounded number in a bounded time. The result is
    remembered while the log is unchanged. The next list of the same server continues with the rest.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        # By id: the epoch and seq up to which the log was read, and the waiting asks.
        self._seen: OrderedDict[str, tuple[tuple[int, int], tuple[WaitingAsk, ...]]] = OrderedDict()

    async def glance(self, sessions: Sequence[Session]) -> list[Status]:
        """Return the status of each session, in the same order."""
        found = [session.status() for session in sessions]
        unknown = [
            session
            for session, status in zip(sessions, found, strict=True)
            if status.phase in UNOWNED_PHASES and status.seq and self._waiting(status) is None
        ]
        if unknown:
            unknown.sort(
                key=lambda session: 0.0 if session.known is None else -session.known.changed
            )
            await self._look_at(unknown[:LOOKS_MAX])
        return [self._told(status) for status in found]

    def _waiting(self, status: Status) -> tuple[WaitingAsk, ...] | None:
        """Return the waiting asks; None if the log was not read, or has changed since."""
        place, waiting = self._seen.get(status.id, ((0, 0), ()))
        # The status may be older than what was read. A writer raises the epoch by its claim first,
        # so an equal or lower place cannot hide a new event.
        return waiting if (status.epoch, status.seq) <= place else None

    def _told(self, status: Status) -> Status:
        """Return the status with the waiting asks, if there are any."""
        waiting = self._waiting(status) if status.phase in UNOWNED_PHASES else None
        return replace(status, state="queued", queue=waiting) if waiting else status

    async def _look_at(self, sessions: Sequence[Session]) -> None:
        places = asyncio.Semaphore(LOOKS_AT_ONCE_MAX)

        async def look(session: Session) -> None:
            # An unreadable session must not keep the others from being listed.
            async with places:
                with suppress(BanksmanError):
                    await self._look(session)

        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS_MAX):
                await asyncio.gather(*map(look, sessions))

    async def _look(self, session: Session) -> None:
        """Read the queue of one session and remember it."""
        known = session.known
        if known is None:
            return
        # For a session that was closed in good order, as most were, reading the last event is
        # enough. The mirror may still show an owner that has released the session, so ignore the
        # owner.
        has_waiting_asks = await self._host.has_waiting_asks(known._replace(owner=None))
        status = await session.look() if has_waiting_asks else session.status()
        if status.phase not in UNOWNED_PHASES:
            return  # A host has claimed it and knows its state.
        self._seen[session.id] = (status.epoch, status.seq), status.queue
        self._seen.move_to_end(session.id)
        while len(self._seen) > REMEMBERED_MAX:
            self._seen.popitem(last=False)
