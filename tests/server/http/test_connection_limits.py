"""Limits on requests: sizes, shapes and times. The server refuses others and keeps serving."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from tests.server.kit import AUTHORIZATION, SECONDS_MAX, TOKEN, Served, head, no_drain, shared, statuses, talk

from banksman import Host
from banksman.server import app, http_service
from banksman.server.api import route
from banksman.server.context import Context
from banksman.server.http import connection
from banksman.server.http import listener as servers
from banksman.server.http.start_policy import StartPolicy
from banksman.server.server_settings import ServerSettings
from banksman.server.streams.follower import EventStreams, StreamCounts
from banksman.server.streams.shared_pages import SharedPages

pytestmark = pytest.mark.thorough

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with shared(tmp_path_factory.mktemp("server"), log_level="debug") as server:
        yield server


@pytest.fixture
def served(server: Served) -> Iterator[Served]:
    before = server.log.stat().st_size
    yield server
    # Whatever the test sent, the server still serves, and its log has no traceback.
    assert server.request("GET", "/healthz").status == 200
    assert b"Traceback" not in server.log.read_bytes()[before:]


# -- sizes ------------------------------------------------------------------------------------------------------------
def test_body_is_limited_to_32_mib(served: Served) -> None:
    limit = 32 << 20
    frame = b'{"token":""}'
    whole = b'{"token":"%s"}' % (b"x" * (limit - len(frame)))
    assert len(whole) == limit
    # The body was read, and holds no valid token.
    assert served.request("POST", "/v1/login", whole, headers=JSON).status == 401
    for size in (limit + 1, 1 << 40, 10**30):
        # Refused by its declared length: not a byte of the body was sent.
        length = f"Content-Length: {size}"
        said = talk(
            served.port, head("POST /v1/login HTTP/1.1", length, "Content-Type: application/json", port=served.port)
        )
        assert statuses(said) in ([413], [400]), size


async def test_body_without_a_token_is_limited_to_4_kib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients without a token make the server keep little, however many there are."""
    monkeypatch.setattr(connection, "LINGER_SECONDS_MAX", 0.1)
    async with in_this_process() as port:
        for size, status in ((route.STRANGER_BODY_BYTES_MAX, 401), (route.STRANGER_BODY_BYTES_MAX + 1, 413)):
            body = b'{"token":"%s"}' % (b"x" * (size - len(b'{"token":""}')))
            for length, sent in (
                (f"Content-Length: {size}", body),
                ("Transfer-Encoding: chunked", b"%x\r\n%b\r\n0\r\n\r\n" % (size, body)),
            ):
                request = head("POST /v1/login HTTP/1.1", length, JSON_LINE, port=port, token=False)
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(request + sent)
                assert statuses(await reader.read()) == [status], (size, length)
                writer.close()


