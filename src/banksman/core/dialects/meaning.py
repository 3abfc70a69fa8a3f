"""Meanings: the dialect-independent inputs that a frame gives the session state machine.

A dialect reads a line and returns one of these values. It returns None for a frame that is only
content of the turn (text, tool output, thinking), and nearly all frames are. `AskChecks` in
`sessions/ask_arguments.py` creates the names of prompts (`refs`). The dialect puts them into the
prompt's frame if the agent can carry a name. `core/session/agent_output.py` applies the meanings.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field

from banksman.core.dialects.tokens import Tokens
from banksman.errors import ErrorKind

# Limit on the name of a usage window.
WINDOW_NAME_CHARACTERS_MAX = 64


class Noise(Struct, frozen=True):
    """Bytes without progress: a line that is no frame of the dialect, or an empty one.

    The log keeps it. It is never an answer.
    """


class Thought(Struct, frozen=True):
    """The agent shows that it is thinking. It is alive, but endless thinking is no progress."""


class UsageReported(Struct, frozen=True):
    """Usage of one model call, as far as the agent knows it. The boundary has the final counts.

    `call`: the id of the model call; several reports may concern one call. `tokens`: the tokens of
    the call until now. `spent`: see `TurnOver`.
    """

    call: str = ""
    tokens: Tokens | None = None
    spent: float | None = None


class Retrying(Struct, frozen=True):
    """The provider failed a model call, and the agent will repeat the call by itself.

    `attempt`: the number of the coming retry. `attempts_max`: how many the agent makes. `delay`:
    seconds until then. None: the agent does not say it. `cause`: the agent's words.
    """

    attempt: int
    cause: str
    kind: ErrorKind = ErrorKind.OTHER
    attempts_max: int | None = None
    delay: float | None = None
    status: int | None = None


class LimitWindow(Struct, frozen=True):
    """One usage window of an account.

    `used`: the used fraction; 1.0 is all of it. `resets_at`: when it starts again. None: the agent
    did not say it. `is_exhausted`: the provider rejects requests until the reset.
    """

    name: str
    used: float | None = None
    resets_at: float | None = None
    is_exhausted: bool = False


class LimitsReported(Struct, frozen=True):
    """The agent reports usage windows of its account: all of them or some."""

    windows: tuple[LimitWindow, ...]


class ToolBegan(Struct, frozen=True):
    """The agent waits for its tools, which may be silent while they run.

    A compaction counts as a tool. `reported`: the usage of the model call that wants the tools.
    """

    calls: tuple[str, ...]
    reported: UsageReported | None = None


class ToolEnded(Struct, frozen=True):
    """The named tool calls are over."""

    calls: tuple[str, ...]


class BackgroundTask(Struct, frozen=True):
    """Work that the agent does beside its turns: a shell command or a subagent.

    `id`: the agent's name for it. `kind` and `description`: as the agent reports them.
    """

    id: str
    kind: str = ""
    description: str = ""


class TasksChanged(Struct, frozen=True):
    """The complete list of background tasks of the agent, in or out of a turn."""

    tasks: tuple[BackgroundTask, ...]


class Replied(Struct, frozen=True):
    """The agent answered a request of Banksman.

    `still_queued`: prompts that the agent has accepted and not started.
    """

    request: str
    error: str | None = None
    still_queued: tuple[str, ...] = ()


class PromptTaken(Struct, frozen=True):
    """The agent has accepted the prompt and will start it later."""

    ref: str


class TurnOpened(Struct, frozen=True):
    """The agent started to work on the named prompts; without refs, on unknown work.

    `can_interrupt`: the agent accepts an interrupt from now on. `origin`: the agent's name for the
    source of the work, if the agent gives one and the source is not Banksman.
    """

    refs: tuple[str, ...] = ()
    origin: str | None = None
    conversation: str | None = None
    can_interrupt: bool = False


class ProviderFailure(Struct, frozen=True):
    """Cause of a failed turn. The members are those of `AgentError`."""

    kind: ErrorKind
    status: int | None = None
    retry_after: float | None = None
    limited_until: float | None = None
    raw: Mapping[str, Any] | None = None


class TurnOver(Struct, frozen=True):
    """The boundary, with the result that the agent reports.

    `is_overflow`: the conversation exceeds the model's context, and will again next time.
    `structured`: the answer as a value, if the ask wanted one. `spent`: the cost of the whole
    conversation until now. `cost`: the cost of this turn, if the agent reports it. If not, the
    session computes it. `usage`: the agent's own report. `tokens`: the tokens of this turn in it.
    `failure`: the cause of an error, if the dialect knows it.
    """

    refs: tuple[str, ...] = ()
    origin: str | None = None
    conversation: str | None = None
    is_error: bool = False
    is_aborted: bool = False
    is_overflow: bool = False
    text: str | None = None
    structured: Any = None
    error: str | None = None
    stop_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    spent: float | None = None
    cost: float | None = None
    tokens: Tokens | None = None
    failure: ProviderFailure | None = None


class PromptSettled(Struct, frozen=True):
    """The agent is done with a prompt and will not return to it."""

    ref: str
    is_cancelled: bool = False


class PromptRefused(Struct, frozen=True):
    """The agent rejected a prompt that was added to an open turn, and will not run it."""

    ref: str


class RequestPurpose(enum.StrEnum):
    """The purpose of an agent's request."""

    # May the agent use this tool? A caller decides.
    PERMISSION = "permission"
    # An MCP server of the agent wants information from the user.
    ELICITATION = "elicitation"
    # The agent is about to use this tool and wants only the verdict of the rules. See
    # core/session/permissions.py.
    RULING = "ruling"
    # A callback of the caller: a hook, or a message to the tools that live in the caller's process.
    HOOK = "hook"
    TOOL = "tool"
    # A file or a terminal of the session's workspace. The agent lets its client read, write and
    # run.
    WORKSPACE = "workspace"
    # No request of the agent: the session asks what to do about a budget that is used up.
    BUDGET = "budget"
    # A request that Banksman cannot answer.
    UNKNOWN = "unknown"


class Requested(Struct, frozen=True):
    """The agent sends a request and waits for the answer.

    `subtype`: the agent's word for the request. `tool`: the tool in question; for a hook or a tool
    message, the callback to call. `input`: the input of the tool or callback. `details`: further
    information (a title, a reason, suggestions) in the agent's words.
    """

    request: str
    wants: RequestPurpose
    subtype: str = ""
    tool: str = ""
    input: Mapping[str, Any] = field(default_factory=dict[str, Any])
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])


class RequestWithdrawn(Struct, frozen=True):
    """The agent has withdrawn a request and needs no answer."""

    request: str


class Forgot(Struct, frozen=True):
    """The agent does not know the conversation that it was asked to resume."""

    error: str


class NeedsConversation(Struct, frozen=True):
    """A message that only the state of this process's protocol can interpret.

    See `ProtocolState.hear`. `message`: in the dialect's own type.
    """

    message: Any


Meaning = (
    Noise
    | Thought
    | ToolBegan
    | ToolEnded
    | TasksChanged
    | Replied
    | PromptTaken
    | TurnOpened
    | TurnOver
    | PromptSettled
    | PromptRefused
    | Requested
    | RequestWithdrawn
    | Forgot
    | NeedsConversation
    | UsageReported
    | Retrying
    | LimitsReported
)
