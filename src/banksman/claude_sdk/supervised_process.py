"""A Banksman command with the interface of an anyio `Process`.

The SDK's transport reads, writes and waits through this interface, so its own code runs unchanged
on top of it. `open_process` takes the arguments that the SDK passes to `anyio.open_process`.

The process belongs to the default host of the running asyncio loop. The host finishes a stop that
has begun, even if every task that waits for it is cancelled.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from signal import SIGKILL

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream, Process

from banksman.commands.command import Command
from banksman.commands.options import Options, StartOptions, launch_of
from banksman.commands.output_streams import OutputReader
from banksman.commands.result import Ended, Finished
from banksman.errors import BanksmanError, ProgramNotFound
from banksman.process.launch import Launch
from banksman.runtime.execute import default_host

# How long the CLI may take to exit after the end of its input. It writes its transcript then.
EOF_SECONDS = 1.0
OPTIONS = Options(stdin="pipe", eof=EOF_SECONDS, keep_output=False)


class _Input(ByteSendStream):
    """Stdin of a command."""

    def __init__(self, command: Command) -> None:
        self._command = command

    async def send(self, item: bytes) -> None:
        try:
            await self._command.write(item)
        except BanksmanError as exc:
            raise anyio.BrokenResourceError(str(exc)) from exc

    async def aclose(self) -> None:
        await self._command.close_stdin()


class _Output(ByteReceiveStream):
    """Stdout or stderr of a command."""

    def __init__(self, reader: OutputReader) -> None:
        self._reader = reader

    async def receive(self, max_bytes: int = 65536) -> bytes:
        data = await self._reader.read(max_bytes)
        if not data:
            raise anyio.EndOfStream
        return data

    async def aclose(self) -> None:
        """Do nothing: the command reads its pipes until its end, so that it cannot block."""


class SupervisedProcess(Process):
    """A running command as an anyio `Process`. All methods belong to its event loop.

    `wait` returns when the whole process tree is gone, and `returncode` is None until then.
    """

    def __init__(self, command: Command) -> None:
        self._command = command
        self._stdin = _Input(command)
        self._stdout = _Output(command.stdout)
        self._stderr = _Output(command.stderr)

    def __repr__(self) -> str:
        return f"<SupervisedProcess {self._command!r}>"

    @property
    def finished(self) -> Finished | None:
        """The result, or None while a process of the tree may be alive."""
        return self._command.finished

    @property
    def pid(self) -> int:
        assert self._command.pid is not None, "the process has not started"
        return self._command.pid

    @property
    def returncode(self) -> int | None:
        """Exit code; -N after signal N; None before the end."""
        done = self._command.finished
        if done is None:
            return None
        if done.signal is not None:
            return -done.signal
        # The keeper was killed and could not report the exit status.
        return -int(SIGKILL) if done.code is None else done.code

    @property
    def stdin(self) -> ByteSendStream:
        return self._stdin

    @property
    def stdout(self) -> ByteReceiveStream:
        return self._stdout

    @property
    def stderr(self) -> ByteReceiveStream:
        return self._stderr

    async def wait(self) -> int:
        """Wait for the end of the process tree.

        Output that no task reads is dropped meanwhile. Cancelling only ends the wait.
        """
        await self._command.wait_over()
        self._command.result()  # Raises if Banksman itself failed.
        assert self.returncode is not None
        return self.returncode

    def stop_nowait(self) -> None:
        """Begin to stop the process tree by the ladder: end of input, TERM, KILL."""
        self._command.stop_nowait()

    def terminate(self) -> None:
        self._command.stop_nowait()

    def kill(self) -> None:
        self._command.stop_nowait(at_once=True)

    def send_signal(self, signal: int) -> None:
        """Begin to stop the process tree: the SDK sends signals for no other purpose."""
        self._command.stop_nowait(at_once=signal == SIGKILL)

    async def aclose(self) -> None:
        self.stop_nowait()
        await self.wait()


async def open_process(
    command: Sequence[str],
    *,
    cwd: str | None,
    env: Mapping[str, str],
    user: str | int | None,
) -> SupervisedProcess:
    """Start a command with pipes for stdin, stdout and stderr.

    Raises FileNotFoundError for a missing program or folder, as `anyio.open_process` does.
    Cancelling this call stops the command.
    """
    launch = check_launch(command, cwd=cwd, env=env, user=user)
    started = default_host().launch(launch, OPTIONS)
    started.hold_output()
    is_started = False
    try:
        await started.wait_started()
        is_started = True
    finally:
        if not is_started:
            started.stop_nowait(Ended.CANCELLED)
    return SupervisedProcess(started)


def check_launch(
    command: Sequence[str], *, cwd: str | None, env: Mapping[str, str], user: str | int | None
) -> Launch:
    """Check a command and return the order for it. Raises FileNotFoundError like `open_process`."""
    assert command
    if cwd is not None and not os.path.isdir(cwd):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), cwd)
    how: StartOptions = {"cwd": cwd, "env": env, "inherit_env": False, "user": user}
    try:
        return launch_of(command, how, OPTIONS)
    except ProgramNotFound as exc:
        raise FileNotFoundError(errno.ENOENT, str(exc), command[0]) from exc
