"""What a frame from the agent means to the turn machine: the common tongue of the dialects.

A dialect reads a line and answers with one of these, or with None for a frame that only belongs to the turn (text, a
tool's output, thinking): nearly all of them. Names of prompts (`refs`) are ours: the shell made them and the dialect
put them into the prompt's frame, if the agent can carry one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Noise:
    """No frame of the dialect, or one that says nothing: bytes, but no progress. Kept in the log, never an answer."""


@dataclass(frozen=True, slots=True)
class Replied:
    """The agent answered a request of ours. `still_queued`: prompts that it has taken and not begun."""

    request: str
    error: str | None = None
    still_queued: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptTaken:
    """The agent has the prompt and will come to it."""

    ref: str


@dataclass(frozen=True, slots=True)
class TurnOpened:
    """The agent began to work: on these prompts of ours, or, with no refs, on it does not say what.

    `can_interrupt`: from here on it takes an interrupt. `origin`: who asked for it, if it says so and it was not us.
    """

    refs: tuple[str, ...] = ()
    origin: str | None = None
    conversation: str | None = None
    can_interrupt: bool = False


@dataclass(frozen=True, slots=True)
class TurnOver:
    """The boundary, with what the agent says about how it went."""

    refs: tuple[str, ...] = ()
    origin: str | None = None
    conversation: str | None = None
    is_error: bool = False
    is_aborted: bool = False
    text: str | None = None
    error: str | None = None
    stop_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    cost: float | None = None


@dataclass(frozen=True, slots=True)
class PromptSettled:
    """The agent is done with a prompt: it will not come back to it."""

    ref: str
    is_cancelled: bool = False


@dataclass(frozen=True, slots=True)
class Requested:
    """The agent asks us something and waits for the answer. `tool` None: nothing that we know how to answer."""

    request: str
    subtype: str
    tool: str | None = None
    input: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class RequestWithdrawn:
    """The agent no longer wants that answer."""

    request: str


Meaning = Noise | Replied | PromptTaken | TurnOpened | TurnOver | PromptSettled | Requested | RequestWithdrawn
