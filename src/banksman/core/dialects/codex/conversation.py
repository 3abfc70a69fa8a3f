"""State of the Codex protocol with one app-server process: turns, prompts and interrupts.

Lines that need memory are resolved here, and every frame to the agent starts here. `reader.py`
reads the lines that need no memory. `writer.py` and `client_requests.py` build the parameters.

**Ownership of a turn.** A prompt is a request (`turn/start`). Its reply names the turn of the
prompt: a new turn that is about to start, or the running turn, which the prompt has joined. The
order of this reply and the turn's notifications is not guaranteed. While a reply is pending, a turn
that starts has no known prompt. The reply or the prompt's own item resolves it. If the turn ends
first, its boundary is stored until then. A turn that no request of Banksman caused is the agent's
own turn.

**Steering.** A prompt during a running turn is added to it (`turn/steer`), on the condition that
the same turn is still running. If that turn is over or takes no prompts, the agent refuses. The
prompt then becomes an ordinary ask again.

**Interrupts** name their turn, so a late interrupt cannot stop another turn. An interrupt before
the start of the turn is stored and sent when the turn starts. An interrupt without an answer at the
end of its turn needs no answer.

**Threads.** A subagent has its own thread with the same notifications. They do not concern the turn
of this session. Requests of a subagent are answered like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from banksman.core.dialects.codex import client_requests, reader, writer
from banksman.core.dialects.codex.reader import EndedTurn, RunningTurn
from banksman.core.dialects.codex.writer import Begin, Converse, Initialize, Join, Purpose, Stop
from banksman.core.dialects.dialect import (
    DENIED,
    PLAIN,
    Decision,
    Prompt,
    ProtocolOutput,
    Setup,
    Verdict,
    is_aside,
)
from banksman.core.dialects.meaning import (
    Forgot,
    Meaning,
    NeedsConversation,
    Noise,
    PromptRefused,
    PromptTaken,
    Replied,
    Requested,
    RequestPurpose,
    RequestWithdrawn,
    TurnOpened,
    UsageReported,
)
from banksman.core.dialects.tokens import tokens_in
from banksman.core.wire import jsonrpc
from banksman.core.wire.jsonrpc import InvalidMessage, Message, Notification, RpcCall, RpcReply
from banksman.core.wire.partial_json import mapping, text
from banksman.core.wire.pending_requests import NO_ROOM, PendingRequests

_NO_REQUESTS: PendingRequests[Purpose] = PendingRequests(jsonrpc.BARE)
# Matches any turn: the reply did not name the prompt's turn, or not legibly.
_ANY = ""
# Number of ended turns known by id. An agent may repeat notifications about a turn after later
# turns.
ENDED_TURNS_MAX = 16


class CodexProtocolState(Struct, frozen=True):
    """Immutable state of the Codex protocol with one process. Implements `ProtocolState`.

    - `accepted`: pairs of turn id and prompt, for turns that have not started.
    - `over`: the last ended turn.
    - `ended`: ids of the turns that ended before `over`.
    - `stops`: interrupts that wait for their turn to start.
    - `wishes`: settings changed since the thread started.
    - `total`: token usage of the thread.
    - `changes`: the file changes that the agent proposes, with the id of their item.
    """

    setup: Setup = PLAIN
    exchange: PendingRequests[Purpose] = _NO_REQUESTS
    conversation: str | None = None
    running: RunningTurn | None = None
    accepted: tuple[tuple[str, str], ...] = ()
    over: EndedTurn | None = None
    ended: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    wishes: tuple[tuple[str, str], ...] = ()
    total: Mapping[str, Any] | None = None
    changes: tuple[str, Any] | None = None

    @property
    def recites(self) -> bool:
        """False. The reply that resumes the thread contains the history, without a replay."""
        return False

    @property
    def quiet_seconds(self) -> float:
        return 0.0

    def is_aside(self, line: bytes) -> bool:
        return is_aside(line, self.conversation, "threadId")

    # -- to the agent -----------------------------------------------------------------------------
    def handshake(self, request: str) -> ProtocolOutput:
        return self._call(Initialize(request), "initialize", writer.INITIALIZE)

    def hurry(self) -> ProtocolOutput:
        return ProtocolOutput(self)

    def prompt(self, ref: str, prompt: Prompt) -> ProtocolOutput:
        parts = writer.content(prompt)
        if not self.exchange.ours.has_room:
            is_added = self.running is not None or bool(self.accepted) or self._has_begun
            return ProtocolOutput(
                self,
                meanings=(PromptRefused(ref),)
                if is_added
                else EndedTurn.refused(NO_ROOM).told(ref),
            )
        if self.running is None:
            return self._begin(ref, parts)
        params = writer.steer(self.conversation or "", self.running.id, ref, parts)
        return self._call(Join(ref, self.running.id), "turn/steer", params)

    def interrupt(self, request: str) -> ProtocolOutput:
        if not self.exchange.ours.has_room:
            return self._told(Replied(request, error=NO_ROOM))
        if self.running is not None:
            return self._stop((request,), self.running.id)
        if self.accepted or self._has_begun:
            return ProtocolOutput(replace(self, stops=(*self.stops, request)))
        return self._told(Replied(request, error="no turn is running"))

    def setting(self, request: str, name: str, value: str) -> ProtocolOutput:
        """Store a setting. It is sent with the next turn and stays in effect."""
        if name == "permission_mode" and value not in writer.POLICIES:
            known = ", ".join(writer.POLICIES)
            return self._told(Replied(request, error=f"known modes: {known}"))
        kept = tuple(pair for pair in self.wishes if pair[0] != name)
        return replace(self, wishes=(*kept, (name, value)))._told(Replied(request))

    def answer(self, asked: Requested, decision: Decision) -> ProtocolOutput:
        return self._reply(asked, client_requests.answer(asked, decision))

    def rule(self, asked: Requested, verdict: Verdict | None) -> ProtocolOutput:
        # Codex does not ask before each tool. The rules answer the permissions that it does ask
        # for.
        return ProtocolOutput(self)

    def respond(self, asked: Requested, response: Mapping[str, Any]) -> ProtocolOutput:
        return self._reply(asked, dict(response))

    def refuse(self, asked: Requested, error: str) -> ProtocolOutput:
        if asked.wants is not RequestPurpose.UNKNOWN:
            return self.answer(asked, DENIED)
        exchange, frames = self.exchange.error(asked.request, jsonrpc.METHOD_NOT_FOUND, error)
        return ProtocolOutput(replace(self, exchange=exchange), frames)

    def cancel(self, asked: Requested) -> ProtocolOutput:
        if asked.wants is RequestPurpose.UNKNOWN:
            return self.refuse(asked, "cancelled")
        return self._reply(asked, client_requests.cancelled(asked))

    def _told(self, *meanings: Meaning) -> ProtocolOutput:
        return ProtocolOutput(self, meanings=meanings)

    def _call(self, purpose: Purpose, method: str, params: Mapping[str, Any]) -> ProtocolOutput:
        exchange, frame = self.exchange.call(purpose, method, params)
        return ProtocolOutput(replace(self, exchange=exchange), (frame,))

    def _begin(self, ref: str, parts: list[dict[str, Any]]) -> ProtocolOutput:
        begin = Begin(ref, is_added=bool(self.accepted) or self._has_begun)
        params = writer.turn(
            self.conversation or "", ref, parts, wishes=self.wishes, schema=self.setup.schema
        )
        return self._call(begin, "turn/start", params)

    def _stop(self, requests: tuple[str, ...], turn: str) -> ProtocolOutput:
        params = {"threadId": self.conversation or "", "turnId": turn}
        return self._call(Stop(requests, turn), "turn/interrupt", params)

    def _reply(self, asked: Requested, result: dict[str, Any]) -> ProtocolOutput:
        exchange, frames = self.exchange.reply(asked.request, result)
        return ProtocolOutput(replace(self, exchange=exchange), frames)

    # -- from the agent ---------------------------------------------------------------------------
    def hear(self, told: NeedsConversation) -> ProtocolOutput:
        """Resolve the messages of one line in order."""
        messages: tuple[Message, ...] = told.message
        output = ProtocolOutput(self)
        for message in messages:
            output = _then(output, partial(CodexProtocolState._heard, message=message))
        return output

    def _heard(self, message: Message) -> ProtocolOutput:
        match message:
            case RpcCall():
                return self._on_call(message)
            case RpcReply():
                return self._on_reply(message)
            case Notification():
                plain = None if reader.is_only_state(message) else reader.plain(message)
                output = self._on_notice(message)
                return (
                    output if plain is None else replace(output, meanings=(*output.meanings, plain))
                )
            case InvalidMessage():
                exchange, frames = self.exchange.reject(message)
                return ProtocolOutput(replace(self, exchange=exchange), frames, (Noise(),))

    def _on_call(self, call: RpcCall) -> ProtocolOutput:
        exchange, is_taken, frames = self.exchange.take(call)
        protocol = replace(self, exchange=exchange)
        if not is_taken:
            return ProtocolOutput(protocol, frames)
        asked = client_requests.requested(call)
        if call.is_cut:
            # The agent waits, so even a request this large needs an answer: a refusal.
            return protocol.refuse(asked, "the request is too large")
        if self.changes is not None and call.named.get("itemId") == self.changes[0]:
            asked = replace(asked, input={**asked.input, "changes": self.changes[1]})
        return protocol._told(asked)

    # -- replies ----------------------------------------------------------------------------------
    def _on_reply(self, reply: RpcReply) -> ProtocolOutput:
        if reply.id is None:
            # The line was too large to identify. It may have been the end of the turn, and no other
            # frame may ever report that end.
            return self._on_lost() if reply.is_cut else self._told(Noise())
        exchange, purpose = self.exchange.settle(reply.id)
        protocol = replace(self, exchange=exchange)
        match purpose:
            case None:
                # The reply is late, a duplicate, or an answer to nothing.
                return self._told(Noise())
            case Initialize(request=request):
                if reply.error is not None:
                    return protocol._told(Replied(request, error=str(reply.error)))
                method, params = writer.thread(self.setup)
                exchange, initialized = exchange.notice("initialized")
                output = replace(protocol, exchange=exchange)._call(
                    Converse(request), method, params
                )
                return replace(output, frames=(initialized, *output.frames))
            case Converse(request=request):
                return protocol._on_conversation(request, reply)
            case Begin():
                return protocol._on_begun(purpose, reply)
            case Join():
                return protocol._on_joined(purpose, reply)
            case Stop(requests=requests):
                error = None if reply.error is None else str(reply.error)
                return ProtocolOutput(
                    protocol, meanings=tuple(Replied(request, error=error) for request in requests)
                )

    def _on_conversation(self, request: str, reply: RpcReply) -> ProtocolOutput:
        if reply.error is not None:
            error = str(reply.error)
            is_unknown = reader.is_unknown(error, self.setup)
            return self._told(Forgot(error) if is_unknown else Replied(request, error=error))
        name = reader.conversation(reply, self.setup)
        if name is None:
            error = "the agent gave no id for the thread"
            return self._told(Replied(request, error=error))
        return replace(self, conversation=name)._told(Replied(request))

    def _on_begun(self, begin: Begin, reply: RpcReply) -> ProtocolOutput:
        if reply.error is None:
            output = self._placed(
                begin.ref, text(mapping(reply.named.get("turn")).get("id")) or _ANY
            )
        elif begin.is_added:
            output = self._told(PromptRefused(begin.ref))
        else:
            output = ProtocolOutput(
                self, meanings=EndedTurn.refused(str(reply.error)).told(begin.ref)
            )
        return _then(output, CodexProtocolState._told_own)

    def _on_joined(self, join: Join, reply: RpcReply) -> ProtocolOutput:
        if reply.error is not None:
            return self._told(PromptRefused(join.ref))
        return self._placed(join.ref, text(reply.named.get("turnId")) or join.turn)

    def _placed(self, ref: str, turn: str) -> ProtocolOutput:
        """Assign a prompt to its turn, which is running, has ended or has not started yet."""
        running, over = self.running, self.over
        if running is not None and running.id == turn:
            return self._named(ref)
        if over is not None and over.id == turn:
            if ref in over.refs:
                return ProtocolOutput(self)  # The item of the prompt has already reported it.
            opened = () if over.is_told else (self._turn_opened(ref),)
            return ProtocolOutput(
                replace(self, over=over.named(ref)), meanings=(*opened, *over.told(ref))
            )
        return replace(self, accepted=(*self.accepted, (turn, ref)))._told(PromptTaken(ref))

    def _named(self, ref: str) -> ProtocolOutput:
        """Assign a prompt to the running turn."""
        running = self.running
        assert running is not None
        if ref in running.refs:
            return ProtocolOutput(self)
        protocol = replace(self, running=running.named(ref))
        if running.refs:
            return protocol._told(PromptTaken(ref))
        return protocol._told(self._turn_opened(ref))

    def _turn_opened(self, *refs: str) -> TurnOpened:
        return TurnOpened(refs, conversation=self.conversation, can_interrupt=True)

    def _told_own(self) -> ProtocolOutput:
        """Report unassigned turns as the agent's own, once no reply about a turn is pending."""
        if self._has_begun:
            return ProtocolOutput(self)
        protocol = self
        meanings: list[Meaning] = []
        opened = self._turn_opened()
        if self.over is not None and not self.over.is_told:
            meanings += (opened, self.over.boundary())
            protocol = replace(protocol, over=replace(self.over, is_told=True))
        if self.running is not None and not self.running.is_told:
            meanings.append(opened)
            protocol = replace(protocol, running=replace(self.running, is_told=True))
        if self.running is None and not self.accepted and self.stops:
            meanings += (Replied(request, error="no turn is running") for request in self.stops)
            protocol = replace(protocol, stops=())
        return ProtocolOutput(protocol, meanings=tuple(meanings))

    @property
    def _has_begun(self) -> bool:
        """Whether a prompt that opens a turn is pending, and its turn is unknown."""
        return any(isinstance(purpose, Begin) for _, purpose in self.exchange.ours.open)

    # -- notifications ----------------------------------------------------------------------------
    def _on_notice(self, notice: Notification) -> ProtocolOutput:
        params = notice.named
        if notice.method == reader.RESOLVED:
            return self._on_resolved(jsonrpc.as_id(params.get("requestId")))
        if params.get("threadId", self.conversation) != self.conversation:
            return ProtocolOutput(self)
        running = self.running
        match notice.method:
            case reader.TURN_STARTED:
                turn = text(mapping(params.get("turn")).get("id"))
                return ProtocolOutput(self) if turn is None else self._on_started(turn)
            case reader.TURN_COMPLETED:
                return self._on_completed(mapping(params.get("turn")), is_cut=notice.is_cut)
            case reader.TOKEN_USAGE:
                usage = mapping(params.get("tokenUsage"))
                total, last = mapping(usage.get("total")), mapping(usage.get("last"))
                protocol = replace(self, total=total or self.total)
                if running is None:
                    return ProtocolOutput(protocol)
                running = running.counted(total, last)
                report = UsageReported(running.id, tokens_in(running.usage))
                return replace(protocol, running=running)._told(report)
            case reader.ERROR if running is not None:
                message = text(mapping(params.get("error")).get("message"))
                return ProtocolOutput(
                    replace(self, running=replace(running, error=message or running.error))
                )
            case "item/started" | "item/completed":
                return self._on_item(
                    notice.method, text(params.get("turnId")), mapping(params.get("item"))
                )
            case _:
                return ProtocolOutput(self)

    def _on_started(self, turn: str) -> ProtocolOutput:
        output = ProtocolOutput(self)
        if self._has_ended(turn):
            return self._told(Noise())
        if self.running is not None:
            if self.running.id == turn:
                return output
            # Codex runs one turn at a time. A new turn proves that the other is over, even without
            # its boundary.
            output = self._ended(EndedTurn.lost(self.running.id, "the agent began another turn"))
        return _then(output, lambda protocol: protocol._opened(turn))

    def _opened(self, turn: str) -> ProtocolOutput:
        refs = tuple(ref for id, ref in self.accepted if id in (turn, _ANY))
        is_told = bool(refs) or not self._has_begun
        running = RunningTurn(turn, refs=refs, is_told=is_told, before=self.total)
        accepted = tuple(pair for pair in self.accepted if pair[1] not in refs)
        # An interrupt that arrived before the turn names it now, and is sent below.
        protocol = replace(self, running=running, accepted=accepted, stops=())
        opened = self._turn_opened(*refs)
        output = ProtocolOutput(protocol, meanings=(opened,) if is_told else ())
        if self.stops:
            output = _then(output, lambda protocol: protocol._stop(self.stops, turn))
        return output

    def _on_completed(self, turn: dict[str, Any], *, is_cut: bool) -> ProtocolOutput:
        id = text(turn.get("id"))
        running = self.running
        if id is None or (running is not None and running.id == id):
            if running is None:
                return self._told(Noise())
            return self._ended(running.over(turn, self.conversation, self.setup, is_cut=is_cut))
        if self._has_ended(id):
            return self._told(Noise())  # A duplicate.
        # The start of this turn was lost or unreadable.
        output = self._on_started(id)
        return _then(output, lambda protocol: protocol._on_completed(turn, is_cut=is_cut))

    def _has_ended(self, turn: str) -> bool:
        return turn in self.ended or (self.over is not None and self.over.id == turn)

    def _on_lost(self) -> ProtocolOutput:
        if self.running is not None:
            return self._ended(EndedTurn.lost(self.running.id, "frame_too_large"))
        if not self.accepted:
            return self._told(Noise())
        # The lost line contained the start of the turn, or more of it.
        running = RunningTurn(_ANY, refs=tuple(ref for _, ref in self.accepted), is_told=True)
        return replace(self, running=running, accepted=())._ended(
            EndedTurn.lost(_ANY, "frame_too_large")
        )

    def _ended(self, over: EndedTurn) -> ProtocolOutput:
        """End the running turn with this result."""
        running = self.running
        assert running is not None
        over = replace(over, refs=running.refs, is_told=running.is_told)
        meanings: tuple[Meaning, ...] = over.told(*running.refs) if running.is_told else ()
        # Drop the pending requests about this turn, because their replies are irrelevant now. The
        # turn of each prompt is known, and an interrupt has nothing left to stop.
        ours, needless = self.exchange.ours.without(
            lambda purpose: writer.is_settled(purpose, over.id, over.refs)
        )
        error = "the turn ended before the agent answered the request"
        for stop in needless:
            meanings += tuple(
                Replied(request, error=error)
                for request in (stop.requests if isinstance(stop, Stop) else ())
            )
        before = () if self.over is None else (self.over.id,)
        protocol = replace(
            self,
            running=None,
            over=over,
            ended=(*self.ended, *before)[-ENDED_TURNS_MAX:],
            exchange=replace(self.exchange, ours=ours),
            changes=None,
        )
        return ProtocolOutput(protocol, meanings=meanings)

    def _on_item(self, method: str, turn: str | None, item: dict[str, Any]) -> ProtocolOutput:
        running = self.running
        if running is None or turn != running.id:
            return ProtocolOutput(self)
        match item.get("type"):
            case "userMessage" if isinstance(ref := item.get("clientId"), str):
                return self._named(ref) if self._is_sent(ref) else ProtocolOutput(self)
            case "agentMessage" if method == "item/completed":
                return ProtocolOutput(
                    replace(self, running=replace(running, text=text(item.get("text"))))
                )
            case "fileChange" if method == "item/started" and isinstance(item.get("id"), str):
                return ProtocolOutput(replace(self, changes=(item["id"], item.get("changes"))))
            case _:
                return ProtocolOutput(self)

    def _is_sent(self, ref: str) -> bool:
        """Return whether this is a pending prompt whose turn is unknown."""
        return any(
            isinstance(purpose, Begin | Join) and purpose.ref == ref
            for _, purpose in self.exchange.ours.open
        )

    def _on_resolved(self, id: jsonrpc.Id | None) -> ProtocolOutput:
        """Close a request of the agent. The agent also sends this after it got an answer."""
        if id is None:
            return self._told(Noise())
        exchange, was_open = self.exchange.close(id)
        withdrawn = (RequestWithdrawn(jsonrpc.id_text(id)),) if was_open else ()
        return ProtocolOutput(replace(self, exchange=exchange), meanings=withdrawn)


def _then(
    output: ProtocolOutput, say: Callable[[CodexProtocolState], ProtocolOutput]
) -> ProtocolOutput:
    """Apply a further step and append its frames and meanings."""
    assert isinstance(output.protocol, CodexProtocolState)
    more = say(output.protocol)
    return ProtocolOutput(
        more.protocol, (*output.frames, *more.frames), (*output.meanings, *more.meanings)
    )
