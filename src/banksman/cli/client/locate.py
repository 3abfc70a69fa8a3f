"""Locate the server for a verb, or start an embedded host for it when there is none.

The embedded host starts with the verb's first request and ends with the verb.

It is the server's own application (server/embedded.py), on a socket in the state folder that only this user can open.
So a verb asks it as it asks any server; and a second verb, in another terminal, that finds a session in its hands, asks
it too. When the verb ends, sessions stay in the store, asleep; their agents' processes do not.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from banksman import config
from banksman.cli.client.client import Client, ClientError, NoServer, UnexpectedReply
from banksman.cli.client.discovery import ServerAddress, announced, at_socket, is_there, named
from banksman.cli.output import PATIENCE_SECONDS, ProgressMessage, say_progress
from banksman.cluster.store_address import is_address, parse
from banksman.errors import UsageError
from banksman.folders import state_folder

if TYPE_CHECKING:
    from banksman.server.embedded import EmbeddedServer

# What others have asked of this host by the time the verb is done may take so long.
FINISH_SECONDS = 60.0
# Told to end so, a program is killed unless it listens; and would leave its socket behind.
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)

# As `Host` takes them after a path.
_STORE_SETTINGS = re.compile(r"\?(?=(?:level|keep_bytes|keep_seconds)=)")
# What a server says that was told no store.
_USUAL = "the state folder"


class VerbHost:
    """Of one verb. `store` None: as the settings say, or the user's own."""

    def __init__(self, store: str | None, *, in_memory: bool) -> None:
        self._store = store
        self._in_memory = in_memory
        self._inside: EmbeddedServer | None = None
        self._before: dict[int, Any] = {}

    def start(self) -> ServerAddress:
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
            with ProgressMessage("finishing what others have asked for here; Ctrl-C stops it"):
                inside.stop(FINISH_SECONDS)
        self._inside = None
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _made(self) -> EmbeddedServer:
        try:
            from banksman.server.embedded import EmbeddedServer  # noqa: PLC0415
            from banksman.server.server_settings import load  # noqa: PLC0415
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
        return EmbeddedServer(settings)

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


# Which server a verb asks. It is decided once, with the first request, and holds until the verb ends.
#
# A server that was named (`--url`, `BANKSMAN_URL`, `url` of the settings) is the one, whether it is there or not. Else
# it is the one that this user has running. Else it is a host inside of the verb (above), on the store that was
# named or the user's own: the same application, asked in the same way. On a store that many machines share it takes no
# session, and asks those that do.
#
# A store that was named for this call (`--store`, `BANKSMAN_STORE`) is meant: a running server that has another is left
# alone. A verb that has begun with a server stays with it: one that is started anew is waited for, and never replaced
# by a host inside, which could not wait for anybody.


class ServerLocator:
    """Of one verb. Any thread may ask where; the one that began the verb ends it."""

    def __init__(self, *, url: str | None, store: str | None, in_memory: bool = False, needs_server: str = "") -> None:
        """`in_memory`: a store that ends with the verb makes sense. `needs_server`: why a host inside will not do."""
        self._flags = {"url": url or None, "store": store or None}
        self._in_memory = in_memory
        self._needs_server = needs_server
        # Whoever holds it decides, which may take as long as a host takes to start; the others want to know the same.
        self._deciding = threading.Lock()
        self._decided: Callable[[], ServerAddress] | None = None
        self._embedded: VerbHost | None = None

    def place(self) -> ServerAddress:
        """The server, as it is known at this moment. Raises `NoServer` and whatever keeps a host from starting."""
        with self._deciding:
            if self._decided is None:
                self._decided = self._decide()
        return self._decided()

    @property
    def is_embedded(self) -> bool:
        """Nobody but us will be there when this verb has ended."""
        return self._embedded is not None

    def end(self, *, at_once: bool) -> None:
        """What runs inside may finish, if it need not be `at_once`. May be called again, after an interruption too."""
        if self._embedded is not None:
            self._embedded.end(at_once=at_once)

    def _decide(self) -> Callable[[], ServerAddress]:
        found = config.load(flags=self._flags)
        url, store = found["url"], found["store"]
        if self._flags["url"] is not None and self._flags["store"] is not None:
            raise UsageError("a server has its own store", hint="either --url or --store")
        # A flag is heard before a variable, also where the two are not of the same name.
        if url.is_set and self._flags["store"] is None:
            return lambda: named(url.value)
        wanted: str | None = store.value if store.origin in (store.key.flag, store.key.variable) else None
        running = announced()
        if running is not None and is_there(running) and (wanted is None or _has_store(running, wanted)):
            return _RunningServer(running)
        # Of a store that many share, the one inside only asks: those who do the work are there when it has ended.
        if self._needs_server and not is_address(wanted or found.value("serve.store") or ""):
            hint = "banksman serve starts one; --url names one elsewhere"
            raise NoServer(f"there is no server here, and {self._needs_server}", hint=hint)
        embedded = self._embedded = VerbHost(wanted, in_memory=self._in_memory)
        inside = embedded.start()
        return lambda: inside


class _RunningServer:
    """The server of this user, wherever it is by now; if it says nothing, where it was."""

    def __init__(self, place: ServerAddress) -> None:
        self._last = place

    def __call__(self) -> ServerAddress:
        # Put there whole, by whichever thread: all of them read the same file.
        self._last = announced() or self._last
        return self._last


def _has_store(place: ServerAddress, wanted: str) -> bool:
    try:
        told: Any = Client(lambda: place).get("/v1/server")
        return _file_of(str(told["store"])) == _file_of(wanted)
    except (ClientError, UnexpectedReply):
        return False


def _file_of(store: str) -> str:
    """Two that name the same file are the same store; what is no file is only itself. Of one that many share a server
    tells where it is, and not how it is let in."""
    if is_address(store):
        return str(parse(store))
    if store != _USUAL and not store.startswith("sqlite:"):
        return store
    path = "" if store == _USUAL else _STORE_SETTINGS.split(store.removeprefix("sqlite:"))[0]
    if not path:
        return os.path.realpath(state_folder() / "store.db")
    # One that a server was given as a relative path is in a folder that we do not know. It is another one then: a
    # session that the server has is found to be in its hands all the same.
    return os.path.realpath(os.path.expanduser(path))
