"""Loss of ownership: callers learn of it, every process ends, and the host can start over.

The store is `LeasedLog`, which holds and loses its leases as a test says. The agents are real processes, and the tests
count dead processes from outside.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.process.helpers import alive, leave_keepers_untold, rungs, wait_until
from tests.sessions.helpers import QUICK, Case, exists
from tests.sessions.leased_log import LeasedLog, times
from tests.thorough import IS_THOROUGH

from banksman import Command, Kind, NotOwner, Session
from banksman.commands import running_command
from banksman.errors import BanksmanError, Closed, Unreachable
from banksman.process.portable import PortableProcess
from banksman.runtime.base_host import Host, SettleTime
from banksman.testing import fake_acp, fake_agent

# So long that a full wait shows that the ladder was not shortened.
LONG = {"eof_grace": 60.0, "grace": 60.0}
WINDOW_SECONDS = 12.0 if IS_THOROUGH else 3.0
# How much later than the deadline a tree may be dead. `make prove` allows no delay. `make test` may run on a busy
# machine, so there only the long waits above must not pass.
LATE_SECONDS_MAX = 0.0 if IS_THOROUGH else 30.0


class Fenced(Case):
    """Session in a store that can be lost."""

    def __init__(self, host: Host, session: Session, folder: Path, store: LeasedLog) -> None:
        super().__init__(host, session, folder)  # pyright: ignore[reportArgumentType]
        self.store = store

    def lose(self, seconds: float = WINDOW_SECONDS) -> float:
        """Lose all leases. Every process must be dead after `seconds`. Return that time."""
        dead_by = time.monotonic() + seconds
        self.store.lose(dead_by)
        return dead_by


@asynccontextmanager
async def hosting(store: LeasedLog, **how: Any) -> AsyncGenerator[Host]:
    async with Host(lambda: store, **how) as host:
        yield host


@asynccontextmanager
async def opened(folder: Path, marker: str, *, options: dict[str, float] | None = None) -> AsyncGenerator[Fenced]:
    """Open a session whose agent ignores EOF and TERM, with the marker in the argv of each process."""
    store = LeasedLog(times(60, 60))
    command = fake_agent.command(["ignore term", "ignore eof"], evidence=folder / "evidence", memory=folder / "memory")
    async with hosting(store) as host:
        session = await host.open("claude", command=command, args=[marker], options=options or LONG, name="one")
        yield Fenced(host, session, folder, store)


# -- open sessions ---------------------------------------------------------------------------------------------------
@pytest.mark.explored
@pytest.mark.parametrize("is_portable", [False, True], ids=["with a keeper", "without one"])
async def test_lost_lease_ends_every_turn_and_kills_tree_in_time(
    tmp_path: Path, marker: str, is_portable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline holds for any length of the ladder's waits, and queued asks stop waiting."""
    if is_portable:
        monkeypatch.setattr(running_command, "PROCESS", PortableProcess)
    async with opened(tmp_path, marker) as case:
        turn = await case.reaches("one\n@@hold 50 setsid\n@@hang")
        waiting = await case.ask("two")
        asking = asyncio.ensure_future(case.ask("about to be accepted"))
        holding = asyncio.ensure_future(case.session.hold().__aenter__())
        interrupting = asyncio.ensure_future(case.session.interrupt(waiting))
        await asyncio.sleep(0)
        assert len(alive(marker)) == 2
        dead_by = case.lose()
        for each in (turn, waiting):
            outcome = await each.outcome()
            assert outcome.kind is Kind.UNKNOWN  # The log of the next owner records the real outcome.
            assert isinstance(outcome.error, NotOwner)
            assert not outcome.durable
        # The callers get their outcomes before the tree is gone.
        assert alive(marker)
        results = await asyncio.gather(asking, holding, interrupting, return_exceptions=True)
        assert all(not isinstance(each, BaseException) or isinstance(each, BanksmanError) for each in results)
        with pytest.raises((NotOwner, Closed)):
            await case.ask("too late")
        await case.session.wait_closed()
        assert time.monotonic() < dead_by + LATE_SECONDS_MAX
        assert alive(marker) == []


