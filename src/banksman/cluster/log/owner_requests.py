"""How the owner of a session is asked, by whoever: a question to the session's subject, and the answer of who hears it.

Whoever owns a session has one subscription for it. That nobody has is told by the server at once (`NoOwner`), and that
somebody has it and does not answer is told by nobody: then it is unknown what was done (`Unanswered`). An answer may
take as long as a turn does, so who is at it says so now and then, and who hears nothing for a while waits no longer.

A question may be older than it looks: a connection that was away brings, when it is back, what was sent into it.
Whoever asked has given up by then, has said so, and perhaps something else is going on. So nothing is begun before who
asked has said that it still waits (`WANTED`); what nobody waits for was never done.

Each question is answered by a task of its own: one may wait for the end of a turn, and the next be the interrupt that
ends it. Whoever loses its lease falls silent before anything else. Its answers would be those of an owner that it is
not any more, so what was asked and is not answered yet never is.

A subscription is heard of by the server behind all that was sent before it, and before all that is sent after it; the
client's own `flush` overtakes it. So `answer_for` returns when a question of ours to ourselves, sent behind it, is
answered.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from banksman.cluster.interfaces import Answerer
from banksman.cluster.jetstream import StreamMessage
from banksman.cluster.log.message_codec import FAILED, REFUSED, WANTED, WORKING, LargePayloads
from banksman.cluster.log.streams import token
from banksman.cluster.nats import Nats, NatsSubscription
from banksman.errors import NoOwner, StoreError, Unanswered, Unreachable
from banksman.tasks import OwnedTasks

log = logging.getLogger("banksman")

# Questions that are being answered at a time, all sessions together. Most of them wait for the end of a turn, and cost
# nothing; whoever comes later is told at once that nothing was done.
QUESTIONS_MAX = 2048
# How long a large answer lies there for who asked, if it does not say that it has it.
ANSWER_KEPT_SECONDS = 30.0
HEARD_SECONDS_MAX = 1.0
# Whoever has a question says so, unless it has answered by then, and again and again as long as it is at it. Who has
# heard nothing at all for so long believes that the owner is frozen; and who heard of it once, that it was killed with
# the question in its hands. Both are soon seen, for another may be the owner by then.
HAS_IT_SECONDS, HAS_IT_SECONDS_MAX = 0.25, 2.0
WORKING_SECONDS, QUIET_SECONDS_MAX = 1.0, 4.0
NO_RESPONDERS = "503"
YES, NO = b"yes", b"no"


@dataclass
class OutgoingOwnerRequest:
    """A question of ours. `answer` None: nobody hears it. `quiet_until`: so long nothing needs to be heard of it."""

    answer: asyncio.Future[bytes | None]
    quiet_until: float


class OwnerResponder:
    """One session's answers. `is_silent`: nothing that is asked, or was, is answered any more."""

    def __init__(self, answerer: Answerer) -> None:
        self.answerer = answerer
        self.tasks = OwnedTasks()
        self.wakeup: NatsSubscription | None = None
        self.is_heard = True
        self.is_silent = False


