"""The log on NATS, on one server and on three: all that every engine must do."""

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
from banksman.cluster.log import ClusterLog, session_directory, session_ownership
from banksman.cluster.nats import Nats
from banksman.cluster.store_address import parse
from banksman.errors import Unanswered
from banksman.store.log import Log
from banksman.testing.nats_servers import Servers

# Before its import, or its asserts would fail without saying what they saw.
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
        """Each stream is a Raft group with heartbeats, on three nodes: thousands of them keep the machine busy."""
        type(self).prefixes = []
        yield
        asyncio.run(self._delete_streams())

    async def _delete_streams(self) -> None:
        nats = Nats(parse(self.servers.store("p")), name="test")
        await nats.connect()
        try:
            for prefix in dict.fromkeys(self.prefixes):
                for kind in ("events", "records", "hosts", "work", "blobs"):
                    with suppress(Unanswered):  # Then it stays, and costs only time.
                        await nats.api(f"STREAM.DELETE.{prefix}-{kind}", {})
        finally:
            await nats.close()

    @pytest.fixture(autouse=True)
    def _believes_a_leader(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """No server is killed here. So none is behind, and each answers, however busy the machine is. Of three, one
        that stands still for a moment may lose its lead, and what it was asked; so they are asked again."""
        monkeypatch.setattr(session_directory, "BEHIND_SECONDS_MAX", 0.2)
        monkeypatch.setattr(nats, "ANSWER_SECONDS_MAX", 5.0)
        monkeypatch.setattr(session_ownership, "PATIENCE_SECONDS", 120.0)

    async def opened_at(self, prefix: str, *, retained_bytes: int | None = None) -> ClusterLog:
        # Long: a busy machine must not cost a host its lease where the lease is not what is tried.
        self.prefixes.append(prefix)
        address = parse(self.servers.store(prefix, lease=60))
        log = ClusterLog(address, self.folder, bytes_max=retained_bytes)
        await log.ready()
        return log


class _Log(_OnServers, LogConformance):
    # Each makes its streams anew: `make prove` has them all.
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
