"""Names of callers in the log: who asked, interrupted, answered, moved, edited, shared, closed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.server.access import tokens
from tests.server.kit import Served, shared

from banksman.server.access.roles import Role


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with shared(tmp_path_factory.mktemp("server")) as served:
        yield served


def events(served: Served, session: str) -> list[dict[str, Any]]:
    return served.get(f"/v1/sessions/{session}/events?frames=false")["events"]


def callers(served: Served, session: str, kind: str, member: str = "caller") -> list[str | None]:
    return [event["body"].get(member) for event in events(served, session) if event["kind"] == kind]


def wait_event(served: Served, session: str, kind: str, count: int = 1) -> dict[str, Any]:
    """Wait until the session has so many events of this kind, and return the last of them."""
    with served.stream(f"/v1/sessions/{session}/events?frames=false") as stream:
        for message in stream.messages():
            if message.id is not None and message.data["kind"] == kind:
                count -= 1
                if not count:
                    return message.data
    raise AssertionError("the stream has ended")


def test_log_names_callers_of_asks_answers_and_interrupts(served: Served) -> None:
    session = tokens.opened_by(served, "ann", "named-1")
    ann, boss = tokens.create(served, "ann", Role.ASKER), tokens.create(served, "boss", Role.OPERATOR)
    path = f"/v1/sessions/{session}"
    tokens.request(served, ann, "POST", f"{path}/turns", {"prompt": "@@ask Bash {}\n@@hang"})
    question = wait_event(served, session, "question.asked")["body"]["question"]
    given = tokens.request(served, boss, "POST", f"{path}/questions/{question}", {"decision": "allow"})
    assert given.json["caller"] == "boss"
    # A later answer gets the first one, with its caller, also from the log.
    again = tokens.request(served, boss, "POST", f"{path}/questions/{question}", {"decision": "deny"})
    assert (again.json["first"], again.json["caller"]) == (False, "boss")
    waiting = [
        tokens.request(served, ann, "POST", f"{path}/turns", {"prompt": f"later {number}"}).json["turn"]
        for number in range(2)
    ]
    move = tokens.request(served, ann, "POST", f"{path}/turns/{waiting[1]}/move", {"before": waiting[0]})
    assert move.status == 200, move
    # The second one is withdrawn, the running one is interrupted.
    assert tokens.request(served, boss, "POST", f"{path}/turns/{waiting[1]}/interrupt").status == 200
    assert tokens.request(served, ann, "POST", f"{path}/interrupt").status == 200
    served.outcome(session, waiting[0])
    assert tokens.request(served, boss, "DELETE", path).status == 200
    assert callers(served, session, "session.opened") == ["ann"]
    assert callers(served, session, "turn.queued") == ["ann"] * 3
    assert callers(served, session, "question.answered") == ["boss"]
    assert callers(served, session, "queue.changed") == ["ann"]
    assert callers(served, session, "turn.interrupted") == ["ann"]
    assert callers(served, session, "turn.ended", "stopped_by") == ["boss", "ann", None]
    assert callers(served, session, "session.closed") == ["boss"]


def test_logs_name_the_caller_of_a_setting_a_new_name_and_a_deletion(served: Served) -> None:
    session = tokens.opened_by(served, "sue", "changed-1")
    sue, boss = tokens.create(served, "sue", Role.ASKER), tokens.create(served, "boss-of-sue", Role.OPERATOR)
    path = f"/v1/sessions/{session}"
    assert tokens.request(served, sue, "PATCH", path, {"model": "large", "name": "changed-2"}).status == 200
    assert tokens.request(served, boss, "PATCH", path, {"permission_mode": "plan"}).status == 200
    assert served.request("PATCH", path, {"model": "small"}).status == 200
    assert callers(served, session, "session.setting") == ["sue", "boss-of-sue", None]
    assert tokens.request(served, boss, "DELETE", f"{path}?forget=true").status == 204
    lines = served.log.read_text(encoding="utf-8")
    assert f"session {session} has the name 'changed-2': changed by sue" in lines
    assert f"session {session} deleted by boss-of-sue" in lines


def test_log_names_no_caller_without_a_name(served: Served) -> None:
    session = served.open(name="nameless-1")
    turn = served.ask(session, "@@ask Bash {}\n@@hang")
    question = wait_event(served, session, "question.asked")["body"]["question"]
    served.post(f"/v1/sessions/{session}/questions/{question}", {"decision": "allow"})
    served.post(f"/v1/sessions/{session}/turns/{turn}/interrupt")
    for event in events(served, session):
        if event["kind"] in ("question.answered", "turn.interrupted"):
            assert "caller" not in event["body"]


def test_command_shows_its_caller(served: Served) -> None:
    boss = tokens.create(served, "chief", Role.OPERATOR)
    made = tokens.request(served, boss, "POST", "/v1/commands", {"argv": ["true"]}).json
    assert made["caller"] == "chief"
    assert served.get(f"/v1/commands/{made['id']}")["caller"] == "chief"
    assert served.post("/v1/commands", {"argv": ["true"]})["caller"] is None
