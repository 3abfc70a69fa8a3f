"""Discovery of the server, use of the token, and handling of bad answers."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.client.player import Player, answer

from banksman.cli.client import client as clients
from banksman.cli.client.client import Client, segment
from banksman.cli.client.discovery import ServerAddress, find, named, owner_of
from banksman.cli.client.exchange import Lost, NoServer, NotLetIn, RequestRefused, Silent
from banksman.errors import UsageError
from banksman.folders import state_folder

SECRET = "s3cret-of-this-machine"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BANKSMAN_URL", "BANKSMAN_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(clients, "RETRY_SECONDS", (0.0, 0.0, 0.0))


def leave(**files: str) -> None:
    """Write files to the state folder, as a server does."""
    folder = state_folder()
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)


def found(url: str | None = None) -> ServerAddress:
    place = find(url)
    assert place is not None
    return place


def announce(url: str) -> None:
    """Announce a server at this address, the only one that is trusted with the token."""
    leave(server_json=json.dumps({"url": url, "pid": os.getpid()}))


def client(player: Player) -> Client:
    return Client(lambda: named(player.url))


def test_server_address_is_looked_up_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find() is None
    said = {"url": "http://127.0.0.1:5000", "pid": os.getpid(), "started": 0}
    leave(server_json=json.dumps(said), token=f"{SECRET}\n")
    assert (found().url, found().token) == ("http://127.0.0.1:5000", SECRET)
    monkeypatch.setenv("BANKSMAN_URL", "http://localhost:6000")
    assert found().url == "http://localhost:6000"
    assert found("https://[::1]:7000/under/").url == "https://[::1]:7000/under"
    assert (found("https://[::1]").port, found("http://h").port, found("http://h/a/").prefix) == (443, 80, "/a")
    monkeypatch.setenv("BANKSMAN_TOKEN", "another")
    assert found().token == "another"


def test_server_socket_is_preferred_to_the_url_and_needs_no_token(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    leave(server_json=json.dumps({"url": "http://127.0.0.1:5000", "socket": str(path)}), token=f"{SECRET}\n")
    assert (found().socket, found().token, found().is_local) == (str(path), None, True)
    assert found().url == f"unix:{path}"
    # Also when named by hand. The client accepts only an absolute path from the state folder.
    assert found(f"unix:{path}") == found()
    (state_folder() / "server.json").write_text('{"url": "http://127.0.0.1:5000", "socket": "a.sock"}')
    assert found().url == "http://127.0.0.1:5000"


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"url": 3}', '{"url": ""}', "\x00"])
def test_discovery_file_without_an_address_is_ignored(text: str) -> None:
    leave(server_json=text)
    assert find() is None


def test_state_folder_ignores_a_relative_xdg_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "somewhere")
    assert state_folder() == Path.home() / ".local/state/banksman"


def test_token_file_is_sent_only_to_the_announced_address(monkeypatch: pytest.MonkeyPatch) -> None:
    leave(server_json=json.dumps({"url": "http://127.0.0.1:5000", "pid": os.getpid()}), token=SECRET)
    assert found().token == found("http://127.0.0.1:5000").token == found("http://127.0.0.1:5000/").token == SECRET
    for other in (
        *("http://127.0.0.1:5001", "http://localhost:5001", "http://[::1]:5000", "https://127.0.0.1:5000"),
        *("http://127.0.0.2:5000", "http://10.0.0.2:5000", "http://127.0.0.1"),
    ):
        assert found(other).token is None, other
    # localhost may resolve to ::1, where another user may have the same port. So the client uses the announced address.
    assert (found("http://localhost:5000").host, found("http://localhost:5000").token) == ("127.0.0.1", SECRET)
    # A token that the user sets is for the server that the user names.
    assert found("http://10.0.0.2:5000/#token=theirs").token == "theirs"
    monkeypatch.setenv("BANKSMAN_TOKEN", "theirs")
    assert found("http://10.0.0.2:5000").token == "theirs"


@pytest.mark.parametrize(("bound", "asked"), [("0.0.0.0", "127.0.0.1"), ("[::]", "::1")])
def test_token_file_is_sent_to_loopback_when_server_listens_on_all_addresses(bound: str, asked: str) -> None:
    leave(server_json=json.dumps({"url": f"http://{bound}:5000", "pid": os.getpid()}), token=SECRET)
    assert (found("http://localhost:5000").host, found("http://localhost:5000").token) == (asked, SECRET)


def test_token_file_is_not_sent_when_the_announced_server_is_dead(tmp_path: Path) -> None:
    """Another user may have taken its port since."""
    with subprocess.Popen(["true"]) as gone:
        pass
    leave(server_json=json.dumps({"url": "http://127.0.0.1:5000", "pid": gone.pid}), token=SECRET)
    assert found("http://127.0.0.1:5000").token is found().token is None
    said = {"url": "http://127.0.0.1:5000", "pid": os.getpid(), "socket": str(tmp_path / "gone.sock")}
    (state_folder() / "server.json").write_text(json.dumps(said))
    assert found("http://127.0.0.1:5000").token is None


@pytest.mark.parametrize(
    "url",
    [
        "localhost:4380",
        "ftp://h",
        "http://",
        "http://h:port",
        "http://h:99999",
        "http://[::1",
        "http://h/\n",
        "http://h é",
    ],
)
def test_malformed_url_is_a_usage_error(url: str) -> None:
    with pytest.raises(UsageError):
        found(url)


def test_secret_in_a_url_is_refused_and_not_repeated() -> None:
    for url in (
        "http://me:pass@h",
        "http://h/#pass",
        "http://h/?token=pass",
        "ftp://h/#token=pass",
        "http://h/#token=pass é",
    ):
        with pytest.raises(UsageError) as caught:
            found(url)
        assert "pass" not in str(caught.value).replace("password", "")


def test_url_may_end_with_a_token_or_with_an_unused_code(monkeypatch: pytest.MonkeyPatch) -> None:
    leave(server_json=json.dumps({"url": "http://127.0.0.1:5000", "pid": os.getpid()}), token="of-the-file")
    given = f"http://127.0.0.1:5000/#token={SECRET}"
    assert (found(given).url, found(given).prefix, found(given).token) == ("http://127.0.0.1:5000", "", SECRET)
    assert found("http://127.0.0.1:5000/#token=").token == "of-the-file"
    printed = "http://127.0.0.1:5000/#code=once"
    assert (found(printed).url, found(printed).token) == ("http://127.0.0.1:5000", "of-the-file")
    monkeypatch.setenv("BANKSMAN_TOKEN", "of-the-variable")
    assert found(given).token == "of-the-variable"


def test_malformed_token_is_refused_and_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BANKSMAN_URL", "http://127.0.0.1:5000")
    for bad in (f"{SECRET}\r\nX: y", f"{SECRET}é", f"a {SECRET}"):
        monkeypatch.setenv("BANKSMAN_TOKEN", bad)
        with pytest.raises(UsageError) as caught:
            found()
        assert SECRET not in str(caught.value)
    monkeypatch.setenv("BANKSMAN_TOKEN", SECRET)
    assert found().token == SECRET
    assert SECRET not in repr(found())


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("list the sessions", "see banksman ps"),
        ("list the commands; a command that ended long ago is not kept", "see banksman ps --all"),
        ("begin again at the first event, without a cursor", "begin again without --after"),
        ('use on_busy="enqueue" to wait', "use --on-busy enqueue to wait"),
        ("use interactive, or a whole number", "use interactive, or a whole number"),
        ("use an int", ""),
        ("write numbers as str(…)", ""),
        ("raise the limit (ulimit -n)", "raise the limit (ulimit -n)"),
        ("set NAME=value, or --flag=value", "set NAME=value, or --flag=value"),
    ],
)
def test_problem_hint_about_python_is_reworded_for_the_cli(said: str, told: str) -> None:
    refusal = answer(404, {"title": "NotFound", "detail": "no", "hint": said, "status": 404})
    with Player(lambda request: refusal) as player, pytest.raises(RequestRefused) as caught:
        client(player).get("/v1/x")
    assert caught.value.hint == told


def test_problem_keeps_the_servers_words_and_is_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"title": "QueueFull", "detail": "64 wait", "hint": "later", "status": 429, "ids": {"session": "s"}}
    said = answer(429, body, kind="application/problem+json", headers="Retry-After: 7\r\n")
    with Player(lambda request: said) as player, pytest.raises(RequestRefused) as caught:
        client(player).post("/v1/x")
    problem = caught.value
    assert (problem.title, problem.detail, problem.hint, problem.status) == ("QueueFull", "64 wait", "later", 429)
    assert (problem.ids, problem.retry_seconds, str(problem)) == ({"session": "s"}, 7.0, "64 wait (later)")
    # No retry: a known server has refused it.
    assert len(player.requests) == 1


@pytest.mark.parametrize("body", [b"<html>Bad gateway</html>", b"", b"[]", b'{"title": null, "ids": 3}', b"\xff"])
def test_problem_without_a_json_body_is_still_reported(body: bytes) -> None:
    with Player(lambda request: answer(502, body, kind="text/html")) as player, pytest.raises(RequestRefused) as caught:
        client(player).get("/v1/x")
    assert caught.value.status == 502
    assert "502 Bad Gateway" in str(caught.value)


def test_not_let_in_says_what_to_do_and_shows_no_token() -> None:
    leave(token=SECRET)
    with Player(lambda request: answer(401, {"title": "X", "detail": "no"})) as player:
        said = {"url": player.url, "pid": os.getpid()}
        (state_folder() / "server.json").write_text(json.dumps(said))
        with pytest.raises(NotLetIn) as caught:
            client(player).get("/v1/x")
    assert f"Authorization: Bearer {SECRET}" in player.requests[0]
    assert caught.value.hint == f"check the token in {state_folder() / 'token'}: it is for another server"
    assert SECRET not in str(caught.value)


def test_not_let_in_names_the_source_of_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with Player(lambda request: answer(401, {"title": "X", "detail": "no"})) as player:
        for given, hint in (
            (f"{player.url}#token=zzz", "check the token in the server's URL: it is for another server"),
            (
                player.url,
                "set BANKSMAN_TOKEN; the token in the state folder is only for the server that this user runs",
            ),
        ):
            with pytest.raises(NotLetIn) as caught:
                Client(lambda given=given: named(given)).get("/v1/x")
            assert caught.value.hint == hint
        monkeypatch.setenv("BANKSMAN_TOKEN", "zzz")
        with pytest.raises(NotLetIn) as caught:
            client(player).get("/v1/x")
        assert caught.value.hint == "check the token in BANKSMAN_TOKEN: it is for another server"


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/foo", "remove /foo from --url or BANKSMAN_URL, unless a proxy needs it"),
        ("", "check that --url or BANKSMAN_URL names a Banksman server of this version"),
    ],
)
@pytest.mark.parametrize("body", [{"title": "NotFound", "detail": "this path does not exist"}, b"<html>"])
def test_unknown_path_hint_names_the_url(path: str, hint: str, body: dict[str, str] | bytes) -> None:
    with Player(lambda request: answer(404, body)) as player, pytest.raises(RequestRefused) as caught:
        Client(lambda: named(f"{player.url}{path}")).get("/v1/sessions")
    assert caught.value.hint == hint


def test_no_server_at_a_remote_url_does_not_advise_to_start_one_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(NoServer) as caught:
        Client(lambda: named("http://build-1.example:4380")).get("/v1/x")
    assert str(caught.value) == (
        "no server at http://build-1.example:4380: Connection refused"
        " (check --url and BANKSMAN_URL, and start the server on that machine)"
    )


def test_no_server_is_reported_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(NoServer, match=rf"^no server at http://127.0.0.1:{port}: start one with banksman serve$"):
        Client(lambda: found(f"http://127.0.0.1:{port}")).get("/v1/x")
    # No host name can be that long: it is not even looked up.
    with pytest.raises(NoServer, match=r"^no server at http://aaa"):
        Client(lambda: found(f"http://{'a' * 64}.example")).get("/v1/x")


@pytest.mark.parametrize("said", [b"SSH-2.0-OpenSSH\r\n", b"\r\n\r\n", answer(200, b"<html>"), answer(200, b"{")])
def test_foreign_server_is_reported_as_no_server(said: bytes) -> None:
    with Player(lambda request: said) as player, pytest.raises(NoServer):
        client(player).post("/v1/x")
    assert len(player.requests) == 1


def test_client_retries_only_idempotent_requests() -> None:
    whole = answer(200, {"a": 1})
    # A reset, a cut in the head, a cut in the body, and then the whole answer.
    cuts: list[bytes | None] = [None, whole[:9], whole[:-3]]
    for method, key in (("GET", None), ("POST", "k")):
        answers = iter(cuts)
        with Player(lambda request, answers=answers: next(answers, whole)) as player:
            assert client(player).request(method, "/v1/x", body={}, key=key) == {"a": 1}
        assert len(player.requests) == 4
        assert all(("Idempotency-Key: k" in request) == (key is not None) for request in player.requests)
    for cut in cuts:
        with Player(lambda request, cut=cut: cut) as player, pytest.raises(Lost):
            client(player).post("/v1/x")
        assert len(player.requests) == 1


def test_client_never_accepts_a_truncated_answer() -> None:
    whole = answer(200, {"a": [1, 2, 3]})
    for cut in range(len(whole)):
        with Player(lambda request, cut=cut: whole[:cut]) as player, pytest.raises(NoServer):
            client(player).post("/v1/x")


def test_client_quotes_path_segments_and_queries() -> None:
    with Player(lambda request: answer(200, {})) as player:
        client(player).get(f"/v1/sessions/{segment('a/../b?c#d é')}", {"after": "x&y=1\r\n", "limit": 3, "raw": None})
    assert player.requests[0].startswith(
        "GET /v1/sessions/a%2F..%2Fb%3Fc%23d%20%C3%A9?after=x%26y%3D1%0D%0A&limit=3 HTTP/1.1\r\n"
    )


def test_client_returns_none_for_an_answer_without_a_body() -> None:
    with Player(lambda request: b"HTTP/1.1 204 No Content\r\n\r\n") as player:
        assert client(player).request("DELETE", "/v1/x") is None


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "banksman", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **variables},
    )


def test_cli_exits_3_without_a_server_and_2_on_a_bad_url() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    gone = run("ps", "--url", url, "--json")
    assert (gone.returncode, gone.stderr) == (3, f"banksman: no server at {url}: start one with banksman serve\n")
    assert json.loads(gone.stdout)["error"] == "NoServer"
    assert run("ps", "--url", "nonsense").returncode == 2
    assert run("log", "x", "--follow", BANKSMAN_URL=url).returncode == 3
    bad = run("ps", BANKSMAN_URL=url, BANKSMAN_TOKEN=f"{SECRET} x")
    assert (bad.returncode, SECRET in bad.stderr) == (2, False)


@pytest.mark.thorough
def test_cli_serve_that_cannot_start_says_why(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("[serve]\nprot = 3\n")
    misspelt = run("serve", "--config", str(config))
    assert (misspelt.returncode, "port" in misspelt.stderr) == (2, True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        busy = run("serve", "--port", port, "--store", f"sqlite:{tmp_path / 'store.db'}")
    # A retry may help, so the exit code does not stop a service manager from one.
    assert (busy.returncode, port in busy.stderr) == (1, True)
    remote = run("serve", "--bind", "0.0.0.0", "--store", "memory:")
    assert (remote.returncode, "allow-remote" in remote.stderr) == (2, True)
    for failed in (misspelt, busy, remote):
        assert "Traceback" not in failed.stderr


# -- a session of another process -------------------------------------------------------------------------------------
def refusal(address: str) -> bytes:
    ids = {"session": "s", "pid": 7, "address": address}
    said = {"title": "NotOwner", "detail": "process 7 has it", "hint": "", "ids": ids}
    return answer(409, said)


def test_client_follows_a_session_to_its_owner() -> None:
    with (
        Player(lambda _: answer(200, {"of": "the owner"})) as owner,
        Player(lambda _: refusal(owner.url)) as base,
    ):
        announce(owner.url)
        asking = client(base)
        assert asking.post("/v1/sessions/s/interrupt") == {"of": "the owner"}
        assert asking.get("/v1/sessions/s") == {"of": "the owner"}
        assert len(base.requests) == 1
        # An open by name has no session in its path, so each request starts at the base server.
        for _ in range(2):
            assert asking.post("/v1/sessions", {"name": "x"}) == {"of": "the owner"}
        assert len(base.requests) == 3


@pytest.mark.parametrize("address", ["http://10.0.0.1:1", "nonsense", "", "http://example.org", "file:///etc/passwd"])
def test_client_does_not_follow_an_owner_on_another_machine(address: str) -> None:
    with Player(lambda _: refusal(address)) as base, pytest.raises(RequestRefused) as caught:
        client(base).post("/v1/sessions/s/interrupt")
    assert caught.value.title == "NotOwner"


def test_client_follows_no_owner_named_by_a_remote_server() -> None:
    """A remote server could name any local socket, which would then get the user's token."""
    elsewhere = ServerAddress("http://example.org", is_secure=False, host="example.org", port=80, prefix="", token=None)
    here = ServerAddress("http://localhost:1", is_secure=False, host="localhost", port=1, prefix="", token=None)
    ids = {"address": "unix:/run/something.sock"}
    assert owner_of("NotOwner", ids, elsewhere) is None
    assert owner_of("Busy", ids, here) is None
    owner = owner_of("NotOwner", ids, here)
    assert owner is not None
    assert owner.socket == "/run/something.sock"


