r"""The log has the agent's output byte for byte, whatever the agent writes and however it arrives.

Every turn still gets its answer. A line is the text between two newlines, and a newline is `\n` or `\r\n`. So one `\r`
before a `\n` is not kept, and any other `\r` is. An empty line is not kept. A line of blanks is kept. The end of the
stream ends a last line without a newline. No other byte has a meaning here: not NUL, not invalid UTF-8, and not the
line separators of Unicode.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.sessions.helpers import QUICK, opened

from banksman import Event, Host, Kind, Outcome, Session
from banksman.core.session import event as kinds
from banksman.testing import checks

# Agent that answers each prompt with the bytes of the file that the prompt names. Its argument selects the writes: 0,
# as many bytes as the pipe takes; 1, byte by byte; -SEED, random sizes. It names its prompt before and after. It also
# writes its output to a file `said-NUMBER`, with a higher number for each process.
PARROT = r"""
import json, os, random, sys

folder, how = sys.argv[1], int(sys.argv[2])
chance = random.Random(how)
said = open(os.path.join(folder, f"said-{len(os.listdir(folder)):04}"), "xb", buffering=0)

def say(data):
    said.write(data)
    place = 0
    while place < len(data):
        size = {0: len(data), 1: 1}.get(how) or chance.randint(1, chance.choice((2, 20, 500, 5000)))
        place += os.write(1, data[place : place + size])

def tell(**frame):
    say(json.dumps(frame).encode() + b"\n")

for line in sys.stdin.buffer:
    frame = json.loads(line)
    if frame["type"] == "control_request":
        tell(type="control_response", response={"subtype": "success", "request_id": frame["request_id"]})
    elif frame["type"] == "user":
        ref = frame["uuid"]
        for state in ("queued", "started"):
            tell(type="command_lifecycle", command_uuid=ref, state=state)
        tell(type="system", subtype="init", session_id="s", user_message_uuids=[ref])
        with open(os.path.join(folder, frame["message"]["content"]), "rb") as file:
            say(file.read().replace(b"REF", ref.encode()))
        if os.path.exists(os.path.join(folder, "exits")):
            sys.exit(0)
        tell(type="command_lifecycle", command_uuid=ref, state="completed")
"""

HOW = {"at once": 0, "byte by byte": 1, "at random, seed 2": -2, "at random, seed 3": -3, "at random, seed 4": -4}
each_way = pytest.mark.parametrize("how", HOW.values(), ids=list(HOW))


@dataclass
class Parrot:
    session: Session
    folder: Path

    async def answer(self, data: bytes) -> tuple[str, Outcome]:
        """Make the agent write the data, with the ref of the prompt in place of REF.

        Return the turn's id and its outcome.
        """
        name = f"answer-{len(list(self.folder.iterdir()))}"
        (self.folder / name).write_bytes(data)
        turn = await self.session.ask(name)
        return turn.id, await turn.outcome()

    @property
    def said(self) -> list[bytes]:
        """Return the lines that the agent wrote, one process after the other."""
        return [line for path in sorted(self.folder.glob("said-*")) for line in lines_of(path.read_bytes())]


@asynccontextmanager
async def parroting(folder: Path, how: int = 0) -> AsyncGenerator[Parrot]:
    """Run the agent in a session. At the end the log must have everything that it wrote."""
    program = folder / "parrot.py"
    program.write_text(PARROT)
    command = [sys.executable, "-I", "-S", str(program), str(folder), str(how)]
    async with Host() as host:
        session = await host.open("claude", command=command, options=QUICK)
        parrot = Parrot(session, folder)
        yield parrot
        await session.close()
        events = [event async for event in session.follow()]
        checks.log(events)
        checks.turns(events)
        checks.readers_agree(events, [event async for event in session.events(0)])
        same(kept(events), parrot.said)


def lines_of(data: bytes) -> list[bytes]:
    parts = (part.removesuffix(b"\r") for part in data.split(b"\n"))
    return [part for part in parts if part]


def kept(events: list[Event], turn: str | None = None) -> list[bytes]:
    """Return the agent's lines in the log, of all turns or of one."""
    frames = [event.frame for event in events if event.kind == kinds.UPDATE and turn in (None, event.turn)]
    return [frame for frame in frames if frame is not None]


