"""The layer of `BANKSMAN_*` variables, and those that are none of ours.

A variable that is not known is no error: programs that start us have variables of their own, and a letter too many in
somebody's profile must not end every verb. `config show` and `doctor` mention it, with the nearest that is known.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from banksman.config.keys import KEYS
from banksman.config.nearest import nearest
from banksman.config.places import CONFIG_VARIABLE
from banksman.config.values import of_text

PREFIX = "BANKSMAN_"


class Stray(NamedTuple):
    """A variable that means nothing to us, and the one that may be meant."""

    name: str
    nearest: str


def read() -> dict[str, Any]:
    """Values by the names of their keys. An empty variable is one that is not set."""
    found: dict[str, Any] = {}
    for name, key in KEYS.items():
        text = os.environ.get(key.variable, "")
        if text:
            found[name] = of_text(key, text, where=key.variable)
    return found


def strays() -> list[Stray]:
    known = [CONFIG_VARIABLE, *(key.variable for key in KEYS.values())]
    return [
        Stray(name, nearest(name, known))
        for name in sorted(os.environ)
        if name.startswith(PREFIX) and name not in known
    ]
