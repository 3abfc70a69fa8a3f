"""A planned restart: the old host exits, the next one continues the session in the middle of its turn.

test_hand_over_transcripts.py compares whole transcripts, in each dialect.

Both hosts are programs of their own (crash_host.py) with one store. Each agent is one real process, for all hosts.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.process.helpers import PATIENCE_SECONDS, parent_of
from tests.sessions.crash_host import Agents, Died, Refusal, Remote, keepers, remote
from tests.sessions.helpers import QUICK, bodies, exists

from banksman import Event, Host, Kind, sockets
from banksman.core.session import event as kinds
from banksman.errors import MachineError, Moved, StoreError
from banksman.folders import held_folder
from banksman.process import hold_record
from banksman.sessions import frame_reader, held_session
from banksman.sessions.held_session import HeldSession
from banksman.store.sqlite import SqliteLog
from banksman.testing import checks

WAITING = 20
# Longer than any test: a hold that ends by its time would hide a lost claim.
HOLD_SECONDS = 100.0
# The next host has to wait for the end of this hold.
SHORT_SECONDS = 3.0
# Parts of frames that differ from run to run: ids, those of an item of fake Codex and of an interrupt (which has the id
# of its turn) among them, the folder of the test, and pids.
VARIABLE = re.compile(
    rb"[0-9a-f]{8}-[0-9a-f-]{27}|\bitem-[0-9a-f]{8}\b|\bt-[0-9a-f]{16}\b"
    rb'|(?<=/)(?:restarted|whole)(?=/)|"pid": ?\d+'
)


class Scene:
    """One session, its agent, and the hosts that it has one after another."""

    def __init__(self, folder: Path, marker: str, stack: AsyncExitStack, *survival: Any) -> None:
        """`survival`: the arguments `survive` and `hold_seconds` of the hosts, from the next one on."""
        self.folder = folder
        self.survival = survival
        self.agents = Agents(folder, marker)
        self.store = folder / "store.db"
        self.session = ""
        self.host: Remote
        self._stack = stack

    def path(self, name: str) -> Path:
        return self.folder / name

    def go(self) -> None:
        """Let the agent continue."""
        self.path("go").touch()

    async def reached(self) -> None:
        """Wait until the agent has come to its pause, and has written everything before it."""
        await exists(self.path("reached"))

    async def start_host(self) -> None:
        self.host = await self._stack.enter_async_context(remote(self.store, self.agents.marker, *self.survival))

    async def leave(self, hold_seconds: float = HOLD_SECONDS) -> None:
        """Hand the session over, and let the old host exit."""
        await self.host.call("hand_over", hold_seconds=hold_seconds)
        await self.host.leave()

    async def die(self, hold_seconds: float = HOLD_SECONDS) -> None:
        """Kill the old host when the keeper has the process, and the log does not know it."""
        with pytest.raises(Died):
            await self.host.call("hand_over_and_die", hold_seconds=hold_seconds)
        self.host.process.wait()

    async def come(self) -> None:
        """Start the next host, and let it take the session up."""
        await self.start_host()
        assert await self.host.call("take_up") == [self.session]

    async def restart(self) -> None:
        await self.leave()
        await self.come()

    async def ask(self, prompt: str) -> str:
        return await self.host.ask(self.session, prompt.format(at=self.folder))

    async def results(self, turns: Sequence[str]) -> list[list[str | None]]:
        return [await self.host.call("result", session=self.session, turn=turn) for turn in turns]

    async def end(self) -> list[Event]:
        """Close the session and the host, check what they leave, and return the log."""
        await self.host.close(self.session)
        await self.host.leave()
        events = await self.events()
        self.check(events)
        return events

    async def events(self) -> list[Event]:
        async with Host(f"sqlite:{self.store}") as host:
            return [event async for event in host.session(self.session).events(0, waits=False)]

    def check(self, events: Sequence[Event]) -> None:
        """Check that one process served everything, that the log is dense, and that nothing is left."""
        checks.log(events)
        checks.turns(events)
        assert self.agents.alive() == []
        assert len(self.agents.evidence.processes) == 1
        assert [event.kind for event in events].count(kinds.PROCESS_STARTED) == 1
        assert list(held_folder().iterdir()) == []


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the sockets and records of the hosts in the folder of the test."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


@asynccontextmanager
async def opened(folder: Path, marker: str, **how: Any) -> AsyncGenerator[Scene]:
    folder.mkdir(exist_ok=True)
    async with AsyncExitStack() as stack:
        it = Scene(folder, marker, stack, *how.pop("survival", ()))
        await it.start_host()
        options = {**QUICK, **how.pop("options", {})}
        how.setdefault("command", it.agents.command())
        it.session = await it.host.open(name="the session", options=options, **how)
        yield it


@asynccontextmanager
async def copied(it: Scene) -> AsyncGenerator[Remote]:
    """Start a host on a copy of the store, which no host has open."""
    copy = it.path("copy.db")
    shutil.copy(it.store, copy)
    async with remote(copy, it.agents.marker, *it.survival) as host:
        yield host
        await host.leave()


def spoken(events: Sequence[Event]) -> list[tuple[str, bytes]]:
    """Return all frames of a log. A name that differs from run to run becomes the number of its first place."""
    numbers: dict[bytes, int] = {}

    def number(match: re.Match[bytes]) -> bytes:
        return b"<%d>" % numbers.setdefault(match[0], len(numbers))

    frames = [(event.kind, event.data) for event in events if event.kind in kinds.FRAMES]
    return [(kind, VARIABLE.sub(number, data)) for kind, data in frames]


# -- in the middle of a turn -----------------------------------------------------------------------------------------
STREAM = "@@stream 5 0 tick\n@@half two\n@@touch {at}/reached\n@@wait {at}/go\n@@say three"
TOOL = '@@tool_use Bash {{"command": "make"}}\n@@touch {at}/reached\n@@wait {at}/go\n@@tool_result ok\n@@say built'


async def test_turn_survives_fifty_restarts_in_a_row(state: Path, marker: str) -> None:
    # Hosts in one program: a restart takes no longer than the hand-over.
    agents = Agents(state, marker)
    store = f"sqlite:{state / 'store.db'}"
    async with Host(store) as host:
        session = await host.open("claude", command=agents.command(), name="it", options=QUICK)
        turn = await session.ask(STREAM.format(at=state))
        waiting = await session.ask("@@say after")
        await exists(state / "reached")
        await host.drain(hand_over=True, hold_seconds=HOLD_SECONDS)
        with pytest.raises(Moved):
            await turn.outcome()
    for _ in range(49):
        async with Host(store) as host:
            await host.take_up()
            (session,) = host.our_sessions()
            assert (await session.turn(turn.id)).state == "running"
            await host.drain(hand_over=True, hold_seconds=HOLD_SECONDS)
    async with Host(store) as host:
        await host.take_up()
        (state / "go").touch()
        session = host.session(session.id)
        outcomes = [await (await session.turn(each.id)).outcome() for each in (turn, waiting)]
        assert [(outcome.kind, outcome.text) for outcome in outcomes] == [(Kind.DONE, "three"), (Kind.DONE, "after")]
        await session.close()
        events = [event async for event in session.events(0, waits=False)]
    checks.log(events)
    checks.turns(events)
    assert len(bodies(events, kinds.PROCESS_ADOPTED)) == 50
    assert len(agents.evidence.processes) == 1
    assert agents.alive() == []


async def test_host_that_leaves_before_it_takes_the_session_up_gives_no_outcome(state: Path, marker: str) -> None:
    agents = Agents(state, marker)
    store = f"sqlite:{state / 'store.db'}"
    async with Host(store) as host:
        session = await host.open("claude", command=agents.command(), options=QUICK)
        turn = await session.ask(f"@@touch {state}/reached\n@@wait {state}/go\n@@say late")
        await exists(state / "reached")
        await host.drain(hand_over=True, hold_seconds=HOLD_SECONDS)
    async with Host(store) as host:
        waiting = asyncio.create_task((await host.session(session.id).turn(turn.id)).outcome())
        await asyncio.sleep(0)
    with pytest.raises(Moved):
        await waiting
    async with Host(store) as host:
        await host.take_up()
        (state / "go").touch()
        outcome = await (await host.session(session.id).turn(turn.id)).outcome()
        assert (outcome.kind, outcome.text) == (Kind.DONE, "late")
        await host.session(session.id).close()
    assert agents.alive() == []


async def test_host_keeps_the_process_when_the_record_cannot_be_written(
    state: Path, marker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = Agents(state, marker)
    failed = asyncio.Event()

    def fail(name: str, record: bytes) -> None:
        failed.set()
        raise MachineError(f"no room for {len(record)} bytes of {name}")

    monkeypatch.setattr(hold_record, "write", fail)
    store = f"sqlite:{state / 'store.db'}"
    async with Host(store) as host:
        session = await host.open("claude", command=agents.command(), options=QUICK)
        turn = await session.ask(f"@@half one\n@@touch {state}/reached\n@@wait {state}/go\n@@say two")
        await exists(state / "reached")
        draining = asyncio.create_task(host.drain(hand_over=True, hold_seconds=HOLD_SECONDS))
        await failed.wait()
        (state / "go").touch()
        assert (await turn.outcome()).text == "two"
        await draining
    async with Host(store) as host:
        events = [event async for event in host.session(session.id).events(0, waits=False)]
    checks.log(events)
    checks.turns(events)
    assert [event.kind for event in events][-1] == kinds.SESSION_LEFT
    assert bodies(events, kinds.SESSION_HANDED_OVER) == []
    assert len(agents.evidence.processes) == 1
    assert agents.alive() == []


@pytest.mark.parametrize("survive", [None, "crash"])
async def test_host_ends_the_process_when_the_log_does_not_take_the_hand_over(
    state: Path, marker: str, monkeypatch: pytest.MonkeyPatch, survive: str | None
) -> None:
    agents = Agents(state, marker)
    loop = asyncio.get_running_loop()
    failures: list[StoreError] = []
    append = SqliteLog.append

    def fail(log: SqliteLog, *words: Any) -> None:
        *_, entries, done = words[:6]
        if failures or kinds.SESSION_HANDED_OVER not in {kind for _, kind, _ in entries}:
            append(log, *words)
        else:
            failures.append(StoreError("the disk is full"))
            loop.call_soon(done, failures[0])

    monkeypatch.setattr(SqliteLog, "append", fail)
    store = f"sqlite:{state / 'store.db'}"
    async with Host(store) as host:
        session = await host.open("claude", command=agents.command(), options=QUICK, survive=survive)
        turn = await session.ask(f"@@touch {state}/reached\n@@hang")
        await exists(state / "reached")
        await host.drain(hand_over=True, hold_seconds=HOLD_SECONDS)
        outcome = await turn.outcome()
        assert (outcome.kind, outcome.durable) == (Kind.FAILED, False)
        assert str(outcome.error) == "the disk is full"
        # Not only at the end of the program.
        async with asyncio.timeout(PATIENCE_SECONDS):
            while list(held_folder().iterdir()):  # noqa: ASYNC110  Another process removes the files.
                await asyncio.sleep(0.01)
    async with Host(store) as host:
        events = [event async for event in host.session(session.id).events(0, waits=False)]
    checks.log(events)
    checks.turns(events)
    assert len(failures) == 1
    assert bodies(events, kinds.SESSION_HANDED_OVER) == []
    assert len(agents.evidence.processes) == 1
    assert agents.alive() == []
    assert list(held_folder().iterdir()) == []


@pytest.mark.parametrize("fails", [False, True], ids=["late commit", "failed commit"])
async def test_hand_over_waits_until_the_log_has_what_was_read(
    state: Path, marker: str, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """A host that is killed while its record is ahead of its log would lose the turn."""
    agents, store = Agents(state, marker), f"sqlite:{state / 'store.db'}"
    append, write = SqliteLog.append, hold_record.write
    waiting: list[tuple[Any, ...]] = []
    written: list[str] = []
    is_slow, has_read = False, asyncio.Event()

    def append_later(*words: Any) -> None:
        if is_slow:
            waiting.append(words)
            has_read.set()
        else:
            append(*words)

    def note(name: str, record: bytes) -> None:
        written.append(name)
        write(name, record)

    monkeypatch.setattr(SqliteLog, "append", append_later)
    monkeypatch.setattr(hold_record, "write", note)
    async with Host(store) as host:
        session = await host.open("claude", command=agents.command(), options=QUICK)
        turn = await session.ask(f"@@touch {state}/reached\n@@wait {state}/go\n@@junk unknown\n@@hang")
        await exists(state / "reached")
        is_slow = True
        (state / "go").touch()
        await has_read.wait()
        draining = asyncio.create_task(host.drain(hand_over=True, hold_seconds=HOLD_SECONDS))
        for _ in range(100):
            await asyncio.sleep(0.001)
        early = [*written]
        is_slow = False
        for words in waiting:
            if fails:
                words[6](StoreError("the disk is full"))
            else:
                append(*words)
        await draining
        assert early == []
        if fails:
            outcome = await turn.outcome()
            assert (outcome.kind, str(outcome.error)) == (Kind.FAILED, "the disk is full")
            assert written == []
        else:
            with pytest.raises(Moved):
                await turn.outcome()
            assert len(written) == 1
    async with Host(store) as host:
        await host.take_up()
        if not fails:
            await (await host.session(session.id).turn(turn.id)).interrupt()
            await host.session(session.id).close()
        events = [event async for event in host.session(session.id).events(0, waits=False)]
    checks.log(events)
    checks.turns(events)
    assert len(bodies(events, kinds.PROCESS_ADOPTED)) == (not fails)
    assert agents.alive() == []
    assert list(held_folder().glob("*")) == []


@pytest.mark.parametrize("limit", ["deadline", "budget"])
async def test_limit_that_is_reached_while_a_hand_over_waits_for_the_log_is_kept(
    state: Path, marker: str, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    agents, store = Agents(state, marker), f"sqlite:{state / 'store.db'}"
    append = SqliteLog.append
    waiting: list[tuple[Any, ...]] = []
    is_slow, has_read = False, asyncio.Event()
    seconds = 1.0

    def append_later(*words: Any) -> None:
        if is_slow:
            waiting.append(words)
            has_read.set()
        else:
            append(*words)

    monkeypatch.setattr(SqliteLog, "append", append_later)
    deadline = seconds if limit == "deadline" else None
    budget = {"working_seconds": seconds} if limit == "budget" else None
    async with Host(store) as host:
        session = await host.open("claude", command=agents.command(), options=QUICK, budget=budget)
        turn = await session.ask(
            f"@@touch {state}/reached\n@@wait {state}/go\n@@junk unknown\n@@hang", deadline=deadline
        )
        await exists(state / "reached")
        is_slow = True
        (state / "go").touch()
        await has_read.wait()
        draining = asyncio.create_task(host.drain(hand_over=True, hold_seconds=HOLD_SECONDS))
        await asyncio.sleep(seconds + 0.5)
        is_slow = False
        for words in waiting:
            append(*words)
        await draining
    async with Host(store) as host:
        await host.take_up()
        session = host.session(session.id)
        if limit == "budget":
            await (await session.turn(turn.id)).interrupt()
        outcome = await (await session.turn(turn.id)).outcome()
        assert outcome.kind is Kind.INTERRUPTED
        await session.close()
        events = [event async for event in session.events(0, waits=False)]
    checks.log(events)
    checks.turns(events)
    assert len(bodies(events, kinds.BUDGET_EXCEEDED)) == (limit == "budget")
    assert agents.alive() == []


async def test_timer_behind_the_last_output_does_not_keep_the_process(
    state: Path, marker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flood of output waits in a backlog, and timers that fire wait behind it."""
    agents, store = Agents(state, marker), f"sqlite:{state / 'store.db'}"
    take, fired = frame_reader.Backlog.take, list[str]()

    def fire_behind(backlog: frame_reader.Backlog, *steps: Callable[[], None]) -> None:
        if "HandingOver" in repr(steps) and not fired:
            steps = (*steps, lambda: fired.append("timer"))
        take(backlog, *steps)

    monkeypatch.setattr(frame_reader.Backlog, "take", fire_behind)
    async with Host(store) as host:
        session = await host.open("claude", command=agents.command(), options=QUICK)
        turn = await session.ask(f"@@touch {state}/reached\n@@wait {state}/go\n@@say end")
        await exists(state / "reached")
        await host.drain(hand_over=True, hold_seconds=HOLD_SECONDS)
        assert fired
        (state / "go").touch()
        with pytest.raises(Moved):
            await turn.outcome()
    async with Host(store) as host:
        await host.take_up()
        session = host.session(session.id)
        assert (await (await session.turn(turn.id)).outcome()).text == "end"
        await session.close()
    assert len(agents.evidence.processes) == 1
    assert agents.alive() == []


