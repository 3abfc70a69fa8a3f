"""The SDK's transport on Banksman's process layer.

`ClaudeTransport` is the SDK's `SubprocessCLITransport` with another process below it. The command
line, the environment, the writes and the stderr callback are the SDK's code. These differ:

- `connect` starts the CLI as a Banksman command (supervised_process.py). Under trio it starts
  `banksman guard -- CLI …`, which supervises the CLI from a process of its own.
- `close` begins the stop before its first await. No cancellation can come before it, and the host
  finishes it. Stdout is read and dropped meanwhile, so that the CLI cannot block on it.
- A reader of the messages that is cancelled or dropped begins the stop too: the SDK cancels its
  reader before it closes the transport, and a second cancellation may come between the two.
- Long lines pass, and `ProcessError` has the end of stderr (cli_output.py).
"""

# The SDK has no public names for these parts. installation.py checks that they are the known ones.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import dataclasses
import sys
import types
from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Any

import anyio
import sniffio
from anyio.abc import Process
from claude_agent_sdk import ClaudeAgentOptions, CLIConnectionError, ProcessError
from claude_agent_sdk._internal.transport import subprocess_cli

from banksman.claude_sdk.cli_output import MessageReader, StderrCopy, StderrTail
from banksman.claude_sdk.supervised_process import SupervisedProcess, check_launch, open_process
from banksman.commands.result import Finished

# The CLI is gone when the rest of its stderr is read, so that takes no time. This only ends a hang.
STDERR_SECONDS_MAX = 5.0
# -P: the folder of the CLI must not shadow this package. --no-hangup: the SDK ends the input of a
# CLI that works on, and `end_input` is not a stop.
GUARD = (sys.executable, "-P", "-m", "banksman", "guard", "--no-hangup", "--")


_Base = subprocess_cli.SubprocessCLITransport


