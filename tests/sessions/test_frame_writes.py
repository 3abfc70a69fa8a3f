"""Frames as bytes: whole and in order, whatever is full, slow, cut or broken; and frames that are too large to keep."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.sessions.helpers import SHORT_DRAIN, exists, interrupts, opened, prompts, touch
from tests.thorough import thorough

from banksman import AgentError, By, Kind
from banksman.core.dialects.claude import CLAUDE
from banksman.core.session import event as kinds
from banksman.core.session.state import Stdin
from banksman.core.wire.framing import Framed, MixedChunk, OversizeBegan, OversizeEnded, OversizePiece
from banksman.sessions import frame_reader, log_writer
from banksman.sessions.diagnostics import Counters
from banksman.testing import checks

pytestmark = thorough

LARGE = "x" * 200_000
# More than any pipe to the agent holds.
HUGE = "y" * 4_000_000


async def test_concurrent_callers_never_mix_frame_bytes(tmp_path: Path) -> None:
    """Large and small frames with interrupts between them, and an agent that reads in small pieces."""
    async with opened(tmp_path, ["read_slowly 3000 0"]) as case:

        async def call(caller: int) -> None:
            for number in range(4):
                word = f"caller{caller}number{number}x"
                body = LARGE[: (caller * 37_000 + number * 9_000) % 200_000]
                ends = "@@hang" if (caller + number) % 3 == 0 else f"@@say {word}"
                turn = await case.ask(f"{word}\n{body}\n@@say {word}\n{ends}", priority=caller % 3 * 10)
                if (caller + number) % 3 == 0:
                    await case.wait_kind(kinds.TURN_STARTED, turn)
                    await turn.interrupt()
                outcome = await case.outcome(turn)
                if outcome.kind is Kind.DONE:
                    assert outcome.text == word

        await asyncio.gather(*(call(caller) for caller in range(8)))
        assert len(case.processes) == 1
        assert len(case.outcomes) == 32
        # The bytes that the agent read are the bytes that were sent, frame by frame, and each frame is whole.
        frames = checks.frames(case.processes[0].stdin)
        assert max(len(json.dumps(frame)) for frame in frames) > 65536
        assert interrupts(case) > 0


async def test_frame_of_megabytes_reaches_slow_reader_whole(tmp_path: Path) -> None:
    async with opened(tmp_path, ["read_slowly 65536 0.001"]) as case:
        turn = await case.ask(f"{HUGE}\n@@say read it")
        second = await case.ask("second")
        assert (await case.outcome(turn)).text == "read it"
        assert (await case.outcome(second)).text == "second"
        first, _ = checks.prompts(case.processes[0].stdin)
        assert first == f"{HUGE}\n@@say read it"


# -- stdin is full ---------------------------------------------------------------------------------------------------
# The conversation is known after the first turn. Then the agent reads only a piece of the next prompt.
DEAF = {"prompt 1": ["say one", "at completed read_slowly 4000 60"]}


@pytest.mark.parametrize("how", ["interrupt", "clock", "preempt"])
async def test_turn_stopped_while_prompt_is_half_written_replaces_process(tmp_path: Path, how: str) -> None:
    options: dict[str, Any] = {**SHORT_DRAIN}
    if how == "clock":
        options["clocks"] = {"overall": 0.3}
    async with opened(tmp_path, DEAF, memory=True, options=options) as case:
        assert (await case.answer("one")).text == "one"
        turn = await case.ask(f"two{HUGE}", priority="background")
        await case.wait_kind(kinds.SENT, turn)
        waiting = await case.ask("three", priority="interactive" if how == "preempt" else "background")
        if how == "interrupt":
            receipt = await turn.interrupt()
            assert (receipt.stopped, receipt.by) == (True, By.LADDER)
        outcome = await case.outcome(turn)
        assert outcome.kind is (Kind.PREEMPTED if how == "preempt" else Kind.INTERRUPTED)
        assert outcome.clock == ("overall" if how == "clock" else None)
        assert (await case.outcome(waiting)).text == "three"
        first, second = case.processes
        *_, rest = first.stdin.split(b"\n")
        assert rest.startswith(b'{"type":"user","message":{"role":"user","content":"two')
        assert b"interrupt" not in first.stdin
        assert [f["message"]["content"] for f in second.frames if f["type"] == "user"] == ["three"]


async def test_half_written_frame_is_finished_before_interrupt(tmp_path: Path) -> None:
    """The interrupt waits behind the frame, and works when it arrives."""
    go = tmp_path / "go"
    script = {"prompt 1": ["say one", f"at completed stop_reading {go}"], "prompt 2": ["say two", "hang"]}
    async with opened(tmp_path, script) as case:
        await case.answer("one")
        turn = await case.ask(f"two{HUGE}")
        await case.wait_kind(kinds.SENT, turn)
        interrupting = asyncio.ensure_future(turn.interrupt())
        await case.wait_kind(kinds.TURN_INTERRUPTED, turn)
        touch(go)
        receipt = await interrupting
        assert (receipt.stopped, receipt.by) == (True, By.BOUNDARY)
        assert (await case.outcome(turn)).kind is Kind.INTERRUPTED
        assert (await case.answer("three")).text == "three"
        assert len(case.processes) == 1


async def test_frames_waiting_for_pipe_keep_their_order(tmp_path: Path) -> None:
    """Prompts join a turn whose agent does not read. The first of them fills the pipe."""
    go = tmp_path / "go"
    async with opened(tmp_path) as case:
        turn = await case.reaches(f"one\n@@stop_reading {go}\n@@wait {go}")
        added = [await case.ask(word, on_busy="steer") for word in (f"two{HUGE}", "three", "four", "five")]
        touch(go)
        for each in (turn, *added):
            assert (await case.outcome(each)).kind is Kind.DONE
        assert [prompt[:3] for prompt in prompts(case)] == ["one", "two", "thr", "fou", "fiv"]


async def test_frame_not_read_in_time_fails_its_turn(tmp_path: Path) -> None:
    async with opened(tmp_path, DEAF, memory=True, options={"write_seconds": 0.3}) as case:
        await case.answer("one")
        outcome = await case.answer(f"two{HUGE}")
        assert outcome.kind is Kind.FAILED
        assert isinstance(outcome.error, AgentError)
        assert "stdin" in str(outcome.error)
        assert (await case.answer("three")).text == "three"
        assert len(case.processes) == 2


async def test_session_with_full_stdin_closes_quickly(tmp_path: Path) -> None:
    async with opened(tmp_path, DEAF, memory=True) as case:
        await case.answer("one")
        turn = await case.ask(f"two{HUGE}")
        await case.wait_kind(kinds.SENT, turn)
        async with asyncio.timeout(30):  # Less than `write_seconds`.
            await case.session.close()
        assert (await case.outcome(turn)).kind is Kind.INTERRUPTED


# -- a broken pipe ---------------------------------------------------------------------------------------------------
async def test_closed_stdin_fails_ask_and_session_recovers(tmp_path: Path) -> None:
    script = {"prompt 1": ["say one", "stderr I close my ears", "at completed close_stdin"]}
    async with opened(tmp_path, script, memory=True) as case:
        await case.answer("one")
        outcome = await case.answer("two")
        assert outcome.kind is Kind.FAILED
        assert outcome.error is not None
        assert "stdin" in str(outcome.error)
        assert (await case.answer("three")).text == "three"
        assert prompts(case) == ["one", "three"]


async def test_agent_that_dies_during_write_fails_only_that_ask(tmp_path: Path) -> None:
    async with opened(tmp_path, DEAF, memory=True) as case:
        await case.answer("one")
        turn = await case.ask(f"two{HUGE}")
        await case.wait_kind(kinds.SENT, turn)
        waiting = await case.ask("three")
        os.kill(case.processes[0].pid, signal.SIGKILL)
        outcome = await case.outcome(turn)
        assert outcome.kind is Kind.FAILED
        assert outcome.error is not None
        assert (await case.outcome(waiting)).text == "three"
        assert prompts(case) == ["one", "three"]


async def test_interrupt_ends_turn_when_stdin_is_closed(tmp_path: Path) -> None:
    async with opened(tmp_path, memory=True) as case:
        turn = await case.reaches("one\n@@say so far\n@@close_stdin\n@@hang")
        await asyncio.sleep(0)
        receipt = await turn.interrupt()
        assert receipt.stopped
        outcome = await case.outcome(turn)
        assert outcome.kind is Kind.INTERRUPTED
        assert outcome.text == "so far"
        assert (await case.answer("two")).text == "two"


@pytest.mark.parametrize(
    ("end", "kind", "said"),
    [("result in time", Kind.DONE, "in time"), ("error no credit left", Kind.FAILED, "no credit left")],
)
async def test_turn_ends_by_its_result_when_stdin_broke_before_the_result_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, kind: Kind, said: str
) -> None:
    monkeypatch.setattr(frame_reader, "PASS_SECONDS_MAX", 0.001)
    monkeypatch.setattr(frame_reader, "FLOOD_SECONDS", -1.0)
    deaf, broke = tmp_path / "deaf", tmp_path / "broke"
    patient = {"eof_grace": 60.0, "grace": 60.0}
    async with opened(tmp_path, memory=True, options=patient) as case:
        steps = ["close_stdin", f"touch {deaf}", f"wait {broke}", "flood 3000 10", end, "exit 0"]
        turn = await case.ask("\n".join(["one", *(f"@@{step}" for step in steps)]))
        await exists(deaf)
        change = asyncio.create_task(case.session.set_permission_mode("plan"))
        while case.state().process.stdin is not Stdin.BROKEN:  # noqa: ASYNC110
            await asyncio.sleep(0)
        touch(broke)
        outcome = await case.outcome(turn)
        assert outcome.kind is kind
        assert said in str(outcome.text if kind is Kind.DONE else outcome.error)
        assert case.session.status().counters["dropped"] == 0
        change.cancel()
        await asyncio.wait([change])


# -- full buffers ----------------------------------------------------------------------------------------------------
async def test_flood_without_followers_is_kept_and_answered(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        outcome = await case.answer("@@flood 20000 1000\n@@say done")
        assert outcome.text == "done"
        assert case.session.status().counters["bytes_in"] > 20_000_000


async def test_idle_follower_blocks_nobody(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        slow = case.session.follow()
        assert (await anext(slow)).seq == 1 if (turn := await case.ask("@@flood 5000 500\n@@say done")) else False
        assert (await case.outcome(turn)).text == "done"
        await case.session.close()
        rest = [event async for event in slow]
        everything = await case.events()
        checks.readers_agree(rest, everything)
        assert len(rest) == len(everything) - 1


async def test_session_does_not_deadlock_when_both_pipes_are_full(tmp_path: Path) -> None:
    """The agent floods and does not read. The frame to it is larger than its pipe."""
    go = tmp_path / "go"
    steps = [f"stop_reading {go}", "flood 3000 1000", f"touch {go}", "flood 3000 1000", "say done"]
    async with opened(tmp_path, {"prompt 1": steps}) as case:
        turn = await case.ask("one")
        await case.wait_event(lambda e: e.kind == kinds.UPDATE and b"content_block_delta" in e.data)
        added = await case.ask(HUGE, on_busy="steer")
        await case.outcome(turn)
        assert (await case.outcome(added)).kind is Kind.DONE
        assert (await case.answer("next")).text == "next"


async def test_reading_pauses_while_too_much_is_uncommitted_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_writer, "UNCOMMITTED_BYTES_MAX", 20_000)
    async with opened(tmp_path) as case:
        driver: Any = case.session._driver  # pyright: ignore[reportPrivateUsage]
        paused_when_behind: list[bool] = []
        on_frames = driver.on_frames

        def noted(*args: Any) -> None:
            on_frames(*args)
            if driver._log_writer.is_behind:
                paused_when_behind.append(driver.process.driven.is_paused)

        driver.on_frames = noted
        assert (await case.answer("@@flood 5000 1000\n@@say done")).text == "done"
        assert paused_when_behind
        assert all(paused_when_behind)
        assert not driver.process.driven.is_paused
        assert driver._log_writer._uncommitted_bytes == 0
        assert (await case.answer("next")).text == "next"
        events = await case.events()
        deltas = sum(b"content_block_delta" in event.data for event in events)
        assert deltas == 5000


async def test_interrupt_stops_turn_while_reading_is_paused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "UNCOMMITTED_BYTES_MAX", 20_000)
    async with opened(tmp_path) as case:
        turn = await case.ask("@@flood 1000000 1000")
        await case.wait_event(lambda e: b"content_block_delta" in e.data)
        assert (await turn.interrupt()).stopped
        assert (await case.answer("next")).text == "next"


# -- too large to keep -----------------------------------------------------------------------------------------------
LIMIT = 100_000


async def test_frame_at_limit_is_kept_and_larger_one_is_spilled(tmp_path: Path) -> None:
    async with opened(tmp_path, options={"frame_bytes_max": LIMIT}) as case:
        outcome = await case.answer(f"@@huge {LIMIT - 2000}\n@@huge {LIMIT}\n@@say after it")
        assert outcome.kind is Kind.DONE
        assert outcome.text == "after it"
        spilled = [e for e in await case.events() if e.data.startswith(b'{"type": "banksman.spilled"')]
        assert len(spilled) == 1
        note = json.loads(spilled[0].data)
        assert note["bytes"] > LIMIT
        whole = json.loads(Path(note["file"]).read_bytes())
        assert whole["message"]["content"][0]["text"] == "x" * LIMIT
        assert note["head"].startswith('{"type":"assistant"')
        assert case.session.status().counters["spilled"] == 1
        await case.session.close()
        assert not Path(note["file"]).exists()


async def test_oversized_boundary_fails_its_turn(tmp_path: Path) -> None:
    async with opened(tmp_path, options={"frame_bytes_max": LIMIT}) as case:
        outcome = await case.answer(f"@@say what it said\n@@huge_result {LIMIT}")
        assert outcome.kind is Kind.FAILED
        assert "frame_too_large" in str(outcome.error)
        assert outcome.text == "what it said"
        assert (await case.answer("next")).text == "next"
        assert len(case.processes) == 1


async def test_agent_that_dies_inside_huge_frame_leaves_no_file(tmp_path: Path) -> None:
    async with opened(tmp_path, memory=True, options={"frame_bytes_max": LIMIT}) as case:
        outcome = await case.answer(f"@@say so far\n@@half {LIMIT * 3 * 'z'}\n@@exit 1")
        assert outcome.kind is Kind.FAILED
        assert outcome.text == "so far"
        assert (await case.answer("next")).text == "next"
        spilled = [json.loads(e.data) for e in await case.events() if e.data.startswith(b'{"type": "banksman.spilled"')]
        await case.session.close()
        assert not any(Path(note["file"]).exists() for note in spilled)


async def test_large_line_is_kept_with_default_limit(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        outcome = await case.answer("@@huge 9000000\n@@huge_result 3000000")
        assert outcome.kind is Kind.DONE
        assert outcome.text == "x" * 3_000_000


def test_spilled_bytes_are_cut_and_marked_past_session_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_reader, "SPILLED_BYTES_MAX", 10)
    spilled, counters = frame_reader.OversizeFrames(), Counters()

    def take(*pieces: bytes) -> dict[str, Any]:
        whole = b"".join(pieces)
        items: list[Framed] = [OversizeBegan(whole[:1]), *map(OversizePiece, pieces)]
        lines, _ = spilled.take(
            MixedChunk((*items, OversizeEnded(len(whole), whole[:1], whole[-1:]))), CLAUDE, counters
        )
        return json.loads(lines[0])

    first, second, third = take(b"abcd"), take(b"efghijkl", b"mn"), take(b"op")
    assert (first["bytes"], first["kept"], Path(first["file"]).read_bytes()) == (4, 4, b"abcd")
    # The file has the beginning without a hole: after a piece that did not fit, nothing is kept.
    assert (second["bytes"], second["kept"], Path(second["file"]).read_bytes()) == (10, 6, b"efghij")
    assert (third["bytes"], third["kept"], third["file"]) == (2, 0, None)
    assert (counters.spilled, counters.dropped) == (3, 6)
    spilled.close()
    assert not Path(first["file"]).exists()
