"""Lifetime of a connection: whatever it carried, and in whatever pieces, a client or a timer ends it."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.server.http.test_connection_limits import JSON_LINE, in_this_process
from tests.server.kit import SECONDS_MAX, Served, head, statuses, talk

from banksman.server import http_service as servers
from banksman.server.http import connection

BODY = b'{"token": "not the one"}'
SHORT = 0.1
only_linux = pytest.mark.skipif(sys.platform != "linux", reason="no other kernel is asked to")


@asynccontextmanager
async def connected(port: int) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a connection, with a timeout for the whole test."""
    async with asyncio.timeout(SECONDS_MAX / 4):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            yield reader, writer
        finally:
            writer.close()


def kept(line: str, *headers: str, port: int, token: bool = True) -> bytes:
    """Return the head of a request that keeps its connection alive."""
    return head(line, *headers, port=port, token=token).replace(b"Connection: close\r\n", b"")


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Read the next answer: its status and its body."""
    said = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", said)
    return statuses(said)[0], b"" if length is None else await reader.readexactly(int(length[1]))


async def wait_lingered(port: int) -> None:
    """Wait until the server closes a connection that was answered early. At least the linger time has passed then."""
    async with connected(port) as (reader, writer):
        writer.write(kept("POST /v1/server HTTP/1.1", "Content-Length: 1000", port=port, token=False))
        assert statuses(await reader.read()) == [401]


async def waiting(port: int, seconds: float) -> bytes:
    """Return a request that is answered after `seconds`."""
    async with connected(port) as (reader, writer):
        body = b'{"argv": ["sleep", "60"]}'
        writer.write(kept("POST /v1/commands HTTP/1.1", JSON_LINE, f"Content-Length: {len(body)}", port=port) + body)
        status, shown = await answer(reader)
        assert status in (200, 201)
        found = re.search(rb'"id": ?"([^"]+)"', shown)
        assert found is not None
        return kept(f"GET /v1/commands/{found[1].decode()}?wait={seconds} HTTP/1.1", port=port)


# -- connections answered before the end of their request -------------------------------------------------------------
@pytest.mark.parametrize(
    ("length", "rest"), [("Content-Length: 10", b"67890"), ("Transfer-Encoding: chunked", b"5\r\n67890\r\n0\r\n\r\n")]
)
async def test_connection_answered_early_is_closed_when_the_client_goes_quiet(
    monkeypatch: pytest.MonkeyPatch, length: str, rest: bytes
) -> None:
    monkeypatch.setattr(connection, "STRANGER_IDLE_SECONDS_MAX", SHORT)
    async with in_this_process() as port, connected(port) as (reader, writer):
        begin = b"12345" if "Length" in length else b"5\r\n12345\r\n"
        writer.write(kept("POST /v1/sessions HTTP/1.1", length, port=port, token=False) + begin)
        assert (await answer(reader))[0] == 401
        writer.write(rest)
        assert await reader.read() == b""


async def test_connection_is_not_kept_alive_by_blank_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blank lines are no request, and no late request either.

    The server sends nothing that a client could take for the answer to its next request.
    """
    monkeypatch.setattr(connection, "IDLE_SECONDS_MAX", SHORT)
    async with in_this_process() as port, connected(port) as (reader, writer):
        writer.write(kept("GET /healthz HTTP/1.1", port=port))
        assert (await answer(reader))[0] == 200
        rest = asyncio.ensure_future(reader.read())
        while not rest.done():
            writer.write(b"\r\n")
            await asyncio.wait((rest,), timeout=SHORT / 10)
        # A blank line may have crossed the close, and cause a reset.
        assert isinstance(rest.exception(), ConnectionError) or rest.result() == b""


