"""Archive for a bug report: its parts, their cleaning and limits, and a log that changes meanwhile."""

from __future__ import annotations

import asyncio
import io
import json
import threading
import zipfile
from collections.abc import Mapping
from typing import Any

import pytest
from tests.store.test_bundle import KEYS, said, streamed

from banksman.core.session.event import TURN_QUEUED, Entry, entry
from banksman.errors import MachineError, StoreError, UsageError
from banksman.store import bug_report
from banksman.store.bug_report import Part, archive
from banksman.store.bundle import scrubber
from banksman.store.memory import MemoryLog
from banksman.store.transfer import THREAD_BYTES_MIN


async def log_of(*entries: Entry) -> MemoryLog:
    log = MemoryLog()
    epoch = await log.claim("s-1", name="a name", agent="claude")
    for place, each in enumerate(entries):
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        log.append("s-1", epoch, place, 0.0, [each], answer.set_result)
        assert await answer is None
    return log


async def made(
    log: MemoryLog, parts: Mapping[str, Part] | None = None, *, text: bool = True, secrets: tuple[str, ...] = ()
) -> dict[str, bytes]:
    pieces = [piece async for piece in archive(log, "s-1", parts or {}, scrub=scrubber(secrets), text=text)]
    with zipfile.ZipFile(io.BytesIO(b"".join(pieces))) as file:
        assert file.testzip() is None
        return {name: file.read(name) for name in file.namelist()}


def part(data: bytes) -> Part:
    async def make() -> bytes:
        return data

    return make


def listed(found: Mapping[str, bytes]) -> dict[str, Any]:
    return {each["name"]: each for each in json.loads(found["manifest.json"])["parts"]}


async def test_archive_has_the_session_its_parts_and_a_manifest() -> None:
    log = await log_of(entry("t-1", TURN_QUEUED, prompt="a prompt"), said("an answer"))
    found = await made(log, {"why.json": part(b'{"phase":"idle"}'), "stderr.txt": part(b"oh")})
    lines = [json.loads(line) for line in found["session.ndjson"].splitlines()]
    assert lines[0]["banksman"] == "bundle"
    assert "an answer" in lines[2]["frame"]
    assert (found["why.json"], found["stderr.txt"]) == (b'{"phase":"idle"}', b"oh")
    manifest = json.loads(found["manifest.json"])
    assert (manifest["session"], manifest["agent"], manifest["text"]) == ("s-1", "claude", True)
    assert {name: each["bytes"] for name, each in listed(found).items()} == {
        name: len(data) for name, data in found.items() if name != "manifest.json"
    }
    assert all(each["complete"] for each in listed(found).values())


@pytest.mark.parametrize("name", ["why.json", "stderr.txt"])
async def test_every_part_loses_secrets_and_keys(name: str) -> None:
    words = ["hunter-two", *KEYS.values(), "ann@example.org"]
    log = await log_of(said("hello"))
    data = json.dumps({"last": words}).encode() if name.endswith("json") else "\n".join(words).encode()
    found = (await made(log, {name: part(data)}, secrets=("hunter-two",)))[name].decode()
    assert not [word for word in words if word in found]


async def test_without_text_json_is_masked_and_other_parts_are_left_out() -> None:
    log = await log_of(said("a private answer"))
    why = b'{"phase":"running","holder_prompt":"a private prompt","queue":[{"turn":"t-2","prompt":"more"}]}'
    found = await made(log, {"why.json": part(why), "stderr.txt": part(b"private")}, text=False)
    assert sorted(found) == ["manifest.json", "session.ndjson", "why.json"]
    assert b"private" not in b"".join(found.values())
    told = json.loads(found["why.json"])
    assert (told["phase"], told["queue"][0]["turn"], told["queue"][0]["prompt"]) == ("running", "t-2", "xxxx")