def test_silent_owner_is_named_with_how_to_end_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        gone = f"http://127.0.0.1:{taken.getsockname()[1]}"
    announce(gone)
    with Player(lambda _: refusal(gone)) as base, pytest.raises(RequestRefused, match="does not answer") as caught:
        client(base).post("/v1/sessions/s/interrupt")
    assert "kill 7" in caught.value.hint
    # The owner may have ended in that moment, so the client asks the base server again.
    assert len(base.requests) == 1 + len(clients.RETRY_SECONDS)


def test_client_returns_to_the_base_server_when_the_owner_goes() -> None:
    answers = iter([answer(202, {"turn": "t"})])
    gone: list[bool] = []

    def base_says(request: str) -> bytes:
        if not gone:
            return refusal(owner.url)
        return answer(202, {"turn": "t"}) if request.startswith("POST") else answer(200, {"outcome": "done"})

    with Player(base_says) as base:
        with Player(lambda _: next(answers)) as owner:
            announce(owner.url)
            asking = client(base)
            assert asking.post("/v1/sessions/s/turns", {"prompt": "hi"}, key="the-key") == {"turn": "t"}
        gone.append(True)
        assert asking.get("/v1/sessions/s/turns/t") == {"outcome": "done"}
    again = base.requests[1]
    assert again.startswith("POST /v1/sessions/s/turns ")
    assert "Idempotency-Key: the-key" in again


def test_silent_server_is_asked_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a stopped server: the kernel accepts the connection for it."""
    monkeypatch.setattr(clients, "LOOK_SECONDS_MAX", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(Silent, match="does not answer"):
            Client(lambda: named(url)).get("/v1/sessions")
        listener.settimeout(0.2)
        listener.accept()[0].close()
        with pytest.raises(TimeoutError):
            listener.accept()


def test_silent_server_at_a_socket_is_named_by_its_pid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(clients, "LOOK_SECONDS_MAX", 0.2)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        with pytest.raises(Silent) as caught:
            Client(lambda: named(f"unix:{tmp_path}/s")).get("/v1/sessions")
    assert caught.value.hint == f"the server (pid {os.getpid()}) may be stopped or busy; see its log"
