"""A session's face for asyncio: ask, follow, interrupt, hold, answer, close.

It holds no state that decides anything: what callers want goes through the driver's door, what becomes of it comes back
as promises that are kept. A caller that is cancelled stops waiting, and an ask that nobody waits for any more before it
was accepted is withdrawn.

A session is in the store, whoever owns it. Reading needs no more than that. Whatever changes something needs it to be
ours: the first such call claims it (`Life`), or is refused because a live host has it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, MutableSet, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from banksman.commands.options import check_seconds, endless_beyond
from banksman.core.dialects.dialect import Dialect
from banksman.core.session.ask_queue import BACKGROUND, NORMAL
from banksman.core.session.facts import (
    Asked,
    AskMoved,
    AskWithdrawn,
    CallerFact,
    CloseAsked,
    DrainAsked,
    InterruptAsked,
    LeaveAsked,
    Reconfigured,
    SettingAsked,
)
from banksman.core.session.outcome import By, Receipt
from banksman.core.session.session_config import Config
from banksman.core.session.state import KEEPING, Mode, Store
from banksman.core.session.turn import TurnPhase
from banksman.core.stop_ladder import Timings
from banksman.core.wire.redaction import Redactor
from banksman.errors import Moved, NotFound, Refused, UsageError
from banksman.sessions import promises, status
from banksman.sessions.driver import Driver
from banksman.sessions.hooks import Hooks
from banksman.sessions.life import Life
from banksman.sessions.log_reader import Readable, Readers
from banksman.sessions.names import check_no_secret, checked_name
from banksman.sessions.opening import Opening
from banksman.sessions.promises import Promises, ignore
from banksman.sessions.questions import Answer, Answered, OnQuestion, Question, asked_before, checked, find_answer
from banksman.sessions.recovery import load
from banksman.sessions.session_options import Wishes, moved, priority_of
from banksman.sessions.status import Status
from banksman.sessions.tools import ToolServer
from banksman.sessions.turn import Turn, Watch
from banksman.sessions.workspace import Workspace
from banksman.store.log import Log

# Of this program: see Session.incarnation.
_incarnations = itertools.count()

Prompt = str | Sequence[Mapping[str, Any]]
Claim = Callable[["Session"], Awaitable[None]]


class Session(Readable):
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
        readers: MutableSet[Readers] | None = None,
        capabilities: Collection[str] | None = None,
        claim: Claim | None = None,
        redactor: Redactor | None = None,
    ) -> None:
        """`ends`: the host closes, and waits for `readers`. `capabilities`: what the agent can; None: everything.
        `claim` makes it ours. `redactor`: what must not be written to the store."""
        super().__init__(id, name=name, agent=agent, dialect=dialect, store=store, ends=ends, readers=readers)
        self._claim = claim
        self._redactor = redactor
        self._wishes = Wishes(agent, dialect, capabilities)
        self._life: Life | None = None
        # Another one that is made under the same id, after this one was deleted, has another number.
        self.incarnation = next(_incarnations)
        # How often it was opened here.
        self.openings = 0
        # Where its agent works, as far as is known; and by when a process that is being stopped is gone.
        self.cwd: str | None = None
        self._stop_seconds_max = Timings().seconds_max
        # Where its agent keeps a conversation, by the name of that; asks the file system.
        self.transcript_of: Callable[[str], Path | None] | None = None

    def opened_with(self, opening: Opening) -> None:
        """What is shown of how it was opened."""
        self.cwd = opening.cwd
        self.transcript_of = opening.transcript
        self._stop_seconds_max = opening.stop_seconds_max

    def live(self, life: Life) -> None:
        """It is ours from here on."""
        self._life = life
        self.openings += 1
        life.promises.save = self._save
        self._readers = self._reading(life.promises.finished, since=life.driver.state.head)
        life.begin(self)

    def __repr__(self) -> str:
        return f"<Session {self.name or self.id} {'not here' if self._life is None else self.status().phase}>"

    @property
    def _here(self) -> Life:
        if self._life is None:
            raise UsageError("nothing runs in this session here", hint="ask first, or open it", session=self.id)
        return self._life

    @property
    def _driver(self) -> Driver:
        return self._here.driver

    @property
    def _promises(self) -> Promises:
        return self._here.promises

    async def _own(self) -> Life:
        """Claim it, if it is not ours yet."""
        if self._life is None:
            assert self._claim is not None
            await self._claim(self)
        return self._here

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
        life = await self._own()
        ask = self._wishes.ask(
            prompt,
            at=self._now(),
            priority=priority,
            on_busy=on_busy,
            on_preempt=on_preempt,
            key=key,
            schema=schema,
            rules=rules,
            hold=promises.inside(self.id),
        )
        known = life.keys.get(key)
        if known is not None and known[0].was_never_sent:
            known = None
        stored = None if known else life.keys.take_stored(key)
        if stored is not None:
            known = life.promises.find_turn(Turn(self, stored.turn, stored.after), stored.outcome)
            life.keys.remember(key, known)
        elif known is None:
            turn = Turn(self, ask.id, life.driver.state.head)
            known = turn, life.promises.expect_turn(turn)
            life.keys.remember(key, known)
            self._tell(Asked(self._now(), ask))
        turn, accepted = known
        await self._wait_accepted(life, turn, accepted)
        turn.takers += 1
        return turn

    async def _wait_accepted(self, life: Life, turn: Turn, accepted: asyncio.Future[None]) -> None:
        """One of those who want it; when the last one goes, and nobody has it, it is withdrawn."""
        callers = life.callers
        callers[turn.id] = callers.get(turn.id, 0) + 1
        try:
            self._raise_if_failed(accepted)
            await asyncio.shield(accepted)
        except asyncio.CancelledError:
            ignore(accepted)
            if callers[turn.id] == 1 and not turn.takers:
                life.keys.forget(turn)
                self._give_up(turn)
            raise
        except BaseException:
            life.keys.forget(turn)
            raise
        finally:
            callers[turn.id] -= 1
            if not callers[turn.id]:
                del callers[turn.id]

    async def turn(self, id: str) -> Turn:
        """A turn by its id, whoever asked for it and wherever it is: one that waits, runs, or is over long since."""
        while True:
            life = self._life
            if life is not None and (known := life.promises.turn(id)) is not None:
                return known
            # In this order: the end of a turn that is over is in the log by the time that the turn is looked for.
            watch = await self._watched(id)
            place = await self.find_turn(id)
            if place is None:
                hint = "it may be too old to be kept"
                raise NotFound(f"there is no turn {id!r:.100} in this session", hint=hint, turn=id)
            if self._life is life:
                found = Turn(self, id, place.first - 1)
                found.watch(watch)
                return found
            # It has become ours, or another's, while its log was read: what is known of its turns is known elsewhere.

    def _save(self, prompt: str) -> None:
        """Ask the process to put down what it knows, before it is replaced for its age. Nobody waits for the outcome:
        it is in the log."""
        ask = replace(self._wishes.ask(prompt, at=self._now(), priority=BACKGROUND), is_last=True)
        ignore(self._promises.expect_turn(Turn(self, ask.id, self._driver.state.head)))
        self._tell(Asked(self._now(), ask))

    async def _watched(self, turn: str) -> Watch:
        """Of one that nobody here was promised. While the log cannot be written, what was told of it is not in it: who
        looks now waits until it is, and is not told anything else meanwhile."""
        if self._life is not None and self._life.driver.state.store is Store.WORKING:
            return Watch(is_over=True)
        past = await load(self._store, self.id, Config(dialect=self.dialect))
        found = status.find_turn(past.session, turn)
        if found is None:
            return Watch(is_over=True)
        # What was started has been sent, as far as a log can tell.
        return Watch(is_over=False, phase=TurnPhase.QUEUED if found.phase is TurnPhase.QUEUED else TurnPhase.RUNNING)

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
        self._promises.raise_if_passed_on(_id(turn))
        interrupt = f"i-{os.urandom(8).hex()}"
        receipt = self._promises.expect_receipt(interrupt, turn)
        self._tell(InterruptAsked(self._now(), _id(turn), interrupt))
        self._raise_if_failed(receipt)
        return await asyncio.shield(receipt)

    def move(self, turn: Turn | str, *, before: Turn | str | None = None) -> None:
        """Put a queued ask before another of its class, or to the head of its class. Else nothing happens. `Moved` as
        in `interrupt`."""
        self._promises.raise_if_passed_on(_id(turn))
        self._tell(AskMoved(self._now(), _id(turn), None if before is None else _id(before)))

    async def reorder(self, turn: Turn | str, *, before: Turn | str | None = None) -> None:
        """The same, for who must know that it was done: `Refused` if the ask, or the other, does not wait any more,
        `UsageError` if the two are not of one class."""
        life = await self._own()
        try:
            first, other = moved(life.driver.state, _id(turn), None if before is None else _id(before))
        except Refused as exc:
            await self.turn(str(exc.ids["turn"]))  # `NotFound`: there never was one.
            raise
        if first != other:
            self.move(first, before=other)

    def withdraw(self, turn: Turn | str) -> None:
        """Take a queued ask back; one that runs is interrupted. `Moved` as in `interrupt`."""
        self._promises.raise_if_passed_on(_id(turn))
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
        life = await self._own()
        async with promises.held(self.id, life.promises, priority_of(priority), self._tell, self._raise_if_failed):
            yield

    # -- questions ---------------------------------------------------------------------------------------------------
    def questions(self) -> list[Question]:
        """Those that wait for an answer."""
        return [] if self._life is None else self._life.questions.open()

    async def open_questions(self) -> list[Question]:
        """The same, wherever the session is: of one that is not ours, what its log says."""
        if self._life is not None:
            return self.questions()
        past = await load(self._store, self.id, Config(dialect=self.dialect))
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
        if self._life is None:
            past = await load(self._store, self.id, Config(dialect=self.dialect))
            if not any(waiting.id == question for waiting in past.questions):
                told = await self._find_answer(question)
                return told or Answered(question, "withdrawn", "store", None, is_first=False)
        life = await self._own()
        told = await life.questions.answer(question, answer, self._tell) or await self._find_answer(question)
        return self._as_logged(told or life.questions.without_answer(question))

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
        self._wishes.check_setting(name, value)
        await self._own()
        change = f"c-{os.urandom(8).hex()}"
        taken = self._promises.expect_change(change)
        self._tell(SettingAsked(self._now(), change, name, value))
        await self._wait_change(taken)

    async def _wait_change(self, taken: asyncio.Future[None]) -> None:
        self._raise_if_failed(taken)
        try:
            await asyncio.shield(taken)
        except asyncio.CancelledError:
            ignore(taken)
            raise

    def check_log(self) -> None:
        """`StoreError`: nothing can be written to it now."""
        if (error := self._driver.state.store_error) is not None:
            raise error

    @property
    def has_broken_log(self) -> bool:
        """The store did not take the last append of this session, which is still open here."""
        return self._life is not None and not self.is_closed and self._driver.state.store is Store.BROKEN

    async def reconfigure(
        self,
        opening: Opening,
        *,
        replaces: bool,
        drops: Sequence[str],
        opened: Mapping[str, Any] | None,
        on_question: OnQuestion | None,
    ) -> None:
        """It was opened again. Whoever did is the one that is asked from now on; `replaces`: and what runs is not what
        was asked for, so that the next turn gets another process. `drops`: settings that are as opened again. `opened`:
        what the log is to say of it, and does not yet: returns when it does. Cancelling this only stops waiting."""
        self.openings += 1
        self.opened_with(opening)
        self._here.questions.on_question = on_question
        self._driver.frame_bytes_max = opening.frame_bytes_max
        # One that only waits for its place is started as it is asked for now.
        is_due = replaces and not self._driver.waits_to_start
        if opened is None:
            self._tell(Reconfigured(self._now(), opening.config, is_due, tuple(drops)))
            return
        change = f"c-{os.urandom(8).hex()}"
        written = self._promises.expect_change(change)
        self._tell(Reconfigured(self._now(), opening.config, is_due, tuple(drops), opened, change))
        await self._wait_change(written)

    def call_these(self, hooks: Hooks, server: ToolServer) -> None:
        """What the process that runs was told of."""
        self._here.callbacks.replace(hooks, server)

    def work_in(self, workspace: Workspace | None) -> None:
        """What the process that is started may ask us for."""
        self._here.callbacks.work_in(workspace)

    # -- looking -----------------------------------------------------------------------------------------------------
    def status(self) -> Status:
        """What it is doing. Never blocks, and changes nothing. Of one that is not ours it is what the store says at a
        glance; `look` says more."""
        if self._life is None:
            return status.glance(self._store.find(self.id), self.id, name=self.name, agent=self.agent)
        redact = None if self._redactor is None else self._redactor.redact_text
        return status.take(
            self._driver,
            name=self.name,
            agent=self.agent,
            stop_seconds_max=self._stop_seconds_max,
            preview=functools.partial(status.preview, redact=redact),
        )

    async def look(self) -> Status:
        """What it is doing, wherever it is: of one that is not ours, what its log says. Changes nothing."""
        if self._life is not None:
            return self.status()
        past = await load(self._store, self.id, Config(dialect=self.dialect))
        if past.opened is not None and isinstance(cwd := past.opened.get("cwd"), str):
            self.cwd = cwd
        return status.told(past, self.status())

    def state_of(self, turn: str) -> str:
        """queued, starting, running, interrupting or ended."""
        found = None if self._life is None else status.find_turn(self._driver.state, turn)
        return "ended" if found is None else found.phase

    async def rename(self, name: str | None) -> None:
        """Give it another name, or none. `NameTaken` if another session has it; `UsageError` if somebody else has
        renamed it since."""
        await self._store.rename(self.id, checked_name(name, self._redactor), expected=self.name)
        self.name = name

    # -- closing -----------------------------------------------------------------------------------------------------
    async def close(self) -> None:
        """Stop what runs, by the ladder, and let go. May be called again, and by several; cancelling stops waiting.

        It stays in the store: opened by its name, or asked by `Host.session`, it goes on where it was.
        """
        self.close_nowait()
        await self.wait_closed()

    def close_nowait(self) -> None:
        """Begin to close; `wait_closed` tells when it is."""
        if self._life is not None:
            self._tell(CloseAsked(self._now()))

    def drain_nowait(self) -> None:
        """Take nothing new, finish what runs, then close."""
        if self._life is not None:
            self._tell(DrainAsked(self._now()))

    async def leave(self, timeout: float | None = None) -> None:
        """Let go of it, for another host to have it: take nothing new (`Moving`), finish the turn that runs, stop the
        process, release the session. It is not closed, and who waits in it is not refused: they are kept in its log,
        as if this host had died, and whoever claims it next serves them; `turn.outcome()` raises `Moved` for them.

        Past `timeout` seconds what runs is stopped by the ladder (INTERRUPTED); of several deadlines the first one
        counts. If the log cannot be written, that is waited for, and past `timeout` no more. May be called again, and
        by several; cancelling stops waiting. One that is not ours, or is being closed already, is let be; one that is
        closed meanwhile is closed. `Host.session` can claim it again, also here.
        """
        if timeout is not None:
            check_seconds("timeout", timeout)
        self.leave_nowait(timeout)
        await self.wait_closed()

    def leave_nowait(self, timeout: float | None = None) -> None:
        """Begin to leave; `wait_closed` tells when it has left."""
        if self._life is not None:
            now, seconds = self._now(), endless_beyond(timeout)
            self._tell(LeaveAsked(now, None if seconds is None else now + seconds))

    def end_nowait(self) -> None:
        """Its host ends. What is closed by that refuses who waits in it; but one that is leaving has to go at once, and
        keeps them."""
        if self.is_leaving:
            self.leave_nowait(0.0)
        else:
            self.close_nowait()

    async def wait_closed(self) -> None:
        """Until it is closed or has left, its callbacks have ended, and who was reading its log by then has what it
        reads."""
        life = self._life
        if life is not None:
            await asyncio.shield(life.promises.finished)
            await life.questions.wait_ended()
            await life.callbacks.wait_ended()
            await life.promises.wait_read()
            await self._readers.wait_left()

    @property
    def conversation(self) -> str | None:
        """The agent's own name for it, while the session is ours; None: nothing was said in it yet."""
        return self._driver.state.conversation

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
        return self._here.questions.on_question

    @property
    def is_ours(self) -> bool:
        """It lives here, or did until it was closed."""
        return self._life is not None

    @property
    def is_open(self) -> bool:
        """It takes asks here: nobody has begun to close it."""
        if self._life is None or self._driver.error is not None:
            return False
        return self._driver.state.mode is Mode.OPEN and self._driver.state.store is not Store.LOST

    @property
    def is_leaving(self) -> bool:
        """It is let go of, or was, and goes on wherever it is claimed next."""
        return self._life is not None and self._driver.state.mode in KEEPING - {Mode.OPEN}

    def when_closed(self, call: Callable[[], None]) -> None:
        self._promises.finished.add_done_callback(lambda _: call())

    @property
    def is_closed(self) -> bool:
        """It was closed here, or has left."""
        return self._life is not None and self._life.is_over

    def abandon(self) -> None:
        """Its loop was closed under it: see `Driver.abandon`."""
        if self._life is not None:
            self._life.callbacks.abandon()
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
