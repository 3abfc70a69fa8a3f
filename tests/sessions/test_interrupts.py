"""Interrupts of a turn: the right turn stops, its text is kept, and the next turn is not affected."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.sessions.helpers import SHORT_DRAIN, bodies, ended, exists, interrupts, opened, prompts, sent, touch

from banksman import By, Kind
from banksman.core.session import event as kinds


async def test_interrupted_turn_keeps_its_text(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        turn = await case.reaches("@@say first part\n@@stream 3 0\n@@hang")
        receipt = await turn.interrupt()
        outcome = await case.outcome(turn)
        assert receipt.stopped
        assert receipt.by is By.BOUNDARY
        assert outcome.kind is Kind.INTERRUPTED
        assert outcome.error is None
        assert receipt.kept is not None
        assert receipt.kept == outcome.text
        assert "tick0 tick1 tick2 " in receipt.kept
        assert (await case.answer("next")).text == "next"
        assert len(case.processes) == 1


async def test_interrupted_turn_keeps_unfinished_sentence(tmp_path: Path) -> None:
    """The interrupt comes during the stream, so a part of the sentence is there."""
    async with opened(tmp_path) as case:
        turn = await case.ask("@@stream 1000 0.02")
        await case.wait_said("tick1 ")
        receipt = await turn.interrupt()
        assert receipt.kept is not None
        assert receipt.kept.startswith("tick0 tick1 ")
        assert (await case.outcome(turn)).text == receipt.kept


async def test_empty_result_after_interrupt_is_not_success(tmp_path: Path) -> None:
    """After the acknowledgement, a result without an error and without text ends the turn."""
    empty = '{"type":"result","subtype":"success","is_error":false,"result":""}'
    mark = tmp_path / "mark"
    script = {"prompt 1": ["omit result", "omit completed", f"at acked raw {empty}", f"touch {mark}", "hang"]}
    async with opened(tmp_path, script) as case:
        turn = await case.ask("first")
        await case.reached(mark)
        receipt = await turn.interrupt()
        assert receipt.stopped
        assert (await case.outcome(turn)).kind is Kind.INTERRUPTED
        assert (await case.answer("next")).text == "next"


async def test_interrupt_of_idle_session_reports_already_over(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        before = await case.session.interrupt()
        assert (before.stopped, before.by) == (False, By.ALREADY_OVER)
        turn = await case.ask("one")
        await case.outcome(turn)
        for receipt in (await case.session.interrupt(), await turn.interrupt(), await case.session.interrupt("t-none")):
            assert (receipt.stopped, receipt.by) == (False, By.ALREADY_OVER)
        assert (await case.answer("two")).text == "two"
        assert interrupts(case) == 0


async def test_late_interrupt_does_not_stop_next_turn(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        first = await case.ask("first")
        await case.outcome(first)
        go = case.path("go")
        second = await case.reaches(f"@@say second\n@@wait {go}")
        receipt = await first.interrupt()
        assert (receipt.stopped, receipt.by) == (False, By.ALREADY_OVER)
        touch(go)
        assert (await case.outcome(second)).kind is Kind.DONE
        assert interrupts(case) == 0


async def test_interrupt_at_end_of_turn_does_not_stop_next_turn(tmp_path: Path) -> None:
    """The next ask is queued already, so the agent gets it right after the first result."""
    async with opened(tmp_path) as case:
        for number in range(20):
            first = await case.ask(f"first {number}")
            second = await case.ask(f"second {number}")
            receipt = await first.interrupt()
            outcome = await case.outcome(first)
            stopped = (Kind.INTERRUPTED, Kind.WITHDRAWN)
            assert outcome.kind in (stopped if receipt.stopped else (Kind.DONE,))
            assert (await case.outcome(second)).text == f"second {number}"


async def test_turn_that_finishes_before_interrupt_is_done(tmp_path: Path) -> None:
    """The boundary was on its way when the interrupt was sent."""
    async with opened(tmp_path, ["on_interrupt finished"]) as case:
        turn = await case.reaches("@@say all of it\n@@hang")
        receipt = await turn.interrupt()
        outcome = await case.outcome(turn)
        assert outcome.kind is Kind.DONE
        assert outcome.text == "all of it"
        assert not receipt.stopped
        assert receipt.by is By.BOUNDARY
        assert (await case.answer("next")).text == "next"
        assert len(case.processes) == 1


@pytest.mark.parametrize("point", ["initialize", "read", "queued", "started", "init"])
@pytest.mark.parametrize("how", ["boundary", "ignored_early"])
async def test_interrupt_is_honoured_at_every_point_of_start(tmp_path: Path, point: str, how: str) -> None:
    reached, go = tmp_path / "reached", tmp_path / "go"
    script = {
        "process": [f"on_interrupt {how}", f"at {point} touch {reached}", f"at {point} wait {go}"],
        "prompt first": ["say said", "hang"],
    }
    async with opened(tmp_path, script) as case:
        turn = await case.ask("first")
        await exists(reached)
        interrupting = asyncio.ensure_future(turn.interrupt())
        await asyncio.sleep(0)
        if point != "initialize":
            # The agent continues only after it has the interrupt.
            await case.wait_said("still_queued")
        touch(go)
        receipt = await interrupting
        assert receipt.stopped
        assert (await case.outcome(turn)).kind in (Kind.INTERRUPTED, Kind.WITHDRAWN)
        assert (await case.answer("next")).text == "next"
        assert len(case.processes) == 1
        assert prompts(case).count("first") == (0 if point == "initialize" else 1)


async def test_interrupt_before_first_byte_sends_nothing(tmp_path: Path) -> None:
    """Nothing is sent between the grant and the commit of the turn's start.

    After the interrupt nothing is sent either.
    """
    async with opened(tmp_path) as case:
        await case.answer("warm")
        asking = asyncio.ensure_future(case.ask("never sent"))
        await asyncio.sleep(0)
        assert case.session.status().phase == "starting"
        receipt = await case.session.interrupt()
        assert (receipt.stopped, receipt.by) == (True, By.WITHDRAWN)
        turn = await asking
        assert (await case.outcome(turn)).kind is Kind.INTERRUPTED
        assert (await case.answer("next")).text == "next"
        assert prompts(case) == ["warm", "next"]


async def test_interrupt_of_queued_turn_withdraws_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        first = await case.running("first")
        second, third = await case.ask("second"), await case.ask("third")
        receipt = await second.interrupt()
        assert (receipt.stopped, receipt.by) == (True, By.WITHDRAWN)
        assert receipt.queued == (third.id,)
        assert (await case.outcome(second)).kind is Kind.WITHDRAWN
        receipt = await first.interrupt()
        assert receipt.queued == (third.id,)
        assert (await case.outcome(third)).text == "third"
        assert prompts(case) == ["first", "third"]


async def test_concurrent_interrupts_all_get_a_receipt(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        turn = await case.running("one")
        receipts = await asyncio.gather(*(turn.interrupt() for _ in range(5)), case.session.interrupt())
        assert {(receipt.stopped, receipt.by) for receipt in receipts} == {(True, By.BOUNDARY)}
        await case.outcome(turn)
        assert interrupts(case) == 1


async def test_interrupt_takes_effect_after_its_caller_is_cancelled(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        turn = await case.running("one")
        interrupting = asyncio.ensure_future(turn.interrupt())
        await asyncio.sleep(0)
        interrupting.cancel()
        await asyncio.wait([interrupting])
        assert (await case.outcome(turn)).kind is Kind.INTERRUPTED


async def test_next_prompt_waits_for_late_acknowledgement(tmp_path: Path) -> None:
    """A late answer to an interrupt could apply to the next turn. So the next prompt waits for it."""
    async with opened(tmp_path, ["on_interrupt late_ack"]) as case:
        turn = await case.running("one")
        assert (await turn.interrupt()).stopped
        assert (await case.answer("two")).text == "two"
        order = [
            "ack" if b"still_queued" in event.data else "prompt"
            for event in await case.events()
            if b"still_queued" in event.data or (event.kind == kinds.SENT and b'"type":"user"' in event.data)
        ]
        assert order == ["prompt", "ack", "prompt"]
        assert len(case.processes) == 1


async def test_session_recovers_from_boundary_without_acknowledgement(tmp_path: Path) -> None:
    async with opened(tmp_path, ["on_interrupt unacked"], memory=True, options=SHORT_DRAIN) as case:
        turn = await case.running("one")
        assert (await turn.interrupt()).stopped
        assert (await case.outcome(turn)).kind is Kind.INTERRUPTED
        assert (await case.answer("two")).text == "two"
        assert len(case.processes) == 2


@pytest.mark.parametrize("how", ["ack_only", "ignored", "unanswered"])
async def test_process_is_replaced_when_interrupt_gets_no_boundary(tmp_path: Path, how: str) -> None:
    async with opened(tmp_path, [f"on_interrupt {how}"], memory=True, options=SHORT_DRAIN) as case:
        await case.answer("zero")
        turn = await case.reaches("one\n@@say so far\n@@hang")
        waiting = await case.ask("two\n@@recall")
        receipt = await turn.interrupt()
        assert receipt.stopped
        assert receipt.by is By.LADDER
        assert receipt.kept == "so far"
        assert receipt.queued == (waiting.id,)
        outcome = await case.outcome(turn)
        assert outcome.kind is Kind.INTERRUPTED
        assert outcome.text == "so far"
        assert "zero" in ((await case.outcome(waiting)).text or "")
        first, second = case.processes
        assert not any(word.startswith("--resume") for word in first.argv)
        assert any(word.startswith("--resume=") for word in second.argv)
        # The interrupted turn is not repeated by the new process.
        assert prompts(case) == ["zero", "one", "two"]


async def test_agent_that_ignores_every_signal_is_killed(tmp_path: Path) -> None:
    script = ["on_interrupt unanswered", "ignore term", "ignore eof"]
    options = {**SHORT_DRAIN, "grace": 0.3}
    async with opened(tmp_path, script, memory=True, options=options) as case:
        turn = await case.running("one")
        assert (await turn.interrupt()).by is By.LADDER
        assert (await case.answer("two")).text == "two"
        exits = bodies(await case.events(), kinds.PROCESS_EXITED)
        assert exits[0]["signal"] == 9


async def test_boundary_during_process_end_still_counts(tmp_path: Path) -> None:
    """The drain is over and stdin is closed. Then the agent sends its boundary and exits."""
    script = {"prompt 1": ["on_interrupt unanswered", "say all of it", "await eof", "result at last"]}
    async with opened(tmp_path, script, memory=True, options={"drain_seconds": 0.2, "eof_grace": 5.0}) as case:
        turn = await case.ask("one")
        await case.wait_said("all of it")
        receipt = await turn.interrupt()
        outcome = await case.outcome(turn)
        assert outcome.kind is Kind.DONE
        assert outcome.text == "at last"
        assert (receipt.stopped, receipt.by) == (False, By.BOUNDARY)


async def test_turn_is_interrupted_by_exit_when_agent_dies_of_interrupt(tmp_path: Path) -> None:
    async with opened(tmp_path, {"prompt 1": ["at interrupt exit 1", "say x", "hang"]}, memory=True) as case:
        turn = await case.ask("one")
        await case.wait_said('"text":"x"')
        receipt = await turn.interrupt()
        assert (receipt.stopped, receipt.by) == (True, By.EXIT)
        assert (await case.outcome(turn)).kind is Kind.INTERRUPTED
        assert (await case.answer("two")).text == "two"


# -- clocks ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["boundary", "unanswered"])
async def test_endless_stream_is_ended_by_overall_clock(tmp_path: Path, how: str) -> None:
    options = {**SHORT_DRAIN, "clocks": {"overall": 1.0}}
    async with opened(tmp_path, [f"on_interrupt {how}"], memory=True, options=options) as case:
        turn = await case.ask("one\n@@stream 1000000 0.005")
        outcome = await case.outcome(turn)
        assert outcome.kind is Kind.INTERRUPTED
        assert outcome.clock == "overall"
        assert (outcome.text or "").startswith("tick0 ")
        events = await case.events()
        assert ended(events, turn)["clock"] == "overall"
        assert ended(events, turn)["by"] == ("boundary" if how == "boundary" else "ladder")
        # The set is empty if the machine paused between the warning and the end. tests/simulation covers it in virtual
        # time.
        assert {warning["clock"] for warning in bodies(events, kinds.CLOCK_WARNING)} <= {"overall"}
        assert (await case.answer("two")).text == "two"
        # The end of the old process came later, and had no effect.
        assert len(case.processes) == (1 if how == "boundary" else 2)


async def test_endless_chatter_is_ended_by_progress_clock(tmp_path: Path) -> None:
    noise = [step for _ in range(400) for step in ("pause 0.01", "junk text")]
    options = {"clocks": {"progress": 1.0, "bytes": 5.0}}
    async with opened(tmp_path, {"prompt 1": noise}, options=options) as case:
        outcome = await case.answer("one")
        assert outcome.kind is Kind.INTERRUPTED
        assert outcome.clock == "progress"
        assert (await case.answer("two")).text == "two"


async def test_silent_turn_is_ended_by_bytes_clock(tmp_path: Path) -> None:
    async with opened(tmp_path, options={"clocks": {"bytes": 1.0}}) as case:
        outcome = await case.answer("one\n@@say x\n@@hang")
        assert (outcome.kind, outcome.clock) == (Kind.INTERRUPTED, "bytes")
        assert (await case.answer("two")).text == "two"


@pytest.mark.thorough
async def test_long_turn_with_progress_is_not_ended_by_silence_clocks(tmp_path: Path) -> None:
    """The turn takes longer than either clock allows for one silence."""
    async with opened(tmp_path, options={"clocks": {"bytes": 5.0, "progress": 5.0}}) as case:
        outcome = await case.answer("@@stream 60 0.1")
        assert outcome.kind is Kind.DONE
        assert outcome.clock is None
        assert interrupts(case) == 0


@pytest.mark.thorough
async def test_clocks_start_when_prompt_is_sent(tmp_path: Path) -> None:
    async with opened(tmp_path, options={"clocks": {"overall": 5.0}}) as case:
        outcomes = [await case.ask(f"{n}\n@@pause 2\n@@say {n}") for n in range(3)]
        assert [(await case.outcome(turn)).text for turn in outcomes] == ["0", "1", "2"]


async def test_streaming_turn_is_interrupted_by_caller(tmp_path: Path) -> None:
    async with opened(tmp_path, ["on_interrupt unanswered"], memory=True, options=SHORT_DRAIN) as case:
        turn = await case.ask("one\n@@stream 1000000 0.002")
        await case.wait_said("tick3 ")
        waiting = await case.ask("two")
        assert (await turn.interrupt()).by is By.LADDER
        assert (await case.outcome(waiting)).text == "two"
        assert (await case.answer("three")).text == "three"
        assert len(case.processes) == 2


# -- control requests that are never answered ------------------------------------------------------------------------
async def test_unanswered_handshake_fails_by_start_clock(tmp_path: Path) -> None:
    async with opened(tmp_path, ["omit initialize"], options={"start_seconds": 0.3}) as case:
        outcome = await case.answer("one")
        assert outcome.kind is Kind.FAILED
        assert "start" in str(outcome.error)
        assert prompts(case) == []
        assert [frame["type"] for frame in sent(case)] == ["control_request"]
