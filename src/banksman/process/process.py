"""Host side of the start of a child: the request to the zygote, and its answer.

The zygote forks a keeper, the parent process of the child, and the keeper carries out the order
(`keeper/spare.py`). `SpawnRequest` owns the fds that the keeper is to get, and sends them with the
order. A busy zygote, or a kernel that has no room, delays the request. The fact `Started` or
`StartFailed` follows. If a step fails in the keeper, `start_errors.py` translates it into an error
for the caller. `kept_process.py` has everything after the start.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from banksman.core.process_facts import (
    NeverStarted,
    ProcessFact,
    Started,
    StartFailed,
    Stream,
    Survivor,
)
from banksman.errors import BanksmanError, MachineError, no_room
from banksman.process.cgroups import takes_turn_to_prune
from banksman.process.keeper import messages
from banksman.process.kept_process import KeptProcess
from banksman.process.launch import PIPES, Launch, Source, Target
from banksman.process.lease_page import LeasePage
from banksman.process.start_errors import start_error
from banksman.process.stdio import ChildStreams, Size
from banksman.process.zygote_client import socketpair, spawner

if TYPE_CHECKING:
    import asyncio

    from banksman.process.tree_hand_over import Survival
import _socket
import asyncio
import marshal
import os

from banksman.process import syscalls
from banksman.process.stdio import TAKE_TERMINAL
from banksman.process.zygote_client import ZygoteHandle

RETRY_SECONDS = 0.005


class SpawnRequest:
    """Order and fds of one start.

    The caller holds `spawner.fork_lock` around `open`, `send` and `close`. No fork of the program
    may happen between the creation of an fd and its registration, or between its removal and its
    close. The forked child would keep a copy of the fd open.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, fingerprint: object, grace: float) -> None:
        """Prepare a request without fds. `fingerprint`: attributes that the zygote must have."""
        self._loop = loop
        self._fingerprint = fingerprint
        self._grace = grace
        # The fds for the keeper, in the order that it expects.
        self._fds: list[int] = []
        self._order: bytes | None = None
        self._busy_fd = -1

    def open(
        self,
        launch: Launch,
        control: _socket.socket,
        streams: ChildStreams,
        lease: LeasePage | None,
        *,
        linger: float,
        deadline: float | None,
        has_terminal: bool,
    ) -> None:
        """Collect the fds for the keeper and encode the order.

        `control`: the keeper's end of the control socket. This request closes it.
        """
        fds = self._fds
        order = {
            "grace": self._grace,
            "linger": linger,
            "deadline": deadline,
            "terminal": TAKE_TERMINAL if has_terminal else None,
            "has_lease": lease is not None,
            "path": launch.path,
            "argv": launch.argv,
            "env": launch.env,
            "umask": launch.inherited.umask,
            "limits": launch.limits,
            "nofile": launch.inherited.nofile,
            "targets": [*(target for _fd, target in streams.theirs), *launch.pass_fds],
            "user": launch.user,
            "ender": launch.ender,
            "is_agents": launch.is_agents,
            "cgroup": launch.cgroup and (*launch.cgroup, takes_turn_to_prune(launch.cgroup[0])),
            **messages.OWN_SESSION,
        }
        # Each fd enters the list as soon as it exists, so that `close` finds it if a later step
        # fails.
        fds.append(control.detach())
        fds.append(
            syscalls.above_stdio(
                syscalls.open_fd(launch.cwd, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            )
        )
        if lease is not None:
            fds.append(lease.copy_fd())
        fds.extend(fd for fd, _target in streams.theirs)
        streams.theirs.clear()
        fds.extend(syscalls.dup(fd) for fd in launch.pass_fds)
        self._order = marshal.dumps(order)
        if len(self._order) > messages.ORDER_BYTES_MAX:
            fds.append(_write_order(self._order))
            self._order = None

    def send(self, retry: Callable[[], None]) -> ZygoteHandle | None:
        """Send the order and the fds, and return the zygote that has taken them.

        None if there is no room now. Then the loop calls `retry` when sending may succeed.
        """
        try:
            return spawner.spawn(self._order, self._fds, self._grace, self._fingerprint)
        except BlockingIOError:
            # The queue of the zygote is full. Its socket is shared with other loops and other
            # starts of this loop, and a selector has one writer per fd. Hence a separate copy of
            # the fd to wait on.
            self._busy_fd = syscalls.dup(spawner.current(self._fingerprint).fileno())
            self._loop.add_writer(self._busy_fd, retry)
        except OSError as exc:
            if exc.errno != errno.ETOOMANYREFS:
                raise
            # ETOOMANYREFS: a user without root rights may have only a limited number of fds in
            # flight between processes. The kernel does not tell when there is room again, so this
            # start retries. The start timer bounds the retries.
            self._loop.call_later(RETRY_SECONDS, retry)
        return None

    def stop_waiting(self) -> None:
        """Stop waiting for the zygote's socket."""
        if self._busy_fd >= 0:
            self._loop.remove_writer(self._busy_fd)
            self._close_busy_fd()

    def close(self) -> None:
        """Stop waiting, and close the fds: the keeper has its copies, or none is needed."""
        self.stop_waiting()
        self.forget()

    def forget(self) -> None:
        """Close the fds without touching the loop."""
        self._order = None
        self._close_busy_fd()
        while self._fds:
            syscalls.close(self._fds.pop())

    def _close_busy_fd(self) -> None:
        if self._busy_fd >= 0:
            fd, self._busy_fd = self._busy_fd, -1
            syscalls.close(fd)


def _write_order(data: bytes) -> int:
    """Write the order to a memory file and return its fd.

    A file takes any size. A message on a socket would be refused as too long.
    """
    fd = syscalls.above_stdio(syscalls.memfd_create("banksman-order"))
    try:
        written = 0
        while written < len(data):
            written += syscalls.write(fd, data[written:] if written else data)
    except OSError:
        syscalls.close(fd)
        raise
    return fd


# A zygote that does not answer within this time is stopped or hung. Five hundred starts at the same
# time take about one second.
START_SECONDS_MAX = 30.0


class ChildProcess(KeptProcess):
    """One child, from the request to the report that its tree is gone."""

    def __init__(
        self,
        launch: Launch,
        *,
        stdin: Source,
        grace: float,
        linger: float,
        deadline: float | None,
        on_fact: Callable[[ProcessFact], None],
        terminal: Size | None = None,
        lease: LeasePage | None = None,
        outputs: tuple[Target, Target] = PIPES,
        survival: Survival | None = None,
    ) -> None:
        """Request the child; the fact `Started` or `StartFailed` follows.

        Raises, with nothing left open, if the request cannot be sent.

        `deadline`: seconds after which the keeper acts without an order; see `renew`. `terminal`:
        its size; the child gets a terminal instead of pipes. `lease`: page with the times by which
        the tree must end, unless the host renews them. `outputs`: targets of stdout and stderr.
        `survival`: the tree survives the death of this host; not with a terminal. See `survive` and
        `place`.
        """
        super().__init__(grace=grace, on_fact=on_fact)
        # For the error of a failed start.
        self._cwd = launch.cwd
        self._uid = None if launch.user is None else launch.user[0]
        # The streams to read after the fact `Started`. The child may write, or end a stream, before
        # the keeper has reported its start.
        self._first_reads: set[Stream] = set()
        self._request = SpawnRequest(self._loop, launch.inherited.fingerprint, grace)
        self._start_timer: asyncio.TimerHandle | None = None
        self._survival_wanted = survival
        # Where a successor claims the child, once its keeper can hold it. An error says that the
        # child ends with this host.
        self.place: asyncio.Future[str] | None = None
        spawner.know(self)
        try:
            # Why under this lock: see `SpawnRequest`.
            with spawner.fork_lock:
                streams = self._streams = ChildStreams(
                    stdin, on_fact, terminal, outputs, survives=survival is not None
                )
                self.stdin = streams.stdin
                self._control, control = socketpair()
                self._request.open(
                    launch,
                    control,
                    streams,
                    lease,
                    linger=linger,
                    deadline=deadline,
                    has_terminal=terminal is not None,
                )
                self._ask()
        except BanksmanError:
            self.close()
            raise
        except OSError as exc:
            self.close()
            raise no_room("fds", exc) from exc
        except BaseException:
            self.close()  # For example, an event loop that cannot watch fds.
            raise
        self._start_timer = self._loop.call_later(START_SECONDS_MAX, self._on_start_timeout)

    # -- start ------------------------------------------------------------------------------------
    def _ask(self) -> None:
        """Send the request to the zygote. If it is busy, retry when it can take the request."""
        assert self._control is not None
        self._zygote = self._request.send(self._ask_again)
        if self._zygote is None:
            return
        self._request.close()
        # Only now: before this point no other process has the other ends.
        self._begin_to_read()

    def _ask_again(self) -> None:
        self._request.stop_waiting()
        if self._is_over:
            return
        try:
            with spawner.fork_lock:
                self._ask()
        except BanksmanError as exc:
            self._fail(exc)
        except OSError as exc:
            self._fail(no_room("fds", exc))

    def pause_reading(self, stream: Stream | None = None) -> None:
        self._first_reads.difference_update(Stream if stream is None else (stream,))
        super().pause_reading(stream)

    def resume_reading(self, stream: Stream | None = None) -> None:
        self._first_reads.update(Stream if stream is None else (stream,))
        if self.pid is not None:
            super().resume_reading(stream)

    def _on_start_timeout(self) -> None:
        self._start_timer = None
        if self.pid is None and not self._is_over:
            if self._zygote is not None:
                # The zygote is replaced, because every later start would wait for it too. Its
                # keepers end their trees without it.
                spawner.replace(self._zygote)
            message = "cannot start a command: no answer in time"
            hint = "check whether the machine is overloaded"
            self._fail(MachineError(message, number=errno.ETIMEDOUT, hint=hint))

    def _fail(self, error: BanksmanError) -> None:
        self.close()
        self._on_fact(StartFailed(error))

    def _on_message(self, message: tuple[Any, ...]) -> None:
        match message:
            case (messages.STARTED, pid, keeper, at):
                self.pid, self.keeper_pid = pid, keeper
                self._cancel_start_timer()
                if self._survival_wanted is not None:
                    self.place = self.survive(self._survival_wanted)
                self._on_fact(Started(pid, at))
                for stream in Stream:
                    if stream in self._first_reads:
                        super().resume_reading(stream)
            case (messages.FAILED, "stopped", _):
                self.close()
                self._on_fact(NeverStarted(time.monotonic()))
            case (messages.FAILED, step, number):
                self._fail(start_error(step, number, cwd=self._cwd, uid=self._uid))
            case _:
                super()._on_message(message)

    # -- guards that die during the start ---------------------------------------------------------
    def _on_lost(self, statuses: dict[int, int]) -> None:
        # Whether a child without a pid has run is unknown. GONE follows with the survivors, and
        # becomes an error.
        if self.pid is not None:
            super()._on_lost(statuses)

    def _on_gone(self, survivors: tuple[Survivor, ...]) -> None:
        if self.pid is None:
            left = ", ".join(str(survivor.pid) for survivor in survivors)
            hint = (
                f"end these processes, which Banksman could not end: {left}"
                if survivors
                else "check what it did before you try again; none of its processes is left"
            )
            reason = "its keeper died during the start; the command may have run"
            self._fail(MachineError(f"cannot start the command: {reason}", hint=hint))
            return
        super()._on_gone(survivors)

    def _on_silence(self) -> None:
        if self.pid is None:
            hint = "check what it did before you try again"
            reason = "the zygote died during the start; the command may have run"
            self._fail(MachineError(f"cannot start the command: {reason}", hint=hint))
            return
        super()._on_silence()

    # -- end --------------------------------------------------------------------------------------
    def close(self) -> None:
        """Close every fd. A keeper that still has a tree ends it: closing the socket is a stop."""
        self._cancel_start_timer()
        with spawner.fork_lock:
            super().close()
            self._request.close()

    def forget(self) -> None:
        super().forget()
        self._request.forget()

    def _cancel_start_timer(self) -> None:
        if self._start_timer is not None:
            self._start_timer.cancel()
            self._start_timer = None
