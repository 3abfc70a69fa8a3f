"""`changed` is `dataclasses.replace`, faster: for every value that it is used for, and any member of it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import pytest

from banksman.core import past
from banksman.core.changing import changed
from banksman.core.config import Config
from banksman.core.dialects.claude import CLAUDE
from banksman.core.state import Process, Session


def session() -> Session:
    return past.beginning(Config(dialect=CLAUDE)).session


@pytest.mark.parametrize("value", [session(), Process()], ids=["session", "process"])
def test_it_changes_what_is_named_and_nothing_else(value: Session | Process) -> None:
    for field in fields(value):
        mark = object()
        other = changed(value, **{field.name: mark})
        assert getattr(other, field.name) is mark
        assert changed(other, **{field.name: getattr(value, field.name)}) == value
        for rest in fields(value):
            if rest.name != field.name:
                assert getattr(other, rest.name) is getattr(value, rest.name)
    assert type(changed(value)) is type(value)
    assert changed(value) == replace(value)


def test_the_value_itself_stays_as_it_was() -> None:
    before = session()
    after = changed(before, head=7)
    assert (before.head, after.head) == (0, 7)
    with pytest.raises(AttributeError):
        after.head = 8  # pyright: ignore[reportAttributeAccessIssue]


def test_a_member_that_there_is_not_is_an_error() -> None:
    with pytest.raises(KeyError):
        changed(session(), nonsense=1)


@dataclass(frozen=True, slots=True)
class Checked:
    one: int
    two: int

    def __post_init__(self) -> None:
        assert self.one < self.two


def test_a_class_that_checks_its_values_is_not_for_it() -> None:
    with pytest.raises(AssertionError, match="would not be called"):
        changed(Checked(1, 2), one=3)
