"""Unusual inputs of callers and agents: they harm no other caller, and every report stays true."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from tests.sessions.helpers import QUICK, opened, touch

from banksman import BugError, Host, Kind, Question, UsageError
from banksman.core.session import event as kinds
from banksman.core.session import step as core
from banksman.core.session.facts import AskWithdrawn
from banksman.sessions.session_table import SESSIONS_KEPT_MAX


@pytest.mark.parametrize(
    ("prompt", "how"),
    [
        ("hello", {"key": "\ud800"}),
        ("hello", {"priority": 10**5000}),
        ([{"type": "text", "text": "hello", "_meta": {"x": object()}}], {}),
        ([{"type": "text", "text": "hello", "_meta": {"x": "\ud800"}}], {}),
    ],
)
async def test_unloggable_ask_is_usage_error_and_spares_running_turn(
    tmp_path: Path, prompt: Any, how: dict[str, Any]
) -> None:
    async with opened(tmp_path) as case:
        other = await case.running("other")
        with pytest.raises(UsageError):
            await case.session.ask(prompt, **how)
        assert other.state == "running"
        await other.interrupt()
        assert (await case.answer("still here")).text == "still here"


async def test_accepted_prompt_is_unaffected_by_later_mutation(tmp_path: Path) -> None:
    blocks: list[Any] = [{"type": "text", "text": "as it was"}]
    async with opened(tmp_path) as case:
        first = await case.running("first")
        turn = await case.session.ask(blocks)
        blocks[0]["text"] = "changed"
        await first.interrupt()
        assert (await case.outcome(turn)).text == "as it was"


@pytest.mark.parametrize("error", [asyncio.CancelledError(), ValueError("not UTF-8: \udcff")])
async def test_callback_that_raises_unusual_error_denies(
    tmp_path: Path, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    # The log record contains the odd text too, and a worker could not send it.
    caplog.set_level(logging.CRITICAL, "banksman")

    def on_question(_question: Question) -> str:
        raise error

    async with opened(tmp_path, on_question=on_question) as case:
        assert (await case.answer("@@ask Bash\n@@say went on")).kind is Kind.DONE
        [answered] = [event.body for event in await case.events() if event.kind == kinds.QUESTION_ANSWERED]
        assert answered["answer"] == "deny"


async def test_endless_agent_initiated_turn_is_ended_by_overall_clock(tmp_path: Path) -> None:
    go = tmp_path / "go"
    script = {"process": [f"at idle wait {go}", "at idle own none ;; say by myself ;; hang"]}
    async with opened(tmp_path, script, options={**QUICK, "clocks": {"overall": 0.3}}) as case:
        await case.answer("hello")
        touch(go)
        await case.wait_said("by myself")
        assert (await case.answer("chore", priority="background")).text == "chore"
        ended = [e.body for e in await case.events() if e.kind == kinds.TURN_ENDED and (e.turn or "").startswith("own")]
        assert [body["clock"] for body in ended] == ["overall"]


async def test_drain_does_not_wait_for_unasked_turn(tmp_path: Path) -> None:
    go = tmp_path / "go"
    script = {"process": [f"at idle wait {go}", "at idle own none ;; say by myself ;; hang"]}
    async with opened(tmp_path, script) as case:
        await case.answer("hello")
        touch(go)
        await case.wait_said("by myself")
        case.session.drain_nowait()
        await case.session.wait_closed()


async def test_host_drops_history_of_forgotten_sessions(tmp_path: Path) -> None:
    async with Host("memory:") as host, opened(tmp_path, host=host) as case:
        for _ in range(SESSIONS_KEPT_MAX + 8):
            session = await case.host.open("claude", command=["true"])
            await session.close()
        sessions = case.host._sessions  # pyright: ignore[reportPrivateUsage]
        assert sessions is not None
        assert len(sessions.store.sessions()) <= SESSIONS_KEPT_MAX + 2


async def test_session_refuses_use_from_another_loop(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:

        async def elsewhere() -> None:
            with pytest.raises(UsageError, match="another event loop"):
                await case.session.ask("hello")
            with pytest.raises(UsageError, match="another event loop"):
                await case.session.interrupt("t")

        await asyncio.to_thread(asyncio.run, elsewhere())
        with pytest.raises(UsageError, match="another event loop"):
            await asyncio.to_thread(case.session.close_nowait)
        assert not case.session.is_closed
        assert (await case.answer("still here")).text == "still here"


async def test_session_let_go_affects_only_one_share_of_key(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        first = await case.session.ask("@@say one", key="k")
        second = await case.session.ask("@@say one", key="k")
        assert first is second
        case.session.let_go(second)
        assert (await case.outcome(first)).kind is Kind.DONE
        hanging = await case.running("for ever", key="other")
        case.session.let_go(hanging)
        assert (await case.outcome(hanging)).kind is Kind.INTERRUPTED


async def test_keyboard_interrupt_in_step_fails_turn_without_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, is_checked=False) as case:
        turn = await case.running("for ever")
        plain = core.step

        def step(state: Any, fact: Any) -> Any:
            if isinstance(fact, AskWithdrawn):
                raise KeyboardInterrupt
            return plain(state, fact)

        monkeypatch.setattr(core, "step", step)
        with pytest.raises(KeyboardInterrupt):
            case.session.withdraw("t")
        outcome = await turn.outcome()
        assert isinstance(outcome.error, BugError)


@pytest.mark.parametrize("cursor", ["x.1", ".1", "9" * 5000, "1.", "-1", "1.-1", "\u0661"])
async def test_follow_refuses_invalid_cursor(tmp_path: Path, cursor: str) -> None:
    async with opened(tmp_path) as case:
        with pytest.raises(UsageError, match="cursor"):
            case.session.follow(cursor)


async def test_ask_error_quotes_invalid_priority(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        with pytest.raises(UsageError, match="'urgent'"):
            await case.session.ask("hello", priority="urgent")
