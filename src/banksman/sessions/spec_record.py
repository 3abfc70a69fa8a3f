"""Record of a session's spec in its log: write it, compare it, and rebuild the spec from it.

The event `session.opened` has the record. It has no values that may be secret, and no objects of
one process. A session that was opened with such a value cannot be opened from its log alone.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from banksman.core.redaction.redactor import Redactor
from banksman.core.session import fallback
from banksman.core.session.event import SESSION_OPENED, SESSION_SETTING, Entry, entry, storable
from banksman.core.session.history import ACCESS, SessionHistory
from banksman.core.wire.elided_text import REDACTED
from banksman.errors import NameTaken, UsageError
from banksman.sessions import containment
from banksman.sessions.containment import Containment
from banksman.sessions.session_spec import SessionSpec

# Members of `session.opened` that are no part of the spec.
NOT_OF_SPEC = ("resume", "fork", *ACCESS)
# Arguments that the log must not keep: possible secrets, and objects of this process only.
UNKEPT = {
    "env": "variables",
    "mcp_servers": "MCP servers",
    "hooks": "hooks",
    "tools": "tools",
    "functions": "functions",
}


def entries(
    spec: SessionSpec,
    past: SessionHistory,
    *,
    resume: str | None,
    settings: Sequence[tuple[str, str]] = (),
) -> list[Entry]:
    """Return the entries of an open: the record, and the settings that change with it.

    `settings`: those that a fork takes from its origin.
    """
    opened = entry(None, SESSION_OPENED, **opening(spec, resume=resume, fork=spec.forks))
    # A setting that the new spec changes overrides the value that was set since the last open. Both
    # are of the first agent, which may not be the one that serves now.
    dropped = [(name, None) for name in spec.settings_asked_anew(past.opened)]
    changed = [(name, value, "fork") for name, value in settings] + [
        (*pair, "open") for pair in dropped
    ]
    first = spec.profile.name
    agent = None if fallback.current(past.session) == first else first
    told = [
        entry(None, SESSION_SETTING, name=name, value=value, by=by, agent=agent)
        for name, value, by in changed
    ]
    return [opened, *told]


def opening(spec: SessionSpec, *, resume: str | None = None, fork: bool = False) -> dict[str, Any]:
    """Return the body of `session.opened`: the record, and what only this open knows."""
    caller = {} if spec.caller is None else {"caller": spec.caller}
    return {**spec.record(), "resume": resume, "fork": fork, **caller}


def is_whole(spec: SessionSpec, redactor: Redactor | None) -> bool:
    """Return whether a host can build the same spec from the log alone."""
    record = spec.record()
    told = entry(None, SESSION_OPENED, **record)
    is_told = redactor is None or [*redactor.entries([told])] == [told]
    is_kept = not any(record.get(name) for name in UNKEPT)
    return is_told and is_kept and spec.on_limit is None


def is_equal(spec: SessionSpec, opened: Mapping[str, Any] | None) -> bool:
    """Return whether a `session.opened` event records the same process as this spec.

    Whether that process survives its host is no part of it.
    """
    if opened is None:
        return False
    others = (*NOT_OF_SPEC, "survive")
    told = {name: value for name, value in opened.items() if name not in others}
    wanted = {name: value for name, value in spec.record().items() if name not in others}
    return bool(storable(wanted) == told)


def rebuild(
    agent: str, record: Mapping[str, Any] | None, *, user_helper: Sequence[str] = ()
) -> SessionSpec:
    """Rebuild the spec of the last open.

    `UsageError`: the session had arguments that the log does not keep. An agent without its
    variables, servers or tools would not do the same work.
    """
    if record is None:
        message = "cannot open the session: its log does not record how it was opened"
        raise UsageError(message, hint="open it by its name")
    missing = [
        f"{what} ({', '.join(record[name])})" for name, what in UNKEPT.items() if record.get(name)
    ]
    missing += [
        f"{name} (which contained a secret)"
        for name, value in record.items()
        if REDACTED in repr(value)
    ]
    if missing:
        hint = (
            f"open it by its name and pass its {' and '.join(missing)}: the log does not keep them"
        )
        raise UsageError("cannot open the session from its log alone", hint=hint)
    return SessionSpec(
        agent,
        cwd=record["cwd"],
        command=record["command"],
        args=record["args"],
        env=None,
        inherit_env=record["inherit_env"],
        model=record["model"],
        permission_mode=record["permission_mode"],
        system_prompt=record["system_prompt"],
        mcp_servers=(),
        options=record["options"],
        resume=None,
        forks=False,
        hooks=None,
        tools=(),
        rules_wanted=record["rules"],
        labels=record.get("labels") or (),
        fallback=record.get("fallback") or (),
        contained=containment.from_record(record),
        user_helper=user_helper,
        survive=record.get("survive"),
        is_recorded=True,
    )


def with_containment(spec: SessionSpec, record: Mapping[str, Any] | None) -> SessionSpec:
    """Return the spec with the recorded containment, where the caller has stated none.

    A session that is opened again by its name stays contained.
    """
    given: Containment = spec.given["contained"]
    recorded = containment.from_record(record)
    wanted = given.over(recorded)
    if REDACTED in repr(wanted):
        hint = "pass wrap=: the log does not keep the secret in it"
        raise UsageError("cannot open the session from its log alone", hint=hint)
    if wanted == given:
        return spec
    spec.close()
    is_recorded = (wanted.wrap, wanted.limits) == (recorded.wrap, recorded.limits)
    again: dict[str, Any] = {**spec.given, "contained": wanted, "is_recorded": is_recorded}
    return SessionSpec(**again)


def check_owner(spec: SessionSpec, opened: Mapping[str, Any] | None, session: str) -> None:
    """Raise `NameTaken` if the spec is only for a session of its caller, and this one is not.

    A session that was never opened belongs to nobody.
    """
    if spec.only_own and opened is not None and opened.get("caller") != spec.caller:
        hint = "choose another name, and another Idempotency-Key"
        raise NameTaken("another caller has this session", hint=hint, session=session)


def of_another_agent(name: str | None, agent: str, session: str) -> UsageError:
    """Build the error for an open of a session with another agent than its own."""
    hint = (
        f"use another name, or run `banksman close {shlex.quote(name or session)} --forget`, "
        "which deletes its log"
    )
    return UsageError(
        f"the session {name!r} belongs to the agent {agent}", hint=hint, session=session
    )


def cannot_survive() -> UsageError:
    """Build the error for a session that shall survive its host, and that no other could open."""
    hint = (
        "leave survive, env, mcp_servers, hooks, tools and functions out, and use a store in a file"
    )
    message = "cannot survive a crash of the host: no other host could open the session"
    return UsageError(message, hint=hint)
