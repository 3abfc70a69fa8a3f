"""Marks for text that the log leaves out: the end of a long text, and a secret.

The core cuts texts before the log writer removes secrets. The rest of a divided secret is not
recognised as a secret. So `Redactor.redact_text` also removes the beginning of a secret in front of
the mark `CUT`. A cut without the mark may store a part of a secret.
"""

from __future__ import annotations

CUT = "… [cut]"
REDACTED = "[redacted]"


def cut(text: str, characters_max: int) -> str:
    """Return the text, or its beginning and the mark: together at most `characters_max`."""
    assert characters_max >= len(CUT)
    return text if len(text) <= characters_max else text[: characters_max - len(CUT)] + CUT
