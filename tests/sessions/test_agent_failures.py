"""Failures that an agent reports, in each shape that was seen, and their effect on the conversation and its prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.sessions.helpers import SHORT_DRAIN, Case, bodies, ended, opened, prompts, requests

from banksman import AgentError, Kind
from banksman.core.session import event as kinds
from banksman.core.session.agent_conversation import LARGE_PROMPT_CHARACTERS

TOO_LONG = "Prompt is too long"
OVERFLOW = {"is_error": True, "terminal_reason": "prompt_too_long", "result": TOO_LONG, "api_error_status": 400}


def fails(**members: Any) -> str:
    """Return the prompt of a turn that says some text and whose boundary has these members."""
    return f"@@say so far\n@@boundary {json.dumps({'is_error': True, **members})}"


def resumed(case: Case) -> list[list[str]]:
    """Return the conversation that each process had to resume."""
    return [[word for word in process.argv if word.startswith("--resume")] for process in case.processes]


# -- scenario 50 -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        # The agent reports a failed model call as a success.
        ("@@error API Error: 529 overloaded", "API Error: 529 overloaded"),
        (fails(terminal_reason="api_error", api_error_status=500, result="API Error: 500 boom"), "API Error: 500 boom"),
        (fails(result="what was said", errors=["a list"]), "what was said"),
        (fails(result="", errors=["first", "second"]), "first\nsecond"),
        (fails(result=None, errors=["only this"]), "only this"),
        (fails(result=None, errors=[], terminal_reason="api_error", api_error_status=529), "api_error 529"),
        (fails(result="", errors=None, terminal_reason=None, subtype="error_max_turns"), "error_max_turns"),
        # Either member alone marks the turn as failed.
        (fails(is_error=False, subtype="error_max_budget_usd", result="", errors=["too dear"]), "too dear"),
        (fails(result="", terminal_reason=None), "error"),
        ("@@failure [ede_diagnostic] boom", "[ede_diagnostic] boom"),
    ],
)
async def test_failure_reported_as_success_fails_turn_with_most_telling_text(
    tmp_path: Path, prompt: str, error: str
) -> None:
    async with opened(tmp_path) as case:
        turn = await case.ask(prompt)
        outcome = await case.outcome(turn)
        assert outcome.kind is Kind.FAILED
        assert isinstance(outcome.error, AgentError)
        assert str(outcome.error).startswith(error)
        assert ended(await case.events(), turn)["by"] == "boundary"
        assert (await case.answer("next")).text == "next"
        assert len(case.processes) == 1


async def test_agent_that_exits_after_error_fails_its_turn_once(tmp_path: Path) -> None:
    async with opened(tmp_path, memory=True) as case:
        outcome = await case.answer("@@error API Error: 401\n@@exit 1")
        assert (outcome.kind, str(outcome.error)) == (Kind.FAILED, "API Error: 401")
        assert (await case.answer("next")).text == "next"
        assert len(case.processes) == 2


# -- scenario 67 -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "overflow",
    [
        OVERFLOW,
        {"is_error": True, "result": "API Error: 400 prompt is too long: 210000 tokens > 200000 maximum"},
        {"is_error": True, "result": "", "errors": ["Prompt is too long"]},
        {"is_error": True, "result": "", "terminal_reason": "prompt_too_long"},
    ],
)
async def test_overflown_conversation_is_retired_and_next_ask_begins_another(
    tmp_path: Path, overflow: dict[str, Any]
) -> None:
    async with opened(tmp_path, memory=True) as case:
        await case.answer("one")
        before = case.session.status().conversation
        outcome = await case.answer(f"two\n@@boundary {json.dumps(overflow)}\n@@result said twice")
        assert outcome.kind is Kind.FAILED
        assert (await case.answer("three\n@@recall")).text == '["three\\n@@recall"]'
        after = case.session.status().conversation
        assert after not in (before, None)
        events = await case.events()
        (lost,) = bodies(events, kinds.SESSION_CONTEXT_LOST)
        assert (lost["conversation"], bool(lost["error"])) == (before, True)
        assert resumed(case) == [[], []]
        # The session continues the new conversation, however often the old process names the old one.
        assert (await case.answer("@@exit 1")).kind is Kind.FAILED
        assert (await case.answer("four")).text == "four"
        assert resumed(case) == [[], [], [f"--resume={after}"]]
        # No prompt was sent twice.
        assert prompts(case) == ["one", "two", "three", "@@exit 1", "four"]


async def test_oversized_prompt_does_not_retire_conversation(tmp_path: Path) -> None:
    async with opened(tmp_path, memory=True) as case:
        await case.answer("one")
        conversation = case.session.status().conversation
        huge = "x" * LARGE_PROMPT_CHARACTERS
        assert (await case.answer(f"two {huge}\n@@boundary {json.dumps(OVERFLOW)}")).kind is Kind.FAILED
        # The overflows are not consecutive: this prompt fits.
        assert (await case.answer("three")).text == "three"
        assert (await case.answer(f"four {huge}\n@@boundary {json.dumps(OVERFLOW)}")).kind is Kind.FAILED
        assert case.session.status().conversation == conversation
        assert kinds.SESSION_CONTEXT_LOST not in await case.kinds()
        assert len(case.processes) == 1
        # A second overflow in a row retires the conversation, whatever the size of the prompt.
        assert (await case.answer(f"five {huge}\n@@boundary {json.dumps(OVERFLOW)}")).kind is Kind.FAILED
        assert kinds.SESSION_CONTEXT_LOST in await case.kinds()
        assert (await case.answer("six")).text == "six"
        assert resumed(case) == [[], []]


async def test_answer_that_quotes_overflow_error_is_no_overflow(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        assert (await case.answer(f"@@say {TOO_LONG}")).kind is Kind.DONE
        assert (await case.answer("next")).text == "next"
        assert kinds.SESSION_CONTEXT_LOST not in await case.kinds()


# -- scenario 48 -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["boundary", "ladder", "exit"])
async def test_timed_out_turn_is_not_resent_after_its_tools_ran(tmp_path: Path, how: str) -> None:
    setting = {"boundary": "", "ladder": "@@on_interrupt ignored\n", "exit": "@@at interrupt exit 1\n"}[how]
    work = f"work\n{setting}@@tool_use Bash\n@@tool_result done\n@@hang"
    options = {**SHORT_DRAIN, "clocks": {"bytes": 1.0}}
    async with opened(tmp_path, memory=True, options=options) as case:
        turn = await case.ask(work, on_preempt="requeue")
        outcome = await case.outcome(turn)
        assert (outcome.kind, outcome.clock) == (Kind.INTERRUPTED, "bytes")
        assert ended(await case.events(), turn)["by"] == how
        assert (await case.answer("next")).text == "next"
        assert prompts(case) == ["work", "next"]
        assert kinds.TURN_REQUEUED not in await case.kinds()


# -- scenario 25 -----------------------------------------------------------------------------------------------------
async def test_session_accepts_image_repeated_in_one_line(tmp_path: Path) -> None:
    data = "iVBORw0K" * 160_000
    source = {"type": "base64", "media_type": "image/png", "data": data}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "image", "source": source}]}
    line = json.dumps(
        {
            "type": "user",
            "message": {"role": "user", "content": [result]},
            "tool_use_result": {"type": "image", "file": {"base64": data}},
        }
    )
    async with opened(tmp_path) as case:
        outcome = await case.answer(f"@@tool_use Read\n@@raw {line}\n@@huge {8 << 20}\n@@say seen")
        assert (outcome.kind, outcome.text) == (Kind.DONE, "seen")
        # Both lines are kept unchanged.
        said = [event.data for event in await case.events() if event.kind == kinds.UPDATE]
        assert line.encode() in said
        assert max(map(len, said)) > 8 << 20
        assert (await case.answer("next")).text == "next"
        assert (len(case.processes), len(requests(case, "interrupt"))) == (1, 0)
