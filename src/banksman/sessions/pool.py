"""Limit on the agent processes of a host and on the number of concurrent starts.

All sessions of a host share one pool. It has places and a queue of sessions, but no processes: the
drivers start and stop them when the pool says so.

A start costs an agent half a second of a core. Eight concurrent starts on two cores cost each agent
five seconds. So few agents start at the same time, the most urgent first. A start that takes long
waits for something other than a core and stops counting: a handful of agents that hang at their
start must not block all others.

With a limit on processes, a session that needs a process takes the place of the process that has
been idle for the longest time. A process in use is never evicted. In that case the new session
waits for a place, and its status shows this.
"""

from __future__ import annotations

import asyncio
import os
from typing import Protocol

# A start counts against `starts_max` for at most this many seconds.
START_SECONDS_MAX = 5.0


def starts_at_once() -> int:
    """Return the default limit on concurrent starts: the number of cores, and at least two.

    With two, one agent can use the core while the other waits for its disk.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(2, cores)


class PoolMember(Protocol):
    """Driver of a session, as the pool uses it."""

    @property
    def urgency(self) -> int:
        """The highest urgency of the asks that wait for the process."""
        ...

    @property
    def idle_since(self) -> float | None:
        """When the process became idle; None if it is in use or does not exist."""
        ...

    @property
    def is_leaving(self) -> bool:
        """Whether the process is being stopped."""
        ...

    def start_now(self) -> None: ...
    def evict(self) -> None: ...


class Pool:
    """Places for agent processes and a queue of sessions that wait for a place.

    Belongs to one event loop. A limit of None means no limit. `host`: kept alive while a session
    or a process refers to the pool. A host that the garbage collector takes ends its sessions.
    """

    def __init__(
        self,
        *,
        processes_max: int | None = None,
        starts_max: int | None = None,
        host: object = None,
    ) -> None:
        self._host = host
        self.processes_max = processes_max
        self.starts_max = starts_max
        # First come, first. A dict, because members look for themselves in a long queue.
        self._waiting: dict[PoolMember, None] = {}
        self._there: set[PoolMember] = set()
        # Members whose start still counts. The timer ends the time in which it counts.
        self._starting: dict[PoolMember, asyncio.TimerHandle] = {}
        # Members that were asked to leave and have not left yet.
        self._told: set[PoolMember] = set()
        self._is_looking = False
        self._must_look_again = False

    def __repr__(self) -> str:
        return (
            f"<Pool {len(self._there)} there, "
            f"{len(self._starting)} starting, {len(self._waiting)} waiting>"
        )

    def want(self, member: PoolMember) -> None:
        """Queue a member for a place. The pool calls `start_now` when the member has a place.

        That call may happen before this function returns.
        """
        assert member not in self._there
        self._waiting[member] = None
        self.look()

    def adopt(self, member: PoolMember) -> None:
        """Give a place to a member whose process runs already, even beyond the limit."""
        self._there.add(member)

    def is_waiting(self, member: PoolMember) -> bool:
        return member in self._waiting

    def has_started(self, member: PoolMember) -> None:
        timer = self._starting.pop(member, None)
        if timer is not None:
            timer.cancel()
            self.look()

    def leave(self, member: PoolMember) -> None:
        """Give up a place, or the wait for one. Does nothing for a member that has neither."""
        if member in self._waiting:
            del self._waiting[member]
        elif member in self._there:
            self._there.remove(member)
            self._told.discard(member)
            self.has_started(member)
        else:
            return
        self.look()

    def look(self) -> None:
        """Start the members that may start and evict idle members if the pool is full.

        A started or evicted member may call `look` again before its call returns. The nested call
        only requests another pass of the outer loop, so passes never nest.
        """
        self._must_look_again = True
        if self._is_looking:
            return
        self._is_looking = True
        try:
            while self._must_look_again:
                self._must_look_again = False
                self._let_start()
        finally:
            self._is_looking = False

    def _let_start(self) -> None:
        while self._waiting and not self._is_full(len(self._starting), self.starts_max):
            if self._is_full(len(self._there), self.processes_max):
                self._make_room()
                return
            # `max` returns the first of the most urgent members, so equal urgency is first come,
            # first served.
            member = max(self._waiting, key=lambda waiting: waiting.urgency)
            del self._waiting[member]
            self._there.add(member)
            loop = asyncio.get_running_loop()
            self._starting[member] = loop.call_later(START_SECONDS_MAX, self.has_started, member)
            member.start_now()

    @staticmethod
    def _is_full(count: int, limit: int | None) -> bool:
        return limit is not None and count >= limit

    def _make_room(self) -> None:
        # A member that got work before it processed the request keeps its process. This member is
        # neither idle nor leaving, and must not count as a place that becomes free.
        self._told = {
            member for member in self._told if member.idle_since is not None or member.is_leaving
        }
        leaving = sum(member.is_leaving or member in self._told for member in self._there)
        idle = {
            member: since
            for member in self._there - self._told
            if (since := member.idle_since) is not None
        }
        for member in sorted(idle, key=lambda member: idle[member])[
            : max(0, len(self._waiting) - leaving)
        ]:
            self._told.add(member)
            member.evict()
