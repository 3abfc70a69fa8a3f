"""The zygote: a small interpreter, started once per host process, that forks a keeper for each command.

It owns its keepers. It promises to fork one for each request or to say why not, to continue a keeper that is stopped,
and to end the tree of a keeper that was killed: it is a subreaper too, so such a tree falls to it.

While the host lives, the host decides that a keeper does not answer (the last rung of its ladder). After the host's
death the zygote does: a keeper that has not ended its tree when it should have (it is stopped over and over, or a
tracer holds it) is killed, and the zygote ends the tree.

One keeper is always forked ahead, a *spare*, so that a start does not wait for a fork.

It never waits for anything but poll(). An orphan that cannot be ended (uninterruptible, another user's) costs a scan
now and then, and no request waits for it. When the host is gone it takes no more requests, and leaves when the last
keeper and the last orphan have.
"""

from __future__ import annotations

import _socket
import errno
import gc
import os
import select
import time

from banksman.process import syscalls
from banksman.process.keeper import messages
from banksman.process.keeper.keeper import RETRY_SECONDS, ROUND_SECONDS, SWEEP_SECONDS_MAX
from banksman.process.keeper.proc_tree import descendants, survey
from banksman.process.keeper.spare import be_keeper, be_spare, rehearse
from banksman.process.keeper.spawn import (
    SpawnFailed,
    close_all_but,
    milliseconds_until,
    set_soft_nofile,
    stay_deaf,
    wake_on_child,
)
from banksman.process.keeper.sweep import SIGCONT, SIGKILL, Sweep

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from banksman.process.fault_plan import FaultPlan


# How many ends of orphans are kept for the report: more would not fit one message.
STATUSES_MAX = 1000
# How long a keeper may take after the host's death, beyond the command's grace: the bound of its sweep, the runs of a
# helper that has to signal another user's processes, and some slack.
DUTY_SECONDS_MAX = 10.0
# A killed keeper that is not there to be reaped after so long is held by a tracer, and the kernel tells nobody else of
# its death. Its orphans are ours from that moment on all the same.
HELD_SECONDS = 0.5


def main(request_fd: int, host_pid: int, plan_text: str) -> None:
    plan: FaultPlan | None = None
    if plan_text:
        from banksman.process.fault_plan import FaultPlan  # noqa: PLC0415

        plan = FaultPlan(plan_text)
        plan.follow("zygote")
    syscalls.open_proc()
    # No process of this user may trace us, or take fds out of us, unless it has CAP_SYS_PTRACE. Forks inherit it, and
    # exec() undoes it, so it holds for the keepers and not for the commands.
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    # Whatever the host had open and inheritable is not ours to keep open.
    close_all_but(0, 1, 2, request_fd)
    # The folder the program was in when it first needed us is not ours to hold either.
    os.chdir("/")
    stay_deaf()
    set_soft_nofile(None)
    host = syscalls.pidfd_open(host_pid)
    # Opened first, checked second: if our parent is still the host now, then the pidfd is the host and not some later
    # process with its number.
    if os.getppid() != host_pid:
        os._exit(0)
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    syscalls.prctl(syscalls.PR_SET_NAME, b"banksman-zygote")
    try:
        rehearse(host)
    except (OSError, SpawnFailed):
        pass  # No such program here, or no room. It would only have made the keepers smaller.
    # A collection in a keeper would write to every page it shares with us.
    gc.collect()
    gc.disable()
    gc.freeze()
    Zygote(_socket.socket(fileno=request_fd), host, plan).stay()
    os._exit(0)


