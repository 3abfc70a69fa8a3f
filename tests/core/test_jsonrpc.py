"""JSON-RPC over lines: what is read from any bytes, and the two tables of requests."""

from __future__ import annotations

import json
import time

import pytest

from banksman.core import jsonrpc
from banksman.core.jsonrpc import (
    ASKED_MAX,
    BARE,
    CALLS_MAX,
    JSONRPC,
    Asked,
    Call,
    Calls,
    Failure,
    Garbage,
    Message,
    Notice,
    Reply,
)
from banksman.errors import UsageError

REASON = "the agent gave no reason"
DEEP = b"[" * 100_000 + b"]" * 100_000


# -- reading ---------------------------------------------------------------------------------------------------------
READ: list[tuple[bytes, Message]] = [
    (b'{"jsonrpc":"2.0","id":1,"method":"a","params":{"b":2}}', Call(1, "a", {"b": 2})),
    (b'{"id":"1","method":"a"}', Call("1", "a")),
    (b'{"id":0,"method":"a","params":[1]}', Call(0, "a", [1])),
    (b'{"method":"a","params":{}}', Notice("a", {})),
    (b'{"id":null,"method":"a"}', Notice("a")),
    (b'{"id":1,"result":{}}', Reply(1, {})),
    (b'{"result":null,"id":-5}', Reply(-5)),
    # What JavaScript makes of a result that is undefined.
    (b'{"jsonrpc":"2.0","id":1}', Reply(1)),
    (b'{"error":{"code":-32600,"message":"no"},"id":8}', Reply(8, None, Failure(-32600, "no"))),
    (b'{"id":null,"error":{"code":-32700,"message":"x"}}', Reply(None, None, Failure(-32700, "x"))),
    (b'{"id":1,"error":"no"}', Reply(1, None, Failure(0, "no"))),
    (b'{"id":1,"error":{}}', Reply(1, None, Failure(0, REASON))),
    (
        b'{"id":1,"error":{"code":true,"message":7,"data":[1]}}',
        Reply(1, None, Failure(0, REASON, [1])),
    ),
    (b'{"id":1,"error":null,"result":2}', Reply(1, 2)),
    (b'{"id":1,"error":{"code":1,"message":"x"},"result":2}', Reply(1, None, Failure(1, "x"))),
    # Of two members with one name the last counts.
    (b'{"id":2,"method":"x","id":3}', Call(3, "x")),
    (b' {"id":1,"result":2} \r', Reply(1, 2)),
    # Text that is none is mended.
    (b'{"id":2,"result":"\xff"}', Reply(2, "\ufffd")),
    (b'{"id":2,"result":"\\ud800"}', Reply(2, "\ufffd")),
    # Read as far as it goes.
    (b'{"id":2,"result":' + DEEP + b"}", Reply(2, is_cut=True)),
    (b'{"id":2,"result":1e999999}', Reply(2, is_cut=True)),
    (b'{"id":2,"method":"m","params":{"a":' + DEEP + b"}}", Call(2, "m", None, is_cut=True)),
    (b'{"id":18446744073709551615,"result":1}', Reply(18446744073709551615, 1)),
]


@pytest.mark.parametrize(("line", "message"), READ, ids=[str(number) for number in range(len(READ))])
def test_one_message_a_line(line: bytes, message: Message) -> None:
    (read,) = jsonrpc.decode(line)
    assert read == message
    assert type(getattr(read, "id", None)) is type(getattr(message, "id", None))


GARBAGE = [
    *(b"", b" ", b"nope", b"null", b"1", b'"x"', b"{", b"{}", b"[]", b'{"a":1}', b'{"id":null}', b"\xff\xfe"),
    *(b'{"id":1.0,"result":1}', b'{"id":true,"result":1}', b'{"id":[],"result":1}', b'{"id":{},"method":"m"}'),
    *(b'{"id":1,"method":2}', b'{"id":99999999999999999999999,"method":"m"}', b'{"id":1,"result":2} and more'),
    b'{"id":"' + b"x" * 2_000 + b'","result":1}',
    DEEP,
]


