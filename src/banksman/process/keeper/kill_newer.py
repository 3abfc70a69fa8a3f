"""Ending what a tree has grown since a moment, and leaving the rest of it alone.

An agent that is interrupted may leave its tool running. The tool is to be ended; the agent is not, nor is what it had
started before: its servers, its adapters, the second process it talks through.

Who is meant. No command line and no group tells a tool from a server. What does is the time of birth, which the kernel
notes for each process and nobody can change: meant is every descendant that was born since that moment, and with it all
that descends from it. What the agent starts after the order came is not meant, or an agent that runs something every
second would never be done with. But what those who are meant go on to fork is: it is below one of them, or has lost its
parent to death and become a child of the keeper.

How. TERM, then a grace in which the keeper goes on hearing everybody, then freeze and kill, round by round, until a
look finds nobody. Such a look proves nothing by itself: there is no ECHILD here, since the agent stays. A line of
processes that fork and exit may have gone on, behind the look, in a child that was born during it. But then whoever was
there when the look began is dead now, and was not before; unless its parent has reaped it at once, which only one can
do that is not meant itself, and only to the first of a line. Hence the rule: it is over when two looks in a row have
found nobody, and the second nobody newly dead. All of it is bounded, and those who are left then are named.

The limit: an orphan falls to the nearest subreaper. If the agent had one running before, what a tool forks and leaves
behind in the moments of its own end becomes that one's child, and is taken for one.
"""

from __future__ import annotations

import os
import time

from banksman.process import syscalls
from banksman.process.keeper.kill_tree import Sweep
from banksman.process.keeper.proc_tree import UNSEEN, census, explain, is_alive, read_stat
from banksman.process.keeper.sudo_kill import Helper

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable

    from banksman.process.keeper.proc_tree import Member, Row

# How long they have between TERM and KILL. Short, because the next prompt waits for it, and most go at once.
GRACE_SECONDS = 0.5
# How long KILL is tried after that.
KILL_SECONDS_MAX = 1.0
# Between two rounds. Their deaths are told to their parents and not to us, so they are looked for.
ROUND_SECONDS = 0.02


class NewerSweep(Sweep):
    """One order of the host. The keeper calls `go_on` whenever `next_round` has come, until it says that it is over."""

    def __init__(
        self,
        number: int,
        since: tuple[int, int],
        *,
        ends: bool,
        leader: int,
        reap: Callable[[], None],
        ender: tuple[bytes, ...] | None,
    ) -> None:
        """`since`: a tick, and the last pid in it that is not meant: see process/tree_cleanup.py. `ends` False: only
        look.
        """
        now = self.next_round = time.monotonic()
        self._kill_at = now + GRACE_SECONDS
        self._over_at = self._kill_at + KILL_SECONDS_MAX
        helper: Helper | None = None
        if ender is not None:
            # One of its own, so that nothing of what the last stop may use is used up here.
            helper = Helper(ender)
            helper.until = self._over_at
        super().__init__(os.getpid(), reap, helper)
        self.number = number
        self.survivors: list[tuple[int, str, str]] = []
        self._ends = ends
        self._leader = leader
        self._since = since
        self._began = int(time.clock_gettime(time.CLOCK_BOOTTIME) * syscalls.TICKS_PER_SECOND)
        self._asked: set[Member] = set()
        # Whom the last look found dead; None: there was none.
        self._dead: set[Member] | None = None

    def go_on(self) -> bool:
        """One round. True if that was the last: see `ended` and `survivors`."""
        is_killing = self._ends and time.monotonic() >= self._kill_at
        self.next_round = time.monotonic() + ROUND_SECONDS
        try:
            is_over = self._kill_round() if is_killing else self._ask_round()
        except OSError:
            # No room to look. There may be in the next round.
            is_over = False
            if time.monotonic() >= self._over_at:
                self.survivors = [UNSEEN]
                is_over = True
        return is_over

    @property
    def ended(self) -> list[tuple[int, str]]:
        """Those that were signalled, but for those that are known to have survived it."""
        left = {pid for pid, _name, _why in self.survivors}
        return [(pid, name) for (pid, _start), name in self.names.items() if pid not in left]

    def _ask_round(self) -> bool:
        if any(_is_there(member) for member in self._asked):
            return False
        living, is_over = self._look()
        if not self._ends:
            self.survivors = [(pid, name, "left as it is") for pid, name, _why in explain(living, ())]
            return True
        self._asked = {(row[0], row[3]) for row in living}
        self._ask(self._asked)
        return is_over

    def _kill_round(self) -> bool:
        self.kill()
        living, is_over = self._look()
        if not is_over and time.monotonic() >= self._over_at:
            self.survivors = explain(living, self.denied)
            return True
        return is_over

    def _look(self) -> tuple[list[Row], bool]:
        """Who is meant and alive; and whether that was all."""
        self._reap()
        chosen = self._choose(list(census(self._root, near=False)), (), ())
        living = [row for row in chosen if is_alive(row)]
        dead = {(row[0], row[3]) for row in chosen if not is_alive(row)}
        is_proof = not living and self._dead is not None and dead <= self._dead
        self._dead = dead
        if not living:
            self.next_round = time.monotonic()
        return living, is_proof

    # -- who is meant ------------------------------------------------------------------------------------------------
    def _is_meant(self, row: Row) -> bool:
        # A child of the keeper that is not the leader has lost its parent. It may have been born at any time since: its
        # parent was one of those who are meant, or was itself born before, and left it to nobody.
        return row[0] != self._leader and (row[3], row[0]) > self._since

    def _choose(self, rows: list[Row], held: Iterable[int], but: Container[int]) -> list[Row]:
        children: dict[int, list[Row]] = {}
        for row in rows:
            children.setdefault(row[1], []).append(row)
        chosen: list[Row] = []
        # Each with whether it is meant, and so all below it. The leader hangs on the keeper alone, and is not.
        waiting = [(self._root, False), *((pid, True) for pid in held)]
        while waiting:
            parent, is_meant = waiting.pop()
            for row in children.get(parent, ()):
                is_born_in_time = parent == self._root or row[3] <= self._began
                is_chosen = is_meant or (is_born_in_time and self._is_meant(row))
                waiting.append((row[0], is_chosen))
                if is_chosen:
                    chosen.append(row)
        return chosen

    def _kill_unseen(self) -> bool:
        # A child of ours that /proc does not show may well be the leader.
        return False


def _is_there(member: Member) -> bool:
    stat = read_stat(member[0])
    return stat is not None and stat[2] == member[1] and stat[1] not in "ZX"
