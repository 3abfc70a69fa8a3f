"""Settings of a guard: the command, the times of its ladder, and its limits.

A plain class, because `dataclasses` would double the start time of a guard.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Settings:
    """A checked call of `banksman guard`. All strings are in the form that the kernel takes."""

    def __init__(
        self,
        *,
        path: bytes,
        argv: tuple[bytes, ...],
        env: dict[bytes, bytes],
        cwd: bytes,
        grace: float,
        linger: float,
        timeout: float | None = None,
        grace_after_eof: float | None = None,
        memory_bytes_max: int | None = None,
        processes_max: int | None = None,
    ) -> None:
        """`grace_after_eof`: None does not watch stdin."""
        assert argv
        assert grace >= 0
        assert linger >= 0
        assert timeout is None or timeout >= 0
        assert grace_after_eof is None or grace_after_eof >= 0
        self.path = path
        self.argv = argv
        self.env = env
        self.cwd = cwd
        self.grace = grace
        self.linger = linger
        self.timeout = timeout
        self.grace_after_eof = grace_after_eof
        self.memory_bytes_max = memory_bytes_max
        self.processes_max = processes_max

    def order(
        self, *, umask: int, nofile: int, group: int | None, mask: list[int], ignored: list[int]
    ) -> dict[str, Any]:
        """Return the order for the keeper: see `process/keeper/messages.py`."""
        return {
            **{"path": self.path, "argv": self.argv, "env": self.env},
            **{"umask": umask, "limits": None, "nofile": nofile},
            **{"grace": self.grace, "linger": self.linger, "deadline": self.timeout},
            **{"terminal": None, "user": None, "ender": None},
            **{"group": group, "mask": mask, "ignored": ignored},
        }
