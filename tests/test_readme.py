"""Run the Python examples of the README and of docs/python.md exactly as they are shown."""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import subprocess
import sys
import textwrap

from banksman.testing import fake_agent

ROOT = pathlib.Path(__file__).parents[1]
README = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL)


def run(code: str, folder: pathlib.Path, *, stdin: str = "", path: str = "") -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-W", "error", "-c", code]
    env = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}"}
    return subprocess.run(
        argv, cwd=folder, env=env, input=stdin, capture_output=True, text=True, timeout=60, check=False
    )


def test_readme_example_runs(tmp_path: pathlib.Path) -> None:
    script = {"prompt Why is CI red?": ["say the build is broken"]}
    shim = tmp_path / "claude"
    words = fake_agent.command(script, memory=tmp_path / "memory")
    shim.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    shim.chmod(0o755)
    (code,) = README
    done = run(code, tmp_path, path=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "the build is broken\ndone\n"


def test_readme_example_has_at_most_fifteen_lines() -> None:
    (code,) = README
    assert len([line for line in code.splitlines() if line.strip()]) <= 15


def test_python_page_bot_runs(tmp_path: pathlib.Path) -> None:
    """Run the bot with a fake agent that hangs on a chore until an interrupt, and does the chore again later."""
    chore = "prompt Tidy up the imports"
    words = fake_agent.command({f"{chore}": ["hang"], "prompt 3": ["say tidied"]}, memory=tmp_path / "memory")
    shim = tmp_path / "claude"
    shim.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    shim.chmod(0o755)
    done = run(BLOCKS[0], tmp_path, stdin="How are you?\nbye\n", path=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert "> How are you?" in done.stdout


def test_python_page_bot_has_at_most_thirty_lines() -> None:
    assert len([line for line in BLOCKS[0].splitlines() if line.strip()]) <= 30


def test_store_example_returns_the_same_turn_when_run_twice(tmp_path: pathlib.Path) -> None:
    shim = tmp_path / "claude"
    shim.write_text(f'#!/bin/sh\nexec {shlex.join(fake_agent.command(memory=tmp_path / "memory"))} "$@"\n')
    shim.chmod(0o755)
    code = f"import asyncio, banksman\nasync def main():\n{textwrap.indent(BLOCKS[1], '    ')}\nasyncio.run(main())"
    first, second = (run(code, tmp_path, path=str(tmp_path)) for _ in range(2))
    for done in (first, second):
        assert (done.returncode, done.stderr) == (0, "")
        assert "done\n" in done.stdout
        assert "fix-ci idle" in done.stdout
    assert first.stdout.split()[1] == second.stdout.split()[1]


def test_execute_example_runs(tmp_path: pathlib.Path) -> None:
    (tmp_path / "Makefile").write_text("test:\n\t@echo tested\n")
    done = run(BLOCKS[2], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("exited 0 None")
    assert "tested" in done.stdout


def test_background_command_example_runs(tmp_path: pathlib.Path) -> None:
    code = f"import asyncio, banksman\nasync def main():\n{textwrap.indent(BLOCKS[3], '    ')}\nasyncio.run(main())"
    done = run(code, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Serving HTTP on 127.0.0.1" in done.stdout


def test_reader_example_runs(tmp_path: pathlib.Path) -> None:
    code = f"import asyncio, banksman\nasync def main():\n{textwrap.indent(BLOCKS[4], '    ')}\nasyncio.run(main())"
    done = run(code, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("b'one\\n'\nb'two\\n'\n(Step(rung='eof'")


def test_python_page_examples_are_all_run() -> None:
    assert len(BLOCKS) == 5
