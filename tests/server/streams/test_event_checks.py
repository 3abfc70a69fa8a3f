"""The event checks detect duplicates, omissions and reordering that a proxy plants between a server and its client."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import threading
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import pytest
from tests.server.kit import SECONDS_MAX, Served
from tests.server.streams.stream_clients import NDJSON, SSE, Client, Received, is_live, walk

from banksman.testing import checks
from banksman.testing.checks import Message, Visit

# A change of the events of one answer, or of the cursor that a client resumes from.
Fault = Callable[[list[Message]], Sequence[Message]]
CUT = 5


class Between:
    """Proxy that forwards complete messages after it has changed the events of the n-th answer."""

    def __init__(self, port: int, fault: Fault, *, at: int, goes_back: bool = False) -> None:
        self._port = port
        self._fault = fault
        self._at = at
        # Whether the proxy requests one event more than the client.
        self._goes_back = goes_back
        self._seen: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Between:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        number = 0
        with contextlib.suppress(OSError):  # The listener was closed.
            while True:
                client, _ = self._listener.accept()
                with client, contextlib.suppress(ConnectionError):
                    self._hand_on(client, number)
                number += 1

    def _hand_on(self, client: socket.socket, number: int) -> None:
        request = b""
        while not request.endswith(b"\r\n\r\n"):
            request += client.recv(1 << 16)
        if self._goes_back and number == self._at:
            last, before = self._seen[CUT - 1], self._seen[CUT - 2]
            assert f"Last-Event-ID: {last}\r\n".encode() in request
            request = request.replace(f"Last-Event-ID: {last}".encode(), f"Last-Event-ID: {before}".encode())
        accept = NDJSON if NDJSON.encode() in request else SSE
        answer = Received(accept)
        with socket.create_connection(("127.0.0.1", self._port), SECONDS_MAX) as server:
            server.sendall(request.replace(str(self.port).encode(), str(self._port).encode()))
            while not any(map(is_live, answer.messages)):
                answer.feed(server.recv(1 << 16))
        *events, live = answer.messages
        self._seen = [message.id or "" for message in events]
        messages = [*(self._fault(events) if number == self._at else events), live]
        text = b"".join(_sse(message) if accept == SSE else message.data + b"\n" for message in messages)
        client.sendall(
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(text), text)
        )


def _sse(message: Message) -> bytes:
    fields = (("id", message.id), ("event", message.event), ("data", message.data.decode()))
    return ("".join(f"{name}: {value}\n" for name, value in fields if value is not None) + "\n").encode()


def nothing(events: list[Message]) -> Sequence[Message]:
    return events


def twice(events: list[Message]) -> Sequence[Message]:
    return [*events[:4], events[3], *events[4:]]


def left_out(events: list[Message]) -> Sequence[Message]:
    return [*events[:3], *events[4:]]


def swapped(events: list[Message]) -> Sequence[Message]:
    return [*events[:3], events[4], events[3], *events[5:]]


def first_left_out(events: list[Message]) -> Sequence[Message]:
    return events[1:]


def without_id(events: list[Message]) -> Sequence[Message]:
    return [events[0]._replace(id=None), *events[1:]]


def altered(events: list[Message]) -> Sequence[Message]:
    body = json.loads(events[2].data)
    return [*events[:2], events[2]._replace(data=json.dumps({**body, "at": 0.0}).encode()), *events[3:]]


def with_a_mark_that_has_an_id(events: list[Message]) -> Sequence[Message]:
    mark = Message(events[0].id, "stream.heartbeat", b'{"kind":"stream.heartbeat","head":null}')
    return [mark, *events]


FAULTS: dict[str, tuple[Fault, int, str]] = {
    "one event twice": (twice, 0, "comes twice"),
    "one event left out": (left_out, 0, "is left out"),
    "two events swapped": (swapped, 0, "is left out"),
    "the last one again after a cut": (nothing, 1, "comes twice"),
    "the next one left out after a cut": (first_left_out, 1, "is left out"),
    "an event without an id": (without_id, 0, "has no id"),
    "an event that others see differently": (altered, 0, "two clients differ"),
    "an id on what was made for one reader": (with_a_mark_that_has_an_id, 0, "which is for one reader, has the id"),
}


@contextlib.contextmanager
def short(folder: Path) -> Generator[tuple[Served, str, str]]:
    """Serve two sessions with a few events each."""
    with Served(folder) as served:
        one, other = served.open(name="one"), served.open(name="other")
        for session in (one, other):
            served.outcome(session, served.ask(session, "@@stream 3 0 漢"))
        yield served, one, other


def look(port: int, path: str, accept: str) -> Client:
    """Read a few events, drop the connection, and resume."""
    client = Client(port, path, accept=accept)
    count = iter(range(1, CUT + 1))
    client.visit(until=lambda message: message.id is not None and next(count) == CUT)
    client.visit(until=is_live)
    return client


FORMS = (("/v1/sessions/one/events", SSE), ("/v1/sessions/one/events", NDJSON), ("/v1/events", SSE))
# NDJSON has no ids apart from those in its lines.
OF_IDS = ("an event without an id", "an id on what was made for one reader")


def test_event_checks_catch_duplicate_missing_and_reordered_events(tmp_path: Path) -> None:
    with short(tmp_path / "served") as (served, one, other):
        known = walk(served, one), walk(served, other)
        for path, accept in FORMS:
            # Without a fault there is nothing to detect.
            with Between(served.port, nothing, at=0) as between:
                checks.views_agree(*known, look(between.port, path, accept).view())
        for (path, accept), (fault, (change, at, said)) in itertools.product(FORMS, FAULTS.items()):
            goes_back = fault == "the last one again after a cut"
            if accept == NDJSON and fault in OF_IDS:
                continue
            with Between(served.port, change, at=at, goes_back=goes_back) as between:
                client = look(between.port, path, accept)
            with pytest.raises(AssertionError, match=said):
                checks.views_agree(*known, client.view())


def _events(*places: tuple[str, int], epoch: int = 1) -> list[Message]:
    return [
        Message(
            f"p{number}",
            None,
            json.dumps(
                {"cursor": f"{epoch}.{seq}", "session": session, "epoch": epoch, "seq": seq, "kind": "update"}
            ).encode(),
        )
        for number, (session, seq) in enumerate(places)
    ]


def _made(kind: str, **more: object) -> Message:
    return Message(None, kind, json.dumps({"kind": kind, **more}).encode())


def test_event_checks_catch_two_clients_with_different_order() -> None:
    one = checks.joined_many([Visit(None, _events(("a", 1), ("b", 1), ("a", 2)))])
    events = _events(("a", 1), ("b", 1), ("a", 2))
    other = checks.joined_many([Visit(None, [events[0], events[2], events[1]])])
    checks.views_agree(one, one)
    with pytest.raises(AssertionError, match="another was given"):
        checks.views_agree(one, other)


def test_event_checks_accept_only_the_exact_gap() -> None:
    events = _events(("a", 4), ("b", 1))
    gap = _made("stream.gap", session="a", first=1, last=3)
    view = checks.joined_many([Visit(None, [gap, *events])])
    assert view.gaps == {"a": [(1, 3)]}
    assert view.heads() == {"a": 4, "b": 1}
    for wrong in ((1, 2), (2, 3)):
        told = _made("stream.gap", session="a", first=wrong[0], last=wrong[1])
        with pytest.raises(AssertionError, match=r"left out|comes next"):
            checks.joined_many([Visit(None, [told, *events])])


@pytest.mark.parametrize(
    ("visits", "said"),
    [
        ([Visit("p9", [])], "the last one ended at None"),
        ([Visit(None, _events(("a", 1))), Visit(None, [])], "the last one ended at p0"),
        ([Visit(None, [_made("stream.live", head=None), _made("stream.live", head=None)])], "live twice"),
        ([Visit(None, [_made("stream.closing"), *_events(("a", 1))])], "after stream.closing"),
        ([Visit(None, [_made("stream.live", head=None)._replace(event=None)])], "is called None"),
        ([Visit(None, [*_events(("a", 1), epoch=2), *_events(("x", 1), ("a", 2))[1:]])], "the epoch falls"),
        ([Visit(None, [*_events(("a", 1)), *_events(("b", 1))])], "the id p0 comes twice"),
    ],
)
def test_event_checks_catch_invalid_visits(visits: list[Visit], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        checks.joined_many(visits)


def test_event_checks_catch_live_mark_before_the_end() -> None:
    (event,) = _events(("a", 1))
    event = event._replace(id="1.1")
    checks.joined([Visit(None, [event, _made("stream.live", head="1.1")])])
    with pytest.raises(AssertionError, match="live at"):
        checks.joined([Visit(None, [event, _made("stream.live", head="1.2")])])
    with pytest.raises(AssertionError, match="of another session"):
        checks.joined([Visit(None, [event, _events(("b", 1))[0]._replace(id="1.1")])])
