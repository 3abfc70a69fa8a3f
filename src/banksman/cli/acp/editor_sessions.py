"""The sessions that one editor has open. All of them are known; of those that it does not use, not all are followed.

A session that is followed costs a thread here and a stream in the server. Editors open one for each conversation and
seldom close any. So only the last used ones are followed; another is followed again, from where it was left, as soon as
something is asked in it.
"""

from __future__ import annotations

import threading

from banksman.cli.acp.editor_session import Talk
from banksman.cli.acp.outcomes import bad_params
from banksman.core.wire.jsonrpc import Id

FOLLOWED_MAX = 64
# A session that is only known costs a few hundred bytes; an editor that opens more was never seen.
TALKS_MAX = 10_000


class Talks:
    def __init__(self) -> None:
        # For the table alone. A talk's own lock may be taken while it is held, and never the other way round.
        self._lock = threading.Lock()
        self._talks: dict[str, Talk] = {}

    def find(self, session: str) -> Talk:
        """Raises `Refusal` if the editor has not opened it."""
        with self._lock:
            talk = self._talks.get(session)
        if talk is None:
            raise bad_params(
                f"this editor has no session {session!r:.100} open", "session/load or session/resume opens one"
            )
        return talk

    def of_request(self, request: Id) -> Talk | None:
        """The one in which this request is a prompt that waits."""
        with self._lock:
            return next((talk for talk in self._talks.values() if talk.has(request)), None)

    def add(self, talk: Talk) -> None:
        """In the place of what the editor had of the same session. Raises `Refusal` if that is at work."""
        with self._lock:
            old = self._talks.get(talk.id)
            if old is not None and old.is_busy:
                raise bad_params("the session is at work for this editor", "wait for its prompts, or stop them")
            if old is None and len(self._talks) >= TALKS_MAX:
                raise bad_params(f"{TALKS_MAX} sessions are open", "close some, or start another editor")
            self._talks[talk.id] = talk
        if old is not None:
            old.rest()

    def remove(self, session: str) -> None:
        with self._lock:
            talk = self._talks.pop(session, None)
        if talk is not None:
            talk.rest()

    def follow(self, talk: Talk) -> None:
        """Follow it, and no more than there may be: the one that was not used for longest rests."""
        talk.follow()
        with self._lock:
            followed = [each for each in self._talks.values() if each.is_following]
            idle = [each for each in followed if each is not talk and not each.is_busy]
        if len(followed) > FOLLOWED_MAX and idle:
            min(idle, key=lambda each: each.used).rest()
