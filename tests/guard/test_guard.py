"""`banksman guard` as its caller sees it: streams, exit codes, signals, flags, the report and messages."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.guard.running import SECONDS_MAX, environment, guard, run, started
from tests.process.hosts import look
from tests.thorough import one_in, thorough

PYTHON = [sys.executable, "-I", "-S"]
# Prints the device and the inode of each standard stream to fd 2, which the test reads.
IDENTITY = """
import os
for fd in (0, 1, 2):
    try:
        found = os.fstat(fd)
        print(fd, found.st_dev, found.st_ino, os.isatty(fd), file=open(os.environ['SEEN'], 'a'))
    except OSError:
        print(fd, 'closed', file=open(os.environ['SEEN'], 'a'))
"""
# Waits for signals and exits with 40 plus the first one. It writes a line when it is ready.
SIGNALLED = """
import os, signal, sys
def seen(number, _frame):
    os._exit(40 + number)
for number in map(int, sys.argv[1:]):
    signal.signal(number, seen)
os.write(1, b'up\\n')
while True:
    signal.pause()
"""

# The status of the command is unknown if its keeper was killed before it could report the start.
KEEPER_KILLED = (128 + signal.SIGKILL, 125)


def wait_for_line(process: subprocess.Popen[bytes], line: bytes = b"up\n") -> None:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], SECONDS_MAX)[0]
    assert process.stdout.readline() == line


def read_to_the_end(fd: int) -> bytes:
    said = b""
    while True:
        assert select.select([fd], [], [], SECONDS_MAX)[0], "another process holds it open"
        piece = os.read(fd, 4096)
        if not piece:
            return said
        said += piece


# -- streams ---------------------------------------------------------------------------------------------------------
def test_guard_passes_the_same_streams_to_the_command(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    ours, theirs = socket.socketpair()
    read, write = os.pipe()
    with ours, theirs, (tmp_path / "errors").open("wb") as errors:
        argv = guard("--", *PYTHON, "-c", IDENTITY)
        env = environment(SEEN=str(seen))
        subprocess.run(
            argv, stdin=theirs.fileno(), stdout=write, stderr=errors, env=env, check=True, timeout=SECONDS_MAX
        )
        wanted = [(number, os.fstat(fd)) for number, fd in ((0, theirs.fileno()), (1, write), (2, errors.fileno()))]
    os.close(read)
    os.close(write)
    assert seen.read_text() == "".join(f"{n} {found.st_dev} {found.st_ino} False\n" for n, found in wanted)


def test_guard_leaves_closed_streams_closed(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    words = ['exec "$@" <&- >&- 2>&-', "sh", *guard("--", *PYTHON, "-c", IDENTITY)]
    subprocess.run(["sh", "-c", *words], env=environment(SEEN=str(seen)), check=True, timeout=SECONDS_MAX)
    assert seen.read_text() == "0 closed\n1 closed\n2 closed\n"


def test_guard_passes_other_open_fds_on_and_closes_its_own_copy() -> None:
    read, write = os.pipe()
    code = f"import os, sys; os.write({write}, b'said'); os.close({write}); sys.stdin.read()"
    argv = guard("--grace-after-eof", "60", "--", *PYTHON, "-c", code)
    with started(argv, stdin=subprocess.PIPE, pass_fds=[write]) as process:
        os.close(write)
        # The end of the pipe while the command still runs: neither the guard nor the keeper holds it.
        assert read_to_the_end(read) == b"said"
        assert process.poll() is None
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(SECONDS_MAX) == 0
    os.close(read)


def test_guard_does_not_hold_the_stdout_of_the_command() -> None:
    code = "import os, sys; os.write(1, b'said'); os.close(1); sys.stdin.read()"
    argv = guard("--grace-after-eof", "60", "--", *PYTHON, "-c", code)
    with started(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert read_to_the_end(process.stdout.fileno()) == b"said"
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(SECONDS_MAX) == 0


def test_guard_lets_the_command_read_a_pipe_to_its_end() -> None:
    assert run("--", "cat", stdin=None, input="x" * 200_000).stdout == "x" * 200_000


# -- exit codes ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "code", "message"),
    one_in(
        2,
        [
            (["--", "sh", "-c", "exit 7"], 7, ""),
            (["--", "sh", "-c", "kill -SEGV $$"], 128 + signal.SIGSEGV, ""),
            (["--timeout", "0.1", "--", "sleep", "60"], 124, "timeout"),
            (["--", "no-such-program"], 127, "there is no program 'no-such-program'"),
            (["--", "/etc/passwd"], 126, "is not executable"),
            (["--"], 125, "none was given"),
            (["--no-such-flag"], 125, "unrecognized"),
            (["--timeout", "soon", "--", "true"], 125, "invalid seconds value"),
            (["--timeout", "-1", "--", "true"], 125, "invalid seconds value"),
            (["--memory", "much", "--", "true"], 125, "invalid size value"),
            (["--pids", "0", "--", "true"], 125, "invalid whole_number value"),
            (["--env", "NAME", "--", "true"], 125, "--env 'NAME' is not of the form K=V"),
            (["--cwd", "/no-such-folder", "--", "true"], 125, "cannot start in /no-such-folder"),
            (["--report", "/no-such-folder/report", "--", "true"], 125, "cannot write the report"),
        ],
    ),
)
def test_guard_exit_code(words: list[str], code: int, message: str) -> None:
    done = run(*words)
    assert done.returncode == code
    assert message in done.stderr
    assert bool(done.stderr) == bool(message)


def test_guard_sets_environment_and_folder(tmp_path: Path) -> None:
    done = run("--env", "A=1=2", "--cwd", str(tmp_path), "--", "sh", "-c", 'echo "$A $PWD"')
    assert done.stdout == f"1=2 {tmp_path}\n"


@pytest.mark.parametrize("given", [{}, {"LC_CTYPE": "C"}, {"LC_CTYPE": "C.UTF-8"}])
def test_guard_hides_the_locale_that_the_interpreter_sets_for_itself(given: dict[str, str]) -> None:
    kept = {"PATH": os.environ["PATH"], "PYTHONPATH": environment()["PYTHONPATH"], **given}
    result = subprocess.run(guard("--", "env", "-0"), env=kept, capture_output=True, timeout=SECONDS_MAX, check=True)
    found = dict(pair.split("=", 1) for pair in result.stdout.decode().split("\0") if pair)
    assert found == kept


def test_guard_hides_the_watchdog_pid_that_names_itself(tmp_path: Path) -> None:
    # The shell becomes the guard, so `$$` is the guard's pid.
    script = 'WATCHDOG_PID=$$ exec "$@"'
    words = [*guard("--", "sh", "-c", 'echo "[$WATCHDOG_PID]"')]
    done = subprocess.run(
        ["sh", "-c", script, "sh", *words], env=environment(), capture_output=True, check=True, timeout=SECONDS_MAX
    )
    assert done.stdout == b"[]\n"


# -- signals ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1])
def test_guard_passes_a_signal_on(number: int) -> None:
    argv = guard("--grace", "60", "--", *PYTHON, "-c", SIGNALLED, str(number))
    with started(argv, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        wait_for_line(process)
        process.send_signal(number)
        assert process.wait(SECONDS_MAX) == 40 + number


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_guard_dies_of_the_signal_that_ended_the_command(number: int) -> None:
    argv = guard("--grace", "60", "--", "sh", "-c", "echo up; exec sleep 60")
    with started(argv, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        wait_for_line(process)
        process.send_signal(number)
        assert process.wait(SECONDS_MAX) == -number


def test_guard_kills_at_once_on_a_second_signal_that_comes_later() -> None:
    code = "import os, signal; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; os.write(1, b'up\\n')"
    argv = guard("--grace", "3600", "--", *PYTHON, "-c", f"{code}\nwhile True: signal.pause()")
    with started(argv, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        wait_for_line(process)
        process.send_signal(signal.SIGTERM)
        # A signal within half a second is the same request. One of the later ones kills.
        while process.poll() is None:
            process.send_signal(signal.SIGTERM)
            time.sleep(0.05)
        assert process.returncode == -signal.SIGTERM


# Prints TERM, and exits when the test has read that. HUP and INT change nothing.
CLEANS = """
import os, signal, sys
def clean(number, _frame):
    os.write(1, b'term\\n')
    sys.stdin.readline()
    os._exit(0)
