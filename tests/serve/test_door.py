"""Who is let in, and who is not. A real server, and bytes at its socket: what a browser would never send, too."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.serve.kit import TOKEN, Served, head, statuses, talk

from banksman.serve.entrance import token as tokens


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path / "server", log_level="debug") as served:
        yield served


def cookie(served: Served) -> str:
    """As a browser gets it."""
    answer = served.request("POST", "/v1/login", {"token": TOKEN}, token=False, headers={"Origin": served.url})
    assert answer.status == 204
    return answer.headers["set-cookie"].partition(";")[0]


def ask(served: Served, line: str, *headers: str, host: str | None = None, token: bool = False) -> int:
    said = talk(served.port, head(f"{line} HTTP/1.1", *headers, port=served.port, host=host, token=token))
    (status,) = statuses(said)
    return status


# -- the token --------------------------------------------------------------------------------------------------------
def test_only_the_token_opens_and_only_as_a_whole(served: Served) -> None:
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


def test_a_token_in_the_url_is_not_taken(served: Served) -> None:
    for query in (f"token={TOKEN}", f"access_token={TOKEN}", f"authorization=Bearer%20{TOKEN}"):
        assert ask(served, f"GET /v1/server?{query}") == 401


def test_who_is_not_let_in_is_told_how(served: Served) -> None:
    answer = served.request("GET", "/v1/server", token=False)
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["www-authenticate"] == 'Bearer realm="banksman"'
    assert answer.json["type"] == "urn:banksman:not-let-in"
    assert "Authorization: Bearer" in answer.json["hint"]


def test_what_is_open_is_the_page_and_healthz_and_nothing_else(served: Served) -> None:
    for path in ("/", "/page/main.js", "/page/style/tokens.css", "/healthz"):
        assert served.request("GET", path, token=False).status == 200, path
    assert served.request("GET", "/healthz", token=False).json == {"status": "ok"}
    paths: dict[str, Any] = {**served.get("/openapi.json")["paths"], "/openapi.json": {"get": {}}}
    for path, methods in paths.items():
        for method in methods:
            if (method, path) not in (("get", "/healthz"), ("post", "/v1/login")):
                filled = re.sub(r"\{\w+\}", "x", path)
                assert served.request(method.upper(), filled, token=False).status == 401, (method, path)
    # Nobody is told either what is there and what is not.
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


def test_a_name_that_is_not_ours_is_refused(served: Served) -> None:
    """Rebinding: a foreign name was made to point here. Whatever it brings, and where everybody may look, too."""
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


def test_a_request_has_one_host(served: Served) -> None:
    ours = f"127.0.0.1:{served.port}"
    for hosts in ([], [ours, "evil.example"], ["evil.example", ours], [ours, ours]):
        lines = ["GET /v1/server HTTP/1.1", f"Authorization: Bearer {TOKEN}", "Connection: close"]
        lines += [f"Host: {host}" for host in hosts]
        (status,) = statuses(talk(served.port, "\r\n".join([*lines, "", ""]).encode()))
        assert status in (400, 403), hosts


@pytest.mark.thorough
def test_the_name_of_a_proxy_can_be_made_ours(tmp_path: Path) -> None:
    with Served(tmp_path / "server", hosts=["agents.example"]) as served:
        assert ask(served, "GET /v1/server", host="agents.example", token=True) == 200
        assert ask(served, "GET /v1/server", host="Agents.Example:443", token=True) == 200
        assert ask(served, "GET /v1/server", host="x.agents.example", token=True) == 403
        # The proxy took the TLS off: the page is at https.
        host = "agents.example"
        assert ask(served, "GET /v1/server", "Origin: https://agents.example", host=host, token=True) == 200
        assert ask(served, "GET /v1/server", "Origin: https://evil.example", host=host, token=True) == 403


# -- the site ---------------------------------------------------------------------------------------------------------
def test_a_foreign_origin_is_refused_whatever_it_brings(served: Served) -> None:
    good = cookie(served)
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
            assert ask(served, line, f"Origin: {origin}", f"Cookie: {good}") == 403, (origin, line)
            assert ask(served, line, f"Origin: {origin}") == 403, (origin, line)
    for two in ((ours, "http://evil.example"), ("http://evil.example", ours)):
        headers = [f"Origin: {origin}" for origin in two]
        assert ask(served, "GET /v1/server", *headers, token=True) == 403
    assert served.get("/v1/sessions")["sessions"] == []


@pytest.mark.thorough
def test_a_preflight_gets_no_permission(served: Served) -> None:
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


# -- the cookie -------------------------------------------------------------------------------------------------------
def test_logging_in_and_out(served: Served) -> None:
    origin = {"Origin": served.url}
    for wrong in ("", "x", f"{TOKEN}x", TOKEN[:-1]):
        answer = served.request("POST", "/v1/login", {"token": wrong}, token=False, headers=origin)
        assert answer.status == 401
        assert "set-cookie" not in answer.headers
    for odd in ({}, {"token": 1}, {"token": None}, {"token": TOKEN, "x": 1}):
        assert served.request("POST", "/v1/login", odd, token=False, headers=origin).status == 400
    answer = served.request("POST", "/v1/login", {"token": TOKEN}, token=False, headers=origin)
    assert answer.status == 204
    pair, *attributes = (part.strip().lower() for part in answer.headers["set-cookie"].split(";"))
    assert {"httponly", "samesite=strict", "path=/"} <= set(attributes)
    assert not any(attribute.startswith("domain") for attribute in attributes)
    assert TOKEN.lower() not in pair
    good = {"Cookie": answer.headers["set-cookie"].partition(";")[0]}
    assert served.request("GET", "/v1/server", token=False, headers=good).status == 200
    # To be logged out is something that another site must not do to us either.
    assert served.request("POST", "/v1/logout", token=False, headers=good).status == 403
    answer = served.request("POST", "/v1/logout", token=False, headers=good | origin)
    assert answer.status == 204
    assert "max-age=0" in answer.headers["set-cookie"].lower()


def test_with_a_cookie_what_changes_something_says_its_origin(served: Served) -> None:
    good = f"Cookie: {cookie(served)}"
    ours = f"Origin: http://127.0.0.1:{served.port}"
    for line in ("POST /v1/logout", "DELETE /v1/sessions/x", "PATCH /v1/sessions/x", "POST /v1/interrupt", "PUT /"):
        assert ask(served, line, good) == 403, line
        assert ask(served, line, good, "Referer: http://127.0.0.1/") == 403, line
        assert ask(served, line, good, "Sec-Fetch-Site: same-origin") == 403, line
        assert ask(served, line, good, ours) != 403, line
    # A form of another site: no preflight, and the cookie is there if the browser is old.
    form = ("Content-Type: text/plain", "Origin: http://evil.example", "Sec-Fetch-Site: cross-site")
    assert ask(served, "POST /v1/sessions", good, *form) == 403
    # With both, it is the token that counts: a program's.
    assert ask(served, "POST /v1/logout", good, token=True) == 204


def test_with_a_cookie_what_reads_was_not_begun_by_another_site(served: Served) -> None:
    good = f"Cookie: {cookie(served)}"
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)):
        for line in ("GET /v1/server", "HEAD /v1/server"):
            assert ask(served, line, good, f"Sec-Fetch-Site: {site}") == status, (site, line)
    assert ask(served, "GET /v1/server", good) == 200


def test_an_event_source_of_our_page_needs_the_cookie_only(served: Served) -> None:
    session = served.open()
    request = head(
        f"GET /v1/sessions/{session}/events HTTP/1.1",
        *(
            "Accept: text/event-stream",
            "Cache-Control: no-cache",
            "Sec-Fetch-Site: same-origin",
            "Sec-Fetch-Mode: cors",
        ),
        *("Sec-Fetch-Dest: empty", f"Cookie: {cookie(served)}"),
        port=served.port,
        token=False,
    )
    with socket.create_connection(("127.0.0.1", served.port), 30) as peer:
        peer.sendall(request)
        said = b""
        while b"stream.live" not in said:
            data = peer.recv(65536)
            assert data, said
            said += data
    assert statuses(said) == [200]


@pytest.mark.thorough
def test_a_cookie_of_another_server_or_port_is_none(served: Served) -> None:
    name, _, value = cookie(served).partition("=")
    assert value == tokens.cookie_of(TOKEN, served.port)
    wrong = [
        *(f"{name}={value}x", f"{name}={value[:-1]}", f"{name}=", f"x{name}={value}", f"banksman={value}"),
        f"{name}={tokens.cookie_of(TOKEN, served.port + 1)}",
        f"{name}={tokens.cookie_of('another-token', served.port)}",
        f"banksman-{served.port + 1}={value}",
        f"{name}={TOKEN}",
    ]
    for one in wrong:
        assert ask(served, "GET /v1/server", f"Cookie: {one}") == 401, one


@pytest.mark.thorough
def test_odd_cookies_of_others_do_not_hide_ours(served: Served) -> None:
    """A browser sends what all ports of this machine have set, in one header."""
    good = cookie(served)
    for other in ('a={"b": [1, 2]}', "a b=c", "=", ";;", 'x="unended', "\xe9=\xe9", "a@b=1", "session", "x=a,b"):
        assert ask(served, "GET /v1/server", f"Cookie: {other}; {good}; {other}") == 200, other


@pytest.mark.thorough
def test_a_cookie_lives_as_long_as_the_token(tmp_path: Path) -> None:
    served = Served(tmp_path / "server")
    with served:
        good = f"Cookie: {cookie(served)}"
        served.kill()
        served.start()
        assert ask(served, "GET /v1/server", good) == 200
        served.kill()
        served.settings["token"] = "quite-another-token"
        served.start()
        assert ask(served, "GET /v1/server", good) == 401


# -- nothing is told --------------------------------------------------------------------------------------------------
def test_no_secret_is_in_a_line_of_the_log_or_an_answer(tmp_path: Path) -> None:
    """At debug level, and with the secrets put wherever a careless caller could put them."""
    with Served(tmp_path / "server", log_level="debug", secrets=["another-secret-word"]) as served:
        good = cookie(served)
        secret = good.partition("=")[2]
        said: list[bytes] = []
        for line in (
            *(f"GET /{TOKEN}", f"GET /v1/server?token={TOKEN}", f"GET /v1/sessions/{TOKEN}", f"POST /v1/{TOKEN}"),
            *(f"GET /v1/sessions?limit={TOKEN}", f"GET /%61{TOKEN[1:]}", f"GET /v1/commands/{TOKEN}/output"),
        ):
            odd = ((), (f"X-Token: {TOKEN}", f"Referer: http://127.0.0.1/{TOKEN}"), (f"Cookie: {good}x",))
            requests = [head(f"{line} HTTP/1.1", *headers, port=served.port, token=False) for headers in odd]
            said += [talk(served.port, request) for request in requests]
            # To who is let in it is no news: it may be told that there is no session by the name that it gave.
            talk(served.port, head(f"{line} HTTP/1.1", f"Cookie: {good}", port=served.port, token=True))
        said.append(talk(served.port, f"garbage {TOKEN}\r\n\r\n".encode()))
        said.append(talk(served.port, head("GET / HTTP/1.1", port=served.port, host=TOKEN)))
        paths = ("/v1/server", "/v1/agents", "/v1/stacks", "/metrics", "/openapi.json", "/v1/sessions", "/")
        said += [served.request("GET", path).body for path in paths]
        assert served.process is not None
        assert served.process.stdout is not None
        served.process.terminate()
        # Its first line was the URL with the token, for whoever started it. There is no second.
        assert served.process.stdout.read() == ""
        log = served.log.read_text(encoding="utf-8")
    assert "GET /v1/server 200" in log
    for word in (TOKEN, secret, "another-secret-word"):
        assert not [line for line in log.splitlines() if word in line]
        assert not [answer for answer in said if word.encode() in answer]
