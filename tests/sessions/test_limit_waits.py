"""Asks that wait for the end of a limit of the agent's account, with fake agents (`on_limit`)."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.sessions.helpers import QUICK, bodies, let_pass, opened, prompts
from tests.sessions.test_provider_errors import LIMITED, failure, rate_limit

from banksman import AgentError, ErrorKind, Event, Host, Kind, LimitReached, Session, UsageError
from banksman.core.session import event as kinds
from banksman.core.session import fallback
from banksman.sessions import session_timers
from banksman.sessions.accounts import JITTER_PART, JITTER_SECONDS_MAX, AccountLimits
from banksman.testing import fake_agent

SECONDS_MAX = 60
# No test waits so long: the tests set the wall clock that the timers read.
UNTIL = float(int(time.time()) + 36_000)
LIMITED_ONCE = {
    "prompt 1": [f"raw {rate_limit(UNTIL)}", f"boundary {json.dumps(LIMITED)}"],
    "prompt 2": ["say fine"],
}


async def waiting(session: Session) -> None:
    """Wait until only a limit keeps the queue of a session."""
    async with asyncio.timeout(SECONDS_MAX):
        while not (status := session.status()).waits_for_limit or status.holder:  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@pytest.fixture
def reset(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set the wall clock to the end of the limit plus so many seconds. The timers look at it within a minute."""

    def set_clock(seconds: float = JITTER_SECONDS_MAX) -> None:
        monkeypatch.setattr(session_timers, "time", SimpleNamespace(time=lambda: UNTIL + seconds))
        let_pass(session_timers.WALL_SECONDS_MAX)

    return set_clock


async def events_of(session: Session) -> list[Event]:
    return [event async for event in session.events()]


# -- one session -------------------------------------------------------------------------------------------------------
async def test_limited_ask_is_answered_after_the_reset(tmp_path: Path, reset: Callable[[], None]) -> None:
    async with opened(tmp_path, LIMITED_ONCE, on_limit="wait") as case:
        turn = await case.session.ask("one")
        await waiting(case.session)
        assert prompts(case) == ["one"]
        reset()
        outcome = await case.outcome(turn)
        assert (outcome.kind, outcome.text) == (Kind.DONE, "fine")
        assert prompts(case) == ["one", "one"]
        (requeued,) = bodies(await case.events(), kinds.TURN_REQUEUED)
        assert (requeued["reason"], requeued["limited_until"]) == ("limit", UNTIL)
        assert not case.session.status().waits_for_limit


async def test_status_says_that_the_queue_waits_and_the_process_is_idle(tmp_path: Path) -> None:
    async with opened(tmp_path, LIMITED_ONCE, on_limit="wait", options={"idle_seconds": 0.1}) as case:
        turn = await case.session.ask("one")
        await waiting(case.session)
        status = case.session.status()
        assert (status.state, status.limited_until, len(status.queue)) == ("queued", UNTIL, 1)
        await case.wait_kind(kinds.PROCESS_RETIRED)
        await turn.interrupt()
        assert (await case.outcome(turn)).kind is Kind.WITHDRAWN


async def test_ask_with_deadline_says_that_the_account_is_limited(tmp_path: Path) -> None:
    async with opened(tmp_path, LIMITED_ONCE, on_limit="wait") as case:
        turn = await case.session.ask("one", deadline=1000)
        await waiting(case.session)
        let_pass(1000)
        outcome = await case.outcome(turn)
        assert (outcome.kind, outcome.clock) == (Kind.WITHDRAWN, "deadline")
        assert isinstance(outcome.error, AgentError)
        assert (outcome.error.kind, outcome.error.limited_until) == (ErrorKind.USAGE_LIMIT, UNTIL)


