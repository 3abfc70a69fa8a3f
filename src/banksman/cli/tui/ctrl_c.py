"""Ctrl-C, counted. The first stops the turn and not us: its ending is what was asked for, and comes in a moment. A
second one leaves, and raises `KeyboardInterrupt` wherever we are.

The turn is stopped by a thread of its own, so that a reader of ours who is slow to take what the agent says does not
keep it from being stopped.
"""

from __future__ import annotations

import queue
import signal
import threading
from types import FrameType

from banksman.cli.client.client import Client
from banksman.cli.session_actions import interrupt_turn
from banksman.cli.tui.event_loop import Done, ScreenLoop
from banksman.errors import BanksmanError

# Errands, as they come back: it is being stopped; it is.
STOPPING, STOPPED = "stopping", "stopped"


class Stops:
    def __init__(self, loop: ScreenLoop, client: Client) -> None:
        self.count = 0
        # Somebody wanted it stopped, and the receipt has not come.
        self.is_due = False
        self._loop = loop
        self._client = client
        # True: stop it. To put into one of these is allowed in a signal handler.
        self._wishes: queue.SimpleQueue[bool] = queue.SimpleQueue()
        loop.handle(signal.SIGINT, self._on_signal)

    def begin(self, session: str, turn: str) -> None:
        """The turn is known from here on. One who wanted it stopped before that has his wish now."""
        threading.Thread(target=self._stop, args=(session, turn), name="banksman-interrupt", daemon=True).start()

    def stop(self) -> None:
        """As a first Ctrl-C does, without counting as one."""
        if not self.is_due:
            self.is_due = True
            self._wishes.put(True)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt
        self.stop()

    def _stop(self, session: str, turn: str) -> None:
        self._wishes.get()
        self._loop.post(Done(STOPPING))
        try:
            self._loop.post(Done(STOPPED, interrupt_turn(self._client, session, turn)))
        except BanksmanError as exc:
            self._loop.post(Done(STOPPED, error=exc))
