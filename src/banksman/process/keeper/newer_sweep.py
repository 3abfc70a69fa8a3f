"""Sweep of the newer part of a tree: end the processes that were started after a given moment.

An interrupted agent may leave its tool running. The sweep ends the tool, and spares the agent and
everything that it had started before. Examples are its servers, its adapters, and a second process
that it talks through. The sweep runs in the keeper, and `process/sweep_requests.py` is the host's
end.

*Targets.* Neither a command line nor a process group distinguishes a tool from a server. The start
time does: the kernel records it for each process, and no process can change it. The targets are all
descendants that started after the given moment, together with all of their descendants. Processes
that the agent starts after the order arrived are spared. Otherwise the sweep of an agent that runs
something every second would never end. But everything that a target forks is a target. It is a
descendant of a target, or it was orphaned and is a child of the keeper now.

*Method.* The sweep sends TERM and grants a grace, in which the keeper keeps serving its other
events. Then it freezes and kills, round by round, until a look finds no target. A look is one scan
of /proc.

*Proof.* One look is no proof, and ECHILD is not available, because the agent keeps running. A chain
of processes that fork and exit can escape a look, in a child that was born during the look. But
then its ancestor, alive when the look began, is dead now and was not dead in the look before. There
is one exception: the parent of that ancestor has reaped it already. Only a process that is not a
target can do that, and only to the first process of a chain. Hence the rule: a sweep is over after
two looks in a row that find no living target, the second of which finds none that is newly dead.
All of this is bounded in time, and the report names the survivors.

*Limit.* An orphan becomes a child of the nearest subreaper. If the agent has started a subreaper
before the given moment, a process that a tool forks while it is dying becomes a child of that
subreaper. The sweep then takes it for a process that the subreaper has started.
"""

from __future__ import annotations

import os
import time

from banksman.process import syscalls
from banksman.process.keeper import messages
from banksman.process.keeper.proc_tree import UNSEEN, census, explain, is_alive, read_stat
from banksman.process.keeper.sweep import Helper, Sweep

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable

    from banksman.process.keeper.outbox import KeeperOutbox
    from banksman.process.keeper.proc_tree import Member, Row

# Time between TERM and KILL. It is short, because the next prompt waits for the sweep, and most
# processes exit immediately.
NEWER_GRACE_SECONDS = 0.5
# How long the sweep retries KILL after that.
NEWER_KILL_SECONDS_MAX = 1.0
# Pause between two rounds. The kernel reports the death of a target to its parent, not to the
# keeper, so the sweep has to look.
NEWER_ROUND_SECONDS = 0.02


