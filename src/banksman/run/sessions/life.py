"""A session's life under this host: from the claim to the release. What is here exists only while the session is ours.

A session outlives it: it is in the store before and after, and can be read there by anybody.
"""

from __future__ import annotations

from banksman.core.framing import FRAME_BYTES_MAX
from banksman.core.past import Past
from banksman.core.redaction import Redactor
from banksman.core.session_facts import Begun
from banksman.core.turn import Turn as Waiting
from banksman.errors import NotOwner
from banksman.run.sessions.agent import Spawn
from banksman.run.sessions.callbacks import Callbacks
from banksman.run.sessions.driver import Driver
from banksman.run.sessions.hooks import Hooks
from banksman.run.sessions.keys import Keys
from banksman.run.sessions.pool import Pool
from banksman.run.sessions.promises import Promises
from banksman.run.sessions.questions import OnQuestion, Questions
from banksman.run.sessions.tools import ToolServer
from banksman.run.sessions.turn import Home, Turn
from banksman.store.log import Log


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
        self.keys = Keys(past.keys)
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
