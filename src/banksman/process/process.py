"""The host's end of a child: its pipes, and the conversation with its keeper.

It owns the control socket, the streams and its use of the zygote. It decides nothing: what happens is told as facts to
`on_fact`, what is to be done is told to it. Nothing here awaits, so there is nothing that a cancelled task could leave
half done. The host never signals a pid: every signal is a request to the keeper, the one that knows whether that pid is
still the child.
"""

from __future__ import annotations

import _socket
import asyncio
import contextlib
import errno
import marshal
import os
import time
from collections.abc import Callable
from typing import Any

from banksman.core.process_facts import (
    Exited,
    KeeperActed,
    NeverStarted,
    ProcessesSwept,
    ProcessFact,
    Started,
    StartFailed,
    Stream,
    Survivor,
    Swept,
    TreeEnded,
)
from banksman.errors import BanksmanError, MachineError, NotOwner, ProgramNotExecutable, UsageError, no_room
from banksman.process import syscalls
from banksman.process.keeper import messages
from banksman.process.launch import PIPES, Launch, Target
from banksman.process.lease_page import LeasePage
from banksman.process.pipes import PipeWriter
from banksman.process.stdio import TAKE_TERMINAL, ChildStreams, Size, Stdin
from banksman.process.sweep_requests import OpenSweeps, StartedSince
from banksman.process.zygote_client import ZygoteHandle, socketpair, spawner

# A zygote that does not answer within this time is stopped or wedged. Five hundred starts at once take about one.
START_SECONDS_MAX = 30.0
RETRY_SECONDS = 0.005


