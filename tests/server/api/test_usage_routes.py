"""Usage over HTTP: the caller of an ask, the query, and the counters of `/metrics`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from tests.server.kit import Served, shared


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with shared(tmp_path_factory.mktemp("served")) as served:
        yield served


def ask(served: Served, session: str, **body: Any) -> dict[str, Any]:
    turn = served.post(f"/v1/sessions/{session}/turns", {"prompt": "hello", **body})["turn"]
    return served.outcome(session, turn)


def rows(served: Served, query: str) -> dict[str | None, dict[str, Any]]:
    return {row["key"]: row["usage"] for row in served.get(f"/v1/usage?{query}")["rows"]}


def metric(served: Served, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", served.request("GET", "/metrics").body.decode(), re.MULTILINE)
    return 0.0 if found is None else float(found[1])


def test_usage_of_turn_is_counted_by_everything(served: Served) -> None:
    name = 'banksman_tokens_total{agent="claude",kind="input"}'
    before = metric(served, name)
    session = served.open()
    outcomes = [ask(served, session, caller=caller) for caller in ("alice", "alice", "bob", None)]
    used = outcomes[0]["used"]
    assert (used["turns"], used["tokens"]["input"] > 0) == (1, True)
    for by, key, turns in (("session", session, 4), ("caller", "alice", 2), ("caller", "bob", 1)):
        found = rows(served, f"by={by}")[key]
        assert (found["turns"], found["tokens"]["input"]) == (turns, turns * used["tokens"]["input"])
    assert rows(served, "by=agent")["claude"]["turns"] >= 4
    [day] = rows(served, "")
    assert rows(served, f"since={day}&until={day}&by=session")[session]["turns"] == 4
    assert session not in rows(served, "until=1999-12-31&by=session")
    assert metric(served, name) - before == 4 * used["tokens"]["input"]


def test_usage_stays_after_deletion(served: Served) -> None:
    session = served.open()
    ask(served, session, caller="carol")
    before = rows(served, "by=caller")["carol"]
    assert served.request("DELETE", f"/v1/sessions/{session}?forget=1").status in (200, 204)
    assert rows(served, "by=caller")["carol"] == before


@pytest.mark.parametrize(
    "query", ["by=moon", "since=yesterday", "since=20261118", "until=2026-W47-3", "until=2026-13-01", "wrong=1"]
)
def test_wrong_query_is_refused(served: Served, query: str) -> None:
    assert served.request("GET", f"/v1/usage?{query}").status in (400, 422)


@pytest.mark.parametrize("caller", ["", "x" * 201, "a\nb", "\x00"])
def test_wrong_caller_is_refused(served: Served, caller: str) -> None:
    session = served.open()
    answer = served.request("POST", f"/v1/sessions/{session}/turns", {"prompt": "hello", "caller": caller})
    assert answer.status in (400, 422)
