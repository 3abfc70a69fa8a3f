"""Explore every order of facts: a breadth-first search over the `session.step` that the driver runs.

A `Scenario` fixes the asks, the agent's behaviour, and how often each fault may happen. From the first state on, the
search delivers everything that the world could deliver next. Breadth first finds the shortest path to a violation. The
checks look from outside: at the effects, the log, and the true state of the agent, which is a model (see toy.py). The
search skips a state that it has seen before, apart from irrelevant values: the number of events in the log, the number
of a process, the name of a question.

Two checks cover the whole graph afterwards:

- From every state in which a caller waits, time, the log and the process alone lead to an end, or to a running turn.
- If the agent does its work, too, they lead to an end for all callers.

A state without such a path is a wedge.

Time stands still at 0.0. Each started timer may fire at any moment, which covers more orders than a clock would.
"""

from __future__ import annotations

import functools
import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import msgspec
from msgspec.structs import replace
from tests.core.session import exploration_budgets as money
from tests.core.session import toy
from tests.core.session.exploration_hand_over import check_held, try_hand_over
from tests.core.session.ledger import Ledger, Violation, check, fold
from tests.core.session.talk import counts_plain_frames

from banksman.core.dialects.dialect import DENIED
from banksman.core.dialects.meaning import Meaning, TurnOpened, TurnOver
from banksman.core.process_facts import (
    Exited,
    FrameWritten,
    ProcessGone,
    Started,
    StartFailed,
    SweepEnded,
    Swept,
    WriteFailed,
)
from banksman.core.session import ask_queue, budget_gate, crash_recovery
from banksman.core.session import event as kinds
from banksman.core.session import history as pasts
from banksman.core.session.ask_queue import BACKGROUND, INTERACTIVE, Hold
from banksman.core.session.budget import CapUse
from banksman.core.session.effects import (
    Accept,
    Append,
    AskHuman,
    AskToSave,
    CallOnLimit,
    CancelTimer,
    ClaimBudget,
    CloseQuestion,
    Effect,
    EndHold,
    Finish,
    GiveReceipt,
    GrantHold,
    HandOver,
    HoldConversation,
    LeaveInLog,
    Reject,
    ReportIdle,
    ReportLimit,
    ReportReady,
    Resolve,
    SettingTaken,
    StartProcess,
    StartTimer,
    StopProcess,
    SweepTools,
    TellAnswer,
    WaitUntil,
    WriteFrame,
)
from banksman.core.session.event import Entry
from banksman.core.session.facts import (
    AccountLimited,
    AppendFailed,
    Asked,
    AskEdited,
    AskMoved,
    AskWithdrawn,
    Begun,
    BudgetChanged,
    BudgetClaimed,
    CloseAsked,
    Committed,
    DrainAsked,
    EvictAsked,
    Fact,
    FramesRead,
    HandedOver,
    HandOverAsked,
    HandOverFailed,
    HoldAsked,
    HoldReleased,
    InterruptAsked,
    LeaveAsked,
    LimitDecided,
    ProcessReported,
    QuestionAnswered,
    Reconfigured,
    SettingAsked,
    Subject,
    Timer,
    TimerFired,
)
from banksman.core.session.history import SessionHistory
from banksman.core.session.outcome import Kind, Outcome
from banksman.core.session.session_config import Config
from banksman.core.session.state import (
    OVER,
    AgentState,
    MaySteer,
    MayWrite,
    Mode,
    ProcessPhase,
    ProcessState,
    Session,
    Store,
)
from banksman.core.session.step import step
from banksman.core.session.turn import Ask, Turn, TurnPhase
from banksman.core.session.usage import NO_USAGE
from banksman.errors import AgentError, ProgramNotFound, StoreError

AT = 0.0
LEFT = (Swept(99, "sleep 60"),)
NOT_INSTALLED = ProgramNotFound("no such program")
BROKEN_PIPE, NO_START, NO_STORE = (
    AgentError("broken pipe"),
    AgentError("no such program"),
    StoreError("the disk is full"),
)

# Events that may happen, with a maximum count in each scenario.
BUDGETS = (
    *(
        "own",
        "stray",
        "unacknowledged",
        "missing",
        "merge",
        "question",
        "task",
        "unanswered",
        "use",
        "limit",
    ),  # the agent
    *("exit", "cut", "unstartable"),  # the agent's process and pipe
    *("fail", "fenced"),  # the log
    *("late",),  # a fact that arrives after the end of its subject
    *("withdraw", "interrupt", "move", "edit", "release", "setting", "reconfigure"),  # callers
    *("drain", "close", "leave", "hurry"),
    *("hand", "unhand"),  # the session is handed over; the keeper does not take the process
    *("evict",),  # other sessions
    *("reach", "refuse"),  # the host's budgets
    *("crash", "claim"),  # this host; another host
    *("uninstalled",),  # a program
    *("limited", "tool", "account"),  # the agent, whose turn meets a limit or uses a tool; another session
)

_INDEX = {name: index for index, name in enumerate(BUDGETS)}


@dataclass(frozen=True, kw_only=True)
class Scenario:
    name: str
    asks: tuple[Ask, ...]
    holds: tuple[tuple[str, int], ...] = ()
    budget: Mapping[str, int] = field(default_factory=dict[str, int])
    manners: toy.Manners = toy.POLITE
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    acknowledges: bool = True
    # The agents of the session, if there are several.
    agents: tuple[str, ...] = ()
    # Parts that act before everything else: fewer orders, and fewer states.
    eager: frozenset[str] = frozenset()
    states_max: int = 1_000_000
    # The shared cap that may be reached.
    cap: CapUse = money.FULL

    @functools.cached_property
    def by_id(self) -> dict[str, Ask]:
        return {ask.id: ask for ask in self.asks}

    def first(self) -> World:
        config = Config(dialect=toy.ToyDialect(acknowledges_interrupts=self.acknowledges), **self.config)
        if self.agents:
            roster = tuple(replace(config, agent=name) for name in self.agents)
            config = replace(roster[0], roster=roster)
        session = Session(config=config)
        return World(
            session=session,
            agent=toy.Agent(),
            budget=tuple(self.budget.get(name, 0) for name in BUDGETS),
            asks=(Life.UNASKED,) * len(self.asks),
            holds=(Life.UNASKED,) * len(self.holds),
            mirror=SessionHistory(session=session),
            durable_mirror=SessionHistory(session=session),
        )


class Life:
    """State of an ask, an interrupt or a hold, as its caller sees it."""

    UNASKED, ASKED, ACCEPTED, OVER, REJECTED, PASSED_ON = range(6)


class Unlogged(msgspec.Struct, frozen=True):
    """A pending append."""

    seq: int
    ledger: Ledger
    mirror: SessionHistory


class World(msgspec.Struct, frozen=True):
    session: Session
    agent: toy.Agent
    budget: tuple[int, ...]
    asks: tuple[int, ...]
    holds: tuple[int, ...]
    # The durable log, and the log after each pending append, as the ledger and as the fold read it.
    mirror: SessionHistory
    durable_mirror: SessionHistory
    ledger: Ledger = Ledger()
    durable: Ledger = Ledger()
    unlogged: tuple[Unlogged, ...] = ()
    # The current process.
    process: int = 0
    is_asked_for: bool = False
    is_alive: bool = False
    has_exited: bool = False
    is_told_to_stop: bool = False
    is_writing: bool = False
    is_cut: bool = False
    # A sweep of an interrupted turn's tools is running.
    is_sweeping: bool = False
    # Names of the prompts that were sent.
    sent: frozenset[str] = frozenset()
    timers: frozenset[Subject] = frozenset()
    # Interrupts by turn, and the turns that a caller wants to end.
    interrupts: tuple[tuple[str, int], ...] = ()
    unwanted: frozenset[str] = frozenset()
    # The unique generation of the process; the question that a caller sees; all questions that a caller ever saw; and
    # the closed questions whose answer was not reported yet.
    epoch: int = 0
    question: str = ""
    seen: frozenset[str] = frozenset()
    untold: frozenset[str] = frozenset()
    change: int = Life.UNASKED
    edit: int = Life.UNASKED
    late: frozenset[Fact] = frozenset()
    is_finished: bool = False
    # The wall clock time that has certainly passed; the limit about which a caller decides; the limits for which the
    # caller did not want to wait; and the prompts in whose turn a tool ran.
    wall: float = 0.0
    undecided: str = ""
    given_up: frozenset[str] = frozenset()
    tooled: frozenset[str] = frozenset()
    # Turns (keys) for which the session claims a part of the shared budgets, and those that got it.
    claims: frozenset[str] = frozenset()
    granted: frozenset[str] = frozenset()
    # The agent of the current process; the agents that are not installed; and the agents (name) that got the prompt of
    # an ask (id), which may have had an effect.
    serving: str = ""
    absent: frozenset[str] = frozenset()
    got: frozenset[tuple[str, str]] = frozenset()
    # The state that the next host gets, from the hand-over of the process on.
    held: Session | None = None

    def spend(self, name: str) -> World:
        index = _INDEX[name]
        return replace(self, budget=(*self.budget[:index], self.budget[index] - 1, *self.budget[index + 1 :]))


