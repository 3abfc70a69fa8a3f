"""The server that is asked: one that is found, else our own. If it goes away, the next request finds another.

A server that was named (`--url`, `BANKSMAN_URL`) is the only one that is meant: it is waited for as every verb does,
and never replaced. Otherwise it is looked for as every verb does, and whoever finds none begins one. Of two editors
that are started at the same moment one begins it, and the other finds it: there is a lock for that in the state folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Generator, Mapping
from typing import Any

from banksman import config
from banksman.cli.acp.own_server import START_SECONDS_MAX, OwnServer
from banksman.cli.client.client import Client, ClientError, Lost, NoServer, segment
from banksman.cli.client.discovery import ServerPlace, announced, named
from banksman.cli.client.event_stream import seq_of
from banksman.cli.output.terminal import say_aside
from banksman.errors import BanksmanError
from banksman.folders import state_folder

# While there is no server, it is looked for this often; what waits for it fails after so long.
AWAY_SECONDS, AWAY_SECONDS_MAX = 2.0, 300.0
LOCK = "acp.lock"
# Of a session that is resumed, so many are looked at for what was set in it.
OWN_EVENTS_MAX = 1000
_LOCK_AGAIN_SECONDS = 0.05
# The pauses before a request is repeated that does no harm when it is done twice.
AGAIN_SECONDS = (0.0, 0.5, 2.0)


class _Seeking(Client):
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

    def __init__(self, url: str | None, own: OwnServer) -> None:
        self._url: str | None = config.load(flags={"url": url or None}).value("url")
        self._own = own
        # Whoever holds it looks for a server, or waits for our own; the others want the same, and wait for that. No
        # other lock is taken before it.
        self._looking = threading.Lock()
        self._known: ServerPlace | None = None
        # Put there whole, by whichever thread comes first.
        self._dialects: dict[str, str] = {}
        self.client: Client = _Seeking(self._place, on_gone=self._doubt)

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

    def _doubt(self, place: ServerPlace) -> None:
        with self._looking:
            if self._known == place:
                self._known = None

    def _place(self) -> ServerPlace:
        if self._url is not None:
            return named(self._url)
        with self._looking:
            if self._known is None:
                self._known = self._look()
            return self._known

    def _look(self) -> ServerPlace:
        own = self._own.place
        if own is not None and _answers(own):
            return own
        found = announced()
        if found is not None and _answers(found):
            return found
        with _one_at_a_time():
            found = announced()
            return found if found is not None and _answers(found) else self._own.start()


def _answers(place: ServerPlace) -> bool:
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