@pytest.mark.parametrize("line", GARBAGE, ids=[str(number) for number in range(len(GARBAGE))])
def test_garbage_is_a_value(line: bytes) -> None:
    (read,) = jsonrpc.decode(line)
    assert isinstance(read, Garbage)
    assert read.reason


def test_a_batch_is_taken_apart() -> None:
    line = b'[1,{"id":"1","error":"x"},[],{"method":"n"},{"id":1,"method":"m"},{"id":1,"result":null}]'
    first, second, third, *rest = jsonrpc.decode(line)
    assert isinstance(first, Garbage)
    assert isinstance(third, Garbage)
    assert second == Reply("1", None, Failure(0, "x"))
    assert rest == [Notice("n"), Call(1, "m"), Reply(1)]


def test_a_line_too_long_to_salvage_is_read_at_its_ends() -> None:
    line = b'{"result":' + DEEP * 6 + b',"id":5}'
    assert len(line) > jsonrpc.SALVAGE_BYTES_MAX
    assert jsonrpc.decode(line) == (Reply(5, {}, is_cut=True),)


# -- a line that was too long to keep --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("head", "tail", "message"),
    [
        (b'{"id":5,"result":{"a":1,"b":"xx', b'xx"}}', Reply(5, {"a": 1}, is_cut=True)),
        # The id comes last; what looks like one inside a text is none.
        (b'{"jsonrpc":"2.0","result":{"b":"xx', b'x,\\"id\\":3}"},"id":5}\n', Reply(5, {}, is_cut=True)),
        (b'{"result":{"b":"xx', b'"},"id":"u-1","jsonrpc":"2.0"}', Reply("u-1", {}, is_cut=True)),
        # That one is the id of something inside.
        (b'{"result":{"b":"xx', b'x","id":3}}', Reply(None, {}, is_cut=True)),
        (b'{"error":{"code":3,"data":"xx', b'"},"id":7}', Reply(7, None, Failure(3, REASON), is_cut=True)),
        (
            b'{"method":"m","params":{"t":1,"u":{"id":2,"v":[{',
            b"]}}}",
            Notice("m", {"t": 1, "u": {"id": 2}}, is_cut=True),
        ),
        (b'{"method":"m","id":0,"params":{"a":"', b'"}}', Call(0, "m", {}, is_cut=True)),
        # Both at the end, after a member that says nothing.
        (b'{"params":{"a":1,"b":"', b'"},"method":"m","id":"q","at":1.5e3}', Call("q", "m", {"a": 1}, is_cut=True)),
        (b'{"id":5,"id":6,"result":"x', b'x"}', Reply(6, {}, is_cut=True)),
        # Of what is in the middle alone nobody can tell whose it is.
        (b'{"a":"xx', b'xx"}', Reply(None, is_cut=True)),
        (b'[{"id":5,"result":"', b'"}]', Reply(None, is_cut=True)),
        (b'{"id":1.5,"result":"', b'"}', Reply(None, is_cut=True)),
    ],
)
def test_an_oversize_message_is_known_by_its_ends(head: bytes, tail: bytes, message: Message) -> None:
    assert jsonrpc.decode_head(head, tail) == message


@pytest.mark.parametrize("head", [b"xx", b"12", b'"text', b'{"params":{"a":"'])
def test_an_oversize_line_that_is_no_message(head: bytes) -> None:
    assert isinstance(jsonrpc.decode_head(head), Garbage)


@pytest.mark.parametrize("piece", [b',"a":"', b',"a":1', b'{"a":', b'"', b"\\", b",", b' , "id" : 1 '])
def test_the_ends_of_a_line_cost_little(piece: bytes) -> None:
    began = time.monotonic()
    jsonrpc.decode_head((b'{"result":' + piece * 60_000)[: 64 << 10], (piece * 4_000)[: 4 << 10] + b"}")
    assert time.monotonic() - began < 2


