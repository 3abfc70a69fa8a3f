"""The blocking face: the same host, sessions, turns and commands for programs that have threads and no loop.

Nothing is implemented here. Each name has the async one behind it, in a loop that runs in a thread of its own (see
`loop_thread.py`), and a call waits until that one has come to its end. What holds there holds here, with these words:

Any thread may call, at any time. Ctrl-C in the main thread, and the end of a `timeout`, are what cancellation is to the
async one: `ask` withdraws, most others only stop waiting. Callbacks (`on_question`, `on_output`) run in the loop's
thread, where a call that waits would wait for itself, and raises `UsageError`; what never waits may be called there.

After `Host.close` calls raise `Closed`, but what was learned can still be read: an outcome, a status, the end of a
command. Whatever did not raise was done. A fork of the program cannot use a host that was made before it.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar, Unpack, cast, overload

from banksman.commands.command import Command as AsyncCommand
from banksman.commands.registry import How
from banksman.commands.result import Ended, Finished
from banksman.commands.running_command import State
from banksman.core.session.ask_queue import NORMAL
from banksman.core.session.event import Event
from banksman.core.session.outcome import Outcome, Receipt
from banksman.errors import UsageError
from banksman.process.launch import Argv
from banksman.runtime.base_host import Host as AsyncHost
from banksman.runtime.blocking import Face, Holding, OutputReader, Reader, blocking, blocking_as, looking
from banksman.runtime.execute import execute as async_execute
from banksman.runtime.loop_thread import CallPolicy, LoopThread, ThreadPhase, close_all, is_in_a_loop_thread
from banksman.sessions.questions import OnQuestion
from banksman.sessions.session import Prompt
from banksman.sessions.session import Session as AsyncSession
from banksman.sessions.turn import Turn as AsyncTurn

P = ParamSpec("P")
R = TypeVar("R")


class Turn(Face[AsyncTurn]):
    """An ask that was accepted: `for update in turn` gives its updates, `turn.outcome()` its outcome."""

    @property
    def id(self) -> str:
        return self._inner.id

    @property
    def session(self) -> Session:
        return Session(self._bridge, cast(AsyncSession, self._inner.session))

    @property
    def state(self) -> str:
        """queued, starting, running, interrupting or ended."""
        return self._bridge.look(lambda: self._inner.state)

    def outcome(self, *, timeout: float | None = None) -> Outcome:
        """How it ended; never raises for an ending. Past `timeout` seconds: TimeoutError, and the turn goes on."""
        return self._bridge.call(self._inner.outcome, CallPolicy.READS, timeout=timeout)

    def __iter__(self) -> Reader[dict[str, Any]]:
        return Reader(self._bridge, self._inner.__aiter__())

    interrupt = blocking(AsyncTurn.interrupt)
    said = blocking(AsyncTurn.said, CallPolicy.READS)


class Session(Face[AsyncSession]):
    """One conversation with one agent. Made by `Host.open`."""

    @property
    def id(self) -> str:
        return self._inner.id

    @property
    def name(self) -> str | None:
        return self._inner.name

    @property
    def agent(self) -> str:
        return self._inner.agent

    @property
    def is_closed(self) -> bool:
        return self._inner.is_closed

    def ask(
        self,
        prompt: Prompt,
        *,
        priority: int | str = NORMAL,
        on_busy: str = "enqueue",
        on_preempt: str = "end",
        key: str | None = None,
        schema: Mapping[str, Any] | None = None,
        rules: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Turn:
        """Ask for one turn. Returns when it is accepted, which is when the log has it; raises if it is not.

        If it is not accepted within `timeout` seconds, or Ctrl-C comes, the ask is withdrawn.
        """
        work = functools.partial(
            self._inner.ask,
            prompt,
            priority=priority,
            on_busy=on_busy,
            on_preempt=on_preempt,
            key=key,
            schema=schema,
            rules=rules,
        )
        return Turn(self._bridge, self._bridge.call(work, timeout=timeout, undo=self._inner.let_go))

    def ask_and_wait(
        self,
        prompt: Prompt,
        *,
        priority: int | str = NORMAL,
        on_busy: str = "enqueue",
        on_preempt: str = "end",
        key: str | None = None,
        schema: Mapping[str, Any] | None = None,
        rules: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Outcome:
        """Ask for one turn, and wait for its outcome.

        If it has none within `timeout` seconds (TimeoutError), or Ctrl-C comes, it is withdrawn: interrupted, if it
        runs. This is not waited for.
        """

        async def work() -> Outcome:
            turn = await self._inner.ask(
                prompt,
                priority=priority,
                on_busy=on_busy,
                on_preempt=on_preempt,
                key=key,
                schema=schema,
                rules=rules,
            )
            try:
                return await turn.outcome()
            except asyncio.CancelledError:
                self._inner.let_go(turn)
                raise

        return self._bridge.call(work, timeout=timeout)

    def interrupt(self, turn: Turn | str | None = None) -> Receipt:
        """Stop a turn, by default the one that is running now. On an idle session: a receipt that says so."""
        return self._bridge.call(functools.partial(self._inner.interrupt, _behind(turn)))

    def move(self, turn: Turn | str, *, before: Turn | str | None = None) -> None:
        """Put a queued ask before another of its class, or to the head of its class. Else nothing happens."""
        work = functools.partial(self._inner.move, _behind(turn), before=_behind(before))
        self._bridge.look(work, CallPolicy.ACTS)

    def reorder(self, turn: Turn | str, *, before: Turn | str | None = None) -> None:
        """The same, for who must know that it was done: `Refused` or `UsageError` if it cannot be."""
        self._bridge.call(functools.partial(self._inner.reorder, _behind(turn), before=_behind(before)))

    def withdraw(self, turn: Turn | str) -> None:
        """Take a queued ask back; one that runs is interrupted."""
        self._bridge.look(functools.partial(self._inner.withdraw, _behind(turn)), CallPolicy.ACTS)

    def hold(self, priority: int | str = NORMAL) -> AbstractContextManager[None]:
        """Several asks of this thread in a row, with nobody of this class or below between them. May be re-entered."""
        return Holding(self._bridge, self._inner.hold(priority))

    def follow(self, after: str | int | None = None) -> Reader[Event]:
        """Every event of the log after a cursor, then each as it is committed, until the session is closed."""
        return Reader(self._bridge, self._inner.follow(after))

    questions = looking(AsyncSession.questions)
    open_questions = blocking(AsyncSession.open_questions, CallPolicy.READS)
    answer = blocking(AsyncSession.answer)
    set_model = blocking(AsyncSession.set_model)
    set_permission_mode = blocking(AsyncSession.set_permission_mode)

    def turn(self, id: str) -> Turn:
        """A turn by its id, whoever asked for it and wherever it is."""
        work = functools.partial(self._inner.turn, id)
        return Turn(self._bridge, self._bridge.call(work, CallPolicy.READS))

    status = looking(AsyncSession.status)
    look = blocking(AsyncSession.look, CallPolicy.READS)
    head = blocking(AsyncSession.head, CallPolicy.READS)
    page = blocking(AsyncSession.page, CallPolicy.READS)
    last_frames = blocking(AsyncSession.last_frames, CallPolicy.READS)
    page_before = blocking(AsyncSession.page_before, CallPolicy.READS)
    rename = blocking(AsyncSession.rename)
    close = blocking(AsyncSession.close)
    close_nowait = looking(AsyncSession.close_nowait, CallPolicy.ACTS)
    leave = blocking(AsyncSession.leave)
    wait_closed = blocking(AsyncSession.wait_closed, CallPolicy.READS)


class Command(Face[AsyncCommand]):
    """A command that was started. Made by `Host.start`."""

    @property
    def id(self) -> str:
        return self._inner.id

    @property
    def argv(self) -> tuple[str, ...]:
        return self._inner.argv

    @property
    def pid(self) -> int | None:
        return self._inner.pid

    @property
    def finished(self) -> Finished | None:
        return self._inner.finished

    @property
    def is_over(self) -> bool:
        return self._inner.is_over

    @property
    def state(self) -> State:
        return self._bridge.look(lambda: self._inner.state)

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

    @property
    def stdout(self) -> OutputReader:
        """Its stdout, to be read at the caller's pace: `for line in command.stdout`. The first read begins at the first
        byte; from then on the command waits while its output is not read, and nothing is lost."""
        return OutputReader(self._bridge, self._inner.stdout)

    @property
    def stderr(self) -> OutputReader:
        """Its stderr, in the same way."""
        return OutputReader(self._bridge, self._inner.stderr)

    result = looking(AsyncCommand.result)
    stop_nowait = looking(AsyncCommand.stop_nowait, CallPolicy.ACTS)
    signal = blocking(AsyncCommand.signal)
    read = blocking(AsyncCommand.read, CallPolicy.READS)
    watch = blocking(AsyncCommand.watch, CallPolicy.READS)
    write = blocking(AsyncCommand.write)
    close_stdin = blocking(AsyncCommand.close_stdin)
    resize = blocking(AsyncCommand.resize)


def _close_unused(session: AsyncSession) -> None:
    """Whoever opened it has gone before it had it. One that was open already is somebody else's, too."""
    if session.openings == 1 and not session.status().queue:
        session.close_nowait()


