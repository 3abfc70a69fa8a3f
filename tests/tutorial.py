"""Follow docs/tutorial.md as a reader does: type each command into a real shell in a real terminal.

The page uses a small notation, and the output on the page is compared with the real output:

- A fenced block named `console` is typed into the first terminal. A block named `console second` is typed into a second
  terminal. Each terminal has one shell for the whole page, so a changed folder stays changed.
- A line that begins with `$ ` is typed, together with the following lines that begin with `> `. The lines below it are
  the complete output.
- `…` in a line stands for text that varies. A line with only `…` stands for any number of lines.
- Each command ends with code 0, unless the next command is `$ echo $?`, which shows another code.
- After a command that ends with `&` the prompt comes back immediately, so the test waits for the output below it.
- Between the blocks the page names pictures. The `picture` callback of `follow` gets each name at that point.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "tutorial.md"
# Time limit for one command. The first command may have to create an environment.
SECONDS_MAX = 90.0
# The prompt contains the exit code of the command before it.
PROMPT = re.compile(r"<<(\d+)>>")


@dataclass
class Command:
    """`shown`: the lines below the command. `terminal`: 1 or 2."""

    terminal: int
    typed: str
    shown: list[str] = field(default_factory=list[str])
    may_fail: bool = False

    @property
    def is_left_running(self) -> bool:
        return self.typed.rstrip().endswith("&")

    @property
    def pattern(self) -> re.Pattern[str]:
        lines = (
            r"(?:[^\n]*\n)*?" if line == "…" else "[^\n]*".join(map(re.escape, line.split("…"))) + "\n"
            for line in self.shown
        )
        return re.compile("".join(lines))


@dataclass(frozen=True)
class Picture:
    """`name`: the file in docs/images."""

    name: str


def steps(text: str) -> Iterator[Command | Picture]:
    """Yield the steps in the order of the page."""
    found = re.compile(r"^```console( second)?\n(.*?)^```$|!\[[^]]*\]\(images/([^)]+)\)", re.M | re.S)
    for match in found.finditer(text):
        second, block, picture = match.groups()
        if picture is not None:
            yield Picture(picture)
            continue
        command: Command | None = None
        for line in block.splitlines():
            if line.startswith("$ "):
                if command is not None:
                    command.may_fail = line == "$ echo $?"
                    yield command
                command = Command(2 if second else 1, line[2:])
            elif line.startswith("> ") and command is not None and not command.shown:
                command.typed += "\n" + line[2:]
            else:
                assert command is not None, f"a block begins with output: {line!r}"
                command.shown.append(line)
        if command is not None:
            yield command


class Terminal:
    """Shell with a terminal. The shell keeps its state from one command to the next."""

    def __init__(self, env: dict[str, str], folder: Path) -> None:
        self._own, other = os.openpty()
        # `setsid -c` gives the terminal to the shell, so that jobs and Ctrl-C work as for a person.
        self._shell = subprocess.Popen(
            ["setsid", "-c", "bash", "--noprofile", "--norc", "--noediting", "-i"],
            stdin=other,
            stdout=other,
            stderr=other,
            cwd=folder,
            env={**env, "PS1": "<<$?>>", "PS2": ""},
        )
        os.close(other)
        self.said = ""
        self._read_until(lambda: PROMPT.search(self.said) is not None, "its prompt")
        self._type("stty -echo")
        self._read_until(lambda: len(PROMPT.findall(self.said)) == 2, "its prompt")

    def perform(self, command: Command) -> str:
        """Type a command and return its output. Raises AssertionError if the page shows another output."""
        self.said = ""
        self._type(command.typed)

        def is_shown() -> bool:
            if not PROMPT.search(self.said):
                return False
            is_match = command.pattern.fullmatch(self._printed) is not None
            return is_match or not command.is_left_running

        self._read_until(is_shown, "\n".join([f"$ {command.typed}", *command.shown]))
        printed = self._printed
        assert command.pattern.fullmatch(printed), "\n".join(
            [f"the tutorial shows\n$ {command.typed}", *command.shown, "and it prints", printed]
        )
        (code,) = PROMPT.findall(self.said)
        assert command.may_fail or code == "0", f"$ {command.typed}\nended with code {code}, and printed\n{printed}"
        return printed

    def wait_for(self, state: str) -> None:
        """Wait until a session is in that state. A person who reads the page needs no command for this."""
        self.said = ""
        self._type(f"until banksman ps | grep -q '^{state} '; do sleep 0.1; done")
        self._read_until(lambda: PROMPT.search(self.said) is not None, f"a session whose state is {state!r}")

    @property
    def _printed(self) -> str:
        plain = PROMPT.sub("", self.said.replace("\r\n", "\n"))
        return plain if plain.endswith("\n") or not plain else plain + "\n"

    def _type(self, text: str) -> None:
        os.write(self._own, text.encode() + b"\n")

    def _read_until(self, is_there: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + SECONDS_MAX
        while not is_there():
            left = deadline - time.monotonic()
            assert left > 0, f"this did not come:\n{what}\nbut this:\n{self._printed}"
            if select.select([self._own], [], [], left)[0]:
                self.said += os.read(self._own, 1 << 16).decode(errors="replace")

    def close(self) -> None:
        """End the shell and its running jobs, as closing a terminal window does."""
        try:
            self._type("kill -TERM $(jobs -p) 2> /dev/null; sleep 0.2; kill -TERM $(jobs -p) 2> /dev/null; wait; exit")
            self._shell.wait(20)
        except (OSError, subprocess.TimeoutExpired):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._shell.pid, signal.SIGKILL)
            self._shell.wait()
        finally:
            os.close(self._own)


def own_text() -> str:
    """Return the page with a `sleep` that only this process uses.

    The page looks for the `sleep` by name, and another test may do the same.
    """
    return PAGE.read_text(encoding="utf-8").replace("sleep 4242", f"sleep 4242{os.getpid()}")


def follow(home: Path, picture: Callable[[str, str], None] | None = None) -> list[str]:
    """Run the whole page in the home folder `home`, and return all commands.

    `picture`: called with each picture's name at its place on the page, and with the last address that the server
    printed.
    """
    home.mkdir(parents=True, exist_ok=True)
    # The environment decides how to reach a registry. Variables that are set for Banksman or by a test are removed.
    ours = ("BANKSMAN_", "PYTEST_", "PYTHON", "VIRTUAL_ENV", "CI")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    env = {
        **inherited,
        "HOME": str(home),
        "XDG_STATE_HOME": str(home / "state"),
        "XDG_CONFIG_HOME": str(home / "config"),
        "TERM": "dumb",
        "NO_COLOR": "1",
        # A reader of the page can use the usual port. Tests run beside each other and cannot.
        "BANKSMAN_SERVE_PORT": "0",
    }
    terminals: dict[int, Terminal] = {}
    done: list[str] = []
    address = ""
    try:
        for step in steps(own_text()):
            if isinstance(step, Picture):
                if picture is not None:
                    picture(step.name, address)
                continue
            if step.terminal not in terminals:
                terminals[step.terminal] = Terminal(env, ROOT)
            printed = terminals[step.terminal].perform(step)
            done.append(step.typed)
            if step.typed.endswith("--no-wait"):
                terminals[step.terminal].wait_for("asks" if "@@ask" in step.typed else "running")
            for url in re.findall(r"http://\S+#code=\S+", printed):
                address = url
    finally:
        for terminal in terminals.values():
            terminal.close()
    return done
