"""A take-over brings the agent's own transcript along.

Two home folders stand for two machines.
"""

from __future__ import annotations

import asyncio
import json
import os
import stat
import zlib
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.fleet import fleet
from tests.cluster.lines import SECONDS_MAX, until
from tests.cluster.members import QUICK, Here, here, store, there

from banksman.cluster.host import transcript_copies
from banksman.cluster.host.transcript_copies import CopyResult, TranscriptHead, read, unpack, write
from banksman.core.session import event as kinds
from banksman.core.session.event import Event
from banksman.sessions import known_agents, profile
from banksman.testing import checks, fake_agent
from banksman.testing.nats_servers import Servers

HOW: dict[str, Any] = {"command": fake_agent.command(remembers_at_home=True), "options": QUICK}


@pytest.fixture
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Homes of the first host, which is another process, and of the hosts in this process."""
    monkeypatch.delenv("CLAUDE_CONFIG_DIR", raising=False)
    homes = tmp_path / "home-1", tmp_path / "home-2"
    for home in homes:
        home.mkdir()
    monkeypatch.setenv("HOME", str(homes[1]))
    return homes


async def events_of(front: Here, session: str) -> list[Event]:
    events = [event async for event in front.host.session(session).events()]
    checks.log(events)
    checks.turns(events)
    return events


def bodies(events: list[Event], kind: str) -> list[dict[str, Any]]:
    return [event.body for event in events if event.kind == kind]


def kept_by(home: Path) -> list[Path]:
    return sorted(home.glob(".claude/projects/*/*.jsonl"))


def remembered(events: list[Event]) -> list[str]:
    """Return the prompts in the agent's last answer, which lists every prompt that it knows."""
    said: list[str] = json.loads(bodies(events, kinds.TURN_ENDED)[-1]["text"])
    return [prompt.partition("\n")[0] for prompt in said]


async def copied(front: Here, session: str, turn: str) -> TranscriptHead:
    async with asyncio.timeout(SECONDS_MAX):
        while True:
            data = await front.cluster.transcripts.get(session)
            if data is not None and (head := unpack(data)[0]).turn == turn:
                return head
            await asyncio.sleep(0.02)  # No event announces the copy.


async def test_takeover_host_resumes_the_conversation_from_the_transcript_copy(
    nats_one: Servers, prefix: str, tmp_path: Path, homes: tuple[Path, Path]
) -> None:
    url = store(nats_one, prefix)
    work = tmp_path / "work.d"
    work.mkdir()
    async with here(url, "front") as front, there(url, "old", room=1, home=homes[0]) as old:
        session, _ = await front.place(work, **HOW)
        await front.ask(session, do="ask", prompt="first", key="1")
        said = await front.ask(session, do="ask", prompt="second", key="2")
        head = await copied(front, session, said["turn"])
        (file,) = kept_by(homes[0])
        assert file.stem == head.conversation
        assert kept_by(homes[1]) == []
        async with here(url, "new", room=1):
            await old.lose()
            said = await front.ask(session, do="ask", prompt="third\n@@recall", key="3")
            assert (said["host"], said["outcome"]) == ("new", "done")
        (brought,) = kept_by(homes[1])
        assert brought.relative_to(homes[1]) == file.relative_to(homes[0])
        assert stat.S_IMODE(brought.stat().st_mode) == 0o600
        events = await events_of(front, session)
        assert remembered(events) == ["first", "second", "third"]
        assert bodies(events, kinds.SESSION_CONTEXT_LOST) == []
        (restored,) = bodies(events, kinds.SESSION_CONTEXT_RESTORED)
        assert restored == {"conversation": head.conversation, "turn": head.turn, "missing": 0}


@pytest.mark.thorough
async def test_takeover_without_a_transcript_copy_logs_context_lost(
    nats_one: Servers, prefix: str, tmp_path: Path, homes: tuple[Path, Path]
) -> None:
    """Both hosts have copying switched off: the old owner stores no copy, and the new one would not use one."""
    url = store(nats_one, prefix)
    async with here(url, "front") as front, there(url, "old", room=1, home=homes[0], mirrors=False) as old:
        session, _ = await front.place(tmp_path, **HOW)
        await front.ask(session, do="ask", prompt="first", key="1")
        (file,) = kept_by(homes[0])
        async with here(url, "new", room=1, mirrors_transcripts=False):
            await old.lose()
            said = await front.ask(session, do="ask", prompt="second\n@@recall", key="2")
            assert (said["host"], said["outcome"]) == ("new", "done")
        assert await front.cluster.transcripts.get(session) is None
        events = await events_of(front, session)
        (lost,) = bodies(events, kinds.SESSION_CONTEXT_LOST)
        assert lost["conversation"] == file.stem
        assert remembered(events) == ["second"]
        assert bodies(events, kinds.SESSION_CONTEXT_RESTORED) == []


