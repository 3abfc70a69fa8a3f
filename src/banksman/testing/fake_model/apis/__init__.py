"""Interface of a model API of the fake model, and helpers that all APIs share.

Each API has a module with an `Api` value. A function reads a request: the body as entries of a
conversation. A `ModelMessage` class builds the reply, as events and as a whole. The modules do no
I/O. The choice of the script step and the time of sending are the same for every API, and are in
`play.py`.
"""

from __future__ import annotations

import enum
import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

# A rule of thumb of all vendors: a token is about four characters.
TOKEN_CHARACTERS = 4

Body = Mapping[str, Any]


class BadRequest(ValueError):
    """A body that no model could answer."""


class Who(enum.Enum):
    """Author of an entry. SYSTEM is the agent, which may pass on text of the user."""

    USER, MODEL, SYSTEM = range(3)


@dataclass(frozen=True, slots=True)
class Entry:
    """One message of a conversation. `has_result`: it also has a tool result, not in `texts`."""

    who: Who
    texts: tuple[str, ...] = ()
    has_result: bool = False


@dataclass(frozen=True, slots=True)
class ModelEvent:
    """One event of a stream. `name`: sent only by APIs that name their events."""

    data: str
    name: str | None = None

    def encode(self) -> bytes:
        name = f"event: {self.name}\n" if self.name is not None else ""
        return f"{name}data: {self.data}\n\n".encode()


class ModelMessage(Protocol):
    """A reply under construction.

    Each method returns the events to send and stores their content. A streaming call sends the
    events. A call without streaming ignores them and sends `whole` after `finish`. The agent gets
    the same content either way.
    """

    @property
    def is_empty(self) -> bool: ...
    def start(self) -> list[ModelEvent]: ...
    def text(self, words: str) -> list[ModelEvent]: ...
    def think(self, words: str) -> list[ModelEvent]: ...
    def tool(self, name: str, arguments: dict[str, object]) -> list[ModelEvent]: ...
    def finish(self) -> list[ModelEvent]: ...
    def fail(self, kind: str, message: str) -> list[ModelEvent]:
        """Return the events of an error in mid-stream."""
        ...

    def whole(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class ModelCall:
    """The part of a request that its reply depends on."""

    path: str
    body: Body
    input_tokens: int

    def model(self, otherwise: str) -> str:
        model = self.body.get("model")
        return model if isinstance(model, str) else otherwise


@dataclass(frozen=True, slots=True)
class Api:
    """One model API.

    `kinds`: error names of the API by HTTP status. `kind`: error name for the other statuses.
    """

    name: str
    read: Callable[[Body], list[Entry]]
    begin: Callable[[ModelCall], ModelMessage]
    is_streamed: Callable[[ModelCall], bool]
    # Builds the body of an error answer from status, error name and message.
    error: Callable[[int, str, str], dict[str, Any]]
    kinds: Mapping[int, str]
    kind: str
    # Error name and message for a prompt that is too long.
    overflow: tuple[str, str]

    def kind_of(self, status: int) -> str:
        return self.kinds.get(status, self.kind)

    def status_of(self, kind: str) -> int:
        return next((status for status, name in self.kinds.items() if name == kind), 500)


def wants_stream(call: ModelCall) -> bool:
    """Whether the body asks for a stream; three of the four APIs have this field."""
    return call.body.get("stream") is True


def has_tools(body: Body) -> bool:
    return bool(body.get("tools"))


def tokens(characters: int) -> int:
    return 1 + characters // TOKEN_CHARACTERS


def new_id(prefix: str) -> str:
    """Return an id that is unique across servers.

    A resumed session has ids of an earlier server in its history.
    """
    return f"{prefix}_{uuid.uuid4().hex[:24]}"


def named(value: dict[str, Any]) -> ModelEvent:
    """Return an event named after its type."""
    return ModelEvent(json.dumps(value), value["type"])


def unnamed(value: dict[str, Any]) -> ModelEvent:
    return ModelEvent(json.dumps(value))


# ── Parsing untrusted bodies ──


def objects(value: object, where: str) -> list[dict[str, Any]]:
    """Return a list of objects, or raise BadRequest."""
    if not isinstance(value, list):
        raise BadRequest(f"{where}: a list is required")
    items = cast("list[object]", value)
    if not all(isinstance(item, dict) for item in items):
        raise BadRequest(f"{where}: each must be an object")
    return cast("list[dict[str, Any]]", items)


def texts(content: object, where: str) -> tuple[str, ...]:
    """Return the texts of a content, which is a string or a list of blocks; or raise BadRequest."""
    if isinstance(content, str):
        return (content,)
    found = (block.get("text") for block in objects(content, where))
    return tuple(text for text in found if isinstance(text, str))