for number in (1, 2):
    signal.signal(number, lambda number, _: os.write(1, b'%d\\n' % number))
signal.signal(15, clean)
os.write(1, b'up\\n')
while True:
    signal.pause()
"""


@pytest.mark.parametrize("numbers", [(15, 1), (15, 2), (1, 15)])
def test_signals_at_once_are_one_request_for_term(numbers: tuple[int, ...], tmp_path: Path) -> None:
    """A stopped guard finds both. The kernel hands out the lowest number first."""
    report = tmp_path / "report"
    argv = guard("--grace", "3600", "--report", str(report), "--", *PYTHON, "-c", CLEANS)
    with started(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        wait_for_line(process)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        for number in numbers:
            process.send_signal(number)
        process.send_signal(signal.SIGCONT)
        wait_for_line(process, b"term\n")
        assert process.stdin is not None
        process.stdin.write(b"line\n")
        process.stdin.flush()
        assert process.wait(SECONDS_MAX) == 0
    assert [step["rung"] for step in json.loads(report.read_text())["ladder"]] == ["term"]


def test_term_after_hangup_is_the_first_term() -> None:
    argv = guard("--grace", "3600", "--", *PYTHON, "-c", CLEANS)
    with started(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        wait_for_line(process)
        process.send_signal(signal.SIGHUP)
        wait_for_line(process, b"1\n")
        time.sleep(0.6)
        process.send_signal(signal.SIGTERM)
        wait_for_line(process, b"term\n")
        assert process.stdin is not None
        process.stdin.write(b"line\n")
        process.stdin.flush()
        assert process.wait(SECONDS_MAX) == 0


def test_guard_handles_signals_that_its_caller_had_blocked() -> None:
    # Not a shell: dash empties its mask.
    code = (
        "import signal, time; print(*map(int, sorted(signal.pthread_sigmask(0, ()))), flush=True);"
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, {15}); time.sleep(60)"
    )
    argv = guard("--grace", "60", "--", *PYTHON, "-c", code)

    def block() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR2})

    with started(argv, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, preexec_fn=block) as process:
        # The command gets the mask of the caller.
        wait_for_line(process, b"12 15\n")
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS_MAX) == -signal.SIGTERM


def test_guard_ignores_signals_that_its_caller_had_ignored() -> None:
    argv = guard("--grace", "60", "--", *PYTHON, "-c", SIGNALLED, str(int(signal.SIGTERM)))
    code = 'trap "" HUP INT; exec "$@"'
    with started(["sh", "-c", code, "sh", *argv], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        wait_for_line(process)
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS_MAX) == 40 + signal.SIGTERM


def test_guarded_command_inherits_ignored_signals() -> None:
    code = 'trap "" HUP USR1; exec "$@"'
    argv = ["sh", "-c", code, "sh", *guard("--", "grep", "SigIgn", "/proc/self/status")]
    done = subprocess.run(argv, env=environment(), capture_output=True, check=True, timeout=SECONDS_MAX)
    # Bit 0 is SIGHUP, bit 9 is SIGUSR1. glibc's posix_spawn leaves its two internal signals ignored.
    assert int(done.stdout.split()[1], 16) & ~0x180000000 == 0x201


def test_guard_without_terminal_is_suspended_and_continued_with_its_command() -> None:
    argv = guard("--", *PYTHON, "-c", SIGNALLED, str(int(signal.SIGTERM)))
    with started(argv, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        wait_for_line(process)
        process.send_signal(signal.SIGTSTP)
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS_MAX) == 40 + signal.SIGTERM


def test_stopped_guard_continues_when_its_command_has_exited() -> None:
    """Its keeper wakes it: a guard that stays stopped would be a process that is left."""
    argv = guard("--", "sh", "-c", "echo up; read line; exit 6")
    with started(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        wait_for_line(process)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert process.stdin is not None
        process.stdin.write(b"line\n")
        process.stdin.flush()
        assert process.wait(SECONDS_MAX) == 6


def test_hangup_after_another_signal_does_not_kill() -> None:
    code = (
        "import os, signal, sys\n"
        "for number in (10, 15):\n"
        "    signal.signal(number, lambda number, _: os.write(1, b'%d\\n' % number))\n"
        "os.write(1, b'up\\n')\n"
        "sys.stdin.readline()\n"
    )
    argv = guard("--grace", "3600", "--", *PYTHON, "-c", code)
    with started(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        wait_for_line(process)
        process.send_signal(signal.SIGTERM)
        wait_for_line(process, b"15\n")
        process.send_signal(signal.SIGHUP)
        # The kernel delivers the lower number first, so HUP has been handled when USR1 arrives.
        process.send_signal(signal.SIGUSR1)
        wait_for_line(process, b"10\n")
        assert process.stdin is not None
        process.stdin.write(b"line\n")
        process.stdin.flush()
        assert process.wait(SECONDS_MAX) == 0


@thorough
def test_timeout_of_a_command_that_has_exited_does_not_count_for_its_keeper(tmp_path: Path) -> None:
    """The linger may be longer than the timeout. The keeper that waits for its end is not stuck.

    A keeper counts as stuck twelve seconds after this timeout.
    """
    path = tmp_path / "report"
    script = "(sleep 14; echo finished) & exit 0"
    done = run("--timeout", "1", "--grace", "0", "--linger", "60", "--report", str(path), "--", "sh", "-c", script)
    assert (done.returncode, done.stdout) == (0, "finished\n")
    assert json.loads(path.read_text())["ladder"] == []


# -- limits ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("flags", "code", "reason"),
    [
        (["--memory", "30M"], "kept = bytearray(b'x') * (60 << 20)", "--memory"),
        # Shared memory, as between the workers of a pool.
        (
            ["--memory", "30M"],
            "import mmap; kept = mmap.mmap(-1, 60 << 20); [kept.write(b'x' * 4096) for _ in range(15360)]",
            "--memory",
        ),
        pytest.param(
            *(["--pids", "3"], "import os; [os.fork() or time.sleep(60) for _ in range(6)]", "--pids"), marks=thorough
        ),
    ],
)
def test_guard_ends_a_tree_over_its_limit(flags: list[str], code: str, reason: str) -> None:
    # A command that handles TERM and exits with 0 has not succeeded.
    handled = "import os, signal, time; signal.signal(15, lambda *_: os._exit(0))"
    done = run(*flags, "--", *PYTHON, "-c", f"{handled}; {code}; time.sleep(60)")
    assert done.returncode == 128 + signal.SIGTERM
    assert f"its process tree exceeds {reason}" in done.stderr


@thorough
def test_guard_spares_a_tree_within_its_limits() -> None:
    assert run("--memory", "1G", "--pids", "100", "--timeout", "1.5", "--", "sleep", "60").returncode == 124


# -- report ----------------------------------------------------------------------------------------------------------
def test_report_names_swept_processes(tmp_path: Path) -> None:
    path = tmp_path / "report"
    path.write_text("an older report")
    done = run("--report", str(path), "--", "sh", "-c", "setsid sleep 61 & exit 3")
    assert done.returncode == 3
    report = json.loads(path.read_text())
    assert [process["command"] for process in report["swept"]] == ["sleep 61"]
    assert report["survivors"] == []
    assert {name: report[name] for name in ("ended", "code", "signal", "caught")} == {
        **{"ended": "exited", "code": 3},
        **{"signal": None, "caught": None},
    }
    assert [step["rung"] for step in report["ladder"]] == ["rest"]
    # No temporary file is left.
    assert os.listdir(tmp_path) == ["report"]


@pytest.mark.parametrize(
    ("words", "ended", "rungs"),
    [
        (["--timeout", "0.1", "--", "sleep", "60"], "timeout", ["term"]),
        (["--grace-after-eof", "0.1", "--", "sleep", "60"], "stdin_hangup", ["term"]),
        (["--", "true"], "exited", []),
    ],
)
def test_report_goes_to_an_open_fd(words: list[str], ended: str, rungs: list[str]) -> None:
    read, write = os.pipe()
    argv = guard("--report", f"/dev/fd/{write}", *words)
    with started(argv, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=[write]) as process:
        os.close(write)
        assert process.stdin is not None
        process.stdin.close()
        report = json.loads(read_to_the_end(read))
        os.close(read)
        assert report["ended"] == ended
        assert [step["rung"] for step in report["ladder"]] == rungs
        process.wait(SECONDS_MAX)


def test_report_that_cannot_be_written_fails_a_successful_run(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "report"
    done = run("--report", str(path), "--", "rmdir", str(folder))
    assert done.returncode == 125
    assert "cannot write the report" in done.stderr
    folder.mkdir()
    assert run("--report", str(path), "--", "sh", "-c", f"rmdir {folder}; exit 9").returncode == 9


@pytest.mark.parametrize("has_reader", [True, False])
def test_report_to_a_fifo_does_not_delay_the_command(has_reader: bool, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    argv = guard("--report", str(fifo), "--", "sh", "-c", "echo up; read line")
    with started(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        wait_for_line(process)
        reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK) if has_reader else -1
        assert process.stdin is not None
        process.stdin.write(b"line\n")
        process.stdin.flush()
        assert process.wait(SECONDS_MAX) == (0 if has_reader else 125)
    if has_reader:
        assert json.loads(read_to_the_end(reader))["ended"] == "exited"
        os.close(reader)


def test_guard_starts_nothing_for_a_caller_that_has_died(tmp_path: Path) -> None:
    """The caller dies after the first look for it. A module that the guard imports later waits for that."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\n"
        "import banksman.process.caller as caller\n"
        "look = caller.open_caller\n"
        "def wait():\n"
        "    found, parent = look(), os.getppid()\n"
        "    os.write(1, b'up\\n')\n"
        "    while os.getppid() == parent: time.sleep(0.01)\n"
        "    return found\n"
        "caller.open_caller = wait\n"
    )
    env = environment()
    env["PYTHONPATH"] += f":{tmp_path}"
    words = [sys.executable, "-m", "banksman", "guard", "--", "touch", str(tmp_path / "started")]
    code = "import os, subprocess, sys; subprocess.Popen(sys.argv[1:]); sys.stdin.read()"
    pipe = subprocess.PIPE
    with started([*PYTHON, "-c", code, *words], stdin=pipe, stdout=pipe, stderr=pipe, env=env) as caller:
        wait_for_line(caller)
        caller.kill()
        assert caller.stderr is not None
        assert b"the process that asked for it has exited" in read_to_the_end(caller.stderr.fileno())
    assert not (tmp_path / "started").exists()


