"""How many agents' processes there are, and how many start at once: the one thing that sessions of a host share.

A start costs an agent half a second of a core, and eight at once on two cores cost each of them five: so few start at a
time, the most urgent first. A start that takes long is waiting for something else than a core, and no longer counts: a
handful of agents that hang at their start must not keep all others from theirs.

With a limit on processes, a session that needs one takes the place of the one that was not needed for the longest time.
One that is needed is never taken: then the newcomer waits, and shows that it does.
"""

from __future__ import annotations

import asyncio
import os
from typing import Protocol

# How long a start counts as one.
START_SECONDS_MAX = 5.0


def starts_at_once() -> int:
    """One a core, and two at least: while one waits for its disk the other can go on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(2, cores)


class PoolMember(Protocol):
    """A session in the pool: its driver."""

    @property
    def urgency(self) -> int:
        """How urgent the most urgent of those is that wait for the process."""
        ...

    @property
    def idle_since(self) -> float | None:
        """Since when nobody has needed the process; None: somebody does, or there is none."""
        ...

    @property
    def is_leaving(self) -> bool:
        """It was told to stop."""
        ...

    def start_now(self) -> None: ...
    def evict(self) -> None: ...


class Pool:
    """For one loop. None: without a limit."""

    def __init__(self, *, processes_max: int | None = None, starts_max: int | None = None) -> None:
        self.processes_max = processes_max
        self.starts_max = starts_max
        self._waiting: list[PoolMember] = []
        self._there: set[PoolMember] = set()
        # Those that are starting, each with the end of the time in which it counts as one.
        self._starting: dict[PoolMember, asyncio.TimerHandle] = {}
        # Those that were told to make room, and have not heard it or not obeyed yet.
        self._told: set[PoolMember] = set()
        self._is_looking = False
        self._must_look_again = False

    def __repr__(self) -> str:
        return f"<Pool {len(self._there)} there, {len(self._starting)} starting, {len(self._waiting)} waiting>"

    def want(self, member: PoolMember) -> None:
        """It needs a process, and is told when it may start one: at once, perhaps."""
        assert member not in self._there
        self._waiting.append(member)
        self.look()

    def withdraw(self, member: PoolMember) -> None:
        """It no longer waits for its place."""
        self._waiting.remove(member)
        self.look()

    def has_started(self, member: PoolMember) -> None:
        timer = self._starting.pop(member, None)
        if timer is not None:
            timer.cancel()
            self.look()

    def has_left(self, member: PoolMember) -> None:
        self._there.discard(member)
        self._told.discard(member)
        self.has_started(member)
        self.look()

    def look(self) -> None:
        """Let those start that may, and make room for those that may not. Whoever is started or evicted may come back
        in here before it returns; then it is looked at once more, and not inside."""
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
            member = max(self._waiting, key=lambda waiting: waiting.urgency)  # The first of the most urgent.
            self._waiting.remove(member)
            self._there.add(member)
            loop = asyncio.get_running_loop()
            self._starting[member] = loop.call_later(START_SECONDS_MAX, self.has_started, member)
            member.start_now()

    @staticmethod
    def _is_full(count: int, limit: int | None) -> bool:
        return limit is not None and count >= limit

    def _make_room(self) -> None:
        self._told = {member for member in self._told if member.idle_since is not None or member.is_leaving}
        leaving = sum(member.is_leaving or member in self._told for member in self._there)
        idle = {member: since for member in self._there - self._told if (since := member.idle_since) is not None}
        for member in sorted(idle, key=lambda member: idle[member])[: max(0, len(self._waiting) - leaving)]:
            self._told.add(member)
            member.evict()
