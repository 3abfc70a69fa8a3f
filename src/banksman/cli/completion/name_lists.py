"""Lists of names for completion: sessions, agents and keys, as they are at this moment.

The user waits for the answer with a key pressed, so the list is quick or empty. A running server is asked; without one
the store is read, and not changed. The process gives up after `SECONDS_MAX`, and reports no error.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from types import FrameType

from banksman.errors import BanksmanError

# Ten times as long as it takes on an idle machine. Ctrl-C ends it earlier.
SECONDS_MAX = 5.0
NAMES_MAX = 200


def listed(what: str) -> list[str]:
    """Never raises. The process exits after `SECONDS_MAX`, because a blocked read cannot be interrupted."""
    signal.signal(signal.SIGALRM, _give_up)
    signal.setitimer(signal.ITIMER_REAL, SECONDS_MAX)
    try:
        # A shell takes one line for each name.
        return [name for name in _LISTS[what]() if name.isprintable()]
    except (BanksmanError, OSError, ValueError, ImportError, LookupError):
        return []
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _give_up(number: int, frame: FrameType | None) -> None:
    os._exit(0)


def _sessions() -> Iterable[str]:
    from banksman.cli.client.client import Client  # noqa: PLC0415
    from banksman.cli.client.discovery import find, is_there  # noqa: PLC0415

    place = find()
    if place is not None and is_there(place):
        page = Client(lambda: place).get("/v1/sessions", {"limit": NAMES_MAX})
        return [each["name"] or each["id"] for each in page["sessions"]]
    from banksman.cli.doctor.places import stores  # noqa: PLC0415
    from banksman.store.sqlite import store_health  # noqa: PLC0415

    return [name for path in stores()[:1] for name in store_health.names(path, NAMES_MAX)]


def _agents() -> Iterable[str]:
    from banksman.sessions import known_agents  # noqa: PLC0415

    return sorted({*known_agents.user_files(), *known_agents.packaged()})


def _keys() -> Iterable[str]:
    from banksman.config import KEYS  # noqa: PLC0415

    return KEYS


_LISTS = {"sessions": _sessions, "agents": _agents, "keys": _keys}
