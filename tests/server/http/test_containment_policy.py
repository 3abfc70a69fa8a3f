"""What callers may choose of an agent's containment, and what the settings of the server decide.

Each test observes the process of the agent, and never trusts the answer alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.server.kit import TOKEN, Served

from banksman import Host
from banksman.errors import UsageError
from banksman.process import cgroups
from banksman.server.http.start_policy import StartPolicy
from banksman.server.problems import Problem
from banksman.server.server_settings import ServerSettings
from banksman.sessions.command_prefix import prefix
from banksman.sessions.containment import PARTS
from banksman.testing import fake_agent

FAKE = fake_agent.command()[:-1]
MARK = ["env", "WRAPPED=yes"]
CHOICES: dict[str, list[Any]] = {
    "user": ["nobody", "root", 0, 65534, str(os.getuid())],
    "limits": [{"nofile": 100}, {}, {"nofile": [100, 200]}, {"cgroup": 1}, {"memory_bytes": 1 << 28, "cpus": 0.5}],
    "scrub": [[], ["nesting"], ["PATH"]],
    "wrap": [MARK, [], "bwrap", "unshare", "ssh:far", "docker:far"],
    "on_open": [["touch", "/tmp/never"], []],
    "on_close": [["touch", "/tmp/never"], []],
}


def opened(served: Served, **body: Any) -> Any:
    return served.request("POST", "/v1/sessions", {"command": fake_agent.command(), **body})


def environment(served: Served, session: str) -> str:
    """The environment of the agent's process, after a turn."""
    assert served.outcome(session, served.ask(session, "hello"))["kind"] == "done"
    (pid,) = served.get(f"/v1/sessions/{session}/why")["pids"]
    return Path(f"/proc/{pid}/environ").read_bytes().decode()


# -- callers ---------------------------------------------------------------------------------------------------------
def test_caller_may_choose_nothing_unless_the_settings_say_so(tmp_path: Path) -> None:
    with Served(tmp_path / "server", variables={"HOUSE_API_KEY": "value-of-house"}) as served:
        assert opened(served, name="n").status == 201
        for part, values in CHOICES.items():
            for value in values:
                # A new session, and one that is open.
                for body in ({part: value}, {part: value, "name": "n"}):
                    answer = opened(served, **body)
                    assert answer.status == 403, (body, answer)
                    assert part in answer.json["detail"]
                    assert f'add "{part}" to callers_choose' in answer.json["hint"]
        assert [session["name"] for session in served.get("/v1/sessions")["sessions"]] == ["n"]
        session = served.get("/v1/sessions/n")["id"]
        found = environment(served, session)
        assert "WRAPPED" not in found
        assert "value-of-house" not in found
        # Without a value nothing is chosen.
        assert opened(served, **dict.fromkeys(CHOICES)).status == 201
        assert "Traceback" not in served.log.read_text(encoding="utf-8")


@pytest.mark.thorough
def test_caller_may_choose_survival_if_the_settings_say_so(tmp_path: Path) -> None:
    with Served(tmp_path / "refusing") as served:
        answer = opened(served, survive="crash")
        assert answer.status == 403
        assert 'add "survive" to callers_choose' in answer.json["hint"]
        assert opened(served, survive=None).status == 201
    with Served(tmp_path / "allowing", callers_choose=["survive"]) as served:
        answer = opened(served, survive="crash")
        assert answer.status == 201, answer
        events = served.get(f"/v1/sessions/{answer.json['id']}/events?limit=10")["events"]
        (body,) = [event["body"] for event in events if event["kind"] == "session.opened"]
        assert body["survive"] == "crash"
        assert opened(served, survive="power cut").status in (400, 422)


def test_caller_may_choose_the_parts_that_the_settings_name(tmp_path: Path) -> None:
    with Served(tmp_path / "server", callers_choose=["wrap", "limits"]) as served:
        answer = opened(served, wrap=MARK, limits={"nofile": [100, 200]})
        assert answer.status == 201
        assert "WRAPPED=yes" in environment(served, answer.json["id"])
        shown = served.get(f"/v1/sessions/{answer.json['id']}/why")["containment"]
        chosen = {"limits": {"nofile": [100, 200]}, "wrap": MARK}
        group = {"cgroup": None, "why_not": "no limit of the session needs one"}
        assert shown == {**dict.fromkeys(PARTS), **chosen, **group}
        for part in ("user", "scrub"):
            assert opened(served, **{part: CHOICES[part][0]}).status == 403
        for wrong in (
            {"wrap": "no-such"},
            {"wrap": "ssh:-oProxyCommand=x"},
            {"wrap": [5]},
            {"wrap": ["a\0b"]},
            {"limits": {"x": 1}},
            {"limits": [1]},
        ):
            assert opened(served, **wrong).status in (400, 422), wrong


