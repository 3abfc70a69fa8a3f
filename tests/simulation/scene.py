"""One session in a simulated world, its callers, and the invariants of every schedule.

A scenario creates a `Scene` and starts callers, each in a separate lane. It ends with `await scene.end()`, which closes
the session and checks everything that is left. Time is virtual.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from banksman.core.dialects.claude import CLAUDE
from banksman.core.session import event as kinds
from banksman.core.session.event import Event
from banksman.core.session.facts import Timer
from banksman.core.session.history import SessionHistory
from banksman.core.session.outcome import Kind, Outcome, Receipt
from banksman.core.session.replay import replay
from banksman.core.session.session_config import Config
from banksman.core.session.state import Mode, ProcessPhase, Stdin
from banksman.core.session.state import Session as State
from banksman.core.session.turn import Turn as Waiting
from banksman.errors import BanksmanError, BugError, Busy, Closed, Moved, NotOwner, QueueFull, Refused, StoreError
from banksman.sessions.agent_process import Spawn
from banksman.sessions.log_writer import lease_name
from banksman.sessions.ownership import OwnedSession
from banksman.sessions.pool import Pool
from banksman.sessions.questions import OnQuestion
from banksman.sessions.readable_session import SessionParts
from banksman.sessions.session import Session, Turn
from banksman.testing import checks, sim
from banksman.testing.world import Manner, Play, World, WorldLog, answer_to

# Errors that `ask`, `hold` and `interrupt` may raise, besides errors for a caller's mistakes.
DOCUMENTED = (QueueFull, Busy, Closed, NotOwner, StoreError, Refused)
# No scenario takes longer in any order: start, drain and ladder several times.
SECONDS_MAX = 500.0
# Fewer lines give fewer choices: the agent sends the output of a turn before its result together, and the rest, too.
TERSE = Manner(is_terse=True)
READY = Play()
# A timer that is due so soon may fire before any step: see `sim`.
MOMENT = 0.001
R = TypeVar("R")


def at_once(work: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine that never suspends, and return its result."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits")


def budget(schedules: int) -> int:
    """Return the number of schedules of a scenario; BANKSMAN_EXPLORE sets a higher minimum."""
    return max(schedules, int(os.environ.get("BANKSMAN_EXPLORE", "0")))


class Scene:
    def __init__(
        self,
        plays: Mapping[str, Play] | None = None,
        *,
        manners: Sequence[Manner] = (TERSE, TERSE, TERSE, TERSE),
        log: WorldLog | None = None,
        on_question: OnQuestion | None = None,
        allows_steering: bool = False,
        id: str = "s",
        conversation: str | None = None,
        pool: Pool | None = None,
        spawn: Callable[[World], Spawn] | None = None,
        **config: Any,
    ) -> None:
        """`spawn`: starts the processes in place of the world."""
        self.loop = sim.current()
        self.world = World({"get ready": READY, **(plays or {})}, manners=manners, allows_steering=allows_steering)
        self.log = log or WorldLog()
        self.config = Config(dialect=CLAUDE, **config)
        self.first = State(config=self.config, conversation=conversation)
        ends: asyncio.Future[None] = self.loop.create_future()
        parts = SessionParts(id=id, name=id, agent="claude", dialect=CLAUDE, store=self.log, ends=ends)
        self.session = Session(parts)
        epoch = at_once(self.log.claim(id, name=id, agent="claude"))
        past = SessionHistory(session=self.first)
        # The scene does not wait for the lease: `refusals` has the error if it was refused.
        self.refusals: list[BanksmanError] = []
        if conversation is not None:
            self.log.lease(id, epoch, lease_name(CLAUDE.name, conversation), self._on_leased)
        self.session.attach(
            OwnedSession(
                id,
                past,
                epoch=epoch,
                store=self.log,
                spawn=self.world.spawn if spawn is None else spawn(self.world),
                on_question=on_question,
                pool=pool,
            )
        )
        # By the caller's name: the outcome of its ask, or the error.
        self.outcomes: dict[str, Outcome] = {}
        self.errors: dict[str, BaseException] = {}
        self.receipts: dict[str, Receipt] = {}
        self.turns: dict[str, Turn] = {}
        self.prompts: dict[str, str] = {}
        self.tasks: list[asyncio.Task[None]] = []

    def _on_leased(self, error: BanksmanError | None) -> None:
        if error is not None:
            self.refusals.append(error)

    async def get_ready(self) -> None:
        """Start the agent by a first turn in asyncio's order; the exploration begins after it."""
        self.world.is_calm = self.log.is_calm = True
        turn = await self.session.ask("get ready")
        assert (await turn.outcome()).kind is Kind.DONE
        self.world.is_calm = self.log.is_calm = False

    # -- callers -----------------------------------------------------------------------------------------------------
    def start(self, name: str, doing: Coroutine[Any, Any, object]) -> asyncio.Task[None]:
        """Start a caller in a separate lane. It may raise documented errors only."""

        async def call() -> None:
            try:
                await doing
            except DOCUMENTED as exc:
                self.errors[name] = exc

        task = self.loop.create_lane_task(call(), lane=name)
        # A task that is cancelled before its first step never starts its coroutine, so the callback closes it.
        task.add_done_callback(lambda _: doing.close())
        self.tasks.append(task)
        return task

    def ask(self, name: str, prompt: str | None = None, **how: Any) -> asyncio.Task[None]:
        """Start a caller that asks and waits for the outcome."""
        return self.start(name, self.asking(name, prompt, **how))

    async def asking(self, name: str, prompt: str | None = None, **how: Any) -> Turn:
        turn = await self.session.ask(prompt or name, **how)
        self.turns[name] = turn
        self.prompts[name] = prompt or name
        outcome = await turn.outcome()
        assert name not in self.outcomes
        self.outcomes[name] = outcome
        return turn

    def at_any_moment(self, act: Callable[[], object]) -> None:
        """Act when all is quiet, or, with one departure, before any step. Explore with `jitter_seconds=MOMENT`."""

        def come() -> None:
            act()

        self.loop.call_later(MOMENT, come)

    def interrupt(self, name: str, turn: Turn | str | None = None) -> asyncio.Task[None]:
        async def interrupting() -> None:
            self.receipts[name] = await self.session.interrupt(turn)

        return self.start(name, interrupting())

    async def callers(self) -> None:
        for ended in await asyncio.gather(*self.tasks, return_exceptions=True):
            if ended is not None and not isinstance(ended, asyncio.CancelledError):
                raise ended

    # -- the end -----------------------------------------------------------------------------------------------------
    async def end(self, *, is_calm: bool = True) -> None:
        """Wait for the callers, close, and check. `is_calm`: do not explore the close."""
        await self.callers()
        if is_calm:
            self.world.is_calm = self.log.is_calm = True
        self.check_timers()
        await self.session.close()
        assert self.loop.time() < SECONDS_MAX
        for name, turn in self.turns.items():
            # A turn has an outcome even if its caller did not wait for it.
            assert turn.state == "ended", name
            self.outcomes.setdefault(name, await turn.outcome())
        self.check_callers()
        self.check_nothing_is_left()
        self.check_events(await self.events())

    async def leave(self) -> None:
        """Wait for the callers and for the leave. Each ask has one outcome here, or waits in the log."""
        await self.callers()
        await self.session.wait_closed()
        assert self.loop.time() < SECONDS_MAX
        events = await self.events()
        found = replay(events, self.config, self.first)
        waiting = {ask.id for turn in found.queue if isinstance(turn, Waiting) for ask in turn.asks}
        passed_on = {self.turns[name].id for name, error in self.errors.items() if isinstance(error, Moved)}
        # Each ask whose caller got `Moved` waits in the log. Only asks whose callers left their turn may wait besides
        # them.
        left = {turn.id for name, turn in self.turns.items() if name not in self.outcomes}
        assert passed_on <= waiting <= left
        for name, turn in self.turns.items():
            assert turn.state == ("queued" if turn.id in waiting else "ended"), name
        assert (found.mode, found.turn, found.own) == (Mode.OPEN, None, None)
        checks.turns(events, is_over=False)
        ended = {event.turn: event.body["outcome"] for event in events if event.kind == kinds.TURN_ENDED}
        for name, outcome in self.outcomes.items():
            assert ended[self.turns[name].id] == outcome.kind, name
        self.check_callers()
        self.check_nothing_is_left()
        self.check_interrupts(events)

    async def events(self) -> list[Event]:
        is_unreadable, self.log.is_unreadable = self.log.is_unreadable, False
        events = [event async for event in self.session.follow()]
        self.log.is_unreadable = is_unreadable
        return events

    def check_callers(self) -> None:
        assert self.world.violations == []
        for name, outcome in self.outcomes.items():
            if outcome.kind is Kind.DONE:
                play = self.world.plays.get(self.prompts.get(name, name)) or self.world.plays.get("") or Play()
                expected = play.text if play.text is not None else answer_to(self.prompts.get(name, name))
                # Steered and collected asks share an answer that contains each of their prompts.
                if not play.boundaries:
                    continue  # The agent reported the prompt as settled without a boundary.
                assert outcome.text is not None
                assert outcome.text == expected or self.prompts.get(name, name) in outcome.text.split(), (
                    name,
                    outcome.text,
                )
            if outcome.kind is Kind.FAILED:
                assert isinstance(outcome.error, BanksmanError)
                assert not isinstance(outcome.error, BugError), outcome.error

    def check_timers(self) -> None:
        """Check that no timer waits for something that is over.

        The check covers the current process only: timers of an ended process expire later.
        """
        state = self.driver.state
        process = state.process
        subjects = set(self.driver.timers)
        assert all(due >= self.loop.time() for due in self.driver.timers.values()), "one that fired is kept"
        if process.stdin is Stdin.FREE and process.phase is ProcessPhase.READY:
            assert not {(Timer.WRITE, f"{process.number}.{count}") for count in range(99)} & subjects
        if process.phase is ProcessPhase.READY:
            assert (Timer.START, str(process.number)) not in subjects
        if state.turn is None and state.own is None and process.phase is ProcessPhase.READY:
            kinds_left = {timer for timer, _ in subjects}
            assert process.unacknowledged or not kinds_left & {Timer.DRAIN, Timer.SETTLE, Timer.CLOCKS}

    def check_nothing_is_left(self) -> None:
        session, driver = self.session, self.driver
        assert driver.error is None
        for name in ("_turns", "_accepting", "_receipts", "_granting", "_changing"):
            left = getattr(session._futures, name)  # pyright: ignore[reportPrivateUsage]
            assert not left, f"left in {name}: {left}"
        assert not driver.timers, f"timers left: {driver.timers}"
        assert not session.questions()
        assert not session._here.questions._waiting  # pyright: ignore[reportPrivateUsage]
        assert self.world.is_over, self.world
        assert driver.state.turn is None
        assert driver.state.own is None
        # After a leave, the queue holds the asks that were passed on.
        assert not driver.state.queue or driver.state.mode is Mode.LEFT

    @property
    def driver(self) -> Any:
        return self.session._driver  # pyright: ignore[reportPrivateUsage]

    def check_events(self, events: Sequence[Event]) -> None:
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        ended: dict[str, str] = {}
        for event in events:
            if event.kind == kinds.TURN_ENDED:
                assert event.turn is not None
                assert event.turn not in ended, f"{event.turn} ended twice"
                ended[event.turn] = event.body["outcome"]
            elif event.kind != kinds.UPDATE:
                assert event.turn not in ended, f"{event.kind} of {event.turn} after its end"
        queued = {event.turn for event in events if event.kind == kinds.TURN_QUEUED}
        for name, turn in self.turns.items():
            outcome = self.outcomes[name]
            if outcome.durable:
                assert turn.id in queued
                assert turn.id in ended, f"{name} has no end in the log"
                assert ended[turn.id] == outcome.kind
        if self.driver.state.store.name == "WORKING":
            assert queued <= set(ended), "a turn without an end"
            self.check_replay(events)
        self.check_interrupts(events)

    def check_replay(self, events: Sequence[Event]) -> None:
        state = replay(events, self.config, self.first)
        assert (state.conversation, state.settings) == (self.driver.state.conversation, self.driver.state.settings)
        assert state.turn is None
        assert state.own is None
        assert not state.queue

    def check_interrupts(self, events: Sequence[Event]) -> None:
        """Check that an interrupt of a granted turn never hit another granted turn (G4)."""
        refs = {event.turn: event.body["ref"] for event in events if event.kind == kinds.TURN_QUEUED}
        for process in self.world.processes:
            for request, open_refs in process.agent.interrupts:
                turn = request.removeprefix("interrupt-").rpartition("#")[0]
                if turn in refs and open_refs:
                    assert any(ref[:-4] == refs[turn][:-4] for ref in open_refs), f"{request} met {open_refs}"


def explored(
    scenario: Callable[[], Awaitable[object]],
    *,
    departures: int = 2,
    schedules: int = 3000,
    is_complete: bool = True,
    **options: Any,
) -> sim.Explored:
    """Explore, print the counts, and require completeness if `is_complete`."""
    found = sim.explore(scenario, departures_max=departures, schedules_max=budget(schedules), **options)
    name = getattr(scenario, "__name__", "scenario")
    counts = f"{found.schedules} schedules, {found.choice_points} choice points, {found.steps} steps"
    print(f"{name}: {counts}, {found.left} left")
    if is_complete:
        assert found.is_complete, f"{found.left} schedules were not run: there is no budget for them"
    return found
