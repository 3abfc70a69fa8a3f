"""Fold a session's log into its state and history; encode and decode snapshots of that.

`replay(events)` returns the state. `fold(history, entries)` returns a `SessionHistory`: the state,
the spec, the used idempotency keys, the open questions and the last process. All functions are
pure. `sessions/recovery.py` reads the log, and `sessions/log_writer.py` folds what it appends.

Only durable state comes back: the queue and its order, the open turn, and the agent's name for the
conversation. Holds, uncommitted writes and all clocks were lost with their process. The caller
decides about an open turn, which may have been completed or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec.structs import replace

from banksman.core.dialects.meaning import BackgroundTask
from banksman.core.session import account_limits, ask_queue, fallback, usage_events
from banksman.core.session import budget as budgets
from banksman.core.session import event as kinds
from banksman.core.session.account_limits import Windows
from banksman.core.session.ask_queue import Hold
from banksman.core.session.budget import RaisedBudget, Told
from banksman.core.session.event import Entry, Event
from banksman.core.session.idempotency import IdempotencyKey, IdempotencyKeys
from banksman.core.session.outcome import Kind, tasks_of
from banksman.core.session.permissions import Verdict
from banksman.core.session.session_config import Config
from banksman.core.session.state import AgentState, Mode, ProcessState, Session
from banksman.core.session.turn import Ask, Turn, TurnPhase, queued
from banksman.core.session.usage import NO_USAGE, Meter, Usage
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
    "agent",
    "agents",
)
_OF_PAST = ("questions", "process")
_Agent = TypeVar("_Agent", Session, AgentState)


def replay(events: Iterable[Event], config: Config, after: Session | None = None) -> Session:
    """Return the state after these events, as their writer had it.

    `after`: the state that the earlier events produced.
    """
    state = Session(config=config) if after is None else after
    head = state.head
    for event in events:
        assert event.seq == head + 1, f"event {event.seq} does not follow {head}"
        head = event.seq
        if not event.is_frame:
            state = fold_event(state, event)
    return replace(state, head=head, committed=head)


def fold_event(state: Session, event: Event) -> Session:
    """Apply one event of Banksman's own kinds to the state. Its seq is not checked."""
    return _fold_event(_use(state, event), event)


def _use(state: Session, event: Event) -> Session:
    """Add the usage in an event to the sum of the session."""
    if event.kind not in usage_events.KINDS:
        return state
    found = usage_events.addition(event.kind, event.data)
    return state if found is None else replace(state, used=state.used.plus(found.usage))


def _fold_event(state: Session, event: Event) -> Session:
    turn = event.turn
    match event.kind:
        case kinds.TURN_QUEUED:
            assert turn is not None
            return _queue(state, turn, event.body)
        case kinds.TURN_STARTED:
            assert turn is not None
            return _start(state, turn, event.body)
        case kinds.TURN_REQUEUED:
            assert state.turn is not None
            if turn != state.turn.id:
                return _requeue_unsent(state, state.turn, event)
            # The same as `Turn.requeued`, except that a steered prompt stays with the agent.
            rest = _led_by_next(state.turn, state.turn.steered)
            again = _again(state.turn.requeued(), event)
            state = _limited_by(state, event)
            return replace(state, turn=rest, queue=ask_queue.requeue(state.queue, again))
        case kinds.TURN_INTERRUPTED:
            for name in ("turn", "own"):
                open_turn: Turn | None = getattr(state, name)
                if open_turn is not None and open_turn.id == turn:
                    return replace(
                        state, **{name: replace(open_turn, phase=TurnPhase.INTERRUPTING)}
                    )
            return state
        case kinds.TURN_ENDED:
            assert turn is not None
            body = event.body
            # An agent that has completed a turn knows its conversation.
            is_adopted = state.is_adopted and body["outcome"] != Kind.DONE
            ended = _end_turn(state, turn)
            failure: Mapping[str, Any] = body.get("failure") or {}
            return replace(
                ended,
                spent=body["spent"],
                cost=body["cost_in_all"],
                is_adopted=is_adopted,
                limited_until=account_limits.limited_after(
                    state.limited_until, Kind(body["outcome"]), failure.get("limited_until")
                ),
            )
        case kinds.USAGE_REPORTED:
            return _count(state, event)
        case kinds.QUEUE_CHANGED:
            assert turn is not None
            return replace(state, queue=ask_queue.move(state.queue, turn, event.body["before"]))
        case kinds.PROCESS_STARTED:
            return replace(state, process=ProcessState(number=event.body["process"]))
        case kinds.TASKS_CHANGED:
            return _with_tasks(state, tasks_of(event.body["tasks"]))
        case _:
            return _fold_session(state, event)


