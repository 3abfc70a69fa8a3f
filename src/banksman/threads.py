"""Banksman for programs that have threads and no loop: the same names, blocking, to be called from any thread.

    with threads.Host() as host:
        session = host.open("claude")
        print(session.ask_and_wait("Why is CI red?", timeout=600).text)

`banksman.run.threads` tells what holds on close, Ctrl-C, timeouts, callbacks and forks. Values and errors are those of
`banksman`.
"""

from __future__ import annotations

from banksman import host
from banksman.run import threads
from banksman.run.faces import Reader
from banksman.run.threads import Command, Session, Turn, execute

__all__ = ["Command", "Host", "Reader", "Session", "Turn", "execute"]


class Host(threads.Host):
    """Owns sessions and commands, in a loop of its own: `with Host() as host`, or call `close()`. See `banksman.Host`.

    Not closed, it is closed when the program ends, after all its threads have ended.
    """

    def __init__(
        self,
        store: str = "memory:",
        *,
        processes_max: int | None = None,
        starts_max: int | None = None,
        finished_max: int = 256,
        finished_seconds_max: float = 3600.0,
    ) -> None:
        super().__init__(
            host.Host(
                store,
                processes_max=processes_max,
                starts_max=starts_max,
                finished_max=finished_max,
                finished_seconds_max=finished_seconds_max,
            )
        )
