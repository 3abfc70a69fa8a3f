"""Several hosts on one store: access to a session that another host owns, owned, or is about to own."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Mapping
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.sessions.crash_host import Agents, Refusal, remote
from tests.sessions.helpers import QUICK, bodies, exists
from tests.sessions.takeover_scene import check, outcomes, read, recalled
from tests.store.kit import Writer

from banksman import Closed, Event, Host, Kind, NotOwner, Session, Tool, UsageError
from banksman.core.session import event as kinds
from banksman.core.session.event import entry
from banksman.errors import HistoryLost, NameTaken
from banksman.store.sqlite import SqliteLog
from banksman.testing import checks


class Shared:
    """Store that several hosts share, and the agents of their sessions."""

    def __init__(self, folder: Path, marker: str) -> None:
        self.folder = folder
        self.path = folder / "store.db"
        self.agents = Agents(folder, marker)

    def host(self) -> Host:
        return Host(f"sqlite:{self.path}")

    async def open(self, host: Host, name: str | None = "one", **how: Any) -> Session:
        words: dict[str, Any] = {"command": self.agents.command(), "options": QUICK, **how}
        return await host.open("claude", name=name, **words)


@pytest.fixture
def shared(tmp_path: Path, marker: str) -> Shared:
    return Shared(tmp_path, marker)


async def answer(session: Session, prompt: str) -> str | None:
    outcome = await (await session.ask(prompt)).outcome()
    assert outcome.kind is Kind.DONE, outcome
    return outcome.text


# -- sessions of another host ----------------------------------------------------------------------------------------
async def test_session_of_live_host_can_be_read_but_not_claimed(shared: Shared, marker: str, tmp_path: Path) -> None:
    """Two processes. The reader gets each event at its commit, and sees the state of the session."""
    async with remote(shared.path, marker) as there, shared.host() as here:
        id = await there.open(name="one", command=shared.agents.command(), options=QUICK)
        session = here.session("one")
        assert (session.id, session.agent, here.sessions()) == (id, "claude", [session])
        seen: list[Event] = []
        following = asyncio.create_task(_follow(session, seen))
        running = await there.ask(id, f"one\n@@stream 5 0\n@@touch {tmp_path / 'reached'}\n@@ask Bash {{}}")
        waiting = await there.ask(id, "two", priority="background")
        await exists(tmp_path / "reached")
        question = await _until(session, kinds.QUESTION_ASKED)
        await _is_refused(shared, here, session, there.pid, question.body["question"])
        status = await session.look()
        assert (status.phase, status.holder, status.seq) == ("elsewhere", running, question.seq)
        assert [each.turn for each in status.queue] == [waiting]
        assert status.questions == (question.body["question"],)
        assert status.pids == (shared.agents.evidence.processes[0].pid,)
        assert status.owner is not None
        assert (status.owner.pid, status.owner.address) == (there.pid, socket.gethostname())
        assert (status.owner.is_here, status.owner.is_alive) == (False, True)
        # A turn of the other host can be awaited here.
        turn = await session.turn(running)
        ending = asyncio.create_task(turn.outcome())
        assert await there.interrupt(running)
        assert (await ending).kind is Kind.INTERRUPTED
        assert (await ending).text == "tick0 tick1 tick2 tick3 tick4 "
        assert await outcomes(session, [waiting]) == [Kind.DONE]
        await there.close(id)
        await following
        assert seen[-1].kind == kinds.SESSION_CLOSED
        events = await read(session)
        checks.readers_agree(seen, events)
        check(events, shared.agents, [running, waiting])
        # No host owns the session now. The first ask claims it with its recorded options, and the conversation
        # continues.
        assert session.status().phase == "asleep"
        assert await recalled(session) == ["one", "two"]
        with pytest.raises(Refusal, match=f"NotOwner.*{os.getpid()}"):
            await there.open(name="one", command=shared.agents.command(), options=QUICK)
        with pytest.raises(Refusal, match="NotOwner"):
            await there.ask("one", "mine?")
        await session.close()
        check(await read(session), shared.agents, [running, waiting])


async def _is_refused(shared: Shared, here: Host, session: Session, pid: int, question: str) -> None:
    """Check that every change is refused, and that the log has nothing of it."""
    before = session.status()
    changes: list[Callable[[], Awaitable[object]]] = [
        lambda: shared.open(here),
        lambda: session.ask("mine?"),
        session.interrupt,
        lambda: session.answer(question, "allow"),
        lambda: session.set_model("opus"),
        lambda: session.hold().__aenter__(),
        lambda: here.delete(session),
    ]
    for change in changes:
        with pytest.raises(NotOwner) as caught:
            await change()
        assert (caught.value.ids["pid"], caught.value.ids["address"]) == (pid, socket.gethostname())
        assert str(pid) in str(caught.value)
    with pytest.raises(UsageError, match="not open here"):
        await here.fork(session)
    await session.close()  # The close of another host's session has no effect.
    assert session.status() == before


async def _follow(session: Session, seen: list[Event]) -> None:
    async with aclosing(session.follow()) as events:
        async for event in events:
            seen.append(event)  # noqa: PERF401  The test reads the list meanwhile.


async def _until(session: Session, kind: str) -> Event:
    async with aclosing(session.follow()) as events:
        async for event in events:
            if event.kind == kind:
                return event
    raise AssertionError(f"closed without {kind}")


async def test_follower_in_other_host_gets_each_event_before_next(shared: Shared, tmp_path: Path) -> None:
    """The agent continues only after the reader on another host has its output.

    A reader that gets events late or in batches would never reach the end.
    """
    async with shared.host() as writer, shared.host() as reader:
        session = await shared.open(writer)
        steps = [f"@@say word-{n}-\n@@wait {tmp_path / f'heard-{n}'}" for n in range(5)]
        turn = await session.ask("one\n" + "\n".join(steps))
        heard = 0
        async with asyncio.timeout(30), aclosing(reader.session("one").follow()) as events:
            async for event in events:
                if event.kind == kinds.UPDATE and b'"assistant"' in event.data:
                    assert f"word-{heard}-".encode() in event.data
                    (tmp_path / f"heard-{heard}").touch()
                    heard += 1
                if event.kind == kinds.TURN_ENDED:
                    break
        assert heard == 5
        assert (await turn.outcome()).kind is Kind.DONE


async def test_follower_in_other_host_reaches_end_and_can_resume(shared: Shared) -> None:
    async with shared.host() as one, shared.host() as other:
        session = await shared.open(one)
        await answer(session, "first")
        handle = other.session("one")
        following = asyncio.create_task(_follow(handle, first := []))
        await session.close()
        await following
        assert first == await read(handle)
        # A closed session has an end for followers, also from the last cursor, until it is opened again.
        async with asyncio.timeout(10), aclosing(handle.follow(after=first[-1].cursor)) as events:
            assert [event async for event in events] == []
        again = await shared.open(one)
        assert again.id == session.id
        async with aclosing(handle.follow(after=first[-1].cursor)) as events:
            async for event in events:
                assert event.seq == first[-1].seq + 1
                break


# -- one host after the other ----------------------------------------------------------------------------------------
async def test_session_moves_between_hosts_with_its_conversation(shared: Shared) -> None:
    accepted: list[str] = []
    for number in range(4):
        async with shared.host() as host:
            # By name with new options, or by lookup with the recorded ones.
            session = host.session("one") if number % 2 else await shared.open(host)
            turn = await session.ask(f"ask {number}", key=f"key {number}")
            accepted.append(turn.id)
            assert (await turn.outcome()).text == f"ask {number}"
            for before in range(number):
                known = await session.ask("not again", key=f"key {before}")
                assert known.id == accepted[before]
                assert (await known.outcome()).text == f"ask {before}"
    async with shared.host() as host:
        events = await read(host.session("one"))
        check(events, shared.agents, accepted)
        assert [event.epoch for event in events if event.kind == kinds.SESSION_OPENED] == [1, 3, 5, 7]
        assert kinds.SESSION_RECOVERED not in {event.kind for event in events}
        assert await recalled(host.session("one")) == [f"ask {number}" for number in range(4)]


async def test_session_closed_by_one_host_opens_at_once_in_another(shared: Shared) -> None:
    async with shared.host() as one, shared.host() as other:
        for number in range(20):
            host = (one, other)[number % 2]
            session = await shared.open(host)
            await session.close()
        assert len(bodies(await read(one.session("one")), kinds.SESSION_OPENED)) == 20


async def test_concurrent_asks_claim_session_once(shared: Shared) -> None:
    async with shared.host() as host:
        await shared.open(host)
    async with shared.host() as host:
        session = host.session("one")
        turns = await asyncio.gather(*(session.ask(f"ask {n}") for n in range(5)))
        assert [(await turn.outcome()).text for turn in turns] == [f"ask {n}" for n in range(5)]
        opened = bodies(await read(session), kinds.SESSION_OPENED)
        assert len(opened) == 2
        await session.close()
        check(await read(session), shared.agents, [turn.id for turn in turns])


def _nothing(_: Mapping[str, Any]) -> None:
    pass


def _three(_: Mapping[str, Any]) -> str:
    return "3"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"env": {"TOKEN": "hunter2"}}, ["variables", "TOKEN"]),
        ({"hooks": {"Stop": _nothing}}, ["hooks", "Stop"]),
        ({"tools": [Tool("add", "Adds", {"type": "object"}, _three)]}, ["tools", "add"]),
        ({"mcp_servers": [{"name": "probe", "command": "/bin/cat"}]}, ["MCP servers", "probe"]),
    ],
)
async def test_ask_names_options_that_log_does_not_keep(shared: Shared, how: dict[str, Any], words: list[str]) -> None:
    async with shared.host() as host:
        await shared.open(host, **how)
    async with shared.host() as host:
        session = host.session("one")
        before = session.status()
        with pytest.raises(UsageError) as caught:
            await session.ask("one")
        for word in words:
            assert word in caught.value.hint
        assert "hunter2" not in str(caught.value)
        assert session.status() == before
        assert await answer(await shared.open(host, **how), "one") == "one"


async def test_settings_and_rules_move_with_session(shared: Shared) -> None:
    how: dict[str, Any] = {"model": "opus", "permission_mode": "plan", "rules": {"Bash": "deny"}, "args": ["--x=1"]}
    async with shared.host() as host:
        session = await shared.open(host, system_prompt="be brief", **how)
        await session.set_model("haiku")
    async with shared.host() as host:
        session = host.session("one")
        assert await answer(session, "@@ask Bash {}\n@@say asked") == "asked"
        (process,) = shared.agents.evidence.processes
        assert {"--model=haiku", "--permission-mode=plan", "--x=1"} <= set(process.argv)
        assert any("be brief" in word for word in process.argv)
        (answered,) = bodies(await read(session), kinds.QUESTION_ANSWERED)
        assert (answered["answer"], answered["by"]) == ("deny", "rule")


async def test_open_options_override_earlier_settings(shared: Shared) -> None:
    """An option overrides a value that was set since the last open.

    If the open repeats the earlier option, the value that was set stays.
    """
    wanted: list[dict[str, Any]] = [{}, {}, {"model": "opus"}, {"model": "opus"}, {"permission_mode": "plan"}]
    for how in wanted:
        async with shared.host() as host:
            session = await shared.open(host, **how)
            await answer(session, "one")
            await session.set_model("haiku")
            await session.set_permission_mode("acceptEdits")
    told = ("--model=", "--permission-mode=")
    started = [[word for word in process.argv if word.startswith(told)] for process in shared.agents.evidence.processes]
    assert started == [
        [],
        ["--model=haiku", "--permission-mode=acceptEdits"],
        ["--model=opus", "--permission-mode=acceptEdits"],
        ["--model=haiku", "--permission-mode=acceptEdits"],
        ["--permission-mode=plan"],
    ]


# -- names -----------------------------------------------------------------------------------------------------------
async def test_hosts_opening_new_name_together_make_one_session(shared: Shared) -> None:
    async with shared.host() as one, shared.host() as other:
        for number in range(5):
            name = f"name {number}"
            got = await asyncio.gather(shared.open(one, name), shared.open(other, name), return_exceptions=True)
            assert {type(each) for each in got} == {Session, NotOwner}
            assert [session.name for session in one.sessions()].count(name) == 1
        assert len(one.sessions()) == len(other.sessions()) == 5


async def test_concurrent_opens_of_name_in_one_host_get_same_session(shared: Shared) -> None:
    async with shared.host() as host:
        for _ in range(2):  # A new session, and then an existing one.
            sessions = await asyncio.gather(*(shared.open(host) for _ in range(5)))
            assert len(set(map(id, sessions))) == 1
            assert await answer(sessions[0], "one") == "one"
            await sessions[0].close()
        assert len(host.sessions()) == 1
        check(await read(host.session("one")), shared.agents, [])


async def test_concurrent_open_and_ask_get_same_session(shared: Shared) -> None:
    async with shared.host() as host:
        id = (await shared.open(host)).id
    async with shared.host() as host:
        session, turn = await asyncio.gather(shared.open(host), host.session(id).ask("one"))
        assert turn.session is session
        assert (await turn.outcome()).text == "one"
        assert await answer(session, "two") == "two"
        await session.close()
        check(await read(host.session(id)), shared.agents, [turn.id])


async def test_session_name_can_be_reused_after_rename(shared: Shared) -> None:
    async with shared.host() as one, shared.host() as other:
        first = await shared.open(one)
        await answer(first, "first")
        handle = other.session("one")
        await handle.rename("two")
        with pytest.raises(UsageError, match="no session 'one'"):
            other.session("one")
        # Another host renamed the session in the meantime.
        with pytest.raises(UsageError):
            await first.rename("three")
        assert one.session("two") is first
        assert await shared.open(one, "two") is first
        assert first.name == "two"
        second = await shared.open(one, "one")
        assert second is not first
        with pytest.raises(NameTaken):
            await second.rename("two")
        with pytest.raises(UsageError, match="two"):
            await one.fork(first, name="two")
        await first.rename(None)
        assert {session.name for session in other.sessions()} == {None, "one"}
        await second.rename("two")
        await answer(first, "still here")


async def test_deleted_session_is_gone_for_every_host(shared: Shared) -> None:
    async with shared.host() as one, shared.host() as other:
        session = await shared.open(one)
        await answer(session, "forget me")
        handle = other.session("one")
        with pytest.raises(NotOwner):
            await other.delete(handle)
        await one.delete("one")
        assert session.is_closed
        assert not shared.agents.alive()
        assert one.sessions() == other.sessions() == []
        assert handle.status().phase == "deleted"
        assert (await handle.look()).phase == "deleted"
        with pytest.raises(UsageError):
            await handle.ask("anybody?")
        assert other.sessions() == []
        # The name is free, and the new session has no memory of the old one.
        fresh = await shared.open(other)
        assert fresh.id != session.id
        assert await recalled(fresh) == []


@pytest.mark.parametrize("hosts", ["one host", "two hosts"])
async def test_open_during_delete_gets_consistent_session(shared: Shared, hosts: str) -> None:
    """The open gets a new session, or the existing one if it is faster.

    Then the delete is refused, or closes it again. A session in the store has its name in either case.
    """
    async with shared.host() as one, shared.host() as other:
        for number in range(30):
            await (await shared.open(one)).close()
            deleter = one if hosts == "one host" else other
            passes = number % 6
            got = await asyncio.gather(
                _after(passes % 3, deleter.delete("one")),
                _after(passes % 2, shared.open(one)),
                return_exceptions=True,
            )
            deleted, opened = got
            assert isinstance(opened, Session), opened
            assert deleted is None or isinstance(deleted, NotOwner)
            assert [(each.name, each.agent) for each in other.sessions()] in ([], [("one", "claude")])
            if not opened.is_closed:
                assert one.session("one") is opened
                await one.delete(opened)
            assert one.sessions() == []


async def _after(passes: int, what: Awaitable[Any]) -> Any:
    for _ in range(passes):
        await asyncio.sleep(0)
    return await what


# -- conversations ---------------------------------------------------------------------------------------------------
async def test_conversation_is_driven_by_one_host_at_a_time(shared: Shared, marker: str) -> None:
    async with shared.host() as here:
        async with remote(shared.path, marker) as there:
            id = await there.open(name="one", command=shared.agents.command(), options=QUICK)
            await there.outcome(await there.ask(id, "first"))
            conversation = (await here.session(id).look()).conversation
            assert conversation is not None
            with pytest.raises(NotOwner, match=id):
                await shared.open(here, "two", resume=conversation)
            assert [session.name for session in here.sessions()] == ["one"]
            # A fork of the conversation is allowed.
            fork = await shared.open(here, "fork", resume=conversation, fork=True)
            assert await recalled(fork) == ["first"]
            there.kill()
        # The host is dead, so no host owns the session.
        second = await shared.open(here, "two", resume=conversation)
        assert await recalled(second) == ["first"]
        # Now the first session is refused, and still has no owner.
        with pytest.raises(NotOwner, match=second.id):
            await shared.open(here, "one")
        with pytest.raises(NotOwner, match=second.id):
            await here.session("one").ask("mine?")
        assert await _settled(here) == ["asleep"]
        await second.close()
        assert await recalled(await shared.open(here, "one")) == ["first", "@@recall"]


async def test_session_refuses_open_with_another_conversation(shared: Shared) -> None:
    async with shared.host() as host:
        session = await shared.open(host)
        await answer(session, "first")
        conversation = session.status().conversation
    async with shared.host() as host:
        wrongs: tuple[dict[str, Any], ...] = (
            {"resume": "11111111-2222-4333-8444-555555555555"},
            {"resume": conversation, "fork": True},
        )
        for wrong in wrongs:
            with pytest.raises(UsageError, match="another conversation"):
                await shared.open(host, **wrong)
            assert await _settled(host) == ["asleep"]
        assert await recalled(await shared.open(host, resume=conversation)) == ["first"]


# -- histories -------------------------------------------------------------------------------------------------------
async def test_cursor_of_unknown_history_is_refused(shared: Shared) -> None:
    """A backup replaced the store: the reader's cursor is from the lost history."""
    backup = shared.folder / "backup"
    async with shared.host() as host:
        await answer(await shared.open(host), "kept")
    shutil.copyfile(shared.path, backup)
    async with shared.host() as host:
        session = host.session("one")
        kept = (await read(session))[-1]
        await answer(session, "lost")
        lost = [event.cursor for event in await read(session) if event.seq > kept.seq]
    for file in shared.folder.glob("store.db*"):
        file.unlink()
    backup.rename(shared.path)
    async with shared.host() as host:
        session = host.session("one")
        for cursor in (*lost, f"{kept.epoch + 1}.{kept.seq}"):
            with pytest.raises(HistoryLost) as caught:
                await anext(aiter(session.follow(after=cursor)))
            assert caught.value.hint == "begin again at the first event, without a cursor"
        async with aclosing(session.follow(after=kept.cursor)) as events:
            assert [event async for event in events] == []
        await answer(session, "another")
        async with aclosing(session.follow(after=kept.cursor)) as events:
            assert (await anext(events)).seq == kept.seq + 1


