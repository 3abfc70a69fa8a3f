"""The public `Host`: the one of `run`, with the engine for its log chosen by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from banksman.errors import UsageError
from banksman.run import host

if TYPE_CHECKING:
    from banksman.store.log import Log


class Host(host.Host):
    """Owns sessions and commands of one loop: `async with Host() as host`, or call `close()`.

    `store`: "memory:" keeps the log of sessions as long as this object lives. `processes_max`: so many agents'
    processes at most; who was not needed for the longest time makes room, and resumes its conversation when it is asked
    again. `starts_max`: so many of them start at once; None: one a core.
    """

    def __init__(
        self,
        store: str = "memory:",
        *,
        processes_max: int | None = None,
        starts_max: int | None = None,
        finished_max: int = 256,
        finished_seconds_max: float = 3600.0,
    ) -> None:
        _check(store)
        super().__init__(
            _open,
            processes_max=processes_max,
            starts_max=starts_max,
            finished_max=finished_max,
            finished_seconds_max=finished_seconds_max,
        )


def _check(store: Any) -> None:
    if store != "memory:":
        raise UsageError(f"there is no store {store!r}", hint='this version knows "memory:"')


def _open() -> Log:
    # Loaded with the first session, like the rest of what sessions need.
    from banksman.store.memory import MemoryLog  # noqa: PLC0415

    return MemoryLog()
