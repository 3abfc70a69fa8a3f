"""Banksman runs coding agents and plain commands as subprocesses, and ends them.

    done = await banksman.execute(["make", "test"], timeout=600)

The names below are the public surface. They are loaded when first used: `import banksman` alone costs little, and the
keepers, which import a part of this package in an interpreter of their own, stay small.
"""

from __future__ import annotations

# At once, and not when first used: that may be in a signal handler, which may come twice.
from banksman.run.shutdown import shutdown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from banksman.core.arbiter import BACKGROUND, INTERACTIVE, NORMAL, Priority
    from banksman.core.event import Event
    from banksman.core.facts import Survivor, Swept
    from banksman.core.outcome import By, Kind, Outcome, Receipt
    from banksman.errors import (
        AgentError,
        BanksmanError,
        BugError,
        Busy,
        Closed,
        CommandError,
        HistoryLost,
        MachineError,
        Moved,
        Moving,
        NameTaken,
        NotFound,
        NotOwner,
        ProgramNotExecutable,
        ProgramNotFound,
        QueueFull,
        Refused,
        StoreBusy,
        StoreDamaged,
        StoreError,
        StoreFull,
        StoreReadOnly,
        StoreTooNew,
        UsageError,
    )
    from banksman.host import Host
    from banksman.run.child.limits import raise_fd_limit
    from banksman.run.commands.command import Command, Piece
    from banksman.run.commands.finished import Ended, Finished, Step
    from banksman.run.commands.output import Output
    from banksman.run.commands.reader import OutputReader
    from banksman.run.commands.watching import Match
    from banksman.run.execute import execute, start
    from banksman.run.sessions.hooks import Hook
    from banksman.run.sessions.questions import Answer, Answered, Question
    from banksman.run.sessions.session import Session
    from banksman.run.sessions.status import Status
    from banksman.run.sessions.tools import Tool, tool
    from banksman.run.sessions.turn import Turn

__version__ = "0.1.0"

_HOMES = {
    "core.arbiter": ("BACKGROUND", "INTERACTIVE", "NORMAL", "Priority"),
    "core.event": ("Event",),
    "core.facts": ("Survivor", "Swept"),
    "core.outcome": ("By", "Kind", "Outcome", "Receipt"),
    "errors": (
        *("AgentError", "BanksmanError", "BugError", "Busy", "Closed", "CommandError", "HistoryLost", "MachineError"),
        *(
            "Moved",
            "Moving",
            "NameTaken",
            "NotFound",
            "NotOwner",
            "ProgramNotExecutable",
            "ProgramNotFound",
            "QueueFull",
            "Refused",
            "StoreBusy",
        ),
        *("StoreDamaged", "StoreError", "StoreFull", "StoreReadOnly", "StoreTooNew", "UsageError"),
    ),
    "host": ("Host",),
    "run.commands.command": ("Command", "Piece"),
    "run.commands.watching": ("Match",),
    "run.execute": ("execute", "start"),
    "run.commands.finished": ("Ended", "Finished", "Step"),
    "run.sessions.hooks": ("Hook",),
    "run.child.limits": ("raise_fd_limit",),
    "run.commands.output": ("Output",),
    "run.commands.reader": ("OutputReader",),
    "run.sessions.questions": ("Answer", "Answered", "Question"),
    "run.sessions.session": ("Session",),
    "run.sessions.status": ("Status",),
    "run.sessions.tools": ("Tool", "tool"),
    "run.sessions.turn": ("Turn",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "BACKGROUND",
    "INTERACTIVE",
    "NORMAL",
    "AgentError",
    "Answer",
    "Answered",
    "BanksmanError",
    "BugError",
    "Busy",
    "By",
    "Closed",
    "Command",
    "CommandError",
    "Ended",
    "Event",
    "Finished",
    "HistoryLost",
    "Hook",
    "Host",
    "Kind",
    "MachineError",
    "Match",
    "Moved",
    "Moving",
    "NameTaken",
    "NotFound",
    "NotOwner",
    "Outcome",
    "Output",
    "OutputReader",
    "Piece",
    "Priority",
    "ProgramNotExecutable",
    "ProgramNotFound",
    "Question",
    "QueueFull",
    "Receipt",
    "Refused",
    "Session",
    "Status",
    "Step",
    "StoreBusy",
    "StoreDamaged",
    "StoreError",
    "StoreFull",
    "StoreReadOnly",
    "StoreTooNew",
    "Survivor",
    "Swept",
    "Tool",
    "Turn",
    "UsageError",
    "execute",
    "raise_fd_limit",
    "shutdown",
    "start",
    "tool",
]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'banksman' has no attribute {name!r}")
    import importlib  # noqa: PLC0415

    value = getattr(importlib.import_module(f"banksman.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
