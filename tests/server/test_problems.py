"""Errors over HTTP: each is a problem whose status names the side that must act, and when a client may retry."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from tests.server.kit import Answer, Served

from banksman import errors
from banksman.server.problems import CLOSING_HINT, problem_of
from banksman.testing import fake_agent

MEMBERS = {"type", "title", "status", "detail", "hint", "ids"}


def problem(answer: Answer, status: int, type_: str) -> Any:
    assert answer.status == status, answer
    assert answer.headers["content-type"] == "application/problem+json"
    found = answer.json
    assert set(found) == MEMBERS
    assert found["type"] == f"urn:banksman:{type_}"
    assert found["status"] == status
    assert found["detail"]
    if status in (429, 503) or type_ == "busy":
        assert int(answer.headers["retry-after"]) >= 1
    return found


STATUSES = {
    **{errors.UsageError: 422, errors.NotFound: 404, errors.ProgramNotFound: 422, errors.ProgramNotExecutable: 422},
    **{
        errors.CommandError: 409,
        errors.HookFailed: 409,
        errors.Refused: 409,
        errors.QueueFull: 429,
        errors.Busy: 409,
        errors.NotOwner: 409,
    },
    **{
        errors.NameTaken: 409,
        errors.Closed: 409,
        errors.AgentError: 502,
        errors.StoreError: 503,
        errors.StoreFull: 503,
    },
    **{errors.StoreReadOnly: 503, errors.StoreBusy: 503, errors.StoreDamaged: 500, errors.HistoryLost: 410},
    **{errors.NoOwner: 503, errors.Moving: 503, errors.Moved: 503, errors.Unreachable: 503, errors.Unanswered: 504},
    **{errors.StoreTooNew: 500, errors.BugError: 500, errors.MachineError: 503, errors.BanksmanError: 500},
}


def test_problem_status_is_defined_for_every_error() -> None:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.BanksmanError)]
    assert set(kinds) == set(STATUSES)
    for kind, status in STATUSES.items():
        found = problem_of(kind("words", hint="do this", session="s"))
        assert found.status == status, kind
        assert (found.title, found.detail, found.hint, found.ids) == (
            kind.__name__,
            "words",
            "do this",
            {"session": "s"},
        )
        assert ("Retry-After" in found.headers) == (status in (429, 503) or kind is errors.Busy), kind
    # A closing host is no fault of the caller: another host will serve.
    closing = problem_of(errors.Closed("x", hint="open another Host"), is_closing=True)
    assert (closing.status, closing.hint) == (503, CLOSING_HINT)
    assert problem_of(errors.Busy("x"), is_closing=True).status == 409


def test_problem_of_missing_thing_or_impossible_request_has_its_status(served: Served, tmp_path: Path) -> None:
    def ask(method: str, path: str, body: Any = None) -> Answer:
        return served.request(method, path, body)

    session = served.open(name="here")
    for path in (
        "/v1/sessions/none",
        "/v1/commands/none",
        f"/v1/sessions/{session}/turns/none",
        "/v1/events?sessions=none",
    ):
        problem(ask("GET", path), 404, "not-found")
    problem(ask("GET", "/v1/none"), 404, "not-found")
    problem(ask("POST", f"/v1/sessions/{session}/questions/none", {"decision": "allow"}), 404, "not-found")
    problem(ask("POST", "/v1/commands", {"argv": ["no-such-program"]}), 422, "program-not-found")
    (tmp_path / "file").touch()
    problem(ask("POST", "/v1/commands", {"argv": [str(tmp_path / "file")]}), 422, "program-not-executable")
    problem(ask("POST", "/v1/sessions", {"agent": "none"}), 422, "usage-error")
    problem(ask("POST", "/v1/sessions", {"none": 1}), 400, "bad-request")
    problem(ask("GET", f"/v1/sessions/{session}/events?after=9.9"), 410, "history-lost")
    assert problem(ask("PUT", "/v1/server"), 405, "wrong-method")["hint"] == "use GET, HEAD"
    problem(served.request("POST", "/v1/commands", b"{}", headers={"Content-Type": "text/plain"}), 415, "not-json")
    # A name belongs to one session.
    other = served.open()
    problem(ask("PATCH", f"/v1/sessions/{other}", {"name": "here"}), 409, "name-taken")
    # A command that is over accepts no input.
    command = served.post("/v1/commands", {"argv": ["true"], "stdin": "pipe"})["id"]
    served.get(f"/v1/commands/{command}?wait=30")
    problem(ask("POST", f"/v1/commands/{command}/stdin", {"text": "x"}), 409, "command-error")


def test_problem_of_busy_or_full_has_retry_after(tmp_path: Path) -> None:
    with Served(tmp_path / "server", streams_max=1) as served:
        session = served.open({"prompt": ["hang"]}, options={"queue_max": 1})
        turns = f"/v1/sessions/{session}/turns"
        served.ask(session, "runs")
        answer = served.request("POST", turns, {"prompt": "x", "on_busy": "reject"})
        problem(answer, 409, "busy")
        answer = served.request("POST", turns, {"prompt": "waits"})
        while answer.status == 202:  # The first may not have started yet. Then it waits too.
            answer = served.request("POST", turns, {"prompt": "waits"})
        problem(answer, 429, "queue-full")
        with served.stream("/v1/events") as stream:
            stream.until_live()
            answer = served.request("GET", "/v1/events")
            problem(answer, 429, "too-many-streams")


def test_draining_server_refuses_new_work_and_shows_sessions(tmp_path: Path) -> None:
    with Served(tmp_path / "server") as served:
        session = served.open({"prompt": ["hang"]})
        turn = served.ask(session, "runs")
        with served.stream(f"/v1/sessions/{session}/events") as stream:
            for message in stream.messages():
                if message.data["kind"] == "turn.started":
                    break
            assert served.request("POST", "/v1/drain", {"timeout": 60}).status == 202
            while not served.get("/v1/server")["draining"]:
                pass
            # The next server serves this session, so a client may ask again.
            for path, body, type_ in (
                ("/v1/sessions", {"command": fake_agent.command()}, "closed"),
                ("/v1/commands", {"argv": ["true"]}, "closed"),
                (f"/v1/sessions/{session}/turns", {"prompt": "more"}, "moving"),
            ):
                problem(served.request("POST", path, body), 503, type_)
            assert served.get(f"/v1/sessions/{session}/turns/{turn}")["outcome"] is None
            for path in ("/readyz", "/healthz"):
                problem(served.request("GET", path, token=False), 503, "draining")
            assert served.get("/livez") == {"status": "ok"}
            # A client may interrupt the running turn, and then the server exits.
            served.post(f"/v1/sessions/{session}/interrupt")
            assert [message.event for message in stream.messages()][-1] == "stream.closing"
        assert served.process is not None
        assert served.process.wait(60) == 0


@pytest.mark.thorough
def test_problem_of_session_at_another_server_names_its_owner(tmp_path: Path) -> None:
    with Served(tmp_path / "one") as one, Served(tmp_path / "two", store=one.settings["store"]) as two:
        session = one.open({"prompt": ["hang"]})
        one.ask(session, "runs")
        answer = two.request("POST", f"/v1/sessions/{session}/turns", {"prompt": "x"})
        found = problem(answer, 409, "not-owner")
        assert str(one.pid) in str(found)
        assert one.url in str(found)
        owner = two.get(f"/v1/sessions/{session}")["owner"]
        assert owner == {"pid": one.pid, "address": one.url}


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_problem_is_sent_for_every_authentication_refusal(served: Served, method: str) -> None:
    problem(served.request(method, "/v1/server", token=False), 401, "not-let-in")
    problem(served.request(method, "/v1/server", headers={"Host": "evil.example"}), 403, "foreign-host")
    problem(served.request(method, "/v1/server", headers={"Origin": "null"}), 403, "foreign-origin")


def test_problem_of_oversized_list_or_word_is_short(served: Served) -> None:
    many = served.request("POST", "/v1/commands", {"argv": ["x"] * 10_001})
    assert many.status == 400
    long = served.request("POST", "/v1/commands", {"argv": ["x" * 1_000_000]})
    assert long.status == 422
    assert len(long.body) < 10_000
