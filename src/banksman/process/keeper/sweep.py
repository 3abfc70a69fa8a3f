"""Sweeps: the end of a whole tree, or of what it has grown since a moment.

**A whole tree** (`Sweep`): TERM to each member, or freeze and kill until there is proof that nobody is left. Frozen
first, because a tree that forks faster than it is killed outruns a sweep that only kills, and one that restarts its
dead children never ends.

**The newer part** (`NewerSweep`). An agent that is interrupted may leave its tool running. The tool is to be ended;
the agent is not, nor is what it had started before: its servers, its adapters, the second process it talks through.

Who is meant. No command line and no group tells a tool from a server. What does is the time of birth, which the
kernel notes for each process and nobody can change: meant is every descendant that was born since that moment, and
with it all that descends from it. What the agent starts after the order came is not meant, or an agent that runs
something every second would never be done with. But what those who are meant go on to fork is: it is below one of
them, or has lost its parent to death and become a child of the keeper.

How. TERM, then a grace in which the keeper goes on hearing everybody, then freeze and kill, round by round, until a
look finds nobody. Such a look proves nothing by itself: there is no ECHILD here, since the agent stays. A line of
processes that fork and exit may have gone on, behind the look, in a child that was born during it. But then whoever
was there when the look began is dead now, and was not before; unless its parent has reaped it at once, which only one
can do that is not meant itself, and only to the first of a line. Hence the rule: it is over when two looks in a row
have found nobody, and the second nobody newly dead. All of it is bounded, and those who are left then are named.

The limit: an orphan falls to the nearest subreaper. If the agent had one running before, what a tool forks and leaves
behind in the moments of its own end becomes that one's child, and is taken for one.
"""

from __future__ import annotations

import errno
import os
import select
import time

from banksman.process import syscalls
from banksman.process.keeper.proc_tree import (
    UNSEEN,
    census,
    descendants,
    enumerate_children,
    explain,
    family,
    is_alive,
    name_of,
    open_member,
    read_stat,
)
from banksman.process.keeper.spawn import DEFAULT_SIGNALS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable

    from banksman.process.keeper.proc_tree import Member, Row

SIGHUP, SIGKILL, SIGTERM, SIGCONT, SIGSTOP = 1, 9, 15, 18, 19
# One pass finds what was forked during the pass before; each pass freezes more of the tree, so a tree that can be
# frozen at all is frozen in a few. The bound is for one that cannot: those that are held are killed, and the next round
# goes on with fewer.
FREEZE_SECONDS_MAX = 0.5
# Asking about every pid is done more than once, because what a hidden child leaves behind becomes ours only when the
# child is dead; but not too often.
ENUMERATE_SECONDS_BETWEEN = 0.5
# The names of what was swept are for people. A tree that made thousands of processes is told by its first ones.
NAMES_MAX = 1000

# How long they have between TERM and KILL. Short, because the next prompt waits for it, and most go at once.
NEWER_GRACE_SECONDS = 0.5
# How long KILL is tried after that.
NEWER_KILL_SECONDS_MAX = 1.0
# Between two rounds. Their deaths are told to their parents and not to us, so they are looked for.
NEWER_ROUND_SECONDS = 0.02

# `kill` is over in a moment, and what comes before it (rules, a log) in a few. The keeper hears nobody meanwhile.
RUN_SECONDS_MAX = 2.0
# A refusal is in somebody's log each time. Who could not be ended by so many runs will not be by more.
RUNS_MAX = 32
# So that the words of one run fit in a command line.
PIDS_PER_RUN = 1000
_NAMES = {1: "HUP", 2: "INT", 3: "QUIT", 9: "KILL", 10: "USR1", 12: "USR2", 15: "TERM", 18: "CONT", 19: "STOP"}
_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}


