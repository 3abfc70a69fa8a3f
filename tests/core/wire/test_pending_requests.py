"""Pending requests in both directions: each is settled once, and none is dropped in favour of another."""

from __future__ import annotations

import json

import pytest

from banksman.core.wire.jsonrpc import BARE, InvalidMessage, RpcCall
from banksman.core.wire.pending_requests import (
    OURS_MAX,
    THEIRS_MAX,
    IncomingRequests,
    OutgoingRequests,
    PendingRequests,
)


def test_outgoing_requests_count_from_one_and_settle_once() -> None:
    ours = OutgoingRequests[str]()
    ours, first = ours.begin("a")
    ours, second = ours.begin("b")
    assert (first, second) == (1, 2)
    ours, purpose = ours.settle(2)
    assert purpose == "b"
    for late in (2, "2", 3, "01", " 1", "1.0", "", None):
        assert ours.settle(late) == (ours, None)
    ours, purpose = ours.settle(1)
    assert purpose == "a"
    ours, third = ours.begin("c")
    assert third == 3, "an id is never used again"


def test_outgoing_request_settles_by_id_as_text() -> None:
    ours, _ = OutgoingRequests[str]().begin("a")
    ours, _ = ours.begin("b")
    ours, purpose = ours.settle("2")
    assert purpose == "b"
    assert [id for id, _ in ours.open] == [1]
    assert ours.settle("2") == (ours, None)


def test_outgoing_requests_are_bounded_without_dropping() -> None:
    ours = OutgoingRequests[int]()
    for number in range(OURS_MAX):
        assert ours.has_room
        ours, _ = ours.begin(number)
    assert not ours.has_room
    with pytest.raises(AssertionError):
        ours.begin(OURS_MAX)
    assert ours.settle(1)[1] == 0
    assert ours.settle(1)[0].has_room


def test_incoming_request_is_answered_once() -> None:
    theirs, is_new = IncomingRequests().take(0)
    assert is_new
    theirs, is_new = theirs.take("0")
    assert is_new, "an id is told apart by its type"
    assert theirs.take(0) == (theirs, False)
    assert theirs.is_open(0)
    theirs, may_answer = theirs.answer(0)
    assert may_answer
    assert theirs.answer(0) == (theirs, False)
    assert theirs.is_open("0")
    theirs, is_new = theirs.take(0)
    assert is_new, "it may use an id again when it has its answer"


def test_incoming_requests_are_bounded() -> None:
    theirs = IncomingRequests()
    for number in range(THEIRS_MAX):
        theirs, is_new = theirs.take(number)
        assert is_new
    assert theirs.take(THEIRS_MAX) == (theirs, False)
    assert not theirs.is_open(THEIRS_MAX)


def test_exchange_remembers_last_request_until_next_frame() -> None:
    exchange, _ = PendingRequests[str]().call("a", "m", {})
    assert exchange.last == 1
    exchange, is_taken, frames = exchange.take(RpcCall("q", "m"))
    assert (is_taken, frames, exchange.last) == (True, (), 1)
    answered, [frame] = exchange.reply('"q"', {"b": 1})
    assert json.loads(frame) == {"jsonrpc": "2.0", "id": "q", "result": {"b": 1}}
    assert answered.last is None
    assert answered.reply('"q"', {}) == (answered, ())
    assert exchange.notice("n")[0].last is None


def test_exchange_rejects_invalid_message_only_when_it_is_request() -> None:
    exchange = PendingRequests[str](BARE)
    assert exchange.reject(InvalidMessage("not an object")) == (exchange, ())
    _, [frame] = exchange.reject(InvalidMessage("the id", is_request=True))
    assert json.loads(frame) == {"id": None, "error": {"code": -32600, "message": "the id"}}
