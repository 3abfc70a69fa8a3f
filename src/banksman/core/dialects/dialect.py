"""What the core asks of a dialect: lines to meanings, wishes to frames. Pure.

A dialect reads each line by itself, without memory: that is the path of every token. What cannot be understood without
knowing what was said before (a reply says only the number of its request) comes out as `Told`, and is resolved by a
`ProtocolState`: what one process was told and has said so far, a frozen value in the session's state like all others. A
dialect whose every frame says all there is to know needs none, and is spoken as it is: `StatelessProtocol`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from banksman.core.dialects.meaning import Meaning, NeedsConversation, Requested
from banksman.core.json_schema.regex import BadPattern, MatchTooCostly, compiled
from banksman.core.session.permissions import Decision, Verdict
from banksman.core.wire import jsonrpc
from banksman.core.wire.jsonrpc import Notification

# What one program does otherwise than its protocol says: measured, kept in its profile, and put right by its dialect.
#
# Nothing here is guessed at run time. An agent that says `end_turn` for a turn that was cancelled, or for one that
# failed, says it in every such turn; so a profile states it once, with the evidence beside it, and the outcome that
# callers get is the true one. What the agent said is in the log as it came, whatever became of it.

SERVICES = ("fs", "terminal")
# A message of an error is short. A longer text is an answer, whatever it begins with, and is not looked at.
ERROR_CHARACTERS_MAX = 4000


class Quirks(Struct, frozen=True):
    """`cancel_may_say`: the reasons to stop that mean "cancelled" after we have cancelled. `error_texts`: patterns; a
    turn that ends well and whose last text one of them matches has failed. `silence_is_error`: so has one that ends
    well and said and did nothing at all. `serves`: what of ours is offered to the agent. `recites_late`: it may go on
    repeating a conversation that it has loaded after it has answered."""

    cancel_may_say: tuple[str, ...] = ()
    error_texts: tuple[str, ...] = ()
    silence_is_error: bool = False
    serves: tuple[str, ...] = SERVICES
    recites_late: bool = False

    def has_failed(self, text: str) -> bool:
        """Whether the last text of a turn that is said to have ended well is the message of an error."""
        if not self.error_texts or len(text) > ERROR_CHARACTERS_MAX:
            return False
        return any(_matches(pattern, text) for pattern in self.error_texts)


def fault(pattern: str) -> str | None:
    """What is wrong with a pattern for texts of errors; None: nothing. Agents write the texts, so a pattern must be
    one that is followed in a bounded time, whatever it meets."""
    try:
        compiled(pattern)
    except BadPattern as exc:
        return str(exc)
    return None


def _matches(pattern: str, text: str) -> bool:
    try:
        return compiled(pattern).search(text)
    except MatchTooCostly:
        # What cannot be judged is no proof of an error.
        return False


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


class ProtocolOutput(Struct, frozen=True):
    """What came of saying or hearing something: the memory from now on, frames to be written, in order, and what it
    means to the turn."""

    protocol: ProtocolState
    frames: tuple[bytes, ...] = ()
    meanings: tuple[Meaning, ...] = ()


class ProtocolState(Protocol):
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

    def handshake(self, request: str) -> ProtocolOutput:
        """The first word to a new process. When all that it takes is done, `Replied(request)` is heard."""
        ...

    def hurry(self) -> ProtocolOutput:
        """The handshake has lasted as long as it may. If there is something in it that can be done without, it goes on
        without; the same speech again: there is not."""
        ...

    def hear(self, told: NeedsConversation) -> ProtocolOutput: ...

    def prompt(self, ref: str, prompt: Prompt) -> ProtocolOutput: ...

    def interrupt(self, request: str) -> ProtocolOutput: ...

    def setting(self, request: str, name: str, value: str) -> ProtocolOutput:
        """A change of the model, or of the permission mode. `Replied(request)` is heard, at once or later."""
        ...

    def answer(self, asked: Requested, decision: Decision) -> ProtocolOutput: ...

    def rule(self, asked: Requested, verdict: Verdict | None) -> ProtocolOutput: ...

    def respond(self, asked: Requested, response: Mapping[str, Any]) -> ProtocolOutput: ...

    def refuse(self, asked: Requested, error: str) -> ProtocolOutput:
        """We do not take this request; the agent goes on without."""
        ...

    def cancel(self, asked: Requested) -> ProtocolOutput:
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

    def begin(self, setup: Setup) -> ProtocolState:
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


class FrameWriter(Protocol):
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


class StatelessProtocol(Struct, frozen=True):
    """The speech of a dialect without memory."""

    words: FrameWriter
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

    def hurry(self) -> ProtocolOutput:
        return ProtocolOutput(self)

    def handshake(self, request: str) -> ProtocolOutput:
        return ProtocolOutput(self, (self.words.handshake(request, self.setup),))

    def hear(self, told: NeedsConversation) -> ProtocolOutput:
        return ProtocolOutput(self)

    def prompt(self, ref: str, prompt: Prompt) -> ProtocolOutput:
        return ProtocolOutput(self, (self.words.prompt(ref, prompt),))

    def interrupt(self, request: str) -> ProtocolOutput:
        return ProtocolOutput(self, (self.words.interrupt(request),))

    def setting(self, request: str, name: str, value: str) -> ProtocolOutput:
        return ProtocolOutput(self, (self.words.setting(request, name, value),))

    def answer(self, asked: Requested, decision: Decision) -> ProtocolOutput:
        return ProtocolOutput(self, (self.words.answer(asked, decision),))

    def rule(self, asked: Requested, verdict: Verdict | None) -> ProtocolOutput:
        return ProtocolOutput(self, (self.words.rule(asked, verdict),))

    def respond(self, asked: Requested, response: Mapping[str, Any]) -> ProtocolOutput:
        return ProtocolOutput(self, (self.words.respond(asked, response),))

    def refuse(self, asked: Requested, error: str) -> ProtocolOutput:
        return ProtocolOutput(self, (self.words.refuse(asked.request, error),))

    def cancel(self, asked: Requested) -> ProtocolOutput:
        return self.refuse(asked, "cancelled")


class StatelessDialect:
    __slots__ = ()

    def has_forgotten(self, stderr: str) -> bool:
        """It says so in words, and stays: see `Forgot`."""
        return False

    def mcp_file(self, servers: Sequence[Mapping[str, Any]]) -> str | None:
        """None: it is told its servers when its conversation begins."""
        return None

    def argv(
        self,
        command: Sequence[str],
        *,
        resume: str | None = None,
        forks: bool = False,
        mcp_config: str | None = None,
        model: str | None = None,
        permission_mode: str | None = None,
        system_prompt: str | None = None,
        args: Sequence[str] = (),
    ) -> list[str]:
        """The command, then `args`. All that was wished for is said over the wire."""
        return [*command, *args]


# Lines that are about another conversation than ours: a subagent has one of its own, and so has what was begun and
# left. They are kept, and are no turn's: neither its answer nor its progress to look at.


def is_aside(line: bytes, conversation: str | None, member: str) -> bool:
    """Whether all that a line tells is about another. `member`: of the parameters, the one that says about which.

    This is the path of each token. A line that has our name in it is ours, which is one look at its first bytes; only
    one that has not is taken apart.
    """
    # It was read from a line, or written to one, so it has bytes. To find is cheaper than to ask whether it is in.
    if conversation is None or line.find(conversation.encode()) >= 0:
        return False
    return all(_is_about_another(message, conversation, member) for message in jsonrpc.decode(line))


def _is_about_another(message: jsonrpc.Message, conversation: str, member: str) -> bool:
    if not isinstance(message, Notification):
        return False
    name = message.named.get(member)
    return isinstance(name, str) and name != conversation
