"""A planned restart with a long queue: the next host serves the asks in the same order, with the same options.

Both hosts are in this process. The agent is one real process, for both hosts.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.sessions.helpers import QUICK, bodies, exists
from tests.sessions.test_hand_over import HOLD_SECONDS, WAITING, state

from banksman import Host, Kind, Session, Turn
from banksman.core.session import event as kinds
from banksman.testing import checks, fake_agent
from banksman.testing.fake_agent import Evidence

__all__ = ["state"]

BUDGETS: dict[str, Any] = {"caller_budgets": {"alice": {"turns": 1000}, "bob": {"turns": 1000}}}


async def test_turn_goes_on_when_a_requeued_turn_waits_with_a_hold_of_its_class(state: Path) -> None:
    """The requeued turn stands before the hold, and so before an urgent ask. The log has no holds."""
    store = f"sqlite:{state / 'store.db'}"
    async with Host(store) as host:
        session = await host.open("claude", command=fake_agent.command(), options=QUICK)
        again = await session.ask(f"@@touch {state}/up\n@@wait {state}/go\n@@say again", on_preempt="requeue")
        await exists(state / "up")
        holding = asyncio.create_task(session.begin_hold())
        # Both before the turn ends that they preempt.
        prompts = (f"@@touch {state}/reached\n@@wait {state}/go\n@@say one", "@@say two")
        urgent = await asyncio.gather(*(session.ask(prompt, priority="interactive") for prompt in prompts))
        await exists(state / "reached")
        assert [waiting.turn for waiting in session.status().queue] == [again.id, urgent[1].id]
        await holding
        await host.drain(hand_over=True, hold_seconds=HOLD_SECONDS)
    async with Host(store) as host:
        await host.take_up()
        (state / "go").touch()
        (session,) = host.our_sessions()
        outcomes = [await (await session.turn(turn.id)).outcome() for turn in (*urgent, again)]
        assert [(each.kind, each.text) for each in outcomes] == [
            (Kind.DONE, "one"),
            (Kind.DONE, "two"),
            (Kind.DONE, "again"),
        ]
        await session.close()


async def fill(session: Session, folder: Path) -> tuple[list[Turn], str]:
    """Begin a turn that waits for a file, and let asks of every kind wait behind it. Return them and a hold."""
    turns = [await session.ask(f"@@touch {folder}/reached\n@@wait {folder}/go\n@@say first")]
    await exists(folder / "reached")
    hold = await session.begin_hold("background", caller="bob")
    how: list[dict[str, Any]] = [
        {"caller": "alice"},
        {"caller": "bob", "priority": "background"},
        {"deadline": 1000.0},
        {"on_busy": "collect", "caller": "alice"},
        {"on_busy": "collect", "caller": "alice"},
        {"rules": {"Bash": "deny"}, "on_preempt": "requeue"},
        {"hold": hold},
    ]
    asked = [(f"@@say {number}", f"key {number}", how[number % len(how)]) for number in range(WAITING)]
    turns += [await session.ask(prompt, key=key, **more) for prompt, key, more in asked]
    await session.edit(turns[1].id, prompt="@@say edited")
    await session.edit(turns[6].id, prompt="@@say edited too", priority="background")
    session.move(turns[13])
    session.move(turns[2], before=turns[9])
    assert (await turns[10].interrupt()).stopped
    return turns, hold


async def served(folder: Path, *, restarts: int) -> list[Any]:
    """Serve such a queue, and return what the log and the callers got."""
    folder.mkdir()
    store = f"sqlite:{folder / 'store.db'}"
    async with Host(store, **BUDGETS) as host:
        command = fake_agent.command(evidence=folder / "evidence")
        session = await host.open("claude", command=command, options={**QUICK, "collect_seconds": 0.01})
        turns, hold = await fill(session, folder)
        if not restarts:
            # A restart ends it, because its holder is a caller of the old host.
            await session.end_hold(hold)
            return await finished(session, turns, folder)
        await host.drain(hand_over=True, hold_seconds=HOLD_SECONDS)
    for rest in reversed(range(restarts)):
        async with Host(store, **BUDGETS) as host:
            await host.take_up()
            (session,) = host.our_sessions()
            if not rest:
                return await finished(session, turns, folder)
            await host.drain(hand_over=True, hold_seconds=HOLD_SECONDS)
    raise AssertionError


async def finished(session: Session, turns: list[Turn], folder: Path) -> list[Any]:
    again = await session.ask("@@say not this", key="key 2")
    assert again.id == turns[3].id
    (folder / "go").touch()
    outcomes = [await (await session.turn(turn.id)).outcome() for turn in turns]
    await session.close()
    events = [event async for event in session.events(0, waits=False)]
    checks.log(events)
    checks.turns(events)
    (process,) = Evidence(folder / "evidence").processes
    checks.stdin(events, [process.stdin])
    names = {turn.id: number for number, turn in enumerate(turns)}
    order = [(names[event.turn or ""], event.kind) for event in events if event.kind in ORDERED]
    ended = [(body["outcome"], body["by"]) for body in bodies(events, kinds.TURN_ENDED)]
    callers = [body.get("caller") for body in bodies(events, kinds.TURN_QUEUED)]
    return [order, ended, callers, [(each.kind, each.text) for each in outcomes]]


ORDERED = (kinds.TURN_QUEUED, kinds.TURN_EDITED, kinds.QUEUE_CHANGED, kinds.TURN_STARTED, kinds.TURN_ENDED)


async def test_long_queue_of_every_kind_of_ask_is_served_as_without_a_restart(state: Path) -> None:
    whole = await served(state / "whole", restarts=0)
    restarted = await served(state / "restarted", restarts=2)
    assert restarted == whole
    assert [kind for kind, _ in whole[-1]].count(Kind.DONE) == WAITING