def _with_tasks(state: Session, tasks: tuple[BackgroundTask, ...]) -> Session:
    return replace(state, process=replace(state.process, tasks=tasks))


def _fold_session(state: Session, event: Event) -> Session:
    """Apply an event that concerns the session as a whole."""
    match event.kind:
        case kinds.SESSION_OPENED:
            return _open(state, event.body)
        case kinds.SESSION_IMPORTED:
            # An imported session is a copy. Its open and waiting asks are served at the origin, and
            # so is its conversation. The copy forks that conversation.
            left = replace(
                _with_tasks(state, ()),
                queue=(),
                turn=None,
                own=None,
                agents=tuple((name, _copied(agent)) for name, agent in state.agents),
            )
            return _copied(left)
        case kinds.SESSION_CONVERSATION:
            return replace(state, conversation=event.body["conversation"], is_adopted=False)
        case kinds.SESSION_CONTEXT_LOST:
            return replace(state, conversation=None, fork_of=None, spent=0.0, is_adopted=False)
        case kinds.SESSION_SETTING:
            name, value = event.body["name"], event.body["value"]
            kept = tuple(pair for pair in state.settings if pair[0] != name)
            return replace(state, settings=kept if value is None else (*kept, (name, value)))
        case kinds.LIMITS_CHANGED:
            body = event.body
            told = {
                "limits": account_limits.from_json(body["windows"]),
                "limited_until": body["limited_until"],
            }
            other = body.get("agent")
            return replace(state, **told) if other is None else fallback.noted(state, other, **told)
        case kinds.SESSION_FELL_BACK:
            return fallback.switched(state, event.body["from"], event.body["to"])
        case kinds.BUDGET_WARNING | kinds.BUDGET_EXCEEDED:
            body = event.body
            if body["scope"] != "session":
                return state
            cap = (event.kind, body["unit"], body["cap"])
            return replace(state, told=budgets.with_told(state.told, cap))
        case kinds.BUDGET_RAISED:
            return replace(state, raised=msgspec.convert(event.body, RaisedBudget))
        case kinds.SESSION_CLOSED:
            return replace(state, mode=Mode.CLOSED)
        case kinds.SESSION_STORE_RETURNED:
            # The process was stopped when the log broke, and could not log the end of its tasks.
            return _with_tasks(state, ())
        case _:
            return state


def _copied(state: _Agent) -> _Agent:
    """Return the state of an agent in an imported copy, which forks the conversation."""
    origin = state.conversation or state.fork_of
    left = replace(
        state,
        settings=(),
        conversation=None,
        fork_of=origin,
        # The agent may use another account here.
        limits=(),
        limited_until=None,
    )
    return left if origin is None else replace(left, spent=None, is_adopted=True)


def _open(state: Session, body: dict[str, Any]) -> Session:
    state = replace(state, mode=Mode.OPEN)
    if body["resume"] is None:
        return state
    # The conversation began elsewhere. Its cost so far is unknown, and so is whether it exists at
    # all.
    conversation, fork_of = (None, body["resume"]) if body["fork"] else (body["resume"], None)
    return replace(state, conversation=conversation, fork_of=fork_of, spent=None, is_adopted=True)


def _queue(state: Session, id: str, body: dict[str, Any]) -> Session:
    prompt: Any = body["prompt"]
    ask = Ask(
        id=id,
        ref=body["ref"],
        prompt=prompt,
        priority=body["priority"],
        on_busy=body["on_busy"],
        on_preempt=body["on_preempt"],
        key=body["key"],
        rules=tuple((name, Verdict(verdict)) for name, verdict in body["rules"]),
        schema=body["schema"],
        is_last=body["is_last"],
        # Events of earlier versions lack both.
        deadline=body.get("deadline"),
        caller=body.get("caller"),
    )
    if body.get("into") is not None:
        return replace(state, queue=ask_queue.join(state.queue, body["into"], ask))
    return replace(state, queue=ask_queue.enqueue(state.queue, queued(ask)))


