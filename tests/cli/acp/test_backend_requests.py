"""Requests to the main thread of `banksman acp`."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from banksman.cli.acp.backend import MainThreadRequest, MainThreadRequests


@pytest.fixture
def wishes() -> Iterator[MainThreadRequests]:
    wishes = MainThreadRequests()

    def on_signal(number: int, frame: FrameType | None) -> None:
        wishes.put(MainThreadRequest.LEAVE)

    before = signal.signal(signal.SIGUSR1, on_signal)
    wishes.wake_on_signals()
    try:
        yield wishes
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGUSR1, before)
        wishes.close()


def is_asleep(thread: int) -> bool:
    stat = Path(f"/proc/self/task/{thread}/stat").read_text(encoding="utf-8")
    return stat.rpartition(") ")[2].startswith("S")


def test_signal_that_interrupts_no_wait_is_handled(wishes: MainThreadRequests) -> None:
    """A signal to another thread does not interrupt the main thread, like a signal that comes just before its wait."""
    is_over = threading.Event()
    main = threading.get_native_id()

    def send() -> None:
        # Only the kernel knows that the main thread waits.
        while not is_asleep(main):
            time.sleep(0.01)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        # If the signal does not wake the main thread, this does, and the test fails instead of hanging.
        if not is_over.wait(20):
            wishes.put(MainThreadRequest.SERVE)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        assert wishes.get() is MainThreadRequest.LEAVE
    finally:
        is_over.set()
        thread.join()


def test_main_thread_requests_keep_their_order_around_signals(wishes: MainThreadRequests) -> None:
    wishes.put(MainThreadRequest.SERVE)
    signal.raise_signal(signal.SIGUSR1)
    wishes.put(MainThreadRequest.SERVE)
    assert [wishes.get() for _ in range(3)] == [
        MainThreadRequest.SERVE,
        MainThreadRequest.LEAVE,
        MainThreadRequest.SERVE,
    ]
