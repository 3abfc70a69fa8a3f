"""Host side of a child: the start, its streams, and the control socket to its keeper.

The keeper is the parent process of the child (`keeper/keeper.py`), and the zygote forks it.
`Process` owns the control socket, the streams and a use of the zygote. It takes no decisions about
a stop: it reports events as facts to `on_fact`, and its methods carry out orders. Nothing here
awaits, so a cancelled task cannot leave an operation half done. `Process` never signals a pid.
Every signal is a request to the keeper, because only the keeper knows whether that pid is still the
child.
"""

from __future__ import annotations

import _socket
import asyncio
import contextlib
import errno
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
from banksman.errors import BanksmanError, MachineError, no_room
from banksman.process import syscalls
from banksman.process.keeper import messages
from banksman.process.launch import PIPES, Launch, Source, Target
from banksman.process.lease_page import LeasePage
from banksman.process.pipes import PipeWriter
from banksman.process.spawn_request import SpawnRequest
from banksman.process.start_errors import start_error
from banksman.process.stdio import ChildStreams, Size
from banksman.process.sweep_requests import OpenSweeps, StartedSince
from banksman.process.zygote_client import ZygoteHandle, socketpair, spawner

# A zygote that does not answer within this time is stopped or hung. Five hundred starts at the same
# time take about one second.
START_SECONDS_MAX = 30.0


