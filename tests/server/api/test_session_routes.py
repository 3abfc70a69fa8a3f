"""Sessions over HTTP, with a real server, an agent process and several clients. Includes scenarios 58 and 64."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.server.kit import Answer, Served

from banksman import Host
from banksman.testing import fake_agent

ASKS = {"prompt 1": ['ask Bash {"command": "make test"}', "say done"]}


def wait_for(served: Served, session: str, kind: str, *, turn: str | None = None) -> Any:
    """Wait for the first event of this kind and return it."""
    with served.stream(f"/v1/sessions/{session}/events") as stream:
        for message in stream.messages():
            if message.id is not None and message.data["kind"] == kind and turn in (None, message.data["turn"]):
                return message.data
    raise AssertionError(f"there was no {kind}")


def at_once(*calls: Any) -> list[Answer]:
    """Run several clients, each in a thread, from the same moment."""
    gate = threading.Barrier(len(calls))
    answers: list[Answer | None] = [None] * len(calls)

    def do(number: int) -> None:
        gate.wait()
        answers[number] = calls[number]()

    threads = [threading.Thread(target=do, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answer for answer in answers if answer is not None]


# -- turns -----------------------------------------------------------------------------------------------------------
def test_turn_runs_from_ask_to_outcome(served: Served) -> None:
    session = served.open(name="fix-ci")
    accepted = served.request("POST", "/v1/sessions/fix-ci/turns", {"prompt": "hello"})
    assert accepted.status == 202
    turn = accepted.json["turn"]
    assert accepted.headers["location"] == f"/v1/sessions/{session}/turns/{turn}"
    assert served.outcome(session, turn) == {
        **{"kind": "done", "text": "hello", "stop_reason": "end_turn", "structured": None, "error": None},
        **{"clock": None, "durable": True, "background": []},
        **{"failure": None, "used_tools": False, "empty": False},
        **{name: served.outcome(session, turn)[name] for name in ("usage", "cost", "used")},
    }
    shown = served.get("/v1/sessions/fix-ci")
    assert (shown["id"], shown["name"], shown["phase"], shown["holder"]) == (session, "fix-ci", "idle", None)


def test_turn_has_a_deadline(served: Served) -> None:
    session = served.open()
    path = f"/v1/sessions/{session}/turns"
    running = served.ask(session, "@@hang")
    late = served.post(path, {"prompt": "late", "deadline": 0.1})["turn"]
    outcome = served.outcome(session, late)
    assert (outcome["kind"], outcome["clock"]) == ("withdrawn", "deadline")
    for wrong in (0, -1, 1e9):
        assert served.request("POST", path, {"prompt": "late", "deadline": wrong}).status == 422
    served.post(f"{path}/{running}/interrupt")


def test_outcome_lists_background_tasks(served: Served) -> None:
    session = served.open()
    turn = served.ask(session, "@@tasks b1\n@@say started it")
    task = {"id": "b1", "kind": "local_bash", "description": "task b1"}
    assert served.outcome(session, turn)["background"] == [task]
    assert wait_for(served, session, "tasks.changed")["body"] == {"tasks": [task]}


def test_accepted_turns_survive_a_server_kill(fresh: Served) -> None:
    """The turn that ran is unknown and never sent again. The ask that waited runs without another request."""
    session = fresh.open({"prompt work": ["hang"]})
    running, waiting = fresh.ask(session, "work"), fresh.ask(session, "more")
    wait_for(fresh, session, "turn.started", turn=running)
    fresh.kill()
    fresh.start()
    assert fresh.outcome(session, running)["kind"] == "unknown"
    assert fresh.outcome(session, waiting)["kind"] == "done"


def test_late_interrupt_does_not_stop_the_next_turn(served: Served) -> None:
    """Scenario 58. The page still shows the first turn, and the user presses its stop when the second one runs."""
    session = served.open({"prompt 2": ["stream 3 0.01", "say second"]})
    first = served.ask(session, "first")
    assert served.outcome(session, first)["kind"] == "done"
    second = served.ask(session, "second")
    receipt = served.post(f"/v1/sessions/{session}/turns/{first}/interrupt")
    assert (receipt["stopped"], receipt["by"]) == (False, "already_over")
    assert served.outcome(session, second)["kind"] == "done"


def test_interrupt_of_gone_client_stops_only_its_turn(served: Served) -> None:
    """Scenario 58 in reverse: the receipt comes after its client has gone, while the next turn runs."""
    session = served.open({"prompt 1": ["hang"]})
    first = served.ask(session, "first")
    wait_for(served, session, "turn.started", turn=first)
    second = served.ask(session, "second")
    with served.stream(f"/v1/sessions/{session}/turns/{first}/interrupt"):
        pass  # The route refuses a GET, and the client is gone before the refusal arrives.
    answers = at_once(
        *(lambda: served.request("POST", f"/v1/sessions/{session}/turns/{first}/interrupt"),) * 3,
    )
    assert all(answer.json["stopped"] or answer.json["by"] == "already_over" for answer in answers)
    assert served.outcome(session, first)["kind"] == "interrupted"
    assert served.outcome(session, second)["kind"] == "done"


def test_session_interrupt_stops_the_running_turn(served: Served) -> None:
    session = served.open({"prompt 1": ["hang"]})
    assert served.post(f"/v1/sessions/{session}/interrupt") == {
        **{"stopped": False, "by": "already_over", "kept": None, "queued": []}
    }
    turn = served.ask(session, "work")
    wait_for(served, session, "turn.started", turn=turn)
    assert served.post(f"/v1/sessions/{session}/interrupt")["stopped"]
    assert served.outcome(session, turn)["kind"] == "interrupted"


def test_turn_wait_ends_at_its_timeout_without_outcome(served: Served) -> None:
    session = served.open({"prompt 1": ["hang"]})
    turn = served.ask(session, "work")
    shown = served.get(f"/v1/sessions/{session}/turns/{turn}?wait=0.05")
    assert shown["outcome"] is None
    assert shown["state"] in ("queued", "starting", "running")


# -- questions -------------------------------------------------------------------------------------------------------
def test_question_answered_by_two_clients_has_one_winner(served: Served) -> None:
    """Scenario 64."""
    session = served.open(ASKS)
    turn = served.ask(session, "go")
    question = wait_for(served, session, "question.asked")["body"]["question"]
    path = f"/v1/sessions/{session}/questions/{question}"
    allow, deny = at_once(
        lambda: served.request("POST", path, {"decision": "allow"}),
        lambda: served.request("POST", path, {"decision": "deny"}),
    )
    assert (allow.status, deny.status) == (200, 200)
    assert allow.json["first"] is not deny.json["first"]
    assert allow.json["answer"] == deny.json["answer"]
    winner = "allow" if allow.json["first"] else "deny"
    assert allow.json["answer"] == winner
    assert served.outcome(session, turn)["kind"] == "done"
    answered = [
        event["body"]["answer"]
        for event in served.get(f"/v1/sessions/{session}/events")["events"]
        if event["kind"] == "question.answered"
    ]
    assert answered == [winner]


@pytest.mark.thorough
def test_question_answer_sent_again_is_the_same_after_a_restart(fresh: Served) -> None:
    session = fresh.open(ASKS)
    turn = fresh.ask(session, "go")
    question = wait_for(fresh, session, "question.asked")["body"]["question"]
    path = f"/v1/sessions/{session}/questions/{question}"
    first = fresh.post(path, {"decision": "allow", "message": "go on"})
    answered = {"question": question, "answer": "allow", "by": "answer", "message": "go on", "caller": None}
    assert first == {**answered, "first": True}
    assert fresh.post(path, {"decision": "allow"}) == {**first, "first": False}
    assert fresh.outcome(session, turn)["kind"] == "done"
    fresh.kill()
    fresh.start()
    assert fresh.post(path, {"decision": "deny"}) == {**first, "first": False}
    assert fresh.request("POST", f"{path}0", {"decision": "allow"}).status == 404


def test_tool_waits_for_the_decision_and_the_session_shows_it(served: Served, tmp_path: Path) -> None:
    """Scenario 64: the tool's file appears only after the answer. Meanwhile the other watchdogs stand still."""
    made = tmp_path / "made"
    script = {"prompt 1": ['ask Bash {"command": "touch"}', f"touch {made}", "say done"]}
    session = served.open(script, options={"clocks": {"progress": 600}})
    turn = served.ask(session, "go")
    question = wait_for(served, session, "question.asked")["body"]["question"]
    (waiting,) = served.get(f"/v1/sessions/{session}/questions")["questions"]
    assert (waiting["id"], waiting["tool"], waiting["input"]) == (question, "Bash", {"command": "touch"})
    why = served.get(f"/v1/sessions/{session}/why")
    assert why["questions"] == [question]
    assert not [clock["name"] for clock in why["clocks"] if clock["running"] and clock["name"] != "human"]
    assert not made.exists()
    served.post(f"/v1/sessions/{session}/questions/{question}", {"decision": "allow"})
    assert served.outcome(session, turn)["kind"] == "done"
    assert made.exists()
    assert served.get(f"/v1/sessions/{session}/questions") == {"questions": []}


