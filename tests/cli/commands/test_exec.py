"""`banksman exec` in a shell: exit codes, streams, signals, and no process left behind."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from tests.process.count import marked
from tests.process.hosts import look
from tests.thorough import thorough

from banksman.cli.watches import Watches
from banksman.commands.options import Options
from banksman.errors import UsageError
from banksman.process.launch import prepare
from banksman.runtime.base_host import Host

BANKSMAN = [sys.executable, "-m", "banksman"]
# Prints "up" and stays for a minute. "deaf" ignores TERM. Its child is in a new session.
STAYS = (
    "import os, signal, sys, time\n"
    "if 'deaf' in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "if os.fork() == 0: os.setsid(); time.sleep(60); os._exit(0)\n"
    "print('up', flush=True); time.sleep(60)\n"
)


def run(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*BANKSMAN, "exec", *words], capture_output=True, text=True, timeout=60, check=False, **options
    )


def stays(marker: str, *words: str) -> list[str]:
    return ["--", sys.executable, "-I", "-S", "-c", STAYS, marker, *words]


def wait_gone(marker: str, *, but: int = 0) -> None:
    deadline = time.monotonic() + 15
    while set(marked(marker)) - {but}:
        assert time.monotonic() < deadline, "processes left behind"
        time.sleep(0.01)  # They are not children of this process, so it cannot wait for them.


def test_exec_passes_output_and_exit_code_through() -> None:
    done = run("--", "sh", "-c", "cat; echo out; echo err >&2; exit 3", input="in\n")
    assert (done.returncode, done.stdout, done.stderr) == (3, "in\nout\n", "err\n")


def test_exec_accepts_a_command_without_double_dash() -> None:
    assert run("sh", "-c", "exit 4").returncode == 4
    assert run("--timeout", "60", "sh", "-c", 'exit "$1"', "sh", "5").returncode == 5


@pytest.mark.parametrize("option", ["--timeout", "--idle-timeout"])
def test_exec_exits_124_on_either_timeout(option: str) -> None:
    done = run(option, "0.2", "--", "sleep", "60")
    assert done.returncode == 124
    assert "timeout after" in done.stderr
    assert re.search(r"\(TERM to the command at [\d.]+ s(, TERM to the rest of its tree at [\d.]+ s)?\)$", done.stderr)


def test_exec_exits_125_on_its_own_failure() -> None:
    assert run("--no-such-option").returncode == 125
    assert run().returncode == 125
    assert run("--timeout", "-1", "--", "true").returncode == 125
    assert run("--timeout", "x", "--", "true").returncode == 125
    assert run("--cwd", "/no/such/folder", "--", "true").returncode == 125
    assert run("--env", "novalue", "--", "true").returncode == 125


def test_cli_exits_2_on_unknown_verb() -> None:
    for words in ([], ["nosuchverb"]):
        assert subprocess.run([*BANKSMAN, *words], capture_output=True, check=False).returncode == 2


def test_cli_help_that_cannot_be_written_fails_in_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*BANKSMAN, "--help"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 5
    assert done.stderr == "banksman: cannot write to stdout: No space left on device\n"


def test_exec_exits_126_for_unrunnable_and_127_for_missing_command(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    assert run("--", str(script)).returncode == 126
    script.chmod(0o755)
    assert run("--", str(script)).returncode == 126
    assert run("--", str(tmp_path)).returncode == 126
    missing = run("--", "no-such-program-anywhere")
    assert missing.returncode == 127
    assert "install it" in missing.stderr


def test_exec_exits_128_plus_signal_number() -> None:
    assert run("--", "sh", "-c", "kill -9 $$").returncode == 128 + 9
    assert run("--", "sh", "-c", "kill -TERM $$").returncode == 128 + 15


def test_exec_json_is_one_object_with_everything(marker: str) -> None:
    script = f"echo out; echo err >&2; setsid sh -c 'sleep 60; : {marker}' & exit 3"
    done = run("--json", "--linger", "0.1", "--", "sh", "-c", script)
    seen = json.loads(done.stdout)
    assert done.returncode == 3
    assert (seen["ended"], seen["code"], seen["signal"], seen["drained"]) == ("exited", 3, None, True)
    assert seen["stdout"] == {"text": "out\n", "bytes": 4, "dropped": 0, "file": None}
    assert seen["stderr"] == {"text": "err\n", "bytes": 4, "dropped": 0, "file": None}
    assert any(marker in process["command"] for process in seen["swept"])
    assert seen["survivors"] == []
    assert [step["rung"] for step in seen["ladder"]] == ["rest"]
    assert 0 < seen["seconds"] < 60
    wait_gone(marker)


def test_exec_json_reports_timeout_and_failure_to_start() -> None:
    timed_out = run("--json", "--timeout", "0.1", "--", "sleep", "60")
    assert timed_out.returncode == 124
    assert json.loads(timed_out.stdout)["ended"] == "timeout"
    failed = run("--json", "--", "no-such-program-anywhere")
    assert failed.returncode == 127
    assert json.loads(failed.stdout)["error"] == "ProgramNotFound"


def test_exec_json_keeps_head_and_tail_and_names_the_spill_file() -> None:
    seen = json.loads(run("--json", "--output-bytes-max", "10", "--", "seq", "1000").stdout)["stdout"]
    path = pathlib.Path(seen["file"])
    try:
        assert path.read_text() == "".join(f"{n}\n" for n in range(1, 1001))
        assert seen["bytes"] == 3893
        assert seen["dropped"] == 3893 - 10
        assert seen["text"].startswith("1\n2\n3")
        assert seen["text"].endswith("1000\n")
    finally:
        path.unlink()


def test_exec_passes_environment_and_cwd(tmp_path: pathlib.Path) -> None:
    done = run("--cwd", str(tmp_path), "--env", "A=b=c", "--", "sh", "-c", 'echo "$A"; pwd')
    assert done.stdout == f"b=c\n{tmp_path}\n"


def start(*words: str) -> subprocess.Popen[bytes]:
    child = subprocess.Popen([*BANKSMAN, "exec", *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.stdout is not None
    assert child.stdout.readline() == b"up\n"
    return child


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_exec_ends_the_tree_by_the_ladder_on_a_signal(number: int, marker: str) -> None:
    with start(*stays(marker)) as child:
        child.send_signal(number)
        assert child.wait(30) == 128 + number
    assert marked(marker) == []


def test_exec_kills_at_once_on_a_second_interrupt(marker: str) -> None:
    with start("--grace", "50", *stays(marker, "deaf")) as child:
        child.send_signal(signal.SIGINT)
        # The first signal is handled when the ladder has begun. Only a later rung reaches the child that left its
        # group. So the test can only wait for the second signal to end it long before the grace.
        child.send_signal(signal.SIGINT)
        while child.poll() is None:
            child.send_signal(signal.SIGINT)
            time.sleep(0.05)
        assert child.returncode == 128 + signal.SIGINT
    assert marked(marker) == []


# On TERM it prints "term", and "clean" when the file exists.
CLEANS = (
    "clean() { echo term; until [ -e $0 ]; do sleep 0.05; done; echo clean; exit; }\n"
    "trap clean TERM; echo up; while :; do sleep 0.05; done"
)


def cleans(tmp_path: pathlib.Path) -> tuple[pathlib.Path, list[str]]:
    """Return the file of a command that cleans up, and its words."""
    gate = tmp_path / "gate"
    return gate, ["--grace", "60", "--", "sh", "-c", CLEANS, str(gate)]


def test_exec_takes_two_signals_at_once_as_one_request(tmp_path: pathlib.Path) -> None:
    gate, words = cleans(tmp_path)
    with start(*words) as child:
        assert child.stdout is not None
        child.send_signal(signal.SIGTERM)
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == b"term\n"
        gate.touch()
        assert child.stdout.read() == b"clean\n"


def test_exec_leaves_nothing_when_killed(marker: str) -> None:
    with start("--grace", "0.5", *stays(marker, "deaf")) as child:
        child.kill()
    wait_gone(marker)


def test_exec_ends_the_tree_when_its_reader_goes_away(marker: str) -> None:
    child = subprocess.Popen(
        [*BANKSMAN, "exec", "--", "sh", "-c", "yes # " + marker], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.read(100)
    child.stdout.close()
    assert child.wait(30) == 128 + signal.SIGPIPE
    assert child.stderr.read() == b""
    child.stderr.close()
    assert marked(marker) == []


@pytest.mark.thorough
def test_exec_with_a_slow_reader_bounds_memory_and_keeps_its_timeout(marker: str) -> None:
    child = subprocess.Popen(
        [*BANKSMAN, "exec", "--timeout", "1", "--", "sh", "-c", "yes # " + marker],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert child.stdout is not None
    with child:
        # Without a reader, the timeout still ends the tree.
        wait_appears(marker)
        wait_gone(marker, but=child.pid)
        with open(f"/proc/{child.pid}/status") as file:
            peak = next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
        assert peak < 100_000
        # The verb does not wait forever for a reader.
        assert child.wait(30) == 124


def wait_appears(marker: str) -> None:
    deadline = time.monotonic() + 15
    while len(marked(marker)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_cli_help_loads_neither_asyncio_nor_argparse() -> None:
    script = (
        "import sys, banksman.cli; banksman.cli.main(['--help']); print({'asyncio', 'argparse'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "banksman exec --timeout 60 -- make test" in done.stdout
    assert done.stdout.endswith("set()\n")
    assert "example:" in run("--help").stdout


def test_exec_of_a_plain_command_imports_only_what_it_needs() -> None:
    """Every import delays the start: `make bench` has the goal."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "banksman", "exec", "--", "true"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "asyncio" in loaded
    # asyncio tries to import `ssl`, and works without it. The modules that `ssl` would import show it.
    assert not {"_ssl", "json", "tempfile", "msgspec", "banksman.process.portable"} & loaded


