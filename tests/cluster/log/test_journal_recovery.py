"""Recovery of the journal of a dead host."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.store.kit import Writer, data, everything, until

from banksman.cluster.jetstream import ID
from banksman.cluster.log import ClusterLog, message_codec
from banksman.cluster.log.journal import Journal
from banksman.cluster.log.journal_file import JournalRow
from banksman.cluster.nats import Nats
from banksman.cluster.store_address import parse
from banksman.testing.nats_servers import Servers


@pytest.mark.parametrize("is_stored", [True, False])
async def test_journal_of_a_host_that_died_before_it_deleted_a_stored_message_makes_no_report(
    is_stored: bool, nats_one: Servers, tmp_path: Path, prefix: str
) -> None:
    address = parse(nats_one.store(prefix, lease=60))
    owner = ClusterLog(address, tmp_path / "owner")
    await owner.ready()
    nats = Nats(address, name="test")
    await nats.connect()
    folder = tmp_path / "dead"
    try:
        writer = await Writer.claim(owner)
        for event in (b"one", b"two", b"three"):
            await writer.commit(event)
        (one, two, _), _ = await nats.read(f"{prefix}-events", 2, f"{prefix}.ev.s", 3)
        dead = Journal(folder, "h-dead")
        id = two.headers[ID] if is_stored else "s.1.1.another"
        await dead.put(JournalRow(two.subject, id, one.seq, two.headers[message_codec.HEADER], two.data))
        await dead.close()  # It keeps the file, because the message is still in it.
        heir = ClusterLog(address, folder)
        try:
            await heir.ready()
            async with asyncio.timeout(30):
                await until(lambda: not dead.path.exists())
            assert data(await everything(heir)) == [b"one", b"two", b"three"]
        finally:
            await heir.close()
        assert (folder / "reports").exists() != is_stored
    finally:
        await nats.close()
        await owner.close()
