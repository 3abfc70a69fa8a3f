"""The sessions of a host: opened, opened again, forked, found, forgotten. They share one log and one pool."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

from banksman.core.session_facts import StartProcess
from banksman.errors import UsageError
from banksman.run.sessions.agent import AgentProcess, OnEvent
from banksman.run.sessions.opening import Opening
from banksman.run.sessions.pool import Pool
from banksman.run.sessions.questions import OnQuestion
from banksman.run.sessions.session import Session
from banksman.store.log import Log

# Closed sessions that can still be asked for. Each may hold its whole history in memory.
SESSIONS_KEPT_MAX = 32


class Startup:
    """How one session's processes are started: the one that runs, and the next one.

    They differ from the moment the session is opened again to the moment its process is replaced. Until then the hooks
    and tools that are called are those that the running one was told of: its names for them mean others in the next.
    """

    def __init__(self, opening: Opening) -> None:
        self.next = opening
        self.running: Opening | None = None
        self.session: Session | None = None

    def spawn(self, effect: StartProcess, on_event: OnEvent) -> AgentProcess:
        self.running = self.next
        self._call_its_own()
        return self.next.spawn(effect, on_event)

    def replace(self, opening: Opening) -> bool:
        """Whether the process that runs is not the one that is wanted now."""
        before, self.next = self.next, opening
        before.close()
        if self.running is None or self.running.fingerprint != opening.fingerprint:
            return self.running is not None
        self.running = opening
        self._call_its_own()
        return False

    def _call_its_own(self) -> None:
        assert self.session is not None
        assert self.running is not None
        self.session.call_these(self.running.hooks, self.running.server)


class Sessions:
    """For one loop. It closes nothing: that is the host's, and so is the log."""

    def __init__(self, store: Log, pool: Pool) -> None:
        self.store = store
        self._pool = pool
        # Oldest first; and how those that are open were opened.
        self._known: dict[str, Session] = {}
        self._startups: dict[str, Startup] = {}

    def open(self, opening: Opening, *, name: str | None, on_question: OnQuestion | None) -> Session:
        """A new one; or, under the name of one that is open, that one, which from its next turn on is as asked for."""
        known = None if name is None else self._named(name)
        if known is not None:
            return self._open_again(known, opening, on_question)
        return self._add(opening, name, on_question)

    def _add(
        self,
        opening: Opening,
        name: str | None,
        on_question: OnQuestion | None,
        settings: tuple[tuple[str, str], ...] = (),
    ) -> Session:
        id = f"s-{os.urandom(8).hex()}"
        startup = Startup(opening)
        startup.session = session = Session(
            id,
            replace(opening.state(), settings=settings),
            name=name,
            agent=opening.profile.name,
            store=self.store,
            spawn=startup.spawn,
            on_question=on_question,
            capabilities=opening.profile.capabilities,
            pool=self._pool,
            frame_bytes_max=opening.frame_bytes_max,
        )
        self._known[id] = session
        self._startups[id] = startup
        session.when_closed(partial(self._close_startup, id))
        self._forget()
        return session

    def _close_startup(self, id: str) -> None:
        self._startups.pop(id).next.close()

    def _open_again(self, session: Session, opening: Opening, on_question: OnQuestion | None) -> Session:
        startup = self._startups[session.id]
        before = startup.next
        if opening.profile.name != before.profile.name:
            hint = "another name, or close that one first"
            raise UsageError(f"the session {session.name!r} is one with {before.profile.name}", hint=hint)
        if opening.forks or (opening.resumes and opening.resumes != session.status().conversation):
            raise UsageError(f"the session {session.name!r} has another conversation", hint="another name")
        drops = opening.settings_unlike(before)
        session.reconfigure(opening, replaces=startup.replace(opening), drops=drops, on_question=on_question)
        return session

    def fork(self, session: Session, name: str | None, on_question: OnQuestion | None) -> Session:
        """Another session that begins as a copy of this one's conversation, or of the one that this is to be a copy
        of."""
        conversation = session.origin
        if conversation is None:
            raise UsageError("there is nothing to fork: nothing was said in it yet", hint="ask first, or open another")
        if name is not None and self._named(name) is not None:
            raise UsageError(f"there is a session {name!r} already", hint="another name")
        startup = self._startups.get(session.id)
        if startup is None:
            raise UsageError("a session that is closed cannot be forked", hint="open(resume=…, fork=True)")
        forked = startup.next.forked(conversation)
        return self._add(forked, name, on_question or session.on_question, settings=session.settings)

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
