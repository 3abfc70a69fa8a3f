"""What some tests of sessions need besides their helpers."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture
def unreported(monkeypatch: pytest.MonkeyPatch) -> list[logging.LogRecord]:
    """What the package logs, kept out of the test's report: half a surrogate pair in a traceback cannot be sent from a
    worker to who prints it."""
    records: list[logging.LogRecord] = []

    def keep(record: logging.LogRecord) -> bool:
        records.append(record)
        return False

    # A filter: a logger that does not propagate gets the report's handler all the same.
    monkeypatch.setattr(logging.getLogger("banksman"), "filters", [keep])
    return records
