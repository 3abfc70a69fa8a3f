"""Sweep of a whole process tree: TERM to each member, or freeze and kill round by round.

The caller repeats the rounds and decides when no process is left. The callers are the keeper, the
zygote (`lost_trees.py`) and the host (`process/orphans.py`). `Helper` signals processes that the
caller may not signal, through a program such as sudo. `newer_sweep.py` has the sweep that ends only
a part of a tree.

A round freezes before it kills, for two reasons. A tree that forks faster than it is killed outruns
a sweep that only kills. A tree that restarts its dead children never ends.
"""

from __future__ import annotations

import errno
import select
import time

from banksman.process import syscalls
from banksman.process.keeper.proc_tree import (
    census,
    descendants,
    enumerate_children,
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

# Plain numbers, because the keeper does not import `signal`: see `process/syscalls.py`.
SIGHUP, SIGKILL, SIGTERM, SIGCONT, SIGSTOP = 1, 9, 15, 18, 19
# Bound of one freeze. Each pass finds the processes that were forked during the pass before, and
# freezes more of the tree. A tree that can be frozen at all is frozen after a few passes. For a
# tree that cannot, the bound applies: the held processes are killed, and the next round has fewer
# left.
FREEZE_SECONDS_MAX = 0.5
# Pause between two enumerations of all pids. More than one is needed, because the children of a
# hidden child become children of the keeper only after that child is dead. But each enumeration is
# expensive.
ENUMERATE_SECONDS_BETWEEN = 0.5
# The names of swept processes are for people. For a tree of thousands of processes the first names
# are enough.
NAMES_MAX = 1000

# Bound of one run of the helper. `kill` takes a moment; sudo's rules and its log take a little
# longer. The keeper handles no events meanwhile.
RUN_SECONDS_MAX = 2.0
# Bound of all runs. Each refusal is logged by sudo, and a process that survives this many runs will
# survive more.
RUNS_MAX = 32
# Keeps the arguments of one run below the size limit of a command line.
PIDS_PER_RUN = 1000
_NAMES = {
    1: "HUP",
    2: "INT",
    3: "QUIT",
    9: "KILL",
    10: "USR1",
    12: "USR2",
    15: "TERM",
    18: "CONT",
    19: "STOP",
}
_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C",
}


class Helper:
    """Signals processes through a program with more privileges: `sudo -n /usr/bin/kill …`.

    The sweep needs it for processes that the keeper may not signal (EPERM). The program may be
    slow, refuse or hang, while a tree waits to be ended. Hence three bounds: a time for each run, a
    number for all runs, and no further run after a timeout. The sweep does not trust the exit
    status either. The kernel proves that the tree is gone, as in any other sweep, and the report
    names the survivors.

    `ender`: the words of the command, up to and including the absolute path of `kill`.
    """

    def __init__(self, ender: tuple[bytes, ...]) -> None:
        self._ender = ender
        self._runs = 0
        # No run lasts beyond this moment. None: only the bound of each run applies.
        self.until: float | None = None

    def kill(self, number: int, pids: list[int]) -> bool:
        """Signal these processes and return whether all of them got the signal.

        `pids`: a negative number means a process group, as for `kill`.
        """
        # `kill -s` takes a name. Signals without an entry here are never part of a stop, so they
        # are not forwarded.
        if number not in _NAMES:
            return False
        done = True
        for first in range(0, len(pids), PIDS_PER_RUN):
            words = ["-s", _NAMES[number], "--", *map(str, pids[first : first + PIDS_PER_RUN])]
            # The call comes first in this expression: a failed batch must not skip the batches
            # after it.
            done = self._run([*self._ender, *(word.encode() for word in words)]) and done
        return done

    def _run(self, argv: list[bytes]) -> bool:
        now = time.monotonic()
        due = (
            now + RUN_SECONDS_MAX if self.until is None else min(now + RUN_SECONDS_MAX, self.until)
        )
        if self._runs >= RUNS_MAX or due <= now:
            return False
        self._runs += 1
        try:
            # The stdio of the keeper is /dev/null, and all its other fds have the close-on-exec
            # flag. So the helper inherits nothing.
            pid = syscalls.posix_spawn(
                argv[0], argv, _ENVIRONMENT, setsigmask=(), setsigdef=DEFAULT_SIGNALS
            )
        except OSError:
            return False
        try:
            pidfd = syscalls.pidfd_open(pid)
        except OSError:
            # The run cannot be waited for with a timeout, so it is not waited for at all. It is a
            # child of the keeper, and the code that reaps the tree reaps it too.
            return False
        try:
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            if not syscalls.poll(poller, max(0.0, due - time.monotonic()) * 1000):
                # A helper that hung once would probably hang again, while the tree waits. No
                # further run.
                self._runs = RUNS_MAX
                # This may fail with EPERM, because sudo runs as another user. Then the run becomes
                # one of the survivors.
                syscalls.pidfd_send_signal(pidfd, SIGKILL)
                return False
            # The pidfd is readable, so the process is dead and waitpid does not block.
            return syscalls.waitpid(pid, 0)[1] == 0
        except OSError:
            return False
        finally:
            syscalls.close(pidfd)


