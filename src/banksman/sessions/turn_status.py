"""The turns of a session as its status shows them: which one holds it, and which asks wait.

The shown beginning of a prompt has no secrets.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from banksman.core.dialects.dialect import Prompt
from banksman.core.session.ask_queue import Hold
from banksman.core.session.state import Session
from banksman.core.session.turn import Turn
from banksman.core.session.turn_usage import caller_of

# Length of the shown beginning of a prompt.
PREVIEW_CHARACTERS_MAX = 200
# Number of characters that are searched for secrets before the text is cut, and number of blocks of
# a prompt.
SECRET_CHARACTERS_MAX = 4096
BLOCKS_MAX = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingAsk:
    """Ask in the queue.

    `prompt`: its beginning. `at`: the wall clock time since which it is queued here; None if
    unknown. `caller`: the person or program that asked; None if it has no name.
    """

    turn: str
    priority: int
    seconds: float
    attempt: int
    prompt: str = ""
    at: float | None = None
    caller: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldStatus:
    """A hold of the session: the granted one, or one that waits in the queue.

    `caller`: the person or program that holds; None if it has no name. `at`: the wall clock time of
    the grant; None if the hold waits.
    """

    hold: str
    priority: int
    caller: str | None
    at: float | None


def preview(prompt: Prompt, *, redact: Callable[[str], str] | None = None) -> str:
    """Return the beginning of a prompt, without secrets.

    A prompt in memory has not been redacted by the log.
    """
    if not isinstance(prompt, str):
        texts = (block["text"] for block in prompt if isinstance(block.get("text"), str))
        prompt = "\n\n".join(
            text[:SECRET_CHARACTERS_MAX] for text in itertools.islice(texts, BLOCKS_MAX)
        )
    if redact is not None:
        # Redact before the cut, because a truncated secret is not recognised.
        prompt = redact(prompt[:SECRET_CHARACTERS_MAX])
    return prompt[:PREVIEW_CHARACTERS_MAX]


def holder(state: Session) -> str | None:
    """Return the granted turn, or the turn that the agent started without an ask."""
    turn = state.own or state.turn
    return None if turn is None else turn.id


def holding(
    state: Session, wall: float | None, now: float, preview: Callable[[Prompt], str]
) -> dict[str, Any]:
    """Return the members of a status about the turn that holds the session.

    `wall`, `now`: the present moment in Unix time and in the time of the session. `wall` None: the
    state comes from the log, which has other times.
    """
    turn = state.own or state.turn
    if turn is None:
        return {"holder": None}
    since = turn.granted_at or turn.began_at
    return {
        "holder": turn.id,
        "holder_prompt": None if turn.ask is None else preview(turn.ask.prompt),
        "holder_caller": caller_of(turn),
        "holder_since": wall - (now - since) if wall is not None and since else None,
    }


def holds(state: Session, wall: float, now: float) -> tuple[HoldStatus, ...]:
    """Return the holds: the granted one first, then the waiting ones. See `holding`."""
    found = (state.hold, *(each for each in state.queue if isinstance(each, Hold)))
    return tuple(
        HoldStatus(
            hold=each.id,
            priority=each.priority,
            caller=each.caller,
            at=None if each.granted_at is None else wall - (now - each.granted_at),
        )
        for each in found
        if each is not None
    )


def waiting_asks(
    state: Session, wall: float | None, now: float, preview: Callable[[Prompt], str]
) -> tuple[WaitingAsk, ...]:
    """Return the asks in the queue, without the holds. `wall`, `now`: see `holding`."""
    found: list[WaitingAsk] = []
    for turn in state.queue:
        if isinstance(turn, Turn) and turn.ask is not None:
            seconds = 0.0 if wall is None else now - turn.ask.at
            ask = WaitingAsk(
                turn=turn.id,
                priority=turn.priority,
                seconds=seconds,
                attempt=turn.attempt,
                prompt=preview(turn.ask.prompt),
                at=None if wall is None else wall - seconds,
                caller=turn.ask.caller,
            )
            found.append(ask)
    return tuple(found)
