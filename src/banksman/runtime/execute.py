"""`execute` and `start` without a host of the caller's: the running loop has one for them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack, overload

from banksman.commands.command import Command
from banksman.commands.options import OnOutput, Options, Pty, Redirect, Stdin
from banksman.commands.output import OUTPUT_BYTES_MAX
from banksman.commands.registry import How
from banksman.commands.result import Finished
from banksman.errors import UsageError
from banksman.process.launch import Argv, prepare
from banksman.runtime.base_host import default_host


async def execute(
    argv: Argv,
    *,
    timeout: float | None = None,
    idle_timeout: float | None = None,
    grace: float = 5.0,
    linger: float = 0.3,
    drain: float = 2.0,
    stdin: Stdin = None,
    pty: Pty = False,
    stdout: Redirect = None,
    stderr: Redirect = None,
    eof: float | None = None,
    user: str | int | None = None,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    inherit_env: bool = True,
    scrub: Iterable[str] = (),
    limits: Mapping[Any, Any] | None = None,
    pass_fds: Sequence[int] = (),
    output_bytes_max: int = OUTPUT_BYTES_MAX,
    output_total_max: int | None = None,
    keep_output: bool = True,
    on_output: OnOutput | None = None,
) -> Finished:
    """Run a command to its end and return how it ended. A timeout or a non-zero code is a result, not an error.

    When this returns, no process of the command's tree is left but those named in `survivors`. Cancelling goes through
    at once, and ends the command too: the running loop's host sees the teardown to its end, also if that is the loop's.

    `timeout`, `idle_timeout`: seconds in all, and without output. Then TERM, `grace` seconds, KILL. `linger`: how long
    what the command leaves behind may still run after it exits by itself. `drain`: how long to wait for the end of the
    output once every process is gone. `env` is added to what is inherited; `scrub` takes out ("nesting", "secrets", or
    names). `limits`: `{"nofile": 64, "as": …, "nice": 5, "oom_score_adj": 500}`. Of each stream `output_bytes_max` are
    kept, head and tail; beyond `output_total_max` the command is ended. `on_output(stream, data)` sees all of it.

    `pty`: True, or (rows, columns): it has a terminal, and all that is on it is its stdout. Nobody types there: the end
    of the input is typed at once. `user`: it runs as another user, by name or number; that takes root.

    `stdout`, `stderr`: None: captured. `subprocess.DEVNULL`, a path (created or emptied), an open file or its fd,
    "inherit": there instead. `stderr=subprocess.STDOUT`: where stdout goes. `keep_output` False: output is counted, and
    passed to `on_output`, but not kept. `eof`: a stop closes stdin first, and waits so many seconds before TERM.
    """
    options = Options(
        timeout=timeout,
        idle_timeout=idle_timeout,
        grace=grace,
        linger=linger,
        drain=drain,
        stdin=stdin,
        pty=pty,
        stdout=stdout,
        stderr=stderr,
        eof=eof,
        ends_input=True,
        output_bytes_max=output_bytes_max,
        output_total_max=output_total_max,
        keep_output=keep_output,
        on_output=on_output,
    )
    if options.stdin == "pipe":
        raise UsageError('execute cannot write to stdin="pipe"', hint="pass the bytes, or use Host.start")
    launch = prepare(
        argv,
        cwd=cwd,
        env=env,
        inherit_env=inherit_env,
        scrub=scrub,
        limits_wanted=limits,
        pass_fds=pass_fds,
        has_terminal=options.terminal is not None,
        user=user,
    )
    return await default_host().run(launch, options)


@overload
async def start(argv: Argv, *, yield_after: None = None, **how: Unpack[How]) -> Command: ...
@overload
async def start(argv: Argv, *, yield_after: float, **how: Unpack[How]) -> Command | Finished: ...
async def start(argv: Argv, *, yield_after: float | None = None, **how: Unpack[How]) -> Command | Finished:
    """Start a command in the background, without a `Host`: see `Host.start`, which takes the same.

    The running loop owns it. It lives until it ends or is stopped; leaving the loop (`asyncio.run`) stops it by the
    ladder, the exit of the interpreter and `shutdown` end it. `Host.take_ended` knows nothing of it: wait for it.
    """
    if yield_after is None:
        return await default_host().start(argv, **how)
    return await default_host().start(argv, yield_after=yield_after, **how)
