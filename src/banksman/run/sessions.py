"""The sessions of a host: opened, opened again, forked, found, forgotten. They share one log and one pool."""

from __future__ import annotations

import os
from functools import partial

from banksman.errors import UsageError
from banksman.run.opening import Opening
from banksman.run.pool import Pool
from banksman.run.questions import OnQuestion
from banksman.run.session import Session
from banksman.store.log import Log

# Closed sessions that can still be asked for. Each may hold its whole history in memory.
SESSIONS_KEPT_MAX = 32


class Sessions:
    """For one loop. It closes nothing: that is the host's, and so is the log."""

    def __init__(self, store: Log, pool: Pool) -> None:
        self.store = store
        self._pool = pool
        # Oldest first; and how those that are open were opened.
        self._known: dict[str, Session] = {}
        self._openings: dict[str, Opening] = {}

    def open(self, opening: Opening, *, name: str | None, on_question: OnQuestion | None) -> Session:
        """A new one; or, under the name of one that is open, that one, which from its next turn on is as asked for."""
        known = None if name is None else self._named(name)
        if known is not None:
            return self._open_again(known, opening, on_question)
        return self._add(opening, name, on_question)

    def _add(self, opening: Opening, name: str | None, on_question: OnQuestion | None) -> Session:
        id = f"s-{os.urandom(8).hex()}"
        session = Session(
            id,
            opening.state(),
            name=name,
            agent=opening.profile.name,
            store=self.store,
            spawn=opening.spawn,
            on_question=on_question,
            hooks=opening.hooks,
            server=opening.server,
            capabilities=opening.profile.capabilities,
            pool=self._pool,
            frame_bytes_max=opening.frame_bytes_max,
        )
        self._known[id] = session
        self._openings[id] = opening
        session.when_closed(partial(self._close_opening, id))
        self._forget()
        return session

    def _close_opening(self, id: str) -> None:
        self._openings.pop(id).close()

    def _open_again(self, session: Session, opening: Opening, on_question: OnQuestion | None) -> Session:
        before = self._openings[session.id]
        if opening.profile.name != before.profile.name:
            hint = "another name, or close that one first"
            raise UsageError(f"the session {session.name!r} is one with {before.profile.name}", hint=hint)
        if opening.forks or (opening.resumes and opening.resumes != session.status().conversation):
            raise UsageError(f"the session {session.name!r} has another conversation", hint="another name")
        session.reconfigure(
            opening,
            replaces=opening.fingerprint != before.fingerprint,
            drops=opening.settings_unlike(before),
            on_question=on_question,
        )
        self._openings[session.id] = opening
        before.close()
        return session

    def fork(self, session: Session, name: str | None, on_question: OnQuestion | None) -> Session:
        """Another session that begins as a copy of this one's conversation."""
        conversation = session.status().conversation
        if conversation is None:
            raise UsageError("there is nothing to fork: nothing was said in it yet", hint="ask first, or open another")
        if name is not None and self._named(name) is not None:
            raise UsageError(f"there is a session {name!r} already", hint="another name")
        opening = self._openings.get(session.id)
        if opening is None:
            raise UsageError("a session that is closed cannot be forked", hint="open(resume=…, fork=True)")
        return self._add(opening.forked(conversation), name, on_question)

    def find(self, id_or_name: str) -> Session:
        """By its id or its name; of several that had the name, the one opened last."""
        for session in reversed(self._known.values()):
            if id_or_name in (session.id, session.name):
                return session
        raise UsageError(f"there is no session {id_or_name!r}", hint="see sessions()")

    def all(self) -> list[Session]:
        return list(self._known.values())

    def _named(self, name: str) -> Session | None:
        return next((known for known in self.all() if known.name == name and known.is_open), None)

    def _forget(self) -> None:
        closed = [session for session in self.all() if session.is_closed]
        for session in closed[: max(0, len(closed) - SESSIONS_KEPT_MAX)]:
            del self._known[session.id]
            if not self.store.is_durable:
                self.store.delete(session.id)
