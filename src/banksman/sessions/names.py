"""What a session may be called. A name is for people and for programs: it is listed, logged, typed and looked up."""

from __future__ import annotations

import re
from typing import Any

from banksman.core.wire.redaction import Redactor
from banksman.errors import NotFound, UsageError

NAME_CHARACTERS_MAX = 200
# An id of ours is no name: whoever finds by either would find another one's session.
ID = re.compile(r"s-[0-9a-f]{16}")


def checked_name(name: Any, redactor: Redactor | None = None) -> str | None:
    """None: it has none."""
    if name is None:
        return None
    if not isinstance(name, str) or not 1 <= len(name) <= NAME_CHARACTERS_MAX or not name.isprintable():
        hint = f"1 to {NAME_CHARACTERS_MAX} characters, all of them printable"
        raise UsageError(f"a session cannot be called {name!r:.60}", hint=hint)
    if ID.fullmatch(name):
        raise UsageError(f"{name} is an id, and no name", hint="a name of your own")
    check_no_secret("name", name, redactor)
    return name


def check_no_secret(what: str, text: str, redactor: Redactor | None) -> None:
    if redactor is not None and redactor.redact_text(text) != text:
        raise UsageError(f"a {what} cannot hold a secret", hint="it would be written to the store")


def checked_id(session: Any) -> str:
    """An id or a name, as somebody gives it who wants to find one."""
    if not isinstance(session, str):
        raise UsageError(f"a session is not found by {session!r:.60}", hint="its id, or its name")
    try:
        session.encode()
    except UnicodeEncodeError as exc:
        raise NotFound(f"there is no session {session!r:.60}", hint="see sessions()") from exc
    return session
