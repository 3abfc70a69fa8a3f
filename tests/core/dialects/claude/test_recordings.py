"""Claude dialect, and a session that speaks it, against complete recordings of the real program.

The meaning of a frame, its projection and its stored bytes must not depend on how the bytes are cut. See
tests/core/dialects/recordings/corpus.py for the recordings, and rehearsal.py for how a session plays one.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from typing import NamedTuple

import pytest
from tests.core.dialects.recordings import corpus
from tests.core.dialects.recordings.corpus import CUTS, NAMES, Cut
from tests.core.dialects.recordings.rehearsal import Rehearsal
from tests.core.session import ledger

from banksman.core.dialects.claude import CLAUDE
from banksman.core.dialects.meaning import (
    Meaning,
    PromptSettled,
    PromptTaken,
    Replied,
    Requested,
    RequestWithdrawn,
    TurnOpened,
    TurnOver,
)
from banksman.core.session import event as kinds
from banksman.core.session.outcome import Kind
from banksman.core.wire.framing import Framing, MixedChunk
from banksman.testing import checks

each_recording = pytest.mark.parametrize("name", NAMES)
each_cut = pytest.mark.parametrize("cut", CUTS.values(), ids=list(CUTS))


# -- expected results ------------------------------------------------------------------------------------------------
# The agent's messages about turns, prompts and requests, in the words of `told`.
HEARD = {
    "claude-A-lifecycle": (
        "replied req_1_initialize, init, over, replied req_2_set_model, replied req_3_set_permission_mode,"
        " replied req_4_mcp_status, refused req_5_nonsense, replied req_6_interrupt,"
        " taken 2, opened 2, init 2, over 2, settled 2"
    ),
    "claude-B-interrupt-stream": (
        "replied req_7_initialize, init, replied req_8_interrupt, over error aborted, init, over"
    ),
    "claude-C-interrupt-bash": (
        "replied req_1_initialize, init, replied req_2_interrupt, over error aborted, init, over"
    ),
    "claude-D-noprompt": "replied req_3_initialize, init, over",
    "claude-D-permission": (
        "replied req_1_initialize, init, asked Bash 747dabf4, over, init, asked Bash e36e0140, over,"
        " init, asked Bash b886e4d4, over error aborted,"
        " init, asked Bash 040e0e13, withdrawn 040e0e13, replied req_2_interrupt, over error aborted,"
        " init, asked Bash a4c96fa8, over, init, asked Bash fc432e66, over"
    ),
    "claude-F-sigterm-in-bash": "replied req_4_initialize, init",
    "claude-G-kill": "replied req_4_initialize, init, over, init",
    "claude-G-resume": "replied req_5_initialize, init, over",
    "claude-G-resume-missing": "over error",
    "claude-H-errors": (
        "replied req_1_initialize, init, over, init, over, init, replied req_2_interrupt, over error aborted,"
        " init, replied req_3_interrupt, over error aborted, init, replied req_4_interrupt, over error aborted, init"
    ),
    # Waiting prompts are merged, and an interrupt leaves the next prompt to run.
    "claude-L-queue": (
        "replied req_7_initialize, taken 1, opened 1, init 1, taken 2, taken 3, over 1, settled 1,"
        " opened 2, opened 3, init 2 3, over 2 3, settled 2, settled 3,"
        " taken 4, opened 4, init 4, taken 5, replied req_8_interrupt 5, over error aborted 4, cancelled 4,"
        " opened 5, init 5, over 5, settled 5"
    ),
}


class Ended(NamedTuple):
    """A turn: how it ended, how many of the agent's frames belong to it, and its last text."""

    kind: Kind
    frames: int
    text: str | None = None


def ticks(count: int) -> str:
    return "".join(f"tick{number} " for number in range(count))


