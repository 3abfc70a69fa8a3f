"""Single sign-on as the pages show it: a real Caddy, a real server, and a stand-in for oauth2-proxy.

docs/how-to/proxy.md gives each person a token. docs/security.md lets the proxy name its users.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Generator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.docs.blocks import blocks
from tests.process.helpers import wait_until
from tests.server.access.tokens import create
from tests.server.kit import SECONDS_MAX, Served
from tests.thorough import thorough

from banksman.server.access.roles import Role
from banksman.testing.nats_servers import free_ports

CADDY = shutil.which("caddy")
NAME = "banksman.example.com"
# A cookie of a login that is valid and names nobody.
NAMELESS = "nameless"
pytestmark = [thorough, pytest.mark.skipif(CADDY is None, reason="needs caddy: make caddy")]


class SignedIn(BaseHTTPRequestHandler):
    """Answer as oauth2-proxy does: 202 with the address of the person of the cookie, else 401."""

    def do_GET(self) -> None:
        person = re.search(r"_oauth2_proxy=(\w+)", self.headers.get("Cookie", ""))
        self.send_response(401 if person is None else 202)
        if person is not None and person[1] != NAMELESS:
            self.send_header("X-Auth-Request-Email", f"{person[1]}@example.com")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002


class Site:
    def __init__(self, port: int, name: str) -> None:
        self.port = port
        self.name = name

    @contextlib.contextmanager
    def request(self, path: str, person: str = "", **headers: str) -> Generator[http.client.HTTPResponse]:
        sent = {"Host": self.name, **{name.replace("_", "-"): value for name, value in headers.items()}}
        if person:
            sent["Cookie"] = f"_oauth2_proxy={person}"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS_MAX)
        with contextlib.closing(connection):
            connection.request("GET", path, headers=sent)
            with connection.getresponse() as answer:
                yield answer

    def status(self, path: str, person: str = "", **headers: str) -> int:
        with self.request(path, person, **headers) as answer:
            return answer.status

    def json(self, path: str, person: str, **headers: str) -> Any:
        with self.request(path, person, **headers) as answer:
            assert answer.status == 200, answer.read()
            return json.loads(answer.read())


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path / "server", hosts=[NAME]) as served:
        yield served


@contextlib.contextmanager
def caddy(folder: Path, served: Served, text: str, name: str, tokens: dict[str, str]) -> Generator[Site]:
    """Run Caddy with the text of a page, for the site of this name, at a free port."""
    (port,) = free_ports(1)
    auth = ThreadingHTTPServer(("127.0.0.1", 0), SignedIn)
    thread = threading.Thread(target=auth.serve_forever)
    thread.start()
    for old, new in (
        (f"{name} {{", f"http://{name}:{port} {{\n\tbind 127.0.0.1"),
        ("127.0.0.1:4180", f"127.0.0.1:{auth.server_port}"),
        ("127.0.0.1:4380", f"127.0.0.1:{served.port}"),
    ):
        assert old in text
        text = text.replace(old, new)
    file = folder / "Caddyfile"
    file.write_text(f"{{\n\tadmin off\n\tauto_https off\n}}\n{text}", encoding="utf-8")
    env = {
        **os.environ,
        "HOME": str(folder),
        "XDG_DATA_HOME": str(folder / "data"),
        "XDG_CONFIG_HOME": str(folder / "settings"),
        **tokens,
    }
    log = folder / "caddy.log"
    with log.open("wb") as output:
        argv = [CADDY or "", "run", "--adapter", "caddyfile", "--config", str(file)]
        process = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    site = Site(port, name)

    def is_there() -> bool:
        assert process.poll() is None, log.read_text(encoding="utf-8")
        try:
            site.status("/livez", "alice")
        except OSError:
            return False
        return True

    try:
        wait_until(is_there, "caddy")
        yield site
    finally:
        # It would wait for every open connection.
        process.kill()
        process.wait(SECONDS_MAX)
        auth.shutdown()
        auth.server_close()
        thread.join()


@pytest.fixture
def site(tmp_path: Path, served: Served) -> Iterator[Site]:
    (block,) = [each for each in blocks() if (each.page, each.language) == ("docs/how-to/proxy.md", "caddy")]
    tokens = {
        "ALICE_TOKEN": create(served, "alice", Role.OPERATOR),
        "BOB_TOKEN": create(served, "bob", Role.VIEWER),
    }
    with caddy(tmp_path, served, block.text, NAME, tokens) as site:
        yield site


def test_proxy_gives_each_person_the_rights_of_a_token(site: Site, served: Served) -> None:
    assert [site.json("/v1/caller", name)["name"] for name in ("alice", "bob")] == ["alice", "bob"]
    # No login, a person without a token, and clients that name themselves.
    assert site.status("/v1/caller") == 401
    assert site.status("/v1/caller", "mallory") == 401
    forged = {"X_Auth_Request_Email": "alice@example.com", "X_Forwarded_User": "alice"}
    assert site.status("/v1/caller", **forged) == 401
    assert site.json("/v1/caller", "bob", **forged)["name"] == "bob"
    assert site.json("/v1/caller", "bob", Authorization="Bearer a-token-of-the-tests")["name"] == "bob"
    # A browser that opens the page is sent to the login, and a request of the page is not.
    with site.request("/", Sec_Fetch_Mode="navigate") as answer:
        assert (answer.status, answer.headers["Location"]) == (302, "/oauth2/sign_in?rd=/")
    assert site.status("/", "alice") == 200
    assert served.get("/v1/caller")["name"] != "alice"


def test_proxy_passes_events_on_at_once(site: Site, served: Served) -> None:
    session = served.open()
    with site.request("/v1/events", "alice", Accept="text/event-stream") as stream:
        assert stream.status == 200
        read_until(stream, b"stream.live")
        # The stream goes on, so only a proxy that does not collect passes this event on.
        served.ask(session, "hello")
        read_until(stream, b"turn.ended")


def read_until(stream: http.client.HTTPResponse, word: bytes) -> None:
    while word not in (line := stream.readline()):
        assert line, "the stream has ended"


def test_proxy_that_names_its_users_lets_no_client_name_itself(tmp_path: Path) -> None:
    (block,) = [each for each in blocks() if each.page == "docs/security.md" and "forward_auth" in each.text]
    name = block.text.partition(" {")[0]
    settings: dict[str, Any] = {"hosts": [name], "trusted_proxies": ["sso@127.0.0.1"]}
    with Served(tmp_path / "server", **settings) as served:
        tokens = {"BANKSMAN_PROXY_TOKEN": create(served, "sso", Role.ASKER)}
        with caddy(tmp_path, served, block.text, name, tokens) as site:
            for person in ("alice", "bob"):
                found = site.json("/v1/caller", person, X_Forwarded_User="mallory", Authorization="Bearer x")
                assert (found["name"], found["role"]) == (f"{person}@example.com", "asker")
            forged = {"X_Auth_Request_Email": "alice@example.com", "X_Forwarded_User": "alice@example.com"}
            assert site.status("/v1/caller", **forged) == 401
            assert site.json("/v1/caller", "bob", **forged)["name"] == "bob@example.com"
            # oauth2-proxy names nobody without `set_xauthrequest`, or for a login without an address.
            assert site.status("/v1/caller", NAMELESS) == 401
            assert site.status("/v1/caller", NAMELESS, **forged) == 401
            with site.request("/v1/events", "alice", Accept="text/event-stream") as stream:
                assert stream.status == 200
                read_until(stream, b"stream.live")
