"""Authentication at a real server, with raw bytes at its socket, including requests that no browser sends."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server.kit import TOKEN, Served, head, shared, statuses, talk

from banksman.server.http import auth
from banksman.server.http.auth import PageTokens


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with shared(tmp_path_factory.mktemp("server"), log_level="debug") as served:
        yield served


def page_token(served: Served) -> str:
    """Return a page token as a browser gets it: by the code in the link that `banksman page` prints."""
    code = served.post("/v1/login/code")["code"]
    answer = served.request("POST", "/v1/login", {"code": code}, token=False, headers={"Origin": served.url})
    assert answer.status == 200
    return answer.json["token"]


def ask(served: Served, line: str, *headers: str, host: str | None = None, token: bool = False) -> int:
    said = talk(served.port, head(f"{line} HTTP/1.1", *headers, port=served.port, host=host, token=token))
    (status,) = statuses(said)
    return status


# -- the token --------------------------------------------------------------------------------------------------------
def test_auth_accepts_only_the_whole_token(served: Served) -> None:
    def ask_with(authorization: str) -> int:
        return ask(served, "GET /v1/server", f"Authorization: {authorization}")

    assert ask_with(f"Bearer {TOKEN}") == 200
    assert ask_with(f"bearer {TOKEN}") == 200
    for wrong in (
        *(
            "Bearer",
            "Bearer ",
            "Bearer x",
            f"Bearer {TOKEN}x",
            f"Bearer {TOKEN} x",
            f"Bearer x{TOKEN}",
            f"Bearer{TOKEN}",
        ),
        *(
            f"Bearer {TOKEN[:-1]}",
            f"Bearer {TOKEN.upper()}",
            f"Basic {TOKEN}",
            TOKEN,
            f"Bearer {TOKEN},",
            "Bearer \xff",
        ),
        *(f'Bearer "{TOKEN}"', f"Bearer {TOKEN}\x7f"),
    ):
        assert ask_with(wrong) in (400, 401), wrong
    assert ask(served, "GET /v1/server") == 401


def test_auth_ignores_token_in_the_url(served: Served) -> None:
    for query in (f"token={TOKEN}", f"access_token={TOKEN}", f"authorization=Bearer%20{TOKEN}"):
        assert ask(served, f"GET /v1/server?{query}") == 401


def test_auth_refusal_says_how_to_authenticate(served: Served) -> None:
    answer = served.request("GET", "/v1/server", token=False)
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["www-authenticate"] == 'Bearer realm="banksman"'
    assert answer.json["type"] == "urn:banksman:not-let-in"
    assert "Authorization: Bearer" in answer.json["hint"]


def test_auth_is_required_except_for_page_and_health_routes(served: Served) -> None:
    for path in ("/", "/page/main.js", "/page/style/tokens.css", "/readyz", "/healthz", "/livez"):
        assert served.request("GET", path, token=False).status == 200, path
    assert served.request("GET", "/healthz", token=False).json == {"status": "ok"}
    paths: dict[str, Any] = {**served.get("/openapi.json")["paths"], "/openapi.json": {"get": {}}}
    for path, methods in paths.items():
        for method in methods:
            health = path in ("/readyz", "/healthz", "/livez")
            if not health and (method, path) != ("post", "/v1/login"):
                filled = re.sub(r"\{\w+\}", "x", path)
                assert served.request(method.upper(), filled, token=False).status == 401, (method, path)
    # A refusal does not reveal which routes exist.
    assert served.request("GET", "/v1/nothing", token=False).status == 401


# -- the address ------------------------------------------------------------------------------------------------------
FOREIGN_HOSTS = (
    *("evil.example", "evil.example:4380", "127.0.0.1.evil.example", "localhost.evil.example", "evil-localhost"),
    *(
        "localhost.",
        "127.0.0.1.",
        "127.0.0.2",
        "127.1",
        "0.0.0.0",
        "2130706433",
        "0x7f.1",
        "[::]",
        "[::ffff:127.0.0.1]",
    ),
    *("127.0.0.1@evil.example", "evil.example@127.0.0.1", "user:pass@localhost", "localhost:", "localhost:x"),
    *("localhost:123456", "localhost/", "localhost#", "localhost\tevil", "http://localhost", "localhost,evil.example"),
    *("::1", "[::1", "[localhost]", "\xff", "%6cocalhost", "localhost%00.evil.example", " "),
)


def test_auth_refuses_foreign_host_header(served: Served) -> None:
    """DNS rebinding: a foreign name points here. It is refused with every header, and on open routes too."""
    for host in FOREIGN_HOSTS:
        for path in ("/v1/server", "/", "/healthz"):
            assert ask(served, f"GET {path}", host=host, token=True) in (400, 403), (host, path)
        assert ask(served, "GET /", f"Origin: http://{host}", host=host) in (400, 403), host
    for host in (
        f"127.0.0.1:{served.port}",
        "127.0.0.1",
        f"localhost:{served.port}",
        "LOCALHOST",
        f"[::1]:{served.port}",
    ):
        assert ask(served, "GET /v1/server", host=host, token=True) == 200, host


def test_auth_refuses_request_without_exactly_one_host_header(served: Served) -> None:
    ours = f"127.0.0.1:{served.port}"
    for hosts in ([], [ours, "evil.example"], ["evil.example", ours], [ours, ours]):
        lines = ["GET /v1/server HTTP/1.1", f"Authorization: Bearer {TOKEN}", "Connection: close"]
        lines += [f"Host: {host}" for host in hosts]
        (status,) = statuses(talk(served.port, "\r\n".join([*lines, "", ""]).encode()))
        assert status in (400, 403), hosts


@pytest.mark.thorough
def test_auth_accepts_configured_proxy_host(tmp_path: Path) -> None:
    with Served(tmp_path / "server", hosts=["agents.example"]) as served:
        assert ask(served, "GET /v1/server", host="agents.example", token=True) == 200
        assert ask(served, "GET /v1/server", host="Agents.Example:443", token=True) == 200
        assert ask(served, "GET /v1/server", host="x.agents.example", token=True) == 403
        # The proxy terminated the TLS: the page is at https.
        host = "agents.example"
        assert ask(served, "GET /v1/server", "Origin: https://agents.example", host=host, token=True) == 200
        assert ask(served, "GET /v1/server", "Origin: https://evil.example", host=host, token=True) == 403


# -- the origin -------------------------------------------------------------------------------------------------------
def test_auth_refuses_foreign_origin_even_with_a_token(served: Served) -> None:
    good = page_token(served)
    ours = f"http://127.0.0.1:{served.port}"
    foreign = [
        *("http://evil.example", "null", "", "http://127.0.0.1", "https://127.0.0.1", "file://", "http://localhost"),
        *(f"http://127.0.0.1:{served.port + 1}", f"http://localhost:{served.port}", f"http://[::1]:{served.port}"),
        *(f"{ours}.evil.example", f"{ours}/", f"{ours} http://evil.example", f"http://evil.example#{ours}"),
        *(f"ftp://127.0.0.1:{served.port}", f"HTTP://127.0.0.1:{served.port}", f"http://user@127.0.0.1:{served.port}"),
    ]
    for origin in foreign:
        for line in ("POST /v1/sessions", "GET /v1/server", "GET /", "DELETE /v1/sessions/x", "GET /healthz"):
            assert ask(served, line, f"Origin: {origin}", token=True) == 403, (origin, line)
            assert ask(served, line, f"Origin: {origin}", f"Authorization: Bearer {good}") == 403, (origin, line)
            assert ask(served, line, f"Origin: {origin}") == 403, (origin, line)
    for two in ((ours, "http://evil.example"), ("http://evil.example", ours)):
        headers = [f"Origin: {origin}" for origin in two]
        assert ask(served, "GET /v1/server", *headers, token=True) == 403
    assert served.get("/v1/sessions")["sessions"] == []


@pytest.mark.thorough
def test_auth_grants_no_cors_preflight(served: Served) -> None:
    for origin in ("http://evil.example", f"http://127.0.0.1:{served.port}"):
        for token in (True, False):
            said = talk(
                served.port,
                head(
                    "OPTIONS /v1/sessions HTTP/1.1",
                    *(f"Origin: {origin}", "Access-Control-Request-Method: POST"),
                    *("Access-Control-Request-Headers: authorization", "Access-Control-Request-Private-Network: true"),
                    port=served.port,
                    token=token,
                ),
            )
            assert statuses(said)[0] in (401, 403, 405)
            assert b"access-control" not in said.lower()


# -- the page token ---------------------------------------------------------------------------------------------------
def test_login_by_token_and_logout(served: Served) -> None:
    origin = {"Origin": served.url}
    for wrong in ("", "x", f"{TOKEN}x", TOKEN[:-1]):
        assert served.request("POST", "/v1/login", {"token": wrong}, token=False, headers=origin).status == 401
    for odd in ({}, {"token": 1}, {"token": None}, {"token": TOKEN, "x": 1}, {"token": TOKEN, "code": "x"}):
        assert served.request("POST", "/v1/login", odd, token=False, headers=origin).status == 400
    answer = served.request("POST", "/v1/login", {"token": TOKEN}, token=False, headers=origin)
    assert (answer.status, "set-cookie" in answer.headers) == (200, False)
    assert TOKEN not in answer.json["token"]
    good = {"Authorization": f"Bearer {answer.json['token']}"}
    assert served.request("GET", "/v1/server", token=False, headers=good).status == 200
    assert served.request("POST", "/v1/logout", token=False).status == 401
    assert served.request("POST", "/v1/logout", token=False, headers=good | origin).status == 204
    assert served.request("GET", "/v1/server", token=False, headers=good).status == 401
    # A page cannot revoke the server's own token.
    assert served.request("POST", "/v1/logout").status == 204
    assert served.request("GET", "/v1/server").status == 200


def test_logout_ends_the_streams_of_its_page_token_and_no_others(served: Served) -> None:
    good = page_token(served)
    with (
        served.stream("/v1/events?after=now", token=good) as page,
        served.stream("/v1/events?after=now", token=page_token(served)) as other,
        served.stream("/v1/events?after=now") as own,
    ):
        for stream in (page, other, own):
            stream.until_live()
        headers = {"Authorization": f"Bearer {good}", "Origin": served.url}
        assert served.request("POST", "/v1/logout", token=False, headers=headers).status == 204
        session = served.open()
        assert [message.data for message in page.messages()] == []
        for stream in (other, own):
            message = next(message for message in stream.messages() if message.id is not None)
            assert message.data["session"] == session


def test_logout_ends_a_stream_that_is_being_opened(served: Served) -> None:
    """The stream's request passes authentication first. The logout comes while the server prepares the stream."""
    for _ in range(5):
        good = page_token(served)
        head = f"HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\nAuthorization: Bearer {good}\r\n"
        with contextlib.ExitStack() as stack:
            stream, other = (
                stack.enter_context(socket.create_connection(("127.0.0.1", served.port), timeout=30)) for _ in range(2)
            )
            stream.sendall(
                f"GET /v1/events?after=now {head}Accept: text/event-stream\r\nConnection: close\r\n\r\n".encode()
            )
            other.sendall(f"POST /v1/logout {head}Origin: {served.url}\r\nContent-Length: 0\r\n\r\n".encode())
            assert other.recv(1000).startswith(b"HTTP/1.1 204")
            served.open()
            # The stream is refused or cut off.
            told = b""
            with contextlib.suppress(ConnectionResetError):
                while data := stream.recv(1 << 16):
                    told += data
                    assert b"session.opened" not in told


