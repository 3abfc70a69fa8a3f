"""A session by the word in a path: its id or its name."""

from __future__ import annotations

from banksman import Host
from banksman.errors import NotFound
from banksman.server.server_settings import NAME_LENGTH_MAX
from banksman.sessions.session import Session


def session_of(host: Host, id_or_name: str) -> Session:
    """`NotFound`: there is none; also for what can be the name of none."""
    if len(id_or_name) > NAME_LENGTH_MAX or "\0" in id_or_name:
        raise NotFound("there is no such session", hint="see /v1/sessions")
    return host.session(id_or_name)
