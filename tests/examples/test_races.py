"""Run both halves of each example in examples/races: the naive one fails as described, the other one does not.

Each program decides its race by a handshake with its agent, so the output is the same in every run.
"""

from __future__ import annotations

import sys
from pathlib import Path

import banksman

RACES = Path(__file__).parents[2] / "examples" / "races"
SECONDS_MAX = 240.0


async def run(folder: Path, name: str, *arguments: str) -> list[str]:
    """Run an example in its own process and return the lines that it prints.

    `execute` ends whatever the program leaves behind, also a tool that left the process group, and also if this test
    fails or is cancelled.
    """
    argv = [sys.executable, "-W", "error", str(RACES / name), *arguments]
    done = await banksman.execute(argv, timeout=SECONDS_MAX, cwd=folder)
    assert (done.ended, done.code, done.stderr.text) == (banksman.Ended.EXITED, 0, "")
    assert done.survivors == ()
    return done.stdout.text.splitlines()


async def test_naive_consumer_dies_when_its_reader_is_destroyed(tmp_path: Path) -> None:
    assert await run(tmp_path, "reader_destroyed.py", "naive") == [
        "log: ready",
        "log: saving the conversation",
        "the consumer died: KeyError('fix-ci')",
    ]


async def test_banksman_consumer_reads_to_the_end_of_a_stopped_agent(tmp_path: Path) -> None:
    assert await run(tmp_path, "reader_destroyed.py", "banksman") == [
        "log: ready",
        "log: saving the conversation",
        "log: saved as 42",
        "the consumer read to the end; exit code: 0",
    ]


async def test_naive_writers_interleave_their_frames(tmp_path: Path) -> None:
    assert await run(tmp_path, "interleaved_stdin.py", "naive") == [
        "the agent exited with code 1: Error parsing streaming input line",
    ]


async def test_banksman_writers_each_get_their_own_answer(tmp_path: Path) -> None:
    assert await run(tmp_path, "interleaved_stdin.py", "banksman") == ["done, the answer is its own: True"] * 2


async def test_naive_cancelled_turn_answers_the_next_prompt(tmp_path: Path) -> None:
    assert await run(tmp_path, "leaked_turn.py", "naive") == [
        "Tidy up the imports: cancelled",
        "Why is CI red?: tidied the imports",
    ]


async def test_banksman_interrupted_turn_does_not_answer_the_next_prompt(tmp_path: Path) -> None:
    assert await run(tmp_path, "leaked_turn.py", "banksman") == [
        "Tidy up the imports: interrupted",
        "Why is CI red?: a test fails",
    ]


async def test_naive_close_waits_in_vain_for_an_agent_blocked_on_its_stdout(tmp_path: Path) -> None:
    assert await run(tmp_path, "slow_close.py", "naive", "0.2") == [
        "agent: answering",
        "end of input: no exit within 0.2 s",
        "TERM: no exit within 0.2 s",
        "KILL: exit code -9",
        "whole answer: False",
    ]


async def test_banksman_stop_lets_a_blocked_agent_finish_without_a_signal(tmp_path: Path) -> None:
    assert await run(tmp_path, "slow_close.py", "banksman") == [
        "agent: answering",
        "first step: eof, exit code 0",
        "whole answer: True",
    ]


async def test_naive_clean_up_removes_the_stream_of_the_next_turn(tmp_path: Path) -> None:
    assert await run(tmp_path, "stale_cleanup.py", "naive") == [
        "Tidy up the imports: tidied the imports",
        "Why is CI red?: reading the log",
        "second turn running: True, its stream is known: False",
    ]


async def test_banksman_late_clean_up_leaves_the_next_turn_alone(tmp_path: Path) -> None:
    assert await run(tmp_path, "stale_cleanup.py", "banksman") == [
        "Tidy up the imports: tidied the imports",
        "Why is CI red?: reading the log",
        "late clean-up: already_over",
        "second turn running: True",
        "new browser: reading the log",
        "new browser: a test fails",
    ]


async def test_naive_timeout_loses_the_work_and_leaves_the_tool_running(tmp_path: Path) -> None:
    assert await run(tmp_path, "no_grace.py", "naive") == [
        "exit code: -9",
        "tool is running: True",
        "communicate() still waits: the tool holds stdout open",
        "output: []",
    ]


async def test_banksman_timeout_saves_the_work_and_ends_the_tool(tmp_path: Path) -> None:
    assert await run(tmp_path, "no_grace.py", "banksman") == [
        "exit code: 0",
        "tool is running: False",
        "ended with the agent: [True]",
        "output: ['work saved']",
    ]
