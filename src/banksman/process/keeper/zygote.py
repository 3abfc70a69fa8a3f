"""The zygote: a small interpreter, one per host process, that forks a keeper for each command.

`process/zygote_client.py` is the host's end. A keeper is the parent process of one command, and
runs `spare.py`. The zygote owns its keepers. It promises three things:
- It forks a keeper for each request, or reports why it cannot.
- It continues a keeper that was stopped (SIGSTOP).
- It ends the tree of a keeper that was killed. The zygote is a subreaper too, so the orphans of
  that tree become its children.

While the host lives, the host decides that a keeper does not answer (the last rung of its ladder).
After the death of the host the zygote decides. A keeper may fail to end its tree in time, because
it is stopped over and over or held by a tracer. Then the zygote kills the keeper and ends the tree.

One keeper is always forked ahead, the *spare*, so that the start of a command does not wait for a
fork.

The zygote blocks only in poll(). An orphan that cannot be ended (uninterruptible, or of another
user) costs a scan every RETRY_SECONDS and delays no request. After the death of the host the zygote
accepts no requests, and exits after its last keeper and the last orphan.

If the host has handed trees over, their keepers stay, and so does the zygote. It then has other
hosts than the one that started it (`successors.py`).
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
from banksman.process.keeper.hold import close_all
from banksman.process.keeper.lost_trees import Orphans, tell
from banksman.process.keeper.spare import be_keeper, be_spare, rehearse
from banksman.process.keeper.spawn import (
    SpawnFailed,
    close_all_but,
    milliseconds_until,
    set_soft_nofile,
    stay_deaf,
    wake_on_child,
)
from banksman.process.keeper.successors import Successors
from banksman.process.keeper.sweep import SIGCONT, SIGKILL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from banksman.process.fault_plan import FaultPlan


# How long a keeper may take after the host's death, in addition to the command's grace. It covers
# the bound of the keeper's sweep, the runs of a helper that signals another user's processes, and
# some slack.
DUTY_SECONDS_MAX = 10.0
# Python warms a function up during its first eight calls, and writes to it each time. Eight
# rehearsals save each keeper 80 kB, and the start of a zygote takes some milliseconds longer.
REHEARSALS = 8
# A killed keeper that cannot be reaped after this time is held by a tracer. The kernel reports its
# death only to the tracer then. Its orphans are children of the zygote all the same.
HELD_SECONDS = 0.5


def main(request_fd: int, host_pid: int, plan_text: str) -> None:
    """Set up the process and run the zygote until its work is done. Never returns.

    `request_fd`: the socket of the host. `plan_text`: a fault plan of a test; usually empty.
    """
    plan: FaultPlan | None = None
    if plan_text:
        from banksman.process.fault_plan import FaultPlan  # noqa: PLC0415

        plan = FaultPlan(plan_text)
        plan.follow("zygote")
    # Opened before any command runs: see `syscalls.proc_fd`.
    syscalls.open_proc()
    # No process of this user may trace the zygote or take fds out of it, unless it has
    # CAP_SYS_PTRACE. fork() inherits this and exec() resets it, so it protects the keepers and not
    # the commands.
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    # Inheritable files of the host would stay open for as long as the zygote lives.
    close_all_but(0, 1, 2, request_fd)
    # The zygote must not keep the host's working directory busy either (a mount, say).
    os.chdir("/")
    stay_deaf()
    # A sweep holds one pidfd per process of the tree.
    set_soft_nofile(None)
    host = syscalls.pidfd_open(host_pid)
    # The order matters: first open, then check. If the parent is still the host now, its pid was
    # not free in between. So the pidfd is the host and not a later process with the same pid.
    if os.getppid() != host_pid:
        os._exit(0)
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    syscalls.prctl(syscalls.PR_SET_NAME, messages.ZYGOTE)
    try:
        for _ in range(REHEARSALS):
            rehearse(host)
    except (OSError, SpawnFailed):
        pass  # No /bin/true, or no memory. The rehearsal only makes the keepers smaller.
    # A garbage collection in a keeper would write to every page that it shares with the zygote.
    gc.collect()
    gc.disable()
    gc.freeze()
    Zygote(_socket.socket(fileno=request_fd), host, plan).stay()
    # No interpreter shutdown: nothing is left to clean up, and it would only touch memory.
    os._exit(0)


class Zygote:
    """Event loop of the zygote: requests, dead children, overdue keepers and orphans."""

    def __init__(self, requests: _socket.socket, host: int, plan: FaultPlan | None) -> None:
        # The keepers inherit this fd: see `get_ready`. No command runs yet.
        assert syscalls.proc_fd >= 0
        self._requests: _socket.socket | None = requests
        # The same socket, after its host has ended its requests: see `_say_done`.
        self._ended_requests: _socket.socket | None = None
        self._host = host
        self._is_host_gone = False
        self._plan = plan
        self._woken, _ = wake_on_child()
        self._keepers: dict[int, KnownKeeper] = {}
        # Deadlines of keepers, as `(when, is_killed)`. A keeper that is not killed yet is killed
        # then. A killed one is given up as lost then.
        self._dues: dict[int, tuple[float, bool]] = {}
        self._spare: Spare | None = None
        self._orphans: Orphans | None = None
        self._poller = select.poll()
        for fd in (requests.fileno(), host, self._woken):
            self._poller.register(fd, select.POLLIN)
        self._successors = Successors(self._poller, self)

    def stay(self) -> None:
        """Serve until the host is gone and no keeper and no orphan is left."""
        while self._requests is not None or self._keepers or self._orphans is not None:
            # Before poll(), so that the spare is ready when the next request arrives.
            self._have_spare()
            ready = dict(syscalls.poll(self._poller, self._timeout_ms()))
            # Unlike the keeper, the zygote ignores orders that a dead host has left in the socket:
            # nothing may be started for a host that is gone.
            if self._host in ready:
                self._on_host_gone()
            elif self._requests is not None and self._requests.fileno() in ready:
                self._on_request(self._requests)
            self._successors.on_ready(ready)
            if self._woken in ready:
                syscalls.read(self._woken, 4096)
                self._reap()
            # After reaping, so that a keeper that has just exited in time is not killed.
            if self._dues:
                self._on_dues()
            if self._orphans is not None and self._orphans.is_due():
                self._end_orphans(self._orphans)
            self._say_done()
        # Each deadline belongs to a keeper in the table, and both are removed together. A deadline
        # that is left would be a kill by number of a reaped process. Nothing is guarded at this
        # point, so a failure leaves no tree.
        assert not self._dues
        self._dismiss_spare()

    def _timeout_ms(self) -> float | None:
        dues = [due for due, _is_killed in self._dues.values()]
        if self._orphans is not None:
            dues.append(self._orphans.next_round)
        return min(map(milliseconds_until, dues), default=None)

    def _end_orphans(self, orphans: Orphans) -> None:
        if orphans.end(self._guards):
            self._orphans = None

    def _guards(self) -> set[int]:
        """The children of the zygote that are not orphans."""
        return {*self._keepers, *([] if self._spare is None else [self._spare.pid])}

    def _on_host_gone(self) -> None:
        # Each keeper watches the host too, and ends its tree. The zygote only bounds the time that
        # they take: a keeper that is stopped or traced would never end it.
        self._poller.unregister(self._host)
        self._is_host_gone = True
        # The keeper may have acknowledged a hand-over before this process has read of it.
        if self._requests is not None:
            self._take_last_requests(self._requests)
        self._take_no_more()
        for pid in self._keepers:
            # A tree that was handed over has another host, or waits for one.
            if pid not in self._successors:
                self.bound(pid, self._successors.hold_seconds(pid))

    def _take_no_more(self) -> None:
        """Accept no further requests."""
        if self._requests is not None:
            self._poller.unregister(self._requests.fileno())
            self._ended_requests, self._requests = self._requests, None
            # The spare gets no command any more, and exits. Trees that were handed over may last
            # for days.
            if self._spare is not None:
                self._spare.orders.close()

    def _say_done(self) -> None:
        """Tell the host, if it waits, that only trees are left which it has handed over."""
        if self._ended_requests is None or self._orphans is not None:
            return
        if all(pid in self._successors for pid in self._keepers):
            # Without a keeper the zygote exits now. The host must not take that for DONE, because
            # it has to reap the zygote.
            if self._keepers:
                tell(self._ended_requests.fileno(), messages.DONE)
            self._ended_requests.close()
            self._ended_requests = None

    def _on_request(self, requests: _socket.socket) -> None:
        try:
            data, fds = syscalls.recv_fds(requests)
        except BlockingIOError:
            return
        except ConnectionError:
            # A reset means the same as the end of the stream: the host has closed its end.
            data, fds = b"", []
        if not data:
            # The host has closed its end, but may be alive. Its keepers notice the same by their
            # own sockets. Only the death of the host sets deadlines for them.
            self._take_no_more()
            return
        message = messages.decode(data)
        if message[0] == messages.SPAWN:
            _word, count, grace, _order = message
            self._on_spawn(data, fds, count, grace)
        else:
            self._obey(message, fds)

    def _take_last_requests(self, requests: _socket.socket) -> None:
        """Hear which trees a dead host has handed over. Nothing is started for it any more."""
        while True:
            try:
                data, fds = syscalls.recv_fds(requests)
            except OSError:
                return  # No request is left.
            if not data:
                return
            message = messages.decode(data)
            if message[0] == messages.SPAWN:
                close_all(fds)
            else:
                self._obey(message, fds)

    def _obey(self, message: tuple[Any, ...], fds: list[int]) -> None:
        match message:
            case (messages.KILL_KEEPER, pid):
                # The keeper may have exited while the request was on its way, and its pid may be in
                # use again. A pid in the table is certain: the entry is removed at the latest
                # when the zygote reaps that keeper, and only then the kernel frees the pid.
                if pid in self._keepers:
                    self.kill_keeper(pid)
            case (messages.HAND_OVER, pid, seconds) if pid in self._keepers and len(fds) == 1:
                self._successors.expect(pid, fds.pop(), seconds)
            case (messages.SURVIVE, pid, seconds) if pid in self._keepers and len(fds) == 1:
                self._successors.survive(pid, fds.pop(), seconds)
            case (messages.KEEP, pid):
                self._successors.keep(pid)
            case (messages.HAND_OVER | messages.SURVIVE, *_):
                pass  # The keeper has ended. The successor sees the end of the channel.
            case other:
                raise AssertionError(other)
        close_all(fds)

    def _on_spawn(self, data: bytes, fds: list[int], count: int, grace: float) -> None:
        if len(fds) == count:
            self._hand_over(data, fds, grace)
            return
        # The zygote had no room for all of the fds. It closes the fds that arrived. If the control
        # socket is among them, the host gets the reason. If not, the host sees the end of that
        # socket.
        if fds:
            tell(fds[0], messages.FAILED, "fds", errno.EMFILE)
        for fd in fds:
            syscalls.close(fd)

    def _hand_over(self, data: bytes, fds: list[int], grace: float) -> None:
        """Give a command to the spare keeper, or fork a keeper for it."""
        control = fds[0]
        pid = self._send_to_spare(data, fds)
        try:
            if pid is None:
                pid = self._fork(lambda: be_keeper(data, fds, self._host))
        except OSError as exc:
            tell(control, messages.FAILED, "fork", exc.errno or 0)
            syscalls.close(control)
        else:
            # The zygote keeps its copy of the control socket: see `KnownKeeper`.
            self._keepers[pid] = KnownKeeper(control, grace)
        # Copies of the child's files must not stay open here. The reader of a pipe waits for the
        # last writer.
        for fd in fds[1:]:
            syscalls.close(fd)

    def _send_to_spare(self, data: bytes, fds: list[int]) -> int | None:
        """Send the command to the spare keeper and return the keeper's pid, or None.

        None if there is no spare, if it was killed, or if the fds cannot be sent. The kernel bounds
        how many fds a user may have in flight between processes, and other programs of this user
        count too.
        """
        if self._spare is None:
            return None
        try:
            syscalls.send_fds(self._spare.orders, data, fds)
        except OSError:
            # The spare stays. If it is dead, `_reap` removes it.
            return None
        spare, self._spare = self._spare, None
        spare.orders.close()
        return spare.pid

    def _have_spare(self) -> None:
        """Fork a spare keeper, unless there is one or no further request can come."""
        if self._spare is None and self._requests is not None:
            try:
                ours, theirs = syscalls.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
            except OSError:
                return
            try:
                self._spare = Spare(self._fork(lambda: be_spare(theirs, self._host)), ours)
            except OSError:
                # No room for another process. The next command tries to fork a keeper, and reports
                # the failure.
                ours.close()
            finally:
                theirs.close()

    def _fork(self, live: Callable[[], None]) -> int:
        pid = syscalls.fork()
        if pid == 0:
            # This is the keeper. Every failure ends in its exit, which the zygote sees and cleans
            # up after. Without the `finally`, an exception would return into the loop of the
            # zygote, in two processes. The status 1 is not DUTY_DONE, so the exit counts as a loss.
            try:
                # The keeper counts its calls separately from the zygote: see `FaultPlan.follow`.
                if self._plan is not None:
                    self._plan.follow("keeper")
                live()
            finally:
                os._exit(1)
        return pid

    def _dismiss_spare(self) -> None:
        # No further request can come, so the spare gets no command. Nothing is guarded here, so a
        # failure leaves no tree.
        assert self._requests is None
        if self._spare is not None:
            self._spare.orders.close()
            # By number, which is safe: `_reap` clears `_spare` when it reaps that child. KILL,
            # because the spare holds nothing that needs a cleanup, and a stopped one would not
            # notice the closed socket.
            syscalls.kill(self._spare.pid, SIGKILL)
            # The only blocking wait. The zygote has nothing left to do at this point.
            syscalls.waitpid(self._spare.pid, 0)
            self._spare = None

    # -- keepers that fail ------------------------------------------------------------------------
    def bound(self, pid: int, seconds: float) -> None:
        """Kill this keeper if it has not ended `seconds` from now, plus the time for its duty."""
        due = time.monotonic() + seconds + self._keepers[pid].grace + DUTY_SECONDS_MAX
        # A keeper that was killed already keeps its deadline.
        if not self._is_killed(pid):
            self._dues[pid] = due, False

    def unbound(self, pid: int) -> None:
        """Lift the bound of a keeper: it has a host."""
        if self._is_host_gone and pid not in self._successors:
            self.bound(pid, self._successors.hold_seconds(pid))
        elif not self._is_killed(pid):
            self._dues.pop(pid, None)

    def _is_killed(self, pid: int) -> bool:
        return pid in self._dues and self._dues[pid][1]

    def kill_keeper(self, pid: int) -> None:
        """Kill a keeper that does not answer. The zygote ends its tree then."""
        # By number, which is safe: a keeper in the table is an unreaped child of the zygote.
        syscalls.kill(pid, SIGKILL)
        # SIGKILL cannot be refused, but a tracer can delay the reaping. Hence a second deadline.
        self._dues[pid] = time.monotonic() + HELD_SECONDS, True

    def _on_dues(self) -> None:
        now = time.monotonic()
        for pid, (due, is_killed) in list(self._dues.items()):
            if now < due:
                continue
            # A keeper leaves `_dues` when the zygote reaps it. So each pid here is an unreaped
            # child, and cannot be another process.
            if is_killed:
                # Not reaped, and yet dead: held by a tracer. Its pid leaves the table, so that it
                # is not signalled by number later.
                del self._dues[pid]
                self._lose([self._pop_keeper(pid)])
            else:
                self.kill_keeper(pid)

    def _lose(self, lost: list[KnownKeeper]) -> None:
        """Take over the trees of these keepers."""
        # One sweep for all lost keepers, since their orphans cannot be distinguished. The orphans
        # are children of the zygote by now: the kernel hands them to the nearest subreaper while
        # the keeper exits, before it reports the death of the keeper.
        self._orphans = self._orphans or Orphans(self._reap)
        self._orphans.controls.extend(kept.control for kept in lost)
        self._orphans.channels.extend(channel for kept in lost for channel in kept.channels)
        self._orphans.begin_anew()

    def _on_stopped(self, pid: int) -> None:
        """Continue a keeper that something has stopped, such as its own command.

        A stopped keeper guards nothing.
        """
        # Only the guards. A stopped orphan stays stopped, because the sweep stops orphans before it
        # kills them.
        if pid in self._guards():
            syscalls.kill(pid, SIGCONT)

    def _reap(self) -> None:
        """Reap dead children, continue stopped keepers, and take over the trees of lost ones."""
        statuses: dict[int, int] = {}
        lost: list[KnownKeeper] = []
        while True:
            try:
                # WUNTRACED also reports stopped children. Without __WALL, children that clone()
                # made with another exit signal would never be reaped.
                pid, status = syscalls.waitpid(-1, os.WNOHANG | os.WUNTRACED | syscalls.WALL)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if os.WIFSTOPPED(status):
                self._on_stopped(pid)
                continue
            kept = self._pop_keeper(pid) if pid in self._keepers else None
            self._dues.pop(pid, None)
            # A dead spare is replaced by the next iteration of the loop. It had no tree.
            if self._spare is not None and pid == self._spare.pid:
                self._spare.orders.close()
                self._spare = None
            elif kept is None:
                statuses[pid] = status
            elif os.WIFEXITED(status) and os.WEXITSTATUS(status) == messages.DUTY_DONE:
                # The exit status is the keeper's proof that its tree is gone. Any other end leaves
                # the tree in an unknown state, so the zygote sweeps.
                syscalls.close(kept.control)
                for channel in kept.channels:
                    channel.close()
            else:
                lost.append(kept)
        # After the loop: all keepers that died together share one report.
        if lost:
            self._lose(lost)
        if self._orphans is not None:
            self._orphans.note(statuses)

    def _pop_keeper(self, pid: int) -> KnownKeeper:
        kept = self._keepers.pop(pid)
        kept.channels = self._successors.end(pid)
        return kept


class KnownKeeper:
    """The zygote's record of a keeper: a copy of its control socket, and the grace of its command.

    While the zygote holds this copy, the host sees no end of file on the socket. So the report
    about a lost keeper arrives on the same socket, in order, after its tree is gone.
    """

    def __init__(self, control: int, grace: float) -> None:
        self.control = control
        self.grace = grace
        # The channels to its other hosts, set when the keeper has ended.
        self.channels: list[_socket.socket] = []


class Spare:
    """A keeper that waits for its command."""

    def __init__(self, pid: int, orders: _socket.socket) -> None:
        self.pid = pid
        self.orders = orders
