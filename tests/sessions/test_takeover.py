"""A host is killed, and another host takes its sessions over: real processes, one store.

These rules hold at every moment:

- Each accepted ask has one end in the log. It is UNKNOWN only if its start is in the log.
- No prompt is sent twice.
- Queued asks are served in their order.
- No process of the dead host is left when the conversation continues.

crash_host.py has the host that is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import AsyncExitStack, aclosing, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.sessions.crash_host import Agents, Remote, keepers, remote
from tests.sessions.helpers import QUICK, bodies
from tests.sessions.takeover_scene import NAME, SHORT, Scene, check, gone, outcomes, read, recalled, reopen, scene
from tests.store.kit import Writer
from tests.thorough import IS_THOROUGH, one_in, thorough

from banksman import Event, Host, Kind, Session
from banksman.core.session import event as kinds
from banksman.core.session.event import entry
from banksman.process import orphans
from banksman.store.sqlite import SqliteLog
from banksman.testing import checks

pytestmark = pytest.mark.explored


# -- the whole take-over ---------------------------------------------------------------------------------------------
async def test_killed_host_session_is_taken_over(tmp_path: Path, marker: str) -> None:
    """Scenarios 55 and 66.

    The kill comes in mid-stream, with three queued asks and a tool with three children: a plain one, one in another
    session, and one that ignores TERM.
    """
    async with scene(tmp_path, marker, tool=True) as it:
        open_turn = await it.reaches("one\n@@stream 5 0 tick\n@@hang", priority="interactive")
        last = await it.ask("background", priority="background")
        keyed = await it.ask("keyed", key="the key")
        first = await it.ask("interactive", priority="interactive")
        tool = json.loads(it.path("tool-dead").read_text())
        assert set(tool.values()) < set(it.agents.alive("-dead"))
        await it.logged(kinds.UPDATE, open_turn, b"tick4")
        it.kill()
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
            # A repeated key finds the turn again after its end.
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
    """Check that each claim and each process has a new epoch."""
    before, after = (event.epoch for event in events if event.kind == kinds.PROCESS_STARTED)
    (recovered,) = (event.epoch for event in events if event.kind == kinds.SESSION_RECOVERED)
    opened = [event.epoch for event in events if event.kind == kinds.SESSION_OPENED]
    assert opened[0] < before < recovered < after
    assert recovered <= opened[1] < after


# -- every moment of a kill ------------------------------------------------------------------------------------------
Moment = Callable[[Scene], Awaitable[dict[str, str]]]
MOMENTS: dict[str, tuple[Moment, Sequence[str], dict[str, float]]] = {}


def moment(*script: str, **options: float) -> Callable[[Moment], Moment]:
    """Register a moment at which the host is killed, with an agent of this script.

    The function returns the required outcomes.
    """

    def enter(function: Moment) -> Moment:
        MOMENTS[function.__name__.replace("_", " ")] = function, script, options
        return function

    return enter


@moment()
async def nothing_was_asked(it: Scene) -> dict[str, str]:
    return {}


@moment()
async def an_ask_is_not_yet_accepted(it: Scene) -> dict[str, str]:
    # The held write lock keeps the ask from its commit, so it is not acknowledged.
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
    """Its prompt may or may not have been sent."""
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
    """The turn asked to be requeued, but this has not happened yet. The agent may have done its work."""
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
    waiting = await it.ask("two", priority="background")  # A background ask preempts nothing.
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
    """The queued ask ends immediately. The running turn ends with the agent, which takes its time."""
    turn = await it.reaches("one\n@@hang")
    waiting = await it.ask("two")
    it.host.close(it.session)
    await it.logged(kinds.TURN_ENDED, waiting)
    return {turn: "unknown", waiting: "refused"}


@pytest.mark.parametrize("name", one_in(6, MOMENTS))
async def test_host_killed_at_any_point_gives_each_ask_one_outcome(tmp_path: Path, marker: str, name: str) -> None:
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


async def test_session_is_taken_over_by_its_reader(tmp_path: Path, marker: str) -> None:
    """No starting host has settled the session. The reader follows it, and takes it over."""
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


# Successive hosts, each killed at a random moment.
KILLS = 20 if IS_THOROUGH else 6


# -- repeated kills --------------------------------------------------------------------------------------------------
@pytest.mark.thorough
async def test_hosts_killed_at_random_lose_no_ask(tmp_path: Path, marker: str) -> None:
    """Each host takes over the session of the one before it, or is killed first."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # To repeat the run, as far as timing allows.
    chance = random.Random(seed)
    agents = Agents(tmp_path, marker)
    accepted: dict[str, str] = {}
    store = tmp_path / "store.db"
    for number in range(KILLS):
        async with remote(store, marker) as host:
            asks = await _work(host, agents, number, chance)
        accepted |= {word: ask.result() for word, ask in asks.items() if ask.exception() is None}
    async with Host(f"sqlite:{store}") as host:
        session = await host.open("claude", name=NAME, command=agents.command("-last-"), options=QUICK)
        assert all(not agents.alive(f"-{number}-") for number in range(KILLS))
        for word, turn in accepted.items():
            outcome = await (await session.turn(turn)).outcome()
            assert outcome.kind in (Kind.DONE, Kind.UNKNOWN), f"{word}: {outcome}"
            assert outcome.kind is Kind.UNKNOWN or outcome.text == word
            assert (await session.ask(f"again {word}", key=word)).id == turn
        await session.close()
        events = await read(session)
    check(events, agents, list(accepted.values()))
    assert len(accepted) > 3, "hardly anything was ever asked"
    await gone(0, marker)


