"""Asyncio handle of a turn: its state, its outcome and the agent's output.

The driver resolves a turn that this host accepted. The outcome of any other turn, and all output,
is read from the log. `core/session/turn.py` has the turn of the state machine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from banksman.core.dialects.log_dialect import MixedReader
from banksman.core.session import event as kinds
from banksman.core.session.event import Event
from banksman.core.session.idempotency import UNUSED, IdempotencyKey
from banksman.core.session.outcome import Kind, Outcome, Receipt, outcome_of
from banksman.core.session.turn import TurnPhase
from banksman.errors import Moved, StoreError, UsageError
from banksman.store.log_values import TurnPlace

log = logging.getLogger("banksman")

Prompt = str | Sequence[Mapping[str, Any]]

# What `Turn.outcome` does about background tasks that outlive the turn.
BACKGROUND = ("report", "wait")
# After one of these events, a turn may have ended without its end in the log: retention removed it.
_AFTER_LOST_ENDS = (kinds.STREAM_GAP, kinds.SESSION_CLOSED)


class TurnSession(Protocol):
    """Interface of the session that a turn uses."""

    @property
    def id(self) -> str: ...
    @property
    def frames(self) -> MixedReader: ...
    def state_of(self, turn: str) -> str: ...
    def events(
        self, after: int = 0, *, waits: bool = False, until: asyncio.Future[Any] | None = None
    ) -> AsyncGenerator[Event]: ...
    async def find_turn(self, id: str) -> TurnPlace | None: ...
    async def interrupt(self, turn: Turn | str | None = None) -> Receipt: ...
    async def edit(
        self,
        turn: str,
        *,
        prompt: Prompt | None = None,
        priority: int | str | None = None,
        caller: str | None = None,
    ) -> None: ...


class LoggedTurn(NamedTuple):
    """State of a turn according to the log, for a turn that this host did not accept.

    `is_over`: the turn has ended. `kind`: the kind of its outcome. `phase`: the phase at the time
    when the log was read.
    """

    is_over: bool
    kind: Kind | None = None
    phase: str = TurnPhase.ENDED


class Turn:
    """Accepted ask.

    `async for update in turn` yields the agent's updates. `await turn.outcome()` returns the
    outcome.
    """

    def __init__(self, session: TurnSession, id: str, after: int) -> None:
        self.id = id
        self.session = session
        # Number of callers that share this turn. Callers that ask with the same key get the same
        # turn.
        self.takers = 0
        self._after = after
        # A `Moved` error means that this host will never learn the outcome.
        self._outcome: asyncio.Future[Outcome | Moved] = asyncio.get_running_loop().create_future()
        self._kept: asyncio.Future[str | None] | None = None
        # Set for a turn that this host did not accept. `outcome` then searches the log for the end
        # of the turn.
        self._watch: LoggedTurn | None = None

    @property
    def after(self) -> int:
        """The seq before all events of the turn."""
        return self._after

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
        """Whether the turn ended without reaching the agent.

        A new ask with the same key then creates a new turn.
        """
        outcome = self._outcome.result() if self._outcome.done() else None
        return isinstance(outcome, Outcome) and outcome.kind in UNUSED

    def stored_as(self, key: str) -> IdempotencyKey | None:
        """Return the place of the ended turn in the log, under its idempotency key.

        Returns None if the turn has not ended or if its end is not in the log.
        """
        outcome = self._outcome.result() if self._outcome.done() else None
        if isinstance(outcome, Outcome):
            return (
                IdempotencyKey(key, self.id, self._after, outcome.kind) if outcome.durable else None
            )
        if self._watch is not None and self._watch.is_over and self._watch.kind is not None:
            return IdempotencyKey(key, self.id, self._after, self._watch.kind)
        return None

    @property
    def _has_ended(self) -> bool:
        return self._outcome.done() and isinstance(self._outcome.result(), Outcome)

    async def outcome(self, *, background: str = "report") -> Outcome:
        """Wait for the outcome. Every kind of ending is returned, not raised.

        Cancelling the call only stops the wait.

        `background`: what happens if the agent's background tasks still run when the turn has
        ended. "report": the outcome lists them (`background`). "wait": the call also waits until
        they are over. The outcome is the same. If the agent reacts to the end of a task, that is
        a turn of its own.

        `Moved`: the turn has not ended and will not end on this host. Its session left this host
        (`Session.leave`), or this host closes and another one has the session. The ask is kept in
        the log, and the next owner of the session serves it. The time of that is unknown, so this
        call neither invents an outcome nor waits. The caller must not ask again.
        `await host.session(id).turn(turn)` returns a turn whose `outcome()` waits for the log.
        `follow` reports the outcome too.
        """
        if background not in BACKGROUND:
            hint = f"use one of: {', '.join(BACKGROUND)}"
            raise UsageError(f"background cannot be {background!r:.60}", hint=hint)
        if self._watch is not None and not self._outcome.done():
            await self._find_outcome(self._watch)
        outcome = await asyncio.shield(self._outcome)
        if isinstance(outcome, Moved):
            # Each caller gets a copy of the error. A shared instance that is raised repeatedly
            # would keep the stack frames of all callers alive.
            raise copy(outcome)
        if background == "wait" and outcome.background:
            await self._wait_tasks({task.id for task in outcome.background})
        return outcome

    async def _wait_tasks(self, tasks: set[str]) -> None:
        """Wait until the log shows that these background tasks are over.

        Every end of a process is such an event, also one that recovery finds. Without the end of
        the turn in the log there is nothing to wait for: the session has lost its process.
        """
        place = await self.session.find_turn(self.id)
        if place is None or place.ended is None:
            return
        async with aclosing(self.session.events(place.ended, waits=True)) as events:
            async for event in events:
                if event.kind in (kinds.PROCESS_STARTED, kinds.SESSION_STORE_RETURNED):
                    return
                if event.kind == kinds.TASKS_CHANGED:
                    tasks &= {task["id"] for task in event.body["tasks"]}
                    if not tasks:
                        return

    def watch(self, watch: LoggedTurn) -> None:
        """Take the outcome from the log, because this host will not be notified of it."""
        self._watch = watch

    async def _find_outcome(self, watch: LoggedTurn) -> None:
        outcome: Outcome | None = None
        may_be_removed = watch.is_over
        place = await self.session.find_turn(self.id)
        # Events after `seen` may still be written. The index has covered all events up to `seen`.
        after = self._after if place is None else (place.ended or place.seen + 1) - 1
        if not watch.is_over or (place is not None and place.ended is not None):
            async with aclosing(self.session.events(after, waits=not watch.is_over)) as events:
                async for event in events:
                    if event.turn == self.id and event.kind == kinds.TURN_ENDED:
                        outcome = outcome_of(event.body)
                        break
                    may_be_removed |= event.kind in _AFTER_LOST_ENDS
        if outcome is None and not may_be_removed:
            # This host closes before the turn has ended. Another owner of the session will write
            # the outcome, so this host must not make one up.
            if not self._outcome.done():
                self.pass_on()
            return
        if outcome is None:
            hint = "retention removed it, or its host is gone"
            error = StoreError(f"the outcome of turn {self.id} is not in the log", hint=hint)
            # The turn was not over when its log was read, so this outcome is not durable.
            outcome = Outcome(kind=watch.kind or Kind.UNKNOWN, error=error, durable=watch.is_over)
        elif outcome.text is None and outcome.kind not in (Kind.WITHDRAWN, Kind.REFUSED):
            outcome = replace(outcome, text=await self.kept())
        if not self._outcome.done():  # A concurrent caller may have found the outcome first.
            self.resolve(outcome)

    async def interrupt(self) -> Receipt:
        """Ask this turn to stop and return the receipt of the interrupt.

        Cancelling the call only stops the wait.
        """
        return await self.session.interrupt(self)

    async def edit(
        self,
        *,
        prompt: Prompt | None = None,
        priority: int | str | None = None,
        caller: str | None = None,
    ) -> None:
        """Change the prompt or the class of this ask while it waits for its first grant.

        Returns when the log has the change. None: as before. In another class, the ask is the last
        one. An ask of a hold, or one that shares its turn with other asks, keeps its class.
        `caller`: the caller that edits the ask. `Refused`: the ask is not queued any more, or must
        keep its class. Raises `Moved` like `outcome`. Cancelling the call only stops the wait.
        """
        await self.session.edit(self.id, prompt=prompt, priority=priority, caller=caller)

    async def said(self) -> str | None:
        """Return the agent's text in this turn until now."""
        # Frame by frame, as the pages arrive. A long turn must not block the event loop.
        transcript = self.session.frames.transcript()
        async with aclosing(self._events(waits=False)) as events:
            async for event in events:
                if event.kind == kinds.UPDATE:
                    transcript.add(event.data)
        return transcript.text()

    async def __aiter__(self) -> AsyncGenerator[dict[str, Any]]:
        """Yield the agent's output in this turn from its beginning, as ACP session updates.

        Text is streamed. The iterator ends with the turn. It raises `Moved` like `outcome` if the
        turn will run on another host.
        """
        projector = self.session.frames.projector()
        is_over = self._watch is not None and self._watch.is_over
        async with aclosing(self._events(waits=not is_over)) as events:
            async for event in events:
                if event.kind == kinds.UPDATE:
                    for update in projector.project(event.data):
                        yield update
        self.raise_if_passed_on()

    async def _events(self, *, waits: bool) -> AsyncGenerator[Event]:
        """Yield the events of this turn and of the turn that it was collected or steered into."""
        tag = self.id
        # After the outcome nothing more arrives, even if retention removed the event of the end.
        # The generator is closed explicitly: a generator that is left to the garbage collector is
        # closed by a task without an owner.
        async with aclosing(
            self.session.events(self._after, waits=waits, until=self._outcome)
        ) as events:
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

    # -- for the session --------------------------------------------------------------------------
    def resolve(self, outcome: Outcome) -> None:
        assert not self._outcome.done(), f"turn {self.id} has two outcomes"
        self._outcome.set_result(outcome)

    def pass_on(self) -> None:
        """Set `Moved` as the result: the session has left, and the ask waits in the log."""
        assert not self._outcome.done(), f"turn {self.id} has an outcome, and is passed on"
        hint = "do not ask again; wait for the outcome with host.session(id).turn(turn)"
        message = "the session has left this host, and the ask waits in its log for the next owner"
        self._outcome.set_result(Moved(message, hint=hint, session=self.session.id, turn=self.id))

    def raise_if_passed_on(self) -> None:
        if self._outcome.done() and isinstance(moved := self._outcome.result(), Moved):
            raise copy(moved)

    async def complete(self, outcome: Outcome) -> None:
        """Resolve a turn without a final answer with the text that the log has for it."""
        text: str | None = None
        try:
            text = await self.kept()
        finally:
            self.resolve(replace(outcome, text=text))

    async def kept(self) -> str | None:
        """Return the text that the log has for this turn, or None if the log cannot be read.

        A read error is only logged: the caller waits for the outcome, which is known in any case.
        The text is read once, for the outcome and for every receipt.
        """
        if self._kept is not None:
            return await asyncio.shield(self._kept)
        self._kept = asyncio.get_running_loop().create_future()
        text: str | None = None
        try:
            text = await self.said()
        except StoreError as exc:
            log.warning("turn %s: cannot read its text from the log: %s", self.id, exc)
        finally:
            self._kept.set_result(text)
        return text