def test_auth_ignores_cookies(served: Served) -> None:
    """A browser sends cookies to every port of this machine.

    A program at another port would receive the cookie and could forge the rest of a request.
    """
    good = page_token(served)
    ours = f"Origin: http://127.0.0.1:{served.port}"
    for value in (good, TOKEN):
        for name in (f"banksman-{served.port}", "banksman", "Authorization", "token"):
            for line in ("GET /v1/server", "POST /v1/commands", "POST /v1/logout"):
                assert ask(served, line, f"Cookie: {name}={value}", ours) == 401, (name, line)


def test_login_code_works_once(served: Served) -> None:
    told = served.post("/v1/login/code")
    assert (told["url"], told["seconds"]) == (served.url, 600)
    answers = [served.request("POST", "/v1/login", {"code": told["code"]}, token=False) for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 401, 401]
    assert "banksman page" in answers[1].json["hint"]
    assert served.request("POST", "/v1/login", {"code": ""}, token=False).status == 401
    assert served.request("POST", "/v1/login/code", token=False).status == 401


def test_login_link_printed_by_the_server_works_once(served: Served) -> None:
    url, _, code = served.printed.split()[-1].partition("/#code=")
    assert url == served.url
    assert TOKEN not in served.printed
    statuses = [served.request("POST", "/v1/login", {"code": code}, token=False).status for _ in range(2)]
    assert statuses == [200, 401]


