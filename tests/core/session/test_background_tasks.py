"""Background tasks of an agent in a session: in outcomes, in the log, and during a drain or a leave."""

from __future__ import annotations

import pytest
from tests.core.session.scenarios import ask
from tests.core.session.talk import TELLING, Talk, of

from banksman.core.dialects.meaning import BackgroundTask, TasksChanged
from banksman.core.session import event as kinds
from banksman.core.session.ask_queue import NORMAL
from banksman.core.session.effects import StopProcess
from banksman.core.session.facts import CallerFact, DrainAsked, LeaveAsked
from banksman.core.session.outcome import Kind, outcome_of

A, B = ask("a", NORMAL), ask("b", NORMAL)
SERVER = BackgroundTask("t1", "local_bash", "a server")
SERVER_BODY = {"id": "t1", "kind": "local_bash", "description": "a server"}


def with_task() -> Talk:
    talk = Talk(TELLING)
    talk.ask(A)
    talk.begin()
    talk.opens(A.ref)
    talk.mean(TasksChanged((SERVER,)))
    return talk


def stopped(talk: Talk) -> bool:
    return bool(of(StopProcess, talk.effects))


def test_outcome_lists_tasks_that_still_run() -> None:
    talk = with_task()
    talk.over(A.ref)
    assert talk.outcomes["a"].background == (SERVER,)
    [body] = talk.logged(kinds.TURN_ENDED)
    assert body["background"] == [SERVER_BODY]
    assert outcome_of(body).background == (SERVER,)
    # An event of an older version has no such member.
    del body["background"]
    assert outcome_of(body).background == ()


def test_outcome_lists_no_task_that_is_over() -> None:
    talk = with_task()
    talk.mean(TasksChanged(()))
    talk.over(A.ref)
    assert talk.outcomes["a"].background == ()


def test_tasks_end_with_their_process() -> None:
    talk = with_task()
    talk.die(code=1)
    assert (talk.kinds["a"], talk.outcomes["a"].background) == (Kind.FAILED, ())
    assert talk.logged(kinds.TASKS_CHANGED) == [{"tasks": [SERVER_BODY]}, {"tasks": []}]


def test_change_of_tasks_is_logged_once() -> None:
    talk = with_task()
    talk.mean(TasksChanged((SERVER,)))
    assert talk.logged(kinds.TASKS_CHANGED) == [{"tasks": [SERVER_BODY]}]


@pytest.mark.parametrize("fact", [DrainAsked(0.0), LeaveAsked(0.0), LeaveAsked(0.0, 1000.0)])
def test_drain_waits_until_tasks_are_over(fact: CallerFact) -> None:
    talk = with_task()
    talk.tell(fact)
    talk.over(A.ref)
    assert talk.kinds == {"a": Kind.DONE}
    assert not stopped(talk)
    talk.mean(TasksChanged(()))
    assert stopped(talk)


@pytest.mark.parametrize("fact", [DrainAsked(0.0), LeaveAsked(0.0)])
def test_drain_of_idle_session_waits_for_tasks_for_a_limited_time(fact: CallerFact) -> None:
    talk = with_task()
    talk.over(A.ref)
    talk.tell(fact)
    talk.wait(TELLING.background_seconds - 0.5)
    assert not stopped(talk)
    talk.wait(0.5)
    assert stopped(talk)


def test_leave_stops_tasks_at_its_deadline() -> None:
    talk = with_task()
    talk.over(A.ref)
    talk.tell(LeaveAsked(0.0, 5.0))
    talk.wait(5.0)
    assert stopped(talk)
