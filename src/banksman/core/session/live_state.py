"""Encode the live state of a session for the next host of its process, and decode it there.

    session ──frozen──► session ──encode──► JSON value ──decode──► session, exactly the same

The log brings back what is durable (`replay.py`). The rest lives with the process: the protocol
state of its dialect, the open turn, open questions, clocks. A session whose process is handed over
takes all of it along, as a value.

The state is a tree of frozen Structs, enums, tuples and JSON values, so one codec does it. Objects
and scalars of JSON stand for themselves. Each array begins with a tag, which says what it is: a
tuple, a list, a Struct or an enum by the name of its class, bytes, or the dialect. No class is
listed by hand, so a new field or class cannot be forgotten. The names are those of the classes of
the core. An unknown name is an error: another version of Banksman wrote the state.

The configuration is not encoded: the next host builds it from the spec in the log.

Times are those of the event loop, CLOCK_MONOTONIC, which all processes of one boot share. A host
with another clock cannot use the state: `sessions/held_session.py` checks that.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from banksman.core.dialects.dialect import Dialect
from banksman.core.session import fallback
from banksman.core.session.session_config import Config
from banksman.core.session.state import MaySteer, MayWrite, Mode, Session
from banksman.core.session.turn import Turn
from banksman.errors import StoreTooNew

# Must change with each change of the form, or of the meaning of a field. Changes of the names
# recognise themselves, and an upgrade compares them first (state_names.py).
VERSION = 1

_TUPLE, _LIST, _SET, _BYTES, _DIALECT = "tuple", "list", "set", "bytes", "dialect"
_STRUCT, _ENUM = "struct", "enum"
# The errors have one enum, which an ended turn of a provider's failure carries.
_OURS = ("banksman.core.", "banksman.errors")
NAMES = tuple(name for name in Session.__struct_fields__ if name != "config")
# Effects that outlive a host that is killed: see `surviving`.
_Surviving = MayWrite | MaySteer
# Fields that are narrower in a record than in a session. A session that is handed over has ended
# its holds, and no effect waits for its log (`hand_over.py`). For a killed host see `surviving`.
NARROWED: Mapping[str, Any] = {
    "hold": None,
    "queue": tuple[Turn, ...],
    "deferred": tuple[tuple[int, _Surviving], ...],
}


def frozen(state: Session) -> Session:
    """Return the state without what ends with this host: its departure, and waiting callers.

    The next host starts open. It has no caller that waits for the receipt of an interrupt.
    """
    return replace(
        state,
        mode=Mode.OPEN,
        is_handing=False,
        closed_by=None,
        leave_by=None,
        is_overdue=False,
        tasks_by=None,
        turn=_without_callers(state.turn),
        own=_without_callers(state.own),
    )


def _without_callers(turn: Turn | None) -> Turn | None:
    return None if turn is None else replace(turn, interrupts=())


def surviving(state: Session) -> Session:
    """Return the state without what ends with a host that is killed: see `frozen`.

    Its callers have lost their holds, and wait for no effect. But the intent to send a prompt goes
    on: the log has it, or no host has this state.
    """
    process = state.process
    if process.changes:
        changes = tuple(replace(change, id="") for change in process.changes)
        process = replace(process, changes=changes)
    return replace(
        frozen(state),
        process=process,
        hold=None,
        queue=tuple(turn for turn in state.queue if isinstance(turn, Turn)),
        deferred=tuple(
            (seq, effect) for seq, effect in state.deferred if isinstance(effect, _Surviving)
        ),
    )


def encode(state: Session) -> Any:
    """Encode a state as a JSON value. TypeError, ValueError: it has a value that has no form."""
    return encoded(Encoder(state).fields(state))


def encoded(fields: Mapping[str, Any]) -> Any:
    """Return the value that `decode` takes, from the fields of an `Encoder`."""
    return {"version": VERSION, "fields": dict(fields)}


class Encoder:
    """Encoder of the states of one session, for all or for some of their fields."""

    def __init__(self, state: Session) -> None:
        self._write = _Writer(state.config.dialect)

    def fields(self, state: Session, names: Collection[str] | None = None) -> dict[str, Any]:
        """Return fields by name; None: all. TypeError, ValueError: one has no form."""
        return {
            name: self._write.form(getattr(state, name))
            for name in (NAMES if names is None else names)
        }


def decode(encoded: Any, config: Config) -> Session:
    """Decode a state. `config`: of the session's first agent.

    `StoreTooNew`: another version of Banksman wrote it.
    """
    try:
        if encoded["version"] != VERSION:
            raise ValueError(f"version {encoded['version']}")
        fields: dict[str, Any] = encoded["fields"]
        config = fallback.config_of(config, fields["agent"])
        decoded = {name: _decode(value, config) for name, value in fields.items()}
        return _built(Session, {"config": config, **decoded})
    except (AttributeError, LookupError, TypeError, ValueError) as exc:
        message = f"cannot decode the state of a handed-over session: {exc!r:.200}"
        raise StoreTooNew(message, hint="use the version of Banksman that wrote it") from exc


# -- values --------------------------------------------------------------------------------------
class _Writer(NamedTuple):
    dialect: Dialect

    def form(self, value: Any) -> Any:
        """Return a value as JSON."""
        match value:
            case _ if value is self.dialect:
                return [_DIALECT]
            case enum.Enum():
                return [_ENUM, self._name_of(type(value)), value.name]
            case None | bool() | int() | str():
                return value
            case float() if math.isfinite(value):
                return value
            case bytes():
                return [_BYTES, msgspec.to_builtins(value)]
            case Struct():
                fields = value.__struct_fields__
                members = {name: self.form(getattr(value, name)) for name in fields}
                return [_STRUCT, self._name_of(type(value)), members]
            case tuple() | list() | frozenset():
                many = cast("tuple[Any, ...]", value)
                kinds = {tuple: _TUPLE, list: _LIST, frozenset: _SET}
                return [kinds[type(many)], *map(self.form, many)]
            case Mapping():
                return self._members(cast("Mapping[object, Any]", value))
            case _:
                raise TypeError(f"no form for {value!r:.50}")

    def _members(self, members: Mapping[object, Any]) -> dict[str, Any]:
        told: dict[str, Any] = {}
        for name, value in members.items():
            if not isinstance(name, str):
                raise TypeError(f"a key that is not text: {name!r:.50}")
            told[name] = self.form(value)
        return told

    def _name_of(self, kind: type) -> str:
        if not kind.__module__.startswith(_OURS) or _classes[kind.__name__] is not kind:
            raise TypeError(f"no form for {kind.__qualname__}")
        return kind.__name__


def _decode(value: Any, config: Config) -> Any:
    if isinstance(value, dict):
        members = cast("dict[str, Any]", value)
        return {name: _decode(each, config) for name, each in members.items()}
    if not isinstance(value, list):
        return value
    tag, *rest = cast("list[Any]", value)
    if tag in (_TUPLE, _LIST, _SET):
        many = [_decode(each, config) for each in rest]
        return tuple(many) if tag == _TUPLE else many if tag == _LIST else frozenset(many)
    match tag, rest:
        case "dialect", []:
            return config.dialect
        case "bytes", [text]:
            return msgspec.convert(text, bytes)
        case "enum", [name, member]:
            return _classes[name][member]
        case "struct", [name, fields]:
            decoded = {key: _decode(each, config) for key, each in fields.items()}
            return _built(_classes[name], decoded)
        case _:
            raise ValueError(f"unknown form {tag!r:.50}")


def _built(kind: Any, fields: Mapping[str, Any]) -> Any:
    unknown = fields.keys() - set(kind.__struct_fields__)
    if unknown:
        raise ValueError(f"unknown fields of {kind.__name__}: {', '.join(sorted(unknown))}")
    return kind(**fields)


class _Classes(dict[str, Any]):
    """The Structs and enums of the core by name. Those of a dialect come with its module."""

    def __missing__(self, name: str) -> Any:
        waiting: list[type] = [Struct, enum.Enum]
        while waiting:
            kind = waiting.pop()
            waiting += kind.__subclasses__()
            if kind.__module__.startswith(_OURS):
                self[kind.__name__] = kind
        if name not in self:
            raise KeyError(name)
        return self[name]


_classes = _Classes()
