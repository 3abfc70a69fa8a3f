"""A session's face for asyncio: ask, follow, interrupt, hold, answer, close.

It holds no state that decides anything: what callers want goes through the driver's door, what becomes of it comes back
as promises that are kept. A caller that is cancelled stops waiting, and an ask that nobody waits for any more before it
was accepted is withdrawn.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from banksman.core.arbiter import BACKGROUND, NORMAL
from banksman.core.event import Event
from banksman.core.framing import FRAME_BYTES_MAX
from banksman.core.outcome import By, Receipt
from banksman.core.session_facts import (
    Asked,
    AskMoved,
    AskWithdrawn,
    CallerFact,
    CloseAsked,
    DrainAsked,
    HoldAsked,
    HoldReleased,
    InterruptAsked,
    Reconfigured,
    SettingAsked,
)
from banksman.core.state import Mode
from banksman.core.state import Session as State
from banksman.errors import UsageError
from banksman.run.sessions import status
from banksman.run.sessions.agent import Spawn
from banksman.run.sessions.callbacks import Callbacks
from banksman.run.sessions.driver import Driver
from banksman.run.sessions.following import Readers, seq_of
from banksman.run.sessions.hooks import Hooks
from banksman.run.sessions.opening import Opening
from banksman.run.sessions.pool import Pool
from banksman.run.sessions.promises import Promises, ignore
from banksman.run.sessions.questions import Answer, OnQuestion, Question, Questions
from banksman.run.sessions.status import Status
from banksman.run.sessions.tools import ToolServer
from banksman.run.sessions.turn import Turn
from banksman.run.sessions.wishes import Wishes, priority_of
from banksman.store.log import Log

Prompt = str | Sequence[Mapping[str, Any]]
# How many idempotency keys a session remembers.
KEYS_MAX = 1024

# The holds that the running task is inside of, by session: asks made there are made in the hold.
_holds: contextvars.ContextVar[Mapping[str, str]] = contextvars.ContextVar(
    "banksman_holds", default=MappingProxyType({})
)


class Session:
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
        capabilities: Collection[str] | None = None,
        pool: Pool | None = None,
        frame_bytes_max: int = FRAME_BYTES_MAX,
    ) -> None:
        """`capabilities`: what the agent can; None: everything."""
        self.id = id
        self.name = name
        self.agent = agent
        self.dialect = state.config.dialect
        self._wishes = Wishes(agent, self.dialect, capabilities)
        # Each with its acceptance: whoever comes with a key hears of it what the first one hears.
        self._keys: OrderedDict[str, tuple[Turn, asyncio.Future[None]]] = OrderedDict()
        # How many callers wait for a turn (id) to be accepted.
        self._callers: dict[str, int] = {}
        self._promises = promises = Promises()
        self._readers = Readers(store, id, promises.finished, self.dialect.project)
        self._driver = Driver(
            id, state, store=store, spawn=spawn, listener=promises, pool=pool, frame_bytes_max=frame_bytes_max
        )
        self._questions = promises.questions = Questions(self._driver, on_question)
        self._callbacks = promises.callbacks = Callbacks(self._driver, Hooks({}), ToolServer(()))
        promises.save = self._save

    def __repr__(self) -> str:
        return f"<Session {self.name or self.id} {status.phase(self._driver)}>"

    # -- asking ------------------------------------------------------------------------------------------------------
    async def ask(
        self,
        prompt: Prompt,
        *,
        priority: int | str = NORMAL,
        on_busy: str = "enqueue",
        on_preempt: str = "end",
        key: str | None = None,
        schema: Mapping[str, Any] | None = None,
        rules: Mapping[str, str] | None = None,
    ) -> Turn:
        """Ask for one turn. Returns when it is accepted, which is when the log has it; raises if it is not.

        Cancelled, the ask is withdrawn. With a `key` that was used before, the turn of that time is returned. With a
        JSON `schema` the outcome has a value that fits it (`structured`), or is FAILED. `rules` for tools of this turn
        come before those of the session.
        """
        ask = self._wishes.ask(
            prompt,
            at=self._now(),
            priority=priority,
            on_busy=on_busy,
            on_preempt=on_preempt,
            key=key,
            schema=schema,
            rules=rules,
            hold=_holds.get().get(self.id),
        )
        known = None if key is None else self._keys.get(key)
        if known is None:
            turn = Turn(self, ask.id, self._driver.state.head)
            known = turn, self._promises.expect_turn(turn)
            if key is not None:
                self._remember(key, known)
            self._tell(Asked(self._now(), ask))
        turn, accepted = known
        await self._wait_accepted(turn, accepted)
        turn.takers += 1
        return turn

    async def _wait_accepted(self, turn: Turn, accepted: asyncio.Future[None]) -> None:
        """One of those who want it; when the last one goes, and nobody has it, it is withdrawn."""
        self._callers[turn.id] = self._callers.get(turn.id, 0) + 1
        try:
            self._raise_if_failed(accepted)
            await asyncio.shield(accepted)
        except asyncio.CancelledError:
            ignore(accepted)
            if self._callers[turn.id] == 1 and not turn.takers:
                self._forget_key(turn)
                self.withdraw(turn)
            raise
        except BaseException:
            self._forget_key(turn)
            raise
        finally:
            self._callers[turn.id] -= 1
            if not self._callers[turn.id]:
                del self._callers[turn.id]

    def _remember(self, key: str, asked: tuple[Turn, asyncio.Future[None]]) -> None:
        self._keys[key] = asked
        if len(self._keys) > KEYS_MAX:
            self._keys.popitem(last=False)

    def _forget_key(self, turn: Turn) -> None:
        """It came to nothing: whoever comes with its key again makes a new ask."""
        for key in [key for key, (known, _) in self._keys.items() if known is turn]:
            del self._keys[key]

    def _save(self, prompt: str) -> None:
        """Ask the process to put down what it knows, before it is replaced for its age. Nobody waits for the outcome:
        it is in the log."""
        ask = replace(self._wishes.ask(prompt, at=self._now(), priority=BACKGROUND), is_last=True)
        ignore(self._promises.expect_turn(Turn(self, ask.id, self._driver.state.head)))
        self._tell(Asked(self._now(), ask))

    async def interrupt(self, turn: Turn | str | None = None) -> Receipt:
        """Stop a turn, by default the one that is running now. On an idle session: a receipt that says so.

        Cancelling this only stops waiting: the turn is stopped all the same.
        """
        if turn is None:
            turn = status.holder(self._driver.state)
        if turn is None:
            return Receipt(stopped=False, by=By.ALREADY_OVER)
        interrupt = f"i-{os.urandom(8).hex()}"
        receipt = self._promises.expect_receipt(interrupt, turn)
        self._tell(InterruptAsked(self._now(), _id(turn), interrupt))
        self._raise_if_failed(receipt)
        return await asyncio.shield(receipt)

    def move(self, turn: Turn | str, *, before: Turn | str | None = None) -> None:
        """Put a queued ask before another of its class, or to the head of its class. Else nothing happens."""
        self._tell(AskMoved(self._now(), _id(turn), None if before is None else _id(before)))

    def withdraw(self, turn: Turn | str) -> None:
        """Take a queued ask back; one that runs is interrupted."""
        self._tell(AskWithdrawn(self._now(), _id(turn)))

    def let_go(self, turn: Turn) -> None:
        """Whoever got it from `ask` no longer wants it. Withdrawn when the last one says so: a key may be shared."""
        turn.takers -= 1
        if turn.takers <= 0 and turn.id not in self._callers:
            self.withdraw(turn)

    @asynccontextmanager
    async def hold(self, priority: int | str = NORMAL) -> AsyncGenerator[None]:
        """Several asks in a row, with nobody of this class or below between them. May be re-entered.

        Entering waits for the grant; cancelled, it is given up; `Refused` is raised if the session closes first. A hold
        ends by itself after `hold_idle_seconds` without an ask, and with the session: asks made after that are plain.
        """
        holds = _holds.get()
        # Only one that is still there: a task that was started inside a hold may outlive it.
        if self._promises.has_hold(holds.get(self.id)):
            yield  # Its own: whoever holds the session already has what it asks for.
            return
        id = f"h-{os.urandom(8).hex()}"
        granted = self._promises.expect_hold(id)
        token = _holds.set({**holds, self.id: id})
        try:
            self._tell(HoldAsked(self._now(), id, priority_of(priority)))
            self._raise_if_failed(granted)
            await asyncio.shield(granted)
            yield
        except asyncio.CancelledError:
            ignore(granted)
            raise
        finally:
            self._promises.forget_hold(id)
            self._tell(HoldReleased(self._now(), id))
            # Left in another context than it was entered in (a fixture, a generator that is closed by the loop): there
            # is nothing to be put back there.
            with suppress(ValueError):
                _holds.reset(token)

    # -- following ---------------------------------------------------------------------------------------------------
    def follow(self, after: str | int | None = None) -> AsyncGenerator[Event]:
        """Every event of the log after a cursor, then each as it is committed, until the session is closed.

        A range that retention took is told by one `stream.gap` event. Once the host is closed, the log is too, and
        reading raises `StoreError`.
        """
        return self._readers.events(seq_of(after), waits=True)

    def events(
        self, after: int = 0, *, waits: bool = False, until: asyncio.Future[Any] | None = None
    ) -> AsyncGenerator[Event]:
        """The events after a seq that are there now; `waits`: and those to come, as `follow`, or until `until`."""
        return self._readers.events(after, waits=waits, until=until)

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
        content: Mapping[str, Any] | None = None,
        remember: bool | str = False,
        interrupt: bool = False,
    ) -> None:
        """Answer a question of the agent: "allow" or "deny". One that needs no answer any more is let be.

        `message`: why not, for the agent to read. `updated_input`: what the tool is to be used with instead.
        `content`: what was entered, for an elicitation. `remember`: the agent is not to ask again: True or "session"
        for as long as its process lives, "local", "project" or "user" in its own settings. `interrupt`: a denial that
        ends the turn.
        """
        self._questions.answer(question, Answer(decision, message, updated_input, content, remember, interrupt))

    # -- settings ----------------------------------------------------------------------------------------------------
    async def set_model(self, model: str) -> None:
        """Another model from the next turn on. Returns when the agent has it; an agent that does not answer is replaced
        by one that is started with it. Cancelling this only stops waiting."""
        await self._set("model", model)

    async def set_permission_mode(self, mode: str) -> None:
        """Another permission mode, in the agent's words. As `set_model`; also in a turn that runs."""
        await self._set("permission_mode", mode)

    async def _set(self, name: str, value: Any) -> None:
        self._wishes.check_setting(name, value)
        change = f"c-{os.urandom(8).hex()}"
        taken = self._promises.expect_change(change)
        self._tell(SettingAsked(self._now(), change, name, value))
        self._raise_if_failed(taken)
        try:
            await asyncio.shield(taken)
        except asyncio.CancelledError:
            ignore(taken)
            raise

    def reconfigure(
        self, opening: Opening, *, replaces: bool, drops: Sequence[str], on_question: OnQuestion | None
    ) -> None:
        """It was opened again. Whoever did is the one that is asked from now on; `replaces`: and what runs is not what
        was asked for, so that the next turn gets another process. `drops`: settings that are as opened again."""
        self._questions.on_question = on_question
        self._driver.frame_bytes_max = opening.frame_bytes_max
        # One that only waits for its place is started as it is asked for now.
        is_due = replaces and not self._driver.waits_to_start
        self._tell(Reconfigured(self._now(), opening.config, is_due, tuple(drops)))

    def call_these(self, hooks: Hooks, server: ToolServer) -> None:
        """What the process that runs was told of."""
        self._callbacks.replace(hooks, server)

    # -- looking -----------------------------------------------------------------------------------------------------
    def status(self) -> Status:
        """What it is doing. Never blocks, and changes nothing."""
        return status.take(self._driver, name=self.name, agent=self.agent)

    def state_of(self, turn: str) -> str:
        """queued, starting, running, interrupting or ended."""
        found = status.find_turn(self._driver.state, turn)
        return "ended" if found is None else found.phase

    # -- closing -----------------------------------------------------------------------------------------------------
    async def close(self) -> None:
        """Stop what runs, by the ladder, and let go. May be called again, and by several; cancelling stops waiting."""
        self.close_nowait()
        await self.wait_closed()

    def close_nowait(self) -> None:
        """Begin to close; `wait_closed` tells when it is."""
        self._tell(CloseAsked(self._now()))

    def drain_nowait(self) -> None:
        """Take nothing new, finish what runs, then close."""
        self._tell(DrainAsked(self._now()))

    async def wait_closed(self) -> None:
        """Until it is closed, its callbacks have ended, and who was reading its log by then has what it reads."""
        await asyncio.shield(self._promises.finished)
        await self._questions.wait_ended()
        await self._callbacks.wait_ended()
        await self._promises.wait_read()
        await self._readers.wait_left()

    @property
    def origin(self) -> str | None:
        """The conversation that a fork begins as a copy of."""
        return self._driver.state.conversation or self._driver.state.fork_of

    @property
    def settings(self) -> tuple[tuple[str, str], ...]:
        """What was changed since it was opened."""
        return self._driver.state.settings

    @property
    def on_question(self) -> OnQuestion | None:
        return self._questions.on_question

    @property
    def is_open(self) -> bool:
        """It takes asks: nobody has begun to close it."""
        return self._driver.error is None and self._driver.state.mode is Mode.OPEN

    def when_closed(self, call: Callable[[], None]) -> None:
        self._promises.finished.add_done_callback(lambda _: call())

    @property
    def is_closed(self) -> bool:
        return self._promises.finished.done()

    def abandon(self) -> None:
        """Its loop was closed under it: see `Driver.abandon`."""
        self._driver.abandon()

    def _now(self) -> float:
        return self._driver.now()

    def _tell(self, fact: CallerFact) -> None:
        """Through the door, which is in this session's loop and nowhere else."""
        try:
            is_here = asyncio.get_running_loop() is self._promises.loop
        except RuntimeError:
            is_here = False
        if not is_here:
            hint = "call it from the loop it was opened in; banksman.threads is for threads"
            raise UsageError("this session belongs to another event loop", hint=hint, session=self.id)
        self._driver.dispatch(fact)

    def _raise_if_failed(self, waiting: asyncio.Future[Any]) -> None:
        if self._driver.error is not None and not waiting.done():
            raise self._driver.bug()


def _id(turn: Turn | str) -> str:
    return turn.id if isinstance(turn, Turn) else turn
