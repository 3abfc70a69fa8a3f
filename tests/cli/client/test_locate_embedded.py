"""Verbs without a server: each has an embedded host that ends with it, and several share one store.

Each verb is a real process, as a shell starts it. No process is left at its end.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import pytest
from tests.server.kit import Served

from banksman.cli.client import locate
from banksman.testing import fake_agent

pytestmark = pytest.mark.thorough

BANKSMAN = [sys.executable, "-m", "banksman"]
SECONDS_MAX = 60.0
# A program with a host that owns a session and announces no address, or a wrong one.
HOST = """
import asyncio, sys
import banksman

async def main():
    async with banksman.Host(f"sqlite:{sys.argv[1]}", address=sys.argv[2]) as host:
        turn = await host.session("one").ask("@@hang")
        async for _ in host.session("one").follow():
            print("has it", flush=True)
            await asyncio.to_thread(sys.stdin.read)
            break
asyncio.run(main())
"""


class Terminal:
    """A user's folder, and verbs in it.

    `marker`: in the argv of every agent that they start.
    """

    def __init__(self, folder: Path, marker: str) -> None:
        self.folder = folder
        self.state = folder / "state" / "banksman"
        self.marker = marker
        folder.mkdir(exist_ok=True)

    def environment(self, **more: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("BANKSMAN_")}
        folders = {"XDG_STATE_HOME": str(self.folder / "state"), "XDG_CONFIG_HOME": str(self.folder / "config")}
        return {**kept, **folders, **more}

    def run(self, *words: str, code: int | None = 0, **more: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*BANKSMAN, *words],
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            env=self.environment(**more),
        )
        assert code is None or done.returncode == code, done
        return done

    def json(self, *words: str, **more: Any) -> Any:
        return json.loads(self.run(*words, "--json", **more).stdout)

    @contextlib.contextmanager
    def begin(self, *words: str, **more: str) -> Generator[subprocess.Popen[str]]:
        process = subprocess.Popen(
            [*BANKSMAN, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env=self.environment(**more),
        )
        with process:
            try:
                yield process
            finally:
                process.kill()

    def open(self, name: str = "one", *words: str, **more: Any) -> str:
        memory = self.folder / "memory"
        memory.mkdir(exist_ok=True)
        command = [*fake_agent.command(memory=memory), f"--{self.marker}"]
        return self.run("open", "claude", "--name", name, *words, "--", *command, **more).stdout.strip()

    def sockets(self) -> list[str]:
        return sorted(os.listdir(self.state / "sockets"))

    def agents(self) -> list[int]:
        """Return the live agent processes."""
        found: list[int] = []
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if entry.isdigit() and self.marker.encode() in Path("/proc", entry, "cmdline").read_bytes():
                    found.append(int(entry))
        return found

    def wait_no_agents(self) -> None:
        """Wait for the agents of a killed host: its keepers end them, and they are not children of this process."""
        deadline = time.monotonic() + SECONDS_MAX
        while self.agents():
            assert time.monotonic() < deadline, "agents are left"
            time.sleep(0.01)


@pytest.fixture
def terminal(tmp_path: Path, marker: str) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path / "user", marker)
    yield terminal
    assert terminal.agents() == []


def wait_line(stream: IO[str] | None, word: str) -> str:
    assert stream is not None
    for line in stream:
        if word in line:
            return line
    raise AssertionError(f"{word!r} never came")


def kinds(terminal: Terminal, session: str) -> list[str]:
    lines = terminal.run("log", session, "--json").stdout.splitlines()
    return [json.loads(line)["kind"] for line in lines]


# -- each verb --------------------------------------------------------------------------------------------------------
def test_embedded_host_serves_every_verb_and_announces_nothing(terminal: Terminal) -> None:
    assert terminal.run("ps").stdout == "no sessions and no running commands; run `banksman open AGENT`\n"
    session = terminal.open()
    assert terminal.agents() == [], "a session that nobody has asked anything has no process"
    assert terminal.run("ps", "--format", "quiet").stdout.split() == [session]
    done = terminal.run("ask", "one", "@@say hello")
    assert done.stdout == "hello\n"
    assert terminal.agents() == []
    # The same conversation, with another process for each verb.
    assert "@@say hello" in terminal.run("ask", "one", "@@recall").stdout
    [shown] = terminal.json("ps")["sessions"]
    assert (shown["id"], shown["phase"], shown["owner"]) == (session, "asleep", None)
    assert terminal.json("why", "one")["phase"] == "closed"
    assert kinds(terminal, "one").count("turn.ended") == 2
    assert terminal.json("interrupt", "one")["by"] == "already_over"
    assert {each["name"] for each in terminal.json("agents")["agents"]} >= {"claude", "codex"}
    terminal.run("close", "one")
    terminal.run("close", "one", "--forget")
    assert terminal.json("ps")["sessions"] == []
    assert terminal.sockets() == []
    # Nothing was announced, and no token was made.
    assert not (terminal.state / "server.json").exists()
    assert not (terminal.state / "token").exists()


def test_embedded_host_refuses_unknown_session_like_a_server(terminal: Terminal) -> None:
    refused = terminal.run("why", "nobody", "--json", code=4)
    assert json.loads(refused.stdout)["status"] == 404
    assert terminal.sockets() == []


@pytest.mark.parametrize("words", [("drain",), ("page",), ("ask", "one", "hi", "--no-wait")])
def test_embedded_host_refuses_verbs_that_need_a_server(terminal: Terminal, words: Sequence[str]) -> None:
    terminal.open()
    refused = terminal.run(*words, code=3)
    assert "no server is running, and" in refused.stderr
    assert "banksman serve" in refused.stderr
    assert kinds(terminal, "one").count("turn.queued") == 0


def test_cli_open_in_a_deleted_folder_is_refused_in_one_line(terminal: Terminal) -> None:
    gone = terminal.folder / "gone"
    gone.mkdir()
    script = 'cd "$1" && rmdir "$1" && shift && exec "$@"'
    for words in (("open", "claude"), ("open", "claude", "--cwd", "relative")):
        done = subprocess.run(
            ["sh", "-c", script, "sh", str(gone), *BANKSMAN, *words],
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
            env=terminal.environment(),
        )
        assert (done.returncode, done.stderr) == (
            2,
            "banksman: cannot use the current folder: it was deleted "
            "(cd to another folder, or pass an absolute path with --cwd)\n",
        )
        gone.mkdir()


def test_embedded_host_with_a_broken_store_fails_in_one_line(terminal: Terminal) -> None:
    terminal.state.mkdir(parents=True)
    (terminal.state / "store.db").write_bytes(os.urandom(20_000))
    refused = terminal.run("ps", code=4)
    assert refused.stderr.splitlines()[-1].startswith("banksman: ")
    assert "Traceback" not in refused.stderr
    assert terminal.sockets() == []


@pytest.mark.parametrize("is_terminal", [True, False])
def test_embedded_host_with_a_slow_start_says_so_on_a_terminal(terminal: Terminal, is_terminal: bool) -> None:
    terminal.open()
    ours, theirs = pty.openpty() if is_terminal else os.pipe()
    # A verb waits a second or two for the folder lock before it makes its socket, and then continues without one.
    folder = os.open(terminal.state / "sockets", os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    process = subprocess.Popen(
        [*BANKSMAN, "ps"], stdout=subprocess.DEVNULL, stderr=theirs, env=terminal.environment(), cwd=terminal.folder
    )
    os.close(theirs)
    said = b""
    with process, open(ours, "rb", buffering=0) as reader:
        # The end of a terminal is an error on Linux.
        with contextlib.suppress(OSError):
            while more := reader.read(1000):
                said += more
        assert process.wait(SECONDS_MAX) == 0
    os.close(folder)
    told = b"banksman: no server is running: starting an embedded host"
    assert (told in said) is is_terminal
    assert is_terminal or said == b""


def test_embedded_host_without_server_packages_says_what_to_install(terminal: Terminal) -> None:
    missing = terminal.folder / "missing"
    missing.mkdir()
    text = "raise ModuleNotFoundError(\"No module named 'starlette'\", name='starlette')\n"
    (missing / "starlette.py").write_text(text)
    path = os.pathsep.join([str(missing), *filter(None, [os.environ.get("PYTHONPATH")])])
    refused = terminal.run("ps", code=3, PYTHONPATH=path)
    [line] = refused.stderr.splitlines()
    assert "the package starlette is not installed" in line
    assert "pip install 'banksman[server]'" in line


# -- two terminals ----------------------------------------------------------------------------------------------------
def test_turn_in_one_terminal_is_interrupted_from_another(terminal: Terminal) -> None:
    terminal.open()
    with terminal.begin("ask", "one", "@@say begun\n@@hang") as asking:
        wait_line(asking.stdout, "begun")
        [name] = terminal.sockets()
        owner = terminal.json("ps")["sessions"][0]["owner"]
        assert owner == {"pid": asking.pid, "address": f"unix:{terminal.state / 'sockets' / name}"}
        assert terminal.json("interrupt", "one")["stopped"] is True
        assert asking.wait(SECONDS_MAX) == 1
    assert terminal.sockets() == []


def test_session_in_one_terminal_is_reopened_by_name_from_another(terminal: Terminal) -> None:
    session = terminal.open()
    with terminal.begin("ask", "one", "@@say begun\n@@hang") as asking:
        wait_line(asking.stdout, "begun")
        assert terminal.open() == session
        assert terminal.json("interrupt", "one")["stopped"] is True
        assert asking.wait(SECONDS_MAX) == 1


def test_session_in_one_terminal_is_closed_from_another(terminal: Terminal) -> None:
    terminal.open()
    with terminal.begin("ask", "one", "@@say begun\n@@hang") as asking:
        wait_line(asking.stdout, "begun")
        assert terminal.run("close", "one").stdout == "one: closed\n"
        assert asking.wait(SECONDS_MAX) == 1
    assert terminal.sockets() == []


def test_question_in_one_terminal_is_answered_from_another(terminal: Terminal) -> None:
    terminal.open()
    with terminal.begin("ask", "one", '@@ask Bash {"command": "ls"}\n@@say over') as asking:
        wait_line(asking.stderr, "banksman answer")
        assert terminal.run("answer", "one", "allow").stdout.endswith(": allow\n")
        out, _ = asking.communicate(timeout=SECONDS_MAX)
        assert (asking.returncode, out.splitlines()[-1]) == (0, "over")


def test_ask_in_a_session_of_another_terminal_is_served_there(terminal: Terminal, tmp_path: Path) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    terminal.open()
    with terminal.begin("ask", "one", f"@@say begun\n@@wait {go}") as first:
        wait_line(first.stdout, "begun")
        with (
            terminal.begin("ask", "one", "@@stream 10 0.1 x\n@@say mine") as second,
            terminal.begin("ask", "one", "@@say late", "--priority", "background") as third,
        ):
            wait_queued(terminal, "one", 2)
            go.write_text("now")
            for asking, said in ((second, "mine"), (third, "late")):
                out, _ = asking.communicate(timeout=SECONDS_MAX)
                assert (asking.returncode, out.splitlines()[-1]) == (0, said)
            assert first.wait(SECONDS_MAX) == 0
    # One process served them all.
    assert kinds(terminal, "one").count("process.started") == 1
    assert terminal.sockets() == []


def wait_queued(terminal: Terminal, session: str, count: int = 1) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while len(terminal.json("why", session)["queue"]) < count:
        assert time.monotonic() < deadline, "nothing waits"


def test_ask_continues_by_itself_when_the_owning_terminal_is_killed(terminal: Terminal) -> None:
    terminal.open()
    with terminal.begin("ask", "one", "@@say begun\n@@hang") as first:
        wait_line(first.stdout, "begun")
        with terminal.begin("ask", "one", "@@say mine") as second:
            wait_queued(terminal, "one")
            first.kill()
            out, err = second.communicate(timeout=SECONDS_MAX)
            assert (second.returncode, out) == (0, "mine\n"), err
    assert kinds(terminal, "one").count("turn.queued") == 2, "it was asked once"
    assert terminal.sockets() == []


def test_owner_without_an_address_is_named_by_pid(terminal: Terminal) -> None:
    terminal.open()
    with host(terminal, "") as pid:
        refused = terminal.run("interrupt", "one", code=4)
        assert str(pid) in refused.stderr
        # Reading it needs no owner.
        assert terminal.json("ps")["sessions"][0]["owner"]["pid"] == pid
    assert terminal.run("ask", "one", "@@say hello").stdout == "hello\n"


def test_owner_address_from_the_store_is_not_sent_the_token(terminal: Terminal) -> None:
    """A store may be shared, and the owner of a session writes its address there: that may be any listener."""
    terminal.open()
    (terminal.state / "token").touch(0o600)
    (terminal.state / "token").write_text("a-secret-of-ours")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(1.0)
        with host(terminal, f"http://127.0.0.1:{listener.getsockname()[1]}"):
            done = terminal.run("interrupt", "one", code=4)
        assert "process" in done.stderr
        with pytest.raises(TimeoutError):
            listener.accept()


def test_owner_that_does_not_answer_is_named_with_how_to_end_it(terminal: Terminal) -> None:
    terminal.open()
    with host(terminal, f"unix:{terminal.folder / 'nowhere.sock'}") as pid:
        refused = terminal.run("interrupt", "one", code=4)
        assert f"process {pid}" in refused.stderr
        assert "does not answer" in refused.stderr
        assert f"kill {pid}" in refused.stderr


@contextlib.contextmanager
def host(terminal: Terminal, address: str) -> Generator[int]:
    """Run a program that owns the session `one`; yield its pid."""
    words = [sys.executable, "-c", HOST, str(terminal.state / "store.db"), address]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            wait_line(process.stdout, "has it")
            yield process.pid
            process.communicate("", timeout=SECONDS_MAX)
        finally:
            process.kill()


# -- its end ----------------------------------------------------------------------------------------------------------
def test_killed_verb_leaves_nothing_and_the_next_continues(terminal: Terminal) -> None:
    terminal.open()
    terminal.run("ask", "one", "@@say before")
    with terminal.begin("ask", "one", "@@say begun\n@@hang") as asking:
        wait_line(asking.stdout, "begun")
        assert len(terminal.agents()) >= 1
        asking.kill()
        asking.wait()
    terminal.wait_no_agents()
    assert len(terminal.sockets()) == 1, "what a killed process has left"
    done = terminal.run("ask", "one", "@@recall")
    assert "@@say before" in done.stdout
    assert terminal.sockets() == [], "and whoever came next has removed"
    ended = [line for line in terminal.run("log", "one", "--json").stdout.splitlines() if '"turn.ended"' in line]
    assert [json.loads(line)["body"]["outcome"] for line in ended] == ["done", "unknown", "done"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_verb_ended_by_a_signal_removes_its_socket(terminal: Terminal, number: signal.Signals) -> None:
    terminal.open()
    with terminal.begin("ask", "one", "@@say begun\n@@hang") as asking:
        wait_line(asking.stdout, "begun")
        asking.send_signal(number)
        assert asking.wait(SECONDS_MAX) == 128 + number
    assert terminal.agents() == []
    assert terminal.sockets() == []


@pytest.mark.parametrize("verb", ["ask", "run"])
def test_verb_ended_by_repeated_signals_removes_its_socket(terminal: Terminal, verb: str) -> None:
    if verb == "ask":
        terminal.open()
        words = ["ask", "one", "@@say begun\n@@hang"]
    else:
        words = ["run", "claude", "@@say begun\n@@hang", "--", *fake_agent.command(), f"--{terminal.marker}"]
    with terminal.begin(*words) as begun:
        wait_line(begun.stdout, "begun")
        deadline = time.monotonic() + SECONDS_MAX
        while begun.poll() is None:
            assert time.monotonic() < deadline
            begun.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                begun.wait(0.02)
    assert terminal.sockets() == []
    terminal.wait_no_agents()


def test_ctrl_c_stops_the_turn(terminal: Terminal) -> None:
    terminal.open()
    with terminal.begin("ask", "one", "@@say begun\n@@hang") as asking:
        wait_line(asking.stdout, "begun")
        asking.send_signal(signal.SIGINT)
        assert asking.wait(SECONDS_MAX) == 130
    assert terminal.sockets() == []
    assert terminal.run("ask", "one", "@@say on").stdout == "on\n"


def test_ctrl_c_twice_does_not_wait_for_the_turn(terminal: Terminal) -> None:
    """An agent that ignores the interrupt: its turn would get five seconds to stop, and its process more."""
    terminal.open()
    with terminal.begin("ask", "one", "@@say begun\n@@stop_reading\n@@hang") as asking:
        wait_line(asking.stdout, "begun")
        asking.send_signal(signal.SIGINT)
        wait_line(asking.stderr, "Ctrl-C again")
        began = time.monotonic()
        asking.send_signal(signal.SIGINT)
        assert asking.wait(SECONDS_MAX) == 130
        # The first rungs of the ladder always take their time, and the machine may be slow.
        assert time.monotonic() - began < 20.0
    assert terminal.agents() == []
    assert terminal.sockets() == []


def test_closed_stdout_ends_the_turn_with_the_verb(terminal: Terminal) -> None:
    """No other process could continue the turn, and the verb does not wait for it."""
    terminal.open()
    with terminal.begin("ask", "one", "@@stream 100 0.02 x\n@@hang", "--json") as asking:
        wait_line(asking.stdout, "turn.started")
        assert asking.stdout is not None
        asking.stdout.close()
        assert asking.wait(locate.FINISH_SECONDS / 2) == 128 + signal.SIGPIPE
    assert terminal.agents() == []
    assert terminal.sockets() == []


# -- with a server ----------------------------------------------------------------------------------------------------
def test_server_started_meanwhile_leaves_the_session_with_its_verb(terminal: Terminal) -> None:
    terminal.open()
    with terminal.begin("ask", "one", "@@say begun\n@@hang") as asking:
        wait_line(asking.stdout, "begun")
        with Served(terminal.folder, store=None) as served:
            # The server names the owner, and the client sends its request there.
            assert terminal.json("ps")["sessions"][0]["owner"]["pid"] == asking.pid
            assert served.get("/v1/sessions")["sessions"][0]["phase"] == "elsewhere"
            assert terminal.json("interrupt", "one")["stopped"] is True
            assert asking.wait(SECONDS_MAX) == 1
            # From here on the server owns it.
            assert terminal.run("ask", "one", "@@say hello").stdout == "hello\n"
            assert served.get("/v1/sessions")["sessions"][0]["phase"] == "idle"
    assert terminal.sockets() == []


@pytest.mark.parametrize(("closed", "code"), [("0<&-", 0), ("2>&-", 0), ("1>&-", 5), ("0<&- 1>&- 2>&-", 5)])
def test_verb_started_with_closed_fds_does_not_crash(terminal: Terminal, closed: str, code: int) -> None:
    """Otherwise the host's loop would get one of these numbers, and an error message would be written there."""
    words = [*BANKSMAN, "run", "claude", "hi", "--", *fake_agent.command()]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *words],
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
        cwd=terminal.folder,
        env=terminal.environment(),
    )
    assert done.returncode == code, done
    assert "Traceback" not in done.stderr