# The outcome of each ask, and of the agent-initiated turns.
TURNS = {
    "claude-A-lifecycle": {
        "1": Ended(Kind.DONE, 30, f"hello{ticks(5)}"),
        "2": Ended(Kind.DONE, 13, "second"),
    },
    "claude-B-interrupt-stream": {
        "1": Ended(Kind.INTERRUPTED, 36),
        "2": Ended(Kind.DONE, 10, "after interrupt"),
    },
    "claude-C-interrupt-bash": {"1": Ended(Kind.INTERRUPTED, 7), "2": Ended(Kind.DONE, 3, "after")},
    "claude-D-noprompt": {"1": Ended(Kind.DONE, 6, "done")},
    "claude-D-permission": {
        "1": Ended(Kind.DONE, 6, "done"),
        "2": Ended(Kind.DONE, 6, "done"),
        # The answer ended the turn. The session got no request to interrupt it.
        "3": Ended(Kind.FAILED, 6),
        "4": Ended(Kind.INTERRUPTED, 8),
        "5": Ended(Kind.DONE, 6, "done"),
        "6": Ended(Kind.DONE, 6, "done"),
    },
    "claude-F-sigterm-in-bash": {"1": Ended(Kind.FAILED, 4)},
    "claude-G-kill": {"1": Ended(Kind.DONE, 10, "remember 42"), "2": Ended(Kind.FAILED, 29)},
    "claude-G-resume": {"1": Ended(Kind.DONE, 3, "resumed")},
    # The boundary belongs to no ask, because no turn was granted. The session was closed before another process
    # started.
    "claude-G-resume-missing": {"own-1": Ended(Kind.FAILED, 1), "1": Ended(Kind.REFUSED, 0)},
    # The recorder sent three prompts during the third turn. The agent got no prompt names there, so the session queues
    # them and sends each when the turn before it is over. The recorded output is then read in that order.
    "claude-H-errors": {
        "1": Ended(Kind.DONE, 5, "recovered"),
        "2": Ended(Kind.DONE, 3, "ok"),
        "3": Ended(Kind.INTERRUPTED, 12),
        "4": Ended(Kind.INTERRUPTED, 7),
        "5": Ended(Kind.INTERRUPTED, 4),
        "6": Ended(Kind.FAILED, 1),
        "7": Ended(Kind.REFUSED, 0),
        "8": Ended(Kind.REFUSED, 0),
    },
    # The agent merged the second and the third prompt: one turn, one answer.
    "claude-L-queue": {
        "1": Ended(Kind.DONE, 54, ticks(40)),
        "2": Ended(Kind.DONE, 14, "secondthird"),
        "3": Ended(Kind.DONE, 0, "secondthird"),
        "4": Ended(Kind.INTERRUPTED, 32),
        "5": Ended(Kind.DONE, 12, "queued-after-int"),
    },
}


# -- the recordings themselves ---------------------------------------------------------------------------------------
def test_recordings_are_complete() -> None:
    assert set(NAMES) == set(HEARD) == set(TURNS)
    assert {path.stem for path in corpus.golden(NAMES[0]).parent.iterdir()} == set(NAMES)


@each_recording
def test_recording_is_whole_and_names_no_machine(name: str) -> None:
    entries = corpus.entries(name)
    assert [entry.kind for entry in entries].count("argv") == 1
    assert [entry.at for entry in entries] == sorted(entry.at for entry in entries)
    for entry in entries:
        if entry.kind == "argv":
            assert "/" not in "".join(entry.value)
        if entry.kind in ("in", "out"):
            # A line that was cut by the recorder has no type.
            assert isinstance(entry.value["type"], str)
    text = (corpus.FOLDER / f"{name}.jsonl").read_text(encoding="utf-8")
    # Paths of the recording machine: at the root, or as one word, which is the agent's name for a project folder.
    somewhere = re.compile(r"""(?<=["'\s=:])/(?!srv/|bin/bash|dev/null)[\w.-]+/|-(?:root|tmp|home|Users)-""")
    assert somewhere.findall(text) == []


# -- lines and their meanings ----------------------------------------------------------------------------------------
def heard(data: bytes, cut: Cut) -> list[tuple[bytes, Meaning | None]]:
    framing = Framing()
    lines: list[bytes] = []
    for answer in (*map(framing.feed, cut(data)), framing.end()):
        assert not isinstance(answer, MixedChunk)
        lines += answer
    return [(line, CLAUDE.read(line)) for line in lines]


