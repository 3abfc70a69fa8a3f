"""Readiness and liveness of a server whose store is gone.

tests/server/test_problems.py tests them during a drain.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cluster.fleet import fleet, until
from tests.cluster.shared import some_prefix
from tests.server.kit import Answer, Served
from tests.thorough import thorough

from banksman import Host
from banksman.runtime import host_stats
from banksman.runtime.host_stats import has_working_store
from banksman.testing import fake_agent
from banksman.testing.nats_servers import Servers

pytestmark = thorough


def test_healthz_fails_on_unwritable_store_and_livez_does_not(tmp_path: Path) -> None:
    with Served(tmp_path / "server", drain_seconds=1) as served:
        session = served.post("/v1/sessions", {"command": fake_agent.command()})["id"]
        assert served.request("GET", "/healthz", token=False).status == 200
        for file in served.folder.glob("store.db*"):
            file.unlink()
        assert served.request("POST", f"/v1/sessions/{session}/turns", {"prompt": "x"}).status == 503
        answer = served.request("GET", "/healthz", token=False)
        assert (answer.status, answer.json["type"]) == (503, "urn:banksman:store-broken")
        assert answer.headers["retry-after"]
        # The answer names no file and no session.
        assert str(tmp_path) not in answer.body.decode()
        assert served.request("GET", "/livez", token=False).json == {"status": "ok"}


@pytest.mark.parametrize("how", ["a folder", "empty", "missing"])
def test_healthz_fails_when_store_could_not_be_opened_at_start(tmp_path: Path, how: str) -> None:
    served = Served(tmp_path / "server", store=None)
    store = served.folder / "state" / "banksman" / "store.db"
    store.parent.mkdir(parents=True)
    if how == "a folder":
        store.mkdir()
    else:
        # No reader gets as far as the contents.
        store.with_name("store.db-wal").write_bytes(b"commits")
        if how == "empty":
            store.touch()
    with served:
        assert _is_broken(served.request("GET", "/healthz", token=False))
        line = "cannot open the store, sessions are not available: "
        until(lambda: line in served.log.read_text(encoding="utf-8"), "the warning")
        assert served.request("GET", "/livez", token=False).status == 200
        assert served.request("GET", "/v1/sessions").status in (500, 503)
        if how == "a folder":
            store.rmdir()
        else:
            store.with_name("store.db-wal").unlink()
        assert served.request("GET", "/v1/sessions").status == 200
        assert served.request("GET", "/healthz", token=False).status == 200


async def test_unopened_store_is_retried_at_a_limited_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "store.db"
    async with Host(f"sqlite:{store}") as host:
        store.mkdir()
        assert not has_working_store(host)
        store.rmdir()
        monkeypatch.setattr(host_stats, "OPEN_AGAIN_SECONDS", float("inf"))
        assert not has_working_store(host)
        monkeypatch.setattr(host_stats, "OPEN_AGAIN_SECONDS", 0.0)
        assert has_working_store(host)


def test_healthz_fails_when_store_was_moved_before_any_write(tmp_path: Path) -> None:
    with Served(tmp_path / "server", drain_seconds=1) as served:
        served.open()
        files = [*served.folder.glob("store.db*")]
        away = tmp_path / "away"
        away.mkdir()
        for file in files:
            file.rename(away / file.name)
        assert _is_broken(served.request("GET", "/healthz", token=False))
        assert served.request("POST", "/v1/sessions", {"command": fake_agent.command()}).status == 503
        for file in files:
            (away / file.name).rename(file)
        assert served.request("GET", "/healthz", token=False).status == 200


def _is_broken(answer: Answer) -> bool:
    return answer.status == 503 and answer.json["type"] == "urn:banksman:store-broken"


@pytest.mark.thorough
def test_healthz_of_front_end_fails_when_cluster_is_unreachable(tmp_path: Path) -> None:
    with Servers(1) as servers, fleet(tmp_path, servers, some_prefix(), lease=5) as many:
        front = many.front()
        assert front.request("GET", "/healthz", token=False).status == 200
        servers.stop(0)
        try:
            until(lambda: front.request("GET", "/healthz", token=False).status == 503, "it is not ready")
            assert front.request("GET", "/readyz", token=False).json["type"] == "urn:banksman:cluster-unreachable"
            assert front.request("GET", "/livez", token=False).status == 200
        finally:
            servers.cont(0)
        until(lambda: front.request("GET", "/healthz", token=False).status == 200, "it is ready again")
        assert front.request("GET", "/readyz", token=False).status == 200