async def test_lost_lease_shortens_ladder_without_skipping_rungs(
    tmp_path: Path, marker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_keepers_untold(monkeypatch)
    async with opened(tmp_path, marker) as case:
        await case.running("one")
        process: Any = case.session._driver.process.driven  # pyright: ignore[reportPrivateUsage]
        command: Command = process.agent._command
        case.lose(0.6)
        await case.session.wait_closed()
        assert command.finished is not None
        assert rungs(command.finished) == ["eof", "term", "kill"]


@pytest.mark.thorough
async def test_lost_lease_keeps_ladder_that_fits(tmp_path: Path, marker: str) -> None:
    async with opened(tmp_path, marker, options=QUICK) as case:
        await case.running("one")
        began = time.monotonic()
        case.lose(60)
        await case.session.wait_closed()
        assert QUICK["eof_grace"] + QUICK["grace"] <= time.monotonic() - began < 20


@pytest.mark.thorough
async def test_lost_lease_shortens_close_under_way(tmp_path: Path, marker: str) -> None:
    async with opened(tmp_path, marker) as case:
        await case.running("one")
        case.session.close_nowait()
        assert alive(marker)
        dead_by = case.lose()
        await case.session.wait_closed()
        assert time.monotonic() < dead_by + LATE_SECONDS_MAX
        assert alive(marker) == []


async def test_lost_lease_cancels_pending_process_start(tmp_path: Path, marker: str) -> None:
    store = LeasedLog(times(60, 60))
    async with hosting(store, processes_max=1) as host:
        command = fake_agent.command(evidence=tmp_path / "evidence")
        first, second = [await host.open("claude", command=command, args=[marker], options=QUICK) for _ in range(2)]
        case = Fenced(host, first, tmp_path, store)
        await case.running("one")
        turn = await second.ask("two")
        case.lose()
        assert (await turn.outcome()).kind is Kind.UNKNOWN
        await asyncio.gather(first.wait_closed(), second.wait_closed())
        assert len(case.processes) == 1


@pytest.mark.thorough
async def test_lost_lease_ends_terminals_together_with_agent(tmp_path: Path, marker: str) -> None:
    """An agent that uses all of its time must still leave time for its terminals."""
    store = LeasedLog(times(60, 60))
    async with hosting(store) as host:
        # The leader ignores TERM, and stays after the agent has exited at the end of its input.
        command = ["sh", "-c", "trap '' TERM; \"$@\"; sleep 60", "sh", *fake_acp.command()]
        session = await host.open("custom", command=command, cwd=str(tmp_path), options=LONG)
        await (await session.ask("hello")).outcome()
        workspace = session._here.callbacks.workspace  # pyright: ignore[reportPrivateUsage]
        assert workspace is not None
        line = f"trap '' TERM; touch {tmp_path}/up; : {marker}; while :; do sleep 1; done"
        await workspace.serve("terminal/create", {"command": "sh", "args": ["-c", line]})
        await exists(tmp_path / "up")
        dead_by = time.monotonic() + WINDOW_SECONDS
        store.lose(dead_by)
        wait = asyncio.ensure_future(session.wait_closed())
        while alive(marker):  # noqa: ASYNC110  No event reports it.
            await asyncio.sleep(0.01)
        assert not wait.done(), "it was to outlive its terminal"
        await wait
        assert time.monotonic() < dead_by + LATE_SECONDS_MAX
        assert alive(marker) == []


# -- sessions in the middle of an open -------------------------------------------------------------------------------
@pytest.mark.parametrize("is_known", [False, True], ids=["a new one", "one with a past"])
async def test_lost_lease_fails_session_being_opened(tmp_path: Path, is_known: bool) -> None:
    store = LeasedLog(times(60, 60))
    async with hosting(store) as host:
        command = fake_agent.command(evidence=tmp_path / "evidence")
        if is_known:
            await (await host.open("claude", command=command, name="one")).close()
        store.append_after = asyncio.get_running_loop().create_future()
        opening = asyncio.ensure_future(host.open("claude", command=command, name="one"))
        while not (known := store.sessions()) or known[0].owner is None:  # noqa: ASYNC110  No event reports a claim.
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        assert not opening.done()
        # The append began before the loss and still succeeds. The loss is reported after it.
        store.append_after.set_result(None)
        store.append_after = None
        store.lose(time.monotonic() + 1)
        with pytest.raises(NotOwner):
            await opening
        assert all(session.is_closed for session in host.our_sessions())
        store.hold(times(60, 60))
        again = await host.open("claude", command=command, name="one", options=QUICK)
        assert (await (await again.ask("hello")).outcome()).kind is Kind.DONE


# -- start over ------------------------------------------------------------------------------------------------------
@pytest.mark.thorough
@pytest.mark.parametrize("by", ["name", "id"])
async def test_host_can_start_over_after_lost_lease(tmp_path: Path, marker: str, by: str) -> None:
    """The session is requested immediately, so the remains of the earlier process go first.

    A lease that is renewed after a loss is a new lease, and does not extend the deadline of the old process.
    """
    async with opened(tmp_path, marker) as case:
        await case.reaches("one\n@@say one\n@@hang")
        dead_by = case.lose()
        case.store.hold(times(120, 120))
        if by == "name":
            command = fake_agent.command(evidence=tmp_path / "evidence", memory=tmp_path / "memory")
            again = await case.host.open("claude", command=command, options=QUICK, name="one")
        else:
            again = case.host.session(case.session.id)
            assert again is not case.session
        turn = await again.ask("two")
        assert time.monotonic() < dead_by + LATE_SECONDS_MAX
        assert (await turn.outcome()).kind is Kind.DONE
        assert len(case.processes) == 2
        assert case.session.is_closed
        case.lose()  # With the options of its open, the session would take two minutes to close.
        await again.wait_closed()


@pytest.mark.thorough
async def test_host_closes_normally_after_lost_lease(tmp_path: Path, marker: str) -> None:
    async with opened(tmp_path, marker) as case:
        await case.running("one")
        dead_by = case.lose()
    assert time.monotonic() < dead_by + LATE_SECONDS_MAX


# -- a host that was too busy ----------------------------------------------------------------------------------------
async def renew(store: LeasedLog, seconds: float) -> None:
    """Renew a lease of `seconds` until the task is cancelled. It survives shorter pauses of a busy machine."""
    while True:
        store.hold(times(seconds, WINDOW_SECONDS))
        await asyncio.sleep(seconds / 20)


async def test_turn_ended_by_keeper_reports_expired_lease(tmp_path: Path, marker: str) -> None:
    """The loop was blocked, and the store noticed nothing. So the host still owns the session, and continues it."""
    store = LeasedLog(times(60, 60))
    command = fake_agent.command(evidence=tmp_path / "evidence", memory=tmp_path / "memory")
    async with hosting(store) as host:
        session = await host.open("claude", command=command, args=[marker], options=QUICK)
        case = Fenced(host, session, tmp_path, store)
        # No process exists yet. The next lease is short, and is renewed until the test needs it to expire.
        store.lose(time.monotonic())
        renewing = asyncio.create_task(renew(store, 3.0))
        await session.wait_closed()
        case.session = session = host.session(session.id)
        turn = await case.running("one")
        renewing.cancel()
        wait_until(lambda: not alive(marker), "the keeper to act while our loop does not run")
        store.hold(times(60, 60))
        outcome = await turn.outcome()
        assert outcome.kind is Kind.FAILED
        assert "lease" in str(outcome.error)
        assert outcome.durable
        assert (await case.answer("two")).kind is Kind.DONE
        await session.close()


# -- a store that is not ready yet -----------------------------------------------------------------------------------
async def test_first_await_waits_until_store_is_ready(tmp_path: Path) -> None:
    store = LeasedLog(times(60, 60), is_ready=False)
    async with hosting(store) as host:
        with pytest.raises(Unreachable):
            host.sessions()
        with pytest.raises(Unreachable):
            host.session("one")
        opening = asyncio.ensure_future(host.open("claude", command=fake_agent.command(), name="one", options=QUICK))
        reading = asyncio.ensure_future(host.read_many())
        await asyncio.sleep(0.05)
        assert not opening.done()
        assert not reading.done()
        store.become_ready()
        session = await opening
        assert [each.id for each in host.sessions()] == [session.id]
        await reading


async def test_host_entry_waits_for_store_opened_at_start(tmp_path: Path) -> None:
    store = LeasedLog(times(60, 60), is_ready=False)
    host = Host(lambda: store, settles=SettleTime.AT_START)
    entering = asyncio.ensure_future(host.__aenter__())
    await asyncio.sleep(0.05)
    assert not entering.done()
    store.become_ready()
    await entering
    assert host.sessions() == []
    await host.close()


async def test_host_closes_when_store_never_became_ready(tmp_path: Path) -> None:
    store = LeasedLog(times(60, 60), is_ready=False)
    async with hosting(store) as host:
        opening = asyncio.ensure_future(host.open("claude", command=fake_agent.command()))
        await asyncio.sleep(0.05)
    with pytest.raises((Unreachable, Closed)):
        await opening
