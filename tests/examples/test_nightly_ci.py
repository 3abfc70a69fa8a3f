"""Run examples/nightly_ci.py as a CI system does: its exit code, its output and its report."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.examples.programs import Program

from banksman.testing.fake_agent import Evidence

NEVER = "1000"
# A test run that leaves a process behind, and passes once the agent has created the file.
TESTS = "setsid sleep 1000 & echo tested; test -e repaired"


def nightly(
    folder: Path, *steps: str, tests: str = TESTS, test_seconds: str = NEVER, agent_seconds: str = NEVER
) -> tuple[int, list[str], str]:
    """Run the job with an agent that performs these steps. Returns the code, the lines and the report."""
    times = ("--test-seconds", test_seconds, "--agent-seconds", agent_seconds)
    with Program("nightly_ci.py", folder, *times, "--", "sh", "-c", tests, script={"prompt": steps}) as job:
        code, out, err = job.end()
    assert err == ""
    return code, out.splitlines(), (folder / "nightly.md").read_text()


def test_nightly_ci_passes_when_the_agent_repairs_the_tests(tmp_path: Path) -> None:
    code, lines, report = nightly(tmp_path, "ask Bash {}", f"touch {tmp_path / 'repaired'}", "say repaired it")
    assert code == 0
    assert lines == [
        "tests: code 1, 1 leftover processes ended",
        "denied: Bash",
        "agent: done",
        "tests: code 0, 1 leftover processes ended",
        "exit code: 0",
    ]
    assert "repaired it" in report
    assert report.count("tested") == 2
    (agent,) = Evidence(tmp_path / "evidence").processes
    assert b"Nobody can approve this at night" in agent.stdin


@pytest.mark.thorough
def test_nightly_ci_fails_when_the_tests_still_fail(tmp_path: Path) -> None:
    code, lines, _ = nightly(tmp_path, "say I cannot")
    assert code == 1
    assert lines[1:] == ["agent: done", "tests: code 1, 1 leftover processes ended", "exit code: 1"]


@pytest.mark.thorough
def test_nightly_ci_exits_124_when_the_tests_take_too_long(tmp_path: Path) -> None:
    code, lines, _ = nightly(tmp_path, "say unused", tests="exec sleep 1000", test_seconds="0.2")
    assert code == 124
    assert lines == ["tests: timeout, 0 leftover processes ended", "exit code: 124"]


@pytest.mark.thorough
def test_nightly_ci_exits_124_when_the_turn_takes_too_long(tmp_path: Path) -> None:
    code, lines, _ = nightly(tmp_path, "hang", agent_seconds="0.2")
    assert code == 124
    assert lines[1:] == ["agent: interrupted", "exit code: 124"]