async def test_take_up_held_waits_for_no_session_that_was_not_handed_over(state: Path, marker: str) -> None:
    async with opened(state / "it", marker) as it:
        turns = [await it.ask("@@say one\n@@touch {at}/reached\n@@hang"), await it.ask("@@say two")]
        await it.reached()
        it.host.kill()
        async with Host(f"sqlite:{it.store}") as host:
            await host.take_up_held()
            assert host.our_sessions() == []
            await host.take_up()
            assert [session.id for session in host.our_sessions()] == [it.session]
            outcomes = [await (await host.session(it.session).turn(turn)).outcome() for turn in turns]
            assert [outcome.kind for outcome in outcomes] == [Kind.UNKNOWN, Kind.DONE]


async def test_turn_goes_on_when_the_old_host_was_killed_before_it_logged_the_hand_over(
    state: Path, marker: str
) -> None:
    async with opened(state / "it", marker) as it:
        turns = [await it.ask(STREAM), await it.ask("@@say after")]
        await it.reached()
        await it.die()
        await it.come()
        it.go()
        assert await it.results(turns) == [["done", "three"], ["done", "after"]]
        events = await it.end()
        assert bodies(events, kinds.SESSION_HANDED_OVER) == []
        assert len(bodies(events, kinds.PROCESS_ADOPTED)) == 1


