"""What a session's log says, folded: all that whoever finds the session needs in order to go on with it.

    Past ──fold(entries)──► Past ──encode──► a snapshot, kept beside the events ──decode──► Past

A log is read from its last snapshot on, never from its beginning: a session of a million events opens as fast as one of
a thousand. The snapshot is nothing but the fold, written down; `fold` from it and `fold` from the first event give the
same `Past`, which is tested at every prefix. So there is one way to know what a session is, and no second account of it
that could be older than the first.

Besides the session's state (see replay.py) the past knows how the session was opened, which idempotency keys were used,
which questions wait, and which process was started last: who recovers a session looks whether that is still there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from banksman.core import event as kinds
from banksman.core.arbiter import Hold
from banksman.core.config import Config
from banksman.core.event import Entry, Event
from banksman.core.keys import Key, Keys
from banksman.core.outcome import Kind
from banksman.core.replay import fold as fold_state
from banksman.core.state import Mode, Process, Session
from banksman.core.turn import Turn
from banksman.errors import StoreTooNew

_FRAMES = kinds.FRAMES
_kind_of = itemgetter(1)
_NO_KEYS = Keys()
# The form of a snapshot. One of another form is not read: the events are, from the first one.
VERSION = 1


class OpenQuestion(msgspec.Struct, frozen=True, array_like=True):
    """`about`: what it is about, as JSON. `is_kept`: who asked it is gone; see keeping.py."""

    id: str
    turn: str | None
    about: str = ""
    is_kept: bool = False


class Born(msgspec.Struct, frozen=True, array_like=True):
    """The process that was started last: its pid, its keeper's and its host's, each with the time of its start, which
    no other process of that pid has, in this boot of the machine."""

    boot: str
    pid: int
    started: int
    keeper: int
    keeper_started: int
    host: int = 0
    host_started: int = 0

    @property
    def parts(self) -> tuple[str, int, int, int, int, int, int]:
        return msgspec.structs.astuple(self)


class Past(msgspec.Struct, frozen=True, kw_only=True):
    session: Session
    opened: Mapping[str, Any] | None = None
    keys: Keys = _NO_KEYS
    questions: tuple[OpenQuestion, ...] = ()
    process: Born | None = None


def beginning(config: Config) -> Past:
    """Of a session that has no events."""
    return Past(session=Session(config=config))


def fold(past: Past, entries: Iterable[Entry]) -> Past:
    """The past with these after it. Frames of the agent, which are nearly all, change nothing but the count."""
    seq = past.session.head
    entries = tuple(entries)
    if _FRAMES.issuperset(map(_kind_of, entries)):
        seq += len(entries)  # The path of every token, of which there are hundreds in a chunk.
        entries = ()
    for turn, kind, data in entries:
        seq += 1
        if kind not in _FRAMES:
            past = _fold(past, Event("", 0, seq, 0.0, turn, kind, data))
    return replace(past, session=replace(past.session, head=seq, committed=seq))


def fold_events(past: Past, events: Iterable[Event]) -> Past:
    """The same, of events that were read."""
    return fold(past, ((event.turn, event.kind, event.data) for event in events))


def _fold(past: Past, event: Event) -> Past:
    past = replace(past, session=fold_state(past.session, event))
    match event.kind:
        case kinds.SESSION_OPENED:
            return replace(past, opened=event.body)
        case kinds.TURN_QUEUED if event.body["key"] is not None:
            assert event.turn is not None
            key = Key(event.body["key"], event.turn, event.seq - 1)
            return replace(past, keys=past.keys.queued(key))
        case kinds.TURN_ENDED:
            return _end(past, event)
        case kinds.SESSION_IMPORTED:
            # How it was opened there, which process it had, and what that has asked, says nothing about this place.
            return replace(past, opened=None, process=None, questions=(), keys=past.keys.without_waiting())
        case kinds.QUESTION_ASKED:
            question = OpenQuestion(event.body["question"], event.turn, event.data.decode())
            return replace(past, questions=(*(q for q in past.questions if q.id != question.id), question))
        case kinds.QUESTION_KEPT:
            kept = (_nobodys(q, is_kept=True) if q.id == event.body["question"] else q for q in past.questions)
            return replace(past, questions=tuple(kept))
        case kinds.QUESTION_ANSWERED:
            left = tuple(question for question in past.questions if question.id != event.body["question"])
            return replace(past, questions=left)
        case kinds.SESSION_STORE_RETURNED:
            # While the log was broken nothing was written, no answer either; and the process that had asked was ended.
            return replace(past, questions=tuple(question for question in past.questions if question.is_kept))
        case kinds.PROCESS_STARTED:
            return replace(past, process=msgspec.convert(event.body.get("born"), Born | None))
        case _:
            return past


def _end(past: Past, event: Event) -> Past:
    """Mostly there is nothing of it: neither a key, nor a question."""
    keys = past.keys.ended(event.turn, Kind(event.body["outcome"]))
    if keys is not past.keys:
        past = replace(past, keys=keys)
    if any(question.turn == event.turn for question in past.questions):
        # It did not wait for them: they are of a task in its background, which goes on. See `questioning.leave`.
        left = (_nobodys(q) if q.turn == event.turn else q for q in past.questions)
        past = replace(past, questions=tuple(left))
    return past


def _nobodys(question: OpenQuestion, *, is_kept: bool = False) -> OpenQuestion:
    return replace(question, turn=None, is_kept=is_kept or question.is_kept)


# -- snapshots -------------------------------------------------------------------------------------------------------
class _Saved(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What folding can change, by the names of `Session` and `Past`. All else is as it is in a new session. A name that
    is not known is an error: to pass over it would be to make another session of it."""

    version: int
    head: Annotated[int, msgspec.Meta(ge=0)]
    mode: Mode = Mode.OPEN
    conversation: str | None = None
    fork_of: str | None = None
    is_adopted: bool = False
    spent: float | None = None
    cost: float | None = None
    settings: tuple[tuple[str, str], ...] = ()
    queue: tuple[Turn, ...] = ()
    turn: Turn | None = None
    own: Turn | None = None
    own_count: int = 0
    processes: int = 0
    opened: dict[str, Any] | None = None
    keys: tuple[Key, ...] = ()
    questions: tuple[OpenQuestion, ...] = ()
    process: Born | None = None


