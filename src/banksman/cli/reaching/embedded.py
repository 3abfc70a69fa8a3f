"""A host inside of a verb, where there is no server: it begins with the verb's first request, and ends with the verb.

It is the server's own application (serve/inside.py), on a socket in the state folder that only this user can open. So a
verb asks it as it asks any server; and a second verb, in another terminal, that finds a session in its hands, asks it
too. When the verb ends, sessions stay in the store, asleep; their agents' processes do not.
"""

from __future__ import annotations

import signal
import threading
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from banksman.cli.reaching.client import NoServer
from banksman.cli.reaching.finding import Place, at_socket
from banksman.cli.saying.progress import PATIENCE_SECONDS, Telling, say_progress
from banksman.errors import UsageError

if TYPE_CHECKING:
    from banksman.serve.inside import Inside

# What others have asked of this host by the time the verb is done may take so long.
FINISH_SECONDS = 60.0
# Told to end so, a program is killed unless it listens; and would leave its socket behind.
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class Embedded:
    """Of one verb. `store` None: as the settings say, or the user's own."""

    def __init__(self, store: str | None, *, in_memory: bool) -> None:
        self._store = store
        self._in_memory = in_memory
        self._inside: Inside | None = None
        self._before: dict[int, Any] = {}

    def start(self) -> Place:
        """Where it is. `NoServer`: this installation has no server in it. Also whatever is wrong with the store."""
        inside = self._inside = self._made()
        self._hear_signals()
        ready = inside.start_nowait()
        _tell_if_late(ready, "no server runs here: starting a host inside of this verb")
        return at_socket(str(ready.result()))

    def end(self, *, at_once: bool) -> None:
        """Returns when nothing is left of it. Torn out of it (by Ctrl-C), call it again."""
        inside = self._inside
        if inside is None:
            return
        if at_once:
            inside.stop(0.0)
        else:
            with Telling("finishing what others have asked for here; Ctrl-C stops it"):
                inside.stop(FINISH_SECONDS)
        self._inside = None
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _made(self) -> Inside:
        try:
            from banksman.serve.inside import Inside  # noqa: PLC0415
            from banksman.serve.settings import load  # noqa: PLC0415
        except ModuleNotFoundError as exc:
            if (exc.name or "").startswith("banksman"):
                raise
            hint = "pip install 'banksman[server]', or name a server by --url"
            raise NoServer(
                f"there is no server, and one inside needs {exc.name}, not installed here", hint=hint
            ) from exc
        settings = load(None, {"store": self._store})
        if settings.store == "memory:" and not self._in_memory:
            hint = "--store sqlite:PATH"
            raise UsageError("a store in memory ends with this verb, and nothing is in it when it begins", hint=hint)
        return Inside(settings)

    def _hear_signals(self) -> None:
        # Only there can they be heard; and whoever has set them has a reason.
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._before[number] = signal.signal(number, _leave)


def _leave(number: int, _: FrameType | None) -> NoReturn:
    # Once: a second one would tear us out of our end.
    for one in _SIGNALS:
        signal.signal(one, signal.SIG_IGN)
    # As a shell tells of a program that a signal has ended.
    raise SystemExit(128 + number)


def _tell_if_late(ready: Future[Path], doing: str) -> None:
    try:
        ready.exception(PATIENCE_SECONDS)
    except TimeoutError:
        say_progress(doing)