async def _work(host: Remote, agents: Agents, number: int, chance: random.Random) -> dict[str, asyncio.Future[Any]]:
    """Open, ask, and kill the host at a random moment. Return the asks, to be checked after its death."""
    opening = host.open(name=NAME, command=agents.command(f"-{number}-"), options=QUICK)
    asks: dict[str, asyncio.Future[Any]] = {}
    if chance.random() < 0.3:
        await asyncio.wait((opening,), timeout=chance.random() * 0.2)
    else:
        session = await opening
        left = [other for other in range(number) if agents.alive(f"-{other}-")]
        assert not left, f"taken over by {number}, with processes of {left}"
        for count in range(3):
            word = f"word-{number}-{count}-"
            says = "@@stream 10 0.005\n@@" if chance.random() < 0.5 else "@@"
            priority = chance.choice(["interactive", "normal", "background"])
            asks[word] = host.ask(
                session, f"{word}\n{says}say {word}", key=word, priority=priority, on_preempt="requeue"
            )
        # Some asks are accepted even on a slow machine. Then the kill comes at a random moment, so there is no event to
        # wait for.
        await asyncio.gather(*list(asks.values())[: chance.randrange(4)])
        never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await asyncio.wait((never,), timeout=chance.random() ** 2 * 0.4)
    host.kill()
    return asks


# -- processes of the dead host --------------------------------------------------------------------------------------
@pytest.mark.parametrize("is_zygote_killed", [False, pytest.param(True, marks=thorough)])
async def test_process_tree_is_swept_when_its_keeper_was_killed(
    tmp_path: Path, marker: str, is_zygote_killed: bool
) -> None:
    """Without its keeper and its zygote no process would end the tree, and the tree does not end alone."""
    async with scene(tmp_path, marker, ["ignore eof", "ignore term"], tool=True) as it:
        turn = await it.reaches("one\n@@hold 60 setsid\n@@hang")
        born = (await it.logged(kinds.PROCESS_STARTED)).body["born"]
        (zygote,) = [pid for pid in keepers(it.host.pid) if pid != born[3] and _parent(pid) == it.host.pid]
        # The host is frozen, so that it starts no other zygote and cannot react.
        it.host.process.send_signal(signal.SIGSTOP)
        for pid in ([zygote] if is_zygote_killed else []) + [born[3]]:
            os.kill(pid, signal.SIGKILL)
        it.kill()
        async with Host(f"sqlite:{it.store}") as host:
            session = await reopen(host, it.agents)
            assert await outcomes(session, [turn]) == [Kind.UNKNOWN]
            assert await recalled(session) == ["one"]
            await session.close()
            events = await read(session)
        check(events, it.agents, it.accepted)
        (recovered,) = bodies(events, kinds.SESSION_RECOVERED)
        # A live zygote may have been faster.
        assert len(recovered["swept"]) >= 6 or not is_zygote_killed


async def test_takeover_waits_for_zygote_that_sweeps_the_rest_of_a_tree(tmp_path: Path, marker: str) -> None:
    """The leader and the keeper are dead. The new host finds the rest of the tree only through the zygote."""
    async with scene(tmp_path, marker, ["ignore eof", "ignore term"], tool=True) as it:
        turn = await it.reaches("one\n@@hold 60 setsid\n@@hang")
        born = (await it.logged(kinds.PROCESS_STARTED)).body["born"]
        zygote = _parent(born[3])
        it.host.process.send_signal(signal.SIGSTOP)
        # The zygote is stopped, because it is nearly always faster than the new host. The spare would continue it.
        for pid in (zygote, *(pid for pid in keepers(it.host.pid) if pid not in (zygote, born[3]))):
            os.kill(pid, signal.SIGSTOP)
        for pid in (born[3], born[1]):
            os.kill(pid, signal.SIGKILL)
        it.kill()
        async with Host(f"sqlite:{it.store}") as host:
            session = await reopen(host, it.agents)
            assert it.agents.alive("-dead") == []
            assert await outcomes(session, [turn]) == [Kind.UNKNOWN]
            await session.close()
            check(await read(session), it.agents, it.accepted)


