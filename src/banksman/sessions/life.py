"""Idempotency keys: whoever asks again with the same one gets the turn of the first time, also after a restart."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from banksman.core.session.facts import Begun
from banksman.core.session.history import Past
from banksman.core.session.outcome import KEYS_MAX, UNUSED, IdempotencyKey, Kind
from banksman.core.session.turn import Turn as Waiting
from banksman.core.session.turn import TurnPhase
from banksman.core.wire.framing import FRAME_BYTES_MAX
from banksman.core.wire.redaction import Redactor
from banksman.errors import NotOwner
from banksman.sessions.agent_process import Spawn
from banksman.sessions.callbacks import Callbacks
from banksman.sessions.counters import Counters, TurnTimes
from banksman.sessions.driver import Driver
from banksman.sessions.hooks import Hooks
from banksman.sessions.pool import Pool
from banksman.sessions.promises import Promises
from banksman.sessions.questions import OnQuestion, Questions
from banksman.sessions.tools import ToolServer
from banksman.sessions.turn import Home, Turn
from banksman.store.log import Log

if TYPE_CHECKING:
    pass

# A turn with its acceptance: whoever comes with its key hears of it what the first one hears.
Asked = tuple[Turn, asyncio.Future[None]]
# How many turns stay in memory although they are over. The outcomes of older ones are read from the log.
TURNS_MAX = 64


class KeyedTurns:
    """Of one session; `stored`: those that the log has from before."""

    def __init__(self, stored: Iterable[IdempotencyKey]) -> None:
        self._asked: OrderedDict[str, Asked] = OrderedDict()
        self._stored = {key.key: key for key in stored}

    def get(self, key: str | None) -> Asked | None:
        return None if key is None else self._asked.get(key)

    def take_stored(self, key: str | None) -> IdempotencyKey | None:
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
                if turn.state != TurnPhase.ENDED:
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


# A session's life under this host: from the claim to the release. What is here exists only while the session is ours.
#
# A session outlives it: it is in the store before and after, and can be read there by anybody.


class Life:
    def __init__(
        self,
        id: str,
        past: Past,
        *,
        epoch: int,
        store: Log,
        spawn: Spawn,
        on_question: OnQuestion | None = None,
        pool: Pool | None = None,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        redactor: Redactor | None = None,
    ) -> None:
        self.promises = promises = Promises()
        self.driver = Driver(
            id,
            past,
            epoch=epoch,
            store=store,
            spawn=spawn,
            listener=promises,
            pool=pool,
            frame_bytes_max=frame_bytes_max,
            redactor=redactor,
        )
        self.questions = promises.questions = Questions(self.driver, on_question)
        self.callbacks = promises.callbacks = Callbacks(self.driver, Hooks({}), ToolServer(()))
        self.keys = KeyedTurns(past.keys)
        # How many callers wait for a turn (id) to be accepted.
        self.callers: dict[str, int] = {}
        # It was taken from us: what is left of it here is only its end.
        self.is_lost = False

    def begin(self, session: Home) -> None:
        """Serve who waits in it since before it was ours: each is an ask like any other, accepted long ago."""
        state = self.driver.state
        for waiting in state.queue:
            for ask in waiting.asks if isinstance(waiting, Waiting) else ():
                # None has begun: what is said in it comes after all that is there now.
                turn = Turn(session, ask.id, state.head)
                accepted = self.promises.expect_turn(turn)
                self.promises.accept(ask.id)
                self.keys.remember(ask.key, (turn, accepted))
        self.driver.dispatch(Begun(self.driver.now()))

    def lose(self, error: NotOwner, kill_by: float) -> None:
        """It is not ours any more. Whoever waits in it is told; its processes come to their KILL by then."""
        self.is_lost = True
        self.driver.lose(error, kill_by)
        self.callbacks.lose(kill_by)

    @property
    def is_over(self) -> bool:
        return self.promises.finished.done()


# What went through the sessions of a host, those that are over included.
#
# Each session counts for itself, and what it counted goes with it when it is forgotten. A number that somebody follows
# for days must not fall because of that: so when a session ends here, its numbers are added to those of all that have
# ended before. Nothing is added up while it lives, and a frame costs no more for being counted.


class Totals:
    """For one loop. None of the sums ever falls."""

    def __init__(self) -> None:
        self._open: dict[Life, None] = {}
        self._counters: Counter[str] = Counter(dict.fromkeys(Counters.__slots__, 0))
        self._turns: Counter[str] = Counter({kind.value: 0 for kind in Kind})
        self._times = TurnTimes()

    def follow(self, life: Life) -> None:
        """Until its end, and what it had counted by then for ever."""
        self._open[life] = None
        life.promises.finished.add_done_callback(partial(self._end, life))

    def _end(self, life: Life, _: object) -> None:
        del self._open[life]
        self._counters.update(_counted(life))
        self._turns.update(life.promises.outcomes)
        self._times.update(life.driver.turn_times)

    def counters(self) -> Mapping[str, int]:
        """The fields of `Counters`, of all together."""
        total = self._counters.copy()
        for life in self._open:
            total.update(_counted(life))
        return total

    def turns(self) -> Mapping[str, int]:
        """How many asks ended, by the kind of their outcome."""
        total = self._turns.copy()
        for life in self._open:
            total.update(life.promises.outcomes)
        return total

    def times(self) -> TurnTimes:
        """How long asks have waited, and turns taken."""
        total = TurnTimes()
        for times in (self._times, *(life.driver.turn_times for life in self._open)):
            total.update(times)
        return total


def _counted(life: Life) -> dict[str, int]:
    counters = life.driver.counters
    return {name: getattr(counters, name) for name in counters.__slots__}
