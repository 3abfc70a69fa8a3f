"""What takes longer than a moment says what it is, to a person, and to nobody else."""

from __future__ import annotations

import sys
import threading

from banksman.cli.output.terminal import say_aside

# Whoever waits longer for something is told what for.
PATIENCE_SECONDS = 1.0


class Telling:
    """Says what is being done, if it takes long. Only in the main thread: a verb that has the whole screen waits for
    nothing there, and says what it waits for in its own way."""

    def __init__(self, doing: str) -> None:
        self._timer: threading.Timer | None = None
        if has_person() and threading.current_thread() is threading.main_thread():
            self._timer = threading.Timer(PATIENCE_SECONDS, say_progress, (doing,))
            self._timer.daemon = True

    def __enter__(self) -> None:
        if self._timer is not None:
            self._timer.start()

    def __exit__(self, *exc_info: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()


def say_progress(doing: str) -> None:
    if has_person():
        say_aside(f"banksman: {doing} …")


def has_person() -> bool:
    """A program that reads stderr has asked for nothing of the kind."""
    return sys.stderr is not None and sys.stderr.isatty()
