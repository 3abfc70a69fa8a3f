"""Play twelve recordings of nine ACP agents to the client side of the ACP dialect.

corpus.py reads the recordings and describes their format. Two kinds of entries are left out: `in_raw`, a line of
garbage that the client wrote as a test, and an `out` that was cut by the recorder (`RAW`).

The player asks the client side for every frame that the recorded client sent. The frame must be equal, except for the
id of a request and for `initialize`, which names the client. An answer of the agent is read under the id that the
client side gave to that request. The recorded client differs in two ways, for which the player compensates:

- It loaded a conversation although the agent can resume it silently. In such a recording the agent is read without the
  resume capability, so that the client side loads, too.
- It did not ask where the history ends, but waited. The player refuses that question at the moment when the recorded
  client continued.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.core.dialects.recordings import corpus
from tests.core.dialects.recordings.corpus import Cut, Entry

from banksman.core.dialects.acp import acp
from banksman.core.dialects.acp.conversation import AcpProtocolState
from banksman.core.dialects.dialect import Decision, ProtocolOutput, Quirks, Setup
from banksman.core.dialects.meaning import (
    Meaning,
    NeedsConversation,
    Noise,
    Replied,
    Requested,
    RequestWithdrawn,
    Thought,
    ToolBegan,
    ToolEnded,
    TurnOver,
    UsageReported,
)
from banksman.core.wire.framing import Framing, MixedChunk

NAMES = sorted(path.stem for path in corpus.FOLDER.glob("acp*.jsonl"))
HANDSHAKE = "handshake-1"
# Quirks of the agents whose frames need corrections.
QUIRKS = {
    "acp-gemini-load": Quirks(recites_late=True),
    "acp-goose-basic": Quirks(cancel_may_say=("end_turn",)),
    "acp400-copilot": Quirks(error_texts=("^Error: ",)),
}
OPENINGS = ("session/new", "session/load")


def golden(name: str) -> Path:
    return corpus.FOLDER / "golden_acp" / f"{name}.jsonl"


def entries(name: str) -> list[Entry]:
    """The entries that are played."""
    found = corpus.entries(name)
    is_loaded = any(entry.kind == "in" and entry.value.get("method") == "session/load" for entry in found)
    played = [entry for entry in found if entry.kind in ("in", "out") and "RAW" not in entry.value]
    return [_without_resume(entry) if is_loaded else entry for entry in played]


def _without_resume(entry: Entry) -> Entry:
    result: dict[str, Any] = entry.value.get("result") or {}
    if "agentCapabilities" in result:
        result["agentCapabilities"].get("sessionCapabilities", {}).pop("resume", None)
    return entry


def lines(name: str) -> list[bytes]:
    """Every line of the agent."""
    return [corpus.line(entry.value) for entry in entries(name) if entry.kind == "out"]


class Played:
    """One recording, played to its end. The attributes hold the results."""

    def __init__(self, name: str, cut: Cut = corpus.whole, quirks: Quirks | None = None) -> None:
        self.name = name
        # Each line of the agent, with all its meanings.
        self.heard: list[tuple[bytes, tuple[Meaning, ...]]] = []
        # Frames of the client side that the recorded client did not send.
        self.extra: list[dict[str, Any]] = []
        # Number of lines that the agent recited.
        self.recited = 0
        # Meanings of the answer to the question where the history ends.
        self.at_fence: tuple[Meaning, ...] = ()
        self.dialect = acp(QUIRKS.get(name, Quirks()) if quirks is None else quirks)
        played = entries(name)
        openings = [entry.value for entry in played if entry.value.get("method") in OPENINGS]
        [opening] = openings
        params = opening["params"]
        self.protocol = self.dialect.begin(Setup(cwd=params["cwd"], conversation=params.get("sessionId")))
        self._cut = cut
        self._framing = Framing()
        self._written: list[bytes] = []
        self._prompts = 0
        # Request ids of the recorded client, each with the client side's id.
        self._ids: dict[int, int] = {}
        for is_said, group in groupby(played, lambda entry: entry.kind == "out"):
            values = [entry.value for entry in group]
            if is_said:
                self._hear(values)
            else:
                for value in values:
                    self._say(value)
        assert self._framing.end() == []
        self.extra += map(json.loads, self._written)

    @property
    def meanings(self) -> list[Meaning]:
        return [meaning for _, meanings in self.heard for meaning in meanings]

    # -- frames to the agent -----------------------------------------------------------------------------------------
    def _say(self, frame: dict[str, Any]) -> None:
        match frame:
            case {"method": "initialize", "id": id}:
                self._take(self.protocol.handshake(HANDSHAKE))
                sent = self._next()
                assert sent["method"] == "initialize"
                assert sent["params"]["protocolVersion"] == frame["params"]["protocolVersion"]
                self._ids[id] = sent["id"]
            case {"method": "session/new" | "session/load"}:
                self._is_said(frame)
            case {"method": "session/prompt", "params": params}:
                self._pass_fence()
                self._prompts += 1
                self._take(self.protocol.prompt(f"prompt-{self._prompts}", params["prompt"]))
                self._is_said(frame)
            case {"method": "session/cancel"}:
                self._take(self.protocol.interrupt("interrupt"))
                self._is_said(frame)
            case {"id": id, "result": {"outcome": outcome}}:
                self._answer(id, outcome)
            case _:
                raise AssertionError(f"the recorded client said {frame}")

    def _answer(self, id: int | str, outcome: dict[str, Any]) -> None:
        request = json.dumps(id)
        [asked] = [each for each in self.meanings if isinstance(each, Requested) and each.request == request][-1:]
        if outcome["outcome"] == "cancelled":
            self._take(self.protocol.cancel(asked))
        else:
            kinds = {option["optionId"]: option["kind"] for option in asked.details["options"]}
            chosen = outcome["optionId"]
            allows = kinds[chosen].startswith("allow")
            self._take(self.protocol.answer(asked, Decision(allows=allows, option=chosen)))
        if RequestWithdrawn(request) in self.meanings:
            # The request was answered when it was withdrawn. The recorded client gave another answer.
            [sent] = self._written
            assert json.loads(sent)["error"]["code"] == -32800
        else:
            self._is_said({"jsonrpc": "2.0", "id": id, "result": {"outcome": outcome}})

    def _is_said(self, frame: dict[str, Any]) -> None:
        sent = self._next()
        if "method" in frame and "id" in frame:
            self._ids[frame["id"]] = sent["id"]
            frame = {**frame, "id": sent["id"]}
        assert sent == frame

    def _pass_fence(self) -> None:
        assert isinstance(self.protocol, AcpProtocolState)
        if self.protocol.recites:
            fence = self._next()
            error = {"code": -32601, "message": "Method not found"}
            self._feed(corpus.line({"jsonrpc": "2.0", "id": fence["id"], "error": error}) + b"\n")
            assert self.heard.pop()[1] == ()
            # The agent is then quiet for long enough.
            hurried = self.protocol.hurry()
            self.protocol, self.at_fence = hurried.protocol, hurried.meanings

    def _take(self, output: ProtocolOutput) -> None:
        assert output.meanings == ()
        self.protocol = output.protocol
        self._written += output.frames

    def _next(self) -> dict[str, Any]:
        frame = self._written.pop(0)
        assert frame.endswith(b"\n")
        return json.loads(frame)

    # -- lines of the agent ------------------------------------------------------------------------------------------
    def _hear(self, frames: list[dict[str, Any]]) -> None:
        self._feed(b"".join(corpus.line(self._renamed(frame)) + b"\n" for frame in frames))

    def _renamed(self, frame: dict[str, Any]) -> dict[str, Any]:
        """Put the client side's id into a reply, at the same place, because the order of members may matter."""
        if "method" in frame or frame.get("id") not in self._ids:
            return frame
        return {name: self._ids[value] if name == "id" else value for name, value in frame.items()}

    def _feed(self, data: bytes) -> None:
        for piece in self._cut(data):
            read = self._framing.feed(piece)
            assert not isinstance(read, MixedChunk)
            for line in read:
                self.heard.append((line, tuple(self._understood(line))))

    def _understood(self, line: bytes) -> Iterator[Meaning]:
        meaning = self.dialect.read(line)
        self.recited += self.protocol.recites
        if not isinstance(meaning, NeedsConversation):
            if meaning is not None:
                yield meaning
            return
        output = self.protocol.hear(meaning)
        self.protocol = output.protocol
        self._written += output.frames
        yield from output.meanings