@pytest.mark.parametrize("is_zygote_stopped", [False, pytest.param(True, marks=thorough)])
async def test_session_is_taken_over_when_its_keeper_was_stopped(
    tmp_path: Path, marker: str, is_zygote_stopped: bool
) -> None:
    """A keeper that stays stopped ends nothing, and a take-over refuses to continue beside the agent that it keeps."""
    async with scene(tmp_path, marker, ["ignore eof", "ignore term"]) as it:
        turn = await it.reaches("one\n@@hang")
        await it.logged(kinds.TURN_STARTED, turn)
        born = (await it.logged(kinds.PROCESS_STARTED)).body["born"]
        for pid in ([_parent(born[3])] if is_zygote_stopped else []) + [born[3]]:
            os.kill(pid, signal.SIGSTOP)
        it.kill()
        async with Host(f"sqlite:{it.store}") as host:
            session = await reopen(host, it.agents)
            assert await outcomes(session, [turn]) == [Kind.UNKNOWN]
            assert (await (await session.ask("two")).outcome()).kind is Kind.DONE
            await session.close()
            events = await read(session)
        check(events, it.agents, it.accepted)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("is_its_own", [False, True])
@pytest.mark.parametrize("what", ["boot", "start", "keeper's start"])
async def test_reused_pid_is_never_signalled(tmp_path: Path, marker: str, what: str, is_its_own: bool) -> None:
    """Scenario 65.

    A bystander has the pid that the log names. The start time and the boot tell whether it is the recorded process.
    """
    async with Host(f"sqlite:{tmp_path / 'store.db'}") as host:
        agents = Agents(tmp_path, marker)
        session = await host.open("claude", name=NAME, command=agents.command(), options=QUICK)
    with _bystander() as bystander:
        traced = orphans.trace(bystander.pid)
        assert traced is not None
        boot, pid, started, *_ = traced
        born = {
            "boot": (boot if is_its_own else "another", pid, started, 0, 0),
            "start": (boot, pid, started if is_its_own else started + 1, 0, 0),
            # A take-over only waits for a live keeper. The keeper must be the wrong one here, otherwise the test would
            # end in a wait.
            "keeper's start": (boot, pid, started + (not is_its_own), pid, started + 1),
        }[what]
        await _craft(tmp_path / "store.db", session.id, born)
        async with Host(f"sqlite:{tmp_path / 'store.db'}") as host:
            session = await host.open("claude", name=NAME, command=agents.command(), options=QUICK)
            (recovered,) = bodies(await read(session), kinds.SESSION_RECOVERED)
            assert (recovered["unknown"], len(recovered["swept"])) == (["t-1"], int(is_its_own))
            assert await recalled(session) == []
        assert (bystander.poll() is None) is not is_its_own


