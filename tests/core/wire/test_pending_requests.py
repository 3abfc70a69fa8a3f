"""Requests in both directions: each is settled once, and none is forgotten for another."""

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


def test_ours_count_from_one_and_are_settled_once() -> None:
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


def test_a_number_that_comes_back_as_its_text_is_that_number() -> None:
    ours, _ = OutgoingRequests[str]().begin("a")
    ours, _ = ours.begin("b")
    ours, purpose = ours.settle("2")
    assert purpose == "b"
    assert [id for id, _ in ours.open] == [1]
    assert ours.settle("2") == (ours, None)


def test_of_too_many_none_is_forgotten() -> None:
    ours = OutgoingRequests[int]()
    for number in range(OURS_MAX):
        assert ours.has_room
        ours, _ = ours.begin(number)
    assert not ours.has_room
    with pytest.raises(AssertionError):
        ours.begin(OURS_MAX)
    assert ours.settle(1)[1] == 0
    assert ours.settle(1)[0].has_room


def test_each_of_theirs_is_answered_once() -> None:
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


def test_there_is_room_for_so_many() -> None:
    theirs = IncomingRequests()
    for number in range(THEIRS_MAX):
        theirs, is_new = theirs.take(number)
        assert is_new
    assert theirs.take(THEIRS_MAX) == (theirs, False)
    assert not theirs.is_open(THEIRS_MAX)


def test_the_last_word_is_a_request_until_something_else_is_said() -> None:
    exchange, _ = PendingRequests[str]().call("a", "m", {})
    assert exchange.last == 1
    exchange, is_taken, frames = exchange.take(RpcCall("q", "m"))
    assert (is_taken, frames, exchange.last) == (True, (), 1)
    answered, [frame] = exchange.reply('"q"', {"b": 1})
    assert json.loads(frame) == {"jsonrpc": "2.0", "id": "q", "result": {"b": 1}}
    assert answered.last is None
    assert answered.reply('"q"', {}) == (answered, ())
    assert exchange.notice("n")[0].last is None


def test_what_nobody_can_answer_is_rejected_if_somebody_waits() -> None:
    exchange = PendingRequests[str](BARE)
    assert exchange.reject(InvalidMessage("no object")) == (exchange, ())
    _, [frame] = exchange.reject(InvalidMessage("the id", is_request=True))
    assert json.loads(frame) == {"id": None, "error": {"code": -32600, "message": "the id"}}
