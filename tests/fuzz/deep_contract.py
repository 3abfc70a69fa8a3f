"""Deep schemathesis run: many examples of every route, and sequences of routes that follow their links.

The file name keeps this run out of the normal test runs. See tests/server/api/test_openapi_contract.py for the contract
tests of every run.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.fuzz.bounded import SECONDS
from tests.server.api import contract
from tests.server.kit import Served


@pytest.mark.parametrize("group", contract.GROUPS)
def test_server_conforms_to_its_contract_over_many_requests(tmp_path: Path, group: str) -> None:
    seed = int(os.environ.get("BANKSMAN_DEEP_SEED", "0")) or int.from_bytes(os.urandom(4))
    with Served(tmp_path / "server", **contract.SETTINGS) as served:
        is_stateful = group == "all"
        wanted = contract.Wanted(
            group,
            100_000,
            is_stateful=is_stateful,
            has_coverage=not is_stateful,
            has_fuzzing=not is_stateful,
            seconds_max=max(5, int(SECONDS)),
            seed=seed,
        )
        found = contract.check(served, wanted)
        again = f"again: BANKSMAN_DEEP_SEED={seed}\n"
        assert not found.failures, again + "\n\n".join(f"{name}\n{what}" for name, what in found.failures.items())
        assert not [status for status in found.statuses if status >= 500], again
        assert sum(found.statuses.values()) > 20
        assert served.request("GET", "/healthz").status == 200
        assert "Traceback" not in served.log.read_text(encoding="utf-8"), again
