"""A host is killed in the middle of something, and another goes on with what it had: real processes, one store.

What holds at every moment: each ask that was accepted has one end in the log, and it is UNKNOWN only if its start is
there; nothing is sent twice; what waited is served, in its order; nothing is left of the dead host's processes when the
conversation goes on. See crashing.py for the host that is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sqlite3
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.sessions.crashing import Agents, Remote, keepers, marked, remote
from tests.sessions.helpers import QUICK, bodies, exists

from banksman import Event, Host, Kind, Session
from banksman.core import event as kinds
from banksman.core.event import entry
from banksman.run.child import orphans
from banksman.store.sqlite import SqliteLog
from banksman.testing import checks

NAME = "the one"
# A child that does not hear TERM is there until the grace is over.
SHORT = {**QUICK, "grace": 0.3}
PATIENCE_SECONDS = 20.0


class Scene:
    """A store, a host on it that will be killed, and its session."""

    def __init__(self, folder: Path, agents: Agents, host: Remote, session: str) -> None:
        self.folder = folder
        self.agents = agents
        self.host = host
        self.session = session
        # The asks that were acknowledged, in order.
        self.accepted: list[str] = []

    @property
    def store(self) -> Path:
        return self.folder / "store.db"

    def path(self, name: str) -> Path:
        return self.folder / name

    async def ask(self, prompt: str, **how: Any) -> str:
        turn = await self.host.ask(self.session, prompt, **how)
        self.accepted.append(turn)
        return turn

    async def reaches(self, prompt: str, **how: Any) -> str:
        """Ask, until the agent has come to the last line of it."""
        *before, last = prompt.split("\n")
        turn = await self.ask("\n".join([*before, f"@@touch {self.path('reached')}", last]), **how)
        await exists(self.path("reached"))
        return turn

    async def logged(self, kind: str, turn: str | None = None, data: bytes = b"") -> Event:
        """Until the log has such an event, as another host reads it."""
        async with Host(f"sqlite:{self.store}") as reader, aclosing(reader.session(self.session).follow()) as events:
            async for event in events:
                if event.kind == kind and turn in (None, event.turn) and data in event.data:
                    return event
        raise AssertionError(f"the session was closed without {kind}")

    def kill(self) -> None:
        self.host.kill()


@asynccontextmanager
async def scene(
    folder: Path, marker: str, script: Sequence[str] = (), *, tool: bool = False, **how: Any
) -> AsyncGenerator[Scene]:
    agents = Agents(folder, marker)
    async with remote(folder / "store.db", marker) as host:
        how = {"name": NAME, "options": SHORT, **how}
        session = await host.open(command=agents.command("-dead", script, tool=tool), **how)
        yield Scene(folder, agents, host, session)
        await gone(host.pid, marker)


async def gone(pid: int, marker: str) -> None:
    """Until nothing at all is left of a host that was killed: its zygote goes last, and tells nobody."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while keepers(pid) or marked(marker):
            await asyncio.sleep(0.005)


async def reopen(host: Host, agents: Agents) -> Session:
    """Take it over. Nothing of the dead host's agents is left by then."""
    session = await host.open("claude", name=NAME, command=agents.command("-next"), options=QUICK)
    assert agents.alive("-dead") == []
    return session


async def read(session: Session) -> list[Event]:
    return [event async for event in session.events(0)]


async def outcomes(session: Session, turns: Sequence[str]) -> list[Kind]:
    return [(await (await session.turn(turn)).outcome()).kind for turn in turns]


async def recalled(session: Session) -> list[str]:
    """The first lines of the prompts that the agent knows of, without the one that asks for them."""
    outcome = await (await session.ask("@@recall")).outcome()
    *known, _ = json.loads(outcome.text or "")
    return [prompt.partition("\n")[0] for prompt in known]


def check(events: Sequence[Event], agents: Agents, accepted: Sequence[str]) -> None:
    """What a log must say however often its hosts were killed."""
    checks.log(events)
    checks.turns(events)
    checks.attribution(events)
    ends = [event.turn for event in events if event.kind == kinds.TURN_ENDED]
    assert len(ends) == len(set(ends))
    assert set(accepted) <= set(ends)
    _check_sent(events, agents)
    _check_unknown(events)


