"""ACP dialect against complete recordings of nine real agents.

tests/core/dialects/recordings/acp_player.py plays the recordings. It checks that the meanings do not depend on how the
bytes are cut, and that the client side sends the same frames as the recorded client. This file has the expected
meanings.
"""

from __future__ import annotations

import difflib
import json
import re
from typing import NamedTuple

import pytest
from tests.core.dialects.recordings import acp_player, corpus
from tests.core.dialects.recordings.acp_player import HANDSHAKE, NAMES, QUIRKS, Played, golden, in_words, told
from tests.core.dialects.recordings.corpus import CUTS, Cut
from tests.thorough import one_in

from banksman.core.dialects.acp import Acp
from banksman.core.dialects.dialect import Quirks
from banksman.core.dialects.meaning import NeedsConversation, Replied, Requested, TurnOver
from banksman.core.wire.framing import HEAD_BYTES

each_recording = pytest.mark.parametrize("name", NAMES)
each_cut = pytest.mark.parametrize("cut", CUTS.values(), ids=list(CUTS))


class Expected(NamedTuple):
    """How the turns ended, which tools asked for permission, and the last message of each turn."""

    turns: str
    asked: str = ""
    texts: tuple[str | None, ...] = ()


def ticks(count: int) -> str:
    return "".join(f"tick{number} " for number in range(count))


_BASIC = "end_turn, cancelled aborted, end_turn, cancelled aborted, cancelled aborted"
_WARNING = (
    "Model metadata for `gpt-5` not found. Defaulting to fallback metadata;"
    " this can degrade performance and cause issues."
)
_RETRYING = "Info: Request failed due to a transient API error. Retrying..."


def texts(count: int, *, before: str = "") -> tuple[str, ...]:
    """The last messages of the turns when the second turn is cancelled after `count` words."""
    return tuple(before + text for text in ("hello" + ticks(5), ticks(count), "afterc", "go", "go"))


EXPECTED = {
    "acp-claude-agent-acp-basic": Expected(_BASIC, "execute, execute", texts(25)),
    "acp-claude-agent-acp-load": Expected("end_turn", "", ("back",)),
    # The messages of this agent have ids, so its warning is not part of the answer. The next agent's messages have no
    # ids.
    "acp-codex-acp-new-basic": Expected(_BASIC, "", texts(20)),
    "acp-codex-acp-zed-basic": Expected(_BASIC, "execute, execute", texts(20, before=_WARNING)),
    "acp-copilot-basic": Expected(_BASIC, "execute, execute", texts(22)),
    "acp-gemini-load": Expected("end_turn", "", ("back",)),
    # This agent reports `end_turn` for a cancelled turn. Its profile has the quirk.
    "acp-goose-basic": Expected(
        "end_turn, end_turn aborted, end_turn, cancelled aborted, cancelled aborted", "other", texts(26)
    ),
    # The permission request of this agent does not name the tool's kind. An earlier update about the tool does.
    "acp-kimi-basic": Expected(_BASIC, "execute, execute", texts(25)),
    "acp-opencode-basic": Expected(_BASIC, "execute, execute", texts(30)),
    "acp-qwen-basic": Expected(_BASIC, "execute, execute", texts(25)),
    # This agent reports an error as an answer. Its profile detects it by the text.
    "acp400-copilot": Expected(
        "end_turn error, cancelled aborted, cancelled aborted", "", ("Error: 400 fake 400", _RETRYING * 5, None)
    ),
    "acp400-qwen": Expected("- error, cancelled aborted, cancelled aborted", "", (None, None, None)),
}


# -- the recordings themselves ---------------------------------------------------------------------------------------
def test_recordings_are_complete() -> None:
    assert set(NAMES) == set(EXPECTED)
    assert {path.stem for path in golden(NAMES[0]).parent.iterdir()} == set(NAMES)


@each_recording
def test_recording_names_no_machine(name: str) -> None:
    entries = corpus.entries(name)
    assert [entry.kind for entry in entries].count("argv") == 1
    assert "/" not in "".join(next(entry.value for entry in entries if entry.kind == "argv"))
    text = (corpus.FOLDER / f"{name}.jsonl").read_text(encoding="utf-8")
    somewhere = re.compile(r"""(?<=["'\s=:`(])/(?!srv/|bin/bash|dev/null)[\w.-]+/|-(?:root|tmp|home|Users)-""")
    assert somewhere.findall(text) == []


# -- meanings --------------------------------------------------------------------------------------------------------
@each_recording
def test_recording_has_expected_turns_and_handshake(name: str) -> None:
    played = Played(name)
    overs = [meaning for meaning in played.meanings if isinstance(meaning, TurnOver)]
    assert [in_words(over).split(" ", 2)[2] for over in overs] == EXPECTED[name].turns.split(", ")
    assert [over.refs for over in overs] == [(f"prompt-{number}",) for number in range(1, len(overs) + 1)]
    prompts = [entry.value for entry in acp_player.entries(name) if entry.value.get("method") == "session/prompt"]
    [conversation] = {prompt["params"]["sessionId"] for prompt in prompts}
    assert {over.conversation for over in overs} == {conversation} == {played.protocol.conversation}
    asked = [meaning.tool for meaning in played.meanings if isinstance(meaning, Requested)]
    assert ", ".join(asked) == EXPECTED[name].asked
    handshakes = [meaning for meaning in (*played.meanings, *played.at_fence) if isinstance(meaning, Replied)]
    assert handshakes == [Replied(HANDSHAKE)]
    assert not played.protocol.recites


