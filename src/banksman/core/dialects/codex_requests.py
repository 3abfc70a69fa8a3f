"""What a request of ours to the Codex app-server is for: what its reply, which names only a number, is about."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Initialize:
    request: str


@dataclass(frozen=True, slots=True)
class Converse:
    """The thread is begun, resumed or forked."""

    request: str


@dataclass(frozen=True, slots=True)
class Begin:
    """A prompt that opens a turn. `is_added`: another is on its way, whose turn it is to join."""

    ref: str
    is_added: bool = False


@dataclass(frozen=True, slots=True)
class Join:
    """A prompt for the turn that runs."""

    ref: str
    turn: str


@dataclass(frozen=True, slots=True)
class Stop:
    requests: tuple[str, ...]
    turn: str


Purpose = Initialize | Converse | Begin | Join | Stop
