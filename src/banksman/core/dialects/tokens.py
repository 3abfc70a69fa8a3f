"""`Tokens`, the token counts of an agent in one form, and the reader of the agents' own forms.

Agents use other names for the same counts, and disagree about one thing: whether the tokens of the
input include the tokens that came from the provider's cache. `Tokens` keeps the four kinds apart,
so that their sum counts every token once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from banksman.core.wire.partial_json import count

# A larger count is a mistake of the agent. The sum of many counts fits into 64 bits.
COUNT_MAX = 10**12

# The names of each count: Claude Code, Codex, ACP, and agents that report beside ACP.
_INPUT = ("input_tokens", "inputTokens")
_OUTPUT = ("output_tokens", "outputTokens")
_CACHE_READ = (
    *("cache_read_input_tokens", "cacheReadInputTokens"),
    *("cachedInputTokens", "cachedReadTokens"),
)
_CACHE_WRITE = (
    *("cache_creation_input_tokens", "cacheCreationInputTokens"),
    *("cacheWriteInputTokens", "cachedWriteTokens"),
)
_THOUGHT = ("thoughtTokens",)
_TOTAL = ("totalTokens",)
_KNOWN = frozenset((*_INPUT, *_OUTPUT, *_CACHE_READ, *_CACHE_WRITE, *_TOTAL))


class Tokens(Struct, frozen=True):
    """Token counts by kind.

    `input`: input that was not cached. `cache_read` and `cache_write`: input that the provider read
    from its cache, or stored there. `output`: everything that the model wrote, its thinking
    included.
    """

    input: int = 0
    output: int = 0
    cache_read: int = 0
    cache_write: int = 0

    @property
    def total(self) -> int:
        """The sum of all kinds."""
        return self.input + self.output + self.cache_read + self.cache_write

    def plus(self, other: Tokens) -> Tokens:
        """Return the sum, kind by kind."""
        return Tokens(
            self.input + other.input,
            self.output + other.output,
            self.cache_read + other.cache_read,
            self.cache_write + other.cache_write,
        )

    def minus(self, other: Tokens) -> Tokens:
        """Return the difference, kind by kind. A kind may become negative: it is a correction."""
        return Tokens(
            self.input - other.input,
            self.output - other.output,
            self.cache_read - other.cache_read,
            self.cache_write - other.cache_write,
        )

    def most(self, other: Tokens) -> Tokens:
        """Return the larger count of each kind, for two reports about the same model call."""
        return Tokens(
            max(self.input, other.input),
            max(self.output, other.output),
            max(self.cache_read, other.cache_read),
            max(self.cache_write, other.cache_write),
        )


NO_TOKENS = Tokens()


def tokens_in(usage: Mapping[str, Any] | None) -> Tokens | None:
    """Return the counts in an agent's report; None if it has none.

    If the reported total is the sum of input and output alone, then the cached tokens are part of
    the input, and the tokens of thinking are part of the output.
    """
    if not usage or _KNOWN.isdisjoint(usage):
        return None
    given, output = _count(usage, _INPUT), _count(usage, _OUTPUT)
    read, write = _count(usage, _CACHE_READ), _count(usage, _CACHE_WRITE)
    total = _count(usage, _TOTAL)
    if total and not given and not output:
        # Only the total is known. Nearly all tokens of an agent are input.
        return Tokens(input=max(0, total - read - write), cache_read=read, cache_write=write)
    if total and total == given + output:
        return Tokens(max(0, given - read - write), output, read, write)
    return Tokens(given, output + _count(usage, _THOUGHT), read, write)


def _count(usage: Mapping[str, Any], names: tuple[str, ...]) -> int:
    for name in names:
        if name in usage:
            value = count(usage[name])
            return 0 if value is None or value > COUNT_MAX else value
    return 0
