"""Export of a session to a file: the import restores the session exactly, and a malformed file creates no session."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from banksman.core.dialects.claude import CLAUDE
from banksman.core.redaction.redactor import Redactor
from banksman.core.session import history as pasts
from banksman.core.session.event import (
    PROCESS_STARTED,
    SENT,
    SESSION_IMPORTED,
    SESSION_OPENED,
    TURN_QUEUED,
    UPDATE,
    Entry,
    Event,
    entry,
)
from banksman.core.session.session_config import Config
from banksman.core.wire.elided_text import REDACTED
from banksman.errors import NameTaken, StoreDamaged, StoreError, StoreFull, UsageError
from banksman.sessions import recovery
from banksman.store import export_file, private_file, transfer
from banksman.store.log_values import NUMBER_MAX, Chunk
from banksman.store.memory import MemoryLog
from banksman.store.sqlite import SqliteLog
from banksman.store.transfer import export, export_to, import_session, write_new

AT = 1700000000.25

# One entry of each sort: written by Banksman; as another encoder would write it; frames that are JSON, text, and
# neither.
ENTRIES: list[Entry] = [
    entry("t-1", TURN_QUEUED, prompt='say "hé😀\\"\n', turn="a member of this name", number=1e16, nothing=None),
    ("t-1", TURN_QUEUED, b'{ "prompt": "spaced" }'),
    ("t-1", "process.started", b'{"a":1,"a":2}'),
    ("t-1", "process.started", b'{"big":123456789012345678901234567890}'),
    ("t-1", "process.started", b'{"deep":' + b"[" * 600 + b"]" * 600 + b"}"),
    ("t-1", "process.started", b"[]"),
    ("t-1", "process.started", b"\xff"),
    ("t-1", SENT, b'{"type":"user","uuid":"\\u0041"}'),
    (None, UPDATE, b'{"type" : "system"}\r'),
    (None, UPDATE, "é😀\u2028\x7f\x00".encode()),
    (None, UPDATE, b"\xff\xfe no text"),
    (None, UPDATE, b"\x00" * 1000),
    (None, UPDATE, b""),
]


async def append(
    log: MemoryLog,
    session: str,
    epoch: int,
    after: int,
    entries: list[Entry],
    at: float = AT,
    snapshot: bytes | None = None,
) -> None:
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    log.append(session, epoch, after, at, entries, answer.set_result, snapshot)
    assert await answer is None


async def written(log: MemoryLog, session: str = "s-1", entries: list[Entry] = ENTRIES) -> None:
    """Write a session with two epochs and several times."""
    epoch = await log.claim(session, name="a name", agent="claude")
    await append(log, session, epoch, 0, entries)
    await append(log, session, epoch, len(entries), entries[:1], at=AT + 0.125)
    epoch = await log.claim(session)
    await append(log, session, epoch, len(entries) + 1, entries[:2], at=AT + 1)
    log.release(session, epoch)


async def exported(log: MemoryLog, session: str = "s-1") -> list[bytes]:
    return [line async for line in export(log, session)]


async def everything(log: MemoryLog | SqliteLog, session: str) -> list[tuple[Any, ...]]:
    events: list[Event] = []
    while (page := await log.read(session, events[-1].seq if events else log.head(session).first - 1)).events:
        events += page.events
    return [(event.seq, event.epoch, event.at, event.turn, event.kind, event.data) for event in events]


async def imported(log: MemoryLog | SqliteLog, session: str, times: int = 1) -> list[tuple[Any, ...]]:
    """Return the events that came from the file. After them follows one event for each import."""
    events = await everything(log, session)
    assert [event[4] for event in events[-times:]] == [SESSION_IMPORTED] * times
    return events[:-times]


def chunks_of(path: Path) -> Iterator[Chunk]:
    """Return the chunks of the file, without other checks."""
    return transfer._chunks(export_file.ExportReader(str(path)))  # pyright: ignore[reportPrivateUsage]


def snapshot_at(seq: int) -> bytes:
    """Return a snapshot after this many events that change nothing."""
    return pasts.encode(pasts.fold(pasts.beginning(Config(dialect=CLAUDE)), [(None, UPDATE, b"")] * seq))


# -- export and import -----------------------------------------------------------------------------------------------
async def test_export_and_import_round_trip_a_session(tmp_path: Path) -> None:
    one, other = MemoryLog(), MemoryLog()
    await written(one)
    await export_to(one, "s-1", tmp_path / "file")
    count = await import_session(other, tmp_path / "file", session="s-2", name="another")
    assert count == len(ENTRIES) + 3 + 1
    assert await imported(other, "s-2") == await everything(one, "s-1")
    known = other.find("another")
    assert known is not None
    assert (known.id, known.agent, known.seq, known.owner) == ("s-2", "claude", count, None)
    # A second export has the same lines, except the header, the last line and a line that names the origin.
    assert (await exported(other, "s-2"))[1:-2] == (await exported(one))[1:-1]
    await one.close()
    await other.close()


async def test_import_moves_a_session_between_engines_and_bad_file_leaves_nothing(tmp_path: Path) -> None:
    """The engine with a disk takes the chunks in a separate thread."""
    memory, disk, again = MemoryLog(), SqliteLog(tmp_path / "store.db"), MemoryLog()
    await written(memory)
    await export_to(memory, "s-1", tmp_path / "first")
    await import_session(disk, tmp_path / "first", session="s-2", name="another")
    await export_to(disk, "another", tmp_path / "second")
    await import_session(again, tmp_path / "second", session="s-3", name=None)
    assert await imported(again, "s-3", times=2) == await everything(memory, "s-1")
    bad = tmp_path / "bad"
    bad.write_bytes((tmp_path / "first").read_bytes()[:-20])
    with pytest.raises(UsageError, match="was cut here"):
        await disk.restore("s-4", name=None, agent="", chunks=lambda: chunks_of(bad))
    assert [known.id for known in disk.sessions()] == ["s-2"]
    for log in (memory, disk, again):
        await log.close()


@given(st.lists(st.tuples(st.sampled_from([UPDATE, SENT, TURN_QUEUED]), st.binary(max_size=40)), min_size=1))
def test_export_round_trips_any_data_byte_for_byte(given: list[tuple[str, bytes]]) -> None:
    entries: list[Entry] = [(None, kind, data) for kind, data in given]

    async def run() -> None:
        one, other = MemoryLog(), MemoryLog()
        await append(one, "s-1", await one.claim("s-1", agent="claude"), 0, entries)
        lines = await exported(one)
        assert all(line.count(b"\n") == 1 for line in lines)
        # The test's folder would be shared by all examples.
        with tempfile.NamedTemporaryFile() as file:
            file.write(b"".join(lines))
            file.flush()
            await import_session(other, file.name, session="s-1", name=None)
        assert await imported(other, "s-1") == await everything(one, "s-1")
        await one.close()
        await other.close()

    asyncio.run(run())


async def test_export_file_is_readable_json_lines() -> None:
    log = MemoryLog()
    await written(log)
    header, *lines, footer = [json.loads(line) for line in await exported(log)]
    assert header["banksman"] == "session"
    assert (header["version"], header["id"], header["name"], header["agent"]) == (1, "s-1", "a name", "claude")
    assert (header["first"], header["last"]) == (1, len(lines))
    held = [next(name for name in line if name in ("body", "data64", "frame", "frame64")) for line in lines]
    frames = ["frame", "frame", "frame", "frame64", "frame64", "frame"]
    assert held == ["body", "data64", "data64", "body", "data64", "data64", "data64", *frames, "body", "body", "data64"]
    assert lines[0]["body"]["prompt"] == 'say "hé😀\\"\n'
    assert (footer["end"], footer["events"]) == (True, len(lines))
    await log.close()


async def test_export_ends_at_the_head_it_began_with() -> None:
    log = MemoryLog()
    epoch = await log.claim("s-1", agent="claude")
    await append(log, "s-1", epoch, 0, ENTRIES[:2])
    lines = export(log, "s-1")
    header = json.loads(await anext(lines))
    await append(log, "s-1", epoch, 2, ENTRIES[:5])
    rest = [json.loads(line) async for line in lines]
    assert header["last"] == 2
    assert [line.get("seq") for line in rest] == [1, 2, None]
    assert rest[-1]["events"] == 2
    await log.close()


async def test_export_of_trimmed_session_keeps_its_seqs(tmp_path: Path) -> None:
    one, other = MemoryLog(bytes_max=4000), MemoryLog()
    epoch = await one.claim("s-1", agent="claude")
    for after in range(0, 40, 2):
        await append(one, "s-1", epoch, after, [(None, UPDATE, b"x" * 300)] * 2, snapshot=snapshot_at(after + 2))
    first = one.head("s-1").first
    assert first > 1
    await export_to(one, "s-1", tmp_path / "file")
    assert await import_session(other, tmp_path / "file", session="s-1", name=None) == 42 - first
    assert await imported(other, "s-1") == await everything(one, "s-1")
    assert await other.snapshot("s-1") == await one.snapshot("s-1")
    await one.close()
    await other.close()


async def test_export_raises_when_session_is_deleted_meanwhile() -> None:
    log = MemoryLog()
    await written(log)
    lines = export(log, "s-1")
    await anext(lines)
    await log.delete("s-1")
    with pytest.raises(StoreError, match="no longer there"):
        await anext(lines)
    await log.close()


async def test_import_splits_events_of_one_time_into_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "CHUNK_EVENTS_MAX", 3)
    one, other = MemoryLog(), MemoryLog()
    await append(one, "s-1", await one.claim("s-1", agent="claude"), 0, [(None, UPDATE, b"%d" % n) for n in range(10)])
    await export_to(one, "s-1", tmp_path / "file")
    chunks = list(chunks_of(tmp_path / "file"))
    assert [(chunk.first, len(chunk.entries)) for chunk in chunks] == [(1, 3), (4, 3), (7, 3), (10, 1)]
    await import_session(other, tmp_path / "file", session="s-1", name=None)
    assert await imported(other, "s-1") == await everything(one, "s-1")
    await one.close()
    await other.close()


@pytest.mark.parametrize("session", ["nobody", "empty"])
async def test_export_refuses_missing_or_empty_session(session: str, tmp_path: Path) -> None:
    log = MemoryLog()
    await log.claim("empty", agent="claude")
    with pytest.raises(UsageError):
        await export_to(log, session, tmp_path / "file")
    assert os.listdir(tmp_path) == []
    await log.close()


# -- events before the import ----------------------------------------------------------------------------------------
async def test_import_appends_an_event_with_its_origin(tmp_path: Path) -> None:
    one, other = MemoryLog(), SqliteLog(tmp_path / "store.db")
    await written(one)
    await export_to(one, "s-1", tmp_path / "file")
    before = time.time()
    count = await import_session(other, tmp_path / "file", session="s-2", name=None)
    seq, epoch, at, turn, kind, data = (await everything(other, "s-2"))[-1]
    assert (seq, turn, kind) == (count, None, SESSION_IMPORTED)
    assert epoch == (await everything(one, "s-1"))[-1][1]
    assert before <= at <= time.time()
    assert json.loads(data) == {"origin": "s-1", "at": at}
    await one.close()
    await other.close()


@pytest.mark.parametrize("is_trimmed", [False, True])
async def test_imported_session_is_not_started_by_its_events_or_snapshot(is_trimmed: bool, tmp_path: Path) -> None:
    """Neither an event nor the snapshot starts a process. The snapshot's last event can be the last one of the file."""
    config = Config(dialect=CLAUDE)
    opened = entry(None, SESSION_OPENED, command=["/bin/sh"], resume=None, fork=False)
    started = entry(None, PROCESS_STARTED, process=1, born=["boot", 2, 3, 4, 5, 6, 7])
    past = pasts.fold(pasts.beginning(config), [opened, started])
    assert past.opened is not None
    assert past.process is not None
    one, other = MemoryLog(), MemoryLog()
    epoch = await one.claim("s-1", agent="claude")
    await append(one, "s-1", epoch, 0, [opened])
    await append(one, "s-1", epoch, 1, [started], snapshot=pasts.encode(past))
    assert await one.trim("s-1", 2 if is_trimmed else 1) == 1 + is_trimmed
    await export_to(one, "s-1", tmp_path / "file")
    await import_session(other, tmp_path / "file", session="s-1", name=None)
    kept = await other.snapshot("s-1")
    assert (kept is not None) == is_trimmed
    past = pasts.beginning(config) if kept is None else pasts.decode(kept.data, config)
    past = pasts.fold_events(past, (await other.read("s-1", past.session.head)).events)
    assert past.session.head == 3
    assert (past.opened, past.process) == (None, None)
    await one.close()
    await other.close()


