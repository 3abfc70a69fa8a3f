"""How many are let in: as many as there is room for, with enough kept back for what the server is for."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.serve.kit import Served

from banksman.serve.entrance import accepting

FDS = 160


@pytest.mark.thorough
def test_out_of_fds_the_rest_waits_and_what_is_started_still_starts(tmp_path: Path) -> None:
    with Served(tmp_path / "server", fds_max=FDS) as served, ExitStack() as open_ones:
        session = served.open()
        room = FDS - min(accepting.FDS_KEPT_BACK, FDS // 2)
        followed = [open_ones.enter_context(served.stream("/v1/events")) for _ in range(room - 1)]
        for stream in followed:
            stream.until_live()
        # The last one that there is room for: it can do whatever the server can.
        assert served.outcome(session, served.ask(session, "hello"))["kind"] == "done"
        assert served.get(f"/v1/commands/{served.post('/v1/commands', {'argv': ['true']})['id']}?wait=60")["finished"]
        waiting = [open_ones.enter_context(socket.create_connection(("127.0.0.1", served.port))) for _ in range(50)]
        for peer in waiting:
            peer.sendall(
                f"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\nConnection: close\r\n\r\n".encode()
            )
        # As each is answered and goes, the next is let in.
        for peer in waiting:
            peer.settimeout(60)
            assert peer.recv(65536).startswith(b"HTTP/1.1 200 ")
        log = served.log.read_text(encoding="utf-8")
        assert "there is no room for more" in log
        assert "Traceback" not in log
        # What it said about it is a line for each time, and not one for each who waits a second.
        assert log.count("there is no room for more") <= 60
