"""Interfaces that every dialect implements, and the values and base classes that they share.

- `Dialect`: lines to meanings, frames to session updates.
- `ProtocolState`: the messages exchanged with one process, and every frame to it.
- `FrameWriter`, `StatelessProtocol`: for a dialect whose frames are self-contained.
- `StatelessDialect`: defaults for a dialect that sends every setting over the wire.
- `Quirks`, `Setup`: measured deviations of a program, and the settings of a new process.

A dialect reads each line alone and keeps no memory, because every token takes this path. Some lines
cannot be understood without earlier messages: a reply carries only the number of its request. The
dialect returns these as `NeedsConversation`, and a `ProtocolState` resolves them. It is a frozen
value in the session's state, like all others.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from banksman.core.dialects.meaning import Meaning, NeedsConversation, Requested
from banksman.core.json_schema.regex import BadPattern, MatchTooCostly, compiled
from banksman.core.wire import jsonrpc
from banksman.core.wire.jsonrpc import Notification


class Verdict(enum.StrEnum):
    """Result of a rule."""

    ALLOW = "allow"
    DENY = "deny"
    # Ask a human, even where the agent would not.
    ASK = "ask"


class Decision(Struct, frozen=True, kw_only=True):
    """A caller's answer to a question.

    - `allows`: True for yes, False for no. `message`: the reason, for the agent to read.
    - `option`: the chosen one of the options that the agent offered; None: any option with the same
      meaning.
    - `updated_input`: the input that the tool gets instead; None: unchanged. An empty mapping
      counts: an input that was emptied on purpose must not run unchanged.
    - `content`: the user's input, if the agent wanted some.
    - `remember`: where the agent stores this answer for the next time; None: nowhere.
    - `interrupts`: the turn is to end as well.
    - `by`: the source of the answer, for the log. `caller`: the name of the caller that gave it.
    """

    allows: bool
    message: str | None = None
    option: str | None = None
    updated_input: Mapping[str, Any] | None = None
    content: Mapping[str, Any] | None = None
    remember: str | None = None
    interrupts: bool = False
    by: str = "answer"
    caller: str | None = None

    @property
    def word(self) -> str:
        """The answer as the log spells it."""
        return "allow" if self.allows else "deny"


DENIED = Decision(allows=False)


SERVICES = ("fs", "terminal")
# An error message is short. A longer text is an answer, whatever its first words are, and is not
# matched.
ERROR_CHARACTERS_MAX = 4000


class Quirks(Struct, frozen=True):
    """Measured deviations of one program from its protocol, kept in its profile.

    The dialect corrects them, so callers get the true outcome. Nothing is guessed at run time: an
    agent that says `end_turn` for a cancelled or failed turn says so in every cancelled or failed
    turn. The profile therefore states the deviation once, with the evidence beside it. The log
    keeps the agent's frame unchanged.

    - `cancel_may_say`: stop reasons that mean "cancelled" after Banksman has cancelled the turn.
    - `error_texts`: patterns. A turn that ends well has failed if a pattern matches its last text.
    - `silence_is_error`: a turn that ends well without any message or action has failed.
    - `serves`: the client services that Banksman offers to the agent.
    - `usage_is_total`: the usage in the answer to a prompt is of all prompts of the process.
    - `recites_late`: the agent may still repeat a loaded conversation after it has answered the
      load request.
    """

    cancel_may_say: tuple[str, ...] = ()
    error_texts: tuple[str, ...] = ()
    silence_is_error: bool = False
    serves: tuple[str, ...] = SERVICES
    recites_late: bool = False
    usage_is_total: bool = False

    def has_failed(self, text: str) -> bool:
        """Return whether the last text of a turn that claims success is an error message."""
        if not self.error_texts or len(text) > ERROR_CHARACTERS_MAX:
            return False
        return any(_matches(pattern, text) for pattern in self.error_texts)


def fault(pattern: str) -> str | None:
    """Return the fault of a pattern for error texts, or None if the pattern is usable.

    Agents write the matched texts, so the pattern must match any text in bounded time.
    """
    try:
        compiled(pattern)
    except BadPattern as exc:
        return str(exc)
    return None


def _matches(pattern: str, text: str) -> bool:
    try:
        return compiled(pattern).search(text)
    except MatchTooCostly:
        # A match that cannot be decided is no proof of an error.
        return False


# The client version that agents receive. A test compares it with the version of the package.
CLIENT_VERSION = "0.1.0"

# Text, or ACP content blocks.
Prompt = str | Sequence[Mapping[str, Any]]


def client() -> dict[str, str]:
    """Return the client description for agents that ask for it."""
    return {"name": "banksman", "title": "Banksman", "version": CLIENT_VERSION}


class Registration(Struct, frozen=True):
    """A hook that the agent calls.

    `event`: the event that triggers the hook. `matcher`: the subset of these events; None means
    all. `id`: the name under which the agent calls the hook. `seconds`: how long the agent waits
    for the answer. This is longer than Banksman's own timeout.
    """

    event: str
    matcher: str | None
    id: str
    seconds: float


class Setup(Struct, frozen=True, kw_only=True):
    """Settings for a new agent process, sent as frames or on its command line.

    `servers`: names of the MCP servers whose tools live in the caller's process. `mcp_servers`:
    other MCP servers, as ACP describes them. `schema`: the JSON Schema for answers of this process.
    `conversation`: the conversation to resume. `forks`: use `conversation` only as the start of a
    new conversation.
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
    """Result of one protocol step.

    `protocol`: the new state. `frames`: frames to write, in order. `meanings`: the meanings for the
    turn.
    """

    protocol: ProtocolState
    frames: tuple[bytes, ...] = ()
    meanings: tuple[Meaning, ...] = ()


