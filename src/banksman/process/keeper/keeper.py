"""The keeper: a command's parent, the subreaper of its tree, and the one that ends it.

It owns one tree. It promises that the tree is ended when the host says so, when the host dies or falls silent past its
deadline, and that it does not itself go before the last of the tree is gone.

Theory of operation. The keeper sits in poll() on four things: the leader's pidfd, the control socket, a pidfd of the
host, and a pipe that SIGCHLD writes to. The host drives the stop ladder, rung by rung. But each rung it sends says how
long the keeper is to wait for the next one; after that the keeper goes on alone (TERM, then KILL). So a stop once begun
ends, whatever becomes of the host: killed (its pidfd), closed (the socket), or frozen (the deadline). Where the tree
works for something that the host has for a time only, that time is a deadline too, from the start (`LeaseTimer`).
While nothing is being stopped, the host may have a part of the tree ended and the rest left alone (`NewerSweep`); a
stop comes first.

That the tree is empty is never read from /proc. The keeper is a subreaper, so every orphan of the tree becomes its
child, and `waitpid(-1)` answering ECHILD proves that there is none. That proof needs the leader reaped, and reaping
frees the leader's pid and group id for reuse. Hence the rule: until the leader is reaped its group is signalled by
number, which is safe; afterwards only pidfds are used, and the numbers of children that are still ours to reap.
"""

from __future__ import annotations

import _socket
import errno
import mmap
import os
import select
import time

from banksman.process import syscalls
from banksman.process.keeper import messages
from banksman.process.keeper.proc_tree import is_ignoring, survey
from banksman.process.keeper.spawn import milliseconds_until, wake_parent
from banksman.process.keeper.sweep import SIGCONT, SIGHUP, SIGKILL, SIGSTOP, SIGTERM, Helper, NewerSweep, Sweep

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# How much longer than the host said the keeper waits before it acts alone: long enough for a host whose loop is busy.
MARGIN_SECONDS = 1.0
# Between two rounds of a sweep, if no child's death wakes us first.
ROUND_SECONDS = 0.02
# After this long the sweep reports what it could not end, and goes on trying at a slower pace.
SWEEP_SECONDS_MAX = 5.0
RETRY_SECONDS = 0.5
# When all that is left is not ours to signal, waiting longer helps only if it was about to end by itself.
DENIED_SECONDS_MAX = 1.0
# How long a report may wait for a host that has closed its end and may yet read.
FLUSH_MS_MAX = 1000

NEVER = float("inf")
# How much later than the lease says: the host's own timers are as punctual as ours, and it comes first.
LEASE_MARGIN_SECONDS = 0.02

# The phases, in the only order they can come.
RUNNING, TERMED, KILLING = "running", "termed", "killing"


class LeaseTimer:
    """When to act because nobody has said that the host still has what the tree works for.

    The host writes the times to a page that is shared by all keepers (`process/lease_page.py`), or, once it ends the
    tree itself, tells them for this one tree. A time that has come is looked up again before it is believed.

    `page`: an fd of it, which may be closed afterwards; None: the tree may live for as long as its host does.
    """

    def __init__(self, page: int | None) -> None:
        # Never let go of, not even when it is not looked at any more: the mapping has a copy of the fd, and the keeper
        # closes that with all others it does not need. To close the mapping would close whatever has that number then.
        shared = None if page is None else mmap.mmap(page, 16, prot=mmap.PROT_READ)
        self._page = None if shared is None else memoryview(shared).cast("d")
        self._is_taken_over = False
        self.term_at = self.kill_at = NEVER
        self._look()

    def take_over(self, term_at: float, kill_at: float) -> None:
        """The host ends the tree itself, by these times. TERM may come later than the page has it, for the host is
        there and does what comes before it; KILL may not."""
        self._look()
        self._is_taken_over = True
        self.term_at = term_at + LEASE_MARGIN_SECONDS
        self.kill_at = min(self.kill_at, kill_at + LEASE_MARGIN_SECONDS)

    def due(self, phase: str) -> float:
        return {"running": self.term_at, "termed": self.kill_at}.get(phase, NEVER)

    def is_due(self, phase: str, now: float) -> bool:
        if now < self.due(phase):
            return False
        self._look()
        return now >= self.due(phase)

    def _look(self) -> None:
        if self._page is not None and not self._is_taken_over:
            self.term_at, self.kill_at = self._page