class Host(Face[AsyncHost]):
    """Owns sessions and commands, in a loop of its own. `with Host() as host`, or call `close()`.

    Not closed, it is closed when the program ends, after all its threads have ended.
    """

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

    def finish(self, *, timeout: float | None = None) -> None:
        """Take nothing new and finish what runs; what was said can still be read."""
        self._bridge.call(functools.partial(self._inner.finish, timeout=timeout), CallPolicy.FOLLOWS)

    # -- sessions ----------------------------------------------------------------------------------------------------
    def session(self, id_or_name: str) -> Session:
        """Any session of the store, by its id or its name. The first ask claims it."""
        return Session(self._bridge, self._bridge.look(functools.partial(self._inner.session, id_or_name)))

    def sessions(self, after: str | None = None, *, limit: int | None = None) -> list[Session]:
        """Every session of the store, whoever has it, oldest first; or so many after the one of this id."""
        look = functools.partial(self._inner.sessions, after, limit=limit)
        return [Session(self._bridge, found) for found in self._bridge.look(look)]

    open = blocking_as(Session, AsyncHost.open, undo=_close_unused)

    def fork(
        self, session: Session | str, *, name: str | None = None, on_question: OnQuestion | None = None
    ) -> Session:
        """Another session that begins as a copy of this one's conversation, opened as this one was."""
        id = session if isinstance(session, str) else session.id
        work = functools.partial(self._inner.fork, id, name=name, on_question=on_question)
        return Session(self._bridge, self._bridge.call(work, undo=_close_unused))

    def delete(self, session: Session | str) -> None:
        """Forget a session for good, with all its history; one that is open here is closed first."""
        id = session if isinstance(session, str) else session.id
        self._bridge.call(functools.partial(self._inner.delete, id))

    read_many = blocking(AsyncHost.read_many, CallPolicy.READS)
    take_up = blocking(AsyncHost.take_up)

    # -- commands ----------------------------------------------------------------------------------------------------
    @overload
    def start(self, argv: Argv, *, yield_after: None = None, **how: Unpack[How]) -> Command: ...
    @overload
    def start(self, argv: Argv, *, yield_after: float, **how: Unpack[How]) -> Command | Finished: ...
    def start(self, argv: Argv, *, yield_after: float | None = None, **how: Unpack[How]) -> Command | Finished:
        """Start a command in the background and return it once it runs. It lives until it ends, is stopped, or the host
        closes.

        With `yield_after`, wait that many seconds first: if it ends within them, its result is returned instead. If
        Ctrl-C comes meanwhile, the command is stopped: nobody has it yet.
        """

        async def work() -> AsyncCommand | Finished:
            if yield_after is None:
                return await self._inner.start(argv, **how)
            return await self._inner.start(argv, yield_after=yield_after, **how)

        started = self._bridge.call(work, undo=_stop_untaken)
        return started if isinstance(started, Finished) else Command(self._bridge, started)

    def commands(self) -> list[Command]:
        """Every command that runs, and those that have ended and are still kept, oldest first."""
        return self._commands(self._bridge.look(self._inner.commands))

    def command(self, id: str) -> Command:
        return Command(self._bridge, self._bridge.look(functools.partial(self._inner.command, id)))

    def take_ended(self) -> list[Command]:
        """The background commands that have ended and were not reported before: each is reported once."""

        async def work() -> list[AsyncCommand]:
            return [*self._take_returned(), *self._inner.take_ended()]

        return self._commands(self._bridge.call(work, CallPolicy.READS, undo=self._returned.extend))

    def wait_ended(self, *, timeout: float | None = None) -> list[Command]:
        """Like `take_ended`, but waits until there is one. Past `timeout` seconds: TimeoutError."""

        async def work() -> list[AsyncCommand]:
            return self._take_returned() or await self._inner.wait_ended()

        return self._commands(self._bridge.call(work, CallPolicy.WAITS, timeout=timeout, undo=self._returned.extend))

    def _take_returned(self) -> list[AsyncCommand]:
        returned = list(self._returned)
        self._returned.clear()
        return returned

    def _commands(self, found: list[AsyncCommand]) -> list[Command]:
        return [Command(self._bridge, each) for each in found]


