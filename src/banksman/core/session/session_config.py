"""How a session is configured: its numbers, its rules, and what its agent is told. Changed only by opening it again."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from banksman.core.dialects.dialect import PLAIN, Dialect, Setup
from banksman.core.session.permissions import Rules


class Config(Struct, frozen=True, kw_only=True):
    """Seconds, unless it says otherwise."""

    dialect: Dialect
    drain_seconds: float = 5.0
    # After a boundary, how long what confirms it may be missing.
    settle_seconds: float = 0.5
    start_seconds: float = 60.0
    # How long a frame may wait to be taken by the agent. Tools that run for minutes do not read, so it is long.
    write_seconds: float = 60.0
    ageing_seconds: float = 300.0
    hold_idle_seconds: float = 60.0
    collect_seconds: float = 0.3
    queue_max: int = 256
    # When the queue is full: "refuse" the newcomer, or "drop" the last of the lowest class below it.
    when_full: str = "refuse"
    # How often one ask may be sent: one that gave way so often does not come back.
    attempts_max: int = 1000
    store_retry_seconds: float = 1.0
    store_retry_seconds_max: float = 30.0
    # How long a question waits for its answer, and what it is then; None: as long as it takes.
    question_seconds: float | None = None
    question_default: str = "deny"
    # What becomes of one that was open when the host died: "withdraw" or "keep", see questions.py.
    question_after_crash: str = "withdraw"
    # How long a change of a setting may go unanswered before the process is replaced by one that has it.
    setting_seconds: float = 10.0
    # How long a process that nobody needs is kept; None: until the session is closed.
    idle_seconds: float | None = None
    # At what age a process is replaced, and what it is asked before, so that nothing it knows is lost.
    recycle_seconds: float | None = None
    save_prompt: str | None = None
    # How long after a second crash in a row no process is started; doubled with each further one.
    backoff_seconds: float = 1.0
    backoff_seconds_max: float = 60.0
    # What the agent is told at its start, as far as that is the same for each process; which tools it may use: see
    # permissions.py.
    setup: Setup = PLAIN
    rules: Rules = ()
    # After a boundary, how long it must have been quiet until the turn is over: some agents say a few words more.
    quiet_seconds: float = 0.0
    # The agent's tools live on after an interrupt; and whether they are ended then ("sweep") or only told of ("keep").
    leaves_tools: bool = False
    after_interrupt: str = "sweep"
    # It may have its client run commands for it.
    serves_terminals: bool = False
    # The watchdogs of a turn, by name; None or missing: there is none.
    clocks: Mapping[str, float | None] = field(default_factory=dict[str, "float | None"])
