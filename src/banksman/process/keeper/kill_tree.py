"""Ending a tree: TERM to each member, or freeze and kill until there is proof that nobody is left.

Frozen first, because a tree that forks faster than it is killed outruns a sweep that only kills, and one that restarts
its dead children never ends.
"""

from __future__ import annotations

import errno
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

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable

    from banksman.process.keeper.proc_tree import Member, Row
    from banksman.process.keeper.sudo_kill import Helper

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
