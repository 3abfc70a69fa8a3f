"""Server access of `banksman acp`: find a server, or run one in this process.

- `Backend` finds the server, sends requests for the other modules of `acp`, and looks for another
  server when the first is gone.
- `BundledServer` runs the server of `banksman serve` in the main thread, if no other server is
  found.
- `MainThreadRequests` is the queue by which other threads ask the main thread for that.
  `cli/commands/acp.py` reads it.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any

from banksman import config
from banksman.cli.client.client import Client, segment
from banksman.cli.client.discovery import ServerAddress, announced, named
from banksman.cli.client.event_stream import seq_of
from banksman.cli.client.exchange import ClientError, Lost, NoServer
from banksman.cli.output import say_aside
from banksman.errors import BanksmanError, UsageError
from banksman.folders import state_folder

# The bundled server: started if no other is found, so that there is always one server and one way
# to use it.
#
# It is the server of `banksman serve`, on a free port and for this machine only. It announces
# itself in the state folder, so that a second editor finds it. It ends with this process.
#
# Signals and the server's loop belong to the main thread. A thread that needs a server sends a
# `MainThreadRequest` to the main thread and waits until the server is ready.

# Opening a large store takes time, because it is read.
START_SECONDS_MAX = 60.0
# How long running turns may take to finish when the editor is gone. Editors wait about two seconds
# for the exit before they send signals, and stopping an agent takes time as well.
FINISH_SECONDS = 0.5

LOCK = "acp.lock"
# How many events of a resumed session are read to find its settings.
OWN_EVENTS_MAX = 1000
_LOCK_AGAIN_SECONDS = 0.05
# Pauses before the repetitions of a request that is harmless to repeat.
AGAIN_SECONDS = (0.0, 0.5, 2.0)


class MainThreadRequest(enum.Enum):
    """Request to the main thread. No value equals the number of a signal."""

    SERVE = ord("s")
    LEAVE = ord("l")


class MainThreadRequests:
    """Queue of requests to the main thread, implemented by a pipe.

    A `queue.Queue` does not work. A signal that arrives just before the main thread waits in `get`
    does not wake it. The handler would run at the next request, which may never come. With a pipe,
    Python also writes the number of each signal to it.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)

    def wake_on_signals(self) -> None:
        """Let signals wake `get`.

        Call it in the main thread, and again after a loop has ended there.
        """
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def put(self, wish: MainThreadRequest) -> None:
        """Queue a request. May be called from any thread and from a signal handler."""
        os.write(self._write, bytes([wish.value]))

    def get(self) -> MainThreadRequest:
        """Wait for the next request."""
        while True:
            (byte,) = os.read(self._read, 1)
            # Any other byte is a signal. Its handler has run before this line.
            if byte in (wish.value for wish in MainThreadRequest):
                return MainThreadRequest(byte)

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


class _ServerPhase(enum.Enum):
    ABSENT, STARTING, SERVING = range(3)


class BundledServer:
    """The server inside this process.

    `install`: called in the server's loop when it serves. It installs this program's signal
    handlers in place of the server's.
    """

    def __init__(
        self, wishes: MainThreadRequests, install: Callable[[asyncio.AbstractEventLoop], None]
    ) -> None:
        self._wishes = wishes
        self._install = install
        # Protects the three members below. Only `MainThreadRequests.put` is called while it is
        # held, and that never waits.
        self._changed = threading.Condition()
        self._phase = _ServerPhase.ABSENT
        self._place: ServerAddress | None = None
        self._failure = ""

    @property
    def place(self) -> ServerAddress | None:
        """The address of the server; None while it does not serve."""
        with self._changed:
            return self._place

    # -- called from all threads except the main thread -------------------------------------------
    def start(self) -> ServerAddress:
        """Start the server if needed and return its address when it serves. Raises `NoServer`."""
        with self._changed:
            if self._phase is _ServerPhase.ABSENT:
                self._phase, self._failure = _ServerPhase.STARTING, ""
                self._wishes.put(MainThreadRequest.SERVE)
            self._changed.wait_for(self._is_settled, START_SECONDS_MAX)
            if self._place is None:
                reason = self._failure or f"it did not start within {START_SECONDS_MAX:.0f} s"
                raise NoServer(f"no server is running, and starting one failed: {reason}")
            return self._place

    def end(self) -> None:
        """Drain the server with a short timeout.

        Returns when the server has accepted the request.
        """
        with self._changed:
            self._changed.wait_for(self._is_settled, START_SECONDS_MAX)
            place = self._place
        if place is not None:
            try:
                Client(lambda: place).post("/v1/drain", {"timeout": FINISH_SECONDS})
            except ClientError:
                # The server is already ending.
                pass

    def _is_settled(self) -> bool:
        return self._phase is not _ServerPhase.STARTING

    # -- called in the main thread ----------------------------------------------------------------
    def run(self) -> bool:
        """Serve until the server ends.

        Returns False if the server ended normally before it served. Then a signal ended it, because
        no client could have asked it to end.
        """
        was_told = False
        try:
            was_told = self._run()
        except (UsageError, ModuleNotFoundError) as exc:
            self._fail(str(exc))
        finally:
            with self._changed:
                has_served = self._phase is _ServerPhase.SERVING
                self._phase, self._place = _ServerPhase.ABSENT, None
                self._changed.notify_all()
        return has_served or not was_told

    def _run(self) -> bool:
        try:
            from banksman.server.main import run  # noqa: PLC0415
            from banksman.server.server_settings import load  # noqa: PLC0415
        except ModuleNotFoundError as exc:
            if (exc.name or "").startswith("banksman"):
                raise
            self._fail(f"the package {exc.name} is not installed (pip install 'banksman[server]')")
            return False
        settings = load(None, _flags())

        async def serving(_: Any, url: str) -> None:
            loop = asyncio.get_running_loop()
            self._install(loop)
            place = named(url if settings.token is None else f"{url}/#token={settings.token}")
            with self._changed:
                self._phase, self._place = _ServerPhase.SERVING, place
                self._changed.notify_all()
            # The server cancels this task when it ends.
            await loop.create_future()

        code = run(settings, serving)
        self._fail("it exited at once; see stderr")
        return code == 0

    def _fail(self, reason: str) -> None:
        with self._changed:
            self._failure = reason


