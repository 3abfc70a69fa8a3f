"""Idempotency keys: whoever asks again with the same one gets the turn of the first time, also after a restart."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable

from banksman.core.past import KEYS_MAX, Key
from banksman.run.sessions.turn import Turn

# A turn with its acceptance: whoever comes with its key hears of it what the first one hears.
Asked = tuple[Turn, asyncio.Future[None]]


class Keys:
    """Of one session; `stored`: those that the log has from before."""

    def __init__(self, stored: Iterable[Key]) -> None:
        self._asked: OrderedDict[str, Asked] = OrderedDict()
        self._stored = {key.key: key for key in stored}

    def get(self, key: str | None) -> Asked | None:
        return None if key is None else self._asked.get(key)

    def take_stored(self, key: str | None) -> Key | None:
        """Where the log has it, if it has it and nobody has come with it since."""
        return None if key is None else self._stored.pop(key, None)

    def remember(self, key: str | None, asked: Asked) -> None:
        if key is not None:
            self._stored.pop(key, None)
            self._asked[key] = asked
            if len(self._asked) > KEYS_MAX:
                self._asked.popitem(last=False)

    def forget(self, turn: Turn) -> None:
        """It came to nothing: whoever comes with its key again makes a new ask."""
        for key in [key for key, (known, _) in self._asked.items() if known is turn]:
            del self._asked[key]