class Move(msgspec.Struct, frozen=True):
    """One possible event.

    `by`: "world" (time, the log, the process), "agent", or "other" (a party that need not act). "late": the fact has
    happened before and is delivered again.
    """

    by: str
    fact: Fact | None
    world: World


# -- possible events -------------------------------------------------------------------------------------------------
def moves(scenario: Scenario, world: World) -> Iterator[Move]:
    if world.is_finished:
        # The session has left its host. Another host continues from the log alone.
        if world.session.mode is Mode.LEFT and world.budget[_INDEX["claim"]]:
            if world.session.is_handed_over:
                yield _adopted(scenario, world.spend("claim"))
            yield _crash(scenario, world.spend("claim"))
        return
    if world.session.is_handing or world.session.is_handed_over:
        yield from _by_hand_over(world)
        return
    urgent = next(_urgent(scenario, world), None)
    if urgent is not None:
        yield urgent
        return
    budget = dict(zip(BUDGETS, world.budget, strict=True))
    yield from _by_callers(scenario, world, budget)
    yield from _by_log(world, budget)
    yield from _by_process(world, budget)
    yield from _by_agent(scenario, world, budget)
    yield from _by_budgets(scenario, world, budget)
    if budget["crash"] and world.session.store is not Store.LOST:
        yield _crash(scenario, world.spend("crash"))
    for subject in sorted(world.timers, key=_timer_order):
        # An agent that names prompts does so when it reads one: a prompt that it has not read is not late.
        is_early = subject[0] is Timer.SETTLE and (
            any(frame.startswith(b"P") for frame in world.agent.inbox) or any(b"over" in o for o in world.agent.owed)
        )
        if not is_early or world.has_exited:
            yield Move("world", TimerFired(AT, subject), _past_deadline(world, subject))
    if budget["late"]:
        for fact in sorted(world.late, key=repr):
            after = replace(world.spend("late"), late=frozenset())
            yield Move("late", fact, _at_wall(after, fact.subject) if isinstance(fact, TimerFired) else after)


def _past_deadline(world: World, subject: Subject) -> World:
    """The world after a timer. After its deadline, an ask is not wanted.

    A session that has left does not end the ask: the next owner does.
    """
    timer, id = subject
    is_deadline = timer is Timer.DEADLINE and world.session.mode not in OVER
    unwanted = world.unwanted | {id} if is_deadline else world.unwanted
    return replace(_at_wall(world, subject), timers=world.timers - {subject}, unwanted=unwanted)


def _at_wall(world: World, subject: Subject) -> World:
    """The world after a timer. The driver fires the timer of a limit when the wall clock has passed its end."""
    timer, end = subject
    is_limit = timer in (Timer.LIMIT, Timer.FALLBACK) and not end.startswith("after")
    return replace(world, wall=max(world.wall, float(end.split()[-1]))) if is_limit else world


def _is_limited(scenario: Scenario, world: World, ledger: Ledger) -> bool:
    """Whether nothing may be sent, because the account is limited."""
    until = ledger.limited
    waits = scenario.config.get("on_limit", "fail") != "fail" and world.session.mode is Mode.OPEN
    return waits and until is not None and until > world.wall and repr(until) not in world.given_up


def _timer_order(subject: Subject) -> tuple[str, str]:
    return subject[0].value, subject[1]


def _urgent(scenario: Scenario, world: World) -> Iterator[Move]:
    eager = scenario.eager
    if "log" in eager and world.unlogged:
        yield from _by_log(world, {})
    if "pipe" in eager and world.is_writing and not world.has_exited:
        yield Move("world", ProcessReported(AT, world.process, FrameWritten()), replace(world, is_writing=False))
    if "start" in eager and world.session.process.phase is ProcessPhase.STARTING and not world.is_told_to_stop:
        yield from _by_process(world, {})
        for move in _by_agent(scenario, world, {}):
            yield replace(move, by="world")


def _by_callers(scenario: Scenario, world: World, budget: Mapping[str, int]) -> Iterator[Move]:
    for index, ask in enumerate(scenario.asks):
        life = world.asks[index]
        if life == Life.UNASKED:
            yield Move("other", Asked(AT, ask), replace(world, asks=_with(world.asks, index, Life.ASKED)))
            continue
        if budget["withdraw"]:
            unwanted = replace(world.spend("withdraw"), unwanted=world.unwanted | {ask.id})
            yield Move("other", AskWithdrawn(AT, ask.id), unwanted)
        if budget["interrupt"] and ask.id not in dict(world.interrupts):
            yield Move("other", InterruptAsked(AT, ask.id, f"stop-{ask.id}"), _interrupted(world, ask.id))
        if budget["move"]:
            yield Move("other", AskMoved(AT, ask.id), world.spend("move"))
        if budget["edit"] and world.edit != Life.ASKED:
            edited = replace(world.spend("edit"), edit=Life.ASKED)
            yield Move("other", AskEdited(AT, "edit", ask.id, prompt="another"), edited)
            for priority in {BACKGROUND, INTERACTIVE} - {ask.priority}:
                yield Move("other", AskEdited(AT, "edit", ask.id, priority=priority), edited)
    own = world.session.own
    if own is not None and budget["interrupt"] and own.id not in dict(world.interrupts):
        yield Move("other", InterruptAsked(AT, own.id, f"stop-{own.id}"), _interrupted(world, own.id))
    for index, (hold, priority) in enumerate(scenario.holds):
        if world.holds[index] == Life.UNASKED:
            held = replace(world, holds=_with(world.holds, index, Life.ASKED))
            yield Move("other", HoldAsked(AT, hold, priority), held)
        elif budget["release"] and world.holds[index] in (Life.ASKED, Life.ACCEPTED):
            released = replace(world.spend("release"), holds=_with(world.holds, index, Life.OVER))
            yield Move("other", HoldReleased(AT, hold), released)
    if world.question:
        is_about_budget = world.session.budget_question is not None
        for decision in money.ANSWERS if is_about_budget else (DENIED,):
            yield Move("other", QuestionAnswered(AT, world.question, decision), world)
    if budget["setting"]:
        changed = replace(world.spend("setting"), change=Life.ASKED)
        yield Move("other", SettingAsked(AT, "change", "model", "large"), changed)
    if budget["reconfigure"]:
        yield Move("other", Reconfigured(AT, world.session.config, True), world.spend("reconfigure"))
        if scenario.agents:
            # Without the other agents.
            first = world.session.config.roster[0]
            alone = replace(first, roster=(first,))
            yield Move("other", Reconfigured(AT, alone, True), world.spend("reconfigure"))
    if world.undecided:
        key = world.undecided
        decided = replace(world, undecided="")
        yield Move("other", LimitDecided(AT, key, fails=False), decided)
        yield Move("other", LimitDecided(AT, key, fails=True), replace(decided, given_up=world.given_up | {key}))
    if budget["account"]:
        for agent in scenario.agents or ("",):
            for until in (9.0, 20.0, None):
                yield Move("other", AccountLimited(AT, until, agent), world.spend("account"))
    if budget["evict"]:
        yield Move("other", EvictAsked(AT), world.spend("evict"))
    if budget["drain"]:
        yield Move("other", DrainAsked(AT), world.spend("drain"))
    if budget["close"]:
        yield Move("other", CloseAsked(AT), world.spend("close"))
    if budget["leave"]:
        yield Move("other", LeaveAsked(AT), world.spend("leave"))
    if budget["hand"]:
        yield Move("other", HandOverAsked(AT, AT + 1.0), world.spend("hand"))
    if budget["hurry"]:
        # A deadline in the future, and one that is reached already.
        yield Move("other", LeaveAsked(AT, AT + 1.0), world.spend("hurry"))
        yield Move("other", LeaveAsked(AT, AT), world.spend("hurry"))