async def test_wait_follows_the_wall_clock(tmp_path: Path, reset: Callable[[float], None]) -> None:
    async with opened(tmp_path, LIMITED_ONCE, on_limit="wait") as case:
        turn = await case.session.ask("one")
        await waiting(case.session)
        # The clock of the loop passes the reset, and the wall clock does not.
        for _ in range(3):
            let_pass(40_000)
            await asyncio.sleep(0.05)
        reset(-1.0)
        await asyncio.sleep(0.05)
        assert case.session.status().waits_for_limit
        reset(JITTER_SECONDS_MAX)
        assert (await case.outcome(turn)).text == "fine"


async def test_ask_is_not_sent_again_at_once_when_the_reset_has_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fallback, "RESEND_SECONDS", 3600.0)  # Only `let_pass` ends it.
    past = float(int(time.time()) - 60)
    script = {
        "prompt 1": [f"raw {rate_limit(past)}", "say one"],
        "prompt 2": [f"boundary {json.dumps(LIMITED)}"],
        "prompt 3": ["say fine"],
    }
    async with opened(tmp_path, script, on_limit="wait") as case:
        await case.answer("one")
        turn = await case.session.ask("two")
        await waiting(case.session)
        assert prompts(case) == ["one", "two"]
        let_pass(3600.0)
        assert (await case.outcome(turn)).text == "fine"


async def test_session_reopened_with_fail_does_not_wait(tmp_path: Path) -> None:
    async with opened(tmp_path, LIMITED_ONCE, on_limit="wait", name="s") as case:
        turn = await case.session.ask("one")
        await waiting(case.session)
        command = fake_agent.command(LIMITED_ONCE, evidence=case.folder / "evidence")
        assert await case.host.open("claude", command=command, options=QUICK, name="s") is case.session
        assert (await case.outcome(turn)).text == "fine"


async def test_wait_survives_restart_of_host(tmp_path: Path, reset: Callable[[], None]) -> None:
    store = f"sqlite:{tmp_path / 'log.db'}"
    how: dict[str, Any] = {"options": QUICK, "name": "s", "on_limit": "wait"}
    # The agent remembers the first prompt.
    command = fake_agent.command(LIMITED_ONCE, evidence=tmp_path / "evidence", memory=tmp_path / "memory")
    async with Host(store=store) as host:
        session = await host.open("claude", command=command, **how)
        turn = await session.ask("one")
        await waiting(session)
        await session.leave()
    async with Host(store=store) as host:
        session = await host.open("claude", command=command, **how)
        assert session.status().waits_for_limit
        again = await session.turn(turn.id)
        assert session.status().pids == ()
        reset()
        outcome = await again.outcome()
        assert (outcome.kind, outcome.text) == (Kind.DONE, "fine")


# -- several sessions --------------------------------------------------------------------------------------------------
async def test_sessions_of_one_account_wait_together(tmp_path: Path, reset: Callable[[], None]) -> None:
    async with opened(tmp_path / "a", LIMITED_ONCE, on_limit="wait") as case:
        host = case.host

        async def open_other(name: str, **how: Any) -> Session:
            command = fake_agent.command({"prompt 1": ["say other"]}, evidence=tmp_path / name)
            return await host.open("claude", command=command, options=QUICK, **how)

        before = await open_other("before", on_limit="wait")
        other = await open_other("other", on_limit="wait", env={"ANTHROPIC_API_KEY": "another"})
        turn = await case.session.ask("one")
        await waiting(before)
        after = await open_other("after", on_limit="wait")
        assert after.status().waits_for_limit
        (changed,) = bodies(await events_of(before), kinds.LIMITS_CHANGED)
        assert (changed["limited_until"], changed["by"]) == (UNTIL, "account")
        asked = [await session.ask("two") for session in (before, after)]
        # Another account, and a session that does not wait, are not affected.
        for session in (other, await open_other("fails")):
            assert (await (await session.ask("two")).outcome()).kind is Kind.DONE
        assert [session.status().pids for session in (before, after)] == [(), ()]
        await waiting(case.session)
        reset()
        assert (await case.outcome(turn)).text == "fine"
        assert [(await each.outcome()).text for each in asked] == ["other", "other"]


