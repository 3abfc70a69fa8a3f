"""Locate the server for a verb, or start an embedded host if no server runs.

The embedded host starts with the verb's first request and ends with the verb. It is the server's
application (server/embedded.py) on a socket in the state folder that only this user can open. The
verb therefore talks to it as to any server. So does a second verb in another terminal that needs a
session of this host. When the verb ends, sessions stay in the store without a process, and the
processes of their agents end.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from banksman import config
from banksman.cli.client.client import Client
from banksman.cli.client.discovery import ServerAddress, announced, at_socket, is_there, named
from banksman.cli.client.exchange import ClientError, NoServer
from banksman.cli.client.server_reply import UnexpectedReply
from banksman.cli.output import PATIENCE_SECONDS, ProgressMessage, say_progress
from banksman.cluster.store_address import is_address, parse
from banksman.errors import UsageError
from banksman.folders import state_folder

if TYPE_CHECKING:
    from banksman.server.embedded import EmbeddedServer

# Other clients may have asked this host for work. It may take this long after the verb is done.
FINISH_SECONDS = 60.0
# By default these signals kill the process, which would leave the socket file behind.
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)

# The settings that `Host` accepts after a path.
_STORE_SETTINGS = re.compile(r"\?(?=(?:level|keep_bytes|keep_seconds)=)")
# The name that a server reports for the default store.
_USUAL = "the state folder"


class VerbHost:
    """The embedded host of one verb.

    `store`: None for the store of the settings, or the default one.
    """

    def __init__(self, store: str | None, *, in_memory: bool) -> None:
        self._store = store
        self._in_memory = in_memory
        self._inside: EmbeddedServer | None = None
        self._before: dict[int, Any] = {}

    def start(self) -> ServerAddress:
        """Start the host and return its address.

        Raises `NoServer` if the server packages are not installed, and the errors of opening the
        store.
        """
        inside = self._inside = self._made()
        self._hear_signals()
        ready = inside.start_nowait()
        _tell_if_late(ready, "no server is running: starting an embedded host")
        return at_socket(str(ready.result()))

    def end(self, *, at_once: bool) -> None:
        """End the host.

        Returns when nothing of it is left. After an interruption, call it again.
        """
        inside = self._inside
        if inside is None:
            return
        if at_once:
            inside.stop(0.0)
        else:
            with ProgressMessage("finishing the work of other clients; Ctrl-C stops it"):
                inside.stop(FINISH_SECONDS)
        self._inside = None
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _made(self) -> EmbeddedServer:
        try:
            # All that the host needs, so that the error names the first missing package.
            import_module("banksman.server.http_service")
            from banksman.server.embedded import EmbeddedServer  # noqa: PLC0415
            from banksman.server.server_settings import CHOICES, load  # noqa: PLC0415
        except ModuleNotFoundError as exc:
            if (exc.name or "").startswith("banksman"):
                raise
            hint = "run pip install 'banksman[server]', or name a server with --url"
            reason = f"the package {exc.name} is not installed"
            raise NoServer(
                f"no server is running, and an embedded host cannot start: {reason}", hint=hint
            ) from exc
        # The caller of an embedded host is its own user, and may choose everything.
        settings = load(None, {"store": self._store, "callers_choose": [*CHOICES]})
        if settings.store == "memory:" and not self._in_memory:
            hint = "pass --store sqlite:PATH"
            raise UsageError(
                "cannot use a store in memory: it is empty and ends with this verb", hint=hint
            )
        return EmbeddedServer(settings)

    def _hear_signals(self) -> None:
        # Only the main thread can set signal handlers. A handler that the program has set already
        # stays.
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._before[number] = signal.signal(number, _leave)


def _leave(number: int, _: FrameType | None) -> NoReturn:
    # Ignore further signals: a second one would interrupt the cleanup.
    for one in _SIGNALS:
        signal.signal(one, signal.SIG_IGN)
    # The exit code by which a shell reports death by a signal.
    raise SystemExit(128 + number)


def _tell_if_late(ready: Future[Path], doing: str) -> None:
    try:
        ready.exception(PATIENCE_SECONDS)
    except TimeoutError:
        say_progress(doing)


# The server of a verb. It is chosen at the first request and stays until the verb ends:
#
# 1. A server that the user named (`--url`, `BANKSMAN_URL`, `url` in the settings), whether it
#    answers or not.
# 2. The running server of this user.
# 3. An embedded host (above), on the named store or the default one. It is the same application,
#    addressed in the same way. On a store that many machines share it takes no session, and
#    forwards to the hosts that do.
#
# A store named for this call (`--store`, `BANKSMAN_STORE`) is binding: a running server with
# another store is not used. A verb that began with a server stays with it. While that server
# restarts, the verb waits. It never falls back to an embedded host, because that host would end
# with the verb.


class ServerLocator:
    """Choose the server of one verb. Thread-safe; the thread that began the verb ends it."""

    def __init__(
        self,
        *,
        url: str | None,
        store: str | None,
        cafile: str | None = None,
        in_memory: bool = False,
        only_reads: bool = False,
        needs_server: str = "",
    ) -> None:
        """Create a locator.

        `in_memory`: a store that ends with the verb is useful for it. `only_reads`: the verb does
        not create the store that the flag names. `needs_server`: why an embedded host is not
        enough; empty if it is.
        """
        self._flags = {"url": url or None, "store": store or None}
        self._cafile = cafile or None
        self._in_memory = in_memory
        self._only_reads = only_reads
        self._needs_server = needs_server
        # The first thread decides, which may take as long as the start of a host. The other threads
        # wait, because they need the same result.
        self._deciding = threading.Lock()
        self._decided: Callable[[], ServerAddress] | None = None
        self._embedded: VerbHost | None = None

    def place(self) -> ServerAddress:
        """Return the current address of the server.

        Raises `NoServer`, and every error that keeps an embedded host from starting.
        """
        with self._deciding:
            if self._decided is None:
                self._decided = self._decide()
        return self._decided()

    @property
    def is_embedded(self) -> bool:
        """Whether the host ends together with this verb."""
        return self._embedded is not None

    def end(self, *, at_once: bool) -> None:
        """End the embedded host, if there is one. May be called again, also after an interruption.

        `at_once`: stop running turns instead of letting them finish.
        """
        if self._embedded is not None:
            self._embedded.end(at_once=at_once)

    def _decide(self) -> Callable[[], ServerAddress]:
        found = config.load(flags=self._flags)
        url, store = found["url"], found["store"]
        if self._flags["url"] is not None and self._flags["store"] is not None:
            raise UsageError(
                "cannot use --url with --store: a server has its own store",
                hint="pass only one of them",
            )
        # A flag wins over a variable, even if the two set different keys.
        if url.is_set and self._flags["store"] is None:
            return lambda: named(url.value, self._cafile)
        wanted: str | None = (
            store.value if store.origin in (store.key.flag, store.key.variable) else None
        )
        running = announced()
        if (
            running is not None
            and is_there(running)
            and (wanted is None or _has_store(running, wanted))
        ):
            return _RunningServer(running)
        # On a shared store the embedded host only forwards. The hosts that do the work still run
        # after the verb has ended.
        if self._needs_server and not is_address(wanted or found.value("serve.store") or ""):
            hint = "run `banksman serve`, or name a server with --url"
            raise NoServer(f"no server is running, and {self._needs_server}", hint=hint)
        flag = self._flags["store"]
        if self._only_reads and flag is not None and _is_missing(flag):
            hint = "pass the path of an existing store as --store sqlite:PATH"
            raise UsageError(f"there is no store {_file_of(flag)}", hint=hint)
        embedded = self._embedded = VerbHost(wanted, in_memory=self._in_memory)
        inside = embedded.start()
        return lambda: inside


class _RunningServer:
    """The current address of this user's server; the last known one while it announces none."""

    def __init__(self, place: ServerAddress) -> None:
        self._last = place

    def __call__(self) -> ServerAddress:
        # Threads may race here. Each assignment is atomic, and all threads read the same file.
        self._last = announced() or self._last
        return self._last


def _has_store(place: ServerAddress, wanted: str) -> bool:
    try:
        told: Any = Client(lambda: place).get("/v1/server")
        return _file_of(str(told["store"])) == _file_of(wanted)
    except (ClientError, UnexpectedReply):
        return False


def _is_missing(store: str) -> bool:
    return store.startswith("sqlite:") and not os.path.exists(_file_of(store))


def _file_of(store: str) -> str:
    """Normalise the name of a store for comparison.

    Two names of the same file are the same store. Other names are compared as text. For a shared
    store the server reports its address without credentials.
    """
    if is_address(store):
        return str(parse(store))
    if store != _USUAL and not store.startswith("sqlite:"):
        return store
    path = "" if store == _USUAL else _STORE_SETTINGS.split(store.removeprefix("sqlite:"))[0]
    if not path:
        return os.path.realpath(state_folder() / "store.db")
    # A server may have got a relative path, whose folder is unknown here. It then counts as another
    # store. That is harmless: the store reports that the server owns the session.
    return os.path.realpath(os.path.expanduser(path))
