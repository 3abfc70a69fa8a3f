"""Durability of sessions in a file: full disks, read-only stores, torn files.

Other files cover the remaining scenarios of logs and restarts: 51 and 52 are in tests/store (appends and snapshots
under an expected seq, whole or not at all; exports), 55 and 66 in test_takeover.py, 62 in test_pool.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.sessions.crash_host import REPOSITORY, Agents, remote
from tests.sessions.helpers import QUICK, bodies, exists
from tests.sessions.takeover_scene import check, read, recalled

from banksman import Host, Kind, Moved, Outcome, QueueFull, Session, Turn, UsageError
from banksman.core.session import event as kinds
from banksman.core.session.outcome import By
from banksman.errors import StoreDamaged, StoreError, StoreFull, StoreReadOnly
from banksman.testing import checks, fake_agent

NAME = "the one"
# The store is retried immediately, and then at short intervals.
RETRIES = {"store_retry_seconds": 0.01, "store_retry_seconds_max": 0.05}


@pytest.fixture
def agents(tmp_path: Path, marker: str) -> Agents:
    return Agents(tmp_path, marker)


def store_of(agents: Agents, settings: str = "") -> str:
    return f"sqlite:{agents.folder / 'store.db'}{settings}"


async def open_on(host: Host, agents: Agents, **how: Any) -> Session:
    words: dict[str, Any] = {"command": agents.command(), "options": QUICK, **how}
    return await host.open("claude", name=NAME, **words)


async def outcome_of(session: Session, prompt: str) -> Outcome:
    return await (await session.ask(prompt)).outcome()


async def ask_writer(host: Host, pragma: str) -> Any:
    """Query the connection of the writer, because the setting belongs to it."""

    def ask(work: Any) -> Any:
        return work.row(pragma)

    store: Any = host._own_sessions().store  # pyright: ignore[reportPrivateUsage]
    # In a transaction of its own: another write of the same one could fail.
    return await store._bridge.call(ask, is_alone=True)


# -- events of a turn ------------------------------------------------------------------------------------------------
async def test_late_interrupt_after_success_changes_nothing_after_restart(agents: Agents) -> None:
    """Scenario 53."""
    async with Host(store_of(agents)) as host:
        session = await open_on(host, agents)
        turn = await session.ask("one")
        assert (await turn.outcome()).kind is Kind.DONE
        receipts = [await turn.interrupt()]
    async with Host(store_of(agents)) as host:
        session = host.session(NAME)
        found = await session.turn(turn.id)
        receipts += [await found.interrupt(), await session.interrupt(turn.id), await session.interrupt()]
        assert (await found.outcome()).kind is Kind.DONE
        assert [(receipt.stopped, receipt.by) for receipt in receipts] == [(False, By.ALREADY_OVER)] * 4
        await session.close()
        events = await read(session)
        assert kinds.TURN_INTERRUPTED not in {event.kind for event in events}
        check(events, agents, [turn.id])


async def test_interrupted_turn_is_stored_with_all_it_had(agents: Agents, tmp_path: Path) -> None:
    """Scenario 54.

    The log keeps the prompt, the text so far, the reasoning and the tool calls, for a reader on another host and after
    a restart.
    """
    lines = ["look into it", "@@think hm, let me see", "@@say half of it", '@@tool_use Bash {"command":"make"}']
    prompt = "\n".join([*lines, f"@@touch {tmp_path / 'reached'}", "@@hang"])
    async with Host(store_of(agents)) as host, Host(store_of(agents)) as reader:
        session = await open_on(host, agents)
        turn = await session.ask(prompt)
        await exists(tmp_path / "reached")
        receipt = await turn.interrupt()
        assert (receipt.stopped, receipt.kept) == (True, "half of it")
        await _has_all(reader.session(NAME), turn.id, prompt)
    async with Host(store_of(agents)) as host:
        await _has_all(host.session(NAME), turn.id, prompt)
        # The agent's memory of the turn continues too.
        assert await recalled(host.session(NAME)) == ["look into it"]


async def _has_all(session: Session, id: str, prompt: str) -> None:
    turn = await session.turn(id)
    outcome = await turn.outcome()
    assert (outcome.kind, outcome.text) == (Kind.INTERRUPTED, "half of it")
    updates = [update async for update in turn]
    said = {update["sessionUpdate"]: update for update in updates}
    assert said["agent_thought_chunk"]["content"]["text"] == "hm, let me see"
    assert said["agent_message_chunk"]["content"]["text"] == "half of it"
    assert said["tool_call"]["rawInput"] == {"command": "make"}
    (queued,) = [event.body for event in await read(session) if (event.turn, event.kind) == (id, kinds.TURN_QUEUED)]
    assert queued["prompt"] == prompt


async def test_turn_end_survives_full_queue_and_delayed_log(agents: Agents, tmp_path: Path) -> None:
    """Scenario 57. Another connection holds the write lock of the store while the turn is flooded to its end."""
    options = {**QUICK, "queue_max": 2}
    async with Host(store_of(agents)) as host:
        session = await open_on(host, agents, options=options)
        steps = f"@@touch {tmp_path / 'reached'}\n@@wait {tmp_path / 'go'}\n@@flood 2000 5000\n@@say the end"
        turn = await session.ask(f"one\n{steps}")
        await exists(tmp_path / "reached")
        waiting = [await session.ask(word) for word in ("two", "three")]
        with pytest.raises(QueueFull):
            await session.ask("four")
        with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            (tmp_path / "go").touch()
            # The host reads until the limit of uncommitted bytes. Then the pipe pushes back on the agent.
            async with asyncio.timeout(30):
                while session.status().counters["bytes_in"] < 8 << 20:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
            assert turn.state == "running"
        outcome = await turn.outcome()
        assert (outcome.kind, outcome.text) == (Kind.DONE, "the end")
        assert [(await each.outcome()).text for each in waiting] == ["two", "three"]
        await session.close()
        check(await read(session), agents, [turn.id, *(each.id for each in waiting)])


async def test_agent_initiated_turn_is_delivered_once_to_late_follower(agents: Agents, tmp_path: Path) -> None:
    """Scenario 61. A background task ends, and the agent reports it in an unasked turn."""
    mark = tmp_path / "own"
    async with Host(store_of(agents)) as host:
        session = await open_on(host, agents)
        steps = f"say the build is green ;; at completed touch {mark}"
        outcome = await outcome_of(session, f"one\n@@say one\n@@at idle own task-notification {steps}")
        assert outcome.text == "one"
        await exists(mark)
    async with Host(store_of(agents)) as host:
        session = host.session(NAME)
        first = [event async for event in session.follow()]
        own = [event for event in first if event.turn == "own-1"]
        assert [event.body["outcome"] for event in own if event.kind == kinds.TURN_ENDED] == ["done"]
        assert sum(b'"assistant"' in event.data for event in own) == 1
        # A follower gets each event only once.
        again = [event async for event in session.follow(after=first[-1].cursor)]
        assert again == []
        checks.log(first)
        checks.turns(first)


async def test_unseen_process_exit_is_not_recorded_as_success(agents: Agents, tmp_path: Path, marker: str) -> None:
    """Scenario 63. No log records exit code 0 for a process that died with its host or by a signal."""
    async with remote(tmp_path / "store.db", marker) as there:
        session = await there.open(name=NAME, command=agents.command(), options=QUICK)
        turn = await there.ask(session, f"one\n@@touch {tmp_path / 'reached'}\n@@hang")
        await exists(tmp_path / "reached")
        there.kill()
    async with Host(store_of(agents)) as host:
        taken = await open_on(host, agents)
        killed = await outcome_of(taken, "two\n@@kill 9")
        assert killed.kind is Kind.FAILED
        assert (await (await taken.turn(turn)).outcome()).kind is Kind.UNKNOWN
        exits = bodies(await read(taken), kinds.PROCESS_EXITED)
        assert [(body["process"], body["code"], body["signal"]) for body in exits] == [(2, None, 9)]


async def test_turn_end_is_known_by_key_after_retention_took_its_events(agents: Agents) -> None:
    """A repeated ask starts no second turn. A caller that waits for dropped text gets an error and does not hang."""
    store = store_of(agents, "?keep_bytes=20000")
    async with Host(store) as host:
        session = await open_on(host, agents)
        turn = await session.ask("first", key="the key")
        assert (await turn.outcome()).kind is Kind.DONE
        # The session writes a snapshot now and then. The events that it covers need not be kept.
        assert (await outcome_of(session, "more\n@@flood 2500 100\n@@say more")).kind is Kind.DONE
    async with Host(store) as host:
        session = await open_on(host, agents)
        again = await session.ask("first", key="the key")
        assert again.id == turn.id
        async with asyncio.timeout(10):
            outcome = await again.outcome()
            assert [update async for update in again] == []
        assert (outcome.kind, outcome.text) == (Kind.DONE, None)
        assert isinstance(outcome.error, StoreError)
        with pytest.raises(UsageError, match="find the id with `banksman log SESSION`; old turns may be deleted"):
            await session.turn(turn.id)
        assert (await recalled(session))[0] == "first"


# -- no space --------------------------------------------------------------------------------------------------------
class Disk:
    """Full disk: a page limit makes SQLite report that the file cannot grow."""

    def __init__(self, host: Host) -> None:
        self._host = host

    async def fill(self) -> None:
        (pages,) = await self._ask("PRAGMA page_count")
        assert await self._ask(f"PRAGMA max_page_count={pages}") == (pages,)

    async def make_room(self) -> None:
        await self._ask("PRAGMA max_page_count=1000000")

    async def refuse(self) -> None:
        """Refuse every further write."""
        with suppress(StoreReadOnly):  # The write of the same transaction fails too.
            await self._ask("PRAGMA query_only=ON")

    async def _ask(self, pragma: str) -> Any:
        return await ask_writer(self._host, pragma)


async def test_full_disk_fails_running_turn_and_session_recovers(agents: Agents, tmp_path: Path) -> None:
    """Scenario 68."""
    async with Host(store_of(agents)) as host, Host(store_of(agents)) as reader:
        session = await open_on(host, agents, options={**QUICK, **RETRIES})
        acknowledged = await session.ask("before")
        assert (await acknowledged.outcome()).kind is Kind.DONE
        turn = await session.ask(f"one\n@@wait {tmp_path / 'go'}\n@@flood 100 5000\n@@hang")
        waiting = await session.ask("two", key="the key")
        kept = await read(session)
        (pid,) = session.status().pids
        disk = Disk(host)
        await disk.fill()
        (tmp_path / "go").touch()
        for each in (turn, waiting):
            outcome = await each.outcome()
            assert outcome.kind is Kind.FAILED
            assert isinstance(outcome.error, StoreFull)
            assert "space" in outcome.error.hint
            assert not outcome.durable
        with pytest.raises(StoreFull):
            await session.ask("three" * 100_000)
        await _is_gone(pid)
        # The events acknowledged before are there, also for other hosts.
        for each in (session, reader.session(NAME)):
            assert (await read(each))[: len(kept)] == kept
        await disk.make_room()
        four = await _accepted(session, "four")
        assert (await four.outcome()).text == "four"
        assert await recalled(session) == ["before", "one", "four"]
        await session.close()
        events = await read(session)
        assert kinds.SESSION_STORE_RETURNED in {event.kind for event in events}
        # The ends of turns that could not be written before.
        ends = {event.turn: event.body["outcome"] for event in events if event.kind == kinds.TURN_ENDED}
        assert (ends[turn.id], ends[waiting.id]) == ("failed", "failed")
        check(events, agents, [acknowledged.id, turn.id, waiting.id])
    async with Host(store_of(agents)) as host:
        assert await read(host.session(NAME)) == events


async def _accepted(session: Session, prompt: str) -> Turn:
    """Repeat an ask that the full disk refused, until there is room."""
    async with asyncio.timeout(30):
        while True:
            with suppress(StoreFull):
                return await session.ask(prompt)
            await asyncio.sleep(0.002)


async def _is_gone(pid: int) -> None:
    async with asyncio.timeout(30):
        while os.path.exists(f"/proc/{pid}"):  # noqa: ASYNC110  The full log cannot record the exit.
            await asyncio.sleep(0.002)


async def test_host_closes_with_unwritable_store_and_next_host_settles_it(agents: Agents, tmp_path: Path) -> None:
    """Scenario 68. The host cannot write the end of the turn, so the log has none. The next host adds it."""
    async with Host(store_of(agents)) as host:
        session = await open_on(host, agents, options={**QUICK, **RETRIES})
        prompt = f"one\n@@touch {tmp_path / 'reached'}\n@@wait {tmp_path / 'go'}\n@@say more\n@@hang"
        turn = await session.ask(prompt)
        waiting = await session.ask("two", key="the key")
        await exists(tmp_path / "reached")
        await Disk(host).refuse()
        (tmp_path / "go").touch()
        for each in (turn, waiting):
            outcome = await each.outcome()
            assert (outcome.kind, outcome.durable) == (Kind.FAILED, False)
            assert isinstance(outcome.error, StoreReadOnly)
        # A later reader does not see an end that the log does not have.
        looking = [asyncio.ensure_future((await session.turn(each.id)).outcome()) for each in (turn, waiting)]
        await read(session)
        assert not any(each.done() for each in looking)
    # The next host decides how these turns ended, so this host reports no outcome.
    assert {type(found) for found in await asyncio.gather(*looking, return_exceptions=True)} == {Moved}
    assert agents.alive() == []
    async with Host(store_of(agents)) as host:
        session = await open_on(host, agents)
        assert (await (await session.turn(turn.id)).outcome()).kind is Kind.UNKNOWN
        # The ask was accepted. Its caller knows from `durable` that its fate is not proven.
        again = await session.ask("two", key="the key")
        assert again.id == waiting.id
        assert (await again.outcome()).text == "two"
        await session.close()
        check(await read(session), agents, [turn.id, waiting.id])


_ON_A_SMALL_DISK = """
import asyncio, json, os, subprocess, sys
from banksman import Host, StoreFull
from banksman.testing import fake_agent

