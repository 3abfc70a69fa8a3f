"""A faulty world for sessions in virtual time: a process that misbehaves by plan, and a log that fails by plan.

    async def scenario():
        world = World({"hi": Play(says=("hm",)), "": Play(hangs=True)}, manners=[Manner(broken_at=2)])
        session = Session("s", state, store=WorldLog(faults={3: Fault.FAILS}), spawn=world.spawn, …)
        …

    sim.explore(scenario, departures_max=2)

`Play` says how the agent answers one prompt, `Manner` how one process behaves whatever it is asked. Everything comes
through the loop's lanes, in any order that causality allows. What is never right, whatever the order, is noted in
`World.violations`: two prompts at once, a frame that is not whole, a word to a process that was stopped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from banksman.core.session.effects import StartProcess
from banksman.errors import AgentError
from banksman.sessions.agent_process import OnEvent
from banksman.testing.world_agent import Ack, Play, Stage, answer_to
from banksman.testing.world_process import Manner, Phase, WorldProcess
from banksman.testing.world_store import Fault, WorldLog

__all__ = ["Ack", "Fault", "Manner", "Phase", "Play", "Stage", "World", "WorldLog", "WorldProcess", "answer_to"]


class World:
    """Starts simulated processes. `plays`: by the prompt's text; `""`: any other. `manners`: of the first process, the
    second, …; those after the last are plain."""

    def __init__(
        self,
        plays: Mapping[str, Play] | None = None,
        *,
        manners: Sequence[Manner] = (),
        allows_steering: bool = False,
    ) -> None:
        self.plays: dict[str, Play] = dict(plays or {})
        self.manners = list(manners)
        self.allows_steering = allows_steering
        self.processes: list[WorldProcess] = []
        self.spawned = 0
        self._is_calm = False

    def __repr__(self) -> str:
        return f"<World {self.processes}>"

    def spawn(self, effect: StartProcess, on_event: OnEvent) -> WorldProcess:
        """A `Spawn`, to be handed to a session."""
        self.spawned += 1
        manner = self.manners[self.spawned - 1] if self.spawned <= len(self.manners) else Manner()
        if manner.raises:
            raise AgentError("the world does not even try to start it", process=self.spawned)
        process = WorldProcess(self.spawned, manner, self.plays, effect.conversation, on_event)
        process.agent.allows_steering = self.allows_steering
        if any(other.phase is not Phase.GONE for other in self.processes):
            process.violations.append(f"process {self.spawned} was started while another was there")
        self.processes.append(process)
        process.is_calm = self._is_calm
        process.begin()
        return process

    @property
    def is_calm(self) -> bool:
        """Whether everything comes in the loop's own order, so that an exploration begins where it matters."""
        return self._is_calm

    @is_calm.setter
    def is_calm(self, value: bool) -> None:
        self._is_calm = value
        for process in self.processes:
            process.is_calm = value

    @property
    def violations(self) -> list[str]:
        return [f"process {process.number}: {what}" for process in self.processes for what in process.violations]

    @property
    def is_over(self) -> bool:
        """Nothing runs."""
        return all(process.phase is Phase.GONE for process in self.processes)