async def test_import_refuses_file_replaced_between_its_two_readings(tmp_path: Path) -> None:
    """Otherwise the snapshot of the first file could cover the closing event of the second, and hide it."""
    one, other = MemoryLog(), MemoryLog()
    await append(one, "s-1", await one.claim("s-1", agent="claude"), 0, ENTRIES[8:])
    path = tmp_path / "file"
    path.write_bytes(b"".join(snapshot(5, snapshot_at(5))(await exported(one))))
    await append(one, "s-2", await one.claim("s-2", agent="claude"), 0, ENTRIES[9:])
    await export_to(one, "s-2", tmp_path / "another")
    restore = other.restore

    async def late(*args: Any, **how: Any) -> None:
        os.replace(tmp_path / "another", path)
        await restore(*args, **how)

    other.restore = late
    with pytest.raises(UsageError, match="changed while"):
        await import_session(other, path, session="s-1", name=None)
    assert other.sessions() == []
    await one.close()
    await other.close()


@pytest.mark.parametrize(
    "body", [{}, {"prompt": "all of it is missing"}, {"key": 7, "rules": [["Bash", "perhaps"]], "priority": []}]
)
async def test_imported_invalid_event_is_kept_and_raises_only_at_load(body: dict[str, Any], tmp_path: Path) -> None:
    one, other = MemoryLog(), SqliteLog(tmp_path / "store.db")
    await append(one, "s-1", await one.claim("s-1", agent="claude"), 0, [entry("t-1", TURN_QUEUED, **body)])
    await export_to(one, "s-1", tmp_path / "file")
    await import_session(other, tmp_path / "file", session="s-2", name=None)
    assert await imported(other, "s-2") == await everything(one, "s-1")
    with pytest.raises(StoreDamaged, match="s-2"):
        await recovery.load(other, "s-2", Config(dialect=CLAUDE))
    await one.close()
    await other.close()


