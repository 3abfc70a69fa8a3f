"""Run a host and its HTTP application on given sockets, for a server or inside another program.

- `serving` is the part that `banksman serve`, `banksman host` and a verb with an embedded host
  share. It installs no signal handler, prints and announces nothing, and makes no token.
- `GracefulShutdown` is the state of a shutdown: its time limit, and the request to skip the rest.
- `EmbeddedServer` runs `serving` in a thread of another program. That program sends its requests
  over a private Unix socket. Other verbs of the same user find the socket too: the store keeps the
  address of each session's owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from banksman import Host, sockets
from banksman.cluster.http import membership
from banksman.errors import MachineError, Refused, StoreError
from banksman.folders import sockets_folder
from banksman.server import app
from banksman.server import listener as servers
from banksman.server.context import Context
from banksman.server.http.start_policy import StartPolicy
from banksman.server.server_settings import ServerSettings
from banksman.server.streams.follower import EventStreams, StreamCounts
from banksman.server.streams.shared_pages import SharedPages

if TYPE_CHECKING:
    from banksman.cluster.host import Member

log = logging.getLogger("banksman.serve")
# Prefix of the address of a host that listens on a Unix socket only.
UNIX = "unix:"
# Separates the path of a store from its settings, as `Host` reads a store address.
_SETTING = re.compile(r"\?(?=(?:level|keep_bytes|keep_seconds)=)")


class GracefulShutdown:
    """The state of a shutdown: requested, or requested a second time.

    The first request starts the shutdown with its time limit. The second one skips the rest of that
    time. Belongs to the event loop in which it is created.
    """

    def __init__(self, drain_seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self.asked: asyncio.Future[None] = loop.create_future()
        self._now: asyncio.Future[None] = loop.create_future()
        self.seconds = drain_seconds

    def ask(self, seconds: float | None = None) -> None:
        """Request the shutdown; later calls change nothing.

        `seconds`: time limit for running turns; None keeps the present limit.
        """
        if not self.asked.done():
            if seconds is not None:
                self.seconds = seconds
            self.asked.set_result(None)

    def hurry(self) -> bool:
        """Stop running turns now. Returns False if that was requested before."""
        if self._now.done():
            return False
        self._now.set_result(None)
        return True

    async def wait(self, work: Coroutine[Any, Any, None]) -> None:
        """Run this coroutine within the time limit.

        It is cancelled at the limit, or when `hurry` is called. It has ended when this returns.
        """
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait(
                (task, self._now), timeout=self.seconds, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            task.cancel()
            await asyncio.wait((task,))
        if not task.cancelled():
            task.result()

    async def leave(self, member: Member) -> None:
        """Hand the sessions of this host over to other hosts.

        The time that this takes is subtracted from the limit of `finish`.
        """
        began = time.monotonic()
        await self.wait(member.drain(timeout=self.seconds))
        self.seconds = max(0.0, self.seconds - (time.monotonic() - began))

    async def finish(self, host: Host) -> None:
        """Wait until nothing runs.

        The host stops what still runs at the time limit, or when `hurry` is called.
        """
        finishing = asyncio.ensure_future(host.finish(timeout=self.seconds))
        try:
            await asyncio.wait((finishing, self._now), return_when=asyncio.FIRST_COMPLETED)
            if not finishing.done():
                await host.finish(timeout=0)
            await finishing
        finally:
            if not finishing.done():
                # This task was cancelled. Cancelling `finishing` only stops the wait: the host owns
                # what runs, and the host is closed next.
                finishing.cancel()
                await asyncio.wait((finishing,))


# Called when a client requests the shutdown over HTTP, with the time limit for running turns.
Drain = Callable[[float | None], None]


@asynccontextmanager
async def serving(
    settings: ServerSettings,
    listeners: Sequence[socket.socket],
    *,
    token: str,
    port: int,
    address: str,
    drain: Drain,
) -> AsyncGenerator[Context]:
    """Open a host and serve its HTTP application until the context exits.

    `address`: where other processes find this host. `port`: 0 without one. `drain`: called when a
    client requests the shutdown over HTTP.
    """
    policy = StartPolicy(settings)
    budget, caller_budgets = settings.shared_budgets()
    # Answers come from HTTP clients, and those see the open questions. The log must not warn that a
    # question waits for an answer.
    logging.getLogger("banksman.questions").setLevel(logging.ERROR)
    async with Host(
        store_of(settings),
        secrets=[token, *settings.secrets],
        processes_max=settings.processes_max,
        address=address,
        permit=policy.reopen,
        user_helper=settings.user_helper,
        budget=budget,
        caller_budgets=caller_budgets,
    ) as host:
        context = context_of(host, settings, drain, policy)
        context.url = "" if port == 0 else address
        application = app.make(context, token=token, port=port)
        # A host with a port is a front end: clients of the cluster can connect to it.
        async with membership.of(context, is_front=port != 0):
            server = servers.HttpServer(application, listeners, settings, context.streams)
            server.start()
            try:
                yield context
            finally:
                # First end the streams, while the log can still be read. Then the host closes the
                # log.
                await server.close()


def context_of(
    host: Host, settings: ServerSettings, drain: Drain, policy: StartPolicy | None = None
) -> Context:
    streams = EventStreams(
        closing=asyncio.get_running_loop().create_future(),
        counts=StreamCounts(),
        pages=SharedPages(),
        heartbeat_seconds=settings.heartbeat_seconds,
        streams_max=settings.streams_max,
    )
    return Context(
        host,
        settings,
        policy or StartPolicy(settings),
        streams,
        drain=drain,
        store=settings.store_shown,
    )


def store_of(settings: ServerSettings) -> str | None:
    """Return the store address with the retention settings, unless the address has its own.

    A store in memory keeps everything and takes no settings.
    """
    # Without a path the store is the file in the state folder.
    store = settings.store or "sqlite:"
    if not store.startswith("sqlite:"):
        return store
    found = _SETTING.search(store)
    own = "" if found is None else store[found.end() :]
    keeps = [
        f"{name}={value}"
        for name, value in (
            ("keep_bytes", settings.keep_bytes),
            ("keep_seconds", settings.keep_seconds),
        )
        if value is not None and f"&{name}=" not in f"&{own}"
    ]
    if not keeps:
        return settings.store
    return f"{store}{'?' if found is None else '&'}{'&'.join(keeps)}"


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


@contextlib.contextmanager
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


def _not_here(_: float | None) -> None:
    hint = "end that program"
    raise Refused("cannot drain this host: it is embedded in another program", hint=hint)
