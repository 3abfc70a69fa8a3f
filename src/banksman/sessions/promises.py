"""What callers wait for: that an ask is accepted, that a turn ends, a receipt, a hold. The driver keeps each, once.

A caller that goes away leaves its promise behind; that it is kept then is not worth a warning.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from copy import copy
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from banksman.core.session.effects import AskHuman, CallBack, EndTerminals, GiveReceipt, TellAnswer
from banksman.core.session.facts import HoldAsked, HoldReleased
from banksman.core.session.outcome import By, Kind, Outcome, Receipt
from banksman.errors import BanksmanError, Refused
from banksman.sessions.callbacks import Callbacks
from banksman.sessions.outcome_listener import OutcomeListener
from banksman.sessions.questions import Questions
from banksman.sessions.turn import Turn, Watch


class Promises(OutcomeListener):
    """Of one session. `finished` is done when nothing more will happen in it."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.finished: asyncio.Future[None] = self.loop.create_future()
        # Set by the session, which makes them when there is a driver to answer to.
        self.questions: Questions | None = None
        self.callbacks: Callbacks | None = None
        self.save: Callable[[str], None] | None = None
        # Told of each turn that is over, once the log has that.
        self.on_resolved: Callable[[str], None] | None = None
        # How many of what was asked for ended, by how.
        self.outcomes: Counter[str] = Counter()
        self._turns: dict[str, Turn] = {}
        # Those that wait in the log, for whoever has the session next: nobody here hears how they end.
        self._passed_on: dict[str, Turn] = {}
        self._accepting: dict[str, asyncio.Future[None]] = {}
        self._receipts: dict[str, tuple[asyncio.Future[Receipt], Turn | None]] = {}
        self._granting: dict[str, asyncio.Future[None]] = {}
        self._changing: dict[str, asyncio.Future[None]] = {}
        # What is read for somebody who was promised it: waited for at the end, because the host closes the log then.
        self._tasks: set[asyncio.Task[None]] = set()

    # -- made --------------------------------------------------------------------------------------------------------
    def expect_turn(self, turn: Turn) -> asyncio.Future[None]:
        """Its acceptance; its outcome is the turn's own."""
        self._turns[turn.id] = turn
        accepted = self._accepting[turn.id] = self.loop.create_future()
        return accepted

    def find_turn(self, turn: Turn, kind: Kind | None) -> tuple[Turn, asyncio.Future[None]]:
        """One that was accepted by a host before this one, and is over: whoever takes a session over sees to that."""
        turn.watch(Watch(is_over=True, kind=kind))
        accepted: asyncio.Future[None] = self.loop.create_future()
        accepted.set_result(None)
        return turn, accepted

    def turn(self, id: str) -> Turn | None:
        return None if id in self._accepting else self._turns.get(id, self._passed_on.get(id))

    def raise_if_passed_on(self, turn: str) -> None:
        """`Moved`: nothing can be done about it here any more."""
        if turn in self._passed_on:
            self._passed_on[turn].raise_if_passed_on()

    def expect_receipt(self, interrupt: str, turn: Turn | str) -> asyncio.Future[Receipt]:
        receipt: asyncio.Future[Receipt] = self.loop.create_future()
        self._receipts[interrupt] = receipt, turn if isinstance(turn, Turn) else self._turns.get(turn)
        return receipt

    def expect_hold(self, hold: str) -> asyncio.Future[None]:
        granted = self._granting[hold] = self.loop.create_future()
        return granted

    def expect_change(self, change: str) -> asyncio.Future[None]:
        taken = self._changing[change] = self.loop.create_future()
        return taken

    def has_hold(self, hold: str | None) -> bool:
        return hold in self._granting

    def forget_hold(self, hold: str) -> None:
        self._granting.pop(hold, None)

    async def wait_read(self) -> None:
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    # -- kept --------------------------------------------------------------------------------------------------------
    def accept(self, turn: str) -> None:
        _set(self._accepting.pop(turn))

    def reject(self, turn: str, error: BanksmanError) -> None:
        self._turns.pop(turn)
        # Each gets its own: one that is raised again and again would keep the frames of all who got it.
        self._accepting.pop(turn).set_exception(copy(error))

    def resolve(self, turn: str, outcome: Outcome) -> None:
        resolved = self._turns.pop(turn)
        self.outcomes[outcome.kind.value] += 1
        was_sent = outcome.kind not in (Kind.WITHDRAWN, Kind.REFUSED)
        if outcome.text is None and was_sent:
            self._own(resolved.complete(outcome))
        else:
            resolved.resolve(outcome)
        if was_sent and self.on_resolved is not None:
            self.on_resolved(turn)

    def pass_on(self, turn: str) -> None:
        passed = self._passed_on[turn] = self._turns.pop(turn)
        passed.pass_on()

    def give_receipt(self, effect: GiveReceipt) -> None:
        receipt, turn = self._receipts.pop(effect.interrupt)
        if turn is None or effect.receipt.by in (By.WITHDRAWN, By.ALREADY_OVER):
            _set(receipt, effect.receipt)
        else:
            self._own(self._complete(turn, receipt, effect.receipt))

    async def _complete(self, turn: Turn, receipt: asyncio.Future[Receipt], given: Receipt) -> None:
        kept: str | None = None
        try:
            kept = await turn.kept()
        finally:
            _set(receipt, replace(given, kept=kept))

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def grant_hold(self, hold: str) -> None:
        granted = self._granting.get(hold)
        if granted is not None:
            _set(granted)

    def end_hold(self, hold: str, error: BanksmanError | None) -> None:
        granted = self._granting.pop(hold, None)
        if granted is not None and not granted.done():
            granted.set_exception(copy(error) if error else Refused("the hold ended before it was granted"))

    def ask_human(self, effect: AskHuman) -> None:
        assert self.questions is not None
        self.questions.ask(effect)

    def close_question(self, question: str) -> None:
        assert self.questions is not None
        self.questions.close(question)

    def tell_answer(self, effect: TellAnswer) -> None:
        assert self.questions is not None
        self.questions.tell(effect)

    def call_back(self, effect: CallBack) -> None:
        assert self.callbacks is not None
        self.callbacks.call(effect)

    def close_callback(self, request: str) -> None:
        assert self.callbacks is not None
        self.callbacks.close(request)

    def end_terminals(self, effect: EndTerminals) -> None:
        assert self.callbacks is not None
        self.callbacks.end_terminals(effect)

    def take_setting(self, change: str, error: BanksmanError | None) -> None:
        taken = self._changing.pop(change)
        if error is None:
            _set(taken)
        elif not taken.done():
            taken.set_exception(copy(error))

    def ask_to_save(self, prompt: str) -> None:
        assert self.save is not None
        # Not here, inside the door: it is an ask like any other, and comes in by the door.
        self.loop.call_soon(self.save, prompt)

    # -- broken ------------------------------------------------------------------------------------------------------
    def finish(self) -> None:
        """Nothing more will happen."""
        self._end_callbacks()
        _set(self.finished)

    def _end_callbacks(self) -> None:
        if self.questions is not None:
            self.questions.end()
        if self.callbacks is not None:
            self.callbacks.end()

    def fail(self, error: BanksmanError) -> None:
        """A bug of ours: whoever still waits for something is told so, and will not be told anything else."""
        self._end_callbacks()
        if self.questions is not None:
            self.questions.fail(error)
        receipts = [receipt for receipt, _ in self._receipts.values()]
        for future in (*self._accepting.values(), *self._granting.values(), *self._changing.values(), *receipts):
            if not future.done():
                future.set_exception(error)
                future.exception()
        for id, turn in list(self._turns.items()):
            if id not in self._accepting:
                self.outcomes[Kind.FAILED.value] += 1
                turn.resolve(Outcome(kind=Outcome.FAILED, error=error, durable=False))
        self._turns.clear()
        self._accepting.clear()
        self._granting.clear()
        self._changing.clear()
        self._receipts.clear()


