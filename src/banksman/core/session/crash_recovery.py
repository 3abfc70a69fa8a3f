"""Settle a session whose host died, from its log alone: return the entries to append.

`sessions/recovery.py` claims the session, ends its old processes and appends the entries. The host
that claims the session does this once:

- A turn whose start is in the log may have been sent, and may have been completed. That cannot be
  known, so its outcome is UNKNOWN, and it is never resent automatically.
- An ask without a start in the log was not sent. It keeps its place in the queue. But if its prompt
  held a secret, which the log does not store, it is refused: the rest is not the caller's prompt.
- The agent's background tasks ended with its process.
- A question waited for an answer to a process that is gone. It is withdrawn, because an answer
  could reach no process. Or it is kept, if that is the session's policy: see questions.py. The
  question about a budget stays open, because it needs no process.

Settling is idempotent: a settled log has nothing left to settle, so a second call returns no
entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from banksman.core.session import event as kinds
from banksman.core.session import questions
from banksman.core.session.event import Entry, entry
from banksman.core.session.history import OpenQuestion, SessionHistory
from banksman.core.session.outcome import By, Kind
from banksman.core.session.turn import Turn
from banksman.core.session.turn_usage import caller_of
from banksman.core.session.usage import Usage
from banksman.core.wire.elided_text import REDACTED

MAIMED = "the log does not keep the secret in the prompt: ask again"
ERROR = "the host died during the turn: the agent may have done all or part of it"


def settle(past: SessionHistory, *, swept: Sequence[str] = ()) -> list[Entry]:
    """Return the entries to append; empty if nothing was open.

    `swept`: processes of the session that were found and ended.
    """
    session = past.session
    waiting = [ask for turn in session.queue if isinstance(turn, Turn) for ask in turn.asks]
    maimed = [ask for ask in waiting if REDACTED in repr(ask.prompt)]
    # A save prompt (`is_last`) is for one process only, and that process is gone.
    needless = [ask for ask in waiting if ask.is_last and ask not in maimed]
    unknown = () if session.turn is None else session.turn.asks
    entries = [
        _without_process(past, question)
        for question in past.questions
        if not question.is_kept and not questions.is_about_budget(question)
    ]
    entries += [_ended(past, ask.id, Kind.REFUSED, By.WITHDRAWN, MAIMED) for ask in maimed]
    entries += [_ended(past, ask.id, Kind.WITHDRAWN, By.WITHDRAWN, None) for ask in needless]
    if session.own is not None:
        own = session.own
        entries.append(
            _ended(
                past,
                own.id,
                Kind.UNKNOWN,
                By.EXIT,
                ERROR,
                counts=own,
                origin=own.origin,
            )
        )
    entries += [
        _ended(
            past,
            ask.id,
            Kind.UNKNOWN,
            By.EXIT,
            ERROR,
            counts=session.turn if index == 0 else None,
        )
        for index, ask in enumerate(unknown)
    ]
    if session.process.tasks:
        entries.append(entry(None, kinds.TASKS_CHANGED, tasks=()))
    if not entries and not swept:
        return []
    recovered = entry(
        None,
        kinds.SESSION_RECOVERED,
        unknown=[*([] if session.own is None else [session.own.id]), *(ask.id for ask in unknown)],
        queued=[ask.id for ask in waiting if ask not in maimed and ask not in needless],
        swept=list(swept),
    )
    return [*entries, recovered]


def _without_process(past: SessionHistory, question: OpenQuestion) -> Entry:
    options: Mapping[str, Any] = {} if past.opened is None else past.opened.get("options", {})
    keeps = options.get("question_after_crash") == "keep"
    # A redacted question differs from the original, so a resumed agent would never ask the same
    # again.
    if keeps and questions.is_about_a_tool(question) and REDACTED not in question.about:
        return entry(question.turn, kinds.QUESTION_KEPT, question=question.id)
    return entry(
        question.turn,
        kinds.QUESTION_ANSWERED,
        question=question.id,
        answer="withdrawn",
        by="recovery",
        message=None,
    )


def _ended(
    past: SessionHistory,
    id: str,
    kind: Kind,
    by: By,
    error: str | None,
    *,
    counts: Turn | None = None,
    **more: object,
) -> Entry:
    # The reports of the agent are in the log and are counted. Later usage is unknown.
    once = Usage(turns=1)
    return entry(
        id,
        kinds.TURN_ENDED,
        outcome=kind,
        by=by,
        stop_reason=None,
        text=None,
        structured=None,
        usage=None,
        cost=None,
        # The agent's further spending is part of its next total, so the next turn costs it.
        spent=past.session.spent,
        cost_in_all=past.session.cost,
        error=error,
        clock=None,
        **more,
        used=None if counts is None else counts.meter.logged.plus(once),
        added=None if counts is None else once,
        caller=None if counts is None else caller_of(counts),
        used_by=None if counts is None else past.session.agent,
    )