async def test_turn_goes_on_when_an_older_version_has_written_the_record(state: Path, marker: str) -> None:
    async with opened(state / "it", marker) as it:
        turn = await it.ask(STREAM)
        await it.reached()
        await it.die()
        # One line, without format and store.
        record().write_bytes(msgspec.json.encode(recorded()))
        await it.come()
        it.go()
        assert await it.results([turn]) == [["done", "three"]]
        await it.end()


async def test_host_of_a_copy_of_the_store_leaves_the_process_to_the_original(state: Path, marker: str) -> None:
    async with opened(state / "it", marker) as it:
        turn = await it.ask(STREAM)
        await it.reached()
        await it.leave()
        async with copied(it) as copy:
            assert await copy.call("take_up_held") == []
        await it.come()
        it.go()
        assert await it.results([turn]) == [["done", "three"]]
        await it.end()


async def test_question_stays_open_and_is_answered_at_the_next_host(state: Path, marker: str) -> None:
    async with opened(state / "it", marker) as it:
        turn = await it.ask("@@touch {at}/reached\n@@ask Bash\n@@say asked")
        asked: list[str] = []
        while not asked:
            asked = await it.host.call("questions", session=it.session)
        await it.restart()
        assert await it.host.call("questions", session=it.session) == asked
        assert await it.host.call("answer", session=it.session, question=asked[0])
        assert await it.results([turn]) == [["done", "asked"]]
        events = await it.end()
        assert len(bodies(events, kinds.QUESTION_ASKED)) == 1
        assert [body["answer"] for body in bodies(events, kinds.QUESTION_ANSWERED)] == ["allow"]


