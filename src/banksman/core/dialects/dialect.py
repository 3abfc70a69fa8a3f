"""What the core asks of a dialect: lines to meanings, wishes to frames. Pure.

A dialect reads each line by itself, without memory: that is the path of every token. What cannot be understood without
knowing what was said before (a reply says only the number of its request) comes out as `Told`, and is resolved by a
`Speech`: what one process was told and has said so far, a frozen value in the session's state like all others. A
dialect whose every frame says all there is to know needs none, and is spoken as it is: `Plain`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from banksman.core.dialects.meaning import Meaning, NeedsConversation, Requested
from banksman.core.session.permissions import Decision, Verdict

# Of Banksman: agents are told who speaks to them. A test holds it to the package's.
CLIENT_VERSION = "0.1.0"

# Text, or ACP content blocks.
Prompt = str | Sequence[Mapping[str, Any]]


def client() -> dict[str, str]:
    """Who speaks, as those agents are told that ask."""
    return {"name": "banksman", "title": "Banksman", "version": CLIENT_VERSION}


class Registration(Struct, frozen=True):
    """A hook that the agent is to call: on which event, for which of them (None: all), by which name. `seconds`: how
    long it should wait for the answer, which is longer than we do."""

    event: str
    matcher: str | None
    id: str
    seconds: float


class Setup(Struct, frozen=True, kw_only=True):
    """What a new process is told at its start: in words, or by its command line, as the agent takes it.

    `servers`: the names of those whose tools live in the caller's process; `mcp_servers`: others, as ACP describes
    them. `schema`: what the answers of this process are to look like. `conversation`: the one to go on with; `forks`:
    only as the beginning of another.
    """

    hooks: tuple[Registration, ...] = ()
    servers: tuple[str, ...] = ()
    schema: Mapping[str, Any] | None = None
    conversation: str | None = None
    forks: bool = False
    cwd: str = ""
    model: str | None = None
    permission_mode: str | None = None
    system_prompt: str | None = None
    mcp_servers: tuple[Mapping[str, Any], ...] = ()


PLAIN = Setup()


class Spoken(Struct, frozen=True):
    """What came of saying or hearing something: the memory from now on, frames to be written, in order, and what it
    means to the turn."""

    speech: Speech
    frames: tuple[bytes, ...] = ()
    meanings: tuple[Meaning, ...] = ()


class Speech(Protocol):
    """One process's conversation with us, so far. Frozen; every method is pure, and total but for `UsageError`, which
    says that something of the caller's cannot be sent."""

    @property
    def conversation(self) -> str | None:
        """The agent's own name for what is being said, where it has told one before the first prompt."""
        ...

    @property
    def recites(self) -> bool:
        """What it says now was said before: it repeats a conversation that it was to go on with."""
        ...

    @property
    def quiet_seconds(self) -> float:
        """How long nothing must be heard until `hurry` is to be called; 0: that is not waited for."""
        ...

    def is_aside(self, line: bytes) -> bool:
        """Whether a line is about another conversation than ours: it is no turn's."""
        ...

    def handshake(self, request: str) -> Spoken:
        """The first word to a new process. When all that it takes is done, `Replied(request)` is heard."""
        ...

    def hurry(self) -> Spoken:
        """The handshake has lasted as long as it may. If there is something in it that can be done without, it goes on
        without; the same speech again: there is not."""
        ...

    def hear(self, told: NeedsConversation) -> Spoken: ...

    def prompt(self, ref: str, prompt: Prompt) -> Spoken: ...

    def interrupt(self, request: str) -> Spoken: ...

    def setting(self, request: str, name: str, value: str) -> Spoken:
        """A change of the model, or of the permission mode. `Replied(request)` is heard, at once or later."""
        ...

    def answer(self, asked: Requested, decision: Decision) -> Spoken: ...

    def rule(self, asked: Requested, verdict: Verdict | None) -> Spoken: ...

    def respond(self, asked: Requested, response: Mapping[str, Any]) -> Spoken: ...

    def refuse(self, asked: Requested, error: str) -> Spoken:
        """We do not take this request; the agent goes on without."""
        ...

    def cancel(self, asked: Requested) -> Spoken:
        """Its turn is being stopped: it needs no answer any more."""
        ...