def _flags() -> dict[str, Any]:
    """Return the settings: the user's, but reachable from this machine only.

    A user who starts an editor has not asked for a public server. The token is the one that clients
    on this machine look up.
    """
    return {
        "bind": "127.0.0.1",
        "port": 0,
        "allow_remote": False,
        "token": os.environ.get("BANKSMAN_TOKEN", "").strip() or None,
        "token_file": str(state_folder() / "token"),
        "log_level": "warning",
    }


# The server in use: one that is found, else the bundled one. If it goes away, the next request
# finds another.
#
# A server that the user named (`--url`, `BANKSMAN_URL`) is binding: the client waits for it, as
# every verb does, and never replaces it. Otherwise the server is found as for every verb, and
# started if it is missing. If two editors start at the same moment, a lock in the state folder lets
# one of them start the server, and the other finds it.

# The interval at which a missing server is looked for, and the time after which waiting requests
# fail.
AWAY_SECONDS, AWAY_SECONDS_MAX = 2.0, 300.0


class _RetryingClient(Client):
    """Client that repeats a request once with the next server, if no server received it."""

    def request(self, method: str, path: str, **more: Any) -> Any:
        try:
            return super().request(method, path, **more)
        except Lost:
            raise  # The server may have executed the request.
        except NoServer:
            return super().request(method, path, **more)


class Backend:
    """Server access for one editor.

    Every thread except the main one may use it: the bundled server runs in the main thread.
    """

    def __init__(self, url: str | None, own: BundledServer) -> None:
        self._url: str | None = config.load(flags={"url": url or None}).value("url")
        self._own = own
        # The holder looks for a server or waits for the bundled one. The other threads need the
        # same result and wait. No other lock is held when this one is taken.
        self._looking = threading.Lock()
        self._known: ServerAddress | None = None
        # Replaced as a whole, by the first thread that needs it.
        self._dialects: dict[str, str] = {}
        self.client: Client = _RetryingClient(self._place, on_gone=self._doubt)

    def insist(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a POST that is harmless to repeat, if necessary to the next server."""
        for pause in AGAIN_SECONDS:
            try:
                return self.client.post(path, body)
            except NoServer:
                time.sleep(pause)
        return self.client.post(path, body)

    def head(self, session: str) -> str | None:
        """Return the cursor of the last committed event. The session's `seq` may be ahead of it."""
        return self.client.get(f"/v1/sessions/{segment(session)}/events", {"limit": 1})["head"]

    def own_events(self, session: str, head: str | None) -> list[dict[str, Any]]:
        """Return the last events up to `head` that are not frames of the agent."""
        before = 0 if head is None else seq_of(head) or 0
        query = {"before": before + 1, "limit": OWN_EVENTS_MAX, "frames": 0}
        return self.client.get(f"/v1/sessions/{segment(session)}/events", query)["events"]

    def dialect_of(self, agent: str) -> str | None:
        """Return the dialect of an agent as the server knows it.

        A profile of the same name may differ on this machine, or be missing.
        """
        if agent not in self._dialects:
            agents = self.client.get("/v1/agents")["agents"]
            self._dialects = {each["name"]: each["dialect"] for each in agents}
        return self._dialects.get(agent)

    def _doubt(self, place: ServerAddress) -> None:
        with self._looking:
            # Compare first: another thread may have found the next server meanwhile.
            if self._known == place:
                self._known = None

    def _place(self) -> ServerAddress:
        if self._url is not None:
            return named(self._url)
        with self._looking:
            if self._known is None:
                self._known = self._look()
            return self._known

    def _look(self) -> ServerAddress:
        own = self._own.place
        if own is not None and _answers(own):
            return own
        found = announced()
        if found is not None and _answers(found):
            return found
        with _one_at_a_time():
            # Look again: another editor may have started a server while this one waited for the
            # lock.
            found = announced()
            return found if found is not None and _answers(found) else self._own.start()


def _answers(place: ServerAddress) -> bool:
    """Return whether a Banksman server answers, accepts the token, and is not draining."""
    try:
        told = Client(lambda: place).get("/v1/server")
    except ClientError:
        return False
    return isinstance(told, dict) and told.get("draining") is False  # pyright: ignore[reportUnknownMemberType]


@contextlib.contextmanager
def _one_at_a_time() -> Generator[None]:
    """Hold the lock in the state folder while a server is looked for or started.

    If the lock cannot be taken, two servers may start. That costs only memory.
    """
    fd = -1
    try:
        folder = state_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        _lock(fd)
    except (OSError, BanksmanError, RuntimeError) as exc:
        say_aside(f"banksman: cannot lock the state folder: {exc}")
    try:
        yield
    finally:
        if fd >= 0:
            os.close(fd)


def _lock(fd: int) -> None:
    # Poll instead of a blocking flock: a blocked call cannot be given up, and the holder may hang.
    deadline = time.monotonic() + START_SECONDS_MAX
    while time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_LOCK_AGAIN_SECONDS)
