"""Provider failures, retries and limits of sessions with fake agents, one test per dialect and fact."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from tests.sessions import acp_case, test_codex
from tests.sessions.helpers import QUICK, Case, bodies, let_pass, opened

from banksman import AgentError, ErrorKind, Event, Host, Kind, LimitWindow, Outcome
from banksman.core.session import event as kinds
from banksman.core.session.outcome import outcome_of
from banksman.testing import fake_agent

FAILED = {"is_error": True, "terminal_reason": "api_error"}
LIMITED = {
    **FAILED,
    **{"api_error": "usage_limit_reached", "api_error_status": 429, "result": "You've hit your 5-hour limit"},
}


def failure(outcome: Outcome) -> AgentError:
    assert outcome.kind is Kind.FAILED
    assert isinstance(outcome.error, AgentError)
    return outcome.error


def rate_limit(resets_at: float, *, used: float = 1.0) -> str:
    status = "rejected" if used >= 1 else "allowed"
    window = {"utilization": used, "resetsAt": int(resets_at), "status": status}
    info = {"status": status, "unifiedWindows": {"five_hour": window}}
    return json.dumps({"type": "rate_limit_event", "rate_limit_info": info})


def retry(attempt: int = 1, delay_ms: int = 30_000) -> str:
    frame = {"attempt": attempt, "max_retries": 10, "retry_delay_ms": delay_ms}
    return json.dumps({"type": "system", "subtype": "api_retry", "error_status": 529, "error": "overloaded", **frame})


def told(events: list[Event], kind: str) -> list[dict[str, Any]]:
    return bodies(events, kind)


# -- Claude ------------------------------------------------------------------------------------------------------------
async def test_claude_failure_has_kind_in_outcome_and_log(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        boundary = {**FAILED, "api_error_status": 529, "api_error_type": "overloaded_error", "result": "API Error: 529"}
        error = failure(await case.answer(f"@@boundary {json.dumps(boundary)}"))
        assert (error.kind, error.status, str(error)) == (ErrorKind.OVERLOADED, 529, "API Error: 529")
        (ended,) = told(await case.events(), kinds.TURN_ENDED)
        assert ended["error"] == "API Error: 529"
        assert outcome_of(ended).failure == ended["failure"]
        assert ended["failure"]["kind"] == "overloaded"


async def test_claude_limit_is_shown_until_provider_answers(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        until = float(int(time.time()) + 3600)
        prompt = f"@@raw {rate_limit(until)}\n@@boundary {json.dumps(LIMITED)}"
        error = failure(await case.answer(prompt))
        assert (error.kind, error.limited_until) == (ErrorKind.USAGE_LIMIT, until)
        status = case.session.status()
        assert status.limited_until == until
        assert status.limits == (LimitWindow("five_hour", 1.0, until, is_exhausted=True),)
        assert (await case.answer("next")).text == "next"
        assert case.session.status().limited_until is None


async def test_limit_in_the_past_is_not_shown(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        until = float(int(time.time()) - 5)
        error = failure(await case.answer(f"@@raw {rate_limit(until)}\n@@boundary {json.dumps(LIMITED)}"))
        assert error.limited_until == until
        assert case.session.status().limited_until is None


async def test_limit_survives_restart_of_host(tmp_path: Path) -> None:
    store, until = f"sqlite:{tmp_path / 'log.db'}", float(int(time.time()) + 3600)
    command = fake_agent.command((), evidence=tmp_path / "evidence", memory=tmp_path / "memory")
    async with Host(store=store) as host:
        session = await host.open("claude", command=command, options=QUICK, name="s")
        turn = await session.ask(f"@@raw {rate_limit(until)}\n@@boundary {json.dumps(LIMITED)}")
        assert failure(await turn.outcome()).limited_until == until
    async with Host(store=store) as host:
        session = await host.open("claude", command=command, options=QUICK, name="s")
        assert session.status().limited_until == until
        assert [window.name for window in session.status().limits] == ["five_hour"]
        found = await session.turn(turn.id)
        assert failure(await found.outcome()).limited_until == until


async def test_unchanged_limits_are_logged_once(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        until = time.time() + 3600
        line = f"@@raw {rate_limit(until, used=0.5)}"
        await case.answer(f"{line}\n{line}\n@@say a")
        await case.answer(f"{line}\n@@raw {rate_limit(until, used=0.75)}\n@@say b")
        changes = told(await case.events(), kinds.LIMITS_CHANGED)
        assert [change["windows"][0]["used"] for change in changes] == [0.5, 0.75]


async def test_claude_retry_is_shown_and_no_silence(tmp_path: Path) -> None:
    async with opened(tmp_path, options={"clocks": {"bytes": 100.0}}) as case:
        turn = await case.reaches(f"@@raw {retry(3)}\n@@hang")
        shown = case.session.status().retry
        assert shown is not None
        assert (shown.attempt, shown.attempts_max, shown.error, shown.status) == (3, 10, "overloaded", 529)
        assert 0 < shown.seconds <= 30
        # Without the retry, 60 s of silence would show the session as wedged.
        let_pass(80)
        assert case.session.status().state == "running"
        let_pass(20)
        assert case.session.status().state == "wedged"
        await turn.interrupt()
        await case.outcome(turn)
        (event,) = told(await case.events(), kinds.PROVIDER_RETRYING)
        assert (event["attempt"], event["delay"], event["cause"]) == (3, 30.0, "overloaded")
        assert case.session.status().retry is None


async def test_claude_success_without_answer_is_empty(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        outcome = await case.answer("@@tool_use Bash {}\n@@tool_result ok\n@@boundary " + json.dumps({"result": ""}))
        assert (outcome.kind, outcome.used_tools, outcome.empty) == (Kind.DONE, True, True)
        outcome = await case.answer("@@tool_use Bash {}\n@@tool_result ok\n@@say done")
        assert (outcome.used_tools, outcome.empty) == (True, False)


async def test_exit_of_agent_has_its_kind(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        error = failure(await case.answer("@@stderr no key\n@@exit 3"))
        assert (error.kind, error.hint) == (ErrorKind.AGENT_EXITED, "no key")
        assert str(error) == "the agent exited (code 3) (no key)"
        (ended,) = told(await case.events(), kinds.TURN_ENDED)
        assert str(outcome_of(ended).error) == ended["error"] == str(error)


# -- Codex -------------------------------------------------------------------------------------------------------------
async def test_codex_limit_has_reset_time_of_its_window(tmp_path: Path) -> None:
    until = int(time.time()) + 3600
    window = {"usedPercent": 100, "windowDurationMins": 300, "resetsAt": until}
    limits = {"method": "account/rateLimits/updated", "params": {"rateLimits": {"limitId": "codex", "primary": window}}}
    limited = {"message": "You’ve hit your usage limit.", "codexErrorInfo": "usageLimitExceeded"}
    async with test_codex.opened(tmp_path) as case:
        error = failure(await case.answer(f"@@raw {json.dumps(limits)}\n@@failure {json.dumps(limited)}"))
        assert (error.kind, error.limited_until) == (ErrorKind.USAGE_LIMIT, float(until))
        assert case.session.status().limited_until == until


async def test_codex_failure_and_retry_have_kind(tmp_path: Path) -> None:
    info = {"httpConnectionFailed": {"httpStatusCode": 401}}
    retried = {"message": "Reconnecting... 1/5", "codexErrorInfo": info, "additionalDetails": "status 401"}
    notice = {"method": "error", "params": {"error": retried, "willRetry": True}}
    async with test_codex.opened(tmp_path) as case:
        failed = json.dumps({"message": "unexpected status 401", "codexErrorInfo": info})
        error = failure(await case.answer(f"@@raw {json.dumps(notice)}\n@@failure {failed}"))
        assert (error.kind, error.status) == (ErrorKind.AUTH, 401)
        (event,) = told(await case.events(), kinds.PROVIDER_RETRYING)
        assert (event["attempt"], event["attempts_max"], event["error"]) == (1, 5, "auth")


async def test_codex_success_without_answer_is_empty(tmp_path: Path) -> None:
    async with test_codex.opened(tmp_path) as case:
        assert (await case.answer("@@ran ls")).empty


# -- ACP ---------------------------------------------------------------------------------------------------------------
async def test_acp_failure_has_kind(tmp_path: Path) -> None:
    async with acp_case.opened(tmp_path) as case:
        error = failure(await case.answer("@@error -32603 API Error: 429 rate limit, try again in 7 s"))
        assert (error.kind, error.status, error.retry_after) == (ErrorKind.RATE_LIMITED, 429, 7.0)
        assert failure(await case.answer("@@stop max_turn_requests")).kind is ErrorKind.MAX_TURNS
        assert failure(await case.answer("@@error -32000 log in first")).kind is ErrorKind.AUTH


async def test_acp_success_without_answer_is_empty(tmp_path: Path) -> None:
    async with acp_case.opened(tmp_path) as case:
        assert (await empty_of(case, "@@ran ls")) == (Kind.DONE, True)
        assert (await empty_of(case, "@@ran ls\n@@text done")) == (Kind.DONE, False)
        assert (await empty_of(case, "@@silence")) == (Kind.DONE, False)


async def empty_of(case: Case, prompt: str) -> tuple[Kind, bool]:
    outcome = await case.answer(prompt)
    return outcome.kind, outcome.empty
