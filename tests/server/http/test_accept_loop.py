"""Accept loop with a connection limit that keeps file descriptors for the work of the server."""

from __future__ import annotations

import http.client
import json
import socket
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from tests.server.kit import TOKEN, Served
from tests.thorough import thorough

from banksman import sockets
from banksman.server.http import accept_loop

pytestmark = thorough

FDS = 160
ROOM = FDS - min(accept_loop.FDS_KEPT_BACK, FDS // 2)


def test_accept_shares_are_split_between_port_and_socket() -> None:
    with socket.socket() as port, socket.socket(socket.AF_UNIX) as unix:
        assert accept_loop.shares([port, unix], 100) == [75, 25]
        assert accept_loop.shares([unix], 100) == accept_loop.shares([port], 100) == [100]


def test_accept_loop_keeps_room_for_owner_when_clients_lack_a_token(tmp_path: Path) -> None:
    """Another user of this machine holds more connections than the limit. Most of them were answered once."""
    with Served(tmp_path / "server", fds_max=FDS) as served, ExitStack() as held:
        peers = [held.enter_context(socket.create_connection(("127.0.0.1", served.port))) for _ in range(2 * FDS)]
        for peer in peers[::2]:
            peer.sendall(f"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\n\r\n".encode())
        assert served.get("/v1/server")["pid"] == served.pid
        # A connection that has shown a token stays, however many come after it.
        stream = held.enter_context(served.stream("/v1/events"))
        stream.until_live()
        peers += [held.enter_context(socket.create_connection(("127.0.0.1", served.port))) for _ in range(FDS)]
        assert served.get("/v1/server")["pid"] == served.pid
        session = served.open()
        assert any(message.data.get("session") == session for message in stream.messages())
        log = served.log.read_text(encoding="utf-8")
        assert log.count("connection limit reached") == 1


def test_accept_loop_serves_owner_socket_when_port_is_full(tmp_path: Path) -> None:
    with Served(tmp_path / "server", fds_max=FDS) as served, ExitStack() as held:
        path = json.loads((served.folder / "state" / "banksman" / "server.json").read_text())["socket"]
        for stream in [held.enter_context(served.stream("/v1/events")) for _ in range(ROOM - ROOM // 4)]:
            stream.until_live()
        # More connections than the limit. They have the token, so none of them is closed for another.
        lines = ("GET /v1/events HTTP/1.1", f"Host: 127.0.0.1:{served.port}", f"Authorization: Bearer {TOKEN}", "", "")
        for _ in range(ROOM):
            peer = held.enter_context(socket.create_connection(("127.0.0.1", served.port)))
            peer.sendall("\r\n".join(lines).encode())
        connection = http.client.HTTPConnection("localhost", timeout=60)
        connection.sock = sockets.connect(path, 60)
        with closing(connection):
            connection.request("GET", "/v1/server")
            assert connection.getresponse().status == 200


@pytest.mark.thorough
def test_accept_loop_at_fd_limit_makes_connections_wait_and_still_starts_commands(tmp_path: Path) -> None:
    with Served(tmp_path / "server", fds_max=FDS) as served, ExitStack() as open_ones:
        session = served.open()
        room = ROOM - ROOM // 4  # The rest belongs to the user's socket.
        followed = [open_ones.enter_context(served.stream("/v1/events")) for _ in range(room - 1)]
        for stream in followed:
            stream.until_live()
        # The last connection within the limit can use the whole server.
        assert served.outcome(session, served.ask(session, "hello"))["kind"] == "done"
        assert served.get(f"/v1/commands/{served.post('/v1/commands', {'argv': ['true']})['id']}?wait=60")["finished"]
        waiting = [open_ones.enter_context(socket.create_connection(("127.0.0.1", served.port))) for _ in range(50)]
        for peer in waiting:
            peer.sendall(
                f"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\nConnection: close\r\n\r\n".encode()
            )
        # When a connection is answered and closes, the next is accepted.
        for peer in waiting:
            peer.settimeout(60)
            assert peer.recv(65536).startswith(b"HTTP/1.1 200 ")
        log = served.log.read_text(encoding="utf-8")
        assert "connection limit reached" in log
        assert "Traceback" not in log
        # The log has a line for each time that the limit is reached, not one for each second of waiting.
        assert log.count("connection limit reached") <= 60