def _by_budgets(scenario: Scenario, world: World, budget: Mapping[str, int]) -> Iterator[Move]:
    caps = (scenario.cap,)
    for key in sorted(world.claims):
        decided = replace(world, claims=world.claims - {key})
        granted = replace(decided, granted=world.granted | {key})
        yield Move("world", BudgetClaimed(AT, key, True, world.session.shared), granted)
        if budget["refuse"] and scenario.cap.concerns(scenario.by_id[key.split("#")[0]].caller):
            yield Move("other", BudgetClaimed(AT, key, False, caps), decided.spend("refuse"))
    if world.session.shared:
        # The next day.
        yield Move("world", BudgetChanged(AT, ()), world)
    elif budget["reach"]:
        yield Move("other", BudgetChanged(AT, caps), world.spend("reach"))


def _interrupted(world: World, id: str) -> World:
    pending = (*world.interrupts, (id, Life.ASKED))
    return replace(world.spend("interrupt"), interrupts=pending, unwanted=world.unwanted | {id})


def _by_log(world: World, budget: Mapping[str, int]) -> Iterator[Move]:
    if not world.unlogged:
        return
    first, *rest = world.unlogged
    after = replace(world, unlogged=tuple(rest), durable=first.ledger, durable_mirror=first.mirror)
    yield Move("world", Committed(AT, first.seq), after)
    lost = replace(world, unlogged=(), ledger=world.durable, mirror=world.durable_mirror)
    if budget.get("fail"):
        yield Move("other", AppendFailed(AT, NO_STORE), lost.spend("fail"))
    if budget.get("fenced"):
        yield Move("other", AppendFailed(AT, NO_STORE, is_final=True), lost.spend("fenced"))


def _by_hand_over(world: World) -> Iterator[Move]:
    """The driver holds everything back but the log. If the log fails, it gets the process back first."""
    budget = dict(zip(BUDGETS, world.budget, strict=True))
    if world.session.is_handed_over:
        yield from _by_log(world, budget)
        return
    yield from _by_log(world, {})
    number = world.process
    yield Move("world", HandedOver(AT, number, {"hold": "h", "host": 7, "until": 9.0}), world)
    if budget["unhand"]:
        failed = replace(world.spend("unhand"), held=None)
        yield Move("other", HandOverFailed(AT, number, is_final=True), failed)
        yield Move("other", HandOverFailed(AT, number, is_final=False), failed)


def _adopted(scenario: Scenario, world: World) -> Move:
    """The next host takes the process over, and continues from what the old one has encoded."""
    assert world.held is not None
    entries = [kinds.entry(None, kinds.PROCESS_ADOPTED, process=world.process, pid=77, hold="h", born=None)]
    past = _folded(world.durable_mirror, entries)
    check(past.held is None, "G9", "the process is taken over, and still held")
    ledger = world.durable
    for entry in entries:
        ledger = fold(ledger, entry, lambda granted, other: False)
    session = replace(world.held, head=past.session.head, committed=past.session.head)
    # A log that has failed may lack the rest: see `_check_questions`.
    if projection(session)[:3] != projection(past.session)[:3]:
        raise Violation("G9", f"handed over {projection(session)}, and in the log {projection(past.session)}")
    asks = tuple(_life_after(ledger, ask.id, life) for ask, life in zip(scenario.asks, world.asks, strict=True))
    is_about_budget = session.budget_question is not None and session.budget_question.id == world.question
    found = replace(
        world,
        session=session,
        asks=asks,
        mirror=past,
        durable_mirror=past,
        ledger=ledger,
        durable=ledger,
        timers=frozenset(subject for subject in world.timers if subject[0] not in (Timer.LEAVE, Timer.BACKGROUND)),
        interrupts=tuple((id, Life.OVER) for id, _ in world.interrupts),
        # `Begun` shows this one again. The driver shows those of the agent.
        question="" if is_about_budget else world.question,
        late=frozenset(),
        is_finished=False,
        held=None,
    )
    return Move("other", Begun(AT), found)


def _crash(scenario: Scenario, world: World) -> Move:
    """The host dies, with all pending appends and its callers. Another host settles the log and continues."""
    entries = crash_recovery.settle(world.durable_mirror)
    past = _folded(world.durable_mirror, entries)
    ledger = world.durable
    for entry in entries:
        ledger = fold(ledger, entry, lambda granted, other: False)
    session = past.session
    # The driver does this with the log that it finds.
    about_budget = budget_gate.kept(past)
    queue = ask_queue.restart_waits(session.queue, AT, AT)
    session = replace(session, queue=queue, budget_question=about_budget)
    is_settled = session.turn is None and session.own is None and not ledger.turn and ledger.own is None
    check(is_settled, "G2", f"settled, and {session.turn or session.own} is open")
    waiting = [question.id for question in past.questions if about_budget is None or question.id != about_budget.id]
    check(not waiting, "G2", f"settled, and {waiting} wait for an answer")
    check(ledger.waiting == world.durable.waiting, "G7", f"{world.durable.waiting} waited, and now {ledger.waiting}")
    check(not crash_recovery.settle(past), "G2", "what is settled is settled again")
    asks = tuple(_life_after(ledger, ask.id, life) for ask, life in zip(scenario.asks, world.asks, strict=True))
    is_closed = session.mode is Mode.CLOSED
    check(not is_closed or not entries, "G2", f"a closed session has to be settled: {entries}")
    found = replace(
        world,
        session=session,
        agent=toy.Agent(),
        asks=asks,
        holds=tuple(life if life == Life.UNASKED else Life.OVER for life in world.holds),
        mirror=past,
        durable_mirror=past,
        ledger=ledger,
        durable=ledger,
        unlogged=(),
        process=session.process.number,
        **dict.fromkeys(("is_asked_for", "is_alive", "has_exited", "is_told_to_stop", "is_writing", "is_cut"), False),
        timers=frozenset(),
        interrupts=tuple((id, Life.OVER) for id, _ in world.interrupts),
        unwanted=frozenset(),
        epoch=world.epoch + 1,
        question="",
        untold=frozenset(),
        undecided="",
        given_up=frozenset(),
        claims=frozenset(),
        change=Life.UNASKED if world.change == Life.UNASKED else Life.OVER,
        edit=Life.UNASKED,
        # A caller that saw the question elsewhere can still answer it.
        late=frozenset(
            fact
            for fact in _closed(world, world.question).late
            if isinstance(fact, QuestionAnswered) and (about_budget is None or fact.question != about_budget.id)
        ),
        is_finished=is_closed,
    )
    return Move("other", None if is_closed else Begun(AT), found)


def _closed(world: World, question: str) -> World:
    """Close the question. A caller that saw it may still answer."""
    if question and world.budget[_INDEX["late"]]:
        world = replace(world, late=world.late | {QuestionAnswered(AT, question, DENIED)})
    return replace(world, question="")


def _life_after(ledger: Ledger, id: str, life: int) -> int:
    """State of an ask after its host died. The caller died too, so an ask that was not durable was never made."""
    if life in (Life.UNASKED, Life.REJECTED):
        return life
    return Life.OVER if id in ledger.ended else Life.ACCEPTED if id in ledger.queued else Life.REJECTED


def _folded(past: SessionHistory, entries: Iterable[Entry]) -> SessionHistory:
    try:
        return pasts.fold(past, entries)
    except AssertionError as exc:
        raise Violation("replay", f"{entries}: {exc}") from exc


def _by_process(world: World, budget: Mapping[str, int]) -> Iterator[Move]:
    number = world.process
    if world.is_asked_for and (world.serving in world.absent or budget.get("uninstalled")):
        is_absent = world.serving in world.absent
        gone = _gone(world if is_absent else world.spend("uninstalled"))
        absent = replace(gone, absent=world.absent | {world.serving})
        missing = ProcessReported(AT, number, StartFailed(NOT_INSTALLED))
        yield Move("world" if is_absent else "other", missing, absent)
    if world.is_asked_for and world.serving not in world.absent:
        started = ProcessReported(AT, number, Started(77, AT), epoch=world.epoch)
        yield Move("world", started, replace(world, is_asked_for=False, is_alive=True))
        if world.is_told_to_stop or budget.get("unstartable"):
            gone = _gone(world if world.is_told_to_stop else world.spend("unstartable"))
            yield Move(
                "world" if world.is_told_to_stop else "other", ProcessReported(AT, number, StartFailed(NO_START)), gone
            )
    if world.is_alive and world.is_told_to_stop:
        exited = replace(world, is_alive=False, has_exited=True)
        yield Move("world", ProcessReported(AT, number, Exited(None, 15, AT)), exited)
    elif world.is_alive and budget.get("exit"):
        exited = replace(world.spend("exit"), is_alive=False, has_exited=True)
        yield Move("other", ProcessReported(AT, number, Exited(1, None, AT)), exited)
    if world.has_exited:
        yield Move("world", ProcessReported(AT, number, ProcessGone()), _gone(world))
    elif world.is_sweeping:
        yield Move("world", ProcessReported(AT, number, SweepEnded(LEFT)), replace(world, is_sweeping=False))
    if world.is_writing and world.is_alive:
        yield Move("world", ProcessReported(AT, number, FrameWritten()), replace(world, is_writing=False))
        if budget.get("cut"):
            unread = world.agent.inbox[:-1]
            cut = replace(world.spend("cut"), is_writing=False, is_cut=True, agent=replace(world.agent, inbox=unread))
            yield Move("other", ProcessReported(AT, number, WriteFailed(BROKEN_PIPE)), cut)