# -- requests --------------------------------------------------------------------------------------------------------
def test_ours_count_from_one_and_are_settled_once() -> None:
    calls = Calls[str]()
    calls, first = calls.begin("a")
    calls, second = calls.begin("b")
    assert (first, second) == (1, 2)
    calls, purpose = calls.settle(2)
    assert purpose == "b"
    for late in (2, 3, "1", None):
        assert calls.settle(late) == (calls, None)
    calls, purpose = calls.settle(1)
    assert purpose == "a"
    calls, third = calls.begin("c")
    assert third == 3, "an id is never used again"


def test_of_too_many_the_oldest_is_forgotten() -> None:
    calls = Calls[int]()
    for number in range(CALLS_MAX + 1):
        calls, _ = calls.begin(number)
    assert len(calls.open) == CALLS_MAX
    assert calls.settle(1)[1] is None
    assert calls.settle(2)[1] == 1


def test_each_of_theirs_is_answered_once() -> None:
    asked, is_new = Asked().take(0)
    assert is_new
    asked, is_new = asked.take("0")
    assert is_new, "an id is told apart by its type"
    assert asked.take(0) == (asked, False)
    assert asked.is_open(0)
    asked, may_answer = asked.answer(0)
    assert may_answer
    assert asked.answer(0) == (asked, False)
    assert asked.is_open("0")
    asked, is_new = asked.take(0)
    assert is_new, "it may use an id again when it has its answer"


def test_there_is_room_for_so_many() -> None:
    asked = Asked()
    for number in range(ASKED_MAX):
        asked, is_new = asked.take(number)
        assert is_new
    assert asked.take(ASKED_MAX) == (asked, False)
    assert not asked.is_open(ASKED_MAX)


@pytest.mark.parametrize("id", [0, "0", -7, "", 'a"b\n', (1 << 64) - 1], ids=repr)
def test_an_id_as_text_says_its_type(id: jsonrpc.Id) -> None:
    text = jsonrpc.id_text(id)
    assert json.loads(text) == id
    assert jsonrpc.id_from(text) == id
    assert type(jsonrpc.id_from(text)) is type(id)


@pytest.mark.parametrize("text", ["", "x", "null", "1.5", "true", "[]", "\ud800"])
def test_any_other_text_is_none(text: str) -> None:
    assert jsonrpc.id_from(text) is None


@pytest.mark.parametrize(
    ("notice", "id"),
    [
        (Notice("$/cancel_request", {"requestId": "a"}), "a"),
        (Notice("$/cancelRequest", {"id": 0}), 0),
        (Notice("notifications/cancelled", {"requestId": 3}), 3),
        (Notice("$/cancel_request", {"requestId": None}), None),
        (Notice("$/cancel_request", [1]), None),
        (Notice("other", {"requestId": 3}), None),
    ],
)
def test_a_request_may_be_withdrawn(notice: Notice, id: jsonrpc.Id | None) -> None:
    assert jsonrpc.withdrawn(notice) == id


# -- writing ---------------------------------------------------------------------------------------------------------
def test_what_is_written_is_read_again() -> None:
    for writer in (JSONRPC, BARE):
        sent: list[tuple[bytes, Message]] = [
            (writer.call(1, "m", {"a": "b\nc"}), Call(1, "m", {"a": "b\nc"})),
            (writer.call("1", "m"), Call("1", "m")),
            (writer.notice("n", {}), Notice("n", {})),
            (writer.reply(0, None), Reply(0)),
            (writer.error("x", -32601, "no", {"a": 1}), Reply("x", None, Failure(-32601, "no", {"a": 1}))),
            (writer.error(None, -32700, "no"), Reply(None, None, Failure(-32700, "no"))),
        ]
        for line, message in sent:
            assert line.endswith(b"\n")
            assert line.count(b"\n") == 1
            assert jsonrpc.decode(line) == (message,)
            assert (json.loads(line).get("jsonrpc") == "2.0") is (writer is JSONRPC)


@pytest.mark.parametrize("value", ["\ud800", object()])
def test_what_cannot_be_written_is_an_error_of_whoever_gave_it(value: object) -> None:
    with pytest.raises(UsageError):
        JSONRPC.call(1, "m", {"a": value})