def _check_sent(events: Sequence[Event], agents: Agents) -> None:
    """No prompt was given to an agent before its start was in the log, and none was given twice."""
    refs = [event.body["ref"] for event in events if event.kind == kinds.TURN_QUEUED]
    started = {event.turn for event in events if event.kind == kinds.TURN_STARTED}
    queued = {event.body["ref"]: event.turn for event in events if event.kind == kinds.TURN_QUEUED}
    given = [
        frame["uuid"]
        for process in agents.evidence.processes
        for frame in checks.frames(process.stdin, may_be_cut=True)
        if frame.get("type") == "user"
    ]
    assert len(given) == len(set(given)), "a prompt was sent again"
    assert set(given) <= set(refs)
    assert {queued[ref] for ref in given} <= started


def _check_unknown(events: Sequence[Event]) -> None:
    """UNKNOWN is what had begun, and each is named by the recovery that says so."""
    started = {event.turn for event in events if event.kind == kinds.TURN_STARTED}
    joined = {id for body in bodies(events, kinds.TURN_STARTED) for id in body.get("joined") or ()}
    unknown = [event.turn for event in events if event.kind == kinds.TURN_ENDED and event.body["outcome"] == "unknown"]
    assert set(unknown) <= started | joined
    assert [id for body in bodies(events, kinds.SESSION_RECOVERED) for id in body["unknown"]] == unknown


# -- the whole of it -------------------------------------------------------------------------------------------------
async def test_what_a_killed_host_had_is_taken_over(tmp_path: Path, marker: str) -> None:
    """Scenarios 55 and 66. In mid-stream, with three asks waiting and a tool whose children are plain, in a session of
    their own, and deaf to TERM."""
    async with scene(tmp_path, marker, tool=True) as it:
        open_turn = await it.reaches("one\n@@stream 5 0 tick\n@@hang", priority="interactive")
        last = await it.ask("background", priority="background")
        keyed = await it.ask("keyed", key="the key")
        first = await it.ask("interactive", priority="interactive")
        tool = json.loads(it.path("tool-dead").read_text())
        assert set(tool.values()) < set(it.agents.alive("-dead"))
        await it.logged(kinds.UPDATE, open_turn, b"tick4")
        it.kill()
        assert set(tool.values()) & set(it.agents.alive("-dead")), "somebody must be left to be ended"
        async with Host(f"sqlite:{it.store}") as host:
            session = await reopen(host, it.agents)
            again = await session.ask("keyed", key="the key")
            assert again.id == keyed
            assert (await again.outcome()).text == "keyed"
            unknown = await (await session.turn(open_turn)).outcome()
            assert unknown.kind is Kind.UNKNOWN
            assert "host died" in str(unknown.error)
            assert unknown.text == "tick0 tick1 tick2 tick3 tick4 ", "what it had said is kept"
            assert unknown.durable
            assert await outcomes(session, [first, keyed, last]) == [Kind.DONE] * 3
            assert await recalled(session) == ["one", "interactive", "keyed", "background"]
            # Also by who was not asked when it was taken over, and after it is over.
            assert (await session.ask("keyed", key="the key")).id == keyed
            await session.close()
            events = await read(session)
        check(events, it.agents, it.accepted)
        (recovered,) = bodies(events, kinds.SESSION_RECOVERED)
        assert recovered == {"unknown": [open_turn], "queued": [last, keyed, first], "swept": []}
        assert kinds.SESSION_CONTEXT_LOST not in {event.kind for event in events}
        _, process = it.agents.evidence.processes
        (conversation,) = {body["conversation"] for body in bodies(events, kinds.SESSION_CONVERSATION)}
        assert f"--resume={conversation}" in process.argv
        _check_epochs(events)


def _check_epochs(events: Sequence[Event]) -> None:
    """Each claim and each process is a generation of its own."""
    before, after = (event.epoch for event in events if event.kind == kinds.PROCESS_STARTED)
    (recovered,) = (event.epoch for event in events if event.kind == kinds.SESSION_RECOVERED)
    opened = [event.epoch for event in events if event.kind == kinds.SESSION_OPENED]
    assert opened[0] < before < recovered < after
    assert recovered <= opened[1] < after


# -- at every moment -------------------------------------------------------------------------------------------------
Moment = Callable[[Scene], Awaitable[dict[str, str]]]
MOMENTS: dict[str, tuple[Moment, Sequence[str], dict[str, float]]] = {}


def moment(*script: str, **options: float) -> Callable[[Moment], Moment]:
    """Something that a host is killed in the middle of, with an agent of this script. It gives the ends that the turns
    must have."""

    def enter(function: Moment) -> Moment:
        MOMENTS[function.__name__.replace("_", " ")] = function, script, options
        return function

    return enter


