"""The server behind the editor: one that is found, or else our own."""

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
from banksman.cli.client.client import Client, ClientError, Lost, NoServer, segment
from banksman.cli.client.discovery import ServerAddress, announced, named
from banksman.cli.client.event_stream import seq_of
from banksman.cli.output import say_aside
from banksman.errors import BanksmanError, UsageError
from banksman.folders import state_folder

# The server inside: begun when there is no other, so that there is always one to ask, and only one way to ask it.
#
# It is the server of `banksman serve`, on a port of its own and on this machine only. It is announced in the state
# folder as any other, so that a second editor finds it; and it ends with us.
#
# Signals and the server's loop belong to the main thread. So whoever needs a server only asks for it, by a
# `MainThreadRequest` that the main thread waits for, and waits until it is there.

# A store with much in it is read when it is opened.
START_SECONDS_MAX = 60.0
# When the editor is gone: what runs may take so long to finish, and is stopped then. Editors wait some two seconds for
# us to end before they signal, and to stop an agent takes its time too.
FINISH_SECONDS = 0.5

LOCK = "acp.lock"
# Of a session that is resumed, so many are looked at for what was set in it.
OWN_EVENTS_MAX = 1000
_LOCK_AGAIN_SECONDS = 0.05
# The pauses before a request is repeated that does no harm when it is done twice.
AGAIN_SECONDS = (0.0, 0.5, 2.0)


class MainThreadRequest(enum.Enum):
    """What the main thread is asked for. No value is the number of a signal."""

    SERVE = ord("s")
    LEAVE = ord("l")


class MainThreadRequests:
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

    def put(self, wish: MainThreadRequest) -> None:
        """From any thread, also from the handler of a signal."""
        os.write(self._write, bytes([wish.value]))

    def get(self) -> MainThreadRequest:
        while True:
            (byte,) = os.read(self._read, 1)
            # Otherwise it is a signal, and its handler has run when this line is reached.
            if byte in (wish.value for wish in MainThreadRequest):
                return MainThreadRequest(byte)

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


class _ServerPhase(enum.Enum):
    ABSENT, STARTING, SERVING = range(3)


class BundledServer:
    """`install` is called in the server's loop once it serves: the signals that it has taken are to be ours."""

    def __init__(self, wishes: MainThreadRequests, install: Callable[[asyncio.AbstractEventLoop], None]) -> None:
        self._wishes = wishes
        self._install = install
        # For the three below. Nothing is called while it is held but `MainThreadRequests.put`, which never waits.
        self._changed = threading.Condition()
        self._phase = _ServerPhase.ABSENT
        self._place: ServerAddress | None = None
        self._failure = ""

    @property
    def place(self) -> ServerAddress | None:
        with self._changed:
            return self._place

    # -- from any thread but the main one ----------------------------------------------------------------------------
    def start(self) -> ServerAddress:
        """Where it is, when it can be asked. Raises `NoServer`."""
        with self._changed:
            if self._phase is _ServerPhase.ABSENT:
                self._phase, self._failure = _ServerPhase.STARTING, ""
                self._wishes.put(MainThreadRequest.SERVE)
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
        return self._phase is not _ServerPhase.STARTING

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
            self._fail(f"it needs {exc.name}, which is not installed (pip install 'banksman[server]')")
            return False
        settings = load(None, _flags())

        async def serving(_: Any, url: str) -> None:
            loop = asyncio.get_running_loop()
            self._install(loop)
            place = named(url if settings.token is None else f"{url}/#token={settings.token}")
            with self._changed:
                self._phase, self._place = _ServerPhase.SERVING, place
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


# The server that is asked: one that is found, else our own. If it goes away, the next request finds another.
#
# A server that was named (`--url`, `BANKSMAN_URL`) is the only one that is meant: it is waited for as every verb does,
# and never replaced. Otherwise it is looked for as every verb does, and whoever finds none begins one. Of two editors
# that are started at the same moment one begins it, and the other finds it: there is a lock for that in the state
# folder.

# While there is no server, it is looked for this often; what waits for it fails after so long.
AWAY_SECONDS, AWAY_SECONDS_MAX = 2.0, 300.0


class _RetryingClient(Client):
    """Where nobody was there to hear a request, it is put to whoever is found next."""

    def request(self, method: str, path: str, **more: Any) -> Any:
        try:
            return super().request(method, path, **more)
        except Lost:
            raise  # It may have been done.
        except NoServer:
            return super().request(method, path, **more)


class Backend:
    """Asks on behalf of one editor. Any thread may use it, but the main one: there our own server runs."""

    def __init__(self, url: str | None, own: BundledServer) -> None:
        self._url: str | None = config.load(flags={"url": url or None}).value("url")
        self._own = own
        # Whoever holds it looks for a server, or waits for our own; the others want the same, and wait for that. No
        # other lock is taken before it.
        self._looking = threading.Lock()
        self._known: ServerAddress | None = None
        # Put there whole, by whichever thread comes first.
        self._dialects: dict[str, str] = {}
        self.client: Client = _RetryingClient(self._place, on_gone=self._doubt)

    def insist(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """A POST that may be repeated without harm, also with the next server."""
        for pause in AGAIN_SECONDS:
            try:
                return self.client.post(path, body)
            except NoServer:
                time.sleep(pause)
        return self.client.post(path, body)

    def head(self, session: str) -> str | None:
        """Where its log ends, as far as it is committed. What a session says of itself (`seq`) may be ahead of that."""
        return self.client.get(f"/v1/sessions/{segment(session)}/events", {"limit": 1})["head"]

    def own_events(self, session: str, head: str | None) -> list[dict[str, Any]]:
        """The last events before its end that are not the agent's frames."""
        before = 0 if head is None else seq_of(head) or 0
        query = {"before": before + 1, "limit": OWN_EVENTS_MAX, "frames": 0}
        return self.client.get(f"/v1/sessions/{segment(session)}/events", query)["events"]

    def dialect_of(self, agent: str) -> str | None:
        """How the server says that this agent speaks: a profile of the same name may be another here, or none."""
        if agent not in self._dialects:
            agents = self.client.get("/v1/agents")["agents"]
            self._dialects = {each["name"]: each["dialect"] for each in agents}
        return self._dialects.get(agent)

    def _doubt(self, place: ServerAddress) -> None:
        with self._looking:
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
            found = announced()
            return found if found is not None and _answers(found) else self._own.start()


def _answers(place: ServerAddress) -> bool:
    """Whether a server of ours is there, lets us in, and stays."""
    try:
        told = Client(lambda: place).get("/v1/server")
    except ClientError:
        return False
    return isinstance(told, dict) and told.get("draining") is False  # pyright: ignore[reportUnknownMemberType]


@contextlib.contextmanager
def _one_at_a_time() -> Generator[None]:
    """Without the lock two servers may be begun. That costs a process's worth of memory, and no more."""
    fd = -1
    try:
        folder = state_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        _lock(fd)
    except (OSError, BanksmanError, RuntimeError) as exc:
        say_aside(f"banksman: no lock in the state folder: {exc}")
    try:
        yield
    finally:
        if fd >= 0:
            os.close(fd)


def _lock(fd: int) -> None:
    # By asking again: a lock that is waited for cannot be given up, and its holder may never go on.
    deadline = time.monotonic() + START_SECONDS_MAX
    while time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_LOCK_AGAIN_SECONDS)