@pytest.mark.thorough
async def test_takeover_reports_turns_missing_from_the_transcript_copy(
    nats_one: Servers, prefix: str, tmp_path: Path, homes: tuple[Path, Path]
) -> None:
    """The host dies in the middle of a turn: the copy lacks that turn, and its outcome is unknown."""
    url = store(nats_one, prefix)
    async with here(url, "front") as front, there(url, "old", room=1, home=homes[0]) as old:
        session, _ = await front.place(tmp_path, **HOW)
        first = await front.ask(session, do="ask", prompt="first", key="1")
        await copied(front, session, first["turn"])
        # Put the older copy back, as if no later copy had arrived.
        data = await front.cluster.transcripts.get(session)
        assert data is not None
        await front.ask(session, do="ask", prompt="second", key="2")
        mark = tmp_path / "reached"
        second = await front.ask(session, do="put", prompt=f"third\n@@touch {mark}\n@@hang")
        await until(mark.exists)
        await old.lose()
        await front.cluster.transcripts.put(session, data)
        async with here(url, "new", room=1):
            await front.ask(session, do="ask", prompt="fourth\n@@recall", key="4")
        events = await events_of(front, session)
        assert remembered(events) == ["first", "fourth"]
        (restored,) = bodies(events, kinds.SESSION_CONTEXT_RESTORED)
        assert (restored["turn"], restored["missing"]) == (first["turn"], 2)
        unknown = [
            event.turn for event in events if event.kind == kinds.TURN_ENDED and event.body["outcome"] == "unknown"
        ]
        assert unknown == [second["turn"]]


@pytest.mark.thorough
async def test_returning_host_resumes_with_what_was_said_elsewhere(
    nats_one: Servers, prefix: str, tmp_path: Path, homes: tuple[Path, Path]
) -> None:
    """The host still has its old transcript, which has grown elsewhere since."""
    url = store(nats_one, prefix, 60)
    async with here(url, "front") as front:
        async with here(url, "one", room=1) as one:
            session, _ = await front.place(tmp_path, **HOW)
            await front.ask(session, do="ask", prompt="first", key="1")
            await one.member.drain()
        async with there(url, "two", room=1, home=homes[0]) as two:
            said = await front.ask(session, do="ask", prompt="second", key="2")
            assert said["host"] == "two"
            two.tell("drain")
            assert await two.read() == "drained"
        async with here(url, "three", room=1):
            await front.ask(session, do="ask", prompt="third\n@@recall", key="3")
        events = await events_of(front, session)
        assert remembered(events) == ["first", "second", "third"]
        assert [body["missing"] for body in bodies(events, kinds.SESSION_CONTEXT_RESTORED)] == [0, 0]
        assert len(kept_by(homes[0])) == len(kept_by(homes[1])) == 1


