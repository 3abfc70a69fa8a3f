"""What hosts that have died left in a store: settled at the beginning of the next host's life, in the background.

Whoever opens such a session does not wait for it: to open it is to settle it. And whichever host comes first does it.
"""

from __future__ import annotations

import asyncio
import logging

from banksman.core.config import Config
from banksman.run.sessions import profiles, recovery
from banksman.run.sessions.gate import Gate
from banksman.store.log import Known, Log

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