def same(found: list[bytes], expected: list[bytes]) -> None:
    """Compare two lists of lines. A plain assert would print megabytes."""
    for place, (line, wanted) in enumerate(zip(found, expected, strict=False)):
        if line != wanted:
            pytest.fail(f"line {place} is {len(line)} bytes {line[:80]!r}, not {len(wanted)} {wanted[:80]!r}")
    assert len(found) == len(expected)


# -- any bytes -------------------------------------------------------------------------------------------------------
def text(inside: bytes) -> bytes:
    return b'{"type":"assistant","message":{"content":[{"type":"text","text":"%s"}]}}' % inside


# The written bytes, and the lines that are kept of them.
ODD: Mapping[str, tuple[bytes, list[bytes]]] = {
    "odd spacing": (b' \t{ "type" :\t"assistant" ,  "a":[ ] } \n', [b' \t{ "type" :\t"assistant" ,  "a":[ ] } ']),
    "another order of names": (b'{"message":{},"type":"assistant"}\n', [b'{"message":{},"type":"assistant"}']),
    "a name twice": (b'{"type":"user","type":"assistant"}\n', [b'{"type":"user","type":"assistant"}']),
    "numbers": (b'{"type":"user","a":[1.50,1E2,-0,0.1e-7]}\n', [b'{"type":"user","a":[1.50,1E2,-0,0.1e-7]}']),
    "escapes": (text(rb"\u0041\/\u00E9\u00e9\"\\n") + b"\n", [text(rb"\u0041\/\u00E9\u00e9\"\\n")]),
    "a pair of surrogates": (text(rb"\ud83d\ude00") + b"\n", [text(rb"\ud83d\ude00")]),
    "lone surrogates": (text(rb"\ud83d and \ude00") + b"\n", [text(rb"\ud83d and \ude00")]),
    "CRLF": (text(b"one") + b"\r\n" + text(b"two") + b"\r\n", [text(b"one"), text(b"two")]),
    "two CR": (text(b"one") + b"\r\r\n", [text(b"one") + b"\r"]),
    "a CR inside": (b'{"type":"assistant",\r"a":1}\n\rb\n', [b'{"type":"assistant",\r"a":1}', b"\rb"]),
    "empty lines": (b"\n\r\n\n" + text(b"one") + b"\n\n", [text(b"one")]),
    "blanks": (b"  \n\t\r\n", [b"  ", b"\t"]),
    "bad UTF-8": (
        text(b"\xff\xfe \xc3( \xed\xa0\x80 \xe2\x82") + b"\n",
        [text(b"\xff\xfe \xc3( \xed\xa0\x80 \xe2\x82")],
    ),
    "NUL": (b'{"type":"assistant","a":"\x00"}\x00\n\x00\n', [b'{"type":"assistant","a":"\x00"}\x00', b"\x00"]),
    "a byte order mark": (b"\xef\xbb\xbf" + text(b"one") + b"\n", [b"\xef\xbb\xbf" + text(b"one")]),
    # A reader of text lines ends a line at each of these.
    "other ends of lines": (
        text(b"\x0b\x0c\x1c\x1d\x1e\xc2\x85\xe2\x80\xa8\xe2\x80\xa9") + b"\n",
        [text(b"\x0b\x0c\x1c\x1d\x1e\xc2\x85\xe2\x80\xa8\xe2\x80\xa9")],
    ),
    "no JSON": (b"Warning: \x1b[1mthis\x1b[0m is not for you\n", [b"Warning: \x1b[1mthis\x1b[0m is not for you"]),
}
RESULT = b'{"type":"result","result":"done","user_message_uuids":["REF"]}\n'


@each_way
async def test_agent_output_is_stored_byte_for_byte(tmp_path: Path, how: int) -> None:
    async with parroting(tmp_path, how) as parrot:
        for data, lines in ODD.values():
            turn, outcome = await parrot.answer(data + RESULT)
            assert (outcome.kind, outcome.text) == (Kind.DONE, "done")
            events = [event async for event in parrot.session.events(0)]
            # The lines of the turn, between the three frames that open it and the two that end it.
            same(kept(events, turn)[3:-2], lines)


