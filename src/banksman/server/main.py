"""`banksman serve`: from the socket to the exit code.

It begins in an order in which each step can still say no without harm: the address, the token, the store, then the
door is opened. It ends by a signal or by `/v1/drain`: nothing new is taken (503), what runs may finish, everybody can
still read; then the streams are told to come back, and the host is closed. A second signal does not wait for what runs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

from banksman import Host, raise_fd_limit, sockets
from banksman.cluster.http import membership
from banksman.errors import BanksmanError, UsageError
from banksman.folders import sockets_folder, state_folder
from banksman.server import embedded
from banksman.server import listener as servers
from banksman.server.context import Context
from banksman.server.embedded import GracefulShutdown
from banksman.server.http import token_file as tokens
from banksman.server.ops import discovery_file, logs, service_manager, stack_dump
from banksman.server.server_settings import ServerSettings

log = logging.getLogger("banksman.serve")

# What is begun with the server, and ends with it.
Then = Callable[[Host, str], Coroutine[Any, Any, None]]


def run(settings: ServerSettings, then: Then | None = None) -> int:
    """Serve until told to end: the exit code. Prints the address when it can be used. `then` is given the host and the
    address at that moment, and is cancelled at the end."""
    return _ended(_run(settings, then))


def _ended(serving: Coroutine[Any, Any, int]) -> int:
    try:
        return asyncio.run(serving)
    except BanksmanError as exc:
        print(f"banksman: {exc}", file=sys.stderr)
        # What the caller must change does not get right by being tried again; the rest may.
        return 2 if isinstance(exc, UsageError) else 1
    except KeyboardInterrupt:
        return 130


async def _run(settings: ServerSettings, then: Then | None) -> int:
    loop = asyncio.get_running_loop()
    notifier = service_manager.take()
    with closing(servers.bind(settings)) as listener:
        token = settings.token or tokens.load_or_make(_token_path(settings))
        logs.configure(settings.log_format, settings.log_level, [token, *settings.secrets])
        raise_fd_limit()
        stack_dump.install(loop)
        service_manager.install(loop)
        try:
            await _serve(settings, listener, token, notifier, then)
        finally:
            stack_dump.uninstall(loop)
    return 0


def run_host(settings: ServerSettings) -> int:
    """The same without a port: a host takes sessions of a store that others share, and is asked over their bus."""
    return _ended(_run_host(settings))


async def _run_host(settings: ServerSettings) -> int:
    loop = asyncio.get_running_loop()
    notifier = service_manager.take()
    # Nobody comes in by it: there is no port.
    token = secrets.token_urlsafe(32)
    logs.configure(settings.log_format, settings.log_level, [token, *settings.secrets])
    raise_fd_limit()
    stack_dump.install(loop)
    service_manager.install(loop)
    ending = GracefulShutdown(settings.drain_seconds)
    try:
        with _hearing_signals(ending), _own_socket() as (own, path):
            listeners = [] if own is None else [own]
            address = "" if path is None else f"{embedded.UNIX}{path}"
            async with embedded.serving(
                settings, listeners, token=token, port=0, address=address, drain=ending.ask
            ) as context:
                _say(f"Banksman takes {settings.room} sessions of {context.store}, as {membership.name_of(settings)}")
                await _until_ended(context, ending, notifier, context.store)
    finally:
        stack_dump.uninstall(loop)
    return 0


async def _serve(
    settings: ServerSettings, listener: socket.socket, token: str, notifier: service_manager.Notifier, then: Then | None
) -> None:
    url = servers.url_of(listener)
    port = servers.port_of(listener)
    ending = GracefulShutdown(settings.drain_seconds)
    with _hearing_signals(ending), _own_socket() as (own, path):
        listeners = [listener] if own is None else [listener, own]
        async with embedded.serving(
            settings, listeners, token=token, port=port, address=url, drain=ending.ask
        ) as context:
            host = context.host
            # Who waits in sessions of dead hosts is served by whichever host takes them up, where there are many.
            takes_up = [] if settings.is_clustered else [host.take_up()]
            with _announced(url, path):
                _tell(context)
                await _until_ended(context, ending, notifier, url, *takes_up, *([then(host, url)] if then else []))


async def _until_ended(
    context: Context,
    ending: GracefulShutdown,
    notifier: service_manager.Notifier,
    status: str,
    *work: Coroutine[Any, Any, None],
) -> None:
    """Until somebody says so; then what runs may finish, or goes on elsewhere."""
    notifier.ready(status)
    async with _beating(notifier):
        async with _beside(*work):
            await asyncio.shield(ending.asked)
            context.streams.is_ending = True
            notifier.stopping()
        if context.member is not None:
            await ending.leave(context.member)
        await ending.finish(context.host)


@contextmanager
def _own_socket() -> Generator[tuple[socket.socket | None, Path | None]]:
    """The one for our own user. A server can do without: its clients then need the URL and the token."""
    try:
        own, path = sockets.listen_in(sockets_folder())
    except (BanksmanError, OSError) as exc:
        log.warning("! no socket for the user of this server; clients ask by its URL: %s", exc)
        yield None, None
        return
    try:
        yield own, path
    finally:
        sockets.remove(path)
        own.close()


def _token_path(settings: ServerSettings) -> Path:
    return tokens.default_path() if settings.token_file is None else Path(settings.token_file)


def _tell(context: Context) -> None:
    """Print the page's address, with a one-time code that logs a browser in. Browsers send nobody what follows the #,
    and a code that was used is worthless in their history. A journal is read by others and kept, so it gets no code."""
    assert context.authentication is not None
    link = context.url if _is_journal() else f"{context.url}/#code={context.authentication.pages.make_code()}"
    _say(f"Banksman is at {link}")


def _say(line: str) -> None:
    try:
        print(line, flush=True)
    except OSError as exc:
        log.warning("! nobody could be told that we are there: %s", exc.strerror)


def _is_journal() -> bool:
    device, _, inode = os.environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        stat = os.fstat(1)
    except OSError:
        return False
    return (device, inode) == (str(stat.st_dev), str(stat.st_ino))


@contextmanager
def _announced(url: str, socket_path: Path | None) -> Generator[None]:
    """Clients of this user find us in the state folder. A server can do without them."""
    try:
        folder = state_folder()
        discovery_file.announce(folder, url, socket_path)
    except (BanksmanError, OSError) as exc:
        log.warning("! clients must be told where we are (--url): %s", exc)
        yield
        return
    try:
        yield
    finally:
        discovery_file.withdraw(folder)


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
        if tasks:
            await asyncio.wait(tasks)


def _note_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (exc := task.exception()) is not None:
        log.error("! what was begun with the server has failed: %s", exc)


@asynccontextmanager
async def _beating(notifier: service_manager.Notifier) -> AsyncGenerator[None]:
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


@contextmanager
def _hearing_signals(ending: GracefulShutdown) -> Generator[None]:
    """The first one ends the server, the second one hurries. One that comes when all is over changes nothing."""

    def on_signal(number: int) -> None:
        name = signal.Signals(number).name
        if not ending.asked.done():
            log.info("x %s: nothing new is taken; what runs has %g s", name, ending.seconds)
            ending.ask()
        elif ending.hurry():
            log.info("x %s again: what runs is stopped", name)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)
