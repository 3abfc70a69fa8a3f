"""The script of docs/how-to/guard.md for `cli_path`, run by the real SDK with a scripted CLI behind it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from claude_agent_sdk import ClaudeAgentOptions, ResultMessage, query
from tests.claude_sdk.cli import scripted
from tests.docs.blocks import blocks
from tests.guard.running import SECONDS_MAX, environment

# The prompt, the end of the input, and only then the work. A guard that reacts to the end needs a fraction of the time.
WORKS_AFTER_THE_END_OF_INPUT = "\nfor prompt in prompts():\n    pass\ntime.sleep(1)\nresult()\n"


async def test_documented_script_lets_a_query_finish_after_its_input_has_ended(
    tmp_path: Path, marker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`query("text")` closes stdin after the prompt, and the agent works on."""
    [block] = [each for each in blocks() if each.page == "docs/how-to/guard.md" and "> guarded-claude" in each.text]
    subprocess.run(["sh", "-ec", block.text], cwd=tmp_path, check=True, timeout=SECONDS_MAX)
    scripted(tmp_path, marker, WORKS_AFTER_THE_END_OF_INPUT)
    (tmp_path / "cli").rename(tmp_path / "claude")
    # The default would give the CLI ten seconds after a hang-up.
    banksman = tmp_path / "banksman"
    words = f"'{sys.executable}' -m banksman \"$verb\" --grace-after-eof 0"
    banksman.write_text(f'#!/bin/sh\nverb=$1; shift\nexec {words} "$@"\n')
    banksman.chmod(0o700)
    env = environment()
    monkeypatch.setenv("PYTHONPATH", env["PYTHONPATH"])
    monkeypatch.setenv("PATH", f"{tmp_path}:{env['PATH']}")
    options = ClaudeAgentOptions(cli_path=tmp_path / "guarded-claude")
    messages = [message async for message in query(prompt="hello", options=options)]
    assert [type(message) for message in messages] == [ResultMessage]
