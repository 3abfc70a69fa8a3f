"""Event loop of a guard: pass signals on, watch stdin, and follow the keeper to the tree's end.

The keeper takes the rungs of the ladder. The guard only gives it deadlines: the timeout, the time
after a hang-up of stdin, the time after a signal. Each deadline has a name, and the earliest one
that passes is the reason for the end. So a guard that is stopped or killed changes nothing.

The keeper also watches the caller, the process that started the guard, for the same reason.

If the keeper dies before its tree, the guard sweeps the orphans, as the zygote does.
"""

from __future__ import annotations

import os
import select
import time

from banksman.guard.outcome import GuardOutcome
from banksman.guard.signals import CHLD, CONT, ENDING, HUP, PASSED, STOP, TERM, TSTP
from banksman.process import syscalls
from banksman.process.caller import SECOND_SIGNAL_SECONDS, is_gone
from banksman.process.keeper import messages
from banksman.process.keeper.keeper import MARGIN_SECONDS
from banksman.process.keeper.lost_trees import Orphans
from banksman.process.keeper.proc_tree import descendants
from banksman.process.keeper.spawn import milliseconds_until
from banksman.process.keeper.sweep import SIGCONT, SIGKILL
from banksman.process.keeper.zygote import DUTY_SECONDS_MAX, HELD_SECONDS
from banksman.process.tree_limits import TreeLimits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from banksman.errors import BanksmanError
    from banksman.guard.start import GuardSettings, KeeperProcess

# How long the guard waits for the exit of a keeper that has reported the end of its tree.
EXIT_SECONDS_MAX = 1.0


