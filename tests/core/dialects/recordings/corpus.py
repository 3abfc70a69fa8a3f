"""What Claude Code 2.1.325 was recorded to say, and what it was told: the recordings beside this file, read.

A recording has one JSON object a line: `t`, seconds since the start; `d`, what it is; and `v`, its value.

    argv    the command
    in      a frame to the agent
    out     a frame from it
    err     what it wrote to stderr
    ev      what was seen or done besides: a signal, the end of a stream, an exit
    tree    the processes there were

They are whole. Only the paths were changed, each everywhere alike, to ones below /srv; the program's own is left out.
A frame was decoded when it was recorded, so how its bytes were spaced and escaped is not known any more: `line` writes
it as the agent most likely had.

`golden/` has what each frame projects to. It is written by `python -m tests.core.dialects.recordings.regolden`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob("claude-*.jsonl"))


class Entry(NamedTuple):
    at: float
    kind: str
    value: Any


def entries(name: str) -> list[Entry]:
    with (FOLDER / f"{name}.jsonl").open(encoding="utf-8") as file:
        return [Entry(entry["t"], entry["d"], entry["v"]) for entry in map(json.loads, file)]


def frames(name: str, kind: str) -> list[dict[str, Any]]:
    return [entry.value for entry in entries(name) if entry.kind == kind]


def line(frame: Any) -> bytes:
    """One compact line without its newline, as JavaScript writes it."""
    return json.dumps(frame, separators=(",", ":"), ensure_ascii=False).encode()


def lines(name: str) -> list[bytes]:
    """Everything the agent said."""
    return [line(frame) for frame in frames(name, "out")]


# -- how the bytes may come ------------------------------------------------------------------------------------------
Cut = Callable[[bytes], Iterator[bytes]]


def whole(data: bytes) -> Iterator[bytes]:
    yield data


def byte_by_byte(data: bytes) -> Iterator[bytes]:
    for place in range(len(data)):
        yield data[place : place + 1]


def at_random(seed: int) -> Cut:
    """Pieces of a few bytes and of many lines, mixed; the same ones for the same seed and length."""

    def cut(data: bytes) -> Iterator[bytes]:
        chance = random.Random(seed)
        place = 0
        while place < len(data):
            size = chance.randint(1, chance.choice((2, 20, 500, 5_000, 50_000)))
            yield data[place : place + size]
            place += size

    return cut


CUTS: dict[str, Cut] = {
    "byte by byte": byte_by_byte,
    **{f"at random, seed {seed}": at_random(seed) for seed in range(8)},
}


# -- golden files ----------------------------------------------------------------------------------------------------
def golden(name: str) -> Path:
    return FOLDER / "golden" / f"{name}.jsonl"


def projected(name: str, project: Callable[[bytes], list[dict[str, Any]]]) -> str:
    """What a golden file holds: a line for each frame that projects to something. Frames count from 0."""
    found = ((index, project(said)) for index, said in enumerate(lines(name)))
    kept = [{"frame": index, "updates": updates} for index, updates in found if updates]
    return "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in kept)