async def accepted(session):
    while True:
        try:
            return await session.ask("two")
        except StoreFull:
            await asyncio.sleep(0.01)

async def main(folder):
    disk, evidence = f"{folder}/disk", f"{folder}/evidence"
    os.mkdir(disk)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", disk], check=True)
    said = []
    async with Host(f"sqlite:{disk}/store.db") as host:
        options = {"eof_grace": 0.1, "store_retry_seconds": 0.01, "store_retry_seconds_max": 0.05}
        session = await host.open("claude", name="one", command=fake_agent.command(evidence=evidence), options=options)
        turn = await session.ask("one\\n@@flood 1000 50000\\n@@hang")
        outcome = await turn.outcome()
        said.append([outcome.kind.value, type(outcome.error).__name__, outcome.durable])
        # Room is made by somebody else: what the flood left of it is in the store's own files.
        subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
        outcome = await (await accepted(session)).outcome()
        said.append([outcome.kind.value, outcome.text, outcome.durable])
    async with Host(f"sqlite:{disk}/store.db") as host:
        found = host.session("one")
        said.append([(await (await found.turn(turn.id)).outcome()).kind.value])
        said.append([event.seq async for event in found.events()])
    print(json.dumps(said))

asyncio.run(asyncio.wait_for(main(sys.argv[1]), 60))
"""


def test_full_tmpfs_fails_running_turn_and_session_recovers(tmp_path: Path) -> None:
    """Scenario 68."""
    flags = ("--mount", *(() if os.geteuid() == 0 else ("--user", "--map-root-user")))
    probe = subprocess.run(
        ["unshare", *flags, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, text=True, check=False
    )
    if probe.returncode != 0:
        pytest.skip(f"NOT TESTED: nothing can be mounted here: {probe.stderr}")
    done = _run(_ON_A_SMALL_DISK, tmp_path, prefix=["unshare", *flags])
    full, after, found, seqs = json.loads(done)
    assert full == ["failed", "StoreFull", False]
    assert after == ["done", "two", True]
    assert found == ["failed"]
    assert seqs == list(range(1, len(seqs) + 1))


def _run(code: str, *words: object, prefix: Sequence[str] = ()) -> str:
    argv = [*prefix, sys.executable, "-c", code, *map(str, words)]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- no permission ---------------------------------------------------------------------------------------------------
_AS_A_READER = """
import asyncio, json, os, sys
from banksman import BanksmanError, Host

