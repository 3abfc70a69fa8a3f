"""Failures of a simulation, their reports, and the loop methods that a simulation refuses."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

LoopT = TypeVar("LoopT", bound=asyncio.AbstractEventLoop)


class SimFailure(AssertionError):
    """The code under test failed in a way that only the loop can see."""


class Deadlock(SimFailure):
    """The scenario is not done, but nothing is ready and no timer is set."""


class Livelock(SimFailure):
    """The scenario ran `steps_max` steps and is not done."""


class Unhandled(SimFailure):
    """A callback or a task raised an exception that no code handled."""


class TasksLeft(SimFailure):
    """The scenario is done, but tasks that it started are not."""


class NotDeterministic(Exception):
    """The same schedule ran differently, or does not fit, so the exploration proves nothing."""

    def __init__(self, message: str) -> None:
        super().__init__(
            f"{message} (each run must start afresh and take nothing from outside: "
            "look for state kept between runs, the order of a set, id(), random, a real clock; "
            "or the code has changed since the schedule was made)"
        )


class NotSimulated(NotImplementedError):
    """The simulated loop has no files, sockets, signals, processes or threads."""


def label(handle: asyncio.Handle) -> str:
    callback: Any = handle._callback
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return owner.get_name()
    while isinstance(callback, functools.partial):
        callback = callback.func
    return getattr(callback, "__qualname__", type(callback).__name__)


def stack(task: asyncio.Task[Any]) -> str:
    """Describe where a task waits, from its outermost coroutine inwards.

    `Task.get_stack` knows only the outermost coroutine.
    """
    lines = [f"  {task.get_name()}"]
    inner: Any = task.get_coro()
    while inner is not None:
        kind = next((kind for kind in ("cr", "gi", "ag") if hasattr(inner, f"{kind}_frame")), None)
        frame = getattr(inner, f"{kind}_frame", None)
        if frame is None:
            break
        lines.append(
            f"    {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
        )
        inner = getattr(inner, "gi_yieldfrom" if kind == "gi" else f"{kind}_await", None)
    lines.append(f"    for {getattr(task, '_fut_waiter', None)!r}")
    return "\n".join(lines)


# Loop methods that need the real world.
_REFUSED = {
    "add_reader",
    "remove_reader",
    "add_writer",
    "remove_writer",
    "add_signal_handler",
    "remove_signal_handler",
    "run_in_executor",
    "create_connection",
    "create_server",
    "create_unix_connection",
    "create_unix_server",
    "create_datagram_endpoint",
    "connect_accepted_socket",
    "connect_read_pipe",
    "connect_write_pipe",
    "subprocess_exec",
    "subprocess_shell",
    "start_tls",
    "sendfile",
    "getaddrinfo",
    "getnameinfo",
    "sock_recv",
    "sock_recv_into",
    "sock_recvfrom",
    "sock_recvfrom_into",
    "sock_sendall",
    "sock_sendto",
    "sock_connect",
    "sock_accept",
    "sock_sendfile",
}


def without_world(loop_class: type[LoopT]) -> type[LoopT]:
    """Class decorator: make every loop method that needs the real world raise `NotSimulated`."""
    for name in _REFUSED:
        setattr(loop_class, name, _refusal(name))
    return loop_class


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(*_args: object, **_options: object) -> NoReturn:
        raise NotSimulated(f"loop.{name}: the simulated loop has no world; play it with outside()")

    return refuse
