"""What there is to see of sessions: what `ps` and its like have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from banksman.cli.client.client import Client
from banksman.cli.output.terminal import Style

Shown = dict[str, Any]


def sessions(client: Client) -> Iterator[Shown]:
    """All of them, oldest first, page by page."""
    after: str | None = None
    while True:
        page = client.get("/v1/sessions", {"after": after})
        yield from page["sessions"]
        after = page["next"]
        if after is None:
            return


def money(cost: float | None) -> str | None:
    return None if cost is None else f"${cost:.4f}"


def colour_of(style: Style, state: str) -> Callable[[str], str]:
    """Of the word for a session's state: who needs somebody, and who is at work."""
    match state:
        case "asks":
            return style.yellow
        case "wedged" | "not movable" | "unreachable":
            return style.red
        case "running":
            return style.green
        case "gone" | "elsewhere":
            return style.dim
        case _:
            return str
