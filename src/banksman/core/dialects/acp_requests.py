"""What a request of ours to an ACP agent is for: what its reply, which names only a number, is about."""

from __future__ import annotations

import enum

from msgspec import Struct


class Stage(enum.Enum):
    """How far the handshake is: what is waited for. Also what each of its requests was for."""

    SILENT = "silent"
    INITIALIZING = "initializing"
    OPENING = "opening"
    LOADING = "loading"
    FENCING = "fencing"
    QUIETING = "quieting"
    ADJUSTING = "adjusting"
    READY = "ready"
    REFUSED = "refused"


class Prompted(Struct, frozen=True):
    """A request was a prompt of ours. `is_cancelled`: we have asked the agent to stop it."""

    ref: str
    is_cancelled: bool = False


class Adjusted(Struct, frozen=True):
    """A request was to set something. `request`: who waits for it; None: the handshake does."""

    request: str | None
    name: str
    value: str


Purpose = Stage | Prompted | Adjusted