async def test_import_redacts_secrets_in_the_origin(tmp_path: Path) -> None:
    one, other = MemoryLog(), MemoryLog()
    await append(one, "hunter2hunter2", await one.claim("hunter2hunter2", agent="claude"), 0, ENTRIES[:1])
    await export_to(one, "hunter2hunter2", tmp_path / "file")
    redactor = Redactor(["hunter2hunter2"])
    await import_session(other, tmp_path / "file", session="s-1", name=None, redactor=redactor)
    assert json.loads((await everything(other, "s-1"))[-1][5])["origin"] == REDACTED
    await one.close()
    await other.close()


async def test_imported_session_at_largest_numbers_can_be_continued_and_deleted(tmp_path: Path) -> None:
    one, other = MemoryLog(), SqliteLog(tmp_path / "store.db")
    await append(one, "s-1", await one.claim("s-1", agent="claude"), 0, ENTRIES[:1])
    header, line, footer = [json.loads(line) for line in await exported(one)]
    last = NUMBER_MAX - 1
    saved = json.loads(snapshot_at(0)) | {"head": last - 1}
    header |= {"first": last, "last": last, "snapshot_seq": last - 1, "snapshot": json.dumps(saved)}
    line |= {"seq": last, "epoch": NUMBER_MAX}
    path = tmp_path / "file"
    path.write_bytes(b"".join(hashed([export_file.line_of(value) for value in (header, line, footer)])))
    await import_session(other, path, session="s-2", name=None)
    epoch = await other.claim("s-2", agent="claude")
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    other.append("s-2", epoch, other.head("s-2").seq, AT, ENTRIES[:1], answer.set_result)
    assert await answer is None
    await other.delete("s-2")
    assert await other.claim("s-3", agent="claude") >= 1
    await one.close()
    await other.close()


