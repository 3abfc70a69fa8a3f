"""Usage of turns with real processes: as the agent reported it, over restarts and kills of the host."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from tests.sessions.crash_host import remote
from tests.sessions.helpers import QUICK, opened
from tests.thorough import one_in

from banksman import Host, Kind, Tokens, Usage, UsageError, UsageRow
from banksman.testing import fake_agent

Call = tuple[int, int]


def using(calls: Iterable[Call]) -> str:
    return "\n".join(f"@@used {read} {written}" for read, written in calls)


def total(calls: Iterable[Call]) -> Tokens:
    found = Tokens()
    for read, written in calls:
        found = found.plus(Tokens(read, written))
    return found


async def test_outcome_has_usage_of_its_turn(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        first = await case.answer(using([(10, 1), (20, 2)]))
        second = await case.answer(using([(5, 5)]))
        assert (first.kind, second.kind) == (Kind.DONE, Kind.DONE)
        assert first.used is not None
        assert second.used is not None
        assert (first.used.tokens, first.used.turns) == (Tokens(30, 3), 1)
        assert second.used.tokens == Tokens(5, 5)
        assert first.used.working_seconds > 0
        [row] = await case.host.usage()
        assert row.usage.tokens == Tokens(35, 8)
        assert row.usage.working_seconds == pytest.approx(first.used.working_seconds + second.used.working_seconds)
        reports = [event.body for event in await case.events() if event.kind == "usage.reported"]
        assert [report["added"]["tokens"]["input"] for report in reports] == [10, 20, 5]


@pytest.mark.parametrize("caller", ["", "x" * 201, "a\nb", 7, "tab\t"])
async def test_wrong_caller_is_refused(tmp_path: Path, caller: str) -> None:
    async with opened(tmp_path) as case:
        with pytest.raises(UsageError, match="caller"):
            await case.session.ask("hello", caller=caller)


async def test_usage_of_merged_asks_counts_once_for_the_first_caller(tmp_path: Path) -> None:
    async with opened(tmp_path, options={"collect_seconds": 0.2}) as case:
        asks = [await case.session.ask(using([(7, 1)]), on_busy="collect", caller=name) for name in ("ann", "bob")]
        outcomes = [await turn.outcome() for turn in asks]
        assert [outcome.used and outcome.used.tokens for outcome in outcomes] == [Tokens(14, 2)] * 2
        [row] = await case.host.usage("caller")
        assert (row.key, row.usage.tokens, row.usage.turns) == ("ann", Tokens(14, 2), 1)


@pytest.mark.parametrize("seed", one_in(6, range(6)))
async def test_usage_after_kills_of_host_is_what_agents_reported(tmp_path: Path, marker: str, seed: int) -> None:
    """Each host is killed in the middle of a turn, after the log has the agent's last report."""
    lot = random.Random(seed)
    store = tmp_path / "store.db"
    expected: Counter[tuple[str, str]] = Counter()
    turns: Counter[str] = Counter()
    names = ("one", "two")
    agent = fake_agent.command(memory=tmp_path / "memory")

    def calls(session: str, caller: str) -> list[Call]:
        found = [(lot.randrange(1, 1000), lot.randrange(1, 100)) for _ in range(lot.randrange(1, 5))]
        tokens = total(found)
        expected[caller, "input"] += tokens.input
        expected[caller, "output"] += tokens.output
        turns[session] += 1
        return found

    async with Host(f"sqlite:{store}") as reader:
        for _ in range(3 if seed else 1):
            async with remote(store, marker) as there:
                for name in names:
                    await there.open(name=name, command=agent, options=QUICK)
                    for _ in range(lot.randrange(2)):
                        caller = lot.choice(("alice", "bob"))
                        turn = await there.ask(name, using(calls(name, caller)), caller=caller)
                        assert await there.outcome(turn) == "done"
                cut = calls("one", "alice")
                turn = await there.ask("one", f"{using(cut)}\n@@hang", caller="alice")
                reports = 0
                async for event in reader.session("one").follow():
                    reports += event.turn == turn and event.kind == "usage.reported"
                    if reports == len(cut):
                        break
                there.kill()
        for name in names:
            session = await reader.open("claude", name=name, command=agent, options=QUICK)
            await session.close()
        by_caller = {row.key: row.usage for row in await reader.usage("caller")}
        by_session = {row.key: row.usage.turns for row in await reader.usage("session")}
        counted = {
            (caller, kind): getattr(usage.tokens, kind)
            for caller, usage in by_caller.items()
            for kind in ("input", "output")
        }
        assert counted == dict(expected)
        assert by_session == {reader.session(name).id: turns[name] for name in names if turns[name]}
        everything = [usage for _, usage in await reader.usage("day")]
        assert sum(usage.turns for usage in everything) == turns.total()
        await reader.delete("one")
        assert {row.key: row.usage for row in await reader.usage("caller")} == by_caller


async def test_usage_without_turns_is_empty(tmp_path: Path) -> None:
    async with Host(f"sqlite:{tmp_path / 'store.db'}") as host:
        rows: list[UsageRow] = await host.usage("agent")
        assert rows == []
        assert Usage().tokens.total == 0
