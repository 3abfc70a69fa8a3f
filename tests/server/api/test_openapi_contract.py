"""No request made from the API description gets a 5xx or an undescribed answer.

This bounded run takes each route's limits, the values beside them, and some generated values. tests/fuzz has the large
run, for `make check-deep`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.server.api import contract
from tests.server.kit import Served

pytestmark = pytest.mark.thorough

EXAMPLES = 3


@pytest.mark.parametrize("group", [group for group in contract.GROUPS if group != "all"])
def test_server_answers_generated_requests_as_described(tmp_path: Path, group: str) -> None:
    with Served(tmp_path / "server", **contract.SETTINGS) as served:
        found = contract.check(served, contract.Wanted(group, EXAMPLES))
        assert not found.failures, "\n\n".join(f"{name}\n{what}" for name, what in found.failures.items())
        assert not [status for status in found.statuses if status >= 500]
        # The run was not empty: each phase took place, and some requests succeeded.
        assert found.phases["coverage"] == "success"
        assert found.phases["fuzzing"] == "success"
        assert sum(found.statuses.values()) > 40
        assert found.successes
        # Some of them would have chosen what an agent or a command may use.
        assert bool(found.refused) == (group in ("sessions", "commands"))
        assert served.request("GET", "/healthz").status == 200
        assert "Traceback" not in served.log.read_text(encoding="utf-8")


def test_drain_is_answered_as_described_and_ends_the_server(tmp_path: Path) -> None:
    with Served(tmp_path / "server", **contract.SETTINGS) as served:
        for body in (b"{", b"[]", b'{"timeout": -1}', b'{"timeout": "x"}', b'{"x": 1}', b'{"timeout": 1e400}'):
            answer = served.request("POST", "/v1/drain", body, headers={"Content-Type": "application/json"})
            assert answer.status == 400
        assert served.request("POST", "/v1/drain", {}, token=False).status == 401
        answer = served.request("POST", "/v1/drain", {"timeout": 5})
        assert (answer.status, answer.json) == (202, {"draining": True})
        assert served.process is not None
        assert served.process.wait(30) == 0