def test_page_token_is_refused_when_changed_or_of_another_server_or_port(served: Served) -> None:
    good = page_token(served)
    begin, expires, mac = good.split(".")
    assert ask(served, "GET /v1/server", f"Authorization: Bearer {good}") == 200
    for wrong in (
        *(f"{good}x", good[:-1], f"{begin}.{int(expires) + 1}.{mac}", f"{begin[:-1]}x.{expires}.{mac}x", begin),
        *(PageTokens(TOKEN, served.port + 1).make()[0], PageTokens("another", served.port).make()[0]),
    ):
        assert ask(served, "GET /v1/server", f"Authorization: Bearer {wrong}") == 401, wrong
    assert ask(served, "GET /v1/server", f"Authorization: Bearer {PageTokens(TOKEN, served.port).make()[0]}") == 200


def test_page_tokens_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = PageTokens(TOKEN, 4380)
    given, expires = pages.make()
    code = pages.make_code()
    assert pages.is_valid(given)
    monkeypatch.setattr(auth.time, "time", lambda: expires + 1.0)
    assert not pages.is_valid(given)
    now = time.monotonic()
    monkeypatch.setattr(auth.time, "monotonic", lambda: now + auth.CODE_SECONDS_MAX + 1)
    assert pages.take_code(code) is None


