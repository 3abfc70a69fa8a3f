"""The application on a host of its own, behind whichever sockets: what `banksman serve` and a verb without one share.

`serving` is all that there is to it: no signal is taken, nothing is printed or announced, no token is made.
`EmbeddedServer` is the same in a thread of another program, which asks it by a socket that is nobody else's; other
verbs of the same user find it there, by the address that the store has of whoever owns a session.
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
from banksman.server.streams.sources import SharedPages

if TYPE_CHECKING:
    from banksman.cluster.host import Member

log = logging.getLogger("banksman.serve")
# What begins the address of a host that has nothing but a socket.
UNIX = "unix:"
# Where the path of a store ends and its settings begin, as a host takes them.
_SETTING = re.compile(r"\?(?=(?:level|keep_bytes|keep_seconds)=)")


class GracefulShutdown:
    """The first word counts; the second says: now. Belongs to the loop it is made in."""

    def __init__(self, drain_seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self.asked: asyncio.Future[None] = loop.create_future()
        self._now: asyncio.Future[None] = loop.create_future()
        self.seconds = drain_seconds

    def ask(self, seconds: float | None = None) -> None:
        if not self.asked.done():
            if seconds is not None:
                self.seconds = seconds
            self.asked.set_result(None)

    def hurry(self) -> bool:
        """What runs is stopped. False: that was said already."""
        if self._now.done():
            return False
        self._now.set_result(None)
        return True

    async def wait(self, work: Coroutine[Any, Any, None]) -> None:
        """For this, within the same deadline, or until somebody would not wait. It has ended when this returns."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._now), timeout=self.seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            task.cancel()
            await asyncio.wait((task,))
        if not task.cancelled():
            task.result()

    async def leave(self, member: Member) -> None:
        """Other hosts go on with our sessions. What this takes is taken from what `finish` may take."""
        began = time.monotonic()
        await self.wait(member.drain(timeout=self.seconds))
        self.seconds = max(0.0, self.seconds - (time.monotonic() - began))

    async def finish(self, host: Host) -> None:
        """Until nothing runs any more: by itself, by the deadline, or because somebody would not wait."""
        finishing = asyncio.ensure_future(host.finish(timeout=self.seconds))
        try:
            await asyncio.wait((finishing, self._now), return_when=asyncio.FIRST_COMPLETED)
            if not finishing.done():
                await host.finish(timeout=0)
            await finishing
        finally:
            if not finishing.done():
                # We were cancelled. This only stops the waiting: what runs is the host's, which is closed next.
                finishing.cancel()
                await asyncio.wait((finishing,))


# Called by whoever asks for the end over HTTP, with how long what runs may take.
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
    """Until it is left. `address`: where others find this host. `drain` is called by whoever asks for it over HTTP."""
    policy = StartPolicy(settings)
    # Who answers here comes from outside, and is shown what waits.
    logging.getLogger("banksman.questions").setLevel(logging.ERROR)
    async with Host(
        store_of(settings),
        secrets=[token, *settings.secrets],
        processes_max=settings.processes_max,
        address=address,
        permit=policy.reopen,
        user_helper=settings.user_helper,
    ) as host:
        context = context_of(host, settings, drain, policy)
        context.url = "" if port == 0 else address
        application = app.make(context, token=token, port=port)
        # Who has a port is there for others to come in by it.
        async with membership.of(context, is_front=port != 0):
            server = servers.HttpServer(application, listeners, settings, context.streams)
            server.start()
            try:
                yield context
            finally:
                # Those who read first, while there is something to read; then the log, with the host.
                await server.close()


def context_of(host: Host, settings: ServerSettings, drain: Drain, policy: StartPolicy | None = None) -> Context:
    streams = EventStreams(
        closing=asyncio.get_running_loop().create_future(),
        counts=StreamCounts(),
        pages=SharedPages(),
        heartbeat_seconds=settings.heartbeat_seconds,
        streams_max=settings.streams_max,
    )
    return Context(host, settings, policy or StartPolicy(settings), streams, drain=drain, store=settings.store_shown)


def store_of(settings: ServerSettings) -> str | None:
    """With what is kept of it, unless the store says that itself. One in memory keeps all, and takes no settings."""
    # Without a path it is the file in the state folder.
    store = settings.store or "sqlite:"
    if not store.startswith("sqlite:"):
        return store
    found = _SETTING.search(store)
    own = "" if found is None else store[found.end() :]
    keeps = [
        f"{name}={value}"
        for name, value in (("keep_bytes", settings.keep_bytes), ("keep_seconds", settings.keep_seconds))
        if value is not None and f"&{name}=" not in f"&{own}"
    ]
    if not keeps:
        return settings.store
    return f"{store}{'?' if found is None else '&'}{'&'.join(keeps)}"


class EmbeddedServer:
    """A host inside of a program that is something else: in a thread, on a socket. One thread starts and stops it."""

    def __init__(self, settings: ServerSettings) -> None:
        # Whoever ends with its verb takes no session that others count on: it only asks those that have room.
        self._settings = settings.with_room(0) if settings.is_clustered else settings
        self._thread = threading.Thread(target=self._run, name="banksman-inside", daemon=True)
        self._ready: Future[Path] = Future()
        self._over = threading.Event()
        # Both are there when it is ready.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: GracefulShutdown | None = None

    def start_nowait(self) -> Future[Path]:
        """The socket, when it can be asked; or the error that keeps it from that."""
        self._thread.start()
        return self._ready

    def stop(self, finish_seconds: float) -> None:
        """Let what runs finish for so long, stop it then, and return when nothing is left. Whoever was torn out of this
        (by Ctrl-C) calls it again, with no patience: 0."""
        if self._thread.ident is None:
            return
        # Futures and events can be waited for without being deaf to Ctrl-C; a thread, not everywhere.
        if self._ready.exception() is None:
            assert self._loop is not None
            with contextlib.suppress(RuntimeError):  # The loop is closed: it is over already.
                self._loop.call_soon_threadsafe(self._end, finish_seconds)
        self._over.wait()
        self._thread.join()

    # -- in the thread -----------------------------------------------------------------------------------------------
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
                log.exception("! the host inside has failed")
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
                # Nobody comes in by it: there is no port.
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
    """Until nothing runs in our sessions, and nobody waits. A host that finishes would refuse those who wait; and they
    were sent to us, because we had the session."""
    for session in host.our_sessions():
        # Of a session that is let go of nothing comes, and nothing of a store that fails.
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
        hint = "XDG_STATE_HOME names a folder that can be written"
        raise MachineError(f"no socket in {folder}: {exc.strerror or exc}", number=exc.errno, hint=hint) from exc
    try:
        yield listener, path
    finally:
        sockets.remove(path)
        listener.close()


def _not_here(_: float | None) -> None:
    raise Refused("this is no server, but a host inside of another program", hint="it ends with that program")