async def test_idle_connection_is_kept_for_the_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of an idle connection is not that of the rest of a body, or of a head."""
    monkeypatch.setattr(connection, "LINGER_SECONDS_MAX", SHORT)
    monkeypatch.setattr(connection, "HEAD_SECONDS_MAX", SHORT)
    async with in_this_process() as port, connected(port) as (reader, writer):
        writer.write(kept("POST /v1/sessions HTTP/1.1", "Content-Length: 10", port=port, token=False) + b"12345")
        assert (await answer(reader))[0] == 401
        writer.write(b"67890" + kept("GET /healthz HTTP/1.1", port=port))
        assert (await answer(reader))[0] == 200
        await wait_lingered(port)
        await wait_lingered(port)
        writer.write(head("GET /healthz HTTP/1.1", port=port))
        assert statuses(await reader.read()) == [200]


# -- pipelined requests -----------------------------------------------------------------------------------------------
async def test_pipelined_request_has_full_time_for_its_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "LINGER_SECONDS_MAX", SHORT)
    async with in_this_process() as port:
        first = await waiting(port, SHORT)
        second = head("POST /v1/login HTTP/1.1", JSON_LINE, f"Content-Length: {len(BODY)}", port=port)
        async with connected(port) as (reader, writer):
            writer.write(first + second + BODY[:5])
            assert (await answer(reader))[0] == 200
            await wait_lingered(port)
            await wait_lingered(port)
            writer.write(BODY[5:])
            assert statuses(await reader.read()) == [401]
        # Here too, the server does not wait for an unread body.
        async with connected(port) as (reader, writer):
            writer.write(first + kept("POST /v1/server HTTP/1.1", "Content-Length: 9", port=port, token=False))
            assert statuses(await reader.read()) == [200, 401]


@pytest.mark.parametrize("ahead", [b"\r\n", b"GET /heal"], ids=["a blank line", "half a head"])
async def test_pipelined_bytes_do_not_end_a_running_request(monkeypatch: pytest.MonkeyPatch, ahead: bytes) -> None:
    """The time for the next head begins when no request runs and the server reads again."""
    monkeypatch.setattr(connection, "HEAD_SECONDS_MAX", SHORT)
    monkeypatch.setattr(connection, "LINGER_SECONDS_MAX", SHORT)
    async with in_this_process() as port:
        first = await waiting(port, 5 * SHORT)
        async with connected(port) as (reader, writer):
            writer.write(first)
            # The server has read the head: the next bytes are another piece.
            await wait_lingered(port)
            writer.write(ahead)
            assert (await answer(reader))[0] == 200
            if ahead.strip():
                assert statuses(await reader.read()) == [408]


async def test_connection_is_cut_off_when_too_many_requests_are_pipelined(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client could not match an answer to its request. The first request runs, and is not answered."""
    monkeypatch.setattr(connection, "PIPELINED_MAX", 3)
    async with in_this_process() as port:
        first = await waiting(port, 5 * SHORT)
        one = kept("GET /healthz HTTP/1.1", port=port)
        last = head("GET /healthz HTTP/1.1", port=port)
        assert statuses(await asyncio.to_thread(talk, port, first + one * 2 + last)) == [200] * 4
        assert await asyncio.to_thread(talk, port, first + one * 3 + last) == b""


# -- refused connections ----------------------------------------------------------------------------------------------
async def test_refusal_has_the_headers_of_every_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def names(said: bytes) -> set[bytes]:
        return {line.partition(b":")[0] for line in said.partition(b"\r\n\r\n")[0].split(b"\r\n")[1:]}

    async with in_this_process() as port:
        usual = await asyncio.to_thread(talk, port, head("GET /v1/nothing HTTP/1.1", port=port))
        refusal = await asyncio.to_thread(talk, port, b"GET /%s HTTP/1.1\r\n\r\n" % (b"x" * 9000))
        assert (statuses(usual), statuses(refusal)) == ([404], [414])
        assert names(usual) == names(refusal)
        # The headers of the problem are there too.
        monkeypatch.setattr(connection, "_too_large", lambda: connection.Problem(429, "TooMany", "for this test"))
        busy = await asyncio.to_thread(talk, port, head("GET / HTTP/1.1", f"X: {'x' * 70_000}", port=port))
        assert statuses(busy) == [429]
        assert b"\r\nretry-after: 1\r\n" in busy.lower()


# -- clients that do not read -----------------------------------------------------------------------------------------
@pytest.mark.thorough
@pytest.mark.parametrize("by_kernel", [False, pytest.param(True, marks=only_linux)], ids=["by us", "by the kernel"])
async def test_stream_that_is_cut_off_is_counted_and_plain_answer_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, by_kernel: bool
) -> None:
    if by_kernel:
        # Otherwise it is a matter of milliseconds which of the two comes first.
        monkeypatch.setattr(connection.Connection, "_watch_stall", leave_it)
    cut: asyncio.Queue[bool] = asyncio.Queue()
    count = servers.HttpServer._on_stall  # pyright: ignore[reportPrivateUsage]

    def on_stall(self: servers.HttpServer, is_stream: bool) -> None:
        cut.put_nowait(is_stream)
        count(self, is_stream)

    monkeypatch.setattr(servers.HttpServer, "_on_stall", on_stall)
    async with in_this_process(stall_seconds=5 * SHORT) as port:
        served = Served(tmp_path)
        served.port = port
        session = await asyncio.to_thread(served.open)
        for _ in range(5):
            turn = await asyncio.to_thread(served.ask, session, "x" * 1_000_000)
            await asyncio.to_thread(served.outcome, session, turn)
        path = f"GET /v1/sessions/{session}/events HTTP/1.1"
        for accept in ("application/json", "text/event-stream", "application/x-ndjson"):
            # Also with a plain request waiting behind: the answer that was being sent is cut off.
            for behind in (b"", kept("GET /healthz HTTP/1.1", port=port)):
                with unread(port, kept(path, f"Accept: {accept}", port=port) + behind):
                    async with asyncio.timeout(SECONDS_MAX / 4):
                        assert await cut.get() is (accept != "application/json"), accept
        # A stream behind an answer that the client does not read has not begun.
        both = kept(path, port=port) + kept(path, "Accept: text/event-stream", port=port)
        with unread(port, both):
            async with asyncio.timeout(SECONDS_MAX / 4):
                assert await cut.get() is False
        metrics = (await asyncio.to_thread(served.request, "GET", "/metrics")).body.decode()
        assert "banksman_streams_cut_total 4" in metrics
        assert cut.empty()


def leave_it(_: connection.Connection) -> None:
    """Do nothing; the kernel cuts the connection off."""


def unread(port: int, request: bytes) -> socket.socket:
    """Send a request without reading the answer, with a small receive buffer."""
    peer = socket.socket()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 10)
    peer.connect(("127.0.0.1", port))
    peer.sendall(request)
    return peer
