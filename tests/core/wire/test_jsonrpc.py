"""JSON-RPC over lines: decode any bytes, encode messages, and read an oversize message from its ends."""

from __future__ import annotations

import json
import sys
import time
from types import FrameType

import pytest

from banksman.core.wire import jsonrpc
from banksman.core.wire.jsonrpc import (
    BARE,
    BATCH_MAX,
    JSONRPC,
    Failure,
    InvalidMessage,
    Message,
    Notification,
    RpcCall,
    RpcReply,
)
from banksman.errors import UsageError

REASON = "the agent gave no reason"
DEEP = b"[" * 100_000 + b"]" * 100_000


# -- decode ----------------------------------------------------------------------------------------------------------
READ: list[tuple[bytes, Message]] = [
    (b'{"jsonrpc":"2.0","id":1,"method":"a","params":{"b":2}}', RpcCall(1, "a", {"b": 2})),
    (b'{"id":"1","method":"a"}', RpcCall("1", "a")),
    (b'{"id":0,"method":"a","params":[1]}', RpcCall(0, "a", [1])),
    (b'{"method":"a","params":{}}', Notification("a", {})),
    (b'{"id":null,"method":"a"}', Notification("a")),
    (b'{"id":1,"result":{}}', RpcReply(1, {})),
    (b'{"result":null,"id":-5}', RpcReply(-5)),
    # JavaScript omits a result that is undefined.
    (b'{"jsonrpc":"2.0","id":1}', RpcReply(1)),
    (b'{"error":{"code":-32600,"message":"no"},"id":8}', RpcReply(8, None, Failure(-32600, "no"))),
    (b'{"id":null,"error":{"code":-32700,"message":"x"}}', RpcReply(None, None, Failure(-32700, "x"))),
    (b'{"id":1,"error":"no"}', RpcReply(1, None, Failure(0, "no"))),
    (b'{"id":1,"error":{}}', RpcReply(1, None, Failure(0, REASON))),
    (
        b'{"id":1,"error":{"code":true,"message":7,"data":[1]}}',
        RpcReply(1, None, Failure(0, REASON, [1])),
    ),
    (b'{"id":1,"error":null,"result":2}', RpcReply(1, 2)),
    (b'{"id":1,"error":{"code":1,"message":"x"},"result":2}', RpcReply(1, None, Failure(1, "x"))),
    # If two members have the same name, the last one counts.
    (b'{"id":2,"method":"x","id":3}', RpcCall(3, "x")),
    (b' {"id":1,"result":2} \r', RpcReply(1, 2)),
    # Invalid text is repaired.
    (b'{"id":2,"result":"\xff"}', RpcReply(2, "\ufffd")),
    (b'{"id":2,"result":"\\ud800"}', RpcReply(2, "\ufffd")),
    # Too deep or out of range: the message is read as far as possible.
    (b'{"id":2,"result":' + DEEP + b"}", RpcReply(2, is_cut=True)),
    (b'{"id":2,"result":1e999999}', RpcReply(2, is_cut=True)),
    (b'{"id":2,"method":"m","params":{"a":' + DEEP + b"}}", RpcCall(2, "m", None, is_cut=True)),
    (b'{"id":18446744073709551615,"result":1}', RpcReply(18446744073709551615, 1)),
    # JSON has one number type.
    (b'{"id":3.0,"result":1}', RpcReply(3, 1)),
    (b'{"id":-0.0,"method":"a"}', RpcCall(0, "a")),
    (b'{"id":"' + b"x" * 5_000 + b'","method":"a"}', RpcCall("x" * 5_000, "a")),
]


@pytest.mark.parametrize(("line", "message"), READ, ids=[str(number) for number in range(len(READ))])
def test_decode_reads_one_message_per_line(line: bytes, message: Message) -> None:
    (read,) = jsonrpc.decode(line)
    assert read == message
    assert type(getattr(read, "id", None)) is type(getattr(message, "id", None))


GARBAGE = [
    *(b"", b" ", b"nope", b"null", b"1", b'"x"', b"{", b"{}", b"[]", b'{"a":1}', b'{"id":null}', b"\xff\xfe"),
    *(b'{"id":1.5,"result":1}', b'{"id":true,"result":1}', b'{"id":[],"result":1}', b'{"id":{},"method":"m"}'),
    *(b'{"id":1,"method":2}', b'{"id":99999999999999999999999,"method":"m"}', b'{"id":1,"result":2} and more'),
    b'{"id":"' + b"x" * (jsonrpc.ID_CHARACTERS_MAX + 1) + b'","result":1}',
    *(b"[1,2]", b'[[],"x"]', b" [ 0 ] "),
    DEEP,
]


