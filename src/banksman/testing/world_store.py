"""Log that fails on demand, in virtual or real time.

Without faults it is a correct log and passes the tests of the log engines. Commits use the lane
`store`, so the explorer may delay them: behind an exit, a boundary, a second ask.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from banksman.core.session.event import Entry, Project
from banksman.errors import NotOwner, StoreError
from banksman.store.log_values import (
    READ_EVENTS_MAX,
    Done,
    MultiSessionPage,
    Page,
    ProjectOf,
    Snapshot,
)
from banksman.store.memory import SESSION_BYTES_MAX, MemoryLog
from banksman.testing.sim_loop import SimLoop

STORE = "store"


class Fault(enum.Enum):
    """Why an append is refused: a disk failure, or another writer."""

    FAILS = enum.auto()
    NOT_OWNER = enum.auto()


class WorldLog(MemoryLog):
    """In-memory log with faults.

    A test may change each setting while the log is in use.

    - `faults`: faults of the n-th append, counted from 1 over all sessions.
    - `is_broken`: every append fails. `is_unreadable`: every read fails.
    - `claims_failing`: number of the next claims and `advance` calls that fail.
    - `commit_seconds`: how long a commit takes.
    - `reads_late`: a reader gets its page a moment after the read, as with a page from another
      thread.
    - `refuses_at_claim`: a new claim of a session refuses the appends that are not answered yet, as
      an engine may do.
    """

    def __init__(
        self,
        *,
        faults: Mapping[int, Fault] | None = None,
        commit_seconds: float = 0.0,
        reads_late: bool = False,
        refuses_at_claim: bool = False,
        bytes_max: int = SESSION_BYTES_MAX,
    ) -> None:
        super().__init__(bytes_max=bytes_max)
        self.faults = dict(faults or {})
        self.commit_seconds = commit_seconds
        self.reads_late = reads_late
        self.refuses_at_claim = refuses_at_claim
        self.is_broken = False
        self.is_unreadable = False
        # A calm log commits in the order of the loop, so the explorer has nothing to reorder.
        self.is_calm = False
        self.appends = 0
        self.claims_failing = 0
        # Answers of appends that the last commit made durable and that are not delivered yet. A
        # claim must not refuse these.
        self._committed: tuple[Any, ...] = ()

    async def claim(
        self, session: str, *, name: str | None = None, agent: str | None = None
    ) -> int:
        if self._takes_failing_claim():
            raise StoreError("the world does not let it be claimed", session=session)
        if self.refuses_at_claim:
            self._refuse_unanswered(session)
        return await super().claim(session, name=name, agent=agent)

    def advance(self, session: str, epoch: int, done: Done) -> None:
        if not self._takes_failing_claim():
            super().advance(session, epoch, done)
            return

        def fail(_: StoreError | NotOwner | None) -> None:
            done(StoreError("the world does not let it advance", session=session))

        self._refuse(session, epoch, fail)

    def append(  # noqa: PLR0917  The signature is that of the protocol.
        self,
        session: str,
        epoch: int,
        expected_seq: int,
        at: float,
        entries: Sequence[Entry],
        done: Done,
        snapshot: bytes | None = None,
    ) -> None:
        self.appends += 1
        fault = Fault.FAILS if self.is_broken else self.faults.get(self.appends)
        if fault is None:
            super().append(session, epoch, expected_seq, at, entries, done, snapshot)
            return
        self._counters["failures"] += fault is Fault.FAILS

        def fail(error: StoreError | NotOwner | None) -> None:
            assert error is not None
            number = self.appends if fault is Fault.FAILS else 0
            done(
                StoreError("the world does not write it", session=session, append=number)
                if number
                else error
            )

        self._refuse(session, epoch, fail)

    async def read(
        self, session: str, after: int, limit: int = READ_EVENTS_MAX, project: Project | None = None
    ) -> Page:
        self._check_readable(session)
        page = await super().read(session, after, limit, project)
        if self.reads_late:
            await asyncio.sleep(0)
        return page

    async def wait_past(self, session: str, seq: int, *, is_known: bool = False) -> None:
        self._check_readable(session)
        await super().wait_past(session, seq, is_known=is_known)

    async def snapshot(self, session: str) -> Snapshot | None:
        self._check_readable(session)
        return await super().snapshot(session)

    async def read_many(
        self,
        after: str | None,
        limit: int = READ_EVENTS_MAX,
        *,
        sessions: Collection[str] | None = None,
        project_of: ProjectOf | None = None,
    ) -> MultiSessionPage:
        self._check_readable(None)
        page = await super().read_many(after, limit, sessions=sessions, project_of=project_of)
        if self.reads_late:
            await asyncio.sleep(0)
        return page

    async def wait_past_position(self, position: str) -> None:
        self._check_readable(None)
        await super().wait_past_position(position)

    def _takes_failing_claim(self) -> bool:
        self.claims_failing, is_failing = max(0, self.claims_failing - 1), self.claims_failing > 0
        return is_failing

    def _refuse(self, session: str, epoch: int, done: Done) -> None:
        # No seq is negative, so the log refuses this append in its place among the answers, and
        # with it the appends behind it.
        super().append(session, epoch, -1, 0.0, (), done)

    def _check_readable(self, session: str | None) -> None:
        if self.is_unreadable:
            raise StoreError("the world does not read it", session=session)

    def _refuse_unanswered(self, session: str) -> None:
        state = self._sessions.get(session)
        if state is None or state not in self._behind:
            return
        state.refuse_uncommitted()
        del self._behind[state]
        error = NotOwner("another writer has claimed the session", session=session)
        for index, answer in enumerate(self._answers):
            if (
                answer.session is state
                and answer.error is None
                and not any(answer is one for one in self._committed)
            ):
                self._answers[index] = answer._replace(error=error)

    def _commit(self) -> None:
        super()._commit()
        self._committed = tuple(self._answers)

    def _answer(self, answer: Any) -> None:
        self._answers.append(answer)
        if not self._is_flush_due:
            self._is_flush_due = True
            self._later(self._flush)

    def _later(self, flush: Callable[[], None]) -> None:
        if self.commit_seconds:
            self._loop.call_later(self.commit_seconds, flush)
        elif isinstance(self._loop, SimLoop) and not self.is_calm:
            self._loop.outside(flush, lane=STORE)
        else:
            self._loop.call_soon(flush)