async def test_interrupt_ends_its_turn_at_the_next_host(state: Path, marker: str) -> None:
    async with opened(state / "it", marker, options={"drain_seconds": 60.0}) as it:
        turn = await it.ask("@@at interrupt touch {at}/reached\n@@at interrupt wait {at}/go\n@@touch {at}/up\n@@hang")
        await exists(it.path("up"))
        stopping = it.host.interrupt(turn)
        await it.reached()
        await it.restart()
        with pytest.raises(Refusal, match="the turn continues at its next host"):
            await stopping
        it.go()
        assert [kind for kind, _ in await it.results([turn])] == ["interrupted"]
        events = await it.end()
        assert len(bodies(events, kinds.TURN_INTERRUPTED)) == 1


async def test_turn_can_be_interrupted_at_the_next_host(state: Path, marker: str) -> None:
    async with opened(state / "it", marker) as it:
        turn = await it.ask("@@touch {at}/reached\n@@hang")
        await it.reached()
        await it.restart()
        assert await it.host.call("stop", session=it.session, turn=turn)
        assert [kind for kind, _ in await it.results([turn])] == ["interrupted"]
        await it.end()


async def test_idle_process_is_kept_over_a_restart(state: Path, marker: str) -> None:
    async with opened(state / "it", marker) as it:
        assert await it.results([await it.ask("@@say one")]) == [["done", "one"]]
        await it.restart()
        assert await it.results([await it.ask("@@recall")]) == [["done", '["@@say one", "@@recall"]']]
        await it.end()


