"""Pool of agent processes: started on demand, retired when idle, and limited in number."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.sessions.crowd import Crowd, argv, crowd, recalled, retired, tasks
from tests.sessions.helpers import Case, bodies, exists, opened, touch

from banksman import BACKGROUND, INTERACTIVE, Host, Kind, Turn, UsageError
from banksman.core.session import event as kinds
from banksman.sessions import pool
from banksman.sessions.agent_process import AgentProcess

IDLE = {"idle_seconds": 0.5}


async def wait_idle_seconds(them: Crowd) -> None:
    """Wait until another process, which becomes idle now, is retired.

    An older idle process has been idle at least as long.
    """
    control = await them.open(f"control-{len(them.cases)}", options=IDLE)
    await control.answer("nothing")
    assert await retired(control) == "idle"


async def is_kept(case: Case) -> bool:
    return kinds.PROCESS_RETIRED not in await case.kinds() and len(case.session.status().pids) == 1


# -- lazy start and idle retirement ----------------------------------------------------------------------------------
async def test_session_has_no_process_before_first_ask(tmp_path: Path) -> None:
    async with crowd(tmp_path) as them:
        quiet = await them.open("quiet")
        other = await them.open("other")
        # This session was opened later and was served. A process of the first session would exist at this point.
        assert (await other.answer("one")).text == "one"
        assert quiet.processes == []
        assert quiet.session.status().counters["processes"] == 0
        assert len(them.alive()) == 1
        assert (await quiet.answer("two")).text == "two"


async def test_idle_process_is_retired_and_conversation_resumes(tmp_path: Path) -> None:
    async with opened(tmp_path, memory=True, options=IDLE) as case:
        await case.answer("one")
        before = case.session.status()
        event = await case.wait_kind(kinds.PROCESS_RETIRED)
        assert event.body == {"process": 1, "reason": "idle"}
        await case.wait_event(lambda e: e.kind == kinds.PROCESS_EXITED, event.seq)
        assert await recalled(case) == ["one"]
        after = case.session.status()
        assert after.epoch > before.epoch
        assert after.conversation == before.conversation
        assert f"--resume={before.conversation}" in argv(case, 2)
        events = await case.events()
        assert kinds.SESSION_CONTEXT_LOST not in [e.kind for e in events]
        first, second = (e for e in events if e.kind == kinds.PROCESS_STARTED)
        assert first.epoch < second.epoch


async def test_idle_process_is_retired_every_time(tmp_path: Path) -> None:
    async with crowd(tmp_path) as them:
        case = await them.open("a", options=IDLE)
        for number in range(3):
            await case.answer(f"ask {number}")
            assert len(case.processes) == number + 1
            await case.wait_event(
                lambda e, number=number: e.kind == kinds.PROCESS_EXITED and e.body["process"] == number + 1
            )
        assert await recalled(case) == ["ask 0", "ask 1", "ask 2"]


async def test_process_is_kept_without_idle_seconds(tmp_path: Path) -> None:
    async with crowd(tmp_path) as them:
        case = await them.open("a")
        await case.answer("one")
        await wait_idle_seconds(them)
        assert await is_kept(case)


async def test_running_turn_is_not_idle(tmp_path: Path) -> None:
    async with crowd(tmp_path) as them:
        case = await them.open("a", options=IDLE)
        turn = await case.running("long")
        await wait_idle_seconds(them)
        assert await is_kept(case)
        await turn.interrupt()
        assert (await case.outcome(turn)).kind is Kind.INTERRUPTED
        assert await retired(case) == "idle"


# Activity after the end of the turn, until the file GATE exists.
NEEDS = {
    "own turn": "@@at idle own task-notification touch MARK;;wait GATE;;say done",
    "background task": f"@@raw {tasks('b1')}\n@@at idle touch MARK\n@@at idle wait GATE\n@@at idle raw {tasks()}",
    "question": '@@at idle touch MARK\n@@at idle ask Bash {"command":"ls"}',
}


@pytest.mark.parametrize("need", NEEDS)
async def test_work_between_turns_is_not_idle(tmp_path: Path, need: str) -> None:
    async with crowd(tmp_path) as them:
        case = await them.open("a", options=IDLE)
        mark, gate = case.path("mark"), case.path("gate")
        await case.answer(f"@@say one\n{NEEDS[need]}".replace("MARK", str(mark)).replace("GATE", str(gate)))
        await case.reached(mark)
        if need == "question":
            await case.wait_kind(kinds.QUESTION_ASKED)
        await wait_idle_seconds(them)
        assert await is_kept(case)
        assert case.session.status().phase == ("running" if need == "own turn" else "idle")
        if need == "question":
            (question,) = case.session.questions()
            await case.session.answer(question.id, "allow")
        touch(gate)
        assert await retired(case) == "idle"


async def test_held_session_is_not_idle(tmp_path: Path) -> None:
    async with crowd(tmp_path) as them:
        case = await them.open("a", options=IDLE)
        async with case.session.hold():
            await case.answer("one")
            await wait_idle_seconds(them)
            assert await is_kept(case)
            await case.answer("two")
        assert await retired(case) == "idle"
        assert len(case.processes) == 1


async def test_ask_during_process_retirement_is_served_by_next_process(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    script = [f"at eof wait {gate}"]
    async with opened(tmp_path, script, memory=True, options={**IDLE, "eof_grace": 20.0}) as case:
        await case.answer("one")
        await case.wait_kind(kinds.PROCESS_RETIRED)
        turn = await case.ask("@@recall")
        assert case.session.status().phase == "stopping"
        assert turn.state == "queued"
        touch(gate)
        assert (await case.outcome(turn)).text == '["one", "@@recall"]'
        assert len(case.processes) == 2


# -- limit of processes ----------------------------------------------------------------------------------------------
async def test_least_recently_used_process_is_evicted(tmp_path: Path) -> None:
    async with crowd(tmp_path, processes_max=2) as them:
        a, b, c = [await them.open(name) for name in "abc"]
        await a.answer("a1")
        await b.answer("b1")
        await a.answer("a2")
        assert (await c.answer("c1")).text == "c1"
        assert await retired(b) == "evicted"
        assert await is_kept(a)
        assert await recalled(b) == ["b1"]
        assert await retired(a) == "evicted"
        assert await is_kept(c)
        assert await recalled(a) == ["a1", "a2"]
        assert [len(case.processes) for case in (a, b, c)] == [2, 2, 1]
        assert them.most_alive == 2


async def test_busy_sessions_beyond_places_wait(tmp_path: Path) -> None:
    async with crowd(tmp_path, processes_max=2) as them:
        a, b, c = [await them.open(name) for name in "abc"]
        running = [await case.running("long") for case in (a, b)]
        third = await c.ask("third")
        status = c.session.status()
        assert (status.phase, status.pids, len(status.queue)) == ("starting", (), 1)
        assert status.waits_for_place
        assert third.state == "queued"
        pid = a.session.status().pids
        await running[1].interrupt()
        assert (await c.outcome(third)).text == "third"
        assert not c.session.status().waits_for_place
        assert await retired(b) == "evicted"
        assert a.session.status().pids == pid
        assert running[0].state == "running"
        assert them.most_alive == 2


async def test_urgent_sessions_get_places_first(tmp_path: Path) -> None:
    async with crowd(tmp_path, processes_max=1) as them:
        a, low, middle, high = [await them.open(name) for name in ("a", "low", "middle", "high")]
        running = await a.running("long")
        turns = [
            (low, await low.ask("low", priority=BACKGROUND)),
            (middle, await middle.ask("middle")),
            (high, await high.ask("high", priority=INTERACTIVE)),
        ]
        await running.interrupt()
        for case, turn in turns:
            assert (await case.outcome(turn)).kind is Kind.DONE
        by_start = sorted(turns, key=lambda each: each[0].processes[0].stem.name)
        assert [case.folder.name for case, _ in by_start] == ["high", "middle", "low"]
        assert them.most_alive == 1


async def test_waiting_session_becomes_urgent_by_later_ask(tmp_path: Path) -> None:
    async with crowd(tmp_path, processes_max=1) as them:
        a, first, second = [await them.open(name) for name in ("a", "first", "second")]
        running = await a.running("long")
        turns = [(first, await first.ask("one")), (second, await second.ask("two", priority=BACKGROUND))]
        turns.append((second, await second.ask("three", priority=INTERACTIVE)))
        await running.interrupt()
        for case, turn in turns:
            assert (await case.outcome(turn)).kind is Kind.DONE
        assert second.processes[0].stem.name < first.processes[0].stem.name


async def test_waiting_session_closes_at_once(tmp_path: Path) -> None:
    async with crowd(tmp_path, processes_max=2) as them:
        a, b, c, d = [await them.open(name) for name in "abcd"]
        running = [await case.running("long") for case in (a, b)]
        waiting = await c.ask("never")
        later = await d.ask("later")
        await c.session.close()
        assert (await c.outcome(waiting)).kind is Kind.REFUSED
        assert c.processes == []
        # The close ended no other turn, and the place in the queue was given up.
        assert [turn.state for turn in running] == ["running", "running"]
        await running[0].interrupt()
        assert (await d.outcome(later)).text == "later"
        assert them.most_alive == 2


async def test_process_is_not_started_when_its_ask_was_withdrawn(tmp_path: Path) -> None:
    async with crowd(tmp_path, processes_max=1) as them:
        a, b, c = [await them.open(name) for name in "abc"]
        running = await a.running("long")
        waiting = await b.ask("never")
        last = await c.ask("last")
        assert (await waiting.interrupt()).stopped
        assert (await b.outcome(waiting)).kind is Kind.WITHDRAWN
        await running.interrupt()
        assert (await c.outcome(last)).text == "last"
        assert (await a.answer("again")).text == "again"
        # The session was queued before both of these, and would have been served first.
        assert b.processes == []
        assert (await b.answer("now")).text == "now"


@pytest.mark.parametrize("how", ["close", "drain"])
async def test_host_with_waiting_sessions_closes_at_once(tmp_path: Path, how: str) -> None:
    async with Host(processes_max=1) as host:
        them = Crowd(host, tmp_path)  # Not checked at the end, because its log is closed then.
        cases = [await them.open(str(number)) for number in range(4)]
        running = await cases[0].running("long")
        waiting: list[Turn] = [await case.ask("never") for case in cases[1:]]
        if how == "drain":
            await host.drain(timeout=0)
        else:
            await host.close()
        assert (await running.outcome()).kind is Kind.INTERRUPTED
        assert [(await turn.outcome()).kind for turn in waiting] == [Kind.REFUSED] * 3
        assert [case.processes for case in cases[1:]] == [[], [], []]
        assert them.alive() == []
        await asyncio.gather(*them.watchers, return_exceptions=True)


async def test_place_is_freed_when_process_dies_or_never_starts(tmp_path: Path) -> None:
    async with crowd(tmp_path, processes_max=1, starts_max=1) as them:
        dies, fails, last = [
            await them.open("dies"),
            await them.open("fails", ["exit 3"]),
            await them.open("last"),
        ]
        turns = [
            (dies, await dies.ask("@@kill 9")),
            (fails, await fails.ask("one")),
            (last, await last.ask("two")),
        ]
        outcomes = [(await case.outcome(turn)).kind for case, turn in turns]
        assert outcomes == [Kind.FAILED, Kind.FAILED, Kind.DONE]
        assert them.most_alive == 1


async def test_place_is_freed_when_session_fails_by_internal_bug(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> AgentProcess:
        raise RuntimeError("a bug")

    async with crowd(tmp_path, processes_max=1) as them:
        broken, other = await them.open("broken"), await them.open("other")
        broken.session._driver.process.spawn = fail  # pyright: ignore[reportPrivateUsage]
        turn = await broken.ask("one")
        assert (await turn.outcome()).kind is Kind.FAILED
        assert "a bug" in caplog.text
        waiting = await other.ask("two")
        # If the place is not free now, it never is.
        await broken.session.wait_closed()
        assert "0 waiting" in repr(other.session._driver.process._pool)  # pyright: ignore[reportPrivateUsage]
        assert (await other.outcome(waiting)).text == "two"
        them.cases.remove(broken)  # Its log has no end.


async def test_sessions_beyond_places_are_all_served_and_remember(tmp_path: Path) -> None:
    async with crowd(tmp_path, processes_max=2) as them:
        cases = [await them.open(name) for name in "abcde"]

        async def talk(case: Case) -> list[str]:
            for number in range(3):
                assert (await case.answer(f"{case.folder.name}{number}")).kind is Kind.DONE
            return await recalled(case)

        known = await asyncio.gather(*map(talk, cases))
        assert known == [[f"{name}{number}" for number in range(3)] for name in "abcde"]
        assert them.most_alive == 2
        reasons = [body["reason"] for case in cases for body in bodies(await case.events(), kinds.PROCESS_RETIRED)]
        assert set(reasons) == {"evicted"}
        assert not [case for case in cases if kinds.SESSION_CONTEXT_LOST in await case.kinds()]


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "2"])
@pytest.mark.parametrize("name", ["processes_max", "starts_max"])
def test_host_refuses_invalid_limit(name: str, limit: object) -> None:
    with pytest.raises(UsageError, match=name):
        Host(**{name: limit})  # pyright: ignore[reportArgumentType]


# -- limit of concurrent starts --------------------------------------------------------------------------------------
def slow_start(them: Crowd, name: str) -> list[str]:
    """Return the script of an agent that reports its handshake, and answers it when the gate file exists."""
    return [f"at initialize touch {them.folder / f'{name}-mark'}", f"at initialize wait {them.folder / f'{name}-gate'}"]


async def test_concurrent_starts_are_bounded(tmp_path: Path) -> None:
    async with crowd(tmp_path, starts_max=2) as them:
        names = [str(number) for number in range(6)]
        cases = [await them.open(name, slow_start(them, name)) for name in names]
        turns = [await case.ask("one") for case in cases]
        for number, (case, turn) in enumerate(zip(cases, turns, strict=True)):
            # This session and the next are starting. Earlier ones are ready, and later ones have no process.
            for name in names[number : number + 2]:
                await exists(tmp_path / f"{name}-mark")
            assert len(them.alive()) == min(number + 2, 6)
            assert [other.session.status().phase for other in cases[number:]] == ["starting"] * (6 - number)
            touch(tmp_path / f"{number}-gate")
            assert (await case.outcome(turn)).text == "one"
        assert them.most_starting == 2
        assert them.most_alive == 6


async def test_hanging_starts_delay_others_only_briefly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "START_SECONDS_MAX", 0.3)
    async with crowd(tmp_path, starts_max=2) as them:
        hanging = [await them.open(name, slow_start(them, name)) for name in "ab"]
        stuck = [await case.ask("one") for case in hanging]
        other = await them.open("c")
        turn = await other.ask("two")
        for name in "ab":
            await exists(tmp_path / f"{name}-mark")
        assert (await other.outcome(turn)).text == "two"
        assert [turn.state for turn in stuck] == ["queued", "queued"]
        # The starts are late but not lost.
        for name, case, late in zip("ab", hanging, stuck, strict=True):
            touch(tmp_path / f"{name}-gate")
            assert (await case.outcome(late)).text == "one"


async def test_hanging_start_delays_others_at_first(tmp_path: Path) -> None:
    async with crowd(tmp_path, starts_max=1) as them:
        first = await them.open("a", slow_start(them, "a"))
        second, third = await them.open("b"), await them.open("c")
        turns = [await first.ask("one"), await second.ask("two", priority=BACKGROUND)]
        turns.append(await third.ask("three", priority=INTERACTIVE))
        await exists(tmp_path / "a-mark")
        assert len(them.alive()) == 1
        touch(tmp_path / "a-gate")
        for case, turn in zip((first, second, third), turns, strict=True):
            assert (await case.outcome(turn)).kind is Kind.DONE
        assert third.processes[0].stem.name < second.processes[0].stem.name
        assert them.most_starting == 1
