"""Mutants of the driver and the session: the exploration must find each planted bug."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.register_assert_rewrite("tests.simulation.scene", "tests.simulation.scenarios")

from tests.simulation.scenarios import CASES  # noqa: E402
from tests.thorough import thorough  # noqa: E402

from banksman.core.process_facts import Report, WriteFailed  # noqa: E402
from banksman.core.session.facts import AskWithdrawn, Fact, HoldReleased  # noqa: E402
from banksman.dispatcher import Dispatcher  # noqa: E402
from banksman.sessions import log_reader  # noqa: E402
from banksman.sessions.agent_process import DrivenProcess  # noqa: E402
from banksman.sessions.caller_futures import CallerFutures  # noqa: E402
from banksman.sessions.driver import Driver  # noqa: E402
from banksman.sessions.log_reader import LogReaders  # noqa: E402
from banksman.sessions.log_writer import LogWriter  # noqa: E402
from banksman.sessions.questions import OpenQuestions  # noqa: E402
from banksman.sessions.session_process import SessionProcess  # noqa: E402
from banksman.sessions.session_timers import SessionTimers  # noqa: E402
from banksman.testing import sim  # noqa: E402

Patch = Callable[[type, str, Callable[..., Any]], None]
MUTANTS: dict[str, tuple[Callable[[Patch], None], tuple[str, ...]]] = {}


def mutant(*found_by: str) -> Callable[[Callable[[Patch], None]], None]:
    def enter(plant: Callable[[Patch], None]) -> None:
        MUTANTS[plant.__name__] = plant, found_by

    return enter


@pytest.fixture(autouse=True)
def is_silent() -> Iterator[None]:
    log = logging.getLogger("banksman")
    level = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(level)


@mutant("frames_are_taken_at_once")
def a_fact_that_is_born_of_an_effect_is_dispatched_at_once(patch: Patch) -> None:
    def dispatch(self: Any, fact: Fact) -> None:
        self._handle(fact)

    patch(Dispatcher, "dispatch", dispatch)


@mutant(*(f"append_{number}_fails" for number in range(1, 12)))
def an_answer_of_an_older_run_is_told_to_the_core(patch: Patch) -> None:
    plain: Any = LogWriter._on_answer  # pyright: ignore[reportPrivateUsage]

    def on_answer(self: Any, run: int, seq: int, size: int, error: Any) -> None:
        plain(self, self._run, seq, size, error)

    patch(LogWriter, "_on_answer", on_answer)


@mutant(*(f"append_{number}_fails" for number in range(1, 12)))
def after_a_failure_appends_go_on_where_they_were(patch: Patch) -> None:
    plain: Any = LogWriter._on_answer  # pyright: ignore[reportPrivateUsage]

    def on_answer(self: Any, run: int, seq: int, size: int, error: Any) -> None:
        appended = self._appended
        plain(self, run, seq, size, error)
        if error is not None:
            self._appended = appended

    patch(LogWriter, "_on_answer", on_answer)


@mutant("two_callers_and_the_first_process", "the_drain_is_over_as_the_boundary_comes")
def a_timer_that_was_cancelled_is_kept(patch: Patch) -> None:
    def cancel(self: Any, subject: Any) -> None:
        del self, subject

    patch(SessionTimers, "cancel", cancel)


@mutant("a_window_closes_and_its_turn_takes_its_time")
def a_timer_that_fired_is_kept(patch: Patch) -> None:
    def on_due(self: Any, subject: Any) -> None:
        if subject in self.running:
            self._fire(subject)

    patch(SessionTimers, "_on_due", on_due)


@mutant("a_write_breaks")
def a_broken_write_is_ignored(patch: Patch) -> None:
    plain: Any = SessionProcess._on_report  # pyright: ignore[reportPrivateUsage]

    def on_report(self: Any, number: int, report: Report) -> None:
        if not isinstance(report, WriteFailed):
            plain(self, number, report)

    patch(SessionProcess, "_on_report", on_report)


@mutant("an_exit_at_any_moment", "a_write_breaks")
def the_next_process_is_told_apart_by_nothing(patch: Patch) -> None:
    plain: Any = SessionProcess._on_report  # pyright: ignore[reportPrivateUsage]

    def on_report(self: Any, number: int, report: Report) -> None:
        plain(self, 1, report)

    patch(SessionProcess, "_on_report", on_report)


@mutant("the_log_is_slower_than_the_agent")
def an_agent_that_was_paused_is_never_read_again(patch: Patch) -> None:
    def resume(self: Any) -> None:
        pass

    patch(DrivenProcess, "resume", resume)


@mutant("a_caller_is_cancelled")
def an_ask_that_was_cancelled_is_not_withdrawn(patch: Patch) -> None:
    plain: Any = Driver.dispatch

    def dispatch(self: Any, fact: Fact) -> None:
        if not isinstance(fact, AskWithdrawn):
            plain(self, fact)

    patch(Driver, "dispatch", dispatch)


@mutant("a_caller_is_cancelled")
def an_ask_that_was_cancelled_loses_its_turn(patch: Patch) -> None:
    plain: Any = Driver.dispatch

    def dispatch(self: Any, fact: Fact) -> None:
        if isinstance(fact, AskWithdrawn):
            self._listener._turns.pop(fact.turn, None)
        plain(self, fact)

    patch(Driver, "dispatch", dispatch)


@mutant("a_holder_is_cancelled")
def a_hold_that_was_cancelled_is_not_released(patch: Patch) -> None:
    plain: Any = Driver.dispatch

    def dispatch(self: Any, fact: Fact) -> None:
        if not isinstance(fact, HoldReleased):
            plain(self, fact)

    patch(Driver, "dispatch", dispatch)


@mutant("a_caller_is_cancelled_while_the_log_breaks")
def whoever_waits_to_be_accepted_cancels_the_acceptance(patch: Patch) -> None:
    def reject(self: Any, turn: str, error: Any) -> None:
        del self._turns[turn]
        self._accepting[turn].set_exception(error)

    patch(CallerFutures, "reject", reject)


@mutant("two_followers_that_hear_late_agree_and_end")
def a_follower_looks_for_the_end_after_it_has_read(patch: Patch) -> None:
    async def events(self: Any, after: int, *, waits: bool, until: asyncio.Future[Any] | None = None) -> Any:
        seq, ends = after, (self._finished, *([until] if until else []))
        while True:
            page = await self._read(self._store.read(self._session, seq))
            for event in page.events:
                yield event
                seq = event.seq
            if not page.events:
                if not waits or any(end.done() for end in ends):
                    return
                await self._read(self._wait_past(seq, ends))

    patch(LogReaders, "events", events)


@mutant("a_follower_ends_with_a_session_that_lost_its_log")
def the_end_forgets_those_who_follow(patch: Patch) -> None:
    async def wait_past(self: Any, seq: int, ends: Any) -> None:
        await self._store.wait_past(self._session, seq)

    patch(LogReaders, "_wait_past", wait_past)
    never: Any = False
    patch(log_reader._CommitWait, "_is_over", never)  # pyright: ignore[reportPrivateUsage]


@mutant("closed_while_a_callback_thinks")
def a_question_that_is_over_leaves_its_callback(patch: Patch) -> None:
    def close(self: Any, id: str) -> None:
        self._open.pop(id, None)

    patch(OpenQuestions, "close", close)


@thorough
@pytest.mark.parametrize("name", MUTANTS)
def test_exploration_finds_planted_bug(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, found_by = MUTANTS[name]
    plant(monkeypatch.setattr)
    for case in found_by:
        try:
            # Deeper than the daily run: some mutants need two specific departures.
            replace(CASES[case], schedules=800, is_complete=False).explore()
        except (sim.ScheduleFailed, sim.NotDeterministic) as failed:
            print(f"{name}: found by {case}: {str(failed).splitlines()[:2]}")
            return
    raise AssertionError(f"{name} was not found")
