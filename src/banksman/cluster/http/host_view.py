"""The hosts of the cluster as this server sees them, and the sessions that no host owns."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from banksman import Host
from banksman.cluster.interfaces import HostReport, Hosts, HostSeen
from banksman.errors import BanksmanError
from banksman.server.problems import Problem
from banksman.sessions import session_spec
from banksman.sessions.session import Session
from banksman.sessions.status import UNOWNED_PHASES, Status, Waiting
from banksman.store.log import KnownSession

# The hosts that share a store, as they are seen from here: which of them has a session, and which could take one.
#
# Of the others it is what they said last. Of ourselves it is what is so now: what we say is heard by us, too, a moment
# after it was said, and who answers in that moment must not say that it has no room.

# Among the labels of a host: callers come in there. One that has neither room nor this is a program that uses the store
# for itself, or a verb that ends in a moment.
FRONT = "banksman=front"
# Names of hosts that were seen, for as long as sessions are said to be with them.
NAMES_MAX = 1000
# They are looked up anew after so long, and not for each session of a list.
NAMES_SECONDS = 1.0

# For one list, which is a page of at most a thousand. A verb with a host inside, which has nothing to remember from,
# asks for ten of them where there are ten thousand: that is three seconds, and not a minute.
LOOKS_MAX = 100
LOOK_SECONDS_MAX = 0.3
LOOKS_AT_ONCE_MAX = 16
# Of so many it is remembered who waits there: mostly nobody.
REMEMBERED_MAX = 20_000


class HostView:
    def __init__(self, hosts: Hosts, ourselves: Callable[[], HostReport]) -> None:
        self._hosts = hosts
        self._ourselves = ourselves
        self._names: dict[str, str] = {}
        self._named_at = float("-inf")

    def all(self) -> list[HostSeen]:
        hosts = self._hosts.all()
        self._note_names(hosts)
        return [host if host.id != self._hosts.id else host._replace(**self._ourselves()._asdict()) for host in hosts]

    def _note_names(self, hosts: Iterable[HostSeen]) -> None:
        self._named_at = time.monotonic()
        self._names |= {host.id: host.name for host in hosts}
        while len(self._names) > NAMES_MAX:
            del self._names[next(iter(self._names))]

    def is_silent(self, host: HostSeen) -> bool:
        """For longer than its lease: would we hear anything, we would have heard of its end."""
        return time.monotonic() - host.seen > self._hosts.lease_seconds

    @property
    def own_id(self) -> str:
        return self._hosts.id

    def find(self, id_or_name: str) -> list[HostSeen]:
        """By its id, else all of that name: those that take sessions, else front ends. Who only looks is called like
        its machine, as a host is that was given no name; and it may be the very one that asks."""
        hosts = self.all()
        by_id = [host for host in hosts if host.id == id_or_name]
        named = [host for host in hosts if host.name == id_or_name]
        return by_id or [host for host in named if host.room] or [host for host in named if FRONT in host.labels]

    def host_of(self, known: KnownSession | None) -> HostSeen | None:
        """Whoever has it, if it is heard of. An address is `ID@MACHINE`."""
        if known is None or known.owner is None:
            return None
        id = known.owner.address.partition("@")[0]
        return next((host for host in self.all() if host.id == id), None)

    def name_of(self, known: KnownSession | None) -> str | None:
        """Of the host that has it; of one that is not heard of any more, as it was called, or its machine."""
        if known is None or known.owner is None:
            return None
        id, _, machine = known.owner.address.partition("@")
        if id == self._hosts.id:
            return self._ourselves().name
        if id not in self._names or time.monotonic() >= self._named_at + NAMES_SECONDS:
            self._note_names(self._hosts.all())
        return self._names.get(id, machine)

    # -- ourselves ---------------------------------------------------------------------------------------------------
    def _me(self) -> HostSeen | None:
        return next((host for host in self.all() if host.id == self._hosts.id), None)

    def has_room(self) -> bool:
        me = self._me()
        return me is not None and not me.is_draining and me.used < me.room

    def can_take(self, need: Sequence[str]) -> bool:
        me = self._me()
        return me is not None and self.has_room() and not session_spec.lacking(need, me.labels, me.agents)

    # -- where sessions could go -------------------------------------------------------------------------------------
    def takers(self, wanted: Sequence[Sequence[str]], *, but: str) -> list[str | None]:
        """For sessions with these needs, in the same order: the name of a host that has room for each, as it looks now
        and without the one of the id `but`; None: there is none. Nobody is asked, and nothing is kept free for them."""
        free = {host: host.room - host.used for host in self.all() if host.id != but and not host.is_draining}
        fits = [[host for host in free if not session_spec.lacking(need, host.labels, host.agents)] for need in wanted]
        found: list[str | None] = [None] * len(wanted)
        # Those that fit in few places come first: the others find another.
        for index in sorted(range(len(wanted)), key=lambda index: len(fits[index])):
            taker = max(fits[index], key=free.__getitem__, default=None)
            if taker is not None and free[taker] > 0:
                free[taker] -= 1
                found[index] = taker.name
        return found

    # -- refusals ----------------------------------------------------------------------------------------------------
    def check_satisfiable(self, need: Sequence[str]) -> None:
        """Said at once, for to wait would not help: somebody has to start such a host, or to ask for less."""
        hosts = [host for host in self.all() if host.room > 0]
        lacks = {host.name: session_spec.lacking(need, host.labels, host.agents) for host in hosts}
        if not hosts:
            hint = "banksman host --store … starts one; try again then"
            raise Problem(503, "NoHost", "there is no host that takes sessions", hint=hint)
        if all(lacks.values()):
            told = "; ".join(f"{name} has no {', '.join(missing)}" for name, missing in sorted(lacks.items()))
            hint = _hint({word for missing in lacks.values() for word in missing})
            raise Problem(422, "NoSuchHost", f"no host has what the session needs: {told}", hint=hint)

    def no_room(self, need: Sequence[str]) -> Problem:
        fit = [host for host in self.all() if host.room and not session_spec.lacking(need, host.labels, host.agents)]
        told = ", ".join(
            f"{host.name} has {host.used} of {host.room}{' and drains' * host.is_draining}" for host in fit
        )
        hint = "close a session, or start another host; it was not opened, and will not be"
        return Problem(503, "NoRoom", f"no host took the session in time: {told or 'none is there'}", hint=hint)


def _hint(missing: Collection[str]) -> str:
    """An agent is no label: it is there where its program is."""
    labels = [word for word in missing if not word.startswith(session_spec.agent_word(""))]
    agents = [word for word in missing if word not in labels]
    wanted = ["where that agent is installed"] * bool(agents) + ["that has the labels (--label)"] * bool(labels)
    return f"start a host {' and '.join(wanted)}{', or ask for less (labels)' * bool(labels)}"


# Sessions that nobody has: what a list says of them.
#
# At a glance they are gone. But an ask that was accepted is kept, whatever became of its host, and in one that was
# left, or lost, somebody may wait until a host comes. Only its log says so, and a store may have ten thousand that were
# closed long since. So of those in a list that nobody has, the ones that changed last are looked at, a bounded number
# in a bounded time; what a log said is remembered for as long as the log is the same. A server that is asked again goes
# on where it was.


class UnownedSessions:
    """Of one host's store. Belongs to its loop."""

    def __init__(self, host: Host) -> None:
        self._host = host
        # By id: the epoch and the seq up to which it was read, and who waited.
        self._seen: OrderedDict[str, tuple[tuple[int, int], tuple[Waiting, ...]]] = OrderedDict()

    async def glance(self, sessions: Sequence[Session]) -> list[Status]:
        """What each is doing, in the same order."""
        found = [session.status() for session in sessions]
        unknown = [
            session
            for session, status in zip(sessions, found, strict=True)
            if status.phase in UNOWNED_PHASES and status.seq and self._waiting(status) is None
        ]
        if unknown:
            unknown.sort(key=lambda session: 0.0 if session.known is None else -session.known.changed)
            await self._look_at(unknown[:LOOKS_MAX])
        return [self._told(status) for status in found]

    def _waiting(self, status: Status) -> tuple[Waiting, ...] | None:
        """None: it was not looked at, or something has happened in it since."""
        place, waiting = self._seen.get(status.id, ((0, 0), ()))
        # At a glance less may be known than was read. Whoever writes in it has claimed it first, under a higher epoch.
        return waiting if (status.epoch, status.seq) <= place else None

    def _told(self, status: Status) -> Status:
        waiting = self._waiting(status) if status.phase in UNOWNED_PHASES else None
        return replace(status, state="queued", queue=waiting) if waiting else status

    async def _look_at(self, sessions: Sequence[Session]) -> None:
        places = asyncio.Semaphore(LOOKS_AT_ONCE_MAX)

        async def look(session: Session) -> None:
            # One that cannot be read keeps no other from being listed.
            async with places:
                with suppress(BanksmanError):
                    await self._look(session)

        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS_MAX):
                await asyncio.gather(*map(look, sessions))

    async def _look(self, session: Session) -> None:
        known = session.known
        if known is None:
            return
        # Of one that was closed in good order, which nearly all were, the last event is enough.
        # That we have let go of it the store may say a moment later.
        has_waiting_asks = await self._host.has_waiting_asks(known._replace(owner=None))
        status = await session.look() if has_waiting_asks else session.status()
        if status.phase not in UNOWNED_PHASES:
            return  # Somebody has it by now, and says it better.
        self._seen[session.id] = (status.epoch, status.seq), status.queue
        self._seen.move_to_end(session.id)
        while len(self._seen) > REMEMBERED_MAX:
            self._seen.popitem(last=False)
