"""Sessions with Codex: a fake app-server, driven through the public API."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.sessions.helpers import QUICK, Case, bodies, check, exists

from banksman import Answer, Event, Host, Kind, Question, Turn, UsageError
from banksman.core.session import event as kinds
from banksman.core.session.outcome import By
from banksman.sessions import known_agents
from banksman.testing import fake_codex


@asynccontextmanager
async def opened(folder: Path, *, options: Mapping[str, Any] | None = None, **how: Any) -> AsyncGenerator[Case]:
    """Open a session with a fake Codex. At the end close it, and check everything that it left."""
    folder.mkdir(exist_ok=True)
    command = fake_codex.command(evidence=folder / "evidence", memory=folder / "memory")
    async with Host() as host:
        settings = {**QUICK, **(options or {})}
        session = await host.open("codex", command=command, cwd=str(folder), options=settings, **how)
        case = Case(host, session, folder)
        yield case
        await session.close()
        check(case, await case.events())


def sent(case: Case, method: str) -> list[dict[str, Any]]:
    """Return the parameters of each such request to the agent's processes, in order."""
    frames = [frame for process in case.processes for frame in process.frames]
    return [frame["params"] for frame in frames if frame.get("method") == method]


def replies(case: Case) -> list[Any]:
    """Return the replies to the agent's requests, in order."""
    frames = [frame for process in case.processes for frame in process.frames]
    return [frame.get("result", frame.get("error")) for frame in frames if "method" not in frame]


async def own_turns(case: Case) -> list[str]:
    """Return the turns that the agent started without an ask."""
    return [
        event.turn or "" for event in await case.events() if event.kind == kinds.TURN_STARTED and "origin" in event.body
    ]


# -- turns -----------------------------------------------------------------------------------------------------------
async def test_turn_reports_text_and_usage(tmp_path: Path) -> None:
    async with opened(tmp_path, model="m", permission_mode="untrusted", system_prompt="be kind") as case:
        outcome = await case.answer("@@think hm\n@@text Looking.\n@@ran ls\n@@text All is well.")
        assert (outcome.kind, outcome.text, outcome.stop_reason) == (Kind.DONE, "All is well.", "completed")
        assert outcome.usage == {"totalTokens": 15}
        assert (await case.answer("hello")).text == "you said: hello"
        assert sent(case, "thread/start") == [
            {"cwd": str(tmp_path), "model": "m", "approvalPolicy": "untrusted", "developerInstructions": "be kind"}
        ]
        assert await own_turns(case) == []


