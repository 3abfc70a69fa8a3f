"""Banksman runs coding agents and plain commands as subprocesses, and ends them.

    done = await banksman.execute(["make", "test"], timeout=600)

The names in `__all__` are the public API. All except `shutdown` are loaded at first use. So `import
banksman` costs little, and the keepers, which import a part of this package in a separate
interpreter, stay small.
"""

from __future__ import annotations

# Imported eagerly. A lazy import could happen in a signal handler, and a signal may arrive twice.
from banksman.runtime.shutdown import shutdown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from banksman.commands.command import Command
    from banksman.commands.output import Output, Piece
    from banksman.commands.output_streams import OutputReader
    from banksman.commands.output_watch import Match
    from banksman.commands.result import Ended, Finished, Step
    from banksman.core.dialects.meaning import BackgroundTask, LimitWindow
    from banksman.core.dialects.tokens import Tokens
    from banksman.core.process_facts import Survivor, Swept
    from banksman.core.session.ask_queue import BACKGROUND, INTERACTIVE, NORMAL, Priority
    from banksman.core.session.budget import Budget, CapUse
    from banksman.core.session.event import Event
    from banksman.core.session.outcome import By, Kind, Outcome, Receipt
    from banksman.core.session.usage import Usage
    from banksman.errors import (
        AgentError,
        BanksmanError,
        BugError,
        Busy,
        Closed,
        CommandError,
        ErrorKind,
        HistoryLost,
        HookFailed,
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
    from banksman.process.attributes import raise_fd_limit
    from banksman.runtime.execute import execute, start
    from banksman.sessions.hooks import Hook
    from banksman.sessions.limit_callback import LimitReached
    from banksman.sessions.questions import Answer, Answered, Question
    from banksman.sessions.session import Session
    from banksman.sessions.session_hooks import HookCall
    from banksman.sessions.status import Status
    from banksman.sessions.tools import Tool, tool
    from banksman.sessions.turn import Turn
    from banksman.store.log_values import UsageRow

__version__ = "0.1.0"

_HOMES = {
    "core.dialects.meaning": ("BackgroundTask", "LimitWindow"),
    "core.session.ask_queue": ("BACKGROUND", "INTERACTIVE", "NORMAL", "Priority"),
    "core.session.budget": ("Budget", "CapUse"),
    "core.session.event": ("Event",),
    "core.process_facts": ("Survivor", "Swept"),
    "core.session.outcome": ("By", "Kind", "Outcome", "Receipt"),
    "core.session.usage": ("Usage",),
    "core.dialects.tokens": ("Tokens",),
    "store.log_values": ("UsageRow",),
    "errors": (
        *(
            "AgentError",
            "BanksmanError",
            "BugError",
            "Busy",
            "Closed",
            "CommandError",
            "ErrorKind",
            "HistoryLost",
            "HookFailed",
            "MachineError",
        ),
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
    "commands.command": ("Command",),
    "commands.output_watch": ("Match",),
    "runtime.execute": ("execute", "start"),
    "commands.result": ("Ended", "Finished", "Step"),
    "sessions.hooks": ("Hook",),
    "process.attributes": ("raise_fd_limit",),
    "commands.output": ("Output", "Piece"),
    "commands.output_streams": ("OutputReader",),
    "sessions.limit_callback": ("LimitReached",),
    "sessions.questions": ("Answer", "Answered", "Question"),
    "sessions.session": ("Session",),
    "sessions.session_hooks": ("HookCall",),
    "sessions.status": ("Status",),
    "sessions.tools": ("Tool", "tool"),
    "sessions.turn": ("Turn",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "BACKGROUND",
    "INTERACTIVE",
    "NORMAL",
    "AgentError",
    "Answer",
    "Answered",
    "BackgroundTask",
    "BanksmanError",
    "Budget",
    "BugError",
    "Busy",
    "By",
    "CapUse",
    "Closed",
    "Command",
    "CommandError",
    "Ended",
    "ErrorKind",
    "Event",
    "Finished",
    "HistoryLost",
    "Hook",
    "HookCall",
    "HookFailed",
    "Host",
    "Kind",
    "LimitReached",
    "LimitWindow",
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
    "Tokens",
    "Tool",
    "Turn",
    "Usage",
    "UsageError",
    "UsageRow",
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
