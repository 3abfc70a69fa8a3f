"""`execute` and `start` without a host of the caller's: the running loop has one for them."""

from __future__ import annotations

import asyncio
import weakref
from typing import Unpack, overload

from banksman.commands.command import Command
from banksman.commands.registry import StartOptions, explicit, launch_of, options_of
from banksman.commands.result import Finished
from banksman.errors import UsageError
from banksman.process.launch import Argv
from banksman.runtime.base_host import Host, running_loop

_defaults: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Host] = weakref.WeakKeyDictionary()


def default_host() -> Host:
    """The host of the running loop, for `execute` and `start`: made at first use, and closed by nothing but the end of
    its loop.

    It keeps no finished commands and no reports of them: only the caller that started a command has it.
    """
    loop = running_loop()
    host = _defaults.get(loop)
    if host is None:
        host = _defaults[loop] = Host(finished_max=0)
        host.owes_reports = False
    return host


@explicit
async def execute(argv: Argv, **how: Unpack[StartOptions]) -> Finished:
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
    options = options_of(how, ends_input=True)
    if options.stdin == "pipe":
        raise UsageError('execute cannot write to stdin="pipe"', hint="pass the bytes, or use Host.start")
    return await default_host().run(launch_of(argv, how, options), options)


@overload
async def start(argv: Argv, *, yield_after: None = None, **how: Unpack[StartOptions]) -> Command: ...
@overload
async def start(argv: Argv, *, yield_after: float, **how: Unpack[StartOptions]) -> Command | Finished: ...
@explicit
async def start(argv: Argv, *, yield_after: float | None = None, **how: Unpack[StartOptions]) -> Command | Finished:
    """Start a command in the background, without a `Host`: see `Host.start`, which takes the same.

    The running loop owns it. It lives until it ends or is stopped; leaving the loop (`asyncio.run`) stops it by the
    ladder, the exit of the interpreter and `shutdown` end it. `Host.take_ended` knows nothing of it: wait for it.
    """
    return await default_host().start(argv, yield_after=yield_after, **how)
