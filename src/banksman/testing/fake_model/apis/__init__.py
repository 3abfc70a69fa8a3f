"""What a model API is to the rest of the server; one module has the shape of each. Pure.

An API is read (the body of a request, as entries of a conversation) and spoken (a reply, as events and as a whole). All
else, which script a request plays and when its bytes go out, is the same for each.
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
    """Who speaks in an entry. SYSTEM is the agent itself, where it may pass on what the user said."""

    USER, MODEL, SYSTEM = range(3)


@dataclass(frozen=True, slots=True)
class Entry:
    """One message of a conversation. `has_result`: it brings what a tool gave, which is in no text of `texts`."""

    who: Who
    texts: tuple[str, ...] = ()
    has_result: bool = False


@dataclass(frozen=True, slots=True)
class ModelEvent:
    """One event of a stream. `name` is sent only by those APIs that name their events."""

    data: str
    name: str | None = None

    def encode(self) -> bytes:
        name = f"event: {self.name}\n" if self.name is not None else ""
        return f"{name}data: {self.data}\n\n".encode()


class ModelMessage(Protocol):
    """One reply while it is said.

    Each method returns the events to send and keeps what was said. A call that streams sends the events; one that does
    not ignores them and sends `whole` after `finish`: what the agent gets is the same either way.
    """

    @property
    def is_empty(self) -> bool: ...
    def start(self) -> list[ModelEvent]: ...
    def text(self, words: str) -> list[ModelEvent]: ...
    def think(self, words: str) -> list[ModelEvent]: ...
    def tool(self, name: str, arguments: dict[str, object]) -> list[ModelEvent]: ...
    def finish(self) -> list[ModelEvent]: ...
    def fail(self, kind: str, message: str) -> list[ModelEvent]:
        """An error in mid-stream."""
        ...

    def whole(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class ModelCall:
    """What a reply must know of the request that it answers."""

    path: str
    body: Body
    input_tokens: int

    def model(self, otherwise: str) -> str:
        model = self.body.get("model")
        return model if isinstance(model, str) else otherwise


@dataclass(frozen=True, slots=True)
class Api:
    """One API. The errors' names are the API's own, by HTTP status; `kind` is the one for the other statuses."""

    name: str
    read: Callable[[Body], list[Entry]]
    begin: Callable[[ModelCall], ModelMessage]
    is_streamed: Callable[[ModelCall], bool]
    # The body of an answer with this status, this name of an error, and these words.
    error: Callable[[int, str, str], dict[str, Any]]
    kinds: Mapping[int, str]
    kind: str
    # The name and the words of the error that says that a prompt is too long.
    overflow: tuple[str, str]

    def kind_of(self, status: int) -> str:
        return self.kinds.get(status, self.kind)

    def status_of(self, kind: str) -> int:
        return next((status for status, name in self.kinds.items() if name == kind), 500)


def wants_stream(call: ModelCall) -> bool:
    """As the body says, which it does in three of the four."""
    return call.body.get("stream") is True


def has_tools(body: Body) -> bool:
    return bool(body.get("tools"))


def tokens(characters: int) -> int:
    return 1 + characters // TOKEN_CHARACTERS


def new_id(prefix: str) -> str:
    """Never the same twice, also across servers: a session that is resumed has ids of an earlier one in its history."""
    return f"{prefix}_{uuid.uuid4().hex[:24]}"


def named(value: dict[str, Any]) -> ModelEvent:
    """An event that has the name of its type."""
    return ModelEvent(json.dumps(value), value["type"])


def unnamed(value: dict[str, Any]) -> ModelEvent:
    return ModelEvent(json.dumps(value))


# ── Reading what may be anything ──


def objects(value: object, where: str) -> list[dict[str, Any]]:
    """A list of objects, or BadRequest."""
    if not isinstance(value, list):
        raise BadRequest(f"{where}: a list is required")
    items = cast("list[object]", value)
    if not all(isinstance(item, dict) for item in items):
        raise BadRequest(f"{where}: each must be an object")
    return cast("list[dict[str, Any]]", items)


def texts(content: object, where: str) -> tuple[str, ...]:
    """The texts in a content that is a string or a list of blocks, or BadRequest."""
    if isinstance(content, str):
        return (content,)
    found = (block.get("text") for block in objects(content, where))
    return tuple(text for text in found if isinstance(text, str))
