"""Terminals and watches of the blocking face: the same as the async ones, waited for by any thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from banksman import Closed, Ended, UsageError, threads


@pytest.fixture
def host() -> Iterator[threads.Host]:
    with threads.Host("memory:") as host:
        yield host


def test_a_terminal_is_typed_at_watched_and_resized(host: threads.Host) -> None:
    command = host.start(["sh", "-c", "stty size; read line; stty size; read line"], pty=(7, 8))
    first = command.watch("7 8\r\n")
    assert first is not None
    command.resize(9, 10)
    command.write(b"go\n")
    second = command.watch(r"(\d+) (\d+)\r\n", after=first.next, timeout=30)
    assert second is not None
    assert second.groups == ("9", "10")
    command.close_stdin()
    assert command.wait(timeout=30).ended is Ended.EXITED


def test_several_threads_watch_one_command(host: threads.Host) -> None:
    command = host.start(["cat"], stdin="pipe")
    found: dict[str, int | None] = {}

    def watch(pattern: str) -> None:
        match = command.watch(pattern, timeout=30)
        found[pattern] = None if match is None else match.begin

    patterns = ["a", "b", "(c)", "d"]
    watchers = [threading.Thread(target=watch, args=(pattern,)) for pattern in patterns]
    for watcher in watchers:
        watcher.start()
    command.write(b"abc")
    assert command.watch("abc") is not None
    command.close_stdin()
    for watcher in watchers:
        watcher.join(60)
    assert found == {"a": 0, "b": 1, "(c)": 2, "d": None}


def test_what_was_said_is_found_after_the_host_is_closed() -> None:
    with threads.Host("memory:") as host:
        command = host.start(["echo", "said"])
        command.wait()
        with pytest.raises(UsageError):
            command.watch("(")
    match = command.watch("said")
    assert match is not None
    assert (match.begin, match.next) == (0, 4)
    assert command.watch("not said", timeout=1) is None
    # That one would need a process, and a loop.
    with pytest.raises(Closed):
        command.watch("(said)")


def test_a_watch_that_runs_out_of_time_is_none(host: threads.Host) -> None:
    command = host.start(["sleep", "60"])
    assert command.watch("never", timeout=0.01) is None
    with pytest.raises(UsageError):
        command.resize(24, 80)
    command.stop(at_once=True)


def test_execute_has_terminals_too() -> None:
    assert threads.execute(["stty", "size"], pty=(11, 12)).stdout.text == "11 12\r\n"
