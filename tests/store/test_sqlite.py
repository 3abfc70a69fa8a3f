"""The log in an SQLite file: all that every engine must do, and what only this one does."""

from __future__ import annotations

from pathlib import Path

import pytest

from banksman.store.log import Log
from banksman.store.sqlite import SqliteLog

pytest.register_assert_rewrite("tests.store.conformance")

from tests.store.conformance import LogConformance, SharedLogConformance  # noqa: E402


class TestSqliteLog(LogConformance):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.paths = (tmp_path / f"{number}.db" for number in range(10**6))

    async def open_log(self, *, retained_bytes: int | None = None) -> Log:
        return SqliteLog(next(self.paths), bytes_max=retained_bytes)


class TestSharedSqliteLog(SharedLogConformance):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path / "store.db"

    async def open_pair(self) -> tuple[Log, Log]:
        return SqliteLog(self.path), SqliteLog(self.path)
