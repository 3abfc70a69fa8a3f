"""Conformance of the NATS log, on one server and on three, to the contract of every engine."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.thorough import IS_THOROUGH, thorough

from banksman.cluster import nats
from banksman.cluster.log import ClusterLog, session_directory, session_record
from banksman.cluster.nats import Nats
from banksman.cluster.store_address import parse
from banksman.errors import Unanswered
from banksman.store.log import Log
from banksman.testing.nats_servers import Servers

# Before the import: otherwise its asserts fail without their values.
pytest.register_assert_rewrite("tests.store.conformance")

from tests.store.conformance import LogConformance, SharedLogConformance  # noqa: E402

_numbers = itertools.count()


def fresh_prefix() -> str:
    return f"c{os.getpid()}-{next(_numbers)}"


class _OnServers:
    servers: Servers
    folder: Path
    prefixes: list[str]

    @pytest.fixture(autouse=True)
    def _leaves_no_stream(self) -> Iterator[None]:
        """Delete the streams of each test.

        Each stream is a Raft group with heartbeats, on three nodes: thousands of them keep the machine busy.
        """
        type(self).prefixes = []
        yield
        asyncio.run(self._delete_streams())

    async def _delete_streams(self) -> None:
        nats = Nats(parse(self.servers.store("p")), name="test")
        await nats.connect()
        try:
            for prefix in dict.fromkeys(self.prefixes):
                for kind in ("events", "records", "hosts", "work", "blobs"):
                    with suppress(Unanswered):  # Then the stream stays, and costs only time.
                        await nats.api(f"STREAM.DELETE.{prefix}-{kind}", {})
        finally:
            await nats.close()

    @pytest.fixture(autouse=True)
    def _believes_a_leader(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Expect every server to answer, however busy the machine is.

        No test here kills a server, so no server lags. A leader of three that stalls for a moment may lose its lead and
        the request. So the log asks again.
        """
        monkeypatch.setattr(session_directory, "BEHIND_SECONDS_MAX", 0.2)
        monkeypatch.setattr(nats, "ANSWER_SECONDS_MAX", 5.0)
        monkeypatch.setattr(session_record, "PATIENCE_SECONDS", 120.0)

    async def opened_at(self, prefix: str, *, retained_bytes: int | None = None) -> ClusterLog:
        # Long: a busy machine must not cost a host its lease, because these tests do not test the lease.
        self.prefixes.append(prefix)
        address = parse(self.servers.store(prefix, lease=60))
        log = ClusterLog(address, self.folder, bytes_max=retained_bytes)
        await log.ready()
        return log


class _Log(_OnServers, LogConformance):
    # Each example makes new streams. `make prove` runs all of them.
    examples = LogConformance.examples if IS_THOROUGH else 6

    async def open_log(self, *, retained_bytes: int | None = None) -> Log:
        return await self.opened_at(fresh_prefix(), retained_bytes=retained_bytes)


class _Shared(_OnServers, SharedLogConformance):
    async def open_pair(self) -> tuple[Log, Log]:
        prefix = fresh_prefix()
        return await self.opened_at(prefix), await self.opened_at(prefix)


@thorough
class TestOnOneServer(_Log):
    @pytest.fixture(autouse=True)
    def _servers(self, nats_one: Servers, tmp_path: Path) -> None:
        type(self).servers, type(self).folder = nats_one, tmp_path


class TestSharedOnOneServer(_Shared):
    @pytest.fixture(autouse=True)
    def _servers(self, nats_one: Servers, tmp_path: Path) -> None:
        type(self).servers, type(self).folder = nats_one, tmp_path


@thorough
class TestOnThreeServers(_Log):
    @pytest.fixture(autouse=True)
    def _servers(self, nats_three: Servers, tmp_path: Path) -> None:
        type(self).servers, type(self).folder = nats_three, tmp_path


@thorough
class TestSharedOnThreeServers(_Shared):
    @pytest.fixture(autouse=True)
    def _servers(self, nats_three: Servers, tmp_path: Path) -> None:
        type(self).servers, type(self).folder = nats_three, tmp_path
