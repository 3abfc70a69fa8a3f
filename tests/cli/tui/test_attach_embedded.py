"""`run` and `attach` without a server: the host is embedded in the verb, and ends with it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from tests.cli.tui.kit import BANKSMAN, CTRL_C, CTRL_D, ENTER, SECONDS_MAX, Terminal, processes_in
from tests.thorough import one_in

from banksman.testing import fake_agent

AGENT = ("--", *fake_agent.command())


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
    return {**kept, "XDG_STATE_HOME": str(tmp_path / "state"), "XDG_CONFIG_HOME": str(tmp_path / "config")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def piped(env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*BANKSMAN, *words], capture_output=True, text=True, timeout=SECONDS_MAX, check=False, env=env
    )


def test_run_needs_no_server_and_leaves_nothing(env: dict[str, str], folder: Path) -> None:
    with Terminal("run", "claude", "@@hold 60 setsid\n@@stream 3 0 word", *AGENT, env=env, cwd=folder) as terminal:
        terminal.wait_said("word0 word1 word2")
        assert terminal.end() == 0
    assert processes_in(folder) == []


@pytest.mark.parametrize("times", one_in(2, [2, 1]))
def test_run_ctrl_c_stops_the_turn_and_twice_ends_it(env: dict[str, str], folder: Path, times: int) -> None:
    prompt = "@@on_interrupt ignored\n@@hold 60 setsid\n" if times == 2 else ""
    prompt += "@@say begun\n@@hang"
    with Terminal("run", "claude", prompt, *AGENT, env=env, cwd=folder) as terminal:
        terminal.wait_text("begun")
        assert len(processes_in(folder)) >= 2
        terminal.type(CTRL_C)
        terminal.wait_text("Ctrl-C again ends the session")
        if times == 2:
            terminal.type(CTRL_C)
        assert terminal.end() == 130
        assert "Traceback" not in terminal.words
    # The verb itself ran in this folder too, and is gone as well.
    assert processes_in(folder) == []


@pytest.mark.thorough
def test_attach_from_another_terminal_answers_and_interrupts(env: dict[str, str], folder: Path) -> None:
    prompt = '@@ask Bash {"command": "ls"}\n@@say answered\n@@hang'
    words = ("run", "claude", prompt, "--name", "shared", *AGENT)
    with Terminal(*words, env=env, cwd=folder) as first:
        first.wait_text("[a]llow")
        with Terminal("attach", "shared", env=env) as second:
            second.wait_text("[a]llow")
            second.type("a")
            first.wait_text("answered")
            second.wait_text("answered")
            second.type(CTRL_C)
            second.wait_text("stopped, by boundary")
            assert first.end() == 1
            second.type(CTRL_D)
            assert second.end() == 0


@pytest.mark.thorough
def test_attach_talks_to_a_session_of_the_store(env: dict[str, str], folder: Path) -> None:
    assert piped(env, "run", "claude", "hello", "--name", "kept", *AGENT).returncode == 0
    with Terminal("attach", "kept", env=env, cwd=folder) as terminal:
        terminal.wait_text("> hello\nhello\ndone")
        terminal.type(f"again{ENTER}")
        terminal.wait_text("> again\nagain\ndone")
        terminal.type(CTRL_D)
        assert terminal.end() == 0
    assert processes_in(folder) == []
    with Terminal("top", env=env) as terminal:
        terminal.wait_text("kept")
        terminal.type("q")
        assert terminal.end() == 0