@pytest.mark.thorough
def test_question_expires_once_and_late_answer_is_not_first(served: Served) -> None:
    session = served.open(ASKS, options={"question_seconds": 0.05})
    turn = served.ask(session, "go")
    question = wait_for(served, session, "question.answered")["body"]["question"]
    late = served.post(f"/v1/sessions/{session}/questions/{question}", {"decision": "allow"})
    assert (late["answer"], late["by"], late["first"]) == ("deny", "expiry", False)
    assert served.outcome(session, turn)["kind"] == "done"


# -- sessions --------------------------------------------------------------------------------------------------------
def test_session_is_listed_changed_closed_and_forgotten(fresh: Served) -> None:
    sessions = [fresh.open(name=name) for name in ("one", "two", "three")]
    listed = fresh.get("/v1/sessions?limit=2")
    assert [session["name"] for session in listed["sessions"]] == ["one", "two"]
    assert listed["next"] == sessions[1]
    rest = fresh.get(f"/v1/sessions?limit=2&after={listed['next']}")
    assert ([session["name"] for session in rest["sessions"]], rest["next"]) == (["three"], None)
    changed = fresh.request("PATCH", "/v1/sessions/one", {"name": "first"})
    assert (changed.status, changed.json["name"], changed.json["id"]) == (200, "first", sessions[0])
    assert fresh.request("PATCH", "/v1/sessions/two", {"name": "first"}).status == 409
    closed = fresh.request("DELETE", "/v1/sessions/two")
    assert (closed.status, closed.json["phase"]) == (200, "closed")
    assert fresh.request("DELETE", "/v1/sessions/two?forget=1").status == 204
    assert fresh.request("GET", "/v1/sessions/two").status == 404
    assert len(fresh.get("/v1/sessions")["sessions"]) == 2