class _Form(msgspec.Struct, frozen=True):
    version: int


_OF_SESSION = ("conversation", "fork_of", "is_adopted", "spent", "cost", "settings", "turn", "own", "own_count", "mode")
_OF_PAST = ("questions", "process")
_encoder = msgspec.json.Encoder()
_form_decoder = msgspec.json.Decoder(_Form)
_decoder = msgspec.json.Decoder(_Saved)


def encode(past: Past) -> bytes:
    session = past.session
    assert session.committed == session.head
    # Holds are their holders', and die with them: the log knows of none.
    assert not any(isinstance(waiting, Hold) for waiting in session.queue)
    queue = tuple(waiting for waiting in session.queue if isinstance(waiting, Turn))
    saved = _Saved(
        version=VERSION,
        head=session.head,
        queue=queue,
        processes=session.process.number,
        opened=None if past.opened is None else dict(past.opened),
        keys=tuple(past.keys),
        **{name: getattr(session, name) for name in _OF_SESSION},
        **{name: getattr(past, name) for name in _OF_PAST},
    )
    return _encoder.encode(saved)


def decode(data: bytes, config: Config) -> Past:
    """`StoreTooNew`: it was written by a later version, in a form that this one does not know. `ValueError`: it was
    written by nobody."""
    try:
        return _decode(data, config)
    except RecursionError as exc:
        raise ValueError("it is nested too deep for anything that was ever encoded") from exc


def _decode(data: bytes, config: Config) -> Past:
    version = _form_decoder.decode(data).version
    if version != VERSION:
        hint = "a newer Banksman has written it: use that one"
        raise StoreTooNew(f"the session's snapshot has the form {version}, and {VERSION} is known here", hint=hint)
    saved = _decoder.decode(data)
    session = Session(
        config=config,
        head=saved.head,
        committed=saved.head,
        queue=saved.queue,
        process=Process(number=saved.processes),
        **{name: getattr(saved, name) for name in _OF_SESSION},
    )
    parts = {name: getattr(saved, name) for name in _OF_PAST}
    return Past(session=session, opened=saved.opened, keys=Keys(saved.keys), **parts)
