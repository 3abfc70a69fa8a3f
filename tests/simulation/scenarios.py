"""Scenarios for the exploration: each creates its own world, and checks itself at its end. See scene.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.scene import MOMENT, TERSE, Scene, explored

from banksman.core.session import event as kinds
from banksman.core.session.event import Event
from banksman.core.session.outcome import Kind
from banksman.errors import StoreError
from banksman.sessions import log_writer
from banksman.sessions.questions import Answer, Answered, Question
from banksman.sessions.turn import Turn
from banksman.testing import sim
from banksman.testing.world import Ack, Fault, Manner, Play, Stage, WorldLog

Scenario = Callable[[], Awaitable[None]]
# More schedules than any complete scenario has, with room for growth of the code.
COMPLETE = 3000


@dataclass(frozen=True, slots=True)
class Case:
    """A scenario and the extent of its exploration."""

    scenario: Scenario
    schedules: int = 80
    is_complete: bool = False
    departures: int = 2
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def name(self) -> str:
        return getattr(self.scenario, "__name__", "scenario")

    def explore(self) -> sim.Explored:
        return explored(
            self.scenario,
            departures=self.departures,
            schedules=self.schedules,
            is_complete=self.is_complete,
            **self.options,
        )

    def replay(self, schedule: str) -> None:
        sim.replay(self.scenario, schedule, **self.options)


CASES: dict[str, Case] = {}


def case(
    *, schedules: int = 80, is_complete: bool = False, departures: int = 2, moment: bool = False, **options: Any
) -> Callable[[Scenario], Scenario]:
    """Register a scenario.

    A scenario that is not complete runs a sample, spread evenly over all pairs of departures. `moment`: the scenario
    has an event that may happen at any moment.
    """

    def enter(scenario: Scenario) -> Scenario:
        if moment:
            options["jitter_seconds"] = MOMENT
        entered = Case(scenario, schedules, is_complete, departures, options)
        assert entered.name not in CASES
        CASES[entered.name] = entered
        return scenario

    return enter


def named(scenario: Scenario, name: str) -> Scenario:
    scenario.__name__ = name
    return scenario


# -- callers ---------------------------------------------------------------------------------------------------------
@case(schedules=COMPLETE, is_complete=True)
async def two_callers_and_the_first_process() -> None:
    scene = Scene()
    scene.ask("a")
    scene.ask("b")
    await scene.end()
    assert {outcome.kind for outcome in scene.outcomes.values()} == {Kind.DONE}
    assert scene.world.spawned == 1


@case()
async def three_callers_of_three_classes() -> None:
    scene = Scene({"": Play(says=("hm",))})
    await scene.get_ready()
    scene.ask("low", priority="background", on_preempt="requeue")
    scene.ask("middle")
    scene.ask("high", priority="interactive")
    await scene.end()
    assert scene.outcomes["high"].kind is Kind.DONE
    assert scene.outcomes["low"].kind is Kind.DONE
    assert scene.outcomes["middle"].kind in (Kind.DONE, Kind.PREEMPTED)


@case(schedules=200)
async def four_callers_that_meet() -> None:
    scene = Scene({"": Play(says=("hm",))}, queue_max=3)
    await scene.get_ready()
    scene.ask("low", priority="background")
    scene.ask("impatient", on_busy="interrupt")
    scene.ask("polite", on_busy="reject")
    scene.ask("high", priority="interactive")
    await scene.end()
    assert scene.outcomes["high"].kind is Kind.DONE


@case()
async def a_window_closes_and_its_turn_takes_its_time() -> None:
    scene = Scene({"a": Play(result_seconds=1.0)})
    await scene.get_ready()
    scene.ask("a", on_busy="collect")
    await scene.end()
    assert scene.outcomes["a"].kind is Kind.DONE


@case(schedules=200)
async def steered_and_collected() -> None:
    scene = Scene({"": Play(says=("hm",))}, allows_steering=True, collect_seconds=MOMENT)
    await scene.get_ready()
    scene.ask("a")
    scene.ask("steered", on_busy="steer")
    scene.ask("one", on_busy="collect")
    scene.ask("two", on_busy="collect")
    await scene.end()
    assert {outcome.kind for outcome in scene.outcomes.values()} == {Kind.DONE}


@case(moment=True)
async def a_caller_is_cancelled() -> None:
    """A cancelled `ask` is withdrawn. A cancelled wait for the outcome does not affect the ask."""
    scene = Scene({"hangs": Play(hangs=True)})
    await scene.get_ready()

    async def asking() -> None:
        try:
            await scene.asking("hangs")
        except asyncio.CancelledError:
            if "hangs" in scene.turns:
                await scene.turns["hangs"].interrupt()
            raise

    scene.at_any_moment(scene.start("hangs", asking()).cancel)
    scene.ask("next")
    await scene.end()
    assert scene.outcomes["next"].kind is Kind.DONE
    assert scene.loop.time() < 1


@case(moment=True)
async def a_caller_is_cancelled_and_another_has_its_key() -> None:
    scene = Scene()
    await scene.get_ready()
    scene.at_any_moment(scene.ask("first", "same", key="k").cancel)
    scene.ask("second", "same", key="k")
    await scene.end()
    assert scene.outcomes["second"].kind is Kind.DONE


@case(moment=True)
async def a_caller_is_cancelled_while_the_log_breaks() -> None:
    scene = Scene()
    await scene.get_ready()
    scene.log.is_broken = True
    scene.at_any_moment(scene.ask("a").cancel)
    scene.ask("b")
    await scene.end()


@case(moment=True)
async def a_holder_is_cancelled() -> None:
    scene = Scene({"held": Play(hangs=True)})
    await scene.get_ready()

    async def holding() -> None:
        async with scene.session.hold():
            await scene.asking("held")

    def cancel() -> None:
        holder.cancel()
        if "held" in scene.turns:
            scene.session.withdraw(scene.turns["held"])

    holder = scene.start("holder", holding())
    scene.at_any_moment(cancel)
    scene.ask("next")
    await scene.end()
    assert scene.outcomes["next"].kind is Kind.DONE
    assert scene.loop.time() < 1


# -- stopping --------------------------------------------------------------------------------------------------------
@case(moment=True, schedules=COMPLETE, is_complete=True)
async def an_interrupt_at_any_moment() -> None:
    scene = Scene({"a": Play(says=("hm",), result_seconds=MOMENT)})
    await scene.get_ready()
    turn = scene.turns["a"] = await scene.session.ask("a")
    scene.at_any_moment(lambda: scene.interrupt("interrupter", turn))
    scene.ask("b")
    await scene.callers()
    await asyncio.sleep(2 * MOMENT)
    await scene.end()
    assert scene.outcomes["b"].kind is Kind.DONE
    outcome = await turn.outcome()
    assert scene.receipts["interrupter"].stopped == (outcome.kind is Kind.INTERRUPTED)
    assert outcome.kind in (Kind.INTERRUPTED, Kind.DONE)
    assert scene.world.spawned == 1


@case()
async def an_interrupt_and_an_exit() -> None:
    scene = Scene({"a": Play(says=("hm",), exits_after=Stage.ACKED, hangs=True)})
    await scene.get_ready()
    turn = scene.turns["a"] = await scene.session.ask("a")
    scene.interrupt("interrupter", turn)
    scene.ask("b")
    await scene.end()
    assert (await turn.outcome()).kind is Kind.INTERRUPTED
    assert scene.outcomes["b"].kind is Kind.DONE


@case()
async def the_drain_is_over_as_the_boundary_comes() -> None:
    scene = Scene({"a": Play(hangs=True, abort_seconds=5.0)}, drain_seconds=5.0)
    await scene.get_ready()
    turn = scene.turns["a"] = await scene.session.ask("a")
    scene.interrupt("interrupter", turn)
    scene.ask("b")
    await scene.end()
    assert (await turn.outcome()).kind is Kind.INTERRUPTED
    assert scene.outcomes["b"].kind is Kind.DONE
    assert scene.loop.time() < 6


@case(schedules=COMPLETE, is_complete=True)
async def an_interrupt_is_never_acknowledged() -> None:
    scene = Scene({"a": Play(hangs=True, ack=Ack.NEVER)})
    await scene.get_ready()
    turn = scene.turns["a"] = await scene.session.ask("a")
    scene.interrupt("interrupter", turn)
    scene.ask("b")
    await scene.end()
    assert (await turn.outcome()).kind is Kind.INTERRUPTED
    assert scene.outcomes["b"].kind is Kind.DONE
    assert scene.loop.time() < 10


@case(schedules=COMPLETE, is_complete=True)
async def preempted_and_requeued() -> None:
    scene = Scene({"low": Play(says=("hm",), boundaries=2)})
    await scene.get_ready()
    scene.ask("low", priority="background", on_preempt="requeue")
    scene.ask("high", priority="interactive")
    await scene.end()
    assert scene.outcomes["low"].kind is Kind.DONE
    assert scene.outcomes["high"].kind is Kind.DONE


@case(moment=True)
async def closed_at_any_moment() -> None:
    scene = Scene({"": Play(says=("hm",))})
    await scene.get_ready()
    scene.ask("a")
    scene.ask("b")
    scene.at_any_moment(scene.session.close_nowait)
    await scene.end(is_calm=False)


@case(moment=True)
async def left_at_any_moment() -> None:
    scene = Scene({"": Play(says=("hm",))})
    await scene.get_ready()
    for name in ("a", "b", "c"):
        scene.ask(name)
    scene.at_any_moment(scene.session.leave_nowait)
    await scene.leave()


@case(moment=True)
async def left_in_a_hurry_before_its_process_is_there() -> None:
    scene = Scene({"": Play(hangs=True)})
    for name in ("a", "b"):
        scene.ask(name, on_preempt="requeue", priority="background")
    scene.ask("urgent", priority="interactive")
    scene.at_any_moment(lambda: scene.session.leave_nowait(1.0))
    await scene.leave()
    assert Kind.DONE not in {outcome.kind for outcome in scene.outcomes.values()}


@case(moment=True)
async def left_while_the_log_fails() -> None:
    scene = Scene({"": Play(says=("hm",))}, log=WorldLog(faults=dict.fromkeys((14, 17), Fault.FAILS)))
    await scene.get_ready()
    for name in ("a", "b"):
        scene.ask(name)
    scene.at_any_moment(scene.session.leave_nowait)
    await scene.leave()


@case(moment=True)
async def left_by_a_caller_that_vanishes() -> None:
    """A caller that is cancelled before it has its turn leaves nothing in the log that another host would serve."""
    scene = Scene({"a": Play(says=("hm",))})
    await scene.get_ready()
    scene.ask("a")
    vanishing = scene.ask("b")
    scene.at_any_moment(scene.session.leave_nowait)
    scene.at_any_moment(vanishing.cancel)
    await scene.leave()


@case(moment=True)
async def drained_at_any_moment() -> None:
    scene = Scene({"": Play(says=("hm",))})
    await scene.get_ready()
    scene.ask("a")
    scene.ask("b")
    scene.at_any_moment(scene.session.drain_nowait)
    await scene.session.wait_closed()
    await scene.end()
    kinds = {outcome.kind for outcome in scene.outcomes.values()}
    assert kinds <= {Kind.DONE, Kind.REFUSED}


# -- the process -----------------------------------------------------------------------------------------------------
@case(moment=True)
async def an_exit_at_any_moment() -> None:
    scene = Scene({"": Play(says=("hm",))})
    await scene.get_ready()
    scene.ask("a")
    scene.ask("b")
    scene.at_any_moment(lambda: scene.world.processes[0].exit_now(3))
    await scene.end()
    kinds = {outcome.kind for outcome in scene.outcomes.values()}
    assert kinds <= {Kind.DONE, Kind.FAILED}
    assert Kind.DONE in kinds


def exits_after(stage: Stage, last_words: int) -> Scenario:
    async def scenario() -> None:
        first = Manner(last_words=last_words)
        scene = Scene({"a": Play(says=("hm",), exits_after=stage)}, manners=[first, TERSE, TERSE])
        scene.ask("a")
        scene.ask("b")
        await scene.end()
        # The prompt may have been written to the exiting process: then it is not sent again.
        assert scene.outcomes["b"].kind in (Kind.DONE, Kind.FAILED if stage is Stage.COMPLETED else Kind.DONE)
        is_done = stage in (Stage.RESULT, Stage.COMPLETED)
        assert scene.outcomes["a"].kind is (Kind.DONE if is_done else Kind.FAILED)

    return named(scenario, f"exits_after_{stage.name.lower()}_with_{last_words}_last_words")


for _stage in (Stage.READ, Stage.QUEUED, Stage.STARTED, Stage.INIT, Stage.SAID, Stage.RESULT, Stage.COMPLETED):
    case()(exits_after(_stage, 0))


@case()
async def the_boundary_is_heard_after_the_exit() -> None:
    first = Manner(is_terse=True, last_words=2, gone_seconds=0.2)
    scene = Scene({"": Play(says=("hm",))}, manners=[first, TERSE])
    await scene.get_ready()
    turn = scene.turns["a"] = await scene.session.ask("a")
    scene.loop.outside(scene.world.processes[0].exit_now, lane="kernel")
    scene.ask("b")
    await scene.end()
    assert (await turn.outcome()).kind in (Kind.DONE, Kind.FAILED)
    assert scene.outcomes["b"].kind in (Kind.DONE, Kind.FAILED)


@case()
async def a_write_is_stuck() -> None:
    scene = Scene(manners=[Manner(is_terse=True, stuck_at=3, stop_seconds=2.0), TERSE])
    await scene.get_ready()
    scene.ask("a")
    scene.ask("b")
    await scene.end()
    assert sorted(outcome.kind for outcome in scene.outcomes.values()) == [Kind.DONE, Kind.FAILED]
    assert scene.world.spawned == 2


@case()
async def a_write_breaks() -> None:
    scene = Scene(manners=[Manner(is_terse=True, broken_at=3), TERSE])
    await scene.get_ready()
    scene.ask("a")
    scene.ask("b")
    await scene.end()
    assert sorted(outcome.kind for outcome in scene.outcomes.values()) == [Kind.DONE, Kind.FAILED]
    assert scene.world.spawned == 2
    assert scene.loop.time() < 1


@case()
async def that_a_frame_was_taken_is_told_late() -> None:
    scene = Scene({"a": Play(says=("hm",))}, manners=[Manner(is_terse=True, is_told_late=True)])
    await scene.get_ready()
    turn = scene.turns["a"] = await scene.session.ask("a")
    scene.interrupt("interrupter", turn)
    scene.ask("b")
    await scene.end()
    assert scene.outcomes["b"].kind is Kind.DONE


@case()
async def frames_are_taken_at_once() -> None:
    scene = Scene({"a": Play(says=("hm",))}, manners=[Manner(is_terse=True, is_told_at_once=True)])
    await scene.get_ready()
    turn = scene.turns["a"] = await scene.session.ask("a")
    scene.interrupt("interrupter", turn)
    scene.ask("b")
    await scene.end()
    assert scene.outcomes["b"].kind is Kind.DONE


@case(steps_max=5000)
async def the_log_is_slower_than_the_agent() -> None:
    """The host does not read the agent further until the log has stored the earlier output."""
    before, log_writer.UNCOMMITTED_BYTES_MAX = log_writer.UNCOMMITTED_BYTES_MAX, 2000
    try:
        words = tuple(f"{number}" * 500 for number in range(9))
        scene = Scene({"a": Play(says=words)}, manners=[Manner()], log=WorldLog(commit_seconds=0.1))
        await scene.get_ready()
        turn = scene.turns["a"] = await scene.session.ask("a")
        was_paused: list[bool] = []
        while not turn._outcome.done():  # pyright: ignore[reportPrivateUsage]
            was_paused.append(scene.world.processes[0].is_paused)
            await asyncio.sleep(0.01)
        await scene.end()
        assert any(was_paused)
        assert (await turn.outcome()).kind is Kind.DONE
    finally:
        log_writer.UNCOMMITTED_BYTES_MAX = before


def starts_badly(name: str, *manners: Manner, kinds: set[Kind]) -> Scenario:
    async def scenario() -> None:
        scene = Scene(manners=[*manners, TERSE, TERSE], start_seconds=1.0)
        scene.ask("a")
        scene.ask("b")
        await scene.end()
        assert {outcome.kind for outcome in scene.outcomes.values()} <= kinds
        assert len(scene.outcomes) == 2

    return named(scenario, name)


BOTH = {Kind.DONE, Kind.FAILED}
case()(starts_badly("a_start_fails", Manner(fails=True), kinds=BOTH))
case()(starts_badly("a_start_raises", Manner(raises=True), kinds=BOTH))
case()(starts_badly("a_start_takes_its_time", Manner(start_seconds=0.5, is_terse=True), kinds={Kind.DONE}))
case()(starts_badly("a_start_comes_as_it_is_given_up", Manner(start_seconds=1.0), kinds=BOTH))
case()(starts_badly("a_handshake_is_answered_as_it_is_given_up", Manner(handshake_seconds=1.0), kinds=BOTH))
case()(starts_badly("a_handshake_is_never_answered", Manner(handshake_seconds=None), kinds=BOTH))


# -- agent-initiated turns -------------------------------------------------------------------------------------------
@case()
async def an_own_turn_and_a_prompt() -> None:
    scene = Scene(manners=[Manner(owns={1: Play(says=("by the way",))})])
    await scene.get_ready()
    scene.ask("a")
    scene.ask("b")
    await scene.end()
    assert {outcome.kind for outcome in scene.outcomes.values()} == {Kind.DONE}


@case(schedules=COMPLETE, is_complete=True)
async def an_own_turn_gives_way() -> None:
    scene = Scene(manners=[Manner(is_terse=True, owns={1: Play(hangs=True)})])
    await scene.get_ready()
    scene.ask("a")
    await scene.end()
    assert scene.outcomes["a"].kind is Kind.DONE
    assert scene.loop.time() < 10


# -- the log ---------------------------------------------------------------------------------------------------------
def an_append_fails(number: int, fault: Fault) -> Scenario:
    async def scenario() -> None:
        scene = Scene(log=WorldLog(faults={number: fault}))
        scene.ask("a")
        scene.ask("b")
        await scene.callers()
        if fault is Fault.FAILS and number <= scene.log.appends:
            await asyncio.sleep(3.0)  # The log returns with the first retry.
            await scene.asking("later")
            assert scene.outcomes["later"].kind is Kind.DONE
        await scene.end()
        for outcome in scene.outcomes.values():
            assert outcome.kind in (Kind.DONE, Kind.FAILED if fault is Fault.FAILS else Kind.UNKNOWN)
            assert outcome.durable == (outcome.kind is Kind.DONE)

    return named(scenario, f"append_{number}_{fault.name.lower()}")


for _number in range(1, 12):
    for _fault in Fault:
        case()(an_append_fails(_number, _fault))


@case(moment=True)
async def the_log_breaks_at_any_moment_and_returns() -> None:
    scene = Scene({"": Play(says=("hm",))})
    await scene.get_ready()

    def set_broken(is_broken: bool) -> None:
        scene.log.is_broken = is_broken

    scene.at_any_moment(lambda: set_broken(True))
    scene.ask("a")
    scene.ask("b")
    await scene.callers()
    scene.log.is_calm = scene.world.is_calm = True
    await asyncio.sleep(2 * MOMENT)
    set_broken(False)
    await asyncio.sleep(40)
    scene.ask("later")
    await scene.end()
    assert scene.outcomes["later"].kind is Kind.DONE


@case(schedules=COMPLETE, is_complete=True)
async def a_log_that_is_away_for_good_and_cannot_be_read() -> None:
    scene = Scene({"": Play(says=("hm",))})
    await scene.get_ready()
    scene.ask("a")
    scene.ask("b")
    scene.log.is_broken = scene.log.is_unreadable = True
    await scene.end()
    assert not any(outcome.kind is Kind.DONE for outcome in scene.outcomes.values())


@case(schedules=COMPLETE, is_complete=True)
async def slow_commits_and_an_exit() -> None:
    scene = Scene({"a": Play(exits_after=Stage.RESULT)}, log=WorldLog(commit_seconds=0.1))
    scene.ask("a")
    scene.ask("b")
    await scene.end()
    assert {outcome.kind for outcome in scene.outcomes.values()} == {Kind.DONE}


# -- holds -----------------------------------------------------------------------------------------------------------
@case()
async def a_hold_and_somebody_more_urgent() -> None:
    scene = Scene({"": Play(says=("hm",))})
    await scene.get_ready()

    async def holding() -> None:
        async with scene.session.hold():
            await scene.asking("held 1", on_preempt="requeue")
            await scene.asking("held 2", on_preempt="requeue")

    scene.start("holder", holding())
    scene.ask("other")
    scene.ask("high", priority="interactive")
    await scene.end()
    assert {outcome.kind for outcome in scene.outcomes.values()} <= {Kind.DONE, Kind.PREEMPTED}
    assert scene.outcomes["high"].kind is Kind.DONE
    assert scene.outcomes["held 2"].kind is Kind.DONE
    assert scene.loop.time() < 1


@case()
async def a_hold_is_idle_just_as_it_is_used() -> None:
    scene = Scene(hold_idle_seconds=1.0)
    await scene.get_ready()

    async def holding() -> None:
        async with scene.session.hold():
            await asyncio.sleep(1.0)
            await scene.asking("held")

    scene.start("holder", holding())
    scene.ask("other")
    await scene.end()
    assert {outcome.kind for outcome in scene.outcomes.values()} == {Kind.DONE}
    assert scene.loop.time() < 3


@case()
async def two_holders() -> None:
    scene = Scene()
    await scene.get_ready()

    async def holding(name: str, priority: str) -> None:
        async with scene.session.hold(priority):
            await scene.asking(name, priority=priority)

    scene.start("one", holding("held 1", "normal"))
    scene.start("two", holding("held 2", "interactive"))
    await scene.end()
    assert {outcome.kind for outcome in scene.outcomes.values()} <= {Kind.DONE, Kind.PREEMPTED}
    assert scene.loop.time() < 5


# -- questions -------------------------------------------------------------------------------------------------------
@case()
async def a_question_an_answer_and_an_interrupt() -> None:
    scene = Scene({"a": Play(tool="Bash")})
    await scene.get_ready()
    turn = scene.turns["a"] = await scene.session.ask("a")

    told: list[Answered] = []

    async def answering(decision: str) -> None:
        async with aclosing(scene.session.events(0, waits=True)) as events:
            asked = [event.body["question"] async for event in _until_asked(events, turn)]
        told.extend([await scene.session.answer(question, decision) for question in asked])

    scene.start("answerer", answering("allow"))
    scene.start("other", answering("deny"))
    scene.interrupt("interrupter", turn)
    scene.ask("b")
    await scene.end()
    # Each caller gets the same result: the answer of one of them, or the interrupt.
    assert len({(each.question, each.answer, each.by) for each in told}) <= 1
    assert sum(each.is_first for each in told) == any(each.by == "answer" for each in told)
    assert (await turn.outcome()).kind in (Kind.DONE, Kind.INTERRUPTED)
    assert scene.outcomes["b"].kind is Kind.DONE
    _check_answered_once(scene)


@case(moment=True)
async def a_callback_answers_and_an_interrupt_comes() -> None:
    async def on_question(question: Question) -> Answer:
        await asyncio.sleep(0)
        return Answer("allow", updated_input={"command": "false"})

    scene = Scene({"a": Play(tool="Bash")}, on_question=on_question)
    await scene.get_ready()
    turn = scene.turns["a"] = await scene.session.ask("a")
    scene.at_any_moment(lambda: scene.interrupt("interrupter", turn))
    scene.ask("b")
    await turn.outcome()
    await asyncio.sleep(2 * MOMENT)
    await scene.end()
    assert scene.outcomes["b"].kind is Kind.DONE
    _check_answered_once(scene)


@case(moment=True)
async def closed_while_a_callback_thinks() -> None:
    async def on_question(question: Question) -> str:
        await asyncio.sleep(100)
        return "allow"

    scene = Scene({"a": Play(tool="Bash")}, on_question=on_question)
    await scene.get_ready()
    scene.ask("a")
    scene.at_any_moment(scene.session.close_nowait)
    await scene.end(is_calm=False)


async def _until_asked(events: AsyncIterable[Event], turn: Turn) -> AsyncGenerator[Event]:
    """Yield the question of this turn, if it asks one."""
    async for event in events:
        if event.turn == turn.id and event.kind == kinds.QUESTION_ASKED:
            yield event
            return
        if event.turn == turn.id and event.kind == kinds.TURN_ENDED:
            return


@case(moment=True)
async def an_answer_and_a_log_that_fails() -> None:
    """An answer that a caller got confirmed is in the log, whenever the log fails."""
    scene = Scene({"a": Play(tool="Bash")})
    await scene.get_ready()
    turn = scene.turns["a"] = await scene.session.ask("a")
    told: list[Answered] = []

    async def answering() -> None:
        async with aclosing(scene.session.events(0, waits=True)) as events:
            asked = [event.body["question"] async for event in _until_asked(events, turn)]
        told.extend([await scene.session.answer(question, "allow") for question in asked])

    def fail() -> None:
        scene.log.is_broken = True

    scene.at_any_moment(fail)
    scene.start("answerer", answering())
    await turn.outcome()
    await asyncio.sleep(2 * MOMENT)
    scene.log.is_broken = False
    await scene.end(is_calm=False)
    assert [type(error) for error in scene.errors.values()] in ([], [StoreError])
    logged = [event async for event in scene.session.events(0, waits=False) if event.kind == kinds.QUESTION_ANSWERED]
    for each in told:
        # An answer that could not reach its process was withdrawn with the process.
        assert (each.answer, each.by) == (("allow", "answer") if each.is_first else ("withdrawn", "store"))
        assert [event.body["answer"] for event in logged] == ["allow"] * each.is_first


def _check_answered_once(scene: Scene) -> None:
    for process in scene.world.processes:
        answered = [answer["request_id"] for answer in process.agent.answers]
        assert len(answered) == len(set(answered))


# -- readers ---------------------------------------------------------------------------------------------------------
def followers(name: str, *, reads_late: bool) -> Scenario:
    async def scenario() -> None:
        scene = Scene(log=WorldLog(reads_late=reads_late))
        await scene.get_ready()
        seen: dict[str, list[int]] = {"one": [], "two": []}

        async def following(name: str) -> None:
            async for event in scene.session.follow():
                seen[name].append(event.seq)

        async def watching() -> None:
            turn = scene.turns["watched"] = await scene.session.ask("watched")
            assert [update["sessionUpdate"] async for update in turn]

        for follower in seen:
            scene.start(follower, following(follower))
        scene.start("watcher", watching())
        await scene.tasks[-1]
        scene.session.close_nowait()
        await scene.end(is_calm=False)
        head = scene.log.head("s").seq
        assert seen["one"] == list(range(1, head + 1))
        assert seen["two"] == seen["one"]

    return named(scenario, name)


case(schedules=250)(followers("two_followers_agree_and_end", reads_late=False))
case(schedules=250)(followers("two_followers_that_hear_late_agree_and_end", reads_late=True))


@case()
async def a_watcher_of_a_turn_ends_with_it_when_the_log_is_lost() -> None:
    scene = Scene({"a": Play(says=("hm",))})
    await scene.get_ready()
    scene.log.faults[scene.log.appends + 4] = Fault.NOT_OWNER

    async def watching() -> None:
        turn = scene.turns["a"] = await scene.session.ask("a")
        async for _ in turn:
            pass

    scene.start("watcher", watching())
    await scene.end()


@case()
async def a_follower_ends_with_a_session_that_lost_its_log() -> None:
    scene = Scene()
    await scene.get_ready()
    scene.log.faults[scene.log.appends + 2] = Fault.NOT_OWNER

    async def following() -> None:
        async for _ in scene.session.follow():
            pass

    scene.start("follower", following())
    scene.ask("a")
    await asyncio.gather(*scene.tasks[1:])
    await scene.session.close()
    await scene.end()


@case()
async def a_second_process_claims_while_appends_are_on_their_way() -> None:
    """An engine may refuse unacknowledged appends when the session is claimed again."""
    scene = Scene({"a": Play(exits_after=Stage.INIT)}, log=WorldLog(refuses_at_claim=True))
    scene.ask("a")
    scene.ask("b")
    await scene.end()
    assert scene.outcomes["b"].kind is Kind.DONE


@case(moment=True)
async def closed_while_a_start_waits_for_the_log() -> None:
    scene = Scene(log=WorldLog(refuses_at_claim=True, commit_seconds=0.1))
    scene.ask("a")
    scene.ask("b")
    scene.at_any_moment(scene.session.close_nowait)
    await scene.end(is_calm=False)


@case()
async def a_claim_fails() -> None:
    scene = Scene()
    scene.log.claims_failing = 1
    scene.ask("a")
    scene.ask("b")
    await scene.end()
    # An ask that was accepted by then failed with the log. The other ask was refused, or came after the log's return.
    assert Kind.FAILED in [outcome.kind for outcome in scene.outcomes.values()]


def a_log_that_refuses_at_each_claim(number: int) -> Scenario:
    async def scenario() -> None:
        log = WorldLog(refuses_at_claim=True, faults={number: Fault.FAILS})
        scene = Scene({"a": Play(exits_after=Stage.INIT)}, log=log)
        scene.ask("a")
        scene.ask("b")
        await scene.end()

    return named(scenario, f"append_{number}_fails_where_claims_refuse")


for _number in range(1, 8):
    case()(a_log_that_refuses_at_each_claim(_number))


@case()
async def a_tree_takes_longer_to_go_than_its_leader() -> None:
    """A process that has exited is not reported as unresponsive."""
    scene = Scene({"a": Play(exits_after=Stage.INIT)}, manners=[Manner(gone_seconds=3.0), TERSE])
    scene.ask("a")
    await scene.end()
    assert "exited" in str(scene.outcomes["a"].error)
