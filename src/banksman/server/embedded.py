"""Run a host and its HTTP application inside another program, in a thread.

That program sends its requests over a private Unix socket. Other verbs of the same user find the
socket too: the store keeps the address of each session's owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import threading
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

from banksman import Host, sockets
from banksman.errors import MachineError, Refused, StoreError
from banksman.folders import sockets_folder
from banksman.server.graceful_shutdown import GracefulShutdown
from banksman.server.served_host import UNIX, serving
from banksman.server.server_settings import ServerSettings

log = logging.getLogger("banksman.serve")


class EmbeddedServer:
    """A server in a thread of another program, on a private Unix socket.

    One thread starts and stops it.
    """

    def __init__(self, settings: ServerSettings) -> None:
        # A command-line process ends soon, so it must not own sessions that other hosts rely on.
        # With room 0 it only sends requests to the hosts that have room.
        self._settings = settings.with_room(0) if settings.is_clustered else settings
        self._thread = threading.Thread(target=self._run, name="banksman-inside", daemon=True)
        self._ready: Future[Path] = Future()
        self._over = threading.Event()
        # Both are set before `_ready` is done.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: GracefulShutdown | None = None

    def start_nowait(self) -> Future[Path]:
        """Start the thread. The future gets the socket's path, or the error of the start."""
        self._thread.start()
        return self._ready

    def stop(self, finish_seconds: float) -> None:
        """Let running turns finish within this time, then stop them.

        Returns when nothing is left. If Ctrl-C interrupts this call, the caller calls it again with
        0 seconds.
        """
        if self._thread.ident is None:
            return
        # Ctrl-C interrupts a wait for a future or an event. It does not interrupt `Thread.join` on
        # every platform, so the join comes last.
        if self._ready.exception() is None:
            assert self._loop is not None
            # The loop is closed: the thread has ended already.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._end, finish_seconds)
        self._over.wait()
        self._thread.join()

    # -- in the thread ----------------------------------------------------------------------------
    def _end(self, finish_seconds: float) -> None:
        assert self._ending is not None
        self._ending.ask(finish_seconds)
        if finish_seconds == 0:
            self._ending.hurry()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as exc:
            if self._ready.done():
                log.exception("embedded host failed")
            else:
                self._ready.set_exception(exc)
        finally:
            self._over.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        ending = self._ending = GracefulShutdown(0.0)
        with _socket() as (listener, path):
            async with serving(
                self._settings,
                [listener],
                # No client can present this token: there is no port.
                token=secrets.token_urlsafe(32),
                port=0,
                address=f"{UNIX}{path}",
                drain=_not_here,
            ) as context:
                self._ready.set_result(path)
                await asyncio.shield(ending.asked)
                await ending.wait(_wait_served(context.host))
                context.streams.is_ending = True
                await ending.finish(context.host)


async def _wait_served(host: Host) -> None:
    """Wait until the sessions of this host run nothing and have no waiting asks.

    `Host.finish` would refuse the asks that wait. Their callers sent them here because this host
    owns the session.
    """
    for session in host.our_sessions():
        # A session that this host has given up makes no progress, nor does a failed store:
        # `wait_past` raises StoreError for both.
        with contextlib.suppress(StoreError):
            while session.is_open:
                seq = session.committed
                status = session.status()
                if status.holder is None and not status.queue:
                    break
                await session.wait_past(seq)


@contextmanager
def _socket() -> Generator[tuple[socket.socket, Path]]:
    folder = sockets_folder()
    try:
        listener, path = sockets.listen_in(folder)
    except OSError as exc:
        hint = "set XDG_STATE_HOME to a writable folder"
        raise MachineError(
            f"cannot create a socket in {folder}: {exc.strerror or exc}",
            number=exc.errno,
            hint=hint,
        ) from exc
    try:
        yield listener, path
    finally:
        sockets.remove(path)
        listener.close()


def _not_here(seconds: float | None = None, hold_seconds: float | None = None) -> bool:
    del seconds, hold_seconds
    hint = "end that program"
    raise Refused("cannot drain this host: it is embedded in another program", hint=hint)