def _set(future: asyncio.Future[Any], value: Any = None) -> None:
    if not future.done():
        future.set_result(value)


def ignore(future: asyncio.Future[Any]) -> None:
    """Nobody will collect what becomes of it, and that is not worth a warning."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())


# Holds: which of them a task is inside of, and how one is entered and left.

# The holds that the running task is inside of, by session: asks made there are made in the hold.
_holds: contextvars.ContextVar[Mapping[str, str]] = contextvars.ContextVar(
    "banksman_holds", default=MappingProxyType({})
)


def inside(session: str) -> str | None:
    """The hold of this session that the running task is inside of."""
    return _holds.get().get(session)


@asynccontextmanager
async def held(
    session: str,
    promises: Promises,
    priority: int,
    tell: Callable[[HoldAsked | HoldReleased], None],
    raise_if_failed: Callable[[asyncio.Future[None]], None],
) -> AsyncGenerator[None]:
    """See `Session.hold`. `raise_if_failed`: of a session that a bug has failed nobody hears any more."""
    now = promises.loop.time
    holds = _holds.get()
    # Only one that is still there: a task that was started inside a hold may outlive it.
    if promises.has_hold(holds.get(session)):
        yield  # Its own: whoever holds the session already has what it asks for.
        return
    id = f"h-{os.urandom(8).hex()}"
    granted = promises.expect_hold(id)
    token = _holds.set({**holds, session: id})
    try:
        tell(HoldAsked(now(), id, priority))
        raise_if_failed(granted)
        await asyncio.shield(granted)
        yield
    except asyncio.CancelledError:
        ignore(granted)
        raise
    finally:
        promises.forget_hold(id)
        tell(HoldReleased(now(), id))
        # Left in another context than it was entered in (a fixture, a generator that is closed by the loop): there is
        # nothing to be put back there.
        with suppress(ValueError):
            _holds.reset(token)
