"""The scrubber of bug reports: a long text is searched in windows, with the result of one search."""

from __future__ import annotations

import random

import pytest
from tests.store.test_bundle import HOME, KEYS
from tests.thorough import sample

from banksman.store import scrubber as module
from banksman.store.scrubber import scrubber

SECRETS = ["my-secret word", 'a "quoted" one']
UNITS = [
    *KEYS.values(),
    *SECRETS,
    *("my-secret%20word", "Bearer abc.def-123", "api_key = 'abcdefgh'", "https://me:pass@host/x"),
    *("bob.b+x@mail.example.org", "/home/somebody/x", f"{HOME}/x", "eyJhbGciOi", "sk-", "-----BEGIN "),
    *("a", " ", "\n", "\\n", "-", ".", "@", "key", "=", "x" * 100, "é", "\U0001f600"),
]


def in_one_call(text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    with monkeypatch.context() as patched:
        patched.setattr(module, "WINDOW", 1 << 30)
        return scrubber(SECRETS)(text)


def test_windows_find_what_one_call_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOW", 16)
    scrub = scrubber(SECRETS)
    for seed in range(sample(2000)):
        chosen = random.Random(seed)
        text = "".join(chosen.choices(UNITS, k=40))
        assert scrub(text) == in_one_call(text, monkeypatch), seed


@pytest.mark.parametrize("key", [*KEYS, "of settings"])
def test_no_window_cuts_a_key(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOW", 64)
    found = KEYS.get(key, SECRETS[0])
    for before in range(200):
        text = f"{'x ' * (before // 2)}{' ' * (before % 2)}{found}{' y' * 100}"
        assert scrubber(SECRETS)(text) == text.replace(found, "[redacted]")


@pytest.mark.parametrize("part", range(3))
def test_long_part_of_a_web_token_is_no_way_around_it(part: int) -> None:
    parts = ["ey" + "JhbGciOiJIUzI1NiJ9", "eyJzdWIiOiIxIn0", "c2lnbmF0dXJl"]
    parts[part] += "A" * 3 * (module.WINDOW + module.BEYOND)
    text = f"{'x ' * module.WINDOW}{'.'.join(parts)} more"
    assert scrubber()(text) == f"{'x ' * module.WINDOW}[redacted] more"


def test_value_after_a_long_word_is_removed() -> None:
    word = "x" * 100
    assert scrubber()(f"{word}_key=abcdefgh") == f"{word}_key=[redacted]"


def test_value_after_two_words_is_removed() -> None:
    assert "abcdefgh12" not in scrubber()("api-key: Bearer abcdefgh12")
