"""The spec of a session reads the environment of its agent once, whatever it derives from it."""

from __future__ import annotations

import sys

import pytest

from banksman.process import launch
from banksman.sessions.arguments import with_budget
from banksman.sessions.session_spec import SessionSpec


def spec_of(env: dict[str, str]) -> SessionSpec:
    return SessionSpec(
        "claude",
        cwd=None,
        command=[sys.executable],
        args=(),
        env=env,
        inherit_env=True,
        model=None,
        permission_mode=None,
        system_prompt=None,
        mcp_servers=(),
        options=with_budget(None, None, None),
        resume=None,
        forks=False,
        hooks=None,
        tools=(),
        rules_wanted=None,
    )


def test_spec_builds_the_environment_of_its_agent_at_most_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    # A host that takes over many sessions makes a spec of each. The check of the program builds it too.
    built: list[object] = []

    def build(env: object, **more: object) -> dict[bytes, bytes]:
        if env == {"ONE": "1"}:
            built.append(env)
        return original(env, **more)  # pyright: ignore[reportArgumentType]

    original = launch.build
    monkeypatch.setattr(launch, "build", build)
    spec = spec_of({"ONE": "1"})
    assert spec.accounts.keys() == {"claude"}
    assert len(built) == 2


def test_fingerprint_and_account_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "one")
    first = spec_of({})
    monkeypatch.setenv("ANTHROPIC_API_KEY", "two")
    second = spec_of({})
    assert first.fingerprint != second.fingerprint
    assert first.account != second.account
    assert second.account == spec_of({}).account
