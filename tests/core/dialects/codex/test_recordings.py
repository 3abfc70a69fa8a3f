"""Codex dialect against complete recordings of the real program.

The meaning of a frame and its projection must not depend on how the bytes are cut or spaced. See
tests/core/dialects/recordings/codex.py for the recordings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from tests.core.dialects.recordings import codex, corpus
from tests.core.dialects.recordings.codex import NAMES
from tests.core.dialects.recordings.corpus import CUTS, Cut

from banksman.core.dialects.codex import CODEX
from banksman.core.dialects.dialect import Setup
from banksman.core.dialects.meaning import (
    Forgot,
    Meaning,
    NeedsConversation,
    Noise,
    PromptSettled,
    PromptTaken,
    Replied,
    Requested,
    RequestWithdrawn,
    ToolBegan,
    ToolEnded,
    TurnOpened,
    TurnOver,
)
from banksman.core.wire.framing import Framing, MixedChunk

each_recording = pytest.mark.parametrize("name", NAMES)
each_cut = pytest.mark.parametrize("cut", CUTS.values(), ids=list(CUTS))

# All meanings about turns, prompts, tools and requests, in the words of `told`.
HEARD = {
    "codex-B-interrupt": (
        "replied handshake, taken 1, opened 1, replied stop-1, aborted 1, settled 1,"
        # The agent never reports the end of the command: it continues to run.
        " taken 2, opened 2, tool, replied stop-2, aborted 2 'go', settled 2,"
        " taken 3, opened 3, over 3 'after', settled 3, refused stop-3,"
        " taken 4, opened 4, replied stop-4, aborted 4, settled 4,"
        # Two prompts are steered into the fifth: one turn, one answer.
        " taken 5, opened 5, taken 6, taken 7, over 5 6 7 'steered', settled 7, settled 6, settled 5"
    ),
    "codex-D-approval": (
        "replied handshake, taken 1, opened 1, tool, asked 0 commandExecution, tool ended, over 1 'done', settled 1,"
        " taken 2, opened 2, tool, asked 1 commandExecution, tool ended, over 2 'done', settled 2,"
        " taken 3, opened 3, tool, asked 2 commandExecution, tool ended, aborted 3, settled 3,"
        " taken 4, opened 4, tool, asked 3 commandExecution, replied stop-1, aborted 4, settled 4, withdrawn 3"
    ),
    "codex-G-kill": (
        "replied handshake, taken 1, opened 1, over 1 'remember 42', settled 1, taken 2, opened 2"
    ),
    "codex-G-resume": "replied handshake, taken 1, opened 1, over 1 'resumed', settled 1",
    "codex-I-bad-badutf8": "replied handshake",
    "codex-app-0": "replied handshake, taken 1, opened 1, over 1 'hitick0 tick1 tick2 ', settled 1",
    # The exec protocol of the same program: none of its lines is a frame of this dialect.
    "codex-exec": "",
}  # fmt: skip


def told(meaning: Meaning) -> str | None:
    def named(*refs: str) -> str:
        return "".join(f" {ref.removeprefix('ref-')}" for ref in refs)

    match meaning:
        case Replied(request=request, error=error):
            return f"{'replied' if error is None else 'refused'} {request}"
        case PromptTaken(ref=ref):
            return f"taken{named(ref)}"
        case TurnOpened(refs=refs):
            assert meaning.can_interrupt
            return f"opened{named(*refs)}"
        case TurnOver(refs=refs, text=text):
            assert not meaning.is_error
            said = "" if text is None else f" {text!r}"
            return f"{'aborted' if meaning.is_aborted else 'over'}{named(*refs)}{said}"
        case PromptSettled(ref=ref):
            return f"settled{named(ref)}"
        case Requested(request=request, tool=tool):
            return f"asked {request} {tool}"
        case RequestWithdrawn(request=request):
            return f"withdrawn {request}"
        case ToolBegan():
            return "tool"
        case ToolEnded():
            return "tool ended"
        case _:
            return None


# -- the recordings themselves ---------------------------------------------------------------------------------------
def test_recordings_are_complete() -> None:
    assert set(NAMES) == set(HEARD)
    assert {path.stem for path in codex.golden(NAMES[0]).parent.iterdir()} == set(NAMES)


@each_recording
def test_recording_is_whole_and_names_no_machine(name: str) -> None:
    entries = corpus.entries(name)
    assert [entry.kind for entry in entries].count("argv") == 1
    for entry in entries:
        if entry.kind in ("in", "out"):
            # The recorder marks a line that it cut as `RAW`.
            assert not {"RAW"} & entry.value.keys()
    text = (corpus.FOLDER / f"{name}.jsonl").read_text(encoding="utf-8")
    somewhere = re.compile(r"""(?<=["'\s=:])/(?!srv/|bin/bash|dev/null|v1)[\w.-]+/|-(?:root|tmp|home|Users)-""")
    assert somewhere.findall(text) == []


# -- lines and their meanings ----------------------------------------------------------------------------------------
def heard(data: bytes, cut: Cut) -> list[tuple[bytes, Meaning | None]]:
    framing = Framing()
    lines: list[bytes] = []
    for answer in (*map(framing.feed, cut(data)), framing.end()):
        assert not isinstance(answer, MixedChunk)
        lines += answer
    return [(line, CODEX.read(line)) for line in lines]


@each_cut
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
def test_recording_is_read_alike_however_bytes_are_cut(newline: bytes, cut: Cut) -> None:
    for name in NAMES:
        lines = corpus.lines(name)
        data = newline.join(lines)  # The last line has no newline: the end of the stream ends it.
        at_once = heard(data, corpus.whole)
        assert [line for line, _ in at_once] == lines
        assert heard(data, cut) == at_once, name


def spaced(frame: object) -> bytes:
    """Write a frame with spaces that no agent uses, so that no first bytes identify it."""
    return json.dumps(frame, indent=None, separators=(" , ", " : ")).encode()


def reversed_members(frame: dict[str, object]) -> bytes:
    return json.dumps(dict(reversed(frame.items()))).encode()


@each_recording
@pytest.mark.parametrize("write", [corpus.line, spaced, reversed_members])
def test_recording_has_expected_meanings(name: str, write: Callable[[Any], bytes]) -> None:
    played = codex.play(name, write)
    assert ", ".join(word for meaning in played.meanings if (word := told(meaning))) == HEARD[name]


@each_recording
def test_sent_frames_have_no_version_and_own_numbers(name: str) -> None:
    frames = codex.play(name).frames
    assert not [frame for frame in frames if "jsonrpc" in frame]
    numbers = [frame["id"] for frame in frames if "method" in frame and "id" in frame]
    assert numbers == list(range(1, len(numbers) + 1))


def test_recorded_questions_are_answered_by_their_ids() -> None:
    answers = [frame for frame in codex.play("codex-D-approval").frames if "result" in frame]
    decisions = [(frame["id"], frame["result"]["decision"]) for frame in answers]
    assert decisions == [(0, "accept"), (1, "decline"), (2, "cancel")]


def test_recorded_usage_is_of_its_turn() -> None:
    overs = [meaning for meaning in codex.play("codex-D-approval").meanings if isinstance(meaning, TurnOver)]
    # Two model calls with 15 tokens each, twice. The last two turns have one call, because they stopped at the tool.
    assert [over.usage and over.usage["totalTokens"] for over in overs] == [30, 30, 15, 15]


def test_recorded_unknown_conversation_is_forgotten() -> None:
    error = next(frame for frame in corpus.frames("codex-G-resume", "out") if "error" in frame)
    playing = codex.Play(CODEX.begin(Setup(conversation="01a1dca7-0000-7000-8000-000000000000")))
    playing.say(playing.protocol.handshake("handshake"))
    playing.hear(b'{"id":1,"result":{}}')
    assert playing.frames[-1]["method"] == "thread/resume"
    playing.hear(corpus.line(error | {"id": playing.frames[-1]["id"]}))
    (forgot,) = playing.meanings
    assert isinstance(forgot, Forgot)
    assert "no rollout found" in forgot.error


def test_exec_protocol_is_noise() -> None:
    assert {type(CODEX.read(line)) for line in corpus.lines("codex-exec")} == {Noise}


# -- projections -----------------------------------------------------------------------------------------------------
@each_recording
def test_recording_matches_golden_projection(name: str) -> None:
    expected = codex.golden(name).read_text(encoding="utf-8")
    assert corpus.projected(name, CODEX.project) == expected, (
        "python -m tests.core.dialects.recordings.codex writes them anew"
    )


@each_recording
def test_projector_and_transcript_tell_recorded_text_once(name: str) -> None:
    projector, transcript = CODEX.projector(), CODEX.transcript()
    complete: dict[str, str] = {}
    streamed: dict[str, str] = {}
    for line in corpus.lines(name):
        transcript.add(line)
        for told_by, updates in ((complete, CODEX.project(line)), (streamed, projector.project(line))):
            for update in updates:
                if update["sessionUpdate"] == "agent_message_chunk":
                    item = update["messageId"]
                    told_by[item] = told_by.get(item, "") + update["content"]["text"]
    for item, text in complete.items():
        assert streamed[item] == text
    # A message that was cut off is present only as its deltas.
    assert (transcript.text() or "").endswith("".join(list(streamed.values())[-1:]))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "codex-exec"])
def test_read_head_of_recorded_line_agrees_with_read(name: str) -> None:
    for line in corpus.lines(name):
        whole, cut = CODEX.read(line), CODEX.read_head(line[: len(line) - 1], line[-40:])
        if isinstance(whole, NeedsConversation):
            assert isinstance(cut, NeedsConversation), line
        elif whole is not None:
            assert cut == whole, line
