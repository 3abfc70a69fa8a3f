"""`banksman host`, and the verbs on a shared store, in a shell."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.fleet import Fleet, fleet, until
from tests.cluster.shared import shared, some_prefix
from tests.thorough import one_in, thorough

from banksman.cli.commands import drain
from banksman.testing import fake_agent
from banksman.testing.nats_servers import Servers

pytestmark = thorough

SECONDS_MAX = 60.0


@pytest.fixture(scope="session")
def nats_one() -> Iterator[Servers]:
    yield from shared(1)


@pytest.fixture
def many(tmp_path: Path, nats_one: Servers) -> Iterator[Fleet]:
    with fleet(tmp_path, nats_one, some_prefix()) as found:
        yield found


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "banksman", *words],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )


def told(verb: str, *words: str) -> Any:
    done = run(verb, "--json", *words)
    assert done.returncode == 0, done
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("words", "said"),
    one_in(
        3,
        [
            ((), "a store that many machines share"),
            (("--store", "sqlite:x.db"), "a store that many machines share"),
            (("--store", "nats://"), "needs a server"),
            (("--store", "nats://127.0.0.1:1?lease=0"), "lease cannot be"),
            (("--store", "nats://127.0.0.1:1", "--label", "a b"), "a label cannot be 'a b'"),
            (("--store", "nats://127.0.0.1:1", "--name", "a b"), "invalid host name 'a b'"),
            (("--store", "nats://127.0.0.1:1", "--room", "-1"), "room cannot be -1"),
        ],
    ),
)
def test_cli_host_refuses_impossible_settings_before_it_begins(words: tuple[str, ...], said: str) -> None:
    done = run("host", *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_cli_serve_refuses_room_without_a_shared_store() -> None:
    done = run("serve", "--port", "0", "--room", "3")
    assert done.returncode == 2
    assert "several hosts share" in done.stderr


def test_cli_host_without_nats_package_says_what_to_install(tmp_path: Path) -> None:
    # A module that hides the real one, as if it were not installed.
    (tmp_path / "nats.py").write_text("raise ModuleNotFoundError(\"No module named 'nats'\", name='nats')\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = run("host", "--store", "nats://127.0.0.1:1", PYTHONPATH=path)
    assert done.returncode == 2
    assert "pip install 'banksman[cluster]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.thorough
def test_cli_verbs_reach_hosts_of_a_store_without_a_server(many: Fleet) -> None:
    many.host("build-1", "gpu", room=3)
    store = ("--store", many.store)
    (host, *fronts) = sorted(told("hosts", *store)["hosts"], key=lambda host: -host["room"])
    assert (host["name"], host["labels"], host["room"], host["used"]) == ("build-1", ["gpu"], 3, 0)
    assert fronts == [], "the verb itself is there for a moment, and is nobody's host"
    opened = told("open", "claude", "--name", "there", "--label", "gpu", *store, "--", *fake_agent.command())
    assert opened["host"] == "build-1"
    refused = run("open", "claude", "--label", "tpu", *store, "--", *fake_agent.command())
    assert (refused.returncode, "build-1 has no tpu" in refused.stderr) == (4, True), refused
    asked = run("ask", "there", "hello", *store)
    assert (asked.returncode, "hello" in asked.stdout) == (0, True), asked
    listed = run("ps", *store)
    assert "HOST" in listed.stdout.splitlines()[0]
    assert "build-1" in listed.stdout
    shown = run("hosts", *store)
    assert shown.stdout.splitlines()[0].split()[:5] == ["NAME", "HOST", "STATE", "USED", "ROOM"]


def test_server_settings_hide_password_of_the_store_address(many: Fleet) -> None:
    front = many.front()
    server = front.get("/v1/server")
    assert "?" not in server["store"]
    assert server["settings"]["store"] == server["store"]


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"sessions": 0, "hosts": [], "waiting": 0}, "it has no sessions"),
        ({"sessions": 2, "hosts": ["b", "c"], "waiting": 0}, "and exits: its sessions continue on other hosts (b, c)"),
        (
            {"sessions": 3, "hosts": ["b"], "waiting": 2},
            "and exits: 1 of its sessions continue on other hosts (b), 2 wait until another",
        ),
        ({"sessions": 2, "hosts": [], "waiting": 2}, "No other host can take its sessions now: 2 wait until another"),
    ],
)
def test_cli_drain_says_which_host_takes_the_sessions(told: dict[str, Any], said: str) -> None:
    assert said in drain.outlook("a", told)


@pytest.mark.thorough
def test_cli_drain_by_name_ends_a_host_and_a_second_signal_at_once(many: Fleet) -> None:
    first, second = many.host("first"), many.host("second")
    done = run("drain", "first", "--store", many.store)
    assert (done.returncode, done.stdout) == (0, "first accepts nothing new, and exits: it has no sessions\n"), done
    assert first.process.wait(SECONDS_MAX) == 0
    unknown = run("drain", "first", "--store", many.store)
    assert unknown.returncode == 4
    assert "there is no host 'first'" in unknown.stderr
    assert "see banksman hosts" in unknown.stderr
    # A host with a turn that would take minutes.
    store = ("--store", many.store)
    script = fake_agent.command({"prompt": ["stream 5000 0.05"]})
    session = told("open", "claude", "--name", "long", *store, "--", *script)["id"]
    turn = told("ask", "long", "go", "--no-wait", *store)["turn"]
    front = many.front()
    until(lambda: front.get(f"/v1/sessions/{session}/turns/{turn}")["state"] == "running", "it runs")
    gone = run("drain", "second", *store)
    assert "No other host can take its sessions now: 1 wait until another host can" in gone.stdout
    until(lambda: any(host["draining"] for host in front.get("/v1/hosts")["hosts"]), "it says that it drains")
    second.signal(signal.SIGTERM)
    assert second.process.wait(SECONDS_MAX) == 0
    assert front.outcome(session, turn)["kind"] == "interrupted"
