"""Sessions that share a pool, in every order up to two departures from asyncio's order.

crowd.py checks the limits at every moment. These scenarios must also find the bugs that are planted in the pool.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.register_assert_rewrite("tests.simulation.scene", "tests.simulation.crowd")

from tests.simulation.crowd import Crowd  # noqa: E402
from tests.simulation.scenarios import Scenario, named  # noqa: E402
from tests.simulation.scene import MOMENT, explored  # noqa: E402

from banksman.core.session.effects import ReportIdle  # noqa: E402
from banksman.core.session.outcome import Kind  # noqa: E402
from banksman.errors import BugError, NotOwner  # noqa: E402
from banksman.sessions.pool import START_SECONDS_MAX, Pool  # noqa: E402
from banksman.sessions.session_process import SessionProcess  # noqa: E402
from banksman.testing import sim  # noqa: E402
from banksman.testing.world import Manner, Play, WorldLog  # noqa: E402

pytestmark = pytest.mark.thorough


@pytest.fixture(autouse=True)
def is_silent() -> Iterator[None]:
    log = logging.getLogger("banksman")
    level = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(level)


@dataclass(frozen=True, slots=True)
class Case:
    scenario: Scenario
    schedules: int
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    def explore(self, schedules: int | None = None) -> None:
        explored(self.scenario, schedules=schedules or self.schedules, is_complete=False, **self.options)


CASES: dict[str, Case] = {}


def case(*, schedules: int = 80, moment: bool = False) -> Callable[[Scenario], Scenario]:
    def enter(scenario: Scenario) -> Scenario:
        name = getattr(scenario, "__name__", "")
        assert name not in CASES
        CASES[name] = Case(scenario, schedules, {"jitter_seconds": MOMENT} if moment else {})
        return scenario

    return enter


DONE = [Kind.DONE]
SLOW = Play(result_seconds=1.0)


# -- places ----------------------------------------------------------------------------------------------------------
@case()
async def three_sessions_and_one_place() -> None:
    crowd = Crowd("a", "b", "c", processes_max=1, starts_max=1)
    for name in crowd.scenes:
        crowd.ask(name)
    await crowd.end()
    assert [crowd.kinds(name) for name in "abc"] == [DONE] * 3
    assert sorted(crowd.started) == ["a", "b", "c"]
    assert crowd.loop.time() < 1


@case()
async def four_sessions_and_two_places() -> None:
    crowd = Crowd("a", "b", "c", "d", processes_max=2, starts_max=2, plays={"": SLOW})
    for name in crowd.scenes:
        crowd.ask(name)
    await crowd.end()
    assert [crowd.kinds(name) for name in "abcd"] == [DONE] * 4
    assert crowd.loop.time() < 3


@case()
async def the_one_that_was_not_needed_for_the_longest_time_goes() -> None:
    crowd = Crowd("a", "b", "c", "d", processes_max=3)
    await crowd.get_ready("a", "b", "c")
    await asyncio.sleep(1.0)
    await crowd["a"].asking("again")
    crowd.ask("d")
    await crowd.end()
    assert [await crowd.reasons(name) for name in "abcd"] == [[], ["evicted"], [], []]
    assert crowd.started == ["a", "b", "c", "d"]


@case()
async def one_that_is_needed_is_never_taken() -> None:
    """A long turn, and a question that waits for its answer."""
    crowd = Crowd("a", "b", "c", processes_max=2, plays={"long": Play(result_seconds=50.0), "asks": Play(tool="Bash")})
    await crowd.get_ready("a", "b")
    crowd.ask("a", "long")
    crowd.ask("b", "asks")
    await asyncio.sleep(0.5)
    crowd.ask("c")
    await asyncio.sleep(20)
    assert crowd.started == ["a", "b"]
    assert crowd["c"].session.status().waits_for_place
    (question,) = crowd["b"].session.questions()
    crowd["b"].start("answerer", crowd["b"].session.answer(question.id, "allow"))
    await crowd["c"].callers()
    assert crowd.loop.time() < 30
    await crowd.end()
    assert [crowd.kinds(name) for name in "abc"] == [DONE] * 3
    assert [await crowd.reasons(name) for name in "abc"] == [[], ["evicted"], []]


@case()
async def the_most_urgent_is_first() -> None:
    crowd = Crowd("a", "low", "usual", "high", processes_max=1, plays={"first": SLOW})
    await crowd.get_ready("a")
    crowd.ask("a", "first")
    await asyncio.sleep(0.5)
    crowd.ask("low", priority="background")
    crowd.ask("usual")
    crowd.ask("high", priority="interactive")
    await crowd.end()
    assert crowd.started == ["a", "high", "usual", "low"]
    assert [crowd.kinds(name) for name in crowd.scenes] == [DONE] * 4


@case()
async def who_waits_becomes_more_urgent() -> None:
    """The pool compares the waiting asks when a place becomes free, not the order of arrival."""
    crowd = Crowd("a", "one", "two", processes_max=1, plays={"first": SLOW})
    await crowd.get_ready("a")
    crowd.ask("a", "first")
    await asyncio.sleep(0.5)
    crowd.ask("one")
    crowd.ask("two", priority="background")
    await asyncio.sleep(0.1)
    crowd.ask("two", "now", priority="interactive")
    await crowd.end()
    assert crowd.started == ["a", "two", "one"]


@case(schedules=200)
async def an_eviction_and_an_ask_of_the_evicted() -> None:
    """The eviction and a new ask may race: in either order, nothing is lost."""
    crowd = Crowd("a", "b", processes_max=1)
    await crowd.get_ready("a")
    conversation = crowd["a"].session.status().conversation
    crowd.ask("b", "from b")
    crowd.ask("a", "from a")
    await crowd.end()
    assert crowd.kinds("a") == crowd.kinds("b") == DONE
    for process in crowd["a"].world.processes[1:]:
        assert process.resumed == conversation
    assert crowd.loop.time() < 3


@case(moment=True, schedules=200)
async def an_ask_at_any_moment_of_an_eviction() -> None:
    crowd = Crowd("a", "b", processes_max=1, manners={"a": [Manner(is_terse=True, gone_seconds=MOMENT)]})
    await crowd.get_ready("a")
    crowd.ask("b")
    crowd.at_any_moment(lambda: crowd.ask("a"))
    await crowd.callers()
    await asyncio.sleep(2 * MOMENT)
    await crowd.end()
    assert crowd.kinds("a") == crowd.kinds("b") == DONE


@case()
async def two_that_are_needed_in_turns() -> None:
    crowd = Crowd("a", "b", processes_max=1)
    for number in range(3):
        crowd.ask("a", f"{number}")
        crowd.ask("b", f"{number}")
    await crowd.end()
    assert crowd.kinds("a") == crowd.kinds("b") == DONE * 3


# -- starts ----------------------------------------------------------------------------------------------------------
@case()
async def only_so_many_start_at_once() -> None:
    slow = [Manner(start_seconds=0.5, handshake_seconds=0.5, is_terse=True)]
    crowd = Crowd(*"abcde", starts_max=2, manners=dict.fromkeys("abcde", slow))
    for name in crowd.scenes:
        crowd.ask(name)
    await crowd.end()
    assert [crowd.kinds(name) for name in "abcde"] == [DONE] * 5
    # Three rounds of one second, without an unused place in between.
    assert 3.0 <= crowd.loop.time() < 3.5


@case()
async def a_start_that_hangs_does_not_count_for_ever() -> None:
    hangs = [Manner(handshake_seconds=None)]
    crowd = Crowd("a", "b", "c", starts_max=1, manners={"a": hangs, "b": hangs}, start_seconds=60.0)
    crowd.ask("a")
    await asyncio.sleep(0.1)
    crowd.ask("b")
    await asyncio.sleep(0.1)
    crowd.ask("c")
    await crowd["c"].callers()
    assert 2 * START_SECONDS_MAX <= crowd.loop.time() < 2 * START_SECONDS_MAX + 1
    await crowd.end()
    assert crowd.kinds("c") == DONE
    assert crowd.kinds("a") == crowd.kinds("b") == [Kind.FAILED]


def a_start_goes_wrong(name: str, manner: Manner) -> Scenario:
    async def scenario() -> None:
        crowd = Crowd("a", "b", processes_max=1, starts_max=1, manners={"a": [manner]}, start_seconds=3.0)
        crowd.ask("a")
        crowd.ask("b")
        await crowd.callers()
        assert crowd.kinds("b") == DONE
        # The session itself gets a place when it asks again.
        crowd.ask("a", "again")
        await crowd.end()
        assert crowd["a"].outcomes["again"].kind is Kind.DONE

    return named(scenario, name)


case()(a_start_goes_wrong("a_start_that_fails_gives_its_place_back", Manner(fails=True)))
case()(a_start_goes_wrong("a_start_that_raises_gives_its_place_back", Manner(raises=True)))
case()(a_start_goes_wrong("a_start_that_hangs_gives_its_place_back", Manner(handshake_seconds=None)))
case()(a_start_goes_wrong("an_exit_at_the_start_gives_its_place_back", Manner(exits_at=1)))


@case()
async def a_claim_that_fails_gives_its_place_back() -> None:
    crowd = Crowd("a", "b", processes_max=1)
    crowd.log.claims_failing = 1
    crowd.ask("a")
    crowd.ask("b")
    await crowd.end()
    assert sorted([*crowd.kinds("a"), *crowd.kinds("b")]) == [Kind.DONE, Kind.FAILED]


@case(moment=True)
async def an_exit_at_any_moment_gives_its_place_back() -> None:
    crowd = Crowd("a", "b", processes_max=1, plays={"": Play(says=("hm",))})
    await crowd.get_ready("a")
    crowd.ask("a")
    crowd.ask("b")
    crowd.at_any_moment(lambda: crowd["a"].world.processes[0].exit_now(3))
    await crowd.callers()
    await asyncio.sleep(2 * MOMENT)
    await crowd.end()
    assert crowd.kinds("b") == DONE
    assert crowd.kinds("a")[0] in (Kind.DONE, Kind.FAILED)


# -- closing ---------------------------------------------------------------------------------------------------------
@case(moment=True)
async def one_that_waits_is_closed_at_any_moment() -> None:
    crowd = Crowd("a", "b", "c", processes_max=1, plays={"": Play(says=("hm",))})
    await crowd.get_ready("a")
    crowd.ask("a")
    crowd.ask("b")
    crowd.ask("c")
    crowd.at_any_moment(crowd["b"].session.close_nowait)
    await crowd.callers()
    await asyncio.sleep(2 * MOMENT)
    await crowd.end(is_calm=False)
    assert crowd.kinds("a") == crowd.kinds("c") == DONE
    assert set(crowd.kinds("b")) <= {Kind.DONE, Kind.REFUSED, Kind.INTERRUPTED}


@case()
async def one_that_waits_behind_somebody_busy_is_closed() -> None:
    crowd = Crowd("a", "b", "c", processes_max=1, plays={"long": Play(result_seconds=10.0)})
    await crowd.get_ready("a")
    crowd.ask("a", "long")
    await asyncio.sleep(0.5)
    crowd.ask("b")
    await asyncio.sleep(0.5)
    crowd.ask("c")
    await asyncio.sleep(0.5)
    await crowd["b"].session.close()
    assert crowd.loop.time() < 5, "it does not wait for its place"
    await crowd.end()
    assert crowd.kinds("b") == [Kind.REFUSED]
    assert crowd.started == ["a", "c"]


@case(moment=True)
async def who_has_the_place_is_closed_at_any_moment() -> None:
    crowd = Crowd("a", "b", processes_max=1, plays={"": Play(says=("hm",))})
    await crowd.get_ready("a")
    crowd.ask("a")
    crowd.ask("b")
    crowd.at_any_moment(crowd["a"].session.close_nowait)
    await crowd.callers()
    await asyncio.sleep(2 * MOMENT)
    await crowd.end(is_calm=False)
    assert crowd.kinds("b") == DONE


@case()
async def a_bug_in_one_session_is_no_other_sessions_matter() -> None:
    crowd = Crowd("a", "b", processes_max=1)

    def spawn(*_: Any) -> Any:
        raise RuntimeError("a bug of ours")

    crowd["a"].driver.process.spawn = spawn
    await crowd["a"].asking("hi")
    assert isinstance(crowd["a"].outcomes["hi"].error, BugError)
    crowd.ask("b")
    await crowd["b"].callers()
    assert crowd.kinds("b") == DONE
    await crowd["b"].end()
    assert crowd["a"].session.is_closed


# -- one conversation, two sessions ------------------------------------------------------------------------------------
@case()
async def two_sessions_come_into_one_conversation() -> None:
    """Agents have no lock: the first session that names the conversation holds it, and the other session leaves it."""
    same = Manner(is_terse=True, conversation="same")
    crowd = Crowd("a", "b", manners={"a": [same], "b": [same]}, plays={"": SLOW})
    crowd.ask("a")
    crowd.ask("b")
    await crowd.callers()
    [winner] = [name for name in "ab" if crowd.kinds(name) == DONE]
    [loser] = {"a", "b"} - {winner}
    assert crowd.kinds(loser) == [Kind.FAILED]
    assert winner in str(crowd[loser].outcomes["hi"].error)
    # The next process of the other session does not resume that conversation.
    crowd.ask(loser, "again")
    await crowd.end()
    assert crowd.kinds(loser) == [Kind.FAILED, Kind.DONE]
    assert crowd[loser].world.processes[1].resumed is None
    assert crowd[winner].session.status().conversation == "same"


@case()
async def a_conversation_is_free_when_its_session_is_closed() -> None:
    crowd = Crowd("a")
    await crowd["a"].asking("one")
    conversation = crowd["a"].session.status().conversation
    crowd.open("b", conversation=conversation)
    await crowd["b"].session.close()
    [refused] = crowd.scenes.pop("b").refusals
    assert isinstance(refused, NotOwner)
    assert refused.ids["session"] == "a"
    crowd["a"].session.close_nowait()
    await crowd["a"].session.wait_closed()
    crowd.open("c", conversation=conversation)
    crowd.ask("c", "two")
    await crowd.end()
    assert crowd["c"].refusals == []
    assert crowd["c"].world.processes[0].resumed == conversation


# -- every schedule, and the mutants ----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", CASES)
def test_pool_holds_in_every_schedule(name: str) -> None:
    CASES[name].explore()


Patch = Callable[[type, str, Any], None]
MUTANTS: dict[str, tuple[Callable[[Patch], None], tuple[str, ...]]] = {}


def mutant(*found_by: str) -> Callable[[Callable[[Patch], None]], None]:
    def enter(plant: Callable[[Patch], None]) -> None:
        MUTANTS[plant.__name__] = plant, found_by

    return enter


@mutant("three_sessions_and_one_place")
def there_is_always_a_place(patch: Patch) -> None:
    def is_full(count: int, limit: int | None) -> bool:
        return False

    patch(Pool, "_is_full", staticmethod(is_full))


@mutant("four_sessions_and_two_places")
def there_is_one_place_more(patch: Patch) -> None:
    def is_full(count: int, limit: int | None) -> bool:
        return limit is not None and count > limit

    patch(Pool, "_is_full", staticmethod(is_full))


@mutant("only_so_many_start_at_once")
def a_start_is_over_as_it_begins(patch: Patch) -> None:
    plain: Any = SessionProcess.start_now

    def start_now(self: Any) -> None:
        plain(self)
        self._pool.has_started(self)

    patch(SessionProcess, "start_now", start_now)


@mutant("only_so_many_start_at_once", "a_start_that_hangs_does_not_count_for_ever")
def a_start_is_over_when_its_time_is(patch: Patch) -> None:
    """The pool does not get the report that the process is ready."""
    plain: Any = Pool.has_started

    def has_started(self: Any, seat: Any) -> None:
        if seat in self._starting and self._starting[seat].when() <= asyncio.get_running_loop().time():
            plain(self, seat)

    patch(Pool, "has_started", has_started)


@mutant("a_start_that_hangs_does_not_count_for_ever")
def a_start_that_hangs_counts_for_ever(patch: Patch) -> None:
    plain: Any = Pool.has_started

    def has_started(self: Any, seat: Any) -> None:
        timer = self._starting.get(seat)
        if timer is not None and timer.when() > asyncio.get_running_loop().time():
            plain(self, seat)

    patch(Pool, "has_started", has_started)


@mutant("the_one_that_was_not_needed_for_the_longest_time_goes")
def the_last_one_used_is_the_first_to_go(patch: Patch) -> None:
    patch(
        SessionProcess,
        "idle_since",
        property(lambda self: None if (s := self._driver.state.idle_since) is None else -s),
    )


@mutant("one_that_is_needed_is_never_taken")
def whoever_is_there_is_taken(patch: Patch) -> None:
    def evict(self: Any) -> None:
        self._stop()

    patch(SessionProcess, "evict", evict)
    patch(SessionProcess, "idle_since", property(lambda self: 0.0))


@mutant("the_most_urgent_is_first")
def the_first_is_the_first(patch: Patch) -> None:
    patch(SessionProcess, "urgency", property(lambda self: 0))


@mutant("three_sessions_and_one_place")
def nobody_looks_when_one_is_idle(patch: Patch) -> None:
    plain: Any = SessionProcess.perform

    def perform(self: Any, effect: Any) -> None:
        if not isinstance(effect, ReportIdle):
            plain(self, effect)

    patch(SessionProcess, "perform", perform)


@mutant("three_sessions_and_one_place")
def nobody_looks_when_one_has_left(patch: Patch) -> None:
    plain: Any = Pool.leave

    def leave(self: Any, seat: Any) -> None:
        if self.is_waiting(seat):
            plain(self, seat)
        self._there.discard(seat)
        self._told.discard(seat)

    patch(Pool, "leave", leave)


@mutant("one_that_waits_behind_somebody_busy_is_closed", "one_that_waits_is_closed_at_any_moment")
def one_that_was_closed_still_waits(patch: Patch) -> None:
    plain: Any = Pool.leave

    def leave(self: Any, seat: Any) -> None:
        if self.is_waiting(seat):
            self.look()
        else:
            plain(self, seat)

    patch(Pool, "leave", leave)


@mutant("a_start_that_raises_gives_its_place_back", "a_claim_that_fails_gives_its_place_back")
def a_start_that_came_to_nothing_keeps_its_place(patch: Patch) -> None:
    plain: Any = Pool.leave

    def leave(self: Any, seat: Any) -> None:
        if self.is_waiting(seat) or seat._driver.state.process.phase.name != "STARTING":
            plain(self, seat)

    patch(Pool, "leave", leave)


@mutant("two_sessions_come_into_one_conversation")
def nobody_looks_whose_conversation_it_is(patch: Patch) -> None:
    def hold(self: Any, conversation: str | None) -> None:
        pass

    patch(SessionProcess, "_hold_conversation", hold)


@mutant("a_conversation_is_free_when_its_session_is_closed")
def a_conversation_is_never_given_back(patch: Patch) -> None:
    def release(self: Any, name: str, session: str) -> None:
        pass

    patch(WorldLog, "release", release)


@pytest.mark.parametrize("name", MUTANTS)
def test_exploration_finds_planted_bug(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, found_by = MUTANTS[name]
    plant(monkeypatch.setattr)
    for found in found_by:
        try:
            CASES[found].explore(400)
        except (sim.ScheduleFailed, sim.NotDeterministic) as failed:
            print(f"{name}: found by {found}: {str(failed).splitlines()[:2]}")
            return
    raise AssertionError(f"{name} was not found")