def in_words(meaning: Meaning) -> str:
    """Describe a meaning in a few words."""
    match meaning:
        case Replied(request=request, error=error):
            return f"replied {request}" if error is None else f"refused {request}: {error}"
        case TurnOver(refs=refs):
            flags = f"{' error' if meaning.is_error else ''}{' aborted' if meaning.is_aborted else ''}"
            return f"over {' '.join(refs)} {meaning.stop_reason or '-'}{flags}"
        case Requested():
            return f"asked {meaning.wants} {meaning.tool} {meaning.request}"
        case RequestWithdrawn(request=request):
            return f"withdrawn {request}"
        case ToolBegan(calls=calls):
            return f"began {' '.join(calls)}"
        case ToolEnded(calls=calls):
            return f"ended {' '.join(calls)}"
        case UsageReported(tokens=tokens, spent=spent):
            return f"used {'-' if tokens is None else tokens.total} {'-' if spent is None else f'${spent:.6f}'}"
        case Noise() | Thought():
            return type(meaning).__name__.lower()
        case _:
            return repr(meaning)


def told(played: Played) -> str:
    """Content of a golden file: a line for each frame with a meaning or an update. Frames count from 0."""
    kept: list[str] = []
    for index, (line, meanings) in enumerate(played.heard):
        updates = played.dialect.project(line)
        if updates or meanings:
            entry = {"frame": index, "meanings": [in_words(each) for each in meanings], "updates": updates}
            kept.append(json.dumps(entry, ensure_ascii=False) + "\n")
    return "".join(kept)


def main() -> None:
    """Write the golden files: `python -m tests.core.dialects.recordings.acp_player`. `git diff` shows the changes."""
    for name in NAMES:
        path = golden(name)
        text = told(Played(name))
        before = path.read_text(encoding="utf-8") if path.exists() else None
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"{'same   ' if text == before else 'written'} {path.name}")


if __name__ == "__main__":
    main()