# -- malformed files -------------------------------------------------------------------------------------------------
def hashed(lines: list[bytes]) -> list[bytes]:
    """Return the lines with a correct hash in the last one, so that only the intended change is wrong."""
    digest = hashlib.sha256(b"".join(lines[:-1])).hexdigest()
    return [*lines[:-1], export_file.line_of({**json.loads(lines[-1]), "sha256": digest})]


def changed(number: int, **members: Any) -> Callable[[list[bytes]], list[bytes]]:
    """Return a function that changes members of a line. The value `...` removes the member."""

    def change(lines: list[bytes]) -> list[bytes]:
        value = {**json.loads(lines[number - 1]), **members}
        value = {name: member for name, member in value.items() if member is not ...}
        lines[number - 1] = json.dumps(value).encode() + b"\n"
        return hashed(lines)

    return change


def snapshot(seq: int, data: bytes) -> Callable[[list[bytes]], list[bytes]]:
    """Return a function that puts a snapshot into the header."""
    return changed(1, snapshot_seq=seq, snapshot=data.decode())


def edited(lines: list[bytes]) -> list[bytes]:
    """Change one letter of one prompt."""
    other = base64.b64encode(ENTRIES[1][2].replace(b"spaced", b"Spaced"))
    return [line.replace(base64.b64encode(ENTRIES[1][2]), other) for line in lines]


