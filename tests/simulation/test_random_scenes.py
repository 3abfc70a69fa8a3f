"""Random callers and random agents in virtual time, against a naive model of the possible outcomes.

The model knows neither queue nor process. It knows the caller's actions and how the agent treats the prompt, and
derives the allowed outcomes. Times and order are random too: each example has its own schedule of departures.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

pytest.register_assert_rewrite("tests.simulation.scene")

from tests.simulation.scene import Scene, budget  # noqa: E402
from tests.thorough import sample  # noqa: E402

from banksman.core.session.outcome import By, Kind  # noqa: E402
from banksman.errors import StoreError  # noqa: E402
from banksman.testing import sim  # noqa: E402
from banksman.testing.world import Ack, Fault, Manner, Play, Stage, WorldLog  # noqa: E402

INTERRUPTING = ("interrupt", "withdraw")
ACTIONS = ("nothing", "nothing", "interrupt", "withdraw", "cancel", "move")


@dataclass(frozen=True)
class Caller:
    """One ask, and the caller's action on it after a while."""

    play: Play
    priority: str
    on_busy: str
    on_preempt: str
    is_held: bool
    at: float
    action: str
    after: float


@dataclass(frozen=True)
class Plan:
    callers: tuple[Caller, ...]
    manners: tuple[Manner, ...]
    faults: tuple[tuple[int, Fault], ...]
    # When the session is drained or closed, if that happens before its callers are done.
    drain_at: float | None
    close_at: float | None
    seed: int


SECONDS = st.sampled_from([0.0, 0.0, 0.1, 1.0, 5.0])
PLAYS = st.builds(
    Play,
    says=st.sampled_from([(), ("hm",), ("hm", "well")]),
    hangs=st.sampled_from([False, False, False, True]),
    tool=st.sampled_from([None, None, None, "Bash"]),
    result_seconds=SECONDS,
    abort_seconds=st.sampled_from([0.0, 0.0, 5.0, 6.0]),
    boundaries=st.sampled_from([1, 1, 1, 0, 2]),
    is_completed=st.sampled_from([True, True, False]),
    ack=st.sampled_from([Ack.BEFORE, Ack.BEFORE, Ack.AFTER, Ack.NEVER]),
    is_deaf=st.sampled_from([False, False, False, True]),
    error=st.sampled_from([None, None, None, "it failed"]),
    exits_after=st.sampled_from([None, None, None, *Stage]),
)
CALLERS = st.builds(
    Caller,
    play=PLAYS,
    priority=st.sampled_from(["background", "normal", "interactive"]),
    on_busy=st.sampled_from(["enqueue", "enqueue", "reject", "interrupt"]),
    on_preempt=st.sampled_from(["end", "requeue"]),
    is_held=st.sampled_from([False, False, True]),
    at=SECONDS,
    action=st.sampled_from(ACTIONS),
    after=SECONDS,
)
MANNERS = st.builds(
    Manner,
    start_seconds=st.sampled_from([0.0, 0.0, 0.5]),
    fails=st.sampled_from([False, False, False, True]),
    stuck_at=st.sampled_from([None, None, None, 1, 2, 3]),
    broken_at=st.sampled_from([None, None, None, 1, 2, 3]),
    exits_at=st.sampled_from([None, None, 1, 3, 6]),
    stop_seconds=st.sampled_from([0.0, 0.0, 3.0]),
    last_words=st.integers(0, 3),
    gone_seconds=st.sampled_from([0.0, 0.0, 0.3]),
    is_told_late=st.booleans(),
    owns=st.sampled_from([{}, {}, {0: Play(says=("own",))}, {1: Play(hangs=True)}, {1: Play(result_seconds=1.0)}]),
    names=st.sampled_from([True, True, True, False]),
)
PLANS = st.builds(
    Plan,
    callers=st.lists(CALLERS, min_size=1, max_size=4).map(tuple),
    manners=st.lists(MANNERS, max_size=3).map(tuple),
    faults=st.lists(st.tuples(st.integers(1, 30), st.sampled_from(Fault)), max_size=1).map(tuple),
    drain_at=st.sampled_from([None, None, None, 0.0, 1.0]),
    close_at=st.sampled_from([None, None, None, 0.0, 1.0]),
    seed=st.integers(0, 1 << 16),
)