@pytest.mark.parametrize("limit", [{"cgroup": 1}, {"memory_bytes": 1 << 28}, {"cpus": 0.5}, {"processes": 100}])
def test_limit_of_a_tree_is_set_and_shown_or_refused(tmp_path: Path, limit: dict[str, Any]) -> None:
    """Whether this machine has the control groups decides which."""
    try:
        cgroups.order(limit)
        why = None
    except UsageError as exc:
        why = str(exc.args[0])
    with Served(tmp_path / "server", callers_choose=["limits"]) as served:
        answer = opened(served, limits=limit)
        if why is not None:
            assert answer.status == 422
            assert answer.json["detail"] == why
            assert served.get("/v1/sessions")["sessions"] == []
            return
        assert answer.status == 201
        session = answer.json["id"]
        assert served.outcome(session, served.ask(session, "hello"))["kind"] == "done"
        found = served.get(f"/v1/sessions/{session}/why")
        assert found["containment"]["limits"] == limit
        assert found["containment"]["why_not"] is None
        path = found["containment"]["cgroup"]["path"]
        assert str(found["pids"][0]) in Path(path, "cgroup.procs").read_text().split()
        assert "\nbanksman_cgroups 1.0\n" in served.request("GET", "/metrics").body.decode()
        env = {**os.environ, "BANKSMAN_TOKEN": TOKEN, "BANKSMAN_URL": served.url}
        argv = [sys.executable, "-m", "banksman", "why", session]
        done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=60, check=True)
        assert f"cgroup: {path}: " in done.stdout
    assert not Path(path).exists()