async def test_chunked_body_is_refused_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server drops the rest of the body, and stops reading after a while.

    Until then the client can read the answer.
    """
    monkeypatch.setattr(connection, "LINGER_SECONDS_MAX", 0.5)
    async with in_this_process(body_bytes_max=100_000) as port:
        chunk = b"1000\r\n%s\r\n" % (b"x" * 0x1000)
        post = head("POST /v1/login HTTP/1.1", "Transfer-Encoding: chunked", JSON_LINE, port=port)
        post = post.replace(b"Connection: close\r\n", b"")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post + chunk * 24)
        writer.write(chunk)
        answer = await reader.readuntil(b"}")
        assert statuses(answer) == [413]
        while not reader.at_eof() and reader.exception() is None:
            writer.write(chunk)
            with suppress(OSError):
                await writer.drain()
        writer.close()
        # A client that ends its body in time keeps its connection.
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post + chunk * 100 + b"0\r\n\r\n" + head("GET /healthz HTTP/1.1", port=port))
        assert statuses(await reader.read()) == [413, 200]
        writer.close()
        await writer.wait_closed()


def test_body_larger_than_the_head_limit_is_accepted(served: Served) -> None:
    """The body arrives in one piece with its head."""
    for size in (60_000, 70_000, 130_000, 200_000, 250_000, 300_000):
        body = b'{"token":"%s"}' % (b"x" * size)
        assert served.request("POST", "/v1/login", body, headers=JSON).status == 401, size
        # The same with the start of another request behind it.
        lines = head("GET /healthz HTTP/1.1", port=served.port)
        request = head("POST /v1/login HTTP/1.1", f"Content-Length: {len(body)}", JSON_LINE, port=served.port)
        kept = request.replace(b"Connection: close\r\n", b"")
        assert statuses(talk(served.port, kept + body + lines[:40], lines[40:])) == [401, 200], size


JSON_LINE = "Content-Type: application/json"


def test_head_is_limited_in_size(served: Served) -> None:
    port = served.port
    long = "x" * (connection.HEAD_BYTES_MAX + 1)
    assert statuses(talk(port, head("GET /healthz HTTP/1.1", f"X: {'x' * 60_000}", port=port))) == [200]
    assert statuses(talk(port, head("GET /healthz HTTP/1.1", f"X: {long}", port=port))) == [431]
    assert statuses(talk(port, head("GET /healthz HTTP/1.1", f"{long}: x", port=port))) == [431]
    many = [f"X-{number}: {number}" for number in range(10_000)]
    assert statuses(talk(port, head("GET /healthz HTTP/1.1", *many, port=port))) == [431]
    # The server does not wait for the end of an endless head.
    with socket.create_connection(("127.0.0.1", port), SECONDS_MAX) as peer:
        peer.sendall(b"GET /healthz HTTP/1.1\r\nX: ")
        with pytest.raises(OSError, match=r"reset|pipe"):
            peer.sendall(b"x" * (1 << 30))
    # A trailer has the same limit, and is no head.
    trailer = b"5\r\nhello\r\n0\r\nX: %s\r\n\r\n" % long.encode()
    request = head("POST /v1/login HTTP/1.1", "Transfer-Encoding: chunked", JSON_LINE, port=port)
    assert statuses(talk(port, request + trailer)) == [431]


def test_url_is_limited_in_length(served: Served) -> None:
    port = served.port
    fits = "x" * (connection.URL_BYTES_MAX - len("/v1/sessions?after="))
    assert statuses(talk(port, head(f"GET /v1/sessions?after={fits} HTTP/1.1", port=port))) == [404]
    assert statuses(talk(port, head(f"GET /v1/sessions?after={fits}x HTTP/1.1", port=port))) == [414]
    assert statuses(talk(port, head(f"GET /{'x' * 1_000_000} HTTP/1.1", port=port))) == [414]


def test_trailer_is_not_read_as_a_header(served: Served) -> None:
    body = b"2\r\n{}\r\n0\r\nAuthorization: Bearer %s\r\nIdempotency-Key: \xff\r\n\r\n" % TOKEN.encode()
    lines = ("POST /v1/logout HTTP/1.1", "Transfer-Encoding: chunked", JSON_LINE)
    assert statuses(talk(served.port, head(*lines, port=served.port, token=False) + body)) == [401]
    assert statuses(talk(served.port, head(*lines, port=served.port) + body)) == [204]


# -- shapes -----------------------------------------------------------------------------------------------------------
def test_path_traversal_is_refused(served: Served) -> None:
    for path in (
        *(
            "/../",
            "/../../etc/passwd",
            "/page/main.js/../../main.py",
            "/%2e%2e/%2e%2e/etc/passwd",
            "/..%2f..%2fetc%2fpasswd",
        ),
        *(
            "/%2e%2e%2f",
            "/page/index.html",
            "/index.html",
            "/main.py",
            "/__init__.py",
            "/page/main.js%00",
            "/%00",
            "//",
            "/.",
        ),
        *(
            "//etc/passwd",
            "/page/main.js/",
            "/healthz/",
            "/v1/sessions/",
            "/v1//sessions",
            "/V1/sessions",
            "/v1/sessions/../server",
        ),
        *(
            "/v1/sessions/%2e%2e",
            "/v1/sessions/..%2fserver",
            "/v1/sessions/%00",
            "/v1/sessions/a%2fb",
            "/%",
            "/%zz",
            "/\\",
        ),
        *("/v1/commands/%2e%2e%2fx/output", "/v1/sessions/x/turns/..%2f..", "/%ff%fe", "/v1/sessions/%ed%a0%80"),
    ):
        said = talk(served.port, head(f"GET {path} HTTP/1.1", port=served.port))
        assert statuses(said) in ([404], [400]), (path, said[:200])
        assert b"root:" not in said


def test_ambiguous_request_is_refused(served: Served) -> None:
    """Each shape could smuggle a request past a proxy. Each is an error here, and ends the connection."""
    port = served.port
    hidden = b"GET /v1/server HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    post = f"POST /v1/logout HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n".encode()
    shapes = {
        "both lengths": post + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + hidden,
        "two lengths": post + b"Content-Length: 0\r\nContent-Length: 46\r\n\r\n" + hidden,
        "a list of lengths": post + b"Content-Length: 0, 46\r\n\r\n" + hidden,
        "a negative length": post + b"Content-Length: -1\r\n\r\n" + hidden,
        "a length with a sign": post + b"Content-Length: +4\r\n\r\n" + hidden,
        "a hexadecimal length": post + b"Content-Length: 0x4\r\n\r\n" + hidden,
        "chunked is not last": post + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + hidden,
        "chunked, misspelt": post + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + hidden,
        "a blank before the colon": post + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + hidden,
        "a bad chunk size": post + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n\r\n" + hidden,
        "a negative chunk size": post + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n\r\n" + hidden,
        "a huge chunk size": post + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\n" + hidden,
        "a chunk without its end": post + b"Transfer-Encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n" + hidden,
        "a folded header": post + b"X: a\r\n b\r\nY: c\r\n\r\n",
        "a bare CR": post + b"X: a\rY: b\r\n\r\n",
        "bare LFs": post.replace(b"\r\n", b"\n") + b"\n",
        "a NUL": post + b"X: a\0b\r\n\r\n",
        "a header without a name": post + b": a\r\n\r\n",
        "a header without a colon": post + b"nothing\r\n\r\n",
        "a blank in a name": post + b"X Y: a\r\n\r\n",
    }
    for name, data in shapes.items():
        said = talk(port, data, is_ended=True)
        assert statuses(said) == [400], (name, said)


def test_malformed_request_is_refused(served: Served) -> None:
    port = served.port
    for data in (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),  # A browser that uses https.
        *(b"\x00" * 100, b"\xff" * 100, b"hello\r\n\r\n", b"GET\r\n\r\n", b"GET /\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"),
        *(b"GET  / HTTP/1.1\r\n\r\n", b"G\xc3\x89T / HTTP/1.1\r\n\r\n", b"get / http/1.1\r\n\r\n", b"{}\r\n\r\n"),
        *(b"GET / HTTP/1.1 x\r\n\r\n", b" GET / HTTP/1.1\r\n\r\n", b"GET x HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"),
    ):
        said = talk(port, data, is_ended=True)
        # A lenient parser would accept some of these as requests, but they carry no allowed host name.
        assert statuses(said) in ([400], [403]), (data[:40], said)
        assert b"application/problem+json" in said


def test_method_and_version_that_are_unknown_are_refused(served: Served) -> None:
    port = served.port
    for method in ("TRACE", "OPTIONS", "PUT", "DELETE", "PATCH", "PROPFIND", "MKCOL", "LOCK"):
        said = talk(port, head(f"{method} /v1/server HTTP/1.1", port=port))
        assert statuses(said) == [405], method
        assert b"allow: GET, HEAD" in said
    for line in (
        "CONNECT evil.example:443 HTTP/1.1",
        "OPTIONS * HTTP/1.1",
        "CONNECT / HTTP/1.1",
        "FROBNICATE / HTTP/1.1",
    ):
        assert statuses(talk(port, head(line, port=port), is_ended=True))[0] in (400, 403, 404, 405), line
    said = talk(port, head("GET /v1/server HTTP/1.0", port=port))
    assert statuses(said) == [200]
    assert b"transfer-encoding" not in said.lower()
    # The answer to HEAD is only the head, also for a stream.
    for path in ("/v1/server", "/v1/events", "/", "/v1/nothing"):
        said = talk(port, head(f"HEAD {path} HTTP/1.1", port=port))
        assert said.endswith(b"\r\n\r\n"), path
        assert said.count(b"\r\n\r\n") == 1, path
    # There is no protocol to upgrade to: the header is ignored.
    upgrade = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: eA==", "Sec-WebSocket-Version: 13")
    said = talk(port, head("GET /v1/server HTTP/1.1", *upgrade, port=port), is_ended=True)
    assert statuses(said)[0] in (200, 400)
    said = talk(
        port, head("GET /v1/server HTTP/1.1", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk", port=port), is_ended=True
    )
    assert statuses(said)[0] in (200, 400)


def test_pipelined_requests_are_answered_in_order_and_bounded(served: Served) -> None:
    one = f"GET /v1/sessions?limit=NUMBER HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
    last = head("GET /healthz HTTP/1.1", port=served.port)
    requests = [one.replace(b"NUMBER", b"0" if number % 3 else b"1") for number in range(30)]
    said = talk(served.port, b"".join(requests) + last)
    assert statuses(said) == [*(400 if number % 3 else 200 for number in range(30)), 200]
    # More than any client needs: the connection ends, and pipelined requests do not pile up.
    assert len(statuses(talk(served.port, b"".join(requests * 100) + last))) < 3001


def test_malformed_pipelined_request_does_not_answer_the_one_before(served: Served) -> None:
    """A client must not read an error in the second request as the answer to the first."""
    command = served.post("/v1/commands", {"argv": ["sleep", "60"]})["id"]
    waits = head(f"GET /v1/commands/{command}?wait=60 HTTP/1.1", port=served.port).replace(
        b"Connection: close\r\n", b""
    )
    for second in (
        b"garbage\r\n\r\n",
        b"GET /%s HTTP/1.1\r\n\r\n" % (b"x" * 9000),
        b"GET / HTTP/1.1\r\nX: %s" % (b"x" * 400_000),
    ):
        assert talk(served.port, waits, second) == b""
    # Nor the answer to garbage after a request that waits behind a stream.
    follows = waits.replace(f"/v1/commands/{command}?wait=60".encode(), b"/v1/events")
    said = talk(served.port, follows + b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\ngarbage\r\n\r\n")
    assert said == b""


# -- JSON -------------------------------------------------------------------------------------------------------------
DEEP = b"[" * 50_000 + b"]" * 50_000
# The deepest nesting that is still parsed, and one that is deeper than the limit.
NESTED = b'{"a":' * 900 + b"1" + b"}" * 900
TOO_NESTED = b'{"a":' * 5000 + b"1" + b"}" * 5000
ODD_BODIES = (
    *(
        b"",
        b" ",
        b"null",
        b"1",
        b'"x"',
        b"[]",
        b"[{}]",
        b"{",
        b"}",
        b"{}{}",
        b"{}x",
        b"\xff",
        b"\xef\xbb\xbf{}",
        b"\0",
        b"\xfe\xff",
    ),
    *(
        b"NaN",
        b"Infinity",
        b'{"argv": NaN}',
        b'{"argv": [NaN]}',
        b'{"timeout": -Infinity, "argv": ["true"]}',
        b"{'argv': 1}",
    ),
    *(
        b'{"argv": ["\xff"]}',
        b'{"\xff": 1}',
        b'{"argv": ["\\ud800"]}',
        b'{"argv": ["\\udc00\\ud800"]}',
        b'{"argv": ["\\u12"]}',
    ),
    *(b'{"argv": ["true\\u0000"]}', b'{"argv": ["\xed\xa0\x80"]}', b'{"argv": ["\xc0\x80"]}', b'{"argv": ["a\nb"]}'),
    *(b'{"argv": ["true"], "timeout": 1e999}', b'{"argv": ["true"], "timeout": %s}' % (b"9" * 5000)),
    *(
        b'{"argv": ["true"], "output_bytes_max": %s}' % (b"9" * 5000),
        b'{"argv": ["true"], "pty": [%s, 1]}' % (b"9" * 400),
    ),
    *(DEEP, b'{"argv": %s}' % DEEP, b'{"a":' * 50_000, b'{"argv": ["true"], "env": %s}' % NESTED),
    b'{"argv": ["true"], "argv": ["no-such-program"]}',
    b'{"argv": ["true"], "stdin": {"base64": "*"}}',
    b'{"argv": ["true"], "stdin": {"base64": "\xc3\xa9"}}',
    b'{"argv": ["no-such-program"], "stdin": {"text": "\\u0000"}}',
)
ODD_PROMPTS = (
    *(
        b'{"prompt": [%s]}' % NESTED,
        b'{"prompt": "x", "schema": %s}' % NESTED,
        b'{"prompt": "x", "rules": %s}' % NESTED,
    ),
    *(
        b'{"prompt": "x", "priority": %s}' % (b"9" * 5000),
        b'{"prompt": "x", "priority": 1e400}',
        b'{"prompt": "x", "priority": 1.5}',
    ),
    b'{"prompt": "x", "schema": {"type": "object", "properties": {"a": %s}}}' % NESTED,
    b'{"prompt": [%s]}' % TOO_NESTED,
    b'{"prompt": "x", "schema": %s}' % TOO_NESTED,
    b'{"prompt": [{"type": "text", "text": "\\ud800"}]}',
    b'{"prompt": "", "priority": "\\u0000"}',
)


def test_malformed_json_body_is_a_client_error(served: Served) -> None:
    session = served.open()
    for path, bodies in (
        ("/v1/commands", ODD_BODIES),
        (
            "/v1/sessions",
            (*ODD_BODIES, b'{"options": %s}' % NESTED, b'{"mcp_servers": [%s]}' % NESTED, b'{"command": "\'"}'),
        ),
        (f"/v1/sessions/{session}/turns", (*ODD_BODIES, *ODD_PROMPTS)),
        (f"/v1/sessions/{session}/questions/q", (*ODD_BODIES, b'{"decision": "allow", "content": %s}' % NESTED)),
    ):
        for body in bodies:
            for headers in (JSON, {**JSON, "Idempotency-Key": "k"}):
                answer = served.request("POST", path, body, headers=headers)
                assert answer.status in (400, 404, 422), (path, body[:80], answer)
                assert answer.headers["content-type"] == "application/problem+json"
    for content_type in ("text/plain", "", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        assert served.request("POST", "/v1/commands", b"{}", headers={"Content-Type": content_type}).status == 415
    assert (
        served.request(
            "POST", "/v1/login", b'{"token":"x"}', headers={"Content-Type": "Application/JSON; charset=utf-8"}
        ).status
        == 401
    )


def test_malformed_query_is_a_client_error(served: Served) -> None:
    command = served.post("/v1/commands", {"argv": ["sleep", "60"]})["id"]
    session = served.open()
    for path in (
        *(f"/v1/commands/{command}?wait={value}" for value in ("nan", "-1", "1e400", "x", "", "-inf", "%00", "1_0")),
        *(
            f"/v1/commands/{command}/output?{query}"
            for query in ("after=-1", "after=x", "limit=0", "stream=x", "encoding=x")
        ),
        *(f"/v1/commands/{command}/output?{query}" for query in ("after=99999999999999999999", "wait=nan", "limit=x")),
        *(
            f"/v1/commands/{command}/watch?{query}"
            for query in ("", "pattern=(", "pattern=x&wait=nan", "pattern=x&stream=x")
        ),
        *(
            f"/v1/sessions/{session}/events?{query}"
            for query in ("after=x", "after=1.x", "limit=0", "raw=maybe", "after=%00")
        ),
        *(f"/v1/sessions/{session}/events?{query}" for query in ("after=-1.1", "after=1.1e9", f"after={'9' * 5000}.1")),
        *(
            "/v1/events?after=x",
            "/v1/events?sessions=",
            "/v1/events?sessions=,",
            "/v1/events?after=%ff",
            "/v1/sessions?limit=x",
        ),
        *("/v1/sessions?limit=0", "/v1/sessions?limit=%00", "/v1/sessions?limit=-1"),
    ):
        answer = served.request("GET", path)
        assert answer.status in (400, 422), (path, answer)
    # A limit that is too large is reduced without an error.
    assert served.request("GET", f"/v1/sessions?limit={'9' * 100}").status == 200
    assert served.request("GET", f"/v1/commands/{command}/output?limit={'9' * 100}").status == 200


# -- times ------------------------------------------------------------------------------------------------------------
@asynccontextmanager
async def in_this_process(**settings: Any) -> AsyncGenerator[int]:
    """Serve with deadlines that a test can set; yield the port. It is built as in `main.py`, without the signals."""
    made = ServerSettings(port=0, token=TOKEN, **settings)
    listener = servers.bind(made)
    port = int(listener.getsockname()[1])
    closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    streams = EventStreams(closing, StreamCounts(), SharedPages(), made.heartbeat_seconds, made.streams_max)
    try:
        async with Host("memory:") as host:
            context = Context(host, made, StartPolicy(made), streams, drain=no_drain, store="memory:")
            server = http_service.HttpServer(app.make(context, token=TOKEN, port=port), [listener], made, streams)
            server.start()
            try:
                yield port
            finally:
                await server.close()
    finally:
        listener.close()


async def drip(port: int, begin: bytes, drop: bytes) -> tuple[bytes, float]:
    """Send bytes one after the other without an end; return the answer, and the seconds until it came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began = time.monotonic()
    said = b""

    async def listen() -> None:
        nonlocal said
        with suppress(ConnectionResetError):
            while data := await reader.read(1 << 16):
                said += data

    listening = asyncio.ensure_future(listen())
    writer.write(begin)
    while not listening.done():
        writer.write(drop)
        await asyncio.wait((listening,), timeout=0.02)
    writer.close()
    return said, time.monotonic() - began