@overload
def _behind(turn: Turn | str) -> AsyncTurn | str: ...
@overload
def _behind(turn: Turn | str | None) -> AsyncTurn | str | None: ...
def _behind(turn: Turn | str | None) -> AsyncTurn | str | None:
    return turn._inner if isinstance(turn, Turn) else turn  # pyright: ignore[reportPrivateUsage]


def _stop_untaken(started: AsyncCommand | Finished) -> None:
    if isinstance(started, AsyncCommand):
        started.stop_nowait(Ended.CANCELLED)


def _blocking_function(function: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, R]:
    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_in_a_loop_thread():
            hint = "an async callback can await banksman.execute"
            raise UsageError("a blocking call in a host's loop would stop all that this host does", hint=hint)
        # A loop for this one call: it is cheap beside a process, nothing of it is left, and a fork can have its own.
        bridge = LoopThread("banksman-execute")
        try:
            return bridge.call(functools.partial(function, *args, **kwargs))
        finally:
            bridge.close()

    return call


execute = _blocking_function(async_execute)

# The host of commands that are started without one; made at first use, and closed at exit, as every bridge is.
_default: Host | None = None
# Protects `_default`. Held while a thread is started; nothing else is taken inside it.
_default_lock = threading.Lock()


def _default_host() -> Host:
    global _default  # noqa: PLW0603
    if is_in_a_loop_thread():
        raise UsageError("a blocking call in a host's loop would stop all that this host does", hint="await it there")
    with _default_lock:
        if _default is None or not _default.is_usable:
            inner = AsyncHost(finished_max=0)
            inner.owes_reports = False
            _default = Host(inner)
        return _default


def _renew_lock() -> None:
    """In a forked child: the thread that held it may not be here to release it."""
    global _default_lock  # noqa: PLW0603
    _default_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


@overload
def start(argv: Argv, *, yield_after: None = None, **how: Unpack[How]) -> Command: ...
@overload
def start(argv: Argv, *, yield_after: float, **how: Unpack[How]) -> Command | Finished: ...
def start(argv: Argv, *, yield_after: float | None = None, **how: Unpack[How]) -> Command | Finished:
    """Start a command in the background, without a `Host`: see `Host.start`, which takes the same.

    It lives until it ends or is stopped, or the interpreter exits. `Host.take_ended` knows nothing of it: wait for it.
    """
    if yield_after is None:
        return _default_host().start(argv, **how)
    return _default_host().start(argv, yield_after=yield_after, **how)


# Registered after those of the host and of the spawner, which the imports above have run: it is called before them.
atexit.register(close_all)