class Projector(Protocol):
    """The frames of one turn as ACP session updates, as they come."""

    def project(self, line: bytes) -> list[dict[str, Any]]: ...


class Transcript(Protocol):
    """What the agent says in the frames of a turn, gathered as they are added."""

    def add(self, line: bytes) -> None: ...
    def text(self) -> str | None: ...


class Dialect(Protocol):
    name: str
    # An interrupt is answered, whatever becomes of the turn: a boundary without that answer is a fault.
    acknowledges_interrupts: bool
    # A prompt may be added to a turn that is open.
    can_steer: bool
    # Who allows a tool may say with which other input.
    takes_input: bool

    def read(self, line: bytes) -> Meaning | None:
        """What a line means; None: it belongs to the turn and says nothing about it. Never raises, whatever it gets."""
        ...

    def read_head(self, head: bytes, tail: bytes = b"") -> Meaning | None:
        """What a line that was too long to keep means, as far as its two ends tell."""
        ...

    def begin(self, setup: Setup) -> Speech:
        """With a process that was told nothing yet."""
        ...

    def project(self, line: bytes) -> list[dict[str, Any]]:
        """A frame as ACP session updates: none, one or several."""
        ...

    def partial(self, line: bytes) -> list[dict[str, Any]]:
        """What a frame says of a text that is not complete yet, as session updates; the frame that completes it says
        all of it again, to `project`. Stateless, as that is."""
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


class Words(Protocol):
    """What is written in a dialect without memory: one frame for each wish. A frame ends with a newline, and contains
    no other."""

    def handshake(self, request: str, setup: Setup = PLAIN) -> bytes: ...

    def prompt(self, ref: str, prompt: Prompt) -> bytes: ...

    def interrupt(self, request: str) -> bytes: ...

    def setting(self, request: str, name: str, value: str) -> bytes: ...

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


class Plain(Struct, frozen=True):
    """The speech of a dialect without memory."""

    words: Words
    setup: Setup = PLAIN

    @property
    def conversation(self) -> str | None:
        return None

    @property
    def recites(self) -> bool:
        return False

    @property
    def quiet_seconds(self) -> float:
        return 0.0

    def is_aside(self, line: bytes) -> bool:
        return False

    def hurry(self) -> Spoken:
        return Spoken(self)

    def handshake(self, request: str) -> Spoken:
        return Spoken(self, (self.words.handshake(request, self.setup),))

    def hear(self, told: NeedsConversation) -> Spoken:
        return Spoken(self)

    def prompt(self, ref: str, prompt: Prompt) -> Spoken:
        return Spoken(self, (self.words.prompt(ref, prompt),))

    def interrupt(self, request: str) -> Spoken:
        return Spoken(self, (self.words.interrupt(request),))

    def setting(self, request: str, name: str, value: str) -> Spoken:
        return Spoken(self, (self.words.setting(request, name, value),))

    def answer(self, asked: Requested, decision: Decision) -> Spoken:
        return Spoken(self, (self.words.answer(asked, decision),))

    def rule(self, asked: Requested, verdict: Verdict | None) -> Spoken:
        return Spoken(self, (self.words.rule(asked, verdict),))

    def respond(self, asked: Requested, response: Mapping[str, Any]) -> Spoken:
        return Spoken(self, (self.words.respond(asked, response),))

    def refuse(self, asked: Requested, error: str) -> Spoken:
        return Spoken(self, (self.words.refuse(asked.request, error),))

    def cancel(self, asked: Requested) -> Spoken:
        return self.refuse(asked, "cancelled")
