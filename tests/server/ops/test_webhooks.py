"""Webhooks of a real server to a real receiver: which events, in which order, how often, and where they may go."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.docs.blocks import ROOT
from tests.server.kit import SECONDS_MAX, TOKEN, Served
from tests.server.ops.webhook_receiver import Received, Receiver
from tests.thorough import thorough

ASKS = 5


def seqs(received: list[Received], session: str) -> list[int]:
    return [int(one.json["cursor"].split(".")[1]) for one in received if one.json["session"] == session]


def metric(served: Served, name: str) -> float:
    page = served.request("GET", "/metrics").body.decode()
    [value] = re.findall(rf'^{name}{{target="[^"]*"}} (\S+)$', page, re.MULTILINE)
    return float(value)


def secret_of(served: Served) -> str:
    return (served.folder / "state" / "banksman" / "webhook-secret").read_text().strip()


def test_receiver_gets_the_events_of_the_settings_and_no_others(tmp_path: Path) -> None:
    with Receiver() as receiver, Served(tmp_path / "server", webhooks=[receiver.url("/hook?key=k-1")]) as served:
        session = served.open(budget={"tokens": 1000})
        for prompt in ("hello", "@@used 900 0"):
            served.outcome(session, served.ask(session, prompt))
        # Two turns, and a warning about the budget with the second one.
        found = receiver.wait_accepted(3)
        assert sorted(one.json["event"] for one in found) == ["budget.warning", "turn.ended", "turn.ended"]
        assert {one.path for one in found} == {"/hook?key=k-1"}
        log = served.get(f"/v1/sessions/{session}/events?limit=1000")["events"]
        by_cursor = {event["cursor"]: event for event in log}
        for one in found:
            stored = by_cursor[one.json["cursor"]]
            assert (one.json["event"], one.json["data"]) == (stored["kind"], stored["body"])
            assert (one.json["turn"], one.json["at"]) == (stored["turn"], stored["at"])
            assert one.headers["banksman-event"] == one.json["event"]
            assert one.id == f"{session}/{one.json['cursor']}"
            assert not one.json["is_truncated"]
        assert metric(served, "banksman_webhook_deliveries_total") == 3
        assert metric(served, "banksman_webhook_failures_total") == 0
        assert metric(served, "banksman_webhook_lag_seconds") == 0


@thorough
def test_receiver_gets_a_question(tmp_path: Path) -> None:
    with Receiver() as receiver:
        settings: dict[str, Any] = {"webhooks": [receiver.url()], "webhook_events": ["question.asked"]}
        with Served(tmp_path / "server", **settings) as served:
            session = served.open({"prompt": ["ask Bash"]})
            turn = served.ask(session, "may I")
            [one] = receiver.wait_accepted(1)
            assert (one.json["event"], one.json["turn"]) == ("question.asked", turn)
            question = one.json["data"]["question"]
            served.post(f"/v1/sessions/{session}/questions/{question}", {"decision": "allow"})
            served.outcome(session, turn)
            assert len(receiver.all) == 1


def test_no_event_is_lost_and_order_is_kept_when_the_server_is_killed(tmp_path: Path) -> None:
    held, killed = threading.Event(), threading.Event()

    def hold_third(received: Received) -> int:
        if len(receiver.accepted) == 2 and not killed.is_set():
            held.set()
            killed.wait()
        return 204

    with Receiver(answer=hold_third) as receiver:
        served = Served(tmp_path / "server", webhooks=[receiver.url()], webhook_events=["turn.ended", "session.lost"])
        with served:
            session = served.open()
            for number in range(ASKS):
                served.outcome(session, served.ask(session, f"hello {number}"))
            hanging = served.ask(session, "@@hang")
            held.wait()
            served.kill()
            killed.set()
            served.start()
            # The turns, the turn that was open at the kill, and the loss of its host.
            found = receiver.wait_accepted(ASKS + 2)
            assert {one.json["turn"] for one in found} >= {hanging}
            assert [one.json["event"] for one in found][-1] == "session.lost"
        first = list(dict.fromkeys(seqs(found, session)))
        assert first == sorted(first)
        # What was accepted before the kill and stored is not repeated: only the message in flight may be.
        assert len(found) <= ASKS + 2 + 3


@thorough
def test_events_that_are_written_while_the_receiver_is_down_are_sent_later(tmp_path: Path) -> None:
    with Receiver() as probe:
        port = probe.port
    with Served(tmp_path / "server", webhooks=[f"http://127.0.0.1:{port}/"], webhook_events=["turn.ended"]) as served:
        session = served.open()
        for number in range(ASKS):
            served.outcome(session, served.ask(session, f"hello {number}"))
        while not metric(served, "banksman_webhook_failures_total"):
            pass
        assert metric(served, "banksman_webhook_lag_seconds") > 0
        # A planned restart keeps the place, too.
        served.stop()
        with Receiver(port) as receiver:
            served.start()
            found = receiver.wait_accepted(ASKS)
            assert seqs(found, session) == sorted(set(seqs(found, session)))
        log = served.log.read_text()
        assert log.count("delivery failed, trying again: ConnectionRefusedError") == 1


@thorough
@pytest.mark.parametrize("status", [500, 302])
def test_failed_attempt_is_repeated_and_redirect_is_not_followed(status: int, tmp_path: Path) -> None:
    def fail_first(received: Received) -> int:
        return status if len(receiver.all) < 2 else 200

    with Receiver(answer=fail_first) as receiver:
        with Served(tmp_path / "server", webhooks=[receiver.url()], webhook_events=["turn.ended"]) as served:
            session = served.open()
            for number in range(2):
                served.outcome(session, served.ask(session, f"hello {number}"))
            receiver.wait_accepted(2)
            found = receiver.all
            assert [one.status for one in found] == [status, status, 200, 200]
            assert {one.path for one in found} == {"/hook"}
            # The same message each time: a receiver drops duplicates by the id.
            assert len({(one.id, one.body) for one in found[:3]}) == 1
            assert metric(served, "banksman_webhook_failures_total") == 2
        assert f"delivery failed, trying again: status {status}" in served.log.read_text()


@thorough
def test_slow_receiver_delays_neither_another_one_nor_another_session(tmp_path: Path) -> None:
    gates: dict[str, threading.Event] = {}
    has_begun = threading.Event()

    def hold(received: Received) -> int:
        if gate := gates.get(received.json["session"]):
            has_begun.set()
            gate.wait()
        return 200

    with Receiver(answer=hold) as slow, Receiver() as quick:
        settings: dict[str, Any] = {"webhooks": [slow.url(), quick.url()], "webhook_events": ["turn.ended"]}
        with Served(tmp_path / "server", **settings) as served:
            first, second, third = sessions = [served.open() for _ in range(3)]
            # While the first one is held, the others end their turns. So both are in the next page.
            gates.update({first: threading.Event(), second: threading.Event()})
            for session in sessions:
                served.outcome(session, served.ask(session, "hello"))
                assert has_begun.wait(SECONDS_MAX)
            quick.wait_accepted(3)
            assert slow.all == []
            gates[first].set()
            assert [one.json["session"] for one in slow.wait_accepted(2)] == [first, third]
            gates[second].set()
            slow.wait_accepted(3)


def test_message_is_signed_as_the_page_shows_and_has_no_secret(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "webhooks.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(code, "webhooks.md", "exec"), names)
    is_genuine = names["is_genuine"]
    assert callable(is_genuine)
    with Receiver() as receiver, Served(tmp_path / "server", webhooks=[receiver.url()]) as served:
        secret = secret_of(served)
        session = served.open()
        # The secrets of the server are removed from the log, and so from messages.
        served.outcome(session, served.ask(session, f"my key is {secret}, my token {TOKEN}"))
        [one] = receiver.wait_accepted(1)
        assert is_genuine(one.headers, one.body, secret)
        assert not is_genuine(one.headers, one.body + b" ", secret)
        assert not is_genuine(one.headers, one.body, "another")
        assert not is_genuine({**one.headers, "banksman-timestamp": "1700000000"}, one.body, secret)
        sent = repr(one.headers).encode() + one.body
        for key in (secret, TOKEN):
            assert key.encode() not in sent
            assert key not in served.log.read_text()
        assert secret not in served.request("GET", "/v1/server").body.decode()


@thorough
def test_message_that_is_too_large_is_sent_without_its_data(tmp_path: Path) -> None:
    with Receiver() as receiver, Served(tmp_path / "server", webhooks=[receiver.url()]) as served:
        session = served.open({"prompt": [f"huge_result {300 << 10}"]})
        served.outcome(session, served.ask(session, "hello"))
        [one] = receiver.wait_accepted(1)
        assert len(one.body) < 1000
        assert (one.json["data"], one.json["is_truncated"]) == (None, True)


@thorough
def test_only_one_of_two_servers_of_a_store_sends(tmp_path: Path) -> None:
    with Receiver() as receiver:
        settings: dict[str, Any] = {"webhooks": [receiver.url()], "webhook_events": ["turn.ended"]}
        with Served(tmp_path / "server", **settings) as first:
            second = Served(first.folder, **settings)
            with second:
                session = first.open()
                first.outcome(session, first.ask(session, "hello"))
                receiver.wait_accepted(1)
                first.stop()
                session = second.open()
                second.outcome(session, second.ask(session, "hello"))
                found = receiver.wait_accepted(2)
                assert len(found) == 2
