r"""Redact log entries of one session, including secrets that are split over deltas.

Agents stream a text in deltas, and each delta is a separate frame and event. `Redactor` of
`redactor.py` sees one event at a time. `StreamedRedactor` applies it to each entry, and remembers
the end of each streamed text that may be the beginning of a secret. It is a mutable object.

No event is delayed: each is stored when it arrives, in that order. Only text moves. If at least
`PREFIX_CHARS_MIN` characters at the end of a delta may begin a secret, they are removed from it.
They are put in front of the next delta of that text, which shows whether they do. Fewer characters
occur in ordinary text by chance, and stay in place.

    the secret hunter2secret in three deltas:   "it is hu" "nter2se" "cret."
    stored:                                     "it is hu" ""        "[redacted]."
    another text with the same beginning:       "the hunter" "s came"
    stored:                                     "the "       "hunters came"

A text that ends with the beginning of a secret lacks these characters in its deltas. The frame with
the complete text, where the agent sends one, contains them.

A frame that looks like a delta is treated as a delta. Its other faults do not matter: half of a
surrogate pair, a member of another type, bytes behind the JSON.

A secret is found in the same spellings as in `redactor.py`, including a spelling that is cut in
its middle.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from banksman.core.redaction.redactor import Redactor, text_of, token_of
from banksman.core.session.event import RECITED, TURN_ENDED, UPDATE, Entry
from banksman.core.wire.elided_text import REDACTED
from banksman.core.wire.partial_json import UNDECODABLE, decoded, split

# Number of characters at the end of a delta that are held back if a secret begins with them.
PREFIX_CHARS_MIN = 4
# A session streams one text at a time, and each of its subagents another one. But many texts have
# no frame that marks their end. Past the limit the oldest text is forgotten. Its turn then stores
# no delta text, because a later delta may continue a secret.
TEXTS_MAX = 256
# A frame that is no JSON is examined up to this size: that takes a step of Python per token.
MALFORMED_BYTES_MAX = 1 << 20

# The method of a Codex notification, as JSON.
_COMPLETED = b'"item/completed"'
_STRING = rb'"(?:[^"\\]++|\\.)*+"'
# A member that may hold the text of a delta. Inside a string its quotes would be escaped.
_MEMBERS = {
    name: re.compile(b'"' + name.encode() + rb'"\s*:\s*(' + _STRING + b")", re.DOTALL)
    for name in ("text", "thinking", "partial_json", "delta")
}
# The members that a block or a chunk may have.
_PARTS = ("text", "thinking", "partial_json")


class _Part(msgspec.Struct):
    """Claude: the delta of a content block. ACP: the content of a chunk."""

    text: str | None = None
    thinking: str | None = None
    partial_json: str | None = None


class _Said(msgspec.Struct):
    """Claude: a stream event of the model. ACP: an update; the content of a tool call is a list."""

    index: int | None = None
    delta: _Part | None = None
    content: _Part | list[msgspec.Raw] | None = None
    session_update: str | None = msgspec.field(default=None, name="sessionUpdate")


class _Item(msgspec.Struct):
    id: str | None = None


class _StreamedParams(msgspec.Struct):
    """Parameters of a notification. `done`: a Codex item that is complete."""

    delta: str | None = None
    done: _Item | None = msgspec.field(default=None, name="item")
    item: str | None = msgspec.field(default=None, name="itemId")
    session: str | None = msgspec.field(default=None, name="sessionId")
    update: _Said | None = None


class _Frame(msgspec.Struct):
    event: _Said | None = None
    parent: str | None = msgspec.field(default=None, name="parent_tool_use_id")
    method: str | None = None
    params: _StreamedParams | None = None


_decode = msgspec.json.Decoder(_Frame).decode
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class _Delta(NamedTuple):
    """A delta of a streamed text.

    `key`: the text that the delta continues. `member`: the member that holds the delta. None: a
    Claude block begins or ends, so its index belongs to another text from now on.
    """

    key: tuple[object, ...]
    member: str | None
    text: str


class _Carry(NamedTuple):
    """The end of a text that may be the beginning of a secret.

    `stored`: the number of its characters that are already in the log.
    """

    text: str
    stored: int


class StreamedRedactor:
    """Redact the entries of one session, in the order in which they are stored."""

    __slots__ = ("_carries", "_crowded", "_redactor")

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._carries: OrderedDict[tuple[object, ...], _Carry] = OrderedDict()
        # Running turns that exceeded the limit on texts.
        self._crowded: set[object] = set()

    @property
    def memory(self) -> Any:
        """Its memory of the streamed texts, as JSON for `remember` of another host."""
        texts = [[list(key), carry.text, carry.stored] for key, carry in self._carries.items()]
        return [texts, list(self._crowded)]

    def remember(self, memory: Any) -> None:
        """Continue where another redactor has stopped."""
        texts, crowded = memory
        for key, text, stored in texts:
            self._carries[tuple(key)] = _Carry(text, stored)
        self._crowded.update(crowded)

    def entries(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        """Return the entries without the secrets; the same object if none has any."""
        for _, kind, data in entries:
            # Most agents write nothing else for long, and every token takes this path.
            if kind != UPDATE or _may_be_streamed(data):
                changed = [*map(self._entry, entries)]
                return self._redactor.entries(entries if changed == [*entries] else changed)
        return self._redactor.entries(entries)

    def _entry(self, entry: Entry) -> Entry:
        turn, kind, data = entry
        if kind not in (UPDATE, RECITED):
            if kind == TURN_ENDED:
                self._forget(turn)
            return entry
        delta = _delta_of(turn, kind, data) if _may_be_streamed(data) else None
        if delta is None:
            if data.find(_COMPLETED) >= 0:
                self._complete(data)
            return entry
        if delta.member is None:
            for member in _PARTS:
                self._carries.pop((*delta.key, member), None)
            return entry
        text = (REDACTED if delta.text else "") if turn in self._crowded else self._redacted(delta)
        return entry if text == delta.text else (turn, kind, _with_text(data, delta, text))

    def _forget(self, turn: str | None) -> None:
        """Drop the state of a turn: no entry of the log belongs to a turn after its end."""
        for key in [key for key in self._carries if key[0] == turn]:
            del self._carries[key]
        self._crowded.discard(turn)

    def _complete(self, data: bytes) -> None:
        """Drop the state of a completed Codex item: it gets no further deltas, in any turn."""
        try:
            frame = _decode(data)
        except UNDECODABLE:
            return
        if (
            frame.method == "item/completed"
            and frame.params is not None
            and frame.params.done is not None
        ):
            for key in [
                key for key in self._carries if key[2:] == ("item", key[3], frame.params.done.id)
            ]:
                del self._carries[key]

    def _redacted(self, delta: _Delta) -> str:
        """Return the text to store for a delta.

        It begins with the characters held back before, and lacks the characters held back now.
        """
        before = self._carries.pop(delta.key, _Carry("", 0))
        whole, place = before.text + delta.text, before.stored
        spans, begins = self._redactor.found(whole), self._redactor.begun(whole)
        if not spans and not begins:
            return whole[place:]
        likely = min(
            (start for start, end in begins if end - start >= PREFIX_CHARS_MIN), default=len(whole)
        )
        until = max(likely, place)
        pieces: list[str] = []
        for start, end in spans:
            if start < until and end > place:
                # Stored text cannot be taken back. Two secrets that overlap give one replacement.
                if start > place or not pieces:
                    pieces += [whole[place:start], REDACTED]
                place = end
        pieces.append(whole[place:until])
        if begins:
            begun = min(begins)[0]
            self._carries[delta.key] = _Carry(whole[begun:], max(0, max(place, until) - begun))
            if len(self._carries) > TEXTS_MAX:
                (crowded, *_), _ = self._carries.popitem(last=False)
                self._crowded.add(crowded)
        return "".join(pieces)


def _may_be_streamed(data: bytes) -> bool:
    """Whether a frame contains a marker of a streamed text, in any dialect.

    Every delta contains one, every begin or end of a Claude block, and every completed Codex item.
    """
    find = data.find
    return (
        find(b"delta") >= 0
        or find(b"_chunk") >= 0
        or find(b"content_block_st") >= 0
        or find(_COMPLETED) >= 0
    )


def _delta_of(turn: str | None, kind: str, data: bytes) -> _Delta | None:
    """Return the delta in a frame, if it is one.

    A text never continues in another turn, nor from a replay into new output. So the key contains
    the turn and the kind.
    """
    try:
        frame = _decode(data)
    except UNDECODABLE:
        frame = _decode_loosely(data)
    if frame.event is not None:
        if frame.event.index is None and frame.event.delta is None:
            return None
        key = (turn, kind, "block", frame.parent, frame.event.index)
        return (
            _Delta(key, None, "") if frame.event.delta is None else _of_part(key, frame.event.delta)
        )
    if frame.params is None:
        return None
    if frame.params.delta is not None:
        return _Delta(
            (turn, kind, "item", frame.method, frame.params.item), "delta", frame.params.delta
        )
    update = frame.params.update
    if (
        update is not None
        and isinstance(update.content, _Part)
        and (update.session_update or "").endswith("_chunk")
    ):
        return _of_part(
            (turn, kind, "chunk", frame.params.session, update.session_update), update.content
        )
    return None


def _decode_loosely(data: bytes) -> _Frame:
    """Decode a frame as far as possible, although it has members of other types or is no JSON."""
    frame = _members(data)
    params = _members(frame.get("params"))
    return _Frame(
        event=_said(frame.get("event")),
        parent=_name(frame.get("parent_tool_use_id")),
        method=_name(frame.get("method")),
        params=_StreamedParams(
            delta=_text(params.get("delta")),
            item=_name(params.get("itemId")),
            session=_name(params.get("sessionId")),
            update=_said(params.get("update")),
        ),
    )


def _said(data: bytes | None) -> _Said | None:
    members = _members(data)
    if not members:
        return None
    index, delta, content = (
        _name(members.get("index")),
        members.get("delta"),
        members.get("content"),
    )
    return _Said(index, _part(delta), _part(content), _text(members.get("sessionUpdate")))


def _part(data: bytes | None) -> _Part | None:
    if data in (None, b"null"):
        return None
    members = _members(data)
    return _Part(*(_text(members.get(name)) for name in _PARTS))


def _members(data: bytes | None) -> dict[str, bytes]:
    if data is None:
        return {}
    try:
        return {name: bytes(raw) for name, raw in _decode_members(data).items()}
    except UNDECODABLE:
        return split(data[:MALFORMED_BYTES_MAX]).found


def _text(data: bytes | None) -> str | None:
    return text_of(data) if data is not None and data.startswith(b'"') else None


def _name(data: bytes | None) -> Any:
    """Return the value that identifies a text, of any type."""
    value = None if data is None else decoded(data)
    return value if isinstance(value, str | int | float) or data in (None, b"null") else data


def _of_part(key: tuple[object, ...], part: _Part) -> _Delta | None:
    for member in _PARTS:
        text: str | None = getattr(part, member)
        if text is not None:
            return _Delta((*key, member), member, text)
    return None


def _with_text(data: bytes, delta: _Delta, text: str) -> bytes:
    """Return the frame with another text in its delta. All other bytes are unchanged."""

    def replace(match: re.Match[bytes]) -> bytes:
        if text_of(match[1]) != delta.text:
            return match[0]
        return match[0][: match.start(1) - match.start()] + token_of(text)

    assert delta.member is not None
    return _MEMBERS[delta.member].sub(replace, data)
