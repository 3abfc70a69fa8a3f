"""An agent that floods its output does not block other sessions, and can be ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.sessions.helpers import exists, opened, touch

from banksman import Host, Kind, Outcome, Session
from banksman.core.dialects.claude import CLAUDE
from banksman.core.session import event as kinds
from banksman.core.session.state import ProcessState, Stdin
from banksman.sessions import frame_reader as backlogs
from banksman.sessions.diagnostics import Counters
from banksman.sessions.frame_reader import PASS_SECONDS_MAX, SLICE_LINES_MAX, Backlog, FrameReader, slices
from banksman.testing import fake_agent


def _busy() -> None:
    """Work for a quarter of a pass."""
    until = time.monotonic() + PASS_SECONDS_MAX / 4
    while time.monotonic() < until:
        pass


async def test_backlog_yields_to_loop_between_passes() -> None:
    loop = asyncio.get_running_loop()
    order: list[str] = []
    is_empty = loop.create_future()
    backlog = Backlog(loop, lambda: is_empty.set_result(None))

    def step(name: str) -> Callable[[], None]:
        def do() -> None:
            _busy()
            order.append(name)

        return do

    def other() -> None:
        order.append("other")
        if not is_empty.done():
            loop.call_soon(other)

    loop.call_soon(other)
    names = [str(number) for number in range(20)]
    backlog.take(*(step(name) for name in names[:12]))
    assert backlog.steps
    # Later work runs after earlier work.
    backlog.take(*(step(name) for name in names[12:]))
    await is_empty
    assert not backlog.steps
    assert [name for name in order if name != "other"] == names
    runs = "".join("x" if name == "other" else "." for name in order).strip("x").split("x")
    # A run has as much work as fits into one pass.
    assert max(map(len, runs)) <= 5


async def test_backlog_runs_small_work_at_once_and_in_order() -> None:
    done: list[int] = []
    backlog = Backlog(asyncio.get_running_loop(), lambda: done.append(-1))

    def first() -> None:
        done.append(1)
        backlog.take(lambda: done.append(3))
        assert done == [1], "in its order, and not inside of another"

    backlog.take(first, lambda: done.append(2))
    assert done == [1, 2, 3]
    assert not backlog.steps


def test_slices_keep_all_lines_in_order() -> None:
    few, many = b"x\r\n" * SLICE_LINES_MAX, b"".join(b"%d\r\n" % number for number in range(10 * SLICE_LINES_MAX))
    assert slices(few) == [few]
    assert slices(few + b"rest") == [few + b"rest"]
    for rest in (b"", b"rest", b"\n", b"\n\nrest"):
        parts = slices(many + rest)
        assert b"".join(parts) == many + rest
        assert max(part.count(b"\n") for part in parts) == SLICE_LINES_MAX
        assert all(part.endswith(b"\n") for part in parts[:-1])
        assert b"" not in parts


@pytest.mark.thorough
async def test_frame_reader_completes_a_line_that_another_host_has_begun() -> None:
    found: list[bytes] = []

    class Listener:
        counters = Counters()
        last_in: float | None = None
        process_state = ProcessState()
        dialect = CLAUDE

        def on_frames(self, process: int, lines: Sequence[bytes], meanings: object) -> None:
            found.extend(lines)

        def fail(self, exc: BaseException) -> None:
            raise exc

        def on_backlog(self) -> None: ...
        def on_caught_up(self) -> None: ...

    old, following = FrameReader(Listener()), FrameReader(Listener())
    old.begin(1000)
    old.feed(1, b'{"one": 1}\n{"two"')
    assert old.partial is not None
    following.begin(1000, old.partial)
    following.feed(1, b": 2}\n")
    assert found == [b'{"one": 1}', b'{"two": 2}']
    following.feed(1, b"x" * 2000)
    assert following.partial is None, "a frame that is too large has no other reader"


async def test_flooding_agent_does_not_block_others_and_is_ended() -> None:
    """One read returns half a million lines."""
    async with asyncio.timeout(60), Host("memory:") as host:
        flood = await host.open("custom", command=["yes"])
        lost = await flood.ask("hello")
        async for event in flood.follow():
            if event.kind == kinds.UPDATE:
                break
        session = await host.open("claude", command=fake_agent.command())
        turn = await session.ask("@@say hello")
        assert (await turn.outcome()).text == "hello"
        await lost.interrupt()
        await flood.close()
        assert (await lost.outcome()).kind in (Outcome.WITHDRAWN, Outcome.FAILED)
        assert (await (await session.ask("@@say still here")).outcome()).text == "still here"


async def test_last_line_without_newline_is_logged_before_exit() -> None:
    """The last line has no newline, so it is complete only at the end of the output.

    Other work can be queued at that moment.
    """
    async with asyncio.timeout(60), Host("memory:") as host:
        session = await host.open("custom", command=["sh", "-c", "yes | head -n 12000; printf last"])
        turn = await session.ask("hello")
        assert (await turn.outcome()).kind is Outcome.FAILED
        events = [event async for event in session.events(waits=False)]
        assert [event.kind for event in events if event.data == b"last"] == [kinds.UPDATE]


@pytest.mark.parametrize("closes_stdin", [False, True])
async def test_output_of_an_agent_that_exits_is_logged_whole_when_the_host_is_slow(
    monkeypatch: pytest.MonkeyPatch, closes_stdin: bool
) -> None:
    """A host that cannot keep up treats any burst as a flood. The output of an agent that exits is still finite."""
    monkeypatch.setattr(backlogs, "PASS_SECONDS_MAX", 0.001)
    monkeypatch.setattr(backlogs, "FLOOD_SECONDS", -1.0)
    script = "yes | head -n 12000; printf last"
    if closes_stdin:
        script = f"exec 0<&-; {script}"
    async with asyncio.timeout(60), Host("memory:") as host:
        session = await host.open("custom", command=["sh", "-c", script])
        turn = await session.ask("hello")
        assert (await turn.outcome()).kind is Outcome.FAILED
        lines = [event.data async for event in session.events(waits=False) if event.kind == kinds.UPDATE]
        assert lines == [*[b"y"] * 12000, b"last"]
        assert session.status().counters["dropped"] == 0


# -- output of a process that is ending, which cannot be paused ------------------------------------------------------
MIB = 1 << 20


async def _logged_and_dropped(session: Session) -> tuple[int, int]:
    """Return the number of logged bytes and of dropped bytes, without newlines."""
    lines = [event.data async for event in session.events(waits=False) if event.kind == kinds.UPDATE]
    return sum(map(len, lines)), session.status().counters["dropped"]


async def test_flood_of_an_agent_with_a_broken_stdin_is_dropped_past_a_bound(tmp_path: Path) -> None:
    deaf, broke = tmp_path / "deaf", tmp_path / "broke"
    steps = ["close_stdin", f"touch {deaf}", f"wait {broke}", "flood 12000 1000", "exit 0"]
    async with opened(tmp_path, memory=True, options={"eof_grace": 60.0}) as case:
        turn = await case.ask("\n".join(["one", *(f"@@{step}" for step in steps)]))
        await exists(deaf)
        change = asyncio.create_task(case.session.set_permission_mode("plan"))
        while case.state().process.stdin is not Stdin.BROKEN:  # noqa: ASYNC110
            await asyncio.sleep(0)
        touch(broke)
        assert (await case.outcome(turn)).kind is Kind.FAILED
        logged, dropped = await _logged_and_dropped(case.session)
        assert (MIB < logged < 3 * MIB, dropped > 9 * MIB) == (True, True)
        change.cancel()
        await asyncio.wait([change])


async def test_flood_of_what_an_exited_agent_left_is_dropped_past_a_bound(tmp_path: Path) -> None:
    go, line = tmp_path / "go", "abc" * 33
    flood = f"until test -e {go}; do sleep 0.01; done; yes {line} | head -n 120000; printf last"
    script = f"read prompt; echo said; ({flood}) & exit 0"
    async with asyncio.timeout(60), Host("memory:") as host:
        session = await host.open("custom", command=["sh", "-c", script], options={"linger": 60.0})
        turn = await session.ask("hello")
        async for event in session.follow():
            if event.kind == kinds.PROCESS_EXITED:
                break
        touch(go)
        await turn.outcome()
        logged, dropped = await _logged_and_dropped(session)
        assert (MIB < logged < 3 * MIB, logged + dropped) == (True, 120_000 * len(line) + len("saidlast"))
        # The log has whole lines only, and nothing after the first missing one.
        lines = [event.data async for event in session.events(waits=False) if event.kind == kinds.UPDATE]
        assert lines == [b"said", *[line.encode()] * (len(lines) - 1)]
