"""The `traceparent` of an ask: from the request to the log and to the agent, also after a crash of the server."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.server.kit import Served

from banksman.testing import fake_agent

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TEXT = f"00-{TRACE}-00f067aa0ba902b7-01"
# The agent of these tests: it writes its variable to a file.
WRITES = 'printf %s "${TRACEPARENT-none}" > "$0.new" && mv "$0.new" "$0"; exec "$@"'


def open_traced(served: Served, seen: Path) -> str:
    agent = fake_agent.command(memory=seen.with_name("memory"))
    command = ["sh", "-c", WRITES, str(seen), *agent]
    return served.post("/v1/sessions", {"command": command})["id"]


def ask(served: Served, session: str, header: str | None) -> str:
    headers = {} if header is None else {"traceparent": header}
    return served.post(f"/v1/sessions/{session}/turns", {"prompt": "hello"}, headers=headers)["turn"]


def test_traceparent_reaches_the_log_and_the_agent_of_the_first_turn(served: Served, tmp_path: Path) -> None:
    session = open_traced(served, tmp_path / "seen")
    turns = [ask(served, session, TEXT), ask(served, session, TEXT.replace(TRACE, TRACE[::-1]))]
    for turn in turns:
        served.outcome(session, turn)
    log = served.get(f"/v1/sessions/{session}/events?limit=1000")["events"]
    traces = [event["body"]["trace"] for event in log if event["kind"] == "turn.queued"]
    assert traces == [TEXT, TEXT.replace(TRACE, TRACE[::-1])]
    # One process served both turns. It has the span of the first.
    assert (tmp_path / "seen").read_text() == f"00-{TRACE}-{turns[0][2:]}-01"


@pytest.mark.parametrize("header", [None, "nonsense", "00-" + "0" * 32 + "-00f067aa0ba902b7-01"])
def test_ask_without_a_valid_traceparent_has_no_trace(served: Served, tmp_path: Path, header: str | None) -> None:
    session = open_traced(served, tmp_path / "seen")
    served.outcome(session, ask(served, session, header))
    log = served.get(f"/v1/sessions/{session}/events?limit=1000")["events"]
    assert ["trace" in event["body"] for event in log if event["kind"] == "turn.queued"] == [False]
    assert (tmp_path / "seen").read_text() == "none"


@pytest.mark.thorough
def test_trace_of_a_waiting_ask_survives_the_death_of_the_server(fresh: Served, tmp_path: Path) -> None:
    session = open_traced(fresh, tmp_path / "seen")
    hanging = fresh.ask(session, "@@hang")
    while fresh.get(f"/v1/sessions/{session}/turns/{hanging}")["state"] != "running":
        pass
    waiting = ask(fresh, session, TEXT)
    fresh.kill()
    fresh.start()
    assert fresh.outcome(session, waiting)["kind"] == "done"
    assert (tmp_path / "seen").read_text() == f"00-{TRACE}-{waiting[2:]}-01"
