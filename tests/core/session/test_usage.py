"""Tests of the usage of turns: what a report and an end add, and how long a turn works."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.core.session.histories import Told
from tests.core.session.scenarios import ask

from banksman.core.dialects.dialect import Decision
from banksman.core.dialects.meaning import Requested, RequestPurpose, TurnOver, UsageReported
from banksman.core.dialects.tokens import Tokens
from banksman.core.session.ask_queue import NORMAL
from banksman.core.session.facts import AskWithdrawn, FramesRead, QuestionAnswered
from banksman.core.session.outcome import outcome_of
from banksman.core.session.state import ProcessPhase
from banksman.core.session.usage import CALLS_MAX, Meter, Usage

FINAL = TurnOver()


def bodies(talk: Told, *kinds: str) -> list[dict[str, Any]]:
    return [msgspec.json.decode(data) for append in talk.appends for _, kind, data in append if kind in kinds]


def begin(talk: Told, id: str, **more: Any) -> None:
    """Ask, and let the agent begin with the prompt."""
    talk.ask(replace(ask(id, NORMAL), **more))
    if talk.state.process.phase is ProcessPhase.STARTING:
        talk.begin()
    talk.opens(f"{id}0000")


def end(talk: Told, id: str, **how: Any) -> None:
    talk.mean(TurnOver((f"{id}0000",), **how))
    talk.hear(f"settled {id}0000".encode())


def begun(**more: Any) -> Told:
    """Return a talk in the middle of the turn of `a`."""
    talk = Told()
    begin(talk, "a", **more)
    return talk


def test_report_and_end_add_up_to_usage_of_turn() -> None:
    talk = begun(caller="alice")
    talk.mean(UsageReported("c1", Tokens(10, 1)))
    talk.mean(UsageReported("c1", Tokens(0, 9)))
    talk.mean(UsageReported("c2", Tokens(20, 1)))
    end(talk, "a", tokens=Tokens(30, 15), cost=0.5)
    reports = bodies(talk, "usage.reported")
    assert [report["added"]["tokens"]["input"] for report in reports] == [10, 0, 20]
    assert [report["used"]["tokens"]["output"] for report in reports] == [1, 9, 10]
    assert {report["caller"] for report in reports} == {"alice"}
    [ended] = bodies(talk, "turn.ended")
    assert ended["added"]["tokens"] == {"input": 0, "output": 5, "cache_read": 0, "cache_write": 0}
    assert ended["added"]["turns"] == 1
    assert ended["caller"] == "alice"
    assert outcome_of(ended).used == Usage(Tokens(30, 15), 0.5, 0.0, 1)


def test_repeated_report_is_not_logged() -> None:
    talk = begun()
    for _ in range(3):
        talk.mean(UsageReported("c1", Tokens(10, 1)))
    assert len(bodies(talk, "usage.reported")) == 1


def test_report_without_open_turn_is_not_counted() -> None:
    talk = begun()
    end(talk, "a")
    talk.mean(UsageReported("c1", Tokens(10, 1)))
    assert bodies(talk, "usage.reported") == []


def test_cost_during_turn_is_difference_to_conversation() -> None:
    talk = begun()
    end(talk, "a", spent=1.0)
    begin(talk, "b")
    for spent in (1.25, 1.25, 1.75):
        talk.mean(UsageReported(spent=spent))
    end(talk, "b", spent=2.0)
    assert [report["added"]["usd"] for report in bodies(talk, "usage.reported")] == [0.25, 0.5]
    ended = bodies(talk, "turn.ended")[-1]
    assert (ended["added"]["usd"], ended["used"]["usd"]) == (0.25, 1.0)


def test_ask_that_was_never_sent_has_no_usage() -> None:
    talk = begun()
    talk.ask(ask("b", NORMAL))
    talk.tell(AskWithdrawn(0.0, "b"))
    [ended] = bodies(talk, "turn.ended")
    assert (ended["used"], ended["added"]) == (None, None)


def test_boundary_with_less_than_calls_does_not_decide() -> None:
    meter = Meter().reported(UsageReported("c1", Tokens(10, 5)), None)
    assert meter.bounded(replace(FINAL, tokens=Tokens(0, 1))).over.tokens == Tokens(10, 5)
    assert meter.bounded(replace(FINAL, tokens=Tokens(8, 9))).over.tokens == Tokens(8, 9)
    assert meter.bounded(FINAL).over.tokens == Tokens(10, 5)


def test_number_of_open_model_calls_is_bounded() -> None:
    meter = Meter()
    for number in range(CALLS_MAX * 3):
        meter = meter.reported(UsageReported(f"c{number}", Tokens(1)), None)
    assert len(meter.calls) == CALLS_MAX
    assert meter.tokens == Tokens(CALLS_MAX * 3)


def test_working_time_excludes_wait_for_answer() -> None:
    meter = Meter().paused(3.0, has_question=True).paused(5.0, has_question=True)
    assert meter.used(1.0, 10.0).working_seconds == 2.0
    meter = meter.paused(10.0, has_question=False)
    assert meter.used(1.0, 12.0).working_seconds == 4.0
    assert meter.paused(12.0, has_question=False) == meter


@pytest.mark.parametrize("is_answered", [True, False])
def test_turn_does_not_work_while_it_waits_for_an_answer(is_answered: bool) -> None:
    talk = begun()
    question = Requested("q1", RequestPurpose.PERMISSION, "can_use_tool", "saw")
    talk.tell(FramesRead(2.0, 1, [b"ask q1"], [(0, question)]))
    if is_answered:
        [asked] = talk.state.questions
        talk.tell(QuestionAnswered(7.0, asked.id, Decision(allows=True)))
    talk.at = 10.0
    end(talk, "a")
    [ended] = bodies(talk, "turn.ended")
    assert ended["used"]["working_seconds"] == (5.0 if is_answered else 2.0)
