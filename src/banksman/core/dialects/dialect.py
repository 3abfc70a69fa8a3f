"""What the core asks of a dialect: lines to meanings, wishes to frames. Pure, and without state of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from banksman.core.meaning import Meaning

# Text, or ACP content blocks.
Prompt = str | Sequence[Mapping[str, Any]]


class Transcript(Protocol):
    """What the agent says in the frames of a turn, gathered as they are added."""

    def add(self, line: bytes) -> None: ...
    def text(self) -> str | None: ...


class Dialect(Protocol):
    """Frames end with a newline and contain no other."""

    name: str
    # An interrupt is answered, whatever becomes of the turn: a boundary without that answer is a fault.
    acknowledges_interrupts: bool
    # A prompt may be added to a turn that is open.
    can_steer: bool

    def read(self, line: bytes) -> Meaning | None:
        """What a line means; None: it belongs to the turn and says nothing about it. Never raises, whatever it gets."""
        ...

    def read_head(self, head: bytes) -> Meaning | None:
        """What a line that was too long to keep means, as far as its first bytes tell."""
        ...

    def handshake(self, request: str) -> bytes:
        """The first frame to a new process; its answer means that the process is ready."""
        ...

    def prompt(self, ref: str, prompt: Prompt) -> bytes: ...

    def interrupt(self, request: str) -> bytes: ...

    def answer(self, request: str, decision: Mapping[str, Any]) -> bytes:
        """The answer to the agent's question."""
        ...

    def refuse(self, request: str, error: str) -> bytes:
        """The answer to a question that we cannot take."""
        ...

    def project(self, line: bytes) -> list[dict[str, Any]]:
        """A frame as ACP session updates: none, one or several."""
        ...

    def transcript(self) -> Transcript:
        """A new one, for the frames of one turn."""
        ...

    def has_forgotten(self, stderr: str) -> bool:
        """Whether a process that was to resume a conversation ended because it does not know it any more."""
        ...
