"""Names in the encoded state of a session, for a version of Banksman that is to decode it.

`live_state.py` encodes classes, fields and enum members by their names. A version that lacks one of
them cannot decode the state, and the turn would be lost. So an upgrade compares the names first:
`names` in the old version, `misfit` in the new one. A field that only the new version has needs a
default. A field of the same name is taken to have the same meaning: a change of that needs another
`live_state.VERSION`.
"""

from __future__ import annotations

import enum
import typing
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from banksman.core.session import live_state
from banksman.core.session.state import Session

# The fields of each Struct and the members of each enum, by the name of the class.
Names = Mapping[str, Collection[str]]

_PACKAGE = "banksman."


def names(roots: Collection[type]) -> dict[str, list[str]]:
    """Return the names in a record of these classes, and of all classes that they can contain."""
    found = _reachable(roots, live_state.NARROWED)
    return {name: sorted(_members(kind)) for name, kind in sorted(found.items())}


def misfit(theirs: Names, roots: Collection[type]) -> str:
    """Say why this version cannot decode a state with these names; empty if it can."""
    # Not narrowed: another version may have more in its records, or offer more than they have.
    ours = _reachable(roots, {})
    for name, members in theirs.items():
        kind = ours.get(name)
        if kind is None:
            return f"{name!r:.100} is unknown in this version"
        known = _members(kind)
        if unknown := sorted(set(members) - known.keys()):
            return f"{name}.{unknown[0]:.100} is unknown in this version"
        needed = {member for member, is_required in known.items() if is_required}
        if missing := sorted(needed - set(members)):
            return f"{name}.{missing[0]} is new in this version"
    return ""


def _members(kind: type) -> dict[str, bool]:
    """Return the names in a class, and whether each is required."""
    if issubclass(kind, enum.Enum):
        return dict.fromkeys(kind.__members__, False)
    fields = msgspec.structs.fields(typing.cast("type[Struct]", kind))
    found = {field.name: field.required for field in fields}
    # The next host has the configuration from the log.
    return {name: found[name] for name in live_state.NAMES} if kind is Session else found


def _reachable(roots: Collection[type], narrowed: Mapping[str, Any]) -> dict[str, type]:
    """Return these classes and all that they can contain. `narrowed`: hints of a session's fields.

    The dialect is no part of them: its form has no names. Its protocol state has names.
    """
    found: dict[str, type] = {}
    waiting: list[Any] = list(roots)
    while waiting:
        hint = waiting.pop()
        waiting += [part for part in (typing.get_origin(hint), *typing.get_args(hint)) if part]
        if not isinstance(hint, type) or not hint.__module__.startswith(_PACKAGE):
            continue
        if issubclass(hint, Struct | enum.Enum) and hint.__name__ not in found:
            found[hint.__name__] = hint
            waiting += [*_hints(hint, narrowed), *hint.__subclasses__()]
    return found


def _hints(kind: type, narrowed: Mapping[str, Any]) -> Iterator[Any]:
    if issubclass(kind, Struct):
        hints, members = typing.get_type_hints(kind), _members(kind)
        if kind is Session:
            hints |= narrowed
        yield from (hint for name, hint in hints.items() if name in members)