def test_guard_has_no_warning_of_the_interpreter() -> None:
    argv = [sys.executable, "-W", "error", *guard("--", "true")[1:]]
    done = subprocess.run(argv, env=environment(), capture_output=True, text=True, check=False, timeout=SECONDS_MAX)
    assert (done.returncode, done.stderr) == (0, "")


def test_keeper_sigkill_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "report"
    argv = guard("--report", str(path), "--", "sh", "-c", "echo $PPID; sleep 60")
    with started(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        keeper = look(int(process.stdout.readline()))
        assert keeper is not None
        assert keeper.name == "banksman-keeper"
        os.kill(keeper.pid, signal.SIGKILL)
        assert process.wait(SECONDS_MAX) in KEEPER_KILLED
        assert b"its keeper process was killed" in process.stderr.read()
    assert json.loads(path.read_text())["ended"] == "keeper_lost"


def test_guard_continues_a_stopped_keeper() -> None:
    argv = guard("--", "sh", "-c", "echo $PPID; kill -STOP $PPID; read line; exit 5")
    with started(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(b"line\n")
        process.stdin.flush()
        assert process.wait(SECONDS_MAX) == 5


# -- robustness ------------------------------------------------------------------------------------------------------
def test_guard_does_not_wait_for_a_reader_of_its_messages() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, b"x" * 4096)
    os.set_blocking(write, True)
    argv = guard("--timeout", "0.1", "--", "sleep", "60")
    with started(argv, stdin=subprocess.DEVNULL, stderr=write) as process:
        assert process.wait(SECONDS_MAX) == 124
    os.close(read)
    os.close(write)


def test_guard_spares_children_of_the_program_that_it_replaced() -> None:
    """A shell that becomes the guard has children. They are no orphans of the keeper, even if it is killed."""
    script = 'sleep 62 & echo $!; exec "$@"'
    argv = ["sh", "-c", script, "sh", *guard("--", "sh", "-c", "echo $PPID; sleep 60")]
    with started(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        stranger = look(int(process.stdout.readline()))
        keeper = int(process.stdout.readline())
        assert stranger is not None
        os.kill(keeper, signal.SIGKILL)
        assert process.wait(SECONDS_MAX) in KEEPER_KILLED
        assert stranger.is_there
        os.kill(stranger.pid, signal.SIGKILL)


def test_guard_imports_no_slow_module() -> None:
    code = (
        "import sys\nfrom banksman.cli import main\nimport os\n"
        "def leave(code):\n print(*sys.modules)\n sys.stdout.flush()\n raise SystemExit(code)\n"
        "os._exit = leave\nos.dup2 = lambda *a, **k: None\n"
        "sys.exit(main(['guard', '--', 'true']))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env=environment(),
        capture_output=True,
        check=False,
        text=True,
        timeout=SECONDS_MAX,
    )
    loaded = set(done.stdout.split())
    assert "banksman.guard.event_loop" in loaded, done.stderr
    slow = {
        "asyncio",
        "dataclasses",
        "inspect",
        "json",
        "msgspec",
        "shutil",
        "signal",
        "socket",
        "subprocess",
        "typing",
    }
    assert loaded.isdisjoint(slow)


@thorough
def test_guard_takes_a_burst_of_signals_before_the_command_starts() -> None:
    """Signals that arrive at any moment of the start end it, and leave nothing."""
    for delay in range(0, 100, 2):
        with started(guard("--", "sleep", "60"), stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            select.select([], [], [], delay / 1000)
            process.terminate()
            assert process.wait(SECONDS_MAX) == -signal.SIGTERM
