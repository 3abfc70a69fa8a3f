"""A turn's face for asyncio: its state, its outcome, what the agent says in it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from banksman.core.dialects.dialect import Dialect
from banksman.core.session import event as kinds
from banksman.core.session.event import Event
from banksman.core.session.outcome import UNUSED, IdempotencyKey, Kind, Outcome, Receipt, outcome_of
from banksman.core.session.turn import TurnPhase
from banksman.errors import Moved, StoreError
from banksman.store.log import TurnPlace

log = logging.getLogger("banksman")


class TurnSession(Protocol):
    """The session of a turn, as far as a turn needs it."""

    @property
    def id(self) -> str: ...
    @property
    def dialect(self) -> Dialect: ...
    def state_of(self, turn: str) -> str: ...
    def events(
        self, after: int = 0, *, waits: bool = False, until: asyncio.Future[Any] | None = None
    ) -> AsyncGenerator[Event]: ...
    async def find_turn(self, id: str) -> TurnPlace | None: ...
    async def interrupt(self, turn: Turn | str | None = None) -> Receipt: ...


class LoggedTurn(NamedTuple):
    """What is known of a turn that another host had, or has: that it is over, and how it ended; or its phase when its
    log was looked at."""

    is_over: bool
    kind: Kind | None = None
    phase: str = TurnPhase.ENDED


class Turn:
    """An ask that was accepted: `async for update in turn` gives its updates, `await turn.outcome()` its outcome."""

    def __init__(self, session: TurnSession, id: str, after: int) -> None:
        self.id = id
        self.session = session
        # How many callers have it: those that came with the same key share it.
        self.takers = 0
        self._after = after
        # Or that nobody here will ever know it.
        self._outcome: asyncio.Future[Outcome | Moved] = asyncio.get_running_loop().create_future()
        self._kept: asyncio.Future[str | None] | None = None
        # Of one that nobody here was promised: its end is looked for in the log, by whoever wants to know it.
        self._watch: LoggedTurn | None = None

    def __repr__(self) -> str:
        return f"<Turn {self.id} {self.state}>"

    @property
    def state(self) -> str:
        """queued, starting, running, interrupting or ended."""
        if self._has_ended:
            return TurnPhase.ENDED
        if self._watch is not None and not self._watch.is_over:
            return self._watch.phase
        return self.session.state_of(self.id)

    @property
    def was_never_sent(self) -> bool:
        """It is over, and nothing came of it: who asks with its key again makes another ask."""
        outcome = self._outcome.result() if self._outcome.done() else None
        return isinstance(outcome, Outcome) and outcome.kind in UNUSED

    def stored_as(self, key: str) -> IdempotencyKey | None:
        """Its place in the log under its idempotency key. None: it is not over, or the log does not have its end."""
        outcome = self._outcome.result() if self._outcome.done() else None
        if isinstance(outcome, Outcome):
            return IdempotencyKey(key, self.id, self._after, outcome.kind) if outcome.durable else None
        if self._watch is not None and self._watch.is_over and self._watch.kind is not None:
            return IdempotencyKey(key, self.id, self._after, self._watch.kind)
        return None

    @property
    def _has_ended(self) -> bool:
        return self._outcome.done() and isinstance(self._outcome.result(), Outcome)

    async def outcome(self) -> Outcome:
        """How it ended; never raises for an ending. Cancelling this only stops waiting.

        `Moved`: it has not ended, and will not end here. Its session has left this host (`Session.leave`) while it
        waited, and it is kept in the log. Whoever has the session next serves it, and nobody can say when that is: so
        no outcome is made up, and nobody is kept waiting. It must not be asked again. `await
        host.session(id).turn(turn)` has an `outcome()` that waits for the log to say it, and `follow` tells it too.
        """
        if self._watch is not None and not self._outcome.done():
            await self._find_outcome(self._watch)
        outcome = await asyncio.shield(self._outcome)
        if isinstance(outcome, Moved):
            # Each gets its own: one that is raised again and again would keep the frames of all who got it.
            raise copy(outcome)
        return outcome

    def watch(self, watch: LoggedTurn) -> None:
        """Nobody will tell it how it ends: the log says so, or will."""
        self._watch = watch

    async def _find_outcome(self, watch: LoggedTurn) -> None:
        outcome: Outcome | None = None
        place = await self.session.find_turn(self.id)
        # Behind `seen` is what may still be written. Everything before it was looked at by the index.
        after = self._after if place is None else (place.ended or place.seen + 1) - 1
        if not watch.is_over or (place is not None and place.ended is not None):
            async with aclosing(self.session.events(after, waits=not watch.is_over)) as events:
                async for event in events:
                    if event.turn == self.id and event.kind == kinds.TURN_ENDED:
                        outcome = outcome_of(event.body)
                        break
        if outcome is None:
            error = StoreError("what it said is not in the log", hint="retention took it, or its host is gone")
            # Of one that was not over when its log was looked at, whoever has it next may still say how it ended.
            outcome = Outcome(kind=watch.kind or Kind.UNKNOWN, error=error, durable=watch.is_over)
        elif outcome.text is None and outcome.kind not in (Kind.WITHDRAWN, Kind.REFUSED):
            outcome = replace(outcome, text=await self.kept())
        if not self._outcome.done():  # Others may have looked as well.
            self.resolve(outcome)

    async def interrupt(self) -> Receipt:
        """Ask this turn to stop; the receipt tells what became of it. Cancelling this only stops waiting."""
        return await self.session.interrupt(self)

    async def said(self) -> str | None:
        """What the agent has said in this turn so far."""
        # Frame by frame, as the pages come: a long turn must not hold up the loop.
        transcript = self.session.dialect.transcript()
        async with aclosing(self._events(waits=False)) as events:
            async for event in events:
                if event.kind == kinds.UPDATE:
                    transcript.add(event.data)
        return transcript.text()

    async def __aiter__(self) -> AsyncGenerator[dict[str, Any]]:
        """What the agent says in this turn, from its beginning, as ACP session updates, text as it comes; ends with the
        turn. `Moved` as in `outcome`: it will be said elsewhere."""
        projector = self.session.dialect.projector()
        is_over = self._watch is not None and self._watch.is_over
        async with aclosing(self._events(waits=not is_over)) as events:
            async for event in events:
                if event.kind == kinds.UPDATE:
                    for update in projector.project(event.data):
                        yield update
        self.raise_if_passed_on()

    async def _events(self, *, waits: bool) -> AsyncGenerator[Event]:
        """The events of this turn: its own, and those of the turn it was collected or steered into."""
        tag = self.id
        # Once it has its outcome nothing more comes, also if retention took the event that says so. Closed by name: a
        # generator that is left to the collector is closed by a task that nobody owns.
        async with aclosing(self.session.events(self._after, waits=waits, until=self._outcome)) as events:
            async for event in events:
                if event.kind == kinds.TURN_STARTED:
                    if self.id in (event.body.get("joined") or ()):
                        tag = event.turn or tag
                    elif event.turn == self.id:
                        tag = event.body.get("into") or self.id
                if event.turn in (tag, self.id):
                    yield event
                    if event.kind == kinds.TURN_ENDED and event.turn == self.id:
                        return

    # -- for the session ---------------------------------------------------------------------------------------------
    def resolve(self, outcome: Outcome) -> None:
        assert not self._outcome.done(), f"turn {self.id} has two outcomes"
        self._outcome.set_result(outcome)

    def pass_on(self) -> None:
        """Its session has left, and it waits in the log."""
        assert not self._outcome.done(), f"turn {self.id} has an outcome, and is passed on"
        hint = "do not ask again: host.session(id).turn(turn) waits for its outcome, wherever the session is"
        message = "the session has left this host, and the ask waits in its log for whoever has it next"
        self._outcome.set_result(Moved(message, hint=hint, session=self.session.id, turn=self.id))

    def raise_if_passed_on(self) -> None:
        if self._outcome.done() and isinstance(moved := self._outcome.result(), Moved):
            raise copy(moved)

    async def complete(self, outcome: Outcome) -> None:
        """The agent gave no final answer: what it had said until then is in the log."""
        text: str | None = None
        try:
            text = await self.kept()
        finally:
            self.resolve(replace(outcome, text=text))

    async def kept(self) -> str | None:
        """What it had said, if it can be read: the ending is known all the same, and is what was waited for. Read once,
        for the outcome and every receipt."""
        if self._kept is not None:
            return await asyncio.shield(self._kept)
        self._kept = asyncio.get_running_loop().create_future()
        text: str | None = None
        try:
            text = await self.said()
        except StoreError as exc:
            log.warning("! turn %s: what it had said cannot be read: %s", self.id, exc)
        finally:
            self._kept.set_result(text)
        return text
