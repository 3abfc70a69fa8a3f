"""Prometheus metrics: gauges are current, and counters never fall, whatever the host forgets."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from platform import python_version
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.sessions.helpers import QUICK, exists, opened
from tests.store.kit import AT, lines

from banksman import Host, Kind, NotOwner, StoreError, __version__
from banksman.commands.options import Options
from banksman.core.dialects.claude import CLAUDE, Claude
from banksman.process.launch import prepare
from banksman.server.ops import metrics
from banksman.server.streams.follower import StreamCounts
from banksman.sessions import session_table
from banksman.sessions.diagnostics import SILENT_FRAMES_MAX, TurnTimes
from banksman.store.log import Log
from banksman.store.memory import MemoryLog
from banksman.store.sqlite import SqliteLog
from banksman.testing import fake_agent
from banksman.testing.world_store import Fault, WorldLog

Page = dict[tuple[str, str], float]


def read(host: Host, counts: StreamCounts | None = None) -> Page:
    """Return each sample by its name and its label, if any."""
    text = metrics.render(host, counts or StreamCounts()).decode()
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def totals(page: Page) -> Page:
    ends = ("_total", "_count", "_sum")
    return {key: value for key, value in page.items() if key[0].endswith(ends)}


def check_grown(before: Page, after: Page) -> None:
    for key, value in totals(before).items():
        assert after[key] >= value, key


async def test_metrics_of_an_idle_host_have_every_series() -> None:
    assert metrics.CONTENT_TYPE.startswith("text/plain; version=0.0.4")
    async with Host("memory:") as host:
        page = read(host)
        host.sessions()
        assert {name for name, _ in read(host)} >= {name for name, _ in page}
    assert {name for name, _ in page} >= {
        "banksman_bytes_total",
        "banksman_commands",
        "banksman_commit_seconds_count",
        "banksman_commit_seconds_sum",
        "banksman_commits_total",
        "banksman_dropped_bytes_total",
        "banksman_events_total",
        "banksman_followers",
        "banksman_frames_total",
        "banksman_questions",
        "banksman_queue_asks",
        "banksman_stream_bytes_total",
        "banksman_stream_events_total",
        "banksman_streams_cut_total",
        "banksman_survivors_total",
        "banksman_swept_total",
        "process_cpu_seconds_total",
        "process_open_fds",
        "process_resident_memory_bytes",
        "process_start_time_seconds",
    }
    assert [labels for name, labels in page if name == "banksman_build_info"] == [f"{python_version()},{__version__}"]
    for phase in ("idle", "running"):
        assert page["banksman_sessions", phase] == 0
    assert page["banksman_turn_seconds_bucket", "+Inf"] == page["banksman_queue_seconds_count", ""] == 0
    assert page["banksman_followers", "many"] == 0
    assert page["banksman_commands", "running"] == 0
    assert page["process_resident_memory_bytes", ""] > 1 << 20


async def test_metrics_follow_a_session_as_it_runs(tmp_path: Path) -> None:
    async with opened(tmp_path, options={"clocks": {"overall": 500.0, "progress": 100.0}}) as case:
        assert read(case.host)["banksman_sessions", "idle"] == 1
        turn = await case.running("one")
        waiting = [await case.ask(f"@@say {number}") for number in range(3)]
        page = read(case.host)
        assert page["banksman_sessions", "running"] == 1
        assert page["banksman_queue_asks", ""] == 3
        assert 0 < page["banksman_clock_seconds_left", "overall"] <= 500
        assert 0 < page["banksman_clock_seconds_left", "progress"] <= 100
        await case.session.interrupt(turn)
        for one in (turn, *waiting):
            await case.outcome(one)
        page = read(case.host)
        assert page["banksman_turns_total", "interrupted"] == 1
        assert page["banksman_turns_total", "done"] == 3
        assert page["banksman_turns_total", "failed"] == 0
        # Four turns were started. Three of them had waited for the first.
        for name in ("turn", "queue"):
            assert page[f"banksman_{name}_seconds_bucket", "+Inf"] == page[f"banksman_{name}_seconds_count", ""] == 4
            assert page[f"banksman_{name}_seconds_sum", ""] > 0
        # Each had output, and only the first was interrupted.
        assert page["banksman_first_token_seconds_count", ""] == 4
        assert 0 < page["banksman_first_token_seconds_sum", ""] < page["banksman_turn_seconds_sum", ""]
        assert page["banksman_stop_seconds_count", ""] == 1
        assert 0 < page["banksman_stop_seconds_sum", ""] < page["banksman_turn_seconds_sum", ""]
        assert page["banksman_takeover_seconds_count", ""] == 0
        assert page["banksman_queue_asks", ""] == 0
        assert ("banksman_clock_seconds_left", "overall") not in page
        status = case.session.status()
        for name in ("frames", "bytes"):
            for way in ("in", "out"):
                assert page[f"banksman_{name}_total", way] == status.counters[f"{name}_{way}"] > 0
        assert page["banksman_agent_processes_total", ""] == 1
        assert page["banksman_events_total", ""] == status.seq
        assert page["banksman_commits_total", ""] == page["banksman_commit_seconds_count", ""] > 0
        assert page["banksman_commit_seconds_sum", ""] > 0


async def test_metrics_measure_takeovers(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'store.db'}"
    async with Host(store) as host:
        session = await host.open(command=fake_agent.command(), options=QUICK)
    async with Host(store) as host:
        assert read(host)["banksman_takeover_seconds_count", ""] == 0
        for _ in range(2):
            # The second one finds the session here.
            await host.take_over(session.id)
            assert read(host)["banksman_takeover_seconds_count", ""] == 1
        assert 0 < read(host)["banksman_takeover_seconds_sum", ""] < 60


class NoTranslation(Claude):
    """Dialect whose frames must not be translated."""

    def project(self, line: bytes) -> Any:
        raise AssertionError("a frame was translated")

    partial = project


async def test_first_token_is_the_first_output_of_a_turn_and_not_its_first_frame() -> None:
    times, dialect = TurnTimes(), CLAUDE
    times.note([("t", "turn.queued", b""), ("t", "turn.started", b"")], 1.0, dialect)
    init = b'{"type":"system","subtype":"init","session_id":"x"}'
    text = b'{"type":"assistant","message":{"content":[{"type":"text","text":"x"}]}}'
    times.note([("t", "update", init), (None, "update", text), ("other", "update", text)], 2.0, dialect)
    assert (times.awaits_output, sum(times.first_token.counts)) == (True, 0)
    times.note([("t", "update", text), ("t", "update", text)], 4.0, dialect)
    assert (times.awaits_output, sum(times.first_token.counts), times.first_token.seconds) == (False, 1, 3.0)
    # A frame that cannot have output is not translated.
    times.note([("v", "turn.queued", b""), ("v", "turn.started", b"")], 5.0, dialect)
    times.note([("v", "update", init)], 5.0, NoTranslation())
    times.note([("v", "turn.ended", b"")], 5.0, dialect)
    # A flood without output is searched up to a limit.
    times.note([("u", "turn.queued", b""), ("u", "turn.started", b"")], 5.0, dialect)
    times.note([("u", "update", init)] * SILENT_FRAMES_MAX, 6.0, dialect)
    assert not times.awaits_output
    times.note([("u", "turn.ended", b"")], 7.0, dialect)
    assert (sum(times.first_token.counts), sum(times.turn.counts)) == (1, 2)


async def test_metrics_show_the_lowest_clock_of_a_name(tmp_path: Path) -> None:
    async with Host("memory:") as host:
        turns = [
            await (
                await host.open(command=fake_agent.command(), options={**QUICK, "clocks": {"overall": seconds}})
            ).ask(f"@@touch {tmp_path / str(seconds)}\n@@hang")
            for seconds in (900.0, 300.0, 600.0)
        ]
        for seconds in (900.0, 300.0, 600.0):
            await exists(tmp_path / str(seconds))
        assert 200 < read(host)["banksman_clock_seconds_left", "overall"] <= 300
        assert len(turns) == 3


async def test_metrics_count_open_questions(tmp_path: Path) -> None:
    async with opened(tmp_path, options={"clocks": {"overall": 500.0, "progress": 100.0, "human": 50.0}}) as case:
        turn = await case.ask('@@ask Bash {"command":"ls"}\n@@say went on')
        event = await case.wait_kind("question.asked")
        page = read(case.host)
        assert page["banksman_questions", ""] == 1
        # A watchdog that is paused for a human has no seconds left to report.
        clocks = {clock.name: clock.is_running for clock in case.session.status().clocks}
        assert set(clocks.values()) == {True, False}
        assert {name for name, is_running in clocks.items() if is_running} == {
            label for name, label in page if name == "banksman_clock_seconds_left"
        }
        await case.session.answer(event.body["question"], "allow")
        assert (await case.outcome(turn)).kind is Kind.DONE
        assert read(case.host)["banksman_questions", ""] == 0


@pytest.mark.parametrize("store", ["memory:", "sqlite:"])
async def test_metrics_totals_never_fall_when_sessions_close_and_are_forgotten(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_table, "SESSIONS_KEPT_MAX", 0)
    path = f"sqlite:{tmp_path / 'store.db'}" if store == "sqlite:" else store
    async with Host(path) as host:
        before = read(host)
        frames = 0
        for number in range(4):
            name = "again" if number in (1, 2) else None
            session = await host.open(command=fake_agent.command(memory=tmp_path / "memory"), name=name, options=QUICK)
            assert (await (await session.ask("@@say yes")).outcome()).kind is Kind.DONE
            for step in range(3):
                if step == 1:
                    await session.close()
                    frames += session.status().counters["frames_in"]
                elif step == 2 and number != 1:
                    await host.delete(session.id)
                now = read(host)
                check_grown(before, now)
                before = now
        assert before["banksman_turns_total", "done"] == 4
        assert before["banksman_frames_total", "in"] == frames
        assert before["banksman_agent_processes_total", ""] == 4
        assert not [key for key, count in before.items() if key[0] == "banksman_sessions" and count]
    # The listing fails after the close, and the rest still works.
    after = read(host)
    assert before["banksman_store_listed", ""] == 1
    assert after["banksman_store_listed", ""] == 0
    check_grown(before, after)


async def test_metrics_count_swept_processes(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        assert (await case.answer("@@hold 60 setsid\n@@say yes")).kind is Kind.DONE
        assert read(case.host)["banksman_swept_total", ""] == 0
        await case.session.close()
        assert read(case.host)["banksman_swept_total", ""] == 1
        assert read(case.host)["banksman_survivors_total", ""] == 0


async def test_metrics_count_sessions_not_open_here_by_phase(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'store.db'}"
    async with Host(store) as here, Host(store) as there:
        ours = [await here.open(command=fake_agent.command(), options=QUICK) for _ in range(3)]
        for _ in range(2):
            await there.open(command=fake_agent.command(), options=QUICK)
        await ours[0].close()
        page = read(here)
        phases = {phase: value for (name, phase), value in page.items() if name == "banksman_sessions"}
        assert {phase: count for phase, count in phases.items() if count} == {"idle": 2, "elsewhere": 2, "asleep": 1}
        assert phases["running"] == phases["lost"] == 0


async def test_metrics_count_commands_by_state_and_end() -> None:
    async with Host(finished_max=1) as host:
        running = await host.start(["sleep", "60"])
        assert read(host)["banksman_commands", "running"] == 1
        # One command leaves a process behind, which is swept. The output of the other is not all kept in memory.
        await (await host.start(["sh", "-c", "sleep 60 & exit 3"])).wait()
        await (await host.start(["sh", "-c", "head -c 5000 /dev/zero"], output_bytes_max=1000)).wait()
        await running.stop()
        page = read(host)
        assert page["banksman_commands", "running"] == 0
        assert page["banksman_commands", "ended"] == 1
        assert page["banksman_commands_ended_total", "exited"] == 2
        assert page["banksman_commands_ended_total", "stopped"] == 1
        assert page["banksman_swept_total", ""] == 1
        # The spill file has all of the output.
        assert page["banksman_dropped_bytes_total", "output"] == 0


async def test_metrics_count_output_lost_beyond_the_spill_file() -> None:
    async with Host() as host:
        options = Options(output_bytes_max=1000, spill_bytes_max=2000)
        await host.run(prepare(["sh", "-c", "head -c 5000 /dev/zero"]), options)
        # The file has the first 2,000 bytes, and memory the last 500.
        assert read(host)["banksman_dropped_bytes_total", "output"] == 2500


async def test_metrics_count_streams_and_followers() -> None:
    counts = StreamCounts()
    async with Host() as host:
        with counts.following("session"), counts.following("many"), counts.following("many"):
            counts.events, counts.bytes, counts.cut, counts.gaps = 5, 1000, 2, 1
            page = read(host, counts)
        assert page["banksman_followers", "session"] == 1
        assert page["banksman_followers", "many"] == 2
        assert page["banksman_stream_events_total", ""] == 5
        assert page["banksman_stream_bytes_total", ""] == 1000
        assert page["banksman_streams_cut_total", ""] == 2
        assert page["banksman_stream_gaps_total", ""] == 1
        assert counts.followers == {"session": 0, "many": 0, "commands": 0}


async def test_metrics_size_is_independent_of_sessions_and_names_none(tmp_path: Path) -> None:
    async with Host("memory:") as host:
        sessions = [await host.open(command=fake_agent.command(), name="alpha", options=QUICK)]
        before = metrics.render(host, StreamCounts())
        names = [f"name-{number}" for number in range(20)]
        sessions += [await host.open(command=fake_agent.command(), name=name, options=QUICK) for name in names]
        after = metrics.render(host, StreamCounts())
        assert after.count(b"\n") == before.count(b"\n")
        for session in sessions:
            assert session.id.encode() not in after
            assert (session.name or "").encode() not in after
        assert not re.search(rb"s-[0-9a-f]{16}", after)


# -- counters of the engines ------------------------------------------------------------------------------------------
def make(kind: str, folder: Path) -> Log:
    match kind:
        case "memory":
            return MemoryLog()
        case "sqlite":
            return SqliteLog(folder / "store.db")
        case _:
            return WorldLog()


async def append(log: Log, epoch: int, seq: int, *data: bytes) -> StoreError | NotOwner | None:
    answered: asyncio.Future[StoreError | NotOwner | None] = asyncio.get_running_loop().create_future()
    log.append("s", epoch, seq, AT, lines(*data), answered.set_result)
    return await answered


def grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    assert set(before) == set(after) == {"commits", "events", "bytes", "failures"}
    return {name: after[name] - before[name] for name in after}


@pytest.mark.parametrize("kind", ["memory", "sqlite", "world"])
async def test_store_counters_count_written_events_and_bytes(kind: str, tmp_path: Path) -> None:
    log = make(kind, tmp_path)
    assert set(log.counters().values()) == {0}
    epoch = await log.claim("s", agent="claude")
    before = log.counters()
    assert await append(log, epoch, 0, b"a" * 1000, b"b") is None
    assert await append(log, epoch, 2, b"c") is None
    found = grown(before, log.counters())
    assert found["commits"] == 2
    assert found["events"] == 3
    assert 1002 <= found["bytes"] < 4000
    assert 0 < log.commit_times.seconds < 60
    assert sum(log.commit_times.counts) == log.counters()["commits"]
    assert found["failures"] == 0
    # A refused append writes nothing, and is no failure of the store.
    before = log.counters()
    assert isinstance(await append(log, epoch + 1, 3, b"d"), NotOwner)
    found = grown(before, log.counters())
    assert (found["events"], found["bytes"], found["failures"]) == (0, 0, 0)
    await log.close()
    assert log.counters()["events"] == 3


async def test_store_counters_count_a_failed_write_as_failure(tmp_path: Path) -> None:
    log = SqliteLog(tmp_path / "store.db")
    epoch = await log.claim("s", agent="claude")
    assert await append(log, epoch, 0, b"a") is None
    before = log.counters()
    # SQLite's own limit on the file: there is no room left.
    await log._bridge.call(lambda work: work.execute("PRAGMA max_page_count = 1").fetchall())  # pyright: ignore[reportPrivateUsage]
    assert isinstance(await append(log, epoch, 1, b"b" * 1_000_000), StoreError)
    found = grown(before, log.counters())
    assert (found["failures"], found["events"], found["bytes"]) == (1, 0, 0)
    await log.close()


async def test_world_log_counters_count_failures_like_a_disk() -> None:
    log = WorldLog(faults={1: Fault.FAILS, 2: Fault.NOT_OWNER})
    epoch = await log.claim("s", agent="claude")
    assert isinstance(await append(log, epoch, 0, b"a"), StoreError)
    assert isinstance(await append(log, epoch, 0, b"a"), NotOwner)
    assert log.counters()["failures"] == 1
    assert log.counters()["events"] == 0
    await log.close()


# -- promtool ---------------------------------------------------------------------------------------------------------
@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool: make promtool")
async def test_metrics_pass_promtool(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        await case.outcome(await case.ask("@@say one"))
        rendered = metrics.render(case.host, StreamCounts())
    checked = subprocess.run(["promtool", "check", "metrics"], input=rendered, capture_output=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
