"""What the core asks of a dialect: lines to meanings, wishes to frames. Pure, and without state of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from banksman.core.decision import Decision
from banksman.core.meaning import Meaning, Requested
from banksman.core.rules import Verdict

# Text, or ACP content blocks.
Prompt = str | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Registration:
    """A hook that the agent is to call: on which event, for which of them (None: all), by which name. `seconds`: how
    long it should wait for the answer, which is longer than we do."""

    event: str
    matcher: str | None
    id: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a new process is told at its start. `servers`: the names of those whose tools live in the caller's process.
    `schema`: what the answers of this process are to look like."""

    hooks: tuple[Registration, ...] = ()
    servers: tuple[str, ...] = ()
    schema: Mapping[str, Any] | None = None


PLAIN = Setup()


class Projector(Protocol):
    """The frames of one turn as ACP session updates, as they come."""

    def project(self, line: bytes) -> list[dict[str, Any]]: ...


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

    def handshake(self, request: str, setup: Setup = PLAIN) -> bytes:
        """The first frame to a new process; its answer means that the process is ready."""
        ...

    def prompt(self, ref: str, prompt: Prompt) -> bytes: ...

    def interrupt(self, request: str) -> bytes: ...

    def setting(self, request: str, name: str, value: str) -> bytes:
        """A change of the model, or of the permission mode, in a process that runs."""
        ...

    def answer(self, asked: Requested, decision: Decision) -> bytes:
        """The answer to the agent's question."""
        ...

    def rule(self, asked: Requested, verdict: Verdict | None) -> bytes:
        """What the rules say about the tool that the agent is about to use; None: nothing."""
        ...

    def respond(self, asked: Requested, response: Mapping[str, Any]) -> bytes:
        """What a callback of the caller's gave back."""
        ...

    def refuse(self, request: str, error: str) -> bytes:
        """The answer to a request that we cannot take."""
        ...

    def project(self, line: bytes) -> list[dict[str, Any]]:
        """A frame as ACP session updates: none, one or several."""
        ...

    def projector(self) -> Projector:
        """A new one, for the frames of one turn from its beginning: it may tell a text as it comes, where `project`
        has to wait for the frame that has all of it. Each tells everything once."""
        ...

    def transcript(self) -> Transcript:
        """A new one, for the frames of one turn."""
        ...

    def has_forgotten(self, stderr: str) -> bool:
        """Whether a process that was to resume a conversation ended because it does not know it any more."""
        ...
