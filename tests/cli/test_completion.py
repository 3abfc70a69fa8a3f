"""Completion in real shells: bash, zsh and fish, each with its script.

zsh and fish are not on every machine. Their tests are skipped with a message where one is missing. bash must be there.
"""

from __future__ import annotations

import os
import pty
import select
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.server.kit import SECONDS_MAX, Served
from tests.thorough import one_in, thorough

from banksman.cli import VERBS
from banksman.cli.commands.completion import SHELLS, script
from banksman.cli.completion_table import WordKind, verbs

pytestmark = thorough

# Typed words and offered words. The last word is the one to complete.
CASES: list[tuple[list[str], list[str]]] = [
    (["conf"], ["config"]),
    (["a"], ["acp", "agents", "answer", "ask", "attach"]),
    (["--v"], ["--version"]),
    (["help", "doct"], ["doctor"]),
    (["ask", "--pri"], ["--priority"]),
    (["ask", "x", "y", "--priority", ""], ["background", "interactive", "normal"]),
    (["ask", "--on-busy", "st", "x"][:3], ["steer"]),
    (["ps", "--format", "q"], ["quiet"]),
    (["config", "show", "serve.por"], ["serve.port"]),
    (["config", ""], ["init", "path", "show"]),
    (["answer", "x", ""], ["allow", "deny"]),
    (["completion", "f"], ["fish"]),
    (["serve", "--log-l"], ["--log-level"]),
    # The value of a flag is not one of the verb's words.
    (["run", "--priority", "normal", "gem"], ["gemini"]),
    # The flags of `banksman` do not complete the words of a command.
    (["exec", "--timeout", "5", "--", "truncat"], ["truncate"]),
    (["exec", "truncat"], ["truncate"]),
]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the scripts, and with a `banksman` in `bin`."""
    folder = tmp_path_factory.mktemp("completion")
    (folder / "bin").mkdir()
    program = folder / "bin" / "banksman"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m banksman "$@"\n')
    program.chmod(0o755)
    for shell in SHELLS:
        (folder / shell).write_text(script(shell))
    return folder


def environment(scripts: Path, home: Path) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("BANKSMAN_")}
    return {
        **clean,
        "PATH": f"{scripts / 'bin'}:{os.environ['PATH']}",
        "HOME": str(home),
        "XDG_STATE_HOME": str(home / "state"),
        "XDG_CONFIG_HOME": str(home / "config"),
        "XDG_DATA_HOME": str(home / "data"),
        "ZDOTDIR": str(home),
    }


def run(shell: str, text: str, scripts: Path, home: Path) -> str:
    done = subprocess.run(
        [shell, "-c", text],
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        env=environment(scripts, home),
        cwd=home,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def bash(words: list[str], scripts: Path, home: Path) -> list[str]:
    """Complete as readline calls it: with the words and the index of the current one."""
    text = f"""
        source {shlex.quote(str(scripts / "bash"))}
        complete -p banksman >/dev/null || exit 9
        COMP_WORDS=(banksman {" ".join(map(shlex.quote, words))}); COMP_CWORD={len(words)}
        _banksman banksman
        (( ${{#COMPREPLY[@]}} )) && printf '%s\\n' "${{COMPREPLY[@]}}"; true
    """
    return sorted(set(run("bash", text, scripts, home).splitlines()))


def fish(words: list[str], scripts: Path, home: Path) -> list[str]:
    line = " ".join(["banksman", *words])
    text = f"source {scripts / 'fish'}; complete -C {shlex.quote(line)}"
    return sorted({each.partition("\t")[0] for each in run("fish", text, scripts, home).splitlines()})


def needs(shell: str) -> None:
    if shutil.which(shell) is None:
        assert shell != "bash", "bash is on every machine that runs these tests"
        pytest.skip(f"SKIPPED, NOT PASSED: there is no {shell} on this machine")


# -- each shell -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shell", SHELLS)
def test_completion_script_parses_in_its_shell(shell: str, scripts: Path, tmp_path: Path) -> None:
    needs(shell)
    run(shell, f"{shell} -n {scripts / shell}", scripts, tmp_path)


@pytest.mark.parametrize(("words", "offered"), one_in(3, CASES), ids=[" ".join(words) for words, _ in CASES])
def test_bash_completion_offers_words(words: list[str], offered: list[str], scripts: Path, tmp_path: Path) -> None:
    needs("bash")
    assert bash(words, scripts, tmp_path) == offered


def test_bash_completion_handles_a_flag_with_an_equals_sign(scripts: Path, tmp_path: Path) -> None:
    needs("bash")
    assert bash(["ps", "--format", "=", "js"], scripts, tmp_path) == ["json"]
    assert bash(["ps", "--format", "="], scripts, tmp_path) == ["json", "quiet", "text"]


def test_bash_completion_offers_folders_and_files(scripts: Path, tmp_path: Path) -> None:
    needs("bash")
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a file").touch()
    assert bash(["open", "--cwd", "a"], scripts, tmp_path) == ["a folder"]
    assert bash(["config", "--config", "a f"], scripts, tmp_path) == ["a file", "a folder"]


@pytest.mark.thorough
def test_fish_completion_offers_words(scripts: Path, tmp_path: Path) -> None:
    needs("fish")
    for words, offered in CASES:
        assert fish(words, scripts, tmp_path) == offered, words
    assert fish(["ps", "--format=js"], scripts, tmp_path) == ["--format=json"]


def test_zsh_completion_works_on_a_terminal(scripts: Path, tmp_path: Path) -> None:
    needs("zsh")
    terminal = Terminal(["zsh", "-f", "-i"], environment(scripts, tmp_path))
    try:
        setup = f"autoload -Uz compinit; compinit -u -D; source {scripts / 'zsh'}; unsetopt beep; echo rea''dy\n"
        terminal.type(setup)
        terminal.wait("ready")
        for words, offered in CASES:
            line = " ".join(["banksman", *words])
            if len(offered) == 1:
                terminal.type(f"{line}\t")
                terminal.wait(f"{line[: len(line) - len(words[-1])]}{offered[0]} ")
                terminal.type("\x15")  # Clears the line.
        terminal.type("banksman ps --format=js\t")
        terminal.wait("banksman ps --format=json ")
        terminal.type("\x15exit\n")
    finally:
        terminal.close()


class Terminal:
    """A shell on a terminal, and its output."""

    def __init__(self, argv: list[str], env: dict[str, str]) -> None:
        self.said = ""
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.execvpe(argv[0], argv, {**env, "TERM": "dumb", "PS1": "> "})

    def type(self, text: str) -> None:
        self.said = ""
        os.write(self._fd, text.encode())

    def wait(self, text: str) -> None:
        deadline = time.monotonic() + SECONDS_MAX
        while text not in self.said:
            left = deadline - time.monotonic()
            assert left > 0, f"not {text!r} in {self.said!r}"
            if select.select([self._fd], [], [], left)[0]:
                self.said += os.read(self._fd, 65536).decode(errors="replace")

    def close(self) -> None:
        os.close(self._fd)  # A shell exits when its terminal is gone.
        os.waitpid(self._pid, 0)


# -- current names ----------------------------------------------------------------------------------------------------
NAMES = ["fix-ci", "nightly build", "it's $HOME"]


@pytest.fixture
def with_sessions(tmp_path: Path) -> Served:
    served = Served(tmp_path, store=f"sqlite:{tmp_path / 'state' / 'banksman' / 'store.db'}")
    (tmp_path / "state" / "banksman").mkdir(parents=True)
    return served


def test_completion_offers_session_names_with_and_without_a_server(
    with_sessions: Served, scripts: Path, tmp_path: Path
) -> None:
    needs("bash")
    quoted = sorted(["fix-ci", r"nightly\ build", r"it\'s\ \$HOME"])
    with with_sessions as served:
        for name in NAMES:
            served.open(name=name)
        unnamed = served.open()
        assert bash(["log", ""], scripts, tmp_path) == sorted([*quoted, unnamed])
        assert bash(["close", "fi"], scripts, tmp_path) == ["fix-ci"]
        assert bash(["log", "fix-ci", ""], scripts, tmp_path) == [], "one session is enough"
    # The server is gone. Completion reads the store and does not change it.
    store = tmp_path / "state" / "banksman"
    before = {path.name: path.stat().st_mtime_ns for path in store.iterdir()}
    assert bash(["log", ""], scripts, tmp_path) == sorted([*quoted, unnamed])
    assert {path.name: path.stat().st_mtime_ns for path in store.iterdir()} == before


@pytest.mark.parametrize("spoilt", ["config/banksman/config.toml", "state/banksman/store.db"])
def test_completion_is_silent_when_settings_or_store_are_broken(spoilt: str, scripts: Path, tmp_path: Path) -> None:
    needs("bash")
    for folder in ("config", "state"):
        (tmp_path / folder / "banksman").mkdir(parents=True)
    (tmp_path / spoilt).write_text("neither settings nor a store, but long enough for both " * 100)
    assert bash(["log", ""], scripts, tmp_path) == []
    assert run("bash", "banksman completion --list sessions", scripts, tmp_path) == "", "and nothing on stderr"


@pytest.mark.thorough
def test_completion_gives_up_on_a_silent_server(scripts: Path, tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        env = {**environment(scripts, tmp_path), "BANKSMAN_URL": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "banksman", "completion", "--list", "sessions"],
            check=False,
            capture_output=True,
            timeout=SECONDS_MAX,
            env=env,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
        assert time.monotonic() - began < 15, "it is given up long before the client would"


# -- generated from the parsers ---------------------------------------------------------------------------------------
def test_completion_scripts_contain_every_verb_and_flag() -> None:
    texts = {shell: script(shell) for shell in SHELLS}
    described = list(verbs())
    assert [verb.name for verb in described] == list(VERBS)
    for verb in described:
        for flag in verb.flags:
            for name in flag.names:
                assert f"{verb.name} {name}" in texts["fish"] or not flag.takes
                for shell in ("bash", "zsh"):
                    assert name in texts[shell], (shell, verb.name, name)


def test_completion_offers_sessions_for_every_verb_that_takes_one() -> None:
    taking = {verb.name for verb in verbs() if verb.slots and verb.slots[0].kind is WordKind.SESSIONS}
    assert {"ask", "attach", "answer", "interrupt", "close", "why", "log"} <= taking
