"""Requests to the owner of a session over NATS: request, confirmation, signs of life, answer.

Both ends are here: `ask_owner` of the caller, and `answer_for`, `leave` and `fall_silent` of the
owner. The owner starts nothing before the caller confirms that it still waits. A host that loses
its lease falls silent. A request is opaque bytes; `cluster/http/` has its content.

The owner of a session has one subscription for it. If no host has one, the server reports that
immediately (`NoOwner`). If an owner does not answer, nothing reports it, and the result is unknown
(`Unanswered`). An answer may take as long as a turn. So the owner signals now and then that it is
working, and a caller that gets no signal for a while stops waiting.

A request may be older than it looks: a connection that was down delivers, after its reconnect, the
messages that were sent into it. The caller has given up by then and has reported an unknown result.
So the owner starts nothing before the caller confirms that it still waits (`WANTED`). A request
without a waiting caller is never performed.

Each request runs in its own task: one may wait for the end of a turn, and the next may be the
interrupt that ends it. A host that loses its lease falls silent before it does anything else. Its
answers would be those of a former owner, so requests in progress are never answered.

The server processes a subscription after all messages sent before it, and before all messages sent
after it. The client's `flush` overtakes a subscription. So `answer_for` sends a request to itself
behind the subscription, and returns when that one is answered.
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

# Concurrent requests of all sessions. Most of them wait for the end of a turn and cost nothing. A
# request beyond the limit is refused immediately, and nothing is done.
QUESTIONS_MAX = 2048
# How long the blob of a large answer is kept for a caller that does not confirm it.
ANSWER_KEPT_SECONDS = 30.0
HEARD_SECONDS_MAX = 1.0
# The owner signals that it has a request, unless it has answered by then, and repeats that while it
# works. A caller that got no signal at all takes the owner for frozen. One that got a signal once,
# and then none, takes it for killed. Both limits are short, because another host may be the owner
# soon.
HAS_IT_SECONDS, HAS_IT_SECONDS_MAX = 0.25, 2.0
WORKING_SECONDS, QUIET_SECONDS_MAX = 1.0, 4.0
NO_RESPONDERS = "503"
YES, NO = b"yes", b"no"


@dataclass
class OutgoingOwnerRequest:
    """A request that this process sent.

    `answer`: None means that no host answers for the session. `quiet_until`: until when no signal
    of the owner is needed.
    """

    answer: asyncio.Future[bytes | None]
    quiet_until: float


class OwnerResponder:
    """The owner's side of one session's requests.

    `is_silent`: no request is answered, not even one in progress.
    """

    def __init__(self, answerer: Answerer) -> None:
        self.answerer = answerer
        self.tasks = OwnedTasks()
        self.wakeup: NatsSubscription | None = None
        self.is_heard = True
        self.is_silent = False


class ClusterOwnerRequests:
    """Requests to owners over NATS.

    `ensure`: creates the bucket of large payloads if it is missing.
    """

    def __init__(
        self, nats: Nats, prefix: str, ensure: Callable[[str], Awaitable[None]] | None = None
    ) -> None:
        self._nats = nats
        self._prefix = prefix
        self._large_payloads = LargePayloads(nats, prefix, ensure)
        self._answering: dict[str, OwnerResponder] = {}
        # Responders that accept no new request, and still have some in progress.
        self._left: set[OwnerResponder] = set()
        self._chores = OwnedTasks()
        self._echo: tuple[str, NatsSubscription] | None = None
        # The inbox of answers to this process's requests, each under a key.
        self._answers: tuple[str, NatsSubscription] | None = None
        self._asking: dict[str, OutgoingOwnerRequest] = {}
        self._is_closed = False

    def __repr__(self) -> str:
        count = len(self._answering)
        return f"<ClusterOwnerRequests answers for {count}, {self._questions()} questions>"

    def _subject(self, session: str) -> str:
        return f"{self._prefix}.cmd.{token(session)}"

    # -- the caller's side ------------------------------------------------------------------------
    async def ask_owner(self, session: str, data: bytes, *, timeout: float) -> bytes:
        """Send a request to the owner: see `OwnerRequests`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        try:
            async with asyncio.timeout_at(until):
                inbox = await self._hear_answers()
                question = await self._large_payloads.pack(data)
        except (TimeoutError, Unanswered) as exc:
            # The request was not sent, so nothing was done.
            raise Unreachable(
                f"cannot ask the owner of session {session}: {exc}", session=session
            ) from exc
        if not self._nats.is_up:
            raise Unreachable(
                f"cannot ask the owner of session {session}: the cluster is not connected",
                session=session,
            )
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
        """Wait for an answer while the owner shows signs of life, up to the deadline."""
        loop = asyncio.get_running_loop()
        while True:
            seconds = min(until, asking.quiet_until) - loop.time()
            await asyncio.wait((asking.answer,), timeout=max(0.0, seconds))
            if asking.answer.done():
                if asking.answer.result() is None:
                    raise NoOwner(f"no host answers for session {session}", session=session)
                return asking.answer.result() or b""
            if loop.time() >= min(until, asking.quiet_until):
                raise Unanswered(f"the owner of session {session} did not answer", session=session)

    async def _hear_answers(self) -> str:
        if self._answers is None:
            inbox = self._nats.inbox()
            wakeup = await self._nats.ring(f"{inbox}.*", self._on_answer)
            if self._answers is not None or self._is_closed:
                await wakeup.stop()  # A concurrent call was faster.
            else:
                self._answers = inbox, wakeup
        if self._answers is None:
            raise StoreError("the log is closed")
        return self._answers[0]

    def _on_answer(self, message: StreamMessage) -> None:
        asking = self._asking.get(message.subject.rpartition(".")[2])
        is_waiting = asking is not None and not asking.answer.done()
        # Confirm only while the caller waits. This runs in the event loop that also times the
        # request out, so the two cannot overlap.
        if message.data == WANTED:
            self._say(message.reply, YES if is_waiting else NO)
        if asking is None or asking.answer.done():
            return  # The caller has given up.
        if message.headers.get("Status") == NO_RESPONDERS:
            asking.answer.set_result(None)
        elif message.data in (WANTED, WORKING):
            asking.quiet_until = asyncio.get_running_loop().time() + QUIET_SECONDS_MAX
        else:
            asking.answer.set_result(message.data)

    # -- the owner's side -------------------------------------------------------------------------
    async def answer_for(self, session: str, answerer: Answerer) -> None:
        """Subscribe for the session. On return the servers know the subscription."""
        if self._is_closed:
            raise StoreError("the log is closed")
        before = self._answering.get(session)
        if before is not None:
            before.answerer = answerer
            return
        answering = self._answering[session] = OwnerResponder(answerer)
        try:
            wakeup = await self._nats.ring(
                self._subject(session), partial(self._on_question, answering)
            )
        except BaseException:
            if self._answering.get(session) is answering:
                del self._answering[session]
            raise
        if not answering.is_heard:
            await wakeup.stop()  # The session left during the await.
            return
        answering.wakeup = wakeup
        # Without an answer the connection is down, and the client subscribes again after its
        # reconnect.
        with suppress(Unreachable, NoOwner):
            await self._wait_heard()

    async def _wait_heard(self) -> None:
        """Wait until the servers have processed this connection's subscriptions."""
        if self._echo is None:
            subject = self._nats.inbox()
            wakeup = await self._nats.ring(subject, lambda asked: self._say(asked.reply, b""))
            if self._echo is not None or self._is_closed:
                await wakeup.stop()  # A concurrent call was faster.
            else:
                self._echo = subject, wakeup
        if self._echo is not None:
            await self._nats.ask(self._echo[0], b"", timeout=HEARD_SECONDS_MAX)

    def _on_question(self, answering: OwnerResponder, message: StreamMessage) -> None:
        if answering.is_silent or not message.reply:
            return
        if not answering.is_heard:
            # The server sent the request before it processed the unsubscribe. Refuse it: nothing
            # was done.
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
        """Ask the caller whether it still waits."""
        try:
            return await self._nats.ask(reply, WANTED, timeout=HAS_IT_SECONDS_MAX) == YES
        except (Unreachable, NoOwner):
            return False  # The caller is gone, or has given up.

    async def _say_working(self, answering: OwnerResponder, reply: str) -> None:
        """Signal now and then that a request is in progress."""
        seconds = HAS_IT_SECONDS
        while True:
            await asyncio.sleep(seconds)
            if answering.is_silent:
                return
            with suppress(StoreError):
                await self._nats.tell(reply, WORKING)
            seconds = WORKING_SECONDS

    async def _answer_it(self, answering: OwnerResponder, message: StreamMessage) -> None:
        """Perform a request and send its answer."""
        try:
            data = await self._large_payloads.unpack(message.data)
            answer = await self._large_payloads.pack(await answering.answerer(data))
        except Exception as exc:
            # The caller only learns that the result is unknown. The cause is logged here.
            log.exception("forwarded request failed (subject=%s)", message.subject)
            answer = FAILED + f"its owner failed: {type(exc).__name__}".encode()
        # No await lies between this check and the client's buffer. So a responder that fell silent
        # sends nothing.
        if not answering.is_silent:
            with suppress(StoreError):
                await self._nats.tell(message.reply, answer)
        if self._large_payloads.is_beside(answer):
            self._chores.start(self._drop_later(answer))

    async def _drop_later(self, answer: bytes) -> None:
        """Delete the blob of an answer later, in case the caller is gone and does not delete it."""
        try:
            await asyncio.sleep(ANSWER_KEPT_SECONDS)
        finally:
            await self._large_payloads.drop(answer)

    def _say(self, subject: str, data: bytes) -> None:
        """Send a message in the background."""

        async def say() -> None:
            with suppress(StoreError):
                await self._nats.tell(subject, data)

        self._chores.start(say())

    # -- leaving and falling silent ---------------------------------------------------------------
    async def leave(self, session: str) -> None:
        """Unsubscribe. Requests in progress are still answered."""
        answering = self._answering.pop(session, None)
        if answering is None:
            return
        answering.is_heard = False
        self._left = {other for other in self._left if len(other.tasks)} | {answering}
        if answering.wakeup is not None:
            await answering.wakeup.stop()

    def fall_silent_nowait(self, session: str | None = None) -> None:
        """Stop answering without waiting for the cancelled tasks."""
        if session is None:
            quiet = [*self._answering.values(), *self._left]
            self._answering.clear()
        else:
            answering = self._answering.pop(session, None)
            quiet = [] if answering is None else [answering]
        for answering in quiet:
            answering.is_heard = False
            # The flag comes before the cancellation: a task that is already past its last await
            # still checks the flag before it sends.
            answering.is_silent = True
            answering.tasks.cancel()
            # Keep it until its cancelled tasks have finished.
            self._left.add(answering)
            if answering.wakeup is not None:
                self._chores.start(answering.wakeup.stop())

    async def fall_silent(self, session: str | None = None) -> None:
        """Stop answering, and wait for the cancelled tasks."""
        self.fall_silent_nowait(session)
        silent = [answering for answering in self._left if answering.is_silent]
        for answering in silent:
            await answering.tasks.wait()
        self._left.difference_update(silent)

    async def close(self) -> None:
        """Fall silent and end all tasks and subscriptions."""
        self._is_closed = True
        await self.fall_silent()
        await self._chores.end()
        for wakeup in (self._echo, self._answers):
            if wakeup is not None:
                await wakeup[1].stop()
        self._echo = self._answers = None
