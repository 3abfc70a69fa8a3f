"""A session's face for asyncio: ask, follow, interrupt, hold, answer, close.

It holds no state that decides anything: what callers want goes through the driver's door, what becomes of it comes back
as futures. A caller that is cancelled stops waiting; what it asked for is withdrawn where the design says so.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeVar

from banksman.core import event as kinds
from banksman.core.arbiter import NORMAL, Hold, Priority
from banksman.core.event import Event
from banksman.core.framing import FRAME_BYTES_MAX
from banksman.core.outcome import By, Kind, Outcome, Receipt
from banksman.core.session_facts import (
    Asked,
    AskHuman,
    AskMoved,
    AskWithdrawn,
    CloseAsked,
    DrainAsked,
    GiveReceipt,
    HoldAsked,
    HoldReleased,
    InterruptAsked,
)
from banksman.core.state import Mode
from banksman.core.state import Session as State
from banksman.core.turn import Ask, Phase
from banksman.core.turn import Turn as CoreTurn
from banksman.errors import BanksmanError, Refused, StoreError, UsageError
from banksman.run.agent import Spawn
from banksman.run.driver import Counters, Driver, Listener
from banksman.run.questions import OnQuestion, Question, Questions
from banksman.run.waiters import Waiters
from banksman.store.log import Log

log = logging.getLogger("banksman")

R = TypeVar("R")
Prompt = str | Sequence[Mapping[str, Any]]
ON_BUSY = ("enqueue", "reject", "interrupt", "steer", "collect")
ON_PREEMPT = ("end", "requeue")
# How many idempotency keys a session remembers.
KEYS_MAX = 1024

# The holds that the running task is inside of, by session: asks made there are made in the hold.
_holds: contextvars.ContextVar[Mapping[str, str]] = contextvars.ContextVar(
    "banksman_holds", default=MappingProxyType({})
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """An ask in the queue."""

    turn: str
    priority: int
    seconds: float
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockStatus:
    name: str
    seconds: float
    left: float
    is_running: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What a session is doing, at this moment.

    `phase`: idle, starting, running, interrupting, stopping, draining, closing, closed or failed.
    `holder`: the turn that is granted, or the agent's own; `hold`: the hold that is granted.
    """

    id: str
    name: str | None
    agent: str
    phase: str
    holder: str | None
    hold: str | None
    queue: tuple[Waiting, ...]
    clocks: tuple[ClockStatus, ...]
    timers: Mapping[str, float]
    questions: tuple[str, ...]
    pids: tuple[int, ...]
    conversation: str | None
    epoch: int
    seq: int
    counters: Mapping[str, int]
    seconds_since_in: float | None
    seconds_since_out: float | None
    cost: float | None


class Turn:
    """An ask that was accepted: `async for update in turn` gives its updates, `await turn.outcome()` its outcome."""

    def __init__(self, session: Session, id: str, after: int) -> None:
        self.id = id
        self.session = session
        self._after = after
        self._outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

    def __repr__(self) -> str:
        return f"<Turn {self.id} {self.state}>"

    @property
    def state(self) -> str:
        """queued, starting, running, interrupting or ended."""
        if self._outcome.done():
            return Phase.ENDED
        turn = self.session.find_turn(self.id)
        return Phase.ENDED if turn is None else turn.phase

    async def outcome(self) -> Outcome:
        """How it ended; never raises for an ending. Cancelling this only stops waiting."""
        return await asyncio.shield(self._outcome)

    async def interrupt(self) -> Receipt:
        """Ask this turn to stop; the receipt tells what became of it. Cancelling this only stops waiting."""
        return await self.session.interrupt(self)

    async def said(self) -> str | None:
        """What the agent has said in this turn so far."""
        async with aclosing(self._events(waits=False)) as events:
            frames = [event.data async for event in events if event.kind == kinds.UPDATE]
        return self.session.dialect.said(frames)

    async def __aiter__(self) -> AsyncGenerator[dict[str, Any]]:
        async with aclosing(self._events(waits=True)) as events:
            async for event in events:
                if event.kind == kinds.UPDATE:
                    for update in self.session.dialect.project(event.data):
                        yield update

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

    async def complete(self, outcome: Outcome) -> None:
        """The agent gave no final answer: what it had said until then is in the log."""
        text: str | None = None
        try:
            text = await self.said()
        except StoreError as exc:
            # The ending is known all the same, and is what was waited for.
            log.warning("! turn %s: what it had said cannot be read: %s", self.id, exc)
        finally:
            self.resolve(replace(outcome, text=text))


