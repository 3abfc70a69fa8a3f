"""Hand the work of a server over to the server that starts next on the same store.

A planned restart keeps what runs: the old server gives its processes to their keepers and exits,
and the next one takes them over before it accepts a client. See `docs/decisions/0016-hand-over.md`
for the layer below.

The next server may also run already when the old one leaves, in a rolling restart. So each server
looks for records of holds as long as it lives (`keep_taking`).

Only the next server of the same store continues the work, so the path of the store is the scope of
a hand-over. A store in memory ends with its server. In a cluster the sessions continue on another
host. In both cases the server drains instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from banksman import Host, execute
from banksman.errors import BanksmanError, UsageError
from banksman.process import hold_record
from banksman.server.server_settings import ServerSettings

if TYPE_CHECKING:
    from banksman.server.streams.follower import EventStreams

log = logging.getLogger("banksman.serve")

# A call of systemctl.
SYSTEMCTL_SECONDS_MAX = 5.0
_SPARES_OTHERS = ("process", "none")
# The last part of the cgroup that is a unit. A user's manager is a service of the system.
_UNIT = re.compile(r"/([^/\n]+\.service)(?:/[^/\n]+\.scope)?$", re.MULTILINE)
CGROUP = Path("/proc/self/cgroup")
# Pause between two looks for records: one listing of a folder that is nearly always empty.
LOOK_SECONDS = 0.5
# Pause between two looks at known records. They are of processes that survive their host, and that
# host may have been killed meanwhile.
LOOK_AGAIN_SECONDS = 5.0
# A session has a record before its old server has released it. This is the longest time between the
# two (`HAND_OVER_SECONDS_MAX`), with room to spare.
RELEASE_SECONDS_MAX = 15.0


def scope_of(settings: ServerSettings) -> str:
    """Name the servers that may continue the work of this one.

    Raises `UsageError` if no server can.
    """
    hint = "drain without a hand-over"
    if settings.is_clustered:
        raise UsageError("cannot hand over: the store belongs to a cluster", hint=hint)
    file = settings.store_file
    if file is None:
        raise UsageError("cannot hand over: the store is in memory", hint=hint)
    if sys.platform != "linux":
        raise UsageError("cannot hand over: this needs Linux", hint=hint)
    return f"sqlite:{file}"


async def hold_at_term(settings: ServerSettings, *, is_managed: bool) -> float | None:
    """Return how long processes are held after a TERM; None if the server drains instead.

    `is_managed`: a service manager has started the server, and starts the next one.
    """
    is_wanted = is_managed if settings.hand_over is None else settings.hand_over
    if not is_wanted:
        return None
    try:
        scope_of(settings)
    except UsageError as exc:
        if settings.hand_over is None:
            return None
        log.warning("%s: the server drains when it gets TERM", exc.args[0])
        return None
    if (mode := await kill_mode()) is not None:
        log.warning(
            "KillMode=%s would end what is handed over: the server drains when it gets TERM; "
            "set KillMode=process in its unit",
            mode,
        )
        return None
    return settings.hold_seconds


async def kill_mode() -> str | None:
    """Return systemd's kill mode if it would end what this server hands over.

    None if it would not, or if the mode is unknown. With `KillMode=process` systemd signals the
    main process of a unit only. Every other mode also ends keepers and agents, during the stop or
    after it. A hand-over would lose what a drain would finish.
    """
    if os.environ.get("SYSTEMD_EXEC_PID") != str(os.getpid()):
        return None
    with contextlib.suppress(OSError, BanksmanError):
        cgroup = _cgroup()
        if (found := _UNIT.search(cgroup)) is not None:
            manager = ["--user"] if "/user@" in cgroup else []
            shown = ["show", "--property=KillMode", "--value", found[1]]
            argv = ["systemctl", *manager, *shown]
            scrub = ("secrets", "banksman")
            done = await execute(argv, timeout=SYSTEMCTL_SECONDS_MAX, scrub=scrub)
            mode = done.stdout.text.strip()
            if mode and mode not in _SPARES_OTHERS:
                return mode
    return None


def _cgroup() -> str:
    return CGROUP.read_text(encoding="utf-8", errors="replace")


def begin(streams: EventStreams, settings: ServerSettings) -> str:
    """Begin a hand-over, and return its scope.

    The streams end first, so that their clients reconnect by cursor while the next server starts.
    """
    if not streams.closing.done():
        streams.closing.set_result(None)
    return scope_of(settings)


async def take(host: Host, settings: ServerSettings) -> None:
    """Take over what the last server of this store has handed over."""
    try:
        scope = scope_of(settings)
    except BanksmanError:
        return
    taken = await host.take_over_commands(scope)
    if taken:
        log.info("commands taken over: %d", taken)
    await _take_sessions(host)


async def give_back(host: Host, settings: ServerSettings, error: BaseException) -> None:
    """Hand over what this server has taken, because it cannot start. The next one continues."""
    try:
        scope = scope_of(settings)
    except BanksmanError:
        return
    seconds = settings.hold_seconds
    log.error("cannot start: handing over, the next server has %g s: %r", seconds, error)
    try:
        await asyncio.gather(
            host.drain(timeout=settings.drain_seconds, hand_over=True, hold_seconds=seconds),
            host.hand_over_commands(seconds, scope=scope),
        )
    except BanksmanError as exc:
        # The caller raises the error of the start, which is the cause.
        log.error("cannot hand over: %s", exc)


async def keep_taking(host: Host, settings: ServerSettings) -> None:
    """Take over what other servers of this store hand over from now on."""
    known, until, again = set[str](), 0.0, 0.0
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        names, now = set(hold_record.names()), time.monotonic()
        if names - known:
            until = now + RELEASE_SECONDS_MAX
            await _to_the_end(take(host, settings))
        elif names and (now < until or now >= again):
            again = now + LOOK_AGAIN_SECONDS
            await _to_the_end(_take_sessions(host))
        known = names


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Finish this work, even if the caller is cancelled: a cancelled claim ends its process."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise


async def _take_sessions(host: Host) -> None:
    try:
        await host.take_up_held()
    except BanksmanError as exc:
        log.error("cannot take over the sessions: %s", exc)