def test_prefix_is_a_program_that_the_settings_must_allow(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with Served(tmp_path / "server", callers_choose=["wrap"], programs=[FAKE, ["env", "WRAPPED=yes"]]) as served:
        answer = opened(served, wrap=MARK)
        assert answer.status == 201
        assert "WRAPPED=yes" in environment(served, answer.json["id"])
        for wrap in (
            ["touch", str(mark)],
            ["env", "WRAPPED=no"],
            ["sh", "-c", "{command}"],
            [str(mark), *MARK],
            "ssh:far",
            "docker:far",
        ):
            assert opened(served, wrap=wrap).status == 403, wrap
    assert not mark.exists()


def test_hook_is_a_program_that_the_settings_must_allow(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with Served(tmp_path / "server", callers_choose=["on_open"], programs=[FAKE, ["mkdir", "-p"]]) as served:
        folder = tmp_path / "made"
        assert opened(served, cwd=str(folder), on_open=["mkdir", "-p", "{cwd}"]).status == 201
        assert folder.is_dir()
        for wrong in (["touch", str(mark)], ["mkdir", str(mark)], ["sh", "-c", "touch {cwd}"]):
            assert opened(served, on_open=wrong).status == 403, wrong
        assert opened(served, on_close=["mkdir", "-p", str(mark)]).status == 403
    assert not mark.exists()


def test_chosen_program_is_started_as_the_path_that_was_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of the same name in the session's folder is another program."""
    allowed, folder = tmp_path / "server-folder", tmp_path / "session-folder"
    for place in (allowed, folder):
        place.mkdir()
        tool = place / "tool"
        tool.write_text(f'#!/bin/sh\necho {place.name} >> {tmp_path / "notes"}\n[ $# = 0 ] || exec "$@"\n')
        tool.chmod(0o755)
    # The server takes a relative path from its own folder.
    monkeypatch.chdir(allowed)
    choices = ["wrap", "on_open", "on_close"]
    with Served(tmp_path / "server", callers_choose=choices, programs=[FAKE, str(allowed / "tool")]) as served:
        for parts in (["on_open"], ["on_close"], ["wrap"], choices):
            answer = opened(served, cwd=str(folder), **{part: ["./tool"] for part in parts})
            assert answer.status == 201, answer
            session = answer.json["id"]
            assert served.outcome(session, served.ask(session, "hello"))["kind"] == "done"
            shown = served.get(f"/v1/sessions/{session}/why")["containment"]
            assert [shown[part] for part in parts] == [[str(allowed / "tool")]] * len(parts)
            assert served.request("DELETE", f"/v1/sessions/{session}").status < 300
    assert set((tmp_path / "notes").read_text().split()) == {"server-folder"}


@pytest.mark.parametrize(("far", "program"), [("ssh:far", "ssh"), ("docker:far", "docker")])
def test_program_of_a_far_sandbox_is_resolved_while_programs_are_restricted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, far: str, program: str
) -> None:
    file = tmp_path / program
    file.write_text("#!/bin/sh\n")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    restricted = StartPolicy(ServerSettings(programs=[program], callers_choose=["wrap"]))
    assert restricted.containment(wrap=far)["wrap"] == [str(file), *prefix(far)[1:]]
    assert restricted.containment(wrap="bwrap")["wrap"] == "bwrap"
    assert StartPolicy(ServerSettings(callers_choose=["wrap"])).containment(wrap=far)["wrap"] == far


@pytest.mark.parametrize("part", ["wrap", "on_open", "on_close"])
def test_recorded_program_whose_path_is_uncertain_is_not_reopened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.chdir("/")
    path = shutil.which("true") or "/bin/true"
    relative = f".{path}"
    record: dict[str, Any] = {"agent": "claude", "command": [path], "cwd": str(tmp_path), "inherit_env": True}
    policy = StartPolicy(ServerSettings(programs=[path], callers_choose=[part]))
    policy.reopen({**record, "containment": {part: [path]}})
    policy.reopen({**record, "containment": {part: ["true"]}})
    for wrong in (
        {**record, "containment": {part: [relative]}},
        {**record, "inherit_env": False, "containment": {part: ["true"]}},
    ):
        with pytest.raises(Problem, match="not absolute"):
            policy.reopen(wrong)
    # Without restricted programs any program may be started.
    StartPolicy(ServerSettings(callers_choose=[part])).reopen({**record, "containment": {part: [relative]}})


def test_failed_hook_is_a_problem_with_its_stderr(tmp_path: Path) -> None:
    with Served(tmp_path / "server", callers_choose=["on_open"]) as served:
        answer = opened(served, on_open=["sh", "-c", "echo no room >&2; exit 3"])
        assert answer.status == 409
        assert "on_open failed: it exited with code 3: no room" in answer.json["detail"]
        assert served.get("/v1/sessions")["sessions"] == []


def test_settings_run_hooks_for_every_session(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    hook = ["sh", "-c", 'echo "$1" >> "$0"', str(notes)]
    settings: dict[str, Any] = {"agent_on_open": [*hook, "open"], "agent_on_close": [*hook, "close {session}"]}
    with Served(tmp_path / "server", **settings) as served:
        session = opened(served).json["id"]
        assert notes.read_text() == "open\n"
        assert served.get(f"/v1/sessions/{session}/why")["containment"]["on_close"] == [*hook, "close {session}"]
        assert opened(served, on_close=[]).status == 403
        assert served.request("DELETE", f"/v1/sessions/{session}").status < 300
        assert notes.read_text() == f"open\nclose {session}\n"


def test_caller_cannot_run_a_command_by_the_name_of_a_folder(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    evil = f"{tmp_path}/$(touch {mark})"
    for part in ("agent_on_open", "agent_wrap"):
        words = ["sh", "-c", 'mkdir -p "{cwd}"; [ $# = 0 ] || exec "$@"', "sh"]
        settings: dict[str, Any] = {"roots": [str(tmp_path)], part: words}
        with Served(tmp_path / part, **settings) as served:
            answer = opened(served, cwd=evil)
            assert answer.status == 422, answer
            assert "in the text of a program" in answer.json["detail"]
            assert opened(served, cwd=str(tmp_path)).status == 201
    assert not mark.exists()


def test_command_gets_no_secret_of_the_server(tmp_path: Path) -> None:
    variables = {"HOUSE_API_KEY": "value-of-house", "HOUSE_NAME": "house"}
    with Served(tmp_path / "server", variables=variables) as served:
        answer = served.request("POST", "/v1/commands", {"argv": ["env"], "env": {"OWN_API_KEY": "own"}})
        id = answer.json["id"]
        served.get(f"/v1/commands/{id}?wait=30")
        said = served.get(f"/v1/commands/{id}/output")["text"]
        assert "HOUSE_NAME=house" in said
        assert "OWN_API_KEY=own" in said
        assert "value-of-house" not in said


# -- settings --------------------------------------------------------------------------------------------------------
def test_settings_contain_every_agent(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"agent_wrap": MARK, "agent_limits": ["nofile=100"], "agent_scrub": ["PLAIN"]}
    with Served(tmp_path / "server", variables={"PLAIN": "value-of-plain"}, **settings) as served:
        session = opened(served).json["id"]
        found = environment(served, session)
        assert "WRAPPED=yes" in found
        assert "value-of-plain" not in found
        assert opened(served, wrap=[]).status == 403


@pytest.mark.thorough
@pytest.mark.parametrize("restricted", [False, True])
async def test_session_without_the_containment_of_the_settings_is_not_reopened(
    tmp_path: Path, restricted: bool
) -> None:
    """A process with access to the store may open any session. A client over HTTP does not get it started."""
    store = f"sqlite:{tmp_path / 'store.db'}"
    mark = tmp_path / "mark"
    how: dict[str, Any] = {"command": fake_agent.command(), "cwd": tmp_path}
    async with Host(store) as host:
        same = (await host.open("claude", **how, wrap=MARK)).id
        bare = (await host.open("claude", **how, name="bare")).id
        evil = (await host.open("claude", **how, wrap=["touch", str(mark)])).id
        limited = (await host.open("claude", **how, wrap=MARK, limits={"nofile": 100})).id
    settings: dict[str, Any] = {"programs": [FAKE]} if restricted else {}
    with Served(tmp_path / "server", agent_wrap=MARK, store=store, **settings) as served:

        def asked(session: str) -> int:
            return served.request("POST", f"/v1/sessions/{session}/turns", {"prompt": "hello"}).status

        assert "WRAPPED=yes" in environment(served, same)
        assert asked(bare) == 403
        assert asked(evil) == 403
        # No setting speaks of limits: the profile has none.
        assert asked(limited) == 403
        # The hint of the refusal helps.
        assert opened(served, name="bare", cwd=str(tmp_path)).status == 201
        assert "WRAPPED=yes" in environment(served, bare)
    assert not mark.exists()


@pytest.mark.thorough
async def test_choices_of_callers_end_when_they_are_withdrawn(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'store.db'}"
    mark = tmp_path / "mark"
    chosen: dict[str, Any] = {
        "limits": {"nofile": 99},
        "scrub": [],
        "wrap": MARK,
        "on_open": ["touch", str(mark)],
        "on_close": ["touch", str(mark)],
        **({"user": "root"} if os.geteuid() == 0 else {}),
    }
    with Served(tmp_path / "allowing", callers_choose=list(chosen), store=store) as served:
        for part, value in chosen.items():
            assert opened(served, name=part, **{part: value}).status == 201
        assert opened(served, name="empty", limits={}, on_open=[]).status == 201
        waiting = served.get("/v1/sessions/limits")["id"]
    mark.unlink()
    async with Host(store) as host:
        session = host.session(waiting)
        await session.ask(f"@@wait {tmp_path / 'never'}")
        queued = (await session.ask("hello")).id
        await session.leave(timeout=0)
    with Served(tmp_path / "refusing", store=store) as served:
        for part in chosen:
            session = served.get(f"/v1/sessions/{part}")["id"]
            for answer in (
                served.request("POST", f"/v1/sessions/{session}/turns", {"prompt": "hello"}),
                opened(served, name=part),
            ):
                assert answer.status == 403, (part, answer)
                assert f"its {part} is not the one of the settings" in answer.json["detail"]
                assert f"add {part} to callers_choose" in answer.json["hint"]
            assert not mark.exists()
        assert served.get(f"/v1/sessions/{waiting}/turns/{queued}")["state"] == "queued"
        # An empty part is the same as none.
        assert "WRAPPED" not in environment(served, served.get("/v1/sessions/empty")["id"])
    # What the hint says helps.
    with Served(tmp_path / "stating", store=store, agent_wrap=[], callers_choose=["limits"]) as served:
        for part in ("wrap", "limits"):
            assert opened(served, name=part).status == 201
        assert "WRAPPED" not in environment(served, served.get("/v1/sessions/wrap")["id"])


def test_prefix_of_a_recorded_session_must_be_an_allowed_program() -> None:
    record: dict[str, Any] = {"agent": "claude", "command": ["true"], "cwd": "/", "inherit_env": True}
    policy = StartPolicy(ServerSettings(programs=["true"], callers_choose=["wrap"]))
    policy.reopen({**record, "containment": {"wrap": ["true"]}})
    policy.reopen({**record, "containment": {"wrap": "bwrap"}})
    refused: list[dict[str, Any]] = [{"wrap": ["sh"]}, {"user": "root"}, {"scrub": []}, {"limits": {"nofile": 1}}]
    refused += [{"on_open": ["true"]}, {"on_close": ["true"]}]
    for wrong in refused:
        with pytest.raises(Problem):
            policy.reopen({**record, "containment": wrong})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"callers_choose": ["cwd"]}, "callers_choose cannot contain 'cwd'"),
        ({"agent_wrap": ["x"], "agent_sandbox": "bwrap"}, "cannot use both agent_wrap and agent_sandbox"),
        ({"agent_sandbox": "box"}, "there is no sandbox 'box'"),
        ({"agent_limits": ["nofile"]}, "agent_limits cannot be 'nofile'"),
        ({"agent_limits": ["house=1"]}, "there is no limit 'house'"),
        ({"agent_user": ""}, "user cannot be ''"),
        ({"agent_wrap": ["systemd-run"], "agent_limits": ["cpus=1"]}, "cannot set the limits cpus: systemd-run moves"),
        ({"agent_on_open": [""]}, "on_open cannot hold ''"),
    ],
)
def test_settings_refuse_a_containment_that_cannot_be(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        ServerSettings(**settings)
