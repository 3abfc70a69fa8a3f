"""The hosts that share a store, as they are seen from here: which of them has a session, and which could take one.

Of the others it is what they said last. Of ourselves it is what is so now: what we say is heard by us, too, a moment
after it was said, and who answers in that moment must not say that it has no room.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence

from banksman.cluster.interfaces import Card, Hosts, HostSeen
from banksman.server.problems import Problem
from banksman.sessions import host_requirements
from banksman.store.log import Known

# Among the labels of a host: callers come in there. One that has neither room nor this is a program that uses the store
# for itself, or a verb that ends in a moment.
FRONT = "banksman=front"
# Names of hosts that were seen, for as long as sessions are said to be with them.
NAMES_MAX = 1000
# They are looked up anew after so long, and not for each session of a list.
NAMES_SECONDS = 1.0


class Fleet:
    def __init__(self, hosts: Hosts, ourselves: Callable[[], Card]) -> None:
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

    def host_of(self, known: Known | None) -> HostSeen | None:
        """Whoever has it, if it is heard of. An address is `ID@MACHINE`."""
        if known is None or known.owner is None:
            return None
        id = known.owner.address.partition("@")[0]
        return next((host for host in self.all() if host.id == id), None)

    def name_of(self, known: Known | None) -> str | None:
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
        return me is not None and self.has_room() and not host_requirements.lacking(need, me.labels, me.agents)

    # -- where sessions could go -------------------------------------------------------------------------------------
    def takers(self, wanted: Sequence[Sequence[str]], *, but: str) -> list[str | None]:
        """For sessions with these needs, in the same order: the name of a host that has room for each, as it looks now
        and without the one of the id `but`; None: there is none. Nobody is asked, and nothing is kept free for them."""
        free = {host: host.room - host.used for host in self.all() if host.id != but and not host.is_draining}
        fits = [
            [host for host in free if not host_requirements.lacking(need, host.labels, host.agents)] for need in wanted
        ]
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
        lacks = {host.name: host_requirements.lacking(need, host.labels, host.agents) for host in hosts}
        if not hosts:
            hint = "banksman host --store … starts one; try again then"
            raise Problem(503, "NoHost", "there is no host that takes sessions", hint=hint)
        if all(lacks.values()):
            told = "; ".join(f"{name} has no {', '.join(missing)}" for name, missing in sorted(lacks.items()))
            hint = _hint({word for missing in lacks.values() for word in missing})
            raise Problem(422, "NoSuchHost", f"no host has what the session needs: {told}", hint=hint)

    def no_room(self, need: Sequence[str]) -> Problem:
        fit = [
            host for host in self.all() if host.room and not host_requirements.lacking(need, host.labels, host.agents)
        ]
        told = ", ".join(
            f"{host.name} has {host.used} of {host.room}{' and drains' * host.is_draining}" for host in fit
        )
        hint = "close a session, or start another host; it was not opened, and will not be"
        return Problem(503, "NoRoom", f"no host took the session in time: {told or 'none is there'}", hint=hint)


def _hint(missing: Collection[str]) -> str:
    """An agent is no label: it is there where its program is."""
    labels = [word for word in missing if not word.startswith(host_requirements.agent_word(""))]
    agents = [word for word in missing if word not in labels]
    wanted = ["where that agent is installed"] * bool(agents) + ["that has the labels (--label)"] * bool(labels)
    return f"start a host {' and '.join(wanted)}{', or ask for less (labels)' * bool(labels)}"