class Process:
    """One child, from the request to the report that its tree is gone."""

    _zygote: ZygoteHandle | None = None

    def __init__(
        self,
        launch: Launch,
        *,
        stdin: Stdin,
        grace: float,
        linger: float,
        deadline: float | None,
        on_fact: Callable[[ProcessFact], None],
        terminal: Size | None = None,
        lease: LeasePage | None = None,
        outputs: tuple[Target, Target] = PIPES,
    ) -> None:
        """Ask for the child; `Started` or `StartFailed` follows. Raises, with nothing left open, if it cannot even ask.

        `deadline`: seconds after which the keeper acts without being told; see `renew`. `terminal`: of this size, in
        place of the pipes. `lease`: how long it may live at most, as the keeper reads it there. `outputs`: where
        stdout and stderr go.
        """
        self.pid: int | None = None
        self.grace = grace
        self.stdin: PipeWriter | None = None
        self._loop = asyncio.get_running_loop()
        self._on_fact = on_fact
        self._keeper: int | None = None
        self._has_exited = False
        self._is_over = False
        self._control: _socket.socket | None = None
        self._streams: ChildStreams | None = None
        # What goes to the keeper, in the order it expects: closed here as soon as it is sent.
        self._theirs: list[int] = []
        self._order: bytes | None = None
        self._busy_fd = -1
        self._start_timer: asyncio.TimerHandle | None = None
        self._started_since = StartedSince()
        self._sweeps = OpenSweeps(self._loop, self.hear_now, on_fact)
        self._fingerprint = launch.inherited.fingerprint
        spawner.know(self)
        try:
            # No fork of the program may fall between the making of an fd and its being known, nor between its being
            # forgotten and its being closed.
            with spawner.fork_lock:
                streams = self._streams = ChildStreams(stdin, on_fact, terminal, outputs)
                self.stdin = streams.stdin
                order = {"grace": grace, "linger": linger, "deadline": deadline}
                order |= {"terminal": None if terminal is None else TAKE_TERMINAL, "has_lease": lease is not None}
                self._open(launch, streams, order, lease)
                self._ask()
        except BanksmanError:
            self.close()
            raise
        except OSError as exc:
            self.close()
            raise no_room("fds", exc) from exc
        except BaseException:
            self.close()  # A loop that cannot watch fds, say.
            raise
        self._start_timer = self._loop.call_later(START_SECONDS_MAX, self._on_start_timeout)

    # -- the start ---------------------------------------------------------------------------------------------------
    def _open(self, launch: Launch, streams: ChildStreams, order: dict[str, Any], lease: LeasePage | None) -> None:
        order |= {
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
        }
        self._control, control = socketpair()
        theirs = self._theirs
        theirs.append(control.detach())
        theirs.append(syscalls.above_stdio(syscalls.open_fd(launch.cwd, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)))
        if lease is not None:
            theirs.append(lease.copy_fd())
        theirs.extend(fd for fd, _target in streams.theirs)
        streams.theirs.clear()
        theirs.extend(syscalls.dup(fd) for fd in launch.pass_fds)
        self._order = marshal.dumps(order)
        if len(self._order) > messages.ORDER_BYTES_MAX:
            theirs.append(_write_order(self._order))
            self._order = None

    def _ask(self) -> None:
        """Hand the fds over; if the zygote is busy, again as soon as it can take them."""
        assert self._control is not None
        try:
            self._zygote = spawner.spawn(self._order, self._theirs, self.grace, self._fingerprint)
        except BlockingIOError:
            # The zygote's queue is full. Its socket is shared with other loops and other starts of this one, and a
            # selector knows one writer per fd, hence a copy of our own to wait on.
            self._busy_fd = syscalls.dup(spawner.current(self._fingerprint).fileno())
            self._loop.add_writer(self._busy_fd, self._ask_again)
            return
        except OSError as exc:
            if exc.errno != errno.ETOOMANYREFS:
                raise
            # A user who is not root may have only so many fds on their way between processes, and the kernel does not
            # tell when there is room again. The start's own deadline bounds this.
            self._loop.call_later(RETRY_SECONDS, self._ask_again)
            return
        self._order = None
        self._close_theirs()
        self._loop.add_reader(self._control.fileno(), self.hear_now)
        self.resume_reading()

    def _ask_again(self) -> None:
        self._stop_waiting()
        if self._is_over:
            return
        try:
            with spawner.fork_lock:
                self._ask()
        except BanksmanError as exc:
            self._fail(exc)
        except OSError as exc:
            self._fail(no_room("fds", exc))

    def _stop_waiting(self) -> None:
        if self._busy_fd >= 0:
            self._loop.remove_writer(self._busy_fd)
            syscalls.close(self._busy_fd)
            self._busy_fd = -1

    def _on_start_timeout(self) -> None:
        self._start_timer = None
        if self.pid is None and not self._is_over:
            if self._zygote is not None:
                spawner.replace(self._zygote)
            error = MachineError("cannot start a command: no answer", number=errno.ETIMEDOUT, hint="is it overloaded?")
            self._fail(error)

    def _fail(self, error: BanksmanError) -> None:
        self.close()
        self._on_fact(StartFailed(error))

    # -- what is heard -----------------------------------------------------------------------------------------------
    def hear_now(self) -> None:
        """Take what the keeper has said. Also called by those who must know it before they decide."""
        while self._control is not None:
            try:
                data = syscalls.recv(self._control)
            except BlockingIOError:
                return
            except OSError as exc:
                if exc.errno in syscalls.PASSING:
                    return  # The socket is still readable, so the loop calls again.
                data = b""
            if not data:
                self._on_silence()
                return
            self._on_message(messages.decode(data))

    def _on_message(self, message: tuple[Any, ...]) -> None:
        match message:
            case (messages.STARTED, pid, keeper, at):
                self.pid, self._keeper = pid, keeper
                self._cancel_start_timer()
                self._on_fact(Started(pid, at))
            case (messages.FAILED, "stopped", _):
                self.close()
                self._on_fact(NeverStarted(time.monotonic()))
            case (messages.FAILED, step, number):
                self._fail(start_error(step, number))
            case (messages.EXITED, code, number, at, by_itself):
                self._on_exited(Exited(code, number, at, by_itself))
            case (messages.ACTED, rung, at, by_lease):
                self._on_fact(KeeperActed(rung, at, by_lease))
            case (messages.LOST, statuses):
                self._on_lost(statuses)
            case (messages.SWEPT, names):
                others = tuple(Swept(pid, command) for pid, command in names if pid != self.pid)
                self._on_fact(ProcessesSwept(others))
            case (messages.SWEEP_REPORT, number, names, survivors, is_over):
                swept = tuple(Swept(pid, command) for pid, command in names)
                left = tuple(Survivor(*survivor) for survivor in survivors)
                late = self._sweeps.hear(number, swept, left, is_over=is_over)
                if late:
                    self._on_fact(ProcessesSwept(late))
            case (messages.GONE, survivors):
                self._on_gone(tuple(Survivor(*survivor) for survivor in survivors))
            case _:
                raise AssertionError(message)

    def _on_exited(self, fact: Exited) -> None:
        if not self._has_exited:
            self._has_exited = True
            # What it wrote before it exited is told before its exit: whoever asks "was it idle?" must know.
            self.read_now()
            self._on_fact(fact)

    def _on_lost(self, statuses: dict[int, int]) -> None:
        """The keeper was killed, and the zygote has ended the tree in its place."""
        if self.pid is None:
            return  # It may have run or not. What is left of it is told next, and then it is an error.
        code: int | None = None
        number: int | None = None
        if self.pid in statuses:
            result = os.waitstatus_to_exitcode(statuses[self.pid])
            code, number = (result, None) if result >= 0 else (None, -result)
        self._on_exited(Exited(code, number, time.monotonic()))

    def _on_gone(self, survivors: tuple[Survivor, ...]) -> None:
        if self.pid is None:
            left = ", ".join(str(survivor.pid) for survivor in survivors)
            hint = (
                f"these could not be ended: {left}" if survivors else "nothing of it is left; look before you try again"
            )
            self._fail(MachineError("the keeper died while it started the command, which may have run", hint=hint))
            return
        self._hang_up()
        self._on_fact(TreeEnded(survivors, time.monotonic()))

    def _on_silence(self) -> None:
        """The socket ended without a report: keeper and zygote are both dead, which is the limit of what we promise."""
        if self.pid is None:
            hint = "look before you try again"
            self._fail(MachineError("the zygote died while it started the command, which may have run", hint=hint))
            return
        self._on_exited(Exited(None, None, time.monotonic()))
        self._on_gone((Survivor(self.pid, "", "unknown: both of its guards were killed"),))

    # -- what is done ------------------------------------------------------------------------------------------------
    def term(self, seconds: float) -> None:
        self._tell(messages.TERM, seconds)

    def term_rest(self, seconds: float) -> None:
        self._tell(messages.REST, seconds)

    def kill(self) -> None:
        self._tell(messages.KILL)

    def kill_keeper(self) -> None:
        if self._zygote is not None and self._keeper is not None:
            self._zygote.wake()
            with contextlib.suppress(OSError):
                self._zygote.request(messages.encode(messages.KILL_KEEPER, self._keeper))

    def signal(self, number: int, *, to_group: bool) -> None:
        self._tell(messages.SIGNAL, number, to_group)

    def renew(self, seconds: float | None) -> None:
        """The keeper acts alone if it hears nothing for so long; None: it trusts the host to be there."""
        self._tell(messages.RENEW, seconds)

    def hurry(self, term_at: float, kill_at: float) -> None:
        """We end it by these times (`time.monotonic()`); if we do not, the keeper does."""
        self._tell(messages.HURRY, term_at, kill_at)

    def note_time(self) -> None:
        """Something begins now that `sweep` may be asked about later."""
        self._started_since.note()

    def sweep(self, since: float, *, ends: bool) -> None:
        """End what was born in its tree since then (`loop.time()`), or with `ends` False only look for it. The child
        itself is left alone, and so is what it had started before.

        One `SweepEnded` follows, from the loop, in a bounded time; none if the whole tree ends before.
        """
        assert self.pid is not None
        if self._control is not None:
            mark = self._started_since.since(since)
            self._tell(messages.SWEEP, self._sweeps.begin(), mark.tick, mark.pid, ends)

    def _tell(self, *message: Any) -> None:
        if self._control is not None:
            # A keeper that takes nothing more is dead (its socket's end follows) or stopped (the ladder's last rung).
            with contextlib.suppress(OSError):
                syscalls.send(self._control, messages.encode(*message))

    def read_now(self) -> None:
        if self._streams is not None:
            self._streams.read_now()

    def widen_stdout(self) -> None:
        if self._streams is not None:
            self._streams.widen_stdout()

    def resize(self, size: Size) -> None:
        if self._streams is not None:
            self._streams.resize(size)

    def pause_reading(self, stream: Stream | None = None) -> None:
        if self._streams is not None:
            self._streams.pause(stream)

    def resume_reading(self, stream: Stream | None = None) -> None:
        if self._streams is not None:
            self._streams.resume(stream)

    # -- the end -----------------------------------------------------------------------------------------------------
    def close_output(self) -> None:
        if self._streams is not None:
            self._streams.close_output()

    def close(self) -> None:
        """Give up every fd. A keeper that still has a tree ends it: closing the socket is a stop."""
        if self._is_over:
            return
        self._is_over = True
        self._cancel_start_timer()
        with spawner.fork_lock:
            self._stop_waiting()
            self._hang_up()
            if self._streams is not None:
                self._streams.close()
            self._close_theirs()

    def let_go(self) -> None:
        """From any thread: tell the keeper that nobody will tell it anything more. What it reports is still heard."""
        control = self._control
        if control is not None:
            with contextlib.suppress(OSError):
                control.shutdown(_socket.SHUT_WR)

    def abandon(self) -> None:
        """The loop is closed, and nothing can be heard any more. Closing the socket is a stop: the keeper ends it."""
        zygote = self._zygote
        self.forget()
        spawner.release(self, zygote)

    def forget(self) -> None:
        """Close every fd without touching the loop. In a forked child these are copies; the keeper notices nothing."""
        self._is_over = True
        self._zygote = None
        if self._streams is not None:
            self._streams.forget()
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._busy_fd >= 0:
            syscalls.close(self._busy_fd)
            self._busy_fd = -1
        self._close_theirs()

    def __del__(self) -> None:
        # Dropped together with a closed loop. The fds close themselves; the zygote must not count us for ever.
        if self._zygote is not None:
            spawner.drop(self._zygote)

    def _hang_up(self) -> None:
        self._sweeps.drop()
        if self._control is not None:
            self._loop.remove_reader(self._control.fileno())
            self._control.close()
            self._control = None
        spawner.release(self, self._zygote)
        self._zygote = None

    def _cancel_start_timer(self) -> None:
        if self._start_timer is not None:
            self._start_timer.cancel()
            self._start_timer = None

    def _close_theirs(self) -> None:
        while self._theirs:
            syscalls.close(self._theirs.pop())


