"""Write the fixtures of this folder: a store and a cluster of killed hosts, and a list of their contents.

    cd <repository>; PYTHONPATH=<another version>/src python -m tests.compatibility.write FOLDER

The fixtures in this folder were written by 58ad13a, the last commit before the modules moved to their present places.
The program uses only the public API, so any version can write them. It needs a minute. Nothing else on the machine may
use a file `banksman-fixture-go-on` in /tmp.

    X.tar.xz    the files that the hosts left, for X `store` (SQLite) and `cluster` (one NATS node)
    X.jsonl     the contents as the same version read them, one object a line

The objects differ by `what`:

    session     id, name and agent of each session that was not deleted
    event       every event; a long event has its length and hash in place of its data
    outcome     the outcome of each ended turn, as the log has it
    settled     an event that the same version appended when it opened a copy of the store
    killed      the id of the host that was killed, in a cluster

The archives contain nothing about the machine that wrote them: the agent is a name on PATH (`agent.py`) and works in
/tmp, and the machine has the name `fixture`. `tar -xJOf X.tar.xz | grep -a …` shows it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

from tests.compatibility import agent

from banksman import Event, Host, Outcome, Session, Turn
from banksman.testing.nats_servers import Servers

MACHINE = "fixture"
PREFIX = "fixture"
# Long, so that a host that opens the fixture on a busy machine does not lose its lease.
LEASE_SECONDS = 60
QUICK = {"eof_grace": 0.1, "grace": 1.0, "linger": 0.05}
# For longer data the row has its hash.
DATA_BYTES_MAX = 4096
# Retention limit of the session with the long history. A version takes a snapshot after a thousand events.
KEEP_BYTES = 12_000
LONG_EVENTS = 1_050
# More than one NATS message can hold.
LARGE_BYTES = 1_200_000
# File in the agent's folder. The agent continues when the file exists.
GO_ON = "banksman-fixture-go-on"
# Wait for changes that no event reports: a journal is written, the processes of a dead host have ended.
SETTLE_SECONDS = 3.0
PATIENCE_SECONDS = 120.0

Row = dict[str, Any]


# -- rows of the .jsonl files ----------------------------------------------------------------------------------------
def data_row(data: bytes) -> Row:
    if len(data) > DATA_BYTES_MAX:
        return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return {"data": data.decode()}


def event_row(event: Event) -> Row:
    place = {"session": event.session, "epoch": event.epoch, "seq": event.seq, "at": event.at}
    return {"what": "event", **place, "turn": event.turn, "kind": event.kind, **data_row(event.data)}


def outcome_row(turn: str, outcome: Outcome) -> Row:
    told = {
        "kind": outcome.kind.value,
        "stop_reason": outcome.stop_reason,
        "structured": outcome.structured,
        "usage": outcome.usage,
        "cost": outcome.cost,
        "error": None if outcome.error is None else str(outcome.error),
        "clock": outcome.clock,
        "text": None if outcome.text is None else data_row(outcome.text.encode()),
    }
    return {"what": "outcome", "turn": turn, **told}


async def session_rows(session: Session) -> list[Row]:
    """Return the rows of the session, its events, and the outcome of each ended turn."""
    events = [event async for event in session.events(0)]
    rows: list[Row] = [{"what": "session", "session": session.id, "name": session.name, "agent": session.agent}]
    rows += [event_row(event) for event in events]
    for event in events:
        if event.kind == "turn.ended":
            assert event.turn is not None
            row = outcome_row(event.turn, await (await session.turn(event.turn)).outcome())
            rows.append({**row, "session": session.id})
    return rows


async def read(host: Host) -> list[Row]:
    return [row for session in host.sessions() for row in await session_rows(session)]


# -- contents of the fixtures ----------------------------------------------------------------------------------------
async def open_session(host: Host, name: str, **how: Any) -> Session:
    how = {"options": QUICK, **how}
    return await host.open("claude", id=f"s-{name}", name=name, cwd=agent.CWD, command=[agent.NAME], **how)


async def logged(session: Session, kind: str, word: bytes) -> Event:
    """Wait until the log has an event of this kind with `word` in its data."""
    async with asyncio.timeout(PATIENCE_SECONDS), aclosing(session.follow()) as events:
        async for event in events:
            if event.kind == kind and word in event.data:
                return event
    raise AssertionError(f"{session} was closed without {kind} {word!r}")


async def ended(turn: Turn, kind: str) -> None:
    outcome = await turn.outcome()
    assert outcome.kind == kind, outcome


async def talk(host: Host) -> Session:
    """Create a session with turns that end in each way, and with a change of settings."""
    session = await open_session(
        host, "talk", model="first-model", rules={"Read": "allow"}, system_prompt="be brief", labels=("fixture",)
    )
    await ended(await session.ask("hello", key="key-hello"), "done")
    tools = '@@think hm\n@@tool_use Read {"path": "a"}\n@@tool_result text of a\n@@stream 3 0 word\n@@say read'
    await ended(await session.ask(f"read a\n{tools}", key="key-read"), "done")
    await ended(await session.ask("fail\n@@say almost\n@@failure it broke", key="key-failed"), "failed")
    turn = await session.ask("exit\n@@say dying\n@@exit 3")
    await ended(turn, "failed")
    turn = await session.ask("stop me\n@@say half of it\n@@hang", key="key-interrupted")
    await logged(session, "update", b"half of it")
    assert (await turn.interrupt()).stopped
    await ended(turn, "interrupted")
    await session.set_model("second-model")
    await session.set_permission_mode("plan")
    turn = await session.ask('may I\n@@ask Bash {"command": "true"}\n@@say I did')
    asked = await logged(session, "question.asked", b"Bash")
    await session.answer(asked.body["question"], "allow", updated_input={"command": "false"})
    await ended(turn, "done")
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    turn = await session.ask('count\n@@boundary {"structured_output": {"n": 1}}', schema=schema)
    await ended(turn, "done")
    first = await session.ask("background\n@@say at leisure\n@@hang", priority="background")
    await logged(session, "update", b"at leisure")
    waiting = await session.ask("never sent", priority="background")
    session.withdraw(waiting)
    await ended(waiting, "withdrawn")
    await ended(await session.ask("urgent", priority="interactive"), "done")
    await ended(first, "preempted")
    return session


async def long_history(store: str) -> None:
    """Create a session that has a snapshot and has lost its first events to retention."""
    async with Host(f"{store}?keep_bytes={KEEP_BYTES}") as host:
        session = await open_session(host, "long")
        await ended(await session.ask("the first", key="key-trimmed"), "done")
        # The frames contain nothing random, so they compress well.
        frames = ['@@raw {"type":"system","subtype":"note"}'] * LONG_EVENTS
        await ended(await session.ask("\n".join(["at length", *frames, "@@say at last"])), "done")
        for number in range(3):
            await ended(await session.ask(f"more {number}", key=f"key-long-{number}"), "done")
        await session.close()


async def live_in_store(store: str, folder: Path) -> None:
    """Run as the host that is killed. It prints "ready" when everything is in the store."""
    await long_history(store)
    async with Host(store, address="fixture:1") as host:
        finished = await talk(host)
        await finished.close()
        await host.export(finished, folder / "talk.export")
        await host.bundle(finished, folder / "talk.bundle")
        gone = await open_session(host, "gone")
        await ended(await gone.ask("forget me", key="key-gone"), "done")
        await host.delete(gone)
        # One turn runs, and one ask waits behind it.
        running = await open_session(host, "running")
        await ended(await running.ask("before", key="key-before"), "done")
        await running.set_model("third-model")
        await running.ask("work\n@@say working\n@@hang", key="key-open")
        await logged(running, "update", b"working")
        await running.ask("after it", key="key-queued")
        # Two open questions: recovery withdraws one and keeps the other.
        for name, policy in (("asking", "withdraw"), ("keeping", "keep")):
            session = await open_session(host, name, options={**QUICK, "question_after_crash": policy})
            await session.ask('may I\n@@ask Bash {"command": "true"}', key=f"key-{name}")
            await logged(session, "question.asked", b"Bash")
        # This agent waits for the next prompt.
        resting = await open_session(host, "resting")
        await ended(await resting.ask("rest", key="key-rest"), "done")
        await logged(resting, "update", b"completed")
        print("ready", flush=True)
        await asyncio.Event().wait()


async def live_in_cluster(store: str) -> None:
    """Run a host that closes its sessions and leaves."""
    async with Host(store) as host:
        await host.ready()
        session = await open_session(host, "large")
        await ended(await session.ask("hello", key="key-hello"), "done")
        await ended(await session.ask(f"much\n@@huge {LARGE_BYTES}\n@@say that was much", key="key-large"), "done")
        await ended(await session.ask("fail\n@@failure it broke", key="key-failed"), "failed")
        turn = await session.ask("stop me\n@@say half of it\n@@hang", key="key-interrupted")
        await logged(session, "update", b"half of it")
        assert (await turn.interrupt()).stopped
        await session.set_model("second-model")
        await session.close()
        gone = await open_session(host, "gone")
        await ended(await gone.ask("forget me", key="key-gone"), "done")
        await host.delete(gone)


# -- the two fixtures ------------------------------------------------------------------------------------------------
async def write_store(folder: Path, work: Path) -> None:
    kept = work / "kept"
    kept.mkdir()
    agent.install(kept, os.environ)
    store = f"sqlite:{kept / 'store.db'}"
    with part("store", store, str(kept)) as process:
        wait_line(process, "ready")
        async with Host(store) as reader:
            rows = await read(reader)
        process.kill()
        process.wait()
    await asyncio.sleep(SETTLE_SECONDS)
    copy = work / "copy"
    shutil.copytree(kept, copy)
    known = {(row["session"], row["seq"]) for row in rows if row["what"] == "event"}
    async with Host(f"sqlite:{copy / 'store.db'}") as host:
        for row in await read(host):
            if row["what"] == "event" and (row["session"], row["seq"]) not in known:
                rows.append({**row, "what": "settled"})
    save(folder / "store", kept, rows)


async def write_cluster(folder: Path, work: Path) -> None:
    kept = work / "kept"
    kept.mkdir()
    agent.install(kept, os.environ)
    go_on = Path(agent.CWD, GO_ON)
    with Servers() as servers:
        store = servers.store(PREFIX, lease=LEASE_SECONDS, journal=kept / "journals")
        with part("cluster", store) as process:
            assert process.wait() == 0
        # The host has a separate home, as on another machine: its agent's memory must come from the cluster.
        home = work / "other" / "home"
        home.mkdir(parents=True)
        with part("banksman", "host", "--store", store, "--name", "old", "--room", "4", HOME=str(home)) as process:
            wait_line(process, "old")
            banksman("open", "claude", "--name", "carried", "--cwd", agent.CWD, "--store", store, "--", agent.NAME)
            ask = ("ask", "carried", "--store", store, "--key")
            banksman(*ask, "key-first", "first")
            async with Host(store) as reader:
                await reader.ready()
                session, cluster = reader.session("carried"), reader.cluster
                assert cluster is not None
                await until(lambda: cluster.transcripts.get(session.id))
                prompt = f"second\n@@say heard\n@@wait {GO_ON}\n@@say into the journal\n@@hang"
                banksman(*ask, "key-open", prompt, "--no-wait")
                await logged(session, "update", b"heard")
                banksman(*ask, "key-queued", "third", "--no-wait")
                await logged(session, "turn.queued", b"key-queued")
                rows = await read(reader)
                (host,) = (each.id for each in cluster.hosts.all() if each.name == "old")
                rows.append({"what": "killed", "host": host})
            # The next output of the agent exists only in the journal of its host.
            await stop_node(servers)
            try:
                go_on.touch()
                await asyncio.sleep(SETTLE_SECONDS)
            finally:
                go_on.unlink()
            process.kill()
            process.wait()
        shutil.copytree(servers.folder / "n0", kept / "n0")
    save(folder / "cluster", kept, rows)


async def stop_node(servers: Servers) -> None:
    """Stop the node cleanly.

    After a kill, a restarted node can restore data that it removed shortly before the kill.
    """
    pid = servers.pid(0)
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while servers.pid(0) is not None:  # noqa: ASYNC110  No event reports the end.
            await asyncio.sleep(0.1)


async def until(look: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await look():  # noqa: ASYNC110  No event reports the change.
            await asyncio.sleep(0.1)


def save(target: Path, kept: Path, rows: Iterable[Row]) -> None:
    """Write the archive and the rows.

    The archive omits the agent program, because the test creates it after unpacking.
    """
    shutil.rmtree(kept / "bin")

    def neutral(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return member

    with tarfile.open(f"{target}.tar.xz", "w:xz", preset=9) as archive:
        for path in sorted(kept.iterdir()):
            archive.add(path, path.name, filter=neutral)
    lines = (json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows)
    Path(f"{target}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


# -- processes -------------------------------------------------------------------------------------------------------
@contextmanager
def part(*words: str, **environment: str) -> Generator[subprocess.Popen[str]]:
    """Run one part of this program in another process, and kill the process at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.compatibility.write", "--part", *words],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **environment},
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def wait_line(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert word in line, line


def banksman(*words: str) -> None:
    with part("banksman", *words) as process:
        said, _ = process.communicate()
        assert process.returncode == 0, (words, said)


def perform(name: str, *words: str) -> int:
    if name == "banksman":
        from banksman.cli import main as banksman_main

        sys.argv = ["banksman", *words]
        return banksman_main()
    asyncio.run(live_in_store(words[0], Path(words[1])) if name == "store" else live_in_cluster(words[0]))
    return 0


def main(words: Sequence[str]) -> int:
    # A cluster stores the machine name of each host, and a bundle stores the version of its kernel.
    socket.gethostname = lambda: MACHINE
    os.uname = lambda: os.uname_result(("Linux", MACHINE, "0", "0", "x86_64"))
    if words[0] == "--part":
        return perform(*words[1:])
    folder = Path(words[0])
    for name, write in (("store", write_store), ("cluster", write_cluster)):
        with tempfile.TemporaryDirectory(prefix="banksman-fixture-") as work:
            os.environ.update(XDG_STATE_HOME=f"{work}/state", XDG_CONFIG_HOME=f"{work}/config")
            asyncio.run(write(folder, Path(work)))
            print(name, Path(folder, f"{name}.tar.xz").stat().st_size, Path(folder, f"{name}.jsonl").stat().st_size)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
