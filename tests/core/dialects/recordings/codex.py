"""Play recordings of Codex 0.166.0 to the client side of the Codex dialect.

corpus.py describes the recordings beside this file. The player makes two adjustments:

- The recorder numbered its requests in a different way. The player matches each recorded request with the latest
  request of the same purpose from the client side, and puts that id into the agent's reply. If the client side has no
  such request, the reply gets an id that the client side never uses.
- A recorded answer to a question becomes the corresponding decision.

`golden_codex/` holds the projection of each frame. `python -m tests.core.dialects.recordings.codex` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.core.dialects.recordings import corpus

from banksman.core.dialects.codex import CODEX
from banksman.core.dialects.dialect import Decision, ProtocolOutput, ProtocolState, Setup
from banksman.core.dialects.meaning import Meaning, NeedsConversation, Requested

NAMES = sorted(path.stem for path in corpus.FOLDER.glob("codex-*.jsonl"))
# An id that the client side never uses.
UNUSED = 9_000
# Methods that match a recorded request where the two sides use different methods.
_SAME = {"turn/steer": "turn/start", "thread/resume": "thread/start", "thread/fork": "thread/start"}


@dataclass
class Play:
    """The client side of a recording: the frames that it has sent, and the meanings of the agent's lines."""

    protocol: ProtocolState
    write: Callable[[Any], bytes] = corpus.line
    frames: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    meanings: list[Meaning] = field(default_factory=list[Meaning])
    ids: dict[int, int] = field(default_factory=dict[int, int])
    prompts: int = 0
    stops: int = 0

    def say(self, output: ProtocolOutput) -> None:
        self.protocol = output.protocol
        for frame in output.frames:
            assert frame.index(b"\n") == len(frame) - 1
            self.frames.append(json.loads(frame))
        self.meanings += output.meanings

    def told(self, frame: dict[str, Any]) -> None:
        """Let the client side do what the recorder did in this frame."""
        match frame:
            case {"method": "initialize"}:
                self.say(self.protocol.handshake("handshake"))
            case {"method": "turn/start" | "turn/steer", "params": {"input": [{"text": text}]}}:
                self.prompts += 1
                self.say(self.protocol.prompt(f"ref-{self.prompts}", text))
            case {"method": "turn/interrupt"}:
                self.stops += 1
                self.say(self.protocol.interrupt(f"stop-{self.stops}"))
            case {"result": {"decision": decision}}:
                asked = next(each for each in reversed(self.meanings) if isinstance(each, Requested))
                self.say(self.protocol.answer(asked, _decision(decision)))
            case _:
                pass  # The client side sends these frames in reaction to the replies.
        if "method" in frame and "id" in frame:
            self._match(frame)

    def _match(self, frame: dict[str, Any]) -> None:
        wanted = _SAME.get(frame["method"], frame["method"])
        free = [
            sent["id"]
            for sent in self.frames
            if "id" in sent
            and _SAME.get(sent.get("method", ""), sent.get("method")) == wanted
            and sent["id"] not in self.ids.values()
        ]
        if free:
            self.ids[frame["id"]] = free[0]

    def renumbered(self, frame: dict[str, Any]) -> bytes:
        if "method" not in frame and "id" in frame:
            frame = frame | {"id": self.ids.get(frame["id"], UNUSED + frame["id"])}
        return self.write(frame)

    def hear(self, line: bytes) -> None:
        meaning = CODEX.read(line)
        if isinstance(meaning, NeedsConversation):
            self.say(self.protocol.hear(meaning))
        elif meaning is not None:
            self.meanings.append(meaning)


def _decision(word: str) -> Decision:
    return Decision(allows=word == "accept", interrupts=word == "cancel")


def setup(name: str) -> Setup:
    """The recorder's setup, with the conversation that it resumed, if any."""
    resumed = [frame["params"]["threadId"] for frame in told(name) if frame.get("method") == "thread/resume"]
    return Setup(cwd="/srv/ws", conversation=resumed[0] if resumed else None)


def told(name: str) -> list[dict[str, Any]]:
    return corpus.frames(name, "in")


def play(name: str, write: Callable[[Any], bytes] = corpus.line) -> Play:
    playing = Play(CODEX.begin(setup(name)), write)
    for entry in corpus.entries(name):
        if entry.kind == "in":
            playing.told(entry.value)
        elif entry.kind == "out":
            playing.hear(playing.renumbered(entry.value))
    return playing


def golden(name: str) -> Path:
    return corpus.FOLDER / "golden_codex" / f"{name}.jsonl"


def main() -> None:
    for name in NAMES:
        path = golden(name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(corpus.projected(name, CODEX.project), encoding="utf-8")
        print(path.name)


if __name__ == "__main__":
    main()
