"""Fuzz a real server with valid HTTP requests in which pieces are changed, moved, removed and repeated.

The server never dies, never answers 5xx, logs no bug, and works as before afterwards.
"""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st
from tests.fuzz.bounded import for_a_while
from tests.server import kit
from tests.server.kit import TOKEN, Served

from banksman.testing import fake_agent

pytestmark = pytest.mark.thorough

# How long the test reads before it sends the next request. Most requests are answered within this time. For the others,
# the server's log has the status.
READ_SECONDS = 0.02
SPICES = (
    *(
        b"\r\n",
        b"\n",
        b"\r",
        b"\0",
        b"\xff",
        b" ",
        b"\t",
        b":",
        b";",
        b",",
        b"%",
        b"%00",
        b"%2e%2e",
        b"/",
        b"?",
        b"#",
        b"//",
    ),
    *(
        b"HTTP/1.1",
        b"HTTP/1.0",
        b"HTTP/2.0",
        b"GET ",
        b"POST ",
        b"HEAD ",
        b"OPTIONS ",
        b"0\r\n\r\n",
        b"\r\n\r\n",
        b"-1",
        b"1e999",
    ),
    *(
        b"Transfer-Encoding: chunked\r\n",
        b"Content-Length: 5\r\n",
        b"Content-Length: 99999999\r\n",
        b"Expect: 100-continue\r\n",
    ),
    *(
        b"Connection: upgrade\r\nUpgrade: websocket\r\n",
        b"Host: evil.example\r\n",
        b"Origin: null\r\n",
        b"X: " + b"x" * 9000 + b"\r\n",
    ),
    *(
        b"Accept: text/event-stream\r\n",
        b"Idempotency-Key: k\r\n",
        b"Last-Event-ID: 1.1\r\n",
        b'{"',
        b'"}',
        b"[" * 300,
        b"\\ud800",
    ),
    *(b"null", b"true", b"9" * 400, b"Cookie: a=b\r\n", b"Authorization: Bearer x\r\n"),
)


def whole(served: Served, session: str, turn: str, command: str) -> list[bytes]:
    """One valid request of each kind, except requests that stop the server or wait."""
    begin = f"Host: 127.0.0.1:{served.port}\r\nAuthorization: Bearer {TOKEN}\r\n".encode()
    gets = [
        *(
            "/",
            "/healthz",
            "/metrics",
            "/openapi.json",
            "/v1/server",
            "/v1/agents",
            "/v1/stacks",
            "/v1/sessions?limit=2",
        ),
        *(
            "/v1/commands",
            f"/v1/commands/{command}?wait=0",
            f"/v1/commands/{command}/output?after=0&limit=9&encoding=base64",
        ),
        *(f"/v1/commands/{command}/watch?pattern=a&wait=0", f"/v1/sessions/{session}", f"/v1/sessions/{session}/why"),
        *(
            f"/v1/sessions/{session}/events?limit=3&raw=1",
            f"/v1/sessions/{session}/turns/{turn}?wait=0",
            "/v1/events?after=",
        ),
        f"/v1/sessions/{session}/questions",
    ]
    posts: list[tuple[str, Any]] = [
        ("POST /v1/login", {"token": "x"}),
        ("POST /v1/commands", {"argv": ["true"], "cwd": None, "timeout": 5, "stdin": {"text": "x"}, "pty": False}),
        ("POST /v1/sessions", {"command": fake_agent.command(), "name": "n", "options": {"queue_max": 3}, "rules": {}}),
        (f"POST /v1/sessions/{session}/turns", {"prompt": "hello", "priority": 1, "on_busy": "enqueue"}),
        (f"POST /v1/sessions/{session}/questions/q", {"decision": "allow", "message": "x"}),
        (f"POST /v1/sessions/{session}/interrupt", {}),
        (f"POST /v1/commands/{command}/signal", {"signal": "CONT", "group": False}),
        (f"POST /v1/commands/{command}/stdin", {"text": "x", "end": False}),
        (f"PATCH /v1/sessions/{session}", {"name": "m"}),
    ]
    requests = [f"GET {path} HTTP/1.1\r\n".encode() + begin + b"\r\n" for path in gets]
    for line, body in posts:
        data = msgspec.json.encode(body)
        head = f"{line} HTTP/1.1\r\n".encode() + begin + b"Content-Type: application/json\r\n"
        requests.append(head + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        requests.append(head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(data), data))
    return requests


def changed(requests: list[bytes]) -> st.SearchStrategy[list[bytes]]:
    """Mutated requests, each as the list of pieces in which it is sent."""

    @st.composite
    def one(draw: st.DrawFn) -> list[bytes]:
        data = draw(st.sampled_from(requests))
        for _ in range(draw(st.integers(0, 4))):
            place = draw(st.integers(0, len(data)))
            end = place + draw(st.sampled_from([0, 0, 1, 2, 8, 60]))
            other = draw(st.sampled_from(requests))
            new = draw(
                st.one_of(st.sampled_from(SPICES), st.binary(max_size=3), st.just(other), st.just(data[place:end] * 2))
            )
            data = data[:place] + new + data[end:]
        split = draw(st.integers(0, len(data)))
        return [data[:split], data[split:]] if draw(st.booleans()) else [data]

    return one()


def test_server_survives_any_bytes(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "programs": [fake_agent.command()[:-1], "true"],
        "roots": [str(tmp_path)],
        "log_level": "debug",
    }
    with Served(tmp_path / "server", **settings) as served:
        session = served.open()
        turn = served.ask(session, "hello")
        served.outcome(session, turn)
        command = served.post("/v1/commands", {"argv": fake_agent.command(), "stdin": "pipe"})["id"]

        def check(pieces: list[bytes]) -> None:
            with socket.create_connection(("127.0.0.1", served.port), kit.SECONDS_MAX) as peer:
                said = b""
                try:
                    for piece in pieces:
                        peer.sendall(piece)
                    peer.settimeout(READ_SECONDS)
                    while data := peer.recv(1 << 16):
                        said += data
                except OSError:
                    pass
            assert not [status for status in kit.statuses(said) if status >= 500], said[:2000]

        assert for_a_while(check, changed(whole(served, session, turn, command)))
        assert served.process is not None
        assert served.process.poll() is None
        assert served.get("/healthz") == {"status": "ok"}
        other = served.open()
        assert served.outcome(other, served.ask(other, "still there?"))["kind"] == "done"
        log = served.log.read_text(encoding="utf-8")
        assert "Traceback" not in log, log[log.find("Traceback") - 500 :][:4000]
        assert not re.findall(r"^.* status=5\d\d .*$", log, re.MULTILINE)