# -- nothing to continue ---------------------------------------------------------------------------------------------
async def lost(it: Scene, hold_seconds: float, lose: Callable[[], None], *, dies: bool = False) -> list[Event]:
    """Hand over an open turn with asks behind it, lose the process, and let the next host serve the asks.

    `dies`: the old host is killed before it has logged the hand-over.
    """
    turns = await hanging(it)
    await (it.die if dies else it.leave)(hold_seconds)
    lose()
    return await served_after_loss(it, turns)


async def hanging(it: Scene) -> list[str]:
    """Begin a turn that hangs, with an ask behind it."""
    turns = [await it.ask("@@say one\n@@touch {at}/reached\n@@hang"), await it.ask("@@say two")]
    await it.reached()
    return turns


async def served_after_loss(it: Scene, turns: Sequence[str], adopted: int = 0) -> list[Event]:
    """Let the next host come, to which the process is lost, and return the log. `adopted`: how often it was adopted."""
    await it.come()
    assert await it.results(turns) == [["unknown", "one"], ["done", "two"]]
    await it.host.close(it.session)
    await it.host.leave()
    events = await it.events()
    checks.log(events)
    checks.turns(events)
    assert it.agents.alive() == []
    assert len(bodies(events, kinds.PROCESS_ADOPTED)) == adopted
    assert len(bodies(events, kinds.SESSION_RECOVERED)) == 1
    return events


