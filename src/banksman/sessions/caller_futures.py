"""Futures of callers: accepted asks, outcomes, receipts, granted holds, changed settings.

`CallerFutures` is the driver's `OutcomeListener`. The driver reports each result to it once. It
passes questions and callbacks on to `questions.py` and `tools.py`. A cancelled caller leaves its
future behind, and setting that future causes no warning. `KeyedTurns` finds the turn of a repeated
ask, and `held` enters a hold.
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

from banksman.core.session.effects import (
    AskHuman,
    CallBack,
    CallOnLimit,
    EndTerminals,
    GiveReceipt,
    TellAnswer,
)
from banksman.core.session.facts import HoldAsked, HoldReleased
from banksman.core.session.idempotency import KEYS_MAX, UNUSED, IdempotencyKey
from banksman.core.session.outcome import By, Kind, Outcome, Receipt
from banksman.core.session.turn import TurnPhase
from banksman.errors import BanksmanError, Refused
from banksman.sessions.limit_callback import LimitCallback
from banksman.sessions.outcome_listener import OutcomeListener
from banksman.sessions.questions import OpenQuestions
from banksman.sessions.tools import Callbacks
from banksman.sessions.turn import LoggedTurn, Turn
from banksman.tasks import OwnedTasks

# A turn with the future of its acceptance. A repeated ask with the same key waits on the same
# future.
AcceptedTurn = tuple[Turn, asyncio.Future[None]]
# Ended turns that stay in memory. The outcomes of older turns are read from the log.
TURNS_MAX = 64


class CallerFutures(OutcomeListener):
    """Futures of one session.

    `finished`: done when nothing more will happen in the session.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.finished: asyncio.Future[None] = self.loop.create_future()
        # Set by the session, because these objects need the driver.
        self.questions: OpenQuestions | None = None
        self.callbacks: Callbacks | None = None
        self.limits: LimitCallback | None = None
        self.save: Callable[[str], None] | None = None
        # Called for each ended turn when the log has its end.
        self.on_resolved: Callable[[str], None] | None = None
        # Number of ended asks by the kind of their outcome.
        self.outcomes: Counter[str] = Counter()
        self._turns: dict[str, Turn] = {}
        # Turns that stay in the log for the next owner. This host will not learn their outcomes.
        self._passed_on: dict[str, Turn] = {}
        self._accepting: dict[str, asyncio.Future[None]] = {}
        self._receipts: dict[str, tuple[asyncio.Future[Receipt], Turn | None]] = {}
        self._granting: dict[str, asyncio.Future[None]] = {}
        self._changing: dict[str, asyncio.Future[None]] = {}
        # Reads of the log for callers. The session's end waits for them, because the host then
        # closes the log.
        self._reading = OwnedTasks()

    # -- expected results -------------------------------------------------------------------------
    def expect_turn(self, turn: Turn) -> asyncio.Future[None]:
        """Register a turn and return the future of its acceptance.

        The outcome is a future of the turn itself.
        """
        self._turns[turn.id] = turn
        accepted = self._accepting[turn.id] = self.loop.create_future()
        return accepted

    def find_turn(self, turn: Turn, kind: Kind | None) -> AcceptedTurn:
        """Return a turn that an earlier owner accepted and that is over.

        The take-over has settled all turns that were open.
        """
        turn.watch(LoggedTurn(is_over=True, kind=kind))
        accepted: asyncio.Future[None] = self.loop.create_future()
        accepted.set_result(None)
        return turn, accepted

    def turn(self, id: str) -> Turn | None:
        return None if id in self._accepting else self._turns.get(id, self._passed_on.get(id))

    def raise_if_passed_on(self, turn: str) -> None:
        """Raise `Moved` if the turn waits in the log for the next owner."""
        if turn in self._passed_on:
            self._passed_on[turn].raise_if_passed_on()

    def expect_receipt(self, interrupt: str, turn: Turn | str) -> asyncio.Future[Receipt]:
        receipt: asyncio.Future[Receipt] = self.loop.create_future()
        self._receipts[interrupt] = (
            receipt,
            turn if isinstance(turn, Turn) else self._turns.get(turn),
        )
        return receipt

    def expect_hold(self, hold: str) -> asyncio.Future[None]:
        granted = self._granting[hold] = self.loop.create_future()
        return granted

    def expect_change(self, change: str) -> asyncio.Future[None]:
        taken = self._changing[change] = self.loop.create_future()
        return taken

    def hold(self, hold: str) -> asyncio.Future[None] | None:
        """Return the future of the grant of a hold; None if the hold is over."""
        return self._granting.get(hold)

    def has_hold(self, hold: str | None) -> bool:
        return hold in self._granting

    def forget_hold(self, hold: str) -> None:
        self._granting.pop(hold, None)

    async def wait_read(self) -> None:
        await self._reading.wait()

    # -- results from the driver ------------------------------------------------------------------
    def accept(self, turn: str) -> None:
        _set(self._accepting.pop(turn))

    def reject(self, turn: str, error: BanksmanError) -> None:
        self._turns.pop(turn)
        # Each caller gets a copy of the error. A shared instance that is raised repeatedly would
        # keep the stack frames of all callers alive.
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
        if effect.error is not None:
            if not receipt.done():
                receipt.set_exception(copy(effect.error))
                ignore(receipt)
        elif turn is None or effect.receipt.by in (By.WITHDRAWN, By.ALREADY_OVER):
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
            granted.set_exception(
                copy(error) if error else Refused("the hold ended before it was granted")
            )

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
        # Not called directly, because this code runs inside `dispatch`. The save is an ordinary ask
        # and needs its own dispatch.
        self.loop.call_soon(self.save, prompt)

    def call_on_limit(self, effect: CallOnLimit) -> None:
        assert self.limits is not None
        self.limits.call(effect)

    def obstacle(self) -> str:
        return "" if self.callbacks is None else self.callbacks.obstacle

    def turns_after(self) -> dict[str, int]:
        return {id: turn.after for id, turn in self._turns.items()}

    # -- the end ----------------------------------------------------------------------------------
    def finish(self) -> None:
        """End the callbacks and set `finished`."""
        self._end_callbacks()
        _set(self.finished)

    def _end_callbacks(self) -> None:
        if self.questions is not None:
            self.questions.end()
        if self.callbacks is not None:
            self.callbacks.end()
        if self.limits is not None:
            self.limits.end()

    def fail(self, error: BanksmanError) -> None:
        """Fail all waiting callers, because a bug ended the session."""
        self._end_callbacks()
        if self.questions is not None:
            self.questions.fail(error)
        receipts = [receipt for receipt, _ in self._receipts.values()]
        for future in (
            *self._accepting.values(),
            *self._granting.values(),
            *self._changing.values(),
            *receipts,
        ):
            if not future.done():
                # Also retrieve the exception: a cancelled caller never awaits the future, and
                # asyncio would warn.
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
    """Suppress the warning about a future whose exception is never retrieved."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())


class KeyedTurns:
    """Turns of one session by their idempotency keys.

    An ask with a known key gets the turn of the first ask, also after a restart. `stored`: the keys
    that the log has from earlier.
    """

    def __init__(self, stored: Iterable[IdempotencyKey]) -> None:
        self._asked: OrderedDict[str, AcceptedTurn] = OrderedDict()
        self._stored = {key.key: key for key in stored}

    def get(self, key: str | None) -> AcceptedTurn | None:
        return None if key is None else self._asked.get(key)

    def take_stored(self, key: str | None) -> IdempotencyKey | None:
        """Return and remove the logged place of a key whose turn is not in memory."""
        return None if key is None else self._stored.pop(key, None)

    def remember(self, key: str | None, asked: AcceptedTurn) -> None:
        if key is not None:
            self._stored.pop(key, None)
            self._asked[key] = asked
            self._let_go()
            if len(self._asked) > KEYS_MAX:
                self._asked.popitem(last=False)

    def _let_go(self) -> None:
        """Replace the oldest ended turns by their places in the log.

        A turn that is not over stays, and so do all later turns. A turn whose end may be missing in
        the log moves behind the others.
        """
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
        """Forget a turn that was not accepted. The next ask with its key creates a new turn."""
        for key in [key for key, (known, _) in self._asked.items() if known is turn]:
            del self._asked[key]


# -- holds ---------------------------------------------------------------------------------------
# Holds that the current task is inside of, by session. Asks of this task belong to the hold.
_holds: contextvars.ContextVar[Mapping[str, str]] = contextvars.ContextVar(
    "banksman_holds", default=MappingProxyType({})
)


def current_hold(session: str) -> str | None:
    """Return the hold of this session that the current task is inside of."""
    return _holds.get().get(session)


@asynccontextmanager
async def held(
    session: str,
    futures: CallerFutures,
    priority: int,
    tell: Callable[[HoldAsked | HoldReleased], None],
    raise_if_failed: Callable[[asyncio.Future[None]], None],
    *,
    caller: str | None = None,
) -> AsyncGenerator[None]:
    """Enter a hold. See `Session.hold`.

    `raise_if_failed`: raises if a bug has failed the session, because then the future is never set.
    """
    now = futures.loop.time
    holds = _holds.get()
    # Only a hold that still exists: a task that was started inside a hold may outlive it.
    if futures.has_hold(holds.get(session)):
        yield  # Re-entered by the task that already has the hold.
        return
    id = f"h-{os.urandom(8).hex()}"
    granted = futures.expect_hold(id)
    token = _holds.set({**holds, session: id})
    try:
        tell(HoldAsked(now(), id, priority, caller))
        raise_if_failed(granted)
        await asyncio.shield(granted)
        yield
    except asyncio.CancelledError:
        ignore(granted)
        raise
    finally:
        futures.forget_hold(id)
        tell(HoldReleased(now(), id, caller))
        # The generator may be closed in another context than it was entered in (a fixture, a
        # generator that the loop closes). There the token is not valid and nothing needs to be
        # restored.
        with suppress(ValueError):
            _holds.reset(token)