class Keeper:
    def __init__(  # noqa: PLR0917
        self, control: _socket.socket, host: int, woken: int, leader: int, order: dict[str, Any], lease: LeaseTimer
    ) -> None:
        self._control = control
        self._host = host
        self._woken = woken
        self._leader = leader
        self._leader_fd = syscalls.pidfd_open(leader)
        self._grace: float = order["grace"]
        self._linger: float = order["linger"]
        self._has_terminal = order["terminal"] is not None
        self._phase = RUNNING
        self._has_exited = False
        self._is_held = False
        self._is_reaped = False
        self._is_empty = False
        # Acting alone: the host is gone, or was silent past its deadline. What it says later is still obeyed.
        self._is_alone = False
        self._has_reported = False
        self._ender: tuple[bytes, ...] | None = order["ender"] or None
        self._helper = None if self._ender is None else Helper(self._ender)
        self._sweep = Sweep(os.getpid(), self._reap, self._helper)
        self._newer: NewerSweep | None = None
        self._named = 0
        self._sweep_began = 0.0
        self._next_round = 0.0
        # When to act without being told. None: never, the host is trusted to be there.
        self._deadline: float | None = None
        self._renew(order["deadline"])
        self._lease = lease
        self._outbox: list[bytes] = []
        self._is_behind = False
        self._poller = select.poll()
        for fd in (self._leader_fd, control.fileno(), host, woken):
            self._poller.register(fd, select.POLLIN)
        self._say(messages.STARTED, leader, os.getpid(), time.monotonic())

    def stay(self) -> None:
        control = self._control.fileno()
        while not self._is_empty:
            ready = dict(syscalls.poll(self._poller, self._timeout_ms()))
            if self._woken in ready:
                syscalls.read(self._woken, 4096)
            if self._leader_fd in ready:
                self._on_exit()
            # What the host said before it went is heard first: "kill" may be its last word.
            if control in ready:
                self._on_control()
            elif self._host in ready:
                self._on_host_gone()
            self._reap()
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._go_on_alone()
            if self._lease.is_due(self._phase, time.monotonic()):
                self._go_on_alone(by_lease=True)
            if self._phase is KILLING:
                self._sweep_round()
            self._sweep_newer()
        self._report([])
        self._flush_to_the_end()

    def _timeout_ms(self) -> float | None:
        dues = [self._next_round if self._phase is KILLING else self._deadline, self._lease.due(self._phase)]
        if self._is_held:
            dues.append(time.monotonic() + RETRY_SECONDS)
        if self._newer is not None:
            dues.append(self._newer.next_round)
        return min((milliseconds_until(due) for due in dues if due is not None), default=None)

    # -- what is heard -----------------------------------------------------------------------------------------------
    def _on_exit(self) -> None:
        # WNOWAIT leaves the zombie: it is told first and reaped second, so that nobody hears of a pid that is free.
        result = syscalls.waitid(os.P_PIDFD, self._leader_fd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if not self._is_held:
            self._poller.unregister(self._leader_fd)
        # Dead, and yet not ours to wait for: a tracer from outside the tree (gdb, strace -p) has it until it lets go.
        # Its pidfd stays readable all that time, so it is not polled any more; the zombie is looked for now and then.
        self._is_held = result is None
        if result is None:
            return
        syscalls.close(self._leader_fd)
        self._leader_fd = -1
        self._has_exited = True
        has_code = result.si_code == os.CLD_EXITED
        code, number = (result.si_status, None) if has_code else (None, result.si_status)
        self._say(messages.EXITED, code, number, time.monotonic(), self._phase is RUNNING)
        if self._phase is RUNNING:
            self._deadline = time.monotonic() + self._linger + MARGIN_SECONDS
        elif self._is_alone and self._phase is TERMED:
            self._term_rest()

    def _on_control(self) -> None:
        """One message at a time: poll() comes back at once if there are more."""
        self._flush()
        try:
            data = syscalls.recv(self._control)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if data:
            self._obey(messages.decode(data))
        else:
            self._on_host_gone()

    def _obey(self, message: tuple[Any, ...]) -> None:
        match message:
            case (messages.TERM | messages.REST, _) if self._phase is KILLING:
                pass  # From a host that was late. A frozen tree must not be continued.
            case (messages.TERM, seconds):
                self._bound_stop(seconds)
                self._term_group()
            case (messages.REST, seconds):
                self._bound_stop(seconds)
                self._term_rest()
            case (messages.HURRY, term_at, kill_at):
                self._lease.take_over(term_at, kill_at)
            case (messages.KILL,):
                self._kill()
            case (messages.SIGNAL, number, to_group):
                self._signal(number, to_group)
            case (messages.RENEW, seconds):
                if self._phase is RUNNING and not self._has_exited:
                    self._renew(seconds)
            case (messages.SWEEP, number, tick, pid, ends):
                self._begin_newer(number, (tick, pid), ends)
            case _:
                raise AssertionError(message)

    def _on_host_gone(self) -> None:
        """The host was killed, closed its end, or became another program. Nobody will tell us anything any more."""
        if self._host != -1:
            self._poller.unregister(self._host)
            self._poller.unregister(self._control.fileno())
            self._host = -1
            wake_parent()
        if self._phase is RUNNING:
            self._go_on_alone()
        elif self._phase is TERMED:
            self._is_alone = True
            due = time.monotonic() + self._grace
            self._deadline = due if self._deadline is None else min(self._deadline, due)
            if self._has_exited:
                self._term_rest()

    def _renew(self, seconds: float | None) -> None:
        self._deadline = None if seconds is None else time.monotonic() + seconds

    def _bound_stop(self, seconds: float) -> None:
        """The host has taken a rung, and takes the next one after so long. A stop that is under way is only ever
        shortened: a host that wakes late does not give a tree more time than it had."""
        due = time.monotonic() + seconds + MARGIN_SECONDS
        if self._phase is TERMED and self._deadline is not None:
            due = min(due, self._deadline)
        self._deadline = due

    # -- the rungs ---------------------------------------------------------------------------------------------------
    def _go_on_alone(self, *, by_lease: bool = False) -> None:
        """The rung that is next, without being told."""
        self._is_alone = True
        now = time.monotonic()
        if self._phase is TERMED:
            self._say(messages.ACTED, messages.KILL, now, by_lease)
            self._kill()
            return
        # Cut to the lease as it is now: one that is renewed after all gives no more time to what was begun.
        self._deadline = min(now + self._grace, self._lease.kill_at) if by_lease else now + self._grace
        if self._has_exited:
            self._say(messages.ACTED, messages.REST, now, by_lease)
            self._term_rest()
        else:
            self._say(messages.ACTED, messages.TERM, now, by_lease)
            self._term_group()

    def _term_group(self) -> None:
        # Whoever had left before is not to be counted as stopped.
        self._reap()
        if self._phase is RUNNING:
            self._phase = TERMED
        # An interactive shell ignores TERM and obeys a hangup. Any other program gets no HUP: it may clean up on TERM
        # alone, and HUP would cut that short.
        if self._has_terminal and not self._has_exited and is_ignoring(self._leader, SIGTERM):
            self._signal(SIGHUP, to_group=True)
        self._signal(SIGTERM, to_group=True)
        # A stopped process does not even notice TERM until it is continued.
        self._signal(SIGCONT, to_group=True)

    def _term_rest(self) -> None:
        if self._phase is RUNNING:
            self._phase = TERMED
        self._reap()
        if not self._is_empty:
            try:
                self._sweep.term()
            except OSError:
                pass  # No room to look for them all. KILL comes for those who were not asked.
            self._report_names()

    def _kill(self) -> None:
        if self._phase is KILLING:
            return
        self._reap()
        self._phase = KILLING
        self._deadline = None
        self._sweep_began = self._next_round = time.monotonic()
        if self._helper is not None:
            # The report must not wait for it: the host takes a keeper that is silent for longer to be wedged.
            self._helper.until = self._sweep_began + SWEEP_SECONDS_MAX
        # Most of a tree is usually in the leader's group, and one signal stops all of that at once.
        self._signal(SIGSTOP, to_group=True)

    def _signal(self, number: int, to_group: bool) -> None:
        if self._is_reaped or (self._has_exited and not to_group):
            return
        try:
            (syscalls.killpg if to_group else syscalls.kill)(self._leader, number)
        except OSError as exc:
            # ESRCH: the group is gone, which is what was wanted. EPERM: not one of them is ours to signal. Without a
            # helper the sweep will name them.
            if exc.errno == errno.EPERM and self._helper is not None:
                self._helper.kill(number, [-self._leader if to_group else self._leader])

    # -- a part of the tree ------------------------------------------------------------------------------------------
    def _begin_newer(self, number: int, since: tuple[int, int], ends: bool) -> None:
        self._end_newer()
        self._newer = NewerSweep(number, since, ends=ends, leader=self._leader, reap=self._reap, ender=self._ender)

    def _sweep_newer(self) -> None:
        if self._newer is None:
            return
        # Once the whole tree is to go, or its leader has gone, there is nothing to be spared any more.
        is_moot = self._phase is not RUNNING or self._has_exited
        if is_moot or (time.monotonic() >= self._newer.next_round and self._newer.go_on()):
            self._end_newer()

    def _end_newer(self) -> None:
        """Tell how far it came. Those that it has signalled are named even if they are still about to go."""
        sweep, self._newer = self._newer, None
        if sweep is None:
            return
        ended = sweep.ended
        for first in range(0, len(ended), messages.NAMES_PER_MESSAGE):
            self._say(messages.SWEEP_REPORT, sweep.number, ended[first : first + messages.NAMES_PER_MESSAGE], [], False)
        self._say(messages.SWEEP_REPORT, sweep.number, [], sweep.survivors, True)

    # -- the end -----------------------------------------------------------------------------------------------------
    def _reap(self) -> None:
        """Reap what has ended; with the leader reaped too, ECHILD proves the tree empty."""
        options = os.WNOHANG | syscalls.WALL
        try:
            while True:
                if self._has_exited:
                    pid, _status = syscalls.waitpid(-1, options)
                    if pid == 0:
                        return
                    self._is_reaped = self._is_reaped or pid == self._leader
                    continue
                ended = syscalls.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | options)
                if ended is None:
                    return
                if ended.si_pid == self._leader:
                    self._on_exit()
                else:
                    syscalls.waitpid(ended.si_pid, options)
        except ChildProcessError:
            self._is_empty = True

    def _sweep_round(self) -> None:
        now = time.monotonic()
        if self._is_empty or now < self._next_round:
            return
        can_look = True
        try:
            found = self._sweep.kill()
        except OSError:
            # No room to look, or nothing to look at. There may be in the next round, and only ECHILD ends this.
            found, can_look = True, False
        if not (found and can_look):
            # By number, which is safe until the leader is reaped: whatever /proc shows, the leader and its group go.
            # Only after a look, or those in the group would go unnamed.
            self._signal(SIGKILL, to_group=True)
        self._report_names()
        self._reap()
        now = time.monotonic()
        self._next_round = now + (RETRY_SECONDS if self._has_reported else ROUND_SECONDS)
        patience = SWEEP_SECONDS_MAX if found or not self._sweep.denied else DENIED_SECONDS_MAX
        if not self._is_empty and now - self._sweep_began > patience:
            self._report(survey(os.getpid(), self._sweep.denied))

    # -- what is said ------------------------------------------------------------------------------------------------
    def _report_names(self) -> None:
        names = [(pid, name) for (pid, _start), name in self._sweep.names.items() if pid != self._leader]
        for first in range(self._named, len(names), messages.NAMES_PER_MESSAGE):
            self._say(messages.SWEPT, names[first : first + messages.NAMES_PER_MESSAGE])
        self._named = len(names)

    def _report(self, survivors: list[tuple[int, str, str]]) -> None:
        if not self._has_reported:
            self._has_reported = True
            self._say(messages.GONE, survivors)

    def _say(self, *message: Any) -> None:
        self._outbox.append(messages.encode(*message))
        self._flush()

    def _flush_to_the_end(self) -> None:
        """Wait for a host that does not read, as long as there is one: without the last word it must fear the worst."""
        while self._outbox:
            waiting = select.poll()
            waiting.register(self._control.fileno(), select.POLLOUT)
            if self._host != -1:
                waiting.register(self._host, select.POLLIN)
            ready = dict(syscalls.poll(waiting, None if self._host != -1 else FLUSH_MS_MAX))
            if not ready or self._host in ready:
                return
            self._flush()

    def _flush(self) -> None:
        """Send what there is to say, as far as it goes now: while there is a tree to see to nobody is waited for."""
        while self._outbox:
            try:
                syscalls.send(self._control, self._outbox[0])
            except BlockingIOError:
                break
            except ConnectionError:
                self._outbox.clear()  # Nobody is left to tell.
                break
            del self._outbox[0]
        if self._host != -1 and bool(self._outbox) != self._is_behind:
            self._is_behind = bool(self._outbox)
            events = select.POLLIN | select.POLLOUT if self._is_behind else select.POLLIN
            self._poller.modify(self._control.fileno(), events)
