"""Ids and names as parts of a subject, which has its own opinion of dots, stars and blanks."""

from __future__ import annotations

import hashlib
import re

_PLAIN = re.compile(r"[A-Za-z0-9_-]{1,64}")


def token(text: str) -> str:
    """A part of a subject for any text, another for each: what is plain stands for itself."""
    if _PLAIN.fullmatch(text):
        return text
    # No plain text has a sign like this one in it. Long ones too: a subject must stay short.
    return "=" + hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:40]
