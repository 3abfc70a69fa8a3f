"""Redaction across deltas: at most the first characters of a secret that is cut by delta borders are stored."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from banksman.core.redaction.redactor import SECRET_CHARS_MIN, Redactor
from banksman.core.redaction.stream_redactor import PREFIX_CHARS_MIN, TEXTS_MAX, StreamedRedactor
from banksman.core.session.event import RECITED, TURN_ENDED, TURN_QUEUED, UPDATE, Entry
from banksman.core.wire.elided_text import REDACTED

SECRET = 'hunter2/"x" key'


def claude(text: str, member: str = "text", index: int = 0, parent: str | None = None) -> bytes:
    delta = {"type": f"{member}_delta", member: text}
    event = {"type": "content_block_delta", "index": index, "delta": delta}
    return json.dumps({"type": "stream_event", "event": event, "parent_tool_use_id": parent, "uuid": "u-1"}).encode()


def codex(text: str) -> bytes:
    return json.dumps(
        {"method": "item/agentMessage/delta", "params": {"threadId": "t", "itemId": "i-1", "delta": text}}
    ).encode()


def acp(text: str, session: str = "c-1") -> bytes:
    update = {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": text}}
    params = {"sessionId": session, "update": update}
    return json.dumps({"jsonrpc": "2.0", "method": "session/update", "params": params}).encode()


def text_of(data: bytes) -> str:
    frame: dict[str, Any] = json.loads(data)
    if "event" in frame:
        delta = frame["event"]["delta"]
        return next(delta[name] for name in ("text", "thinking", "partial_json") if name in delta)
    params = frame["params"]
    return params["delta"] if "delta" in params else params["update"]["content"]["text"]


def stored(streamed: StreamedRedactor, frames: Sequence[bytes], kind: str = UPDATE) -> str:
    """Return the text that a reader joins from the frames, with one append for each frame."""
    told = [streamed.entries([("t-1", kind, frame)])[0][2] for frame in frames]
    return "".join(map(text_of, told))


def holds_too_much(text: str, secret: str) -> bool:
    """Whether the text contains a longer part of the secret than may be stored."""
    size = PREFIX_CHARS_MIN
    return any(secret[place : place + size] in text for place in range(len(secret) - size + 1))


DIALECTS: dict[str, Callable[[str], bytes]] = {
    "claude": claude,
    "claude thinking": lambda text: claude(text, "thinking"),
    "claude input": lambda text: claude(text, "partial_json"),
    "codex": codex,
    "acp": acp,
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_secret_in_two_deltas_is_redacted_wherever_it_is_cut(dialect: str) -> None:
    frame = DIALECTS[dialect]
    for cut in range(1, len(SECRET)):
        streamed = StreamedRedactor(Redactor([SECRET]))
        said = stored(streamed, [frame(f"it is {SECRET[:cut]}"), frame(f"{SECRET[cut:]}, so")])
        assert not holds_too_much(said, SECRET), (cut, said)
        assert said.startswith("it is ")
        assert said.endswith(", so")
        assert said.count(REDACTED) == 1


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("spelled", [SECRET, json.dumps(SECRET)[1:-1], "hunter2%2F%22x%22+key", "\\u0068" + SECRET[1:]])
def test_secret_in_many_deltas_is_redacted_in_every_spelling(size: int, spelled: str) -> None:
    text = f"a {spelled} b"
    frames = [claude(text[place : place + size], "partial_json") for place in range(0, len(text), size)]
    said = stored(StreamedRedactor(Redactor([SECRET])), frames)
    assert not holds_too_much(said, spelled[spelled.index("unter2") :]), said
    assert said.startswith("a ")
    assert said.endswith(" b")
    assert said.count(REDACTED) == 1


# A small alphabet, so that characters repeat, with some that have several spellings. No character occurs in the
# brackets of the replacement, so a replacement cannot create a secret.
secrets = st.text(st.sampled_from('abu0"\\/\n %+é😀'), min_size=SECRET_CHARS_MIN, max_size=8)
# Spellings of the characters of a secret, in turn.
styles = st.lists(st.sampled_from(["plain", "json", "code", "percent"]), min_size=1, max_size=8)


def spelled_as(secret: str, styles: Sequence[str]) -> str:
    spelling: dict[str, Callable[[str], str]] = {
        "plain": str,
        "json": lambda char: json.dumps(char, ensure_ascii=False)[1:-1],
        "code": lambda char: "".join(f"\\u{unit:04x}" for unit in memoryview(char.encode("utf-16-le")).cast("H")),
        "percent": lambda char: quote(char, safe=""),
    }
    return "".join(spelling[styles[place % len(styles)]](char) for place, char in enumerate(secret))


@given(secrets, styles, st.lists(st.integers(1, 90), max_size=6))
@example(r"\\srv\share\pw9", ["plain"], [])
@example(r"pass\\word99", ["plain"], [])
@example("aaaaé/", ["percent"], [])
def test_joined_deltas_hold_no_secret_wherever_they_are_cut(secret: str, styles: list[str], more: list[int]) -> None:
    """Try every cut in two, each with the same further cuts."""
    redactor = Redactor([secret])
    text = f"<{spelled_as(secret, styles)}>"
    for first in range(1, len(text)):
        cuts = [0, *sorted({cut for cut in (first, *more) if cut < len(text)}), len(text)]
        pieces = [text[start:end] for start, end in pairwise(cuts)]
        said = stored(StreamedRedactor(redactor), [claude(piece, "partial_json") for piece in pieces])
        assert redactor.redact_text(said) == said, (pieces, said)
        before, replacement, _ = said.partition(REDACTED)
        assert replacement, (pieces, said)
        assert text.startswith(before), (pieces, said)
        assert not before.startswith(f"<{spelled_as(secret[:PREFIX_CHARS_MIN], styles)}"), (pieces, said)
        assert said.endswith(">"), (pieces, said)


@pytest.mark.parametrize("frame", [claude, codex, acp])
def test_secret_is_redacted_when_a_hand_over_cuts_it(frame: Callable[[str], bytes]) -> None:
    before, after = StreamedRedactor(Redactor([SECRET])), StreamedRedactor(Redactor([SECRET]))
    first = stored(before, [frame(f"it is {SECRET[:7]}")])
    after.remember(json.loads(json.dumps(before.memory)))
    assert first + stored(after, [frame(f"{SECRET[7:]}.")]) == f"it is {REDACTED}."


def test_longer_secret_that_begins_with_a_whole_one_is_redacted() -> None:
    redactor = Redactor(["secret", "secret-and-more"])
    assert stored(StreamedRedactor(redactor), [claude("a secret"), claude("-and-more b")]) == f"a {REDACTED} b"


@pytest.mark.parametrize("secret", ["abcd%42", "abcdef%", "abcdef\\"])
def test_whole_secret_is_replaced_at_once_when_its_end_may_be_a_cut_escape(secret: str) -> None:
    assert stored(StreamedRedactor(Redactor([secret])), [claude(f"a {secret}")]) == f"a {REDACTED}"


def test_recited_conversation_is_redacted_across_deltas() -> None:
    """An ACP agent that loads a conversation replays it in the original chunks."""
    for cut in range(1, len(SECRET)):
        frames = [acp(f"it is {SECRET[:cut]}"), acp(f"{SECRET[cut:]}, so")]
        said = stored(StreamedRedactor(Redactor([SECRET])), frames, RECITED)
        assert not holds_too_much(said, SECRET), (cut, said)
        assert said.count(REDACTED) == 1


def test_held_text_does_not_move_into_another_conversation_or_out_of_a_replay() -> None:
    streamed = StreamedRedactor(Redactor([SECRET]))
    told = streamed.entries([("t-1", UPDATE, acp("hunter", "c-1")), ("t-1", UPDATE, acp("next", "c-2"))])
    assert [text_of(entry[2]) for entry in told] == ["", "next"]
    told = streamed.entries([("t-2", RECITED, acp("hunter")), ("t-2", UPDATE, acp("next"))])
    assert [text_of(entry[2]) for entry in told] == ["", "next"]


def test_large_delta_costs_little_more_than_plain_redaction() -> None:
    """A search for each secret in the whole text takes a hundred times as long."""
    chance = random.Random(1)
    redactor = Redactor(["".join(chance.choices("abcdefghijklmnop", k=32)) for _ in range(10)])
    streamed = StreamedRedactor(redactor)
    text = " ".join(chance.choices(["an", "import", "of", "good", "keys", "became", "due"], k=12_000))
    entries: list[Entry] = [("t-1", UPDATE, claude(text))]

    def spent(redact: Callable[[Sequence[Entry]], Sequence[Entry]]) -> float:
        best = float("inf")
        for _ in range(5):
            began = time.process_time()
            for _ in range(4):
                assert redact(entries) is entries
            best = min(best, time.process_time() - began)
        return best

    assert spent(streamed.entries) < 20 * spent(redactor.entries)


def test_other_events_between_two_deltas_do_not_hide_the_secret() -> None:
    streamed = StreamedRedactor(Redactor([SECRET]))
    half = len(SECRET) // 2
    entries: list[Entry] = [
        ("t-1", UPDATE, claude(SECRET[:half])),
        ("t-2", TURN_QUEUED, b'{"prompt":"x"}'),
        ("t-1", UPDATE, claude("unrelated", index=1)),
        ("t-1", UPDATE, claude("of a subagent", parent="toolu_1")),
        ("t-1", UPDATE, claude(SECRET[half:])),
    ]
    told = streamed.entries(entries)
    assert [entry[:2] for entry in told] == [entry[:2] for entry in entries]
    assert told[1:4] == entries[1:4]
    assert not holds_too_much(text_of(told[0][2]) + text_of(told[4][2]), SECRET)


def test_text_without_secret_is_stored_byte_for_byte() -> None:
    streamed = StreamedRedactor(Redactor([SECRET]))
    for text in ("hun", "dred h", "h", "ello \\", "u00", " 5%", ""):
        entries: list[Entry] = [("t-1", UPDATE, claude(text).replace(b": ", b" :  "))]
        assert streamed.entries(entries) is entries


def test_redacted_frame_changes_only_in_its_delta() -> None:
    streamed = StreamedRedactor(Redactor([SECRET]))
    frame = claude(f"a {SECRET}").replace(b": ", b" :  ").replace(b"u-1", b"hunter")
    (_, _, data), *_ = streamed.entries([("t-1", UPDATE, frame)])
    assert data == frame.replace(json.dumps(f"a {SECRET}").encode(), b'"a [redacted]"')


@pytest.mark.parametrize("dialect", DIALECTS)
def test_text_that_begins_like_secret_is_stored_whole(dialect: str) -> None:
    """Try cuts at every place, in two and in three pieces."""
    text = f"the {SECRET[:7]}s and {SECRET[:12]}; then"
    for first in range(1, len(text)):
        for second in range(first, len(text), 7):
            pieces = [text[:first], text[first:second], text[second:]]
            assert stored(StreamedRedactor(Redactor([SECRET])), list(map(DIALECTS[dialect], pieces))) == text


def test_overlapping_secrets_are_replaced_as_one() -> None:
    streamed = StreamedRedactor(Redactor(["abcdefgh", "efghijkl"]))
    assert stored(streamed, [claude("x abcdef"), claude("ghij"), claude("kl y")]) == f"x {REDACTED}{REDACTED} y"
    assert (
        stored(StreamedRedactor(Redactor(["abcdefgh", "efghijkl"])), [claude("x abcdefghijkl y")]) == f"x {REDACTED} y"
    )


def test_held_text_does_not_move_into_another_message_or_turn() -> None:
    streamed = StreamedRedactor(Redactor([SECRET]))
    stop = json.dumps({"type": "stream_event", "event": {"type": "content_block_stop", "index": 0}}).encode()
    told = streamed.entries([("t-1", UPDATE, frame) for frame in (claude("hunter"), stop, claude("next"))])
    assert [text_of(told[number][2]) for number in (0, 2)] == ["", "next"]
    told = streamed.entries([("t-1", UPDATE, acp("hunter")), ("t-2", UPDATE, acp("next"))])
    assert [text_of(entry[2]) for entry in told] == ["", "next"]


def test_remembered_texts_are_bounded() -> None:
    streamed = StreamedRedactor(Redactor([SECRET]))
    for index in range(TEXTS_MAX + 1):
        streamed.entries([("t-1", UPDATE, claude("hun", index=index))])
    assert len(streamed._carries) == TEXTS_MAX  # pyright: ignore[reportPrivateUsage]


def _with(frame: bytes, **members: Any) -> bytes:
    """Return a Claude frame with other members in its event."""
    value: dict[str, Any] = json.loads(frame)
    value["event"].update(members)
    return json.dumps(value).encode()


# Deltas with something odd in them. A lone surrogate is written as JavaScript writes it.
ODD: dict[str, Callable[[str], bytes]] = {
    "half a pair before": lambda text: claude(f"\ud83d {text}") if text.startswith("it") else claude(text),
    "half a pair behind": lambda text: claude(f"{text} \ude00") if text.endswith("so") else claude(text),
    "half a pair elsewhere": lambda text: claude(text).replace(b"u-1", rb"\ud83d"),
    "half a pair in codex": lambda text: codex(text).replace(b'"t"', rb'"\ud83d"'),
    "half a pair in acp": lambda text: acp(text).replace(b'"2.0"', rb'"\ud83d"'),
    "no utf-8": lambda text: claude(text).replace(b"u-1", b"\xff"),
    "no utf-8 in a key": lambda text: claude(text, parent="p").replace(b'"p"', b'"\xff"'),
    "no utf-8 in the text": lambda text: claude(text).replace(b'"text": "it', b'"text": "\xffit'),
    "too deep": lambda text: claude(text).replace(b'"u-1"', b"[" * 3000 + b"]" * 3000),
    "no json behind": lambda text: claude(text).replace(b'"u-1"', b"NaN"),
    "content beside it": lambda text: _with(claude(text), content=[1]),
    "index is text": lambda text: _with(claude(text), index="0"),
    "index is a list": lambda text: _with(claude(text), index=[0]),
    "no index": lambda text: _with(claude(text), index=None),
    "item is a number": lambda text: codex(text).replace(b'"i-1"', b"1"),
    "session is a number": lambda text: acp(text).replace(b'"c-1"', b"1"),
}


@pytest.mark.parametrize("odd", ODD)
def test_delta_with_odd_members_elsewhere_is_redacted(odd: str) -> None:
    for cut in range(1, len(SECRET)):
        streamed = StreamedRedactor(Redactor([SECRET]))
        frames = [ODD[odd](f"it is {SECRET[:cut]}"), ODD[odd](f"{SECRET[cut:]}, so")]
        told = b" ".join(streamed.entries([("t-1", UPDATE, frame)])[0][2] for frame in frames)
        assert told.count(REDACTED.encode()) == 1, (cut, told)
        # The first characters of the secret have only one spelling.
        assert b"hunt" not in told
        assert b"nter2" not in told
        assert b"key" not in told
        assert told.count(b"it is ") == told.count(b", so") == 1


@pytest.mark.parametrize("odd", ["half a pair elsewhere", "no utf-8", "too deep", "content beside it"])
@pytest.mark.parametrize("is_first", [True, False])
def test_odd_and_plain_deltas_are_redacted_as_one_text(odd: str, is_first: bool) -> None:
    streamed = StreamedRedactor(Redactor([SECRET]))
    first, second = (ODD[odd], claude) if is_first else (claude, ODD[odd])
    told = [
        streamed.entries([("t-1", UPDATE, frame)])[0][2] for frame in (first("a hunter2/"), second(f"{SECRET[8:]}, b"))
    ]
    assert REDACTED.encode() in told[1]
    assert not any(part in data for data in told for part in (b"hunter", b"key"))


def test_secret_cut_inside_an_emoji_is_redacted() -> None:
    """JavaScript cuts strings by UTF-16 units."""
    for secret in ("key😀secret", "a😀b😀c😀"):
        redactor = Redactor([secret])
        units = secret.encode("utf-16-le")
        for cut in range(2, len(units), 2):
            first, second = (part.decode("utf-16-le", "surrogatepass") for part in (units[:cut], units[cut:]))
            said = stored(StreamedRedactor(redactor), [claude(f"< {first}"), claude(f"{second} >")])
            assert said.startswith("< ")
            assert said.endswith(f"{REDACTED} >"), (cut, said)
            assert len(said) <= len(f"< ____{REDACTED} >")


def test_emoji_cut_in_its_middle_is_stored_unchanged() -> None:
    said = stored(StreamedRedactor(Redactor([SECRET])), [claude("a hunter\ud83d"), claude("\ude00 b")])
    assert said.encode("utf-16-le", "surrogatepass").decode("utf-16-le") == "a hunter😀 b"
    said = stored(StreamedRedactor(Redactor(["secret😀"])), [claude("a secret\ud83d"), claude("\ude01 b")])
    assert said.encode("utf-16-le", "surrogatepass").decode("utf-16-le") == "a secret😁 b"


def test_delta_is_withheld_when_too_many_texts_of_its_turn_are_open() -> None:
    streamed = StreamedRedactor(Redactor([SECRET]))
    entries: list[Entry] = [("t-1", UPDATE, claude("hun"))]
    entries += [("t-1", UPDATE, claude("such h", index=index)) for index in range(1, TEXTS_MAX + 1)]
    entries += [("t-1", UPDATE, claude(SECRET[3:])), ("t-1", UPDATE, claude("more")), ("t-2", UPDATE, claude("other"))]
    told = [text_of(data) for _, _, data in streamed.entries(entries)]
    assert told[: TEXTS_MAX + 1] == ["hun", *["such h"] * TEXTS_MAX]
    assert told[TEXTS_MAX + 1 :] == [REDACTED, REDACTED, "other"]


def test_texts_of_ended_turn_are_forgotten() -> None:
    streamed = StreamedRedactor(Redactor([SECRET]))
    for turn in ("t-1", "t-2"):
        streamed.entries([(turn, UPDATE, claude("hun", index=index)) for index in range(TEXTS_MAX)])
        streamed.entries([(turn, TURN_ENDED, b"{}")])
        assert not streamed._carries  # pyright: ignore[reportPrivateUsage]
    streamed.entries([("t-3", UPDATE, claude("hun", index=index)) for index in range(TEXTS_MAX + 1)])
    streamed.entries([("t-3", TURN_ENDED, b"{}")])
    assert text_of(streamed.entries([("t-3", UPDATE, claude("more"))])[0][2]) == "more"


def test_ended_codex_items_do_not_crowd_out_later_text() -> None:
    """Text outside of a turn, such as a subagent's, gets no turn end that would clear it."""
    streamed = StreamedRedactor(Redactor([SECRET]))
    for number in range(TEXTS_MAX + 10):
        delta = codex(f"words {SECRET[:1]}").replace(b"i-1", b"i-%d" % number)
        item = {"type": "agentMessage", "id": f"i-{number}", "text": "delta"}
        done = json.dumps({"method": "item/completed", "params": {"threadId": "t", "item": item}}).encode()
        streamed.entries([(None, UPDATE, delta), (None, UPDATE, done)])
    later = codex("hello").replace(b"i-1", b"later")
    assert list(streamed.entries([(None, UPDATE, later)])) == [(None, UPDATE, later)]