def record() -> Path:
    (path,) = held_folder().glob(f"*{hold_record.SUFFIX}")
    return path


def recorded() -> HeldSession:
    return held_session.read(record().stem + sockets.SUFFIX)


def rewrite(held: HeldSession) -> None:
    header = record().read_bytes().partition(b"\n")[0]
    record().write_bytes(header + b"\n" + msgspec.json.encode(held))


async def test_turn_is_unknown_and_queue_served_when_no_host_came_in_time(state: Path, marker: str) -> None:
    async with opened(state / "it", marker) as it:

        def wait() -> None:
            until = time.monotonic() + PATIENCE_SECONDS
            while it.agents.alive() and time.monotonic() < until:
                time.sleep(0.01)

        await lost(it, 0.2, wait)


@pytest.mark.thorough
async def test_turn_is_unknown_when_the_record_is_gone(state: Path, marker: str) -> None:
    async with opened(state / "it", marker) as it:
        await lost(it, SHORT_SECONDS, lambda: record().unlink())


@pytest.mark.thorough
async def test_turn_is_unknown_when_the_secret_is_wrong(state: Path, marker: str) -> None:
    async with opened(state / "it", marker) as it:

        def falsify() -> None:
            rewrite(msgspec.structs.replace(recorded(), secret=bytes(32)))

        await lost(it, SHORT_SECONDS, falsify)


