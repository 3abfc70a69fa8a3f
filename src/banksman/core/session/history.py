"""Everything in a session's log that another host needs to continue the session; snapshots of it.

    history ──fold(entries)──► history ──encode──► snapshot ──decode──► history

A `SessionHistory` has the session's state (`replay.py`), the spec, the used idempotency keys, the
open questions and the last process. A host that recovers the session checks whether that process
still runs. All functions are pure. `sessions/recovery.py` reads the log, and
`sessions/log_writer.py` folds what it appends.

The snapshot is stored beside the events. A log is read from its last snapshot on, never from its
beginning. So a session of a million events opens as fast as one of a thousand. The snapshot is
just the encoded fold. `fold` from the snapshot and `fold` from the first event give the same
`SessionHistory`, which is tested at every prefix. So there is one definition of a session's state,
and no second copy that could be out of date.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from banksman.core.dialects.meaning import BackgroundTask, RequestPurpose
from banksman.core.process_facts import Born
from banksman.core.session import budget as budgets
from banksman.core.session import event as kinds
from banksman.core.session import fallback
from banksman.core.session.account_limits import Windows
from banksman.core.session.ask_queue import Hold
from banksman.core.session.budget import LoggedCaps, RaisedBudget
from banksman.core.session.event import Entry, Event
from banksman.core.session.idempotency import IdempotencyKey, IdempotencyKeys
from banksman.core.session.outcome import Kind
from banksman.core.session.replay import fold_event
from banksman.core.session.session_config import Config
from banksman.core.session.state import AgentState, Mode, ProcessState, Session
from banksman.core.session.turn import Turn
from banksman.core.session.usage import NO_USAGE, Usage
from banksman.errors import StoreTooNew

_FRAMES = kinds.FRAMES
_NO_KEYS = IdempotencyKeys()
# Format version of a snapshot. A snapshot of another version is not decoded: the caller folds the
# events from the first one instead, if the log still has it.
VERSION = 1
_OF_SESSION = (
    "conversation",
    "fork_of",
    "is_adopted",
    "spent",
    "cost",
    "settings",
    "turn",
    "own",
    "own_count",
    "mode",
    "limits",
    "limited_until",
    "used",
    "raised",
    "told",
    "is_budget_answered",
    "agent",
    "agents",
)
_OF_PAST = ("questions", "process", "held")

# Members of `SessionHistory.opened` that say who may use the session. They are no part of its spec.
ACCESS = ("caller", "shared")

_kind_of = itemgetter(1)


class OpenQuestion(msgspec.Struct, frozen=True, array_like=True):
    """A question without an answer.

    `about`: its subject, as JSON. `is_kept`: the process that asked is gone; see questions.py.
    """

    id: str
    turn: str | None
    about: str = ""
    is_kept: bool = False

    @property
    def wants(self) -> str:
        """See `RequestPurpose`. Empty for a question of an old snapshot, which has no subject."""
        return str(msgspec.json.decode(self.about)["wants"]) if self.about else ""


class LastProcess(msgspec.Struct, frozen=True, array_like=True):
    """The process that was started last, with its keeper, its host and its keeper's zygote.

    Each pid comes with its start time, which no other process with that pid has in the same boot of
    the machine.
    """

    boot: str
    pid: int
    started: int
    keeper: int
    keeper_started: int
    host: int = 0
    host_started: int = 0
    zygote: int = 0
    zygote_started: int = 0

    @property
    def parts(self) -> Born:
        """The tuple that `process/orphans.py` identifies processes by."""
        return msgspec.structs.astuple(self)


class HeldProcess(msgspec.Struct, frozen=True):
    """A process that a keeper holds for the next owner of the session.

    `hold`: the name of the hold. `host`: the pid of the host that has handed it over. `process`:
    the number of the process. `until`: the end of the hold (wall clock).
    """

    hold: str
    host: int
    process: int
    until: float


class SessionHistory(msgspec.Struct, frozen=True, kw_only=True):
    """The folded log: session state, spec, idempotency keys, open questions and last process.

    `held`: its process waits for the next owner. Any later event ends that. The log writer stores
    no snapshot with it, so that earlier versions can read every stored one.
    """

    session: Session
    opened: Mapping[str, Any] | None = None
    keys: IdempotencyKeys = _NO_KEYS
    questions: tuple[OpenQuestion, ...] = ()
    process: LastProcess | None = None
    held: HeldProcess | None = None


def beginning(config: Config) -> SessionHistory:
    """Return the history of a session without events."""
    return SessionHistory(session=Session(config=config))


def fold(past: SessionHistory, entries: Iterable[Entry]) -> SessionHistory:
    """Append entries to the history.

    Most entries are frames of the agent, which change only the count.
    """
    seq = past.session.head
    entries = tuple(entries)
    if _FRAMES.issuperset(map(_kind_of, entries)):
        return skip(past, len(entries))
    for turn, kind, data in entries:
        seq += 1
        if kind not in _FRAMES:
            past = _fold(past, Event("", 0, seq, 0.0, turn, kind, data))
    return skip(past, seq - past.session.head)


def skip(past: SessionHistory, frames: int) -> SessionHistory:
    """Append so many frames to the history."""
    if not frames:
        return past
    seq = past.session.head + frames
    return replace(past, session=replace(past.session, head=seq, committed=seq))


def fold_events(past: SessionHistory, events: Iterable[Event]) -> SessionHistory:
    """Append events that were read from the log."""
    return fold(past, ((event.turn, event.kind, event.data) for event in events))


def _fold(past: SessionHistory, event: Event) -> SessionHistory:
    body = event.body
    past = replace(past, session=fold_event(past.session, event, body), held=None)
    match event.kind:
        case kinds.SESSION_OPENED:
            return replace(past, opened=_reopened(past, body))
        case kinds.SESSION_SHARED if past.opened is not None:
            return replace(past, opened={**past.opened, "shared": body["shared"]})
        case kinds.TURN_QUEUED if body["key"] is not None:
            assert event.turn is not None
            key = IdempotencyKey(body["key"], event.turn, event.seq - 1)
            return replace(past, keys=past.keys.queued(key))
        case kinds.TURN_ENDED:
            return _end(past, event.turn, body)
        case kinds.SESSION_IMPORTED:
            # The spec, the process and the questions of the origin do not apply to this copy.
            past = _budget_answered(past, False)
            return replace(
                past, opened=None, process=None, questions=(), keys=past.keys.without_waiting()
            )
        case kinds.QUESTION_ASKED:
            question = OpenQuestion(body["question"], event.turn, event.data.decode())
            if question.wants == RequestPurpose.BUDGET:
                past = _budget_answered(past, False)
            return replace(
                past, questions=(*(q for q in past.questions if q.id != question.id), question)
            )
        case kinds.QUESTION_KEPT:
            kept = (
                _without_turn(q, is_kept=True) if q.id == body["question"] else q
                for q in past.questions
            )
            return replace(past, questions=tuple(kept))
        case kinds.QUESTION_ANSWERED:
            left = tuple(question for question in past.questions if question.id != body["question"])
            ended = (question for question in past.questions if question not in left)
            if any(question.wants == RequestPurpose.BUDGET for question in ended):
                # Older versions logged only an option that the answer named.
                past = _budget_answered(past, body.get("option") in {budgets.FINISH, budgets.STOP})
            return replace(past, questions=left)
        case kinds.SESSION_STORE_RETURNED:
            # While the log was broken, nothing was written, not even answers. The process that had
            # asked these questions was stopped then.
            return replace(
                past, questions=tuple(question for question in past.questions if question.is_kept)
            )
        case kinds.SESSION_HANDED_OVER:
            return replace(past, held=msgspec.convert(body, HeldProcess))
        case kinds.PROCESS_STARTED | kinds.PROCESS_ADOPTED:
            return replace(past, process=msgspec.convert(body.get("born"), LastProcess | None))
        case _:
            return past


def _budget_answered(past: SessionHistory, is_answered: bool) -> SessionHistory:
    if past.session.is_budget_answered == is_answered:
        return past
    return replace(past, session=replace(past.session, is_budget_answered=is_answered))


def _reopened(past: SessionHistory, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the record of an open. It keeps the first caller, and whom the session is shared with.

    Otherwise any caller could get a session by opening it again.
    """
    if past.opened is None:
        return body
    kept = {name: past.opened[name] for name in ACCESS if name in past.opened}
    return {name: value for name, value in body.items() if name not in ACCESS} | kept