@pytest.mark.thorough
@each_cut
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
def test_recording_is_read_alike_however_bytes_are_cut(newline: bytes, cut: Cut) -> None:
    for name in NAMES:
        lines = corpus.lines(name)
        data = newline.join(lines)  # The last line has no newline: the end of the stream ends it.
        at_once = heard(data, corpus.whole)
        assert [line for line, _ in at_once] == lines
        assert heard(data, cut) == at_once, name


def told(meaning: Meaning | None) -> str | None:
    """Describe a frame about turns, prompts or requests in a few words; None for any other frame."""

    def named(*refs: str) -> str:
        return "".join(f" {ref[-1]}" for ref in refs)

    match meaning:
        case Replied(request=request, error=None, still_queued=refs):
            return f"replied {request}{named(*refs)}"
        case Replied(request=request):
            return f"refused {request}"
        case PromptTaken(ref=ref):
            return f"taken{named(ref)}"
        case TurnOpened(refs=refs):
            return f"{'init' if meaning.can_interrupt else 'opened'}{named(*refs)}"
        case TurnOver(refs=refs):
            flags = f"{' error' if meaning.is_error else ''}{' aborted' if meaning.is_aborted else ''}"
            return f"over{flags}{named(*refs)}"
        case PromptSettled(ref=ref):
            return f"{'cancelled' if meaning.is_cancelled else 'settled'}{named(ref)}"
        case Requested(request=request):
            return f"asked {meaning.tool} {request[:8]}"
        case RequestWithdrawn(request=request):
            return f"withdrawn {request[:8]}"
        case _:
            return None


@each_recording
def test_recording_has_expected_meanings(name: str) -> None:
    meanings = [CLAUDE.read(line) for line in corpus.lines(name)]
    assert [words for words in map(told, meanings) if words is not None] == HEARD[name].split(", ")
    # Every turn and its boundary belong to the one conversation that the frames name.
    of_turns = [meaning for meaning in meanings if isinstance(meaning, TurnOpened | TurnOver)]
    [conversation] = {frame["session_id"] for frame in corpus.frames(name, "out") if "session_id" in frame}
    assert {meaning.conversation for meaning in of_turns} - {None} == {conversation}


# -- the projection --------------------------------------------------------------------------------------------------
@each_recording
def test_recording_matches_golden_projection(name: str) -> None:
    expected = corpus.golden(name).read_text(encoding="utf-8")
    projected = corpus.projected(name, CLAUDE.project)
    if projected != expected:
        pytest.fail(f"{name}\n{_difference(expected, projected)}\n{REGOLDEN}", pytrace=False)


@each_recording
def test_frame_that_may_not_show_output_shows_none(name: str) -> None:
    silent = [line for line in corpus.lines(name) if not CLAUDE.may_show_output(line)]
    kinds_shown = {
        update["sessionUpdate"] for line in silent for update in (*CLAUDE.project(line), *CLAUDE.partial(line))
    }
    assert kinds_shown <= {"usage_update", "tool_call_update"}


REGOLDEN = "If that is meant: python -m tests.core.dialects.recordings.regolden, and look at what git diff shows."


def _difference(expected: str, projected: str) -> str:
    lines = difflib.unified_diff(expected.splitlines(), projected.splitlines(), "golden", "projected", n=1, lineterm="")
    return "\n".join(lines)


