"""Stack dump of all tasks and threads: it follows awaits, is bounded, and is triggered by signals in a real process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Generator
from typing import Any

import pytest

from banksman.server.ops import stack_dump


def functions(stack: list[str]) -> list[str]:
    """Return the last part of each name, because the functions of the tests are nested."""
    return [place.rpartition(" ")[2].rpartition(".")[2] for place in stack]


@contextlib.asynccontextmanager
async def running(*coroutines: Any, name: str = "mine") -> AsyncGenerator[list[asyncio.Task[Any]]]:
    """Start tasks and wait until they block."""
    tasks = [asyncio.create_task(one, name=f"{name}-{number}") for number, one in enumerate(coroutines)]
    for _ in range(10):
        await asyncio.sleep(0)
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def found(name: str) -> dict[str, Any]:
    return next(task for task in stack_dump.take()["tasks"] if task["name"] == name)


class Awaitable:
    """Awaits by a generator, as an old library may."""

    def __init__(self, future: asyncio.Future[None]) -> None:
        self.future = future

    def __await__(self) -> Generator[Any]:
        yield from self.future


async def test_stack_dump_follows_awaited_coroutines() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def leaf() -> None:
        await Awaitable(future)

    async def values() -> AsyncGenerator[int]:
        await leaf()
        yield 1

    @contextlib.asynccontextmanager
    async def entered() -> AsyncGenerator[None]:
        async for _ in values():
            pass
        yield

    async def middle() -> None:
        async with entered():
            pass

    async def outer() -> None:
        await middle()

    async with running(outer()):
        task = found("mine-0")
        assert task["coroutine"].endswith("outer")
        assert functions(task["stack"]) == ["outer", "middle", "__aenter__", "entered", "values", "leaf", "__await__"]
        file, _, line = task["stack"][0].partition(" ")[0].rpartition(":")
        assert file == __file__
        assert int(line) == outer.__code__.co_firstlineno + 1


async def test_stack_dump_follows_every_kind_of_await() -> None:
    """Each of these has links without a name in Python."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def leaf() -> None:
        await future

    async def values() -> AsyncGenerator[int]:
        try:
            yield 1
            await leaf()
        finally:
            await leaf()

    async def by_asend() -> None:
        generator = values()
        await generator.asend(None)
        await generator.asend(None)

    async def by_aclose() -> None:
        generator = values()
        await generator.asend(None)
        await generator.aclose()

    async def by_anext() -> None:
        generator = values()
        await anext(generator)
        await anext(generator, None)

    class Wrapped:
        def __await__(self) -> Any:
            return leaf().__await__()

    async def by_wrapper() -> None:
        await Wrapped()

    async with running(by_asend(), by_aclose(), by_anext(), by_wrapper()):
        assert functions(found("mine-0")["stack"]) == ["by_asend", "values", "leaf"]
        assert functions(found("mine-1")["stack"]) == ["by_aclose", "values", "leaf"]
        assert functions(found("mine-2")["stack"]) == ["by_anext", "values", "leaf"]
        assert functions(found("mine-3")["stack"]) == ["by_wrapper", "leaf"]
        future.set_result(None)


async def test_stack_dump_names_the_awaited_task() -> None:
    async with running(asyncio.Event().wait()) as (first,):

        async def waits() -> None:
            await asyncio.shield(first)

        async def waits_directly() -> None:
            await first

        async with running(waits_directly(), waits(), name="other"):
            assert found("other-0")["stack"][-1] == "waits for the task mine-0"
            assert functions(found("other-1")["stack"]) == ["waits"]


async def test_stack_dump_shows_the_calling_task_down_to_the_call() -> None:
    def look() -> dict[str, Any]:
        return found("me")

    async def inner() -> dict[str, Any]:
        return look()

    async def outer() -> dict[str, Any]:
        return await inner()

    task = await asyncio.create_task(outer(), name="me")
    assert functions(task["stack"]) == ["outer", "inner", "look", "found"]