class Zygote:
    def __init__(self, requests: _socket.socket, host: int, plan: FaultPlan | None) -> None:
        self._requests: _socket.socket | None = requests
        self._host = host
        self._plan = plan
        self._woken, _ = wake_on_child()
        self._keepers: dict[int, KnownKeeper] = {}
        # Keepers that must be gone by a time. `(when, is_killed)`: at that time it is killed, or given up as lost.
        self._dues: dict[int, tuple[float, bool]] = {}
        self._spare: Spare | None = None
        self._orphans: Orphans | None = None
        self._orphans_reaped = 0
        self._poller = select.poll()
        for fd in (requests.fileno(), host, self._woken):
            self._poller.register(fd, select.POLLIN)

    def stay(self) -> None:
        while self._requests is not None or self._keepers or self._orphans is not None:
            self._have_spare()
            ready = dict(syscalls.poll(self._poller, self._timeout_ms()))
            if self._host in ready:
                self._on_host_gone()
            elif self._requests is not None and self._requests.fileno() in ready:
                self._on_request(self._requests)
            if self._woken in ready:
                syscalls.read(self._woken, 4096)
                self._reap()
            if self._dues:
                self._on_dues()
            if self._orphans is not None and self._orphans.is_due():
                self._sweep_orphans(self._orphans)
        self._dismiss_spare()

    def _timeout_ms(self) -> float | None:
        dues = [due for due, _is_killed in self._dues.values()]
        if self._orphans is not None:
            dues.append(self._orphans.next_round)
        return min(map(milliseconds_until, dues), default=None)

    def _sweep_orphans(self, orphans: Orphans) -> None:
        self._reap()
        reaped_before = self._orphans_reaped
        if orphans.sweep(self._guards()):
            # There is no proof by ECHILD here, since the keepers are our children as well. But this is one too: whoever
            # escaped the look was born during it, and had a parent that ended during it, which is then a zombie of ours
            # (or had such a parent itself). So if nobody is left to reap after a look that saw nobody, there is nobody.
            self._reap()
            is_proven = self._orphans_reaped == reaped_before
            # Begun anew: another keeper was lost meanwhile, and its orphans come first. The clock does not tell: on a
            # busy machine a look takes longer than the time between two.
            if is_proven and not orphans.is_begun_anew:
                orphans.report([])
                self._orphans = None

    def _guards(self) -> set[int]:
        """Our children that are no orphans."""
        return {*self._keepers, *([] if self._spare is None else [self._spare.pid])}

    def _on_host_gone(self) -> None:
        self._poller.unregister(self._host)
        self._take_no_more()
        now = time.monotonic()
        for pid, kept in self._keepers.items():
            self._dues.setdefault(pid, (now + kept.grace + DUTY_SECONDS_MAX, False))

    def _take_no_more(self) -> None:
        if self._requests is not None:
            self._poller.unregister(self._requests.fileno())
            self._requests.close()
            self._requests = None

    def _on_request(self, requests: _socket.socket) -> None:
        try:
            data, fds = syscalls.recv_fds(requests)
        except BlockingIOError:
            return
        except ConnectionError:
            data, fds = b"", []
        if not data:
            self._take_no_more()
            return
        match messages.decode(data):
            case (messages.SPAWN, count, grace, _order):
                self._on_spawn(data, fds, count, grace)
            case (messages.KILL_KEEPER, pid):
                if pid in self._keepers:
                    self._kill_keeper(pid)
            case other:
                raise AssertionError(other)

    def _on_spawn(self, data: bytes, fds: list[int], count: int, grace: float) -> None:
        if len(fds) == count:
            self._hand_over(data, fds, grace)
            return
        # We had no room for all of the fds. Those that arrived are closed; if the control socket is among them the host
        # hears why, and if not, it sees its end.
        if fds:
            _tell(fds[0], messages.FAILED, "fds", errno.EMFILE)
        for fd in fds:
            syscalls.close(fd)

    def _hand_over(self, data: bytes, fds: list[int], grace: float) -> None:
        """Give a command to the spare keeper, which is one no more; or to one forked for it."""
        control = fds[0]
        pid = self._send_to_spare(data, fds)
        try:
            if pid is None:
                pid = self._fork(lambda: be_keeper(data, fds, self._host))
        except OSError as exc:
            _tell(control, messages.FAILED, "fork", exc.errno or 0)
            syscalls.close(control)
        else:
            self._keepers[pid] = KnownKeeper(control, grace)
        for fd in fds[1:]:
            syscalls.close(fd)

    def _send_to_spare(self, data: bytes, fds: list[int]) -> int | None:
        """The spare's pid if the command is its own now. Not so if it was killed, or the fds cannot be sent: there is a
        bound on how many a user may have under way, and it is not ours alone to keep."""
        if self._spare is None:
            return None
        try:
            syscalls.send_fds(self._spare.orders, data, fds)
        except OSError:
            return None
        spare, self._spare = self._spare, None
        spare.orders.close()
        return spare.pid

    def _have_spare(self) -> None:
        if self._spare is None and self._requests is not None:
            try:
                ours, theirs = syscalls.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
            except OSError:
                return
            try:
                self._spare = Spare(self._fork(lambda: be_spare(theirs, self._host)), ours)
            except OSError:
                ours.close()  # No room for another process. The next command gets one of its own, or is told why not.
            finally:
                theirs.close()

    def _fork(self, live: Callable[[], None]) -> int:
        pid = syscalls.fork()
        if pid == 0:
            # In the keeper. Whatever goes wrong there ends in its exit, which we see and clean up after.
            try:
                if self._plan is not None:
                    self._plan.follow("keeper")
                live()
            finally:
                os._exit(1)
        return pid

    def _dismiss_spare(self) -> None:
        if self._spare is not None:
            self._spare.orders.close()
            # It holds nothing, and it may be stopped.
            syscalls.kill(self._spare.pid, SIGKILL)
            syscalls.waitpid(self._spare.pid, 0)
            self._spare = None

    # -- keepers that do not do their duty ---------------------------------------------------------------------------
    def _kill_keeper(self, pid: int) -> None:
        # By number, which is safe: a keeper in the table is our own child and not yet reaped.
        syscalls.kill(pid, SIGKILL)
        self._dues[pid] = time.monotonic() + HELD_SECONDS, True

    def _on_dues(self) -> None:
        now = time.monotonic()
        for pid, (due, is_killed) in list(self._dues.items()):
            if now < due:
                continue
            if is_killed:
                del self._dues[pid]
                self._lose([self._keepers.pop(pid)])
            else:
                self._kill_keeper(pid)

    def _lose(self, lost: list[KnownKeeper]) -> None:
        """What these kept is ours to end."""
        self._orphans = self._orphans or Orphans(self._reap)
        self._orphans.controls.extend(kept.control for kept in lost)
        self._orphans.begin_anew()

    def _on_stopped(self, pid: int) -> None:
        """Continue a guard that something has stopped, its own command say: while it is stopped it guards nothing."""
        if pid in self._guards():
            syscalls.kill(pid, SIGCONT)

    def _reap(self) -> None:
        statuses: dict[int, int] = {}
        lost: list[KnownKeeper] = []
        while True:
            try:
                pid, status = syscalls.waitpid(-1, os.WNOHANG | os.WUNTRACED | syscalls.WALL)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if os.WIFSTOPPED(status):
                self._on_stopped(pid)
                continue
            kept = self._keepers.pop(pid, None)
            self._dues.pop(pid, None)
            if self._spare is not None and pid == self._spare.pid:
                self._spare.orders.close()
                self._spare = None
            elif kept is None:
                self._orphans_reaped += 1
                statuses[pid] = status
            elif os.WIFEXITED(status) and os.WEXITSTATUS(status) == messages.DUTY_DONE:
                syscalls.close(kept.control)
            else:
                lost.append(kept)
        if lost:
            self._lose(lost)
        if self._orphans is not None:
            self._orphans.statuses.update(statuses)
            # For the leaders among them. A tree that forks and exits without end must not make this endless too.
            for pid in list(self._orphans.statuses)[STATUSES_MAX:]:
                del self._orphans.statuses[pid]


