"""Holds over HTTP: begin, wait for the grant, ask in the hold, release, and who may do each."""

from __future__ import annotations

import threading
from typing import Any

from tests.server.access import tokens
from tests.server.kit import Answer, Served

from banksman.server.access.roles import Role
from banksman.server.api.hold_routes import HOLDS_OF_CALLER_MAX


def texts(served: Served, session: str) -> list[str]:
    """Return the prompts of the started turns, in their order."""
    prompts: dict[str, str] = {}
    started: list[str] = []
    for event in served.get(f"/v1/sessions/{session}/events?frames=0&limit=1000")["events"]:
        if event["kind"] == "turn.queued":
            prompts[event["turn"]] = event["body"]["prompt"]
        elif event["kind"] == "turn.started":
            started.append(prompts[event["turn"]])
    return started


def test_other_asks_wait_until_the_hold_is_released(served: Served) -> None:
    session = served.open()
    path = f"/v1/sessions/{session}"
    answer = served.request("POST", f"{path}/holds", {"caller": "ann"})
    hold = answer.json
    assert (answer.status, answer.headers["location"]) == (201, f"{path}/holds/{hold['hold']}")
    assert (hold["priority"], hold["caller"]) == (10, "ann")
    assert hold["at"] is not None
    outsider = served.ask(session, "outsider")
    for word in ("one", "two"):
        served.outcome(session, served.ask(session, word, hold=hold["hold"]))
    shown = served.get(path)
    assert shown["hold"] == hold["hold"]
    assert [each["hold"] for each in shown["holds"]] == [hold["hold"]]
    assert [each["hold"] for each in served.get(f"{path}/why")["holds"]] == [hold["hold"]]
    assert [each["turn"] for each in shown["queue"]] == [outsider]
    assert served.request("DELETE", f"{path}/holds/{hold['hold']}").status == 204
    served.outcome(session, outsider)
    assert texts(served, session) == ["one", "two", "outsider"]
    assert served.get(path)["holds"] == []


def test_look_waits_for_the_grant(served: Served) -> None:
    session = served.open()
    path = f"/v1/sessions/{session}/holds"
    first, second = served.post(path), served.post(path)
    assert (first["at"] is None, second["at"] is None) == (False, True)
    assert served.get(f"{path}/{second['hold']}?wait=0.01")["at"] is None
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(served.get(f"{path}/{second['hold']}?wait=60")))
    thread.start()
    assert served.request("DELETE", f"{path}/{first['hold']}").status == 204
    thread.join()
    assert found[0]["at"] is not None
    # A waiting hold that is released fails the request that waits for it.
    third = served.post(path)
    refused: list[Answer] = []
    thread = threading.Thread(target=lambda: refused.append(served.request("GET", f"{path}/{third['hold']}?wait=60")))
    thread.start()
    assert served.request("DELETE", f"{path}/{third['hold']}").status == 204
    thread.join()
    assert refused[0].status in (404, 409)


def test_repeated_request_with_a_key_is_one_hold(served: Served) -> None:
    session = served.open()
    path = f"/v1/sessions/{session}/holds"
    key = {"Idempotency-Key": "one-hold"}
    first = served.request("POST", path, {}, headers=key).json["hold"]
    assert served.request("POST", path, {}, headers=key).json["hold"] == first
    assert served.request("DELETE", f"{path}/{first}").status == 204
    # The hold is over, so the request begins another one.
    assert served.request("POST", path, {}, headers=key).json["hold"] != first


def test_hold_that_is_over_is_not_found(served: Served) -> None:
    session = served.open()
    path = f"/v1/sessions/{session}"
    assert served.request("GET", f"{path}/holds/h-none").status == 404
    assert served.request("DELETE", f"{path}/holds/h-none").status == 404
    answer = served.request("POST", f"{path}/turns", {"prompt": "late", "hold": "h-none"})
    assert (answer.status, answer.json["title"]) == (404, "NotFound")
    assert "begin another hold" in answer.json["hint"]
    assert served.request("POST", f"{path}/holds", {"priority": "soon"}).status == 422
    assert served.get(path)["holds"] == []


def test_only_the_holder_asks_in_a_hold_and_owner_and_operators_release_it(served: Served) -> None:
    session = tokens.opened_by(served, "ann", "held-1")
    path = f"/v1/sessions/{session}"
    served.request("PUT", f"{path}/shared", {"shared": ["bob", "carl"]})
    ann, bob, carl = (tokens.create(served, name, Role.ASKER) for name in ("ann", "bob", "carl"))
    boss = tokens.create(served, "boss", Role.OPERATOR)

    def begin(token: str, body: Any = None) -> Answer:
        return tokens.request(served, token, "POST", f"{path}/holds", body or {})

    def end(token: str, hold: str) -> int:
        return tokens.request(served, token, "DELETE", f"{path}/holds/{hold}").status

    assert begin(bob, {"priority": "interactive"}).status == 403
    assert begin(bob, {"caller": "ann"}).status == 403
    hold = begin(bob).json
    assert hold["caller"] == "bob"
    asked = {"prompt": "mine", "hold": hold["hold"]}
    answer = tokens.request(served, carl, "POST", f"{path}/turns", asked)
    assert (answer.status, answer.json["hint"]) == (403, "only bob and operators may do this")
    assert tokens.request(served, ann, "POST", f"{path}/turns", asked).status == 403
    accepted = tokens.request(served, bob, "POST", f"{path}/turns", asked)
    served.outcome(session, accepted.json["turn"])
    assert [end(carl, hold["hold"]), end(bob, hold["hold"])] == [403, 204]
    assert end(ann, begin(bob).json["hold"]) == 204
    assert end(boss, begin(bob).json["hold"]) == 204
    events = served.get(f"{path}/events?frames=0&limit=1000")["events"]
    ended = [event["body"].get("caller") for event in events if event["kind"] == "hold.ended"]
    assert ended == ["bob", "ann", "boss"]
    assert {event["body"]["caller"] for event in events if event["kind"] == "hold.granted"} == {"bob"}


def test_named_caller_has_few_holds_of_a_session(served: Served) -> None:
    session = tokens.opened_by(served, "una", "hoarded-1")
    path = f"/v1/sessions/{session}"
    served.request("PUT", f"{path}/shared", {"shared": ["udo"]})
    una, udo = (tokens.create(served, name, Role.ASKER) for name in ("una", "udo"))
    holds = [tokens.request(served, udo, "POST", f"{path}/holds", {}).json["hold"] for _ in range(HOLDS_OF_CALLER_MAX)]
    refused = tokens.request(served, udo, "POST", f"{path}/holds", {})
    assert (refused.status, refused.json["title"]) == (429, "QueueFull")
    # It counts for each caller, and ends with a hold. The server's own token has no such limit.
    assert tokens.request(served, una, "POST", f"{path}/holds", {}).status == 201
    assert served.request("POST", f"{path}/holds", {"caller": "udo"}).status == 201
    for _ in range(2):
        assert served.request("DELETE", f"{path}/holds/{holds.pop()}").status == 204
    assert tokens.request(served, udo, "POST", f"{path}/holds", {}).status == 201
