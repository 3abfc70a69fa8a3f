"""Names of hosts: the name in the first heartbeat, and the hosts that a name selects."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import json
from tests.cluster.fleet import fleet
from tests.cluster.http.test_host_view_last_host import Seen, seen
from tests.cluster.lines import until
from tests.cluster.shared import shared, some_prefix

from banksman.cluster.http import host_view as fleets
from banksman.cluster.interfaces import HostReport
from banksman.cluster.jetstream import StreamMessage
from banksman.cluster.log.host_leases import Heartbeat
from banksman.cluster.nats import Nats
from banksman.cluster.store_address import parse
from banksman.server.problems import Problem
from banksman.store.log_values import KnownSession, Owner
from banksman.testing.nats_servers import Servers


@pytest.fixture(scope="session")
def nats_one() -> Iterator[Servers]:
    yield from shared(1)


def known_at(id: str) -> KnownSession:
    owner = Owner(1, f"{id}@machine", is_here=False, is_alive=True)
    return KnownSession("s", None, "claude", 1, 1, 1, owner, 0.0, 0.0)


class Renamed(Seen):
    """Hosts of which the second changes its name."""

    def rename(self, name: str) -> None:
        self._hosts[1] = self._hosts[1]._replace(name=name)

    def leave(self) -> None:
        del self._hosts[1]


def test_host_name_follows_its_latest_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "NAMES_SECONDS", 0.0)
    hosts = Renamed(HostReport("ours"), HostReport("machine"))
    found = fleets.HostView(hosts, lambda: HostReport("ours"))
    assert found.name_of(known_at("h-1")) == "machine"
    hosts.rename("blue")
    assert found.name_of(known_at("h-1")) == "blue"
    # The view keeps the last name: it shows the sessions with that host until another host owns them.
    hosts.leave()
    assert found.name_of(known_at("h-1")) == "blue"
    assert found.name_of(known_at("h-0")) == "ours"


def test_host_name_selects_hosts_that_take_sessions() -> None:
    verb, front = HostReport("machine"), HostReport("machine", (fleets.FRONT,))
    host, other = HostReport("machine", room=8), HostReport("machine", room=2)

    def ids(*cards: HostReport, name: str = "machine") -> list[str]:
        return [one.id for one in seen(*cards).find(name)]

    assert ids(verb, host) == ["h-1"]
    assert ids(verb, front, host) == ["h-2"]
    assert ids(verb, front) == ["h-1"]
    assert ids(verb) == []
    assert ids(verb, name="h-0") == ["h-0"]
    assert ids(verb, host, other) == ["h-1", "h-2"]


@pytest.mark.parametrize(
    ("need", "hint"),
    [
        (["agent=claude"], "start a host where that agent is installed"),
        (["gpu"], "start a host that has the labels (--label), or ask for fewer labels"),
        (
            ["agent=claude", "gpu"],
            "start a host where that agent is installed and that has the labels (--label), or ask for fewer labels",
        ),
    ],
)
def test_missing_agent_hint_does_not_mention_labels(need: list[str], hint: str) -> None:
    with pytest.raises(Problem) as caught:
        seen(HostReport("front"), HostReport("host", room=1)).check_satisfiable(need)
    assert caught.value.hint == hint


async def test_host_first_heartbeat_carries_its_name(nats_one: Servers, tmp_path: Path) -> None:
    prefix = some_prefix()
    names: list[str] = []

    def hear(message: StreamMessage) -> None:
        if message.data:
            names.append(json.decode(message.data, type=Heartbeat).card.name)

    with fleet(tmp_path, nats_one, prefix) as many:
        nats = Nats(parse(many.store), name="ear")
        await nats.connect()
        try:
            await nats.ring(f"{prefix}.live.host.*", hear)
            await asyncio.to_thread(many.host, "blue")
            await until(lambda: names, "it was heard of")
            assert set(names) == {"blue"}
        finally:
            await nats.close()
