"""Events as `banksman log` prints them for a person."""

from __future__ import annotations

from banksman.cli.commands.log import line_of


def test_log_describes_gaps_and_unknown_updates() -> None:
    assert "events 3 to 9 are no longer kept" in str(line_of({"kind": "stream.gap", "first": 3, "last": 9}))
    event = {
        "cursor": "1.2",
        "at": 0.0,
        "turn": "t",
        "kind": "update",
        "body": {"updates": [{"sessionUpdate": "new_kind"}]},
    }
    assert str(line_of(event)).endswith("update t  new_kind")
    assert line_of({**event, "body": {"updates": []}}) is None
