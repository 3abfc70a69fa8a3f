"""What a frame from the agent means to the turn machine: the common tongue of the dialects.

A dialect reads a line and answers with one of these, or with None for a frame that only belongs to the turn (text, a
tool's output, thinking): nearly all of them. Names of prompts (`refs`) are ours: the shell made them and the dialect
put them into the prompt's frame, if the agent can carry one.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field


class Noise(Struct, frozen=True):
    """No frame of the dialect, or one that says nothing: bytes, but no progress. Kept in the log, never an answer."""


class Thought(Struct, frozen=True):
    """It thinks, and shows that it does: it lives, and has not got on. Thinking for ever is no progress."""


class ToolBegan(Struct, frozen=True):
    """It waits for its own tools, which may be silent for as long as they run. A compaction counts as one."""

    calls: tuple[str, ...]


class ToolEnded(Struct, frozen=True):
    calls: tuple[str, ...]


class TasksChanged(Struct, frozen=True):
    """What runs in the background of the agent now, whether a turn is open or not: all of it, by name."""

    tasks: tuple[str, ...]


class Replied(Struct, frozen=True):
    """The agent answered a request of ours. `still_queued`: prompts that it has taken and not begun."""

    request: str
    error: str | None = None
    still_queued: tuple[str, ...] = ()


class PromptTaken(Struct, frozen=True):
    """The agent has the prompt and will come to it."""

    ref: str


class TurnOpened(Struct, frozen=True):
    """The agent began to work: on these prompts of ours, or, with no refs, on it does not say what.

    `can_interrupt`: from here on it takes an interrupt. `origin`: who asked for it, if it says so and it was not us.
    """

    refs: tuple[str, ...] = ()
    origin: str | None = None
    conversation: str | None = None
    can_interrupt: bool = False


class TurnOver(Struct, frozen=True):
    """The boundary, with what the agent says about how it went.

    `is_overflow`: the conversation does not fit into the model any more, and will not the next time either.
    `structured`: the answer as a value, if one was asked for. `spent`: what the conversation has cost until now;
    `cost`: what this turn has, if the agent says so; else the session finds out.
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


class PromptSettled(Struct, frozen=True):
    """The agent is done with a prompt: it will not come back to it."""

    ref: str
    is_cancelled: bool = False


class PromptRefused(Struct, frozen=True):
    """The agent has not taken a prompt that was added to a turn, and will not come to it."""

    ref: str


class RequestPurpose(enum.StrEnum):
    """What an agent's request is for."""

    # May it use this tool? Somebody decides.
    PERMISSION = "permission"
    # A server of its own wants to know something from the user.
    ELICITATION = "elicitation"
    # It is about to use this tool. Only what the rules say is wanted; see core/session/permissions.py.
    RULING = "ruling"
    # A callback of the caller's: a hook, or a message to the tools that live in the caller's process.
    HOOK = "hook"
    TOOL = "tool"
    # A file, or a terminal, of where the session works: the agent has its client read, write and run for it.
    WORKSPACE = "workspace"
    # Nothing that we know how to answer.
    UNKNOWN = "unknown"


class Requested(Struct, frozen=True):
    """The agent asks us something and waits for the answer. `subtype` is its own word for it.

    `tool`: the tool it is about; of a hook or a tool's message, which one is called. `input`: what goes into it.
    `details`: what else is said about it (a title, a reason, suggestions), in the agent's own words.
    """

    request: str
    wants: RequestPurpose
    subtype: str = ""
    tool: str = ""
    input: Mapping[str, Any] = field(default_factory=dict[str, Any])
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])


class RequestWithdrawn(Struct, frozen=True):
    """The agent no longer wants that answer."""

    request: str


class Forgot(Struct, frozen=True):
    """It was to go on with a conversation, and does not know it any more."""

    error: str


class NeedsConversation(Struct, frozen=True):
    """What only the memory of this process can tell: see `Conversation`. `message` is the dialect's own."""

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
)