def _gone(world: World) -> World:
    if dict(zip(BUDGETS, world.budget, strict=True))["late"]:
        number = world.process
        facts: set[Fact] = {
            ProcessReported(AT, number, ProcessGone()),
            ProcessReported(AT, number, Exited(1, None, AT)),
            ProcessReported(AT, number, Started(77, AT)),
            ProcessReported(AT, number, FrameWritten()),
            ProcessReported(AT, number, WriteFailed(BROKEN_PIPE)),
            ProcessReported(AT, number, StartFailed(NO_START)),
            ProcessReported(AT, number, SweepEnded(LEFT)),
        }
        if world.agent.said:
            facts.add(_frames(world, (world.agent.said,)))
        world = replace(world, late=world.late | facts)
    return replace(
        world,
        agent=toy.Agent(),
        is_asked_for=False,
        is_alive=False,
        has_exited=False,
        is_told_to_stop=False,
        is_writing=False,
        is_cut=False,
        is_sweeping=False,
    )


def _by_agent(scenario: Scenario, world: World, budget: Mapping[str, int]) -> Iterator[Move]:
    if not world.is_alive and not world.has_exited:
        return
    # After its exit the agent reads nothing, but its last lines are still on their way.
    agent = world.agent if world.is_alive else replace(world.agent, inbox=())
    for said in toy.moves(agent, scenario.manners, budget):
        if said.struck is not None:
            _check_struck(scenario, world, *said.struck)
        after = replace(world, agent=said.agent)
        if said.cost:
            after = after.spend(said.cost)
        if said.cost == "tool":
            after = replace(after, tooled=after.tooled | set(agent.current))
        yield Move("other" if said.cost else "agent", _frames(world, said.lines) if said.lines else None, after)


def _check_struck(scenario: Scenario, world: World, request: str, current: tuple[str, ...]) -> None:
    """Check that an interrupt of one turn does not end another turn."""
    id = request.removeprefix("interrupt-").split("#")[0]
    ask = scenario.by_id.get(id)
    by_itself = {toy.OWN, *(other.ref for other in scenario.asks if other.on_busy == "steer")}
    if by_itself & set(current) or len(current) > 1 or ask is None:
        # One of the two turns is agent-initiated, or the turn has several prompts. The agent then has the prompt in its
        # queue and begins it at any time, so the session cannot know which turn the interrupt will hit.
        return
    is_same = all(ref[:-4] == ask.ref[:-4] for ref in current)
    check(is_same, "G4", f"{request} struck {current}")


@functools.cache
def _frames_of(process: int, lines: tuple[bytes, ...], agent: str) -> FramesRead:
    dialect = toy.ToyDialect()
    meanings = tuple((i, meaning) for i, line in enumerate(lines) if (meaning := dialect.read(line)) is not None)
    if agent:  # Each agent has its own conversation.
        meanings = tuple((i, _in_conversation(meaning, f"talk of {agent}")) for i, meaning in meanings)
    return FramesRead(AT, process, lines, meanings)


def _in_conversation(meaning: Meaning, conversation: str) -> Meaning:
    if isinstance(meaning, TurnOpened) and meaning.conversation is not None:
        return replace(meaning, conversation=conversation)
    return meaning


def _frames(world: World, lines: tuple[bytes, ...]) -> FramesRead:
    return _frames_of(world.process, lines, world.serving)


def _with(lives: tuple[int, ...], index: int, life: int) -> tuple[int, ...]:
    return (*lives[:index], life, *lives[index + 1 :])


# -- apply a move and check its effects ------------------------------------------------------------------------------
def take(scenario: Scenario, move: Move) -> tuple[World, list[Effect]]:
    """Return the world after the move, or raise `Violation`."""
    world, fact = move.world, move.fact
    if fact is None:
        return world, []
    before = world.session
    try:
        session, effects = step(before, fact)
    except Violation:
        raise
    except Exception as exc:
        raise Violation("total", f"{type(exc).__name__}: {exc}") from exc
    if move.by == "late" or _is_too_late(scenario, world, fact):
        _check_late(world, fact, effects)
    world = replace(world, session=session)
    for effect in effects:
        world = _perform(scenario, world, fact, effect)
    _check_state(scenario, world, before)
    _check_drain(before, session, fact)
    if effects:
        check(counts_plain_frames(session, AT), "core", "a frame without a meaning needs a step")
    return world, effects


def _is_too_late(scenario: Scenario, world: World, fact: Fact) -> bool:
    """Whether the fact is a caller's request about an ask that is over."""
    match fact:
        case AskWithdrawn(turn=id) | InterruptAsked(turn=id) | AskMoved(turn=id):
            index = next((i for i, ask in enumerate(scenario.asks) if ask.id == id), None)
            return index is not None and world.asks[index] in (Life.OVER, Life.REJECTED)
        case _:
            return False


def _check_late(world: World, fact: Fact, effects: list[Effect]) -> None:
    if isinstance(fact, TimerFired) and fact.subject in world.timers:
        return  # The timer was started again, so this fact is not late.
    for effect in effects:
        if not isinstance(effect, GiveReceipt | CancelTimer):
            raise Violation("G4", f"{fact} is late, and does {effect}")


def _perform(scenario: Scenario, world: World, fact: Fact, effect: Effect) -> World:
    if world.is_finished:
        raise Violation("G2", f"after Finish: {effect}")
    match effect:
        case Append(entries=entries):
            return _append(scenario, world, fact, tuple(entries))
        case WriteFrame(process=process, data=data):
            return _write(scenario, world, process, data)
        case StartTimer(subject=subject):
            return replace(world, timers=world.timers | {subject})
        case CancelTimer(subject=subject):
            late = world.late
            if world.budget[_INDEX["late"]] and subject in world.timers:
                late |= {TimerFired(AT, subject)}
            return replace(world, timers=world.timers - {subject}, late=late)
        case StartProcess(process=process, agent=agent, conversation=conversation):
            is_own = not agent or conversation in (None, f"talk of {agent}")
            check(is_own, "fallback", f"{agent} resumes the conversation {conversation!r} of another agent")
            is_there = world.is_asked_for or world.is_alive or world.has_exited
            check(not is_there, "G1", "a second process is started")
            check(process > world.process, "G4", "the number of a process is used twice")
            return replace(world, process=process, is_asked_for=True, epoch=world.epoch + 1, serving=agent)
        case StopProcess(process=process):
            check(process == world.process, "G4", f"{effect} and {world.process} is the one that runs")
            check(not world.is_told_to_stop, "G3", "it is told to stop twice")
            return replace(world, is_told_to_stop=True)
        case HandOver(process=process):
            check(process == world.process and world.is_alive, "G9", "a process that is not there is handed over")
            check(not world.is_writing, "G3", "handed over in the middle of a frame")
            return replace(world, held=check_held(world.session))
        case SweepTools(process=process):
            check(process == world.process, "G4", f"{effect} and {world.process} is the one that runs")
            check(world.is_alive and not world.is_sweeping, "G6", "it is swept twice at once, or after its end")
            return replace(world, is_sweeping=True)
        case AskHuman(question=question):
            check(not world.question, "G2", "the question is asked twice")
            # All questions about the budget are the same question: see `budget_gate`.
            is_new = question not in world.seen or question.startswith("q-0.")
            check(is_new, "G4", f"{question} was the name of another question")
            return replace(world, question=question, seen=world.seen | {question})
        case ReportIdle():
            is_needless = not world.ledger.open or money.waits(world.session, world.ledger)
            waits = world.session.limit_wait is not None and not world.ledger.turn and world.ledger.own is None
            if not (is_needless or waits):
                raise Violation("G6", f"nobody needs the process, and {world.ledger.open} are open")
            check(not world.agent.has_task or world.agent.owed, "G6", "nobody needs the process, and a task runs in it")
            return world
        case ClaimBudget(key=key):
            check(key not in world.granted, "budget", f"{key} claims twice")
            return replace(world, claims=world.claims | {key})
        case ReportReady() | AskToSave() | HoldConversation() | ReportLimit():
            return world
        case WaitUntil(subject=subject):
            return replace(world, timers=world.timers | {subject})
        case CallOnLimit(key=key):
            return replace(world, undecided=key, given_up=world.given_up - {key})
        case CloseQuestion(question=question):
            check(world.question == question, "G2", f"{question} ends, and nobody asked it")
            money.check_close(world.session, world.ledger, question, fact)
            return replace(_closed(world, question), untold=world.untold | {question})
        case TellAnswer(question=question, error=error):
            check(question in world.untold, "G2", f"the answer to {question} is told, and it is not over, or twice")
            is_open = any(waiting.id == question for waiting in world.durable_mirror.questions)
            check(error is not None or not is_open, "G7", f"the answer to {question} is told before it is durable")
            return replace(world, untold=world.untold - {question})
        case _:
            return _answer(scenario, world, effect)


