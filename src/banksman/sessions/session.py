"""`Session`, the handle for asyncio callers: ask, interrupt, answer, settings, status.

Base classes have the rest: `readable_session.py` reads and follows, `session_lifecycle.py` closes,
drains and leaves, `queue_calls.py` edits and holds. The handle holds no state that decides
anything. Each call becomes a fact for the driver, and the driver sets the future that the caller
waits on. See `ask` for cancelled callers.

The session is in the store. To read needs only the store. A call that changes something needs
ownership: the first one claims the session, or is refused because a live host owns it.
"""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from banksman.core.redaction.redactor import Redactor
from banksman.core.session.ask_queue import BACKGROUND, NORMAL
from banksman.core.session.event import SESSION_SHARED, Entry, entry
from banksman.core.session.facts import (
    Asked,
    AskWithdrawn,
    InterruptAsked,
    SettingAsked,
    ShareAsked,
)
from banksman.core.session.history import SessionHistory
from banksman.core.session.outcome import By, Receipt
from banksman.core.session.session_config import Config
from banksman.core.session.state import Store
from banksman.core.session.turn import TurnPhase
from banksman.errors import Moved, NotFound, NotOwner, Refused
from banksman.sessions import status
from banksman.sessions.arguments import check_caller, check_no_secret, checked_name
from banksman.sessions.ask_arguments import AskChecks, find_move
from banksman.sessions.caller_futures import current_hold, ignore
from banksman.sessions.ownership import OwnedSession
from banksman.sessions.questions import (
    Answer,
    Answered,
    Question,
    as_logged,
    asked_before,
    checked,
    find_answer,
)
from banksman.sessions.queue_calls import QueueCalls, id_of, no_hold
from banksman.sessions.readable_session import SessionParts
from banksman.sessions.recovery import load
from banksman.sessions.session_lifecycle import Claim
from banksman.sessions.status import Status
from banksman.sessions.turn import LoggedTurn, Prompt, Turn
from banksman.sessions.turn_status import holder, preview

Share = Callable[["Session", Entry], Awaitable[bool]]


