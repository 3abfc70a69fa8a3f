"""What a turn has said and done so far, as far as it takes to know an error that is told as if it were an answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from banksman.core.dialects.acp import client_requests as answering
from banksman.core.dialects.acp import protocol_v1 as words
from banksman.core.dialects.acp import reader as reading
from banksman.core.dialects.acp import writer as content
from banksman.core.dialects.acp.updates import said
from banksman.core.dialects.acp.writer import Adjusted, Prompted, Purpose, Stage
from banksman.core.dialects.dialect import ERROR_CHARACTERS_MAX, Prompt, ProtocolOutput, Quirks, Setup, is_aside
from banksman.core.dialects.meaning import (
    Forgot,
    Meaning,
    NeedsConversation,
    Noise,
    Replied,
    Requested,
    RequestWithdrawn,
    Thought,
    ToolBegan,
    ToolEnded,
    TurnOver,
)
from banksman.core.session.permissions import Decision, Verdict
from banksman.core.wire import jsonrpc
from banksman.core.wire.jsonrpc import InvalidMessage, Message, Notification, RpcCall, RpcReply
from banksman.core.wire.partial_json import mapping, text
from banksman.core.wire.pending_requests import NO_ROOM, PendingRequests


class SaidInTurn(Struct, frozen=True):
    """`text`: the last message, or the beginning of one too long to be that of an error. `message`: its name. `call`:
    the tool that was told of last."""

    text: str = ""
    message: str | None = None
    is_nothing: bool = True
    is_over: bool = False
    call: str = ""

    def told(self, update: Mapping[str, Any]) -> SaidInTurn:
        """With one more update."""
        if update["sessionUpdate"] != reading.MESSAGE:
            # What is said after another tool was used is another message.
            call = update.get("toolCallId")
            is_other = isinstance(call, str) and call != self.call
            return replace(
                self, is_nothing=False, is_over=self.is_over or is_other, call=call if is_other else self.call
            )
        text = said(dict(update))
        if not text:
            return self  # One agent hangs its numbers on a chunk that says nothing.
        name = update.get("messageId")
        message = name if isinstance(name, str) else None
        before = "" if self.is_over or message != self.message else self.text
        # One character more than an error may have: then it is known to be none.
        return SaidInTurn((before + text)[: ERROR_CHARACTERS_MAX + 1], message, is_nothing=False, call=self.call)


NOTHING = SaidInTurn()


# What was said so far with one process of an ACP agent: the memory that its lines need to be understood.
#
# **Opening.** `initialize`, then the conversation: a new one, or the old one gone on with (`session/resume`), or
# loaded, or forked, as the agent can; then the model and the mode that were wished for. One step waits for the answer
# to the one before: agents do not take requests that come too early. Any of them may fail, and then the handshake has.
#
# **Reciting.** An agent that loads a conversation first repeats all of it, as if it were said now. It is over with that
# when it answers, says the protocol; one is seen to answer after the first line and go on. Where that is known of an
# agent, or nothing is, a request is sent after the answer that no agent knows: what stands before the refusal is
# history, what comes after it is new. Mostly: the one that goes on does so beside all else that it does. So then it
# must have been quiet for a moment. One that says nothing to what it does not know is not waited for much longer: see
# `hurry`.
#
# **A turn** is a prompt and its answer. An agent answers with why it stopped; some say `end_turn` whatever happened,
# and what their profile knows of that is applied here. What the agent said stays what it said: only what it means is
# put right.

# How long it must say nothing until its history is taken to be over: before it has answered, and after that.
_QUIET_SECONDS = {Stage.FENCING: 2.0, Stage.QUIETING: 0.3}
TOO_LARGE = "frame_too_large"
_NOISE = Noise()


_NOTHING_SAID: PendingRequests[Purpose] = PendingRequests()
# Updates that tell what holds now, and not what was said once.
_STATES = frozenset(("config_option_update", "current_mode_update"))


class AcpProtocolState(Struct, frozen=True):
    setup: Setup
    quirks: Quirks
    stage: Stage = Stage.SILENT
    # The name of the handshake that is under way.
    request: str = ""
    conversation: str | None = None
    agent: words.AcpAgentInfo = words.UNKNOWN_AGENT
    offers: words.Offers = words.NO_OFFERS
    # What is still to be set before the handshake is done.
    wishes: tuple[tuple[str, str], ...] = ()
    exchange: PendingRequests[Purpose] = _NOTHING_SAID
    # The kinds of the tools of this turn, by their calls: a question about one need not say it again.
    tools: tuple[tuple[str, str], ...] = ()
    said: SaidInTurn = NOTHING
    # What the conversation has cost until now, if the agent tells.
    spent: float | None = None

    @property
    def recites(self) -> bool:
        return self.stage in (Stage.LOADING, Stage.FENCING, Stage.QUIETING)

    @property
    def quiet_seconds(self) -> float:
        return _QUIET_SECONDS.get(self.stage, 0.0)

    def is_aside(self, line: bytes) -> bool:
        return is_aside(line, self.conversation, "sessionId")

    # -- what is said ------------------------------------------------------------------------------------------------
    def handshake(self, request: str) -> ProtocolOutput:
        asking = replace(self, request=request, stage=Stage.INITIALIZING)
        return asking._call(Stage.INITIALIZING, words.INITIALIZE, words.initialize(self.quirks))

    def hurry(self) -> ProtocolOutput:
        """Nothing of the handshake is waited for any more that can be done without: to know where the history ends."""
        return self._adjust() if self.stage in _QUIET_SECONDS else ProtocolOutput(self)

    def prompt(self, ref: str, prompt: Prompt) -> ProtocolOutput:
        blocks = content.blocks(prompt)
        if self.stage is Stage.READY:
            fitted = content.fitted(blocks, self.agent)
            if isinstance(fitted, str):
                return ProtocolOutput(self, meanings=(TurnOver(refs=(ref,), is_error=True, error=fitted),))
            blocks = fitted
        if not self.exchange.ours.has_room:
            return ProtocolOutput(self, meanings=(TurnOver(refs=(ref,), is_error=True, error=NO_ROOM),))
        params = {"sessionId": self.conversation, "prompt": blocks}
        return replace(self, said=NOTHING, tools=())._call(Prompted(ref), words.PROMPT, params)

    def interrupt(self, request: str) -> ProtocolOutput:
        del request  # A cancel is a notice: only the turn's end answers it.
        if self.conversation is None:
            return ProtocolOutput(self)
        exchange, frame = self.exchange.notice(words.CANCEL, {"sessionId": self.conversation})
        return ProtocolOutput(
            replace(self, exchange=replace(exchange, ours=exchange.ours.changed(_cancelled))), (frame,)
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
        # Nothing of ACP asks for it.
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

    # -- what is heard -----------------------------------------------------------------------------------------------
    def hear(self, told: NeedsConversation) -> ProtocolOutput:
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

    def _noise(self) -> ProtocolOutput:
        return ProtocolOutput(self, meanings=(_NOISE,))

    # -- updates -----------------------------------------------------------------------------------------------------
    def _hear_update(self, notice: Notification) -> ProtocolOutput:
        update = reading.update_of(notice)
        kind = update.get("sessionUpdate")
        if not isinstance(kind, str):
            return self._noise()
        if notice.named.get("sessionId") != (self.conversation or notice.named.get("sessionId")):
            return ProtocolOutput(self)  # Of a conversation beside ours, a subagent's. It says nothing about our turn.
        if self.recites and not (self.stage in _QUIET_SECONDS and kind in _STATES):
            # Long ago. But what holds now may be told as soon as the conversation is there.
            return ProtocolOutput(self)
        protocol = replace(self, said=self.said.told(update)) if kind in reading.DEEDS else self
        match kind:
            case reading.THOUGHT:
                return ProtocolOutput(protocol, meanings=(Thought(),))
            case "tool_call" | "tool_call_update":
                tools = answering.with_tool(self.tools, update)
                return ProtocolOutput(
                    replace(protocol, tools=tools), meanings=_of_tool(update, is_new=kind == "tool_call")
                )
            case "config_option_update":
                return ProtocolOutput(replace(protocol, offers=words.offers(update, self.offers)))
            case "current_mode_update":
                mode = update.get("currentModeId")
                offers = self.offers.now("permission_mode", mode) if isinstance(mode, str) else self.offers
                return ProtocolOutput(replace(protocol, offers=offers))
            case "usage_update":
                spent = words.spent(update)
                return ProtocolOutput(protocol if spent is None else replace(protocol, spent=spent))
            case _:
                return ProtocolOutput(protocol)

    # -- requests of theirs ------------------------------------------------------------------------------------------
    def _hear_call(self, call: RpcCall) -> ProtocolOutput:
        exchange, is_taken, frames = self.exchange.take(call)
        taken = replace(self, exchange=exchange)
        if not is_taken:
            return ProtocolOutput(taken, frames) if frames else self._noise()
        request = answering.requested(call, self.quirks, dict(self.tools))
        if call.is_cut:
            # Of a question as large as this one the answer is "no", but it must have one: the agent waits.
            return taken.refuse(request, "this request is too large")
        return ProtocolOutput(taken, meanings=(request,))

    def _hear_notice(self, notice: Notification) -> ProtocolOutput:
        id = jsonrpc.withdrawn(notice)
        if id is None:
            return self._noise()
        request = jsonrpc.id_text(id)
        exchange, frames = self.exchange.error(request, jsonrpc.REQUEST_CANCELLED, "cancelled")
        if not frames:
            return self._noise()
        return ProtocolOutput(replace(self, exchange=exchange), frames, (RequestWithdrawn(request),))

    # -- answers to ours ---------------------------------------------------------------------------------------------
    def _hear_reply(self, reply: RpcReply) -> ProtocolOutput:
        id = reply.id
        if id is None:
            id = self._meant(reply)
        exchange, purpose = self.exchange.settle(id)
        if purpose is None:
            return self._noise()  # Late, or said twice, or an answer to nothing.
        protocol = replace(self, exchange=exchange)
        match purpose:
            case Prompted():
                return protocol._over(purpose, reply)
            case Adjusted():
                return protocol._hear_set(purpose, reply)
            case Stage.INITIALIZING:
                return protocol._hear_initialized(reply)
            case Stage.FENCING:
                # Late, it says nothing any more: see `hurry`.
                is_due = self.stage is Stage.FENCING
                return ProtocolOutput(replace(protocol, stage=Stage.QUIETING)) if is_due else protocol._noise()
            case _:
                return protocol._hear_opened(reply)

    def _meant(self, reply: RpcReply) -> int | None:
        """Which request a reply that names none is about.

        One that was too long to keep may be the answer to whatever waits for one. An error that names none is about a
        line that could not be read, and if the last line that we wrote is a prompt, it will have no other answer.
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
        """The boundary."""
        over = TurnOver(refs=(prompted.ref,), conversation=self.conversation, spent=self.spent)
        result = reply.named
        reason = text(result.get("stopReason"))
        if reply.error is not None:
            failure = reply.error
            over = replace(
                over,
                is_error=True,
                is_aborted=prompted.is_cancelled and failure.code == jsonrpc.REQUEST_CANCELLED,
                is_overflow=words.is_overflow(failure),
                error=words.failure_text(failure),
            )
        elif reply.is_cut and reason is None:
            over = replace(over, is_error=True, error=TOO_LARGE)
        else:
            usage = mapping(result.get("usage")) or words.usage_beside(result)
            over = replace(over, stop_reason=reason, usage=usage or None)
            over = replace(over, **self._judged(prompted, reason))
        return ProtocolOutput(self, meanings=(over,))

    def _judged(self, prompted: Prompted, reason: str | None) -> dict[str, Any]:
        """What a reason to stop means, with what is known about this agent."""
        if prompted.is_cancelled and (reason == "cancelled" or reason in self.quirks.cancel_may_say):
            return {"is_aborted": True}
        if reason == "cancelled":
            # Some answers to its questions mean that to it, and some agents give up by that word.
            return {"is_aborted": True, "error": "the agent cancelled the turn, and was not asked to"}
        error = words.STOP_ERRORS.get(reason or "")
        if error is None and self.quirks.has_failed(self.said.text):
            error = self.said.text
        if error is None and self.quirks.silence_is_error and self.said.is_nothing:
            error = "the agent said nothing and reports no error"
        return {} if error is None else {"is_error": True, "error": error}

    # -- the handshake -----------------------------------------------------------------------------------------------
    def _hear_initialized(self, reply: RpcReply) -> ProtocolOutput:
        if reply.error is not None:
            return self._refused(words.failure_text(reply.error))
        agent = words.agent(reply.named)
        protocol = replace(self, agent=agent)
        fault = words.version_fault(reply.named, agent.name) or words.opening_fault(self.setup, agent)
        return protocol._refused(fault) if fault is not None else protocol._open(words.way_in(self.setup, agent))

    def _open(self, method: str | None) -> ProtocolOutput:
        if method is None and self.setup.forks:
            return self._refused(f"{self.agent.name} cannot begin another conversation with what was said in one")
        if method is None:
            return self._forgot(f"{self.agent.name} cannot go on with a conversation of another process")
        stage = Stage.LOADING if method == words.LOAD else Stage.OPENING
        return replace(self, stage=stage)._call(stage, method, words.opening(self.setup, method))

    def _hear_opened(self, reply: RpcReply) -> ProtocolOutput:
        if reply.error is not None:
            return self._not_opened(reply.error)
        # The name of one that is gone on with need not be said again.
        known = None if self.setup.forks else self.setup.conversation
        conversation = words.conversation(reply.named.get("sessionId")) or known
        if conversation is None:
            said = TOO_LARGE if reply.is_cut else "the agent gave its new conversation no name"
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
        if failure.code == jsonrpc.METHOD_NOT_FOUND and self.stage is Stage.OPENING and not self.setup.forks:
            # It says that it can, and cannot.
            return self._open(words.LOAD if self.agent.loads else None)
        if words.is_unknown(failure, self.setup.conversation):
            return self._forgot(words.failure_text(failure))
        return self._refused(words.failure_text(failure))

    def _adjust(self) -> ProtocolOutput:
        """Set what is still to be set, and then the handshake is done."""
        if not self.wishes:
            return ProtocolOutput(replace(self, stage=Stage.READY), meanings=(Replied(self.request),))
        (name, value), *rest = self.wishes
        return replace(self, stage=Stage.ADJUSTING, wishes=tuple(rest))._set(None, name, value)

    def _set(self, request: str | None, name: str, wish: str) -> ProtocolOutput:
        choice = self.offers.get(name)
        value = None if choice is None else choice.find(wish)
        if choice is None or value is None or self.conversation is None:
            return self._not_set(request, words.not_offered(self.agent, name, wish, choice))
        if value == choice.current:
            return self._adjust() if request is None else ProtocolOutput(self, meanings=(Replied(request),))
        if not self.exchange.ours.has_room:
            return self._not_set(request, NO_ROOM)
        return self._call(Adjusted(request, name, value), choice.method, choice.params(self.conversation, value))

    def _hear_set(self, adjusted: Adjusted, reply: RpcReply) -> ProtocolOutput:
        if reply.error is not None:
            return self._not_set(adjusted.request, words.failure_text(reply.error))
        offers = words.offers(reply.named, self.offers.now(adjusted.name, adjusted.value))
        protocol = replace(self, offers=offers)
        if adjusted.request is None:
            return protocol._adjust()
        return ProtocolOutput(protocol, meanings=(Replied(adjusted.request),))

    def _not_set(self, request: str | None, error: str) -> ProtocolOutput:
        return (
            self._refused(error) if request is None else ProtocolOutput(self, meanings=(Replied(request, error=error),))
        )

    def _refused(self, error: str) -> ProtocolOutput:
        return ProtocolOutput(replace(self, stage=Stage.REFUSED), meanings=(Replied(self.request, error=error),))

    def _forgot(self, error: str) -> ProtocolOutput:
        return ProtocolOutput(replace(self, stage=Stage.REFUSED), meanings=(Forgot(error),))


def _cancelled(purpose: Purpose) -> Purpose:
    return replace(purpose, is_cancelled=True) if isinstance(purpose, Prompted) else purpose


def _of_tool(update: Mapping[str, Any], *, is_new: bool) -> tuple[Meaning, ...]:
    call = update.get("toolCallId")
    if not isinstance(call, str):
        return ()
    match update.get("status"):
        case "completed" | "failed":
            return (ToolEnded((call,)),)
        case "in_progress":
            return (ToolBegan((call,)),)
        case _:
            # An update need not say how far it is, and a call that waits is on its way.
            return (ToolBegan((call,)),) if is_new else ()
