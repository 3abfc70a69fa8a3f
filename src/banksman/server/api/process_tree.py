"""The processes of a tree, as /proc shows them at one moment. For people to look at: nothing is decided by it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# A tree that is larger is shown so far.
SHOWN_MAX = 256


class SeenProcess(NamedTuple):
    pid: int
    parent: int
    command: str
    state: str
    rss_bytes: int


def of(pids: Iterable[int]) -> list[SeenProcess]:
    """These, all below them, and all that their keepers have taken in: everything that would be ended with them."""
    everything = {seen.pid: seen for seen in _all()} if (wanted := list(pids)) else {}
    children: dict[int, list[SeenProcess]] = {}
    for seen in everything.values():
        children.setdefault(seen.parent, []).append(seen)
    found: list[SeenProcess] = []
    for pid in wanted:
        leader = everything.get(pid)
        # The leader's parent is its keeper, and the keeper of nothing else.
        waiting = [] if leader is None else list(children.get(leader.parent, ()))
        while waiting and len(found) < SHOWN_MAX:
            seen = waiting.pop(0)
            found.append(seen)
            waiting += children.get(seen.pid, ())
    return found


def _all() -> Iterable[SeenProcess]:
    try:
        names = os.listdir("/proc")
    except OSError:
        return
    for name in names:
        if not name.isdecimal():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                stat = file.read()
        except OSError:
            continue  # It has ended meanwhile.
        # The name is in parentheses, and may have some itself.
        command = stat[stat.index(b"(") + 1 : stat.rindex(b")")].decode(errors="replace")
        state, parent, *rest = stat[stat.rindex(b")") + 2 :].split()
        yield SeenProcess(int(name), int(parent), command, state.decode(), int(rest[19]) * PAGE_BYTES)