def children() -> set[int]:
    """Return the children that this process had before: those of the program that it replaced.

    `sh -c 'job & exec banksman guard …'` leaves some. They belong to no tree of the guard.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return set()
    return {pid for pid, _start in descendants(os.getpid(), near=False)}


class Guard:
    """State of one guarded command, from the fork of its keeper to the end of its tree.

    `signal_fd`: see `CallersSignals`. `shares`: the command is in the session and the group of this
    process. `strangers`: children of this process that are none of the command's.
    """

    def __init__(
        self,
        settings: GuardSettings,
        keeper: KeeperProcess,
        signal_fd: int,
        *,
        shares: bool,
        strangers: set[int],
    ) -> None:
        self._settings = settings
        self._keeper = keeper
        self._is_keeper_reaped = False
        self._signal_fd = signal_fd
        self._shares = shares
        self._strangers = strangers
        self._outcome = GuardOutcome()
        self._error: BanksmanError | None = None
        self._leader = 0
        self._started_at = time.monotonic()
        # The reasons for an end that have a time, and that time. The keeper knows the earliest.
        self._dues: dict[str, float] = {}
        if settings.timeout is not None:
            # The order has told the keeper.
            self._dues["timeout"] = self._started_at + settings.timeout
        # When the last signal arrived that had an effect on the stop.
        self._signalled_at = 0.0
        # Why the keeper has begun to end the tree; None if it has not.
        self._why: str | None = None
        self._has_exited = False
        # When the rest of the tree is ended, after the command has exited without a stop.
        self._rest_at: float | None = None
        # When the keeper counts as stuck, and when a killed keeper counts as lost.
        self._stuck_at: float | None = None
        self._held_until: float | None = None
        self._gone_at: float | None = None
        self._orphans: Orphans | None = None
        self._limits = TreeLimits(keeper.pid, settings.memory_bytes_max, settings.processes_max)
        self._poller = select.poll()
        for fd in (keeper.ours.fileno(), signal_fd):
            self._poller.register(fd, select.POLLIN)
        if settings.grace_after_eof is not None:
            # No POLLIN: the guard reads nothing. POLLHUP is always reported, even with unread data
            # in the pipe. POLLRDHUP is the same for a socket that the other end has half closed.
            self._poller.register(0, select.POLLRDHUP)
        # Messages for a keeper that has not started the command yet. It takes every earlier message
        # as an order not to start.
        self._unsent: list[tuple[Any, ...]] | None = []
        if self._dues:
            self._expect_end_by(min(self._dues.values()))

    def stay(self) -> GuardOutcome:
        """Guard the command until its tree is gone. Raises if the command could not be started."""
        control = self._keeper.ours.fileno()
        while not self._is_over():
            ready = dict(syscalls.poll(self._poller, self._timeout_ms()))
            if self._signal_fd in ready:
                # The kernel hands out the lowest number first. TERM asks for more than the others,
                # so a HUP that came with it must not count as the first signal.
                pending = syscalls.read_signals(self._signal_fd)
                for number, code in sorted(pending, key=lambda each: each[0] != TERM):
                    self._on_signal(number, is_kernels=code == syscalls.SI_KERNEL)
            if control in ready:
                self._read_messages()
            if 0 in ready:
                self._on_hangup()
            self._on_time()
        if self._error is not None:
            raise self._error
        self._outcome.seconds = time.monotonic() - self._started_at
        return self._outcome

    def _is_over(self) -> bool:
        if self._gone_at is None:
            return False
        # A keeper with survivors stays and retries. Every other one exits after its last message.
        is_waiting = not self._is_keeper_reaped and not self._outcome.survivors
        return not is_waiting or time.monotonic() >= self._gone_at + EXIT_SECONDS_MAX

    def _timeout_ms(self) -> float | None:
        dues = [self._rest_at, self._stuck_at, self._held_until, self._limits.next_look]
        if self._gone_at is not None:
            dues = [self._gone_at + EXIT_SECONDS_MAX]
        if self._orphans is not None:
            dues.append(self._orphans.next_round)
        return min((milliseconds_until(due) for due in dues if due is not None), default=None)

    # -- signals ----------------------------------------------------------------------------------
    def _on_signal(self, number: int, *, is_kernels: bool) -> None:
        # A signal of the terminal has reached the command too, because it is in the same group.
        is_known = is_kernels and self._shares
        if number == CHLD:
            self._reap()
        elif number == CONT:
            self._send(messages.SIGNAL, CONT, True)
        elif number == TSTP:
            # The command decides whether it stops on Ctrl-Z. If it does, STOPPED arrives.
            if not is_known:
                self._suspend()
        elif number in PASSED:
            if not is_known:
                self._send(messages.SIGNAL, number, False)
        elif number in ENDING:
            self._on_ending_signal(number, is_known=is_known)

    def _suspend(self) -> None:
        # The kernel ignores TSTP in a session of its own, because no shell could continue it.
        self._send(messages.SIGNAL, TSTP if self._shares else STOP, True)
        if not self._shares:
            self._stop_self()

    def _stop_self(self) -> None:
        """Stop, so that the shell sees a stopped job. Returns when something continues it."""
        if self._why is None and not self._has_exited:
            syscalls.kill(os.getpid(), STOP)

    def _on_ending_signal(self, number: int, *, is_known: bool) -> None:
        if "stopped" not in self._dues and not self._has_exited:
            self._outcome.caught = number
        if is_known and number != HUP:
            # Ctrl-C or Ctrl-\. The command handles it: an interactive agent interrupts its turn.
            return
        if "stopped" in self._dues:
            self._on_further_signal(number)
            return
        self._signalled_at = time.monotonic()
        if number == TERM:
            self._stop("stopped", 0.0)
            return
        if not is_known:
            self._send(messages.SIGNAL, number, True)
        # Other signals than TERM get half of the grace before TERM follows.
        self._stop("stopped", self._settings.grace / 2)

    def _on_further_signal(self, number: int) -> None:
        """Go on to the next rung: TERM, or KILL if the tree has got TERM."""
        now = time.monotonic()
        is_later = now - self._signalled_at >= SECOND_SIGNAL_SECONDS
        # HUP often follows another signal without meaning more: a shell sends it to its jobs after
        # the kernel did, and a service manager after TERM.
        if number == HUP or not (is_later or number == TERM):
            return
        if self._dues["stopped"] > now and not self._outcome.ladder:
            self._signalled_at = self._dues["stopped"] = now
            self._poke_keeper_deadline()
        elif is_later and self._outcome.ladder:
            self._send(messages.KILL)
            self._note("kill")

    # -- the end ----------------------------------------------------------------------------------
    def _stop(self, why: str, seconds: float) -> None:
        """End the tree after `seconds`, for this reason, unless it ends before."""
        self._dues.setdefault(why, time.monotonic() + seconds)
        if self._has_exited:
            # The keeper has no deadline any more, only its rest.
            self._end_rest()
        else:
            self._poke_keeper_deadline()

    def _poke_keeper_deadline(self) -> None:
        """Tell the keeper when the earliest deadline is."""
        if self._dues and self._why is None:
            due = min(self._dues.values())
            self._send(messages.RENEW, max(0.0, due - time.monotonic()))
            self._expect_end_by(due)

    def _expect_end_by(self, stop_at: float) -> None:
        """Set when the keeper counts as stuck, if it begins to end the tree at this time."""
        self._stuck_at = stop_at + self._settings.grace + MARGIN_SECONDS + DUTY_SECONDS_MAX

    def _end_rest(self) -> None:
        self._rest_at = None
        self._note("rest")
        self._send(messages.REST, self._settings.grace)
        self._expect_end_by(time.monotonic())

    def _on_hangup(self) -> None:
        # Reported forever, so poll() would spin.
        self._poller.unregister(0)
        seconds = self._settings.grace_after_eof
        assert seconds is not None
        if not self._has_exited:
            self._stop("stdin_hangup", seconds)

    def _on_time(self) -> None:
        now = time.monotonic()
        if self._rest_at is not None and now >= self._rest_at:
            self._end_rest()
        exceeded = self._limits.exceeded()
        if exceeded is not None:
            self._limits.next_look = None
            self._stop(exceeded, 0.0)
        if self._gone_at is None and self._stuck_at is not None and now >= self._stuck_at:
            self._kill_keeper()
        if self._held_until is not None and now >= self._held_until:
            self._lose_keeper()
        if self._orphans is not None and self._orphans.is_due() and self._orphans.end(self._guards):
            self._orphans = None

    # -- messages of the keeper -------------------------------------------------------------------
    def _send(self, *message: Any) -> None:
        if self._unsent is not None:
            self._unsent.append(message)
            return
        try:
            syscalls.send(self._keeper.ours, messages.encode(*message))
        except OSError:
            pass  # The keeper is dead, or stuck behind hundreds of messages: `_stuck_at` ends that.

    def _on_started(self, leader: int, at: float) -> None:
        self._leader, self._started_at = leader, at
        unsent, self._unsent = self._unsent or [], None
        for message in unsent:
            self._send(*message)

    def _read_messages(self) -> None:
        """Handle all messages that have arrived.

        All of them before the times are looked at: a guard that was stopped may find the end of the
        tree among them.
        """
        while True:
            try:
                data = syscalls.recv(self._keeper.ours)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                # Both copies of the other end are closed, after the report about a lost keeper.
                self._poller.unregister(self._keeper.ours.fileno())
                self._gone_at = self._gone_at or time.monotonic()
                return
            self._on_message(messages.decode(data))

    def _on_message(self, message: tuple[Any, ...]) -> None:
        outcome = self._outcome
        match message:
            case (messages.STARTED, leader, _keeper, at):
                self._on_started(leader, at)
            case (messages.FAILED, step, number):
                self._error = _start_error(step, number, self._settings.cwd)
                self._gone_at = time.monotonic()
            case (messages.STOPPED,):
                self._stop_self()
            case (messages.ACTED, rung, at, _by_lease):
                self._on_acted(rung, at)
            case (messages.EXITED, code, number, at, by_itself):
                self._on_exit(code, number, at, by_itself=by_itself)
            case (messages.SWEPT, processes):
                outcome.swept += processes
            case (messages.LOST, statuses):
                self._on_lost(statuses)
            case (messages.GONE, survivors):
                outcome.survivors = survivors
                self._gone_at = time.monotonic()
            case other:
                raise AssertionError(other)

    def _on_acted(self, rung: str, at: float) -> None:
        self._outcome.ladder.append((rung, at - self._started_at))
        self._limits.next_look = None
        if self._why is None:
            is_orphan = self._keeper.caller >= 0 and is_gone(self._keeper.caller)
            # The caller may have died just after a deadline. Then either reason is true.
            # Without a deadline the keeper has ended the rest after the exit of the command.
            dues = self._dues or {"exited": at}
            self._why = "parent_died" if is_orphan else min(dues, key=dues.__getitem__)
            self._expect_end_by(at)
            if not self._has_exited:
                self._outcome.ended = self._why

    def _on_exit(self, code: int | None, number: int | None, at: float, *, by_itself: bool) -> None:
        self._has_exited = True
        self._limits.next_look = None
        self._outcome.code, self._outcome.signal = code, number
        is_stopped = "stopped" in self._dues
        if is_stopped and self._why is None:
            # The signal ended it that was passed on, or KILL after the second signal.
            self._outcome.ended = "stopped"
        if by_itself:
            # The deadlines of the command are over. `_end_rest` sets the next one.
            self._stuck_at = None
            self._rest_at = at + (0.0 if is_stopped else self._settings.linger)
        # Otherwise the keeper has begun to end the tree, and ends the rest too.

    def _on_lost(self, statuses: dict[int, int]) -> None:
        if not self._has_exited:
            self._has_exited = True
            self._outcome.ended = self._why or "keeper_lost"
            if self._leader in statuses:
                code = os.waitstatus_to_exitcode(statuses[self._leader])
                self._outcome.code = code if code >= 0 else None
                self._outcome.signal = -code if code < 0 else None

    def _note(self, rung: str) -> None:
        self._outcome.ladder.append((rung, time.monotonic() - self._started_at))

    # -- a keeper that fails ----------------------------------------------------------------------
    def _guards(self) -> set[int]:
        """The children of this process that are not orphans of the keeper."""
        return self._strangers if self._is_keeper_reaped else {self._keeper.pid, *self._strangers}

    def _kill_keeper(self) -> None:
        self._stuck_at = None
        if not self._is_keeper_reaped:
            self._note("keeper")
            # By number, which is safe: the keeper is an unreaped child.
            syscalls.kill(self._keeper.pid, SIGKILL)
            # A tracer can delay the reaping.
            self._held_until = time.monotonic() + HELD_SECONDS

    def _lose_keeper(self) -> None:
        """Take over the tree of the keeper, which is dead or as good as dead."""
        self._held_until = self._stuck_at = self._rest_at = None
        if self._orphans is None and self._gone_at is None:
            self._orphans = Orphans(self._reap)
            self._orphans.controls.append(self._keeper.theirs)

    def _reap(self) -> None:
        """Reap dead children, continue a stopped keeper, and take over the tree of a lost one."""
        statuses: dict[int, int] = {}
        while True:
            try:
                pid, status = syscalls.waitpid(-1, os.WNOHANG | os.WUNTRACED | syscalls.WALL)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if os.WIFSTOPPED(status):
                if pid == self._keeper.pid:
                    syscalls.kill(pid, SIGCONT)
            elif pid == self._keeper.pid:
                self._is_keeper_reaped = True
                is_done = os.WIFEXITED(status) and os.WEXITSTATUS(status) == messages.DUTY_DONE
                if not is_done:
                    self._lose_keeper()
            elif pid in self._strangers:
                self._strangers.discard(pid)
            else:
                statuses[pid] = status
        if self._orphans is not None:
            self._orphans.note(statuses)


def _start_error(step: str, number: int, cwd: bytes) -> BanksmanError:
    from banksman.process.start_errors import start_error  # noqa: PLC0415  Imported only here.

    return start_error(step, number, cwd=cwd)
