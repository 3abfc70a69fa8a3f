"""`banksman agents` in a shell: known agents, installed agents, and the user's profiles."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from banksman.cli import main
from banksman.cli.commands import agents
from banksman.sessions.profile import CAPABILITIES

BANKSMAN = [sys.executable, "-m", "banksman", "agents"]
SECONDS_MAX = 60.0


class Machine:
    """A PATH and a user folder that hold only the files of the test."""

    def __init__(self, folder: Path) -> None:
        self.programs, self.users = folder / "bin", folder / "config" / "banksman" / "agents"
        self.programs.mkdir()
        self.users.mkdir(parents=True)
        self.environment = {
            **{name: value for name, value in os.environ.items() if name != "COLUMNS"},
            "PATH": str(self.programs),
            "XDG_CONFIG_HOME": str(folder / "config"),
        }

    def has(self, name: str, script: str) -> Path:
        program = self.programs / name
        program.write_text(f"#!{sys.executable}\n{script}\n")
        program.chmod(0o755)
        return program

    def run(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*BANKSMAN, *words],
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
            env={**self.environment, **more},
        )

    def told(self, *words: str) -> dict[str, dict[str, Any]]:
        done = self.run(*words, "--json")
        assert (done.returncode, done.stderr) == (0, "")
        return {each["name"]: each for each in json.loads(done.stdout)["agents"]}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_cli_agents_lists_capabilities_and_installed_agents(machine: Machine) -> None:
    machine.has("gemini", "raise SystemExit('started')")
    done = machine.run()
    assert (done.returncode, done.stderr) == (0, "")
    head, *lines = done.stdout.splitlines()
    columns = head.split()
    assert columns == ["AGENT", "FOUND", *sorted(CAPABILITIES)]
    rows = {line.split()[0]: dict(zip(columns, line.split(), strict=True)) for line in lines[: lines.index("")]}
    assert {name for name, row in rows.items() if row["FOUND"] == "yes"} == {"gemini"}
    assert (rows["claude"]["hooks"], rows["gemini"]["hooks"], rows["codex"]["steer"]) == ("yes", "-", "yes")
    # Beside the table: how to install a missing agent, and its repairs.
    rest = done.stdout.split("\n\n", 1)[1]
    assert f"gemini  Gemini CLI\n  found     {machine.programs}/gemini\n" in rest
    assert "kimi  Kimi Code\n  install   npm install -g @moonshot-ai/kimi-code\n  repaired  tools that are" in rest
    assert "\x1b" not in done.stdout


def test_cli_agents_uses_paragraphs_on_a_narrow_terminal(machine: Machine) -> None:
    """A real terminal of 60 columns: no line is wider, and the output has no colours."""
    leader, follower = pty.openpty()
    try:
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
        with subprocess.Popen([*BANKSMAN], stdout=follower, env=machine.environment) as process:
            os.close(follower)
            follower = -1
            said = b""
            while True:
                try:
                    piece = os.read(leader, 65536)
                except OSError:  # EIO: the last fd of the other side is closed.
                    break
                if not piece:
                    break
                said += piece
            assert process.wait(SECONDS_MAX) == 0
    finally:
        os.close(leader)
        if follower != -1:
            os.close(follower)
    lines = said.decode().replace("\r\n", "\n").splitlines()
    assert max(map(len, lines)) <= 60
    assert "goose" in lines
    assert sum(line.startswith("  cannot ") for line in lines) == 12
    assert b"\x1b" not in said


@pytest.mark.thorough
def test_cli_agents_of_one_agent_shows_all_that_is_known(machine: Machine) -> None:
    done = machine.run("opencode", COLUMNS="80")
    assert done.stdout.startswith(
        "opencode  OpenCode\n  install   npm install -g opencode-ai\n  command   opencode acp\n"
    )
    assert "  repaired  end_turn after an interrupt is reported as cancelled\n" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert list(machine.told("opencode")) == ["opencode"]
    unknown = machine.run("clod")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert unknown.stderr.startswith("banksman: there is no agent 'clod' (do you mean codex? known agents: claude, ")
    custom = machine.run("custom").stdout
    assert "  command   given when a session is opened" in custom
    assert "install" not in custom


def test_cli_agents_includes_the_users_profiles(machine: Machine) -> None:
    machine.has("house", "")
    (machine.users / "house.toml").write_text('extends = "custom"\ncommand = ["house", "--acp"]\n')
    (machine.users / "qwen.toml").write_text('extends = "qwen"\nafter_interrupt = "keep"\n')
    (machine.users / "bad.toml").write_text('extends = "custom"\n[ladder]\ngrease = 1\n')
    told = machine.told()
    house, qwen, bad = told["house"], told["qwen"], told["bad"]
    assert (house["found"], house["command"], house["overrides"]) == (True, ["house", "--acp"], False)
    assert (qwen["source"], qwen["overrides"]) == (str(machine.users / "qwen.toml"), True)
    assert qwen["repairs"] == ["tools that are still running after an interrupt are reported and kept"]
    assert told["gemini"]["source"] is None
    assert "bad.toml: there is no key ladder.grease (do you mean ladder.grace?" in bad["error"]
    assert (bad["found"], bad["capabilities"]) == (False, [])
    shown = machine.run().stdout
    assert f"from      {machine.users}/qwen.toml, replaces the built-in agent\n" in shown
    assert f"bad\n  from      {machine.users}/bad.toml\n  wrong     " in shown
    assert next(line for line in shown.splitlines() if line.startswith("bad ")).split()[2:] == ["?"] * len(CAPABILITIES)
    # For a script that wants the installed agents.
    assert machine.run("--format", "quiet").stdout == "house\n"


@pytest.mark.thorough
def test_cli_agents_starts_no_program_without_versions(machine: Machine, tmp_path: Path) -> None:
    mark = tmp_path / "started"
    note = f"import sys, os; open({str(mark)!r}, 'a').write(repr(sys.argv[1:]) + os.environ.get('CLAUDECODE', '-'))"
    machine.has("gemini", f"{note}; print(); print('0.61.0 \\x1b[31m')")
    machine.has("qwen", "raise SystemExit(1)")
    machine.environment["CLAUDECODE"] = "1"
    told = machine.told()
    assert told["gemini"]["found"]
    assert "version" not in told["gemini"]
    assert not mark.exists()
    told = machine.told("--versions")
    assert told["gemini"]["version"] == "0.61.0 \\x1b[31m"
    assert told["qwen"]["version"] is None
    assert "version" not in told["kimi"]
    # The program was asked only for its version, and without the variable of an enclosing agent.
    assert mark.read_text() == "['--version']-"
    assert "  version   unknown\n" in machine.run("qwen", "--versions").stdout


def test_cli_agents_does_not_wait_for_a_hanging_version(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No process of the program is left: the leak check of the tests looks for it."""
    machine.has("gemini", "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])")
    for name, value in machine.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(agents, "VERSION_SECONDS_MAX", 0.3)
    began = time.monotonic()
    assert main(["agents", "gemini", "--versions"]) == 0
    assert time.monotonic() - began < SECONDS_MAX / 6
    assert "  version   no answer in " in capsys.readouterr().out


def test_cli_agents_takes_no_version_from_a_launcher(machine: Machine) -> None:
    machine.has("npx", "print('11.0.0')")
    (machine.users / "mine.toml").write_text('extends = "custom"\ncommand = ["npx", "-y", "mine"]\n')
    assert machine.told("mine", "--versions")["mine"]["version"] is None


def test_cli_agents_help_names_the_folder_of_user_profiles(machine: Machine) -> None:
    done = machine.run("--help")
    assert done.returncode == 0
    assert str(machine.users) in done.stdout
    wrong = machine.run("--nonsense")
    assert (wrong.returncode, wrong.stdout) == (2, "")
