"""A restart in the middle of a question and of an interrupt, while 20 asks wait: the transcript of one whole run.

test_hand_over.py has the same for a stream and a tool, tests/agents/test_restart.py for the real agents.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from tests.sessions.helpers import bodies, exists
from tests.sessions.test_hand_over import WAITING, Scene, opened, spoken, state

from banksman import Event
from banksman.core.session import event as kinds

__all__ = ["state"]

# The name of an interrupt has the id of its turn.
TURN = re.compile(rb"\bt-[0-9a-f]{16}\b")
Restart = Callable[[], Awaitable[None]]


async def begin(it: Scene, prompt: str) -> list[str]:
    return [await it.ask(prompt), *[await it.ask(f"@@say answer {number}") for number in range(WAITING)]]


async def in_a_question(it: Scene, restart: Restart) -> list[str]:
    turns = await begin(it, "@@touch {at}/reached\n@@ask Bash\n@@say asked")
    await it.reached()
    asked: list[str] = []
    while not asked:
        asked = await it.host.call("questions", session=it.session)
    await restart()
    assert await it.host.call("answer", session=it.session, question=asked[0])
    return turns


async def in_an_interrupt(it: Scene, restart: Restart) -> list[str]:
    turns = await begin(it, "@@at interrupt touch {at}/reached\n@@at interrupt wait {at}/go\n@@touch {at}/up\n@@hang")
    await exists(it.path("up"))
    it.host.interrupt(turns[0])
    await it.reached()
    await restart()
    it.go()
    return turns


Moment = Callable[[Scene, Restart], Awaitable[list[str]]]
ENDS: dict[Moment, list[str | None]] = {in_a_question: ["done", "asked"], in_an_interrupt: ["interrupted", None]}


async def run(folder: Path, marker: str, moment: Moment, restarts: int) -> list[Event]:
    async with opened(folder, marker, options={"drain_seconds": 60.0}) as it:

        async def restart() -> None:
            for _ in range(restarts):
                await it.restart()

        first, *others = await it.results(await moment(it, restart))
        assert first == ENDS[moment]
        assert others == [["done", f"answer {number}"] for number in range(WAITING)]
        return await it.end()


@pytest.mark.parametrize("moment", ENDS)
async def test_transcript_of_a_restarted_turn_is_that_of_a_whole_one(state: Path, marker: str, moment: Moment) -> None:
    restarted = await run(state / "restarted", marker, moment, restarts=2)
    whole = await run(state / "whole", marker, moment, restarts=0)
    frames, expected = ([(kind, TURN.sub(b"", data)) for kind, data in spoken(each)] for each in (restarted, whole))
    assert frames == expected
    assert len(bodies(restarted, kinds.PROCESS_ADOPTED)) == 2
    assert len(bodies(restarted, kinds.TURN_ENDED)) == WAITING + 1