@each_recording
def test_recording_has_expected_last_messages(name: str) -> None:
    played = Played(name)
    transcript, found = played.dialect.transcript(), list[str | None]()
    # Recited history belongs to no turn.
    for line, meanings in played.heard[played.recited :]:
        transcript.add(line)
        if any(isinstance(meaning, TurnOver) for meaning in meanings):
            found.append(transcript.text())
            transcript = played.dialect.transcript()
    assert tuple(found) == EXPECTED[name].texts


@each_recording
def test_recording_matches_golden_meanings_and_updates(name: str) -> None:
    expected = golden(name).read_text(encoding="utf-8")
    found = told(Played(name))
    if found != expected:
        lines = difflib.unified_diff(expected.splitlines(), found.splitlines(), "golden", "found", n=1, lineterm="")
        hint = "If that is meant: python -m tests.core.dialects.recordings.acp_player, and look at what git diff shows."
        pytest.fail("\n".join((name, *lines, hint)), pytrace=False)


@each_cut
def test_recording_is_read_alike_however_bytes_are_cut(cut: Cut) -> None:
    for name in NAMES:
        at_once, cut_up = Played(name), Played(name, cut)
        assert cut_up.heard == at_once.heard, name
        assert cut_up.protocol == at_once.protocol, name
        assert cut_up.extra == at_once.extra, name


@each_recording
def test_recorded_updates_are_projected_unchanged(name: str) -> None:
    """The projection loses nothing and adds nothing."""
    for line in acp_player.lines(name):
        frame = json.loads(line)
        is_update = frame.get("method") == "session/update"
        assert Acp().project(line) == ([frame["params"]["update"]] if is_update else [])
        assert Acp().projector().project(line) == Acp().project(line)


@pytest.mark.parametrize("name", ["acp-gemini-load", "acp-claude-agent-acp-load"])
def test_recorded_history_is_recited_and_nothing_else(name: str) -> None:
    """One of the two agents answers after the first line of the history, and continues to recite."""
    played = Played(name)
    assert played.recited > 0
    said = [line for line, _ in played.heard]
    kinds = [[update["sessionUpdate"] for update in Acp().project(line)] for line in said]
    assert ["user_message_chunk"] in kinds[: played.recited]
    assert ["user_message_chunk"] not in kinds[played.recited :]
    assert [in_words(meaning) for _, meanings in played.heard[: played.recited] for meaning in meanings] in (
        [],
        ["noise"],
    )


# -- corrections of quirks -------------------------------------------------------------------------------------------
def test_recording_without_quirks_is_taken_at_its_word() -> None:
    for name in QUIRKS:
        overs = [meaning for meaning in Played(name, quirks=Quirks()).meanings if isinstance(meaning, TurnOver)]
        assert [(over.stop_reason, over.is_error, over.is_aborted) for over in overs].count(("end_turn", False, False))


def test_recorded_error_text_fails_turn_and_is_kept() -> None:
    over = next(meaning for meaning in Played("acp400-copilot").meanings if isinstance(meaning, TurnOver))
    assert (over.is_error, over.error, over.stop_reason) == (True, "Error: 400 fake 400", "end_turn")


def test_recorded_error_reason_is_read_from_error_data() -> None:
    over = next(meaning for meaning in Played("acp400-qwen").meanings if isinstance(meaning, TurnOver))
    assert over.error == "Internal error (-32603): 400 fake 400"


def test_recorded_usage_and_cost_are_reported() -> None:
    def usages(name: str) -> list[bool]:
        return [over.usage is not None for over in Played(name).meanings if isinstance(over, TurnOver)]

    assert usages("acp-opencode-basic") == [True] * 5
    assert usages("acp-gemini-load") == [True]
    assert usages("acp-kimi-basic") == [False] * 5
    costs = [over.spent for over in Played("acp-claude-agent-acp-basic").meanings if isinstance(over, TurnOver)]
    assert all(cost is not None for cost in costs)
    assert costs == sorted(cost for cost in costs if cost is not None)


# -- damaged lines ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", one_in(3, NAMES))
def test_line_cut_anywhere_is_read_without_error(name: str) -> None:
    """A cut line raises no exception, and a reply is still recognised by its two ends."""
    dialect = Acp()
    for line in acp_player.lines(name):
        frame = json.loads(line)
        for place in range(0, len(line), max(1, len(line) // 40)):
            dialect.read(line[:place])
            dialect.project(line[:place])
            dialect.read_head(line[:place], line[-64:])
        if "method" not in frame and frame.get("id") is not None:
            meaning = dialect.read_head(line[: min(HEAD_BYTES, len(line) - 1)], line[-64:])
            assert isinstance(meaning, NeedsConversation)
