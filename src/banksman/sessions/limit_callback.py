"""Call the caller's `on_limit` function when the agent's account is limited.

The function decides whether the waiting asks of the session wait for the end of the limit ("wait")
or fail ("fail"). Until it has decided, they wait. A function that raises, or that returns another
value, is logged, and the asks wait.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from banksman.core.dialects.meaning import LimitWindow
from banksman.core.session.effects import CallOnLimit
from banksman.core.session.facts import LimitDecided
from banksman.errors import AgentError
from banksman.sessions.driver import Driver
from banksman.sessions.hooks import RequestTasks, error_text

log = logging.getLogger("banksman")

# Time that the end of a session waits for a cancelled callback that does not end.
CALLBACK_SECONDS_MAX = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitReached:
    """A limit of the agent's account, for a function that decides what the waiting asks do.

    `agent`: the limited one of the session's agents. `limited_until`: when the limit ends, in
    seconds since 1970; None if the provider named only a delay, `error.retry_after`. `windows`: the
    usage windows that the agent has reported. `error`: the error that the asks end with if they
    fail. `waiting`: the turn ids of the waiting asks.
    """

    session: str
    agent: str
    limited_until: float | None
    windows: tuple[LimitWindow, ...]
    error: AgentError
    waiting: tuple[str, ...]


OnLimit = Callable[[LimitReached], "str | Awaitable[str]"]


class LimitCallback:
    """The `on_limit` function of one session, and the tasks of its calls."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.on_limit: OnLimit | None = None
        self._tasks = RequestTasks("on_limit")

    def call(self, effect: CallOnLimit) -> None:
        """Call the function in a task. The call for an earlier limit is cancelled."""
        self._tasks.cancel_all()
        if self.on_limit is not None:
            self._tasks.start(effect.key, self._decide(self.on_limit, effect))

    async def _decide(self, on_limit: OnLimit, effect: CallOnLimit) -> None:
        reached = LimitReached(
            session=self._driver.id,
            agent=effect.agent,
            limited_until=effect.error.limited_until,
            windows=effect.windows,
            error=effect.error,
            waiting=effect.waiting,
        )
        decision: object = "wait"
        try:
            decision = on_limit(reached)
            if inspect.isawaitable(decision):
                decision = await decision
        except Exception as exc:
            log.warning(
                "on_limit failed, the asks wait (session=%s error=%s)",
                self._driver.id,
                error_text(exc),
            )
            return
        if decision not in ("wait", "fail"):
            message = "on_limit returned %.60r, not 'wait' or 'fail': the asks wait (session=%s)"
            log.warning(message, decision, self._driver.id)
        elif decision == "fail":
            self._driver.dispatch(LimitDecided(self._driver.now(), effect.key, fails=True))

    def end(self) -> None:
        """Cancel the calls, because the session ends."""
        self._tasks.cancel_all()

    async def wait_ended(self) -> None:
        """Wait a limited time until the calls have ended, except the one that calls this."""
        running = self._tasks.running - {asyncio.current_task()}
        if running:
            _, late = await asyncio.wait(running, timeout=CALLBACK_SECONDS_MAX)
            if late:
                log.warning(
                    "on_limit callbacks still run after their cancellation (callbacks=%d)",
                    len(late),
                )