def test_login_codes_are_bounded_in_number() -> None:
    pages = PageTokens(TOKEN, 4380)
    codes = [pages.make_code() for _ in range(auth.CODES_MAX + 1)]
    assert [pages.take_code(code) is not None for code in codes] == [False, *(True for _ in codes[1:])]


def test_logout_is_remembered_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "logged-out"
    pages = PageTokens(TOKEN, 4380, path)
    (gone, _), (kept, _) = pages.make(), pages.make()
    pages.revoke(gone)
    again = PageTokens(TOKEN, 4380, path)
    assert (again.is_valid(gone), again.is_valid(kept)) == (False, True)
    assert path.stat().st_mode & 0o777 == 0o600


def test_logouts_on_file_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "logged-out"
    pages = PageTokens(TOKEN, 4380, path)
    given, expires = pages.make()
    path.write_text(f"{'x' * 16} {expires}\n" * 4000)
    pages.revoke(given)
    assert not PageTokens(TOKEN, 4380, path).is_valid(given)
    assert len(path.read_text().splitlines()) == auth.REVOKED_MAX


def test_logouts_that_expired_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "logged-out"
    path.write_text(f"{'x' * 16} 1\nno line of ours\n")
    pages = PageTokens(TOKEN, 4380, path)
    given, expires = pages.make()
    pages.revoke(given)
    assert path.read_text() == f"{given.removeprefix('bmp_').split('.')[0]} {expires}\n"


def test_logout_holds_at_another_server_of_the_same_user(tmp_path: Path) -> None:
    path = tmp_path / "logged-out"
    one, other = PageTokens(TOKEN, 4380, path), PageTokens(TOKEN, 4380, path)
    (gone, _), (kept, _) = one.make(), one.make()
    assert other.is_valid(gone)
    one.revoke(gone)
    assert (other.is_valid(gone), other.is_valid(kept)) == (False, True)


@pytest.mark.thorough
def test_page_token_lives_as_long_as_the_servers_token(tmp_path: Path) -> None:
    served = Served(tmp_path / "server")
    with served:
        good = f"Authorization: Bearer {page_token(served)}"
        served.kill()
        served.start()
        assert ask(served, "GET /v1/server", good) == 200
        served.kill()
        served.settings["token"] = "quite-another-token"
        served.start()
        assert ask(served, "GET /v1/server", good) == 401


# -- secrets ----------------------------------------------------------------------------------------------------------
def test_log_and_answers_never_contain_a_secret(tmp_path: Path) -> None:
    """At debug level, with the secrets in every place where a careless caller could put them."""
    with Served(tmp_path / "server", log_level="debug", secrets=["another-secret-word"]) as served:
        good = page_token(served)
        said: list[bytes] = []
        for line in (
            *(f"GET /{TOKEN}", f"GET /v1/server?token={TOKEN}", f"GET /v1/sessions/{TOKEN}", f"POST /v1/{TOKEN}"),
            *(f"GET /v1/sessions?limit={TOKEN}", f"GET /%61{TOKEN[1:]}", f"GET /v1/commands/{TOKEN}/output"),
        ):
            odd = ((), (f"X-Token: {TOKEN}", f"Referer: http://127.0.0.1/{TOKEN}"), (f"Authorization: Bearer {good}x",))
            requests = [head(f"{line} HTTP/1.1", *headers, port=served.port, token=False) for headers in odd]
            said += [talk(served.port, request) for request in requests]
            # An authenticated client knows the word already: the answer may repeat it as the name of an unknown
            # session.
            talk(served.port, head(f"{line} HTTP/1.1", f"X-Token: {good}", port=served.port, token=True))
        said.append(talk(served.port, f"garbage {TOKEN}\r\n\r\n".encode()))
        said.append(talk(served.port, head("GET / HTTP/1.1", port=served.port, host=TOKEN)))
        paths = ("/v1/server", "/v1/agents", "/v1/stacks", "/metrics", "/openapi.json", "/v1/sessions", "/")
        said += [served.request("GET", path).body for path in paths]
        assert served.process is not None
        assert served.process.stdout is not None
        served.process.terminate()
        # The first line was the URL with a one-time code, for the user that started the server. There is no second.
        assert served.process.stdout.read() == ""
        log = served.log.read_text(encoding="utf-8")
    assert "GET /v1/server 200" in log
    for word in (TOKEN, good, "another-secret-word"):
        assert not [line for line in log.splitlines() if word in line]
        assert not [answer for answer in said if word.encode() in answer]