def _answer(scenario: Scenario, world: World, effect: Effect) -> World:
    """Check a result for a caller: each comes once."""
    match effect:
        case Accept(turn=id):
            check(id in world.durable.queued, "G7", f"{id} is accepted before it is durable")
            return _settle_ask(scenario, world, id, Life.ASKED, Life.ACCEPTED)
        case Reject(turn=id):
            return _settle_ask(scenario, world, id, Life.ASKED, Life.REJECTED)
        case Resolve(turn=id, outcome=outcome):
            _check_outcome(scenario, world, id, outcome)
            return _settle_ask(scenario, world, id, Life.ACCEPTED, Life.OVER)
        case LeaveInLog(turn=id):
            waiting = [other.id for other in world.durable.waiting]
            check(world.session.mode is Mode.LEFT, "G2", f"{id} is passed on by who has not left")
            if world.session.is_handed_over:
                check(id in world.durable.open, "G9", f"{id} is passed on, and is not open in the log")
                return _settle_ask(scenario, world, id, Life.ACCEPTED, Life.PASSED_ON)
            check(id in waiting, "G2", f"{id} is passed on, and in the log only {waiting} wait")
            # An ask that shares a turn is passed on with the other asks of that turn.
            sharing = ask_queue.find(world.session.queue, id)
            is_wanted = sharing is not None and any(ask.id not in world.unwanted for ask in sharing.asks)
            check(is_wanted, "G2", f"{id} is passed on, and nobody wants it")
            return _settle_ask(scenario, world, id, Life.ACCEPTED, Life.PASSED_ON)
        case GiveReceipt(interrupt=interrupt):
            id = interrupt.removeprefix("stop-")
            check((id, Life.ASKED) in world.interrupts, "G2", f"a receipt that nobody waits for: {interrupt}")
            given = tuple((other, Life.OVER if other == id else life) for other, life in world.interrupts)
            return replace(world, interrupts=given)
        case SettingTaken(change="edit"):
            check(world.edit == Life.ASKED, "G2", "an edit is answered twice")
            return replace(world, edit=Life.OVER)
        case SettingTaken():
            check(world.change == Life.ASKED, "G2", "a setting is taken twice")
            return replace(world, change=Life.OVER)
        case GrantHold(hold=hold):
            index = next(i for i, (id, _) in enumerate(scenario.holds) if id == hold)
            check(world.holds[index] in (Life.ASKED, Life.ACCEPTED), "G2", f"{hold} is granted and nobody wants it")
            return replace(world, holds=_with(world.holds, index, Life.ACCEPTED))
        case EndHold(hold=hold):
            index = next(i for i, (id, _) in enumerate(scenario.holds) if id == hold)
            check(world.holds[index] in (Life.ASKED, Life.ACCEPTED), "G2", f"{hold} ends twice")
            return replace(world, holds=_with(world.holds, index, Life.OVER))
        case Finish():
            check(not _open_asks(world), "G2", f"finished, and asks are open: {world.asks}")
            check(all(life == Life.OVER for _, life in world.interrupts), "G2", "finished, and a receipt is owed")
            check(not any(life in (Life.ASKED, Life.ACCEPTED) for life in world.holds), "G2", "a hold has no end")
            check(world.change != Life.ASKED, "G2", "finished, and a setting is not answered")
            check(world.edit != Life.ASKED, "G2", "finished, and an edit is not answered")
            check(not world.untold, "G2", f"finished, and nobody was told the answer to {world.untold}")
            is_there = world.is_asked_for or world.is_alive or world.has_exited
            is_given = world.session.is_handed_over
            check(is_there == is_given, "G6", "finished, and the process is there, or was there to be handed over")
            if is_given:
                check(world.durable_mirror.held is not None, "G9", "handed over, and the log does not say so")
            elif world.session.mode is Mode.CLOSED and world.session.store is Store.WORKING:
                asked = [question.id for question in world.durable_mirror.questions]
                check(not asked, "G2", f"closed, and {asked} wait for an answer")
            elif world.session.mode is Mode.LEFT:
                _check_left(scenario, world)
            return replace(world, is_finished=True)
        case _:
            raise AssertionError(f"no such effect: {effect}")


def _check_left(scenario: Scenario, world: World) -> None:
    """The next host finds nothing to settle, and no ask whose caller got another result."""
    if world.session.store is not Store.WORKING:
        may_go = world.session.store is Store.LOST or world.session.is_overdue
        check(may_go, "G2", "it has left, and the log does not have what callers were told")
        return
    found = world.durable_mirror
    about_budget = world.session.budget_question
    kept = [] if about_budget is None else [about_budget.id]
    has_asked = [question.id for question in found.questions] != kept
    is_settled = found.session.turn is None and found.session.own is None and not has_asked
    if not is_settled or world.durable.own is not None:
        raise Violation("G2", f"it has left, and something is open: {found}")
    check(found.session.mode is Mode.OPEN, "replay", f"it has left, and the log says {found.session.mode}")
    lives = zip(scenario.asks, world.asks, strict=True)
    passed_on = frozenset(ask.id for ask, life in lives if life == Life.PASSED_ON)
    check(world.durable.open == passed_on, "G2", f"{world.durable.open} wait in the log, and {passed_on} were told so")


def _settle_ask(scenario: Scenario, world: World, id: str, life: int, following: int) -> World:
    index = next(i for i, ask in enumerate(scenario.asks) if ask.id == id)
    check(world.asks[index] == life, "G2", f"{id} is {world.asks[index]} and becomes {following}")
    return replace(world, asks=_with(world.asks, index, following))


def _check_outcome(scenario: Scenario, world: World, id: str, outcome: Outcome) -> None:
    if outcome.durable:
        check(id in world.durable.ended, "G7", f"{id} has its outcome before it is durable")
    text = outcome.text
    if outcome.kind is Kind.DONE:
        # `_check_end` looks for the text of agent-initiated turns where the turn ends.
        is_its_own = text is not None and (text == toy.OWN or text[:-4] in _answers_to(scenario, id))
        check(is_its_own, "G4", f"{id} is done with the answer {text!r}")
    elif outcome.kind in (Kind.INTERRUPTED, Kind.PREEMPTED) and scenario.acknowledges:
        check(text is None or text[-1] in "!?", "G4", f"{id} had finished with {text!r} and is called {outcome.kind}")


def _answers_to(scenario: Scenario, id: str) -> set[str]:
    """Prefixes of the answers that may belong to this ask: its own, and those of asks that may share a turn with it."""
    ask = scenario.by_id[id]
    shares = ask.on_busy in ("steer", "collect")
    return {other.ref[:-4] for other in scenario.asks if other is ask or shares or other.on_busy == "steer"}


def _write(scenario: Scenario, world: World, process: int, data: bytes) -> World:
    check(process == world.process and world.is_alive, "G3", f"{data} is written to a process that is not there")
    check(not world.is_writing, "G3", f"{data} is written into a frame")
    check(not world.is_cut, "G3", f"{data} is written after a cut frame")
    check(not world.is_told_to_stop, "G3", f"{data} is written to a process that was told to stop")
    agent = world.agent
    if data.startswith(b"P"):
        check(not world.is_sweeping, "G6", f"{data} is written beside what the turn before has left running")
        ref = data.split()[1].decode()
        turn = world.ledger.turn
        ask = next(ask for ask in scenario.asks if ask.ref[:-4] == ref[:-4])
        check(any(member.id == ask.id for member in turn), "G3", f"{data} is written and {turn} was granted")
        check(ref not in world.sent, "G4", f"{data} is written again: an agent may drop what it has seen")
        money.check_prompt(world.session, world.ledger, world.granted, ask.caller)
        world = replace(world, sent=world.sent | {ref})
        if turn[0].id == ask.id and len(turn) == 1:
            check(
                agent.is_idle(acknowledges=scenario.acknowledges),
                "G1",
                f"{data} is written while the agent is at work: {agent}",
            )
        is_new = turn[0].id == ask.id
        is_limited = _is_limited(scenario, world, world.ledger)
        check(not is_new or not is_limited, "limit", f"{data} is sent, and the account is limited")
        check(not is_new or world.session.mode in (Mode.OPEN, Mode.DRAINING), "G2", f"{data} begins, and it is leaving")
        is_durable = any(member.id == ask.id for member in world.durable.turn)
        check(is_durable, "G7", f"{data} is written before the intent is durable")
        if scenario.agents:
            _check_agent(world, ask.id, is_new=is_new)
            world = replace(world, got=world.got | {(ask.id, world.serving)})
    return replace(world, is_writing=True, agent=replace(agent, inbox=(*agent.inbox, data)))


