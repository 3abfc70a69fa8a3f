"""What is asked of a log must make sense, whichever engine it is."""

from __future__ import annotations

from banksman.errors import UsageError
from banksman.store.log import READ_EVENTS_MAX


def checked_limit(limit: int) -> int:
    if limit < 1:
        raise UsageError("a page holds an event or more", hint="limit is 1 or more", limit=limit)
    return min(limit, READ_EVENTS_MAX)


def check_after(session: str, after: int) -> None:
    if after < 0:
        raise UsageError("no event is before the first", hint="after is 0 or more", session=session, after=after)


def check_seq(session: str, seq: int) -> None:
    if seq < 0:
        raise UsageError("no event is before the first", hint="seq is 0 or more", session=session, seq=seq)


def check_text(*texts: str | None) -> None:
    """What is no Unicode cannot be stored."""
    for text in texts:
        try:
            (text or "").encode()
        except UnicodeEncodeError as exc:
            raise UsageError("an id or a name must be text", hint="it has half of a character", text=text) from exc


def check_no_host(session: str) -> None:
    """On the bus a host is asked as a session is, under its own id behind this word. Whoever had a session of that id
    would hear what is meant for the host."""
    if session.startswith("host:"):
        raise UsageError("a session cannot have the id of a host", hint="one that does not begin so", session=session)
