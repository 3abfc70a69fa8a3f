"""The sessions of the server, as an editor lists them. The protocol wants the folder of each, which its log tells."""

from __future__ import annotations

import time
from typing import Any

from banksman.cli.acp.outcomes import bad_params
from banksman.cli.reaching.client import Client, Problem, segment
from banksman.cli.reaching.stream import seq_of

# Each costs two small requests.
PAGE_SESSIONS_MAX = 50


def list_sessions(client: Client, *, cursor: Any, cwd: Any) -> dict[str, Any]:
    """One page, oldest first, of those in this folder; None: of all."""
    for name, value in (("cursor", cursor), ("cwd", cwd)):
        if value is not None and not isinstance(value, str):
            raise bad_params(f"{name} is no text")
    page = client.get("/v1/sessions", {"after": cursor, "limit": PAGE_SESSIONS_MAX})
    shown = [info for session in page["sessions"] if (info := _info(client, session)) is not None]
    listed: dict[str, Any] = {"sessions": [info for info in shown if cwd is None or info["cwd"] == cwd]}
    # A page may have fewer than it could, or none at all; this alone says that there is another.
    if page["next"] is not None:
        listed["nextCursor"] = page["next"]
    return listed


def _info(client: Client, session: dict[str, Any]) -> dict[str, Any] | None:
    """None: it was deleted in this moment, or its folder is not known any more."""
    path = f"/v1/sessions/{segment(session['id'])}/events"
    try:
        page = client.get(path, {"limit": 1})
        head = seq_of(page["head"] or "") or 1
        last = client.get(path, {"after": head - 1, "limit": 1})["events"]
    except Problem:
        return None
    cwd = page["events"][0]["body"].get("cwd") if page["events"] else None
    if not isinstance(cwd, str):
        return None
    info = {"sessionId": session["id"], "cwd": cwd, "title": session["name"]}
    if last:
        info["updatedAt"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(last[0]["at"]))
    return info
