"""What went through a session, both ways."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Both ways, since the session was opened.

    `noise`: lines that were no frames. `spilled`: frames too large to keep; `dropped`: bytes of those that are lost.
    `swept`: processes that had to be ended with the agent's own; `survivors`: those that could not be.
    """

    frames_in: int = 0
    bytes_in: int = 0
    frames_out: int = 0
    bytes_out: int = 0
    noise: int = 0
    spilled: int = 0
    dropped: int = 0
    processes: int = 0
    swept: int = 0
    survivors: int = 0
