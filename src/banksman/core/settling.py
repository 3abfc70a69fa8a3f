"""What becomes of a session whose host has died: decided once, by whoever claims it, from the log alone.

A turn whose start is in the log may have been sent, and may have been done: nobody can say, so it is UNKNOWN, and is
never sent again by itself. An ask of which the log has no start was not sent, and waits on, in its place. A question
waited for an answer to a process that is gone: it is withdrawn, or the answer would go nowhere.

Settled, the log says nothing of the kind any more: to settle it again gives nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from banksman.core import event as kinds
from banksman.core.event import Entry, entry
from banksman.core.outcome import By, Kind
from banksman.core.past import Past
from banksman.core.turn import Turn

ERROR = "the host died while the turn was open: the agent may have done it, or a part of it"


def settle(past: Past, *, swept: Sequence[str] = ()) -> list[Entry]:
    """The entries to be appended, none if nothing was open. `swept`: what was found of its processes, and ended."""
    session = past.session
    entries = [
        entry(question.turn, kinds.QUESTION_ANSWERED, question=question.id, answer="withdrawn", by="recovery")
        for question in past.questions
    ]
    unknown: list[str] = []
    if session.own is not None:
        entries.append(_ended(past, session.own.id, origin=session.own.origin))
        unknown.append(session.own.id)
    if session.turn is not None:
        entries.extend(_ended(past, ask.id) for ask in session.turn.asks)
        unknown.extend(ask.id for ask in session.turn.asks)
    if not entries and not swept:
        return []
    queued = [ask.id for waiting in session.queue if isinstance(waiting, Turn) for ask in waiting.asks]
    recovered = entry(None, kinds.SESSION_RECOVERED, unknown=unknown, queued=queued, swept=list(swept))
    return [*entries, recovered]


def _ended(past: Past, id: str, **more: object) -> Entry:
    return entry(
        id,
        kinds.TURN_ENDED,
        outcome=Kind.UNKNOWN,
        by=By.EXIT,
        stop_reason=None,
        text=None,
        structured=None,
        usage=None,
        cost=None,
        # What the agent has spent on it nobody has told, so what the next turn costs cannot be told either.
        spent=None,
        cost_in_all=past.session.cost,
        error=ERROR,
        clock=None,
        **more,
    )
