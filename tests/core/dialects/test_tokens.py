"""Tests of `tokens_in`: the reports of all agents in one form, where each token counts once."""

from __future__ import annotations

from typing import Any

import pytest

from banksman.core.dialects.tokens import COUNT_MAX, Tokens, tokens_in

CLAUDE = {
    "input_tokens": 3,
    "cache_creation_input_tokens": 5,
    "cache_read_input_tokens": 7,
    "output_tokens": 11,
    "output_tokens_details": {"thinking_tokens": 2},
}
CODEX = {
    "totalTokens": 21,
    "inputTokens": 10,
    "cachedInputTokens": 4,
    "cacheWriteInputTokens": 1,
    "outputTokens": 11,
    "reasoningOutputTokens": 2,
}
ACP = {"totalTokens": 28, "inputTokens": 3, "outputTokens": 11, "cachedReadTokens": 7, "cachedWriteTokens": 5}


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        (CLAUDE, Tokens(3, 11, 7, 5)),
        # The total shows that the input includes what was cached.
        (CODEX, Tokens(5, 11, 4, 1)),
        (ACP, Tokens(3, 11, 7, 5)),
        ({**ACP, "thoughtTokens": 2}, Tokens(3, 13, 7, 5)),
        ({"inputTokens": 3, "outputTokens": 4, "totalTokens": 7, "thoughtTokens": 2}, Tokens(3, 4)),
        ({"input_tokens": 10, "output_tokens": 5}, Tokens(10, 5)),
        ({"totalTokens": 9}, Tokens(9)),
        ({"totalTokens": 9, "cachedReadTokens": 2}, Tokens(7, 0, 2)),
    ],
)
def test_reports_of_agents_have_one_form(usage: dict[str, Any], tokens: Tokens) -> None:
    assert tokens_in(usage) == tokens


@pytest.mark.parametrize("usage", [None, {}, {"used": 3, "size": 9}])
def test_report_without_tokens_is_none(usage: dict[str, Any] | None) -> None:
    assert tokens_in(usage) is None


@pytest.mark.parametrize("wrong", [-1, True, 1.5, "7", None, COUNT_MAX + 1, [3]])
def test_wrong_count_is_zero(wrong: Any) -> None:
    assert tokens_in({"input_tokens": wrong, "output_tokens": 2}) == Tokens(0, 2)


def test_sums_and_differences_are_by_kind() -> None:
    one, other = Tokens(1, 2, 3, 4), Tokens(10, 20, 30, 40)
    assert one.plus(other) == Tokens(11, 22, 33, 44)
    assert one.plus(other).minus(other) == one
    assert one.most(Tokens(0, 5)) == Tokens(1, 5, 3, 4)
    assert one.total == 10
