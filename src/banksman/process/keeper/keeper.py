"""Event loop of a keeper: supervise the process tree of one command, end it, and prove the end.

A keeper is the parent process of one command and the subreaper of its tree. `spare.py` starts the
command. `process/process.py` is the host's end. The keeper promises two things:
- It ends the tree when the host orders a stop, when the host dies, when the host stays silent past
  its deadline, and when the host does not renew its lease.
- It does not exit before the last process of the tree is gone.

Theory of operation. The keeper sleeps in poll() on four fds: the leader's pidfd, the control
socket, a pidfd of the host, and a pipe that SIGCHLD writes to. The host drives the stop ladder,
rung by rung. Each rung says how long the keeper waits for the next rung. After that time the keeper
takes the next rung without an order (TERM, then KILL). So a stop that has begun always completes,
even if the host is killed (its pidfd fires), closes (the socket ends) or freezes (the deadline
passes).

If the tree works for something that the host has only leased, the end of the lease is a deadline
too, from the start (`LeaseTimer`). While no stop is under way, the host can order the keeper to end
a part of the tree and spare the rest (`NewerSweeps`). A stop takes precedence over that.

A host may leave and hand the tree over to another one, and a tree may survive the death of its host
(`Succession`). If no successor comes, that is the death of a host like any other.

The keeper never concludes from /proc that the tree is empty. It is a subreaper, so every orphan of
the tree becomes its child, and ECHILD from `waitpid(-1)` proves that no process is left. That proof
needs the leader to be reaped, and reaping frees the leader's pid and group id for reuse. Hence the
rule: until the keeper reaps the leader, it may signal the leader's group by number. Afterwards it
uses only pidfds, and the numbers of children that it has not reaped yet.
"""

from __future__ import annotations

import _socket
import os
import select
import time

from banksman.process import syscalls
from banksman.process.keeper import messages
from banksman.process.keeper.leader import Leader
from banksman.process.keeper.lease_timer import LeaseTimer
from banksman.process.keeper.newer_sweep import NewerSweeps
from banksman.process.keeper.outbox import KeeperOutbox
from banksman.process.keeper.proc_tree import is_ignoring, survey
from banksman.process.keeper.spawn import milliseconds_until, wake_parent
from banksman.process.keeper.succession import Succession
from banksman.process.keeper.sweep import SIGCONT, SIGHUP, SIGKILL, SIGSTOP, SIGTERM, Helper, Sweep

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from banksman.process.keeper.cgroup import Cgroup

# Added to every deadline that the host sets, before the keeper acts without it. One second is
# enough for a host whose event loop is busy.
MARGIN_SECONDS = 1.0
# Pause between two rounds of a sweep, unless the death of a child wakes the keeper first.
ROUND_SECONDS = 0.02
# After this long the sweep reports the survivors. It then retries every RETRY_SECONDS.
SWEEP_SECONDS_MAX = 5.0
RETRY_SECONDS = 0.5
# Shorter bound for the case that the keeper may not signal any of the remaining processes. Then
# waiting helps only if those processes are about to exit without a signal.
DENIED_SECONDS_MAX = 1.0
# Longer than a busy machine keeps a shell from running.
LOOK_AGAIN_SECONDS = 0.1

# The phases, in the only order in which they occur. `_phase` never goes back, so an order for an
# earlier rung that arrives late cannot restart the ladder.
RUNNING, TERMED, KILLING = "running", "termed", "killing"


