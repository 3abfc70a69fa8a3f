"""Budgets over HTTP, in the metrics and on the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from tests.server.kit import Served, shared

from banksman import Budget, UsageError
from banksman.server.server_settings import ServerSettings
from banksman.testing import fake_agent

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with shared(tmp_path_factory.mktemp("served")) as served:
        yield served


def cli(served: Served, *words: str) -> str:
    done = served.cli(*words)
    return done.stdout + done.stderr


def test_session_over_budget_is_shown_everywhere_and_question_raises_it(served: Served) -> None:
    session = served.open(name="budgeted", budget={"tokens": 1000, "usd": 5}, on_budget="ask")
    served.outcome(session, served.ask(session, "@@used 1200 0"))
    waiting = served.ask(session, "hello")
    listed = served.get(f"/v1/sessions/{session}")
    tokens = {"scope": "session", "unit": "tokens", "used": 1200.0, "cap": 1000.0, "caller": None, "reached": True}
    assert listed["budget"][0] == tokens
    assert len(listed["queue"]) == 1
    words = "over budget: 1,200 of 1,000 tokens; 1 ask waits"
    assert words in cli(served, "ps")
    assert words in cli(served, "why", "budgeted")
    assert "of 5 US dollars (estimate)" in cli(served, "why", "budgeted")
    page = served.request("GET", "/metrics").body.decode()
    assert "banksman_over_budget_sessions 1.0" in page
    [question] = listed["questions"]
    told = cli(served, "answer", "budgeted", question, "raise")
    served.outcome(session, waiting)
    assert "over budget" not in cli(served, "ps"), told
    assert served.get(f"/v1/sessions/{session}")["budget"][0]["cap"] == 2200.0
    assert served.get("/v1/usage")["budgets"] == []


def test_flags_open_session_with_budget(served: Served) -> None:
    agent = ("--", *fake_agent.command())
    shown = cli(served, "open", "claude", "--name", "flagged", "--budget", "tokens=50,turns=2", "--json", *agent)
    assert [use["unit"] for use in json.loads(shown)["budget"]] == ["tokens", "turns"]
    assert "--budget cannot be" in cli(served, "open", "claude", "--budget", "tokens", *agent)
    assert "euro" in cli(served, "open", "claude", "--budget", "euro=5", *agent)
    assert "cannot be nan" in cli(served, "open", "claude", "--budget", "tokens=nan", *agent)


def test_settings_have_budgets_of_host_and_callers() -> None:
    settings = ServerSettings(budget="tokens=5,usd=1.5", caller_budgets=["a:b:turns=1", "*:tokens=7"])
    callers = {"a:b": Budget(turns=1), "*": Budget(tokens=7)}
    assert settings.shared_budgets() == (Budget(tokens=5, usd=1.5), callers)
    for wrong in ("alice", ":turns=1", "alice:", "alice:euro=1"):
        with pytest.raises(UsageError, match="budget"):
            ServerSettings(caller_budgets=[wrong])
