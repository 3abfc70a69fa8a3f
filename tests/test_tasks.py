"""Background tasks: the log line of a failed one names it."""

from __future__ import annotations

import pytest

from banksman.tasks import OwnedTasks


async def test_failed_background_task_is_logged_by_its_name(caplog: pytest.LogCaptureFixture) -> None:
    async def renew_leases() -> None:
        raise ValueError("odd")

    tasks = OwnedTasks()
    tasks.start(renew_leases())
    await tasks.wait()
    (line,) = caplog.messages
    assert line.startswith("background task failed (task=")
    assert line.endswith("renew_leases error=ValueError('odd'))")
