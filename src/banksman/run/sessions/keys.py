"""Idempotency keys: whoever asks again with the same one gets the turn of the first time, also after a restart."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable

from banksman.core.keys import KEYS_MAX, UNUSED, Key
from banksman.core.turn import Phase
from banksman.run.sessions.turn import Turn

# A turn with its acceptance: whoever comes with its key hears of it what the first one hears.
Asked = tuple[Turn, asyncio.Future[None]]
# How many turns stay in memory although they are over. The outcomes of older ones are read from the log.
TURNS_MAX = 64


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
            self._let_go()
            if len(self._asked) > KEYS_MAX:
                self._asked.popitem(last=False)

    def _let_go(self) -> None:
        """Keep of the oldest turns only their places in the log. One that is not over stays, and all that came after
        it. One whose end the log may not have is put behind the others."""
        for _ in range(len(self._asked) - TURNS_MAX):
            key, (turn, _) = next(iter(self._asked.items()))
            if (stored := turn.stored_as(key)) is None:
                if turn.state != Phase.ENDED:
                    return
                self._asked.move_to_end(key)
                continue
            del self._asked[key]
            if stored.outcome not in UNUSED:
                self._stored[key] = stored
                if len(self._stored) > KEYS_MAX:
                    del self._stored[next(iter(self._stored))]

    def forget(self, turn: Turn) -> None:
        """It came to nothing: whoever comes with its key again makes a new ask."""
        for key in [key for key, (known, _) in self._asked.items() if known is turn]:
            del self._asked[key]