def _end(past: SessionHistory, turn: str | None, body: dict[str, Any]) -> SessionHistory:
    """Apply the end of a turn to keys and questions. Usually it has neither."""
    keys = past.keys.ended(turn, Kind(body["outcome"]))
    if keys is not past.keys:
        past = replace(past, keys=keys)
    if any(question.turn == turn for question in past.questions):
        # The turn did not wait for these questions. They belong to a background task, which
        # continues: see `questions.leave`.
        left = (_without_turn(q) if q.turn == turn else q for q in past.questions)
        past = replace(past, questions=tuple(left))
    return past


def _without_turn(question: OpenQuestion, *, is_kept: bool = False) -> OpenQuestion:
    return replace(question, turn=None, is_kept=is_kept or question.is_kept)


# -- snapshots -----------------------------------------------------------------------------------
class _Saved(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """The state that folding can change, by the names of `Session` and `SessionHistory`.

    All other state is that of a new session. An unknown name is an error, because ignoring it would
    decode a different session.
    """

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
    keys: tuple[IdempotencyKey, ...] = ()
    questions: tuple[OpenQuestion, ...] = ()
    process: LastProcess | None = None
    held: HeldProcess | None = None
    tasks: tuple[BackgroundTask, ...] = ()
    limits: Windows = ()
    limited_until: float | None = None
    used: Usage = NO_USAGE
    raised: RaisedBudget | None = None
    told: LoggedCaps = ()
    is_budget_answered: bool = False
    agent: str | None = None
    agents: tuple[tuple[str, AgentState], ...] = ()


class _Form(msgspec.Struct, frozen=True):
    version: int


_encoder = msgspec.json.Encoder()
_form_decoder = msgspec.json.Decoder(_Form)
_decoder = msgspec.json.Decoder(_Saved)


def encode(past: SessionHistory) -> bytes:
    """Encode a history as a snapshot."""
    session = past.session
    assert session.committed == session.head
    # A hold lives in its holder's process, and no host restores it.
    assert not any(isinstance(waiting, Hold) for waiting in session.queue)
    queue = tuple(waiting for waiting in session.queue if isinstance(waiting, Turn))
    saved = _Saved(
        version=VERSION,
        head=session.head,
        queue=queue,
        processes=session.process.number,
        tasks=session.process.tasks,
        opened=None if past.opened is None else dict(past.opened),
        keys=tuple(past.keys),
        **{name: getattr(session, name) for name in _OF_SESSION},
        **{name: getattr(past, name) for name in _OF_PAST},
    )
    return _encoder.encode(saved)


def decode(data: bytes, config: Config) -> SessionHistory:
    """Decode a snapshot.

    `StoreTooNew`: another version wrote it, in a format that this version does not know.
    `ValueError`: no version of Banksman wrote it.
    """
    try:
        return _decode(data, config)
    except RecursionError as exc:
        raise ValueError("nested too deep") from exc


def _decode(data: bytes, config: Config) -> SessionHistory:
    version = _form_decoder.decode(data).version
    if version != VERSION:
        message = f"cannot read the session's snapshot: its version is {version}, not {VERSION}"
        raise StoreTooNew(message, hint="use the newer version of Banksman that wrote it")
    saved = _decoder.decode(data)
    session = Session(
        config=fallback.config_of(config, saved.agent),
        head=saved.head,
        committed=saved.head,
        queue=saved.queue,
        process=ProcessState(number=saved.processes, tasks=saved.tasks),
        **{name: getattr(saved, name) for name in _OF_SESSION},
    )
    parts = {name: getattr(saved, name) for name in _OF_PAST}
    return SessionHistory(
        session=session, opened=saved.opened, keys=IdempotencyKeys(saved.keys), **parts
    )