def _start(state: Session, id: str, body: dict[str, Any]) -> Session:
    if "origin" in body:
        own = Turn(
            id=id,
            ask=None,
            priority=ask_queue.OWN_PRIORITY,
            origin=body["origin"],
            phase=TurnPhase.RUNNING,
        )
        return replace(state, own=own, own_count=state.own_count + 1)
    if state.turn is not None and state.turn.id == id:
        # The ask was steered into a turn that is over, and the agent reached its prompt unprompted.
        return replace(state, turn=replace(state.turn, attempt=body["attempt"], limit_waits=0))
    waiting = ask_queue.find(state.queue, id)
    assert waiting is not None, f"turn {id} was never queued"
    queue = ask_queue.remove(state.queue, waiting.id)
    if "into" in body:
        assert state.turn is not None
        assert waiting.ask is not None
        return replace(
            state, queue=queue, turn=replace(state.turn, steered=(*state.turn.steered, waiting.ask))
        )
    return replace(
        state, queue=queue, turn=replace(waiting, phase=TurnPhase.STARTING, attempt=body["attempt"])
    )


def _count(state: Session, event: Event) -> Session:
    """Add a report of usage to the open turn that it belongs to."""
    added = msgspec.convert(event.body["added"], Usage)
    for name in ("turn", "own"):
        turn: Turn | None = getattr(state, name)
        if turn is not None and turn.id == event.turn:
            meter = replace(turn.meter, logged=turn.meter.logged.plus(added))
            return replace(state, **{name: replace(turn, meter=meter)})
    return state


def _requeue_unsent(state: Session, turn: Turn, event: Event) -> Session:
    """Requeue a steered ask: its prompt was not sent, or a limit of the account failed it."""
    ask = next((ask for ask in turn.steered if ask.id == event.turn), None)
    assert ask is not None, f"{event.turn} was not to be added to {turn.id}"
    again = _again(queued(ask), event)
    rest = replace(turn, steered=tuple(other for other in turn.steered if other is not ask))
    state = _limited_by(state, event)
    return replace(state, turn=rest, queue=ask_queue.requeue(state.queue, again))


def _again(turn: Turn, event: Event) -> Turn:
    """Return a requeued turn. Only a limit of the account is a logged reason."""
    waits = turn.limit_waits + (event.body.get("reason") == "limit")
    # The agent that got the prompt, if the session has several.
    agent = event.body.get("agent") or turn.agent
    return replace(turn, attempt=event.body["attempt"], limit_waits=waits, agent=agent)


def _limited_by(state: Session, event: Event) -> Session:
    until = event.body.get("limited_until")
    return state if until is None else replace(state, limited_until=until)


def _end_turn(state: Session, id: str) -> Session:
    if state.own is not None and state.own.id == id:
        return replace(state, own=None)
    turn = state.turn
    if turn is not None and any(ask.id == id for ask in turn.asks):
        return replace(state, turn=_without(turn, id))
    waiting = ask_queue.find(state.queue, id)
    assert waiting is not None, f"turn {id} ended twice, or was never queued"
    rest = _without(waiting, id)
    kept = () if rest is None else (rest,)
    index = state.queue.index(waiting)
    return replace(state, queue=(*state.queue[:index], *kept, *state.queue[index + 1 :]))


def _without(turn: Turn, id: str) -> Turn | None:
    """Return a turn without one of its asks, led by the next one; None if no ask is left."""
    if turn.ask is None:
        return None
    if turn.id != id:
        joined = tuple(ask for ask in turn.joined if ask.id != id)
        return replace(
            turn, joined=joined, steered=tuple(ask for ask in turn.steered if ask.id != id)
        )
    # If the leading ask ends, the whole turn is over, and the endings of the other asks follow.
    # Steered prompts continue.
    return _led_by_next(turn, (*turn.joined, *turn.steered))


def _led_by_next(turn: Turn, rest: tuple[Ask, ...]) -> Turn | None:
    if not rest:
        return None
    first, *others = rest
    return replace(
        turn,
        id=first.id,
        ask=first,
        joined=tuple(a for a in others if a in turn.joined),
        steered=tuple(a for a in others if a in turn.steered),
        # The turn that is over has counted its usage.
        meter=Meter(),
    )


