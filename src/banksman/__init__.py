"""Banksman runs coding agents and plain commands as subprocesses, and ends them.

    done = await banksman.execute(["make", "test"], timeout=600)

The names below are the public surface. They are loaded when first used: `import banksman` alone costs nothing, and the
keepers, which import a part of this package in an interpreter of their own, stay small.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from banksman.core.facts import Survivor, Swept
    from banksman.errors import (
        BanksmanError,
        CommandError,
        MachineError,
        ProgramNotExecutable,
        ProgramNotFound,
        Refused,
        UsageError,
    )
    from banksman.run.command import Command, Piece
    from banksman.run.execute import execute
    from banksman.run.finished import Ended, Finished, Step
    from banksman.run.host import Host
    from banksman.run.limits import raise_fd_limit
    from banksman.run.output import Output
    from banksman.run.shutdown import shutdown

__version__ = "0.1.0"

_HOMES = {
    "core.facts": ("Survivor", "Swept"),
    "errors": (
        *("BanksmanError", "CommandError", "MachineError", "ProgramNotExecutable", "ProgramNotFound"),
        *("Refused", "UsageError"),
    ),
    "run.command": ("Command", "Piece"),
    "run.execute": ("execute",),
    "run.finished": ("Ended", "Finished", "Step"),
    "run.host": ("Host",),
    "run.limits": ("raise_fd_limit",),
    "run.output": ("Output",),
    "run.shutdown": ("shutdown",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "BanksmanError",
    "Command",
    "CommandError",
    "Ended",
    "Finished",
    "Host",
    "MachineError",
    "Output",
    "Piece",
    "ProgramNotExecutable",
    "ProgramNotFound",
    "Refused",
    "Step",
    "Survivor",
    "Swept",
    "UsageError",
    "execute",
    "raise_fd_limit",
    "shutdown",
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
