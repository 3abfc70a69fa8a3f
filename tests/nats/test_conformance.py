"""The log on NATS, on one server and on three: all that every engine must do."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from tests.thorough import IS_THOROUGH, thorough

from banksman.store.address import parse
from banksman.store.cluster import ClusterLog, many
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

    @pytest.fixture(autouse=True)
    def _believes_a_leader(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nobody is killed here, so nobody is behind."""
        monkeypatch.setattr(many, "BEHIND_SECONDS_MAX", 0.2)

    async def opened_at(self, prefix: str, *, retained_bytes: int | None = None) -> ClusterLog:
        address = parse(self.servers.store(prefix, lease=10))
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


class TestSharedOnThreeServers(_Shared):
    @pytest.fixture(autouse=True)
    def _servers(self, nats_three: Servers, tmp_path: Path) -> None:
        type(self).servers, type(self).folder = nats_three, tmp_path
