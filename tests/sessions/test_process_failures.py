"""Processes come and go, and the session stays. A failed start or an internal bug fails only its session."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.sessions.helpers import QUICK, bodies, opened, prompts

from banksman import AgentError, BugError, Host, Kind, UsageError
from banksman.core.session import event as kinds
from banksman.core.session import step as core
from banksman.core.session.facts import Fact, FramesRead, InterruptAsked
from banksman.core.session.state import Session as State
from banksman.testing import checks, fake_agent


# -- replaced processes ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["exit 0", "exit 1", "kill 9"])
async def test_process_that_dies_idle_is_replaced_and_conversation_resumes(tmp_path: Path, how: str) -> None:
    async with opened(tmp_path, {"prompt 1": ["say one", f"at idle {how}"]}, memory=True) as case:
        await case.answer("one")
        await case.wait_kind(kinds.PROCESS_EXITED)
        assert (await case.answer("@@recall")).text == json.dumps(["one", "@@recall"])
        conversation = case.session.status().conversation
        assert f"--resume={conversation}" in case.processes[1].argv
        assert kinds.SESSION_CONTEXT_LOST not in await case.kinds()


async def test_process_killed_as_ask_arrives_still_yields_an_outcome(tmp_path: Path) -> None:
    """The kill comes at any moment: before the prompt, during it, or after it."""
    async with opened(tmp_path, memory=True) as case:
        for number in range(6):
            await case.answer("warm")
            os.kill(case.session.status().pids[0], signal.SIGKILL)
            for _ in range(number * 3):
                await asyncio.sleep(0)
            outcome = await case.answer(f"ask {number}")
            assert outcome.kind in (Kind.DONE, Kind.FAILED)
            if outcome.kind is Kind.DONE:
                assert outcome.text == f"ask {number}"
            else:
                assert isinstance(outcome.error, AgentError)
        assert (await case.answer("last")).text == "last"


async def test_unknown_conversation_fails_ask_and_begins_fresh(tmp_path: Path) -> None:
    async with opened(tmp_path, resume="11111111-2222-4333-8444-555555555555", memory=True) as case:
        outcome = await case.answer("go on with it")
        assert outcome.kind is Kind.FAILED
        assert "11111111-2222" in str(outcome.error)
        assert (await case.answer("one")).text == "one"
        lost = bodies(await case.events(), kinds.SESSION_CONTEXT_LOST)
        assert [body["conversation"] for body in lost] == ["11111111-2222-4333-8444-555555555555"]
        assert "No conversation found" in lost[0]["error"]
        assert len(case.processes) == 2
        assert not any(word.startswith("--resume") for word in case.processes[1].argv)


async def test_existing_conversation_of_agent_is_adopted(tmp_path: Path) -> None:
    async with opened(tmp_path, memory=True) as case:
        await case.answer("remember this")
        conversation = case.session.status().conversation
    async with opened(tmp_path, memory=True, resume=conversation, is_checked=False) as case:
        assert "remember this" in ((await case.answer("@@recall")).text or "")
        assert kinds.SESSION_CONTEXT_LOST not in await case.kinds()


async def test_new_process_has_new_epoch_and_continues_numbering(tmp_path: Path) -> None:
    async with opened(tmp_path, memory=True) as case:
        await case.answer("@@say one\n@@at idle exit 0")
        await case.wait_kind(kinds.PROCESS_EXITED)
        await case.answer("two")
        events = await case.events()
        checks.log(events)
        started = [event for event in events if event.kind == kinds.PROCESS_STARTED]
        assert started[0].epoch < started[1].epoch
        assert [event.body["process"] for event in started] == [1, 2]


async def test_process_tree_left_by_agent_is_swept_and_logged(tmp_path: Path) -> None:
    async with opened(tmp_path, memory=True) as case:
        outcome = await case.answer("@@hold 60 setsid\n@@exit 1")
        assert outcome.kind is Kind.FAILED
        swept = bodies(await case.events(), kinds.PROCESS_SWEPT)
        assert [process["pid"] for process in swept[0]["swept"]] == case.processes[0].holders


# -- failed starts ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("script", "word"),
    [
        (["stderr no key", "exit 3"], "code 3"),
        (["at initialize stderr no key", "at initialize exit 0"], "code 0"),
        (["at initialize stderr no key", "at initialize kill 9"], "signal 9"),
    ],
)
async def test_process_that_dies_before_ready_fails_its_ask(tmp_path: Path, script: list[str], word: str) -> None:
    async with opened(tmp_path, script) as case:
        turns = [await case.ask(f"ask {number}") for number in range(3)]
        for turn in turns:
            outcome = await case.outcome(turn)
            assert outcome.kind is Kind.FAILED
            assert isinstance(outcome.error, AgentError)
            assert word in str(outcome.error)
            assert "no key" in outcome.error.hint
        # Exactly one start for each ask.
        assert len(case.processes) == 3
        assert prompts(case) == []


async def test_refused_handshake_fails_its_ask(tmp_path: Path) -> None:
    refusal = {
        "type": "control_response",
        "response": {"subtype": "error", "request_id": "handshake-1", "error": "not today"},
    }
    async with opened(tmp_path, ["omit initialize", f"at initialize raw {json.dumps(refusal)}"]) as case:
        outcome = await case.answer("one")
        assert outcome.kind is Kind.FAILED
        assert "not today" in str(outcome.error)


async def test_open_with_missing_program_is_usage_error(tmp_path: Path) -> None:
    async with Host() as host:
        with pytest.raises(UsageError):
            await host.open("claude", command=[str(tmp_path / "none")])
        with pytest.raises(UsageError):
            await host.open("nobody")
        with pytest.raises(UsageError):
            await host.open("claude", command=fake_agent.command(), options={"no_such": 1})
        assert host.sessions() == []


async def test_program_that_vanishes_fails_ask_and_not_session(tmp_path: Path) -> None:
    program = tmp_path / "agent"
    words = " ".join(f"'{word}'" for word in fake_agent.command())
    program.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    program.chmod(0o700)
    async with Host() as host:
        session = await host.open("claude", command=[str(program)], options=QUICK)
        program.rename(tmp_path / "away")
        outcome = await (await session.ask("one")).outcome()
        assert outcome.kind is Kind.FAILED
        assert outcome.error is not None
        (tmp_path / "away").rename(program)
        assert (await (await session.ask("two")).outcome()).text == "two"


async def test_agent_that_reads_nothing_fails_by_start_clock(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import signal; signal.alarm(60); signal.pause()"]
    async with Host() as host:
        session = await host.open("claude", command=command, options={**QUICK, "start_seconds": 0.2})
        outcome = await (await session.ask("one")).outcome()
        assert outcome.kind is Kind.FAILED
        assert "start" in str(outcome.error)


# -- sessions beside each other --------------------------------------------------------------------------------------
async def test_sessions_of_one_host_do_not_disturb_each_other(tmp_path: Path) -> None:
    async with Host() as host, opened(tmp_path / "a", ["on_interrupt unanswered"], host=host) as one:
        other = await host.open("claude", command=fake_agent.command(evidence=tmp_path / "b"), options=QUICK)
        hanging = await one.running("hanging")
        for word in ("x", "y"):
            assert (await (await other.ask(word)).outcome()).text == word
        os.kill(one.session.status().pids[0], signal.SIGKILL)
        assert (await one.outcome(hanging)).kind is Kind.FAILED
        assert (await (await other.ask("z")).outcome()).text == "z"
        assert other.status().counters["processes"] == 1
        await other.close()
        assert (await one.answer("again")).text == "again"


# -- internal bugs ---------------------------------------------------------------------------------------------------
def _break(monkeypatch: pytest.MonkeyPatch, kind: type[Any]) -> None:
    """Inject a bug into the state machine of one session, for facts of this kind."""
    step = core.step

    def broken(state: State, fact: Fact) -> Any:
        if state.config.queue_max == 77 and isinstance(fact, kind):
            raise AssertionError("a bug, on purpose")
        return step(state, fact)

    monkeypatch.setattr(core, "step", broken)


async def test_internal_bug_fails_only_its_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with Host() as host:
        options = {**QUICK, "queue_max": 77}
        session = await host.open("claude", command=fake_agent.command(evidence=tmp_path), options=options)
        other = await host.open("claude", command=fake_agent.command(), options=QUICK)
        turn = await session.ask("@@say so far\n@@hang")
        async for update in turn:
            if update.get("sessionUpdate") == "agent_message_chunk":
                break
        waiting = await session.ask("waiting")
        holding = asyncio.ensure_future(session.hold().__aenter__())
        await asyncio.sleep(0)
        pid = session.status().pids[0]
        _break(monkeypatch, InterruptAsked)
        with pytest.raises(BugError):
            await turn.interrupt()
        for each in (turn, waiting):
            outcome = await each.outcome()
            assert outcome.kind is Kind.FAILED
            assert isinstance(outcome.error, BugError)
            assert not outcome.durable
        with pytest.raises(BugError):
            await holding
        with pytest.raises(BugError):
            await session.ask("more")
        assert session.status().phase == "failed"
        assert "a bug, on purpose" in caplog.text
        assert "InterruptAsked" in caplog.text
        assert (await (await other.ask("fine")).outcome()).text == "fine"
        await session.close()
        assert not os.path.exists(f"/proc/{pid}")
        assert (await (await other.ask("still")).outcome()).text == "still"


async def test_internal_bug_in_frame_handling_ends_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Host() as host:
        options = {**QUICK, "queue_max": 77}
        session = await host.open("claude", command=fake_agent.command(evidence=tmp_path), options=options)
        _break(monkeypatch, FramesRead)
        turn = await session.ask("one")
        assert isinstance((await turn.outcome()).error, BugError)
        assert [event async for event in session.follow()] != []
        await host.close()
        (process,) = fake_agent.Evidence(tmp_path).processes
        assert not os.path.exists(f"/proc/{process.pid}")


async def test_flight_recording_replays_to_same_state(tmp_path: Path) -> None:
    async with opened(tmp_path, memory=True) as case:
        await case.answer("@@stream 100 0")
        turn = await case.running("two", priority="background")
        await case.answer("three")
        await case.outcome(turn)
        driver = case.session._driver  # pyright: ignore[reportPrivateUsage]
        flight = driver.recorder.flight()
        assert flight is not None
        state, facts = flight
        for fact in facts:
            state, _effects = core.step(state, fact)
        assert state == driver.state
        assert len(facts) >= 20