# A session's log, folded: everything that another host needs to continue the session.
#
#     history ──fold(entries)──► history ──encode──► snapshot ──decode──► history
#
# The snapshot is stored beside the events. A log is read from its last snapshot on, never from its
# beginning. So a session of a million events opens as fast as one of a thousand. The snapshot is
# just the encoded fold. `fold` from the snapshot and `fold` from the first event give the same
# `SessionHistory`, which is tested at every prefix. So there is one definition of a session's
# state, and no second copy that could be out of date.
#
# Besides the session's state (see above), the history has the spec, the used idempotency keys, the
# open questions, and the last process. A host that recovers the session checks whether that process
# still runs.

_kind_of = itemgetter(1)


class OpenQuestion(msgspec.Struct, frozen=True, array_like=True):
    """A question without an answer.

    `about`: its subject, as JSON. `is_kept`: the process that asked is gone; see questions.py.
    """

    id: str
    turn: str | None
    about: str = ""
    is_kept: bool = False


class LastProcess(msgspec.Struct, frozen=True, array_like=True):
    """The process that was started last, with its keeper and its host.

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

    @property
    def parts(self) -> tuple[str, int, int, int, int, int, int]:
        """The tuple that `process/orphans.py` identifies processes by."""
        return msgspec.structs.astuple(self)


class SessionHistory(msgspec.Struct, frozen=True, kw_only=True):
    """The folded log: session state, spec, idempotency keys, open questions and last process."""

    session: Session
    opened: Mapping[str, Any] | None = None
    keys: IdempotencyKeys = _NO_KEYS
    questions: tuple[OpenQuestion, ...] = ()
    process: LastProcess | None = None


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
    seq = past.session.head + frames
    return replace(past, session=replace(past.session, head=seq, committed=seq))


def fold_events(past: SessionHistory, events: Iterable[Event]) -> SessionHistory:
    """Append events that were read from the log."""
    return fold(past, ((event.turn, event.kind, event.data) for event in events))


def _fold(past: SessionHistory, event: Event) -> SessionHistory:
    past = replace(past, session=fold_event(past.session, event))
    match event.kind:
        case kinds.SESSION_OPENED:
            return replace(past, opened=event.body)
        case kinds.TURN_QUEUED if event.body["key"] is not None:
            assert event.turn is not None
            key = IdempotencyKey(event.body["key"], event.turn, event.seq - 1)
            return replace(past, keys=past.keys.queued(key))
        case kinds.TURN_ENDED:
            return _end(past, event)
        case kinds.SESSION_IMPORTED:
            # The spec, the process and the questions of the origin do not apply to this copy.
            return replace(
                past, opened=None, process=None, questions=(), keys=past.keys.without_waiting()
            )
        case kinds.QUESTION_ASKED:
            question = OpenQuestion(event.body["question"], event.turn, event.data.decode())
            return replace(
                past, questions=(*(q for q in past.questions if q.id != question.id), question)
            )
        case kinds.QUESTION_KEPT:
            kept = (
                _without_turn(q, is_kept=True) if q.id == event.body["question"] else q
                for q in past.questions
            )
            return replace(past, questions=tuple(kept))
        case kinds.QUESTION_ANSWERED:
            left = tuple(
                question for question in past.questions if question.id != event.body["question"]
            )
            return replace(past, questions=left)
        case kinds.SESSION_STORE_RETURNED:
            # While the log was broken, nothing was written, not even answers. The process that had
            # asked these questions was stopped then.
            return replace(
                past, questions=tuple(question for question in past.questions if question.is_kept)
            )
        case kinds.PROCESS_STARTED:
            return replace(
                past, process=msgspec.convert(event.body.get("born"), LastProcess | None)
            )
        case _:
            return past


def _end(past: SessionHistory, event: Event) -> SessionHistory:
    """Apply the end of a turn to keys and questions. Usually it has neither."""
    keys = past.keys.ended(event.turn, Kind(event.body["outcome"]))
    if keys is not past.keys:
        past = replace(past, keys=keys)
    if any(question.turn == event.turn for question in past.questions):
        # The turn did not wait for these questions. They belong to a background task, which
        # continues: see `questions.leave`.
        left = (_without_turn(q) if q.turn == event.turn else q for q in past.questions)
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
    tasks: tuple[BackgroundTask, ...] = ()
    limits: Windows = ()
    limited_until: float | None = None
    used: Usage = NO_USAGE
    raised: RaisedBudget | None = None
    told: Told = ()
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
    # A hold lives in its holder's process and is never logged.
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
