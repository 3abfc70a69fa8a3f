"""Start policy of a server: allowed programs (by name, path or first words), folders and variables.

The tests try each known bypass at a real server. They observe the effects of a started program, and never trust the
answer alone.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server.kit import Served, shared

from banksman import Host
from banksman.errors import UsageError
from banksman.server.http.start_policy import StartPolicy
from banksman.server.problems import Problem
from banksman.server.server_settings import ServerSettings
from banksman.testing import fake_agent

FAKE = fake_agent.command()[:-1]
TRUE = shutil.which("true") or "/bin/true"


def may_start(policy: StartPolicy, *words: str) -> bool:
    try:
        policy.command(words)
    except Problem as problem:
        return problem.status != 403
    return True


def script(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


# -- programs ---------------------------------------------------------------------------------------------------------
def test_start_policy_without_settings_allows_everything() -> None:
    policy = StartPolicy(ServerSettings())
    assert policy.command(["./anything", "x"]) == ["./anything", "x"]
    assert policy.env({"LD_PRELOAD": "x"}) == {"LD_PRELOAD": "x"}
    assert policy.folder("/") == "/"
    assert policy.folder(None) is None
    assert policy.user("root") == "root"
    assert policy.agent(None, ["claude"]) is None
    server = {"name": "x", "command": "y", "env": [{"name": "A", "value": "b"}]}
    assert policy.servers([server]) == [server]


def test_start_policy_compares_programs_by_resolved_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path / "one" / "agent")
    script(tmp_path / "two" / "agent")
    monkeypatch.setenv("PATH", f"{tmp_path / 'one'}:{os.environ['PATH']}")
    policy = StartPolicy(ServerSettings(programs=["agent", TRUE, "missing-program"]))
    assert policy.command(["agent", "x"]) == [str(tmp_path / "one" / "agent"), "x"]
    assert may_start(policy, str(tmp_path / "one" / "agent"))
    assert may_start(policy, str(tmp_path / "two" / ".." / "one" / "agent"))
    assert not may_start(policy, str(tmp_path / "two" / "agent"))
    assert may_start(policy, TRUE)
    assert not may_start(policy, "missing-program")
    for other in (
        "sh",
        "/bin/sh",
        "env",
        sys.executable,
        "",
        " ",
        "true ",
        "./true",
        "agent\0",
        "\0",
        "AGENT",
        "../agent",
        "~/agent",
    ):
        assert not may_start(policy, other), other
    # A link to an allowed program is another program, and a link to another program is that program.
    (tmp_path / "link").symlink_to(tmp_path / "one" / "agent")
    assert not may_start(policy, str(tmp_path / "link"))
    assert not may_start(StartPolicy(ServerSettings(programs=[])), "true")


def test_start_policy_resolves_relative_program_in_server_cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path / "here" / "bin" / "agent")
    monkeypatch.chdir(tmp_path / "here")
    policy = StartPolicy(ServerSettings(programs=["bin/agent"]))
    assert policy.command(["bin/agent"]) == [str(tmp_path / "here" / "bin" / "agent")]
    assert policy.command(["./bin/../bin/agent"]) == [str(tmp_path / "here" / "bin" / "agent")]


def test_start_policy_may_fix_the_first_words_of_a_command(tmp_path: Path) -> None:
    policy = StartPolicy(ServerSettings(programs=[["true", "-a", "b"], FAKE]))
    assert may_start(policy, "true", "-a", "b")
    assert may_start(policy, "true", "-a", "b", "more")
    for words in (
        ["true"],
        ["true", "-a"],
        ["true", "-a", "c"],
        ["true", "x", "-a", "b"],
        ["true", "-ab"],
        [sys.executable],
    ):
        assert not may_start(policy, *words), words
    assert may_start(policy, *fake_agent.command())
    assert not may_start(policy, sys.executable, "-c", "print()")
    assert not may_start(policy, *FAKE[:-1], str(tmp_path / "__main__.py"))


def test_start_policy_is_enforced_for_commands_over_http(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    touch = script(tmp_path / "bin" / "true", f"touch {mark}")
    with Served(tmp_path / "server", programs=[FAKE, "true"], env=["ALLOWED"], log_level="debug") as served:

        def start(argv: list[str], **more: Any) -> int:
            return served.request("POST", "/v1/commands", {"argv": argv, **more}).status

        assert start(["true"]) == 201
        assert start(["true"], env={"ALLOWED": "x"}) == 201
        assert start(["true"], inherit_env=False) == 201
        # Another PATH, folder, loader or user in the request does not change which program starts.
        assert start(["true"], env={"PATH": str(touch.parent)}) == 403
        assert start(["true"], env={"ALLOWED": "x", "LD_PRELOAD": "x.so"}) == 403
        assert start(["./true"], cwd=str(touch.parent)) == 403
        assert start(["true"], cwd=str(touch.parent)) == 201
        assert start([str(touch)]) == 403
        assert start(["true"], user="root") == 403
        assert start(["sh", "-c", f"touch {mark}"]) == 403
        assert start([sys.executable, "-c", f"open({str(mark)!r}, 'w')"]) == 403
        answer = served.request("POST", "/v1/commands", {"argv": ["sh"]})
        assert answer.json["type"] == "urn:banksman:forbidden"
        assert "programs" in answer.json["hint"]
        # A forbidden request does not use up its key.
        assert start(["true"], env={}) == 201
        shown = served.get("/v1/commands")["commands"]
        assert {command["argv"][0] for command in shown} == {TRUE}
        for command in shown:
            assert served.get(f"/v1/commands/{command['id']}?wait=30")["finished"]["code"] == 0
    assert not mark.exists()


def test_start_policy_is_enforced_for_sessions_over_http(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    evil = script(tmp_path / "evil", f"touch {mark}")
    with Served(tmp_path / "server", programs=[FAKE, "true"], log_level="debug") as served:

        def open_(**body: Any) -> int:
            return served.request("POST", "/v1/sessions", body).status

        good = fake_agent.command()
        assert open_(command=good) == 201
        assert open_(command=" ".join(f"'{word}'" for word in good)) == 201
        # The profile's own command is a program like any other.
        assert open_() == 403
        for command in (str(evil), [str(evil)], ["sh"], [sys.executable, *good[1:3]], [sys.executable, "-c", "x"]):
            assert open_(command=command) == 403, command
        for command in ("'", '"', "", [], [""], "\\"):
            assert open_(command=command) in (403, 422), command
        # Extra arguments do not complete a command that is not allowed.
        assert open_(command=good[:1], args=good[1:]) == 403
        for env in ({"PATH": str(tmp_path)}, {"LD_PRELOAD": "x"}, {"PYTHONPATH": "x"}):
            assert open_(command=good, env=env) == 403
        servers: list[dict[str, Any]] = [
            {"name": "x", "command": str(evil), "args": []},
            {"name": "x", "command": "true", "args": [], "env": [{"name": "LD_PRELOAD", "value": "x"}]},
            *({"name": "x", "command": "true", "args": args} for args in (5, "x", [5], {"a": 1}, [None])),
            *({"name": "x", "command": command} for command in (5, None, ["true"], "")),
        ]
        for server in servers:
            assert open_(command=good, mcp_servers=[server]) in (403, 422), server
        assert open_(command=good, mcp_servers=[{"name": "x", "command": "true", "args": ["-x"]}]) == 201
        # An open name may be reopened, but not with another program.
        assert open_(command=good, name="n") == 201
        assert open_(command=[str(evil)], name="n") == 403
        session = served.get("/v1/sessions/n")["id"]
        assert served.outcome(session, served.ask(session, "hello"))["kind"] == "done"
        assert "Traceback" not in served.log.read_text(encoding="utf-8")
    assert not mark.exists()


async def test_start_policy_is_enforced_when_an_ask_wakes_a_foreign_session(tmp_path: Path) -> None:
    """A process with access to the file may open any session. A client over HTTP does not get it started."""
    store = tmp_path / "store.db"
    mark = tmp_path / "mark"
    evil = script(tmp_path / "evil", f"touch {mark}")
    async with Host(f"sqlite:{store}") as host:
        other = (await host.open("claude", command=[str(evil)], name="other", cwd=tmp_path)).id
        relative = (await host.open("claude", command=["./evil"], name="relative", cwd=tmp_path)).id
        elsewhere = (await host.open("claude", command=fake_agent.command(), cwd=tmp_path)).id
        inside = (await host.open("claude", command=fake_agent.command(), cwd=_made(tmp_path / "root"))).id
    settings: dict[str, Any] = {
        "programs": [FAKE, "true"],
        "roots": [str(tmp_path / "root")],
        "store": f"sqlite:{store}",
    }
    with Served(tmp_path / "server", **settings) as served:
        for session in (other, relative, "other", elsewhere):
            answer = served.request("POST", f"/v1/sessions/{session}/turns", {"prompt": "hello"})
            assert answer.status == 403, answer
            # A read starts nothing.
            assert served.request("GET", f"/v1/sessions/{session}/events").status == 200
            for body in ({"model": "x"}, {"permission_mode": "plan"}):
                assert served.request("PATCH", f"/v1/sessions/{session}", body).status in (403, 409, 422)
        assert served.outcome(inside, served.ask(inside, "hello"))["kind"] == "done"
    assert not mark.exists()


def test_start_policy_checks_the_recorded_command_on_reopen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path / "bin" / "agent")
    monkeypatch.chdir(tmp_path)
    policy = StartPolicy(ServerSettings(programs=["bin/agent", "true"]))
    record = {"agent": "claude", "command": ["true"], "cwd": "/", "inherit_env": True}
    policy.reopen(record)
    policy.reopen({**record, "command": [TRUE], "inherit_env": False})
    policy.reopen({**record, "command": [str(tmp_path / "bin" / "agent")]})
    for other in (
        # Not found here: relative to the session's folder, or without the server's PATH.
        {"command": ["bin/agent"]},
        {"inherit_env": False},
        {"command": ["sh"]},
    ):
        with pytest.raises(Problem):
            policy.reopen({**record, **other})


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# -- folders ----------------------------------------------------------------------------------------------------------
def test_start_policy_resolves_links_before_comparing_roots(tmp_path: Path) -> None:
    root, other = _made(tmp_path / "root"), _made(tmp_path / "root-not")
    inner = _made(root / "inner")
    (root / "out").symlink_to(other)
    (other / "in").symlink_to(inner)
    (tmp_path / "alias").symlink_to(root)
    policy = StartPolicy(ServerSettings(roots=[str(tmp_path / "alias")]))
    assert policy.folder(None) == str(root)
    assert policy.folder(str(root)) == str(root)
    assert policy.folder(f"{inner}/") == str(inner)
    assert policy.folder(str(tmp_path / "alias" / "inner")) == str(inner)
    assert policy.folder(str(other / "in")) == str(inner)
    assert policy.folder(str(root / "inner" / ".." / "inner")) == str(inner)
    for outside in (
        *(
            "/",
            str(tmp_path),
            str(other),
            str(root / ".."),
            str(root / "out"),
            str(root / "out" / "x"),
            f"{root}/../root-not",
        ),
        *(f"{root}-not", ".", "", "..", "\0", "~", str(root / "inner" / ".." / ".."), "x" * 5000),
    ):
        with pytest.raises(Problem) as caught:
            policy.folder(outside)
        assert caught.value.status == 403
    assert StartPolicy(ServerSettings(roots=["/"])).folder("/tmp") == os.path.realpath("/tmp")


def test_start_policy_with_empty_roots_allows_no_folder() -> None:
    policy = StartPolicy(ServerSettings(roots=[]))
    for folder in (None, "/", "."):
        with pytest.raises(Problem):
            policy.folder(folder)


@pytest.fixture(scope="module")
def rooted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    """A server, and the root in which it starts every program."""
    folder = tmp_path_factory.mktemp("rooted")
    root = _made(folder / "root")
    with shared(folder / "server", roots=[str(root)]) as served:
        yield served, root


def test_start_policy_roots_are_enforced_over_http(rooted: tuple[Served, Path]) -> None:
    served, root = rooted
    (root / "out").symlink_to(root.parent)
    command = served.post("/v1/commands", {"argv": ["pwd"]})["id"]
    served.get(f"/v1/commands/{command}?wait=30")
    assert served.get(f"/v1/commands/{command}/output")["text"] == f"{root}\n"
    for cwd in (str(root.parent), str(root / "out"), f"{root}/..", "/", "."):
        assert served.request("POST", "/v1/commands", {"argv": ["pwd"], "cwd": cwd}).status == 403
        body = {"command": fake_agent.command(), "cwd": cwd}
        assert served.request("POST", "/v1/sessions", body).status == 403
    assert served.request("POST", "/v1/sessions", {"command": fake_agent.command()}).status == 201


def test_folder_replaced_by_a_link_out_of_the_roots_starts_no_process(
    rooted: tuple[Served, Path], tmp_path: Path
) -> None:
    served, root = rooted
    work = _made(root / "work")
    outside = _made(tmp_path / "outside")
    agent = ["touch", "was-here"]
    session = served.post("/v1/sessions", {"agent": "custom", "command": agent, "cwd": str(work)})["id"]
    work.rename(root / "before")
    work.symlink_to(outside)
    outcome = served.outcome(session, served.ask(session, "Go."))
    assert outcome["kind"] == "failed"
    assert "cannot start anything in that folder" in outcome["error"]
    assert list(outside.iterdir()) == []


def test_start_policy_refuses_unparsable_agent_command() -> None:
    with pytest.raises(UsageError):
        StartPolicy(ServerSettings(programs=["true"])).agent("'", ["claude"])
