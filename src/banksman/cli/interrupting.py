"""Stopping a turn, and what the receipt says in words."""

from __future__ import annotations

from typing import Any

from banksman.cli.reaching.client import Client, segment


def interrupt_turn(client: Client, session: str, turn: str | None) -> dict[str, Any]:
    """The receipt."""
    place = "" if turn is None else f"/turns/{segment(turn)}"
    return client.post(f"/v1/sessions/{segment(session)}{place}/interrupt")


def receipt_in_words(receipt: dict[str, Any]) -> str:
    queued = len(receipt["queued"])
    rest = f"; {queued} still queued" if queued else ""
    if not receipt["stopped"]:
        return f"not stopped: {str(receipt['by']).replace('_', ' ')}{rest}"
    return f"stopped, by {receipt['by']}{rest}"
