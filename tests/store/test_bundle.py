"""Bundle of a session for a bug report: it contains the frames and events, without secrets and personal data."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import pwd
import stat
import time
from pathlib import Path
from typing import Any

import pytest
from tests.thorough import one_in

from banksman.core.session.event import PROCESS_EXITED, SENT, TURN_ENDED, TURN_QUEUED, UPDATE, Entry, entry
from banksman.errors import UsageError
from banksman.store.bundle import RUN_FRAMES_MAX, bundle, scrubber
from banksman.store.memory import MemoryLog

AT = 1700000000.0
HOME = pwd.getpwuid(os.getuid()).pw_dir
# The strings are joined here, so that a scan of the repository finds no key.
KEYS = {
    "of a model": "sk-" + "ant-api03-Zx8QwP0aJkLm",
    "of GitHub": "gh" + "p_0123456789abcdefABCDEF",
    "of GitHub, fine-grained": "github" + "_pat_0123456789abcdefABCDEF",
    "of Slack": "xo" + "xb-123456789-abcdef",
    "of AWS": "AK" + "IA0123456789ABCDEF",
    "a named token": "bm" + "t_" + "Zx8-Qw_0" * 5,
    "a page token": "bm" + "p_" + "0123456789abcd-_.1790000000." + "Zx8" + "-Qw_0Zx8" * 5,
    "a JWT": "ey" + "JhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
    "a private key": "-----BEGIN RSA PRIVATE" + " KEY-----\nMIIEow+/=\nabc\n-----END RSA PRIVATE KEY-----",
}


def frame(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def said(text: str) -> Entry:
    content = [{"type": "text", "text": text}]
    return (
        "t-1",
        UPDATE,
        frame({"type": "assistant", "message": {"role": "assistant", "content": content}, "uuid": "u"}),
    )


def streamed(text: str, member: str = "text") -> Entry:
    delta = {"type": f"{member}_delta", member: text}
    event = {"type": "content_block_delta", "index": 0, "delta": delta}
    return "t-1", UPDATE, frame({"type": "stream_event", "event": event, "uuid": "u"})


async def bundled(path: Path, *entries: Entry, seconds: float = 0.0, **how: Any) -> list[dict[str, Any]]:
    """Bundle a session with these entries, `seconds` apart, and return the lines. The first line is the header."""
    log = MemoryLog()
    epoch = await log.claim("s-1", name="a name", agent="claude")
    for place, each in enumerate(entries):
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        log.append("s-1", epoch, place, AT + place * seconds, [each], answer.set_result)
        assert await answer is None
    await bundle(log, "a name", path, **how)
    await log.close()
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- contents --------------------------------------------------------------------------------------------------------
async def test_bundle_holds_frames_of_both_directions_and_events(tmp_path: Path) -> None:
    path = tmp_path / "bundle"
    sent = frame({"type": "user", "message": {"role": "user", "content": "a prompt"}, "uuid": "u"})
    entries: list[Entry] = [
        entry("t-1", TURN_QUEUED, prompt="a prompt", key="a key", priority=10),
        ("t-1", SENT, sent),
        said("an answer"),
        (None, UPDATE, b"\xff no text"),
        entry("t-1", TURN_ENDED, outcome="failed", by="exit", text="an answer", error="it said: an answer"),
        entry(None, PROCESS_EXITED, process=1, code=3, signal=None),
    ]
    header, *lines = await bundled(path, *entries, seconds=0.5)
    assert header["banksman"] == "bundle"
    assert (header["version"], header["agent"], header["text"]) == (1, "claude", True)
    assert header["python"] == platform.python_version()
    assert header["banksman_version"]
    assert os.uname().sysname in header["platform"]
    assert os.uname().nodename not in header["platform"].split()
    assert [line["at"] for line in lines] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert [(line["seq"], line["turn"], line["kind"]) for line in lines] == [
        (place, turn, kind) for place, (turn, kind, _) in enumerate(entries, 1)
    ]
    assert [line.get("frame", "").encode() for line in lines[1:3]] == [sent, entries[2][2]]
    assert "frame64" in lines[3]
    assert [line.get("body") for line in lines] == [
        *[None] * 4,
        {"outcome": "failed", "by": "exit"},
        {"process": 1, "code": 3, "signal": None},
    ]


async def test_bundle_file_is_new_and_private(tmp_path: Path) -> None:
    await bundled(tmp_path / "bundle", said("x"))
    assert stat.S_IMODE((tmp_path / "bundle").stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["bundle"]
    with pytest.raises(UsageError, match="already"):
        await bundled(tmp_path / "bundle", said("x"))


async def test_bundle_with_too_short_secret_makes_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        await bundled(tmp_path / "bundle", said("x"), secrets=["short"])
    assert os.listdir(tmp_path) == []


# -- redaction -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("around", ["{}", "key={}, more", '"{}"', "\\n{}", "({})"])
def test_scrubber_redacts_what_looks_like_a_key(key: str, around: str) -> None:
    scrubbed = scrubber()(around.format(KEYS[key]))
    assert scrubbed == around.format("[redacted]")


@pytest.mark.parametrize(
    ("text", "scrubbed"),
    [
        ("Authorization: Bearer abc.def-123", "Authorization: Bearer [redacted]"),
        ("authorization: basic dXNlcjpwYXNz", "authorization: basic [redacted]"),
        ("export MY_API_KEY=abcdef; x", "export MY_API_KEY=[redacted]; x"),
        ("https://me:pass-word@host/x", "https://me:[redacted]@host/x"),
        ("to bob.b+x@mail.example.org, now", "to [email], now"),
        ("/home/somebody/x and /Users/else/y", "/home/[user]/x and /Users/[user]/y"),
        ("C:\\Users\\somebody\\x", "C:\\Users\\[user]\\x"),
    ],
)
def test_scrubber_keeps_the_word_before_a_secret(text: str, scrubbed: str) -> None:
    assert scrubber()(text) == scrubbed


@pytest.mark.parametrize(
    "text",
    [
        "a basic understanding of tokens",
        "npm i foo@1.2.3 @scope/name",
        "sk-short",
        "risk-averse-and-very-long-word",
        "14a394fb-a313-4f13-8efb-83148cf8ecd6",
        "toolu_0123456789abcdefABCDEF",
        "/srv/project/file.py --root x",
        "max_tokens=100000",
    ],
)
def test_scrubber_keeps_ordinary_text(text: str) -> None:
    assert scrubber()(text) == text


def test_scrubber_replaces_home_folder_and_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/data/people/zaphod")
    monkeypatch.setenv("USER", "zaphod")
    scrub = scrubber()
    assert scrub("/data/people/zaphod/x, /data/people/zaphod") == "[home]/x, [home]"
    assert scrub("/x/projects/-data-people-zaphod-app") == "/x/projects/-[home]-app"
    assert scrub("/mnt/zaphod/x /mnt/zaphodia") == "/mnt/[user]/x /mnt/zaphodia"
    assert scrub(f"{HOME}/x") == "[home]/x"


async def test_bundle_redacts_secrets_in_frames_of_both_directions(tmp_path: Path) -> None:
    secret = 'my "secret" phrase'
    key = KEYS["of a model"]
    asked = frame({"type": "user", "message": {"content": f"use {secret} and {key}"}, key: 1})
    _, sent, update = await bundled(tmp_path / "bundle", ("t-1", SENT, asked), said(f"ok: {secret}"), secrets=[secret])
    assert json.loads(sent["frame"])["message"]["content"] == "use [redacted] and [redacted]"
    assert "[redacted]" in json.loads(sent["frame"])
    assert json.loads(update["frame"])["message"]["content"][0]["text"] == "ok: [redacted]"
    assert "secret" not in (tmp_path / "bundle").read_text()


@pytest.mark.parametrize("member", ["text", "thinking", "partial_json"])
async def test_bundle_redacts_secret_streamed_in_pieces(member: str, tmp_path: Path) -> None:
    pieces = ["so: ", "my-se", "cret-w", "ord", " it is"]
    entries = [said("before"), *(streamed(piece, member) for piece in pieces), said("after")]
    _, *lines = await bundled(tmp_path / "bundle", *entries, secrets=["my-secret-word"])
    frames = [json.loads(line["frame"]) for line in lines]
    shown = [each["event"]["delta"][member] for each in frames[1:-1]]
    assert shown == ["x" * len(piece) for piece in pieces]
    assert frames[1]["event"]["delta"]["type"] == f"{member}_delta"
    assert [each["message"]["content"][0]["text"] for each in (frames[0], frames[-1])] == ["before", "after"]


async def test_bundle_keeps_stream_pieces_without_a_secret_byte_for_byte(tmp_path: Path) -> None:
    entries = [streamed(f"piece {number} ") for number in range(5)]
    _, *lines = await bundled(tmp_path / "bundle", *entries, secrets=["my-secret-word"])
    assert [line["frame"].encode() for line in lines] == [data for _, _, data in entries]


async def test_bundle_scans_a_long_stream_in_parts(tmp_path: Path, monkeypatch: Any) -> None:
    assert RUN_FRAMES_MAX > 1000
    monkeypatch.setattr("banksman.store.bundle.RUN_FRAMES_MAX", 3)
    pieces = ["a", "b", "c", "my-secret", "-word", "d", "e"]
    _, *lines = await bundled(tmp_path / "bundle", *map(streamed, pieces), secrets=["my-secret-word"])
    shown = [json.loads(line["frame"])["event"]["delta"]["text"] for line in lines]
    assert shown == ["a", "b", "c", "x" * 9, "x" * 5, "x", "e"]


# -- without text ----------------------------------------------------------------------------------------------------
async def test_bundle_without_text_keeps_only_the_structure(tmp_path: Path) -> None:
    private = "private words"
    tool = {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": private, "name": private}}
    asked = {"subtype": "can_use_tool", "tool_name": "Bash", "input": {"type": private}, "description": private}
    hooked = {"subtype": "hook_callback", "callback_id": "h", "input": {"tool_name": "Bash", "cwd": private}}
    values: list[dict[str, Any]] = [
        {"type": "user", "message": {"role": "user", "content": private}, "uuid": "u"},
        {"type": "assistant", "message": {"content": [tool, {"type": "text", "text": private}]}, "unknown": [private]},
        {"type": "control_request", "request_id": "q", "request": asked},
        {"type": "control_request", "request_id": "r", "request": hooked},
        {"type": "result", "subtype": "success", "result": private, "user_message_uuids": ["u"], "is_error": False},
    ]
    entries: list[Entry] = [("t-1", UPDATE, frame(value)) for value in values]
    path = tmp_path / "bundle"
    header, *lines = await bundled(path, *entries, streamed(private), ("t-1", UPDATE, private.encode()), text=False)
    assert header["text"] is False
    assert "private" not in path.read_text()
    masked = "x" * len(private)
    expected = [json.loads(frame(value).replace(private.encode(), masked.encode())) for value in values]
    assert [json.loads(line["frame"]) for line in lines[:5]] == expected
    assert json.loads(lines[5]["frame"])["event"]["delta"] == {"type": "text_delta", "text": masked}
    assert lines[6]["frame"] == masked


async def test_bundle_masks_unreadable_frames_whole(tmp_path: Path) -> None:
    deep = b'{"a":' * 20_000 + b'"private"' + b"}" * 20_000
    half = b'{"type":"user","a":"\\ud800 private","uuid":"\\ud800"}'
    _, *lines = await bundled(tmp_path / "bundle", ("t", UPDATE, deep), ("t", UPDATE, half), text=False)
    assert lines[0]["frame"] == "x" * len(deep)
    assert json.loads(lines[1]["frame"]) == {"type": "user", "a": "x" * 9, "uuid": "\ud800"}


async def test_bundle_masks_frames_nested_too_deep_to_walk(tmp_path: Path) -> None:
    """The recursion limit for JSON differs between the versions of Python."""
    frames: list[Entry] = [
        ("t", UPDATE, b'{"a":' * depth + b'"private"' + b"}" * depth) for depth in range(100, 1200, 50)
    ]
    await bundled(tmp_path / "bundle", *frames, text=False)
    assert "private" not in (tmp_path / "bundle").read_text()


# -- cost ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "unit", one_in(10, ["a", "sk-", "eyJa.", "a@", "A_", "://", "/home/", "-----BEGIN ", "bearer ", "\\n"])
)
def test_scrubber_takes_linear_time(unit: str) -> None:
    """Four times the text takes far less than sixteen times the time: no pattern restarts at each place of a word."""
    scrub = scrubber(["my-secret-word"])

    def seconds(size: int) -> float:
        text = f"@ {unit * (size // len(unit))}"
        best = 1e9
        for _ in range(3):
            began = time.process_time()
            scrub(text)
            best = min(best, time.process_time() - began)
        return best

    assert seconds(200_000) < max(10 * seconds(50_000), 0.05)