class ProtocolState(Protocol):
    """State of the protocol between Banksman and one agent process.

    Frozen. Every method is pure. The only exception that a method raises is `UsageError`, when a
    value of the caller cannot be sent.
    """

    @property
    def conversation(self) -> str | None:
        """The agent's id of the conversation, if the agent gave one before the first prompt."""
        ...

    @property
    def recites(self) -> bool:
        """Whether the agent is replaying a conversation that it resumes. Its frames are history."""
        ...

    @property
    def quiet_seconds(self) -> float:
        """Seconds of silence after which the caller calls `hurry`; 0 disables this wait."""
        ...

    def is_aside(self, line: bytes) -> bool:
        """Return whether a line belongs to another conversation, and therefore to no turn here."""
        ...

    def handshake(self, request: str) -> ProtocolOutput:
        """Send the first frame to a new process. `Replied(request)` follows after the handshake."""
        ...

    def hurry(self) -> ProtocolOutput:
        """Skip the optional parts of a handshake that has reached its time limit.

        The handshake continues without them. An unchanged state means that nothing can be skipped.
        """
        ...

    # Resolve messages that need the state of this conversation.
    def hear(self, told: NeedsConversation) -> ProtocolOutput: ...

    def prompt(self, ref: str, prompt: Prompt) -> ProtocolOutput: ...

    def interrupt(self, request: str) -> ProtocolOutput: ...

    def setting(self, request: str, name: str, value: str) -> ProtocolOutput:
        """Change the model or the permission mode. `Replied(request)` follows, now or later."""
        ...

    def answer(self, asked: Requested, decision: Decision) -> ProtocolOutput: ...

    def rule(self, asked: Requested, verdict: Verdict | None) -> ProtocolOutput: ...

    def respond(self, asked: Requested, response: Mapping[str, Any]) -> ProtocolOutput: ...

    def refuse(self, asked: Requested, error: str) -> ProtocolOutput:
        """Decline a request. The agent continues without it."""
        ...

    def cancel(self, asked: Requested) -> ProtocolOutput:
        """Dismiss a request of a turn that is being stopped. The agent needs no real answer."""
        ...


class Projector(Protocol):
    """Translator of the frames of one turn, in order, to ACP session updates."""

    def project(self, line: bytes) -> list[dict[str, Any]]: ...


class Transcript(Protocol):
    """Collector of the agent's text from the frames of one turn."""

    def add(self, line: bytes) -> None: ...
    def text(self) -> str | None: ...