BAD: dict[str, tuple[Callable[[list[bytes]], list[bytes]], int, str]] = {
    "empty": (lambda _: [], 1, "empty"),
    "cut in a line": (lambda lines: [*lines[:3], lines[3][:-5]], 4, "was cut here"),
    "cut after a line": (lambda lines: lines[:4], 5, "was cut here"),
    "without its last newline": (lambda lines: [*lines[:-1], lines[-1][:-1]], 17 + 1, "was cut here"),
    "without a line": (lambda lines: hashed([*lines[:4], *lines[5:]]), 5, "does not follow"),
    "a line twice": (lambda lines: hashed([*lines[:4], lines[3], *lines[4:]]), 5, "does not follow"),
    "without its last event": (lambda lines: hashed([*lines[:-2], lines[-1]]), 17, "up to"),
    "another count": (changed(18, events=3), 18, "up to"),
    "another hash": (lambda lines: [*lines[:-1], lines[-1].replace(b'256":"', b'256":"0')], 18, "hash"),
    "another byte": (edited, 18, "hash"),
    "something after it": (lambda lines: [*lines, b"\n"], 19, "follows the end"),
    "a blank line": (lambda lines: [lines[0], b"\n", *lines[1:]], 2, "not JSON"),
    "no object": (lambda lines: [lines[0], b"[]\n", *lines[1:]], 2, "not a JSON object"),
    "too deep": (lambda lines: [lines[0], b"[" * 100_000 + b"\n", *lines[1:]], 2, "not JSON"),
    "no text": (lambda lines: [lines[0], b'{"seq":"\xff"}\n', *lines[1:]], 2, "not JSON"),
    "another sort of file": (lambda lines: [b'{"name":"x"}\n', *lines[1:]], 1, "not an exported session"),
    "a bundle": (changed(1, banksman="bundle"), 1, "bug report"),
    "a newer version": (changed(1, version=2), 1, "newer"),
    "no version": (changed(1, version=...), 1, "version"),
    "no agent": (changed(1, agent=None), 1, "agent"),
    "no range": (changed(1, first=0), 1, "no events from"),
    "a range that falls": (changed(1, last=0), 1, "no events from"),
    "a range to the last of all numbers": (changed(1, last=NUMBER_MAX), 1, "no events from"),
    "no id": (changed(1, id=...), 1, "id"),
    "an id that is no text": (changed(1, id="\ud800"), 1, "id"),
    "an agent that is no text": (changed(1, agent="\ud800"), 1, "agent"),
    "an agent that is a book": (changed(1, agent="x" * 1000), 1, "agent"),
    "a beginning that nothing stands for": (changed(1, first=3), 1, "without a snapshot"),
    "a snapshot without a seq": (changed(1, snapshot="{}"), 1, "with a seq"),
    "a snapshot past the end": (snapshot(17, snapshot_at(17)), 1, "not of the events"),
    "a snapshot of other events": (snapshot(3, snapshot_at(10**6)), 1, "of the events up to 1000000"),
    "a snapshot of nobody": (snapshot(3, b'{"version":1,"head":3,"mood":"good"}'), 1, "cannot be read"),
    "a snapshot that is no JSON": (snapshot(3, b"so far"), 1, "cannot be read"),
    "a snapshot that is no text": (changed(1, snapshot_seq=3, snapshot="\ud800"), 1, "cannot be read"),
    "a snapshot too deep": (snapshot(3, b'{"version":1,"head":3,"opened":{"a":' + b"[" * 9999), 1, "cannot be read"),
    "a snapshot of a newer version": (snapshot(3, b'{"version":2}'), 1, "newer"),
    "a snapshot with an absurd number": (snapshot(3, b'{"version":1,"head":1e400}'), 1, "cannot be read"),
    "a seq that is none": (changed(2, seq="1"), 2, "numbers"),
    "a seq that is a bool": (changed(2, seq=True), 2, "numbers"),
    "an epoch past all numbers": (changed(2, epoch=1 << 63), 2, "numbers"),
    "an epoch that leaves no room": (changed(2, epoch=NUMBER_MAX + 1), 2, "numbers"),
    "an epoch that falls": (changed(2, epoch=2), 3, "falls"),
    "no time": (changed(2, at=None), 2, "time"),
    "a time that is none": (changed(2, at=float("nan")), 2, "time"),
    "a time past all numbers": (changed(2, at=10**400), 2, "time"),
    "a turn that is none": (changed(2, turn=7), 2, "turn"),
    "a turn that is no text": (changed(2, turn="\ud800"), 2, "turn"),
    "a kind that is no text": (changed(2, kind="\ud800"), 2, "kind"),
    "no kind": (changed(2, kind=""), 2, "kind"),
    "no data": (changed(2, body=...), 2, "either"),
    "two sorts of data": (changed(2, data64=""), 2, "either"),
    "a body of a frame": (changed(9, frame=..., body={}), 9, "either"),
    "a body that is none": (changed(2, body=[]), 2, "wrong type"),
    "a body that is no text": (changed(2, body={"a": "\ud800"}), 2, "cannot be"),
    "a frame that is none": (changed(9, frame=7), 9, "wrong type"),
    "a frame that is no text": (changed(9, frame="\ud800"), 9, "cannot be"),
    "base64 that is none": (changed(3, data64="e30!"), 3, "cannot be"),
}