def test_missing_agent_is_reported_with_how_to_install_it(terminal: Terminal) -> None:
    done = terminal.run("run", "kimi", "hi", code=4, PATH="/nowhere")
    assert "there is no program 'kimi'" in done.stderr
    assert "banksman agents" in done.stderr
    assert "do you mean claude?" in terminal.run("run", "clude", "hi", code=4).stderr
    told = terminal.run("run", "custom", "hi", code=4).stderr
    assert "cannot start the agent 'custom': its profile has no command (add -- COMMAND …)" in told


def test_discovery_file_of_a_killed_server_is_ignored(terminal: Terminal) -> None:
    with Served(terminal.folder, store=None) as served:
        terminal.open()
        served.kill()
        assert (terminal.state / "server.json").exists()
        assert terminal.run("ask", "one", "@@say hello").stdout == "hello\n"
        assert terminal.sockets() == []
        served.start()


# -- the store --------------------------------------------------------------------------------------------------------
def test_named_store_is_the_one_used(terminal: Terminal) -> None:
    other = f"sqlite:{terminal.folder / 'other.db'}"
    terminal.open("one")
    terminal.open("two", "--store", other)
    names = [each["name"] for each in terminal.json("ps", "--store", other)["sessions"]]
    assert names == ["two"]
    assert [each["name"] for each in terminal.json("ps", BANKSMAN_STORE=other)["sessions"]] == ["two"]
    assert [each["name"] for each in terminal.json("ps")["sessions"]] == ["one"]
    assert terminal.run("why", "one", "--store", other, code=4).returncode == 4


