"""Requests that are open between us and one process of an agent, in both directions, and the frames that go with them.

**Two tables.** Either side numbers its own requests, so the same id is open in both directions at once: one agent
counts from 0, and we from 1. `OutgoingRequests` and `IncomingRequests` know nothing of each other, and no id is looked
up in the wrong one.

**Replies are values.** One that comes late, or twice, or that nobody asked for settles nothing, and says so. Of theirs,
each is answered once: who has an answer gets no other.

All of it is pure, and never raises over what an agent says. Only what is written can be at fault, with `UsageError`.
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

# Requests of ours that are open at once: a process has a few. An agent that never answers must not grow a table, and
# none is forgotten for another: the oldest may be the prompt whose answer ends the turn. So there is room, or there is
# not, and whoever has something to ask looks first.
OURS_MAX = 256
# Theirs. One more is refused at once: it has its answer.
THEIRS_MAX = 256
NO_ROOM = "the agent has left too many requests without an answer"


class OutgoingRequests(Struct, Generic[Purpose], frozen=True):
    """Our requests that have no answer yet, each with what it was for."""

    open: tuple[tuple[int, Purpose], ...] = ()
    count: int = 0

    @property
    def has_room(self) -> bool:
        return len(self.open) < OURS_MAX

    def begin(self, purpose: Purpose) -> tuple[OutgoingRequests[Purpose], int]:
        assert self.has_room
        id = self.count + 1
        return OutgoingRequests((*self.open, (id, purpose)), id), id

    def settle(self, id: Id | None) -> tuple[OutgoingRequests[Purpose], Purpose | None]:
        """What the request was for; None: there is none of that id, or not any more.

        An agent in a language that does not tell them apart may give a number back as its text. All of ours are
        numbers, so it can mean no other.
        """
        found = next(((other, purpose) for other, purpose in self.open if id in (other, str(other))), None)
        if found is None:
            return self, None
        return OutgoingRequests(tuple(pair for pair in self.open if pair[0] != found[0]), self.count), found[1]

    def changed(self, change: Callable[[Purpose], Purpose]) -> OutgoingRequests[Purpose]:
        """With what is known now about each."""
        return OutgoingRequests(tuple((id, change(purpose)) for id, purpose in self.open), self.count)

    def without(self, is_over: Callable[[Purpose], bool]) -> tuple[OutgoingRequests[Purpose], tuple[Purpose, ...]]:
        """Those that need no answer any more are taken out."""
        over = tuple(purpose for _, purpose in self.open if is_over(purpose))
        return OutgoingRequests(tuple(pair for pair in self.open if not is_over(pair[1])), self.count), over


class IncomingRequests(Struct, frozen=True):
    """Their requests that have no answer yet, by their ids as they came."""

    open: tuple[Id, ...] = ()

    def take(self, id: Id) -> tuple[IncomingRequests, bool]:
        """False: it is open already, or there is no room; see `is_open`."""
        if id in self.open or len(self.open) >= THEIRS_MAX:
            return self, False
        return IncomingRequests((*self.open, id)), True

    def is_open(self, id: Id) -> bool:
        return id in self.open

    def answer(self, id: Id) -> tuple[IncomingRequests, bool]:
        """Whether it may be answered now: it was asked, and has none yet."""
        if id not in self.open:
            return self, False
        return IncomingRequests(tuple(other for other in self.open if other != id)), True


_NOTHING_ASKED = IncomingRequests()


class PendingRequests(Struct, Generic[Purpose], frozen=True):
    """`last`: the request that was the last thing we wrote; None: we have written something since."""

    writer: RpcWriter = JSONRPC
    ours: OutgoingRequests[Purpose] = field(default_factory=OutgoingRequests[Purpose])
    theirs: IncomingRequests = _NOTHING_ASKED
    last: int | None = None

    # -- ours --------------------------------------------------------------------------------------------------------
    def call(self, purpose: Purpose, method: str, params: Mapping[str, Any]) -> tuple[PendingRequests[Purpose], bytes]:
        ours, id = self.ours.begin(purpose)
        return replace(self, ours=ours, last=id), self.writer.call(id, method, params)

    def notice(self, method: str, params: Mapping[str, Any] | None = None) -> tuple[PendingRequests[Purpose], bytes]:
        return replace(self, last=None), self.writer.notice(method, params)

    def settle(self, id: Id | None) -> tuple[PendingRequests[Purpose], Purpose | None]:
        ours, purpose = self.ours.settle(id)
        return replace(self, ours=ours), purpose

    # -- theirs ------------------------------------------------------------------------------------------------------
    def take(self, call: RpcCall) -> tuple[PendingRequests[Purpose], bool, tuple[bytes, ...]]:
        """Whether it is to be answered, and what is said at once if not. One that is asked again is open already."""
        theirs, is_new = self.theirs.take(call.id)
        if is_new:
            return replace(self, theirs=theirs), True, ()
        if self.theirs.is_open(call.id):
            return self, False, ()
        full = self.writer.error(call.id, INTERNAL_ERROR, "too many requests are open")
        return replace(self, last=None), False, (full,)

    def reject(self, garbage: InvalidMessage) -> tuple[PendingRequests[Purpose], tuple[bytes, ...]]:
        """What is no message is told so if somebody waits for an answer to it."""
        if not garbage.is_request:
            return self, ()
        return replace(self, last=None), (self.writer.error(garbage.id, INVALID_REQUEST, garbage.reason),)

    def reply(self, request: str, result: Any) -> tuple[PendingRequests[Purpose], tuple[bytes, ...]]:
        return self._answered(request, lambda id: self.writer.reply(id, result))

    def error(self, request: str, code: int, message: str) -> tuple[PendingRequests[Purpose], tuple[bytes, ...]]:
        return self._answered(request, lambda id: self.writer.error(id, code, message))

    def close(self, id: Id | None) -> tuple[PendingRequests[Purpose], bool]:
        """It wants no answer any more. Whether it was open."""
        if id is None:
            return self, False
        theirs, was_open = self.theirs.answer(id)
        return replace(self, theirs=theirs), was_open

    def _answered(
        self, request: str, frame: Callable[[Id], bytes]
    ) -> tuple[PendingRequests[Purpose], tuple[bytes, ...]]:
        """`request`: the text of its id."""
        id = id_from(request)
        closed, is_due = self.close(id)
        if id is None or not is_due:
            return self, ()
        return replace(closed, last=None), (frame(id),)