@pytest.mark.parametrize("how", BAD)
async def test_import_refuses_malformed_file(how: str, tmp_path: Path) -> None:
    change, number, why = BAD[how]
    one, other = MemoryLog(), MemoryLog()
    await written(one)
    lines = await exported(one)
    assert len(lines) == 18
    path = tmp_path / "file"
    path.write_bytes(b"".join(change(lines)))
    with pytest.raises(UsageError, match=f"line {number}: .*{why}") as refused:
        await import_session(other, path, session="s-1", name=None)
    assert refused.value.hint
    assert refused.value.ids == {"path": str(path), "line": number}
    assert other.sessions() == []
    await one.close()
    await other.close()


async def test_import_refuses_file_cut_at_any_byte(tmp_path: Path) -> None:
    one, other = MemoryLog(), MemoryLog()
    await append(one, "s-1", await one.claim("s-1", agent="claude"), 0, ENTRIES[:2])
    whole = b"".join(await exported(one))
    path = tmp_path / "file"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(UsageError):
            await import_session(other, path, session="s-1", name=None)
    path.write_bytes(whole)
    await import_session(other, path, session="s-1", name=None)
    await one.close()
    await other.close()


async def test_export_and_import_bound_the_line_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = MemoryLog(), MemoryLog()
    await append(one, "s-1", await one.claim("s-1", agent="claude"), 0, [(None, UPDATE, b"x" * 1000)])
    lines = await exported(one)
    path = tmp_path / "file"
    path.write_bytes(b"".join(lines))
    longest = max(map(len, lines))
    monkeypatch.setattr(export_file, "LINE_BYTES_MAX", longest)
    assert await exported(one) == lines
    await import_session(other, path, session="s-1", name=None)
    monkeypatch.setattr(export_file, "LINE_BYTES_MAX", longest - 1)
    with pytest.raises(UsageError, match="event 1 is too large"):
        await exported(one)
    with pytest.raises(UsageError, match="line 2: a line has at most"):
        await import_session(other, path, session="s-2", name=None)
    await one.close()
    await other.close()