async def test_turn_yields_updates_in_order(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        turn = await case.ask("@@think hm\n@@ran ls\n@@slow 2 0")
        updates = [update async for update in turn]
        await case.outcome(turn)
        assert [update["sessionUpdate"] for update in updates] == [
            *("agent_thought_chunk", "tool_call", "tool_call_update"),
            *("agent_message_chunk", "agent_message_chunk", "usage_update"),
        ]


async def test_ask_with_schema_returns_value_or_fails(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    async with opened(tmp_path) as case:
        assert (await case.answer('@@text {"a": 1}', schema=schema)).structured == {"a": 1}
        assert sent(case, "turn/start")[0]["outputSchema"] == schema
        failed = await case.answer("@@text words", schema=schema)
        assert failed.kind is Kind.FAILED


@pytest.mark.parametrize(
    ("prompt", "words"), [("@@error the model is gone", "the model is gone"), ("@@exit 3", "3")], ids=["error", "exit"]
)
async def test_failed_turn_reports_error_and_next_turn_runs(tmp_path: Path, prompt: str, words: str) -> None:
    async with opened(tmp_path) as case:
        outcome = await case.answer(prompt)
        assert outcome.kind is Kind.FAILED
        assert words in str(outcome.error)
        assert (await case.answer("on")).text == "you said: on"


async def test_late_duplicate_and_stray_replies_are_ignored(tmp_path: Path) -> None:
    strays = "\n".join(f"@@stray {id}" for id in ("0", "1", "3", "999", '"3"', "null"))
    async with opened(tmp_path) as case:
        assert (await case.answer("@@late_reply\n@@text late")).text == "late"
        assert (await case.answer(f"@@twice\n{strays}\n@@raw garbage\n@@raw [1]\n@@raw []\n@@text well")).text == "well"
        assert (await case.answer("@@again\n@@text once")).text == "once"
        assert (await case.answer("@@text next")).text == "next"
        assert await own_turns(case) == []


async def test_oversized_reply_with_trailing_id_is_ignored(tmp_path: Path) -> None:
    async with opened(tmp_path, options={"frame_bytes_max": 1 << 20}) as case:
        assert (await case.answer("@@huge_reply\n@@text well")).text == "well"
        assert await own_turns(case) == []


async def test_oversized_answer_fails_only_its_turn(tmp_path: Path) -> None:
    async with opened(tmp_path, options={"frame_bytes_max": 100_000}) as case:
        outcome = await case.answer("@@huge 300000")
        assert (outcome.kind, str(outcome.error)) == (Kind.FAILED, "frame_too_large")
        assert (await case.answer("@@text small")).text == "small"


async def test_agent_initiated_turn_is_kept_apart_from_asked_ones(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        assert (await case.answer("@@text mine\n@@own by myself")).text == "mine"
        # The agent's output for this turn may come before the start of the turn.
        await case.wait_event(lambda event: event.kind == kinds.TURN_STARTED and "origin" in event.body)
        await case.wait_said("by myself")
        assert (await case.answer("@@text mine again")).text == "mine again"
        assert len(await own_turns(case)) == 1


# -- steering --------------------------------------------------------------------------------------------------------
async def test_steered_prompt_joins_running_turn(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        go = case.path("go")
        first = await case.reaches(f"@@text one\n@@await {go}")
        second = await case.ask("@@text two", on_busy="steer")
        await case.wait_said('"result":{"turnId":')
        go.touch()
        assert (await case.outcome(first)).text == "two"
        assert (await case.outcome(second)).text == "two"
        assert len(sent(case, "turn/start")) == 1
        assert sent(case, "turn/steer")[0]["input"] == [{"type": "text", "text": "@@text two"}]


async def test_steer_is_refused_when_agent_lacks_capability(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = known_agents.load("codex")
    less = dataclasses.replace(known, capabilities=known.capabilities - {"steer"})

    def load(name: str, **_: bool) -> known_agents.Profile:
        return less

    monkeypatch.setattr(known_agents, "load", load)
    async with opened(tmp_path) as case:
        with pytest.raises(UsageError, match="does not support steering"):
            await case.session.ask("more", on_busy="steer")


async def test_steered_prompt_gets_own_turn_when_agent_refuses_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        go = case.path("go")
        first = await case.reaches(f"@@text one\n@@deaf\n@@await {go}")
        second = await case.ask("@@text two", on_busy="steer")
        await case.wait_said("no active turn to steer")
        go.touch()
        assert (await case.outcome(first)).text == "one"
        assert (await case.outcome(second)).text == "two"
        assert len(sent(case, "turn/start")) == 2


# -- interrupts ------------------------------------------------------------------------------------------------------
async def test_interrupt_during_stream_keeps_partial_text(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        turn = await case.ask("@@slow 1000 0.01")
        await case.wait_said("tick1 ")
        receipt = await turn.interrupt()
        assert (receipt.stopped, receipt.by) == (True, By.BOUNDARY)
        outcome = await case.outcome(turn)
        assert outcome.kind is Kind.INTERRUPTED
        assert (outcome.text or "").startswith("tick0 tick1 ")
        assert (await case.answer("next")).text == "you said: next"
        assert len(case.processes) == 1


async def test_interrupt_before_turn_is_named_leaves_session_usable(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        await case.answer("first")
        for number in range(10):
            turn = await case.ask("@@hang")
            await turn.interrupt()
            assert (await case.outcome(turn)).kind in (Kind.INTERRUPTED, Kind.WITHDRAWN)
            assert (await case.answer(f"next {number}")).text == f"you said: next {number}"
        assert len(case.processes) == 1


async def _in_a_tool(case: Case, folder: Path) -> tuple[Turn, list[int]]:
    pids = folder / "pids"
    turn = await case.ask(f"@@tool {pids}")
    await exists(folder / "pids.ready")
    return turn, [int(line) for line in pids.read_text().split()]


def _is_alive(pid: int) -> bool:
    """Return whether the process lives. A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_interrupt_sweeps_processes_of_running_command(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        turn, pids = await _in_a_tool(case, tmp_path)
        assert len(pids) == 4
        await turn.interrupt()
        assert (await case.outcome(turn)).kind is Kind.INTERRUPTED
        # The next prompt is sent only after the sweep.
        assert (await case.answer("next")).text == "you said: next"
        assert not any(map(_is_alive, pids))
        (swept,) = bodies(await case.events(), kinds.PROCESS_SWEPT)
        assert swept["by"] == "interrupt"
        assert len(case.processes) == 1


@pytest.mark.thorough
async def test_interrupt_keeps_processes_until_close_when_configured(tmp_path: Path) -> None:
    async with opened(tmp_path, options={"after_interrupt": "keep"}) as case:
        turn, pids = await _in_a_tool(case, tmp_path)
        await turn.interrupt()
        await case.outcome(turn)
        assert (await case.answer("next")).text == "you said: next"
        assert all(map(_is_alive, pids))
        await case.session.close()
        assert not any(map(_is_alive, pids))


# -- questions -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("answer", "decision"),
    [
        ("allow", "accept"),
        ("deny", "decline"),
        (Answer("allow", remember="session"), "acceptForSession"),
    ],
    ids=["allow", "deny", "remember"],
)
async def test_question_is_answered_under_its_request_id(tmp_path: Path, answer: Any, decision: Any) -> None:
    asked: list[Question] = []

    def on_question(question: Question) -> Any:
        asked.append(question)
        return answer

    async with opened(tmp_path, on_question=on_question) as case:
        for number in range(4):
            # The agent numbers its requests from 0, so each number is also used by a request of the session.
            outcome = await case.answer(f"@@permission touch {number}")
            assert outcome.text == f"answered {json.dumps(decision)}"
        assert [question.input["command"] for question in asked] == [f"touch {number}" for number in range(4)]
        assert asked[0].tool == "commandExecution"
        assert replies(case) == [{"decision": decision}] * 4


async def test_answer_with_updated_input_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        turn = await case.ask("@@permission rm -rf /")
        asked = (await case.wait_kind(kinds.QUESTION_ASKED)).body["question"]
        with pytest.raises(UsageError, match="does not support updated_input"):
            await case.session.answer(asked, "allow", updated_input={"command": "ls"})
        assert replies(case) == []
        await case.session.answer(asked, "deny")
        assert (await case.outcome(turn)).text == 'answered "decline"'


async def test_question_is_cancelled_when_its_turn_is_interrupted(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        turn = await case.ask("@@permission rm")
        await case.wait_kind(kinds.QUESTION_ASKED)
        receipt = await turn.interrupt()
        assert receipt.stopped
        assert (await case.outcome(turn)).kind is Kind.INTERRUPTED
        assert case.session.questions() == []
        assert (await case.answer("next")).text == "you said: next"
        assert replies(case) == [{"decision": "cancel"}]


async def test_unknown_request_is_refused_and_turn_continues(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        assert (await case.answer("@@request currentTime/read")).text == "answered -32601"


# -- settings and the thread -----------------------------------------------------------------------------------------
async def test_model_and_policy_change_with_next_turn(tmp_path: Path) -> None:
    async with opened(tmp_path, model="one") as case:
        assert json.loads((await case.answer("@@settings")).text or "") == {"model": "one"}
        await case.session.set_model("two")
        await case.session.set_permission_mode("never")
        changed = {"model": "two", "approvalPolicy": "never"}
        assert json.loads((await case.answer("@@settings")).text or "") == changed
        assert len(case.processes) == 1


async def killed(case: Case) -> Event:
    os.kill(case.processes[-1].pid, signal.SIGKILL)
    return await case.wait_kind(kinds.PROCESS_EXITED)


async def test_thread_is_resumed_after_agent_is_killed(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        await case.answer("remember 42")
        await killed(case)
        assert (await case.answer("again")).text == "you said: again"
        thread = sent(case, "turn/start")[0]["threadId"]
        assert [params["threadId"] for params in sent(case, "thread/resume")] == [thread]
        assert sent(case, "turn/start")[1]["threadId"] == thread
        assert kinds.SESSION_CONTEXT_LOST not in await case.kinds()


async def test_missing_thread_is_reported_as_lost_context(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        await case.answer("remember 42")
        for path in (tmp_path / "memory").iterdir():
            path.unlink()
        await killed(case)
        assert (await case.answer("again")).text == "you said: again"
        (lost,) = bodies(await case.events(), kinds.SESSION_CONTEXT_LOST)
        assert "no rollout found" in lost["error"]
        assert sent(case, "turn/start")[1]["threadId"] != sent(case, "turn/start")[0]["threadId"]