@pytest.mark.parametrize("error", [MachineError, RuntimeError])
async def test_part_that_fails_is_listed_with_its_error(error: type[Exception]) -> None:
    async def fail() -> bytes:
        raise error("no room for hunter-two")

    found = await made(await log_of(said("hello")), {"doctor.json": fail}, secrets=("hunter-two",))
    assert "doctor.json" not in found
    told = listed(found)["doctor.json"]
    assert not told["complete"]
    assert "no room for" in told["error"]
    assert "hunter" not in told["error"]


async def test_limits_keep_the_newest_events_and_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    log = await log_of(*(said(f"answer {number}") for number in range(5)))
    monkeypatch.setattr(bug_report, "EVENTS_MAX", 2)
    found = await made(log, {"big.txt": part(b"x" * 100)})
    lines = [json.loads(line) for line in found["session.ndjson"].splitlines()]
    assert [line["seq"] for line in lines[1:]] == [4, 5]
    assert not listed(found)["session.ndjson"]["complete"]
    monkeypatch.setattr(bug_report, "PART_BYTES_MAX", 10)
    monkeypatch.setattr(bug_report, "SESSION_BYTES_MAX", 400)
    found = await made(log, {"big.txt": part(b"x" * 100)})
    assert found["big.txt"] == b"x" * 10
    assert not listed(found)["big.txt"]["complete"]
    assert len(found["session.ndjson"]) <= 400


async def test_pieces_are_sent_while_the_log_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bug_report, "PIECE_BYTES", 1000)
    log = await log_of(*(said(f"answer {number}") for number in range(50)))
    pieces = archive(log, "s-1", {}, scrub=scrubber(), text=True)
    sizes = [len(piece) async for piece in pieces]
    assert len(sizes) > 3
    # A client that goes away in the middle leaves nothing behind.
    begun = archive(log, "s-1", {}, scrub=scrubber(), text=True)
    await anext(begun)
    await begun.aclose()


async def test_log_that_is_deleted_meanwhile_ends_the_part_with_an_error() -> None:
    log = await log_of(*(said("x" * 1000) for _ in range(3)))
    read = log.read

    async def forgetful(session: str, after: int, *rest: Any, **more: Any) -> Any:
        page = await read(session, after, *rest, **more)
        return page._replace(events=page.events[:1]) if after == 0 else page._replace(events=())

    log.read = forgetful
    told = listed(await made(log))["session.ndjson"]
    assert not told["complete"]
    assert "no longer there" in told["error"]


async def test_archive_of_a_missing_session_is_refused() -> None:
    with pytest.raises(UsageError, match="no session"):
        await made(MemoryLog())


@pytest.mark.parametrize(
    "entries",
    [
        [said("x" * 100_000)],
        [streamed("y" * 1000) for _ in range(40)],
        [(None, "session.settings", b'{"by":"x","reason":"%s"}' % (b"z" * 100_000))],
    ],
    ids=["large frame", "stream of small pieces", "large event"],
)
async def test_long_texts_are_cleaned_outside_of_the_event_loop(entries: list[Entry]) -> None:
    clean = scrubber()

    def scrub(text: str) -> str:
        assert len(text) < THREAD_BYTES_MIN or threading.current_thread() is not threading.main_thread()
        return clean(text)

    log = await log_of(*entries)
    parts = {"stderr.txt": part(b"s" * 100_000), "why.json": part(b'{"a":"%s"}' % (b"s" * 100_000))}
    pieces = archive(log, "s-1", parts, scrub=scrub, text=True)
    assert b"".join([piece async for piece in pieces]).startswith(b"PK")


async def test_error_of_a_part_that_ends_early_is_cleaned() -> None:
    log = await log_of(*(said("hello") for _ in range(3)))
    read = log.read

    async def fail(session: str, after: int, *rest: Any, **more: Any) -> Any:
        page = await read(session, after, *rest, **more)
        if after == 1:
            raise StoreError("cannot read /home/somebody/store.db with hunter-two")
        return page._replace(events=page.events[:1])

    log.read = fail
    told = listed(await made(log, secrets=("hunter-two",)))["session.ndjson"]
    assert not told["complete"]
    assert told["error"].startswith("cannot read /home/[user]/store.db with [redacted]")
