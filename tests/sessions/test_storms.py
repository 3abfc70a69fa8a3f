"""Many callers and an agent act at random, and every guarantee still holds.

A seed in the name of the test chooses the actions. The machine decides which comes first.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest
from tests.sessions.helpers import Case, opened
from tests.thorough import thorough

from banksman import Busy, Kind, Outcome, Question, QueueFull, Turn
from banksman.testing import checks

pytestmark = thorough

CALLERS = 6
ASKS = 5
OPTIONS = {
    "drain_seconds": 0.2,
    "settle_seconds": 0.1,
    "eof_grace": 0.05,
    "linger": 0.02,
    "collect_seconds": 0.02,
    "queue_max": 12,
    "when_full": "drop",
    "ageing_seconds": 0.5,
    "hold_idle_seconds": 0.1,
    "clocks": {"overall": 1.0, "human": 0.2},
}
# The scripts of agents that omit frames or delay them.
AGENTS: dict[str, list[str]] = {
    "well behaved": [],
    "silent about its prompts": ["omit lifecycle", "omit uuids"],
    "slow to read and to write": ["split 700 0", "read_slowly 900 0"],
    "deaf to interrupts": ["on_interrupt ignored"],
    "without acknowledgements": ["on_interrupt unacked"],
    "late with acknowledgements": ["on_interrupt late_ack"],
    "deaf before it begins": ["on_interrupt ignored_early"],
}
CONTENTS = (
    "@@say {word}",
    "@@stream 20 0.001 {word}",
    "@@say {word}\n@@hang",
    "@@say {word}\n@@exit 1",
    "@@say {word}\n@@kill 9",
    "@@say {word}\n@@error {word}",
    "@@say {word}\n@@junk text\n@@junk unknown",
    '@@say {word}\n@@ask Bash {{"command":"ls"}}\n@@say {word}',
    "@@say {word}\n@@result {word}\n@@result {word}",
    "@@at idle own task-notification say mine\n@@say {word}",
    "@@at result exit 0\n@@say {word}",
    "@@flood 300 500\n@@say {word}",
)


class Storm:
    def __init__(self, case: Case, seed: int) -> None:
        self.case = case
        self.random = Random(seed)
        self.answers: dict[str, str | None] = {}

    async def call(self, caller: int) -> None:
        for number in range(ASKS):
            word = f"w{caller}n{number}w"
            if self.random.random() < 0.15:
                async with asyncio.timeout(None), self.case.session.hold(self.random.choice((0, 10, 20))):
                    await self.ask(word)
            else:
                await self.ask(word)

    async def ask(self, word: str) -> None:
        draw = self.random
        asking = asyncio.ensure_future(
            self.case.ask(
                f"{word}\n{'z' * draw.choice((0, 0, 90_000))}\n{draw.choice(CONTENTS).format(word=word)}",
                priority=draw.choice((0, 10, 20)),
                on_busy=draw.choice(("enqueue", "enqueue", "interrupt", "reject", "collect", "steer")),
                on_preempt=draw.choice(("end", "requeue")),
            )
        )
        if draw.random() < 0.1:
            for _ in range(draw.randrange(6)):
                await asyncio.sleep(0)
            asking.cancel()
        try:
            turn = await asking
        except (asyncio.CancelledError, Busy, QueueFull):
            return
        self.answers[word] = await self.end(turn)

    async def end(self, turn: Turn) -> str | None:
        draw = self.random
        if draw.random() < 0.3:
            for _ in range(draw.randrange(40)):
                await asyncio.sleep(0)
            await turn.interrupt()
        elif draw.random() < 0.2:
            self.case.session.move(turn)
        outcome = await self.case.outcome(turn)
        assert isinstance(outcome, Outcome)
        return outcome.text if outcome.kind is Kind.DONE else None


SLOW = (3, 4)
STORMS = [
    pytest.param(seed, agent, marks=[pytest.mark.thorough] if seed in SLOW else []) for seed, agent in enumerate(AGENTS)
]


@pytest.mark.parametrize(("seed", "agent"), STORMS)
async def test_storm_of_callers_keeps_every_guarantee(tmp_path: Path, agent: str, seed: int) -> None:
    random = Random(seed)

    def answer(_: Question) -> str:
        return random.choice(("allow", "deny"))

    outcome: Outcome | None = None
    async with opened(
        tmp_path,
        AGENTS[agent],
        memory=True,
        options=OPTIONS,
        on_question=answer,
    ) as case:
        storm = Storm(case, seed)
        await asyncio.gather(*(storm.call(caller) for caller in range(CALLERS)))
        status = case.session.status()
        assert (status.queue, status.questions) == ((), ())
        assert len(case.outcomes) >= CALLERS
        # The session still works. A process that ended together with the storm may cost one more ask.
        for _ in range(3):
            outcome = await case.answer("calm")
            if outcome.kind is Kind.DONE:
                break
        assert outcome is not None
        assert outcome.text == "calm"
        await case.session.close()
        shared = {"collect", "steer"}
        events = await case.events()
        alone = {
            str(event.body["prompt"]).partition("\n")[0]
            for event in events
            if event.kind == "turn.queued" and event.body["on_busy"] not in shared
        }
        checks.attribution(events, {word: text for word, text in storm.answers.items() if word in alone})
