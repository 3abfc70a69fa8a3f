"""The main session scenarios under uvloop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop
from tests.sessions import test_close, test_frame_writes, test_interrupts, test_log_reader, test_preemption, test_turn
from tests.thorough import one_in, thorough

pytestmark = thorough

# The first uvloop loop opens fds for the life of the program, so it is created before the leak check.
uvloop.new_event_loop().close()

Scenario = Callable[[Path], Coroutine[Any, Any, None]]

SCENARIOS: list[Scenario] = [
    test_turn.test_ask_gets_answer_of_agent,
    test_turn.test_exit_during_turn_fails_it_with_end_of_stderr,
    test_turn.test_concurrent_turns_keep_their_own_text,
    test_interrupts.test_interrupted_turn_keeps_its_text,
    test_interrupts.test_interrupt_before_first_byte_sends_nothing,
    test_interrupts.test_streaming_turn_is_interrupted_by_caller,
    test_preemption.test_urgent_asks_run_before_queued_background_work,
    test_preemption.test_queued_ask_cancelled_at_any_point_leaves_nothing,
    test_preemption.test_hold_is_preempted_by_urgent_ask_and_resumes,
    test_frame_writes.test_concurrent_callers_never_mix_frame_bytes,
    test_frame_writes.test_frame_of_megabytes_reaches_slow_reader_whole,
    test_frame_writes.test_agent_that_dies_during_write_fails_only_that_ask,
    test_frame_writes.test_session_does_not_deadlock_when_both_pipes_are_full,
    test_log_reader.test_readers_agree_wherever_they_begin,
    test_log_reader.test_outcomes_and_receipts_are_available_after_host_closes,
    test_close.test_close_interrupts_running_turn_and_refuses_queued_asks,
    test_close.test_close_ends_blocked_agent_quickly,
]


@pytest.mark.parametrize("scenario", one_in(3, SCENARIOS), ids=lambda scenario: scenario.__name__.removeprefix("test_"))
def test_scenario_passes_under_uvloop(tmp_path: Path, scenario: Scenario) -> None:
    async def run() -> None:
        assert isinstance(asyncio.get_running_loop(), uvloop.Loop)
        await scenario(tmp_path)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others, f"tasks left behind: {others}"

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