class Sweep:
    """Freeze-and-kill sweep of one tree.

    The caller repeats `kill` until it has *proof* that no process is left. The sweep itself cannot
    prove that: see `proc_tree.census`.
    """

    def __init__(self, root: int, reap: Callable[[], None], helper: Helper | None = None) -> None:
        """Prepare a sweep of all descendants of `root`.

        `reap`: reaps dead children of this process. `helper`: signals the processes that this
        process may not signal; without a helper these processes end up in `denied`.
        """
        self._root = root
        self._reap = reap
        self._helper = helper
        # Look only at pids above the root's until that finds nothing: see `proc_tree.census`.
        self._near = True
        self._ask_all_at = 0.0
        self.names: dict[Member, str] = {}
        self._taken = 0
        self.denied: dict[Member, str] = {}

    def term(self) -> None:
        """Send TERM to each member that is alive now."""
        # A full scan, unlike in `kill`. A process with a pid below the root's would otherwise get
        # no TERM, wait through the grace, and be killed without a chance to clean up.
        self._ask(descendants(self._root, near=False))

    def _ask(self, members: Iterable[Member]) -> None:
        """Send TERM, then CONT: a stopped process does not handle TERM until it is continued."""
        others: list[int] = []
        for member in members:
            fd = open_member(member)
            if fd is None:
                continue
            # The name must be read before the signal. Afterwards the process may be gone, and with
            # it its command line.
            self._name(member)
            try:
                syscalls.pidfd_send_signal(fd, SIGTERM)
                syscalls.pidfd_send_signal(fd, SIGCONT)
            except OSError as exc:
                # ESRCH: the process is gone. EPERM: this process may not signal it. Without a
                # helper, the sweep that follows reports it as denied.
                if exc.errno == errno.EPERM:
                    others.append(member[0])
            finally:
                syscalls.close(fd)
        if others and self._helper is not None:
            self._helper.kill(SIGTERM, others)
            self._helper.kill(SIGCONT, others)

    def kill(self, but: Container[int] = ()) -> bool:
        """Run one round, sparing the subtrees of `but`. True if there was something to kill."""
        held: dict[int, int] = {}
        # Collected again in each round, because a denied process may have exited since.
        self.denied = {}
        try:
            self._freeze(held, but)
            if not held and self._near:
                # No member has a pid above the root's. The rest of the tree has lower pids, because
                # pids wrap around. From now on the sweep looks at all pids.
                self._near = False
                self._freeze(held, but)
        except OSError as exc:
            # Out of fds, most likely. The held processes are killed below, which frees their fds,
            # and the next round finds the others.
            if not held and exc.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise
        finally:
            # In `finally`: processes that are frozen must be killed whatever happens, because
            # nothing would ever continue them.
            for fd in held.values():
                try:
                    syscalls.pidfd_send_signal(fd, SIGKILL)
                except OSError:
                    pass  # The process died between the two signals.
                syscalls.close(fd)
        # The helper comes after the direct kills. A helper takes time to start, and members that
        # are already dead cannot fork meanwhile.
        if self.denied and self._helper is not None:
            return self._kill_by_helper(self._helper) or bool(held)
        # The last resort: /proc shows no member, so look for children without /proc. Never with
        # `but`: the zygote's keepers are not dumpable, so /proc may hide them, and they would be
        # killed here.
        if not held and not self.denied and not but and time.monotonic() >= self._ask_all_at:
            self._ask_all_at = time.monotonic() + ENUMERATE_SECONDS_BETWEEN
            return self._kill_unseen()
        return bool(held)

    def _freeze(self, held: dict[int, int], but: Container[int]) -> None:
        """Stop all members, pass after pass, until a pass finds no new member.

        `held`: pidfds by pid; every process in it is stopped.
        """
        give_up_at = time.monotonic() + FREEZE_SECONDS_MAX
        while time.monotonic() < give_up_at:
            before = len(held)
            others: list[Row] = []
            for row in census(self._root, near=self._near, known=held):
                # Stop a direct child in the moment when the scan reaches it. In a chain of
                # processes that only fork and exit, each generation becomes a direct child of the
                # root. At the end of the pass that generation would be gone.
                if row[1] == self._root and self._is_meant(row) and row[0] not in but:
                    self._stop(row, held)
                others.append(row)
            # The other descendants can only be chosen after the scan, when all parents are known.
            for row in self._choose(others, held, but):
                if row[0] not in held:
                    self._stop(row, held)
            # A pass without a new member means that all visible members are stopped. Stopped
            # processes cannot fork, so there is nothing new to find.
            if len(held) == before:
                return
            # A tree that forks and exits leaves thousands of zombies a second, and each pass would
            # read all of them.
            self._reap()

    def _is_meant(self, row: Row) -> bool:
        """Whether a direct child of the root is a target of this sweep."""
        return True

    def _choose(self, rows: list[Row], held: Iterable[int], but: Container[int]) -> list[Row]:
        """Return the rows that are targets.

        The held processes are not among `rows`, but their descendants are, so the held pids are
        roots too.
        """
        return family([self._root, *held], rows, but=but)

    def _stop(self, row: Row, held: dict[int, int]) -> None:
        """Stop one process and hold its pidfd, unless it is dead or may not be signalled."""
        member = row[0], row[3]
        # One denial per round is enough. Asking again in each pass would only cost time.
        if not is_alive(row) or member in self.denied:
            return
        # The row is a moment old, so the pid may have been reused. `open_member` compares the start
        # time.
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
        # The pidfd stays open until KILL. The process cannot be confused with another one in
        # between, even if something else kills and reaps it.
        held[row[0]] = fd
        self._name(member)

    def _kill_by_helper(self, helper: Helper) -> bool:
        """Freeze and kill the denied processes through the helper. False if the helper failed.

        The helper gets pids, because a pidfd cannot be passed to `kill`. Each pid was verified a
        moment ago, and a frozen process cannot exit and free its pid. One race remains, as a stated
        limit: while the helper starts, the process exits, is reaped, and an unrelated process gets
        its pid.
        """
        members = [
            member
            for member in self.denied
            if (stat := read_stat(member[0])) and stat[2] == member[1]
        ]
        pids = [pid for pid, _start in members]
        for member in members:
            self._name(member)
        # Either call fails if only one of the processes has exited meanwhile. The other call may
        # still have reached all others.
        was_stopped = helper.kill(SIGSTOP, pids)
        return helper.kill(SIGKILL, pids) or was_stopped

    def _kill_unseen(self) -> bool:
        """Kill direct children that /proc does not show.

        By number, which is safe for an unreaped child of this process.
        """
        # Only children that /proc does not show at all are killed here. A child that it shows as a
        # zombie is dead and held by its tracer.
        children = [pid for pid in enumerate_children() if read_stat(pid) is None]
        for pid in children:
            self.names[pid, 0] = "(hidden)"
            try:
                syscalls.kill(pid, SIGKILL)
            except OSError:
                self.denied[pid, 0] = ""
        return bool(children)

    def take_names(self, number: int, *, but: int) -> list[tuple[int, str]]:
        """Return up to `number` names that were not returned before, without that of `but`."""
        # The dict only grows and keeps its order, so an index is enough.
        rows = [(pid, name) for (pid, _start), name in self.names.items() if pid != but]
        taken = rows[self._taken : self._taken + number]
        self._taken += len(taken)
        return taken

    def note(self, pids: Iterable[int]) -> None:
        """Note the command lines of processes that something else is about to kill."""
        for pid in pids:
            stat = read_stat(pid)
            if stat is not None:
                self._name((pid, stat[2]))

    def _name(self, member: Member) -> None:
        """Note the command line of a member for the report."""
        if member not in self.names and len(self.names) < NAMES_MAX:
            name = name_of(member[0])
            if name:  # An empty name means that the process was already exiting.
                self.names[member] = name
