"""Futures that callers wait on: an ask is accepted, a turn ends, an interrupt has its receipt, a hold is granted.

The driver tells `CallerFutures` the result of each, once. A caller that was cancelled leaves its future behind; setting
that one is not worth a warning. `KeyedTurns` finds the turn of an ask that is made again, and `held` enters a hold.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from copy import copy
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from banksman.core.session.effects import AskHuman, CallBack, EndTerminals, GiveReceipt, TellAnswer
from banksman.core.session.facts import HoldAsked, HoldReleased
from banksman.core.session.outcome import KEYS_MAX, UNUSED, By, IdempotencyKey, Kind, Outcome, Receipt
from banksman.core.session.turn import TurnPhase
from banksman.errors import BanksmanError, Refused
from banksman.sessions.outcome_listener import OutcomeListener
from banksman.sessions.questions import Questions
from banksman.sessions.tools import Callbacks
from banksman.sessions.turn import LoggedTurn, Turn
from banksman.tasks import OwnedTasks

# A turn with the future of its acceptance: an ask that is made again with its key waits on the same future.
AcceptedTurn = tuple[Turn, asyncio.Future[None]]
# How many turns stay in memory although they are over. The outcomes of older ones are read from the log.
TURNS_MAX = 64


class CallerFutures(OutcomeListener):
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
        # What is read for a caller: waited for at the end, because the host closes the log then.
        self._reading = OwnedTasks()

    # -- made --------------------------------------------------------------------------------------------------------
    def expect_turn(self, turn: Turn) -> asyncio.Future[None]:
        """Its acceptance; its outcome is the turn's own."""
        self._turns[turn.id] = turn
        accepted = self._accepting[turn.id] = self.loop.create_future()
        return accepted

    def find_turn(self, turn: Turn, kind: Kind | None) -> AcceptedTurn:
        """One that was accepted by a host before this one, and is over: whoever takes a session over sees to that."""
        turn.watch(LoggedTurn(is_over=True, kind=kind))
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
        await self._reading.wait()

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
            self._reading.start(resolved.complete(outcome))
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
            self._reading.start(self._complete(turn, receipt, effect.receipt))

    async def _complete(self, turn: Turn, receipt: asyncio.Future[Receipt], given: Receipt) -> None:
        kept: str | None = None
        try:
            kept = await turn.kept()
        finally:
            _set(receipt, replace(given, kept=kept))

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


class KeyedTurns:
    """The turns of one session by their idempotency keys: an ask with a known key gets the turn of the first ask, also
    after a restart. `stored`: the keys that the log has from before."""

    def __init__(self, stored: Iterable[IdempotencyKey]) -> None:
        self._asked: OrderedDict[str, AcceptedTurn] = OrderedDict()
        self._stored = {key.key: key for key in stored}

    def get(self, key: str | None) -> AcceptedTurn | None:
        return None if key is None else self._asked.get(key)

    def take_stored(self, key: str | None) -> IdempotencyKey | None:
        """Where the log has it, if it has it and nobody has come with it since."""
        return None if key is None else self._stored.pop(key, None)

    def remember(self, key: str | None, asked: AcceptedTurn) -> None:
        if key is not None:
            self._stored.pop(key, None)
            self._asked[key] = asked
            self._let_go()
            if len(self._asked) > KEYS_MAX:
                self._asked.popitem(last=False)

    def _let_go(self) -> None:
        """Keep of the oldest turns only their places in the log. One that is not over stays, and all that came after
        it. One whose end the log may not have is put behind the others."""
        for _ in range(len(self._asked) - TURNS_MAX):
            key, (turn, _) = next(iter(self._asked.items()))
            if (stored := turn.stored_as(key)) is None:
                if turn.state != TurnPhase.ENDED:
                    return
                self._asked.move_to_end(key)
                continue
            del self._asked[key]
            if stored.outcome not in UNUSED:
                self._stored[key] = stored
                if len(self._stored) > KEYS_MAX:
                    del self._stored[next(iter(self._stored))]

    def forget(self, turn: Turn) -> None:
        """It came to nothing: whoever comes with its key again makes a new ask."""
        for key in [key for key, (known, _) in self._asked.items() if known is turn]:
            del self._asked[key]


# -- holds -----------------------------------------------------------------------------------------------------------
# The holds that the running task is inside of, by session: asks made there are made in the hold.
_holds: contextvars.ContextVar[Mapping[str, str]] = contextvars.ContextVar(
    "banksman_holds", default=MappingProxyType({})
)


def current_hold(session: str) -> str | None:
    """The hold of this session that the running task is inside of."""
    return _holds.get().get(session)


@asynccontextmanager
async def held(
    session: str,
    futures: CallerFutures,
    priority: int,
    tell: Callable[[HoldAsked | HoldReleased], None],
    raise_if_failed: Callable[[asyncio.Future[None]], None],
) -> AsyncGenerator[None]:
    """See `Session.hold`. `raise_if_failed`: of a session that a bug has failed nobody hears any more."""
    now = futures.loop.time
    holds = _holds.get()
    # Only one that is still there: a task that was started inside a hold may outlive it.
    if futures.has_hold(holds.get(session)):
        yield  # Its own: whoever holds the session already has what it asks for.
        return
    id = f"h-{os.urandom(8).hex()}"
    granted = futures.expect_hold(id)
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
        futures.forget_hold(id)
        tell(HoldReleased(now(), id))
        # Left in another context than it was entered in (a fixture, a generator that is closed by the loop): there is
        # nothing to be put back there.
        with suppress(ValueError):
            _holds.reset(token)