class Process:
    """One child, from the request to the report that its tree is gone."""

    _zygote: ZygoteHandle | None = None

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
    ) -> None:
        """Request the child; the fact `Started` or `StartFailed` follows.

        Raises, with nothing left open, if the request cannot be sent.

        `deadline`: seconds after which the keeper acts without an order; see `renew`. `terminal`:
        its size; the child gets a terminal instead of pipes. `lease`: page with the times by which
        the tree must end, unless the host renews them. `outputs`: targets of stdout and stderr.
        """
        self.pid: int | None = None
        # The parent process of the child, known with its pid.
        self.keeper_pid: int | None = None
        self.grace = grace
        self.stdin: PipeWriter | None = None
        self._loop = asyncio.get_running_loop()
        self._on_fact = on_fact
        self._has_exited = False
        self._is_over = False
        self._control: _socket.socket | None = None
        self._streams: ChildStreams | None = None
        # For the error of a failed start.
        self._cwd = launch.cwd
        self._uid = None if launch.user is None else launch.user[0]
        self._request = SpawnRequest(self._loop, launch.inherited.fingerprint, grace)
        self._start_timer: asyncio.TimerHandle | None = None
        self._started_since = StartedSince()
        self._sweeps = OpenSweeps(self._loop, self.hear_now, on_fact)
        spawner.know(self)
        try:
            # Why under this lock: see `SpawnRequest`.
            with spawner.fork_lock:
                streams = self._streams = ChildStreams(stdin, on_fact, terminal, outputs)
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
        # Reading begins only now: before this point no other process has the other ends.
        self._loop.add_reader(self._control.fileno(), self.hear_now)
        self.resume_reading()

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

    # -- messages of the keeper -------------------------------------------------------------------
    def hear_now(self) -> None:
        """Read the messages that the keeper has sent.

        Callers that must know them before a decision call this too.
        """
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
                self.pid, self.keeper_pid = pid, keeper
                self._cancel_start_timer()
                self._on_fact(Started(pid, at))
            case (messages.FAILED, "stopped", _):
                self.close()
                self._on_fact(NeverStarted(time.monotonic()))
            case (messages.FAILED, step, number):
                self._fail(start_error(step, number, cwd=self._cwd, uid=self._uid))
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
        """Report the exit of the leader, once."""
        # A second report is possible: the keeper reports the exit and is killed, and then the
        # zygote reports the end.
        if not self._has_exited:
            self._has_exited = True
            # Data that the child wrote before its exit is reported before the exit. The state
            # machine needs that order to decide whether the child was idle.
            self.read_now()
            self._on_fact(fact)

    def _on_lost(self, statuses: dict[int, int]) -> None:
        """Report the exit after the zygote has ended the tree of a killed keeper."""
        if self.pid is None:
            # Whether the child has run is unknown. GONE follows with the survivors, and becomes an
            # error.
            return
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
                f"end these processes, which Banksman could not end: {left}"
                if survivors
                else "check what it did before you try again; none of its processes is left"
            )
            reason = "its keeper died during the start; the command may have run"
            self._fail(MachineError(f"cannot start the command: {reason}", hint=hint))
            return
        self._hang_up()
        self._on_fact(TreeEnded(survivors, time.monotonic()))

    def _on_silence(self) -> None:
        """Report the loss of both the keeper and the zygote: the socket ended without a report.

        This is the limit of the promise that a tree is ended. The tree may still run.
        """
        if self.pid is None:
            hint = "check what it did before you try again"
            reason = "the zygote died during the start; the command may have run"
            self._fail(MachineError(f"cannot start the command: {reason}", hint=hint))
            return
        self._on_exited(Exited(None, None, time.monotonic()))
        why = "unknown: its keeper and the zygote were killed"
        self._on_gone((Survivor(self.pid, "", why),))

    # -- orders to the keeper ---------------------------------------------------------------------
    def term(self, seconds: float) -> None:
        """Order TERM to the leader's group.

        The keeper takes the next rung after `seconds` without an order.
        """
        self._tell(messages.TERM, seconds)

    def term_rest(self, seconds: float) -> None:
        """Order TERM to the rest of the tree.

        The keeper takes the next rung after `seconds` without an order.
        """
        self._tell(messages.REST, seconds)

    def kill(self) -> None:
        """Order the keeper to freeze and kill the whole tree."""
        self._tell(messages.KILL)

    def kill_keeper(self) -> None:
        """Have the zygote kill a keeper that does not answer, and end its tree."""
        if self._zygote is not None and self.keeper_pid is not None:
            # A stopped zygote would not read the request.
            self._zygote.wake()
            with contextlib.suppress(OSError):
                self._zygote.request(messages.encode(messages.KILL_KEEPER, self.keeper_pid))

    def signal(self, number: int, *, to_group: bool) -> None:
        """Order a signal to the child, or to its group."""
        self._tell(messages.SIGNAL, number, to_group)

    def renew(self, seconds: float | None) -> None:
        """Set the time of silence after which the keeper acts alone.

        `seconds`: None: the keeper trusts the host to be alive.
        """
        self._tell(messages.RENEW, seconds)

    def hurry(self, term_at: float, kill_at: float) -> None:
        """Announce that the host ends the tree by these times (`time.monotonic()`).

        Otherwise the keeper does it.
        """
        self._tell(messages.HURRY, term_at, kill_at)

    def note_time(self) -> None:
        """Note the current moment, so that a later `sweep` can refer to it."""
        self._started_since.note()

    def sweep(self, since: float, *, ends: bool) -> None:
        """End the processes of the tree that started since then (`loop.time()`).

        The child and everything that it had started before are spared. `ends`: False only lists the
        processes.

        One `SweepEnded` follows, from the loop, within a bounded time; none if the whole tree ends
        before.
        """
        assert self.pid is not None
        if self._control is not None:
            mark = self._started_since.since(since)
            self._tell(messages.SWEEP, self._sweeps.begin(), mark.tick, mark.pid, ends)

    def _tell(self, *message: Any) -> None:
        if self._control is not None:
            # A keeper that takes no message is dead (the end of its socket follows) or stopped (the
            # last rung of the ladder handles that).
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

    # -- end --------------------------------------------------------------------------------------
    def close_output(self) -> None:
        if self._streams is not None:
            self._streams.close_output()

    def close(self) -> None:
        """Close every fd. A keeper that still has a tree ends it: closing the socket is a stop."""
        if self._is_over:
            return
        self._is_over = True
        self._cancel_start_timer()
        with spawner.fork_lock:
            self._hang_up()
            if self._streams is not None:
                self._streams.close()
            self._request.close()

    def let_go(self) -> None:
        """Tell the keeper, from any thread, that no further order follows.

        Its reports are still read.
        """
        control = self._control
        if control is not None:
            with contextlib.suppress(OSError):
                # Only the sending side: the keeper sees the end of the stream and ends its tree,
                # and can still report.
                control.shutdown(_socket.SHUT_WR)

    def abandon(self) -> None:
        """Give up the child after its loop was closed and no event can arrive.

        Closing the socket is a stop, so the keeper ends the tree.
        """
        zygote = self._zygote
        self.forget()
        spawner.release(self, zygote)

    def forget(self) -> None:
        """Close every fd without touching the loop.

        In a forked child of the program these fds are copies, and the keeper notices nothing.
        """
        self._is_over = True
        self._zygote = None
        if self._streams is not None:
            self._streams.forget()
        if self._control is not None:
            self._control.close()
            self._control = None
        self._request.forget()

    def __del__(self) -> None:
        # The object was collected together with a closed loop. The fds close with their objects,
        # but the zygote must not count this use forever.
        if self._zygote is not None:
            spawner.drop(self._zygote)

    def _hang_up(self) -> None:
        """Close the control socket and release the zygote."""
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
