"""`log --audit`, `share`, `unshare`, and the names of callers in `ps` and `why`, with a real server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.server.access import tokens
from tests.server.kit import SECONDS_MAX, TOKEN, Served, shared

from banksman.server.access.roles import Role


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with shared(tmp_path_factory.mktemp("server")) as served:
        yield served


def run(served: Served, *words: str, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    """Run a verb as a client of the server's port, as the holder of a token."""
    variables = {"XDG_STATE_HOME": str(served.folder / "none"), "BANKSMAN_TOKEN": token, "BANKSMAN_URL": served.url}
    return subprocess.run(
        [sys.executable, "-m", "banksman", *words],
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
        env={**os.environ, **variables},
    )


def test_audit_lists_actions_with_their_callers(served: Served) -> None:
    session = tokens.opened_by(served, "ann", "audited")
    ann = tokens.create(served, "ann", Role.ASKER)
    path = f"/v1/sessions/{session}"
    first = tokens.request(served, ann, "POST", f"{path}/turns", {"prompt": "@@hang"}).json["turn"]
    second = tokens.request(served, ann, "POST", f"{path}/turns", {"prompt": "later"}).json["turn"]
    tokens.request(served, ann, "PATCH", f"{path}/turns/{second}", {"prompt": "much later"})
    why = run(served, "why", session).stdout
    assert f"{first}, asked by ann, since " in why
    assert f"{second} by ann, priority " in why
    head, row = run(served, "ps").stdout.splitlines()[:2]
    assert "BY" in head.split()
    assert row.split()[4:6] == [first, "ann"]
    assert run(served, "interrupt", session, second).returncode == 0
    tokens.request(served, ann, "POST", f"{path}/turns/{first}/interrupt")
    served.outcome(session, first)
    told = run(served, "share", session, "bob", "eve", token=ann)
    assert told.stdout == "owner: ann\nshared: bob, eve\n"
    assert run(served, "unshare", session, "bob").stdout == "owner: ann\nshared: eve\n"
    assert run(served, "share", session).stdout == "owner: ann\nshared: eve\n"

    printed = run(served, "log", session, "--audit", "--json").stdout
    found = [json.loads(line) for line in printed.splitlines()]
    assert [(each["who"], each["did"], each["turn"], each["detail"]) for each in found] == [
        ("ann", "opened", None, "claude"),
        ("ann", "asked", first, "@@hang"),
        ("ann", "asked", second, "later"),
        ("ann", "edited", second, "much later"),
        ("ann", "interrupted", first, ""),
        ("ann", "shared", None, "bob, eve"),
        (None, "shared", None, "eve"),
    ]
    lines = run(served, "log", session, "--audit", "-n", "2").stdout.splitlines()
    assert [line.split("  ", 1)[1] for line in lines] == ["ann  opened  claude", f"ann  asked  {first}  @@hang"]
    assert run(served, "log", session, "--audit", "--raw").returncode == 2


def test_audit_names_the_caller_whose_ask_preempted_a_turn(served: Served) -> None:
    session = tokens.opened_by(served, "una", "audited-3")
    boss = tokens.create(served, "boss-3", Role.OPERATOR)
    path = f"/v1/sessions/{session}/turns"
    with served.stream(f"/v1/sessions/{session}/events?frames=false") as stream:
        first = served.ask(session, "@@hang")
        messages = (message.data for message in stream.messages() if message.id is not None)
        assert next(data for data in messages if data["kind"] == "turn.started")
    urgent = tokens.request(served, boss, "POST", path, {"prompt": "now", "priority": "interactive"})
    assert served.outcome(session, first)["kind"] == "preempted"
    found = [json.loads(line) for line in run(served, "log", session, "--audit", "--json").stdout.splitlines()]
    assert [(each["who"], each["did"], each["turn"]) for each in found[-2:]] == [
        ("boss-3", "asked", urgent.json["turn"]),
        ("boss-3", "preempted", first),
    ]


def test_audit_names_who_withdrew_an_ask_and_who_answered(served: Served) -> None:
    session = tokens.opened_by(served, "cleo", "audited-2")
    boss = tokens.create(served, "boss", Role.OPERATOR)
    path = f"/v1/sessions/{session}"
    with served.stream(f"{path}/events?frames=false") as stream:
        served.ask(session, "@@ask Bash {}\n@@hang")
        messages = (message.data for message in stream.messages() if message.id is not None)
        asked = next(data["body"] for data in messages if data["kind"] == "question.asked")
    tokens.request(served, boss, "POST", f"{path}/questions/{asked['question']}", {"decision": "allow"})
    waiting = served.ask(session, "later")
    tokens.request(served, boss, "POST", f"{path}/turns/{waiting}/interrupt")
    tokens.request(served, boss, "DELETE", path)
    found = [json.loads(line) for line in run(served, "log", session, "--audit", "--json").stdout.splitlines()]
    assert [(each["who"], each["did"]) for each in found] == [
        *[("cleo", "opened"), (None, "asked"), ("boss", "answered"), (None, "asked")],
        *[("boss", "withdrew"), ("boss", "closed")],
    ]