# -- a session -------------------------------------------------------------------------------------------------------
@each_recording
def test_rehearsal_gives_each_ask_one_outcome(name: str) -> None:
    rehearsed = Rehearsal(name, corpus.whole)
    assert rehearsed.is_finished
    events = rehearsed.events
    frames = Counter(event.turn for event in events if event.kind == kinds.UPDATE)
    endings = [(event.turn or "", event.body) for event in events if event.kind == kinds.TURN_ENDED]
    assert {turn: Ended(Kind(body["outcome"]), frames[turn], body["text"]) for turn, body in endings} == TURNS[name]
    # The log agrees with the outcomes that the callers got, one for each ask. Agent-initiated turns have no caller.
    assert len(endings) == len(TURNS[name])
    assert set(rehearsed.outcomes) == {turn for turn in TURNS[name] if not turn.startswith("own")}
    checks.outcomes(events, rehearsed.outcomes)
    checks.log(events)
    checks.turns(events)
    book = ledger.Ledger()
    for entry in rehearsed.entries:
        book = ledger.fold(book, entry, lambda _granted, _other: False)
    assert not book.open


@each_recording
def test_rehearsal_keeps_every_line_once_and_in_order(name: str) -> None:
    rehearsed = Rehearsal(name, corpus.whole)
    assert [data for _, kind, data in rehearsed.entries if kind == kinds.UPDATE] == rehearsed.said
    assert len(rehearsed.said) == len(corpus.lines(name))


@each_cut
def test_rehearsal_is_alike_however_bytes_are_cut(cut: Cut) -> None:
    for name in NAMES:
        at_once, cut_up = Rehearsal(name, corpus.whole), Rehearsal(name, cut)
        assert cut_up.entries == at_once.entries, name
        assert cut_up.written == at_once.written, name
        kept = [{turn: outcome.kind for turn, outcome in each.outcomes.items()} for each in (cut_up, at_once)]
        assert kept[0] == kept[1], name


def test_rehearsal_assigns_named_frames_to_their_turns() -> None:
    rehearsed = Rehearsal("claude-L-queue", corpus.whole)
    turns = [(turn, CLAUDE.read(data)) for turn, kind, data in rehearsed.entries if kind == kinds.UPDATE]
    named = [(turn, told(meaning)) for turn, meaning in turns if isinstance(meaning, TurnOpened | TurnOver)]
    assert named == [
        *[("1", "opened 1"), ("1", "init 1"), ("1", "over 1")],
        *[("2", "opened 2"), ("2", "opened 3"), ("2", "init 2 3"), ("2", "over 2 3")],
        *[("4", "opened 4"), ("4", "init 4"), ("4", "over error aborted 4")],
        *[("5", "opened 5"), ("5", "init 5"), ("5", "over 5")],
    ]


def test_rehearsal_asks_and_closes_each_question_once() -> None:
    rehearsed = Rehearsal("claude-D-permission", corpus.whole)
    about = (kinds.QUESTION_ASKED, kinds.QUESTION_ANSWERED)
    asked = [event.body for event in rehearsed.events if event.kind == kinds.QUESTION_ASKED]
    requests = {body["question"]: body["request"][:8] for body in asked}
    told_of = [
        (event.turn, event.kind, requests[event.body["question"]]) for event in rehearsed.events if event.kind in about
    ]
    names = ["747dabf4", "e36e0140", "b886e4d4", "040e0e13", "a4c96fa8", "fc432e66"]
    turns = enumerate(names, 1)
    expected: list[tuple[str | None, str, str]] = [(str(turn), kind, name) for turn, name in turns for kind in about]
    # Stdin was closed before the last answer: the turn continued without the answer, and ended before the process did.
    expected[-1] = (None, kinds.QUESTION_ANSWERED, names[-1])
    assert told_of == expected


def test_rehearsal_reports_lost_conversation_and_begins_another() -> None:
    rehearsed = Rehearsal("claude-G-resume-missing", corpus.whole)
    [lost] = [event.body for event in rehearsed.events if event.kind == kinds.SESSION_CONTEXT_LOST]
    assert rehearsed.starts == [lost["conversation"], None]
    assert lost["conversation"] == "44444444-4444-4444-8444-444444444444"


def test_rehearsal_resumes_conversation_by_name() -> None:
    resumed = Rehearsal("claude-G-resume", corpus.whole)
    killed = Rehearsal("claude-G-kill", corpus.whole)
    assert resumed.starts == [killed.state.conversation]
    assert resumed.state.conversation == killed.state.conversation
