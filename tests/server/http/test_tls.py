"""TLS of the port: the certificate, its renewal without a restart, and the handshakes of strangers."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import os
import resource
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from starlette.responses import PlainTextResponse
from tests.cluster.certificates import certificate
from tests.process.helpers import wait_until
from tests.server.kit import AUTHORIZATION, TOKEN, Served, shared, talk
from tests.server.ops.test_server_hand_over import echo, output, say, serving
from tests.server.ops.test_upgrade import is_new, started, version
from tests.thorough import thorough

from banksman import sockets
from banksman.errors import UsageError
from banksman.server import http_service
from banksman.server.http import accept_loop
from banksman.server.http.tls import ServerCertificate
from banksman.server.server_settings import ServerSettings
from banksman.server.streams.follower import EventStreams, StreamCounts
from banksman.server.streams.shared_pages import SharedPages
from banksman.testing.nats_servers import Tls

FDS = 160


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tls: Tls) -> Iterator[Served]:
    with shared(tmp_path_factory.mktemp("server"), tls_cert=tls.cert, tls_key=tls.key) as served:
        yield served


def shown(port: int) -> bytes:
    """Return the certificate that a new connection gets."""
    return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate(("127.0.0.1", port), timeout=60)).strip()


def text_of(cert: str) -> bytes:
    return ssl.PEM_cert_to_DER_cert(Path(cert).read_text(encoding="ascii")).strip()


def replace(tls: Tls, new: Tls) -> None:
    """Replace the certificate as a renewal does: each file by a rename."""
    for old, fresh in ((tls.cert, new.cert), (tls.key, new.key)):
        shutil.copy(fresh, f"{old}.new")
        os.replace(f"{old}.new", old)


# -- the certificate ---------------------------------------------------------------------------------------------------
def test_certificate_is_loaded_again_when_both_files_have_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "banksman.serve")
    tls, new = certificate(tmp_path), certificate(tmp_path, "new")
    own = ServerCertificate(tls.cert, tls.key)
    first = own.context()
    assert own.context() is first
    shutil.copy(new.cert, tls.cert)
    assert own.context() is own.context() is first
    (warning,) = caplog.messages
    assert warning.startswith("certificate not reloaded, the previous one stays: cannot use")
    assert warning.endswith("the key does not belong to the certificate")
    shutil.copy(new.key, tls.key)
    assert own.context() is not first
    assert caplog.messages[1:] == [f"certificate reloaded (path={tls.cert})"]


def test_certificate_stays_while_its_files_are_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tls = certificate(tmp_path)
    own = ServerCertificate(tls.cert, tls.key)
    first = own.context()
    Path(tls.cert).unlink()
    assert own.context() is own.context() is first
    assert caplog.messages == [
        f"certificate not reloaded, the previous one stays: cannot read {tls.cert}: No such file or directory"
    ]


def test_certificate_is_loaded_again_when_only_the_time_of_change_differs(tmp_path: Path) -> None:
    # As after a chown or a chmod of files that could not be used before.
    tls, new = certificate(tmp_path), certificate(tmp_path, "new")
    own = ServerCertificate(tls.cert, tls.key)
    first = own.context()
    shutil.copy(new.cert, tls.cert)
    key, right = Path(tls.key), Path(new.key).read_bytes()
    key.write_bytes(b"x" * len(right))
    assert own.context() is first
    before = key.stat()
    key.write_bytes(right)
    os.utime(key, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert own.context() is not first


def test_certificate_is_tried_again_after_it_could_not_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tls, new = certificate(tmp_path), certificate(tmp_path, "new")
    own = ServerCertificate(tls.cert, tls.key)
    first = own.context()
    replace(tls, new)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    # No file can be opened. The files do not change after that.
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        found = [own.context(), own.context()]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert found == [first, first]
    assert [message.rpartition(": ")[2] for message in caplog.messages] == ["Too many open files"]
    assert own.context() is not first


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("missing", "cannot read {key}: No such file or directory"),
        ("mismatch", "the key does not belong to the certificate"),
        ("text", "they are no PEM files of a certificate and a key"),
        ("encrypted", "the key is encrypted"),
    ],
)
def test_certificate_that_cannot_be_used_is_a_usage_error(tmp_path: Path, fault: str, reason: str) -> None:
    tls = certificate(tmp_path)
    key = tmp_path / "other.key"
    match fault:
        case "mismatch":
            shutil.copy(certificate(tmp_path, "new").key, key)
        case "text":
            key.write_text("no key", encoding="ascii")
        case "encrypted":
            words = ["openssl", "pkey", "-in", tls.key, "-aes256", "-passout", "pass:secret", "-out", str(key)]
            subprocess.run(words, check=True, capture_output=True)
        case _:
            assert fault == "missing"
    with pytest.raises(UsageError) as caught:
        ServerCertificate(tls.cert, str(key))
    assert caught.value.args[0].endswith(reason.format(key=key))


@pytest.mark.parametrize("flags", [("--tls-cert", "{cert}"), ("--tls-cert", "{cert}", "--tls-key", "/nowhere")])
def test_server_does_not_start_with_half_a_certificate(tmp_path: Path, tls: Tls, flags: tuple[str, ...]) -> None:
    words = [flag.format(cert=tls.cert) for flag in flags]
    argv = [sys.executable, "-m", "banksman", "serve", "--port", "0", "--store", "memory:", *words]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert "tls_key" in done.stderr or "cannot read /nowhere" in done.stderr


# -- the server --------------------------------------------------------------------------------------------------------
def test_server_with_a_certificate_speaks_https_only(served: Served) -> None:
    assert served.printed.startswith(f"Banksman is at https://127.0.0.1:{served.port}/#code=")
    settings = served.get("/v1/server")["settings"]
    assert settings["tls_cert"] == served.settings["tls_cert"]
    assert "tls_key" not in settings
    assert talk(served.port, b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n") == b""


def test_user_socket_stays_plain_beside_a_port_with_tls(served: Served) -> None:
    path = json.loads((served.folder / "state" / "banksman" / "server.json").read_text(encoding="utf-8"))["socket"]
    connection = http.client.HTTPConnection("localhost", timeout=60)
    connection.sock = sockets.connect(path, 60)
    with closing(connection):
        connection.request("GET", "/v1/server")
        assert connection.getresponse().status == 200


def test_page_origin_must_be_https_at_a_port_with_tls(served: Served) -> None:
    for scheme, status in (("https", 200), ("http", 403)):
        origin = {"Origin": f"{scheme}://127.0.0.1:{served.port}"}
        assert served.request("GET", "/v1/server", headers=origin).status == status


def test_prompt_of_a_megabyte_is_the_same_after_tls(served: Served) -> None:
    session = served.open()
    prompt = "".join(f"{number}," for number in range(200_000))
    served.outcome(session, served.ask(session, prompt))
    assert prompt in {event["body"].get("prompt") for event in served.get(f"/v1/sessions/{session}/events")["events"]}


def test_new_certificate_is_for_new_connections_only(tmp_path: Path) -> None:
    tls, new = certificate(tmp_path), certificate(tmp_path, "new")
    before = text_of(tls.cert)
    with Served(tmp_path / "server", tls_cert=tls.cert, tls_key=tls.key) as served, closing(served.connection()) as old:
        old.request("GET", "/v1/server", headers=AUTHORIZATION)
        old.getresponse().read()
        assert shown(served.port) == before
        replace(tls, new)
        assert shown(served.port) == text_of(new.cert) != before
        old.request("GET", "/v1/server", headers=AUTHORIZATION)
        assert old.getresponse().status == 200
        Path(tls.key).write_text("no key", encoding="ascii")
        assert shown(served.port) == text_of(new.cert)
        assert served.log.read_text(encoding="utf-8").count("certificate not reloaded") == 1


@thorough
def test_clients_that_never_shake_hands_do_not_keep_the_owner_out(tmp_path: Path, tls: Tls) -> None:
    server = Served(tmp_path / "server", fds_max=FDS, tls_cert=tls.cert, tls_key=tls.key)
    with server as served, ExitStack() as held:
        for _ in range(4 * FDS):
            held.enter_context(socket.create_connection(("127.0.0.1", served.port)))
        assert served.get("/v1/server")["pid"] == served.pid
        # The server ends although handshakes are open.
        assert served.stop() == 0
    assert "Traceback" not in served.log.read_text(encoding="utf-8")


async def test_answered_client_that_keeps_its_socket_does_not_delay_the_end(
    tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The client never answers the end of TLS, and only the limit of the shutdown ends its connection.
    monkeypatch.setattr(accept_loop, "TLS_CLOSE_SECONDS_MAX", 3600.0)
    monkeypatch.setattr(http_service, "CLOSE_SECONDS_MAX", 0.01)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    settings = ServerSettings(port=0, token=TOKEN)
    closing_ = asyncio.get_running_loop().create_future()
    streams = EventStreams(closing_, StreamCounts(), SharedPages(), 1.0, 1)
    certificate = ServerCertificate(tls.cert, tls.key)
    server = http_service.HttpServer(PlainTextResponse("alive"), [listener], settings, streams, certificate)
    server.start()

    def ask() -> ssl.SSLSocket:
        raw = socket.create_connection(listener.getsockname(), 60)
        peer = ssl.create_default_context(cafile=tls.cert).wrap_socket(raw, server_hostname="127.0.0.1")
        peer.sendall(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        said = b""
        while not said.endswith(b"alive"):
            said += peer.recv(1 << 16)
        return peer

    with closing(await asyncio.to_thread(ask)):
        async with asyncio.timeout(60):
            await server.close()


@thorough
def test_stalled_client_is_cut_off_by_tls_too(tmp_path: Path, tls: Tls) -> None:
    with Served(tmp_path / "server", tls_cert=tls.cert, tls_key=tls.key, stall_seconds=0.5) as served:
        session = served.open()
        for _ in range(8):
            served.outcome(session, served.ask(session, "x" * 1_000_000))
        context = ssl.create_default_context(cafile=tls.cert)
        with (
            socket.create_connection(("127.0.0.1", served.port), 60) as raw,
            context.wrap_socket(raw, server_hostname="127.0.0.1") as peer,
        ):
            head = f"GET /v1/sessions/{session}/events?after=0 HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\n"
            peer.sendall(f"{head}Accept: text/event-stream\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())

            def cut() -> bool:
                scraped = served.request("GET", "/metrics").body.decode()
                return "banksman_streams_cut_total 1" in scraped

            wait_until(cut, "the disconnect of the client that does not read")


@thorough
def test_upgrade_keeps_the_port_and_its_certificate(tmp_path: Path, tls: Tls) -> None:
    with serving(tmp_path / "server", tls_cert=tls.cert, tls_key=tls.key) as served:
        id, before = echo(served), started(served)
        new = version(tmp_path, 'from banksman.server.ops import upgrade; upgrade.__version__ = "99.0"')
        assert served.post("/v1/upgrade", {"command": new}) == {"version": "99.0"}
        wait_until(lambda: is_new(served, before), "the new version")
        assert shown(served.port) == text_of(tls.cert)
        say(served, id, "upgraded")
        # A version that could not load the certificate would end what it should continue.
        moved = Path(tls.key).rename(f"{tls.key}.away")
        try:
            answer = served.request("POST", "/v1/upgrade", {"command": new})
        finally:
            moved.rename(tls.key)
        assert (answer.status, "cannot read" in answer.json["detail"]) == (409, True)
        served.post(f"/v1/commands/{id}/stdin", {"end": True})
        assert output(served, id).endswith("heard upgraded\nend\n")


# -- the command line --------------------------------------------------------------------------------------------------
def ps(served: Served, tmp_path: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "XDG_STATE_HOME": str(tmp_path / "elsewhere"),
        "BANKSMAN_URL": served.url,
        "BANKSMAN_TOKEN": TOKEN,
        **variables,
    }
    argv = [sys.executable, "-m", "banksman", "ps", *words]
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=60)


def test_verbs_use_https_with_the_ca_of_the_user(served: Served, tls: Tls, tmp_path: Path) -> None:
    session = served.open()
    for done in (ps(served, tmp_path, "--cafile", tls.cert, "--json"), ps(served, tmp_path, BANKSMAN_CAFILE=tls.cert)):
        assert (done.returncode, session in done.stdout, done.stderr) == (0, True, "")


def test_verbs_refuse_an_unknown_certificate_and_an_unusable_ca(served: Served, tls: Tls, tmp_path: Path) -> None:
    unknown = ps(served, tmp_path)
    assert unknown.returncode == 3
    assert "its certificate is not trusted" in unknown.stderr
    assert "--cafile" in unknown.stderr
    missing = ps(served, tmp_path, "--cafile", "/nowhere.pem")
    assert missing.returncode == 2
    assert "cannot read the CA certificates in /nowhere.pem: No such file or directory" in missing.stderr
    empty = ps(served, tmp_path, "--cafile", tls.key)
    assert empty.returncode == 2
    assert "it has no PEM certificate" in empty.stderr
