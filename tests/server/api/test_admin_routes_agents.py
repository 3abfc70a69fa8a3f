"""`GET /v1/agents` lists the same facts as the command line, including the user's own files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.server.kit import Served


@pytest.mark.thorough
def test_agents_route_matches_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    users = tmp_path / "config" / "banksman" / "agents"
    users.mkdir(parents=True)
    with Served(tmp_path / "served") as served:
        agents = {each["name"]: each for each in served.get("/v1/agents")["agents"]}
        assert agents["claude"]["error"] is None
        assert "steer" in agents["codex"]["capabilities"]
        assert (agents["gemini"]["dialect"], agents["gemini"]["command"]) == ("acp", ["gemini", "--acp"])
        assert agents["kimi"]["repairs"]
        # The server reads the files at each call: a new file needs no restart, and a malformed file hides no other.
        (users / "mine.toml").write_text(f'extends = "custom"\ncommand = ["{sys.executable}"]\n')
        (users / "goose.toml").write_text('dialect = "klingon"\n')
        told = served.get("/v1/agents")["agents"]
        mine, goose = (next(each for each in told if each["name"] == name) for name in ("mine", "goose"))
        assert (mine["found"], mine["source"]) == (True, str(users / "mine.toml"))
        assert (goose["overrides"], goose["dialect"], goose["capabilities"]) == (True, "", [])
        assert "goose.toml: dialect cannot be 'klingon'" in goose["error"]
        assert len(told) == len(agents) + 1
        done = subprocess.run(
            [sys.executable, "-m", "banksman", "agents", "--json"],
            capture_output=True,
            check=True,
            timeout=60.0,
            env=os.environ,
        )
        # The command line omits unknown values. The route sends them as null or empty.
        for each, shown in zip(json.loads(done.stdout)["agents"], told, strict=True):
            assert {name: shown[name] for name in each} == each


@pytest.mark.thorough
def test_malformed_agent_file_fails_only_the_open_that_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    users = tmp_path / "config" / "banksman" / "agents"
    users.mkdir(parents=True)
    (users / "bad.toml").write_text('extends = "custom"\ncolour = 1\n')
    with Served(tmp_path / "served") as served:
        refused = served.request("POST", "/v1/sessions", {"agent": "bad"})
        assert (refused.status, refused.json["title"]) == (422, "UsageError")
        assert "bad.toml: there is no key colour" in refused.json["detail"]
        assert refused.json["ids"] == {"agent": "bad"}
        assert served.open()
