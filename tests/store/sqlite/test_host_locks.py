"""Detection of live hosts: real processes hold an id, die in every way, and are checked from outside."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path

import pytest

from banksman.errors import StoreError
from banksman.store.sqlite import host_locks
from banksman.store.sqlite.host_locks import HostLocks, identity

_PROGRAM = """
import os, signal, sys
from banksman.store.sqlite.host_locks import HostLocks
signal.alarm(60)
PATH, HOST_ID = sys.argv[1], int(sys.argv[2])

def say(word):
    os.write(1, f"{word}\\n".encode())

def hear():
    return os.read(0, 1)

hosts = HostLocks(PATH)
hosts.hold(HOST_ID)
"""


@contextlib.contextmanager
def holder(path: str, host_id: int, code: str = "", *prefix: str) -> Generator[subprocess.Popen[str]]:
    """Start a process that holds an id, until its stdin ends or it is killed."""
    argv = [*prefix, sys.executable, "-c", f"{_PROGRAM}\n{code}\nsay('holding')\nhear()", path, str(host_id)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "holding\n"
            yield process
        finally:
            process.kill()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "store")


def test_live_host_is_seen_and_killed_host_is_not(path: str) -> None:
    with contextlib.closing(HostLocks(path)) as hosts, holder(path, 7) as process:
        assert hosts.is_alive(7)
        assert not hosts.is_alive(6)
        assert not hosts.is_alive(8)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not hosts.is_alive(7)


def test_killed_host_is_dead_while_still_a_zombie(path: str) -> None:
    """The host does not have to be reaped first: a parent that never reaps must not block the sessions."""
    with contextlib.closing(HostLocks(path)) as hosts, holder(path, 7) as process:
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not hosts.is_alive(7)


def test_stopped_host_counts_as_alive(path: str) -> None:
    """A process that is stopped, as in a debugger or a frozen container, can resume and write."""
    with contextlib.closing(HostLocks(path)) as hosts, holder(path, 7) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert hosts.is_alive(7)


def test_fork_that_outlives_its_host_does_not_keep_it_alive(path: str) -> None:
    """Every program with multiprocessing has forks.

    With flock() or an open file description lock the fork would keep the lock.
    """
    code = """
pid = os.fork()
if pid == 0:
    # Stdout stays with the fork, so that its end can be waited for; its own word comes first.
    say("forked")
    signal.pause()
say(pid)
"""
    argv = [sys.executable, "-c", f"{_PROGRAM}\n{code}\nsay('holding')\nhear()", path, "7"]
    with (
        contextlib.closing(HostLocks(path)) as hosts,
        subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
    ):
        assert process.stdout is not None
        said = [process.stdout.readline().strip() for _ in range(3)]
        fork = int(next(word for word in said if word.isdigit()))
        try:
            assert hosts.is_alive(7)
            process.send_signal(signal.SIGKILL)
            process.wait()
            os.kill(fork, 0)
            assert not hosts.is_alive(7)
        finally:
            os.kill(fork, signal.SIGKILL)
        assert process.stdout.read() == ""


def test_fork_of_live_host_takes_no_lock_from_it(path: str) -> None:
    """The fork does not drop the lock by its exit, by closing what it inherited, or by opening the same store."""
    code = """
pid = os.fork()
if pid == 0:
    try:
        hosts.is_alive(HOST_ID)
    except Exception as exc:
        say(type(exc).__name__)
    else:
        say("it used what is its parent's")
    hosts.let_go(HOST_ID)
    hosts.close()
    own = HostLocks(PATH)
    say(own.is_alive(HOST_ID))
    own.hold(HOST_ID + 1)
    own.close()
    os._exit(0)
os.waitpid(pid, 0)
"""
    argv = [sys.executable, "-c", f"{_PROGRAM}\n{code}\nsay('holding')\nhear()", path, "7"]
    with (
        contextlib.closing(HostLocks(path)) as hosts,
        subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
    ):
        assert process.stdout is not None
        assert [process.stdout.readline().strip() for _ in range(3)] == ["StoreError", "True", "holding"]
        assert hosts.is_alive(7)
        assert not hosts.is_alive(8)
        process.kill()


def test_program_started_by_host_does_not_keep_it_alive(path: str) -> None:
    code = """
