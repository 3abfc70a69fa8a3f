"""Hints about wrong arguments fit Python, HTTP and the command line alike."""

from __future__ import annotations

import pytest

from banksman.commands.registry import CommandRegistry
from banksman.errors import NotFound, UsageError
from banksman.sessions.arguments import checked_id
from banksman.sessions.ask_arguments import priority_of
from banksman.sessions.readable_session import parse_cursor


def test_priority_hint_names_the_values() -> None:
    with pytest.raises(UsageError) as caught:
        priority_of("hi")
    assert caught.value.hint == "use interactive, normal, background, or a whole number"
    assert priority_of("interactive") > priority_of("normal") > priority_of("background")


def test_cursor_hint_says_how_to_begin_at_the_first_event() -> None:
    with pytest.raises(UsageError) as caught:
        parse_cursor("zzz")
    assert caught.value.hint == "use the `cursor` of an event, or leave it out to begin at the first event"


def test_unknown_session_hint_names_no_call() -> None:
    with pytest.raises(NotFound) as caught:
        checked_id("\ud800")
    assert caught.value.hint == "list the sessions"


def test_unknown_command_hint_names_no_call() -> None:
    with pytest.raises(NotFound) as caught:
        CommandRegistry(finished_max=1, finished_seconds_max=1.0).find("nope")
    assert caught.value.hint == "list the commands; a command that ended long ago is not kept"
