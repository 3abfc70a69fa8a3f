"""Roles of callers, and the one table of what each may do.

A route names its `Action`. `may` decides by the caller's role and by the `Relation` of the caller
to the session. The table in docs/security.md is generated from `RIGHTS`.
"""

from __future__ import annotations

import enum
import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass

from banksman.sessions.session_access import Access


class Role(enum.StrEnum):
    """Role of the holder of a token."""

    VIEWER = enum.auto()
    ASKER = enum.auto()
    APPROVER = enum.auto()
    OPERATOR = enum.auto()
    ADMIN = enum.auto()


# Characters that `fnmatch` gives a meaning that the patterns of tokens do not have.
_SPECIAL = re.compile(r"[?\[]")

# These roles have every session in the scope of their token.
OPERATORS = (Role.OPERATOR, Role.ADMIN)


class Action(enum.Enum):
    """Action of a route. The values are the words of docs/security.md."""

    OPEN_TO_ALL = "load the page, log in, see health"
    LIST = "list agents; list and follow its sessions"
    READ = "read a session: status, events, turns, questions, stderr"
    OPEN = "open a session"
    ASK = "ask"
    HOLD = "hold the queue"
    ANSWER = "answer a question"
    INTERRUPT = "interrupt a turn"
    STEER = "reorder, rename, share, close, delete"
    BUNDLE = "bundle a session for a bug report"
    METRICS = "read the metrics"
    OPERATE = "commands, hosts, usage, settings, drain, upgrade"
    GRANT = "make login links for the page"


class Relation(enum.IntEnum):
    """Relation of a session to a caller."""

    FOREIGN, SHARED, OWN = range(3)


# The least relation to the session that an action needs, by role. Without an entry: forbidden.
# Actions without a session have the relation OWN.
_READS = {Action.LIST: Relation.OWN, Action.READ: Relation.SHARED}
_EVERYTHING = dict.fromkeys(Action, Relation.SHARED)
RIGHTS = {
    Role.VIEWER: {**_READS, Action.METRICS: Relation.OWN},
    Role.ASKER: {
        **_READS,
        Action.OPEN: Relation.OWN,
        Action.ASK: Relation.SHARED,
        Action.HOLD: Relation.SHARED,
        Action.INTERRUPT: Relation.SHARED,
        Action.STEER: Relation.OWN,
    },
    Role.APPROVER: {**_READS, Action.ANSWER: Relation.SHARED},
    Role.OPERATOR: {action: each for action, each in _EVERYTHING.items() if action != Action.GRANT},
    Role.ADMIN: _EVERYTHING,
}


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request.

    `name`: None for the server's own token and the user's socket. `sessions`, `agents`: patterns
    and names that limit the caller to sessions; empty: no limit.
    """

    name: str | None
    role: Role
    sessions: Sequence[str] = ()
    agents: Sequence[str] = ()
    expires: float | None = None

    @property
    def is_limited(self) -> bool:
        """Whether some sessions are foreign to this caller."""
        return self.role not in OPERATORS or not self.has_all_in_scope

    @property
    def has_all_in_scope(self) -> bool:
        """Whether the token has no limits of sessions and agents."""
        return not (self.sessions or self.agents)

    def has_in_scope(self, name: str | None, agent: str) -> bool:
        """Whether the limits of the token include a session with this name and agent."""
        if self.agents and agent not in self.agents:
            return False
        return not self.sessions or (
            name is not None and any(_matches(name, each) for each in self.sessions)
        )

    def relation(self, access: Access) -> Relation:
        """Return what a session in this caller's scope is to the caller."""
        if self.role in OPERATORS:
            return Relation.OWN
        if self.name is None:
            return Relation.FOREIGN
        if access.owner == self.name:
            return Relation.OWN
        return Relation.SHARED if self.name in access.shared else Relation.FOREIGN


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern of a token includes a name. Only `*` is special: names contain `?`, `[`."""
    return fnmatch.fnmatchcase(name, _SPECIAL.sub(r"[\g<0>]", pattern))


# The holder of the server's own token, and the user of the server.
ADMIN = Caller(None, Role.ADMIN)

# A client without a token. It may use only the routes that are open to all.
STRANGER = Caller(None, Role.VIEWER)


def may(caller: Caller, action: Action, relation: Relation = Relation.OWN) -> bool:
    """Whether a caller may perform an action, on a session with this relation if it names one."""
    if action is Action.OPEN_TO_ALL:
        return True
    if action is Action.METRICS and caller.role not in OPERATORS and not caller.has_all_in_scope:
        # The metrics count all sessions of the server.
        return False
    needed = RIGHTS[caller.role].get(action)
    return needed is not None and relation >= needed


def table() -> str:
    """Return the table of docs/security.md."""
    words = {Relation.SHARED: "own and shared", Relation.OWN: "own"}
    rows = [["action", *Role], ["---"] * (1 + len(Role))]
    for action in Action:
        row = [action.value]
        for role in Role:
            needed = RIGHTS[role].get(action)
            if action is Action.OPEN_TO_ALL or (needed and not _names_session(action)):
                row.append("yes")
            elif needed is None:
                row.append("no")
            else:
                row.append("all" if role in OPERATORS else words[needed])
        rows.append(row)
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _names_session(action: Action) -> bool:
    return action in (
        *(Action.READ, Action.ASK, Action.HOLD, Action.ANSWER, Action.INTERRUPT, Action.STEER),
        Action.BUNDLE,
    )
