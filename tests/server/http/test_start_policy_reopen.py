"""Sessions that were opened under other settings, and the fall-backs of a session: what a server still starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.server.http.test_containment_policy import environment, opened
from tests.server.kit import Served
from tests.thorough import one_in

from banksman.server.http.start_policy import StartPolicy
from banksman.server.problems import Problem
from banksman.server.server_settings import ServerSettings
from banksman.testing import fake_agent

RECORD: dict[str, Any] = {"agent": "claude", "command": ["true"], "cwd": "/", "inherit_env": True}


def profile(folder: Path, name: str, command: list[str], contained: str) -> None:
    agents = folder / "banksman" / "agents"
    agents.mkdir(parents=True, exist_ok=True)
    text = f'extends = "claude"\ncommand = {json.dumps(command)}\n[containment]\n{contained}\n'
    (agents / f"{name}.toml").write_text(text)


@pytest.mark.parametrize("own", one_in(2, ["", 'wrap = ["env", "WRAPPED=spare"]']))
def test_fall_back_starts_with_the_containment_of_the_first_profile(tmp_path: Path, own: str) -> None:
    """It has parts that its own profile does not have, and the other way round. No caller has chosen one."""
    profile(tmp_path, "first", ["/no/such/agent"], "limits = { nofile = 200 }")
    profile(tmp_path, "spare", fake_agent.command(), own)
    with Served(tmp_path / "server", variables={"XDG_CONFIG_HOME": str(tmp_path)}) as served:
        answer = served.request("POST", "/v1/sessions", {"agent": "first", "fallback": ["spare"]})
        assert answer.status == 201, answer
        session = answer.json["id"]
        assert ("WRAPPED=spare" in environment(served, session)) == bool(own)
        assert open_files(served, session) == ["200", "200"]


@pytest.mark.parametrize("now", one_in(2, ["limits = { nofile = 300 }", ""]))
def test_session_gets_the_new_containment_of_its_profile_by_its_name(tmp_path: Path, now: str) -> None:
    """No caller has chosen the old one, and the operator has replaced it."""
    profile(tmp_path, "first", fake_agent.command(), "limits = { nofile = 200 }")
    variables = {"XDG_CONFIG_HOME": str(tmp_path)}
    body = {"agent": "first", "name": "s"}
    with Served(tmp_path / "server", variables=variables) as served:
        session = served.request("POST", "/v1/sessions", body).json["id"]
        served.stop()
        profile(tmp_path, "first", fake_agent.command(), now)
        served.start()
        answer = served.request("POST", f"/v1/sessions/{session}/turns", {"prompt": "hello"})
        assert answer.status == 403
        if not now:
            # Nothing says what it should be.
            assert "or state agent_limits there" in answer.json["hint"]
            assert served.request("POST", "/v1/sessions", body).status == 403
            return
        assert answer.json["hint"] == "open the session by its name"
        assert served.request("POST", "/v1/sessions", body).status == 201
        assert open_files(served, session) == ["300", "300"]


def open_files(served: Served, session: str) -> list[str]:
    """The limit of the agent's process, after a turn."""
    assert served.outcome(session, served.ask(session, "hello"))["kind"] == "done"
    (pid,) = served.get(f"/v1/sessions/{session}/why")["pids"]
    lines = Path(f"/proc/{pid}/limits").read_text(encoding="utf-8").splitlines()
    return next(line.split()[3:5] for line in lines if "open files" in line)


@pytest.mark.thorough
def test_survival_ends_when_it_is_withdrawn(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'store.db'}"
    with Served(tmp_path / "allowing", callers_choose=["survive"], store=store) as served:
        session = opened(served, name="s", survive="crash").json["id"]
        assert served.outcome(session, served.ask(session, "hello"))["kind"] == "done"
    with Served(tmp_path / "refusing", store=store) as served:
        answer = served.request("POST", f"/v1/sessions/{session}/turns", {"prompt": "hello"})
        assert answer.status == 403, answer
        assert "its survive is not the one of the settings" in answer.json["detail"]
        assert answer.json["hint"] == "open the session by its name"
        assert opened(served, name="s").status == 201
        assert served.outcome(session, served.ask(session, "hello"))["kind"] == "done"


def test_survival_of_the_settings_is_no_choice_of_a_caller(tmp_path: Path) -> None:
    record = {**RECORD, "survive": "crash"}
    store = f"sqlite:{tmp_path / 'store.db'}"
    StartPolicy(ServerSettings(callers_choose=["survive"])).reopen(record)
    StartPolicy(ServerSettings(survive="crash", store=store)).reopen(record)
    with pytest.raises(Problem, match="cannot reopen the session: its survive"):
        StartPolicy(ServerSettings()).reopen(record)
