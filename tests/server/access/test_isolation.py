"""Sessions of several callers on one server: lists, streams, names, keys, and what a body may say."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.server.access import tokens
from tests.server.kit import SECONDS_MAX, TOKEN, Answer, Served, head, shared, statuses

from banksman import Host
from banksman.server.access.authorization import OF_OPERATORS
from banksman.server.access.roles import Role
from banksman.server.api.messages.session_messages import OpenSession
from banksman.sessions import recovery
from banksman.testing import fake_agent


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with shared(tmp_path_factory.mktemp("server"), log_level="debug") as served:
        yield served


def kinds(served: Served, token: str, path: str, stop: str) -> list[tuple[str, str]]:
    """Return the session and kind of each event of a stream, up to the first one of this kind."""
    found: list[tuple[str, str]] = []
    with served.stream(path, token=token) as stream:
        assert stream.status == 200
        for message in stream.messages():
            if message.id is not None and "kind" in message.data:
                found.append((message.data["session"], message.data["kind"]))
                if message.data["kind"] == stop:
                    break
    return found


def share(served: Served, session: str, *names: str) -> None:
    assert served.request("PUT", f"/v1/sessions/{session}/shared", {"shared": names}).status == 200


def test_lists_and_streams_have_only_own_and_shared_sessions(served: Served) -> None:
    own = tokens.opened_by(served, "ann", "ann-1")
    foreign = tokens.opened_by(served, "ben", "ben-1")
    both = tokens.opened_by(served, "ben", "ben-2")
    share(served, both, "ann")
    token = tokens.create(served, "ann", Role.ASKER)

    def listed(query: str) -> tuple[list[str], str | None]:
        answer = tokens.request(served, token, "GET", f"/v1/sessions{query}").json
        return [session["id"] for session in answer["sessions"]], answer["next"]

    assert listed("") == ([own, both], None)
    assert listed("?limit=1") == ([own], own)
    assert listed(f"?limit=1&after={own}") == ([both], None)
    assert tokens.request(served, token, "GET", f"/v1/sessions?after={foreign}").status == 404
    assert tokens.request(served, token, "GET", f"/v1/events?sessions={own},{foreign}").status == 404

    assert tokens.request(served, token, "POST", f"/v1/sessions/{both}/turns", {"prompt": "hi"}).status == 202
    served.outcome(foreign, served.ask(foreign, "hello"))
    events = kinds(served, token, f"/v1/events?frames_of={foreign}", "turn.ended")
    assert {session for session, _ in events} == {own, both}
    # The administrator still sees all of them.
    assert {session for session, _ in kinds(served, TOKEN, "/v1/events", "turn.ended")} >= {own, foreign, both}


def test_stream_follows_a_session_that_is_shared_later(served: Served) -> None:
    session = served.open(name="later")
    token = tokens.create(served, "eve", Role.VIEWER)
    with served.stream("/v1/events", token=token) as stream:
        assert stream.until_live() == []
        share(served, session, "eve")
        message = next(message for message in stream.messages() if message.id is not None)
        assert (message.data["session"], message.data["kind"]) == (session, "session.shared")


def test_stream_ends_when_the_session_is_not_shared_any_more(served: Served) -> None:
    session = served.open(name="no-longer")
    share(served, session, "dan", "fay")
    token = tokens.create(served, "dan", Role.VIEWER)
    with served.stream(f"/v1/sessions/{session}/events", token=token) as stream:
        stream.until_live()
        share(served, session, "fay")
        assert [message.data["kind"] for message in stream.messages() if message.id] in ([], ["session.shared"])
    assert tokens.request(served, token, "GET", f"/v1/sessions/{session}/events").status == 404


def test_foreign_session_cannot_be_opened_by_name_or_key(served: Served) -> None:
    def open_as(token: str, body: dict[str, Any], key: str) -> Answer:
        return tokens.request(served, token, "POST", "/v1/sessions", body, {"Idempotency-Key": key})

    first = tokens.create(served, "first", Role.OPERATOR)
    body = {"command": fake_agent.command({}), "name": "of-first"}
    assert open_as(first, body, "key-1").status == 201
    second = tokens.create(served, "second", Role.ASKER)
    assert open_as(second, {"name": "of-first"}, "key-2").json["title"] == "NameTaken"
    assert open_as(second, {"name": "of-second"}, "key-1").json["title"] == "NameTaken"
    opened = served.get("/v1/sessions/of-first/shared")
    assert opened == {"owner": "first", "shared": []}


def test_name_that_another_caller_is_opening_cannot_be_opened(tmp_path: Path) -> None:
    begun, go = tmp_path / "begun", tmp_path / "go"
    waits = f"touch {begun}; until test -e {go}; do sleep 0.01; done"
    # An asker starts the program of the profile.
    program = tmp_path / "bin" / "claude"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.join(fake_agent.command({}))} "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    variables = {"PATH": f"{program.parent}:{os.environ['PATH']}"}
    settings: dict[str, Any] = {"callers_choose": ["on_open"], "variables": variables}
    with Served(tmp_path / "server", **settings) as served, ThreadPoolExecutor() as threads:

        def opens(token: str, **body: Any) -> Future[Answer]:
            return threads.submit(tokens.request, served, token, "POST", "/v1/sessions", {"name": "new", **body})

        owner = tokens.create(served, "owner", Role.OPERATOR)
        first = opens(owner, on_open=["sh", "-c", waits])
        while not begun.exists() and not first.done():
            time.sleep(0.01)
        second = opens(tokens.create(served, "other", Role.ASKER), model="another")
        # The second open waits for the first. If it is late, it finds the session, and fails, too.
        for _ in range(20):
            served.get("/v1/caller")
        go.touch()
        assert first.result().status == 201, first.result()
        assert (second.result().status, second.result().json["title"]) == (409, "NameTaken")
        events = served.get("/v1/sessions/new/events?frames=false")["events"]
        opened = [event["body"] for event in events if event["kind"] == "session.opened"]
        assert [(body["caller"], body["model"]) for body in opened] == [("owner", None)]


async def _with_a_damaged_log(store: str) -> tuple[str, str]:
    """Return two closed sessions of "ann". The log of the first one cannot be loaded."""
    async with Host(store) as host:
        opened = [await host.open(command=fake_agent.command({}), name=name, caller="ann") for name in ("hurt", "well")]
        for session in opened:
            await session.close()
        hurt, well = (session.id for session in opened)
        epoch = await recovery.claim(host.log, hurt)
        await recovery.append(host.log, hurt, epoch, host.log.head(hurt).seq, [(None, "turn.ended", b"garbage")])
        host.log.release(hurt, epoch)
    return hurt, well


def test_damaged_session_is_foreign_and_the_others_stay_visible(tmp_path: Path) -> None:
    folder = tmp_path / "server"
    folder.mkdir()
    hurt, well = asyncio.run(_with_a_damaged_log(f"sqlite:{folder / 'store.db'}"))
    with Served(folder) as served:
        token = tokens.create(served, "ann", Role.ASKER)
        listed = tokens.request(served, token, "GET", "/v1/sessions")
        assert listed.status == 200, listed
        assert [session["id"] for session in listed.json["sessions"]] == [well]
        assert tokens.request(served, token, "GET", f"/v1/sessions/{hurt}").status == 404
        answer = tokens.request(served, token, "POST", "/v1/sessions", {"name": "hurt"})
        assert answer.json["title"] == "NameTaken"
        with served.stream("/v1/events", token=token) as stream:
            assert {message.data["session"] for message in stream.until_live()} == {well}
        # Its log line comes once. An operator needs no log to see the session, and can delete it.
        assert served.log.read_text(encoding="utf-8").count(f"session {hurt} is hidden") == 1
        operator = tokens.create(served, "boss", Role.OPERATOR, sessions=["hurt"])
        listed = tokens.request(served, operator, "GET", "/v1/sessions").json["sessions"]
        assert [session["id"] for session in listed] == [hurt]


def test_ask_stays_with_the_session_that_was_checked(served: Served) -> None:
    own = tokens.opened_by(served, "rita", "swapped")
    foreign = tokens.opened_by(served, "sam", "of-sam")
    token = tokens.create(served, "rita", Role.ASKER)
    body = json.dumps({"prompt": "hello"}).encode()
    headers = (
        *(f"Authorization: Bearer {token}", "Content-Type: application/json"),
        *(f"Content-Length: {len(body)}", "Expect: 100-continue"),
    )
    request = head("POST /v1/sessions/swapped/turns", *headers, port=served.port, token=False)
    with socket.create_connection(("127.0.0.1", served.port), SECONDS_MAX) as peer:
        peer.sendall(request)
        # The server asks for the body when it has checked the session.
        assert peer.recv(1 << 10).startswith(b"HTTP/1.1 100 ")
        assert served.request("PATCH", f"/v1/sessions/{own}", {"name": "was-swapped"}).status == 200
        assert served.request("PATCH", f"/v1/sessions/{foreign}", {"name": "swapped"}).status == 200
        peer.sendall(body)
        answer = b"".join(iter(lambda: peer.recv(1 << 16), b""))
    assert statuses(answer) == [202], answer
    asked = [
        [event["kind"] for event in served.get(f"/v1/sessions/{id}/events?frames=false")["events"]].count("turn.queued")
        for id in (own, foreign)
    ]
    assert asked == [1, 0]


def test_asker_cannot_choose_what_an_operator_must(served: Served) -> None:
    token = tokens.create(served, "greedy", Role.ASKER)
    for member in (
        *({"command": ["sh"]}, {"args": ["-x"]}, {"env": {"A": "b"}}, {"rules": {"Bash": "allow"}}),
        *({"permission_mode": "bypassPermissions"}, {"resume": "c"}, {"options": {"idle_seconds": 1}}),
        *({"mcp_servers": [{"name": "x", "command": "sh"}]}, {"inherit_env": False}, {"wrap": ["sh"]}),
        *({"on_open": ["sh"]}, {"on_close": ["sh"]}),
    ):
        answer = tokens.request(served, token, "POST", "/v1/sessions", member)
        assert (answer.status, answer.json["title"]) == (403, "Forbidden"), member
    session = tokens.opened_by(served, "greedy-2", "greedy-2")
    token = tokens.create(served, "greedy-2", Role.ASKER)
    for method, path, body in (
        ("PATCH", "", {"permission_mode": "x"}),
        ("POST", "/turns", {"prompt": "x", "rules": {"Bash": "allow"}}),
        ("POST", "/turns", {"prompt": "x", "caller": "boss"}),
    ):
        answer = tokens.request(served, token, method, f"/v1/sessions/{session}{path}", body)
        assert (answer.status, answer.json["title"]) == (403, "Forbidden"), body


def test_each_member_of_an_open_is_known_to_be_for_askers_or_for_operators() -> None:
    for_askers = {"agent", "cwd", "name", "model", "system_prompt", "labels"}
    for_askers |= {"on_limit", "fallback", "budget", "on_budget"}
    of_answers = {"updated_input", "interrupt"}
    assert {*OpenSession.__struct_fields__} == for_askers | OF_OPERATORS - of_answers


def test_approver_decides_a_question_and_nothing_else(served: Served) -> None:
    session = served.open(name="decided")
    share(served, session, "app")
    app, boss = tokens.create(served, "app", Role.APPROVER), tokens.create(served, "boss-of-app", Role.OPERATOR)
    path = f"/v1/sessions/{session}"

    def answer(token: str, question: str, **body: Any) -> Answer:
        return tokens.request(served, token, "POST", f"{path}/questions/{question}", body)

    def asked() -> str:
        turn = served.ask(session, '@@ask Bash {"command": "true"}\n@@hang')
        with served.stream(f"{path}/events?frames=false") as stream:
            events = (message.data for message in stream.messages() if message.id is not None)
            found = next(event for event in events if (event["kind"], event["turn"]) == ("question.asked", turn))
            return found["body"]["question"]

    question = asked()
    refusals: list[dict[str, Any]] = [
        {"decision": "allow", "updated_input": {"command": "id"}},
        {"decision": "allow", "updated_input": {}},
        *({"decision": "allow", "remember": place} for place in ("local", "project", "user")),
        {"decision": "deny", "interrupt": True},
    ]
    for body in refusals:
        refused = answer(app, question, **body)
        assert (refused.status, refused.json["title"]) == (403, "Forbidden"), body
    assert answer(app, question, decision="allow", remember="session").json["first"] is True
    served.post(f"{path}/interrupt")
    question = asked()
    assert answer(app, question, decision="deny", message="no").json["first"] is True
    served.post(f"{path}/interrupt")
    assert answer(boss, asked(), decision="deny", interrupt=True).status == 200


def test_token_is_limited_to_names_and_agents(served: Served) -> None:
    token = tokens.create(served, "tina", Role.OPERATOR, sessions=["tina-*"], agents=["claude"])
    body = {"command": fake_agent.command({})}
    for name, status in (("tina-1", 201), ("tom-1", 403), (None, 403)):
        assert tokens.request(served, token, "POST", "/v1/sessions", {**body, "name": name}).status == status
    answer = tokens.request(served, token, "POST", "/v1/sessions", {"agent": "codex", "name": "tina-2"})
    assert answer.status == 403
    assert tokens.request(served, token, "PATCH", "/v1/sessions/tina-1", {"name": "tom-2"}).status == 403
    served.open(name="tom-3")
    assert tokens.request(served, token, "GET", "/v1/sessions/tom-3").status == 404
    listed = tokens.request(served, token, "GET", "/v1/sessions").json["sessions"]
    assert [session["name"] for session in listed] == ["tina-1"]


def test_turn_has_the_name_of_the_token(served: Served) -> None:
    session = tokens.opened_by(served, "uma", "uma-1")
    token = tokens.create(served, "uma", Role.ASKER)
    assert tokens.request(served, token, "POST", f"/v1/sessions/{session}/turns", {"prompt": "x"}).status == 202
    events = served.get(f"/v1/sessions/{session}/events?frames=false")["events"]
    named = {event["kind"]: event["body"]["caller"] for event in events if "caller" in event["body"]}
    assert named["session.opened"] == named["turn.queued"] == "uma"
    assert tokens.request(served, token, "GET", "/v1/caller").json["name"] == "uma"
    assert served.get("/v1/caller")["role"] == "admin"


def test_waiting_ask_is_edited_by_its_asker_and_operators_only(served: Served) -> None:
    session = tokens.opened_by(served, "vera", "vera-1")
    vera, will, boss = (
        tokens.create(served, name, role)
        for name, role in (("vera", Role.ASKER), ("will", Role.ASKER), ("boss", Role.OPERATOR))
    )
    served.request("PUT", f"/v1/sessions/{session}/shared", {"shared": ["will"]})
    path = f"/v1/sessions/{session}/turns"
    tokens.request(served, vera, "POST", path, {"prompt": "@@hang"})
    turn = tokens.request(served, will, "POST", path, {"prompt": "will's"}).json["turn"]
    nameless = served.ask(session, "nobody's")

    def edit(token: str, turn: str, prompt: str) -> int:
        return tokens.request(served, token, "PATCH", f"{path}/{turn}", {"prompt": prompt}).status

    # Not even the owner of the session edits the ask of another caller.
    assert [edit(vera, turn, "x"), edit(vera, nameless, "x"), edit(will, nameless, "x")] == [403] * 3
    assert [edit(will, turn, "1"), edit(boss, turn, "2"), edit(vera, "t-none", "x")] == [200, 200, 404]
    events = served.get(f"/v1/sessions/{session}/events?frames=false")["events"]
    edited = [event["body"] for event in events if event["kind"] == "turn.edited"]
    assert [(body["prompt"], body["caller"]) for body in edited] == [("1", "will"), ("2", "boss")]


def wait_started(served: Served, session: str, turn: str) -> None:
    with served.stream(f"/v1/sessions/{session}/events?frames=false") as stream:
        events = (message.data for message in stream.messages() if message.id is not None)
        assert next(event for event in events if (event["kind"], event["turn"]) == ("turn.started", turn))


def wait_output(served: Served, session: str, turn: str) -> None:
    """Wait until the agent works on the prompt. It then takes other prompts into the turn."""
    with served.stream(f"/v1/sessions/{session}/events") as stream:
        events = (message.data for message in stream.messages() if message.id is not None)
        assert next(event for event in events if (event["kind"], event["turn"]) == ("update", turn))


def test_asker_does_not_preempt_the_ask_of_another(served: Served) -> None:
    session = tokens.opened_by(served, "pia", "pia-1")
    pia, ole, boss = (
        tokens.create(served, name, role)
        for name, role in (("pia", Role.ASKER), ("ole", Role.ASKER), ("boss-of-pia", Role.OPERATOR))
    )
    share(served, session, "ole")
    path = f"/v1/sessions/{session}/turns"
    running = tokens.request(served, pia, "POST", path, {"prompt": "@@hang"}).json["turn"]
    wait_started(served, session, running)
    waiting = tokens.request(served, ole, "POST", path, {"prompt": "later", "priority": 10}).json["turn"]
    for priority in ("interactive", 20, 11):
        asked = tokens.request(served, ole, "POST", path, {"prompt": "now", "priority": priority})
        edited = tokens.request(served, ole, "PATCH", f"{path}/{waiting}", {"priority": priority})
        assert (asked.status, edited.status) == (403, 403), priority
        assert asked.json["hint"] == 'use priority="normal" or less, or ask an operator'
    assert tokens.request(served, ole, "PATCH", f"{path}/{waiting}", {"priority": "background"}).status == 200
    assert served.get(f"{path}/{running}")["state"] == "running"
    urgent = {"prompt": "now", "priority": "interactive"}
    assert tokens.request(served, boss, "POST", path, urgent).status == 202
    assert served.outcome(session, running)["kind"] == "preempted"


def test_asker_interrupts_only_its_own_asks(served: Served) -> None:
    session = tokens.opened_by(served, "cat", "cat-1")
    cat, kim, boss = (
        tokens.create(served, name, role)
        for name, role in (("cat", Role.ASKER), ("kim", Role.ASKER), ("lead", Role.OPERATOR))
    )
    share(served, session, "kim")
    path = f"/v1/sessions/{session}"

    def ask(token: str, prompt: str, **more: Any) -> Answer:
        return tokens.request(served, token, "POST", f"{path}/turns", {"prompt": prompt, **more})

    def interrupt(token: str, turn: str | None) -> Answer:
        where = f"{path}/interrupt" if turn is None else f"{path}/turns/{turn}/interrupt"
        return tokens.request(served, token, "POST", where)

    assert interrupt(kim, None).json["stopped"] is False
    running = ask(cat, "@@hang").json["turn"]
    wait_started(served, session, running)
    waiting = ask(kim, "kim's").json["turn"]
    nameless = served.ask(session, "of the administrator")
    refused = interrupt(kim, running)
    assert (refused.status, refused.json["hint"]) == (403, "only cat and operators may do this")
    assert interrupt(kim, nameless).json["hint"] == "only operators may do this"
    statuses = [interrupt(token, turn).status for token, turn in ((kim, None), (cat, waiting), (cat, nameless))]
    assert statuses == [403] * 3
    # Nor by an ask.
    assert ask(kim, "now", on_busy="interrupt").status == 403
    assert interrupt(kim, waiting).json["stopped"] is True
    assert interrupt(cat, None).json["stopped"] is True
    assert interrupt(boss, nameless).status == 200
    assert interrupt(kim, "t-none").status == 404


def test_asker_does_not_interrupt_a_turn_that_runs_for_several_callers(served: Served) -> None:
    session = tokens.opened_by(served, "lia", "lia-1")
    lia, max_ = (tokens.create(served, name, Role.ASKER) for name in ("lia", "max"))
    share(served, session, "max")
    path = f"/v1/sessions/{session}/turns"
    first = tokens.request(served, lia, "POST", path, {"prompt": "@@say up\n@@hang"}).json["turn"]
    wait_output(served, session, first)
    steered = {"prompt": "more", "on_busy": "steer"}
    second = tokens.request(served, max_, "POST", path, steered).json["turn"]
    wait_started(served, session, second)
    for token, turn in ((lia, first), (max_, second)):
        refused = tokens.request(served, token, "POST", f"{path}/{turn}/interrupt")
        assert (refused.status, refused.json.get("hint")) == (403, "only operators may do this"), refused
    served.post(f"{path}/{first}/interrupt")


def test_metrics_are_for_viewers_without_limits_and_operators(served: Served) -> None:
    limits: dict[str, dict[str, Any]] = {"all": {}, "named": {"sessions": ["a-*"]}, "agents": {"agents": ["claude"]}}
    found = {
        (role, name): tokens.request(
            served, tokens.create(served, f"metrics-{role}-{name}", role, **limit), "GET", "/metrics"
        ).status
        for role in (Role.VIEWER, Role.APPROVER, Role.OPERATOR)
        for name, limit in limits.items()
    }
    allowed = {who for who, status in found.items() if status == 200}
    assert allowed == {(Role.VIEWER, "all"), *((Role.OPERATOR, name) for name in limits)}
    assert {*found.values()} == {200, 403}


def test_page_accepts_a_named_token(served: Served) -> None:
    token = tokens.create(served, "page", Role.VIEWER, seconds=3600)
    answer = served.request("POST", "/v1/login", {"token": token}, token=False)
    assert answer.status == 200
    assert answer.json["expires"] <= time.time() + 3600
    assert tokens.request(served, answer.json["token"], "GET", "/v1/caller").json["role"] == "viewer"
    assert served.request("POST", "/v1/login", {"token": f"{token}x"}, token=False).status == 401


@pytest.mark.parametrize("path", ["/v1/events", "/v1/sessions/{}/events"])
def test_open_stream_of_a_revoked_token_ends(served: Served, path: str) -> None:
    name = f"leaver-{len(path)}"
    session = tokens.opened_by(served, name, name)
    token = tokens.create(served, name, Role.ASKER)
    with served.stream(path.format(session), token=token) as stream:
        stream.until_live()
        tokens.revoke(served, name)
        # The server sends no heartbeat for seconds, so the end is its own.
        assert [message for message in stream.messages() if message.id] == []
    assert tokens.request(served, token, "GET", "/v1/caller").status == 401


def test_expired_token_is_refused_and_its_stream_ends(served: Served) -> None:
    session = tokens.opened_by(served, "brief", "brief")
    token = tokens.create(served, "brief", Role.ASKER, seconds=3.0)
    with served.stream(f"/v1/sessions/{session}/events", token=token) as stream:
        if stream.status == 200:
            assert all(message.id or message.event for message in stream.messages())
    assert tokens.request(served, token, "GET", "/v1/caller").status == 401


def test_tokens_are_neither_in_the_file_nor_in_the_log(served: Served) -> None:
    token = tokens.create(served, "quiet", Role.ASKER)
    assert tokens.request(served, token, "GET", "/v1/caller").status == 200
    assert tokens.request(served, token, "GET", "/v1/usage").status == 403
    for file in (tokens.path(served), served.log, *Path(served.folder).glob("store.db*")):
        assert token.removeprefix("bmt_").encode() not in file.read_bytes(), file
    assert tokens.path(served).stat().st_mode & 0o777 == 0o600
