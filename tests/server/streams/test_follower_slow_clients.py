"""Clients that are gone, stalled or slow (scenarios 56 and 60): their cost, and when the server cuts them off."""

from __future__ import annotations

import re
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.server.kit import SECONDS_MAX, Served
from tests.server.streams.stream_clients import Client, Received, is_live, walk

from banksman.testing import checks

pytestmark = pytest.mark.thorough

MANY = "/v1/events"
# One prompt is one event. A few of them exceed the kernel's buffer for a client that does not read.
PROMPT = "漢" * 333_000
MIB = 1 << 20
STALL = 1.5


def of(session: str) -> str:
    return f"/v1/sessions/{session}/events"


def fill(served: Served, session: str, count: int) -> None:
    for _ in range(count):
        served.outcome(session, served.ask(session, PROMPT))


def connect(served: Served, path: str, *, room: int = 8 << 10) -> socket.socket:
    """Request a stream and read nothing. `room`: the receive buffer of the client."""
    peer = socket.socket()
    peer.settimeout(SECONDS_MAX)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    peer.connect(("127.0.0.1", served.port))
    peer.sendall(Client(served.port, path).request())
    return peer


def metric(served: Served, name: str) -> int:
    found = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", served.request("GET", "/metrics").body.decode(), re.MULTILINE)
    assert found, name
    return sum(int(float(value)) for value in found)


def wait_followers(served: Served, count: int, seconds: float = 30.0) -> None:
    """Poll, because no event reports what the server has noticed. Each look is a round trip."""
    deadline = time.monotonic() + seconds
    while (found := metric(served, "banksman_followers")) != count:
        assert time.monotonic() < deadline, f"{found} follow, not {count}"


def memory(served: Served) -> int:
    status = Path(f"/proc/{served.pid}/status").read_text(encoding="ascii")
    found = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def test_gone_and_stalled_clients_cost_no_memory(tmp_path: Path) -> None:
    with Served(tmp_path / "served", stall_seconds=100) as served, ExitStack() as stack:
        session = served.open()
        fill(served, session, 5)
        gone = Client(served.port, of(session))
        gone.visit(until=is_live)
        # The session was read once to its end, so the memory for that is included.
        still = [stack.enter_context(connect(served, path)) for path in (of(session), MANY) for _ in range(10)]
        wait_followers(served, len(still))
        before = memory(served)
        fill(served, session, 10)
        missed = 10 * len(PROMPT.encode())
        grown = memory(served) - before
        # Each of the twenty misses all of it. The bound is for the memory that all clients share.
        assert missed > 9 * MIB
        assert grown < 64 * MIB, f"{grown / MIB:.0f} MiB more for {len(still) * missed / MIB:.0f} MiB missed"
        # The tab comes back after hours, and gets everything once.
        gone.visit(until=is_live)
        known = walk(served, session)
        checks.views_agree(known, gone.view())
        assert gone.view().heads() == known.heads()
        assert metric(served, "banksman_followers") >= len(still)


def test_stalled_client_is_cut_off_and_holds_up_no_other(tmp_path: Path) -> None:
    with Served(tmp_path / "served", stall_seconds=STALL, heartbeat_seconds=0.2) as served, ExitStack() as stack:
        session = served.open()
        fill(served, session, 5)
        known = walk(served, session)
        still = [stack.enter_context(connect(served, path)) for path in (of(session), MANY)]
        wait_followers(served, 2)
        # Beside them a client reads the whole stream, immediately and live.
        for path in (of(session), MANY):
            quick = Client(served.port, path)
            quick.visit(until=is_live)
            assert quick.view().heads() == known.heads()
        # Another client reads a little now and then. It takes longer than the stall limit of the others.
        slow, seconds = slowly(served, of(session))
        assert seconds > 2 * STALL
        assert slow.is_ended is False
        wait_followers(served, 0)
        for peer in still:
            received = Received()
            try:
                while data := peer.recv(MIB):
                    received.feed(data)
            except ConnectionError:
                pass
            # It got only the bytes that were in flight.
            assert not received.is_ended
            assert len(received.messages) < len(known.events)


def slowly(served: Served, path: str) -> tuple[Received, float]:
    began = time.monotonic()
    received = Received()
    pause = threading.Event()
    with connect(served, path, room=512 << 10) as peer:
        while not any(map(is_live, received.messages)):
            left = 400_000
            while left > 0 and not any(map(is_live, received.messages)):
                data = peer.recv(min(left, 1 << 16))
                assert data, "it was cut off, although it reads"
                left -= len(data)
                received.feed(data)
            pause.wait(0.15)  # This pause makes the client slow.
    return received, time.monotonic() - began


def test_silent_connection_is_closed(tmp_path: Path) -> None:
    with Served(tmp_path / "served") as served, socket.create_connection(("127.0.0.1", served.port), 40) as peer:
        assert peer.recv(1) == b""


def test_streams_end_with_closing_and_resume_at_the_next_server(tmp_path: Path) -> None:
    with Served(tmp_path / "served", stall_seconds=100, heartbeat_seconds=100) as served, ExitStack() as stack:
        session = served.open()
        fill(served, session, 5)
        head = Client(served.port, of(session))
        head.visit(until=is_live)
        place = Client(served.port, MANY)
        place.visit(until=is_live)
        # One client does not even read that.
        stack.enter_context(connect(served, of(session)))
        paths = [(of(session), head.place), (MANY, place.place)] * 25
        streams = [stack.enter_context(served.stream(path, after=after)) for path, after in paths]
        for stream in streams:
            assert stream.until_live() == []
        began = time.monotonic()
        assert served.stop() == 0
        assert time.monotonic() - began < 20.0
        for stream in streams:
            # The events that the drain wrote, and then the closing mark.
            *events, last = stream.messages()
            assert all(message.id is not None for message in events)
            assert (last.id, last.event) == (None, "stream.closing")
            assert last.data == {"kind": "stream.closing", "reason": "closing", "retry_seconds": 1.0}
        # A client that returns to the next server resumes at its cursor.
        served.start()
        for client in (head, place):
            client.visit(until=is_live)
        checks.views_agree(walk(served, session), head.view(), place.view())
