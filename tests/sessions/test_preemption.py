"""Order of asks: priorities, preemption, holds, busy sessions, and the limit of the queue."""

from __future__ import annotations

import asyncio
import contextvars
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.sessions.helpers import SHORT_DRAIN, bodies, interrupts, let_pass, opened, prompts, sent, touch

from banksman import BACKGROUND, INTERACTIVE, NORMAL, Busy, Kind, NotFound, QueueFull, Refused, Turn, UsageError
from banksman.core.session import event as kinds


async def outside(asking: Coroutine[Any, Any, Turn]) -> Turn:
    """Ask in an empty context, outside of the hold of the test."""
    return await asyncio.get_running_loop().create_task(asking, context=contextvars.Context())


# -- priorities ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("lower", "upper"), [(BACKGROUND, NORMAL), (NORMAL, INTERACTIVE), (BACKGROUND, INTERACTIVE)])
async def test_urgent_ask_preempts_running_turn(tmp_path: Path, lower: int, upper: int) -> None:
    async with opened(tmp_path) as case:
        turn = await case.running("slow", priority=lower)
        assert (await case.answer("urgent", priority=upper)).text == "urgent"
        outcome = await case.outcome(turn)
        assert outcome.kind is Kind.PREEMPTED
        assert outcome.text == "slow"
        assert len(case.processes) == 1
        assert bodies(await case.events(), kinds.TURN_INTERRUPTED)[0]["cause"] == "preempt"


@pytest.mark.parametrize(
    ("running", "asked"),
    [(BACKGROUND, BACKGROUND), (NORMAL, NORMAL), (INTERACTIVE, INTERACTIVE), (NORMAL, BACKGROUND), (-5, BACKGROUND)],
)
async def test_equal_lower_and_background_asks_wait(tmp_path: Path, running: int, asked: int) -> None:
    async with opened(tmp_path) as case:
        go = case.path("go")
        first = await case.reaches(f"first\n@@say first\n@@wait {go}", priority=running)
        second = await case.ask("second", priority=asked)
        assert second.state == "queued"
        touch(go)
        assert (await case.outcome(first)).kind is Kind.DONE
        assert (await case.outcome(second)).kind is Kind.DONE
        assert interrupts(case) == 0


