"""`Session`, the handle for asyncio callers: ask, interrupt, hold, answer, settings, status.

Base classes have the rest: `readable_session.py` reads and follows, `session_lifecycle.py` closes,
drains and leaves. The handle holds no state that decides anything. Each call becomes a fact for the
driver, and the driver sets the future that the caller waits on. A cancelled caller stops waiting.
An ask that was not accepted yet is withdrawn when its last caller is cancelled.

The session is in the store, whichever host owns it. Reading needs only the store. A call that
changes something needs ownership. The first of these calls claims the session, or is refused
because a live host owns it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import time
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Mapping,
    MutableSet,
    Sequence,
)
from contextlib import asynccontextmanager, suppress
from typing import Any

from msgspec.structs import replace

from banksman.core.dialects.dialect import Dialect
from banksman.core.session.ask_queue import BACKGROUND, NORMAL
from banksman.core.session.facts import (
    Asked,
    AskMoved,
    AskWithdrawn,
    InterruptAsked,
    SettingAsked,
)
from banksman.core.session.history import SessionHistory
from banksman.core.session.outcome import By, Receipt
from banksman.core.session.session_config import Config
from banksman.core.session.state import Store
from banksman.core.session.turn import TurnPhase
from banksman.core.wire.redaction import Redactor
from banksman.errors import Moved, NotFound, Refused
from banksman.sessions import status
from banksman.sessions.arguments import (
    AskChecks,
    check_no_secret,
    checked_name,
    find_move,
    priority_of,
)
from banksman.sessions.caller_futures import current_hold, held, ignore
from banksman.sessions.log_reader import LogReaders
from banksman.sessions.ownership import OwnedSession
from banksman.sessions.questions import (
    Answer,
    Answered,
    Question,
    asked_before,
    checked,
    find_answer,
)
from banksman.sessions.recovery import load
from banksman.sessions.session_lifecycle import SessionLifecycle
from banksman.sessions.status import Status
from banksman.sessions.turn import LoggedTurn, Turn
from banksman.store.log import Log

Prompt = str | Sequence[Mapping[str, Any]]
Claim = Callable[["Session"], Awaitable[None]]


class Session(SessionLifecycle):
    """One conversation with one agent.

    Created by `Host.open`. All methods must be called in the event loop that created the session.
    """

    def __init__(
        self,
        id: str,
        *,
        name: str | None,
        agent: str,
        dialect: Dialect,
        store: Log,
        ends: asyncio.Future[None],
        readers: MutableSet[LogReaders] | None = None,
        capabilities: Collection[str] | None = None,
        claim: Claim | None = None,
        redactor: Redactor | None = None,
    ) -> None:
        """Create a handle without ownership of the session.

        `ends`: done when the host closes. `readers`: the log readers that the host then waits for.
        `capabilities`: the agent's capabilities; None means all. `claim`: claims the session for
        this host. `redactor`: removes secrets from everything that is written to the store.
        """
        super().__init__(
            id, name=name, agent=agent, dialect=dialect, store=store, ends=ends, readers=readers
        )
        self._claim = claim
        self._redactor = redactor
        self._checks = AskChecks(agent, dialect, capabilities)

    def attach(self, owned: OwnedSession) -> None:
        """Take ownership: this host has claimed the session."""
        self._owned = owned
        self.openings += 1
        owned.futures.save = self._save
        self._readers = self._reading(owned.futures.finished, since=owned.driver.state.head)
        owned.begin(self)

    def __repr__(self) -> str:
        return (
            f"<Session {self.name or self.id} "
            f"{'not here' if self._owned is None else self.status().phase}>"
        )

    async def _own(self) -> OwnedSession:
        """Claim the session if this host does not own it yet."""
        if self._owned is None:
            assert self._claim is not None
            await self._claim(self)
        return self._here

    async def _past(self) -> SessionHistory:
        """Load the state from the log, without a claim and without a change."""
        return await load(self._store, self.id, Config(dialect=self.dialect))

    # -- asking -----------------------------------------------------------------------------------
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
        deadline: float | None = None,
        caller: str | None = None,
    ) -> Turn:
        """Ask for one turn. Returns when the log has the ask; raises if it is not accepted.

        Cancelling the call withdraws the ask. There is one exception: the log may just have taken
        the ask together with the leaving of the session (`leave`). Then the next owner of the
        session serves it.

        `key`: idempotency key; a key that was used before returns the turn of that first ask.
        `schema`: JSON schema; the outcome has a value that fits it (`structured`), or is FAILED.
        `rules`: rules for the tools of this turn, which take precedence over the session's rules.
        `deadline`: seconds from now in which the ask must be over, also across a restart of the
        host. An ask that still waits then is WITHDRAWN and never sent. A running turn is
        interrupted (INTERRUPTED). Both outcomes have `clock="deadline"`. A turn that several asks
        share ends only when all of them are past their deadlines or withdrawn. With a used `key`,
        the deadline of the first ask counts.
        `caller`: the person or program that wants the turn; its usage is counted under this name.
        """
        if isinstance(key, str):
            # The log stores the redacted key, and a redacted key would not match the next ask.
            check_no_secret("key", key, self._redactor)
        if isinstance(caller, str):
            check_no_secret("caller", caller, self._redactor)
        owned = await self._own()
        ask = self._checks.ask(
            prompt,
            at=self._now(),
            priority=priority,
            on_busy=on_busy,
            on_preempt=on_preempt,
            key=key,
            schema=schema,
            rules=rules,
            hold=current_hold(self.id),
            deadline=deadline,
            wall=time.time(),
            caller=caller,
        )
        known = owned.keys.get(key)
        if known is not None and known[0].was_never_sent:
            known = None
        stored = None if known else owned.keys.take_stored(key)
        if stored is not None:
            known = owned.futures.find_turn(Turn(self, stored.turn, stored.after), stored.outcome)
            owned.keys.remember(key, known)
        elif known is None:
            turn = Turn(self, ask.id, owned.driver.state.head)
            known = turn, owned.futures.expect_turn(turn)
            owned.keys.remember(key, known)
            self._tell(Asked(self._now(), ask))
        turn, accepted = known
        await self._wait_accepted(owned, turn, accepted)
        turn.takers += 1
        return turn

    async def _wait_accepted(
        self, owned: OwnedSession, turn: Turn, accepted: asyncio.Future[None]
    ) -> None:
        """Wait for the acceptance as one of the ask's callers.

        If the last caller is cancelled before any caller received the turn, the ask is withdrawn.
        """
        callers = owned.callers
        callers[turn.id] = callers.get(turn.id, 0) + 1
        try:
            self._raise_if_failed(accepted)
            await asyncio.shield(accepted)
        except asyncio.CancelledError:
            ignore(accepted)
            if callers[turn.id] == 1 and not turn.takers:
                owned.keys.forget(turn)
                self._give_up(turn)
            raise
        except BaseException:
            owned.keys.forget(turn)
            raise
        finally:
            callers[turn.id] -= 1
            if not callers[turn.id]:
                del callers[turn.id]

    async def turn(self, id: str) -> Turn:
        """Return a turn by its id.

        The turn may be queued, running or ended, and may belong to any caller on any host.
        """
        while True:
            owned = self._owned
            if owned is not None and (known := owned.futures.turn(id)) is not None:
                return known
            # The order matters: when the log says that the turn is over, the later search also
            # finds its end.
            watch = await self._watched(id)
            place = await self.find_turn(id)
            if place is None:
                hint = "find the id with `banksman log SESSION`; old turns may be deleted"
                raise NotFound(f"there is no turn {id!r:.100} in this session", hint=hint, turn=id)
            if self._owned is owned:
                found = Turn(self, id, place.first - 1)
                found.watch(watch)
                return found
            # The ownership changed while the log was read, so the result may be stale. The loop
            # looks again.

    def _save(self, prompt: str) -> None:
        """Ask the process to save its knowledge before it is replaced because of its age.

        No caller waits for the outcome. It is in the log.
        """
        ask = replace(self._checks.ask(prompt, at=self._now(), priority=BACKGROUND), is_last=True)
        ignore(self._futures.expect_turn(Turn(self, ask.id, self._driver.state.head)))
        self._tell(Asked(self._now(), ask))

    async def _watched(self, turn: str) -> LoggedTurn:
        """Return the logged state of a turn that this host did not accept.

        While the log cannot be written, an outcome may have been reported and not be in the log
        yet. In that case the turn counts as not over, so that the reader waits for the log instead
        of getting a different outcome.
        """
        if self._owned is not None and self._owned.driver.state.store is Store.WORKING:
            return LoggedTurn(is_over=True)
        past = await self._past()
        found = status.find_turn(past.session, turn)
        if found is None:
            return LoggedTurn(is_over=True)
        # The log cannot distinguish a started turn from a sent one. A started turn counts as sent.
        return LoggedTurn(
            is_over=False,
            phase=TurnPhase.QUEUED if found.phase is TurnPhase.QUEUED else TurnPhase.RUNNING,
        )

    async def interrupt(self, turn: Turn | str | None = None) -> Receipt:
        """Stop a turn, by default the running turn. An idle session returns a receipt that says so.

        Cancelling the call only stops the wait; the turn is stopped in any case. `Moved`: the
        session has left, and the ask waits in its log. Only the next owner of the session can stop
        it.
        """
        await self._own()
        if turn is None:
            turn = status.holder(self._driver.state)
        if turn is None:
            return Receipt(stopped=False, by=By.ALREADY_OVER)
        self._futures.raise_if_passed_on(_id(turn))
        interrupt = f"i-{os.urandom(8).hex()}"
        receipt = self._futures.expect_receipt(interrupt, turn)
        self._tell(InterruptAsked(self._now(), _id(turn), interrupt))
        self._raise_if_failed(receipt)
        return await asyncio.shield(receipt)

    def move(self, turn: Turn | str, *, before: Turn | str | None = None) -> None:
        """Put a queued ask before another ask of its class, or to the head of its class.

        In all other cases nothing happens. Raises `Moved` like `interrupt`.
        """
        self._futures.raise_if_passed_on(_id(turn))
        self._tell(AskMoved(self._now(), _id(turn), None if before is None else _id(before)))

    async def reorder(self, turn: Turn | str, *, before: Turn | str | None = None) -> None:
        """Move a queued ask like `move`, and raise if that is not possible.

        `Refused`: one of the two asks is not queued. `UsageError`: the two asks are of different
        classes.
        """
        owned = await self._own()
        try:
            first, other = find_move(
                owned.driver.state, _id(turn), None if before is None else _id(before)
            )
        except Refused as exc:
            await self.turn(str(exc.ids["turn"]))  # Raises `NotFound` if the turn never existed.
            raise
        if first != other:
            self.move(first, before=other)

    def withdraw(self, turn: Turn | str) -> None:
        """Withdraw a queued ask, or interrupt a running turn.

        Raises `Moved` like `interrupt`.
        """
        self._futures.raise_if_passed_on(_id(turn))
        self._tell(AskWithdrawn(self._now(), _id(turn)))

    def let_go(self, turn: Turn) -> None:
        """Drop a caller's interest in a turn that `ask` returned.

        A key may be shared by several callers. The turn is withdrawn when the last caller drops it.
        """
        turn.takers -= 1
        if turn.takers <= 0 and turn.id not in self._here.callers:
            self._give_up(turn)

    def _give_up(self, turn: Turn) -> None:
        """Withdraw a turn that has no caller left, and ignore `Moved`."""
        with suppress(Moved):
            self.withdraw(turn)

    @asynccontextmanager
    async def hold(self, priority: int | str = NORMAL) -> AsyncGenerator[None]:
        """Reserve the session for several asks in a row. Other asks of this class or below wait.

        The hold may be re-entered. Entering waits for the grant. Cancelling the wait gives the hold
        up. `Refused` is raised if the session closes first. A hold ends after `hold_idle_seconds`
        without an ask, and with the session. Asks after that are plain asks.
        """
        owned = await self._own()
        async with held(
            self.id, owned.futures, priority_of(priority), self._tell, self._raise_if_failed
        ):
            yield

    # -- questions --------------------------------------------------------------------------------
    def questions(self) -> list[Question]:
        """Return the open questions of an owned session."""
        return [] if self._owned is None else self._owned.questions.open()

    async def open_questions(self) -> list[Question]:
        """Return the open questions, from the log if this host does not own the session."""
        if self._owned is not None:
            return self.questions()
        past = await self._past()
        return [asked_before(question) for question in past.questions]

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
    ) -> Answered:
        """Answer a question of the agent with "allow" or "deny".

        Returns, when it is durable, the one answer that the question has. This is the caller's
        answer (`is_first`) or, for a question that is over, its earlier answer. `NotFound`: the
        question never existed. A question that is over needs no claim. Cancelling the call only
        stops the wait; the answer is given in any case.

        `message`: the reason of a denial, for the agent. `updated_input`: replaces the input of the
        tool. `content`: the entered values, for an elicitation. `remember`: the agent must not ask
        again. True or "session" holds for the life of its process. "local", "project" or "user"
        holds in the agent's settings. `interrupt`: a denial that ends the turn.
        """
        answer = checked(Answer(decision, message, updated_input, content, remember, interrupt))
        if self._owned is None:
            past = await self._past()
            if not any(waiting.id == question for waiting in past.questions):
                told = await self._find_answer(question)
                return told or Answered(question, "withdrawn", "store", None, is_first=False)
        owned = await self._own()
        told = await owned.questions.answer(
            question, answer, self._tell
        ) or await self._find_answer(question)
        return self._as_logged(told or owned.questions.without_answer(question))

    async def _find_answer(self, question: str) -> Answered | None:
        return await find_answer(
            lambda after: self._readers.events(after, waits=False), question, self.committed
        )

    def _as_logged(self, told: Answered) -> Answered:
        """Redact the answer's message.

        The message to the agent may hold a secret. Later callers get the redacted text of the log,
        so the first caller gets the same text.
        """
        if self._redactor is None or told.message is None:
            return told
        return dataclasses.replace(told, message=self._redactor.redact_text(told.message))

    # -- settings ---------------------------------------------------------------------------------
    async def set_model(self, model: str) -> None:
        """Set the model from the next turn on. Returns when the agent has confirmed it.

        An agent that does not answer is replaced by a process that starts with the model.
        Cancelling the call only stops the wait.
        """
        await self._set("model", model)

    async def set_permission_mode(self, mode: str) -> None:
        """Set the permission mode, in the agent's terms.

        Works like `set_model`, and also during a running turn.
        """
        await self._set("permission_mode", mode)

    async def _set(self, name: str, value: Any) -> None:
        self._checks.check_setting(name, value)
        owned = await self._own()
        serving = owned.driver.state.config
        if serving.agent != self.agent:
            # Settings are those of the agent that serves the session now.
            AskChecks(serving.agent, serving.dialect, serving.capabilities).check_setting(
                name, value
            )
        change = f"c-{os.urandom(8).hex()}"
        taken = self._futures.expect_change(change)
        self._tell(SettingAsked(self._now(), change, name, value))
        await self._wait_change(taken)

    # -- looking ----------------------------------------------------------------------------------
    def status(self) -> Status:
        """Return the current state. Never blocks and changes nothing.

        For a session that this host does not own, the state comes from the store's listing. `look`
        returns more.
        """
        if self._owned is None:
            return status.from_listing(
                self._store.find(self.id), self.id, name=self.name, agent=self.agent
            )
        redact = None if self._redactor is None else self._redactor.redact_text
        return status.from_driver(
            self._driver,
            name=self.name,
            agent=self.agent,
            stop_seconds_max=self._stop_seconds_max,
            preview=functools.partial(status.preview, redact=redact),
        )

    async def look(self) -> Status:
        """Return the current state, from the log if this host does not own the session.

        Changes nothing.
        """
        if self._owned is not None:
            return self.status()
        past = await self._past()
        if past.opened is not None and isinstance(cwd := past.opened.get("cwd"), str):
            self.cwd = cwd
        return status.from_log(past, self.status())

    def state_of(self, turn: str) -> str:
        """queued, starting, running, interrupting or ended."""
        found = None if self._owned is None else status.find_turn(self._driver.state, turn)
        return "ended" if found is None else found.phase

    async def rename(self, name: str | None) -> None:
        """Change or remove the session's name.

        `NameTaken`: another session has the name. `UsageError`: another caller has renamed the
        session since.
        """
        await self._store.rename(self.id, checked_name(name, self._redactor), expected=self.name)
        self.name = name


def _id(turn: Turn | str) -> str:
    return turn.id if isinstance(turn, Turn) else turn