async def attempt(what):
    try:
        await what
    except BanksmanError as exc:
        return [type(exc).__name__, bool(exc.hint)]
    return [None, False]

async def main(folder, is_left):
    store = f"sqlite:{folder}/store.db"
    command = ["/bin/true"]  # Any that both users can run.
    async with Host(store) as host:
        session = await host.open("claude", name="one", command=command)
        await (await session.ask("first")).outcome()
        if is_left == "True":
            # As after a kill, with a log beside the store that was never folded back.
            os.system(f"cp {folder}/store.db* {folder}/copy/")
            store = f"sqlite:{folder}/copy/store.db"
    folder = f"{folder}/copy" if is_left == "True" else folder
    if os.geteuid() == 0:
        for name in os.listdir(folder):
            os.chmod(f"{folder}/{name}", 0o644)
        os.chmod(folder, 0o755)
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
    else:
        for name in os.listdir(folder):
            os.chmod(f"{folder}/{name}", 0o444)
        os.chmod(folder, 0o555)
    before = sorted((name, os.stat(f"{folder}/{name}").st_mtime_ns) for name in os.listdir(folder))
    said = {}
    async with Host(store) as host:
        (session,) = host.sessions()
        said["found"] = [session.name, (await session.look()).phase]
        said["kinds"] = [event.kind async for event in session.events()]
        said["new"] = await attempt(host.open("claude", name="two", command=command))
        said["open"] = await attempt(host.open("claude", name="one", command=command))
        said["ask"] = await attempt(session.ask("more"))
        said["delete"] = await attempt(host.delete(session))
        said["rename"] = await attempt(session.rename("two"))
        said["again"] = [event.kind async for event in session.events()] == said["kinds"]
    after = sorted((name, os.stat(f"{folder}/{name}").st_mtime_ns) for name in os.listdir(folder))
    said["unchanged"] = before == after
    print(json.dumps(said))

