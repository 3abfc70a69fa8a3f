"""Module-level `execute` and `start`, which use a default host of the running loop.

The end of the loop closes that host. `commands/` runs the commands. The blocking versions are in
`threads/blocking_execute.py`.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import Unpack, overload

from banksman.commands.command import Command
from banksman.commands.options import StartOptions, explicit, launch_of, options_of
from banksman.commands.result import Finished
from banksman.errors import UsageError
from banksman.process.launch import Argv
from banksman.runtime.base_host import Host
from banksman.runtime.loop_bound import running_loop

_defaults: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Host] = weakref.WeakKeyDictionary()


def default_host() -> Host:
    """Return the default host of the running loop, for `execute` and `start`.

    It is created at first use, and closed only by the end of its loop. It keeps neither finished
    commands nor reports about them: only the caller that started a command has it.
    """
    loop = running_loop()
    host = _defaults.get(loop)
    if host is None:
        host = _defaults[loop] = Host(finished_max=0)
        host.owes_reports = False
    return host


@explicit
async def execute(argv: Argv, **how: Unpack[StartOptions]) -> Finished:
    """Run a command to its end and return the result. A timeout or a non-zero code is no error.

    When this returns, no process of the command's tree is left except those named in `survivors`.
    Cancelling takes effect immediately and also ends the command. The host of the running loop
    completes the teardown, even if the loop is about to end.

    `timeout`, `idle_timeout`: seconds in total, and without output. After that: TERM, `grace`
    seconds, KILL. `linger`: how long remaining processes may run after the command has exited
    without a stop. `drain`: how long to wait for the end of the output once every process is gone.
    `env`: added to the inherited environment. `scrub`: removes variables ("nesting", "secrets", or
    names). `limits`: `{"nofile": 64, "as": …, "nice": 5, "oom_score_adj": 500}` of each process,
    and `{"memory_bytes": …, "swap_bytes": 0, "processes": 100, "cpus": 1.5}` of the whole tree. The
    latter need a control group, and raise `UsageError` where none can be made.
    `output_bytes_max`: bytes kept of each stream, head and tail. `output_total_max`: with more
    output the command is ended. `on_output(stream, data)`: gets all output.

    `pty`: True, or (rows, columns): the command gets a terminal, and everything on it is its
    stdout. There is no input: the end of the input is typed immediately. `user`: run as another
    user, by name or number; this needs root.

    `stdout`, `stderr`: None captures the stream. `subprocess.DEVNULL`, a path (created or
    truncated), an open file or its fd, or "inherit" redirects it. `stderr=subprocess.STDOUT` sends
    it where stdout goes. `keep_output`: False counts the output and passes it to `on_output`, but
    does not keep it. `eof`: a stop closes stdin first, and waits up to this many seconds before
    TERM.
    """
    options = options_of(how, ends_input=True)
    if options.stdin == "pipe":
        raise UsageError(
            'execute cannot write to stdin="pipe"', hint="pass the bytes, or use Host.start"
        )
    return await default_host().run(launch_of(argv, how, options), options)


@overload
async def start(
    argv: Argv, *, yield_after: None = None, **how: Unpack[StartOptions]
) -> Command: ...
@overload
async def start(
    argv: Argv, *, yield_after: float, **how: Unpack[StartOptions]
) -> Command | Finished: ...
@explicit
async def start(
    argv: Argv, *, yield_after: float | None = None, **how: Unpack[StartOptions]
) -> Command | Finished:
    """Start a command in the background, without a `Host`. The options are those of `Host.start`.

    The running loop owns the command. It lives until it ends or is stopped. The end of the loop
    (`asyncio.run`) stops it by the ladder; the exit of the interpreter and `shutdown` end it too.
    `Host.take_ended` does not return it: wait for the command instead.
    """
    return await default_host().start(argv, yield_after=yield_after, **how)