def _write_order(data: bytes) -> int:
    """The order in a memory file: whole whatever its size, where a message on a socket would be refused as too long."""
    fd = syscalls.above_stdio(syscalls.memfd_create("banksman-order"))
    try:
        written = 0
        while written < len(data):
            written += syscalls.write(fd, data[written:] if written else data)
    except OSError:
        syscalls.close(fd)
        raise
    return fd


def start_error(step: str, number: int) -> BanksmanError:
    """What the keeper could not do, by who must act."""
    text = os.strerror(number)
    if step == "exec" and number in (errno.ENOEXEC, errno.EACCES, errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
        hint = "a script needs an interpreter that exists in its first line (#!), a binary must fit this machine"
        return ProgramNotExecutable(f"cannot run the program: {text}", hint=hint)
    if number == errno.E2BIG:
        return UsageError("argv and env together are larger than the kernel takes", hint="pass what is long by stdin")
    if step == "limits":
        return UsageError(f"cannot set the limits: {text}", hint="a hard limit can be raised by root only")
    if step == "cwd":
        hint = "cwd must be a folder that we may enter, and the `user`, if there is one"
        return UsageError(f"cannot start in that folder: {text}", hint=hint)
    if step == "lease":
        hint = "another host goes on with it; is this one overloaded, or was it stopped?"
        return NotOwner("the host's lease had run out when the command was to be started", hint=hint)
    if step == "user":
        return UsageError(f"cannot become that user: {text}", hint="it takes the right to change user and groups")
    return no_room(step, OSError(number, text))