def _check_agent(world: World, id: str, *, is_new: bool) -> None:
    """Check that a prompt goes to the right agent: not to another one than before, and not to a limited one."""
    agents = {agent for other, agent in world.got if other == id}
    check(agents <= {world.serving}, "fallback", f"{id} is sent to {world.serving}, and {agents} had it")
    ledger, wall = world.ledger, world.wall
    limits = {**dict(ledger.parked), world.serving: ledger.limited}
    # A reopen may have removed an agent.
    names = [config.agent for config in world.session.config.roster]
    free = [agent for agent in names if agent not in world.absent and (limits.get(agent) or 0.0) <= wall]
    is_wrong = is_new and not agents and world.session.mode is Mode.OPEN and world.serving not in free
    check(
        not is_wrong or not free, "fallback", f"{id} is sent to {world.serving}, which is limited, and {free} are not"
    )


def _append(scenario: Scenario, world: World, fact: Fact, entries: tuple[Any, ...]) -> World:
    session = world.session

    def may_pass(granted: str, other: str) -> bool:
        if other in session.collecting:
            return True
        if any(use.concerns(scenario.by_id[other].caller) for use in session.shared):
            return True
        hold = session.hold
        if hold is None or scenario.by_id[other].hold == hold.id:
            return False
        return _class_of(scenario, world, other) <= hold.priority

    ledger, mirror = world.ledger, world.mirror
    boundary = -1
    for index, entry in enumerate(entries):
        id, kind, data = entry
        if kind == kinds.UPDATE and isinstance(toy.ToyDialect().read(data), TurnOver):
            boundary = index
        if kind == kinds.TURN_ENDED:
            is_said = isinstance(fact, FramesRead) and any(isinstance(m, TurnOver) for _, m in fact.meanings)
            check(not is_said or boundary >= 0, "log", f"{id} ended before its boundary was logged")
            _check_end(scenario, world, fact, id, data)
        if kind == kinds.TURN_INTERRUPTED and b'"preempt"' in data:
            victim = _class_of(scenario, world, id)
            urgent = (*ledger.waiting, *(hold for hold in session.queue if isinstance(hold, Hold)))
            is_due = any(waiting.priority > max(victim, 0) for waiting in urgent)
            check(is_due, "G5", f"{id} is told to give way, to nobody more urgent")
            is_limited = _is_limited(scenario, world, ledger)
            check(not is_limited, "limit", f"{id} is told to give way to an ask that cannot be sent")
        if kind == kinds.TURN_REQUEUED and b'"limit"' in data:
            _check_retry(scenario, world, id)
            # The turn had no effect, so another agent may get it.
            world = replace(world, got=frozenset(pair for pair in world.got if pair[0] != id))
        if kind == kinds.SESSION_FELL_BACK and b'"return"' not in data:
            is_between = not ledger.turn and ledger.own is None
            check(is_between, "fallback", f"the agent changes in the middle of {ledger.turn or ledger.own}")
            is_there = world.is_asked_for or world.is_alive or world.has_exited
            check(not is_there, "fallback", "the agent changes while the process of the other one is there")
        ledger = fold(ledger, entry, may_pass)
    mirror = _folded(mirror, entries)
    unlogged = (*world.unlogged, Unlogged(session.head, ledger, mirror))
    # Appends without waiting effects between two others need no separate states.
    awaited = {seq for seq, _ in session.deferred}
    unlogged = tuple(u for u in unlogged if u.seq in awaited or u is unlogged[-1])
    return replace(world, ledger=ledger, mirror=mirror, unlogged=unlogged)


def _class_of(scenario: Scenario, world: World, id: str) -> int:
    members = (*world.ledger.turn, *world.ledger.waiting)
    asked = 0 if id not in scenario.by_id else scenario.by_id[id].priority
    return next((member.priority for member in members if member.id == id), asked)


def _check_retry(scenario: Scenario, world: World, id: str) -> None:
    """Check that an ask which met a limit is asked again only if nothing happened, and if its caller wants it."""
    ref = scenario.by_id[id].ref[:-4]
    check(all(other[:-4] != ref for other in world.tooled), "limit", f"{id} is asked again, and a tool ran in its turn")
    check(id not in world.unwanted, "limit", f"{id} is asked again, and nobody wants it")


def _check_end(scenario: Scenario, world: World, fact: Fact, id: str, data: bytes) -> None:
    """Check the reason of an end against the requests of the callers."""
    ask = scenario.by_id.get(id)
    if ask is None:
        return
    # A process that exits before it can name the turn of its boundary has sent a boundary anyway: it is believed.
    is_going = world.has_exited or (isinstance(fact, ProcessReported) and isinstance(fact.report, ProcessGone))
    if b'"outcome":"done"' in data and b'"text":"own' in data and not is_going:
        raise Violation("G4", f"{id} is done with what the agent did by itself")
    ledger = world.ledger
    together = {id, *(m.id for m in ledger.turn), *(m.id for m in ledger.waiting if m.leader is not None)}
    asked = [other for other, life in zip(scenario.asks, world.asks, strict=True) if life != Life.UNASKED]
    if b'"outcome":"interrupted"' in data:
        by_other = any(other.on_busy == "interrupt" and other.priority >= ask.priority for other in asked)
        is_wanted = together & world.unwanted or world.session.mode is not Mode.OPEN
        has_clock = bool(scenario.config.get("clocks")) or world.session.config.on_budget != "queue"
        check(is_wanted or by_other or has_clock, "G4", f"{id} is interrupted and nobody wanted it")
    if b'"outcome":"refused"' in data:
        is_leaving = world.session.mode in (Mode.LEAVING, Mode.HANDING, Mode.PARTING, Mode.LEFT)
        check(not is_leaving or ask.is_last, "G2", f"{id} is refused, and could have been passed on")
    if b'"outcome":"preempted"' in data:
        victim = _class_of(scenario, world, id)
        urgent = [*(other.priority for other in asked), *dict(ledger.classes).values(), *(p for _, p in scenario.holds)]
        check(any(p > victim and p > 0 for p in urgent), "G5", f"{id} was preempted, by nobody more urgent")


def _check_drain(before: Session, session: Session, fact: Fact) -> None:
    """Check that a drain stops no process that has background tasks before its time is over.

    These facts give no other reason to stop a process.
    """
    is_end = before.mode in (Mode.OPEN, *_WAITING) and session.mode in (Mode.CLOSING, Mode.PARTING)
    is_without_reason = isinstance(fact, FramesRead | Committed | DrainAsked) or fact == LeaveAsked(AT)
    if is_end and is_without_reason and before.process.phase is ProcessPhase.READY:
        is_over = session.tasks_by is not None and session.tasks_by <= AT
        check(is_over or not session.process.tasks, "G5", f"{fact} ends a drain, and {session.process.tasks} run")


_WAITING = (Mode.DRAINING, Mode.LEAVING, Mode.HANDING)


