"""The server inside: begun when there is no other, so that there is always one to ask, and only one way to ask it.

It is the server of `banksman serve`, on a port of its own and on this machine only. It is announced in the state folder
as any other, so that a second editor finds it; and it ends with us.

Signals and the server's loop belong to the main thread. So whoever needs a server only asks for it, by a `Wish`
that the main thread waits for, and waits until it is there.
"""

from __future__ import annotations

import asyncio
import enum
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from banksman.cli.client.client import Client, ClientError, NoServer
from banksman.cli.client.discovery import ServerPlace, named
from banksman.errors import UsageError
from banksman.folders import state_folder

# A store with much in it is read when it is opened.
START_SECONDS_MAX = 60.0
# When the editor is gone: what runs may take so long to finish, and is stopped then. Editors wait some two seconds for
# us to end before they signal, and to stop an agent takes its time too.
FINISH_SECONDS = 0.5


class Wish(enum.Enum):
    """What the main thread is asked for. No value is the number of a signal."""

    SERVE = ord("s")
    LEAVE = ord("l")


class ServerWishes:
    """The wishes, in order, in a pipe.

    A signal that arrives just before the main thread begins to wait in `queue.get` does not wake it: its handler would
    run at the next wish, which may never come. Python writes the number of each signal to the pipe as well.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)

    def wake_on_signals(self) -> None:
        """Call it in the main thread, and again when a loop has ended there."""
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def put(self, wish: Wish) -> None:
        """From any thread, also from the handler of a signal."""
        os.write(self._write, bytes([wish.value]))

    def get(self) -> Wish:
        while True:
            (byte,) = os.read(self._read, 1)
            # Otherwise it is a signal, and its handler has run when this line is reached.
            if byte in (wish.value for wish in Wish):
                return Wish(byte)

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


class _Phase(enum.Enum):
    ABSENT, STARTING, SERVING = range(3)


class OwnServer:
    """`install` is called in the server's loop once it serves: the signals that it has taken are to be ours."""

    def __init__(self, wishes: ServerWishes, install: Callable[[asyncio.AbstractEventLoop], None]) -> None:
        self._wishes = wishes
        self._install = install
        # For the three below. Nothing is called while it is held but `ServerWishes.put`, which never waits.
        self._changed = threading.Condition()
        self._phase = _Phase.ABSENT
        self._place: ServerPlace | None = None
        self._failure = ""

    @property
    def place(self) -> ServerPlace | None:
        with self._changed:
            return self._place

    # -- from any thread but the main one ----------------------------------------------------------------------------
    def start(self) -> ServerPlace:
        """Where it is, when it can be asked. Raises `NoServer`."""
        with self._changed:
            if self._phase is _Phase.ABSENT:
                self._phase, self._failure = _Phase.STARTING, ""
                self._wishes.put(Wish.SERVE)
            self._changed.wait_for(self._is_settled, START_SECONDS_MAX)
            if self._place is None:
                reason = self._failure or f"not within {START_SECONDS_MAX:.0f} s"
                raise NoServer(f"there is no server, and none could be started here: {reason}")
            return self._place

    def end(self) -> None:
        """Let what runs finish, for a moment; then it ends. Returns when it was told so."""
        with self._changed:
            self._changed.wait_for(self._is_settled, START_SECONDS_MAX)
            place = self._place
        if place is not None:
            try:
                Client(lambda: place).post("/v1/drain", {"timeout": FINISH_SECONDS})
            except ClientError:
                pass  # It ends already.

    def _is_settled(self) -> bool:
        return self._phase is not _Phase.STARTING

    # -- in the main thread ------------------------------------------------------------------------------------------
    def run(self) -> bool:
        """Serve until it is told to end. False: it was told before anybody could have asked it to, so by a signal."""
        was_told = False
        try:
            was_told = self._run()
        except (UsageError, ModuleNotFoundError) as exc:
            self._fail(str(exc))
        finally:
            with self._changed:
                has_served = self._phase is _Phase.SERVING
                self._phase, self._place = _Phase.ABSENT, None
                self._changed.notify_all()
        return has_served or not was_told

    def _run(self) -> bool:
        try:
            from banksman.server.main import run  # noqa: PLC0415
            from banksman.server.server_settings import load  # noqa: PLC0415
        except ModuleNotFoundError as exc:
            if (exc.name or "").startswith("banksman"):
                raise
            self._fail(f"it needs {exc.name}, which is not installed (pip install 'banksman[server]')")
            return False
        settings = load(None, _flags())

        async def serving(_: Any, url: str) -> None:
            loop = asyncio.get_running_loop()
            self._install(loop)
            place = named(url if settings.token is None else f"{url}/#token={settings.token}")
            with self._changed:
                self._phase, self._place = _Phase.SERVING, place
                self._changed.notify_all()
            # Cancelled when the server ends.
            await loop.create_future()

        code = run(settings, serving)
        self._fail("it ended at once; stderr says why")
        return code == 0

    def _fail(self, reason: str) -> None:
        with self._changed:
            self._failure = reason


def _flags() -> dict[str, Any]:
    """The user's own settings, but nothing that others could reach: who starts an editor has not asked for that. The
    token is the one that clients here look for."""
    return {
        "bind": "127.0.0.1",
        "port": 0,
        "allow_remote": False,
        "token": os.environ.get("BANKSMAN_TOKEN", "").strip() or None,
        "token_file": str(state_folder() / "token"),
        "log_level": "warning",
    }
