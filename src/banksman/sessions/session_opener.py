"""Open sessions by name, open them again with another spec, fork them, and delete them.

Two callers that open the same session at the same time get the same object: the second call waits
for the first.
"""

from __future__ import annotations

import functools
from contextlib import suppress

from banksman.errors import BanksmanError, Moving, NameTaken, UsageError
from banksman.sessions import held_session, spec_record
from banksman.sessions.arguments import checked_id, checked_name
from banksman.sessions.questions import OnQuestion
from banksman.sessions.registry import SessionRegistry
from banksman.sessions.session import Session
from banksman.sessions.session_spec import SessionSpec
from banksman.store.log_values import KnownSession


class SessionOpener(SessionRegistry):
    """Opens sessions for the callers of one host."""

    async def open(
        self,
        spec: SessionSpec,
        *,
        name: str | None,
        on_question: OnQuestion | None,
        id: str | None = None,
    ) -> Session:
        """Open a new session, or the known session of this name.

        `id`: the id of a new session. A session that is open here is returned, and the new spec
        applies from its next turn on. Any other known session is claimed and resumes where it was.
        """
        checked_name(name, self.redactor)
        self.check_survival(spec, on_question)
        async with self._at_work():
            if self._cleanup is not None:
                self._cleanup.begin()
            session = await self._open(spec, name, on_question, id)
        return await self._heard(session)

    async def _open(
        self, spec: SessionSpec, name: str | None, on_question: OnQuestion | None, id: str | None
    ) -> Session:
        if name is None:
            return await self._add(spec, None, on_question, id=id)
        session: Session | None = None
        async with self._gate.alone("name", name):
            while session is None:
                known = self.store.find(name)
                if known is not None:
                    session = await self._open_known(known, name, spec, on_question)
                    continue
                # Another host created the session first. The next pass opens it.
                with suppress(NameTaken):
                    session = await self._add(spec, name, on_question, id=id)
        return session

    async def _open_known(
        self, known: KnownSession, name: str, spec: SessionSpec, on_question: OnQuestion | None
    ) -> Session | None:
        """Open a known session; None if it was deleted or renamed meanwhile."""
        # A concurrent ask may claim the session by its id, so the session is locked too.
        async with self._gate.alone("session", known.id):
            again = self.store.find(name)
            if again is None or again.id != known.id:
                return None
            here = self._table.here(known.id)
            if here is not None and here.is_open:
                here.name = known.name
                return await self._open_again(here, spec, on_question)
            if here is not None and here.is_leaving and not here.is_closed:
                raise Moving(
                    "the session is leaving this host",
                    hint="try again in a moment",
                    session=known.id,
                )
            if here is not None and not here.is_closed:
                # The session is closing, or its ownership was lost. Its log is opened again after
                # the close.
                await here.close()
            try:
                return await self._reopen(known, spec, on_question)
            except UsageError:
                if self.store.find(known.id) is None:
                    return None  # Another host deleted the session at the same time.
                raise

    async def _open_again(
        self, session: Session, spec: SessionSpec, on_question: OnQuestion | None
    ) -> Session:
        spec_record.check_owner(spec, {"caller": session.opened_by}, session.id)
        startup = self._startups[session.id]
        spec = spec_record.with_containment(spec, startup.record)
        # Again: the containment that the session had may have something that no log keeps.
        self.check_survival(spec, on_question)
        self._share_budgets(spec)
        before = startup.next
        if spec.profile.name != before.profile.name:
            raise spec_record.of_another_agent(session.name, before.profile.name, session.id)
        if spec.forks or (spec.resumes and spec.resumes != session.first_conversation):
            message = f"the session {session.name!r} has another conversation"
            raise UsageError(message, hint="choose another name")
        # The spec decides the answers and the next process, here and on a host that takes over. So
        # a changed spec is recorded in the log.
        record = spec.record()
        opened = None if record == startup.record else spec_record.opening(spec)
        if opened is not None:
            session.check_log()
        drops = spec.settings_unlike(before)
        replaces = startup.replace(spec)
        # Set before the wait. A cancelled caller only stops waiting, and the log gets the record in
        # any case.
        logged, startup.record = startup.record, record
        try:
            await session.reconfigure(
                spec,
                replaces=replaces,
                drops=drops,
                opened=opened,
                on_question=on_question,
                # The new configuration decides whether a limit of the account concerns the session.
                on_applied=functools.partial(startup.accounts.renew, spec.accounts),
            )
        except BanksmanError:
            startup.record = logged
            raise
        return session

    async def fork(
        self, session: Session, name: str | None, on_question: OnQuestion | None
    ) -> Session:
        """Open a new session whose conversation is a copy of this session's conversation.

        If this session is itself a fork that has not started, the copy is made from its origin.
        """
        checked_name(name, self.redactor)
        startup = self._startups.get(session.id)
        if startup is None:
            hint = "open it, or use open(resume=…)"
            raise UsageError(f"cannot fork session {session.id}: it is not open here", hint=hint)
        startup.next.check_fork()
        conversation = session.origin
        if conversation is None:
            message = f"cannot fork session {session.id}: it has no conversation yet"
            raise UsageError(message, hint="ask first, or open another session")
        forked = startup.next.forked(conversation)
        try:
            async with self._at_work():
                added = await self._add(
                    forked, name, on_question or session.on_question, settings=session.settings
                )
        except NameTaken as exc:
            forked.close()
            raise UsageError(
                f"session {name!r} already exists", hint="choose another name"
            ) from exc
        return await self._heard(added)

    # -- forgetting -------------------------------------------------------------------------------
    async def delete(self, session: Session) -> None:
        """Delete a session with all of its history."""
        async with self._at_work(), self._gate.alone("session", session.id):
            here = self._table.here(session.id)
            if here is not None:
                await here.close()
            await self._hooks.close_deleted(self.store, session.id)
            await self.store.delete(session.id)
            # Behind the deletion, which refuses the session of another live host.
            await held_session.end(self.store.identity, session.id)
            self._table.forget(session.id)

    async def delete_remains(self, id: str) -> None:
        """Delete the remains of a session without a record.

        Its host died, or lost the store, during the deletion.
        """
        checked_id(id)
        async with self._at_work(), self._gate.alone("session", id):
            await self.store.delete(id)