class KnownKeeper:
    """What we know of a keeper: our copy of its control socket, and its command's grace.

    While we hold the copy the host sees no end of file, so a lost keeper's report arrives on the same socket, in order,
    and after its tree is gone.
    """

    def __init__(self, control: int, grace: float) -> None:
        self.control = control
        self.grace = grace


class Spare:
    """A keeper that waits for its command."""

    def __init__(self, pid: int, orders: _socket.socket) -> None:
        self.pid = pid
        self.orders = orders


class Orphans:
    """The trees of keepers that were killed: ours now, to be ended and reported.

    Several keepers may be lost at once, and their orphans cannot be told apart: each host's command is told of all. It
    knows its own leader by its pid.
    """

    def __init__(self, reap: Callable[[], None]) -> None:
        self.controls: list[int] = []
        self.statuses: dict[int, int] = {}
        self.begin_anew()
        self._sweep = Sweep(os.getpid(), reap)

    def begin_anew(self) -> None:
        """Another keeper was lost: its orphans have the whole time, whoever else is still there."""
        self.next_round = 0.0
        self._began = time.monotonic()

    @property
    def is_begun_anew(self) -> bool:
        """Since the last round began."""
        return self.next_round == 0.0

    def is_due(self) -> bool:
        return time.monotonic() >= self.next_round

    def sweep(self, guards: set[int]) -> bool:
        """One round. True if nobody is left; past the bound those who are left are reported."""
        now = time.monotonic()
        self.next_round = now + (ROUND_SECONDS if self.controls else RETRY_SECONDS)
        try:
            found = self._sweep.kill(but=guards)
            left = descendants(os.getpid(), near=False, but=guards)
        except OSError:
            return False  # No room to look; there may be in the next round.
        if not left and not found:
            return True
        if now - self._began > SWEEP_SECONDS_MAX:
            self.report(survey(os.getpid(), self._sweep.denied, but=guards))
        return False

    def report(self, survivors: list[tuple[int, str, str]]) -> None:
        # Not more than certainly fits: a host that is busy must still hear the last word.
        names = [(pid, name) for (pid, _start), name in self._sweep.names.items()][: 2 * messages.NAMES_PER_MESSAGE]
        for control in self.controls:
            _tell(control, messages.LOST, self.statuses)
            for first in range(0, len(names), messages.NAMES_PER_MESSAGE):
                _tell(control, messages.SWEPT, names[first : first + messages.NAMES_PER_MESSAGE])
            _tell(control, messages.GONE, survivors)
            syscalls.close(control)
        self.controls.clear()


def _tell(control: int, *message: object) -> None:
    sock = _socket.socket(fileno=control)
    try:
        syscalls.send(sock, messages.encode(*message))
    except OSError:
        pass  # The host is gone, or so far behind that it will learn from the end of the stream.
    finally:
        sock.detach()
