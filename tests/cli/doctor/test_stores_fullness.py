"""`banksman doctor --store nats://…` reports how full the servers are, and the versions of the packages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib import metadata

import pytest

from banksman.cli.doctor import DoctorOptions, Finding, FindingVerdict, machine, stores
from banksman.cluster.nats import Nats
from banksman.cluster.store_address import parse
from banksman.testing.nats_servers import Servers

MIB = 1 << 20
# A client sees the limit of its account, if the account has one.
ACCOUNTS = """
accounts { BANKSMAN { jetstream: { max_file: 2MB }, users: [ { user: "banksman", password: "a-password" } ] } }
"""


@pytest.fixture
def small() -> Iterator[Servers]:
    """A separate node: its configuration sets the limit of its store."""
    with Servers(1, file_bytes_max=4 * MIB) as servers:
        yield servers


def seen(store: str, *monitors: str) -> list[Finding]:
    return [
        found
        for check in stores.cluster_checks(DoctorOptions(store, monitors))
        for found in check()
        if found.name == "storage"
    ]


def fill(store: str, mib: float) -> None:
    async def put() -> None:
        nats = Nats(parse(store), name="test")
        await nats.connect()
        try:
            await nats.api("STREAM.CREATE.filler", {"name": "filler", "subjects": ["filler"], "storage": "file"})
            for _ in range(round(mib * 8)):
                await nats.publish("filler", bytes(MIB // 8), timeout=60)
        finally:
            await nats.close()

    asyncio.run(put())


def test_doctor_reports_how_full_a_server_is(small: Servers) -> None:
    store, monitors = small.store("x"), small.monitors()
    account, server = seen(store, *monitors)
    assert (account.verdict, account.seen) == (
        FindingVerdict.OK,
        "this account stores 0 bytes, without a limit",
    )
    assert (server.verdict, server.seen) == (FindingVerdict.OK, "server n0 stores 0 bytes, 0% of 4.0 MiB")
    fill(store, 3.5)
    _, server = seen(store, *monitors)
    assert (server.verdict, server.seen) == (FindingVerdict.NOTE, "server n0 stores 3.5 MiB, 88% of 4.0 MiB")
    assert "max_file_store" in server.fix
    fill(store, 0.375)
    _, server = seen(store, *monitors)
    assert server.verdict is FindingVerdict.WRONG
    assert "a full server accepts nothing" in server.seen


def test_doctor_reports_account_limit_without_a_monitoring_port() -> None:
    with Servers(1, more=ACCOUNTS) as servers:
        store = servers.store("x").replace("nats://", "nats://banksman:a-password@")
        fill(store, 1.75)
        # A port where no server answers.
        (account,) = seen(store, "http://127.0.0.1:1")
        assert account.verdict is FindingVerdict.NOTE
        assert account.seen == "this account stores 1.8 MiB, 88% of 2.0 MiB"


def test_doctor_names_the_nats_package_with_its_version() -> None:
    (found,) = machine.packages()
    assert f"nats-py {metadata.version('nats-py')}" in found.seen