@contextmanager
def _bystander() -> Generator[subprocess.Popen[bytes]]:
    words = [sys.executable, "-I", "-S", "-c", "import signal; signal.alarm(60); print(flush=True); signal.pause()"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()


async def _craft(store: Path, session: str, born: tuple[object, ...]) -> None:
    """Write the events of a host that started this process and gave it a turn."""
    log = SqliteLog(store)
    writer = await Writer.claim(log, session)
    ask = {"ref": "r" * 36, "prompt": "one", "priority": 10, "on_busy": "enqueue", "on_preempt": "end", "key": None}
    await writer.commit(
        entry("t-1", kinds.TURN_QUEUED, **ask, rules=[], schema=None, is_last=False),
        entry(None, kinds.PROCESS_STARTED, process=1, pid=born[1], born=born),
        entry("t-1", kinds.TURN_STARTED, attempt=1, joined=[]),
    )
    await log.close()


# -- settled by a starting host --------------------------------------------------------------------------------------
async def test_starting_host_settles_sessions_of_dead_hosts(tmp_path: Path, marker: str) -> None:
    """Scenario 66. No caller opens the session. Its running turn still gets an end, and its queue stays."""
    async with scene(tmp_path, marker, tool=True) as it:
        turn = await it.reaches("one\n@@ask Bash {}")
        waiting = [await it.ask("two"), await it.ask("three", priority="background")]
        await it.logged(kinds.QUESTION_ASKED)
        it.kill()
        async with Host(f"sqlite:{it.store}") as host:
            assert it.agents.alive("-dead") == []
            session = host.session(NAME)
            status = await session.look()
            assert (status.phase, status.owner, status.holder) == ("asleep", None, None)
            assert (status.questions, status.pids) == ((), ())
            assert [each.turn for each in status.queue] == waiting
            outcome = await (await session.turn(turn)).outcome()
            assert outcome.kind is Kind.UNKNOWN
            before = await read(session)
            assert before[-1].kind == kinds.SESSION_RECOVERED
        # The second host finds nothing to settle.
        async with Host(f"sqlite:{it.store}") as host:
            assert await read(host.session(NAME)) == before
            session = await reopen(host, it.agents)
            assert await outcomes(session, waiting) == [Kind.DONE] * 2
            await session.close()
            check(await read(session), it.agents, it.accepted)


async def test_waiting_turn_is_served_and_read_correctly_during_takeover(
    tmp_path: Path, marker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This host claims the session while a reader looks up the outcome of a queued turn in its log."""
    async with scene(tmp_path, marker) as it:
        await it.reaches("one\n@@hang")
        waiting = await it.ask("two")
        it.kill()
        async with Host(f"sqlite:{it.store}") as host:
            session = host.session(NAME)
            watched = Session._watched  # pyright: ignore[reportPrivateUsage]

            async def first_taken_up(self: Session, turn: str) -> Any:
                # The killed host may seem alive for a moment, and then its session cannot be claimed.
                while not session.is_ours:
                    await host.take_up()
                return await watched(self, turn)

            monkeypatch.setattr(Session, "_watched", first_taken_up)
            turn = await session.turn(waiting)
            assert (await turn.outcome()).kind is Kind.DONE
            assert session.is_open
            await session.close()
            check(await read(session), it.agents, it.accepted)


@pytest.mark.thorough
async def test_hosts_starting_together_settle_once(tmp_path: Path, marker: str) -> None:
    async with scene(tmp_path, marker) as it:
        await it.reaches("one\n@@hang")
        await it.ask("two")
        it.kill()
        hosts = [Host(f"sqlite:{it.store}") for _ in range(3)]
        async with AsyncExitStack() as stack:
            entering = [stack.enter_async_context(host) for host in hosts]
            entering += [stack.enter_async_context(remote(it.store, f"{marker}-{n}")) for n in range(2)]
            await asyncio.gather(*entering)
            for host in hosts:
                events = await read(host.session(NAME))
                assert [event.kind for event in events].count(kinds.SESSION_RECOVERED) == 1
                assert host.session(NAME).status().owner is None


async def test_open_waits_for_host_that_is_settling(tmp_path: Path, marker: str) -> None:
    """Programs that share a store restart together.

    One of them may settle a dead host's session for a moment. An open on another must wait and not be refused.
    """
    async with (
        scene(tmp_path, marker, ["ignore eof", "ignore term"], options={**SHORT, "grace": 1.0}) as it,
        Host(f"sqlite:{it.store}") as host,
    ):
        turn = await it.reaches("one\n@@hang")
        it.kill()
        settling = asyncio.create_task(_entered(it.store))
        while host.session(NAME).status().phase == "lost":  # noqa: ASYNC110  No event reports its claim.
            await asyncio.sleep(0)
        assert not settling.done()
        try:
            session = await reopen(host, it.agents)
        finally:
            await settling
        assert await outcomes(session, [turn]) == [Kind.UNKNOWN]


async def _entered(store: Path) -> None:
    async with Host(f"sqlite:{store}"):
        pass


async def test_kept_question_is_answered_when_agent_asks_again(tmp_path: Path, marker: str) -> None:
    keeps = {**SHORT, "question_after_crash": "keep"}
    async with scene(tmp_path, marker, options=keeps) as it:
        asked = await it.ask('one\n@@ask Bash {"command": "ls"}')
        await it.logged(kinds.QUESTION_ASKED)
        it.kill()
        async with Host(f"sqlite:{it.store}") as host:
            session = await host.open("claude", name=NAME, command=it.agents.command("-next"), options=keeps)
            assert (await (await session.turn(asked)).outcome()).kind is Kind.UNKNOWN
            [question] = session.questions()
            assert (question.tool, question.input) == ("Bash", {"command": "ls"})
            assert session.status().questions == (question.id,)
            # The question has its old id, and one answer.
            asked_then = bodies(await read(session), kinds.QUESTION_ASKED)
            assert [body["question"] for body in asked_then] == [question.id]
            told = await asyncio.gather(*(session.answer(question.id, word) for word in ("allow", "deny")))
            assert [(each.answer, each.is_first) for each in told] == [("allow", True), ("allow", False)]
            assert session.questions() == []
            # The same request is answered from the kept answer, without a new question.
            again = await session.ask('go on\n@@ask Bash {"command": "ls"}\n@@say it is done')
            assert (await again.outcome()).text == "it is done"
            answers = bodies(await read(session), kinds.QUESTION_ANSWERED)
            assert [(body["answer"], body["by"]) for body in answers] == [("allow", "answer"), ("allow", "kept")]
