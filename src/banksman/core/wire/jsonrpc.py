"""JSON-RPC, as agents speak it over lines: messages from bytes, and bytes from messages. Who waits for which answer is
in pending_requests.py.

**What is read.** A line is one message or several: agents are seen to send garbage, and the standard allows batches.
Whatever is no message is `InvalidMessage`, and costs nothing but itself. A message that cannot be read as a whole (too
deep, a text that is none, too long to keep) is read as far as it goes, and `is_cut`: a reply that is not understood is
a request that never ends. Some agents write the id last, so of a line that was too long to keep both ends are looked
at.

**Batches.** No agent that was measured sends one, and all who are on this loop wait until it is taken apart: a line has
room for millions of items, each a step of Python. So one of more than `BATCH_MAX` is not taken apart. It is no message
if it begins with none; else it may hold the answer that ends a turn, and is what a line that was lost is: a reply of
which nothing is known.

**Ids** are texts and whole numbers, told apart: 1 is not "1". JSON has one kind of number, so 1.0 is 1.

All of it is pure, and never raises over bytes from outside. Only what is written can be at fault, with `UsageError`.
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

# What an id may be: it is kept, and written back. A number beyond this is one that no encoder of ours writes.
ID_CHARACTERS_MAX = 8192
_ID_LEAST, _ID_MOST = -(1 << 63), (1 << 64) - 1
# Beyond this a whole number that is written as a float may have been another.
_FLOAT_MOST = 1 << 53
# Messages of one line.
BATCH_MAX = 256
# Beyond this a line that cannot be decoded is judged by its head: reading members costs a step of Python a token.
SALVAGE_BYTES_MAX = 1 << 20
# How far into nested objects the members of a cut message are looked for.
_CUT_DEPTH_MAX = 8

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603
# An agent says so about a request of its own that we withdrew, or we about one of its.
REQUEST_CANCELLED = -32800

# The names by which a notice withdraws a request, and the member that has its id.
_CANCELS = {"$/cancel_request": "requestId", "$/cancelRequest": "id", "notifications/cancelled": "requestId"}

_NO_ID = "the id is neither a number nor a text"
# The beginning of a batch, and that of the first message in it, if that is what its first item is.
_ARRAY = re.compile(rb"\s*+\[\s*+(\{)?")
# A small member that stands last in its object. It is the object's own: what comes before the brace that ends the line
# is at its level, and inside a text the quotes of the name would be escaped.
_LAST = re.compile(
    rb'[,{]\s*+"([A-Za-z_]\w*+)"\s*+:\s*+("(?:[^"\\]|\\.)*+"|-?[0-9][0-9.eE+-]*+|null|true|false)\s*+\Z',
    re.DOTALL,
)
# Longer than any of the members that are looked for; and how many are looked at.
_LAST_BYTES = 4 << 10
_LAST_COUNT = 8


# -- messages --------------------------------------------------------------------------------------------------------
class RpcCall(msgspec.Struct, frozen=True):
    """A request: the other side waits for an answer to it. `is_cut`: there was more of it."""

    id: Id
    method: str
    params: Any = None
    is_cut: bool = False

    @property
    def named(self) -> dict[str, Any]:
        """The parameters, if they have names."""
        return mapping(self.params)


class Notification(msgspec.Struct, frozen=True):
    """A notification: nobody waits."""

    method: str
    params: Any = None
    is_cut: bool = False

    @property
    def named(self) -> dict[str, Any]:
        return mapping(self.params)


class Failure(msgspec.Struct, frozen=True):
    """Why a request has no result."""

    code: int
    message: str
    data: Any = None

    def __str__(self) -> str:
        return f"{self.message} ({self.code})" if self.code else self.message


class RpcReply(msgspec.Struct, frozen=True):
    """The answer to a request of ours. `id` None: it does not say to which, or that could not be read."""

    id: Id | None
    result: Any = None
    error: Failure | None = None
    is_cut: bool = False

    @property
    def named(self) -> dict[str, Any]:
        """The members of the result, if it has any."""
        return mapping(self.result)


class InvalidMessage(msgspec.Struct, frozen=True):
    """No message. `reason`: what is wrong with it. `is_request`: somebody waits for an answer all the same, under this
    id, if it is one: the standard has an answer for that, which names no request."""

    reason: str
    is_request: bool = False
    id: Id | None = None


Message = RpcCall | Notification | RpcReply | InvalidMessage


def withdrawn(notice: Notification) -> Id | None:
    """The request that this notice withdraws, if it does."""
    member = _CANCELS.get(notice.method)
    return None if member is None else as_id(notice.named.get(member))


# -- reading ---------------------------------------------------------------------------------------------------------
class _Envelope(msgspec.Struct, gc=False):
    """Nothing is checked here: a bad value costs itself, not the message. Of two members with one name the last counts,
    and those that have no meaning are skipped."""

    id: Any = msgspec.UNSET
    method: Any = msgspec.UNSET
    params: Any = None
    result: Any = msgspec.UNSET
    error: Any = None


_decode = msgspec.json.Decoder(_Envelope).decode


def decode(line: bytes) -> tuple[Message, ...]:
    """The messages of a line: one, or those of a batch. Never none, never an exception."""
    try:
        return (_message(_decode(line)),)
    except UNDECODABLE:
        return _salvaged(line)


def decode_head(head: bytes, tail: bytes = b"") -> Message:
    """What a line that was too long to keep is, as far as its two ends tell.

    A reply of which no id can be found is one with the id None: it may be the answer to anything.
    """
    members = split(head)
    if not members.is_object:
        array = _ARRAY.match(head)
        return InvalidMessage("no object") if array is None else _unread(holds_message=array[1] is not None)
    last = _last_members(tail)
    found = {name: members.get(name) for name in members.found if name in _Envelope.__struct_fields__} | last
    if members.cut is not None:
        name, start = members.cut
        if name == "error" or (name in ("params", "result") and name not in found):
            found[name] = _partial(start)
    if not {"method", "params", "result", "error", "id"} & found.keys():
        # What it says of itself is in the middle that is gone.
        return RpcReply(None, is_cut=True)
    if "method" not in found and "params" in found:
        return InvalidMessage("a request that names no method")
    message = _message(_Envelope(**found), is_cut=True)
    return RpcReply(None, is_cut=True) if isinstance(message, InvalidMessage) and "method" not in found else message


def as_id(value: Any) -> Id | None:
    """The value, if it can be an id. True is equal to 1, and is none."""
    if isinstance(value, str):
        return value if len(value) <= ID_CHARACTERS_MAX else None
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) <= _FLOAT_MOST else None
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and _ID_LEAST <= value <= _ID_MOST else None


def id_text(id: Id) -> str:
    """An id as a text that says its type: the JSON of it."""
    return msgspec.json.encode(id).decode()


def id_from(text: str) -> Id | None:
    """What `id_text` was made from."""
    return as_id(decoded(text.encode(errors="replace")))


def _message(envelope: _Envelope, *, is_cut: bool = False) -> Message:
    method = envelope.method
    if method is not msgspec.UNSET:
        if not isinstance(method, str):
            return InvalidMessage("the method is no text", is_request=True, id=as_id(envelope.id))
        # A null is how the first version of the protocol marked a notice.
        if envelope.id is msgspec.UNSET or envelope.id is None:
            return Notification(method, envelope.params, is_cut)
        id = as_id(envelope.id)
        return InvalidMessage(_NO_ID, is_request=True) if id is None else RpcCall(id, method, envelope.params, is_cut)
    id = as_id(envelope.id)
    if id is None and envelope.id is not None and envelope.id is not msgspec.UNSET:
        return InvalidMessage(_NO_ID)
    if envelope.error is not None:
        return RpcReply(id, None, _failure(envelope.error), is_cut)
    if envelope.result is not msgspec.UNSET:
        return RpcReply(id, envelope.result, None, is_cut)
    # A writer in JavaScript leaves out a result that is undefined. It still is the answer.
    return InvalidMessage("neither a request nor a reply") if id is None else RpcReply(id, None, None, is_cut)


def _failure(error: Any) -> Failure:
    members = mapping(error)
    code, message = members.get("code"), members.get("message")
    if not isinstance(message, str) or not message:
        message = error if isinstance(error, str) and error else "the agent gave no reason"
    code = code if isinstance(code, int) and not isinstance(code, bool) else 0
    return Failure(code, message, members.get("data"))


def _salvaged(line: bytes) -> tuple[Message, ...]:
    """The messages of a line that was not decoded as one: a batch, or not JSON at all, most likely."""
    array = _ARRAY.match(line)
    better = mended(line)
    line = line if better is None else better
    try:
        value = msgspec.json.decode(line)
    except RecursionError:
        return (_from_members(line) if array is None else _unread(holds_message=array[1] is not None),)
    except UNDECODABLE as exc:
        # A number that no computer can hold is an accident inside a message; the rest of these are no JSON.
        message = _from_members(line) if array is None else InvalidMessage("no object")
        return (InvalidMessage(f"no JSON: {exc}"[:200]) if isinstance(message, InvalidMessage) else message,)
    return _from_batch(cast(list[Any], value)) if isinstance(value, list) else (_from_value(value),)


def _from_batch(items: list[Any]) -> tuple[Message, ...]:
    holds_message = any(isinstance(item, dict) for item in items[:BATCH_MAX])
    if not holds_message or len(items) > BATCH_MAX:
        return (_unread(holds_message=holds_message),)
    return tuple(_from_value(item) for item in items)


def _unread(*, holds_message: bool) -> Message:
    """A batch that is not taken apart."""
    return RpcReply(None, is_cut=True) if holds_message else InvalidMessage("an array that begins with no message")


def _from_value(value: Any) -> Message:
    if not isinstance(value, dict):
        return InvalidMessage("no object")
    members = cast(dict[str, Any], value)
    return _message(_Envelope(**{name: members[name] for name in _Envelope.__struct_fields__ if name in members}))


def _from_members(line: bytes) -> Message:
    """One that is an object for all that."""
    if len(line) > SALVAGE_BYTES_MAX:
        return decode_head(line[:HEAD_BYTES], line[-HEAD_BYTES:])
    members = split(line)
    if not members.is_whole:
        return InvalidMessage("no object")
    found = {name: members.get(name) for name in members.found if name in _Envelope.__struct_fields__}
    if "error" in found and found["error"] is None and members.found["error"] != b"null":
        found["error"] = {}
    return _message(_Envelope(**found), is_cut=True)


def _partial(data: bytes) -> dict[str, Any]:
    """The members of an object whose end is missing, and of the one in it that was cut, and so on."""
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
        # Of two with one name the later one counts, which is the first that is found.
        found.setdefault(last[1].decode(), decoded(last[2]))
        rest = rest[: last.start()]
    return {name: value for name, value in found.items() if name in ("id", "method")}


# -- writing ---------------------------------------------------------------------------------------------------------
class RpcWriter(msgspec.Struct, frozen=True):
    """Messages as lines. `version` None: without the member that tells it."""

    version: str | None = "2.0"

    def call(self, id: Id, method: str, params: Mapping[str, Any] | None = None) -> bytes:
        return self._line({"id": id, "method": method}, params)

    def notice(self, method: str, params: Mapping[str, Any] | None = None) -> bytes:
        return self._line({"method": method}, params)

    def reply(self, id: Id, result: Any) -> bytes:
        return self._line({"id": id, "result": result})

    def error(self, id: Id | None, code: int, message: str, data: Any = None) -> bytes:
        error: dict[str, Any] = {"code": code, "message": message}
        return self._line({"id": id, "error": error if data is None else error | {"data": data}})

    def _line(self, members: dict[str, Any], params: Mapping[str, Any] | None = None) -> bytes:
        """One line: JSON escapes every newline inside a text."""
        head = {} if self.version is None else {"jsonrpc": self.version}
        message = head | members if params is None else head | members | {"params": dict(params)}
        try:
            line = msgspec.json.encode(message)
        except UnicodeEncodeError as exc:
            hint = "half of a surrogate pair is no text; decode with errors='replace'"
            raise UsageError(f"this cannot be sent as UTF-8: {exc.reason}", hint=hint) from exc
        except (TypeError, ValueError, OverflowError, RecursionError) as exc:
            raise UsageError(f"this cannot be sent as JSON: {exc}", hint="text, numbers, lists and dicts") from exc
        assert b"\n" not in line
        return line + b"\n"


JSONRPC = RpcWriter()
# For an agent that leaves the version out, and wants it left out.
BARE = RpcWriter(version=None)
