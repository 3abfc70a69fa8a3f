"""The word that was meant. Something is always the nearest; whoever misspelt it sees at once whether it is right."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str:
    # Loaded only when somebody has misspelt something.
    from difflib import get_close_matches  # noqa: PLC0415

    found = get_close_matches(word, sorted(known), 1, 0)
    assert found, "one of them is the nearest, however far"
    return found[0]