class Session(Listener):
    """One conversation with one agent. Made by `Host.open`; all methods are for the loop it was made in."""

    def __init__(
        self,
        id: str,
        state: State,
        *,
        name: str | None,
        agent: str,
        store: Log,
        spawn: Spawn,
        on_question: OnQuestion | None = None,
        frame_bytes_max: int = FRAME_BYTES_MAX,
    ) -> None:
        self.id = id
        self.name = name
        self.agent = agent
        self.dialect: Any = state.config.dialect
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._turns: dict[str, Turn] = {}
        self._accepting: dict[str, asyncio.Future[None]] = {}
        self._receipts: dict[str, tuple[asyncio.Future[Receipt], Turn | None]] = {}
        self._granting: dict[str, asyncio.Future[None]] = {}
        self._keys: OrderedDict[str, Turn] = OrderedDict()
        self._finished: asyncio.Future[None] = self._loop.create_future()
        # What is read for somebody who was promised it, and readers inside the store: both are waited for at the end,
        # because the host closes the log then.
        self._tasks: set[asyncio.Task[None]] = set()
        self._reading = 0
        self._pauses = Waiters()
        self._cost: float | None = None
        self._driver = Driver(id, state, store=store, spawn=spawn, listener=self, frame_bytes_max=frame_bytes_max)
        self._questions = Questions(self._driver, on_question)

    def __repr__(self) -> str:
        return f"<Session {self.name or self.id} {self._phase()}>"

    # -- asking ------------------------------------------------------------------------------------------------------
    async def ask(
        self,
        prompt: Prompt,
        *,
        priority: int | str = NORMAL,
        on_busy: str = "enqueue",
        on_preempt: str = "end",
        key: str | None = None,
    ) -> Turn:
        """Ask for one turn. Returns when it is accepted, which is when the log has it; raises if it is not.

        Cancelled, the ask is withdrawn. With a `key` that was used before, the turn of that time is returned.
        """
        ask = self._checked(prompt, priority, on_busy, on_preempt, key)
        if key is not None and (known := self._keys.get(key)) is not None:
            await self._wait_accepted(known.id)
            return known
        turn = Turn(self, ask.id, self._driver.state.head)
        self._turns[turn.id] = turn
        if key is not None:
            self._keys[key] = turn
            if len(self._keys) > KEYS_MAX:
                self._keys.popitem(last=False)
        accepted: asyncio.Future[None] = self._loop.create_future()
        self._accepting[turn.id] = accepted
        self._driver.dispatch(Asked(self._driver.now(), ask))
        try:
            self._raise_if_failed(accepted)
            await asyncio.shield(accepted)
        except asyncio.CancelledError:
            _ignore(accepted)
            self._driver.dispatch(AskWithdrawn(self._driver.now(), turn.id))
            raise
        return turn

    async def _wait_accepted(self, id: str) -> None:
        accepted = self._accepting.get(id)
        if accepted is not None:
            await asyncio.shield(accepted)

    def _checked(self, prompt: Any, priority: Any, on_busy: Any, on_preempt: Any, key: Any) -> Ask:
        if on_busy not in ON_BUSY:
            raise UsageError(f"on_busy cannot be {on_busy!r}", hint=f"one of {', '.join(ON_BUSY)}")
        if on_preempt not in ON_PREEMPT:
            raise UsageError(f"on_preempt cannot be {on_preempt!r}", hint=f"one of {', '.join(ON_PREEMPT)}")
        if on_busy == "steer" and not self.dialect.can_steer:
            raise UsageError(f"{self.agent} cannot be steered", hint='on_busy="enqueue", or "interrupt"')
        if key is not None and not isinstance(key, str):
            raise UsageError(f"key cannot be {key!r:.60}", hint="text that is the same when the same ask is made again")
        ref = str(uuid.uuid4())
        # Encoded once to be refused here if the agent could not take it, and not when its turn has come.
        self.dialect.prompt(ref, prompt)
        return Ask(
            id=f"t-{os.urandom(8).hex()}",
            ref=ref,
            prompt=prompt if isinstance(prompt, str) else [dict(block) for block in prompt],
            priority=_priority(priority),
            on_busy=on_busy,
            on_preempt=on_preempt,
            key=key,
            hold=_holds.get().get(self.id),
            at=self._driver.now(),
        )

    async def interrupt(self, turn: Turn | str | None = None) -> Receipt:
        """Stop a turn, by default the one that is running now. On an idle session: a receipt that says so."""
        if turn is None:
            holder = self._holder()
            if holder is None:
                return Receipt(stopped=False, by=By.ALREADY_OVER)
            turn = holder
        id = turn.id if isinstance(turn, Turn) else turn
        interrupt = f"i-{os.urandom(8).hex()}"
        receipt: asyncio.Future[Receipt] = self._loop.create_future()
        self._receipts[interrupt] = receipt, turn if isinstance(turn, Turn) else self._turns.get(turn)
        self._driver.dispatch(InterruptAsked(self._driver.now(), id, interrupt))
        if self._driver.error is not None and not receipt.done():
            raise self._driver.bug()
        return await asyncio.shield(receipt)

    async def _complete(self, turn: Turn, receipt: asyncio.Future[Receipt], given: Receipt) -> None:
        kept: str | None = None
        try:
            kept = await turn.said()
        except StoreError as exc:
            log.warning("! turn %s: what it had said cannot be read: %s", turn.id, exc)
        finally:
            _set(receipt, replace(given, kept=kept))

    def move(self, turn: Turn | str, *, before: Turn | str | None = None) -> None:
        """Put a queued ask before another of its class, or to the head of its class. Else nothing happens."""
        id = turn.id if isinstance(turn, Turn) else turn
        target = before.id if isinstance(before, Turn) else before
        self._driver.dispatch(AskMoved(self._driver.now(), id, target))

    def withdraw(self, turn: Turn | str) -> None:
        """Take a queued ask back; one that runs is interrupted."""
        self._driver.dispatch(AskWithdrawn(self._driver.now(), turn.id if isinstance(turn, Turn) else turn))

    @asynccontextmanager
    async def hold(self, priority: int | str = NORMAL) -> AsyncGenerator[None]:
        """Several asks in a row, with nobody of this class or below between them. May be re-entered."""
        holds = _holds.get()
        # Only one that is still there: a task that was started inside a hold may outlive it.
        if holds.get(self.id) in self._granting:
            yield  # Its own: whoever holds the session already has what it asks for.
            return
        id = f"h-{os.urandom(8).hex()}"
        granted: asyncio.Future[None] = self._loop.create_future()
        self._granting[id] = granted
        token = _holds.set({**holds, self.id: id})
        try:
            self._driver.dispatch(HoldAsked(self._driver.now(), id, _priority(priority)))
            self._raise_if_failed(granted)
            await asyncio.shield(granted)
            yield
        except asyncio.CancelledError:
            _ignore(granted)
            raise
        finally:
            self._granting.pop(id, None)
            self._driver.dispatch(HoldReleased(self._driver.now(), id))
            # Left in another context than it was entered in (a fixture, a generator that is closed by the loop): there
            # is nothing to be put back there.
            with suppress(ValueError):
                _holds.reset(token)

    # -- following ---------------------------------------------------------------------------------------------------
    def follow(self, after: str | int | None = None) -> AsyncGenerator[Event]:
        """Every event of the log after a cursor, then each as it is committed, until the session is closed.

        A range that retention took is told by one `stream.gap` event.
        """
        return self.events(_seq(after), waits=True)

    async def events(
        self, after: int, *, waits: bool, until: asyncio.Future[Any] | None = None
    ) -> AsyncGenerator[Event]:
        """`waits`: also for what is not there yet, until the session is closed or `until` is done."""
        seq = after
        ends = (self._finished,) if until is None else (self._finished, until)
        while True:
            # Looked at before it is read: what is committed after the reading may be the last.
            is_last = not waits or any(end.done() for end in ends)
            page = await self._read(self._store.read(self.id, seq))
            if page.gap is not None:
                first, last = page.gap
                yield kinds.gap(self.id, first, last)
                seq = last
            for event in page.events:
                yield event
                seq = event.seq
                if event.kind == kinds.SESSION_CLOSED and self._finished.done():
                    return  # There is nothing after it; and the log may be closed by now.
            if page.events:
                continue
            if is_last:
                return
            await self._read(self._wait_past(seq, ends))

    async def _read(self, reading: Coroutine[Any, Any, R]) -> R:
        self._reading += 1
        try:
            return await reading
        finally:
            self._reading -= 1
            self._pauses.wake()

    async def _wait_past(self, seq: int, ends: Sequence[asyncio.Future[Any]]) -> None:
        """Until there is more, or there never will be."""
        more = asyncio.ensure_future(self._store.wait_past(self.id, seq))
        try:
            await asyncio.wait((more, *ends), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not more.done():
                more.cancel()
                await asyncio.wait((more,))
            elif not more.cancelled() and not any(end.done() for end in ends):
                # A reader that can never be woken is told so, and does not come back at once to be told again.
                more.result()
            elif not more.cancelled():
                more.exception()

    # -- questions ---------------------------------------------------------------------------------------------------
    def questions(self) -> list[Question]:
        """Those that wait for an answer."""
        return self._questions.open()

    async def answer(
        self,
        question: str,
        decision: str,
        *,
        message: str | None = None,
        updated_input: Mapping[str, Any] | None = None,
    ) -> None:
        """Answer a question of the agent: "allow" or "deny"."""
        self._questions.answer(question, decision, message=message, updated_input=updated_input)

    # -- status ------------------------------------------------------------------------------------------------------
    def find_turn(self, id: str) -> CoreTurn | None:
        state = self._driver.state
        turns = [state.turn, state.own, *(waiting for waiting in state.queue if isinstance(waiting, CoreTurn))]
        for turn in turns:
            if turn is not None and (turn.id == id or any(ask.id == id for ask in turn.asks)):
                return turn
        return None

    def _holder(self) -> str | None:
        state = self._driver.state
        holder = state.own or state.turn
        return None if holder is None else holder.id

    def _phase(self) -> str:
        state = self._driver.state
        if self._driver.error is not None:
            return "failed"
        if state.mode is not Mode.OPEN:
            return state.mode.name.lower()
        holder = state.own or state.turn
        if holder is not None:
            return holder.phase
        return {"NONE": "idle", "READY": "idle"}.get(state.process.phase.name, state.process.phase.name.lower())

    def status(self) -> Status:
        """What it is doing. Never blocks, and changes nothing."""
        driver = self._driver
        state = driver.state
        now = driver.now()
        waiting = [
            Waiting(turn=turn.id, priority=turn.priority, seconds=now - turn.ask.at, attempt=turn.attempt)
            for turn in state.queue
            if not isinstance(turn, Hold) and turn.ask is not None
        ]
        clocks = [
            ClockStatus(name=c.name, seconds=c.seconds, left=c.seconds - c.elapsed(now), is_running=c.is_running)
            for c in state.clocks
        ]
        counters: Counters = driver.counters
        return Status(
            id=self.id,
            name=self.name,
            agent=self.agent,
            phase=self._phase(),
            holder=self._holder(),
            hold=None if state.hold is None else state.hold.id,
            queue=tuple(waiting),
            clocks=tuple(clocks),
            timers={f"{t.value} {subject}": timer.when() - now for (t, subject), timer in driver.timers.items()},
            questions=tuple(question.id for question in state.questions),
            pids=() if driver.pid is None else (driver.pid,),
            conversation=state.conversation,
            epoch=driver.epoch,
            seq=state.head,
            counters={name: getattr(counters, name) for name in counters.__slots__},
            seconds_since_in=None if driver.last_in is None else now - driver.last_in,
            seconds_since_out=None if driver.last_out is None else now - driver.last_out,
            cost=self._cost,
        )

    # -- closing -----------------------------------------------------------------------------------------------------
    async def close(self) -> None:
        """Stop what runs, by the ladder, and let go. May be called again, and by several; cancelling stops waiting."""
        self.close_nowait()
        await self.wait_closed()

    def close_nowait(self) -> None:
        self._driver.dispatch(CloseAsked(self._driver.now()))

    def drain_nowait(self) -> None:
        """Take nothing new, finish what runs, then close."""
        self._driver.dispatch(DrainAsked(self._driver.now()))

    async def wait_closed(self) -> None:
        """Until it is closed, its callbacks have ended, and who was reading its log by then has what it reads."""
        await asyncio.shield(self._finished)
        await self._questions.wait_ended()
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        while self._reading:
            await self._pauses.wait()

    @property
    def is_closed(self) -> bool:
        return self._finished.done()

    def abandon(self) -> None:
        self._driver.abandon()

    # -- told by the driver ------------------------------------------------------------------------------------------
    def accept(self, turn: str) -> None:
        _set(self._accepting.pop(turn))

    def reject(self, turn: str, error: BanksmanError) -> None:
        rejected = self._turns.pop(turn)
        for key in [key for key, known in self._keys.items() if known is rejected]:
            del self._keys[key]
        self._accepting.pop(turn).set_exception(error)

    def resolve(self, turn: str, outcome: Outcome) -> None:
        if outcome.cost is not None:
            self._cost = outcome.cost
        resolved = self._turns.pop(turn)
        if outcome.text is None and outcome.kind not in (Kind.WITHDRAWN, Kind.REFUSED):
            self._own(resolved.complete(outcome))
        else:
            resolved.resolve(outcome)

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def give_receipt(self, effect: GiveReceipt) -> None:
        receipt, turn = self._receipts.pop(effect.interrupt)
        if turn is None or effect.receipt.by in (By.WITHDRAWN, By.ALREADY_OVER):
            _set(receipt, effect.receipt)
        else:
            self._own(self._complete(turn, receipt, effect.receipt))

    def grant_hold(self, hold: str) -> None:
        granted = self._granting.get(hold)
        if granted is not None and not granted.done():
            granted.set_result(None)

    def end_hold(self, hold: str, error: BanksmanError | None) -> None:
        granted = self._granting.pop(hold, None)
        if granted is not None and not granted.done():
            granted.set_exception(error or Refused("the hold ended before it was granted"))

    def ask_human(self, effect: AskHuman) -> None:
        self._questions.ask(effect)

    def close_question(self, question: str) -> None:
        self._questions.close(question)

    def finish(self) -> None:
        """Nothing more will happen."""
        self._questions.end()
        if not self._finished.done():
            self._finished.set_result(None)

    def fail(self, error: BanksmanError) -> None:
        """A bug of ours: whoever still waits for something is told so, and will not be told anything else."""
        self._questions.end()
        receipts = [receipt for receipt, _ in self._receipts.values()]
        for future in (*self._accepting.values(), *self._granting.values(), *receipts):
            if not future.done():
                future.set_exception(error)
                future.exception()
        for id, turn in list(self._turns.items()):
            if id not in self._accepting:
                turn.resolve(Outcome(kind=Outcome.FAILED, error=error, durable=False))
        self._turns.clear()
        self._accepting.clear()
        self._granting.clear()
        self._receipts.clear()

    def _raise_if_failed(self, waiting: asyncio.Future[Any]) -> None:
        if self._driver.error is not None and not waiting.done():
            raise self._driver.bug()


def _set(future: asyncio.Future[Any], value: Any = None) -> None:
    if not future.done():
        future.set_result(value)


def _ignore(future: asyncio.Future[Any]) -> None:
    """Nobody will collect what becomes of it, and that is not worth a warning."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())


def _priority(value: Any) -> int:
    if isinstance(value, str):
        try:
            return Priority[value.upper()]
        except KeyError:
            value = None
    if isinstance(value, bool) or not isinstance(value, int):
        names = ", ".join(priority.name for priority in reversed(Priority))
        raise UsageError(f"there is no priority {value!r}", hint=f"{names}, or an int")
    return value


def _seq(cursor: Any) -> int:
    """The seq of a cursor: `epoch.seq`, a bare seq, or None for the beginning."""
    if cursor is None:
        return 0
    text = str(cursor).rpartition(".")[2]
    is_one = isinstance(cursor, str | int) and not isinstance(cursor, bool)
    if not is_one or not text.isascii() or not text.isdigit():
        raise UsageError(f"not a cursor: {cursor!r:.60}", hint="the `cursor` of an event, or None for the beginning")
    return int(text)