async def test_stack_dump_includes_threads() -> None:
    ready, end = threading.Event(), threading.Event()

    def waits_in_a_thread() -> None:
        ready.set()
        end.wait()

    thread = threading.Thread(target=waits_in_a_thread, name="mine")
    thread.start()
    ready.wait()
    try:
        threads = stack_dump.take()["threads"]
    finally:
        end.set()
        thread.join()
    assert threads[0]["name"] == "MainThread"
    (mine,) = [one for one in threads if one["name"] == "mine"]
    assert "waits_in_a_thread" in functions(mine["stack"])


async def test_stack_dump_is_bounded_and_counts_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def deep(left: int) -> None:
        await (deep(left - 1) if left else asyncio.Event().wait())

    async with running(deep(stack_dump.FRAMES_MAX - 2), deep(stack_dump.FRAMES_MAX - 1), name="x" * 300):
        whole, cut = (stack for stack in (one["stack"] for one in stack_dump.take()["tasks"]) if len(stack) > 5)
        assert len(whole) == stack_dump.FRAMES_MAX
        assert "more" not in whole[0]
        assert cut[0] == "(1 more)"
        assert functions(cut)[-1] == "wait"
        assert len(cut) == stack_dump.FRAMES_MAX + 1
    monkeypatch.setattr(stack_dump, "TASKS_MAX", 3)
    async with running(*(asyncio.Event().wait() for _ in range(5))):
        taken = stack_dump.take()
        assert len(taken["tasks"]) == 3
        assert taken["left_out"] == {"tasks": 3, "threads": 0}
        assert stack_dump.text(taken).startswith("3 tasks (and 3 more)\n")


async def test_stack_dump_is_json_and_readable_text() -> None:
    async with running(asyncio.Event().wait(), name="a\nb"):
        taken = stack_dump.take()
        assert json.loads(json.dumps(taken)) == taken
        text = stack_dump.text(taken)
        assert "\n  a\\nb-0 Event.wait\n    " in text
        assert "threads\n  MainThread\n" in text


# -- signals ----------------------------------------------------------------------------------------------------------
SERVER = """
import asyncio, os, signal, sys, time
from banksman.server.ops import logs; from banksman.server.ops import stack_dump as stacks

def stuck():
    os.write(1, b"!")
    while True:
        time.sleep(60)

async def waits_for_ever():
    await asyncio.Event().wait()

async def main():
    logs.configure(sys.argv[1], "info")
    stacks.install(asyncio.get_running_loop())
    task = asyncio.create_task(waits_for_ever(), name="the-one")
    await asyncio.sleep(0)
    if sys.argv[2] == "stuck":
        stuck()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    os.write(1, b"!")
    try:
        await task
    except asyncio.CancelledError:
        stacks.uninstall(asyncio.get_running_loop())
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR2)

asyncio.run(main())
"""


@contextlib.contextmanager
def server(*words: str) -> Generator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", SERVER, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.read(1) == "!"
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"it ended, and never said {text}: {seen}")


@pytest.mark.parametrize("form", ["text", "json"])
def test_sigusr1_dumps_every_task_and_server_continues(form: str) -> None:
    with server(form, "goes on") as process:
        for _ in range(2):
            process.send_signal(signal.SIGUSR1)
            seen = read_until(process, "MainThread")
            text = seen if form == "text" else json.loads(seen)["message"]
            assert "  the-one waits_for_ever\n" in text
            assert "waits_for_ever\n    " in text
            assert " Event.wait\n" in text
            if form == "text":
                read_until(process, "run_forever")
        process.terminate()
        assert process.wait() == 0


def test_sigusr2_dumps_the_stack_of_a_stuck_loop() -> None:
    with server("text", "stuck") as process:
        process.send_signal(signal.SIGUSR1)
        process.send_signal(signal.SIGUSR2)
        seen = read_until(process, "in main")
        # The first signal was not handled, because the loop is stuck.
        assert "the-one" not in seen
        assert " in stuck\n" in seen
        assert os.waitpid(process.pid, os.WNOHANG) == (0, 0)
