"""Run examples/worker_pool.py: its own NATS nodes and workers, one of which dies during a job."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from tests.examples.programs import Program

from banksman.testing.fake_agent import Evidence

JOBS = {f"job {lane}.{job}" for lane in range(4) for job in range(3)}


@pytest.mark.thorough
def test_worker_pool_finishes_every_job_when_a_worker_is_killed(tmp_path: Path) -> None:
    go = tmp_path / "go"
    # Each worker has two lanes. Their second jobs wait, so the killed worker dies during two jobs.
    script = {f"prompt job {lane}.1": [f"wait {go}", "say late"] for lane in range(4)}
    with Program("worker_pool.py", tmp_path, script=script) as pool:
        lines = [pool.read()]
        while lines[-1] != "killed a worker":
            lines.append(pool.read())
        go.touch()
        code, out, err = pool.end()
    assert (code, err) == (0, "")
    outcomes = Counter([*lines[:-1], *out.splitlines()])
    done = {line.removesuffix(": done"): count for line, count in outcomes.items() if line.endswith(": done")}
    assert done == dict.fromkeys(JOBS, 1)
    unknown = {line.removesuffix(": unknown") for line in outcomes if line.endswith(": unknown")}
    assert unknown
    prompts = b"".join(process.stdin for process in Evidence(tmp_path / "evidence").processes)
    for job in JOBS - unknown:
        assert prompts.count(job.encode()) == 1  # A job with a known outcome is not repeated.
