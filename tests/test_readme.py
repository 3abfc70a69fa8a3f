"""What the README shows works as it is shown: its Python is run, its shell line too."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import textwrap

README = (pathlib.Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(code: str, folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_the_first_example_runs(tmp_path: pathlib.Path) -> None:
    (tmp_path / "Makefile").write_text("test:\n\t@echo tested\n")
    done = run(BLOCKS[0], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("exited 0 None")
    assert "tested" in done.stdout


def test_the_background_example_runs(tmp_path: pathlib.Path) -> None:
    code = f"import asyncio, banksman\nasync def main():\n{textwrap.indent(BLOCKS[1], '    ')}\nasyncio.run(main())"
    done = run(code, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Serving HTTP on 127.0.0.1" in done.stdout


def test_there_are_no_other_examples() -> None:
    assert len(BLOCKS) == 2
