"""Calls of `Session` that change its queue: edit or move a queued ask, hold for several asks.

Each call becomes a fact for the driver. The rules are in `core/session/asks.py` and
`core/session/ask_queue.py`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from banksman.core.redaction.redactor import Redactor
from banksman.core.session import ask_queue
from banksman.core.session.ask_queue import NORMAL
from banksman.core.session.facts import AskEdited, AskMoved, HoldAsked, HoldReleased
from banksman.errors import NotFound, UsageError
from banksman.sessions.arguments import check_caller, check_no_secret
from banksman.sessions.ask_arguments import AskChecks, priority_of
from banksman.sessions.caller_futures import held, ignore
from banksman.sessions.session_lifecycle import SessionLifecycle
from banksman.sessions.status import find_turn
from banksman.sessions.turn import Prompt, Turn
from banksman.sessions.turn_status import holder


class QueueCalls(SessionLifecycle):
    """Calls that change the queue of a session."""

    _checks: AskChecks
    _redactor: Redactor | None

    async def edit(
        self,
        turn: str,
        *,
        prompt: Prompt | None = None,
        priority: int | str | None = None,
        caller: str | None = None,
    ) -> None:
        """Change the prompt or the class of a queued ask: see `Turn.edit`. `turn`: its id."""
        if prompt is None and priority is None:
            raise UsageError("cannot edit an ask without a change", hint="pass prompt or priority")
        self._check_caller(caller)
        owned = await self._own()
        if await self.find_turn(turn) is None:
            hint = "find the id with `banksman log SESSION`; old turns may be deleted"
            raise NotFound(f"there is no turn {turn!r:.100} in this session", hint=hint, turn=turn)
        owned.futures.raise_if_passed_on(turn)
        at, change = self._now(), f"c-{os.urandom(8).hex()}"
        if prompt is not None:
            prompt = self._checks.ask(prompt, at=at, priority=NORMAL).prompt
        number = None if priority is None else priority_of(priority)
        taken = owned.futures.expect_change(change)
        self._tell(AskEdited(at, change, turn, prompt, number, caller))
        await self._wait_change(taken)

    def _check_caller(self, caller: str | None) -> None:
        check_caller(caller)
        if caller is not None:
            check_no_secret("caller", caller, self._redactor)

    def move(
        self,
        turn: Turn | str,
        *,
        before: Turn | str | None = None,
        caller: str | None = None,
    ) -> None:
        """Put a queued ask before another ask of its class, or to the head of its class.

        In all other cases nothing happens. Raises `Moved` like `interrupt`. `caller`: the person or
        program that moves it, for the log.
        """
        self._check_caller(caller)
        self._futures.raise_if_passed_on(id_of(turn))
        other = None if before is None else id_of(before)
        self._tell(AskMoved(self._now(), id_of(turn), other, caller))

    async def holder(self) -> str | None:
        """Return the id of the running turn of the session, which this host owns from now on."""
        return holder((await self._own()).driver.state)

    @property
    def running_trace(self) -> tuple[str, str | None] | None:
        """The running turn and the `traceparent` of its ask; None if no turn runs here."""
        if self._owned is None:
            return None
        state = self._driver.state
        turn = state.own or state.turn
        if turn is None:
            return None
        return turn.id, None if turn.ask is None else turn.ask.trace

    async def running_turns(self) -> list[str]:
        """Return the ids of the turns that an ask with `on_busy="interrupt"` can stop.

        There are two if the agent has started a turn while an ask was granted or was running.
        """
        state = (await self._own()).driver.state
        return [turn.id for turn in (state.own, state.turn) if turn is not None]

    async def callers_of(self, turn: str) -> frozenset[str | None] | None:
        """Return the callers of the asks that end if this turn is interrupted; None if it is over.

        A waiting ask ends alone. A running turn ends for all its asks. Empty: the agent started it
        without one.
        """
        state = (await self._own()).driver.state
        found = find_turn(state, turn)
        if found is None:
            return None
        is_queued = ask_queue.find(state.queue, turn) is not None
        return frozenset(ask.caller for ask in found.asks if not is_queued or ask.id == turn)

    @asynccontextmanager
    async def hold(
        self, priority: int | str = NORMAL, *, caller: str | None = None
    ) -> AsyncGenerator[None]:
        """Reserve the session for several asks in a row. Other asks of this class or below wait.

        The hold may be re-entered. Entering waits for the grant. Cancelling the wait gives the hold
        up. `Refused` is raised if the session closes first. A hold ends after `hold_idle_seconds`
        without an ask, and with the session. Asks after that are plain asks. `caller`: the person
        or program that holds, for the log and the status.
        """
        self._check_caller(caller)
        owned = await self._own()
        wanted = priority_of(priority)
        async with held(
            *(self.id, owned.futures, wanted, self._tell, self._raise_if_failed), caller=caller
        ):
            yield

    async def begin_hold(self, priority: int | str = NORMAL, *, caller: str | None = None) -> str:
        """Ask for a hold, and return its id without waiting for the grant.

        For a holder that is no task of this program. Its asks name the hold (`ask(hold=…)`). They
        may come before the grant, and wait with the hold. Ends like `hold`, or by `end_hold`.
        """
        self._check_caller(caller)
        number = priority_of(priority)
        owned = await self._own()
        id = f"h-{os.urandom(8).hex()}"
        granted = owned.futures.expect_hold(id)
        ignore(granted)
        self._tell(HoldAsked(self._now(), id, number, caller))
        self._raise_if_failed(granted)
        if granted.done():
            granted.result()  # Raises if the hold is refused.
        return id

    async def wait_hold(self, hold: str) -> None:
        """Wait until a hold is granted. Raises `NotFound` if it is over, `Refused` if it ends."""
        granted = (await self._own()).futures.hold(hold)
        if granted is None:
            raise no_hold(hold)
        await asyncio.shield(granted)

    async def end_hold(self, hold: str, *, caller: str | None = None) -> None:
        """Release a hold, also a waiting one and one of another holder. `NotFound`: it is over.

        Its waiting asks keep their places. `caller`: the person or program that releases it.
        """
        self._check_caller(caller)
        owned = await self._own()
        if not owned.futures.has_hold(hold):
            raise no_hold(hold)
        self._tell(HoldReleased(self._now(), hold, caller))
        owned.futures.end_hold(hold, None)


def no_hold(hold: str) -> NotFound:
    """Return the error for a hold that is over."""
    hint = "begin another hold; a hold ends when it is released, idle for long, or its host ends"
    return NotFound(f"there is no hold {hold!r:.100} in this session", hint=hint, hold=hold)


def id_of(turn: Turn | str) -> str:
    """Return the id of a turn."""
    return turn.id if isinstance(turn, Turn) else turn
