"""What a request of ours to the Codex app-server is for: what its reply, which names only a number, is about."""

from __future__ import annotations

from msgspec import Struct


class Initialize(Struct, frozen=True):
    request: str


class Converse(Struct, frozen=True):
    """The thread is begun, resumed or forked."""

    request: str


class Begin(Struct, frozen=True):
    """A prompt that opens a turn. `is_added`: another is on its way, whose turn it is to join."""

    ref: str
    is_added: bool = False


class Join(Struct, frozen=True):
    """A prompt for the turn that runs."""

    ref: str
    turn: str


class Stop(Struct, frozen=True):
    requests: tuple[str, ...]
    turn: str


Purpose = Initialize | Converse | Begin | Join | Stop
