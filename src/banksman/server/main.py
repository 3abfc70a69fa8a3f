"""Run `banksman serve` and `banksman host`: startup, signals, drain, exit code.

Startup runs in an order in which each step can still fail without harm: look for the packages,
check the settings, bind the address, load the token, open the store. Then the server takes over
what the last one left, imports the HTTP application (`served_host.py`), and accepts connections.

A signal or `POST /v1/drain` starts the shutdown:

1. New work is refused with 503. Running turns may finish, and clients can still read.
2. Event streams end with a mark that asks the client to reconnect.
3. The host is closed.

With a hand-over the streams end first. Then the next server gets what runs, and only the rest is
waited for.

A second signal skips the wait for running turns, but takes nothing from the next server.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from banksman import Host, config, raise_fd_limit, sockets
from banksman.errors import BanksmanError, UsageError
from banksman.folders import sockets_folder, state_folder
from banksman.server import served_host
from banksman.server.graceful_shutdown import GracefulShutdown
from banksman.server.http import listener as servers
from banksman.server.http import tls
from banksman.server.http import token_file as tokens
from banksman.server.ops import (
    discovery_file,
    logs,
    passed_sockets,
    server_hand_over,
    service_manager,
    stack_dump,
)
from banksman.server.ops.passed_sockets import PassedSockets
from banksman.server.ops.upgrade import ServerUpgrade, run_check
from banksman.server.server_settings import ServerSettings

if TYPE_CHECKING:
    from banksman.server.context import Context

log = logging.getLogger("banksman.serve")

# The number of new objects after which the garbage collector looks for cycles. With the default of
# 700 it looks a hundred times a second while agents stream, and finds nothing: the events that
# followers may still read are no garbage.
GC_ALLOCATIONS = 20_000

# A background job that starts with the server and is cancelled at its end.
Then = Callable[[Host, str], Coroutine[Any, Any, None]]


def run(settings: ServerSettings, then: Then | None = None, words: Sequence[str] = ()) -> int:
    """Serve until a shutdown is requested, and return the exit code.

    Prints the server's address as soon as clients can use it. `then`: called at that moment with
    the host and the address; its coroutine is cancelled at the end. `words`: the command line from
    its verb on, if this is `banksman serve`: another version can continue with it.
    """
    upgrades: list[ServerUpgrade] = []
    code = _ended(_run(settings, then, words, upgrades.append))
    for upgrade in upgrades:
        if upgrade.is_due:
            upgrade.become()
    return code


def _ended(serving: Coroutine[Any, Any, int]) -> int:
    """Run the coroutine to its end, and translate errors into an exit code."""
    # The imported modules stay until the end: a collection need not look at them.
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS)
    try:
        return asyncio.run(serving)
    except BanksmanError as exc:
        print(f"banksman: {exc}", file=sys.stderr)
        # Exit code 2 tells a service manager that a restart cannot help: the caller must change
        # something. Every other error may be temporary.
        return 2 if isinstance(exc, UsageError) else 1
    except KeyboardInterrupt:
        return 130


async def _run(
    settings: ServerSettings,
    then: Then | None,
    words: Sequence[str],
    on_upgrade: Callable[[ServerUpgrade], None],
) -> int:
    loop = asyncio.get_running_loop()
    notifier = service_manager.take()
    passed = passed_sockets.take()
    certificate = tls.of(settings)
    with closing(passed), closing(_listener(settings, passed)) as listener:
        token = settings.token or tokens.load_or_make(_token_path(settings))
        logs.configure(settings.log_format, settings.log_level, [token, *settings.secrets])
        _warn_about_variables()
        raise_fd_limit()
        stack_dump.install(loop)
        service_manager.install(loop, has_children=passed.is_upgrade)
        try:
            upgrade: ServerUpgrade | None = None
            if words:
                kept = [listener] if passed.user is None else [listener, passed.user]
                upgrade = ServerUpgrade(settings, words, notifier, kept)
                on_upgrade(upgrade)
            await _serve(settings, listener, passed, token, notifier, upgrade, certificate, then)
        finally:
            stack_dump.uninstall(loop)
    return 0


def check(settings: ServerSettings, check_store: Callable[[Path], None]) -> int:
    """Answer a running server whether this version can take over, and return the exit code."""
    # The next version imports it only after it has taken over.
    import_module("banksman.server.http_service")

    def check_files(store: Path) -> None:
        tls.of(settings)
        check_store(store)

    return run_check(settings, check_files)


def _listener(settings: ServerSettings, passed: PassedSockets) -> socket.socket:
    return servers.bind(settings) if passed.port is None else servers.use(passed.port, settings)


def run_host(settings: ServerSettings) -> int:
    """Run a host without a port, and return the exit code.

    The host takes sessions of a shared store. Other hosts send it requests over the cluster's bus.
    """
    return _ended(_run_host(settings))


async def _run_host(settings: ServerSettings) -> int:
    loop = asyncio.get_running_loop()
    notifier = service_manager.take()
    # No client can present this token: there is no port.
    token = secrets.token_urlsafe(32)
    logs.configure(settings.log_format, settings.log_level, [token, *settings.secrets])
    _warn_about_variables()
    raise_fd_limit()
    stack_dump.install(loop)
    service_manager.install(loop)
    ending = GracefulShutdown(settings.drain_seconds)
    passed = passed_sockets.take()
    try:
        with _hearing_signals(ending), closing(passed), _own_socket(passed) as (own, path):
            listeners = [] if own is None else [own]
            address = "" if path is None else f"{served_host.UNIX}{path}"
            async with served_host.serving(
                settings, listeners, token=token, port=0, address=address, drain=ending.ask
            ) as context:
                # Imported with the application: see `served_host.py`.
                from banksman.cluster.http import membership  # noqa: PLC0415

                _say(
                    f"Banksman takes {settings.room} sessions of {context.store}, "
                    f"as {membership.name_of(settings)}"
                )
                await _until_ended(context, ending, notifier, context.store)
    finally:
        stack_dump.uninstall(loop)
    return 0


def _warn_about_variables() -> None:
    """Log the `BANKSMAN_*` variables that no key defines."""
    for stray in config.strays():
        log.warning("unknown variable %s; %s", stray.name, stray.hint)


async def _serve(  # noqa: PLR0917
    settings: ServerSettings,
    listener: socket.socket,
    passed: PassedSockets,
    token: str,
    notifier: service_manager.Notifier,
    upgrade: ServerUpgrade | None,
    certificate: tls.ServerCertificate | None,
    then: Then | None,
) -> None:
    url = servers.url_of(listener, is_secure=certificate is not None)
    port = servers.port_of(listener)
    ending = GracefulShutdown(settings.drain_seconds)
    holds = await server_hand_over.hold_at_term(settings, is_managed=notifier.is_managed)
    with _hearing_signals(ending, holds), _own_socket(passed) as (own, path):
        listeners = [listener] if own is None else [listener, own]
        async with served_host.serving(
            settings,
            listeners,
            token=token,
            port=port,
            address=url,
            drain=ending.ask,
            takes_over=True,
            certificate=certificate,
        ) as context:
            host = context.host
            context.upgrade = upgrade
            # In a cluster, the host that takes over a dead host's session serves the asks that wait
            # in it. A single server must do that at its start.
            takes_up = (
                []
                if settings.is_clustered
                else [host.take_up(), server_hand_over.keep_taking(host, settings)]
            )
            with _announced(url, path):
                _tell(context)
                await _until_ended(
                    context, ending, notifier, url, *takes_up, *([then(host, url)] if then else [])
                )


async def _until_ended(
    context: Context,
    ending: GracefulShutdown,
    notifier: service_manager.Notifier,
    status: str,
    *work: Coroutine[Any, Any, None],
) -> None:
    """Serve until a shutdown is requested, then let running turns finish or hand them over.

    In a cluster the host first hands its sessions to other hosts; only then does it finish the
    rest.
    """
    notifier.ready(status)
    async with _beating(notifier):
        async with _beside(*work):
            # The shield keeps a cancellation of this task from cancelling the future, which signal
            # handlers and the drain route still use.
            await asyncio.shield(ending.asked)
            context.streams.is_ending = True
            context.is_handing_over = ending.hold_seconds is not None
            if context.upgrade is None or not context.upgrade.is_due:
                notifier.stopping()
        # Before `finish`, which refuses the asks that wait: another host can still run them.
        if context.member is not None:
            await ending.leave(context.member)
        scope: str | None = None
        if ending.hold_seconds is not None:
            scope = server_hand_over.begin(context.streams, context.settings)
        keeps_asks = context.settings.is_durable
        await ending.finish(context.host, keeps_asks=keeps_asks, scope=scope)


@contextmanager
def _own_socket(
    passed: PassedSockets,
) -> Generator[tuple[socket.socket | None, Path | None]]:
    """Listen on a Unix socket for the user of this server, or use the passed one.

    The server runs without it if it cannot be created: clients then need the URL and the token.
    """
    if passed.user is not None:
        # Its file belongs to the one that has passed it, and stays.
        yield passed.user, passed.user_path
        return
    try:
        own, path = sockets.listen_in(sockets_folder())
    except (BanksmanError, OSError) as exc:
        log.warning("cannot create the user socket, clients need the URL and the token: %s", exc)
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
    """Print the page's address, with a one-time code that logs a browser in.

    Browsers do not send the part after `#` to any server, and a used code in the browser's history
    is worthless. The systemd journal is kept and read by other users, so it gets the address only.
    """
    assert context.authentication is not None
    link = (
        context.url
        if _is_journal()
        else f"{context.url}/#code={context.authentication.pages.make_code()}"
    )
    _say(f"Banksman is at {link}")


def _say(line: str) -> None:
    try:
        print(line, flush=True)
    except OSError as exc:
        log.warning("cannot write to stdout: %s", exc.strerror)


def _is_journal() -> bool:
    """Tell whether stdout is the systemd journal, by `JOURNAL_STREAM` (see systemd.exec)."""
    device, _, inode = os.environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        stat = os.fstat(1)
    except OSError:
        return False
    return (device, inode) == (str(stat.st_dev), str(stat.st_ino))


@contextmanager
def _announced(url: str, socket_path: Path | None) -> Generator[None]:
    """Announce this server in the state folder, where clients of this user look for it.

    The server runs without the announcement if it cannot be written.
    """
    try:
        folder = state_folder()
        discovery_file.announce(folder, url, socket_path)
    except (BanksmanError, OSError) as exc:
        log.warning("cannot write the discovery file, clients need --url: %s", exc)
        yield
        return
    try:
        yield
    finally:
        discovery_file.withdraw(folder)


@asynccontextmanager
async def _beside(*work: Coroutine[Any, Any, None]) -> AsyncGenerator[None]:
    """Run background jobs beside the server and cancel them at its end.

    `Host.take_up` is one of them: only this host knows of asks that an earlier server accepted and
    did not run.
    """
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
        log.error("background task of the server failed: %s", exc)


@asynccontextmanager
async def _beating(notifier: service_manager.Notifier) -> AsyncGenerator[None]:
    """Send watchdog heartbeats to the service manager, if it wants them.

    They stop when the event loop stops.
    """
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
def _hearing_signals(
    ending: GracefulShutdown, hold_seconds: float | None = None
) -> Generator[None]:
    """Handle SIGTERM and SIGINT: the first starts the shutdown, the second ends running turns.

    `hold_seconds`: of the hand-over at SIGTERM; None without one. SIGINT comes from a person at a
    terminal, who starts no next server. In a hand-over the second signal changes nothing.

    A signal that arrives after the shutdown changes nothing: both are ignored from then on.
    """

    def on_signal(number: int) -> None:
        name = signal.Signals(number).name
        if not ending.asked.done():
            holds = hold_seconds if number == signal.SIGTERM else None
            if holds is None:
                log.info("%s: shutting down, running turns have %g s", name, ending.seconds)
            else:
                log.info("%s: handing over, the next server has %g s", name, holds)
            ending.ask(hold_seconds=holds)
        elif ending.hurry():
            log.info("%s again: stopping running turns", name)

    loop = asyncio.get_running_loop()

    def pass_on(number: int, _: object) -> None:
        loop.call_soon_threadsafe(on_signal, number)

    # Not `loop.add_signal_handler`: its removal restores the default action, if only for a moment.
    # A signal in that moment would kill the process during its exit, and change its exit code. The
    # loop wakes up for these signals too, because `stack_dump` has made it watch for signals.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
        signal.siginterrupt(number, False)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