@pytest.mark.parametrize("line", GARBAGE, ids=[str(number) for number in range(len(GARBAGE))])
def test_decode_returns_invalid_message_for_garbage(line: bytes) -> None:
    (read,) = jsonrpc.decode(line)
    assert isinstance(read, InvalidMessage)
    assert read.reason


@pytest.mark.parametrize(
    "id", [b"1.5", b"true", b"[]", b"{}", b"1e300", b"99999999999999999999999", b'"%s"' % (b"x" * 9_000)]
)
def test_decode_marks_request_with_invalid_id(id: bytes) -> None:
    (read,) = jsonrpc.decode(b'{"jsonrpc":"2.0","id":%s,"method":"m"}' % id)
    assert isinstance(read, InvalidMessage)
    assert read.is_request
    assert read.id is None
    (reply,) = jsonrpc.decode(b'{"jsonrpc":"2.0","id":%s,"result":{}}' % id)
    assert isinstance(reply, InvalidMessage)
    assert not reply.is_request, "nobody waits for an answer to an answer"


def test_decode_marks_request_without_method() -> None:
    assert jsonrpc.decode(b'{"id":7,"method":null}') == (
        InvalidMessage("the method is not text", is_request=True, id=7),
    )


def test_decode_splits_batch() -> None:
    line = b'[1,{"id":"1","error":"x"},[],{"method":"n"},{"id":1,"method":"m"},{"id":1,"result":null}]'
    first, second, third, *rest = jsonrpc.decode(line)
    assert isinstance(first, InvalidMessage)
    assert isinstance(third, InvalidMessage)
    assert second == RpcReply("1", None, Failure(0, "x"))
    assert rest == [Notification("n"), RpcCall(1, "m"), RpcReply(1)]