async def test_import_refuses_file_truncated_between_its_two_readings(tmp_path: Path) -> None:
    one, other = MemoryLog(), MemoryLog()
    await written(one)
    path = tmp_path / "file"
    await export_to(one, "s-1", path)
    restore = other.restore

    async def late(*args: Any, **how: Any) -> None:
        path.write_bytes(path.read_bytes()[:-10])
        await restore(*args, **how)

    other.restore = late
    with pytest.raises(UsageError, match="was cut here"):
        await import_session(other, path, session="s-1", name=None)
    assert other.sessions() == []
    await one.close()
    await other.close()


async def test_import_refuses_taken_id_or_name(tmp_path: Path) -> None:
    log = MemoryLog()
    await written(log)
    await export_to(log, "s-1", tmp_path / "file")
    with pytest.raises(UsageError, match="already"):
        await import_session(log, tmp_path / "file", session="s-1", name=None)
    with pytest.raises(NameTaken):
        await import_session(log, tmp_path / "file", session="s-2", name="a name")
    assert [known.id for known in log.sessions()] == ["s-1"]
    await log.close()


@pytest.mark.parametrize(
    "name",
    ["missing", "folder", "file/below", "pipe", "link to pipe", "socket", "/dev/zero", "/dev/tty", "a\0b", "x" * 999],
)
async def test_import_refuses_unreadable_or_irregular_file_at_once(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link to pipe").symlink_to("pipe")
    log = MemoryLog()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(tmp_path / "socket"))
        with unstuck(tmp_path / "pipe"), pytest.raises(UsageError, match="cannot read") as refused:
            await import_session(log, tmp_path / name, session="s-1", name=None)
    assert refused.value.hint
    assert log.sessions() == []
    await log.close()