class Session(QueueCalls):
    """One conversation with one agent.

    Created by `Host.open`. All methods must be called in the event loop that created the session.
    """

    def __init__(
        self,
        parts: SessionParts,
        *,
        capabilities: Collection[str] | None = None,
        claim: Claim | None = None,
        share: Share | None = None,
        redactor: Redactor | None = None,
    ) -> None:
        """Create a handle without ownership of the session.

        `capabilities`: the agent's capabilities; None means all. `claim`, `share`: see the table.
        `redactor`: removes secrets from everything that is written to the store.
        """
        super().__init__(parts)
        self._claim, self._share = claim, share
        self._redactor = redactor
        self._checks = AskChecks(self.agent, self.dialect, capabilities)

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
        trace: str | None = None,
        hold: str | None = None,
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
        `trace`: the W3C `traceparent` of the trace that the turn belongs to. The log keeps it. If a
        process is started for this turn, it has the turn's own one in the variable `TRACEPARENT`.
        `hold`: the id of the hold that the ask belongs to, as `begin_hold` returned it. Raises
        `NotFound` if that is over. Inside of `async with session.hold()` an ask belongs to that.
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
            hold=current_hold(self.id) if hold is None else hold,
            deadline=deadline,
            wall=time.time(),
            caller=caller,
            trace=trace,
        )
        known = owned.keys.get(key)
        if known is not None and known[0].was_never_sent:
            known = None
        stored = None if known else owned.keys.take_stored(key)
        if stored is not None:
            known = owned.futures.find_turn(Turn(self, stored.turn, stored.after), stored.outcome)
            owned.keys.remember(key, known)
        elif known is None:
            if hold is not None and not owned.futures.has_hold(hold):
                raise no_hold(hold)
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
            # In this order: if the log says that the turn is over, the search then finds its end.
            watch = await self._watched(id)
            place = await self.find_turn(id)
            if place is None:
                hint = "find the id with `banksman log SESSION`; old turns may be deleted"
                raise NotFound(f"there is no turn {id!r:.100} in this session", hint=hint, turn=id)
            if self._owned is owned:
                found = Turn(self, id, place.first - 1)
                found.watch(watch)
                return found
            # The ownership changed meanwhile, so the result may be stale. The loop looks again.

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

    async def interrupt(
        self, turn: Turn | str | None = None, *, caller: str | None = None
    ) -> Receipt:
        """Stop a turn, by default the running turn. An idle session returns a receipt that says so.

        `caller`: the person or program that stops it, for the log.
        Cancelling the call only stops the wait; the turn is stopped in any case. `Moved`: the
        session has left, and the ask waits in its log. Only the next owner of the session can stop
        it.
        """
        self._check_caller(caller)
        await self._own()
        if turn is None:
            turn = holder(self._driver.state)
        if turn is None:
            return Receipt(stopped=False, by=By.ALREADY_OVER)
        self._futures.raise_if_passed_on(id_of(turn))
        interrupt = f"i-{os.urandom(8).hex()}"
        receipt = self._futures.expect_receipt(interrupt, turn)
        self._tell(InterruptAsked(self._now(), id_of(turn), interrupt, caller))
        self._raise_if_failed(receipt)
        return await asyncio.shield(receipt)

    async def reorder(
        self,
        turn: Turn | str,
        *,
        before: Turn | str | None = None,
        caller: str | None = None,
    ) -> None:
        """Move a queued ask like `move`, and raise if that is not possible.

        `Refused`: one of the two asks is not queued. `UsageError`: the two asks are of different
        classes.
        """
        owned = await self._own()
        try:
            first, other = find_move(
                owned.driver.state, id_of(turn), None if before is None else id_of(before)
            )
        except Refused as exc:
            await self.turn(str(exc.ids["turn"]))  # Raises `NotFound` if the turn never existed.
            raise
        if first != other:
            self.move(first, before=other, caller=caller)

    def withdraw(self, turn: Turn | str) -> None:
        """Withdraw a queued ask, or interrupt a running turn.

        Raises `Moved` like `interrupt`.
        """
        self._futures.raise_if_passed_on(id_of(turn))
        self._tell(AskWithdrawn(self._now(), id_of(turn)))

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
        caller: str | None = None,
    ) -> Answered:
        """Answer a question of the agent with "allow" or "deny".

        Returns, when it is durable, the one answer that the question has. This is the caller's
        answer (`is_first`) or, for a question that is over, its earlier answer. `NotFound`: the
        question never existed. A question that is over needs no claim. Cancelling the call only
        stops the wait; the answer is given in any case.

        `message`: the reason of a denial, for the agent. `updated_input`: replaces the input of the
        tool. `content`: the entered values, for an elicitation. `remember`: the agent must not ask
        again. True or "session" holds for the life of its process. "local", "project" or "user"
        holds in the agent's settings. `interrupt`: a denial that ends the turn. `caller`: the
        person or program that answers, for the log.
        """
        self._check_caller(caller)
        answer = checked(Answer(decision, message, updated_input, content, remember, interrupt))
        if self._owned is None:
            past = await self._past()
            if not any(waiting.id == question for waiting in past.questions):
                told = await self._find_answer(question)
                return told or Answered(question, "withdrawn", "store", None, is_first=False)
        owned = await self._own()
        told = await owned.questions.answer(
            question, answer, self._tell, caller
        ) or await self._find_answer(question)
        return as_logged(told or owned.questions.without_answer(question), self._redactor)

    async def _find_answer(self, question: str) -> Answered | None:
        return await find_answer(
            lambda after: self._readers.events(after, waits=False), question, self.committed
        )

    # -- settings ---------------------------------------------------------------------------------
    async def set_model(self, model: str, *, caller: str | None = None) -> None:
        """Set the model from the next turn on. Returns when the agent has confirmed it.

        `caller`: the person or program that sets it, for the log.

        An agent that does not answer is replaced by a process that starts with the model.
        Cancelling the call only stops the wait.
        """
        await self._set("model", model, caller)

    async def set_permission_mode(self, mode: str, *, caller: str | None = None) -> None:
        """Set the permission mode, in the agent's terms.

        Works like `set_model`, and also during a running turn.
        """
        await self._set("permission_mode", mode, caller)

    async def share(self, callers: Sequence[str], *, caller: str | None = None) -> None:
        """Share the session with exactly these callers of `banksman serve`. The log keeps it.

        `caller`: the caller that shares it. Returns when it is durable. Opens no session.
        """
        for name in (caller, *callers):
            check_caller(name)
        shared = tuple(sorted(set(callers)))
        told = entry(None, SESSION_SHARED, shared=shared, caller=caller)
        if self._owned is None and self._share and await self._share(self, told):
            return
        await self._own()
        change = f"c-{os.urandom(8).hex()}"
        taken = self._futures.expect_change(change)
        self._tell(ShareAsked(self._now(), change, shared, caller))
        await self._wait_change(taken)

    async def _set(self, name: str, value: Any, caller: str | None) -> None:
        self._check_caller(caller)
        self._checks.check_setting(name, value)
        owned = await self._own()
        serving = owned.driver.state.config
        if serving.agent != self.agent:
            # Settings are those of the agent that serves the session now.
            checks = AskChecks(serving.agent, serving.dialect, serving.capabilities)
            checks.check_setting(name, value)
        change = f"c-{os.urandom(8).hex()}"
        taken = self._futures.expect_change(change)
        self._tell(SettingAsked(self._now(), change, name, value, caller))
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
            preview=functools.partial(preview, redact=redact),
            limits=self.containment.get("limits"),
        )

    def stderr(self) -> str:
        """Return what the agent's process has written to stderr: at most 64 KiB, both ends of it.

        Also an unfinished line, such as a prompt. Text that an earlier host has read, before a
        hand-over, is not in it, nor are secrets of the host, or an end that may be the beginning
        of one. Empty without a process. `NotOwner`: the process belongs to another host.
        """
        if self._owned is not None:
            return self._driver.process.stderr().text
        owner = self.status().owner
        if owner is not None:
            message = f"cannot read the stderr of session {self.id}: a live host owns it"
            where = {"pid": owner.pid, "address": owner.address}
            raise NotOwner(message, hint="read it there", session=self.id, **where)
        return ""

    async def look(self) -> Status:
        """Return the current state, from the log if this host does not own the session.

        Changes nothing.
        """
        if self._owned is not None:
            return self.status()
        past = await self._past()
        if past.opened is not None and isinstance(cwd := past.opened.get("cwd"), str):
            self.cwd = cwd
            self.containment = past.opened.get("containment") or {}
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
