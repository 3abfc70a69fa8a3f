"""The last host drains: the answer about its sessions, the host that takes them next, and the list of hosts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.cluster.fleet import Fleet, fleet, until
from tests.cluster.shared import shared, some_prefix

from banksman import Host
from banksman.cluster.http import host_view as fleets
from banksman.cluster.interfaces import HostReport, HostSeen
from banksman.testing.nats_servers import Servers


@pytest.fixture(scope="session")
def nats_one() -> Iterator[Servers]:
    yield from shared(1)


@pytest.fixture
def many(tmp_path: Path, nats_one: Servers) -> Iterator[Fleet]:
    with fleet(tmp_path, nats_one, some_prefix()) as found:
        yield found


# -- hosts that can take them ------------------------------------------------------------------------------------------
class Seen:
    """Hosts as a view knows them. The first is this process."""

    lease_seconds = 2.0
    is_held = True

    def __init__(self, *cards: HostReport) -> None:
        self._hosts = [
            HostSeen(f"h-{number}", pid=1, version="", since=0.0, seen=time.monotonic(), **card._asdict())
            for number, card in enumerate(cards)
        ]

    @property
    def id(self) -> str:
        return "h-0"

    def all(self) -> list[HostSeen]:
        return self._hosts

    def announce(self, card: HostReport) -> None:
        raise NotImplementedError

    def on_gone(self, callback: Callable[[str], None]) -> None:
        raise NotImplementedError

    def on_lost(self, callback: Callable[[], None]) -> None:
        raise NotImplementedError


def seen(*cards: HostReport, now: HostReport | None = None) -> fleets.HostView:
    return fleets.HostView(Seen(*cards), lambda: now or cards[0])


def test_takers_match_each_session_to_a_host_with_its_labels() -> None:
    found = seen(
        HostReport("leaves", room=8, used=4),
        HostReport("plain", room=2, used=0),
        HostReport("strong", ("gpu",), room=1, used=0),
        HostReport("full", ("gpu", "tpu"), room=1, used=1),
        HostReport("goes", ("gpu", "tpu"), room=9, is_draining=True),
        HostReport("front", (fleets.FRONT,)),
    )
    assert found.takers([(), ("gpu",), ()], but="h-0") == ["plain", "strong", "plain"]
    assert found.takers([("tpu",), ("gpu",), ("gpu",)], but="h-0").count(None) == 2
    assert found.takers([(), (), (), ()], but="h-0").count(None) == 1
    assert found.takers([], but="h-0") == []


def test_host_view_shows_own_state_instead_of_its_last_report() -> None:
    """A host hears its own report too, and a moment later."""
    heard = HostReport("a-machine")
    found = seen(
        heard, HostReport("other", room=1, used=1), now=HostReport("both", ("gpu",), ("claude",), room=4, used=1)
    )
    assert found.has_room()
    assert found.can_take(["gpu", "agent=claude"])
    assert [(host.name, host.room, host.used) for host in found.all()] == [("both", 4, 1), ("other", 1, 1)]


# -- processes ---------------------------------------------------------------------------------------------------------
@pytest.mark.thorough
def test_queue_left_by_the_last_host_is_listed_and_served_by_the_next(many: Fleet) -> None:
    last = many.host("last")
    front = many.front()
    session = front.open({"prompt long": ["stream 20 0.02"]}, name="left")
    running, waiting = front.ask(session, "long"), front.ask(session, "waits")
    until(lambda: front.get(f"/v1/sessions/{session}/turns/{running}")["state"] == "running", "it runs")
    told = front.post("/v1/hosts/last/drain", {"timeout": 30}, status=202)
    assert told == {"draining": True, "sessions": 1, "hosts": [], "waiting": 1}
    assert front.outcome(session, running)["kind"] == "done"
    assert last.process.wait(60) == 0
    # A list has little time to read logs. It shows the queue in a later listing.
    until(lambda: front.get("/v1/sessions")["sessions"][0]["state"] == "queued", "that somebody waits is seen")
    for shown in (front.get("/v1/sessions")["sessions"][0], front.get(f"/v1/sessions/{session}")):
        assert (shown["state"], shown["host"]) == ("queued", None)
        assert [each["turn"] for each in shown["queue"]] == [waiting]
    assert front.get("/v1/hosts")["hosts"][0]["front"]
    many.host("next")
    assert front.outcome(session, waiting)["text"] == "waits"


@pytest.mark.thorough
def test_reading_program_is_not_listed_as_a_host(many: Fleet) -> None:
    front = many.front()

    async def look() -> list[str]:
        async with Host(many.store) as host:
            await host.ready()
            assert host.cluster is not None
            assert len(host.cluster.hosts.all()) == 2
            return [each["name"] for each in front.get("/v1/hosts")["hosts"]]

    assert asyncio.run(look()) == ["front"]
