"""The main scenarios once more, in a loop of the other kind."""

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

# uvloop opens what it keeps for the life of the program with its first loop.
uvloop.new_event_loop().close()

Scenario = Callable[[Path], Coroutine[Any, Any, None]]

SCENARIOS: list[Scenario] = [
    test_turn.test_an_ask_gets_the_answer_of_the_agent,
    test_turn.test_an_exit_in_a_turn_fails_it_with_what_stderr_said_last,
    test_turn.test_the_text_of_many_turns_is_each_their_own,
    test_interrupts.test_an_interrupted_turn_keeps_what_it_said,
    test_interrupts.test_an_interrupt_before_the_first_byte_sends_nothing,
    test_interrupts.test_a_streaming_turn_is_interrupted_by_hand,
    test_preemption.test_two_urgent_ones_behind_a_third_run_before_background_work,
    test_preemption.test_asks_that_are_cancelled_at_any_moment_leave_nothing_behind,
    test_preemption.test_a_hold_is_preempted_by_someone_more_urgent_and_goes_on_after,
    test_frame_writes.test_eight_callers_at_once_never_mix_their_bytes,
    test_frame_writes.test_a_frame_of_megabytes_to_a_slow_reader_arrives_whole,
    test_frame_writes.test_an_agent_that_dies_in_the_middle_of_a_send_fails_that_ask_only,
    test_frame_writes.test_both_pipes_full_at_once_is_no_deadlock,
    test_log_reader.test_any_two_readers_agree_wherever_they_begin,
    test_log_reader.test_outcomes_and_receipts_can_be_had_after_the_host_is_closed,
    test_close.test_closing_ends_what_runs_and_refuses_what_waits,
    test_close.test_a_blocked_agent_is_closed_quickly,
]


@pytest.mark.parametrize("scenario", one_in(3, SCENARIOS), ids=lambda scenario: scenario.__name__.removeprefix("test_"))
def test_under_uvloop(tmp_path: Path, scenario: Scenario) -> None:
    async def run() -> None:
        assert isinstance(asyncio.get_running_loop(), uvloop.Loop)
        await scenario(tmp_path)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others, f"tasks left behind: {others}"

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
