"""Frames without a meaning, which the driver logs without a step of the state machine."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from tests.core.session.talk import CONFIG

from banksman.core.session import plain_frames
from banksman.core.session.event import UPDATE
from banksman.core.session.facts import FramesRead
from banksman.core.session.history import SessionHistory
from banksman.core.session.state import ProcessPhase, ProcessState, Session
from banksman.sessions.driver import PLAIN_FRAMES_MAX, Driver
from banksman.store.memory import MemoryLog


class Listener:
    """Ignores all results, and notes the error of a failed session."""

    def __init__(self) -> None:
        self.failures: list[BaseException] = []

    def fail(self, error: BaseException) -> None:
        self.failures.append(error)

    def __getattr__(self, _: str) -> Any:
        return self._ignore

    def _ignore(self, *_: object, **__: object) -> None:
        pass


async def driven() -> tuple[MemoryLog, Driver, Listener]:
    """Return a driver whose agent is ready."""
    log, listener = MemoryLog(), Listener()
    past = SessionHistory(session=Session(config=CONFIG))
    spawn: Any = None
    hears: Any = listener
    epoch = await log.claim("s", agent="a")
    driver = Driver("s", past, epoch=epoch, store=log, spawn=spawn, listener=hears)
    process = ProcessState(number=1, phase=ProcessPhase.READY)
    driver._state = replace(driver._state, process=process)  # pyright: ignore[reportPrivateUsage]
    return log, driver, listener


async def test_plain_frames_are_logged_and_counted() -> None:
    log, driver, _ = await driven()
    driver.on_frames(1, [b"one", b"two"], [])
    driver.on_frames(1, [b"three"], [])
    assert driver.state.head == 3
    await log.wait_past("s", 2)
    assert [(event.kind, event.data) for event in (await log.read("s", 0)).events] == [
        (UPDATE, b"one"),
        (UPDATE, b"two"),
        (UPDATE, b"three"),
    ]
    await log.close()


async def test_frames_of_a_replaced_process_are_ignored() -> None:
    log, driver, _ = await driven()
    driver.on_frames(0, [b"late"], [])
    assert driver.state.head == 0
    await log.close()


@pytest.mark.parametrize("error", [ValueError("bug"), KeyboardInterrupt()])
@pytest.mark.parametrize("where", ["entries", "store"])
async def test_failure_of_a_plain_frame_fails_the_session(
    where: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, driver, listener = await driven()
    driver.on_frames(1, [b"before"], [])

    def fail(*_: object, **__: object) -> None:
        raise error

    place = (plain_frames.FrameLabel, "entries") if where == "entries" else (log, "append")
    monkeypatch.setattr(*place, fail)
    try:
        driver.on_frames(1, [b"x"], [])
        is_raised = False
    except KeyboardInterrupt:
        is_raised = True
    assert is_raised is isinstance(error, KeyboardInterrupt)
    assert driver.error is error
    assert len(listener.failures) == 1
    # The record of the failure has the frames before it, and the one that the store refused.
    flight = driver.recorder.flight()
    assert flight is not None
    noted = [b""] if where == "entries" else [b"", b""]
    assert [fact.lines for fact in flight[1] if isinstance(fact, FramesRead)] == [noted]
    await log.close()


async def test_recorder_notes_a_long_answer_in_small_facts() -> None:
    log, driver, _ = await driven()
    for _ in range(PLAIN_FRAMES_MAX * 100):
        driver.on_frames(1, [b"token"], [])
    flight = driver.recorder.flight()
    assert flight is not None
    assert max(len(fact.lines) for fact in flight[1] if isinstance(fact, FramesRead)) <= PLAIN_FRAMES_MAX
    assert driver.state.head == PLAIN_FRAMES_MAX * 100
    await log.close()
