"""A session for asyncio callers: ask, follow, interrupt, hold, answer, close.

It holds no state that decides anything. Each call is a fact for the driver; the driver sets the future that the caller
waits on. A caller that is cancelled stops waiting. An ask that was not accepted yet and has lost its last caller is
withdrawn.

A session is in the store, whichever host owns it, and reading needs no more than that. A call that changes something
needs it to be ours: the first such call claims it, or is refused because a live host has it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, MutableSet, Sequence
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
from banksman.sessions.arguments import AskChecks, check_no_secret, checked_name, find_move, priority_of
from banksman.sessions.caller_futures import current_hold, held, ignore
from banksman.sessions.log_reader import LogReaders
from banksman.sessions.ownership import OwnedSession
from banksman.sessions.questions import Answer, Answered, Question, asked_before, checked, find_answer
from banksman.sessions.recovery import load
from banksman.sessions.session_lifecycle import SessionLifecycle
from banksman.sessions.status import Status
from banksman.sessions.turn import LoggedTurn, Turn
from banksman.store.log import Log

Prompt = str | Sequence[Mapping[str, Any]]
Claim = Callable[["Session"], Awaitable[None]]


class Session(SessionLifecycle):
    """One conversation with one agent. Made by `Host.open`; all methods are for the loop it was made in."""

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
        """`ends`: the host closes, and waits for `readers`. `capabilities`: what the agent can; None: everything.
        `claim` makes it ours. `redactor`: what must not be written to the store."""
        super().__init__(id, name=name, agent=agent, dialect=dialect, store=store, ends=ends, readers=readers)
        self._claim = claim
        self._redactor = redactor
        self._checks = AskChecks(agent, dialect, capabilities)

    def attach(self, owned: OwnedSession) -> None:
        """It is ours from here on."""
        self._owned = owned
        self.openings += 1
        owned.futures.save = self._save
        self._readers = self._reading(owned.futures.finished, since=owned.driver.state.head)
        owned.begin(self)

    def __repr__(self) -> str:
        return f"<Session {self.name or self.id} {'not here' if self._owned is None else self.status().phase}>"

    async def _own(self) -> OwnedSession:
        """Claim it, if it is not ours yet."""
        if self._owned is None:
            assert self._claim is not None
            await self._claim(self)
        return self._here

    async def _past(self) -> SessionHistory:
        """What its log says. Changes nothing, and needs no claim."""
        return await load(self._store, self.id, Config(dialect=self.dialect))

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

        Cancelled, the ask is withdrawn; but if the log has just taken it together with the leaving of its session
        (`leave`), it is served by whoever has the session next. With a `key` that was used before, the turn of that
        time is returned. With a JSON `schema` the outcome has a value that fits it (`structured`), or is FAILED.
        `rules` for tools of this turn come before those of the session.
        """
        if isinstance(key, str):
            # Not the same one any more when it comes back from the log.
            check_no_secret("key", key, self._redactor)
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

    async def _wait_accepted(self, owned: OwnedSession, turn: Turn, accepted: asyncio.Future[None]) -> None:
        """One of those who want it; when the last one goes, and nobody has it, it is withdrawn."""
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
        """A turn by its id, whoever asked for it and wherever it is: one that waits, runs, or is over long since."""
        while True:
            owned = self._owned
            if owned is not None and (known := owned.futures.turn(id)) is not None:
                return known
            # In this order: the end of a turn that is over is in the log by the time that the turn is looked for.
            watch = await self._watched(id)
            place = await self.find_turn(id)
            if place is None:
                hint = "it may be too old to be kept"
                raise NotFound(f"there is no turn {id!r:.100} in this session", hint=hint, turn=id)
            if self._owned is owned:
                found = Turn(self, id, place.first - 1)
                found.watch(watch)
                return found
            # It has become ours, or another's, while its log was read: what is known of its turns is known elsewhere.

    def _save(self, prompt: str) -> None:
        """Ask the process to put down what it knows, before it is replaced for its age. Nobody waits for the outcome:
        it is in the log."""
        ask = replace(self._checks.ask(prompt, at=self._now(), priority=BACKGROUND), is_last=True)
        ignore(self._futures.expect_turn(Turn(self, ask.id, self._driver.state.head)))
        self._tell(Asked(self._now(), ask))

    async def _watched(self, turn: str) -> LoggedTurn:
        """Of one that nobody here was promised. While the log cannot be written, what was told of it is not in it: who
        looks now waits until it is, and is not told anything else meanwhile."""
        if self._owned is not None and self._owned.driver.state.store is Store.WORKING:
            return LoggedTurn(is_over=True)
        past = await self._past()
        found = status.find_turn(past.session, turn)
        if found is None:
            return LoggedTurn(is_over=True)
        # What was started has been sent, as far as a log can tell.
        return LoggedTurn(
            is_over=False, phase=TurnPhase.QUEUED if found.phase is TurnPhase.QUEUED else TurnPhase.RUNNING
        )

    async def interrupt(self, turn: Turn | str | None = None) -> Receipt:
        """Stop a turn, by default the one that is running now. On an idle session: a receipt that says so.

        Cancelling this only stops waiting: the turn is stopped all the same. `Moved`: the session has left, and the ask
        waits in its log for whoever has it next, which is who can stop it.
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
        """Put a queued ask before another of its class, or to the head of its class. Else nothing happens. `Moved` as
        in `interrupt`."""
        self._futures.raise_if_passed_on(_id(turn))
        self._tell(AskMoved(self._now(), _id(turn), None if before is None else _id(before)))

    async def reorder(self, turn: Turn | str, *, before: Turn | str | None = None) -> None:
        """The same, for who must know that it was done: `Refused` if the ask, or the other, does not wait any more,
        `UsageError` if the two are not of one class."""
        owned = await self._own()
        try:
            first, other = find_move(owned.driver.state, _id(turn), None if before is None else _id(before))
        except Refused as exc:
            await self.turn(str(exc.ids["turn"]))  # `NotFound`: there never was one.
            raise
        if first != other:
            self.move(first, before=other)

    def withdraw(self, turn: Turn | str) -> None:
        """Take a queued ask back; one that runs is interrupted. `Moved` as in `interrupt`."""
        self._futures.raise_if_passed_on(_id(turn))
        self._tell(AskWithdrawn(self._now(), _id(turn)))

    def let_go(self, turn: Turn) -> None:
        """Whoever got it from `ask` no longer wants it. Withdrawn when the last one says so: a key may be shared."""
        turn.takers -= 1
        if turn.takers <= 0 and turn.id not in self._here.callers:
            self._give_up(turn)

    def _give_up(self, turn: Turn) -> None:
        """Nobody wants it any more, nor waits to hear what becomes of it."""
        with suppress(Moved):
            self.withdraw(turn)

    @asynccontextmanager
    async def hold(self, priority: int | str = NORMAL) -> AsyncGenerator[None]:
        """Several asks in a row, with nobody of this class or below between them. May be re-entered.

        Entering waits for the grant; cancelled, it is given up; `Refused` is raised if the session closes first. A hold
        ends by itself after `hold_idle_seconds` without an ask, and with the session: asks made after that are plain.
        """
        owned = await self._own()
        async with held(self.id, owned.futures, priority_of(priority), self._tell, self._raise_if_failed):
            yield

    # -- questions ---------------------------------------------------------------------------------------------------
    def questions(self) -> list[Question]:
        """Those that wait for an answer."""
        return [] if self._owned is None else self._owned.questions.open()

    async def open_questions(self) -> list[Question]:
        """The same, wherever the session is: of one that is not ours, what its log says."""
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
        """Answer a question of the agent: "allow" or "deny". Returns, when it is durable, the one answer that the
        question has: this one (`is_first`), or, for one that is over, the one that it had, whoever gave it, however
        long ago. `NotFound`: there never was such a question. One that is over needs no claim.

        `message`: why not, for the agent to read. `updated_input`: what the tool is to be used with instead.
        `content`: what was entered, for an elicitation. `remember`: the agent is not to ask again: True or "session"
        for as long as its process lives, "local", "project" or "user" in its own settings. `interrupt`: a denial that
        ends the turn. Cancelling this only stops waiting: the answer is given all the same.
        """
        answer = checked(Answer(decision, message, updated_input, content, remember, interrupt))
        if self._owned is None:
            past = await self._past()
            if not any(waiting.id == question for waiting in past.questions):
                told = await self._find_answer(question)
                return told or Answered(question, "withdrawn", "store", None, is_first=False)
        owned = await self._own()
        told = await owned.questions.answer(question, answer, self._tell) or await self._find_answer(question)
        return self._as_logged(told or owned.questions.without_answer(question))

    async def _find_answer(self, question: str) -> Answered | None:
        return await find_answer(lambda after: self._readers.events(after, waits=False), question, self.committed)

    def _as_logged(self, told: Answered) -> Answered:
        """What was said to the agent may hold a secret; whoever answers again is told what the log says."""
        if self._redactor is None or told.message is None:
            return told
        return dataclasses.replace(told, message=self._redactor.redact_text(told.message))

    # -- settings ----------------------------------------------------------------------------------------------------
    async def set_model(self, model: str) -> None:
        """Another model from the next turn on. Returns when the agent has it; an agent that does not answer is replaced
        by one that is started with it. Cancelling this only stops waiting."""
        await self._set("model", model)

    async def set_permission_mode(self, mode: str) -> None:
        """Another permission mode, in the agent's words. As `set_model`; also in a turn that runs."""
        await self._set("permission_mode", mode)

    async def _set(self, name: str, value: Any) -> None:
        self._checks.check_setting(name, value)
        await self._own()
        change = f"c-{os.urandom(8).hex()}"
        taken = self._futures.expect_change(change)
        self._tell(SettingAsked(self._now(), change, name, value))
        await self._wait_change(taken)

    # -- looking -----------------------------------------------------------------------------------------------------
    def status(self) -> Status:
        """What it is doing. Never blocks, and changes nothing. Of one that is not ours it is what the store says at a
        glance; `look` says more."""
        if self._owned is None:
            return status.from_listing(self._store.find(self.id), self.id, name=self.name, agent=self.agent)
        redact = None if self._redactor is None else self._redactor.redact_text
        return status.from_driver(
            self._driver,
            name=self.name,
            agent=self.agent,
            stop_seconds_max=self._stop_seconds_max,
            preview=functools.partial(status.preview, redact=redact),
        )

    async def look(self) -> Status:
        """What it is doing, wherever it is: of one that is not ours, what its log says. Changes nothing."""
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
        """Give it another name, or none. `NameTaken` if another session has it; `UsageError` if somebody else has
        renamed it since."""
        await self._store.rename(self.id, checked_name(name, self._redactor), expected=self.name)
        self.name = name


def _id(turn: Turn | str) -> str:
    return turn.id if isinstance(turn, Turn) else turn
