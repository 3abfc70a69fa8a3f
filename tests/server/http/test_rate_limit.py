"""Limit of requests for each token: its bucket in virtual time, and what a server counts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server.kit import TOKEN, Served
from tests.server.test_problems import problem

from banksman.errors import UsageError
from banksman.server.http import rate_limit
from banksman.server.http.rate_limit import RateLimit
from banksman.server.problems import Problem
from banksman.server.server_settings import ServerSettings

ONE, TWO = b"one", b"two"
# The server gains no request during a test: one in more than a day.
NEVER = 1e-5


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def taken(limit: RateLimit, bucket: bytes = ONE, most: int = 1000) -> int:
    """Return how many requests a bucket has now, and take them."""
    for count in range(most):
        try:
            limit.take(bucket)
        except Problem:
            return count
    return most


def test_bucket_has_its_burst_and_gains_by_the_rate() -> None:
    clock = Clock()
    limit = RateLimit(2.0, 5, clock=clock)
    assert (taken(limit), taken(limit), taken(limit, TWO)) == (5, 0, 5)
    clock.now += 0.5
    assert taken(limit) == 1
    clock.now += 1.75
    assert taken(limit) == 3
    clock.now += 0.25
    assert taken(limit) == 1
    clock.now += 3600
    assert taken(limit) == 5
    assert limit.refused == 7


@pytest.mark.parametrize(("per_second", "passed", "after"), [(2.0, 0.0, "1"), (0.1, 0.0, "10"), (0.1, 9.5, "1")])
def test_refusal_says_when_the_next_request_is_accepted(per_second: float, passed: float, after: str) -> None:
    clock = Clock()
    limit = RateLimit(per_second, 3, clock=clock)
    taken(limit)
    clock.now += passed
    with pytest.raises(Problem) as caught:
        limit.take(ONE)
    assert (caught.value.status, caught.value.headers["Retry-After"]) == (429, after)
    clock.now += int(after)
    limit.take(ONE)


@given(st.floats(0.01, 1000), st.integers(1, 50), st.lists(st.floats(0, 30), max_size=60))
def test_bucket_never_gives_more_than_burst_and_rate(per_second: float, burst: int, waits: list[float]) -> None:
    clock = Clock()
    limit = RateLimit(per_second, burst, clock=clock)
    accepted = 0
    for wait in waits:
        clock.now += wait
        accepted += taken(limit, most=3)
        assert accepted <= burst + per_second * (clock.now - 1000.0) + 1e-3


def test_buckets_have_a_limit_and_the_empty_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limit, "BUCKETS_MAX", 3)
    clock = Clock()
    limit = RateLimit(1.0, 4, clock=clock)
    taken(limit)
    for bucket in (b"a", b"b"):
        limit.take(bucket)
    clock.now += 2
    # Those of a and b are full by now and are dropped first.
    limit.take(TWO)
    assert taken(limit) == 2
    for bucket in (b"c", b"d", b"e"):
        limit.take(bucket)
    assert taken(limit) == 4, "the bucket that was used least recently was not dropped"


def test_burst_is_that_of_ten_seconds_by_default() -> None:
    assert ServerSettings(requests_per_second=0.25).burst == 3
    assert ServerSettings(requests_per_second=50, requests_burst=7).burst == 7
    for wrong in ({"requests_burst": 5}, {"requests_per_second": 0}, {"requests_per_second": 1, "requests_burst": 0}):
        with pytest.raises(UsageError):
            ServerSettings(**wrong)  # pyright: ignore[reportArgumentType]


def test_server_limits_each_token_and_neither_health_nor_its_user(tmp_path: Path) -> None:
    with Served(tmp_path / "server", requests_per_second=NEVER, requests_burst=4) as served:
        page = served.post("/v1/login", {"code": served.post("/v1/login/code")["code"]}, token=False)["token"]
        session = served.open()
        with served.stream("/v1/events") as stream:
            stream.until_live()
            served.post(f"/v1/sessions/{session}/turns", {"prompt": "hello"})
            # The stream counts once, however many events it has.
            assert any(message.data.get("kind") == "turn.ended" for message in stream.messages())
            # Four requests: the code, the session, the stream and the ask.
            refused = served.request("POST", "/v1/sessions", {})
            found = problem(refused, 429, "rate-limited")
            assert (int(refused.headers["retry-after"]) > 3600, "at most" in found["detail"]) == (True, True)
        for path in ("/livez", "/readyz", "/healthz", "/"):
            for token in (True, False):
                assert served.request("GET", path, token=token).status == 200
        # A wrong token is no token of the server.
        assert served.request("GET", "/v1/server", headers={"Authorization": "Bearer wrong"}).status == 401
        own = {"Authorization": f"Bearer {page}"}
        scraped = served.request("GET", "/metrics", headers=own).body.decode()
        assert "\nbanksman_rate_limited_requests_total 1.0\n" in scraped
        assert [served.request("GET", "/v1/server", headers=own).status for _ in range(4)] == [200, 200, 200, 429]
        # The user's socket.
        env = {**os.environ, "XDG_STATE_HOME": str(served.folder / "state")}
        argv = [sys.executable, "-m", "banksman", "ps"]
        for _ in range(2):
            done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=60)
            assert (done.returncode, session in done.stdout) == (0, True)


@pytest.mark.thorough
def test_verb_waits_for_the_limit_of_its_token(tmp_path: Path) -> None:
    with Served(tmp_path / "server", requests_per_second=1.0, requests_burst=1) as served:
        env = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "BANKSMAN_URL": served.url, "BANKSMAN_TOKEN": TOKEN}
        argv = [sys.executable, "-m", "banksman", "ps"]
        verbs = [subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        assert [(verb.communicate(timeout=60)[0] != "", verb.returncode) for verb in verbs] == [(True, 0)] * 2