async def test_drain_offers_a_session_only_after_its_transcript_is_copied(
    nats_one: Servers, prefix: str, tmp_path: Path, homes: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with here(store(nats_one, prefix, 60), "one", room=1) as one:
        put, may_put = one.cluster.transcripts.put, asyncio.Event()

        async def put_late(session: str, data: bytes) -> None:
            await may_put.wait()
            await put(session, data)

        monkeypatch.setattr(one.cluster.transcripts, "put", put_late)
        session = await one.host.open("claude", cwd=str(tmp_path), **HOW)
        await (await session.ask("hello")).outcome()
        draining = asyncio.create_task(one.member.drain())
        await until(lambda: session.is_closed)
        await asyncio.wait((draining,), timeout=1.0)
        assert not draining.done()
        may_put.set()
        await draining
        assert await one.cluster.transcripts.get(session.id) is not None


async def test_transcript_copy_is_deleted_with_its_session(
    nats_one: Servers, prefix: str, tmp_path: Path, homes: tuple[Path, Path]
) -> None:
    async with here(store(nats_one, prefix), "one", room=1) as one:
        session = await one.host.open("claude", cwd=str(tmp_path), **HOW)
        turn = await session.ask("hello")
        await turn.outcome()
        await copied(one, session.id, turn.id)
        await one.host.delete(session)
        assert await one.cluster.transcripts.get(session.id) is None


async def test_transcript_that_is_too_long_is_not_copied_and_the_turn_ends_well(
    nats_one: Servers,
    prefix: str,
    tmp_path: Path,
    homes: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(transcript_copies, "FILE_BYTES_MAX", 100)
    async with here(store(nats_one, prefix), "one", room=1) as one:
        session = await one.host.open("claude", cwd=str(tmp_path), **HOW)
        for prompt in ("a" * 200, "b" * 200):
            assert (await (await session.ask(prompt)).outcome()).kind.value == "done"
        await until(lambda: [line for line in caplog.messages if "cannot copy its transcript" in line])
    # The host logs it once and not after each turn.
    assert len([line for line in caplog.messages if "cannot copy its transcript" in line]) == 1
    async with here(store(nats_one, prefix), "two") as two:
        assert await two.cluster.transcripts.get(session.id) is None


async def test_transcript_holding_a_host_secret_is_not_copied(
    nats_one: Servers, prefix: str, tmp_path: Path, homes: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    async with here(store(nats_one, prefix), "one", room=1, secrets=["hunter22"]) as one:
        session = await one.host.open("claude", cwd=str(tmp_path), **HOW)
        first = await session.ask("nothing special")
        await first.outcome()
        await copied(one, session.id, first.id)
        await (await session.ask("it is hunter22")).outcome()
        await until(lambda: [line for line in caplog.messages if "it contains a secret" in line])
        data = await one.cluster.transcripts.get(session.id)
        assert data is not None
        assert unpack(data)[0].turn == first.id


@pytest.mark.thorough
@pytest.mark.parametrize("mirrors", [True, False])
def test_transcript_moves_with_a_drain_unless_mirroring_is_off(
    nats_one: Servers,
    prefix: str,
    tmp_path: Path,
    homes: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    mirrors: bool,
) -> None:
    """The hosts and the front end run as a user starts them."""
    with fleet(tmp_path, nats_one, prefix) as many:
        monkeypatch.setenv("HOME", str(homes[0]))
        old = many.host("old", mirror_transcripts=mirrors)
        front = many.front()
        session = front.open(command=HOW["command"], cwd=str(tmp_path))
        front.outcome(session, front.ask(session, "first"))
        monkeypatch.setenv("HOME", str(homes[1]))
        many.host("new", mirror_transcripts=mirrors)
        assert old.end() == 0
        said = front.outcome(session, front.ask(session, "second\n@@recall"))["text"]
        assert ("first" in said) is mirrors
        all_kinds = [event["kind"] for event in front.get(f"/v1/sessions/{session}/events?limit=1000")["events"]]
        assert all_kinds.count(kinds.SESSION_CONTEXT_RESTORED) == int(mirrors)
        assert all_kinds.count(kinds.SESSION_CONTEXT_LOST) == int(not mirrors)


# -- the path ----------------------------------------------------------------------------------------------------------
ENV = {b"HOME": b"/home/u"}


def test_transcript_path_is_the_one_claude_uses() -> None:
    patterns = known_agents.load("claude").transcripts
    found = profile.transcript_path(patterns, cwd="/tmp/agents_ws.d/x", conversation="c-1", env=ENV)
    assert found == Path("/home/u/.claude/projects/-tmp-agents-ws-d-x/c-1.jsonl")
    moved = profile.transcript_path(patterns, cwd="/", conversation="c-1", env={**ENV, b"CLAUDE_CONFIG_DIR": b"/etc/c"})
    assert moved == Path("/etc/c/projects/-/c-1.jsonl")
    # Only Claude can build the name of a longer folder.
    assert profile.transcript_path(patterns, cwd="/" + "x" * 200, conversation="c-1", env=ENV) is None
    assert profile.transcript_path(patterns, cwd="/", conversation="c-1", env={}) is None
    assert profile.transcript_path(patterns, cwd="/", conversation="c-1", env={b"HOME": b"relative"}) is None


@pytest.mark.parametrize(
    "conversation",
    ["", "..", ".", "../x", "a/b", "/etc/passwd", "a\0b", "a\n", "a.jsonl", "x" * 129, "~", "{cwd_slug}"],
)
def test_transcript_path_is_none_for_unsafe_conversation_name(conversation: str) -> None:
    patterns = known_agents.load("claude").transcripts
    assert profile.transcript_path(patterns, cwd="/", conversation=conversation, env=ENV) is None


@pytest.mark.parametrize(
    "pattern",
    [
        "/etc/{conversation}",
        "~/x",
        "~/{cwd_slug}",
        "~/../{conversation}",
        "~/{other}/{conversation}",
        "~u/{conversation}",
    ],
)
def test_profile_refuses_transcript_pattern_that_escapes(pattern: str) -> None:
    text = f'command = ["x"]\ndialect = "claude"\ntranscripts = [{json.dumps(pattern)}]\n'
    with pytest.raises(known_agents.UsageError, match="transcripts cannot hold"):
        known_agents.parse_text(text, name="x", said_as="x")


# -- the file ----------------------------------------------------------------------------------------------------------
def head_of(text: bytes, mtime_ns: int = 5) -> TranscriptHead:
    return TranscriptHead(1, "c", 1, "t", len(text), mtime_ns)


def test_transcript_write_replaces_only_an_older_copy(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "c.jsonl"
    assert write(path, head_of(b"1\n"), b"1\n") is CopyResult.WRITTEN
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path, path.parent, path.parent.parent)] == [
        0o600,
        0o700,
        0o700,
    ]
    assert path.stat().st_mtime_ns == 5
    assert write(path, head_of(b"1\n", 9), b"1\n") is CopyResult.SAME
    # The copy extends the existing file, whatever the two clocks say.
    assert write(path, head_of(b"1\n2\n", 1), b"1\n2\n") is CopyResult.WRITTEN
    # The existing file extends the copy.
    assert write(path, head_of(b"1\n", 9), b"1\n") is CopyResult.KEPT
    # The two differ: the newer file is kept.
    os.utime(path, ns=(5, 5))
    assert write(path, head_of(b"3\n", 4), b"3\n") is CopyResult.KEPT
    assert write(path, head_of(b"3\n", 6), b"3\n") is CopyResult.WRITTEN
    assert path.read_bytes() == b"3\n"
    assert os.listdir(path.parent) == ["c.jsonl"]


def test_transcript_copy_refuses_symlink_and_pipe(tmp_path: Path) -> None:
    aim, link, pipe = tmp_path / "aim", tmp_path / "link.jsonl", tmp_path / "pipe.jsonl"
    aim.write_bytes(b"mine\n")
    link.symlink_to(aim)
    os.mkfifo(pipe)
    for path in (link, pipe):
        with pytest.raises(OSError, match=path.name):
            read(path)
        with pytest.raises(OSError, match=path.name):
            write(path, head_of(b"1\n"), b"1\n")
    assert aim.read_bytes() == b"mine\n"


def test_transcript_copy_leaves_out_a_half_line(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b"')
    found = read(path)
    assert found is not None
    assert found.text == b'{"a": 1}\n'
    assert read(path, found.seen) is None


PACKED = zlib.compress(b"1\n")


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\n", b"{}\n", b"[]\n", b"[1]\n", b"\xff\n"),
        *(b'[2, "c", 1, "t", 2, 0]\n' + PACKED, b'[1, "c", "1", "t", 2, 0]\n' + PACKED),
        *(b'[1, "c", -1, "t", 2, 0]\n' + PACKED, b'[1, "c", 1, "t", 2, -1]\n' + PACKED),
        b'[1, "c", 1, "t", 99999999999, 0]\n' + PACKED,
        b'[1, "c", 1, "t", 5, 0]\nnot packed',
        b'[1, "c", 1, "t", 2, 0]\n' + zlib.compress(b"1\n2\n"),
        b'[1, "c", 1, "t", 2, 0]\n' + PACKED[:-1],
    ],
)
def test_transcript_unpack_refuses_malformed_copy(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        unpack(data)
    assert unpack(b'[1, "c", 1, "t", 2, 0]\n' + PACKED) == (TranscriptHead(1, "c", 1, "t", 2, 0), b"1\n")
