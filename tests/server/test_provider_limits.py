"""Provider failures, retries and limits over HTTP, in the metrics and on the command line."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server.kit import SECONDS_MAX, Served, shared

from banksman.testing import fake_agent, fake_codex

pytestmark = pytest.mark.thorough

LIMITED = {"is_error": True, "terminal_reason": "api_error", "api_error": "usage_limit_reached", "result": "limited"}
RETRY = {"type": "system", "subtype": "api_retry", "attempt": 3, "max_retries": 10, "retry_delay_ms": 600_000}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with shared(tmp_path_factory.mktemp("served")) as served:
        yield served


def cli(served: Served, *words: str) -> str:
    done = served.cli(*words)
    assert not done.stderr or done.returncode in (0, 1), done.stderr
    return done.stdout


def limit(until: int) -> str:
    window = {"utilization": 1, "resetsAt": until, "status": "rejected"}
    frame = {"type": "rate_limit_event", "rate_limit_info": {"unifiedWindows": {"five_hour": window}}}
    return f"@@raw {json.dumps(frame)}\n@@boundary {json.dumps(LIMITED)}"


def test_limited_session_is_shown_everywhere(served: Served) -> None:
    until = int(time.time()) + 7200
    session = served.open(name="limited")
    turn = served.ask(session, limit(until))
    outcome = served.outcome(session, turn)
    failure = outcome["failure"]
    assert (outcome["error"], failure["kind"], failure["limited_until"]) == ("limited", "usage_limit", until)
    (listed,) = [each for each in served.get("/v1/sessions")["sessions"] if each["id"] == session]
    window = {"name": "five_hour", "used": 1.0, "resets_at": float(until), "exhausted": True}
    assert (listed["limited_until"], listed["limits"]) == (until, [window])
    page = served.request("GET", "/metrics").body.decode()
    assert "banksman_limited_sessions 1.0" in page
    found = re.search(r'^banksman_limited_until_seconds\{agent="claude"\} (\S+)$', page, re.MULTILINE)
    assert found is not None
    assert float(found[1]) == until
    words = f"limited until {time.strftime('%H:%M', time.localtime(until))}"
    assert words in cli(served, "ps")
    assert words in cli(served, "why", "limited")
    assert "five_hour, 100 % used" in cli(served, "why", "limited")
    assert json.loads(cli(served, "why", "limited", "--json"))["limited_until"] == until
    # The provider answers again.
    served.outcome(session, served.ask(session, "hello"))
    assert served.get(f"/v1/sessions/{session}")["limited_until"] is None
    assert words not in cli(served, "ps")


def test_retry_is_shown_and_events_have_their_bodies(served: Served) -> None:
    session = served.open(name="retries")
    frame = {**RETRY, "error_status": 529, "error": "overloaded"}
    turn = served.ask(session, f"@@raw {json.dumps(frame)}\n@@hang")
    why = wait_retry(served, session)
    assert why["retry"]["error"] == "overloaded"
    assert 0 < why["retry"]["seconds"] <= 600
    said = cli(served, "why", "retries")
    assert "retry 3 of 10 in " in said
    assert ": overloaded (529): overloaded" in said
    events = served.get(f"/v1/sessions/{session}/events?frames=0")["events"]
    (retrying,) = [event for event in events if event["kind"] == "provider.retrying"]
    assert (retrying["turn"], retrying["body"]["delay"]) == (turn, 600.0)
    assert "retry 3 of 10" in cli(served, "top", "--once")
    served.post(f"/v1/sessions/{session}/turns/{turn}/interrupt", {})
    served.outcome(session, turn)


def wait_retry(served: Served, session: str) -> Any:
    deadline = time.monotonic() + SECONDS_MAX
    while (why := served.get(f"/v1/sessions/{session}/why"))["retry"] is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return why


def test_json_of_ask_has_failure_and_empty_answer(served: Served) -> None:
    served.open(name="json")
    failed = {"is_error": True, "api_error_status": 401, "result": "API Error: 401"}
    *_, last = map(json.loads, cli(served, "ask", "json", f"@@boundary {json.dumps(failed)}", "--json").splitlines())
    assert "'kind': 'auth'" in str(last)
    prompt = "@@tool_use Bash {}\n@@tool_result ok\n@@boundary " + json.dumps({"result": ""})
    turn = served.ask("json", prompt)
    assert served.outcome("json", turn)["empty"] is True


def test_session_that_waits_for_a_limit_is_shown_everywhere(served: Served) -> None:
    until = int(time.time()) + 7200
    session = served.open(name="waits", on_limit="wait")
    turn = served.ask(session, limit(until))
    deadline = time.monotonic() + SECONDS_MAX
    found = served.get(f"/v1/sessions/{session}")
    while found["holder"] or not found["waits_for_limit"]:
        found = served.get(f"/v1/sessions/{session}")
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert (found["limited_until"], found["waits_for_limit"], found["state"]) == (until, True, "queued")
    at = time.strftime("%H:%M UTC on %Y-%m-%d", time.gmtime(until))
    assert f"waits for the account's limit until {at}; 1 ask waits" in cli(served, "why", "waits")
    assert "banksman_waiting_for_limit 1.0" in served.request("GET", "/metrics").body.decode()
    served.post(f"/v1/sessions/{session}/turns/{turn}/interrupt", {})
    assert served.outcome(session, turn)["kind"] == "withdrawn"


def test_on_limit_is_checked(served: Served) -> None:
    refused = served.request("POST", "/v1/sessions", {"agent": "claude", "on_limit": "later"})
    assert refused.status == 422


def test_flag_on_limit_opens_a_session_that_waits(served: Served) -> None:
    session = cli(served, "open", "claude", "--on-limit", "wait", "--", *fake_agent.command({})).strip()
    opened = served.get(f"/v1/sessions/{session}/events")["events"][0]
    assert opened["body"]["options"]["on_limit"] == "wait"


def test_fallback_is_shown_everywhere(tmp_path: Path) -> None:
    agents = tmp_path / "served" / "config" / "banksman" / "agents"
    agents.mkdir(parents=True)
    codex = json.dumps(fake_codex.command())
    (agents / "codex.toml").write_text(f'extends = "codex"\ncommand = {codex}\n')
    until = int(time.time()) + 7200
    with shared(tmp_path / "served") as served:
        session = served.open(name="falls", fallback=["codex"])
        assert served.outcome(session, served.ask(session, limit(until)))["kind"] == "failed"
        assert served.outcome(session, served.ask(session, "hello"))["text"] == "you said: hello"
        shown = served.get(f"/v1/sessions/{session}")
        assert (shown["agent"], shown["limited_until"]) == ("codex", None)
        assert shown["fallback"] == [
            {"name": "claude", "limited_until": until, "missing": False},
            {"name": "codex", "limited_until": None, "missing": False},
        ]
        events = served.get(f"/v1/sessions/{session}/events?frames=0")["events"]
        (change,) = [event["body"] for event in events if event["kind"] == "session.fell_back"]
        assert change == {"from": "claude", "to": "codex", "why": "limited", "limited_until": until}
        assert "codex" in cli(served, "ps")
        why = cli(served, "why", "falls")
        assert f"claude, limited until {time.strftime('%Y-%m-%d %H:%M', time.localtime(until))}" in why
        assert "codex, serves the session" in why
        assert "session.fell_back  from=claude to=codex" in cli(served, "log", "falls")
        refused = served.request("POST", "/v1/sessions", {"agent": "claude", "fallback": ["claude"]})
        assert refused.status == 422
        command = fake_agent.command(())
        id = cli(served, "open", "claude", "--fallback", "codex", "--name", "other", "--", *command).strip()
        assert [each["name"] for each in served.get(f"/v1/sessions/{id}")["fallback"]] == ["claude", "codex"]