# -- invariants of every state ---------------------------------------------------------------------------------------
def _check_state(scenario: Scenario, world: World, before: Session) -> None:
    session = world.session
    if session.store is not Store.WORKING:
        return
    if session.mode is Mode.OPEN:
        _check_urgency(world)
    money.check_state(session, world.ledger)
    if session.mode in (Mode.OPEN, Mode.DRAINING):
        for ask, life in zip(scenario.asks, world.asks, strict=True):
            is_watched = (Timer.DEADLINE, ask.id) in world.timers or ask.id in world.unwanted
            is_bound = ask.deadline is not None and life == Life.ACCEPTED and ask.id not in world.ledger.ended
            check(not is_bound or is_watched, "G5", f"{ask.id} has a deadline, and nothing ends it then")
    tasks = world.mirror.session.process.tasks
    if session.process.tasks != tasks:
        raise Violation("replay", f"in the log {tasks} run, and it is {session.process.tasks}")
    for turn in (session.turn, session.own):
        # A request to end one ask of a shared turn has no effect: the other asks need the turn.
        if turn is not None and turn.id in world.unwanted and len(turn.asks) <= 1:
            is_going = turn.phase is TurnPhase.INTERRUPTING or turn.boundary is not None
            check(is_going, "G5", f"{turn.id} is not wanted any more, and goes on")
    is_same = session.queue is before.queue and session.turn is before.turn and session.own is before.own
    if (
        is_same
        and session.settings is before.settings
        and session.conversation is before.conversation
        and session.limits is before.limits
        and session.limited_until is before.limited_until
        and session.agent is before.agent
        and session.agents is before.agents
        and session.questions is before.questions
        and (session.used is before.used and session.told is before.told and session.raised is before.raised)
        and session.budget_question is before.budget_question
        and before.store is Store.WORKING
    ):
        return
    live, durable = projection(session), projection(world.mirror.session)
    if live != durable:
        raise Violation("replay", f"the log says {durable}, and it is {live}")
    _check_questions(scenario, world)
    ids = [waiting.id for waiting in world.ledger.waiting]
    if sorted(ids) != sorted(_queued_ids(session)):
        raise Violation("log", f"the log has {ids} waiting, not {_queued_ids(session)}")


def _check_questions(scenario: Scenario, world: World) -> None:
    about_budget = world.session.budget_question
    all_open = (*world.session.questions, *(() if about_budget is None else (about_budget,)))
    open_ones = [(question.id, question.turn) for question in all_open]
    logged = [(question.id, question.turn) for question in world.mirror.questions]
    if world.budget[_INDEX["fail"]] < scenario.budget.get("fail", 0):
        # A question from the time when the log failed is not in the log. But no question is open only in the log.
        is_same = {id for id, _ in logged} <= {id for id, _ in open_ones}
    else:
        is_same = logged == open_ones
    if not is_same:
        raise Violation("replay", f"in the log {logged} wait for an answer, and it is {open_ones}")


def _queued_ids(session: Session) -> list[str]:
    return [ask.id for turn in session.queue if isinstance(turn, Turn) for ask in turn.asks]


def _check_urgency(world: World) -> None:
    session = world.session
    if session.limit_wait is not None:
        return
    hold = session.hold
    for waiting in session.queue:
        passes = hold is None or waiting.priority > hold.priority
        if waiting.id in session.collecting or not passes or waiting.priority <= 0:
            continue
        caller = waiting.ask.caller if isinstance(waiting, Turn) and waiting.ask is not None else None
        if isinstance(waiting, Turn) and money.holds_back(session, world.ledger, caller):
            continue
        for turn in (session.turn, session.own):
            is_running = turn is not None and turn.phase is TurnPhase.RUNNING and turn.boundary is None
            check(
                turn is None or not is_running or turn.priority >= waiting.priority,
                "G5",
                f"{waiting.id} waits, and {turn and turn.id} was not told to stop",
            )


def projection(session: Session) -> tuple[object, ...]:
    """The part of a session that its log contains."""
    turns = [waiting for waiting in session.queue if isinstance(waiting, Turn)]
    queue = sorted(turns, key=lambda turn: turn.priority)
    return (
        *(tuple(map(_brief, queue)), _brief(session.turn), _brief(session.own)),
        *(session.conversation, session.settings, session.limits, session.limited_until),
        *(session.used, session.told, session.raised),
        *(session.agent, tuple(map(_brief_agent, session.agents))),
    )


def _brief_agent(agent: tuple[str, AgentState]) -> tuple[object, ...]:
    name, state = agent
    return name, state.conversation, state.settings, state.limits, state.limited_until


def _brief(turn: Turn | None) -> tuple[object, ...] | None:
    if turn is None:
        return None
    joined, steered = (tuple(ask.id for ask in asks) for asks in (turn.joined, turn.steered))
    prompts = tuple(ask.prompt for ask in turn.asks)
    return turn.id, turn.attempt, prompts, joined, steered, turn.limit_waits, turn.agent


def _open_asks(world: World) -> bool:
    return Life.ASKED in world.asks or Life.ACCEPTED in world.asks


# -- equal states ----------------------------------------------------------------------------------------------------
def key(world: World) -> tuple[object, ...]:
    """Identity of a state. Numbers that only grow are relative to their current value."""
    session = world.session
    seqs = [unlogged.seq for unlogged in world.unlogged]
    deferred = tuple((seqs.index(seq) if seq in seqs else None, _brief_deferred(d)) for seq, d in session.deferred)
    process = session.process
    return (
        *(
            *(session.mode, session.is_handing, session.leave_by, session.is_overdue, session.tasks_by),
            session.conversation,
            session.collecting,
            session.hold,
            session.own_count,
            session.resume_failures,
            *(session.limits, session.limited_until),
            *(session.limit_wait, session.limit_passed, session.limit_failed),
            *(world.wall, world.undecided, world.given_up, world.tooled),
            *(session.agent, session.agents, session.missing, session.agent_limits),
            *(world.serving, world.absent, world.got),
            # From the second crash on, only the backoff grows.
            *(session.settings, min(session.crashes, 2), session.is_backing_off, session.idle_since, session.overflows),
        ),
        tuple(_turn_key(waiting) if isinstance(waiting, Turn) else waiting for waiting in session.queue),
        *(_turn_key(session.turn), _turn_key(session.own), session.clocks, _process_key(process)),
        tuple((question.asked.request, question.turn) for question in session.questions),
        *(deferred, session.store, session.store_retries, tuple((id, kind) for id, kind, _ in session.unwritten)),
        *(world.agent, world.sent, world.budget, world.asks, world.holds),
        *(_ledger_key(session, ledger) for ledger in (world.ledger, world.durable)),
        tuple(_ledger_key(session, unlogged.ledger) for unlogged in world.unlogged),
        *(money.key(session), world.claims, world.granted),
        *(world.is_asked_for, world.is_alive, world.has_exited, world.is_told_to_stop, world.is_writing, world.is_cut),
        frozenset(_timer_key(session, subject) for subject in world.timers),
        *(world.interrupts, world.unwanted, world.change, world.edit, world.is_finished),
        *(_question_key(session, world.question), len(world.untold)),
        frozenset(_fact_key(session, fact) for fact in world.late),
        # The state that another host would find, as long as a crash is possible.
        *(map(_past_key, _mirrors(world)) if world.budget[_INDEX["crash"]] else ()),
    )


def _ledger_key(session: Session, ledger: Ledger) -> Ledger:
    """Without a budget, the amount that was spent does not matter."""
    return ledger if session.config.budget is not None else replace(ledger, spent=(0, 0))


def _mirrors(world: World) -> tuple[SessionHistory, ...]:
    return (world.durable_mirror, *(unlogged.mirror for unlogged in world.unlogged))


def _past_key(past: SessionHistory) -> tuple[object, ...]:
    session = past.session
    questions = tuple((question.turn, question.is_kept) for question in past.questions)
    if session.config.budget is None:
        session = replace(session, used=NO_USAGE)
    return projection(session), session.mode, session.own_count, questions


def _turn_key(turn: Turn | None) -> tuple[object, ...] | None:
    if turn is None:
        return None
    return (
        *(turn.id, turn.priority, turn.phase, turn.attempt, turn.cause, turn.clock, turn.interrupts, turn.may_write),
        *(tuple(ask.id for ask in turn.joined), tuple(ask.id for ask in turn.steered), frozenset(turn.heard)),
        *(turn.is_opened, turn.names_prompts, turn.can_interrupt, turn.is_acknowledged, turn.settled),
        None if turn.boundary is None else (turn.boundary.text, turn.boundary.refs, turn.boundary.is_error),
        # Members that a later version of `Turn` adds.
        _other_members(turn),
    )


_KNOWN_MEMBERS = frozenset(
    (
        *("id", "ask", "priority", "origin", "phase", "attempt", "joined", "steered", "cause", "clock", "interrupts"),
        *("may_write", "seq", "granted_at", "is_opened", "names_prompts", "heard", "can_interrupt", "is_acknowledged"),
        *("settled", "boundary"),
    )
)
_other_members = attrgetter(*(name for name in Turn.__struct_fields__ if name not in _KNOWN_MEMBERS))


# Members that do not distinguish states: numbers that only grow, texts that only explain, and the toy's protocol state,
# which the other members determine.
_UNIMPORTANT = ("number", "frames_sent", "exit", "error", "schema", "protocol")
_process_members = attrgetter(*(name for name in ProcessState.__struct_fields__ if name not in _UNIMPORTANT))


def _process_key(process: ProcessState) -> tuple[object, ...]:
    return process.error is None, process.schema is None, _process_members(process)