class ClaudeTransport(_Base):
    """Transport of one SDK client. The SDK creates it, see installation.py."""

    def __init__(
        self, prompt: str | AsyncIterable[dict[str, Any]], options: ClaudeAgentOptions
    ) -> None:
        self._stderr_tail = StderrTail()
        self._stderr_callback = options.stderr
        self._stderr_copy = StderrCopy()
        # The SDK pipes stderr only for a callback.
        super().__init__(prompt, dataclasses.replace(options, stderr=self._on_stderr_line))
        self._messages = MessageReader(options.max_buffer_size)
        self._supervised: SupervisedProcess | None = None
        self._is_closing = False

    @property
    def finished(self) -> Finished | None:
        """How the CLI ended: `swept`, `survivors`, `ladder` and more. None before its end.

        Always None under trio, where `banksman guard` supervises the CLI.
        """
        return None if self._supervised is None else self._supervised.finished

    # -- start ------------------------------------------------------------------------------------
    async def connect(self) -> None:
        """Start the CLI. Cancelling this call ends the CLI."""
        await _with_open_process(_Base.connect, self._open_process)(self)
        # The SDK signals these at exit. The keeper, or the guard, ends the CLI anyway.
        subprocess_cli._ACTIVE_CHILDREN.discard(self._process)

    async def _open_process(self, command: list[str], **how: Any) -> Process:
        # A closed transport may connect again.
        self._messages = MessageReader(self._options.max_buffer_size)
        self._is_closing = False
        cwd, env, user = how["cwd"], how["env"], how["user"]
        if sniffio.current_async_library() != "asyncio":
            # The guard would report a missing CLI only by its exit code.
            check_launch(command, cwd=cwd, env=env, user=None)
            return await anyio.open_process([*GUARD, *command], **how)
        self._supervised = await open_process(command, cwd=cwd, env=env, user=user)
        return self._supervised

    # -- messages ---------------------------------------------------------------------------------
    async def read_messages(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the messages of the CLI until its stdout ends.

        Raises `ProcessError` after a non-zero exit code. A reader that stops before the end stops
        the CLI.
        """
        process = self._process
        if process is None or process.stdout is None:
            raise CLIConnectionError("Not connected")
        is_read = False
        try:
            with contextlib.suppress(anyio.ClosedResourceError):
                async for data in process.stdout:
                    for message in self._messages.feed(data):
                        self._check_claude_version(message)
                        yield message
            for message in self._messages.end():
                yield message
            is_read = True
        finally:
            if not is_read:
                self.stop_nowait()
        code = await process.wait()
        if code != 0 and not self._is_closing:
            await self._wait_stderr()
            self._exit_error = ProcessError(
                f"Command failed with exit code {code}",
                exit_code=code,
                stderr=self._stderr_tail.text or "Check stderr output for details",
            )
            raise self._exit_error

    # -- stderr -----------------------------------------------------------------------------------
    async def _handle_stderr(self) -> None:
        """Read stderr to its end. With a callback the SDK does it, line by line."""
        process = self._process
        if self._stderr_callback is not None or process is None or process.stderr is None:
            await super()._handle_stderr()
            return
        # Not by lines: the SDK drops blank lines and trailing spaces.
        with contextlib.suppress(anyio.ClosedResourceError):
            async for data in process.stderr:
                self._stderr_tail.add(data)
                self._stderr_copy.put(data)

    def _on_stderr_line(self, line: str) -> None:
        assert self._stderr_callback is not None
        self._stderr_tail.add(f"{line}\n".encode(errors="replace"))
        self._stderr_callback(line)

    async def _wait_stderr(self) -> None:
        if self._stderr_task is not None:
            with anyio.move_on_after(STDERR_SECONDS_MAX):
                await self._stderr_task.wait()
        await self._stderr_copy.flush()

    # -- stop -------------------------------------------------------------------------------------
    def stop_nowait(self) -> None:
        """Begin to stop the CLI and its process tree, and return immediately.

        No effect under trio: its cancellations cannot pass the shield of `close`.
        """
        if self._supervised is not None:
            self._is_closing = True
            self._ready = False
            self._supervised.stop_nowait()

    async def close(self) -> None:
        """Stop the CLI and wait until its process tree is gone. May be called again.

        Cancelling only ends the wait. The wait is bounded by the stop ladder.
        """
        self.stop_nowait()
        if self._supervised is None:
            await self._close_guard()
            return
        with anyio.CancelScope(shield=True):
            await self._supervised.wait()
            await self._wait_stderr()
        self._process = self._stdout_stream = self._stdin_stream = self._stderr_stream = None
        self._stderr_task = self._exit_error = None

    async def _close_guard(self) -> None:
        """Close as the SDK does, with stdout read and dropped meanwhile."""
        self._is_closing = True
        process = self._process
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as reading:
                if process is not None:
                    reading.start_soon(_drop, process)
                await super().close()
                reading.cancel_scope.cancel()
            await self._stderr_copy.flush()


async def _drop(process: Process) -> None:
    with contextlib.suppress(anyio.BusyResourceError, anyio.ClosedResourceError):
        if process.stdout is not None:
            async for _data in process.stdout:
                pass


def _with_open_process(connect: Any, opener: Callable[..., Any]) -> Callable[..., Any]:
    """Return the SDK's `connect` as a function that calls `opener` as `anyio.open_process`.

    `connect` builds the environment of the CLI and starts it in one function. This runs that
    function in a copy of its namespace, so the environment is the SDK's and nothing is patched.
    """
    namespace = {**connect.__globals__, "anyio": _AnyioWith(opener)}
    return types.FunctionType(
        connect.__code__, namespace, connect.__name__, connect.__defaults__, connect.__closure__
    )


class _AnyioWith:
    """The module anyio with another `open_process`."""

    def __init__(self, opener: Callable[..., Any]) -> None:
        self.open_process = opener

    def __getattr__(self, name: str) -> Any:
        return getattr(anyio, name)
