"""`create_subprocess_exec` and `create_subprocess_shell` of asyncio, and their `Process`.

A `Process` is asyncio's, on the transport of a command. It adds `finished` and `stop`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, SubprocessStreamProtocol
from asyncio.subprocess import Process as AsyncioProcess
from collections.abc import Sequence
from typing import IO, Any, Unpack

from banksman.asyncio.popen_keywords import (
    Path,
    PopenKeywords,
    Text,
    check_keywords,
    is_inheritable,
    launch_of,
    os_errors,
)
from banksman.asyncio.transport import CommandTransport
from banksman.commands.options import Options, check_seconds
from banksman.commands.result import Finished

# An fd, an object with an fd, or `PIPE`, `DEVNULL`, `STDOUT`. None: the stream of this process.
Redirect = int | IO[Any] | None
# Default of asyncio: the size of a line, and half of the unread bytes at which a pipe pauses.
LIMIT = 1 << 16
SHELL = "/bin/sh"


class Process(AsyncioProcess):
    """A child process with the interface of `asyncio.subprocess.Process`.

    `wait` and `communicate` return when no process of the child's tree is left. `kill` kills the
    whole tree. The child lives until it exits or is ended, at the latest by the end of the loop.
    """

    _transport: CommandTransport

    @property
    def finished(self) -> Finished | None:
        """How the child ended: the ladder, the swept processes and the survivors.

        None until `wait` would return. The output is in the streams, and not in this result.
        """
        return self._transport.command.finished

    async def stop(self, *, grace: float | None = None) -> Finished:
        """Stop the whole tree by the ladder: TERM, then KILL. Return when it is gone.

        `grace`: seconds from TERM to KILL; at most, and by default, 5. The stop begins immediately,
        and a cancelled call does not abort it. Repeated and concurrent calls are allowed.
        """
        if grace is not None:
            check_seconds("grace", grace)
        kill_by = None if grace is None else time.monotonic() + grace
        self._transport.command.stop_nowait(kill_by=kill_by)
        return await self._transport.wait_finished()


async def create_subprocess_exec(
    program: Path,
    *args: Path,
    stdin: Redirect = None,
    stdout: Redirect = None,
    stderr: Redirect = None,
    limit: int = LIMIT,
    **kwds: Unpack[PopenKeywords],
) -> Process:
    """Start a program, like `asyncio.create_subprocess_exec`."""
    check_keywords(kwds, shell=False)
    return await _create((program, *args), (stdin, stdout, stderr), limit, kwds)


async def create_subprocess_shell(
    cmd: Text,
    stdin: Redirect = None,
    stdout: Redirect = None,
    stderr: Redirect = None,
    limit: int = LIMIT,
    **kwds: Unpack[PopenKeywords],
) -> Process:
    """Start a command line in a shell, like `asyncio.create_subprocess_shell`."""
    if not isinstance(cmd, str | bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"cmd cannot be {cmd!r:.60}: pass text or bytes")
    check_keywords(kwds, shell=True)
    shell = kwds.pop("executable", None) or SHELL
    return await _create((shell, "-c", cmd), (stdin, stdout, stderr), limit, kwds)


async def _create(
    words: Sequence[Path],
    streams: tuple[Redirect, Redirect, Redirect],
    limit: int,
    keywords: PopenKeywords,
) -> Process:
    with os_errors(keywords.get("executable") or words[0]):
        launch = launch_of(words, keywords)
        loop = asyncio.get_running_loop()
        protocol = SubprocessStreamProtocol(limit=limit, loop=loop)
        transport = CommandTransport(protocol)
        try:
            # The child gets copies of its ends. They are closed here as soon as it was requested.
            with contextlib.ExitStack() as theirs:
                size = keywords.get("pipesize", -1)
                fds = [
                    await transport.open_pipe(number, size, theirs)
                    if wanted == PIPE
                    else _target(number, wanted)
                    for number, wanted in enumerate(streams)
                ]
                stdin = None if fds[0] == DEVNULL else fds[0]
                transport.start(launch, Options(stdin_fd=stdin, stdout=fds[1], stderr=fds[2]))
            await transport.wait_started()
        except BaseException:
            # Also after a cancellation: the child may run already, and no caller has it.
            transport.close()
            raise
        return Process(transport, protocol, loop)


def _target(number: int, wanted: Redirect) -> int:
    """Return the fd of a standard stream that is not a pipe, or `DEVNULL` or `STDOUT`."""
    if wanted is None:
        # Not inheritable: this process has closed the stream. Its number may be another file now.
        return number if is_inheritable(number) else DEVNULL
    fd = wanted if isinstance(wanted, int) else wanted.fileno()
    if fd == STDOUT and number != 2:
        raise ValueError("STDOUT can only be used for stderr")
    return fd