async def test_cancelled_reopen_has_the_new_account(tmp_path: Path) -> None:
    async with opened(tmp_path, LIMITED_ONCE, on_limit="wait") as case:
        how: dict[str, Any] = {"command": fake_agent.command(), "name": "s", "on_limit": "wait"}
        session = await case.host.open("claude", **how, env={"ANTHROPIC_API_KEY": "another"})
        await case.session.ask("one")
        await waiting(case.session)
        openings = session.openings
        task = asyncio.create_task(case.host.open("claude", **how))
        while session.openings == openings:  # noqa: ASYNC110
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert session.status().waits_for_limit


async def test_answer_after_the_reset_lifts_the_limit_for_all(tmp_path: Path) -> None:
    limits = AccountLimits()
    told: list[float | None] = []
    first, second = limits.join("a"), limits.join("a")
    first.begin(lambda until: None)
    second.begin(told.append)
    until = time.time() + 3600
    for report in (until, until, None):
        first.report(report)
    await asyncio.sleep(0)
    assert told == [until, None]
    second.leave()
    first.report(until)
    await asyncio.sleep(0)
    assert told == [until, None]


def test_sessions_of_one_account_share_the_jitter() -> None:
    limits = AccountLimits(random.Random(7))
    first, second, other = limits.join("a"), limits.join("a"), limits.join("b")
    until = time.time() + 100.0
    delay = first.jitter(until)
    assert second.jitter(until) == delay
    assert 0.0 < delay <= 100.0 * JITTER_PART
    assert other.jitter(until) != delay
    assert first.jitter(time.time() - 5.0) == 0.0
    assert all(first.jitter(until + day) <= JITTER_SECONDS_MAX for day in range(86_400, 864_000, 86_400))


async def test_session_of_another_account_forgets_the_limit() -> None:
    limits = AccountLimits()
    told: list[float | None] = []
    member, other = limits.join("a"), limits.join("a")
    other.report(time.time() + 3600)
    member.begin(told.append)
    assert told[-1] is not None
    limits.renew(member, "b")
    assert told[-1] is None
    limits.renew(member, "a")
    assert told[-1] is not None


# -- the caller's function ---------------------------------------------------------------------------------------------
async def test_function_decides_to_fail(tmp_path: Path) -> None:
    reached: list[LimitReached] = []

    async def on_limit(limit: LimitReached) -> str:
        reached.append(limit)
        return "fail"

    async with opened(tmp_path, LIMITED_ONCE, on_limit=on_limit) as case:
        turn = await case.session.ask("one")
        error = failure(await case.outcome(turn))
        assert (error.kind, error.limited_until) == (ErrorKind.USAGE_LIMIT, UNTIL)
        (limit,) = reached
        assert (limit.session, limit.agent, limit.limited_until) == (case.session.id, "claude", UNTIL)
        assert limit.windows[0].name == "five_hour"
        # The agent reports the limit before the end of the turn, and the session may read them apart.
        assert limit.waiting in ((), (turn.id,))
        # The session is not held back for this reset.
        assert (await case.answer("two")).text == "fine"


@pytest.mark.parametrize("decision", ["wait", "never", ZeroDivisionError("no")], ids=str)
async def test_asks_wait_unless_the_function_decides_to_fail(
    tmp_path: Path, decision: Any, caplog: pytest.LogCaptureFixture, reset: Callable[[], None]
) -> None:
    def on_limit(_: LimitReached) -> str:
        if isinstance(decision, Exception):
            raise decision
        return decision

    with caplog.at_level(logging.WARNING, "banksman"):
        async with opened(tmp_path, LIMITED_ONCE, on_limit=on_limit) as case:
            turn = await case.session.ask("one")
            await waiting(case.session)
            reset()
            assert (await case.outcome(turn)).text == "fine"
    warnings = [record.getMessage() for record in caplog.records if "on_limit" in record.getMessage()]
    assert len(warnings) == (decision != "wait")


async def test_wrong_decision_in_advance_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="on_limit cannot be 'later'"):
        async with opened(tmp_path, on_limit="later"):
            pass
