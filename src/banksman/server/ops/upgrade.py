"""Replace the running server by another version of Banksman, in the same process.

    old server                                   new version
    offer: versions of what it hands over ─────► `serve --check`: reads settings, store and offer
    ◄──────────────────────────── its version, or why it cannot take over
    hands over, closes everything
    exec ──────────────────────────────────────► `serve`: takes over

The new version checks before anything has happened. If it cannot take over, the old server goes on.

The process keeps its pid, so a service manager and a container see no restart. The listening port
is passed on (`passed_sockets.py`), so no connection is refused. The processes that were handed over
are with their keepers meanwhile: if the new version fails after all, they wait for the next server
until the end of the hold.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from banksman import Ended, __version__, execute, shutdown
from banksman.errors import BanksmanError, Refused
from banksman.runtime import formats
from banksman.server.ops import passed_sockets, server_hand_over, service_manager
from banksman.server.server_settings import ServerSettings

log = logging.getLogger("banksman.serve")

CHECK_SECONDS_MAX = 60.0
# Above the places of the passed sockets.
_FREE_FD = passed_sockets.FIRST_FD + passed_sockets.FDS_MAX
_KEEPS = "nothing has changed: the server goes on"


class UpgradeOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Formats that a new version must understand to take over.

    `formats`, `names`: see `runtime/formats.py`; older versions send no names. `scope`: the store,
    so that both versions mean the same.
    """

    formats: dict[str, str]
    scope: str
    names: dict[str, list[str]] = {}


class UpgradeAccepted(msgspec.Struct, frozen=True):
    """The answer of a version that can take over."""

    version: str


def offer(settings: ServerSettings) -> UpgradeOffer:
    """Return what this version hands over, or can take over. Raises `UsageError` if nothing."""
    scope = server_hand_over.scope_of(settings)
    return UpgradeOffer(formats.formats(), scope, formats.names())


# -- in the new version --------------------------------------------------------------------------
def answer(
    settings: ServerSettings, offered: bytes, check_store: Callable[[Path], None]
) -> UpgradeAccepted:
    """Check that this version can take over from the server that made the offer.

    Changes nothing. `check_store`: raises a `BanksmanError` if this version cannot use the file as
    it is. This function raises one with the reason.
    """
    try:
        theirs = msgspec.json.decode(offered, type=UpgradeOffer)
    except msgspec.MsgspecError as exc:
        raise Refused(f"cannot take over: unknown offer ({exc})") from exc
    ours = offer(settings)
    has, wants = {**theirs.formats, "store": theirs.scope}, {**ours.formats, "store": ours.scope}
    for name in sorted(has.keys() | wants.keys()):
        if has.get(name) != wants.get(name):
            message = f"{name} is {has.get(name)!r}, this version has {wants.get(name)!r}"
            raise Refused(f"cannot take over: {message}")
    if why := formats.misfit(theirs.names):
        raise Refused(f"cannot take over: the state of its sessions does not fit: {why}")
    assert settings.store_file is not None
    check_store(settings.store_file)
    return UpgradeAccepted(__version__)


# -- in the old version --------------------------------------------------------------------------
class ServerUpgrade:
    """The upgrade of one server: check the new version, accept it, and become it at the end.

    `words`: the command line of this server, from its verb on.
    """

    def __init__(
        self,
        settings: ServerSettings,
        words: Sequence[str],
        notifier: service_manager.Notifier,
        listeners: Sequence[socket.socket],
    ) -> None:
        self._settings = settings
        self._words = list(words)
        self._notifier = notifier
        self._listeners = listeners
        self._command: list[str] | None = None
        self._fds: list[int] = []

    @property
    def is_due(self) -> bool:
        """Whether the new version starts when this server has ended."""
        return self._command is not None

    async def check(self, command: Sequence[str]) -> str:
        """Let a new version check that it can take over, and return its name.

        Raises `Refused` if it cannot.
        """
        argv = [*command, *self._words, "--check"]
        said = msgspec.json.encode(offer(self._settings))
        try:
            done = await execute(argv, stdin=said, timeout=CHECK_SECONDS_MAX)
        except BanksmanError as exc:
            raise Refused(f"cannot upgrade: {exc.args[0]}", hint=_KEEPS) from exc
        if done.code == 0:
            with contextlib.suppress(msgspec.MsgspecError):
                return msgspec.json.decode(done.stdout.head, type=UpgradeAccepted).version
        why = done.stderr.text.strip().rpartition("\n")[2] or f"it exited with {done.code}"
        if done.ended is Ended.TIMEOUT:
            why = f"it did not answer within {CHECK_SECONDS_MAX:.0f} s"
        raise Refused(f"cannot upgrade: the new version says: {why:.500}", hint=_KEEPS)

    def accept(self, command: Sequence[str]) -> None:
        """Start this version when the server has ended."""
        # The server closes its listeners at its end. The copies keep the queue of connections.
        self._fds = [
            fcntl.fcntl(each.fileno(), fcntl.F_DUPFD_CLOEXEC, _FREE_FD) for each in self._listeners
        ]
        self._command = list(command)

    def become(self) -> None:
        """Become the new version. Returns only if no version can be started."""
        assert self._command is not None
        # What was handed over does not end here.
        shutdown()
        for number in (signal.SIGTERM, signal.SIGINT):
            # An ignored signal would stay ignored.
            signal.signal(number, signal.SIG_DFL)
        for place, fd in enumerate(self._fds, passed_sockets.FIRST_FD):
            os.dup2(fd, place)
        env = {**os.environ, **self._notifier.variables, **passed_sockets.variables(len(self._fds))}
        # The old version is the second choice: it can continue its own work.
        for command in (self._command, [sys.executable, "-m", "banksman"]):
            try:
                os.execvpe(command[0], [*command, *self._words], env)
            except OSError as exc:
                log.error("cannot start %s: %s", command[0], exc.strerror)


def run_check(settings: ServerSettings, check_store: Callable[[Path], None]) -> int:
    """Answer the check of a running server (`serve --check`). Return the exit code."""
    try:
        accepted = answer(settings, sys.stdin.buffer.read(), check_store)
    except BanksmanError as exc:
        print(f"banksman: {exc}", file=sys.stderr)
        return 2
    print(msgspec.json.encode(accepted).decode(), flush=True)
    return 0