import subprocess
program = subprocess.Popen([sys.executable, "-c", "import signal; signal.alarm(60); signal.pause()"], close_fds=False)
say(program.pid)
"""
    argv = [sys.executable, "-c", f"{_PROGRAM}\n{code}\nsay('holding')\nhear()", path, "7"]
    with (
        contextlib.closing(HostLocks(path)) as hosts,
        subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
    ):
        assert process.stdout is not None
        program = int(process.stdout.readline())
        try:
            assert process.stdout.readline() == "holding\n"
            assert hosts.is_alive(7)
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert not hosts.is_alive(7)
        finally:
            os.kill(program, signal.SIGKILL)
        assert process.stdout.read() == ""


def test_host_lock_ends_with_exec_though_the_pid_lives(path: str) -> None:
    """The pid, the start time and the parent stay the same after an exec, so they would show a live host."""
    code = "os.execv(sys.executable, [sys.executable, '-c', 'import os; os.write(1, b\"new\\\\n\"); os.read(0, 1)'])"
    argv = [sys.executable, "-c", f"{_PROGRAM}\nsay('holding')\nhear()\n{code}", path, "7"]
    with (
        contextlib.closing(HostLocks(path)) as hosts,
        subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
    ):
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "holding\n"
        assert hosts.is_alive(7)
        process.stdin.write("x")
        process.stdin.flush()
        assert process.stdout.readline() == "new\n"
        assert not hosts.is_alive(7)
        process.kill()


def test_host_lock_ignores_the_readers_own_pid(path: str) -> None:
    """A dead host had the pid of this process. Every check by pid would be wrong."""
    with contextlib.closing(HostLocks(path)) as hosts:
        assert not hosts.is_alive(os.getpid())
        with holder(path, os.getpid()) as process:
            assert hosts.is_alive(os.getpid())
            process.kill()
            process.wait()
            assert not hosts.is_alive(os.getpid())


def test_host_in_another_pid_namespace_is_seen_as_alive(path: str) -> None:
    """As in two containers that share a folder. The holder has pid 1 there, and here pid 1 is another process."""
    flags = ["--pid", "--fork", "--kill-child", *(() if os.geteuid() == 0 else ("--user", "--map-root-user"))]
    probe = subprocess.run(["unshare", *flags, "true"], capture_output=True, text=True, timeout=60, check=False)
    if probe.returncode != 0:
        pytest.skip(f"NOT TESTED: no pid namespace can be made here: {probe.stderr}")
    with (
        contextlib.closing(HostLocks(path)) as hosts,
        holder(path, 7, "assert os.getpid() == 1", "unshare", *flags) as process,
    ):
        assert hosts.is_alive(7)
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
        assert not hosts.is_alive(7)


def test_host_locks_of_two_logs_in_one_process_survive_one_closing(path: str, tmp_path: Path) -> None:
    """The second one opens the store through a symlink.

    Another process checks the locks, because the kernel does not show a process its own locks.
    """
    (tmp_path / "link").symlink_to(path)
    first, second = HostLocks(path), HostLocks(str(tmp_path / "link"))
    first.hold(1)
    second.hold(2)
    assert (first.is_alive(1), first.is_alive(2)) == (True, True)
    assert (second.is_alive(1), second.is_alive(2)) == (True, True)
    assert seen_from_outside(path, 1, 2) == [True, True]
    first.close()
    first.close()
    assert (second.is_alive(1), second.is_alive(2)) == (False, True)
    assert seen_from_outside(path, 1, 2) == [False, True]
    # A third handle opens and closes, as a short look at a store does.
    HostLocks(path).close()
    assert seen_from_outside(path, 1, 2) == [False, True]
    second.let_go(2)
    assert seen_from_outside(path, 1, 2) == [False, False]
    second.close()
    with pytest.raises(StoreError, match="is closed"):
        second.is_alive(1)


def test_host_lock_survives_concurrent_open_and_close_in_threads(path: str) -> None:
    def come_and_go(host_id: int) -> None:
        for _ in range(100):
            with contextlib.closing(HostLocks(path)) as hosts:
                hosts.hold(host_id)
                assert hosts.is_alive(host_id)
                seen.append(hosts.is_alive(1))

    seen: list[bool] = []
    with contextlib.closing(HostLocks(path)) as lasting:
        lasting.hold(1)
        threads = [threading.Thread(target=come_and_go, args=(host_id,)) for host_id in range(2, 6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == [True] * 400
        assert seen_from_outside(path, *range(1, 6)) == [True, False, False, False, False]
    assert not host_locks._files  # pyright: ignore[reportPrivateUsage]


def test_host_id_is_held_at_most_once(path: str) -> None:
    with contextlib.closing(HostLocks(path)) as hosts, contextlib.closing(HostLocks(path)) as others, holder(path, 7):
        hosts.hold(8)
        for host_id in (7, 8):
            with pytest.raises(StoreError, match=f"another host holds the id {host_id}"):
                others.hold(host_id)
        # A handle that does not hold the id cannot release it.
        others.let_go(8)
        assert seen_from_outside(path, 7, 8) == [True, True]


def test_host_ids_may_be_large(path: str) -> None:
    """The ids are never used again, so they only grow. The file stays empty."""
    with contextlib.closing(HostLocks(path)) as hosts, holder(path, 1 << 40):
        assert hosts.is_alive(1 << 40)
        assert not hosts.is_alive((1 << 40) + 1)
        assert os.stat(f"{path}-hosts").st_size == 0
        assert os.stat(f"{path}-hosts").st_mode & 0o777 == 0o600


def test_host_locks_raise_store_error_when_file_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="No such file or directory"):
        HostLocks(str(tmp_path / "missing" / "store"))
    (tmp_path / "store-hosts").mkdir()
    with pytest.raises(StoreError, match="Is a directory"):
        HostLocks(str(tmp_path / "store"))


def test_identity_names_this_process() -> None:
    boot, pid, start = identity()
    assert pid == os.getpid()
    assert len(boot) == 36
    assert 0 < start == int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def seen_from_outside(path: str, *host_ids: int) -> list[bool]:
    code = (
        "import sys; from banksman.store.sqlite.host_locks import HostLocks; hosts = HostLocks(sys.argv[1]);"
        "print(*(int(hosts.is_alive(int(word))) for word in sys.argv[2:]))"
    )
    argv = [sys.executable, "-c", code, path, *map(str, host_ids)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    return [word == "1" for word in done.stdout.split()]
