"""Cross-check: Banksman drives an agent that is made with the Python SDK of the protocol."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.sessions.helpers import Case
from tests.thorough import thorough

from banksman import Host
from banksman.core.session import event as kinds
from banksman.core.session.outcome import By, Kind
from banksman.sessions.questions import Question

pytestmark = thorough

AGENT = Path(__file__).parent / "sdk_echo_agent.py"


@asynccontextmanager
async def opened(folder: Path, **how: Any) -> AsyncGenerator[Case]:
    memory = folder / "memory"
    memory.mkdir(exist_ok=True)
    async with Host("memory:") as host:
        command = [sys.executable, str(AGENT), str(memory)]
        yield Case(host, await host.open("custom", command=command, cwd=str(folder), **how), folder)


async def test_sdk_agent_turn_returns_text_and_updates(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        outcome = await case.answer("hello")
        assert (outcome.kind, outcome.text, outcome.stop_reason) == (Kind.DONE, "hello", "end_turn")
        turn = await case.session.ask([{"type": "text", "text": "think of it"}, {"type": "text", "text": "and so on"}])
        updates = [update async for update in turn]
        told = [(update["sessionUpdate"], update["content"]["text"]) for update in updates]
        assert told == [("agent_thought_chunk", "of it"), ("agent_message_chunk", "and so on")]


async def test_sdk_agent_permission_is_answered(tmp_path: Path) -> None:
    asked: list[Question] = []

    def answer(question: Question) -> str:
        asked.append(question)
        return "allow" if len(asked) == 1 else "no"

    async with opened(tmp_path, on_question=answer) as case:
        assert (await case.answer("ask to dig")).kind is Kind.DONE
        assert (await case.answer("ask to drill")).kind is Kind.DONE
        assert [question.tool for question in asked] == ["execute", "execute"]
        answered = [event.body for event in await case.events() if event.kind == kinds.QUESTION_ANSWERED]
        assert [(body["answer"], body.get("option")) for body in answered] == [("allow", None), ("deny", "no")]
        ended = [
            update["status"]
            for event in await case.events()
            for update in event.body.get("updates", ())
            if update["sessionUpdate"] == "tool_call_update"
        ]
        assert ended == ["completed", "failed"]


async def test_sdk_agent_turn_is_interrupted_and_next_one_runs(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        turn = await case.ask("hang on")
        await case.wait_said("hanging")
        receipt = await turn.interrupt()
        assert (receipt.stopped, receipt.by) == (True, By.BOUNDARY)
        assert (await case.outcome(turn)).stop_reason == "cancelled"
        assert (await case.answer("next")).text == "next"


async def test_sdk_agent_error_fails_its_turn(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        outcome = await case.answer("fail on purpose")
        assert outcome.kind is Kind.FAILED
        assert "on purpose" in str(outcome.error)
        assert (await case.answer("next")).text == "next"


async def test_sdk_agent_loads_conversation_after_kill_without_repeating_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        assert (await case.answer("remember this")).text == "remember this"
        conversation = case.session.status().conversation
        (pid,) = case.session.status().pids
        os.kill(pid, signal.SIGKILL)
        await case.wait_event(lambda event: event.kind == kinds.PROCESS_EXITED)
        assert (await case.answer("on")).text == "on"
        assert case.session.status().conversation == conversation
        events = await case.events()
        assert b"remember this" in b"".join(event.data for event in events if event.kind == kinds.RECITED)
        said = [
            update["content"]["text"]
            for event in events
            for update in event.body.get("updates", ())
            if update["sessionUpdate"] == "agent_message_chunk"
        ]
        assert said == ["remember this", "on"]


@pytest.mark.thorough
async def test_sdk_agent_lost_conversation_is_reported(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        assert (await case.answer("remember this")).kind is Kind.DONE
        (pid,) = case.session.status().pids
        for file in (tmp_path / "memory").iterdir():
            file.unlink()
        os.kill(pid, signal.SIGKILL)
        await case.wait_event(lambda event: event.kind == kinds.PROCESS_EXITED)
        assert (await case.answer("on")).text == "on"
        assert kinds.SESSION_CONTEXT_LOST in await case.kinds()
