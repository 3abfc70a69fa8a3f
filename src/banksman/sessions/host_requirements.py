"""What a session needs of the host that has it: its labels, and its agent. The same words on both sides, so that to
satisfy a need is to have every word of it.

A session with a command of its own needs no agent: the command is all that is started. A label `workspace=…` is about
the session and not about hosts: it says how its folder is to be looked for on another one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from banksman.errors import UsageError
from banksman.sessions import known_agents, recovery
from banksman.store.log import Known, Log

LABELS_MAX = 32
_LABEL = re.compile(r"[\w.+@:/=-]{1,100}")
_POLICY = "workspace="


def checked(labels: Sequence[Any]) -> list[str]:
    """Sorted, each once: the same need is the same list."""
    hint = "such as gpu or repo=x: letters, digits, and . _ + @ : / = -; 100 characters at most"
    if isinstance(labels, str | bytes):
        raise UsageError(f"labels cannot be {labels!r:.60}", hint="a list of words")
    for label in labels:
        if not isinstance(label, str) or _LABEL.fullmatch(label) is None or label.startswith("agent="):
            raise UsageError(f"{label!r:.60} is no label", hint=hint)
    found = sorted(set(labels))
    if len(found) > LABELS_MAX:
        raise UsageError(f"so many labels: {len(found)}", hint=f"{LABELS_MAX} at most")
    return found


def need(labels: Iterable[str], agent: str | None) -> list[str]:
    """`agent` None: it has a command of its own."""
    words = {label for label in labels if not label.startswith(_POLICY)}
    return sorted(words if agent is None else {*words, agent_word(agent)})


def need_of(agent: str, record: Mapping[str, Any] | None) -> list[str]:
    """Of a session, by what its log says of how it was opened the last time."""
    if record is None:
        return need((), agent)
    is_own = list(record["command"]) != list(known_agents.load_or_plain(agent).command)
    return need(record.get("labels") or (), None if is_own else agent)


def offered(labels: Iterable[str], agents: Iterable[str]) -> list[str]:
    """The words that a host has for needs."""
    return sorted({*labels, *map(agent_word, agents)})


def lacking(wanted: Iterable[str], labels: Iterable[str], agents: Iterable[str]) -> list[str]:
    """What of a need a host does not have; none: it satisfies it."""
    return sorted(set(wanted) - set(offered(labels, agents)))


def agent_word(agent: str) -> str:
    return f"agent={agent}"


async def read(store: Log, known: Known) -> list[str]:
    """What one that is in the store needs."""
    return need_of(known.agent, (await recovery.load_known(store, known)).opened)
