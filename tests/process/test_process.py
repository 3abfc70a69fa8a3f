"""Start of a child: the order of its first facts."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.process.helpers import child, wait_until

from banksman.core.process_facts import BytesRead, ProcessFact, Started, Stream, StreamEnded, TreeEnded
from banksman.process.launch import prepare
from banksman.process.process import ChildProcess


async def test_output_before_the_report_of_the_start_is_reported_after_it(marker: str, tmp_path: Path) -> None:
    facts: list[ProcessFact] = []
    ended = asyncio.Event()

    def hear(fact: ProcessFact) -> None:
        facts.append(fact)
        if isinstance(fact, TreeEnded):
            ended.set()

    written = tmp_path / "written"
    argv = child("say('early'); os.close(1); touch(WORDS[0])", marker, written)
    process = ChildProcess(prepare(argv), stdin="null", grace=0.2, linger=0.2, deadline=None, on_fact=hear)
    # The loop is late: it has not read the report of the start, and the output is in the pipe.
    wait_until(written.exists, "the child has closed its stdout")
    process.read_now()
    assert facts == []
    await ended.wait()
    process.close()
    assert isinstance(facts[0], Started)
    output = [fact for fact in facts if isinstance(fact, BytesRead | StreamEnded) and fact.stream is Stream.STDOUT]
    assert [type(fact) for fact in output] == [BytesRead, StreamEnded]
