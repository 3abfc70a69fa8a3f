"""Terminals and watches of the blocking API: same behaviour as the async API, from any thread."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from banksman import Closed, Ended, Finished, UsageError, threads
from banksman.threads import blocking_execute as run_threads
from banksman.threads.thread_call import Latch


@pytest.fixture
def host() -> Iterator[threads.Host]:
    with threads.Host("memory:") as host:
        yield host


def test_terminal_is_typed_at_watched_and_resized(host: threads.Host) -> None:
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


@pytest.mark.parametrize("unknown", ["no_such", "ends_input", "spill_bytes_max", "limits_wanted"])
def test_unknown_keyword_is_type_error_and_starts_nothing(host: threads.Host, unknown: str) -> None:
    """Parameters of internal functions count as unknown, too."""
    for function in (threads.execute, host.start):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{unknown}'"):
            function(["true"], **{unknown: 1})  # pyright: ignore[reportCallIssue, reportArgumentType]
    assert not host.commands()


def test_command_is_watched_by_several_threads(host: threads.Host) -> None:
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


def test_watch_finds_output_after_host_closed() -> None:
    with threads.Host("memory:") as host:
        command = host.start(["echo", "said"])
        command.wait()
        with pytest.raises(UsageError):
            command.watch("(")
    match = command.watch("said")
    assert match is not None
    assert (match.begin, match.next) == (0, 4)
    assert command.watch("not said", timeout=1) is None
    # A pattern with a group would need a helper process, and so a loop.
    with pytest.raises(Closed):
        command.watch("(said)")


def test_watch_returns_none_after_timeout(host: threads.Host) -> None:
    command = host.start(["sleep", "60"])
    assert command.watch("never", timeout=0.01) is None
    with pytest.raises(UsageError):
        command.resize(24, 80)
    command.stop(at_once=True)


def test_execute_supports_pty() -> None:
    assert threads.execute(["stty", "size"], pty=(11, 12)).stdout.text == "11 12\r\n"


FLOOD = """
import sys, hashlib
digest = hashlib.sha256()
for number in range(%d):
    line = b"%%01023d\\n" %% number
    digest.update(line * 64)
    sys.stdout.buffer.write(line * 64)
sys.stderr.write(digest.hexdigest())
"""


@pytest.mark.parametrize("how", ["read", "lines"])
def test_reader_loses_nothing_of_fast_writer(host: threads.Host, how: str) -> None:
    """The output exceeds the limits of memory and disk together."""
    command = host.start([sys.executable, "-c", FLOOD % 1100], keep_output=how == "lines")
    digest = hashlib.sha256()
    for piece in command.stdout if how == "lines" else iter(lambda: command.stdout.read(1 << 20), b""):
        digest.update(piece)
    assert command.stderr.read(timeout=60) == digest.hexdigest().encode()
    assert (command.stdout.missed, command.stdout.at_eof()) == (0, True)
    assert command.wait().stdout.total == 1100 << 16


def test_command_with_held_output_ends_when_thread_waits() -> None:
    with threads.Host("memory:") as host:
        flood = ["sh", "-c", "yes | head -c 2000000"]
        assert host.start(flood, keep_output=False).wait(timeout=30).stdout.total == 2_000_000
        command = host.start(flood, keep_output=False)
        assert host.wait_ended(timeout=30) == [command]
        host.start(flood, keep_output=False)
        host.drain()


def test_readline_buffer_is_shared_by_command_handles() -> None:
    with threads.Host("memory:") as host:
        command = host.start(["printf", "one\\ntwo\\nthree"])
        command.wait()
        assert command.stdout.readline() == b"one\n"
        assert host.command(command.id).stdout.readline(timeout=60) == b"two\n"
        with pytest.raises(UsageError):
            command.stdout.read(0)
    # Stored output can be read without a host.
    assert command.stdout.read(2) == b"th"
    assert list(command.stdout) == [b"ree"]


def test_read_timeout_loses_nothing(host: threads.Host) -> None:
    command = host.start(["cat"], stdin="pipe")
    command.write(b"half")
    with pytest.raises(TimeoutError):
        command.stdout.readline(timeout=0.01)
    command.write(b" a line\n")
    assert command.stdout.readline() == b"half a line\n"
    command.close_stdin()
    assert command.stdout.read() == b""


@pytest.mark.parametrize("how", ["timeout", "Ctrl-C", "Ctrl-C after the answer"])
def test_read_to_end_that_is_cut_short_loses_nothing(
    host: threads.Host, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    command = host.start(["cat"], stdin="pipe")
    command.write(b"one\ntwo\nthree")
    assert command.watch("three") is not None
    assert command.stdout.readline() == b"one\n"
    if how == "timeout":
        with pytest.raises(TimeoutError):
            command.stdout.read(timeout=0.05)
    else:
        wait, thread = Latch.wait, threading.get_ident()

        def interrupted(latch: Latch, seconds: float | None = None) -> bool:
            if threading.get_ident() != thread:
                return wait(latch, seconds)
            if how == "Ctrl-C" and wait(latch, 0.05):
                return True  # The answer came immediately. A later wait is interrupted.
            monkeypatch.undo()
            if how == "Ctrl-C after the answer":
                command.close_stdin()
                wait(latch)
            raise KeyboardInterrupt

        monkeypatch.setattr(Latch, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            command.stdout.read()
    command.close_stdin()
    assert command.stdout.readline() == b"two\n"
    assert command.stdout.read() == b"three"
    assert command.stdout.at_eof()


def test_read_to_end_has_one_deadline_for_all_pieces(host: threads.Host) -> None:
    command = host.start(["sh", "-c", "while echo x; do sleep 0.02; done"])
    with pytest.raises(TimeoutError):
        command.stdout.read(timeout=0.2)
    command.stop(at_once=True)
    assert len(command.stdout.read()) == command.result().stdout.total


def test_output_is_redirected_to_file(tmp_path: Path) -> None:
    done = threads.execute(["sh", "-c", "echo out; echo err >&2"], stdout=tmp_path / "out", stderr=subprocess.STDOUT)
    assert (done.code, (tmp_path / "out").read_text()) == (0, "out\nerr\n")


def test_start_without_host_lives_until_stopped() -> None:
    first, second = threads.start(["cat"], stdin="pipe"), threads.start(["sleep", "60"])
    first.write(b"said\n")
    assert first.stdout.readline() == b"said\n"
    assert (first.stop().ended, second.stop().ended) == (Ended.STOPPED, Ended.STOPPED)
    assert isinstance(threads.start(["true"], yield_after=60), Finished)
    # For the leak check after this test: otherwise the loop's thread stays until the program ends.
    implicit = run_threads._default  # pyright: ignore[reportPrivateUsage]
    assert implicit is not None
    implicit.close()
    # A closed default host is replaced.
    assert threads.start(["true"]).wait().code == 0
    implicit = run_threads._default  # pyright: ignore[reportPrivateUsage]
    assert implicit is not None
    implicit.close()


def test_start_without_host_ends_with_program() -> None:
    code = "from banksman import threads; print(threads.start(['sleep', '1000']).pid)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert not os.path.exists(f"/proc/{int(done.stdout)}")
