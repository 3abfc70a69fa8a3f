"""Run the shell client of docs/server.md as it is printed, while the server is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server.kit import TOKEN, Served

PAGE = (Path(__file__).parents[2] / "docs/server.md").read_text(encoding="utf-8")
(CLIENT,) = re.findall(r"```sh\n(url=.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path / "server") as served:
        yield served


@pytest.mark.thorough
def test_shell_client_prints_every_event_once_when_the_server_is_killed(served: Served, tmp_path: Path) -> None:
    state = tmp_path / "home" / "banksman"
    state.mkdir(parents=True)
    (state / "token").write_text(TOKEN, encoding="utf-8")
    script = CLIENT.replace("http://127.0.0.1:4380", served.url)
    assert script != CLIENT
    session = served.open()
    # In a new session, so that the shell, curl and the rest end together.
    client = subprocess.Popen(
        ["sh", "-c", script, "sh", session, str(tmp_path / "place")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "home")},
        start_new_session=True,
    )
    try:
        assert client.stdout is not None
        seen: list[int] = []

        def read_to_the_end_of(turn: str) -> None:
            assert client.stdout is not None
            for line in client.stdout:
                event = json.loads(line)
                seen.append(event["seq"])
                if event["kind"] == "turn.ended" and event["turn"] == turn:
                    return

        for number in range(3):
            turn = served.ask(session, f"hello {number}")
            read_to_the_end_of(turn)
            served.kill()
            served.start()
        read_to_the_end_of(served.ask(session, "and once more"))
        assert seen == list(range(1, len(seen) + 1))
    finally:
        os.killpg(client.pid, signal.SIGKILL)
        client.wait()
        if client.stdout is not None:
            client.stdout.close()


def test_shell_client_is_at_most_22_lines() -> None:
    assert len([line for line in CLIENT.splitlines() if line.strip()]) <= 22