@pytest.mark.thorough
async def test_turn_is_unknown_when_another_version_wrote_the_state(state: Path, marker: str) -> None:
    async with opened(state / "it", marker) as it:

        def age() -> None:
            told = recorded()
            told.state["fields"]["unheard"] = 1
            rewrite(told)

        # The next host has the secret, so it ends the process at once.
        await lost(it, HOLD_SECONDS, age)


@pytest.mark.thorough
async def test_turn_is_unknown_when_the_log_of_a_killed_host_lacks_a_part_of_the_state(
    state: Path, marker: str
) -> None:
    async with opened(state / "it", marker) as it:

        def shorten() -> None:
            told = recorded()
            rewrite(msgspec.structs.replace(told, head=told.head + 1))

        # The next host does not wait for the end of the hold.
        await lost(it, HOLD_SECONDS, shorten, dies=True)


@pytest.mark.thorough
async def test_turn_is_unknown_when_the_keeper_was_killed(state: Path, marker: str) -> None:
    async with opened(state / "it", marker) as it:
        host = it.host.pid

        def kill() -> None:
            (pid,) = it.agents.alive()
            (keeper,) = set(keepers(host)) & {parent_of(pid)}
            os.kill(keeper, signal.SIGKILL)

        await lost(it, HOLD_SECONDS, kill)


async def test_turn_is_unknown_when_the_next_host_dies_after_its_claim(state: Path, marker: str) -> None:
    """The process has no host then, so its keeper ends it. The third host need not wait for the end of the hold."""
    async with opened(state / "it", marker) as it:
        turns = [await it.ask("@@say one\n@@touch {at}/reached\n@@hang"), await it.ask("@@say two")]
        await it.reached()
        await it.leave()
        await it.start_host()
        with pytest.raises(Died):
            await it.host.call("die_after_claim")
        await it.come()
        assert await it.results(turns) == [["unknown", "one"], ["done", "two"]]
        await it.host.close(it.session)
        await it.host.leave()
        events = await it.events()
        checks.log(events)
        checks.turns(events)
        assert it.agents.alive() == []
        assert bodies(events, kinds.PROCESS_ADOPTED) == []


async def test_session_with_variables_leaves_without_its_process(state: Path, marker: str) -> None:
    # The log has no values of variables, so no other program could start the agent again.
    async with opened(state / "it", marker, env={"SOME": "thing"}) as it:
        turns = [await it.ask("@@touch {at}/reached\n@@wait {at}/go\n@@say one"), await it.ask("@@say two")]
        await it.reached()
        leaving = it.host.call("hand_over", hold_seconds=HOLD_SECONDS)
        await it.host.ping()
        it.go()
        await leaving
        await it.host.leave()
        assert it.agents.alive() == []
        events = await it.events()
        assert events[-1].kind == kinds.SESSION_LEFT
        assert [body["outcome"] for body in bodies(events, kinds.TURN_ENDED)] == ["done"]
        assert bodies(events, kinds.SESSION_LEFT) == [{"queued": turns[1:]}]