def steps(line: bytes) -> tuple[int, tuple[Message, ...]]:
    """Return the number of function calls that decode a line, and its messages."""
    count = 0

    def note(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        read = jsonrpc.decode(line)
    finally:
        sys.setprofile(None)
    return count, read


def batch(item: bytes, count: int) -> bytes:
    return b"[%s]" % b",".join([item] * count)


def test_decode_bounds_batch_size() -> None:
    reply = b'{"id":1,"result":{}}'
    assert jsonrpc.decode(batch(reply, BATCH_MAX)) == (RpcReply(1, {}),) * BATCH_MAX
    # An oversize batch may contain the end of a turn that no other message reports, so it is not dropped.
    assert jsonrpc.decode(batch(reply, BATCH_MAX + 1)) == (RpcReply(None, is_cut=True),)
    assert jsonrpc.decode(batch(reply, 1 << 16)) == (RpcReply(None, is_cut=True),)
    # The size in bytes does not matter.
    long = b'{"method":"n","params":{"a":"%s"}}' % (b"x" * jsonrpc.SALVAGE_BYTES_MAX)
    assert jsonrpc.decode(batch(long, 2)) == (Notification("n", {"a": "x" * jsonrpc.SALVAGE_BYTES_MAX}),) * 2
    # A line that only begins like a batch is invalid.
    (no_json,) = jsonrpc.decode(b'[{"id":1,"result":' + b"x" * jsonrpc.SALVAGE_BYTES_MAX)
    assert isinstance(no_json, InvalidMessage)
    assert jsonrpc.decode(b"[" + reply + b"," + DEEP + b"]") == (RpcReply(None, is_cut=True),)


@pytest.mark.thorough
@pytest.mark.parametrize("item", [b"0", b"{}", b"[]", b'"', b'{"id":1,"result":{}}', b" ", b"\xff"])
@pytest.mark.parametrize("bytes_about", [1 << 10, 1 << 20, 4 << 20])
def test_decode_cost_of_batch_is_bounded(item: bytes, bytes_about: int) -> None:
    line = batch(item, bytes_about // (len(item) + 1))
    count, read = steps(line)
    assert len(read) <= BATCH_MAX
    assert count < 20 * BATCH_MAX


def test_decode_reads_ends_of_line_too_long_to_salvage() -> None:
    line = b'{"result":' + DEEP * 6 + b',"id":5}'
    assert len(line) > jsonrpc.SALVAGE_BYTES_MAX
    assert jsonrpc.decode(line) == (RpcReply(5, {}, is_cut=True),)


# -- decode_head: an oversize line -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("head", "tail", "message"),
    [
        (b'{"id":5,"result":{"a":1,"b":"xx', b'xx"}}', RpcReply(5, {"a": 1}, is_cut=True)),
        # The id is at the end. Text that looks like an id inside a string is not an id.
        (b'{"jsonrpc":"2.0","result":{"b":"xx', b'x,\\"id\\":3}"},"id":5}\n', RpcReply(5, {}, is_cut=True)),
        (b'{"result":{"b":"xx', b'"},"id":"u-1","jsonrpc":"2.0"}', RpcReply("u-1", {}, is_cut=True)),
        # This id belongs to an inner object.
        (b'{"result":{"b":"xx', b'x","id":3}}', RpcReply(None, {}, is_cut=True)),
        (b'{"error":{"code":3,"data":"xx', b'"},"id":7}', RpcReply(7, None, Failure(3, REASON), is_cut=True)),
        (
            b'{"method":"m","params":{"t":1,"u":{"id":2,"v":[{',
            b"]}}}",
            Notification("m", {"t": 1, "u": {"id": 2}}, is_cut=True),
        ),
        (b'{"method":"m","id":0,"params":{"a":"', b'"}}', RpcCall(0, "m", {}, is_cut=True)),
        # Method and id are both at the end, after an unknown member.
        (b'{"params":{"a":1,"b":"', b'"},"method":"m","id":"q","at":1.5e3}', RpcCall("q", "m", {"a": 1}, is_cut=True)),
        (b'{"id":5,"id":6,"result":"x', b'x"}', RpcReply(6, {}, is_cut=True)),
        # The identifying members are in the lost middle, so the message could answer any request.
        (b'{"a":"xx', b'xx"}', RpcReply(None, is_cut=True)),
        (b'[{"id":5,"result":"', b'"}]', RpcReply(None, is_cut=True)),
        (b"[0,0,0,", b"0,0]", InvalidMessage("an array that does not begin with a message")),
        (b'{"id":1.5,"result":"', b'"}', RpcReply(None, is_cut=True)),
    ],
)
def test_decode_head_reads_oversize_message_from_its_ends(head: bytes, tail: bytes, message: Message) -> None:
    assert jsonrpc.decode_head(head, tail) == message


@pytest.mark.parametrize("head", [b"xx", b"12", b'"text', b'{"params":{"a":"'])
def test_decode_head_refuses_oversize_line_that_is_no_message(head: bytes) -> None:
    assert isinstance(jsonrpc.decode_head(head), InvalidMessage)


@pytest.mark.parametrize("piece", [b',"a":"', b',"a":1', b'{"a":', b'"', b"\\", b",", b' , "id" : 1 '])
def test_decode_head_cost_is_bounded(piece: bytes) -> None:
    began = time.process_time()
    jsonrpc.decode_head((b'{"result":' + piece * 60_000)[: 64 << 10], (piece * 4_000)[: 4 << 10] + b"}")
    assert time.process_time() - began < 2


# -- ids -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("id", [0, "0", -7, "", 'a"b\n', (1 << 64) - 1], ids=repr)
def test_id_text_keeps_type_of_id(id: jsonrpc.Id) -> None:
    text = jsonrpc.id_text(id)
    assert json.loads(text) == id
    assert jsonrpc.id_from(text) == id
    assert type(jsonrpc.id_from(text)) is type(id)


@pytest.mark.parametrize("text", ["", "x", "null", "1.5", "true", "[]", "\ud800"])
def test_id_from_returns_none_for_other_text(text: str) -> None:
    assert jsonrpc.id_from(text) is None


@pytest.mark.parametrize(
    ("notice", "id"),
    [
        (Notification("$/cancel_request", {"requestId": "a"}), "a"),
        (Notification("$/cancelRequest", {"id": 0}), 0),
        (Notification("notifications/cancelled", {"requestId": 3}), 3),
        (Notification("$/cancel_request", {"requestId": None}), None),
        (Notification("$/cancel_request", [1]), None),
        (Notification("other", {"requestId": 3}), None),
    ],
)
def test_withdrawn_returns_request_id_of_cancel_notice(notice: Notification, id: jsonrpc.Id | None) -> None:
    assert jsonrpc.withdrawn(notice) == id


# -- encode ----------------------------------------------------------------------------------------------------------
def test_written_message_is_read_back() -> None:
    for writer in (JSONRPC, BARE):
        sent: list[tuple[bytes, Message]] = [
            (writer.call(1, "m", {"a": "b\nc"}), RpcCall(1, "m", {"a": "b\nc"})),
            (writer.call("1", "m"), RpcCall("1", "m")),
            (writer.notice("n", {}), Notification("n", {})),
            (writer.reply(0, None), RpcReply(0)),
            (writer.error("x", -32601, "no", {"a": 1}), RpcReply("x", None, Failure(-32601, "no", {"a": 1}))),
            (writer.error(None, -32700, "no"), RpcReply(None, None, Failure(-32700, "no"))),
        ]
        for line, message in sent:
            assert line.endswith(b"\n")
            assert line.count(b"\n") == 1
            assert jsonrpc.decode(line) == (message,)
            assert (json.loads(line).get("jsonrpc") == "2.0") is (writer is JSONRPC)


@pytest.mark.parametrize("value", ["\ud800", object()])
def test_write_refuses_value_that_is_no_json(value: object) -> None:
    with pytest.raises(UsageError):
        JSONRPC.call(1, "m", {"a": value})
