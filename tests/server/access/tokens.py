"""Named tokens for the tests, in the state folder of a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.server.kit import Answer, Served

from banksman.server.access import named_tokens
from banksman.server.access.roles import Role
from banksman.testing import fake_agent


def path(served: Served) -> Any:
    return served.folder / "state" / "banksman" / "named-tokens.json"


def create(served: Served, name: str, role: Role | str, **limits: Any) -> str:
    return named_tokens.create(path(served), name, Role(role), **limits)


def revoke(served: Served, name: str) -> None:
    named_tokens.revoke(path(served), name)


def request(
    served: Served, token: str, method: str, url: str, body: Any = None, headers: Mapping[str, str] | None = None
) -> Answer:
    sent = {"Authorization": f"Bearer {token}", **(headers or {})}
    return served.request(method, url, body, token=False, headers=sent)


def opened_by(served: Served, name: str, session: str, script: Any = None) -> str:
    """Open a session with the scripted agent that belongs to this caller, whose token has ended."""

    token = create(served, name, Role.OPERATOR)
    body = {"command": fake_agent.command(script or {}), "name": session}
    answer = request(served, token, "POST", "/v1/sessions", body)
    assert answer.status == 201, answer
    revoke(served, name)
    return answer.json["id"]