def test_server_is_used_only_for_its_own_store(terminal: Terminal) -> None:
    own, other = (f"sqlite:{terminal.folder / name}" for name in ("own.db", "other.db"))
    with Served(terminal.folder, store=own):
        terminal.open("one")
        # An embedded host would leave it asleep.
        for words in ((), ("--store", own)):
            assert [(each["name"], each["phase"]) for each in terminal.json("ps", *words)["sessions"]] == [
                ("one", "idle")
            ]
        assert terminal.json("ps", "--store", other)["sessions"] == []
        # That store has an embedded host, so there is no server to drain.
        assert "no server is running, and" in terminal.run("drain", "--store", other, code=3).stderr


@pytest.mark.parametrize("words", [("ps",), ("open", "claude"), ("log", "one"), ("why", "one"), ("close", "one")])
def test_memory_store_is_refused_for_lasting_verbs(terminal: Terminal, words: Sequence[str]) -> None:
    refused = terminal.run(*words, "--store", "memory:", code=2)
    assert "cannot use a store in memory: it is empty and ends with this verb" in refused.stderr


def test_url_and_store_together_are_refused(terminal: Terminal) -> None:
    refused = terminal.run("ps", "--url", "http://127.0.0.1:1", "--store", "sqlite:x", code=2)
    assert "cannot use --url with --store" in refused.stderr
    # A flag precedes a variable.
    terminal.run("ps", "--store", f"sqlite:{terminal.folder / 'x'}", BANKSMAN_URL="http://127.0.0.1:1")
    terminal.run("ps", "--url", "http://127.0.0.1:1", code=3, BANKSMAN_STORE="sqlite:x")
