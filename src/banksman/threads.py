"""Banksman for programs that have threads and no loop: the same names, blocking, to be called from any thread.

    with threads.Host() as host:
        session = host.open("claude")
        print(session.ask_and_wait("Why is CI red?", timeout=600).text)

`banksman.runtime.blocking_api` tells what holds on close, Ctrl-C, timeouts, callbacks and forks. Values and errors are
those of `banksman`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from banksman import host
from banksman.runtime import blocking_api
from banksman.runtime.blocking import Reader
from banksman.runtime.blocking_api import Command, OutputReader, Session, Turn, execute, start

if TYPE_CHECKING:
    from banksman.sessions.registry import Permit

__all__ = ["Command", "Host", "OutputReader", "Reader", "Session", "Turn", "execute", "start"]


class Host(blocking_api.Host):
    """Owns sessions and commands, in a loop of its own: `with Host() as host`, or call `close()`. See `banksman.Host`.

    Not closed, it is closed when the program ends, after all its threads have ended.
    """

    def __init__(
        self,
        store: str | None = None,
        *,
        secrets: Sequence[str] = (),
        processes_max: int | None = None,
        starts_max: int | None = None,
        address: str = "",
        permit: Permit | None = None,
        finished_max: int = 256,
        finished_seconds_max: float = 3600.0,
        user_helper: Sequence[str] | None = None,
    ) -> None:
        inner = host.Host(
            store,
            secrets=secrets,
            processes_max=processes_max,
            starts_max=starts_max,
            address=address,
            permit=permit,
            finished_max=finished_max,
            finished_seconds_max=finished_seconds_max,
            user_helper=user_helper,
        )
        super().__init__(inner)
        self._host = inner

    def export(self, session: Session | str, path: str | os.PathLike[str]) -> None:
        """Write a session's whole history to a new file, as NDJSON: see `import_session`."""
        self._bridge.call(partial(self._host.export, _id(session), path))

    def import_session(self, path: str | os.PathLike[str], *, name: str | None = None) -> Session:
        """A session from such a file, under an id of its own; whole, or not at all."""
        return Session(self._bridge, self._bridge.call(partial(self._host.import_session, path, name=name)))

    def bundle(self, session: Session | str, path: str | os.PathLike[str], *, text: bool = True) -> None:
        """Write what was said both ways to a new file, without secrets, for a report of a bug."""
        self._bridge.call(partial(self._host.bundle, _id(session), path, text=text))


def _id(session: Session | str) -> str:
    return session if isinstance(session, str) else session.id
