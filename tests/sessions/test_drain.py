"""A session leaves its host: the running turn ends, the queue stays in the log, and the next host serves it."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.sessions.crash_host import Agents
from tests.sessions.helpers import QUICK, SHORT_DRAIN, bodies, exists, opened, prompts, touch
from tests.sessions.takeover_scene import check, recalled

from banksman import Closed, Event, Host, Kind, Moved, Moving, NotOwner, Session, Turn, threads
from banksman.core.dialects.claude import CLAUDE
from banksman.core.session import event as kinds
from banksman.core.session.session_config import Config
from banksman.core.session.state import Mode
from banksman.sessions import recovery
from banksman.sessions.recovery import has_waiting_asks
from banksman.store.sqlite import SqliteLog
from banksman.testing import checks, fake_agent

NAME = "the one"


class Pair:
    """Two hosts that share a store, and a session on the first."""

    def __init__(self, first: Host, second: Host, session: Session, agents: Agents) -> None:
        self.first = first
        self.second = second
        self.session = session
        self.agents = agents

    async def reaches(self, prompt: str, **how: Any) -> Turn:
        """Ask, and return when the agent has reached the last line of the prompt."""
        mark = self.agents.folder / "reached"
        *before, last = prompt.split("\n")
        turn = await self.session.ask("\n".join([*before, f"@@touch {mark}", last]), **how)
        await exists(mark)
        return turn

    async def events(self) -> list[Event]:
        return [event async for event in self.second.session(self.session.id).events(0, waits=False)]

    def alive(self) -> list[int]:
        return self.agents.alive("-first")


@asynccontextmanager
async def pair(tmp_path: Path, marker: str, script: Sequence[str] = (), **how: Any) -> AsyncGenerator[Pair]:
    agents = Agents(tmp_path, marker)
    store = f"sqlite:{tmp_path / 'store.db'}"
    async with Host(store) as first, Host(store) as second:
        options = {**QUICK, **how.pop("options", {})}
        session = await first.open(
            "claude", name=NAME, command=agents.command("-first", script), options=options, **how
        )
        yield Pair(first, second, session, agents)


async def moved(turn: Turn) -> Moved:
    with pytest.raises(Moved) as caught:
        await turn.outcome()
    return caught.value


# -- the whole move --------------------------------------------------------------------------------------------------
async def test_leaving_session_finishes_running_turn_and_moves_queue_to_next_host(tmp_path: Path, marker: str) -> None:
    async with pair(tmp_path, marker) as it:
        go = tmp_path / "go"
        running = await it.reaches(f"one\n@@wait {go}")
        waiting = [await it.session.ask(text, key=f"key of {text}") for text in ("two", "three")]
        leaving = asyncio.ensure_future(it.session.leave())
        outcomes = [asyncio.ensure_future(moved(turn)) for turn in waiting]
        await asyncio.sleep(0)
        assert it.session.status().phase == "leaving"
        with pytest.raises(Moving):
            await it.session.ask("too late")
        with pytest.raises(NotOwner):
            await it.second.session(NAME).ask("too early")
        assert not leaving.done()
        touch(go)
        await leaving
        assert it.alive() == []
        assert (await running.outcome()).kind is Kind.DONE
        for turn, error in zip(waiting, await asyncio.gather(*outcomes), strict=True):
            assert error.ids == {"session": it.session.id, "turn": turn.id}
            assert turn.state == "queued"
        events = await it.events()
        assert events[-1].kind == kinds.SESSION_LEFT
        assert events[-1].body == {"queued": [turn.id for turn in waiting]}
        assert kinds.SESSION_CLOSED not in {event.kind for event in events}
        # The next host serves the asks in their order, in the same conversation, and under the same keys.
        session = await it.second.open("claude", name=NAME, command=it.agents.command("-second"), options=QUICK)
        again = await session.ask("two", key="key of two")
        assert again.id == waiting[0].id
        assert [(await (await session.turn(turn.id)).outcome()).text for turn in waiting] == ["two", "three"]
        assert await recalled(session) == ["one", "two", "three"]
        # The first host can return each outcome too: the log has it.
        handle = it.first.session(NAME)
        assert handle is not it.session
        assert (await (await handle.turn(waiting[1].id)).outcome()).text == "three"
        await session.close()
        events = await it.events()
        check(events, it.agents, [running.id, *(turn.id for turn in waiting)])
        assert kinds.SESSION_RECOVERED not in {event.kind for event in events}, "nothing had to be settled"


async def test_left_session_can_be_claimed_again_by_same_host(tmp_path: Path) -> None:
    async with opened(tmp_path, host=Host(f"sqlite:{tmp_path / 'store.db'}"), is_checked=False) as case:
        await case.answer("one")
        await case.session.leave()
        assert case.session.is_closed
        with pytest.raises(Moving):
            await case.ask("by the old handle")
        again = case.host.session(case.session.id)
        assert again.status().phase == "asleep"
        assert (await (await again.ask("two")).outcome()).text == "two"
        assert [session.id for session in case.host.our_sessions()] == [case.session.id]
        await again.close()
        events = [event async for event in again.events(0, waits=False)]
        checks.log(events)
        checks.turns(events)
        assert prompts(case) == ["one", "two"]


async def test_unused_session_leaves_at_once_and_repeatedly(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        first = asyncio.ensure_future(case.session.leave())
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(*(case.session.leave() for _ in range(3)), case.session.leave(0.0))
        await asyncio.wait([first])
        assert await case.kinds() == [kinds.SESSION_OPENED, kinds.SESSION_LEFT]
        assert case.processes == []
        await case.session.close()
        assert (await case.kinds())[-1] == kinds.SESSION_LEFT


async def test_unclaimed_or_closed_session_ignores_leave(tmp_path: Path) -> None:
    async with opened(tmp_path, host=Host(f"sqlite:{tmp_path / 'store.db'}")) as case:
        await case.answer("one")
        await case.session.close()
        await case.session.leave()
        await case.host.session(case.session.id).leave()
        assert (await case.kinds())[-1] == kinds.SESSION_CLOSED


# -- the running turn ------------------------------------------------------------------------------------------------
async def test_leave_stops_running_turn_and_keeps_queue_after_timeout(tmp_path: Path, marker: str) -> None:
    async with pair(tmp_path, marker) as it:
        running = await it.reaches("one\n@@say one\n@@hang")
        waiting = await it.session.ask("two")
        async with asyncio.timeout(10):
            await it.session.leave(0.05)
        outcome = await running.outcome()
        assert (outcome.kind, outcome.text) == (Kind.INTERRUPTED, "one")
        await moved(waiting)
        assert it.alive() == []
        assert (await it.events())[-1].body == {"queued": [waiting.id]}


async def test_leave_uses_earliest_of_several_deadlines(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        running = await case.running("one")
        leaving = [asyncio.ensure_future(case.session.leave(seconds)) for seconds in (3600.0, 0.05, None, 3600.0)]
        async with asyncio.timeout(10):
            await asyncio.gather(*leaving)
        assert (await case.outcome(running)).kind is Kind.INTERRUPTED


async def test_leaving_session_allows_interrupt_of_running_turn(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        running = await case.running("one")
        leaving = asyncio.ensure_future(case.session.leave())
        await asyncio.sleep(0)
        assert (await running.interrupt()).stopped
        await leaving
        assert (await case.outcome(running)).kind is Kind.INTERRUPTED


async def test_leaving_session_allows_answer_to_question(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        turn = await case.ask("@@ask Bash {}\n@@say done")
        asked = await case.wait_kind(kinds.QUESTION_ASKED)
        leaving = asyncio.ensure_future(case.session.leave())
        await asyncio.sleep(0)
        assert (await case.session.answer(asked.body["question"], "allow")).is_first
        await leaving
        assert (await case.outcome(turn)).kind is Kind.DONE


async def test_preempted_turn_moves_to_next_host_when_session_leaves(tmp_path: Path, marker: str) -> None:
    """The turn was preempted by a more urgent ask, and the session leaves before that ask runs."""
    script = ["on_interrupt unanswered", "ignore eof"]
    async with pair(tmp_path, marker, script, options=SHORT_DRAIN) as it:
        chore = await it.reaches("chore\n@@hang", priority="background", on_preempt="requeue")
        urgent = await it.session.ask("urgent", priority="interactive")
        await it.session.leave()
        await moved(chore)
        await moved(urgent)
        session = await it.second.open("claude", name=NAME, command=it.agents.command("-second"), options=QUICK)
        assert (await (await session.turn(urgent.id)).outcome()).text == "urgent"
        interrupted = await session.interrupt(chore.id)
        assert interrupted.by is not interrupted.by.ALREADY_OVER
        await session.close()


@pytest.mark.parametrize("point", ["initialize", "read", "started", "init", "result", "completed", "idle"])
async def test_leave_at_any_point_loses_no_turn(tmp_path: Path, marker: str, point: str) -> None:
    reached = tmp_path / "at"
    script = [f"at {point} touch {reached}", f"at {point} wait {tmp_path / 'never'}"]
    async with pair(tmp_path, marker, script) as it:
        turns = [await it.session.ask(text) for text in ("one", "two")]
        await exists(reached)
        async with asyncio.timeout(20):
            await it.session.leave(0.2)
        assert it.alive() == []
        told: list[Kind | None] = []
        for turn in turns:
            try:
                told.append((await turn.outcome()).kind)
            except Moved:
                told.append(None)
        # The second ask may have been sent after the end of the first.
        assert told[0] in (None, Kind.INTERRUPTED, Kind.DONE)
        assert told[1] is None or told[0] is Kind.DONE
        waits = [turn.id for turn, kind in zip(turns, told, strict=True) if kind is None]
        assert (await it.events())[-1].body == {"queued": waits}
        session = await it.second.open("claude", name=NAME, command=it.agents.command("-second"), options=QUICK)
        for id in waits:
            assert (await (await session.turn(id)).outcome()).kind is Kind.DONE
        await session.close()
        check(await it.events(), it.agents, [turn.id for turn in turns])


async def test_leave_during_process_start_leaves_no_process(tmp_path: Path, marker: str) -> None:
    for passes in range(6):
        folder = tmp_path / str(passes)
        folder.mkdir()
        async with pair(folder, marker) as it:
            turn = await it.session.ask("one")
            for _ in range(passes):
                await asyncio.sleep(0)
            await it.session.leave()
            await moved(turn)
            assert it.alive() == []
            assert turn.state == "queued"


# -- the queue -------------------------------------------------------------------------------------------------------
async def test_queued_turn_can_be_withdrawn_until_session_has_left(tmp_path: Path) -> None:
    async with opened(tmp_path, is_checked=False) as case:
        go = case.path("go")
        await case.reaches(f"one\n@@wait {go}")
        withdrawn, stopped, kept = [await case.ask(text) for text in ("two", "three", "four")]
        leaving = asyncio.ensure_future(case.session.leave())
        await asyncio.sleep(0)
        case.session.withdraw(withdrawn)
        assert (await stopped.interrupt()).stopped
        touch(go)
        await leaving
        assert (await case.outcome(withdrawn)).kind is Kind.WITHDRAWN
        assert (await case.outcome(stopped)).kind is Kind.WITHDRAWN
        assert bodies(await case.events(), kinds.SESSION_LEFT) == [{"queued": [kept.id]}]
        for late in (kept.interrupt(), kept.outcome(), anext(aiter(kept))):
            with pytest.raises(Moved):
                await late
        with pytest.raises(Moved):
            case.session.withdraw(kept)
        assert (await case.session.turn(kept.id)) is kept


async def test_ask_cancelled_at_moment_of_leave_leaves_no_turn(tmp_path: Path) -> None:
    """Cancel an ask at every step of the loop: it is withdrawn, or it was accepted and its caller has it.

    There is one exception, in at most two steps: the log commits the ask and the leave together, and the caller is
    cancelled before it gets the turn. The next host serves such an ask.
    """
    # In memory, so that each commit comes at its step.
    taken_at_once = 0
    for passes in range(8):
        async with opened(tmp_path / str(passes), is_checked=False, host=Host("memory:")) as case:
            asking = asyncio.ensure_future(case.ask("one"))
            await asyncio.sleep(0)
            case.session.leave_nowait()
            for _ in range(passes):
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait([asking])
            await case.session.wait_closed()
            events = await case.events()
            (left,) = bodies(events, kinds.SESSION_LEFT)[-1:]
            was_given = not asking.cancelled() and asking.exception() is None
            if left["queued"] and not was_given:
                taken_at_once += 1
            else:
                assert bool(left["queued"]) == was_given
    assert taken_at_once <= 2


async def test_leaving_session_ends_holds_and_refuses_settings(tmp_path: Path) -> None:
    async with opened(tmp_path, is_checked=False) as case:
        go = case.path("go")

        async def hold() -> None:
            async with case.session.hold("background"):
                raise AssertionError

        async with case.session.hold():
            running = await case.reaches(f"one\n@@wait {go}")
            # The task has an empty context, so it is not inside this hold.
            waiting = asyncio.get_running_loop().create_task(hold(), context=contextvars.Context())
            await asyncio.sleep(0)
            case.session.leave_nowait()
            for refused in (waiting, case.ask("inside"), case.session.set_model("another")):
                with pytest.raises(Moving):
                    await refused
        touch(go)
        await case.session.wait_closed()
        assert (await case.outcome(running)).kind is Kind.DONE
        for refused in (hold(), case.session.set_model("another")):
            with pytest.raises(Moving):
                await refused


async def test_left_session_log_names_queued_turns(tmp_path: Path, marker: str) -> None:
    async with pair(tmp_path, marker) as it:
        await it.reaches("one\n@@hang")
        waiting = await it.session.ask("two")
        await it.session.leave(0.0)
        store = SqliteLog(tmp_path / "store.db")
        try:
            known = store.find(NAME)
            assert known is not None
            assert await has_waiting_asks(store, known)
            past = await recovery.load(store, known.id, Config(dialect=CLAUDE))
            assert past.session.mode is Mode.OPEN
            assert [turn.id for turn in past.session.queue] == [waiting.id]
            assert (past.session.turn, past.session.own, past.questions) == (None, None, ())
        finally:
            await store.close()
        look = await it.second.session(NAME).look()
        assert (look.phase, [each.turn for each in look.queue]) == ("asleep", [waiting.id])
        # A host that serves its store takes the session up without a call for it.
        await it.second.take_up()
        assert (await (await it.second.session(NAME).turn(waiting.id)).outcome()).text == "two"
        await it.second.session(NAME).close()


async def test_session_that_a_caller_opens_while_the_host_takes_it_up_causes_no_warning(
    tmp_path: Path, marker: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with pair(tmp_path, marker) as it:
        turn = await it.reaches("@@hang")
        waiting = await it.session.ask("@@say two")
        await it.session.leave(0)
        assert (await turn.outcome()).kind is Kind.INTERRUPTED
        opening = it.second.open("claude", name=NAME, command=it.agents.command("-second"), options=QUICK)
        session, _ = await asyncio.gather(opening, it.second.take_up())
        assert (await (await session.turn(waiting.id)).outcome()).text == "two"
        await session.close()
    assert [record.getMessage() for record in caplog.records] == []


# -- other ends ------------------------------------------------------------------------------------------------------
async def test_close_of_leaving_session_refuses_its_queue(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        running = await case.running("one")
        waiting = await case.ask("two")
        leaving = asyncio.ensure_future(case.session.leave())
        await asyncio.sleep(0)
        await case.session.close()
        await leaving
        assert (await case.outcome(running)).kind is Kind.INTERRUPTED
        refused = await case.outcome(waiting)
        assert refused.kind is Kind.REFUSED
        assert isinstance(refused.error, Closed)
        assert (await case.kinds())[-1] == kinds.SESSION_CLOSED


@pytest.mark.parametrize("how", ["close", "drain", "finish"])
async def test_host_close_keeps_queue_of_leaving_session(tmp_path: Path, marker: str, how: str) -> None:
    async with pair(tmp_path, marker) as it, AsyncExitStack() as stack:
        running = await it.reaches("one\n@@hang")
        waiting = await it.session.ask("two")
        it.session.leave_nowait()
        stack.push_async_callback(it.first.close)
        async with asyncio.timeout(10):
            if how == "close":
                await it.first.close()
            elif how == "drain":
                await it.first.drain(timeout=0.05)
            else:
                await it.first.finish(timeout=0.05)
        assert (await running.outcome()).kind is Kind.INTERRUPTED
        await moved(waiting)
        assert (await it.events())[-1].kind == kinds.SESSION_LEFT


async def test_leaving_session_is_not_reopened_by_name_before_it_has_left(tmp_path: Path, marker: str) -> None:
    async with pair(tmp_path, marker) as it:
        running = await it.reaches("one\n@@hang")
        waiting = await it.session.ask("two")
        it.session.leave_nowait()
        with pytest.raises(Moving):
            await it.first.open("claude", name=NAME, command=it.agents.command("-again"), options=QUICK)
        await running.interrupt()
        await it.session.wait_closed()
        session = await it.first.open("claude", name=NAME, command=it.agents.command("-again"), options=QUICK)
        assert (await (await session.turn(waiting.id)).outcome()).text == "two"
        await session.close()


async def test_bounded_session_table_keeps_left_session_with_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("banksman.sessions.session_table.SESSIONS_KEPT_MAX", 0)
    async with opened(tmp_path, host=Host("memory:"), is_checked=False) as case:
        turn = await case.ask("one")
        await case.session.leave(0.0)
        other = await case.host.open("claude", command=fake_agent.command(), options=QUICK)
        await other.close()
        await case.host.open("claude", command=fake_agent.command(), options=QUICK)
        again = case.host.session(case.session.id)
        assert turn.id in [waiting.turn for waiting in (await again.look()).queue]


# -- from threads ----------------------------------------------------------------------------------------------------
def test_blocking_session_leaves_and_is_claimed_again(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'store.db'}"
    with threads.Host(store) as host:
        session = host.open("claude", command=fake_agent.command(), options=QUICK)
        running = session.ask("@@say x\n@@hang")
        next(iter(running))
        waiting = session.ask("two")
        session.leave(0.05)
        assert running.outcome().kind is Kind.INTERRUPTED
        with pytest.raises(Moved):
            waiting.outcome()
        with pytest.raises(Moving):
            session.ask("three")
        again = host.session(session.id)
        assert again.ask_and_wait("three", priority="background").kind is Kind.DONE
        assert again.turn(waiting.id).outcome().text == "two"
