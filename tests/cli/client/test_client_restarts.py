"""Clients across deaths and restarts of a real server repeat and omit nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from tests.server.kit import Served
from tests.thorough import thorough

pytestmark = thorough

BANKSMAN = [sys.executable, "-m", "banksman"]
SECONDS_MAX = 60.0


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A server with a generated token, at a new address after each start: a client has to look for it."""
    with Moving(tmp_path / "served", token=None) as served:
        yield served


class Moving(Served):
    def start(self) -> None:
        self.settings["port"] = 0
        super().start()


def run(served: Served, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*BANKSMAN, *words],
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
        env=environment(served),
    )


def environment(served: Served) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BANKSMAN_")}
    return {**kept, "XDG_STATE_HOME": str(served.folder / "state")}


def begin(served: Served, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*BANKSMAN, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(served),
    )


def read_until(stream: IO[str] | None, kind: str, turn: str | None = None) -> list[Any]:
    assert stream is not None
    events: list[Any] = []
    for line in stream:
        events.append(json.loads(line))
        if events[-1]["kind"] == kind and turn in (None, events[-1]["turn"]):
            return events
    raise AssertionError(f"{kind} never came")


@pytest.mark.thorough
@pytest.mark.parametrize("ends", ["stop", "kill"])
def test_cli_log_follow_joins_exactly_across_server_restarts(served: Served, ends: str) -> None:
    from banksman.testing import fake_agent

    command = fake_agent.command(memory=served.folder / "memory")
    assert run(served, "open", "claude", "--name", "long", "--", *command).returncode == 0
    with begin(served, "log", "long", "--follow", "--json") as following:
        try:
            assert following.stdout is not None
            seen: list[Any] = []
            for number in range(3):
                asked = run(served, "ask", "long", f"@@stream 20 0\n@@say {number}", "--no-wait")
                assert asked.returncode == 0, asked.stderr
                seen += read_until(following.stdout, "turn.ended", asked.stdout.strip())
                getattr(served, ends)()
                served.start()
            whole = [json.loads(line) for line in run(served, "log", "long", "--json").stdout.splitlines()]
            seen += [json.loads(following.stdout.readline()) for _ in range(len(whole) - len(seen))]
            following.send_signal(signal.SIGINT)
            rest, told = following.communicate(timeout=SECONDS_MAX)
            assert (following.returncode, rest, told) == (130, "", "")
        finally:
            following.kill()
    assert [event["seq"] for event in seen] == list(range(1, len(seen) + 1))
    assert seen == whole


@pytest.mark.thorough
def test_cli_ask_learns_the_outcome_when_its_server_is_restarted(served: Served) -> None:
    from banksman.testing import fake_agent

    run(served, "open", "claude", "--name", "dies", "--", *fake_agent.command())
    with begin(served, "ask", "dies", "@@say begun\n@@hang") as asking:
        try:
            assert asking.stdout is not None
            assert asking.stdout.readline() == "begun\n"
            served.kill()
            served.start()
            out, told = asking.communicate(timeout=SECONDS_MAX)
            assert (asking.returncode, out) == (1, "")
            assert told.splitlines()[-1].startswith("unknown")
        finally:
            asking.kill()


# The verb with less patience.
IMPATIENT = """
import sys
from banksman.cli import main
from banksman.cli.client import event_stream as stream
stream.GONE_SECONDS_MAX = 1.0
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["text", "json"])
def test_cli_ask_exits_3_when_its_server_stays_away(served: Served, form: str) -> None:
    from banksman.testing import fake_agent

    run(served, "open", "claude", "--name", "left", "--", *fake_agent.command())
    words = ["ask", "left", "@@say begun\n@@hang", "--format", form]
    with subprocess.Popen(
        [sys.executable, "-c", IMPATIENT, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(served),
    ) as asking:
        try:
            assert asking.stdout is not None
            assert any("begun" in line for line in asking.stdout)
            served.kill()
            _, told = asking.communicate(timeout=SECONDS_MAX)
        finally:
            asking.kill()
    assert asking.returncode == 3
    assert told.count("banksman: connection lost, trying again") == 1
    served.start()


def test_cli_token_and_discovery_file_are_private_and_found(served: Served) -> None:
    state = served.folder / "state" / "banksman"
    token = (state / "token").read_text().strip()
    for name in ("token", "server.json"):
        assert (state / name).stat().st_mode & 0o777 == 0o600
    assert run(served, "ps", "--url", served.url).returncode == 0
    (state / "token").write_text("x" * len(token))
    refused = run(served, "ps", "--url", served.url)
    assert refused.returncode == 3
    assert "xxx" not in refused.stderr + refused.stdout
    # The server's own user needs no token: the client uses the socket.
    assert run(served, "ps").returncode == 0
    served.stop()
    gone = run(served, "ps", "--json", "--url", served.url)
    assert gone.returncode == 3
    assert "start one with banksman serve" in gone.stderr
    assert json.loads(gone.stdout)["error"] == "NoServer"


def test_cli_drain_lets_turns_finish_and_ends_the_server(served: Served) -> None:
    from banksman.testing import fake_agent

    run(served, "open", "claude", "--name", "last", "--", *fake_agent.command())
    with begin(served, "ask", "last", '@@ask Bash {"command": "ls"}\n@@say finished') as asking:
        try:
            assert asking.stderr is not None
            while "banksman answer" not in asking.stderr.readline():
                pass
            drained = run(served, "drain", "--timeout", "60")
            assert (drained.returncode, "accepts nothing new" in drained.stdout) == (0, True)
            refused = run(served, "ask", "last", "more")
            assert refused.returncode == 4
            assert run(served, "answer", "last", "allow").returncode == 0
            assert served.process is not None
            assert served.process.wait(SECONDS_MAX) == 0
            out, _ = asking.communicate(timeout=SECONDS_MAX)
            assert "finished" in out
        finally:
            asking.kill()