# -- opens that fail -------------------------------------------------------------------------------------------------
class Cancelled:
    """Awaitable that is cancelled at its suspension with this number.

    The cancel comes when it begins to wait there, or (`is_late`) right after the awaited result has come.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], number: int, *, is_late: bool) -> None:
        self._coroutine = coroutine
        self._number = number
        self._is_late = is_late
        self.count = 0

    async def wait(self) -> Any:
        return await self

    def __await__(self) -> Generator[Any, Any, Any]:
        task = asyncio.current_task()
        assert task is not None
        inner = self._coroutine.__await__()
        sent: Any = None
        while True:
            try:
                waited = inner.send(sent) if not isinstance(sent, BaseException) else inner.throw(sent)
            except StopIteration as stop:
                return stop.value
            self.count += 1
            if self.count == self._number:
                if self._is_late and waited is not None:
                    waited.add_done_callback(partial(_cancel, task))
                else:
                    asyncio.get_running_loop().call_soon(task.cancel)
            try:
                sent = yield waited
            except BaseException as exc:
                sent = exc


def _cancel(task: asyncio.Task[Any], _: object) -> None:
    task.cancel()


@asynccontextmanager
async def _new(shared: Shared) -> AsyncGenerator[None]:
    async with shared.host() as host:
        assert host.sessions() == []  # The store exists.
    yield


@asynccontextmanager
async def _known(shared: Shared) -> AsyncGenerator[None]:
    async with shared.host() as host:
        await answer(await shared.open(host), "first")
    yield


@asynccontextmanager
async def _open_turn(shared: Shared) -> AsyncGenerator[None]:
    """A session whose host died in a turn."""
    async with _known(shared):
        log = SqliteLog(shared.path)
        (known,) = log.sessions()
        writer = await Writer.claim(log, known.id)
        ask = {"ref": "r" * 36, "prompt": "two", "priority": 10, "on_busy": "enqueue", "on_preempt": "end", "key": None}
        await writer.commit(
            entry("t-1", kinds.TURN_QUEUED, **ask, rules=[], schema=None, is_last=False),
            entry("t-1", kinds.TURN_STARTED, attempt=1, joined=[]),
        )
        await log.close()
        yield


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("past", [_new, _known, _open_turn])
async def test_open_cancelled_at_any_point_leaves_nothing_owned(
    shared: Shared, past: Callable[[Shared], Any], is_late: bool
) -> None:
    async with past(shared), shared.host() as other:
        number = 0
        while True:
            number += 1
            async with shared.host() as host:
                opening = Cancelled(shared.open(host), number, is_late=is_late)
                task = asyncio.create_task(opening.wait())
                await asyncio.wait((task,))
                if opening.count < number:
                    break  # The open completed before that suspension.
                phases = await _settled(other) if task.cancelled() else []
                assert phases == ([] if past is _new else ["asleep"] * len(phases)), f"cancelled at {number}"
                # The session works as if the cancelled open had not happened.
                session = await shared.open(other)
                assert await answer(session, "one") == "one"
                await session.close()
                if past is _new:
                    await other.delete(session)
        assert number > 2, "there is nothing to be cancelled at"


async def _settled(host: Host) -> list[str]:
    """Return the phases of sessions that are not open here, after pending releases.

    No event reports a release, so the function polls.
    """
    async with asyncio.timeout(30):
        while True:
            phases = [session.status().phase for session in host.sessions() if not session.is_ours]
            if "elsewhere" not in phases:
                return phases
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("passes", [0, 1, 2, 5, 10, 20])
async def test_open_while_host_closes_leaves_session_usable(shared: Shared, passes: int) -> None:
    async with shared.host() as other:
        host = shared.host()
        opening = asyncio.create_task(shared.open(host))
        for _ in range(passes):
            await asyncio.sleep(0)
        if passes == 0:
            await asyncio.sleep(0)  # Otherwise the open would not have begun, in a host that is not in use.
        await host.close()
        (got,) = await asyncio.gather(opening, return_exceptions=True)
        assert isinstance(got, Closed) or (isinstance(got, Session) and got.is_closed), got
        assert [session.status().phase for session in other.sessions()] in ([], ["asleep"])
        assert await answer(await shared.open(other), "one") == "one"
