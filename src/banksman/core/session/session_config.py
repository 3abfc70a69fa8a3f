"""Session configuration: timeouts, limits, rules and agent setup.

Only a reopen and a change to another agent of the session (`fallback.py`) change it.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from banksman.core.dialects.dialect import PLAIN, Dialect, Setup
from banksman.core.session.budget import Budget
from banksman.core.session.permissions import Rules
from banksman.errors import HINTS, ErrorKind

# Enough to recognise the missing one.
SCRUBBED_SHOWN_MAX = 8
# What a program says that lacks a variable, if it does not name the variable. ssh may be the
# program of a prefix, or a tool of the agent.
_SIGNS = {"SSH_AUTH_SOCK": "Permission denied (publickey"}


class Config(Struct, frozen=True, kw_only=True):
    """Configuration of a session. Times are in seconds."""

    dialect: Dialect
    drain_seconds: float = 5.0
    # How long the confirmation of a boundary may be missing.
    settle_seconds: float = 0.5
    start_seconds: float = 60.0
    # How long the agent may leave a frame unread. Tools that run for minutes do not read, so it is
    # long.
    write_seconds: float = 60.0
    ageing_seconds: float = 300.0
    hold_idle_seconds: float = 60.0
    collect_seconds: float = 0.3
    queue_max: int = 256
    # When the queue is full: "refuse" the new ask, or "drop" the last one of the lowest class below
    # it.
    when_full: str = "refuse"
    # How often one ask may be sent. After this many attempts a preempted ask is not requeued.
    attempts_max: int = 1000
    store_retry_seconds: float = 1.0
    store_retry_seconds_max: float = 30.0
    # How long a question waits, and its answer after that. None: it waits forever.
    question_seconds: float | None = None
    question_default: str = "deny"
    # What happens to a question that was open when the host died: "withdraw" or "keep"; see
    # questions.py.
    question_after_crash: str = "withdraw"
    # How long the agent may take to answer a change of a setting. After that, its process is
    # replaced.
    setting_seconds: float = 10.0
    # How long an idle process is kept. None: until the session is closed.
    idle_seconds: float | None = None
    # The age at which a process is replaced, and the prompt that lets it save its knowledge before.
    recycle_seconds: float | None = None
    save_prompt: str | None = None
    # Pause before the next start after the second crash in a row. Each further crash doubles it.
    backoff_seconds: float = 1.0
    backoff_seconds_max: float = 60.0
    # The setup that every process of the agent gets, and the permission rules: see permissions.py.
    setup: Setup = PLAIN
    rules: Rules = ()
    # How long the agent must be quiet after a boundary before the turn is over: some agents send a
    # few more frames.
    quiet_seconds: float = 0.0
    # Whether the agent's tools survive an interrupt, and whether they are ended then ("sweep") or
    # only reported ("keep").
    leaves_tools: bool = False
    after_interrupt: str = "sweep"
    # Whether the agent may have its client run commands.
    serves_terminals: bool = False
    # The watchdogs of a turn, in seconds by name. None or missing: that watchdog is off.
    clocks: Mapping[str, float | None] = field(default_factory=dict[str, "float | None"])
    # How long a drain waits for the agent's background tasks, once no turn runs.
    background_seconds: float = 60.0
    # What asks do while the agent's account is limited: "fail", "wait" for the reset, or "call" the
    # caller, which decides: see limit_wait.py.
    on_limit: str = "fail"
    # The budget of the session over its whole life, and what happens when one is used up: "ask",
    # "stop" or "queue"; see budget_gate.py. `shares_budget`: the host has budgets that sessions
    # share.
    budget: Budget | None = None
    on_budget: str = "queue"
    shares_budget: bool = False
    # Names of variables that may hold secrets, and that the agent therefore does not inherit.
    scrubbed: tuple[str, ...] = ()
    # The agent that this configuration is of, and what it supports; None: everything.
    agent: str = ""
    capabilities: frozenset[str] | None = None
    # The configurations of all agents of the session in order of preference, this one included.
    # Theirs are empty here. Empty: the session has one agent. See fallback.py.
    roster: tuple[Config, ...] = ()

    def hint_of(self, kind: ErrorKind, said: str = "") -> str:
        """Return the hint of an agent's failure: what the agent said, or what the kind means.

        If the agent may lack a variable that it did not inherit, the hint names it.
        """
        named = [name for name in self.scrubbed if name in said or _SIGNS.get(name, name) in said]
        names = named or (self.scrubbed if kind is ErrorKind.AUTH else ())
        hint = said or HINTS[kind]
        if not names:
            return hint
        shown = ", ".join(names[:SCRUBBED_SHOWN_MAX])
        more = ", …" * (len(names) > SCRUBBED_SHOWN_MAX)
        return (
            f"{hint}; the agent did not get {shown}{more} of this host: if it needs one, "
            "pass it in env=, or name it in `keep` of the agent's profile"
        )
