"""Decide from the log of an unowned session whether a host must continue it."""

from __future__ import annotations

import pytest
from tests.sessions.helpers import QUICK
from tests.store.kit import Writer, known

from banksman import Host
from banksman.cluster.host.session_offers import is_to_go_on
from banksman.core.session.event import TURN_STARTED, Entry
from banksman.store.memory import MemoryLog
from banksman.testing import fake_agent


async def said(*prompts: str, is_closed: bool = False) -> list[Entry]:
    """Return the entries that a host has written up to the moment of its death."""
    async with Host("memory:") as host:
        session = await host.open("claude", command=fake_agent.command(), options=QUICK)
        for prompt in prompts:
            await session.ask(prompt)
        if prompts:
            async for event in session.events(waits=True):
                if event.kind == TURN_STARTED:
                    break
        if is_closed:
            await session.close()
        return [(event.turn, event.kind, event.data) for event in (await host.log.read(session.id, 0, 1000)).events]


@pytest.mark.parametrize(
    ("prompts", "is_closed", "expected"),
    [
        pytest.param([], False, False, id="nothing was asked"),
        pytest.param(["@@hang"], False, True, id="a turn is open"),
        pytest.param(["@@hang", "and then"], False, True, id="somebody waits"),
        pytest.param(["@@hang"], True, False, id="it was closed"),
    ],
)
async def test_released_claim_does_not_end_open_turns(prompts: list[str], is_closed: bool, expected: bool) -> None:
    log = MemoryLog()
    writer = await Writer.claim(log)
    await writer.commit(*await said(*prompts, is_closed=is_closed))
    writer.release()
    # As a host that took the session over and failed before it settled any turn.
    log.release("s", await log.claim("s"))
    assert await is_to_go_on(log, known(log)) is expected
    await log.close()
