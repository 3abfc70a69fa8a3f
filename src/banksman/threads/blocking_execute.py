"""Blocking `execute` and `start` for callers without a `Host`.

`execute` runs in an event loop made for the call. `start` uses one default host of the process. At
interpreter exit all loop threads are closed. This file is written by hand.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar, Unpack, overload

from banksman.commands.options import StartOptions, explicit
from banksman.commands.result import Finished
from banksman.errors import UsageError
from banksman.process.launch import Argv
from banksman.runtime.execute import execute as async_execute
from banksman.threads.blocking_command import Command
from banksman.threads.blocking_host import Host
from banksman.threads.loop_thread import LoopThread, close_all, is_in_a_loop_thread

P = ParamSpec("P")
R = TypeVar("R")


def _in_own_loop(function: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, R]:
    """Wrap an async function so that it runs to its end in an event loop made for the call."""

    @functools.wraps(function, assigned=("__name__", "__qualname__", "__doc__", "__annotations__"))
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_in_a_loop_thread():
            hint = "use an async callback that awaits banksman.execute"
            raise UsageError(
                "a blocking call in a host's event loop would block the host", hint=hint
            )
        # A loop per call is cheap compared with a process, leaves nothing behind, and works after a
        # fork.
        bridge = LoopThread("banksman-execute")
        try:
            return bridge.call(functools.partial(function, *args, **kwargs))
        finally:
            bridge.close()

    return call


execute = _in_own_loop(async_execute)

# The host of commands that are started without a host. Made at first use, and closed at exit like
# every `LoopThread`.
_default: Host | None = None
# Protects `_default`. Held while a thread is started; no other lock is acquired inside it.
_default_lock = threading.Lock()


def _default_host() -> Host:
    global _default  # noqa: PLW0603
    if is_in_a_loop_thread():
        message = "a blocking call in a host's event loop would block the host"
        raise UsageError(message, hint="await the async function there")
    with _default_lock:
        if _default is None or not _default.is_usable:
            _default = Host("memory:", finished_max=0)
            _default._inner.owes_reports = False  # pyright: ignore[reportPrivateUsage]
        return _default


def _renew_lock() -> None:
    """Replace the lock in a forked child: the thread that held it may not exist in the child."""
    global _default_lock  # noqa: PLW0603
    _default_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


@overload
def start(argv: Argv, *, yield_after: None = None, **how: Unpack[StartOptions]) -> Command: ...
@overload
def start(argv: Argv, *, yield_after: float, **how: Unpack[StartOptions]) -> Command | Finished: ...
@explicit
def start(
    argv: Argv, *, yield_after: float | None = None, **how: Unpack[StartOptions]
) -> Command | Finished:
    """Start a command in the background without a `Host`; see `Host.start` for the options.

    The command lives until it ends or is stopped, or until the interpreter exits. `Host.take_ended`
    does not report it: wait for it.
    """
    return _default_host().start(argv, yield_after=yield_after, **how)


# atexit runs handlers in reverse order. The imports above have registered those of the host and the
# spawner, so this handler runs before them.
atexit.register(close_all)
