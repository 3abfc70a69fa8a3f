"""`Idempotency-Key`: what is sent again is answered again, and done once. Across a kill, too."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.serve.kit import Answer, Served

from banksman.testing import fake_agent


def send(served: Served, path: str, body: Any, key: str) -> Answer:
    return served.request("POST", path, body, headers={"Idempotency-Key": key})


def at_once(served: Served, path: str, body: Any, key: str, times: int = 20) -> list[Answer]:
    with ThreadPoolExecutor(times) as pool:
        return [sent.result() for sent in [pool.submit(send, served, path, body, key) for _ in range(times)]]


def test_what_comes_twenty_times_at_once_is_done_once(tmp_path: Path) -> None:
    with Served(tmp_path / "server") as served:
        body = {"command": fake_agent.command()}
        opened = at_once(served, "/v1/sessions", body, "open")
        assert {answer.status for answer in opened} == {201}
        assert len({(answer.body, answer.headers["location"]) for answer in opened}) == 1
        (session,) = served.get("/v1/sessions")["sessions"]

        turns = f"/v1/sessions/{session['id']}/turns"
        asked = at_once(served, turns, {"prompt": "hello"}, "ask")
        assert {answer.status for answer in asked} == {202}
        (turn,) = {answer.json["turn"] for answer in asked}
        served.outcome(session["id"], turn)
        events = served.get(f"/v1/sessions/{session['id']}/events?limit=1000")["events"]
        assert sum(event["kind"] == "turn.queued" for event in events) == 1, [event["kind"] for event in events]

        started = at_once(served, "/v1/commands", {"argv": ["true"]}, "start")
        assert {answer.status for answer in started} == {201}
        assert len({answer.json["id"] for answer in started}) == 1
        assert len(served.get("/v1/commands")["commands"]) == 1


def test_another_body_under_a_key_is_refused_and_another_place_is_another_key(tmp_path: Path) -> None:
    with Served(tmp_path / "server") as served:
        assert send(served, "/v1/commands", {"argv": ["true"]}, "k").status == 201
        answer = send(served, "/v1/commands", {"argv": ["true", "x"]}, "k")
        assert (answer.status, answer.json["type"]) == (422, "urn:banksman:key-used")
        # The same said otherwise is the same.
        assert send(served, "/v1/commands", b'{ "grace": 5.0, "argv" : ["tr\\u0075e"] }', "k").status == 415
        again = served.request(
            "POST",
            "/v1/commands",
            b'{ "grace": 5.0, "argv" : ["tr\\u0075e"] }',
            headers={"Idempotency-Key": "k", "Content-Type": "application/json"},
        )
        assert again.status == 201
        assert len(served.get("/v1/commands")["commands"]) == 1
        first, second = (
            send(served, "/v1/sessions", {"command": fake_agent.command()}, key).json["id"] for key in "kl"
        )
        assert first != second
        turns = [send(served, f"/v1/sessions/{id}/turns", {"prompt": "x"}, "k").json["turn"] for id in (first, second)]
        assert turns[0] != turns[1]
        assert send(served, f"/v1/sessions/{first}/turns", {"prompt": "y"}, "k").status == 422


@pytest.mark.thorough
def test_what_has_failed_may_be_tried_again_with_the_same_key(tmp_path: Path) -> None:
    with Served(tmp_path / "server") as served:
        program = tmp_path / "program"
        body = {"argv": [str(program)]}
        assert send(served, "/v1/commands", body, "k").status == 422
        # It counts for nothing: another body may have the key now, and the same may be tried.
        program.write_text("#!/bin/sh\n", encoding="utf-8")
        program.chmod(0o755)
        answers = at_once(served, "/v1/commands", body, "k")
        assert {answer.status for answer in answers} == {201}
        assert len(served.get("/v1/commands")["commands"]) == 1


def test_after_a_kill_the_same_key_is_the_same_session_and_the_same_turn(tmp_path: Path) -> None:
    served = Served(tmp_path / "server")
    body = {"command": fake_agent.command(memory=tmp_path / "memory")}
    with served:
        session = send(served, "/v1/sessions", body, "open").json["id"]
        turn = send(served, f"/v1/sessions/{session}/turns", {"prompt": "hello"}, "ask").json["turn"]
        before = served.outcome(session, turn)
        served.kill()
        served.start()
        again = send(served, "/v1/sessions", body, "open")
        assert (again.status, again.json["id"]) == (201, session)
        asked = at_once(served, f"/v1/sessions/{session}/turns", {"prompt": "hello"}, "ask", 5)
        assert {(answer.status, answer.json["turn"]) for answer in asked} == {(202, turn)}
        assert served.outcome(session, turn)["text"] == before["text"]
        assert len(served.get("/v1/sessions")["sessions"]) == 1
        events = served.get(f"/v1/sessions/{session}/events?limit=1000")["events"]
        assert sum(event["kind"] == "turn.queued" for event in events) == 1


def test_what_is_no_key_is_refused(tmp_path: Path) -> None:
    with Served(tmp_path / "server") as served:
        for key in ("", " ", "a b", "x" * 256, "\xe9", "\t"):
            for path, body in (
                ("/v1/commands", {"argv": ["true"]}),
                ("/v1/sessions", {}),
                ("/v1/sessions/x/turns", {"prompt": "x"}),
            ):
                answer = send(served, path, body, key)
                assert (answer.status, answer.json["type"]) == (400, "urn:banksman:bad-key"), (key, path)
        assert served.get("/v1/commands")["commands"] == []
        assert send(served, "/v1/commands", {"argv": ["true"]}, "!" + "~" * 254).status == 201


def test_the_key_of_a_session_that_was_deleted_makes_it_again(tmp_path: Path) -> None:
    body = {"command": fake_agent.command(), "name": "again"}
    with Served(tmp_path / "server") as served:
        first = send(served, "/v1/sessions", body, "twice")
        assert served.request("DELETE", "/v1/sessions/again?forget=1").status == 204
        second = send(served, "/v1/sessions", body, "twice")
        assert served.get("/v1/sessions/again")["id"] == second.json["id"] == first.json["id"]
