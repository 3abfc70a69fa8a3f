"""Names, as they are at this moment: what a shell asks for while somebody waits with a finger on the key.

So it is quick or silent. A server that runs is asked; without one the store is looked at, which changes nothing. What
takes longer than `SECONDS_MAX` is given up, and whatever goes wrong is nobody's business here.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from types import FrameType

from banksman.errors import BanksmanError

# Ten times as long as it takes on a machine with nothing else to do. Ctrl-C ends it before.
SECONDS_MAX = 5.0
NAMES_MAX = 200


def listed(what: str) -> list[str]:
    """Never raises; the process ends if it takes too long, for what it waits for cannot be hurried."""
    signal.signal(signal.SIGALRM, _give_up)
    signal.setitimer(signal.ITIMER_REAL, SECONDS_MAX)
    try:
        # What cannot be one line is nothing that could be completed.
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