class Helper:
    """Signals to processes that are not ours to signal, by a program with more rights: `sudo -n /usr/bin/kill …`.

    It may be slow, refuse, or hang, and a tree is waiting to be ended. So each run has a time, all runs together a
    number, and one that did not come back in time is not asked again. Whatever it did is not believed either: that the
    tree is gone is proven by the kernel, as ever, and who is left is named.

    `ender` are its words up to and with the absolute path of `kill`.
    """

    def __init__(self, ender: tuple[bytes, ...]) -> None:
        self._ender = ender
        self._runs = 0
        # No run goes on beyond this moment.
        self.until: float | None = None

    def kill(self, number: int, pids: list[int]) -> bool:
        """True if all of them were signalled. A negative one is a group, as ever."""
        if number not in _NAMES:
            return False
        done = True
        for first in range(0, len(pids), PIDS_PER_RUN):
            words = ["-s", _NAMES[number], "--", *map(str, pids[first : first + PIDS_PER_RUN])]
            done = self._run([*self._ender, *(word.encode() for word in words)]) and done
        return done

    def _run(self, argv: list[bytes]) -> bool:
        now = time.monotonic()
        due = now + RUN_SECONDS_MAX if self.until is None else min(now + RUN_SECONDS_MAX, self.until)
        if self._runs >= RUNS_MAX or due <= now:
            return False
        self._runs += 1
        try:
            # Our own stdio is /dev/null, and every other fd of ours is closed on exec.
            pid = syscalls.posix_spawn(argv[0], argv, _ENVIRONMENT, setsigmask=(), setsigdef=DEFAULT_SIGNALS)
        except OSError:
            return False
        try:
            pidfd = syscalls.pidfd_open(pid)
        except OSError:
            # Then it is not waited for. Whoever reaps the tree reaps it too.
            return False
        try:
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            if not syscalls.poll(poller, max(0.0, due - time.monotonic()) * 1000):
                self._runs = RUNS_MAX
                # Perhaps in vain, for it may have become another user. Then it is one of those who are left.
                syscalls.pidfd_send_signal(pidfd, SIGKILL)
                return False
            return syscalls.waitpid(pid, 0)[1] == 0
        except OSError:
            return False
        finally:
            syscalls.close(pidfd)