def _brief_deferred(deferred: object) -> object:
    match deferred:
        case Resolve(turn=turn, outcome=outcome):
            return turn, outcome.kind, outcome.text
        case Accept(turn=name) | LeaveInLog(turn=name) | GiveReceipt(interrupt=name) | MayWrite(key=name):
            return type(deferred).__name__, name
        case MaySteer(key=name, ask=steered):
            return type(deferred).__name__, name, steered
        case _:
            return type(deferred).__name__


def _timer_key(session: Session, subject: Subject) -> Subject | tuple[object, ...]:
    timer, name = subject
    match timer:
        case Timer.START | Timer.AGE | Timer.BACKOFF:
            return timer, session.process.number - int(name)
        case Timer.IDLE:
            number, count = map(int, name.split("."))
            return timer, session.process.number - number, session.idle_count - count
        case Timer.WRITE:
            number, count = map(int, name.split("."))
            return timer, session.process.number - number, session.process.frames_sent - count
        case Timer.HOLD:
            hold, count = name.split("#")
            return timer, hold, session.hold_asks - int(count)
        case Timer.QUESTION:
            return timer, _question_key(session, name)
        case _:
            return subject


def _question_key(session: Session, question: str) -> object:
    """Identify an open question by its request, and another one by the distance of its place from the log's head.

    The name of a question contains its place in the log. Only at that place could a new question get the same name.
    """
    if session.budget_question is not None and session.budget_question.id == question:
        return "budget"
    requests = tuple(waiting.asked.request for waiting in session.questions if waiting.id == question)
    seq = question.rpartition(".")[2]
    return requests or (max(0, int(seq) - session.head) if seq.isdecimal() else question)


def _fact_key(session: Session, fact: Fact) -> object:
    match fact:
        case QuestionAnswered(question=question):
            return "answered", _question_key(session, question)
        case TimerFired(subject=subject):
            return _timer_key(session, subject)
        case FramesRead(process=process, lines=lines):
            return lines[0], session.process.number - process
        case ProcessReported(process=process, report=report):
            return type(report).__name__, session.process.number - process
        case _:
            return fact


# -- the search ------------------------------------------------------------------------------------------------------
@dataclass
class Found:
    """Result of a search."""

    scenario: Scenario
    states: int = 0
    transitions: int = 0
    terminals: int = 0
    # States that were handed over on trial: exploration_hand_over.py.
    hand_overs: int = 0
    is_whole: bool = True
    violation: Violation | None = None
    trace: list[Fact | None] = field(default_factory=list["Fact | None"])

    def __str__(self) -> str:
        whole = "" if self.is_whole else " (cut short)"
        return (
            f"{self.scenario.name}: {self.states:,} states, {self.transitions:,} transitions, "
            f"{self.terminals:,} ends, {self.hand_overs:,} hand-overs{whole}"
        )


def explore(scenario: Scenario) -> Found:
    """Explore everything that may happen, up to the first violation."""
    search = _Search(scenario)
    # All objects live until the end of the search: garbage collection would take half the time.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        search.run()
    finally:
        if was_enabled:
            gc.enable()
    return search.found


class _Search:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.found = Found(scenario)
        self.seen: dict[tuple[object, ...], int] = {}
        # By state number: the first parent and its move, and the states to which time and the agent lead.
        self.parents: list[tuple[int, int]] = []
        self.by_world: list[list[int]] = []
        self.by_agent: list[list[int]] = []
        self.is_over: list[bool] = []
        self.is_at_work: list[bool] = []

    def run(self) -> None:
        frontier = deque([self.scenario.first()])
        self.seen[key(frontier[0])] = 0
        self._add(frontier[0], -1, 0)
        number = 0
        while frontier:
            world = frontier.popleft()
            try:
                frontier.extend(self._expand(number, world))
            except _Failed as failed:
                self._fail(failed.violation, self._moves_to(number), failed.index)
                return
            number += 1
            if len(self.parents) > self.scenario.states_max:
                self.found.is_whole = False
                break
        self.found.states = len(self.parents)
        if self.found.is_whole:
            self._look_for_wedges()

    def _expand(self, number: int, world: World) -> Iterator[World]:
        index = -1
        possible = _possible(self.scenario, world)
        for index, move in enumerate(possible):
            if isinstance(move, Violation):
                raise _Failed(move, index)
            try:
                after, _ = take(self.scenario, move)
            except Violation as violation:
                raise _Failed(violation, index) from None
            self.found.transitions += 1
            name = key(after)
            known = self.seen.setdefault(name, len(self.parents))
            if known == len(self.parents):
                try:
                    self.found.hand_overs += try_hand_over(after.session)
                except Violation as violation:
                    raise _Failed(violation, index) from None
                self._add(after, number, index)
                yield after
            if move.by == "world":
                self.by_world[known].append(number)
            elif move.by == "agent":
                self.by_agent[known].append(number)
        if index < 0:
            self.found.terminals += 1

    def _add(self, world: World, parent: int, index: int) -> None:
        self.parents.append((parent, index))
        self.by_world.append([])
        self.by_agent.append([])
        is_closing = world.session.mode not in (Mode.OPEN, Mode.DRAINING) and not world.is_finished
        owes = any(life == Life.ASKED for _, life in world.interrupts)
        waits = Life.ASKED in world.holds or Life.ASKED in (world.change, world.edit)
        is_answered = not _open_asks(world) or money.waits(world.session, world.ledger)
        self.is_over.append(is_answered and not owes and not is_closing and not waits)
        turns = (world.session.turn, world.session.own)
        is_running = any(turn is not None and turn.phase is TurnPhase.RUNNING for turn in turns)
        self.is_at_work.append(is_running and world.is_alive and not world.is_told_to_stop)

    def _look_for_wedges(self) -> None:
        goals = [i for i, (over, work) in enumerate(zip(self.is_over, self.is_at_work, strict=True)) if over or work]
        self._check_reached(goals, [self.by_world], "time, the log and the process alone do not lead on from here")
        goals = [i for i, over in enumerate(self.is_over) if over]
        self._check_reached(goals, [self.by_world, self.by_agent], "an agent that does its work does not lead on")

    def _check_reached(self, goals: list[int], edges: list[list[list[int]]], message: str) -> None:
        if self.found.violation is not None:
            return
        reached = set(goals)
        stack = list(goals)
        while stack:
            number = stack.pop()
            for graph in edges:
                for before in graph[number]:
                    if before not in reached:
                        reached.add(before)
                        stack.append(before)
        # States are numbered breadth first, so the first one is among the nearest.
        wedge = next((number for number in range(len(self.parents)) if number not in reached), None)
        if wedge is not None:
            self._fail(Violation("G5", f"a wedge: {message}"), self._moves_to(wedge), None)

    def _moves_to(self, number: int) -> list[int]:
        indexes: list[int] = []
        while number > 0:
            number, index = self.parents[number]
            indexes.append(index)
        return indexes[::-1]

    def _fail(self, violation: Violation, indexes: list[int], last: int | None) -> None:
        self.found.states = len(self.parents)
        self.found.violation = violation
        world = self.scenario.first()
        for index in (*indexes, *(() if last is None else (last,))):
            moved = _possible(self.scenario, world)
            move = next(move for i, move in enumerate(moved) if i == index)
            if isinstance(move, Violation):
                return
            self.found.trace.append(move.fact)
            try:
                world, _ = take(self.scenario, move)
            except Violation:
                return


class _Failed(Exception):
    def __init__(self, violation: Violation, index: int) -> None:
        super().__init__(str(violation))
        self.violation = violation
        self.index = index


def _possible(scenario: Scenario, world: World) -> Iterator[Move | Violation]:
    try:
        yield from moves(scenario, world)
    except Violation as violation:
        yield violation


# -- a violation as a readable test ------------------------------------------------------------------------------------
def told(found: Found) -> str:
    """The shortest path to the violation, as a test that can be pasted."""
    lines = [f"# {found.scenario.name}: {found.violation}", "state = Session(config=config)"]
    state = found.scenario.first().session
    for fact in found.trace:
        if fact is None:
            lines.append("# (the agent reads, and says nothing)")
            continue
        lines.append(f"state, effects = step(state, {fact!r})")
        try:
            state, effects = step(state, fact)
        except Exception as exc:
            lines.append(f"#     raises {exc!r}")
            break
        lines += [f"#     {effect!r}" for effect in effects]
    return "\n".join(lines)


def assert_holds(scenario: Scenario, report: Callable[[str], object] = print) -> Found:
    found = explore(scenario)
    assert found.violation is None, told(found)
    report(str(found))
    return found


__all__ = ["BUDGETS", "Found", "Hold", "Scenario", "World", "assert_holds", "explore", "moves", "take", "told"]