async def test_trickling_head_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS_MAX", 0.3)
    async with in_this_process() as port:
        for begin, drop in (
            (b"", b"G"),
            (b"GET / HTTP/1.1\r\n", b"X: y\r\n"),
            (b"GET / HTTP/1.1\r\nX: ", b"x"),
            (b"", b"\r\n"),
        ):
            said, seconds = await drip(port, begin, drop)
            assert statuses(said) in ([408], [400]), (begin, said)
            assert 0.25 < seconds < 20 or statuses(said) == [400]
        # Also the second request of a connection, after a complete first.
        whole = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        said, seconds = await drip(port, whole + b"GET ", b"/")
        assert statuses(said) == [200, 408]
        # A client that sends nothing gets no answer.
        said, seconds = await drip(port, b"", b"")
        assert said == b""
        assert seconds > 0.25


async def test_trickling_body_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route, "BODY_SECONDS_MAX", 0.3)
    monkeypatch.setattr(connection, "LINGER_SECONDS_MAX", 0.3)
    async with in_this_process() as port:
        for length, drop in (("Content-Length: 4000", b"x"), ("Transfer-Encoding: chunked", b"1\r\nx\r\n")):
            # A body that is read, and bodies that no route reads: these are answered immediately while the client still
            # sends. Without a token too.
            for line, token, status in (
                ("POST /v1/login HTTP/1.1", True, 408),
                ("POST /v1/login HTTP/1.1", False, 408),
                ("POST /v1/server HTTP/1.1", False, 401),
                ("GET /healthz HTTP/1.1", False, 200),
            ):
                begin = head(line, length, JSON_LINE, port=port, token=token).replace(b"Connection: close\r\n", b"")
                said, seconds = await drip(port, begin, drop)
                assert statuses(said) == [status], line
                assert seconds > 0.25


async def test_stream_and_long_wait_outlive_request_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (route, "BODY_SECONDS_MAX"),
        (connection, "LINGER_SECONDS_MAX"),
        (connection, "HEAD_SECONDS_MAX"),
    ):
        monkeypatch.setattr(module, name, 0.1)
    async with in_this_process(heartbeat_seconds=0.05) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head("GET /v1/events HTTP/1.1", port=port))
        said = b""
        while said.count(b"stream.heartbeat") < 10:
            said += await reader.readuntil(b"\n\n")
        writer.close()
        await writer.wait_closed()


def test_security_headers_are_on_every_answer(served: Served) -> None:
    for path in ("/", "/healthz", "/v1/server", "/v1/nothing", "/openapi.json"):
        for headers in (AUTHORIZATION, {}):
            answer = served.request("GET", path, headers=headers, token=False)
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["x-frame-options"] == "DENY"
            assert answer.headers["referrer-policy"] == "no-referrer"
            assert answer.headers["cross-origin-resource-policy"] == "same-origin"
            assert "server" not in answer.headers
    policy = served.request("GET", "/").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
