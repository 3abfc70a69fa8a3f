"""The parts of the blocking classes that do more than call the async method and wait for it.

`tools/blocking_api.py` generates the rest: `blocking_session.py`, `blocking_command.py` and `blocking_host.py`.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self

from banksman.commands.command import Command as AsyncCommand
from banksman.commands.result import Ended, Finished
from banksman.core.session.outcome import Outcome
from banksman.host import Host as AsyncHost
from banksman.sessions.session import Session as AsyncSession
from banksman.sessions.turn import Turn as AsyncTurn
from banksman.threads.blocking import Face
from banksman.threads.loop_thread import CallPolicy, LoopThread, ThreadPhase


class BlockingSession(Face[AsyncSession]):
    async def _wait_outcome(self, ask: Callable[[], Coroutine[Any, Any, AsyncTurn]]) -> Outcome:
        """Cancelled, it withdraws the turn."""
        turn = await ask()
        try:
            return await turn.outcome()
        except asyncio.CancelledError:
            self._inner.let_go(turn)
            raise


class BlockingCommand(Face[AsyncCommand]):
    def wait(self, *, timeout: float | None = None) -> Finished:
        """Wait for the end and return the result. Past `timeout` seconds: TimeoutError, and the command runs on. Raises
        if it could not be started.

        This reports the end: `Host.take_ended` does not return the command any more.
        """
        return self._bridge.call(self._wait, CallPolicy.READS, timeout=timeout, undo=self._return_report)[1]

    def stop(self, *, at_once: bool = False) -> Finished:
        """End it by the ladder, or `at_once` by KILL; returns when it is over. This reports the end, as `wait` does."""

        async def work() -> tuple[bool, Finished]:
            self._inner.stop_nowait(at_once=at_once)
            return await self._wait()

        return self._bridge.call(work, undo=self._return_report)[1]

    async def _wait(self) -> tuple[bool, Finished]:
        await self._inner.wait_over()
        return self._inner.take_report(), self._inner.result()

    def _return_report(self, taken: tuple[bool, Finished]) -> None:
        # Ctrl-C came after the end was taken here and before the caller had it.
        if taken[0]:
            self._inner.return_report()


class BlockingHost(Face[AsyncHost]):
    """The life of a host: its thread is started here, and ended by `close`."""

    def __init__(self, inner: AsyncHost) -> None:
        super().__init__(LoopThread("banksman-host", inner.close), inner)
        # Reports whose taker had gone before it had them.
        self._returned: deque[AsyncCommand] = deque()

    def __repr__(self) -> str:
        return f"<blocking Host {self._bridge.phase.value}>"

    @property
    def is_usable(self) -> bool:
        """Whether it belongs to this process, and is not closed or being closed."""
        return self._bridge.is_mine and self._bridge.phase is ThreadPhase.RUNNING

    def __enter__(self) -> Self:
        self._bridge.check_caller()
        if self._inner.settles_at_start:
            try:
                self._bridge.call(self._inner.__aenter__)
            except BaseException:
                self.close()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # In a fork there is nothing of it to be closed, and an error would hide the one that came first.
        if self._bridge.is_mine:
            self.close()

    def close(self) -> None:
        """Close every session, stop every command by the ladder, end the loop's thread. May be called again, and by
        several at once; Ctrl-C only stops the waiting."""
        self._bridge.close()

    def drain(self, *, timeout: float | None = None) -> None:
        """Take nothing new, finish what runs, then close. Past `timeout` seconds what still runs is stopped."""
        self._bridge.call(functools.partial(self._inner.drain, timeout=timeout), CallPolicy.FOLLOWS)
        self.close()

    async def _take_ended(self) -> list[AsyncCommand]:
        return [*self._take_returned(), *self._inner.take_ended()]

    async def _wait_ended(self) -> list[AsyncCommand]:
        return self._take_returned() or await self._inner.wait_ended()

    def _take_returned(self) -> list[AsyncCommand]:
        returned = list(self._returned)
        self._returned.clear()
        return returned

    def _return_reports(self, ended: list[AsyncCommand]) -> None:
        self._returned.extend(ended)


def close_unused(session: AsyncSession) -> None:
    """Its opener has gone before it had the session. One that was open already belongs to another caller, too."""
    if session.openings == 1 and not session.status().queue:
        session.close_nowait()


def stop_untaken(started: AsyncCommand | Finished) -> None:
    """The caller that started it has gone before it had the command."""
    if isinstance(started, AsyncCommand):
        started.stop_nowait(Ended.CANCELLED)
