"""Several simulated sessions that share one pool and one log, in virtual time.

This module checks the pool's limits from outside at every moment: the number of processes, and the number of starting
processes. scene.py checks each session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from tests.simulation.scene import TERSE, Scene

from banksman.core.process_facts import BytesRead, ProcessGone, StartFailed
from banksman.core.session import event as kinds
from banksman.core.session.effects import StartProcess
from banksman.core.session.outcome import Kind
from banksman.errors import AgentError
from banksman.sessions.agent_process import AgentReport, OnReport, Spawn
from banksman.sessions.pool import START_SECONDS_MAX, Pool
from banksman.testing import sim
from banksman.testing.world import Manner, Phase, Play, World, WorldLog, WorldProcess


class Crowd:
    def __init__(
        self,
        *names: str,
        processes_max: int | None = None,
        starts_max: int | None = None,
        plays: Mapping[str, Play] | None = None,
        manners: Mapping[str, Sequence[Manner]] | None = None,
        log: WorldLog | None = None,
        **config: Any,
    ) -> None:
        """`manners`: the behaviour of each session's processes, by session name."""
        self.loop = sim.current()
        self.pool = Pool(processes_max=processes_max, starts_max=starts_max)
        self.log = log or WorldLog()
        self.plays = plays
        self.config = config
        # The session name of every process so far; the present processes; the starting processes with their start time.
        self.started: list[str] = []
        self.there: set[int] = set()
        self.starting: dict[int, float] = {}
        self._numbers = count(1)
        self.scenes: dict[str, Scene] = {}
        for name in names:
            self.open(name, (manners or {}).get(name, ()))

    def open(self, name: str, manners: Sequence[Manner] = (), **more: Any) -> Scene:
        """Open one more session. Processes beyond those in `manners` are terse."""
        self.scenes[name] = scene = Scene(
            self.plays,
            manners=[*manners, *[TERSE] * 8],
            log=self.log,
            id=name,
            pool=self.pool,
            spawn=lambda world: self._spawn_for(name, world),
            **self.config,
            **more,
        )
        return scene

    def __getitem__(self, name: str) -> Scene:
        return self.scenes[name]

    # -- processes and checks ----------------------------------------------------------------------------------------
    def _spawn_for(self, name: str, world: World) -> Spawn:
        def spawn(effect: StartProcess, on_event: OnReport) -> WorldProcess:
            number = next(self._numbers)
            manner = world.manners[world.spawned]
            world.spawned += 1
            self._enter(name, number)

            def watch(event: AgentReport) -> None:
                self._watch(number, event)
                on_event(event)

            if manner.raises:
                self._watch(number, StartFailed(AgentError("")))
                raise AgentError("the world does not even try to start it")
            assert all(other.phase is Phase.GONE for other in world.processes), f"{name} has a process already"
            # Numbered over all sessions, so that each process has its own lane.
            process = WorldProcess(number, manner, world.plays, effect.conversation, watch)
            world.processes.append(process)
            process.is_calm = world.is_calm
            process.begin()
            return process

        return spawn

    def _enter(self, name: str, number: int) -> None:
        self.started.append(name)
        self.there.add(number)
        limit = self.pool.processes_max
        assert limit is None or len(self.there) <= limit, f"{name} is one too many: {self.there}"
        self.starting[number] = now = self.loop.time()
        # A start that takes longer does not count.
        starting = [other for other, since in self.starting.items() if now - since < START_SECONDS_MAX]
        limit = self.pool.starts_max
        assert limit is None or len(starting) <= limit, f"{name} is one start too many: {starting}"

    def _watch(self, number: int, event: AgentReport) -> None:
        """The first output of a process is the answer to the handshake."""
        if isinstance(event, BytesRead | ProcessGone | StartFailed):
            self.starting.pop(number, None)
        if isinstance(event, ProcessGone | StartFailed):
            self.there.discard(number)

    # -- callers -----------------------------------------------------------------------------------------------------
    def ask(self, name: str, prompt: str = "hi", **how: Any) -> asyncio.Task[None]:
        """Ask this session in a separate lane."""
        scene = self.scenes[name]
        return scene.start(f"{name}: {prompt}", scene.asking(prompt, **how))

    async def get_ready(self, *names: str) -> None:
        """Give each of these sessions a process, one after the other, in asyncio's order."""
        for name in names:
            # Each at a different time, so that the order of their idle times is defined.
            await asyncio.sleep(1.0)
            await self.scenes[name].get_ready()
            self.be_calm(False)

    def be_calm(self, is_calm: bool) -> None:
        self.log.is_calm = is_calm
        for scene in self.scenes.values():
            scene.world.is_calm = is_calm

    def at_any_moment(self, act: Callable[[], object]) -> None:
        next(iter(self.scenes.values())).at_any_moment(act)

    # -- results -----------------------------------------------------------------------------------------------------
    def kinds(self, name: str) -> list[Kind]:
        return [outcome.kind for outcome in self.scenes[name].outcomes.values()]

    async def reasons(self, name: str) -> list[str]:
        """Return the reasons for which this session's processes were retired."""
        events = [event async for event in self.scenes[name].session.follow()]
        return [event.body["reason"] for event in events if event.kind == kinds.PROCESS_RETIRED]

    async def callers(self) -> None:
        for scene in self.scenes.values():
            await scene.callers()

    async def end(self, *, is_calm: bool = True) -> None:
        """Wait for all callers, close and check all sessions, and check that the pool is empty."""
        await self.callers()
        if is_calm:
            self.be_calm(True)
        for scene in self.scenes.values():
            await scene.end(is_calm=is_calm)
        assert not self.there
        assert "0 there, 0 starting, 0 waiting" in repr(self.pool)
        for name, scene in self.scenes.items():
            prompts = [prompt.text for process in scene.world.processes for prompt in process.agent.prompts]
            assert len(prompts) == len(set(prompts)), f"{name} was sent a prompt twice: {prompts}"