class Sweep:
    """One tree's sweep. The caller repeats rounds of `kill` until it has *proof* that nothing is left."""

    def __init__(self, root: int, reap: Callable[[], None], helper: Helper | None = None) -> None:
        """`helper` signals those that are not ours to signal; without one they are `denied`."""
        self._root = root
        self._reap = reap
        self._helper = helper
        self._near = True
        self._ask_all_at = 0.0
        self.names: dict[Member, str] = {}
        self.denied: dict[Member, str] = {}

    def term(self) -> None:
        """TERM to each member that is alive now."""
        # A full look: one with a pid below ours would otherwise sit out the grace unasked, and then be killed.
        self._ask(descendants(self._root, near=False))

    def _ask(self, members: Iterable[Member]) -> None:
        """TERM, and CONT, without which a stopped one would not even notice."""
        others: list[int] = []
        for member in members:
            fd = open_member(member)
            if fd is None:
                continue
            self._name(member)
            try:
                syscalls.pidfd_send_signal(fd, SIGTERM)
                syscalls.pidfd_send_signal(fd, SIGCONT)
            except OSError as exc:
                # Gone, or not ours to signal. Without a helper the sweep that follows reports the second.
                if exc.errno == errno.EPERM:
                    others.append(member[0])
            finally:
                syscalls.close(fd)
        if others and self._helper is not None:
            self._helper.kill(SIGTERM, others)
            self._helper.kill(SIGCONT, others)

    def kill(self, but: Container[int] = ()) -> bool:
        """One round, leaving out the subtrees of `but`. True if there was something to kill."""
        held: dict[int, int] = {}
        self.denied = {}
        try:
            self._freeze(held, but)
            if not held and self._near:
                # Nothing near: whatever is left has a pid below ours, so from now on look everywhere.
                self._near = False
                self._freeze(held, but)
        except OSError as exc:
            # Out of fds, most likely. Those that are held get killed below and give their fds back; the next round
            # finds the others.
            if not held and exc.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise
        finally:
            for fd in held.values():
                try:
                    syscalls.pidfd_send_signal(fd, SIGKILL)
                except OSError:
                    pass  # Gone between the two signals.
                syscalls.close(fd)
        if self.denied and self._helper is not None:
            return self._kill_by_helper(self._helper) or bool(held)
        if not held and not self.denied and not but and time.monotonic() >= self._ask_all_at:
            self._ask_all_at = time.monotonic() + ENUMERATE_SECONDS_BETWEEN
            return self._kill_unseen()
        return bool(held)

    def _freeze(self, held: dict[int, int], but: Container[int]) -> None:
        """Stop everybody, pass after pass until a pass finds nobody new. `held`: pid to pidfd, all stopped."""
        give_up_at = time.monotonic() + FREEZE_SECONDS_MAX
        while time.monotonic() < give_up_at:
            before = len(held)
            others: list[Row] = []
            for row in census(self._root, near=self._near, known=held):
                # A child of our own is stopped the moment it is met. A line of processes that only fork and exit is
                # ours in each generation, and is gone again by the end of the pass.
                if row[1] == self._root and self._is_meant(row) and row[0] not in but:
                    self._stop(row, held)
                others.append(row)
            for row in self._choose(others, held, but):
                if row[0] not in held:
                    self._stop(row, held)
            if len(held) == before:
                return
            # A tree that forks and exits leaves us thousands of zombies a second, and each pass would look at them all.
            self._reap()

    def _is_meant(self, row: Row) -> bool:
        """Whether a child of our own is to be ended."""
        return True

    def _choose(self, rows: list[Row], held: Iterable[int], but: Container[int]) -> list[Row]:
        """Who of these is to be ended. Those that are held are not among them, their descendants are."""
        return family([self._root, *held], rows, but=but)

    def _stop(self, row: Row, held: dict[int, int]) -> None:
        member = row[0], row[3]
        if not is_alive(row) or member in self.denied:
            return
        fd = open_member(member)
        if fd is None:
            return
        try:
            syscalls.pidfd_send_signal(fd, SIGSTOP)
        except OSError as exc:
            syscalls.close(fd)
            if exc.errno == errno.EPERM:
                self.denied[member] = name_of(row[0])
            return
        held[row[0]] = fd
        self._name(member)

    def _kill_by_helper(self, helper: Helper) -> bool:
        """Freeze and kill those that are not ours to signal. False if the helper could not.

        By number, since nobody can hand a pidfd to `kill`. Each was this process a moment ago, and one that is frozen
        cannot end and give its number away. What remains is a process that ends, is reaped and has its number used
        again, by somebody else, in the time that a helper takes to start: the stated limit.
        """
        members = [member for member in self.denied if (stat := read_stat(member[0])) and stat[2] == member[1]]
        pids = [pid for pid, _start in members]
        for member in members:
            self._name(member)
        # Either is false if one of them has gone meanwhile, and then the other may well have met the rest.
        was_stopped = helper.kill(SIGSTOP, pids)
        return helper.kill(SIGKILL, pids) or was_stopped

    def _kill_unseen(self) -> bool:
        """Kill direct children that /proc does not show: by number, which is safe for an unreaped child of our own."""
        # A child that /proc shows as a zombie is dead; its tracer has it. One that it does not show at all is meant.
        children = [pid for pid in enumerate_children() if read_stat(pid) is None]
        for pid in children:
            self.names[pid, 0] = "(hidden)"
            try:
                syscalls.kill(pid, SIGKILL)
            except OSError:
                self.denied[pid, 0] = ""
        return bool(children)

    def _name(self, member: Member) -> None:
        if member not in self.names and len(self.names) < NAMES_MAX:
            name = name_of(member[0])
            if name:  # Else it was ending by itself when we met it.
                self.names[member] = name


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
        """`since`: a tick, and the last pid in it that is not meant: see process/sweep_requests.py. `ends` False: only
        look.
        """
        now = self.next_round = time.monotonic()
        self._kill_at = now + NEWER_GRACE_SECONDS
        self._over_at = self._kill_at + NEWER_KILL_SECONDS_MAX
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
        self.next_round = time.monotonic() + NEWER_ROUND_SECONDS
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
        self._dead = None if living else dead
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
