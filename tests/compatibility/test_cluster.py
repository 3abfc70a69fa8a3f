"""Open a cluster that an older version wrote, with a host that was killed: see write.py."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cluster.leases import end_lease
from tests.cluster.lines import until
from tests.cluster.members import here
from tests.compatibility.write import LARGE_BYTES, LEASE_SECONDS, PREFIX
from tests.compatibility.written import Written, doctor, ends, events_of, outcome_of, recalled, rows_of

from banksman import Host, NotFound
from banksman.cluster import nats
from banksman.cluster.host import session_offers
from banksman.testing import checks
from banksman.testing.nats_servers import Servers


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Written:
    # The single node always answers, but late on a busy machine.
    monkeypatch.setattr(nats, "ANSWER_SECONDS_MAX", 30.0)
    return Written("cluster", tmp_path, monkeypatch)


@pytest.fixture
def servers(written: Written) -> Iterator[Servers]:
    """Start a node with the files of the older version's node, and end the lease of the killed host."""
    # The node has a token, because `banksman doctor` reports a node without authentication.
    with Servers(token="fixture") as servers:
        servers.kill(0)
        shutil.rmtree(servers.folder / "n0")
        shutil.copytree(written.folder / "n0", servers.folder / "n0")
        servers.restart(0)
        servers.wait_ready()
        (killed,) = written.rows("killed")
        # The servers would end the lease by their clock. The test ends it here, so that it does not depend on a clock.
        asyncio.run(end_lease(store(servers), killed["host"]))
        yield servers


def store(servers: Servers, journals: Path | None = None) -> str:
    """Return the address of the store. Without a folder of journals, the host acts as a host on another machine."""
    journal = {} if journals is None else {"journal": journals}
    return servers.store(PREFIX, lease=LEASE_SECONDS, **journal)


async def test_opened_cluster_has_every_session_event_and_outcome(written: Written, servers: Servers) -> None:
    async with Host(store(servers)) as host:
        await host.ready()
        found = [(session.id, session.name, session.agent) for session in host.sessions()]
        assert found == [(row["session"], row["name"], row["agent"]) for row in written.rows("session")]
        for gone in ("s-gone", "gone"):
            with pytest.raises(NotFound):
                host.session(gone)
        for session in host.sessions():
            assert rows_of(await events_of(session)) == written.events(session.id)
        assert any(row.get("bytes", 0) > LARGE_BYTES for row in written.events("s-large"))
        for row in written.rows("outcome"):
            turn = await host.session(row["session"]).turn(row["turn"])
            assert await outcome_of(turn, row["session"]) == row


async def test_closed_session_goes_on_and_retried_prompts_have_their_outcomes(
    written: Written, servers: Servers
) -> None:
    async with Host(store(servers)) as host:
        await host.ready()
        session = host.session("large")
        for key in ("key-hello", "key-large", "key-failed", "key-interrupted"):
            again = await session.ask("never said", key=key)
            assert await outcome_of(again, "s-large") == written.outcome("s-large", key)
        assert session.settings == (("model", "second-model"),)
        assert await recalled(session) == ["hello", "much", "fail", "stop me"]


async def test_new_host_takes_over_from_the_killed_one(
    written: Written, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No host was alive to notice the death. A new host looks for the sessions of the dead host, and here it looks
    # immediately.
    monkeypatch.setattr(session_offers, "LOOK_LEASES", 0.1 / LEASE_SECONDS)
    url = store(servers, written.folder / "journals")
    (carried,) = (row["session"] for row in written.rows("session") if row["name"] == "carried")
    opened, queued = (written.turn(carried, key) for key in ("key-open", "key-queued"))
    async with Host(url) as reader:
        await reader.ready()
        # The event that only the journal of the killed host had follows the events of the cluster.
        await until(lambda: reader.session(carried).committed > len(written.events(carried)))
        rows = rows_of(await events_of(reader.session(carried)))
        assert rows[:-1] == written.events(carried)
        assert (rows[-1]["turn"], rows[-1]["kind"]) == (opened, "update")
        assert "into the journal" in rows[-1]["data"]
        async with here(url, "new", room=4) as new:
            await until(lambda: new.member.used == 1)
            session = new.host.session(carried)
            assert (await (await session.turn(queued)).outcome()).text == "third"
            again = await session.ask("never said", key="key-open")
            assert (again.id, (await again.outcome()).kind.value) == (opened, "unknown")
            again = await session.ask("never said", key="key-first")
            assert await outcome_of(again, carried) == written.outcome(carried, "key-first")
            # The agent in this home knows the conversation from the copy in the cluster.
            assert await recalled(session) == ["first", "third"]
            events = await events_of(session)
    assert rows_of(events)[: len(rows)] == rows
    assert ends(events, opened) == ["unknown"]
    assert ends(events, queued) == ["done"]
    (restored,) = (event.body for event in events if event.kind == "session.context_restored")
    assert restored["missing"] == 1
    checks.log(events)
    checks.turns(events)


def test_doctor_finds_the_cluster_whole(written: Written, servers: Servers, capsys: pytest.CaptureFixture[str]) -> None:
    found = doctor(capsys, store(servers), "--monitor", servers.monitors()[0])
    # `doctor` gives a note, because the cluster has only one node.
    assert "wrong" not in {verdict for verdict, _ in found}, found
    assert ("ok", f"{len(written.rows('session'))} sessions, intact") in found, found