async def test_urgent_asks_run_before_queued_background_work(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        go = case.path("go")
        first = await case.reaches(f"first\n@@say first\n@@wait {go}", priority=INTERACTIVE)
        others = [
            await case.ask(word, priority=priority)
            for word, priority in (("b1", BACKGROUND), ("i1", INTERACTIVE), ("n1", NORMAL), ("b2", 0), ("i2", 20))
        ]
        touch(go)
        for turn in (first, *others):
            assert (await case.outcome(turn)).kind is Kind.DONE
        assert prompts(case) == ["first", "i1", "i2", "n1", "b1", "b2"]


async def test_priority_belongs_to_ask_and_not_to_session(tmp_path: Path) -> None:
    """Many callers ask concurrently, each with another priority. Each is served in its own class."""
    async with opened(tmp_path) as case:
        go = case.path("go")
        first = await case.reaches(f"first\n@@say first\n@@wait {go}", priority="interactive")
        classes = [BACKGROUND, NORMAL, INTERACTIVE] * 4

        async def call(number: int) -> None:
            await case.answer(f"{classes[number]}-{number}", priority=classes[number])

        calls = [asyncio.ensure_future(call(number)) for number in range(len(classes))]
        while len(case.session.status().queue) < len(classes):  # noqa: ASYNC110
            await asyncio.sleep(0)
        waiting = {turn.priority for turn in case.session.status().queue}
        assert waiting == set(classes)
        touch(go)
        await case.outcome(first)
        await asyncio.gather(*calls)
        served = [int(word.partition("-")[0]) for word in prompts(case)[1:]]
        assert served == sorted(classes, reverse=True)


async def test_withdrawn_ask_passes_its_grant_to_next_one(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        first = await case.running("first")
        second, third = await case.ask("second"), await case.ask("third")
        interrupting = asyncio.ensure_future(first.interrupt())
        # In the same pass in which the second ask is granted. No byte of it is sent.
        while case.state().turn is None or case.state().turn.id != second.id:  # noqa: ASYNC110
            await asyncio.sleep(0)
        case.session.withdraw(second)
        assert (await case.outcome(second)).kind in (Kind.WITHDRAWN, Kind.INTERRUPTED)
        assert (await case.outcome(third)).text == "third"
        await interrupting
        await case.outcome(first)
        status = case.session.status()
        assert (status.phase, status.holder, status.queue) == ("idle", None, ())


async def test_queued_ask_cancelled_at_any_point_leaves_nothing(tmp_path: Path) -> None:
    """Cancel each ask a number of loop passes after it began: before its acceptance, during it, and in the queue."""
    async with opened(tmp_path) as case:
        first = await case.running("first")
        for passes in range(8):
            asking = asyncio.ensure_future(case.ask(f"vanishing {passes}"))
            for _ in range(passes):
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait([asking])
            if not asking.cancelled():
                case.session.withdraw(asking.result())
        assert case.session.status().queue == ()
        await first.interrupt()
        await case.outcome(first)
        assert (await case.answer("next")).text == "next"
        assert prompts(case) == ["first", "next"]


async def test_ask_cancelled_on_idle_session_does_not_run(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        await case.answer("warm")
        for passes in range(8):
            asking = asyncio.ensure_future(case.ask("@@say x\n@@hang"))
            for _ in range(passes):
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait([asking])
            if not asking.cancelled():
                await asking.result().interrupt()
        assert (await case.answer("next")).text == "next"


async def test_aged_background_ask_is_chosen_one_class_up(tmp_path: Path) -> None:
    async with opened(tmp_path, options={"ageing_seconds": 40.0}) as case:
        go = case.path("go")
        first = await case.reaches(f"first\n@@say first\n@@wait {go}", priority=INTERACTIVE)
        old = await case.ask("old", priority=BACKGROUND)
        let_pass(40)
        others = [await case.ask("normal"), await case.ask("urgent", priority=INTERACTIVE)]
        assert interrupts(case) == 0
        touch(go)
        for turn in (first, old, *others):
            assert (await case.outcome(turn)).kind is Kind.DONE
        assert prompts(case) == ["first", "urgent", "old", "normal"]


async def test_queued_ask_can_be_moved_within_its_class(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        first = await case.running("first")
        a, b, c = [await case.ask(word) for word in "abc"]
        low = await case.ask("low", priority=BACKGROUND)
        case.session.move(c)
        case.session.move(b, before=a)
        case.session.move(low, before=a)  # This ask has another class, so nothing happens.
        case.session.move(first)
        case.session.move("t-none")
        await first.interrupt()
        for turn in (first, a, b, c, low):
            await case.outcome(turn)
        assert prompts(case) == ["first", "c", "b", "a", "low"]
        assert await case.kinds() != []
        assert len(bodies(await case.events(), kinds.QUEUE_CHANGED)) == 2


async def test_edited_ask_runs_with_its_new_prompt_in_its_new_class(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        go = case.path("go")
        first = await case.reaches(f"first\n@@say first\n@@wait {go}", priority=INTERACTIVE)
        a, b = [await case.ask(word) for word in "ab"]
        await b.edit(prompt="better", priority=INTERACTIVE, caller="bob")
        with pytest.raises(Refused, match="not queued"):
            await first.edit(prompt="late")
        with pytest.raises(UsageError):
            await a.edit()
        with pytest.raises(NotFound):
            await case.session.edit("t-none", prompt="x")
        touch(go)
        assert [(await case.outcome(turn)).text for turn in (a, b)] == ["a", "better"]
        assert prompts(case) == ["first", "better", "a"]
        edited = {"prompt": "better", "priority": INTERACTIVE, "caller": "bob"}
        assert bodies(await case.events(), kinds.TURN_EDITED) == [edited]


async def test_ask_that_shares_a_turn_or_a_hold_keeps_its_class(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        first = await case.running("first")
        one, two = [await case.ask(word, on_busy="collect") for word in ("one", "two")]
        with pytest.raises(Refused, match="share"):
            await two.edit(priority=BACKGROUND)
        await two.edit(prompt="2")
        await first.interrupt()
        assert [(await case.outcome(turn)).text for turn in (one, two)] == ["one\n\n2"] * 2
        async with case.session.hold():
            running = await case.running("in the hold")
            held = await case.ask("held")
            with pytest.raises(Refused, match="hold"):
                await held.edit(priority=INTERACTIVE)
            await running.interrupt()
            await case.outcome(held)


async def test_requeued_ask_is_not_edited(tmp_path: Path) -> None:
    script = {"prompt 1": ["say so far", "hang"], "prompt 2": ["hang"]}
    async with opened(tmp_path, script) as case:
        slow = await case.ask("slow", priority=BACKGROUND, on_preempt="requeue")
        await case.wait_said("so far")
        urgent = await case.ask("urgent", priority=INTERACTIVE)
        await case.wait_kind(kinds.TURN_REQUEUED)
        with pytest.raises(Refused, match="may have its prompt"):
            await slow.edit(prompt="other")
        await urgent.interrupt()
        await case.outcome(slow)


# -- requeue ---------------------------------------------------------------------------------------------------------
async def test_preempted_ask_is_requeued_under_its_id_when_asked_to(tmp_path: Path) -> None:
    script = {"prompt 1": ["say so far", "hang"], "prompt 3": ["say finished"]}
    async with opened(tmp_path, script) as case:
        slow = await case.ask("slow", priority=BACKGROUND, on_preempt="requeue")
        await case.wait_said("so far")
        behind = await case.ask("behind", priority=BACKGROUND)
        assert (await case.answer("urgent", priority=INTERACTIVE)).text == "urgent"
        outcome = await case.outcome(slow)
        assert outcome.kind is Kind.DONE
        assert outcome.text == "finished"
        await case.outcome(behind)
        assert prompts(case) == ["slow", "urgent", "slow", "behind"]
        uuids = [frame["uuid"] for frame in sent(case) if frame["type"] == "user"]
        assert len(set(uuids)) == 4
        events = await case.events()
        started = [e.body["attempt"] for e in events if e.kind == kinds.TURN_STARTED and e.turn == slow.id]
        assert started == [1, 2]


async def test_interrupt_of_preempted_turn_prevents_its_requeue(tmp_path: Path) -> None:
    async with opened(tmp_path, ["on_interrupt ack_only"], memory=True, options=SHORT_DRAIN) as case:
        slow = await case.running("slow", priority=BACKGROUND, on_preempt="requeue")
        urgent = await case.ask("urgent", priority=INTERACTIVE)
        assert slow.state == "interrupting"
        assert (await slow.interrupt()).stopped
        assert (await case.outcome(slow)).kind is Kind.INTERRUPTED
        assert (await case.outcome(urgent)).text == "urgent"
        assert prompts(case) == ["slow", "urgent"]


# -- busy ------------------------------------------------------------------------------------------------------------
async def test_on_busy_reject_refuses_ask_while_session_is_busy(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        assert (await case.answer("idle", on_busy="reject")).kind is Kind.DONE
        first = await case.running("first")
        await case.wait_kind("sent", first)
        # The agent's output can still arrive. No other event may come.
        before = [kind for kind in await case.kinds() if kind != "update"]
        with pytest.raises(Busy):
            await case.ask("second", on_busy="reject", priority=INTERACTIVE)
        assert [kind for kind in await case.kinds() if kind != "update"] == before
        await first.interrupt()
        await case.outcome(first)
        assert (await case.answer("third", on_busy="reject")).kind is Kind.DONE


async def test_on_busy_interrupt_ends_equal_but_not_more_urgent_turn(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        equal = await case.running("equal")
        go = case.path("go")
        turn = await case.reaches(f"second\n@@say second\n@@wait {go}", on_busy="interrupt", priority=NORMAL)
        assert (await case.outcome(equal)).kind is Kind.INTERRUPTED
        below = await case.ask("third", on_busy="interrupt", priority=BACKGROUND)
        assert below.state == "queued"
        touch(go)
        assert (await case.outcome(turn)).kind is Kind.DONE
        assert (await case.outcome(below)).kind is Kind.DONE
        assert interrupts(case) == 1


async def test_steered_prompt_joins_open_turn_and_ends_with_it(tmp_path: Path) -> None:
    go = tmp_path / "go"
    async with opened(tmp_path) as case:
        first = await case.reaches(f"first\n@@say first\n@@wait {go}")
        added = await case.ask("added", on_busy="steer")
        assert added.state == "running"
        await case.wait_event(lambda e: e.kind == kinds.SENT and b'"added"' in e.data)
        touch(go)
        assert (await case.outcome(first)).kind is Kind.DONE
        assert (await case.outcome(added)).kind is Kind.DONE
        assert prompts(case) == ["first", "added"]
        assert interrupts(case) == 0
        assert (await case.answer("next")).text == "next"


async def test_steered_prompt_is_a_turn_when_session_is_idle(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        assert (await case.answer("alone", on_busy="steer")).text == "alone"


async def test_interrupt_ends_prompts_steered_into_turn(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        first = await case.running("first")
        added = await case.ask("added\n@@say added", on_busy="steer")
        await first.interrupt()
        assert (await case.outcome(first)).kind is Kind.INTERRUPTED
        assert (await case.outcome(added)).kind in (Kind.INTERRUPTED, Kind.DONE)
        assert (await case.answer("next")).text == "next"


async def test_collected_asks_are_one_prompt_with_shared_outcome(tmp_path: Path) -> None:
    async with opened(tmp_path, options={"collect_seconds": 0.1}) as case:
        turns = [await case.ask(word, on_busy="collect") for word in ("one", "two", "three")]
        outcomes = [await case.outcome(turn) for turn in turns]
        assert [outcome.text for outcome in outcomes] == ["one\n\ntwo\n\nthree"] * 3
        assert [frame["message"]["content"] for frame in sent(case) if frame["type"] == "user"] == [
            "one\n\ntwo\n\nthree"
        ]
        for turn in turns:
            chunks = [u["content"]["text"] async for u in turn if u["sessionUpdate"] == "agent_message_chunk"]
            assert "".join(chunks) == "one\n\ntwo\n\nthree"


async def test_collected_ask_can_be_withdrawn(tmp_path: Path) -> None:
    async with opened(tmp_path, options={"collect_seconds": 0.1}) as case:
        one, two, three = [await case.ask(word, on_busy="collect") for word in ("one", "two", "three")]
        case.session.withdraw(one)
        assert (await case.outcome(one)).kind is Kind.WITHDRAWN
        assert (await case.outcome(two)).text == "two\n\nthree"
        assert (await case.outcome(three)).text == "two\n\nthree"


async def test_key_identifies_one_ask(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        first, same = await asyncio.gather(case.ask("one", key="k"), case.ask("one", key="k"))
        assert first is same
        await case.outcome(first)
        assert await case.ask("one", key="k") is first
        assert await case.ask("one", key="other") is not first
        assert prompts(case)[:1] == ["one"]
        assert len(bodies(await case.events(), kinds.TURN_QUEUED)) == 2


async def test_key_of_refused_ask_can_be_reused(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        first = await case.running("first")
        with pytest.raises(Busy):
            await case.ask("second", key="k", on_busy="reject")
        await first.interrupt()
        await case.outcome(first)
        assert (await case.answer("second", key="k")).text == "second"


# -- limit of the queue ----------------------------------------------------------------------------------------------
async def test_full_queue_refuses_asks_until_there_is_room(tmp_path: Path) -> None:
    async with opened(tmp_path, options={"queue_max": 2}) as case:
        first = await case.running("first")
        second, third = await case.ask("second"), await case.ask("third")
        before = await case.kinds()
        with pytest.raises(QueueFull):
            await case.ask("fourth", priority=INTERACTIVE)
        assert await case.kinds() == before
        case.session.withdraw(third)
        fifth = await case.ask("fifth")
        await first.interrupt()
        for turn in (first, second, third, fifth):
            await case.outcome(turn)
        assert prompts(case) == ["first", "second", "fifth"]


async def test_full_queue_drops_last_of_lowest_class_when_configured(tmp_path: Path) -> None:
    async with opened(tmp_path, options={"queue_max": 2, "when_full": "drop"}) as case:
        go = case.path("go")
        first = await case.reaches(f"first\n@@say first\n@@wait {go}", priority=INTERACTIVE)
        low, lower = await case.ask("low"), await case.ask("lower", priority=BACKGROUND)
        urgent = await case.ask("urgent", priority=INTERACTIVE)
        dropped = await case.outcome(lower)
        assert dropped.kind is Kind.REFUSED
        assert isinstance(dropped.error, QueueFull)
        with pytest.raises(QueueFull):
            await case.ask("as low", priority=NORMAL)
        touch(go)
        for turn in (first, low, urgent):
            assert (await case.outcome(turn)).kind is Kind.DONE
        assert prompts(case) == ["first", "urgent", "low"]


# -- holds -----------------------------------------------------------------------------------------------------------
async def test_hold_keeps_asks_of_its_class_out(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        async with case.session.hold():
            assert (await case.answer("held 1")).text == "held 1"
            turn = await outside(case.ask("outsider"))
            assert turn.state == "queued"
            assert (await case.answer("held 2")).text == "held 2"
        assert (await case.outcome(turn)).text == "outsider"
        assert prompts(case) == ["held 1", "held 2", "outsider"]


@pytest.mark.parametrize("on_busy", ["steer", "interrupt"])
async def test_ask_that_waits_for_a_hold_neither_joins_nor_stops_its_turn(on_busy: str, tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        go = case.path("go")
        async with case.session.hold():
            held = await case.reaches(f"held\n@@say held\n@@wait {go}")
            outsider = await outside(case.ask("outsider", on_busy=on_busy))
            assert outsider.state == "queued"
            touch(go)
            assert (await case.outcome(held)).kind is Kind.DONE
        assert (await case.outcome(outsider)).text == "outsider"
        assert interrupts(case) == 0


async def test_steered_ask_of_the_hold_joins_its_turn(tmp_path: Path) -> None:
    async with opened(tmp_path) as case, case.session.hold():
        held = await case.reaches(f"held\n@@say held\n@@wait {case.path('go')}")
        more = await case.ask("more", on_busy="steer")
        assert more.state == "running"
        urgent = await outside(case.ask("urgent", priority=INTERACTIVE, on_busy="interrupt"))
        assert (await case.outcome(held)).kind is not Kind.DONE
        assert (await case.outcome(urgent)).text == "urgent"


async def test_hold_is_reentrant_for_its_caller(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        async with case.session.hold(), case.session.hold(INTERACTIVE):
            async with case.session.hold():
                assert (await case.answer("inner")).text == "inner"
            # The end of the inner hold does not end the outer one.
            assert case.session.status().hold is not None
            assert (await case.answer("outer")).text == "outer"
            # A task that is started inside the hold belongs to it.
            assert await asyncio.ensure_future(case.answer("child")) is not None
        assert case.session.status().hold is None


async def test_hold_is_preempted_by_urgent_ask_and_resumes(tmp_path: Path) -> None:
    async with opened(tmp_path) as case, case.session.hold(NORMAL):
        turn = await case.running("held")
        urgent = await outside(case.ask("urgent", priority=INTERACTIVE))
        assert (await case.outcome(turn)).kind is Kind.PREEMPTED
        assert (await case.outcome(urgent)).text == "urgent"
        assert (await case.answer("held again")).text == "held again"


async def test_hold_ends_after_idle_time_and_its_late_asks_are_plain(tmp_path: Path) -> None:
    async with opened(tmp_path, options={"hold_idle_seconds": 0.1}) as case, case.session.hold(INTERACTIVE):
        turn = await outside(case.ask("outsider"))
        assert (await case.outcome(turn)).text == "outsider"
        assert case.session.status().hold is None
        assert (await case.answer("late")).text == "late"


async def test_waiting_hold_can_be_cancelled(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        first = await case.running("first")

        async def hold() -> None:
            async with case.session.hold():
                raise AssertionError("never granted")

        for passes in range(4):
            holding = asyncio.ensure_future(hold())
            for _ in range(passes):
                await asyncio.sleep(0)
            holding.cancel()
            await asyncio.wait([holding])
            assert holding.cancelled()
        await first.interrupt()
        await case.outcome(first)
        assert (await case.answer("next")).text == "next"
        assert case.session.status().hold is None


async def test_hold_is_refused_when_session_closes(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        first = await case.running("first")

        async def hold() -> None:
            async with case.session.hold():
                raise AssertionError("never granted")

        holding = asyncio.ensure_future(hold())
        await asyncio.sleep(0)
        await case.session.close()
        with pytest.raises(Refused):
            await holding
        with pytest.raises(Refused):
            await hold()
        await case.outcome(first)


async def test_begun_hold_has_the_asks_that_name_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        running = await case.running("running")
        hold = await case.session.begin_hold(caller="ann")
        (waiting,) = case.session.status().holds
        assert (waiting.hold, waiting.caller, waiting.at) == (hold, "ann", None)
        outsider = await case.ask("outsider")
        # An ask may come before the grant, and waits with its hold.
        early = await case.ask("early", hold=hold)
        await running.interrupt()
        await case.session.wait_hold(hold)
        (granted,) = case.session.status().holds
        assert case.session.status().hold == granted.hold == hold
        assert granted.at is not None
        assert (await case.outcome(early)).text == "early"
        assert (await case.answer("late", hold=hold)).text == "late"
        assert outsider.state == "queued"
        await case.session.end_hold(hold, caller="bob")
        assert (await case.outcome(outsider)).text == "outsider"
        events = await case.events()
        assert bodies(events, kinds.HOLD_GRANTED) == [{"hold": hold, "priority": NORMAL, "caller": "ann"}]
        assert bodies(events, kinds.HOLD_ENDED) == [{"hold": hold, "by": "released", "caller": "bob"}]
        assert prompts(case)[1:] == ["early", "late", "outsider"]


async def test_hold_that_is_over_is_not_found(tmp_path: Path) -> None:
    async with opened(tmp_path, options={"hold_idle_seconds": 0.05}) as case:
        hold = await case.session.begin_hold()
        outsider = await case.ask("outsider")
        assert (await case.outcome(outsider)).text == "outsider"
        with pytest.raises(NotFound, match="no hold"):
            await case.ask("late", hold=hold)
        with pytest.raises(NotFound, match="no hold"):
            await case.session.wait_hold(hold)
        with pytest.raises(NotFound, match="no hold"):
            await case.session.end_hold(hold)
        assert bodies(await case.events(), kinds.HOLD_ENDED) == [{"hold": hold, "by": "idle"}]


async def test_hold_preempted_by_a_hold_is_granted_again(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        async with case.session.hold(caller="ann"):
            first = case.session.status().hold
            urgent = await case.session.begin_hold(INTERACTIVE)
            assert [each.hold for each in case.session.status().holds] == [urgent, first]
            assert case.session.status().holds[1].at is None
            await case.session.end_hold(urgent)
            assert case.session.status().hold == first
        told = [(e.kind, json.loads(e.data)["hold"]) for e in await case.events() if e.kind.startswith("hold.")]
        ended = [body["by"] for body in bodies(await case.events(), kinds.HOLD_ENDED)]
        assert [hold for _, hold in told] == [first, first, urgent, urgent, first, first]
        assert ended == ["preempted", "released", "released"]


async def test_hold_ended_by_another_caller_fails_the_one_who_waits_for_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        await case.running("running")
        hold = await case.session.begin_hold()
        waiting = asyncio.ensure_future(case.session.wait_hold(hold))
        await asyncio.sleep(0)
        await case.session.end_hold(hold)
        with pytest.raises(Refused, match="before it was granted"):
            await waiting


async def test_begun_hold_is_refused_where_the_queue_is_full(tmp_path: Path) -> None:
    async with opened(tmp_path, options={"queue_max": 1}) as case:
        await case.running("running")
        await case.session.begin_hold()
        with pytest.raises(QueueFull, match="holds are waiting"):
            await case.session.begin_hold()