@contextlib.contextmanager
def unstuck(pipe: Path) -> Generator[None]:
    """Open the pipe for writing after a while.

    A thread that waits for a writer forever would block the whole run, and no failure would be reported.
    """

    def write() -> None:
        with contextlib.suppress(OSError):  # Expected: the pipe has no reader.
            os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))

    late = threading.Timer(10, write)
    late.start()
    try:
        yield
    finally:
        assert late.is_alive(), "somebody waited for a writer"
        late.cancel()
        late.join()


# -- the file itself -------------------------------------------------------------------------------------------------
async def lines_of(*lines: bytes) -> AsyncIterator[bytes]:
    for line in lines:
        yield line


async def test_write_new_makes_a_private_file(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        await write_new(tmp_path / "file", lines_of(b"a\n", b"b\n"))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    assert (tmp_path / "file").read_bytes() == b"a\nb\n"
    assert os.listdir(tmp_path) == ["file"]


async def test_write_new_writes_many_blocks_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_file, "WRITE_BYTES", 100)
    lines = [b"%d\n" % number for number in range(1000)]
    await write_new(tmp_path / "file", lines_of(*lines))
    assert (tmp_path / "file").read_bytes() == b"".join(lines)


@pytest.mark.parametrize("sort", ["file", "folder", "dangling link"])
async def test_write_new_refuses_existing_path(sort: str, tmp_path: Path) -> None:
    path = tmp_path / "taken"
    match sort:
        case "file":
            path.write_bytes(b"mine")
        case "folder":
            path.mkdir()
        case _:
            path.symlink_to(tmp_path / "nowhere")
    lines = lines_of(b"a\n")
    with pytest.raises(UsageError, match="already"):
        await write_new(path, lines)
    assert os.listdir(tmp_path) == ["taken"]
    # The call failed before it read from its source.
    assert await anext(lines) == b"a\n"


async def test_write_new_does_not_overwrite_a_file_that_appears_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "file"

    async def lines() -> AsyncIterator[bytes]:
        yield b"a\n"
        path.write_bytes(b"mine")

    with pytest.raises(UsageError, match="already"):
        await write_new(path, lines())
    assert path.read_bytes() == b"mine"
    assert os.listdir(tmp_path) == ["file"]


async def test_write_new_leaves_nothing_when_its_source_fails(tmp_path: Path) -> None:
    async def lines() -> AsyncIterator[bytes]:
        yield b"a\n"
        assert len(os.listdir(tmp_path)) == 1
        assert not (tmp_path / "file").exists()
        raise StoreError("the disk is gone")

    with pytest.raises(StoreError, match="the disk is gone"):
        await write_new(tmp_path / "file", lines())
    assert os.listdir(tmp_path) == []


async def test_write_new_leaves_nothing_when_cancelled(tmp_path: Path) -> None:
    reached = asyncio.Event()

    async def lines() -> AsyncIterator[bytes]:
        yield b"x" * private_file.WRITE_BYTES
        reached.set()
        await asyncio.Event().wait()

    writing = asyncio.ensure_future(write_new(tmp_path / "file", lines()))
    await reached.wait()
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert os.listdir(tmp_path) == []


async def test_write_new_refuses_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write"):
        await write_new(tmp_path / "nowhere" / "file", lines_of(b"a\n"))


async def test_write_new_raises_store_full_on_full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A full disk from the kernel: /dev/full accepts no byte."""
    full = os.open("/dev/full", os.O_WRONLY)

    def opened(_: str) -> tuple[str, Any]:
        return str(tmp_path / "partial"), open(full, "wb", buffering=0)

    monkeypatch.setattr(private_file, "_opened", opened)
    with pytest.raises(StoreFull):
        await write_new(tmp_path / "file", lines_of(b"a\n"))
    assert os.listdir(tmp_path) == []
