"""Fixture for tests of sessions whose log records cannot be reported."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture
def unreported(monkeypatch: pytest.MonkeyPatch) -> list[logging.LogRecord]:
    """Collect the package's log records and keep them out of the test report.

    Half a surrogate pair in a traceback cannot be sent from a worker to the process that prints it.
    """
    records: list[logging.LogRecord] = []

    def keep(record: logging.LogRecord) -> bool:
        records.append(record)
        return False

    # A filter is needed, because a logger without propagation still gets the handler of the report.
    monkeypatch.setattr(logging.getLogger("banksman"), "filters", [keep])
    return records
