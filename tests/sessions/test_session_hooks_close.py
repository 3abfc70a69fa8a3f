"""A host that closes while `on_close` runs waits for it, up to `hook_seconds`."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from tests.process.helpers import alive, wait_until
from tests.sessions.helpers import QUICK
from tests.sessions.test_session_hooks import STUCK, Scene, answer, scene

from banksman import HookCall, Host

__all__ = ["scene"]


@pytest.mark.parametrize("end", ["close", "drain"])
async def test_host_that_closes_waits_for_a_running_on_close(scene: Scene, tmp_path: Path, end: str) -> None:
    begun, gate = tmp_path / "begun", tmp_path / "gate"
    waits = 'echo >> "$0"; until [ -e "$1" ]; do sleep 0.05; done; echo close >> "$2"'
    hook = ["sh", "-c", waits, str(begun), str(gate), str(scene.notes)]
    host = Host(scene.store)
    await answer(await scene.open(host, on_close=hook))
    closing = asyncio.ensure_future(host.close() if end == "close" else host.drain())
    await asyncio.to_thread(wait_until, begun.exists, "the hook")
    assert not closing.done()
    gate.touch()
    await closing
    await host.close()
    assert [line.split()[0] for line in scene.said()] == ["open", "close"]


async def test_host_that_closes_waits_for_a_function(scene: Scene) -> None:
    begun, gate, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def closes(_: HookCall) -> None:
        begun.set()
        await gate.wait()
        await asyncio.to_thread(int)  # Longer than any pass of the loop.
        ended.set()

    host = Host(scene.store)
    await scene.open(host, on_close=closes)
    closing = asyncio.ensure_future(host.close())
    await begun.wait()
    assert not closing.done()
    gate.set()
    await closing
    assert ended.is_set()


async def test_host_that_closes_ends_an_on_close_that_takes_too_long(
    scene: Scene, tmp_path: Path, marker: str, caplog: pytest.LogCaptureFixture
) -> None:
    hook = ["sh", "-c", STUCK, marker, str(tmp_path / "mark")]
    host = Host(scene.store)
    await scene.open(host, on_close=hook, options={**QUICK, "hook_seconds": 0.5, "grace": 0.5})
    with caplog.at_level(logging.WARNING):
        await host.close()
    assert alive(marker) == []
    assert "on_close failed: it has not ended within 0.5 s (options: hook_seconds)" in caplog.text