class Dialect(Protocol):
    """How one family of agents speaks: the reader, writer and projections of its frames."""

    name: str
    # The agent answers every interrupt, however the turn ends. A boundary without that answer is a
    # fault.
    acknowledges_interrupts: bool
    # The agent accepts a prompt that is added to an open turn.
    can_steer: bool
    # An answer that allows a tool may replace the tool's input.
    takes_input: bool

    def read(self, line: bytes) -> Meaning | None:
        """Return the meaning of a line; None if it is only content of the turn. Never raises."""
        ...

    def read_head(self, head: bytes, tail: bytes = b"") -> Meaning | None:
        """Return the meaning of a line too long to keep, judged by its two ends."""
        ...

    def begin(self, setup: Setup) -> ProtocolState:
        """Return the initial state for a process that has received no frame yet."""
        ...

    def project(self, line: bytes) -> list[dict[str, Any]]:
        """Translate a frame to ACP session updates: none, one or several."""
        ...

    def partial(self, line: bytes) -> list[dict[str, Any]]:
        """Translate a frame that holds part of an unfinished text to session updates.

        The frame that completes the text repeats all of it, and `project` translates that frame.
        Stateless, like `project`.
        """
        ...

    def may_show_output(self, line: bytes) -> bool:
        """Return False if neither `project` nor `partial` can find output of the model in a frame.

        This costs much less than to translate the frame. True if that would need its content.
        """
        ...

    def projector(self) -> Projector:
        """Return a new projector for the frames of one turn from its beginning.

        A projector may emit a text in pieces, where `project` waits for the frame with the whole
        text. Each emits everything exactly once.
        """
        ...

    def transcript(self) -> Transcript:
        """Return a new transcript for the frames of one turn."""
        ...

    def has_forgotten(self, stderr: str) -> bool:
        """Return whether a resuming process ended because the conversation is unknown."""
        ...


class FrameWriter(Protocol):
    """Writer of a stateless dialect: one frame for each request.

    A frame ends with a newline and contains no other newline.
    """

    def handshake(self, request: str, setup: Setup = PLAIN) -> bytes: ...

    def prompt(self, ref: str, prompt: Prompt) -> bytes: ...

    def interrupt(self, request: str) -> bytes: ...

    def setting(self, request: str, name: str, value: str) -> bytes: ...

    def answer(self, asked: Requested, decision: Decision) -> bytes:
        """Write the answer to the agent's question."""
        ...

    def rule(self, asked: Requested, verdict: Verdict | None) -> bytes:
        """Write the verdict of the rules on a tool call of the agent; None: no verdict."""
        ...

    def respond(self, asked: Requested, response: Mapping[str, Any]) -> bytes:
        """Write the value that the caller's callback returned."""
        ...

    def refuse(self, request: str, error: str) -> bytes:
        """Write the answer to a request that Banksman cannot serve."""
        ...


class StatelessProtocol(Struct, frozen=True):
    """Protocol state of a stateless dialect."""

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
    """Defaults for dialects that send every setting over the wire."""

    __slots__ = ()

    def has_forgotten(self, stderr: str) -> bool:
        """Return False. These agents report a forgotten conversation by a frame and keep running.

        See `Forgot`.
        """
        return False

    def may_show_output(self, line: bytes) -> bool:
        """Return True. The kind of a JSON-RPC message is not at a fixed place."""
        return True

    def mcp_file(self, servers: Sequence[Mapping[str, Any]]) -> str | None:
        """Return None. The agent gets its MCP servers when its conversation opens."""
        return None

    def argv(
        self, command: Sequence[str], *, args: Sequence[str] = (), **_settings: object
    ) -> list[str]:
        """Return the command, then `args`. All other settings go over the wire."""
        return [*command, *args]


def is_aside(line: bytes, conversation: str | None, member: str) -> bool:
    """Return whether every message of a line belongs to another conversation.

    Subagents have their own conversation, and so does a conversation that was opened and abandoned.
    The log keeps these lines, but they count neither as the answer nor as the progress of a turn.

    `member`: the parameter that names the conversation. Every token takes this path. A line that
    contains the conversation's name belongs to it, which one search over the first bytes decides.
    Only a line without the name is decoded.
    """
    # The name came from a decoded line or went into a frame, so it can be encoded. `find` is
    # cheaper than `in`.
    if conversation is None or line.find(conversation.encode()) >= 0:
        return False
    return all(_is_about_another(message, conversation, member) for message in jsonrpc.decode(line))


def _is_about_another(message: jsonrpc.Message, conversation: str, member: str) -> bool:
    if not isinstance(message, Notification):
        return False
    name = message.named.get(member)
    return isinstance(name, str) and name != conversation