class RandomOrder(dict[int, int]):
    """Random departures in a quarter of the steps that have an alternative; the same seed gives the same order."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def get(self, step: int, default: int = 0) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Each step that gets here has at least two alternatives.
        return 1 if self._random.random() < 0.25 else 0


def allowed(caller: Caller, plan: Plan) -> set[Kind]:
    """Return the outcomes that an ask may have, without any knowledge of the queue."""
    kinds = {Kind.DONE, Kind.FAILED}
    if caller.action in INTERRUPTING or any(other.on_busy == "interrupt" for other in plan.callers):
        kinds |= {Kind.INTERRUPTED, Kind.WITHDRAWN}
    if plan.close_at is not None or caller.play.hangs or caller.play.tool or caller.play.boundaries == 0:
        # The final close interrupts turns that still run.
        kinds |= {Kind.INTERRUPTED, Kind.REFUSED}
    if any(other.play.hangs or other.play.tool or other.play.boundaries == 0 for other in plan.callers):
        kinds |= {Kind.REFUSED}
    if any(manner.owns or manner.stuck_at for manner in plan.manners):
        kinds |= {Kind.REFUSED, Kind.INTERRUPTED}
    if plan.drain_at is not None or any(other.action == "cancel" for other in plan.callers):
        # An ask whose caller has left may still be present at the close.
        kinds |= {Kind.REFUSED, Kind.INTERRUPTED}
    if len(plan.callers) > 1 and caller.priority != "interactive":
        kinds.add(Kind.PREEMPTED)
    # An agent that never reaches its boundary never reports a failure either.
    if caller.play.hangs or (caller.play.error is not None and caller.play.boundaries > 0):
        kinds.discard(Kind.DONE)
    return kinds


async def played(plan: Plan) -> None:
    plays = {f"p{number}": caller.play for number, caller in enumerate(plan.callers)}
    scene = Scene(plays, manners=plan.manners, log=WorldLog(faults=dict(plan.faults)), clocks={})

    async def calling(number: int, caller: Caller) -> None:
        name = f"p{number}"
        await asyncio.sleep(caller.at)
        how = {"priority": caller.priority, "on_busy": caller.on_busy, "on_preempt": caller.on_preempt}
        if caller.is_held:
            async with scene.session.hold(caller.priority):
                await scene.asking(name, **how)
        else:
            await scene.asking(name, **how)

    async def acting(number: int, caller: Caller, task: asyncio.Task[None]) -> None:
        await asyncio.sleep(caller.at + caller.after)
        turn = scene.turns.get(f"p{number}")
        match caller.action:
            case "cancel":
                task.cancel()
            case "interrupt" if turn is not None:
                receipt, outcome = await turn.interrupt(), await turn.outcome()
                is_stopped = outcome.kind in (Kind.INTERRUPTED, Kind.WITHDRAWN, Kind.PREEMPTED)
                assert receipt.by is By.ALREADY_OVER or receipt.stopped == is_stopped or not outcome.durable
            case "withdraw" if turn is not None:
                scene.session.withdraw(turn)
            case "move" if turn is not None:
                scene.session.move(turn)
            case _:
                pass

    for number, caller in enumerate(plan.callers):
        task = scene.start(f"caller-{number}", calling(number, caller))
        scene.start(f"actor-{number}", acting(number, caller, task))
    if plan.drain_at is not None:
        scene.loop.call_later(plan.drain_at, scene.session.drain_nowait)
    if plan.close_at is not None:
        scene.loop.call_later(plan.close_at, scene.session.close_nowait)
    # This close ends turns that hang.
    scene.loop.call_later(150.0, scene.session.close_nowait)
    await scene.end(is_calm=False)
    for number, caller in enumerate(plan.callers):
        outcome = scene.outcomes.get(f"p{number}")
        if outcome is not None and not isinstance(outcome.error, StoreError):
            assert outcome.kind in allowed(caller, plan) or plan.faults, (caller, outcome)


@pytest.fixture(autouse=True, scope="module")
def is_silent() -> Iterator[None]:
    log = logging.getLogger("banksman")
    level = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(level)


@settings(
    max_examples=sample(budget(300)),
    deadline=None,
    # The explain phase would run each failure hundreds of times more.
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(PLANS)
def test_random_scene_gives_every_ask_an_explainable_outcome(plan: Plan) -> None:
    loop = sim.SimLoop(departures=RandomOrder(plan.seed))
    loop._departures = RandomOrder(plan.seed)  # pyright: ignore[reportPrivateUsage]  The loop copies its argument.
    try:
        loop.run_until_complete(loop.create_task(played(plan), name="main"))
        loop.check_ended()
    finally:
        loop.wind_down()
        loop.close()
