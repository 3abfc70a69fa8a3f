"""Permission rules for tools: which rule applies, and which values are invalid."""

from __future__ import annotations

from typing import Any

import pytest

from banksman.core.dialects.dialect import Verdict
from banksman.core.session import permissions
from banksman.core.session.permissions import RULES_MAX, Rules
from banksman.errors import UsageError

ALLOW, DENY, ASK = Verdict.ALLOW, Verdict.DENY, Verdict.ASK


@pytest.mark.parametrize(
    ("tool", "layers", "found"),
    [
        ("Bash", (), None),
        ("Bash", ((), ()), None),
        ("Bash", ((("Bash", DENY),),), DENY),
        ("bash", ((("Bash", DENY),),), None),
        ("BashOutput", ((("Bash", DENY),),), None),
        ("Bash", ((("Bas", DENY),),), None),
        # Within a layer the first match applies, even if a later rule is narrower.
        ("Bash", ((("*", ASK), ("Bash", DENY)),), ASK),
        ("Bash", ((("Bash", DENY), ("*", ASK)),), DENY),
        # The rules of an ask come before those of the session. If none matches, the session's rules apply.
        ("Bash", ((("Bash", ALLOW),), (("Bash", DENY),)), ALLOW),
        ("Read", ((("Bash", ALLOW),), (("*", DENY),)), DENY),
        ("Bash", ((("*", ASK),), (("Bash", DENY),)), ASK),
        # A star matches any rest, including an empty one.
        ("mcp__github__issue", ((("mcp__github__*", DENY),),), DENY),
        ("mcp__github__", ((("mcp__github__*", DENY),),), DENY),
        ("mcp__github", ((("mcp__github__*", DENY),),), None),
        ("", ((("*", DENY),),), DENY),
        ("", ((("Bash", DENY),),), None),
    ],
)
def test_verdict_comes_from_first_matching_rule(tool: str, layers: tuple[Rules, ...], found: Verdict | None) -> None:
    assert permissions.verdict(tool, layers) is found


def test_rules_keep_their_order() -> None:
    wanted = {"mcp__*": "ask", "Bash": "deny", "*": "allow"}
    assert permissions.parse(wanted) == (("mcp__*", ASK), ("Bash", DENY), ("*", ALLOW))
    assert permissions.parse(None) == ()
    assert permissions.parse({}) == ()


@pytest.mark.parametrize(
    "wanted",
    [
        *([("Bash", "deny")], "Bash", 5, {"Bash"}),
        *({"": "deny"}, {5: "deny"}, {None: "deny"}, {"*sh": "deny"}, {"B*h": "deny"}, {"**": "deny"}),
        # Names that no tool has: the author of such a rule would believe that it applies.
        *({"Bash(ls)": "deny"}, {"Bash ": "deny"}, {"Bash, Read": "deny"}, {"Bash\n": "deny"}, {"Bäsh": "deny"}),
        *({"Bash": "DENY"}, {"Bash": "never"}, {"Bash": ""}, {"Bash": True}, {"Bash": None}, {"Bash": ["deny"]}),
    ],
)
def test_rules_refuse_invalid_value(wanted: Any) -> None:
    with pytest.raises(UsageError) as raised:
        permissions.parse(wanted)
    assert "allow" in raised.value.hint


def test_rules_are_bounded() -> None:
    wanted = {f"tool-{number}": "deny" for number in range(RULES_MAX)}
    assert len(permissions.parse(wanted)) == RULES_MAX
    with pytest.raises(UsageError, match=str(RULES_MAX + 1)):
        permissions.parse({**wanted, "another": "deny"})
