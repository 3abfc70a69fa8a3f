"""What callers ask of a session, checked before it goes through the door: there, what is wrong is everybody's."""

from __future__ import annotations

import os
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from banksman.core import rules as tool_rules
from banksman.core import schema as schemas
from banksman.core.arbiter import Priority
from banksman.core.dialects.dialect import PLAIN, Dialect
from banksman.core.event import storable
from banksman.core.state import Session
from banksman.core.turn import Ask, Phase, Turn
from banksman.errors import Refused, UsageError
from banksman.run.sessions.status import find_turn

ON_BUSY = ("enqueue", "reject", "interrupt", "steer", "collect")
ON_PREEMPT = ("end", "requeue")
# What an agent must be able to do, by the kind of content in a prompt. All take text, and links.
_CAPABILITIES = {"image": "images", "audio": "audio"}
# Far beyond any number of classes that a person would tell apart.
PRIORITY_MAX = 1_000_000


class Wishes:
    """Of those who use one session. `capabilities`: what the agent can; None: everything."""

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
    ) -> Ask:
        if on_busy not in ON_BUSY:
            raise UsageError(f"on_busy cannot be {on_busy!r}", hint=f"one of {', '.join(ON_BUSY)}")
        if on_preempt not in ON_PREEMPT:
            raise UsageError(f"on_preempt cannot be {on_preempt!r}", hint=f"one of {', '.join(ON_PREEMPT)}")
        if key is not None and not isinstance(key, str):
            raise UsageError(f"key cannot be {key!r:.60}", hint="text that is the same when the same ask is made again")
        if on_busy == "steer":
            self._check_steering(schema, rules)
        if schema is not None:
            self._check_schema(schema)
        for kind in _kinds(prompt) & _CAPABILITIES.keys():
            self.check_capability(_CAPABILITIES[kind])
        ref = str(uuid.uuid4())
        # Encoded once for the agent and once for the log: what either could not take is refused here. The copy is ours:
        # whatever the caller does to its own afterwards, what is sent is what was accepted.
        self._dialect.begin(PLAIN).prompt(ref, prompt)
        try:
            prompt, key, schema = storable([prompt, key, schema])
        except (TypeError, ValueError, RecursionError) as exc:
            raise UsageError(f"the ask cannot be stored: {exc}", hint="text, or content blocks of plain JSON") from exc
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
        )

    def check_setting(self, name: str, value: Any) -> None:
        self.check_capability(name)
        # It may become a word of a command line.
        if not isinstance(value, str) or not value or "\0" in value:
            raise UsageError(f"{name} cannot be {value!r:.60}", hint="text that is not empty, and has no NUL")
        check_text(name, value)
        self._dialect.begin(PLAIN).setting("", name, value)

    def check_capability(self, name: str) -> None:
        if self._capabilities is not None and name not in self._capabilities:
            hint = f"known of it are: {', '.join(sorted(self._capabilities)) or 'none'}"
            raise UsageError(f"{self._agent} cannot do that: it has no {name}", hint=hint)

    def _check_steering(self, schema: Any, rules: Any) -> None:
        is_able = self._capabilities is None or "steer" in self._capabilities
        if not self._dialect.can_steer or not is_able:
            raise UsageError(f"{self._agent} cannot be steered", hint='on_busy="enqueue", or "interrupt"')
        if schema is not None or rules is not None:
            hint = "both are of a whole turn; ask for one of its own"
            raise UsageError("a prompt that is added to a turn has no schema and no rules", hint=hint)

    def _check_schema(self, schema: Any) -> None:
        self.check_capability("schema")
        if not isinstance(schema, Mapping):
            raise UsageError(f"a schema cannot be {schema!r:.60}", hint="a mapping, as JSON Schema has it")
        if cast(Mapping[str, Any], schema).get("type") != "object":
            hint = '{"type": "object", "properties": {"answer": …}}: agents give their answers as the input of a tool'
            raise UsageError("the schema of an answer is that of an object", hint=hint)
        schemas.check(cast(object, schema))


def priority_of(value: Any) -> int:
    if isinstance(value, str) and value.upper() in Priority.__members__:
        return Priority[value.upper()]
    if isinstance(value, bool) or not isinstance(value, int):
        names = ", ".join(priority.name for priority in reversed(Priority))
        raise UsageError(f"there is no priority {value!r:.60}", hint=f"{names}, or an int")
    if not -PRIORITY_MAX <= value <= PRIORITY_MAX:
        raise UsageError("a priority that far away means nothing", hint=f"at most {PRIORITY_MAX} to either side")
    return int(value)


def check_text(name: str, value: str) -> None:
    """`UsageError` for a text that no agent can be told: one that has no bytes."""
    try:
        value.encode()
    except UnicodeEncodeError as exc:
        hint = "half of a surrogate pair is no text; decode with errors='replace'"
        raise UsageError(f"{name} cannot be sent as UTF-8: {exc.reason}", hint=hint) from exc


def _kinds(prompt: Any) -> set[str]:
    """Of content. What is no list of blocks has none, and is refused elsewhere."""
    blocks = cast(Sequence[Any], prompt) if isinstance(prompt, Sequence) and not isinstance(prompt, str) else ()
    kinds = (cast(Any, block).get("type") for block in blocks if isinstance(block, Mapping))
    return {kind for kind in kinds if isinstance(kind, str)}


def moved(state: Session, turn: str, before: str | None) -> tuple[str, str | None]:
    """The turns that these asks belong to in the queue: the one to be moved, and the other. `Refused` if one of them
    does not wait, `UsageError` if they are in different classes."""
    found: list[Turn] = []
    for id in (turn,) if before is None else (turn, before):
        waiting = find_turn(state, id)
        if waiting is None or waiting.phase is not Phase.QUEUED:
            raise Refused("the turn does not wait any more", hint="see the queue", turn=id)
        found.append(waiting)
    first, other = found[0], found[-1]
    if first.priority != other.priority:
        hint = "a turn is moved within its class; ask with another priority"
        raise UsageError("the two turns are of different classes", hint=hint, turn=first.id, before=other.id)
    return first.id, None if before is None else other.id
