"""Checks of the arguments of an ask and of a setting.

A wrong argument is an error of the call. It must not reach the session state machine, where it
would fail every caller of the session. `find_move` checks the reordering of asks.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from banksman.commands.options import SECONDS_MAX
from banksman.core import json_schema as schemas
from banksman.core.dialects.dialect import PLAIN, Dialect
from banksman.core.session import permissions as tool_rules
from banksman.core.session.ask_queue import Priority
from banksman.core.session.event import storable
from banksman.core.session.fallback import CONTENT
from banksman.core.session.state import Session
from banksman.core.session.trace_context import TraceContext, parse
from banksman.core.session.turn import Ask, Turn, TurnPhase
from banksman.errors import Refused, UsageError
from banksman.sessions.arguments import check_caller, check_text
from banksman.sessions.status import find_turn

ON_BUSY = ("enqueue", "reject", "interrupt", "steer", "collect")
ON_PREEMPT = ("end", "requeue")
# Far more classes than a person can distinguish.
PRIORITY_MAX = 1_000_000


class AskChecks:
    """Checks of the asks and settings of one session.

    `capabilities`: the agent's capabilities; None means all.
    """

    def __init__(self, agent: str, dialect: Dialect, capabilities: Collection[str] | None) -> None:
        self._agent = agent
        self._dialect = dialect
        self._capabilities = capabilities

    def ask(
        self,
        prompt: Any,
        *,
        at: float,
        priority: Any,
        on_busy: Any = "enqueue",
        on_preempt: Any = "end",
        key: Any = None,
        schema: Any = None,
        rules: Any = None,
        hold: str | None = None,
        deadline: Any = None,
        wall: float = 0.0,
        caller: Any = None,
        trace: Any = None,
    ) -> Ask:
        """Check the arguments of an ask and return the ask. `wall`: the Unix time at `at`."""
        if on_busy not in ON_BUSY:
            hint = f"use one of: {', '.join(ON_BUSY)}"
            raise UsageError(f"on_busy cannot be {on_busy!r}", hint=hint)
        if on_preempt not in ON_PREEMPT:
            hint = f"use one of: {', '.join(ON_PREEMPT)}"
            raise UsageError(f"on_preempt cannot be {on_preempt!r}", hint=hint)
        if key is not None and not isinstance(key, str):
            hint = "use text that stays the same when the ask is repeated"
            raise UsageError(f"key cannot be {key!r:.60}", hint=hint)
        seconds = _checked_deadline(deadline)
        check_caller(caller)
        context = _checked_trace(trace)
        if on_busy == "steer":
            self._check_steering(schema, rules)
        if schema is not None:
            self._check_schema(schema)
        for kind in _kinds(prompt) & CONTENT.keys():
            self.check_capability(CONTENT[kind])
        ref = str(uuid.uuid4())
        # Encode the prompt once for the agent and once for the log, so that an ask that cannot be
        # encoded is rejected here. The stored copy is independent: later changes by the caller do
        # not affect the accepted ask.
        self._dialect.begin(PLAIN).prompt(ref, prompt)
        try:
            prompt, key, schema = storable([prompt, key, schema])
        except (TypeError, ValueError, RecursionError) as exc:
            hint = "use text, or content blocks of plain JSON"
            raise UsageError(f"cannot store the ask: {exc}", hint=hint) from exc
        return Ask(
            id=f"t-{os.urandom(8).hex()}",
            ref=ref,
            prompt=prompt,
            priority=priority_of(priority),
            on_busy=on_busy,
            on_preempt=on_preempt,
            key=key,
            hold=hold,
            at=at,
            rules=tool_rules.parse(rules),
            schema=schema,
            deadline=None if seconds is None else wall + seconds,
            due=None if seconds is None else at + seconds,
            caller=caller,
            trace=None if context is None else context.text,
        )

    def check_setting(self, name: str, value: Any) -> None:
        """Raise `UsageError` if the setting cannot be sent to the agent."""
        self.check_capability(name)
        # The value may become a command line argument.
        if not isinstance(value, str) or not value or "\0" in value:
            hint = "use text that is not empty and has no NUL"
            raise UsageError(f"{name} cannot be {value!r:.60}", hint=hint)
        check_text(name, value)
        self._dialect.begin(PLAIN).setting("", name, value)

    def check_capability(self, name: str) -> None:
        """Raise `UsageError` if the agent does not have the capability."""
        if self._capabilities is not None and name not in self._capabilities:
            hint = f"its capabilities: {', '.join(sorted(self._capabilities)) or 'none'}"
            raise UsageError(f"{self._agent} does not support {name}", hint=hint)

    def _check_steering(self, schema: Any, rules: Any) -> None:
        is_able = self._capabilities is None or "steer" in self._capabilities
        if not self._dialect.can_steer or not is_able:
            hint = 'use on_busy="enqueue" or "interrupt"'
            raise UsageError(f"{self._agent} does not support steering", hint=hint)
        if schema is not None or rules is not None:
            hint = "leave them out, or ask for a separate turn"
            raise UsageError("a steered prompt cannot have a schema or rules", hint=hint)

    def _check_schema(self, schema: Any) -> None:
        self.check_capability("schema")
        if not isinstance(schema, Mapping):
            hint = "use a mapping in the form of JSON Schema"
            raise UsageError(f"a schema cannot be {schema!r:.60}", hint=hint)
        if cast(Mapping[str, Any], schema).get("type") != "object":
            hint = 'use {"type": "object", "properties": {"answer": …}}: agents pass it to a tool'
            raise UsageError("the schema of an answer must have the type object", hint=hint)
        schemas.check(cast(object, schema))


def _checked_deadline(deadline: Any) -> float | None:
    if deadline is None:
        return None
    is_number = isinstance(deadline, int | float) and not isinstance(deadline, bool)
    if not is_number or not 0 < deadline <= SECONDS_MAX:
        hint = f"use seconds from now, more than 0 and at most {SECONDS_MAX:.0f}, or None"
        raise UsageError(f"deadline cannot be {deadline!r:.60}", hint=hint)
    return float(deadline)


def _checked_trace(trace: Any) -> TraceContext | None:
    if trace is None:
        return None
    found = parse(trace) if isinstance(trace, str) else None
    if found is None:
        hint = "use a W3C traceparent, such as 00-<32 hex digits>-<16 hex digits>-01"
        raise UsageError(f"trace cannot be {trace!r:.80}", hint=hint)
    return found


def priority_of(value: Any) -> int:
    """Return the number of a priority, given as a name or a number."""
    if isinstance(value, str) and value.upper() in Priority.__members__:
        return Priority[value.upper()]
    if isinstance(value, bool) or not isinstance(value, int):
        names = ", ".join(priority.name.lower() for priority in reversed(Priority))
        hint = f"use {names}, or a whole number"
        raise UsageError(f"there is no priority {value!r:.60}", hint=hint)
    if not -PRIORITY_MAX <= value <= PRIORITY_MAX:
        hint = f"use a number from -{PRIORITY_MAX} to {PRIORITY_MAX}"
        raise UsageError("the priority is out of range", hint=hint)
    return int(value)


def _kinds(prompt: Any) -> set[str]:
    """Return the kinds of content in a prompt.

    A value that is not a list of blocks has no kinds. Other checks reject it.
    """
    blocks = (
        cast(Sequence[Any], prompt)
        if not isinstance(prompt, str) and isinstance(prompt, Sequence)
        else ()
    )
    kinds = (cast(Any, block).get("type") for block in blocks if isinstance(block, Mapping))
    return {kind for kind in kinds if isinstance(kind, str)}


def find_move(state: Session, turn: str, before: str | None) -> tuple[str, str | None]:
    """Return the queued turns of two asks: the turn to move and the other turn.

    `Refused`: one of the asks is not queued. `UsageError`: the asks are of different classes.
    """
    found: list[Turn] = []
    for id in (turn,) if before is None else (turn, before):
        waiting = find_turn(state, id)
        if waiting is None or waiting.phase is not TurnPhase.QUEUED:
            message = f"cannot move turn {id!r:.100}: it is not queued"
            raise Refused(message, hint="see the queue", turn=id)
        found.append(waiting)
    first, other = found[0], found[-1]
    if first.priority != other.priority:
        message = f"cannot move turn {first.id} before turn {other.id}: their priorities differ"
        hint = "move it within its priority, or ask again with another priority"
        raise UsageError(message, hint=hint, turn=first.id, before=other.id)
    return first.id, None if before is None else other.id
