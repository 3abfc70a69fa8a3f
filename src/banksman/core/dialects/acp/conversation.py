"""State of the ACP protocol with one agent process: handshake, turns, settings and requests.

Lines that need memory are resolved here, and every frame to the agent starts here. `reader.py`
reads the lines that need no memory.

**Opening.** The first request is `initialize`. The second opens the conversation: a new one, or an
old one by `session/resume`, load or fork, as the agent can. Then the wanted model and mode are set.
Each step waits for the answer to the previous one, because agents do not accept requests that come
too early. If any step fails, the handshake fails.

**Reciting.** An agent that loads a conversation first replays all of it as new updates. By the
protocol the replay is over when the agent answers the load request. One agent answers after the
first line and continues the replay. A profile records this as `recites_late`, and an agent without
a known profile is assumed to do it. After the answer of this kind of agent, Banksman sends a
request that no agent knows. Updates before its refusal are history, and later updates are new. The
late agent replays concurrently with its other work, so this order is not certain. Therefore the
agent must also be silent for a moment. If an agent never answers an unknown request, `hurry` ends
the wait.

**Turn.** A turn is a prompt and its answer. The answer has the stop reason: see
`provider_errors.judged`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from banksman.core.dialects.acp import client_requests as answering
from banksman.core.dialects.acp import protocol_v1 as words
from banksman.core.dialects.acp import provider_errors
from banksman.core.dialects.acp import reader as reading
from banksman.core.dialects.acp import writer as content
from banksman.core.dialects.acp.updates import NOTHING_SAID, SaidInTurn
from banksman.core.dialects.acp.writer import Adjusted, Prompted, Purpose, Stage
from banksman.core.dialects.dialect import (
    Decision,
    Prompt,
    ProtocolOutput,
    Quirks,
    Setup,
    Verdict,
    is_aside,
)
from banksman.core.dialects.meaning import (
    Forgot,
    Meaning,
    NeedsConversation,
    Noise,
    ProviderFailure,
    Replied,
    Requested,
    RequestWithdrawn,
    Thought,
    TurnOver,
    UsageReported,
)
from banksman.core.dialects.tokens import NO_TOKENS, Tokens, tokens_in
from banksman.core.wire import jsonrpc
from banksman.core.wire.jsonrpc import InvalidMessage, Message, Notification, RpcCall, RpcReply
from banksman.core.wire.partial_json import mapping, text
from banksman.core.wire.pending_requests import NO_ROOM, PendingRequests
from banksman.errors import ErrorKind

# Seconds of silence after which the history counts as complete: while the answer to the fence
# request is missing, and after it.
_QUIET_SECONDS = {Stage.FENCING: 2.0, Stage.QUIETING: 0.3}
TOO_LARGE = "frame_too_large"
_NOISE = Noise()


_NO_REQUESTS: PendingRequests[Purpose] = PendingRequests()
# Updates that report current state rather than history.
_STATES = frozenset(("config_option_update", "current_mode_update"))


class AcpProtocolState(Struct, frozen=True):
    """Immutable state of the ACP protocol with one process. Implements `ProtocolState`."""

    setup: Setup
    quirks: Quirks
    stage: Stage = Stage.SILENT
    # The name of the handshake in progress.
    request: str = ""
    conversation: str | None = None
    agent: words.AcpAgentInfo = words.UNKNOWN_AGENT
    offers: words.Offers = words.NO_OFFERS
    # Settings that remain to be set before the handshake is done.
    wishes: tuple[tuple[str, str], ...] = ()
    exchange: PendingRequests[Purpose] = _NO_REQUESTS
    # Kinds of the tool calls of this turn, by call id. A permission request may omit the kind.
    tools: tuple[tuple[str, str], ...] = ()
    said: SaidInTurn = NOTHING_SAID
    # Cost of the conversation until now, if the agent reports it.
    spent: float | None = None
    # Tokens of the model calls of this turn, if the agent reports them. For `usage_is_total`: the
    # last total.
    counted: Tokens | None = None
    total: Tokens = NO_TOKENS

    @property
    def recites(self) -> bool:
        return self.stage in (Stage.LOADING, Stage.FENCING, Stage.QUIETING)

    @property
    def quiet_seconds(self) -> float:
        return _QUIET_SECONDS.get(self.stage, 0.0)

    def is_aside(self, line: bytes) -> bool:
        return is_aside(line, self.conversation, "sessionId")

    # -- to the agent -----------------------------------------------------------------------------
    def handshake(self, request: str) -> ProtocolOutput:
        asking = replace(self, request=request, stage=Stage.INITIALIZING)
        return asking._call(Stage.INITIALIZING, words.INITIALIZE, words.initialize(self.quirks))

    def hurry(self) -> ProtocolOutput:
        """Stop waiting for the end of the history, the only optional part of the handshake."""
        return self._adjust() if self.stage in _QUIET_SECONDS else ProtocolOutput(self)

    def prompt(self, ref: str, prompt: Prompt) -> ProtocolOutput:
        blocks = content.blocks(prompt)
        if self.stage is Stage.READY:
            fitted = content.fitted(blocks, self.agent)
            if isinstance(fitted, str):
                return self._told(TurnOver(refs=(ref,), is_error=True, error=fitted))
            blocks = fitted
        if not self.exchange.ours.has_room:
            return self._told(TurnOver(refs=(ref,), is_error=True, error=NO_ROOM))
        params = {"sessionId": self.conversation, "prompt": blocks}
        begun = replace(self, said=NOTHING_SAID, tools=(), counted=None)
        return begun._call(Prompted(ref), words.PROMPT, params)

    def interrupt(self, request: str) -> ProtocolOutput:
        del request  # A cancel is a notification: only the end of the turn answers it.
        if self.conversation is None:
            return ProtocolOutput(self)
        exchange, frame = self.exchange.notice(words.CANCEL, {"sessionId": self.conversation})
        return ProtocolOutput(
            replace(self, exchange=replace(exchange, ours=exchange.ours.changed(_cancelled))),
            (frame,),
        )

    def setting(self, request: str, name: str, value: str) -> ProtocolOutput:
        return self._set(request, name, value)

    def answer(self, asked: Requested, decision: Decision) -> ProtocolOutput:
        output = self._reply(asked, answering.decided(asked, decision))
        if not decision.interrupts:
            return output
        stopped = output.protocol.interrupt("")
        return ProtocolOutput(stopped.protocol, (*output.frames, *stopped.frames))

    def rule(self, asked: Requested, verdict: Verdict | None) -> ProtocolOutput:
        # ACP has no request for a ruling.
        return self.refuse(asked, "no rule" if verdict is None else verdict.value)

    def respond(self, asked: Requested, response: Mapping[str, Any]) -> ProtocolOutput:
        return self._reply(asked, dict(response))

    def refuse(self, asked: Requested, error: str) -> ProtocolOutput:
        return self._dismiss(asked, answering.error_code(asked), error)

    def cancel(self, asked: Requested) -> ProtocolOutput:
        return self._dismiss(asked, jsonrpc.REQUEST_CANCELLED, "cancelled")

    def _dismiss(self, asked: Requested, code: int, error: str) -> ProtocolOutput:
        dismissal = answering.dismissed(asked)
        if dismissal is not None:
            return self._reply(asked, dismissal)
        exchange, frames = self.exchange.error(asked.request, code, error)
        return ProtocolOutput(replace(self, exchange=exchange), frames)

    def _call(self, purpose: Purpose, method: str, params: Mapping[str, Any]) -> ProtocolOutput:
        exchange, frame = self.exchange.call(purpose, method, params)
        return ProtocolOutput(replace(self, exchange=exchange), (frame,))

    def _reply(self, asked: Requested, result: Any) -> ProtocolOutput:
        exchange, frames = self.exchange.reply(asked.request, result)
        return ProtocolOutput(replace(self, exchange=exchange), frames)

    # -- from the agent ---------------------------------------------------------------------------
    def hear(self, told: NeedsConversation) -> ProtocolOutput:
        """Resolve the messages of one line in order."""
        protocol = self
        frames: list[bytes] = []
        meanings: list[Meaning] = []
        messages: tuple[Message, ...] = told.message
        for message in messages:
            output = protocol._heard(message)
            assert isinstance(output.protocol, AcpProtocolState)
            protocol = output.protocol
            frames += output.frames
            meanings += output.meanings
        return ProtocolOutput(protocol, tuple(frames), tuple(meanings))

    def _heard(self, message: Message) -> ProtocolOutput:
        match message:
            case RpcReply():
                return self._hear_reply(message)
            case RpcCall():
                return self._hear_call(message)
            case Notification(method=reading.UPDATE):
                return self._hear_update(message)
            case Notification():
                return self._hear_notice(message)
            case InvalidMessage():
                exchange, frames = self.exchange.reject(message)
                return ProtocolOutput(replace(self, exchange=exchange), frames, (_NOISE,))

    def _told(self, *meanings: Meaning) -> ProtocolOutput:
        return ProtocolOutput(self, meanings=meanings)

    def _noise(self) -> ProtocolOutput:
        return self._told(_NOISE)

    # -- updates ----------------------------------------------------------------------------------
    def _hear_update(self, notice: Notification) -> ProtocolOutput:
        update = reading.update_of(notice)
        kind = update.get("sessionUpdate")
        if not isinstance(kind, str):
            return self._noise()
        if notice.named.get("sessionId") != (self.conversation or notice.named.get("sessionId")):
            # The update belongs to another conversation (a subagent's), not to this turn.
            return ProtocolOutput(self)
        if self.recites and not (self.stage in _QUIET_SECONDS and kind in _STATES):
            # The update is history. But current state may arrive as soon as the conversation is
            # open.
            return ProtocolOutput(self)
        protocol = replace(self, said=self.said.told(update)) if kind in reading.DEEDS else self
        match kind:
            case reading.THOUGHT:
                return protocol._told(Thought())
            case "tool_call" | "tool_call_update":
                tools = answering.with_tool(self.tools, update)
                return ProtocolOutput(
                    replace(protocol, tools=tools),
                    meanings=reading.tool_meanings(update, is_new=kind == "tool_call"),
                )
            case "config_option_update":
                return ProtocolOutput(replace(protocol, offers=words.offers(update, self.offers)))
            case "current_mode_update":
                mode = update.get("currentModeId")
                offers = (
                    self.offers.now("permission_mode", mode)
                    if isinstance(mode, str)
                    else self.offers
                )
                return ProtocolOutput(replace(protocol, offers=offers))
            case "usage_update":
                spent = words.spent(update)
                if spent is None:
                    return ProtocolOutput(protocol)
                return replace(protocol, spent=spent)._told(UsageReported(spent=spent))
            case reading.MESSAGE if (tokens := tokens_in(reading.usage_in(update))) is not None:
                counted = tokens if self.counted is None else self.counted.plus(tokens)
                return replace(protocol, counted=counted)._told(UsageReported(tokens=counted))
            case _:
                return ProtocolOutput(protocol)

    # -- requests of the agent --------------------------------------------------------------------
    def _hear_call(self, call: RpcCall) -> ProtocolOutput:
        exchange, is_taken, frames = self.exchange.take(call)
        taken = replace(self, exchange=exchange)
        if not is_taken:
            return ProtocolOutput(taken, frames) if frames else self._noise()
        request = answering.requested(call, self.quirks, dict(self.tools))
        if call.is_cut:
            # The agent waits, so even a request this large needs an answer: a refusal.
            return taken.refuse(request, "the request is too large")
        return taken._told(request)

    def _hear_notice(self, notice: Notification) -> ProtocolOutput:
        id = jsonrpc.withdrawn(notice)
        if id is None:
            return self._noise()
        request = jsonrpc.id_text(id)
        exchange, frames = self.exchange.error(request, jsonrpc.REQUEST_CANCELLED, "cancelled")
        if not frames:
            return self._noise()
        return ProtocolOutput(
            replace(self, exchange=exchange), frames, (RequestWithdrawn(request),)
        )

    # -- replies to Banksman's requests -----------------------------------------------------------
    def _hear_reply(self, reply: RpcReply) -> ProtocolOutput:
        id = reply.id
        if id is None:
            id = self._meant(reply)
        exchange, purpose = self.exchange.settle(id)
        if purpose is None:
            return self._noise()  # The reply is late, a duplicate, or an answer to nothing.
        protocol = replace(self, exchange=exchange)
        match purpose:
            case Prompted():
                return protocol._over(purpose, reply)
            case Adjusted():
                return protocol._hear_set(purpose, reply)
            case Stage.INITIALIZING:
                return protocol._hear_initialized(reply)
            case Stage.FENCING:
                # A late reply means nothing: `hurry` has already ended the wait.
                is_due = self.stage is Stage.FENCING
                return (
                    ProtocolOutput(replace(protocol, stage=Stage.QUIETING))
                    if is_due
                    else protocol._noise()
                )
            case _:
                return protocol._hear_opened(reply)

    def _meant(self, reply: RpcReply) -> int | None:
        """Return which request a reply without an id answers.

        A reply that was too long to keep may answer any open request. An error without an id
        reports a line that the agent could not parse. If the last written line is a prompt, the
        prompt gets no other answer.
        """
        waiting, last = self.exchange.ours.open, self.exchange.last
        prompts = [id for id, purpose in waiting if isinstance(purpose, Prompted)]
        if reply.is_cut:
            return prompts[-1] if prompts else next((id for id, _ in waiting), None)
        is_about_line = reply.error is not None and reply.error.code in (
            jsonrpc.PARSE_ERROR,
            jsonrpc.INVALID_REQUEST,
        )
        return last if is_about_line and last in prompts else None

    def _over(self, prompted: Prompted, reply: RpcReply) -> ProtocolOutput:
        """Return the boundary of a turn."""
        over = TurnOver(
            refs=(prompted.ref,),
            conversation=self.conversation,
            spent=self.spent,
            tokens=self.counted,
        )
        result = reply.named
        reason = text(result.get("stopReason"))
        if reply.error is not None:
            return self._told(
                provider_errors.failed(over, reply.error, is_cancelled=prompted.is_cancelled)
            )
        if reply.is_cut and reason is None:
            failed = ProviderFailure(ErrorKind.PROTOCOL)
            return self._told(replace(over, is_error=True, error=TOO_LARGE, failure=failed))
        usage = mapping(result.get("usage")) or words.usage_beside(result)
        protocol, tokens = self._counted(tokens_in(usage))
        over = replace(over, stop_reason=reason, usage=usage or None, tokens=tokens)
        return protocol._told(
            provider_errors.judged(
                over, self.said, is_cancelled=prompted.is_cancelled, quirks=self.quirks
            )
        )

    def _counted(self, tokens: Tokens | None) -> tuple[AcpProtocolState, Tokens | None]:
        """Return the tokens of this turn, from the report at its end or from its model calls."""
        if tokens is None:
            return self, self.counted
        if not self.quirks.usage_is_total:
            return self, tokens
        has_restarted = tokens.total < self.total.total
        turn = tokens if has_restarted else tokens.minus(self.total)
        return replace(self, total=tokens), turn

    # -- handshake --------------------------------------------------------------------------------
    def _hear_initialized(self, reply: RpcReply) -> ProtocolOutput:
        if reply.error is not None:
            return self._refused(words.failure_text(reply.error))
        agent = words.agent(reply.named)
        protocol = replace(self, agent=agent)
        fault = words.version_fault(reply.named, agent.name) or words.opening_fault(
            self.setup, agent
        )
        return (
            protocol._refused(fault)
            if fault is not None
            else protocol._open(words.way_in(self.setup, agent))
        )

    def _open(self, method: str | None) -> ProtocolOutput:
        if method is None and self.setup.forks:
            return self._refused(f"{self.agent.name} does not support forks of a conversation")
        if method is None:
            error = f"{self.agent.name} cannot resume a conversation of another process"
            return self._forgot(error)
        stage = Stage.LOADING if method == words.LOAD else Stage.OPENING
        return replace(self, stage=stage)._call(stage, method, words.opening(self.setup, method))

    def _hear_opened(self, reply: RpcReply) -> ProtocolOutput:
        if reply.error is not None:
            return self._not_opened(reply.error)
        # A reply to resume or load need not repeat the conversation's id.
        known = None if self.setup.forks else self.setup.conversation
        conversation = words.conversation(reply.named.get("sessionId")) or known
        if conversation is None:
            said = TOO_LARGE if reply.is_cut else "the agent gave no id for its new conversation"
            return self._refused(said)
        wishes = (("model", self.setup.model), ("permission_mode", self.setup.permission_mode))
        protocol = replace(
            self,
            conversation=conversation,
            offers=words.offers(reply.named, self.offers),
            wishes=tuple((name, value) for name, value in wishes if value is not None),
        )
        if self.stage is Stage.LOADING and self.quirks.recites_late:
            return replace(protocol, stage=Stage.FENCING)._call(Stage.FENCING, words.FENCE, {})
        return protocol._adjust()

    def _not_opened(self, failure: jsonrpc.Failure) -> ProtocolOutput:
        if failure.code == words.AUTH_REQUIRED:
            return self._refused(words.login_needed(self.agent, failure))
        if self.setup.conversation is None:
            return self._refused(words.failure_text(failure))
        if (
            failure.code == jsonrpc.METHOD_NOT_FOUND
            and self.stage is Stage.OPENING
            and not self.setup.forks
        ):
            # The agent announced the capability but does not implement it.
            return self._open(words.LOAD if self.agent.loads else None)
        if words.is_unknown(failure, self.setup.conversation):
            return self._forgot(words.failure_text(failure))
        return self._refused(words.failure_text(failure))

    def _adjust(self) -> ProtocolOutput:
        """Set the next pending setting, or finish the handshake."""
        if not self.wishes:
            return replace(self, stage=Stage.READY)._told(Replied(self.request))
        (name, value), *rest = self.wishes
        return replace(self, stage=Stage.ADJUSTING, wishes=tuple(rest))._set(None, name, value)

    def _set(self, request: str | None, name: str, wish: str) -> ProtocolOutput:
        choice = self.offers.get(name)
        value = None if choice is None else choice.find(wish)
        if choice is None or value is None or self.conversation is None:
            return self._not_set(request, words.not_offered(self.agent, name, wish, choice))
        if value == choice.current:
            return self._adjust() if request is None else self._told(Replied(request))
        if not self.exchange.ours.has_room:
            return self._not_set(request, NO_ROOM)
        return self._call(
            Adjusted(request, name, value), choice.method, choice.params(self.conversation, value)
        )

    def _hear_set(self, adjusted: Adjusted, reply: RpcReply) -> ProtocolOutput:
        if reply.error is not None:
            return self._not_set(adjusted.request, words.failure_text(reply.error))
        offers = words.offers(reply.named, self.offers.now(adjusted.name, adjusted.value))
        protocol = replace(self, offers=offers)
        if adjusted.request is None:
            return protocol._adjust()
        return protocol._told(Replied(adjusted.request))

    def _not_set(self, request: str | None, error: str) -> ProtocolOutput:
        return (
            self._refused(error) if request is None else self._told(Replied(request, error=error))
        )

    def _refused(self, error: str) -> ProtocolOutput:
        return replace(self, stage=Stage.REFUSED)._told(Replied(self.request, error=error))

    def _forgot(self, error: str) -> ProtocolOutput:
        return replace(self, stage=Stage.REFUSED)._told(Forgot(error))


def _cancelled(purpose: Purpose) -> Purpose:
    return replace(purpose, is_cancelled=True) if isinstance(purpose, Prompted) else purpose
