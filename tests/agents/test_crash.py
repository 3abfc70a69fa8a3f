"""A host takes over the session of a killed host, with the real agent.

tests/sessions/test_takeover.py tests all the moments of the kill. This test adds the agent's own behaviour: its shells,
its background tasks, its history on the disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from tests.agents import count
from tests.agents.case import Case, answer, done, exists
from tests.agents.ground import WAIT_SECONDS_MAX, Ground, messages, remove
from tests.sessions.crash_host import Remote, keepers, remote
from tests.sessions.helpers import bodies

from banksman import Event, Host, Outcome, Session
from banksman.core.session import event as kinds
from banksman.testing import checks
from banksman.testing.fake_model import FakeModel

NAME = "the one"
TEST_SECONDS_MAX = 100.0
# Time before KILL, also for the tool's children that ignore TERM.
OPTIONS = {"grace": 1.0}


@pytest.fixture
def ground(claude: str, tmp_path: Path) -> Generator[Ground]:
    with FakeModel() as model:
        made = Ground(tmp_path, claude, model)
        yield made
        made.clean_up()
    remove(tmp_path)


class Scene:
    """A session with the real agent, in a host that will be killed.

    Its first turn is done. That turn started a tool in the background and gave the agent a word to remember.
    """

    def __init__(self, ground: Ground, host: Remote) -> None:
        self.ground = ground
        self.host = host
        self.session = ""

    @property
    def store(self) -> Path:
        return self.ground.path("store.db")

    @property
    def how(self) -> dict[str, Any]:
        """Return the arguments that open the session in either host.

        The agent gets this environment and nothing else.
        """
        return {
            "name": NAME,
            "command": [self.ground.claude],
            "cwd": str(self.ground.work),
            "env": self.ground.env(),
            "inherit_env": False,
            "rules": {"Bash": "allow"},
            "options": OPTIONS,
        }

    async def begin(self) -> str:
        self.session = await self.host.open(**self.how)
        turn = await self.host.ask(self.session, f"my word is heron\n{self.ground.tool()}\n@@text noted")
        assert await self.host.outcome(turn) == "done"
        await exists(self.ground.path("tool"))
        self.ground.check_tool()
        return turn

    async def logged(self, turn: str, text: str) -> None:
        """Wait until another host reads this text in the agent's updates."""
        async with Host(f"sqlite:{self.store}") as reader, asyncio.timeout(WAIT_SECONDS_MAX):
            async for event in reader.session(self.session).follow():
                if (event.turn, event.kind) == (turn, kinds.UPDATE) and text.encode() in event.data:
                    return


async def streaming(scene: Scene) -> str:
    turn = await scene.host.ask(scene.session, "my second word is stork\n@@slow 2000 0.02")
    await scene.logged(turn, "text_delta")
    return turn


async def in_a_tool(scene: Scene) -> str:
    prompt = f"my second word is stork\n{scene.ground.tool('second', is_background=False)}\n@@text after it"
    turn = await scene.host.ask(scene.session, prompt)
    await exists(scene.ground.path("second"))
    scene.ground.check_tool("second")
    return turn


@pytest.mark.parametrize("moment", [streaming, in_a_tool])
def test_killed_host_session_is_taken_over(ground: Ground, moment: Any) -> None:
    asyncio.run(asyncio.wait_for(_succeed(ground, moment), TEST_SECONDS_MAX))


async def _succeed(ground: Ground, moment: Any) -> None:
    async with remote(ground.path("store.db"), ground.mark) as host:
        scene = Scene(ground, host)
        first = await scene.begin()
        turn = await moment(scene)
        later = await host.ask(scene.session, "@@text later", priority="background")
        keyed = await host.ask(scene.session, "@@text keyed", key="the key")
        host.kill()
        before = count.marked(ground.mark)
        assert before, "somebody must be left to be ended"
        async with Host(f"sqlite:{scene.store}") as successor:
            # The start of the host alone settles this: the tree is gone, and the turn is over.
            assert not count.marked(ground.mark)
            session = await successor.open("claude", **scene.how)
            unknown = await (await session.turn(turn)).outcome()
            assert unknown.kind is Outcome.UNKNOWN
            again = await session.ask("@@text keyed", key="the key")
            assert again.id == keyed
            done(await again.outcome(), "keyed")
            done(await (await session.turn(later)).outcome(), "later")
            await _goes_on(Case(successor, ground), session)
            await session.close()
            events = [event async for event in session.events()]
        _check(events, turn, [first, turn, keyed, later])
    assert not count.marked(ground.mark)
    async with asyncio.timeout(WAIT_SECONDS_MAX):
        while keepers(host.pid):  # noqa: ASYNC110  The zygote exits last, without an event.
            await asyncio.sleep(0.005)


async def _goes_on(case: Case, session: Session) -> None:
    """Check that the conversation continues: the model receives the text from before the kill and from the cut turn."""
    done(await answer(session, "@@text and on it goes"), "and on it goes")
    remembered = messages(case.ground.plays()[-1])
    for word in ("heron", "stork", "later", "keyed"):
        assert word in remembered, word


def _check(events: list[Event], turn: str, accepted: list[str]) -> None:
    checks.log(events)
    checks.turns(events)
    ends = {event.turn: event.body["outcome"] for event in events if event.kind == kinds.TURN_ENDED}
    assert [ends[id] for id in accepted] == ["done", "unknown", "done", "done"]
    (recovered,) = bodies(events, kinds.SESSION_RECOVERED)
    assert (recovered["unknown"][-1], recovered["swept"]) == (turn, [])
    assert kinds.SESSION_CONTEXT_LOST not in {event.kind for event in events}
    assert len({body["conversation"] for body in bodies(events, kinds.SESSION_CONVERSATION)}) == 1