@pytest.mark.parametrize("how", [0, -2], ids=["at once", "at random"])
async def test_line_of_megabytes_is_stored_whole(tmp_path: Path, how: int) -> None:
    # No two parts are equal, so a lost, doubled or moved part is detected.
    large = b"".join(b"%07d\xc3\xa9" % number for number in range(3_000_000 // 9))
    async with parroting(tmp_path, how) as parrot:
        _, outcome = await parrot.answer(text(large) + b"\r\n" + RESULT.replace(b"done", large))
        assert outcome.kind is Kind.DONE
        assert outcome.text == large.decode()
        assert text(large) in parrot.said


# -- any form of the boundary ----------------------------------------------------------------------------------------
class Boundary(NamedTuple):
    data: bytes
    text: str | None


BOUNDARIES = {
    "odd spacing": Boundary(b' { "user_message_uuids" : [ "REF" ] ,\t"result" : "a" , "type":"result" } \n', "a"),
    "escapes": Boundary(
        rb'{"t\u0079pe":"r\u0065sult","result":"\u0041\/\ud83d\ude00","user_message_uuid":"REF"}' + b"\n",
        "A/\U0001f600",
    ),
    "lone surrogates": Boundary(
        rb'{"result":"cut \ud83d","user_message_uuids":["REF"],"type":"result"}' + b"\n", "cut \ufffd"
    ),
    "CRLF": Boundary(RESULT.replace(b"\n", b"\r\n"), "done"),
    "bad UTF-8": Boundary(RESULT.replace(b"done", b"d\xffne"), "d\ufffdne"),
    "beside empty lines": Boundary(b"\r\n\n" + RESULT + b"\n\n", "done"),
    "after half a frame": Boundary(text(b"half")[:30] + b"\n" + RESULT, "done"),
}


@each_way
async def test_turn_is_answered_for_every_boundary_encoding(tmp_path: Path, how: int) -> None:
    async with parroting(tmp_path, how) as parrot:
        for name, boundary in BOUNDARIES.items():
            _, outcome = await parrot.answer(boundary.data)
            assert (outcome.kind, outcome.text) == (Kind.DONE, boundary.text), name


@each_way
async def test_last_line_without_newline_is_a_line(tmp_path: Path, how: int) -> None:
    (tmp_path / "exits").touch()
    async with parroting(tmp_path, how) as parrot:
        for ending in (b"", b"\r"):
            _, outcome = await parrot.answer(text(b"one") + b"\n" + RESULT.rstrip() + ending)
            assert (outcome.kind, outcome.text) == (Kind.DONE, "done")


async def test_half_a_last_line_is_stored_and_is_no_answer(tmp_path: Path) -> None:
    (tmp_path / "exits").touch()
    half = RESULT[:-10]
    async with parroting(tmp_path) as parrot:
        turn, outcome = await parrot.answer(half)
        assert outcome.kind is Kind.FAILED
        events = [event async for event in parrot.session.events(0)]
        [*_, last] = kept(events, turn)
        assert json.loads(last + RESULT[-10:])["result"] == "done"


# -- the scripted agent ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("split", ["split 1", "split 7", "split 4096"])
async def test_scripted_agent_output_is_stored_byte_for_byte(tmp_path: Path, split: str) -> None:
    spaced = '{ "type" :"assistant",\t"a":  [ 1.50 ] }'
    escaped = r'{"type":"assistant","a":"\u0041\/\ud83d\ude00 \ud83d"}'
    steps = [split, f"raw {spaced}", f"raw {escaped}", f"raw {escaped}\r", "junk not_utf8", "junk blank", "say done"]
    async with opened(tmp_path, {"prompt": steps}) as case:
        turn = await case.ask("go on")
        assert (await case.outcome(turn)).text == "done"
        lines = kept(await case.events(), turn.id)
    first = lines.index(spaced.encode())
    assert lines[first : first + 5] == [
        spaced.encode(),
        escaped.encode(),
        escaped.encode(),
        b"\xff\xfe\x80 neither text nor JSON",
        b"  ",
    ]
    assert json.loads(lines[first + 5])["message"]["content"] == [{"type": "text", "text": "done"}]
