"""Needs of a session: the labels and the agent that its host must have.

Needs and offers are lists of the same words. A host satisfies a need if it offers every word of it.

A session with a custom command needs no agent, because only the command is started. A label
`workspace=…` describes the session and not a host: it says how to find the session's folder on
another host.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from banksman.errors import UsageError
from banksman.sessions import known_agents, recovery
from banksman.store.log import Log
from banksman.store.log_values import KnownSession

LABELS_MAX = 32
_LABEL = re.compile(r"[\w.+@:/=-]{1,100}")
_POLICY = "workspace="


def checked_labels(labels: Sequence[Any]) -> list[str]:
    """Return the labels sorted and without duplicates, so that equal needs are equal lists."""
    hint = "use a word such as gpu or repo=x: at most 100 letters, digits and . _ + @ : / = -"
    if isinstance(labels, str | bytes):
        raise UsageError(f"labels cannot be {labels!r:.60}", hint="use a list of words")
    for label in labels:
        if (
            not isinstance(label, str)
            or _LABEL.fullmatch(label) is None
            or label.startswith("agent=")
        ):
            raise UsageError(f"a label cannot be {label!r:.60}", hint=hint)
    found = sorted(set(labels))
    if len(found) > LABELS_MAX:
        raise UsageError(f"too many labels: {len(found)}", hint=f"use at most {LABELS_MAX}")
    return found


def need(labels: Iterable[str], agent: str | None) -> list[str]:
    """Return the words that a session needs.

    `agent`: None for a session with a custom command.
    """
    words = {label for label in labels if not label.startswith(_POLICY)}
    return sorted(words if agent is None else {*words, agent_word(agent)})


def need_of(agent: str, record: Mapping[str, Any] | None) -> list[str]:
    """Return the words that a session needs, from the spec that its log records."""
    if record is None:
        return need((), agent)
    is_own = list(record["command"]) != list(known_agents.load_or_plain(agent).command)
    return need(record.get("labels") or (), None if is_own else agent)


def offered(labels: Iterable[str], agents: Iterable[str]) -> list[str]:
    """Return the words that a host offers."""
    return sorted({*labels, *map(agent_word, agents)})


def lacking(wanted: Iterable[str], labels: Iterable[str], agents: Iterable[str]) -> list[str]:
    """Return the needed words that a host does not offer; empty if it satisfies the need."""
    return sorted(set(wanted) - set(offered(labels, agents)))


def agent_word(agent: str) -> str:
    return f"agent={agent}"


async def read(store: Log, known: KnownSession) -> list[str]:
    """Return the words that a session of the store needs."""
    return need_of(known.agent, (await recovery.load_known(store, known)).opened)
