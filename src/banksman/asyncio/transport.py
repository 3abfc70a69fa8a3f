"""Subprocess transport on a command: its pipes belong to asyncio, its process tree to the keeper.

asyncio's stream classes (`SubprocessStreamProtocol`, `Process`) work on any `SubprocessTransport`.
This one starts the child as a command of the loop's default host. The host's side of each pipe is
a pipe transport of the loop. So buffers, flow control and the ends of the streams behave as in
asyncio. The command has no captured output. Its ladder, its sweep and its end at the end of the
loop are those of every command.

Order of a start: the pipes are connected before the child starts. So no data can arrive before the
protocol knows its transport.

Order of an end: the exit of the leader sets the returncode. `_wait` returns when the whole tree is
gone. Neither depends on the pipes, which may hold unread data after the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal as signals
from typing import Any, cast

from banksman.commands.command import Command
from banksman.commands.options import Options
from banksman.commands.result import Ended, Finished
from banksman.core.process_facts import Exited, ProcessFact
from banksman.errors import Closed
from banksman.process import syscalls
from banksman.process.launch import Launch
from banksman.process.stdio import open_pipe
from banksman.runtime.execute import default_host

# The returncode that asyncio reports for a child whose exit status is unknown.
UNKNOWN_RETURNCODE = 255
SIGNAL_MAX = 64


class CommandTransport(asyncio.SubprocessTransport):
    """Transport of one child. All methods belong to the event loop of its creation."""

    def __init__(self, protocol: asyncio.SubprocessProtocol) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._protocol = protocol
        self._pipes: dict[int, PipeProtocol] = {}
        self._command: Command | None = None
        self._returncode: int | None = None
        self._is_closing = False
        self._is_finished = False

    def __repr__(self) -> str:
        state = "running" if self._returncode is None else f"returncode={self._returncode}"
        return f"<{type(self).__name__} pid={self.get_pid()} {state}>"

    # -- start ------------------------------------------------------------------------------------
    async def open_pipe(self, number: int, size: int, theirs: contextlib.ExitStack) -> int:
        """Open the pipe of a standard stream, and return the child's end.

        `size`: its capacity in bytes; 0 or less: the default. `theirs`: closes the child's end.
        """
        read_end, write_end = open_pipe()
        ours, child_end = (write_end, read_end) if number == 0 else (read_end, write_end)
        theirs.callback(os.close, child_end)
        file = os.fdopen(ours, "wb" if number == 0 else "rb", buffering=0)
        connect = self._loop.connect_write_pipe if number == 0 else self._loop.connect_read_pipe
        try:
            if size > 0:
                syscalls.set_pipe_size(ours, size)
            _transport, protocol = await connect(lambda: PipeProtocol(self, number), file)
        except BaseException:
            file.close()
            raise
        self._pipes[number] = protocol
        return child_end

    def start(self, launch: Launch, options: Options) -> None:
        """Start the child. `wait_started` waits for it."""
        self._protocol.connection_made(self)
        self._command = default_host().launch(
            launch, options, on_fact=self._on_fact, on_end=self._on_end
        )

    async def wait_started(self) -> None:
        """Wait until the child runs. Raises if it cannot be started."""
        await self.command.wait_started()
        if self.command.pid is None:
            raise Closed("cannot start a command: the host is closing")

    @property
    def command(self) -> Command:
        assert self._command is not None
        return self._command

    # -- events -----------------------------------------------------------------------------------
    def _on_fact(self, fact: ProcessFact) -> None:
        if isinstance(fact, Exited):
            self._set_returncode(fact.code, fact.signal)

    def _on_end(self, command: Command) -> None:
        finished = command.finished
        if finished is None:
            return  # The start failed, and `wait_started` reports the error.
        if self._returncode is None:
            self._set_returncode(finished.code, finished.signal)
        if finished.ended is Ended.HOST_CLOSED:
            # The loop ends. A paused pipe would never see the end of its stream.
            self.close()

    def _set_returncode(self, code: int | None, signal: int | None) -> None:
        if code is None:
            code = UNKNOWN_RETURNCODE if signal is None else -signal
        self._returncode = code
        # Not now: the command must finish this fact before a protocol acts on it.
        self._loop.call_soon(self._tell_exit)

    def _tell_exit(self) -> None:
        self._protocol.process_exited()
        self._finish_if_over()

    def on_pipe_data(self, number: int, data: bytes) -> None:
        self._protocol.pipe_data_received(number, data)

    def on_pipe_lost(self, number: int, error: Exception | None) -> None:
        self._protocol.pipe_connection_lost(number, error)
        self._finish_if_over()

    def on_pause_writing(self) -> None:
        self._protocol.pause_writing()

    def on_resume_writing(self) -> None:
        self._protocol.resume_writing()

    def _finish_if_over(self) -> None:
        """Tell the protocol once that the child has exited and all pipes are closed."""
        is_over = self._returncode is not None and all(
            pipe.is_disconnected for pipe in self._pipes.values()
        )
        if is_over and not self._is_finished:
            self._is_finished = True
            self._protocol.connection_lost(None)

    # -- asyncio.SubprocessTransport --------------------------------------------------------------
    def get_pid(self) -> int:
        # 0 before the start, when no caller has this transport.
        return 0 if self._command is None else self._command.pid or 0

    def get_returncode(self) -> int | None:
        return self._returncode

    def get_pipe_transport(self, fd: int) -> asyncio.BaseTransport | None:
        pipe = self._pipes.get(fd)
        return None if pipe is None else pipe.transport

    def send_signal(self, signal: int) -> None:
        """Send a signal to the leader. KILL goes to the whole tree.

        Raises `ProcessLookupError` if the tree is gone.
        """
        if self.command.is_over:
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        if not 0 <= signal <= SIGNAL_MAX:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if signal == signals.SIGKILL:
            self.command.stop_nowait(at_once=True)
        elif signal:  # Signal 0 only asks whether the process exists.
            self.command.signal_nowait(int(signal))

    def terminate(self) -> None:
        """Send TERM to the leader. When it exits, the rest of the tree is swept."""
        self.send_signal(signals.SIGTERM)

    def kill(self) -> None:
        """Kill the whole tree."""
        self.send_signal(signals.SIGKILL)

    def is_closing(self) -> bool:
        return self._is_closing

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = cast(asyncio.SubprocessProtocol, protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def close(self) -> None:
        """Close the pipes, and kill the tree if its leader still runs."""
        if self._is_closing:
            return
        self._is_closing = True
        for pipe in self._pipes.values():
            pipe.transport.close()
        if self._command is not None and self._returncode is None:
            self._command.stop_nowait(Ended.CANCELLED, at_once=True)

    # -- end --------------------------------------------------------------------------------------
    async def _wait(self) -> int:
        """Wait until no process of the tree is left, for `asyncio.subprocess.Process.wait`."""
        await self.wait_finished()
        assert self._returncode is not None
        return self._returncode

    async def wait_finished(self) -> Finished:
        """Wait until no process of the tree is left, and return the result."""
        await self.command.wait_settled()
        return self.command.result()


class PipeProtocol(asyncio.Protocol):
    """Protocol of one pipe: passes its events on to the transport of the child."""

    transport: Any

    def __init__(self, owner: CommandTransport, number: int) -> None:
        self.is_disconnected = False
        self._owner = owner
        self._number = number

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_disconnected = True
        self._owner.on_pipe_lost(self._number, exc)

    def data_received(self, data: bytes) -> None:
        self._owner.on_pipe_data(self._number, data)

    def pause_writing(self) -> None:
        self._owner.on_pause_writing()

    def resume_writing(self) -> None:
        self._owner.on_resume_writing()
