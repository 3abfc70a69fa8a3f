"""Host side of the start of a child: the request to the zygote, and its answer.

The zygote forks a keeper, the parent process of the child, and the keeper starts the child. The
fact `Started` or `StartFailed` follows. `kept_process.py` has everything after the start.
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
    Survivor,
)
from banksman.errors import BanksmanError, MachineError, no_room
from banksman.process.keeper import messages
from banksman.process.kept_process import KeptProcess
from banksman.process.launch import PIPES, Launch, Source, Target
from banksman.process.lease_page import LeasePage
from banksman.process.spawn_request import SpawnRequest
from banksman.process.start_errors import start_error
from banksman.process.stdio import ChildStreams, Size
from banksman.process.zygote_client import socketpair, spawner

if TYPE_CHECKING:
    import asyncio

# A zygote that does not answer within this time is stopped or hung. Five hundred starts at the same
# time take about one second.
START_SECONDS_MAX = 30.0


class Process(KeptProcess):
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
    ) -> None:
        """Request the child; the fact `Started` or `StartFailed` follows.

        Raises, with nothing left open, if the request cannot be sent.

        `deadline`: seconds after which the keeper acts without an order; see `renew`. `terminal`:
        its size; the child gets a terminal instead of pipes. `lease`: page with the times by which
        the tree must end, unless the host renews them. `outputs`: targets of stdout and stderr.
        """
        super().__init__(grace=grace, on_fact=on_fact)
        # For the error of a failed start.
        self._cwd = launch.cwd
        self._uid = None if launch.user is None else launch.user[0]
        self._request = SpawnRequest(self._loop, launch.inherited.fingerprint, grace)
        self._start_timer: asyncio.TimerHandle | None = None
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
                self._on_fact(Started(pid, at))
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