def test_closed_session_resumes_when_asked(served: Served) -> None:
    session = served.open()
    assert served.outcome(session, served.ask(session, "one"))["kind"] == "done"
    served.request("DELETE", f"/v1/sessions/{session}")
    assert served.outcome(session, served.ask(session, "two"))["text"] == "two"


def test_why_shows_the_process_tree(served: Served) -> None:
    session = served.open()
    served.outcome(session, served.ask(session, "one"))
    why = served.get(f"/v1/sessions/{session}/why")
    assert why["pids"][0] in [process["pid"] for process in why["tree"]]
    assert why["counters"]["frames_in"] > 0


def test_agents_route_lists_agents_and_where_they_are(served: Served) -> None:
    agents = served.get("/v1/agents")["agents"]
    assert "claude" in [agent["name"] for agent in agents]
    assert all(agent["found"] is (agent["path"] is not None) for agent in agents)


def test_session_name_may_contain_a_slash(served: Served) -> None:
    session = served.open(name="a/b ü")
    assert served.get("/v1/sessions/a%2Fb%20%C3%BC")["id"] == session
    assert served.request("GET", "/v1/sessions/a/b").status == 404


# -- sessions of another host ----------------------------------------------------------------------------------------
@pytest.mark.thorough
async def test_session_of_another_host_is_shown_without_waiting(tmp_path: Path) -> None:
    """The other host has a running turn, a waiting ask and a question. The log shows each immediately."""
    with Served(tmp_path / "server") as served:
        async with Host(f"sqlite:{tmp_path / 'server' / 'store.db'}") as host:
            session = await host.open("claude", command=fake_agent.command(ASKS))
            running, waiting = await session.ask("go"), await session.ask("later")
            async for event in session.follow():
                if event.kind == "question.asked":
                    break
            path = f"/v1/sessions/{session.id}"

            def look() -> tuple[Any, ...]:
                (question,) = served.get(f"{path}/questions")["questions"]
                turns = [served.get(f"{path}/turns/{turn.id}?wait=0.05") for turn in (running, waiting)]
                refused = served.request("POST", f"{path}/questions/{question['id']}", {"decision": "allow"})
                return question, turns, refused

            question, turns, refused = await asyncio.to_thread(look)
            assert (question["tool"], question["turn"]) == ("Bash", running.id)
            assert [(turn["state"], turn["outcome"]) for turn in turns] == [("running", None), ("queued", None)]
            assert (refused.status, refused.json["title"]) == (409, "NotOwner")
            await session.answer(question["id"], "allow")
            await running.outcome()
        assert (await asyncio.to_thread(served.outcome, session.id, running.id))["kind"] == "done"
