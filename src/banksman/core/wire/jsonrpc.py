"""Decode and encode JSON-RPC messages, one line each, tolerant of damaged input.

`pending_requests.py` matches replies to requests.

**Reading.** A line holds one message or several: agents do send garbage, and the standard allows
batches. A value that is no message becomes an `InvalidMessage` and does no other harm. Some
messages cannot be decoded as a whole: they are nested too deep, contain invalid text, or are too
long to keep. That message is read as far as possible and marked `is_cut`, because a reply that is
not understood is a request that never ends. Some agents write the id last. So for a line that was
too long to keep, both of its ends are examined.

**Batches.** No measured agent sends a batch. A line has room for millions of items, each costs a
step of Python, and taking them apart blocks the event loop. So a batch of more than `BATCH_MAX`
items is not taken apart. If it begins with no message, it is an `InvalidMessage`. Otherwise it may
hold the reply that ends a turn. It then counts like a lost line: a reply without known content.

**Ids** are strings and integers, and their types are distinct: 1 is not "1". JSON has one kind of
number, so 1.0 is 1.

All functions are pure, and decoding never raises over bytes from an agent. Only encoding can fail,
with `UsageError`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from banksman.core.wire.framing import HEAD_BYTES
from banksman.core.wire.partial_json import UNDECODABLE, Members, decoded, mapping, mended, split
from banksman.errors import UsageError

Id = int | str

# Limits on an id, because it is stored and written back. No encoder of Banksman writes a number
# outside of this range.
ID_CHARACTERS_MAX = 8192
_ID_LEAST, _ID_MOST = -(1 << 63), (1 << 64) - 1
# Beyond this, an integer that was written as a float may have been another number.
_FLOAT_MOST = 1 << 53
# Limit on the messages of one line.
BATCH_MAX = 256
# A longer line that cannot be decoded is judged by its head and tail: reading members costs a step
# of Python per token.
SALVAGE_BYTES_MAX = 1 << 20
# Depth to which the members of a cut message are searched in nested objects.
_CUT_DEPTH_MAX = 8

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603
# Either side sends this code as the reply to a request that the other side withdrew.
REQUEST_CANCELLED = -32800

# Methods of notifications that withdraw a request, each with the member that holds its id.
_CANCELS = {
    "$/cancel_request": "requestId",
    "$/cancelRequest": "id",
    "notifications/cancelled": "requestId",
}

_NO_ID = "the id is neither a number nor a text"
# The beginning of a batch. The group matches if its first item is an object, hence a message.
_ARRAY = re.compile(rb"\s*+\[\s*+(\{)?")
# A small member at the end of its object. It belongs to the outermost object, because it stands
# right before the brace that ends the line. Inside a string, the quotes of the name would be
# escaped.
_LAST = re.compile(
    rb'[,{]\s*+"([A-Za-z_]\w*+)"\s*+:\s*+("(?:[^"\\]|\\.)*+"|-?[0-9][0-9.eE+-]*+|null|true|false)\s*+\Z',
    re.DOTALL,
)
# Longer than any member that is searched for, and the number of members examined.
_LAST_BYTES = 4 << 10
_LAST_COUNT = 8


# -- messages ------------------------------------------------------------------------------------
class RpcCall(msgspec.Struct, frozen=True):
    """A request: the sender waits for a reply. `is_cut`: the request held more."""

    id: Id
    method: str
    params: Any = None
    is_cut: bool = False

    @property
    def named(self) -> dict[str, Any]:
        """The parameters, if they are an object; else an empty dict."""
        return mapping(self.params)


class Notification(msgspec.Struct, frozen=True):
    """A message that expects no reply."""

    method: str
    params: Any = None
    is_cut: bool = False

    @property
    def named(self) -> dict[str, Any]:
        """The parameters, if they are an object; else an empty dict."""
        return mapping(self.params)


class Failure(msgspec.Struct, frozen=True):
    """The error of a request without a result."""

    code: int
    message: str
    data: Any = None

    def __str__(self) -> str:
        return f"{self.message} ({self.code})" if self.code else self.message


class RpcReply(msgspec.Struct, frozen=True):
    """The reply to a request of this side.

    `id` None: the reply names no request, or its id could not be read.
    """

    id: Id | None
    result: Any = None
    error: Failure | None = None
    is_cut: bool = False

    @property
    def named(self) -> dict[str, Any]:
        """The members of the result, if it is an object; else an empty dict."""
        return mapping(self.result)


class InvalidMessage(msgspec.Struct, frozen=True):
    """A value that is no valid message.

    `reason`: the fault. `is_request`: the sender waits for a reply nevertheless, under `id` if that
    is known. The standard defines a reply for this case, which names no request. `is_json`: the
    line is JSON, and the fault is in the message; the standard has an error code for either case.
    """

    reason: str
    is_request: bool = False
    id: Id | None = None
    is_json: bool = True


Message = RpcCall | Notification | RpcReply | InvalidMessage


def withdrawn(notice: Notification) -> Id | None:
    """Return the id of the request that this notification withdraws, if it withdraws one."""
    member = _CANCELS.get(notice.method)
    return None if member is None else as_id(notice.named.get(member))


# -- reading -------------------------------------------------------------------------------------
class _Envelope(msgspec.Struct, gc=False):
    """Members of a message, unchecked, so that a bad value spoils itself and not the message.

    If two members have the same name, the last one counts. Unknown members are skipped.
    """

    id: Any = msgspec.UNSET
    method: Any = msgspec.UNSET
    params: Any = None
    result: Any = msgspec.UNSET
    error: Any = None


_decode = msgspec.json.Decoder(_Envelope).decode


def decode(line: bytes) -> tuple[Message, ...]:
    """Decode the messages of a line: one, or all of a batch. Never empty, never raises."""
    try:
        return (_message(_decode(line)),)
    except UNDECODABLE:
        return _salvaged(line)


def decode_head(head: bytes, tail: bytes = b"") -> Message:
    """Decode a line that was too long to keep, as far as its two ends allow.

    A reply without a recognisable id gets the id None: it may answer any request.
    """
    members = split(head)
    if not members.is_object:
        array = _ARRAY.match(head)
        return (
            InvalidMessage("not an object")
            if array is None
            else _unread(holds_message=array[1] is not None)
        )
    last = _last_members(tail)
    found = {
        name: members.get(name) for name in members.found if name in _Envelope.__struct_fields__
    } | last
    if members.cut is not None:
        name, start = members.cut
        if name == "error" or (name in ("params", "result") and name not in found):
            found[name] = _partial(start)
    if not {"method", "params", "result", "error", "id"} & found.keys():
        # The members that identify the message are in the missing middle.
        return RpcReply(None, is_cut=True)
    if "method" not in found and "params" in found:
        return InvalidMessage("a request without a method")
    message = _message(_Envelope(**found), is_cut=True)
    return (
        RpcReply(None, is_cut=True)
        if isinstance(message, InvalidMessage) and "method" not in found
        else message
    )


def as_id(value: Any) -> Id | None:
    """Return the value if it is a valid id. True equals 1 in Python, but is not an id."""
    if isinstance(value, str):
        return value if len(value) <= ID_CHARACTERS_MAX else None
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) <= _FLOAT_MOST else None
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and _ID_LEAST <= value <= _ID_MOST else None


def id_text(id: Id) -> str:
    """Return an id as text that keeps its type: its JSON."""
    return msgspec.json.encode(id).decode()


def id_from(text: str) -> Id | None:
    """Return the id that `id_text` encoded."""
    return as_id(decoded(text.encode(errors="replace")))


def _message(envelope: _Envelope, *, is_cut: bool = False) -> Message:
    method = envelope.method
    if method is not msgspec.UNSET:
        if not isinstance(method, str):
            return InvalidMessage("the method is not text", is_request=True, id=as_id(envelope.id))
        # JSON-RPC 1.0 marked a notification with a null id.
        if envelope.id is msgspec.UNSET or envelope.id is None:
            return Notification(method, envelope.params, is_cut)
        id = as_id(envelope.id)
        return (
            InvalidMessage(_NO_ID, is_request=True)
            if id is None
            else RpcCall(id, method, envelope.params, is_cut)
        )
    id = as_id(envelope.id)
    if id is None and envelope.id is not None and envelope.id is not msgspec.UNSET:
        return InvalidMessage(_NO_ID)
    if envelope.error is not None:
        return RpcReply(id, None, _failure(envelope.error), is_cut)
    if envelope.result is not msgspec.UNSET:
        return RpcReply(id, envelope.result, None, is_cut)
    # JavaScript writers omit a result that is undefined. The message is a reply all the same.
    return (
        InvalidMessage("neither a request nor a reply")
        if id is None
        else RpcReply(id, None, None, is_cut)
    )


def _failure(error: Any) -> Failure:
    members = mapping(error)
    code, message = members.get("code"), members.get("message")
    if not isinstance(message, str) or not message:
        message = error if isinstance(error, str) and error else "the agent gave no reason"
    code = code if isinstance(code, int) and not isinstance(code, bool) else 0
    return Failure(code, message, members.get("data"))


def _salvaged(line: bytes) -> tuple[Message, ...]:
    """Decode a line that is not one JSON object: most likely a batch, or no JSON at all."""
    array = _ARRAY.match(line)
    better = mended(line)
    line = line if better is None else better
    try:
        value = msgspec.json.decode(line)
    except RecursionError:
        return (
            _from_members(line) if array is None else _unread(holds_message=array[1] is not None),
        )
    except UNDECODABLE as exc:
        # A number that is too large to represent is a fault inside a message. The other errors here
        # mean that the line is no JSON.
        message = _from_members(line) if array is None else InvalidMessage("not an object")
        return (
            InvalidMessage(f"not JSON: {exc}"[:200], is_json=False)
            if isinstance(message, InvalidMessage)
            else message,
        )
    return _from_batch(cast(list[Any], value)) if isinstance(value, list) else (_from_value(value),)


def _from_batch(items: list[Any]) -> tuple[Message, ...]:
    holds_message = any(isinstance(item, dict) for item in items[:BATCH_MAX])
    if not holds_message or len(items) > BATCH_MAX:
        return (_unread(holds_message=holds_message),)
    return tuple(_from_value(item) for item in items)


def _unread(*, holds_message: bool) -> Message:
    """Return the stand-in for a batch that is not taken apart."""
    if holds_message:
        return RpcReply(None, is_cut=True)
    return InvalidMessage("an array that does not begin with a message")


def _from_value(value: Any) -> Message:
    if not isinstance(value, dict):
        return InvalidMessage("not an object")
    members = cast(dict[str, Any], value)
    return _message(
        _Envelope(
            **{name: members[name] for name in _Envelope.__struct_fields__ if name in members}
        )
    )


def _from_members(line: bytes) -> Message:
    """Decode a line that is an object, although the decoder rejects it."""
    if len(line) > SALVAGE_BYTES_MAX:
        return decode_head(line[:HEAD_BYTES], line[-HEAD_BYTES:])
    members = split(line)
    if not members.is_whole:
        return InvalidMessage("not an object")
    found = {
        name: members.get(name) for name in members.found if name in _Envelope.__struct_fields__
    }
    # The line has an error that cannot be decoded. It must still count as an error.
    if "error" in found and found["error"] is None and members.found["error"] != b"null":
        found["error"] = {}
    return _message(_Envelope(**found), is_cut=True)


def _partial(data: bytes) -> dict[str, Any]:
    """Return the members of a cut object, and of the nested objects that were cut with it."""
    found: dict[str, Any] = {}
    inner = found
    for _ in range(_CUT_DEPTH_MAX):
        members: Members = split(data)
        if not members.is_object or not data.lstrip().startswith(b"{"):
            break
        inner |= {name: members.get(name) for name in members.found}
        if members.cut is None:
            break
        name, data = members.cut
        if data.lstrip().startswith(b"{"):
            inner[name] = deeper = dict[str, Any]()
            inner = deeper
    return found


def _last_members(tail: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {}
    rest = tail.rstrip()[-_LAST_BYTES:]
    if not rest.endswith(b"}"):
        return found
    rest = rest[:-1]
    for _ in range(_LAST_COUNT):
        last = _LAST.search(rest)
        if last is None:
            break
        # If two members have the same name, the later one counts. The search runs backwards, so
        # that is the first one found.
        found.setdefault(last[1].decode(), decoded(last[2]))
        rest = rest[: last.start()]
    return {name: value for name, value in found.items() if name in ("id", "method")}


# -- writing -------------------------------------------------------------------------------------
def encode(frame: Mapping[str, Any]) -> bytes:
    """Encode a frame as one line. JSON escapes every newline inside a string."""
    try:
        line = msgspec.json.encode(frame)
    except UnicodeEncodeError as exc:
        hint = "a lone surrogate is not text; decode with errors='replace'"
        raise UsageError(f"cannot encode the frame as UTF-8: {exc.reason}", hint=hint) from exc
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        hint = "use text, numbers, lists and dicts"
        raise UsageError(f"cannot encode the frame as JSON: {exc}", hint=hint) from exc
    assert b"\n" not in line
    return line + b"\n"


class RpcWriter(msgspec.Struct, frozen=True):
    """Encode messages as lines. `version` None: omit the `jsonrpc` member."""

    version: str | None = "2.0"

    def call(self, id: Id, method: str, params: Mapping[str, Any] | None = None) -> bytes:
        """Encode a request."""
        return self._line({"id": id, "method": method}, params)

    def notice(self, method: str, params: Mapping[str, Any] | None = None) -> bytes:
        """Encode a notification."""
        return self._line({"method": method}, params)

    def reply(self, id: Id, result: Any) -> bytes:
        """Encode the result of a request."""
        return self._line({"id": id, "result": result})

    def error(self, id: Id | None, code: int, message: str, data: Any = None) -> bytes:
        """Encode the error of a request. `id` None: the request is unknown."""
        error: dict[str, Any] = {"code": code, "message": message}
        return self._line({"id": id, "error": error if data is None else error | {"data": data}})

    def _line(self, members: dict[str, Any], params: Mapping[str, Any] | None = None) -> bytes:
        head = {} if self.version is None else {"jsonrpc": self.version}
        message = head | members if params is None else head | members | {"params": dict(params)}
        return encode(message)


JSONRPC = RpcWriter()
# For agents that omit the version and expect it to be omitted.
BARE = RpcWriter(version=None)
