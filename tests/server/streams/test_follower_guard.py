"""The check that an open stream repeats: a check that fails ends the stream, and is logged."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from banksman.errors import StoreBusy
from banksman.server.streams import follower


class Transport:
    """A transport that records its abort."""

    def __init__(self) -> None:
        self.transport = self
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True


async def test_stream_whose_check_fails_is_aborted_and_the_error_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def is_allowed() -> bool:
        raise StoreBusy("the store is locked")

    connection = Transport()
    guard = follower._abort_when_forbidden(  # pyright: ignore[reportPrivateUsage]
        cast(Any, connection), is_allowed
    )
    task = asyncio.create_task(guard)
    await asyncio.wait((task,))
    assert connection.is_aborted
    assert task.exception() is None
    assert "the store is locked" in caplog.text
