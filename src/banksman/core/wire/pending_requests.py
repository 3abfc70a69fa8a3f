"""Open JSON-RPC requests with one agent process, both ways, and the frames that they need.

`PendingRequests` registers and encodes requests, notifications, answers and rejections. It holds
two tables. Each side numbers its own requests, so the same id can be open in both directions. One
agent counts from 0, and Banksman counts from 1. `OutgoingRequests` and `IncomingRequests` are
independent, and no id is looked up in the wrong table. `jsonrpc.py` decodes the messages.

**Replies are values.** A late, duplicate or unsolicited reply settles nothing, and `settle` returns
None for it. Each request of the agent is answered at most once: a second answer is dropped.

All functions are pure, and never raise over frames from an agent. Only encoding can fail, with
`UsageError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from banksman.core.wire.jsonrpc import (
    INTERNAL_ERROR,
    INVALID_REQUEST,
    JSONRPC,
    Id,
    InvalidMessage,
    RpcCall,
    RpcWriter,
    id_from,
)

Purpose = TypeVar("Purpose")

# Limit on open requests to the agent; a process has a few. An agent that never answers must not
# grow the table. No request may be forgotten to make room: the oldest may be the prompt whose reply
# ends the turn. So a caller checks `has_room` before it sends a request.
OURS_MAX = 256
# Limit on open requests from the agent. A request beyond it is refused immediately, and that
# refusal is its reply.
THEIRS_MAX = 256
NO_ROOM = "too many requests to the agent have no answer yet"


class OutgoingRequests(Struct, Generic[Purpose], frozen=True):
    """Requests to the agent that have no reply yet, each with its purpose."""

    open: tuple[tuple[int, Purpose], ...] = ()
    count: int = 0

    @property
    def has_room(self) -> bool:
        """Whether another request may be sent."""
        return len(self.open) < OURS_MAX

    def begin(self, purpose: Purpose) -> tuple[OutgoingRequests[Purpose], int]:
        """Register a request, and return its id."""
        assert self.has_room
        id = self.count + 1
        return OutgoingRequests((*self.open, (id, purpose)), id), id

    def settle(self, id: Id | None) -> tuple[OutgoingRequests[Purpose], Purpose | None]:
        """Remove a request and return its purpose; None if no request with this id is open.

        An agent in a language that does not distinguish the types may return a number as a string.
        All ids of this table are numbers, so the string can mean no other request.
        """
        found = next(
            ((other, purpose) for other, purpose in self.open if id in (other, str(other))), None
        )
        if found is None:
            return self, None
        return OutgoingRequests(
            tuple(pair for pair in self.open if pair[0] != found[0]), self.count
        ), found[1]

    def changed(self, change: Callable[[Purpose], Purpose]) -> OutgoingRequests[Purpose]:
        """Apply `change` to the purpose of each open request."""
        return OutgoingRequests(
            tuple((id, change(purpose)) for id, purpose in self.open), self.count
        )

    def without(
        self, is_over: Callable[[Purpose], bool]
    ) -> tuple[OutgoingRequests[Purpose], tuple[Purpose, ...]]:
        """Remove the requests that are over, and return their purposes."""
        over = tuple(purpose for _, purpose in self.open if is_over(purpose))
        return OutgoingRequests(
            tuple(pair for pair in self.open if not is_over(pair[1])), self.count
        ), over


class IncomingRequests(Struct, frozen=True):
    """Requests from the agent that have no reply yet, by their ids exactly as received."""

    open: tuple[Id, ...] = ()

    def take(self, id: Id) -> tuple[IncomingRequests, bool]:
        """Add a request. False: it is already open, or the table is full; see `is_open`."""
        if id in self.open or len(self.open) >= THEIRS_MAX:
            return self, False
        return IncomingRequests((*self.open, id)), True

    def is_open(self, id: Id) -> bool:
        """Whether this request still waits for its reply."""
        return id in self.open

    def answer(self, id: Id) -> tuple[IncomingRequests, bool]:
        """Remove a request. Whether it may be answered now: it is open and has no answer yet."""
        if id not in self.open:
            return self, False
        return IncomingRequests(tuple(other for other in self.open if other != id)), True


_NOTHING_ASKED = IncomingRequests()


class PendingRequests(Struct, Generic[Purpose], frozen=True):
    """Both tables of one process, and the encoder of the frames.

    `last`: the id of the request that was the last frame written; None: another frame followed.
    """

    writer: RpcWriter = JSONRPC
    ours: OutgoingRequests[Purpose] = field(default_factory=OutgoingRequests[Purpose])
    theirs: IncomingRequests = _NOTHING_ASKED
    last: int | None = None

    # -- requests to the agent --------------------------------------------------------------------
    def call(
        self, purpose: Purpose, method: str, params: Mapping[str, Any]
    ) -> tuple[PendingRequests[Purpose], bytes]:
        """Register a request to the agent, and encode it."""
        ours, id = self.ours.begin(purpose)
        return replace(self, ours=ours, last=id), self.writer.call(id, method, params)

    def notice(
        self, method: str, params: Mapping[str, Any] | None = None
    ) -> tuple[PendingRequests[Purpose], bytes]:
        """Encode a notification to the agent."""
        return replace(self, last=None), self.writer.notice(method, params)

    def settle(self, id: Id | None) -> tuple[PendingRequests[Purpose], Purpose | None]:
        """Remove a request to the agent, and return its purpose; see `OutgoingRequests.settle`."""
        ours, purpose = self.ours.settle(id)
        return replace(self, ours=ours), purpose

    # -- requests from the agent ------------------------------------------------------------------
    def take(self, call: RpcCall) -> tuple[PendingRequests[Purpose], bool, tuple[bytes, ...]]:
        """Register a request from the agent.

        Return whether it needs an answer, and otherwise the frames to send immediately. A duplicate
        of an open request gets no frame: its answer is still to come.
        """
        theirs, is_new = self.theirs.take(call.id)
        if is_new:
            return replace(self, theirs=theirs), True, ()
        if self.theirs.is_open(call.id):
            return self, False, ()
        full = self.writer.error(call.id, INTERNAL_ERROR, "too many requests are open")
        return replace(self, last=None), False, (full,)

    def reject(self, garbage: InvalidMessage) -> tuple[PendingRequests[Purpose], tuple[bytes, ...]]:
        """Answer an invalid message with an error if its sender waits for a reply."""
        if not garbage.is_request:
            return self, ()
        return replace(self, last=None), (
            self.writer.error(garbage.id, INVALID_REQUEST, garbage.reason),
        )

    def reply(
        self, request: str, result: Any
    ) -> tuple[PendingRequests[Purpose], tuple[bytes, ...]]:
        """Answer a request of the agent with a result. `request`: the text of its id."""
        return self._answered(request, lambda id: self.writer.reply(id, result))

    def error(
        self, request: str, code: int, message: str
    ) -> tuple[PendingRequests[Purpose], tuple[bytes, ...]]:
        """Answer a request of the agent with an error. `request`: the text of its id."""
        return self._answered(request, lambda id: self.writer.error(id, code, message))

    def close(self, id: Id | None) -> tuple[PendingRequests[Purpose], bool]:
        """Close a request of the agent without an answer. Return whether it was open."""
        if id is None:
            return self, False
        theirs, was_open = self.theirs.answer(id)
        return replace(self, theirs=theirs), was_open

    def _answered(
        self, request: str, frame: Callable[[Id], bytes]
    ) -> tuple[PendingRequests[Purpose], tuple[bytes, ...]]:
        """Answer an open request, once. `request`: the text of its id."""
        id = id_from(request)
        closed, is_due = self.close(id)
        if id is None or not is_due:
            return self, ()
        return replace(closed, last=None), (frame(id),)
