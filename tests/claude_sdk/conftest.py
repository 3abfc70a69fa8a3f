"""Fixture of the drop-in tests: the drop-in for the time of one test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def installed() -> Iterator[None]:
    from banksman import claude_sdk

    claude_sdk.install()
    yield
    claude_sdk.uninstall()
