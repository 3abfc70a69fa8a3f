"""Run an example as a user does: in its own process and folder, with a scripted agent in place of Claude Code."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from banksman.testing import fake_agent

EXAMPLES = Path(__file__).parents[2] / "examples"
SECONDS_MAX = 240.0


def environment(folder: Path, script: Mapping[str, Sequence[str]] | None = None) -> dict[str, str]:
    """Return the variables of an example whose agent follows this script and leaves evidence in the folder."""
    words = fake_agent.command(script or {}, evidence=folder / "evidence", memory=folder / "memory")
    return {**os.environ, "AGENT": shlex.join(words), "XDG_STATE_HOME": str(folder / "state")}


class Program:
    """An example that runs. A test reads its lines, and each line is a fact to wait for."""

    def __init__(
        self, name: str, folder: Path, *arguments: str, script: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments],
            cwd=folder,
            env=environment(folder, script),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        # The deadline of the whole test: a line that never comes fails the test with the program's errors.
        self._deadline = threading.Timer(SECONDS_MAX, self.process.kill)
        self._deadline.start()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self._deadline.cancel()
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def write(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def read(self) -> str:
        """Return the next line of the output, without its end."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        return line.rstrip("\n")

    def end(self) -> tuple[int, str, str]:
        """Close the input and return the exit code, the rest of the output, and the errors."""
        out, err = self.process.communicate(timeout=SECONDS_MAX)
        return self.process.returncode, out, err