def test_exec_treats_closed_stdin_as_empty() -> None:
    words = " ".join([*BANKSMAN, "exec", "--", "cat"])
    done = subprocess.run(["sh", "-c", f"{words} <&-"], capture_output=True, timeout=60, check=False, cwd=os.getcwd())
    assert done.returncode == 0


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", "2>&-", ">&-"])
def test_exec_drops_output_when_standard_fds_are_closed(closed: str) -> None:
    """Otherwise the loop gets their numbers, and reads the bytes (15 is TERM) as received signals."""
    # The pipe takes each write only after the previous one was read.
    script = "i=0; while [ $i -lt 40 ]; do printf '%8192s\\017'; printf '%8192s\\017' >&2; i=$((i+1)); done; exit 7"
    argv = ["sh", "-c", f'exec "$@" {closed}', "sh", *BANKSMAN, "exec", "--", "sh", "-c", script]
    assert subprocess.run(argv, capture_output=True, timeout=60, check=False).returncode == 7


def test_exec_exits_125_when_output_cannot_be_written() -> None:
    with open("/dev/full", "wb") as full:
        for words in (["--", "echo", "hi"], ["--json", "--", "echo", "hi"]):
            argv = [*BANKSMAN, "exec", *words]
            done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
            assert done.returncode == 125
            assert "No space left" in done.stderr
            assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_exec_keeps_ignoring_a_signal_ignored_at_its_start(number: int, tmp_path: pathlib.Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    child = subprocess.Popen(
        [*BANKSMAN, "exec", "--", "sh", "-c", 'echo up; cat "$0"; exit 3', str(gate)],
        stdout=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(number, signal.SIG_IGN),  # noqa: PLW1509  (a test has one thread)
    )
    assert child.stdout is not None
    with child:
        assert child.stdout.readline() == b"up\n"
        child.send_signal(number)
        gate.write_bytes(b"")
        assert child.wait(30) == 3


def test_exec_out_of_fds_fails_in_one_line() -> None:
    limited = ["sh", "-c", 'ulimit -n 6; exec "$@"', "sh", *BANKSMAN, "exec", "--", "echo", "hi"]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 125
    assert "Too many open files" in done.stderr


# -- the caller and stdin --------------------------------------------------------------------------------------------
CALLER = "import os, subprocess, sys; subprocess.Popen(sys.argv[1:]); os.write(1, b'up\\n'); sys.stdin.read()"


@pytest.mark.parametrize("is_detached", [False, pytest.param(True, marks=thorough)])
def test_exec_ends_with_its_parent_unless_hangups_are_ignored(is_detached: bool, marker: str) -> None:
    script = f"setsid sleep 60 & echo is running; sleep 60; : {marker}"
    words = [*BANKSMAN, "exec", "--grace", "0.2", "--", "sh", "-c", script, marker]
    argv = [sys.executable, "-c", CALLER, *(["nohup"] if is_detached else []), *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as caller:
        assert caller.stdout is not None
        said = b""
        while b"is running" not in said:
            said += (piece := os.read(caller.stdout.fileno(), 4096))
            assert piece
        caller.kill()
        caller.wait()
        if is_detached:
            # Nothing may happen, so there is nothing to wait for. The other case takes a fraction of this.
            time.sleep(1.0)
            [pid, *_] = [pid for pid in marked(marker) if b"exec" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()]
            os.kill(pid, signal.SIGTERM)
    wait_gone(marker)


def test_exec_gives_the_grace_when_the_caller_and_its_terminal_go_away(tmp_path: pathlib.Path) -> None:
    """HUP, again HUP, the death of the caller, and the end of stdin are one reason to stop."""
    gate, words = cleans(tmp_path)
    code = "import os, subprocess, sys; print(subprocess.Popen(sys.argv[1:]).pid, flush=True); sys.stdin.read()"
    argv = [sys.executable, "-c", code, *BANKSMAN, "exec", "--grace-after-eof", "0", *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, bufsize=0) as caller:
        assert caller.stdin is not None
        assert caller.stdout is not None
        pid = int(caller.stdout.readline())
        assert caller.stdout.readline() == b"up\n"
        os.kill(pid, signal.SIGHUP)
        assert caller.stdout.readline() == b"term\n"
        # Nothing may happen, so there is nothing to wait for.
        time.sleep(0.6)
        os.kill(pid, signal.SIGHUP)
        caller.kill()
        caller.stdin.close()
        time.sleep(0.4)
        gate.touch()
        assert caller.stdout.read() == b"clean\n"


def test_exec_ends_after_stdin_hung_up_if_asked() -> None:
    done = run("--grace-after-eof", "0.1", "--", "sleep", "60", input="unread")
    assert done.returncode == 128 + signal.SIGHUP


async def test_command_knows_its_keeper() -> None:
    """Its limits are those of all processes below the keeper."""
    async with Host() as host:
        command = host.launch(prepare(["sleep", "60"]), Options())
        assert command.keeper_pid is None
        await command.wait_started()
        assert command.pid is not None
        seen = look(command.pid)
        assert seen is not None
        assert command.keeper_pid == seen.parent
        await command.stop()


def test_watch_of_stdin_without_grace_needs_linux_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UsageError, match="need Linux"):
        Watches(caller=-1, grace_after_eof=0.0, memory_bytes_max=None, processes_max=None)


def test_exec_ignores_the_end_of_stdin_by_default() -> None:
    assert run("--", "sh", "-c", "sleep 0.5; cat", input="read late").stdout == "read late"


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--memory", "30M"], "kept = bytearray(b'x') * (60 << 20)"),
        pytest.param(["--pids", "3"], "import os; [os.fork() or time.sleep(60) for _ in range(6)]", marks=thorough),
    ],
)
def test_exec_ends_a_tree_over_its_limit(flags: list[str], code: str) -> None:
    # A command that handles TERM and exits with 0 has not succeeded.
    handled = "import os, signal, time; signal.signal(15, lambda *_: os._exit(0))"
    done = run(*flags, "--", sys.executable, "-I", "-S", "-c", f"{handled}; {code}; time.sleep(60)")
    assert done.returncode == 128 + signal.SIGTERM
    assert f"its process tree exceeds {flags[0]}" in done.stderr
