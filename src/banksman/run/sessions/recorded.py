"""A session opened again from what its log says: for whoever finds it, and did not open it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from banksman.core.redaction import REDACTED
from banksman.errors import UsageError
from banksman.run.sessions.opening import Opening

# What an opening may have that a log does not keep: values that may be secret, and what lives in one process only.
UNKEPT = {"env": "variables", "mcp_servers": "MCP servers", "hooks": "hooks", "tools": "tools"}


def opening_of(agent: str, record: Mapping[str, Any] | None) -> Opening:
    """As it was opened the last time. `UsageError` if it had what is not kept: an agent without the variables, servers
    or tools that it was to have would do something else than was asked for."""
    if record is None:
        raise UsageError("its log does not say how the session was opened", hint="open it by its name")
    missing = [f"{what} ({', '.join(record[name])})" for name, what in UNKEPT.items() if record[name]]
    missing += [f"{name} (which had a secret)" for name, value in record.items() if REDACTED in repr(value)]
    if missing:
        hint = f"open it by its name, with its {' and '.join(missing)}: they are not kept in the log"
        raise UsageError("the session cannot be opened by what its log says alone", hint=hint)
    return Opening(
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
    )