class ClusterOwnerRequests:
    """`ensure` makes the bucket for what is large, if it is not there yet."""

    def __init__(self, nats: Nats, prefix: str, ensure: Callable[[str], Awaitable[None]] | None = None) -> None:
        self._nats = nats
        self._prefix = prefix
        self._large_payloads = LargePayloads(nats, prefix, ensure)
        self._answering: dict[str, OwnerResponder] = {}
        # Those that hear nothing new, and still have something to answer.
        self._left: set[OwnerResponder] = set()
        self._chores = OwnedTasks()
        self._echo: tuple[str, NatsSubscription] | None = None
        # Where answers to our questions come in, each under a key.
        self._answers: tuple[str, NatsSubscription] | None = None
        self._asking: dict[str, OutgoingOwnerRequest] = {}
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<ClusterBus answers for {len(self._answering)}, {self._questions()} questions>"

    def _subject(self, session: str) -> str:
        return f"{self._prefix}.cmd.{token(session)}"

    # -- asking ------------------------------------------------------------------------------------------------------
    async def ask_owner(self, session: str, data: bytes, *, timeout: float) -> bytes:
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        try:
            async with asyncio.timeout_at(until):
                inbox = await self._hear_answers()
                question = await self._large_payloads.pack(data)
        except (TimeoutError, Unanswered) as exc:
            # Not even the question is out.
            raise Unreachable(f"the owner of session {session} could not be asked: {exc}", session=session) from exc
        if not self._nats.is_up:
            raise Unreachable(f"the owner of session {session} cannot be asked: the cluster is away", session=session)
        asking = OutgoingOwnerRequest(loop.create_future(), loop.time() + HAS_IT_SECONDS_MAX)
        key = os.urandom(8).hex()
        self._asking[key] = asking
        try:
            await self._nats.tell(self._subject(session), question, reply=f"{inbox}.{key}")
            answer = await self._wait_answer(session, asking, until)
            try:
                return await self._large_payloads.unpack(answer)
            finally:
                if self._large_payloads.is_beside(answer):
                    self._chores.start(self._large_payloads.drop(answer))
        finally:
            del self._asking[key]
            if self._large_payloads.is_beside(question):
                self._chores.start(self._large_payloads.drop(question))

    async def _wait_answer(self, session: str, asking: OutgoingOwnerRequest, until: float) -> bytes:
        loop = asyncio.get_running_loop()
        while True:
            seconds = min(until, asking.quiet_until) - loop.time()
            await asyncio.wait((asking.answer,), timeout=max(0.0, seconds))
            if asking.answer.done():
                if asking.answer.result() is None:
                    raise NoOwner(f"nobody answers for session {session}", session=session)
                return asking.answer.result() or b""
            if loop.time() >= min(until, asking.quiet_until):
                raise Unanswered(f"the owner of session {session} did not answer", session=session)

    async def _hear_answers(self) -> str:
        if self._answers is None:
            inbox = self._nats.inbox()
            wakeup = await self._nats.ring(f"{inbox}.*", self._on_answer)
            if self._answers is not None or self._is_closed:
                await wakeup.stop()  # Another was faster.
            else:
                self._answers = inbox, wakeup
        if self._answers is None:
            raise StoreError("the log is closed")
        return self._answers[0]

    def _on_answer(self, message: StreamMessage) -> None:
        asking = self._asking.get(message.subject.rpartition(".")[2])
        is_waiting = asking is not None and not asking.answer.done()
        if message.data == WANTED:
            self._say(message.reply, YES if is_waiting else NO)
        if asking is None or asking.answer.done():
            return  # Too late.
        if message.headers.get("Status") == NO_RESPONDERS:
            asking.answer.set_result(None)
        elif message.data in (WANTED, WORKING):
            asking.quiet_until = asyncio.get_running_loop().time() + QUIET_SECONDS_MAX
        else:
            asking.answer.set_result(message.data)

    # -- answering ---------------------------------------------------------------------------------------------------
    async def answer_for(self, session: str, answerer: Answerer) -> None:
        if self._is_closed:
            raise StoreError("the log is closed")
        before = self._answering.get(session)
        if before is not None:
            before.answerer = answerer
            return
        answering = self._answering[session] = OwnerResponder(answerer)
        try:
            wakeup = await self._nats.ring(self._subject(session), partial(self._on_question, answering))
        except BaseException:
            if self._answering.get(session) is answering:
                del self._answering[session]
            raise
        if not answering.is_heard:
            await wakeup.stop()  # Told otherwise meanwhile.
            return
        answering.wakeup = wakeup
        # Without an answer the connection is down, and the client subscribes again when it is back.
        with suppress(Unreachable, NoOwner):
            await self._wait_heard()

    async def _wait_heard(self) -> None:
        if self._echo is None:
            subject = self._nats.inbox()
            wakeup = await self._nats.ring(subject, lambda asked: self._say(asked.reply, b""))
            if self._echo is not None or self._is_closed:
                await wakeup.stop()  # Another was faster.
            else:
                self._echo = subject, wakeup
        if self._echo is not None:
            await self._nats.ask(self._echo[0], b"", timeout=HEARD_SECONDS_MAX)

    def _on_question(self, answering: OwnerResponder, message: StreamMessage) -> None:
        if answering.is_silent or not message.reply:
            return
        if not answering.is_heard:
            # It left the server before we left.
            self._say(message.reply, REFUSED + b"the session has just left its host")
        elif self._questions() >= QUESTIONS_MAX:
            self._say(message.reply, REFUSED + b"its owner has too many questions to answer")
        else:
            answering.tasks.start(self._answer(answering, message))

    def _questions(self) -> int:
        return sum(len(each.tasks) for each in (*self._answering.values(), *self._left))

    async def _answer(self, answering: OwnerResponder, message: StreamMessage) -> None:
        if not await self._is_wanted(message.reply):
            return
        working = self._chores.start(self._say_working(answering, message.reply))
        try:
            await self._answer_it(answering, message)
        finally:
            working.cancel()

    async def _is_wanted(self, reply: str) -> bool:
        try:
            return await self._nats.ask(reply, WANTED, timeout=HAS_IT_SECONDS_MAX) == YES
        except (Unreachable, NoOwner):
            return False  # Who asked is gone, or so far away that it has given up.

    async def _say_working(self, answering: OwnerResponder, reply: str) -> None:
        seconds = HAS_IT_SECONDS
        while True:
            await asyncio.sleep(seconds)
            if answering.is_silent:
                return
            with suppress(StoreError):
                await self._nats.tell(reply, WORKING)
            seconds = WORKING_SECONDS

    async def _answer_it(self, answering: OwnerResponder, message: StreamMessage) -> None:
        try:
            data = await self._large_payloads.unpack(message.data)
            answer = await self._large_payloads.pack(await answering.answerer(data))
        except Exception as exc:
            # Whoever asked learns no more than that it does not know. What is wrong is said here.
            log.exception("! a question to a session's owner could not be answered: %s", message.subject)
            answer = FAILED + f"its owner could not answer: {type(exc).__name__}".encode()
        # From here to the client's buffer nothing is waited for: who fell silent has said nothing.
        if not answering.is_silent:
            with suppress(StoreError):
                await self._nats.tell(message.reply, answer)
        if self._large_payloads.is_beside(answer):
            self._chores.start(self._drop_later(answer))

    async def _drop_later(self, answer: bytes) -> None:
        """Whoever asked may be gone, and then nobody else does."""
        try:
            await asyncio.sleep(ANSWER_KEPT_SECONDS)
        finally:
            await self._large_payloads.drop(answer)

    def _say(self, subject: str, data: bytes) -> None:
        async def say() -> None:
            with suppress(StoreError):
                await self._nats.tell(subject, data)

        self._chores.start(say())

    # -- silence -----------------------------------------------------------------------------------------------------
    async def leave(self, session: str) -> None:
        answering = self._answering.pop(session, None)
        if answering is None:
            return
        answering.is_heard = False
        self._left = {other for other in self._left if len(other.tasks)} | {answering}
        if answering.wakeup is not None:
            await answering.wakeup.stop()

    def fall_silent_nowait(self, session: str | None = None) -> None:
        if session is None:
            quiet = [*self._answering.values(), *self._left]
            self._answering.clear()
        else:
            answering = self._answering.pop(session, None)
            quiet = [] if answering is None else [answering]
        for answering in quiet:
            answering.is_heard = False
            answering.is_silent = True
            answering.tasks.cancel()
            # Kept until its tasks are over: they are still ours.
            self._left.add(answering)
            if answering.wakeup is not None:
                self._chores.start(answering.wakeup.stop())

    async def fall_silent(self, session: str | None = None) -> None:
        self.fall_silent_nowait(session)
        silent = [answering for answering in self._left if answering.is_silent]
        for answering in silent:
            await answering.tasks.wait()
        self._left.difference_update(silent)

    async def close(self) -> None:
        """Silent, and nothing of it is left."""
        self._is_closed = True
        await self.fall_silent()
        await self._chores.end()
        for wakeup in (self._echo, self._answers):
            if wakeup is not None:
                await wakeup[1].stop()
        self._echo = self._answers = None
