"""Dump the stacks of all tasks and threads, as code locations without values, so without secrets.

A suspended coroutine shows only its own frame. The object that it awaits has the next frame, and so
on down to the unresolved future. This module follows that chain. Some links have no attribute for
the next object: the awaitable of an asynchronous generator, or the iterator of a coroutine. For
those the module asks the garbage collector for their referents.

- SIGUSR1 writes the dump to stderr, in the event loop. It is safe at any time.
- SIGUSR2 writes the stacks of the threads directly from the signal handler, for a loop that is
  stuck. It needs neither the loop nor the interpreter. It cannot see tasks, and it blocks while
  stderr has no reader. Use it if SIGUSR1 prints nothing.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import inspect
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from banksman.server.ops import logs

TASKS_MAX = 2000
THREADS_MAX = 200
FRAMES_MAX = 64
NAME_CHARACTERS_MAX = 200

# Attributes for the frame of a suspendable object, and for the object that it awaits.
_LINKS = (("cr_frame", "cr_await"), ("ag_frame", "ag_await"), ("gi_frame", "gi_yieldfrom"))
# Type names of the links that have no such attribute.
_NAMELESS = frozenset(
    (
        "coroutine_wrapper",
        "async_generator_asend",
        "async_generator_athrow",
        "anext_awaitable",
        "FutureIter",
    )
)


def take() -> dict[str, Any]:
    """Return the stacks of all tasks of the running loop and of all threads, outermost frame first.

    `left_out`: how many tasks and threads exceed the limits.
    """
    tasks = asyncio.all_tasks()
    # Sorted by name, so that two dumps can be compared. The length comes first, so that numbers in
    # names sort by value.
    ordered = sorted(tasks, key=lambda task: (len(task.get_name()), task.get_name()))
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]  There is no other way, and it is documented.
    threads = sorted(
        frames.items(), key=lambda item: (item[0] != threading.main_thread().ident, item[0])
    )
    return {
        "tasks": [_task(task) for task in ordered[:TASKS_MAX]],
        "threads": [
            {"name": _cut(names.get(ident, f"thread {ident}")), "stack": _thread_stack(frame)}
            for ident, frame in threads[:THREADS_MAX]
        ],
        "left_out": {
            "tasks": max(0, len(tasks) - TASKS_MAX),
            "threads": max(0, len(threads) - THREADS_MAX),
        },
    }


def text(stacks: Mapping[str, Any]) -> str:
    """Format the dump for people."""
    lines: list[str] = []
    for kind in ("tasks", "threads"):
        left_out = stacks["left_out"][kind]
        lines.append(
            f"{len(stacks[kind])} {kind}" + (f" (and {left_out} more)" if left_out else "")
        )
        for one in stacks[kind]:
            coroutine = f" {one['coroutine']}" if "coroutine" in one else ""
            lines.append(f"  {logs.escaped(one['name'])}{coroutine}")
            lines += [f"    {place}" for place in one["stack"]]
    return "\n".join(lines) + "\n"


def install(loop: asyncio.AbstractEventLoop) -> None:
    """Install the handlers of SIGUSR1 and SIGUSR2. Call it in the main thread."""
    loop.add_signal_handler(signal.SIGUSR1, _write)
    if sys.stderr is not None:
        faulthandler.register(signal.SIGUSR2, file=2, all_threads=True, chain=False)


def uninstall(loop: asyncio.AbstractEventLoop) -> None:
    """Ignore both signals: their default action would kill a server that is shutting down."""
    loop.remove_signal_handler(signal.SIGUSR1)
    faulthandler.unregister(signal.SIGUSR2)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def _write() -> None:
    logs.write(text(take()))


# -- tasks ---------------------------------------------------------------------------------------
def _task(task: asyncio.Task[Any]) -> dict[str, Any]:
    coroutine = task.get_coro()
    name = getattr(coroutine, "__qualname__", None) or type(coroutine).__name__
    if task is asyncio.current_task():
        stack = _running_stack(coroutine)
    else:
        stack = _bounded(_places(coroutine))
    return {"name": _cut(task.get_name()), "coroutine": _cut(str(name)), "stack": stack}


def _running_stack(coroutine: object) -> list[str]:
    """Return the stack of the task that calls this module.

    It is not suspended, so its frames are those of this thread, down to the coroutine's own frame.
    """
    outermost = next(
        (frame for name, _ in _LINKS if (frame := getattr(coroutine, name, None)) is not None), None
    )
    frames: list[str] = []
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename != __file__:
            frames.append(_place(frame))
        if frame is outermost:
            break
        frame = frame.f_back
    return _bounded(reversed(frames))


def _places(waiting: object) -> Iterator[str]:
    """Yield the location of a suspended object, of the object that it awaits, and so on."""
    seen: set[int] = set()
    while waiting is not None and id(waiting) not in seen:
        seen.add(id(waiting))
        if isinstance(waiting, asyncio.Task):
            yield f"waits for the task {_cut(waiting.get_name())}"
            return
        awaited: object = None
        for frame_name, await_name in _LINKS:
            if hasattr(waiting, frame_name):
                frame = getattr(waiting, frame_name)
                if frame is not None:
                    yield _place(frame)
                awaited = getattr(waiting, await_name)
                break
        else:
            awaited = _behind(waiting)
        waiting = awaited


def _behind(link: object) -> object:
    """Return the object behind a link without an attribute; None if `link` has another type."""
    if type(link).__name__ not in _NAMELESS:
        return None
    referents: list[object] = gc.get_referents(link)
    for referent in referents:
        is_link = (
            any(hasattr(referent, name) for name, _ in _LINKS)
            or type(referent).__name__ in _NAMELESS
        )
        if is_link or asyncio.isfuture(referent):
            return referent
    return None


# -- places --------------------------------------------------------------------------------------
def _thread_stack(frame: FrameType | None) -> list[str]:
    places: list[str] = []
    while frame is not None:
        places.append(_place(frame))
        frame = frame.f_back
    return _bounded(reversed(places))


def _place(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} {code.co_qualname}"


def _bounded(places: Iterator[str]) -> list[str]:
    """Drop the outermost frames beyond the limit: the innermost ones show where the code is."""
    found = list(places)
    left_out = len(found) - FRAMES_MAX
    return found if left_out <= 0 else [f"({left_out} more)", *found[left_out:]]


def _cut(name: str) -> str:
    return name if len(name) <= NAME_CHARACTERS_MAX else f"{name[:NAME_CHARACTERS_MAX]}…"