class NewerSweep(Sweep):
    """Sweep of the processes started after a given moment, as ordered by the host.

    The keeper calls `go_on` whenever `next_round` has passed, until `go_on` returns True.
    """

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
        """Prepare the sweep; nothing is signalled yet.

        `number`: the host's number of the request. `since`: a tick, and the highest pid in that
        tick that is spared (see `process/sweep_requests.py`). `ends`: False only looks. `leader`:
        the process that is always spared.
        """
        now = self.next_round = time.monotonic()
        self._kill_at = now + NEWER_GRACE_SECONDS
        self._over_at = self._kill_at + NEWER_KILL_SECONDS_MAX
        helper: Helper | None = None
        if ender is not None:
            # A separate helper with a separate budget, so that this sweep uses up no runs that the
            # final stop may need.
            helper = Helper(ender)
            helper.until = self._over_at
        super().__init__(os.getpid(), reap, helper)
        self.number = number
        self.survivors: list[tuple[int, str, str]] = []
        self._ends = ends
        self._leader = leader
        self._since = since
        # The kernel counts start times in ticks of CLOCK_BOOTTIME. Processes that the agent starts
        # after this tick are spared.
        self._began = int(time.clock_gettime(time.CLOCK_BOOTTIME) * syscalls.TICKS_PER_SECOND)
        self._asked: set[Member] = set()
        # The dead targets of the last look. None: no look has happened yet, or the last one found a
        # living target.
        self._dead: set[Member] | None = None

    def go_on(self) -> bool:
        """Run one round. True if it was the last; then `ended` and `survivors` hold the result."""
        is_killing = self._ends and time.monotonic() >= self._kill_at
        # Set before the round, because `_look` may bring it forward.
        self.next_round = time.monotonic() + NEWER_ROUND_SECONDS
        try:
            is_over = self._kill_round() if is_killing else self._ask_round()
        except OSError:
            # No memory or fds for a scan. The next round may succeed.
            is_over = False
            if time.monotonic() >= self._over_at:
                # Nothing is known about the tree, and the report must say so: an empty list would
                # claim success.
                self.survivors = [UNSEEN]
                is_over = True
        return is_over

    @property
    def ended(self) -> list[tuple[int, str]]:
        """The processes that got a signal, except the known survivors."""
        left = {pid for pid, _name, _why in self.survivors}
        return [(pid, name) for (pid, _start), name in self.names.items() if pid not in left]

    def _ask_round(self) -> bool:
        # Look again only when all processes that got TERM are gone. This check reads a few files; a
        # look reads all of /proc.
        if any(_is_there(member) for member in self._asked):
            return False
        living, is_over = self._look()
        # The caller only wants a list of the running processes.
        if not self._ends:
            self.survivors = [
                (pid, name, "left as it is") for pid, name, _why in explain(living, ())
            ]
            return True
        # A set of targets that got no TERM before: all earlier ones are gone, as checked above.
        # These are processes forked in between, and they get their TERM too, within the same grace.
        self._asked = {(row[0], row[3]) for row in living}
        self._ask(self._asked)
        return is_over

    def _kill_round(self) -> bool:
        self.kill()
        # The look decides whether the sweep is over. The result of `kill` only says whether it has
        # signalled a process.
        living, is_over = self._look()
        if not is_over and time.monotonic() >= self._over_at:
            self.survivors = explain(living, self.denied)
            return True
        return is_over

    def _look(self) -> tuple[list[Row], bool]:
        """Scan for targets. Return the living ones, and whether the look is a proof."""
        # Reap first: a dead child of the keeper would otherwise count as newly dead and delay the
        # proof.
        self._reap()
        chosen = self._choose(list(census(self._root, near=False)), (), ())
        living = [row for row in chosen if is_alive(row)]
        # Zombies in this scan have other parents, or died during the scan. They are evidence: see
        # "Proof" in the module docstring.
        dead = {(row[0], row[3]) for row in chosen if not is_alive(row)}
        is_proof = not living and self._dead is not None and dead <= self._dead
        self._dead = None if living else dead
        if not living:
            # The look that proves the end follows without a pause.
            self.next_round = time.monotonic()
        return living, is_proof

    # -- targets ----------------------------------------------------------------------------------
    def _is_meant(self, row: Row) -> bool:
        # A child of the keeper other than the leader is an orphan. It has no upper bound on its
        # start time, unlike the others (`_choose`): its parent was a target, or was older than
        # `since` and has abandoned it.
        return row[0] != self._leader and (row[3], row[0]) > self._since

    def _choose(self, rows: list[Row], held: Iterable[int], but: Container[int]) -> list[Row]:
        children: dict[int, list[Row]] = {}
        for row in rows:
            children.setdefault(row[1], []).append(row)
        chosen: list[Row] = []
        # Pairs of a pid and whether it is a target; a target makes all its descendants targets. The
        # keeper's own child, the leader, is reached from the root, which is not a target.
        waiting = [(self._root, False), *((pid, True) for pid in held)]
        while waiting:
            parent, is_meant = waiting.pop()
            for row in children.get(parent, ()):
                # Born between `since` and the order. Later children of the agent are spared;
                # orphans of the keeper have no such bound.
                is_born_in_time = parent == self._root or row[3] <= self._began
                is_chosen = is_meant or (is_born_in_time and self._is_meant(row))
                waiting.append((row[0], is_chosen))
                if is_chosen:
                    chosen.append(row)
        return chosen

    def _kill_unseen(self) -> bool:
        # The child that /proc does not show may be the leader.
        return False


def _is_there(member: Member) -> bool:
    """Whether this process, and not a later one with its pid, is alive."""
    stat = read_stat(member[0])
    return stat is not None and stat[2] == member[1] and stat[1] not in "ZX"


class NewerSweeps:
    """The partial sweep that is under way, if any, and its reports to the host."""

    __slots__ = ("_ender", "_leader", "_outbox", "_reap", "_sweep")

    def __init__(
        self,
        outbox: KeeperOutbox,
        leader: int,
        reap: Callable[[], None],
        ender: tuple[bytes, ...] | None,
    ) -> None:
        self._outbox = outbox
        self._leader = leader
        self._reap = reap
        self._ender = ender
        self._sweep: NewerSweep | None = None

    def due(self) -> float | None:
        """Return when `look` has something to do at the latest."""
        return None if self._sweep is None else self._sweep.next_round

    def begin(self, number: int, since: tuple[int, int], *, ends: bool) -> None:
        """Begin a sweep as the host has ordered it."""
        # One partial sweep at a time. The earlier sweep reports its result so far, so that its
        # request gets an answer.
        self._end()
        self._sweep = NewerSweep(
            number, since, ends=ends, leader=self._leader, reap=self._reap, ender=self._ender
        )

    def look(self, *, is_moot: bool) -> None:
        """Continue the sweep if it is time. `is_moot`: no part of the tree is to be spared."""
        if self._sweep is None:
            return
        if is_moot or (time.monotonic() >= self._sweep.next_round and self._sweep.go_on()):
            self._end()

    def _end(self) -> None:
        """Report the result of the sweep, also if it was cut short.

        The report names every process that got a signal, even if it has not exited yet.
        """
        sweep, self._sweep = self._sweep, None
        if sweep is None:
            return
        ended = sweep.ended
        for first in range(0, len(ended), messages.NAMES_PER_MESSAGE):
            self._outbox.say(
                messages.SWEEP_REPORT,
                sweep.number,
                ended[first : first + messages.NAMES_PER_MESSAGE],
                [],
                False,
            )
        self._outbox.say(messages.SWEEP_REPORT, sweep.number, [], sweep.survivors, True)
