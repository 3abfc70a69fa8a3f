"""An ask with `on_busy="interrupt"`, while the turn of an ask and a turn of the agent are open at the same time."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from banksman import Host
from banksman.core.session import turn as turns
from banksman.server.access import authorization
from banksman.server.access.roles import Caller, Role
from banksman.server.problems import Problem
from banksman.testing import fake_agent


async def test_interrupting_ask_is_refused_if_one_of_two_open_turns_is_of_another_caller() -> None:
    async with Host("memory:") as host:
        session = await host.open(command=fake_agent.command({}), caller="kim")
        turn = await session.ask("@@hang", caller="ann")
        async for event in session.events(waits=True):
            if event.kind == "turn.started":
                break
        kim, ann, boss = Caller("kim", Role.ASKER), Caller("ann", Role.ASKER), Caller("boss", Role.OPERATOR)
        await authorization.check_interrupting_ask(ann, session)
        driver = session._driver  # pyright: ignore[reportPrivateUsage]
        before = driver.state
        # The state of a turn that the agent has started beside the one of ann's ask.
        own = turns.own("own-1", "agent", 0, seq=1, heard=(), at=0.0, limited_until=None)
        driver._state = replace(before, own=own)  # pyright: ignore[reportPrivateUsage]
        try:
            assert await session.running_turns() == ["own-1", turn.id]
            # The session is kim's and so is the turn of the agent, but the other one is not.
            for caller in (kim, ann):
                with pytest.raises(Problem, match="interrupt"):
                    await authorization.check_interrupting_ask(caller, session)
            await authorization.check_interrupting_ask(boss, session)
        finally:
            driver._state = before  # pyright: ignore[reportPrivateUsage]
        await session.interrupt()