asyncio.run(asyncio.wait_for(main(*sys.argv[1:]), 60))
"""


@pytest.mark.parametrize("is_left_by_a_kill", [False, True])
def test_read_only_store_can_be_read_by_another_user(is_left_by_a_kill: bool) -> None:
    """Scenario 68."""
    # Other users must not read pytest's folder.
    folder = tempfile.mkdtemp()
    os.chmod(folder, 0o755)
    os.mkdir(f"{folder}/copy")
    try:
        said = json.loads(_run(_AS_A_READER, folder, is_left_by_a_kill))
    finally:
        for each in (f"{folder}/copy", folder):
            os.chmod(each, 0o700)
        shutil.rmtree(folder)
    assert said["found"][0] == "one"
    assert {kinds.SESSION_OPENED, kinds.TURN_QUEUED, kinds.TURN_ENDED} <= set(said["kinds"])
    assert said["again"]
    for what in ("new", "open", "ask", "delete", "rename"):
        assert said[what] == ["StoreReadOnly", True], what
    assert said["unchanged"]


# -- a torn end ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["cut by a frame", "cut by a byte", "last page zeroed"])
async def test_store_without_its_end_is_refused_and_left_unchanged(
    agents: Agents, tmp_path: Path, marker: str, how: str
) -> None:
    """Scenario 68. A host was killed, and acknowledged events are missing."""
    async with remote(tmp_path / "store.db", marker) as there:
        session = await there.open(name=NAME, command=agents.command(), options=QUICK)
        turn = await there.ask(session, "acknowledged")
        assert await there.outcome(turn) == "done"
        there.kill()
    log = tmp_path / "store.db-wal"
    size = log.stat().st_size
    with open(log, "r+b") as file:
        match how:
            case "last page zeroed":
                file.seek(size - 4096)
                file.write(bytes(4096))
            case _:
                file.truncate(size - (1 if how == "cut by a byte" else 24 + 4096))
    before = _hashes(tmp_path)
    for _ in range(2):
        with pytest.raises(StoreDamaged) as caught:
            async with Host(store_of(agents)):
                pass
        assert "backup" in caught.value.hint
        assert str(tmp_path / "store.db") in str(caught.value)
        assert _hashes(tmp_path) == before
    host = Host(store_of(agents))
    with pytest.raises(StoreDamaged):
        host.sessions()
    with pytest.raises(StoreDamaged):
        await open_on(host, agents)
    await host.close()
    assert _hashes(tmp_path) == before


@pytest.mark.parametrize("how", ["empty", "missing"])
async def test_store_emptied_beside_its_log_is_refused_and_left_unchanged(
    agents: Agents, tmp_path: Path, marker: str, how: str
) -> None:
    async with remote(tmp_path / "store.db", marker) as there:
        await there.open(name=NAME, command=agents.command(), options=QUICK)
        there.kill()
    store = tmp_path / "store.db"
    os.truncate(store, 0) if how == "empty" else store.unlink()
    before = _hashes(tmp_path)
    assert "store.db-wal" in before
    host = Host(store_of(agents))
    with pytest.raises(StoreDamaged, match=how):
        host.sessions()
    await host.close()
    assert _hashes(tmp_path) == before


async def test_ask_raises_damage_when_the_last_chunk_is_missing(agents: Agents, tmp_path: Path) -> None:
    async with Host(store_of(agents)) as host:
        await open_on(host, agents)
    with closing(sqlite3.connect(tmp_path / "store.db")) as connection:
        connection.execute("DELETE FROM chunks WHERE id = (SELECT max(id) FROM chunks)")
        connection.commit()
    async with Host(store_of(agents)) as host:
        session = host.session(NAME)
        with pytest.raises(StoreDamaged, match="missing"):
            await session.ask("more")
        with pytest.raises(StoreDamaged, match="missing"):
            [event async for event in session.events()]


async def test_ask_raises_damage_when_the_row_of_a_session_is_behind_its_chunks(agents: Agents, tmp_path: Path) -> None:
    async with Host(store_of(agents)) as host:
        await open_on(host, agents)
    with closing(sqlite3.connect(tmp_path / "store.db")) as connection:
        connection.execute("UPDATE sessions SET seq = seq - 1")
        connection.commit()
    async with Host(store_of(agents)) as host:
        session = host.session(NAME)
        with pytest.raises(StoreDamaged):
            await session.ask("more")
        with pytest.raises(StoreDamaged, match="row ends at"):
            [event async for event in session.events()]


def _hashes(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.glob("store.db*")}


# -- storage settings ------------------------------------------------------------------------------------------------
async def test_store_files_are_private_to_their_owner(tmp_path: Path) -> None:
    agents = Agents(tmp_path / "new" / "folder", "files")
    before = os.umask(0)
    try:
        async with Host(store_of(agents)) as host:
            session = await host.open("claude", command=fake_agent.command(), options=QUICK)
            assert (await outcome_of(session, "one")).text == "one"
            modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in agents.folder.iterdir()}
            assert {"store.db", "store.db-wal"} < set(modes)
            assert set(modes.values()) == {0o600}, modes
            for folder in (agents.folder, agents.folder.parent):
                assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    finally:
        os.umask(before)


@pytest.mark.parametrize("level", ["full", "normal"])
async def test_store_level_is_chosen_with_path_and_survives_kill(
    agents: Agents, tmp_path: Path, marker: str, level: str
) -> None:
    path = f"{tmp_path / 'store.db'}?level={level}"
    async with remote(path, marker) as there:
        session = await there.open(name=NAME, command=agents.command(), options=QUICK)
        done = await there.ask(session, "one")
        assert await there.outcome(done) == "done"
        turn = await there.ask(session, f"two\n@@touch {tmp_path / 'reached'}\n@@hang")
        waiting = await there.ask(session, "three")
        await exists(tmp_path / "reached")
        there.kill()
    async with Host(f"sqlite:{path}") as host:
        taken = await open_on(host, agents)
        ends = [await (await taken.turn(id)).outcome() for id in (done, turn, waiting)]
        assert [end.kind for end in ends] == [Kind.DONE, Kind.UNKNOWN, Kind.DONE]
        assert await recalled(taken) == ["one", "two", "three"]
        (synced,) = await ask_writer(host, "PRAGMA synchronous")
        assert synced == {"full": 2, "normal": 1}[level]
        await taken.close()
        check(await read(taken), agents, [done, turn, waiting])
    assert (tmp_path / "store.db").exists()