class Keeper:
    """State machine of one tree, from the started leader to the report that the tree is gone."""

    def __init__(  # noqa: PLR0917
        self,
        control: _socket.socket,
        host: int,
        woken: int,
        leader: int,
        order: dict[str, Any],
        lease: LeaseTimer,
        caller: int = -1,
        cgroup: Cgroup | None = None,
    ) -> None:
        self._control = control
        self._woken = woken
        self._cgroup = cgroup
        self._grace: float = order["grace"]
        self._linger: float = order["linger"]
        # The leader is in the process group of the host, because both share a terminal: see
        # `leader.py`.
        self._shares_group = order["group"] is not None
        self._has_terminal = order["terminal"] is not None or self._shares_group
        self._phase = RUNNING
        # When to look again whether the leader ignores TERM: see `_hang_up_shell`.
        self._look_again_at: float | None = None
        # ECHILD was seen with the leader reaped: the only proof that the tree is gone.
        self._is_empty = False
        # True once the keeper acts without orders: the host is gone, or was silent past its
        # deadline. The keeper still obeys orders that arrive later.
        self._is_alone = False
        # GONE is sent once. After a report with survivors the keeper keeps retrying, but does not
        # report the end again: the host has closed the case.
        self._has_reported = False
        self._ender: tuple[bytes, ...] | None = order["ender"] or None
        self._helper = None if self._ender is None else Helper(self._ender)
        self._leader = Leader(leader, self._helper, shares_group=self._shares_group)
        self._sweep = Sweep(os.getpid(), self._reap, self._helper)
        self._sweep_began = 0.0
        self._next_round = 0.0
        # When the keeper acts without an order. None: never, because the host is trusted to be
        # alive.
        self._deadline: float | None = None
        self._renew(order["deadline"])
        self._lease = lease
        self._started_at = time.monotonic()
        self._poller = select.poll()
        # A pidfd of the process that started the host, if its death ends the tree too; else -1. The
        # keeper watches it and not the host, because a host that shares a terminal may be stopped.
        self._caller = caller
        for fd in (self._leader.fd, control.fileno(), host, woken, caller):
            if fd >= 0:
                self._poller.register(fd, select.POLLIN)
        self._outbox = KeeperOutbox(control, self._poller)
        self._newer = NewerSweeps(self._outbox, leader, self._reap, self._ender)
        tree = (leader, self._started_at, self._grace, self._linger, self._has_terminal)
        self._succession = Succession(self._poller, control.fileno(), host, self._outbox, tree)
        self._outbox.say(messages.STARTED, leader, os.getpid(), self._started_at)

    def stay(self) -> None:
        """Supervise the tree until it is proven gone, then report and return."""
        while not self._is_empty:
            ready = dict(syscalls.poll(self._poller, self._timeout_ms()))
            # The bytes only say that a signal arrived, usually SIGCHLD. The pipe must be emptied,
            # because poll() would otherwise return immediately forever.
            if self._woken in ready:
                syscalls.read(self._woken, 4096)
                self._report_stop()
            if self._leader.fd in ready:
                self._on_exit()
            self._hear_host(ready)
            if self._caller in ready:
                self._on_caller_gone()
            # Reap before the deadlines are checked, so that a leader that has just exited is
            # reported as exited without a stop.
            self._reap()
            if self._look_again_at is not None and time.monotonic() >= self._look_again_at:
                self._hang_up_shell()
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._go_on_alone()
            # A separate check, because the lease can end while the host still renews its ordinary
            # deadline. If both checks fire in one iteration, this check sees the new phase and
            # compares with the time of KILL.
            if self._lease.is_due(self._phase, time.monotonic()):
                self._go_on_alone(by_lease=True)
            if self._phase is KILLING:
                self._sweep_round()
            # Once a stop has begun or the leader has exited, no part of the tree is to be spared.
            # The stop or REST ends all of it.
            is_moot = self._phase is not RUNNING or self._leader.has_exited
            self._newer.look(is_moot=is_moot)
            self._lease = self._succession.look_for_successor(ready, self._lease)
        # The proof counts only with the leader reaped (see the module docstring), and the leader is
        # reaped only after its exit was reported. If that ever fails, this process must not exit
        # with DUTY_DONE: the zygote then looks for the tree itself.
        assert self._leader.has_exited
        assert self._leader.is_reaped
        # Before the report: when the end is known, nothing of the tree is left.
        if self._cgroup:
            self._cgroup.remove()
        self._report([])
        self._stay_for_host()
        self._outbox.flush_to_the_end(self._succession.host)

    def _timeout_ms(self) -> float | None:
        dues = [
            self._next_round if self._phase is KILLING else self._deadline,
            self._lease.due(self._phase),
            self._look_again_at,
        ]
        # No event announces that a tracer has released the zombie, so the keeper polls for it.
        # `_reap` then finds the zombie.
        if self._leader.is_held:
            dues.append(time.monotonic() + RETRY_SECONDS)
        dues.extend((self._newer.due(), self._succession.due()))
        return min((milliseconds_until(due) for due in dues if due is not None), default=None)

    # -- events -----------------------------------------------------------------------------------
    def _on_exit(self) -> None:
        result = self._leader.look(self._poller)
        if result is None:
            return
        code, number = result
        if self._cgroup and self._phase is RUNNING and self._cgroup.is_out_of_memory(number):
            self._outbox.say(messages.OUT_OF_MEMORY)
        self._outbox.say(messages.EXITED, code, number, time.monotonic(), self._phase is RUNNING)
        # The leader has exited without a stop. Its remaining children may run for `linger` seconds;
        # the host orders REST after that. The keeper's deadline covers a host that does not.
        if self._phase is RUNNING:
            self._deadline = time.monotonic() + self._linger + MARGIN_SECONDS
        elif self._is_alone and self._phase is TERMED:
            # The host is absent and the leader obeyed TERM. Its group got TERM already, but
            # processes outside of the group have not: they get it now.
            self._term_rest()

    def _hear_host(self, ready: dict[int, int]) -> None:
        # The socket before the pidfd: messages that the host sent before its death are still in the
        # socket, and the last message may be KILL. Only the end of the socket, or a dead host with
        # an empty socket, means that the host is gone.
        if self._control.fileno() in ready:
            self._on_control()
        elif self._succession.is_host_gone(ready):
            self._on_host_gone(self._succession.hold_after_death())

    def _on_control(self) -> None:
        """Read one message. If there are more, poll() returns immediately."""
        # POLLOUT may be the reason of the wake-up: messages were waiting for room in the socket.
        self._outbox.flush()
        try:
            data, fds = syscalls.recv_fds(self._control)
        except BlockingIOError:
            return
        except ConnectionError:
            # A reset means the same as the end of the stream: the host's end is closed.
            data, fds = b"", []
        if data:
            self._obey(messages.decode(data), fds)
        else:
            self._on_host_gone(False)

    def _obey(self, message: tuple[Any, ...], fds: list[int]) -> None:
        match message:
            case (messages.TERM | messages.REST, _) if self._phase is KILLING:
                # A late order of a slow host. It would send CONT and wake a frozen tree that is
                # being killed.
                pass
            case (messages.TERM, seconds):
                self._bound_stop(seconds)
                self._term_group()
            case (messages.REST, seconds):
                self._bound_stop(seconds)
                self._term_rest()
            case (messages.HURRY, term_at, kill_at):
                # In any phase: the times only bound the ladder, they take no rung.
                self._lease.take_over(term_at, kill_at)
            case (messages.KILL,):
                # From any phase, because the host may skip rungs. A second KILL changes nothing.
                self._kill()
            case (messages.SIGNAL, number, to_group):
                self._leader.signal(number, to_group)
            case (messages.RENEW, seconds):
                # RENEW is a sign of life, valid only while nothing is being stopped. It must not
                # lift the deadline of a stop, nor the deadline that the leader's exit has set.
                if self._phase is RUNNING and not self._leader.has_exited:
                    self._renew(seconds)
            case (messages.SWEEP, number, tick, pid, ends):
                self._newer.begin(number, (tick, pid), ends=ends)
            case (messages.HAND_OVER, *order):
                self._succession.hold(tuple(order), fds, is_stopping=self._phase is not RUNNING)
            case (messages.SURVIVE, *order):
                self._succession.survive(tuple(order), fds, is_stopping=self._phase is not RUNNING)
            case (messages.KEEP,):
                self._succession.end_hold(b"cancelled")
            case (messages.FORGO,):
                self._succession.forgo()
            case (messages.DROP, name):
                self._succession.drop(name)
            case _:
                # Both ends are the same program, so this is a bug. The zygote ends the tree.
                raise AssertionError(message)

    def _on_host_gone(self, is_held: bool) -> None:
        """Continue without the host: it was killed, closed its end, or replaced itself by exec().

        `is_held`: the tree waits for another host, and no stop begins. Otherwise no further order
        can arrive.
        """
        if not is_held:
            # A host that ended its orders (`let_go`) before it handed the tree over.
            self._succession.end_hold(b"over")
        if is_held or self._succession.end():
            # The zygote also has to notice the death of the host. If it was stopped (SIGSTOP), only
            # its children know, and they continue it.
            wake_parent()
        if self._phase is RUNNING and (is_held or self._is_empty):
            return
        if self._phase is RUNNING:
            self._go_on_alone()
        elif self._phase is TERMED:
            # The host has sent TERM and died. The tree keeps its grace, counted from now, but never
            # more than the host had granted.
            self._is_alone = True
            due = time.monotonic() + self._grace
            self._deadline = due if self._deadline is None else min(self._deadline, due)
            # Only TERM to the leader's group is certain. The host would have sent REST after the
            # leader's exit, so the keeper does.
            if self._leader.has_exited:
                self._term_rest()

    def _on_caller_gone(self) -> None:
        # Readable from now on, so poll() would spin.
        self._poller.unregister(self._caller)
        self._caller = -1
        if self._phase is RUNNING and not self._is_empty:
            self._go_on_alone()

    def _report_stop(self) -> None:
        """Tell a host that shares the terminal that the leader was stopped, by Ctrl-Z mostly."""
        is_running = self._phase is RUNNING and not self._leader.has_exited
        if self._shares_group and is_running and self._leader.was_stopped():
            self._outbox.say(messages.STOPPED)

    def _renew(self, seconds: float | None) -> None:
        # Counted from now and not from the moment of sending. A message that waited in the socket
        # gives the host more time, never less.
        self._deadline = None if seconds is None else time.monotonic() + seconds

    def _bound_stop(self, seconds: float) -> None:
        """Set the deadline of a rung: the host takes the next rung within `seconds`.

        A stop that is under way can only get shorter. A host that wakes up late must not give the
        tree more time than it had.
        """
        due = time.monotonic() + seconds + MARGIN_SECONDS
        if self._phase is TERMED and self._deadline is not None:
            due = min(due, self._deadline)
        self._deadline = due

    def _stay_for_host(self) -> None:
        """Keep the output and the reports of a tree that is gone for a host that needs them."""
        while self._succession.is_open:
            due = self._succession.due()
            timeout = None if due is None else milliseconds_until(due)
            ready = dict(syscalls.poll(self._poller, timeout))
            if self._woken in ready:
                syscalls.read(self._woken, 4096)
            self._hear_host(ready)
            if self._caller in ready:
                self._on_caller_gone()
            self._lease = self._succession.look_for_successor(ready, self._lease)

    # -- rungs of the ladder ----------------------------------------------------------------------
    def _go_on_alone(self, *, by_lease: bool = False) -> None:
        """Take the next rung without an order.

        `by_lease`: the lease is the reason, and not the silence of the host. The report says which.
        """
        self._is_alone = True
        now = time.monotonic()
        # ACTED precedes the rung in the stream, so that the host can tell this KILL from its own
        # orders.
        if self._phase is TERMED:
            self._outbox.say(messages.ACTED, messages.KILL, now, by_lease)
            self._kill()
            return
        # Bounded by the lease as it is now. If the host renews the lease after all, the stop that
        # has begun gets no extra time.
        self._deadline = (
            min(now + self._grace, self._lease.kill_at) if by_lease else now + self._grace
        )
        if self._leader.has_exited:
            self._outbox.say(messages.ACTED, messages.REST, now, by_lease)
            self._term_rest()
        else:
            self._outbox.say(messages.ACTED, messages.TERM, now, by_lease)
            self._term_group()

    def _term_group(self) -> None:
        # Reap first: a leader that exited before this signal must be reported as exited without a
        # stop.
        self._reap()
        if self._phase is RUNNING:
            self._phase = TERMED
        self._hang_up_shell()
        self._leader.signal(SIGTERM, to_group=True)
        # TERM stays pending in a stopped process until CONT arrives.
        self._leader.signal(SIGCONT, to_group=True)

    def _hang_up_shell(self) -> None:
        """Send HUP to an interactive shell, which ignores TERM and exits on a hangup.

        Other programs get no HUP: they may clean up on TERM alone, and HUP would cut that short. A
        shell that begins to read a line does not ignore TERM for a few microseconds (readline), so
        one look could miss it.
        """
        is_first, self._look_again_at = self._look_again_at is None, None
        if not self._has_terminal or self._phase is not TERMED or self._leader.has_exited:
            return
        if is_ignoring(self._leader.pid, SIGTERM):
            self._leader.signal(SIGHUP, to_group=True)
        elif is_first:
            self._look_again_at = time.monotonic() + LOOK_AGAIN_SECONDS

    def _term_rest(self) -> None:
        """Send TERM to the processes that outlive the leader, anywhere in the tree."""
        # Every caller comes here after the exit of the leader was reported, so the new phase cannot
        # falsify that report.
        if self._phase is RUNNING:
            self._phase = TERMED
        self._reap()
        if not self._is_empty:
            try:
                self._sweep.term()
            except OSError:
                # Not enough memory or fds to scan the tree. KILL follows for the processes that got
                # no TERM.
                pass
            self._report_names()

    def _kill(self) -> None:
        if self._phase is KILLING:
            return
        # Reap while the phase still says how the stop began: `_on_exit` reports from it whether the
        # leader ended without a stop.
        self._reap()
        self._phase = KILLING
        # From here on `_next_round` sets the pace. KILL is the last rung, so no deadline is needed.
        self._deadline = None
        self._sweep_began = self._next_round = time.monotonic()
        if self._helper is not None:
            # The helper must not delay the report. The host takes a keeper that stays silent for
            # longer as hung, and has the zygote kill it.
            self._helper.until = self._sweep_began + SWEEP_SECONDS_MAX
        # Most of a tree is usually in the leader's group. One signal freezes all of those processes
        # at the same moment, before the first scan of /proc.
        self._leader.signal(SIGSTOP, to_group=True)

    # -- proof of the end -------------------------------------------------------------------------
    def _reap(self) -> None:
        """Reap dead children. Once the leader is reaped, ECHILD proves that the tree is empty."""
        # Without __WALL, waitpid skips children that clone() made with another exit signal, and
        # ECHILD would be no proof.
        options = os.WNOHANG | syscalls.WALL
        try:
            while True:
                # The exit of the leader has been reported: its zombie may be reaped like any other.
                if self._leader.has_exited:
                    pid, _status = syscalls.waitpid(-1, options)
                    if pid == 0:
                        return
                    self._leader.is_reaped = self._leader.is_reaped or pid == self._leader.pid
                    continue
                # The exit is not reported yet, so the leader must not be reaped here. WNOWAIT shows
                # which child is dead without reaping it. The other children are reaped by pid. They
                # are unreaped, so the pid cannot be another process.
                ended = syscalls.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | options)
                if ended is None:
                    return
                if ended.si_pid == self._leader.pid:
                    self._on_exit()
                else:
                    syscalls.waitpid(ended.si_pid, options)
        except ChildProcessError:
            # ECHILD cannot occur before the leader is reaped, since a living leader or its zombie
            # is a child too.
            self._is_empty = True

    def _sweep_round(self) -> None:
        now = time.monotonic()
        if self._is_empty or now < self._next_round:
            return
        # The whole tree in one step, reported once. The sweep reaches what has left the group.
        is_first = self._next_round == self._sweep_began
        if self._cgroup and self._cgroup.kill(self._sweep.note) and is_first:
            self._outbox.say(messages.ACTED, messages.CGROUP, now, False)
        can_look = True
        try:
            found = self._sweep.kill()
        except OSError:
            # No memory or fds to scan, or /proc is unreadable. The next round may succeed. Only
            # ECHILD ends the sweep, so a failed scan is never taken for an empty tree.
            found, can_look = True, False
        if not (found and can_look):
            # The group by number, which is safe until the leader is reaped. This ends the leader
            # and its group even if /proc shows nothing. It comes after the scan, because the scan
            # collects the names for the report.
            self._leader.signal(SIGKILL, to_group=True)
        self._report_names()
        self._reap()
        now = time.monotonic()
        # After the report nothing waits for the result.
        self._next_round = now + (RETRY_SECONDS if self._has_reported else ROUND_SECONDS)
        patience = SWEEP_SECONDS_MAX if found or not self._sweep.denied else DENIED_SECONDS_MAX
        # The report names the survivors and the reasons, but the keeper stays: it exits only on
        # ECHILD.
        if not self._is_empty and now - self._sweep_began > patience:
            self._report(survey(os.getpid(), self._sweep.denied))

    # -- messages to the host ---------------------------------------------------------------------
    def _report_names(self) -> None:
        while names := self._sweep.take_names(messages.NAMES_PER_MESSAGE, but=self._leader.pid):
            self._outbox.say(messages.SWEPT, names)

    def _report(self, survivors: list[tuple[int, str, str]]) -> None:
        # A second GONE would arrive after the host has closed its end, or contradict the first.
        if not self._has_reported:
            self._has_reported = True
            self._outbox.say(messages.GONE, survivors)
