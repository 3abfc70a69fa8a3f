"""The session state machine in every order of facts.

See exploration.py for the checks, scenarios.py for the scenarios, and mutants.py for the mistakes that must be found.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace
from tests.core.session import exploration, scenarios, toy
from tests.core.session.exploration import Move, Scenario, World
from tests.core.session.mutants import MUTANTS, Mutant
from tests.core.session.scenarios import LARGE, QUICK, SCENARIOS, ask
from tests.core.session.talk import CONFIG, Talk, sent
from tests.thorough import sample, thorough

from banksman.core.dialects.dialect import DENIED
from banksman.core.dialects.meaning import PromptTaken, Replied, Requested, RequestPurpose, TurnOpened, TurnOver
from banksman.core.process_facts import (
    Exited,
    FrameWritten,
    ProcessGone,
    Started,
    StartFailed,
    Stderr,
    WriteFailed,
)
from banksman.core.session.ask_queue import BACKGROUND, INTERACTIVE, NORMAL
from banksman.core.session.effects import (
    Append,
    Effect,
    EndHold,
    GiveReceipt,
    Reject,
    Resolve,
    SettingTaken,
    StartTimer,
    StopProcess,
)
from banksman.core.session.facts import (
    AppendFailed,
    Asked,
    AskEdited,
    AskMoved,
    AskWithdrawn,
    CallbackAnswered,
    CloseAsked,
    Committed,
    ConversationTaken,
    EvictAsked,
    Fact,
    FramesRead,
    HoldAsked,
    HoldReleased,
    InterruptAsked,
    ProcessReported,
    QuestionAnswered,
    Reconfigured,
    SettingAsked,
    ShareAsked,
    Timer,
    TimerFired,
)
from banksman.core.session.outcome import By, Kind
from banksman.core.session.questions import QUESTIONS_MAX
from banksman.core.session.state import Mode, Stdin
from banksman.core.session.step import step
from banksman.core.session.transition import OUTBOX_FRAMES_MAX
from banksman.core.session.turn import Turn, TurnPhase
from banksman.errors import AgentError, Closed, MachineError, StoreError

pytestmark = pytest.mark.explored

# `make prove` runs a minute longer. `make explore` runs minutes longer and needs up to 1 GB.
IS_WHOLE = "BANKSMAN_EXPLORE" in os.environ
IS_LARGE = "BANKSMAN_EXPLORE_LARGE" in os.environ
USUAL = {name: each for name, each in SCENARIOS.items() if IS_WHOLE or name in QUICK}
CHOSEN = {**USUAL, **(LARGE if IS_LARGE else {})}


# -- every order -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("scenario", CHOSEN.values(), ids=list(CHOSEN))
def test_session_keeps_guarantees_in_every_order_of_facts(scenario: Scenario) -> None:
    found = exploration.assert_holds(scenario)
    assert found.is_whole
    assert found.terminals > 0


@thorough
@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=list(MUTANTS))
def test_exploration_finds_planted_mistake(mutant: Mutant) -> None:
    with mutant.applied():
        if not isinstance(mutant.found_by, str):
            with pytest.raises(AssertionError):
                mutant.found_by()
            return
        found = exploration.explore(SCENARIOS[mutant.found_by])
        assert found.violation is not None
        print(f"{mutant.name}: {len(found.trace)} facts, {found.states:,} states")
        print(exploration.told(found))


# -- random longer orders, with meaningless facts --------------------------------------------------------------------
EVERYTHING = scenarios.scenario(
    "everything",
    *(scenarios.LOW, scenarios.USUAL, scenarios.PATIENT, scenarios.URGENT, scenarios.STEER),
    *(scenarios.FIRST, scenarios.SECOND, scenarios.HELD, scenarios.PUSHY, scenarios.SHY),
    lazy="log pipe start",
    holds=(("hold", NORMAL), ("other", INTERACTIVE)),
    manners=toy.Manners(begins=True, ends=("over,settled", "over+settled"), errs=True),
    config={"clocks": {"overall": 0.0}, "idle_seconds": 0.0, "recycle_seconds": 0.0},
    **dict.fromkeys(("setting", "unanswered", "reconfigure", "hurry"), 1),
    **dict.fromkeys(("own", "stray", "unacknowledged", "question", "exit", "cut", "unstartable", "fail", "late"), 2),
    **dict.fromkeys(("task", "evict"), 2),
    **dict.fromkeys(("withdraw", "interrupt", "move", "edit", "release"), 3),
)

_names = st.sampled_from(["nobody", "low#7", "own-99", "99", "99.1", "other#99", ""])
_REPORTS = (Started(1, 0.0), FrameWritten(), WriteFailed(AgentError("late")), Exited(None, None, 0.0), ProcessGone())
_at = st.just(exploration.AT)
ABSURD: st.SearchStrategy[Fact] = st.one_of(
    st.builds(AskWithdrawn, _at, _names),
    st.builds(InterruptAsked, _at, _names, _names),
    st.builds(AskMoved, _at, _names, st.none() | _names),
    st.builds(HoldReleased, _at, _names | st.sampled_from([ask.id for ask in EVERYTHING.asks])),
    st.builds(QuestionAnswered, _at, _names, st.just(DENIED)),
    st.builds(CallbackAnswered, _at, st.sampled_from([0, 1, 99]), _names, st.none()),
    st.builds(ConversationTaken, _at, st.sampled_from([0, 99]), st.just(AgentError("late")), st.none()),
    st.builds(Committed, _at, st.just(0)),
    st.builds(TimerFired, _at, st.tuples(st.sampled_from(Timer), _names)),
    *(st.builds(ProcessReported, _at, st.sampled_from([0, 99]), st.just(report)) for report in _REPORTS),
    st.builds(
        FramesRead,
        _at,
        st.sampled_from([0, 99]),
        st.just((b"x",)),
        st.sampled_from([(), ((0, TurnOver()),), ((0, TurnOpened()),), ((0, PromptTaken("low0000")),)]),
    ),
)


class AnyOrder(RuleBasedStateMachine):
    """Random possible events, for longer than the exploration can run, mixed with meaningless facts."""

    def __init__(self) -> None:
        super().__init__()
        self.world: World = EVERYTHING.first()

    def _possible(self) -> list[Move]:
        return list(exploration.moves(EVERYTHING, self.world))

    @precondition(lambda self: bool(self._possible()))
    @rule(data=st.data())
    def something_happens(self, data: st.DataObject) -> None:
        possible = self._possible()
        move = possible[data.draw(st.integers(0, len(possible) - 1))]
        self.world, _ = exploration.take(EVERYTHING, move)

    @rule(fact=ABSURD)
    def something_absurd_happens(self, fact: Fact) -> None:
        if isinstance(fact, TimerFired) and fact.subject in self.world.timers:
            return
        before = self.world.session
        session, effects = step(before, fact)
        assert session == before
        assert all(isinstance(effect, GiveReceipt) for effect in effects)

    @invariant()
    def the_log_says_what_is_durable(self) -> None:
        assert self.world.session.committed <= self.world.session.head

    def teardown(self) -> None:
        """After any run, a close ends through time, the log and the process alone."""
        world = self.world
        if world.session.mode in (Mode.OPEN, Mode.DRAINING, Mode.LEAVING):
            world, _ = exploration.take(EVERYTHING, Move("other", CloseAsked(exploration.AT), world))
        for _ in range(200):
            if world.is_finished:
                return
            # Timers are last: pending work completes first, as it does when there is enough time.
            ways = [move for move in exploration.moves(EVERYTHING, world) if move.by == "world"]
            move = next((way for way in ways if not isinstance(way.fact, TimerFired)), None) or ways[0]
            world, _ = exploration.take(EVERYTHING, move)
        raise AssertionError("it does not end")


AnyOrder.TestCase.settings = settings(
    max_examples=sample(60),
    stateful_step_count=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestAnyOrder = AnyOrder.TestCase


# -- outside the exploration: time, and a closed session ---------------------------------------------------------------
def _outcomes(effects: list[Effect]) -> Iterator[tuple[str, Kind]]:
    return ((e.turn, e.outcome.kind) for e in effects if isinstance(e, Resolve))


def test_aged_ask_is_chosen_one_class_up_and_preempts_nobody() -> None:
    talk = Talk()
    talk.ask(ask("a", NORMAL))
    talk.begin()
    talk.ask(ask("low", BACKGROUND))
    talk.at = 299.9
    talk.ask(ask("b", NORMAL))
    assert sent(talk.over("a0000")) == [b"P b0000\n"]  # Not aged yet.
    talk.at = 300.0
    assert not sent(talk.ask(ask("c", NORMAL)))  # An aged ask preempts no turn.
    assert sent(talk.over("b0000")) == [b"P low0000\n"]
    # Asks that waited when it was chosen do not preempt it. But its class is unchanged: a new ask preempts it.
    assert not sent(talk.hear(b"taken low0000", b"init low0000"))
    talk.at = 301.0
    assert sent(talk.ask(ask("d", NORMAL))) == [b"I interrupt-low#1-1\n"]
    assert sent(talk.hear(b"ok interrupt-low#1-1", b"over low0000! low0000", b"settled low0000")) == [b"P c0000\n"]
    assert dict(_outcomes(talk.effects))["low"] is Kind.PREEMPTED


def test_clock_warns_then_ends_turn_and_is_named() -> None:
    talk = Talk(replace(CONFIG, clocks={"progress": 10.0}))
    talk.ask(ask("a", NORMAL))
    talk.begin()
    timer = next(e for e in talk.effects if isinstance(e, StartTimer) and e.subject[0] is Timer.CLOCKS)
    assert timer == StartTimer(5.0, (Timer.CLOCKS, "a#1"))
    talk.at = 4.0
    talk.hear(b"taken a0000", b"init a0000")
    talk.at = 5.0
    assert talk.tell(TimerFired(5.0, timer.subject)) == [StartTimer(9.0, timer.subject)]
    talk.at = 9.0
    warned = talk.tell(TimerFired(9.0, timer.subject))
    assert isinstance(warned[0], Append)
    assert [kind for _, kind, _ in warned[0].entries] == ["clock.warning"]
    talk.at = 14.0
    assert sent(talk.tell(TimerFired(14.0, timer.subject))) == [b"I interrupt-a#1-1\n"]
    talk.hear(b"ok interrupt-a#1-1", b"over a0000! a0000", b"cancelled a0000")
    resolved = next(e for e in talk.effects if isinstance(e, Resolve))
    assert resolved.outcome.kind is Kind.INTERRUPTED
    assert resolved.outcome.clock == "progress"


def test_closed_session_answers_late_callers() -> None:
    talk = Talk()
    talk.tell(CloseAsked(0.0))
    assert talk.state.mode is Mode.CLOSED
    late: list[Fact] = [
        *(Asked(0.0, ask("a", NORMAL)), InterruptAsked(0.0, "a", "x"), HoldAsked(0.0, "h", NORMAL)),
        *(SettingAsked(0.0, "c", "model", "large"), ShareAsked(0.0, "s", ("bob",))),
        AskEdited(0.0, "e", "a", prompt="late"),
    ]
    rejected, receipt, ended, refused, unshared, unedited = [step(talk.state, fact)[1][0] for fact in late]
    assert isinstance(rejected, Reject)
    assert isinstance(receipt, GiveReceipt)
    assert receipt.receipt.by is By.ALREADY_OVER
    assert isinstance(ended, EndHold)
    assert isinstance(refused, SettingTaken)
    assert refused.change == "c"
    assert isinstance(unshared, SettingTaken)
    assert (unshared.change, type(unshared.error)) == ("s", Closed)
    assert isinstance(refused.error, Closed)
    assert isinstance(unedited, SettingTaken)
    assert (unedited.change, type(unedited.error)) == ("e", Closed)
    silent: list[Fact] = [
        AskWithdrawn(0.0, "a"),
        HoldReleased(0.0, "h"),
        CloseAsked(0.0),
        QuestionAnswered(0.0, "q", DENIED),
        CallbackAnswered(0.0, 1, "q", {}),
        EvictAsked(0.0),
        Reconfigured(0.0, CONFIG, True),
    ]
    assert all(step(talk.state, fact) == (talk.state, []) for fact in silent)


def test_acknowledgement_affects_only_the_interrupt_it_names() -> None:
    talk = Talk()
    talk.ask(ask("a", NORMAL))
    talk.begin()
    talk.hear(b"taken a0000", b"init a0000")
    before = talk.state.turn
    stranger = FramesRead(0.0, 1, (b"ok interrupt-z#1-1",), ((0, Replied("interrupt-z#1-1")),))
    talk.tell(stranger)
    assert talk.state.turn == before


def test_full_queue_ranks_ask_of_hold_by_class_of_hold() -> None:
    talk = Talk(replace(CONFIG, queue_max=1, when_full="drop"))
    talk.tell(HoldAsked(0.0, "hold", BACKGROUND))
    talk.ask(ask("a", BACKGROUND, hold="hold"))
    talk.begin()
    talk.ask(ask("low", BACKGROUND))
    # On its own it would be more urgent, and would displace "low".
    rejected = talk.ask(ask("b", NORMAL, hold="hold"))
    assert [effect.turn for effect in rejected if isinstance(effect, Reject)] == ["b"]
    assert not list(_outcomes(talk.effects))


def _resuming() -> Talk:
    """The first process has died, and the second is being started for another ask."""
    talk = Talk()
    talk.ask(ask("a", NORMAL))
    talk.begin()
    talk.over("a0000")
    talk.tell(ProcessReported(0.0, 1, Exited(1, None, 0.0)))
    talk.tell(ProcessReported(0.0, 1, ProcessGone()))
    talk.ask(ask("b", NORMAL))
    assert talk.state.process.number == 2
    assert talk.state.conversation == "talk"
    return talk


def test_conversation_is_lost_only_when_process_says_so() -> None:
    forgets = _resuming()
    forgets.tell(ProcessReported(0.0, 2, Started(77, 0.0)))
    forgets.tell(ProcessReported(0.0, 2, Exited(1, None, 0.0)))
    forgets.tell(ProcessReported(0.0, 2, ProcessGone(stderr=Stderr("forgotten"))))
    assert forgets.state.conversation is None
    assert ("b", Kind.FAILED) not in _outcomes(forgets.effects)
    for how in (ProcessReported(0.0, 2, Exited(1, None, 0.0)), ProcessReported(0.0, 2, Exited(None, 9, 0.0))):
        exits = _resuming()
        exits.tell(ProcessReported(0.0, 2, Started(77, 0.0)))
        exits.tell(how)
        exits.tell(ProcessReported(0.0, 2, ProcessGone(stderr=Stderr("the disk is full"))))
        assert exits.state.conversation == "talk"
        assert ("b", Kind.FAILED) in _outcomes(exits.effects)
    fails = _resuming()
    fails.tell(ProcessReported(0.0, 2, StartFailed(MachineError("no fds"))))
    assert fails.state.conversation == "talk"
    assert ("b", Kind.FAILED) in _outcomes(fails.effects)


def test_conversation_survives_start_cut_short_by_log() -> None:
    talk = _resuming()
    talk.tell(AppendFailed(0.0, StoreError("the disk is full")))
    talk.tell(ProcessReported(0.0, 2, ProcessGone()))
    assert talk.state.conversation == "talk"


def test_refused_interrupt_stops_nothing() -> None:
    talk = Talk()
    talk.ask(ask("a", NORMAL))
    talk.begin()
    talk.hear(b"taken a0000", b"init a0000")
    talk.tell(InterruptAsked(0.0, "a", "i"))
    [(request, _)] = talk.state.process.unacknowledged
    talk.tell(FramesRead(0.0, 1, (b"refused",), ((0, Replied(request, error="not now")),)))
    talk.hear(b"over a0000 a0000", b"settled a0000")
    assert ("a", Kind.DONE) in _outcomes(talk.effects)


def test_settled_prompt_without_result_fails_after_drain_time() -> None:
    late = Talk()
    late.ask(ask("a", NORMAL))
    late.begin()
    late.hear(b"taken a0000", b"init a0000", b"settled a0000")
    late.hear(b"over a0000 a0000")
    assert ("a", Kind.DONE) in _outcomes(late.effects)
    never = Talk()
    never.ask(ask("a", NORMAL))
    never.begin()
    effects = never.hear(b"taken a0000", b"init a0000", b"settled a0000")
    [timer] = [e for e in effects if isinstance(e, StartTimer) and e.subject[0] is Timer.SETTLE]
    assert timer.at == CONFIG.drain_seconds
    never.tell(TimerFired(timer.at, timer.subject))
    assert ("a", Kind.FAILED) in _outcomes(never.effects)


def test_settled_prompt_without_result_fails_when_agent_begins_another_turn() -> None:
    talk = Talk()
    talk.ask(ask("a", NORMAL))
    talk.begin()
    talk.hear(b"taken a0000", b"init a0000", b"settled a0000", b"own")
    assert list(_outcomes(talk.effects)) == [("a", Kind.FAILED)]
    # A boundary that the agent sent is believed, whatever it begins next.
    said = Talk()
    said.ask(ask("a", NORMAL))
    said.begin()
    said.hear(b"taken a0000", b"init a0000", b"over a0000 a0000", b"own")
    assert list(_outcomes(said.effects)) == [("a", Kind.DONE)]


def test_process_death_before_first_byte_is_counted_as_restart() -> None:
    often = Turn(id="a", ask=ask("a", NORMAL), priority=NORMAL, phase=TurnPhase.STARTING, attempt=9)
    talk = Talk()
    talk.ask(ask("z", NORMAL))
    talk.begin()
    talk.state = replace(talk.state, turn=often)
    talk.tell(ProcessReported(0.0, 1, Exited(1, None, 0.0)))
    talk.tell(ProcessReported(0.0, 1, ProcessGone()))
    assert ("a", Kind.FAILED) not in _outcomes(talk.effects)
    assert [waiting.restarts for waiting in talk.state.queue if isinstance(waiting, Turn)] == [1]


def test_repeated_question_is_one_question() -> None:
    talk = Talk()
    talk.ask(ask("a", NORMAL))
    talk.begin()
    talk.hear(b"taken a0000", b"init a0000")
    question = Requested("q", RequestPurpose.PERMISSION, "can_use_tool", "Bash")
    for _ in range(2):
        talk.tell(FramesRead(0.0, 1, (b"?",), ((0, question),)))
    assert [question.asked.request for question in talk.state.questions] == ["q"]
    more = [Requested(f"q{n}", RequestPurpose.PERMISSION, "can_use_tool", "Bash") for n in range(QUESTIONS_MAX + 8)]
    talk.tell(FramesRead(0.0, 1, (b"?",) * len(more), tuple(enumerate(more))))
    assert len(talk.state.questions) == QUESTIONS_MAX


def test_agent_that_asks_and_never_reads_is_stopped() -> None:
    talk = Talk()
    talk.ask(ask("a", NORMAL))
    talk.begin()
    talk.hear(b"taken a0000", b"init a0000")
    unknown = [Requested(f"q{n}", RequestPurpose.UNKNOWN, "unknown") for n in range(OUTBOX_FRAMES_MAX + 2)]
    state, effects = step(talk.state, FramesRead(0.0, 1, (b"?",) * len(unknown), tuple(enumerate(unknown))))
    assert state.process.stdin is Stdin.BROKEN
    assert any(isinstance(effect, StopProcess) for effect in effects)


def test_waiting_holds_are_bounded_and_take_no_ask_places() -> None:
    talk = Talk(replace(CONFIG, queue_max=2))
    talk.ask(ask("a", NORMAL))
    talk.begin()
    ended = [e for n in range(3) for e in talk.tell(HoldAsked(0.0, f"h{n}", NORMAL)) if isinstance(e, EndHold)]
    assert [end.hold for end in ended] == ["h2"]
    assert not [e for e in talk.ask(ask("b", NORMAL)) if isinstance(e, Reject)]


def test_result_that_names_steered_prompt_ends_only_that() -> None:
    talk = Talk()
    talk.ask(ask("a", NORMAL))
    talk.begin()
    talk.hear(b"taken a0000", b"init a0000")
    talk.ask(replace(ask("s", NORMAL), on_busy="steer"))
    effects = talk.hear(b"taken s0000", b"over s0000 s0000")
    [timer] = [e for e in effects if isinstance(e, StartTimer) and e.subject[0] is Timer.SETTLE]
    talk.tell(TimerFired(timer.at, timer.subject))
    assert list(_outcomes(talk.effects)) == [("s", Kind.DONE)]
    talk.hear(b"over a0000 a0000", b"settled a0000")
    assert list(_outcomes(talk.effects)) == [("s", Kind.DONE), ("a", Kind.DONE)]
