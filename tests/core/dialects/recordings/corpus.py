"""Read the recordings of Claude Code 2.1.325: its output and its input.

A recording has one JSON object per line: `t`, seconds since the start; `d`, the kind; and `v`, the value.

    argv    the command
    in      a frame to the agent
    out     a frame from the agent
    err     output on stderr
    ev      another observation or action: a signal, the end of a stream, an exit
    tree    the processes at that moment

The recordings are complete. Only the paths are replaced, consistently, by paths below /srv; the program's own path is
left out. The recorder decoded each frame, so the original spacing and escapes are lost. `line` writes a frame as the
agent most likely did.

`golden/` holds the projection of each frame. `python -m tests.core.dialects.recordings.regolden` writes it.
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
    """Encode a frame as one compact line without a newline, as JavaScript does."""
    return json.dumps(frame, separators=(",", ":"), ensure_ascii=False).encode()


def lines(name: str) -> list[bytes]:
    """Every line of the agent."""
    return [line(frame) for frame in frames(name, "out")]


# -- cuts of the byte stream -----------------------------------------------------------------------------------------
Cut = Callable[[bytes], Iterator[bytes]]


def whole(data: bytes) -> Iterator[bytes]:
    yield data


def byte_by_byte(data: bytes) -> Iterator[bytes]:
    for place in range(len(data)):
        yield data[place : place + 1]


def at_random(seed: int) -> Cut:
    """Mix pieces of a few bytes and of many lines; the same seed and length give the same pieces."""

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
    """Content of a golden file: a line for each frame with an update. Frames count from 0."""
    found = ((index, project(said)) for index, said in enumerate(lines(name)))
    kept = [{"frame": index, "updates": updates} for index, updates in found if updates]
    return "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in kept)
