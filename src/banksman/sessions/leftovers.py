"""A session opened again from what its log says: for whoever finds it, and did not open it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from banksman.core.session import crash_recovery
from banksman.core.session.event import SESSION_CLOSED
from banksman.core.session.history import Past
from banksman.core.session.session_config import Config
from banksman.core.wire.redaction import REDACTED
from banksman.errors import UsageError
from banksman.sessions import profiles, recovery
from banksman.sessions.open_gate import Gate
from banksman.sessions.opening import Opening
from banksman.store.log import Known, Log

# What an opening may have that a log does not keep: values that may be secret, and what lives in one process only.
UNKEPT = {"env": "variables", "mcp_servers": "MCP servers", "hooks": "hooks", "tools": "tools"}


def opening_of(agent: str, record: Mapping[str, Any] | None) -> Opening:
    """As it was opened the last time. `UsageError` if it had what is not kept: an agent without the variables, servers
    or tools that it was to have would do something else than was asked for."""
    if record is None:
        raise UsageError("its log does not say how the session was opened", hint="open it by its name")
    missing = [f"{what} ({', '.join(record[name])})" for name, what in UNKEPT.items() if record[name]]
    missing += [f"{name} (which had a secret)" for name, value in record.items() if REDACTED in repr(value)]
    if missing:
        hint = f"open it by its name, with its {' and '.join(missing)}: they are not kept in the log"
        raise UsageError("the session cannot be opened by what its log says alone", hint=hint)
    return Opening(
        agent,
        cwd=record["cwd"],
        command=record["command"],
        args=record["args"],
        env=None,
        inherit_env=record["inherit_env"],
        model=record["model"],
        permission_mode=record["permission_mode"],
        system_prompt=record["system_prompt"],
        mcp_servers=(),
        options=record["options"],
        resume=None,
        forks=False,
        hooks=None,
        tools=(),
        rules_wanted=record["rules"],
        labels=record.get("labels") or (),
    )


# Sessions in which somebody still waits, though nobody has them: their host died, and no other was asked to go on.
#
# Whoever accepted the asks is gone, and who waits for them may not ask again. A host that serves a store to others
# takes them up by itself.


async def is_waited_in(store: Log, known: Known) -> bool:
    past = await _found(store, known)
    return past is not None and bool(past.session.queue)


async def is_unsettled(store: Log, known: Known) -> bool:
    """The same; or a turn is open in it, of which nobody has said how it ended: who claimed it could not settle it."""
    past = await _found(store, known)
    return past is not None and (bool(past.session.queue) or bool(crash_recovery.settle(past)))


async def _found(store: Log, known: Known) -> Past | None:
    """A session that was closed in good order has refused who waited, and needs no further look: None."""
    if known.owner is not None and known.owner.is_alive:
        return None
    # What is listed may be a moment old; what is read is not, and then the head is known.
    await store.read(known.id, known.seq, 1)
    page = await store.read(known.id, max(0, store.head(known.id).seq - 1), 1)
    if not page.events or page.events[-1].kind == SESSION_CLOSED:
        return None
    return await recovery.load(store, known.id, Config(dialect=profiles.load_or_plain(known.agent).dialect))


# What hosts that have died left in a store: settled at the beginning of the next host's life, in the background.
#
# Whoever opens such a session does not wait for it: to open it is to settle it. And whichever host comes first does it.

log = logging.getLogger("banksman")

# Sessions that are settled at a time. Most of it is waiting for processes to end.
SETTLING_MAX = 16


class Cleaning:
    def __init__(self, store: Log, gate: Gate) -> None:
        self._store = store
        self._gate = gate
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Once, unless it failed: then whoever comes next tries again."""
        task = self._task
        if task is None or (task.done() and not task.cancelled() and task.exception() is not None):
            self._task = asyncio.get_running_loop().create_task(self._settle_all())
            self._task.add_done_callback(_note_failure)

    async def wait(self) -> None:
        self.begin()
        assert self._task is not None
        await asyncio.shield(self._task)

    async def stop(self) -> None:
        """What is not settled is left as it is, for the next one."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def _settle_all(self) -> None:
        dead = [known for known in self._store.sessions() if known.owner is not None and not known.owner.is_alive]
        places = asyncio.Semaphore(SETTLING_MAX)

        async def settle(known: Known) -> None:
            async with places, self._gate.alone("session", known.id):
                await self._settle(known)

        async with asyncio.TaskGroup() as tasks:
            for known in dead:
                tasks.create_task(settle(known))

    async def _settle(self, known: Known) -> None:
        if not recovery.is_left_alone(self._store, known):
            return  # It was opened meanwhile, here or elsewhere.
        try:
            await recovery.clean_up(self._store, known, Config(dialect=profiles.load_or_plain(known.agent).dialect))
        except Exception as exc:
            # One session that cannot be settled must not keep the host from the others. It stays as it is, and whoever
            # opens it is told.
            log.error("! session %s of a dead host cannot be settled: %s", known.id, exc)


def _note_failure(task: asyncio.Task[None]) -> None:
    """Perhaps nobody waits for it."""
    if not task.cancelled() and (exc := task.exception()) is not None:
        log.warning("! what dead hosts have left cannot be settled now: %s", exc)
