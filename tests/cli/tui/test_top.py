"""`banksman top` from the view of a user at a terminal."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.tui.conftest import variables
from tests.cli.tui.kit import BANKSMAN, CTRL_C, CTRL_D, CTRL_Z, ENTER, SECONDS_MAX, UP, Terminal
from tests.server.kit import Served
from tests.thorough import thorough

from banksman.cli.output import width

pytestmark = thorough


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Served]:
    """A server without sessions."""
    with Served(tmp_path / "served") as served:
        yield served


def row(terminal: Terminal, name: str) -> str:
    return next((line for line in terminal.lines if f" {name} " in line), "")


def states(terminal: Terminal) -> list[str]:
    """Return the states of the rows below the head, in their order."""
    lines = terminal.lines
    head = next((at for at, line in enumerate(lines) if line.startswith("STATE")), len(lines))
    return [line.split()[0] for line in lines[head + 1 : -1] if line]


def test_top_shows_states_live_with_those_that_need_attention_first(fresh: Served) -> None:
    with Terminal("top", env=variables(fresh), columns=140) as terminal:
        terminal.wait_text("no sessions yet")
        fresh.open(name="lazy")
        terminal.wait(lambda: states(terminal) == ["idle"], "an idle one")
        busy = fresh.open(name="busy")
        fresh.ask(busy, "@@hang\nTidy up the imports")
        fresh.ask(busy, "later")
        terminal.wait(lambda: states(terminal) == ["running", "idle"], "one that runs")
        terminal.wait(lambda: "Tidy up" in row(terminal, "busy") and " s " in row(terminal, "busy"), "what it does")
        asks = fresh.open(name="curious")
        fresh.ask(asks, '@@ask Bash {"command": "ls"}\n@@say over')
        terminal.wait(lambda: states(terminal) == ["asks", "running", "idle"], "one that asks")
        terminal.wait_text("3 sessions: 1 asks, 1 running, 1 idle")
        terminal.wait(lambda: "MiB" in row(terminal, "busy"), "its memory")
        question = fresh.get(f"/v1/sessions/{asks}/questions")["questions"][0]["id"]
        fresh.post(f"/v1/sessions/{asks}/questions/{question}", {"decision": "allow"})
        terminal.wait(lambda: states(terminal) == ["running", "idle", "idle"], "an answer")
        terminal.type("q")
        assert terminal.end() == 0
        # The screen is restored.
        assert terminal.text == ""


@pytest.mark.thorough
def test_top_leaves_no_reader_behind_after_an_attach(tmp_path: Path) -> None:
    with Served(tmp_path / "served", heartbeat_seconds=0.2) as served:
        served.open(name="lazy")
        with Terminal("top", env=variables(served), columns=120) as terminal:
            terminal.wait_text("idle")
            threads = Path("/proc", str(terminal.process.pid), "task")
            before = len(list(threads.iterdir()))
            terminal.type("j")
            for times in range(1, 4):
                terminal.type(ENTER)
                # The earlier output is still on that screen.
                terminal.wait(lambda times=times: terminal.text.count("lazy, claude, idle") == times, "attached")
                terminal.type(CTRL_D)
                terminal.wait_text("banksman top")
            terminal.wait(lambda: len(list(threads.iterdir())) <= before, "no thread more than before")
            terminal.type("q")
            assert terminal.end() == 0


def test_top_interrupts_a_turn_after_confirmation(served: Served, env: dict[str, str]) -> None:
    session = served.open(name="stopme")
    turn = served.ask(session, "@@hang")
    with Terminal("top", env=env, columns=120) as terminal:
        # While its process starts, the session has no turn yet.
        terminal.wait_text("@@hang")
        terminal.type("i")
        terminal.wait_text("select a session first")
        terminal.type("ji")
        terminal.wait_text("interrupt stopme? y / n")
        terminal.type("n")
        terminal.wait_no_text("y / n")
        assert served.get(f"/v1/sessions/{session}")["holder"] == turn
        terminal.type("iy")
        terminal.wait_text("stopped, by boundary")
        terminal.wait(lambda: "idle" in row(terminal, "stopme"), "its end")
        terminal.type("?")
        terminal.wait_text("interrupt its running turn")
        terminal.type("x")
        terminal.wait_text("stopme")
        terminal.type(CTRL_C)
        assert terminal.end() == 130


def test_top_enter_attaches_and_returns(served: Served, env: dict[str, str]) -> None:
    session = served.open(name="entered")
    with Terminal("top", env=env, columns=120) as terminal:
        terminal.wait_text("entered")
        terminal.type("j" * 50)
        terminal.wait(lambda: "entered" in terminal.text, "the table")
        ids = [line.split()[1] for line in terminal.lines if line.startswith(("idle", "running"))]
        terminal.type("g" + "j" * (ids.index("entered")) + ENTER)
        terminal.wait_text("entered, claude, ")
        terminal.type(f"hello{ENTER}")
        terminal.wait_text("> hello\nhello\ndone")
        terminal.type(CTRL_D)
        terminal.wait_text("STATE")
        terminal.type("q")
        assert terminal.end() == 0
    assert served.get(f"/v1/sessions/{session}")["phase"] == "idle"


@pytest.mark.thorough
@pytest.mark.parametrize("columns", [40, 20])
def test_top_drops_columns_in_order_on_a_narrow_terminal(served: Served, env: dict[str, str], columns: int) -> None:
    served.open(name="narrow-one")
    with Terminal("top", env=env, columns=columns, rows=10) as terminal:
        terminal.wait_text("STATE")
        assert all(len(line) <= columns for line in terminal.lines)
        head = next(line for line in terminal.lines if line.startswith("STATE")).split()
        assert head[:2] == ["STATE", "SESSION"]
        assert not {"PIDS", "MEMORY", "AGENT"} & set(head)
        terminal.type("q")
        assert terminal.end() == 0


@pytest.mark.thorough
def test_top_follows_the_window_size(served: Served, env: dict[str, str]) -> None:
    served.open(name="sized")
    with Terminal("top", env=env, columns=140, rows=30) as terminal:
        terminal.wait_text("MEMORY")
        terminal.resize(50, 8)
        terminal.wait(lambda: "STATE" in terminal.text and "MEMORY" not in terminal.text, "fewer columns")
        assert all(len(line) <= 50 for line in terminal.lines)
        assert terminal.lines[-1].startswith("q quits")
        terminal.resize(140, 20)
        terminal.wait_text("MEMORY")
        terminal.wait(lambda: terminal.lines[-1].startswith("q quits"), "the last line where it belongs")
        terminal.type("q")
        assert terminal.end() == 0


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_top_restores_the_terminal_when_ended_by_a_signal(served: Served, env: dict[str, str], number: int) -> None:
    with Terminal("top", env=env) as terminal:
        terminal.wait_text("banksman top")
        terminal.process.send_signal(number)
        assert terminal.end() == 128 + number
        assert "banksman top" not in terminal.text


@pytest.mark.thorough
def test_top_can_be_suspended_and_resumed(served: Served, env: dict[str, str]) -> None:
    shell = ["bash", "--norc", "--noprofile", "-i"]
    with Terminal(command=shell, env={**env, "PS1": "shell: ", "HISTFILE": ""}, columns=100) as terminal:
        terminal.wait_text("shell:")
        terminal.type(f"{shlex.join(BANKSMAN)} top{ENTER}")
        terminal.wait_text("q quits")
        terminal.type(CTRL_Z)
        terminal.wait_text("Stopped")
        assert not terminal.screen.is_alternate
        terminal.type(f"fg{ENTER}")
        terminal.wait_text("q quits")
        assert terminal.screen.is_alternate
        terminal.type("q")
        terminal.wait(lambda: terminal.cursor_line == "shell:", "the shell again")
        terminal.type(f"exit{ENTER}")
        assert terminal.end() == 0


@pytest.mark.thorough
def test_top_reports_a_lost_server_and_waits_for_it(fresh: Served) -> None:
    fresh.open(name="before")
    with Terminal("top", env=variables(fresh), columns=100) as terminal:
        terminal.wait_text("before")
        fresh.stop()
        terminal.wait_text("connection lost, trying again")
        fresh.start()
        terminal.wait_no_text("connection lost")
        fresh.open(name="after")
        terminal.wait_text("after")
        terminal.type("q")
        assert terminal.end() == 0


@pytest.mark.thorough
def test_top_escapes_terminal_sequences_of_prompts(fresh: Served) -> None:
    session = fresh.open(name="evil")
    fresh.ask(session, "\x1b[2J\x1b]0;mine\x07 prompt\n@@hang")
    with Terminal("top", env=variables(fresh), columns=140) as terminal:
        terminal.wait_text("\\x1b[2J")
        terminal.wait_text("prompt")
        terminal.type(UP + "q")
        assert terminal.end() == 0
        for sequence in (b"\x1b[2J", b"\x1b]", b"\x07"):
            assert sequence not in terminal.said


def piped(env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*BANKSMAN, "top", *words], capture_output=True, text=True, timeout=SECONDS_MAX, check=False, env=env
    )


def test_top_piped_or_once_prints_one_plain_table(fresh: Served) -> None:
    env = variables(fresh)
    assert "banksman run" in piped(env).stdout
    session = fresh.open(name="plain")
    done = piped(env)
    assert done.returncode == 0
    assert done.stdout.splitlines()[0].split()[:3] == ["STATE", "SESSION", "AGENT"]
    assert done.stdout.splitlines()[1].split()[:3] == ["idle", "plain", "claude"]
    assert "\x1b" not in done.stdout
    shown: Any = json.loads(piped(env, "--json").stdout)
    assert [each["id"] for each in shown["sessions"]] == [session]
    assert piped(env, "--format", "quiet").stdout.split() == [session]
    assert piped(env, "--interval", "0").returncode == 2
    with Terminal("top", "--once", env=env, columns=60) as terminal:
        assert terminal.end() == 0
        assert "idle" in terminal.text
        assert b"\x1b" not in terminal.said


@pytest.mark.thorough
def test_top_table_fits_the_terminal_and_is_whole_in_a_pipe(served: Served, env: dict[str, str]) -> None:
    name = "日本語の長い名前" * 3
    served.open(name=name)
    with Terminal("top", "--once", env=env, columns=90) as terminal:
        assert terminal.end() == 0
        # A letter of two columns appears in the first of them.
        assert any("日" in line and "…" in line for line in terminal.lines)
        assert all(width(line) <= 90 for line in terminal.words.splitlines())
    assert name in piped(env).stdout
