"""`banksman serve`: from the socket to the exit code.

It begins in an order in which each step can still say no without harm: the address, the token, the store, then the
door is opened. It ends by a signal or by `/v1/drain`: nothing new is taken (503), what runs may finish, everybody can
still read; then the streams are told to come back, and the host is closed. A second signal does not wait for what runs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

from banksman import Host, raise_fd_limit
from banksman.errors import BanksmanError, UsageError
from banksman.serve import app
from banksman.serve import server as servers
from banksman.serve.context import Context
from banksman.serve.entrance import token as tokens
from banksman.serve.entrance.policy import Policy
from banksman.serve.running import adopted, logs, notify, stacks, whereabouts
from banksman.serve.settings import Settings
from banksman.serve.streams.counts import Counts
from banksman.serve.streams.follower import Streams
from banksman.serve.streams.pages import Pages

log = logging.getLogger("banksman.serve")

# What is begun with the server, and ends with it.
Then = Callable[[Host, str], Coroutine[Any, Any, None]]


def run(settings: Settings, then: Then | None = None) -> int:
    """Serve until told to end: the exit code. Prints the address when it can be used. `then` is given the host and the
    address at that moment, and is cancelled at the end."""
    try:
        return asyncio.run(_run(settings, then))
    except BanksmanError as exc:
        print(f"banksman: {exc}", file=sys.stderr)
        # What the caller must change does not get right by being tried again; the rest may.
        return 2 if isinstance(exc, UsageError) else 1
    except KeyboardInterrupt:
        return 130


async def _run(settings: Settings, then: Then | None) -> int:
    loop = asyncio.get_running_loop()
    notifier = notify.take()
    with closing(servers.bind(settings)) as listener:
        token = settings.token or tokens.load_or_make(_token_path(settings))
        cookie = tokens.cookie_of(token, servers.port_of(listener))
        logs.configure(settings.log_format, settings.log_level, [token, cookie, *settings.secrets])
        raise_fd_limit()
        stacks.install(loop)
        adopted.install(loop)
        try:
            await _serve(settings, listener, token, notifier, then)
        finally:
            stacks.uninstall(loop)
    return 0


async def _serve(
    settings: Settings, listener: socket.socket, token: str, notifier: notify.Notifier, then: Then | None
) -> None:
    url = servers.url_of(listener)
    policy = Policy(settings)
    ending = Ending(settings.drain_seconds)
    async with Host(
        _store(settings),
        secrets=[token, *settings.secrets],
        processes_max=settings.processes_max,
        address=url,
        permit=policy.reopen,
        user_helper=settings.user_helper,
    ) as host:
        context = _context(host, settings, policy, ending)
        application = app.make(context, token=token, port=servers.port_of(listener))
        server = servers.Server(application, listener, settings, context.streams)
        server.start()
        try:
            with _announced(url):
                _tell(url, token)
                notifier.ready(url)
                async with _beating(notifier):
                    async with _beside(host.take_up(), *([then(host, url)] if then else [])):
                        await asyncio.shield(ending.asked)
                        context.streams.is_ending = True
                        notifier.stopping()
                    await ending.finish(host)
        finally:
            # Those who read first, while there is something to read; then the log, with the host.
            await server.close()


def _token_path(settings: Settings) -> Path:
    return tokens.default_path() if settings.token_file is None else Path(settings.token_file)


def _context(host: Host, settings: Settings, policy: Policy, ending: Ending) -> Context:
    streams = Streams(
        closing=asyncio.get_running_loop().create_future(),
        counts=Counts(),
        pages=Pages(),
        heartbeat_seconds=settings.heartbeat_seconds,
        streams_max=settings.streams_max,
    )
    return Context(host, settings, policy, streams, drain=ending.ask, store=settings.store or "the state folder")


def _store(settings: Settings) -> str | None:
    keeps = [
        f"{name}={value}"
        for name, value in (("keep_bytes", settings.keep_bytes), ("keep_seconds", settings.keep_seconds))
        if value is not None
    ]
    if not keeps:
        return settings.store
    # Without a path it is the file in the state folder.
    store = settings.store or "sqlite:"
    return f"{store}{'&' if '?level=' in store else '?'}{'&'.join(keeps)}"


def _tell(url: str, token: str) -> None:
    """The address to open. What comes after the # is for the browser: it sends it to nobody. Into a journal, which
    others may read and which is kept, the token does not go."""
    shown = url if _is_journal() else f"{url}/#token={token}"
    try:
        print(f"Banksman is at {shown}", flush=True)
    except OSError as exc:
        log.warning("! nobody could be told that we are at %s: %s", url, exc.strerror)


def _is_journal() -> bool:
    device, _, inode = os.environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        stat = os.fstat(1)
    except OSError:
        return False
    return (device, inode) == (str(stat.st_dev), str(stat.st_ino))


@contextmanager
def _announced(url: str) -> Generator[None]:
    """Clients of this user find us in the state folder. A server can do without them."""
    try:
        folder = tokens.default_path().parent
        whereabouts.announce(folder, url)
    except (BanksmanError, OSError) as exc:
        log.warning("! clients must be told where we are (--url): %s", exc)
        yield
        return
    try:
        yield
    finally:
        whereabouts.withdraw(folder)


@asynccontextmanager
async def _beside(*work: Coroutine[Any, Any, None]) -> AsyncGenerator[None]:
    """What is begun with the server, and ends with it. `Host.take_up` is: what an earlier server accepted and could not
    come to, nobody else knows of."""
    tasks = [asyncio.ensure_future(one) for one in work]
    for task in tasks:
        task.add_done_callback(_note_failure)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _note_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (exc := task.exception()) is not None:
        log.error("! what was begun with the server has failed: %s", exc)


@asynccontextmanager
async def _beating(notifier: notify.Notifier) -> AsyncGenerator[None]:
    """The service manager hears of us for as long as the loop runs, if it wants to."""
    seconds = notifier.watchdog_seconds()
    if seconds is None:
        yield
        return

    async def beat() -> None:
        while True:
            notifier.beat()
            await asyncio.sleep(seconds / 2)

    task = asyncio.ensure_future(beat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait((task,))


class Ending:
    """Who told us to end, and how long what runs may take. The first word counts; the second says: now."""

    def __init__(self, drain_seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self.asked: asyncio.Future[None] = loop.create_future()
        self._now: asyncio.Future[None] = loop.create_future()
        self._seconds = drain_seconds
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def ask(self, seconds: float | None = None) -> None:
        if not self.asked.done():
            if seconds is not None:
                self._seconds = seconds
            self.asked.set_result(None)

    def _on_signal(self, number: int) -> None:
        if not self.asked.done():
            log.info("x %s: nothing new is taken; what runs has %g s", signal.Signals(number).name, self._seconds)
            self.ask()
        elif not self._now.done():
            log.info("x %s again: what runs is stopped", signal.Signals(number).name)
            self._now.set_result(None)

    async def finish(self, host: Host) -> None:
        """Until nothing runs any more: by itself, by the deadline, or because somebody would not wait."""
        finishing = asyncio.ensure_future(host.finish(timeout=self._seconds))
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