@moment()
async def nothing_was_asked(it: Scene) -> dict[str, str]:
    return {}


@moment()
async def an_ask_is_not_yet_accepted(it: Scene) -> dict[str, str]:
    # Who holds the store's write lock keeps the ask from being committed; nobody was told that it is accepted.
    with closing(sqlite3.connect(it.store, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        accepted = it.host.ask(it.session, "never heard of")
        assert await it.host.ping() == "here"
        assert not accepted.done()
        it.kill()
    return {}


@moment("at start wait never")
async def the_process_is_starting(it: Scene) -> dict[str, str]:
    turns = [await it.ask(word) for word in ("one", "two")]
    await it.logged(kinds.PROCESS_STARTED)
    return dict.fromkeys(turns, "done")


@moment()
async def a_turn_has_just_been_granted(it: Scene) -> dict[str, str]:
    """Its prompt may be on its way or not."""
    turn = await it.ask("one\n@@hang")
    await it.logged(kinds.TURN_STARTED)
    return {turn: "unknown"}


@moment()
async def the_agent_streams(it: Scene) -> dict[str, str]:
    turn = await it.ask("one\n@@stream 100000 0.001")
    waiting = await it.ask("two")
    await it.logged(kinds.UPDATE, data=b"tick9")
    return {turn: "unknown", waiting: "done"}


@moment()
async def a_tool_runs(it: Scene) -> dict[str, str]:
    turn = await it.reaches('one\n@@tool_use Bash {"command":"make"}\n@@hold 60 setsid\n@@hold 60 child\n@@hang')
    (process,) = it.agents.evidence.processes
    assert set(process.holders) < set(it.agents.alive("-dead"))
    return {turn: "unknown"}


@moment()
async def a_question_waits(it: Scene) -> dict[str, str]:
    turn = await it.ask("one\n@@ask Bash {}")
    await it.logged(kinds.QUESTION_ASKED)
    return {turn: "unknown"}


@moment("on_interrupt unanswered", drain_seconds=60.0)
async def a_turn_is_interrupted(it: Scene) -> dict[str, str]:
    turn = await it.reaches("one\n@@hang")
    waiting = await it.ask("two")
    it.host.interrupt(turn)
    await it.logged(kinds.TURN_INTERRUPTED)
    return {turn: "unknown", waiting: "done"}


@moment("on_interrupt unanswered", drain_seconds=60.0)
async def a_turn_is_preempted(it: Scene) -> dict[str, str]:
    """It asked to be requeued, which it was not yet: it may have been done."""
    turn = await it.reaches("one\n@@hang", priority="background", on_preempt="requeue")
    urgent = await it.ask("two")
    await it.logged(kinds.TURN_INTERRUPTED)
    return {turn: "unknown", urgent: "done"}


@moment()
async def a_prompt_was_added_to_the_turn(it: Scene) -> dict[str, str]:
    turn = await it.reaches("one\n@@hang")
    steered = await it.ask("and this", on_busy="steer")
    await it.logged(kinds.TURN_STARTED, steered)
    return {turn: "unknown", steered: "unknown"}


@moment()
async def the_agent_has_a_turn_of_its_own(it: Scene) -> dict[str, str]:
    turn = await it.ask("one\n@@say one\n@@at idle own task-notification hang")
    waiting = await it.ask("two", priority="background")  # Who preempts nobody.
    own = await it.logged(kinds.TURN_STARTED, data=b"origin")
    assert own.turn is not None
    return {turn: "done", own.turn: "unknown", waiting: "done"}


@moment()
async def all_is_done(it: Scene) -> dict[str, str]:
    turn = await it.ask("one")
    assert await it.host.outcome(turn) == "done"
    return {turn: "done"}


@moment("ignore eof", eof_grace=60.0)
async def it_closes(it: Scene) -> dict[str, str]:
    """Who waits is told at once; the turn that runs ends with the agent, which takes its time."""
    turn = await it.reaches("one\n@@hang")
    waiting = await it.ask("two")
    it.host.close(it.session)
    await it.logged(kinds.TURN_ENDED, waiting)
    return {turn: "unknown", waiting: "refused"}


@pytest.mark.parametrize("name", MOMENTS)
async def test_killed_at_any_moment_each_ask_has_one_end(tmp_path: Path, marker: str, name: str) -> None:
    """Scenario 66."""
    reach, script, options = MOMENTS[name]
    async with scene(tmp_path, marker, script, options={**SHORT, **options}) as it:
        expected = await reach(it)
        it.kill()
        async with Host(f"sqlite:{it.store}") as host:
            session = await reopen(host, it.agents)
            ends = {turn: (await (await session.turn(turn)).outcome()).kind.value for turn in expected}
            assert ends == expected
            known = await recalled(session)
            assert "never heard of" not in known
            await session.close()
            events = await read(session)
        check(events, it.agents, it.accepted)
        assert {event.turn for event in events if event.kind == kinds.TURN_QUEUED} >= set(it.accepted)
        unknown = [turn for turn, kind in expected.items() if kind == "unknown"]
        told = bodies(events, kinds.SESSION_RECOVERED)
        assert [set(body["unknown"]) for body in told] == ([set(unknown)] if unknown else [])
        answered = bodies(events, kinds.QUESTION_ANSWERED)
        assert [(body["answer"], body["by"]) for body in answered] == (
            [("withdrawn", "recovery")] if name == "a question waits" else []
        )
        assert session.questions() == []


async def test_one_that_was_read_elsewhere_is_taken_over_by_its_reader(tmp_path: Path, marker: str) -> None:
    """It has not been settled by anybody's start; what the reader follows goes on under its own hands."""
    async with scene(tmp_path, marker) as it, Host(f"sqlite:{it.store}") as host:
        handle = host.session(NAME)
        seen: list[Event] = []
        following = asyncio.create_task(_follow(handle, seen))
        turn = await it.reaches("one\n@@hang")
        waiting = await it.ask("two")
        assert (handle.status().phase, handle.is_ours) == ("elsewhere", False)
        it.kill()
        assert handle.status().phase == "lost"
        session = await reopen(host, it.agents)
        assert session is handle
        assert await outcomes(session, [turn, waiting]) == [Kind.UNKNOWN, Kind.DONE]
        await session.close()
        await following
        events = await read(session)
        check(events, it.agents, it.accepted)
        checks.readers_agree(seen, events)


async def _follow(session: Session, seen: list[Event]) -> None:
    async with aclosing(session.follow()) as events:
        async for event in events:
            seen.append(event)
            if event.kind == kinds.SESSION_CLOSED:
                return


# -- again and again -------------------------------------------------------------------------------------------------
async def test_hosts_that_are_killed_at_random_one_after_the_other(tmp_path: Path, marker: str) -> None:
    """Each takes over what the one before it had, or is killed before it has."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # For who wants to see the same again, as far as time allows.
    chance = random.Random(seed)
    agents = Agents(tmp_path, marker)
    accepted: dict[str, str] = {}
    store = tmp_path / "store.db"
    for number in range(20):
        async with remote(store, marker) as host:
            await _work(host, agents, number, chance, accepted)
    async with Host(f"sqlite:{store}") as host:
        session = await host.open("claude", name=NAME, command=agents.command("-last-"), options=QUICK)
        assert all(not agents.alive(f"-{number}-") for number in range(20))
        for word, turn in accepted.items():
            outcome = await (await session.turn(turn)).outcome()
            assert outcome.kind in (Kind.DONE, Kind.UNKNOWN), f"{word}: {outcome}"
            assert outcome.kind is Kind.UNKNOWN or outcome.text == word
            assert (await session.ask(f"again {word}", key=word)).id == turn
        await session.close()
        events = await read(session)
    check(events, agents, list(accepted.values()))
    assert len(accepted) > 10, "hardly anything was ever asked"
    await gone(0, marker)


async def _work(host: Remote, agents: Agents, number: int, chance: random.Random, accepted: dict[str, str]) -> None:
    """Open, ask, and be killed at a moment that nobody chose."""
    opening = host.open(name=NAME, command=agents.command(f"-{number}-"), options=QUICK)
    asks: dict[str, asyncio.Future[Any]] = {}
    async with asyncio.timeout(None) as moment:
        moment.reschedule(asyncio.get_running_loop().time() + chance.random() ** 2 * 0.8)
        try:
            session = await opening
            left = [other for other in range(number) if agents.alive(f"-{other}-")]
            assert not left, f"taken over by {number}, with processes of {left}"
            for count in range(4):
                word = f"word-{number}-{count}-"
                says = "\n@@stream 30 0.005\n" if chance.random() < 0.5 else "\n"
                priority = chance.choice(["interactive", "normal", "background"])
                asks[word] = host.ask(session, f"{word}{says}@@say {word}", key=word, priority=priority)
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            host.kill()
            raise
