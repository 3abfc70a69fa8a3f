"""Turns and questions over HTTP: ask, show, edit, move, interrupt, answer."""

from __future__ import annotations

import asyncio

from banksman import Kind, Outcome, Receipt
from banksman.errors import NotFound
from banksman.server.access import authorization
from banksman.server.access.roles import Action
from banksman.server.api import usage_routes
from banksman.server.api.messages import turn_messages as messages
from banksman.server.api.messages.common_messages import WAIT_SECONDS_MAX, WaitFor
from banksman.server.api.route import HttpAnswer, OwnerFallback, Route, RouteCall
from banksman.server.context import Context
from banksman.sessions import traces
from banksman.sessions.questions import Question
from banksman.sessions.session import Session
from banksman.sessions.turn import Turn
from banksman.sessions.turn_status import HoldStatus, WaitingAsk


async def ask(call: RouteCall) -> HttpAnswer:
    """Ask for a turn. Responds when the ask is durable in the log."""
    context: Context = call.context
    body: messages.Ask = call.body
    session = context.session(call.path["id"])
    # An invalid header is ignored, as the specification says.
    found = traces.parse(call.header("traceparent") or "")
    trace = None if found is None else found.text

    async def do() -> HttpAnswer:
        if body.on_busy == "interrupt":
            await authorization.check_interrupting_ask(call.caller, session)
        if body.hold is not None:
            authorization.check_hold(call.caller, session.status(), body.hold)
        turn = await session.ask(
            body.prompt,
            priority=body.priority,
            on_busy=body.on_busy,
            on_preempt=body.on_preempt,
            key=call.key,
            schema=body.schema,
            rules=body.rules,
            deadline=body.deadline,
            caller=call.caller.name or body.caller,
            trace=trace,
            hold=body.hold,
        )
        headers = {"Location": f"/v1/sessions/{session.id}/turns/{turn.id}"}
        return HttpAnswer(messages.Accepted(turn.id, str(turn.state)), 202, headers)

    async def is_still_so(answer: HttpAnswer) -> bool:
        """Whether the stored response still holds.

        It does not if the turn was never sent: then the request asks again. A turn that retention
        has removed was sent.
        """
        try:
            turn = await session.turn(answer.made)
        except NotFound:
            return True
        return str(turn.state) != "ended" or (await turn.outcome()).kind not in (
            Kind.REFUSED,
            Kind.WITHDRAWN,
        )

    place = f"turns {session.id} {session.incarnation}"
    return await context.once.do(place, call.key, body, do, is_still_so=is_still_so)


async def look(call: RouteCall) -> HttpAnswer:
    """Show a turn and its outcome; with `wait`, wait for the outcome."""
    query: WaitFor = call.query
    turn = await _turn(call)
    outcome: Outcome | None = None
    try:
        async with asyncio.timeout(min(query.wait, WAIT_SECONDS_MAX)):
            outcome = await turn.outcome()
    except TimeoutError:
        # The turn may have ended just now. Its outcome is then one commit or one read of the log
        # away, and belongs in the response.
        if str(turn.state) == "ended":
            outcome = await turn.outcome()
    state = str(turn.state) if outcome is None else "ended"
    return HttpAnswer(messages.Turn(turn.id, state, None if outcome is None else shown(outcome)))


async def interrupt(call: RouteCall) -> HttpAnswer:
    """Interrupt a turn, or withdraw it from the queue."""
    turn = await _turn(call)
    return await _interrupt(call, turn.id)


async def interrupt_now(call: RouteCall) -> HttpAnswer:
    """Interrupt the turn that runs now, if one does."""
    return await _interrupt(call, None)


async def _interrupt(call: RouteCall, turn: str | None) -> HttpAnswer:
    session: Session = call.context.session(call.path["id"])
    # The turn that was checked, and not one that has begun since.
    turn = await authorization.check_interrupt(call.caller, session, turn)
    return HttpAnswer(receipt(await session.interrupt(turn, caller=call.caller.name)))


async def edit(call: RouteCall) -> HttpAnswer:
    """Edit a waiting ask. Responds with the queue after the edit."""
    body: messages.EditTurn = call.body
    session, turn = call.context.session(call.path["id"]), call.path["turn"]
    await authorization.check_edit(call.caller, session, turn)
    await session.edit(turn, prompt=body.prompt, priority=body.priority, caller=call.caller.name)
    return _queue(session)


async def move(call: RouteCall) -> HttpAnswer:
    """Move a turn in the queue. Responds with the queue after the move."""
    body: messages.MoveTurn = call.body
    session = call.context.session(call.path["id"])
    await session.reorder(call.path["turn"], before=body.before, caller=call.caller.name)
    return _queue(session)


async def list_questions(call: RouteCall) -> HttpAnswer:
    """List the questions that wait for an answer."""
    questions = await call.context.session(call.path["id"]).open_questions()
    return HttpAnswer(messages.Questions([question(each) for each in questions]))


async def answer(call: RouteCall) -> HttpAnswer:
    """Answer a question. Only the first answer counts; a later request gets that answer."""
    body: messages.Answer = call.body
    given = await call.context.session(call.path["id"]).answer(
        call.path["question"],
        body.decision,
        message=body.message,
        updated_input=body.updated_input,
        content=body.content,
        remember=body.remember,
        interrupt=body.interrupt,
        caller=call.caller.name,
    )
    answer = given.question, given.answer, given.by, given.message, given.is_first, given.caller
    return HttpAnswer(messages.Answered(*answer))


def _queue(session: Session) -> HttpAnswer:
    return HttpAnswer(messages.MovedQueue([waiting(each) for each in session.status().queue]))


async def _turn(call: RouteCall) -> Turn:
    return await call.context.session(call.path["id"]).turn(call.path["turn"])


def shown(outcome: Outcome) -> messages.Outcome:
    failure = outcome.failure
    return messages.Outcome(
        kind=str(outcome.kind),
        stop_reason=outcome.stop_reason,
        text=outcome.text,
        structured=outcome.structured,
        usage=None if outcome.usage is None else dict(outcome.usage),
        cost=outcome.cost,
        error=None if outcome.error is None else str(outcome.error),
        clock=outcome.clock,
        durable=outcome.durable,
        background=[
            messages.BackgroundTask(task.id, task.kind, task.description)
            for task in outcome.background
        ],
        used=None if outcome.used is None else usage_routes.shown(outcome.used),
        failure=None if failure is None else messages.AgentFailure(**failure),
        used_tools=outcome.used_tools,
        empty=outcome.empty,
    )


def question(question: Question) -> messages.Question:
    return messages.Question(
        question=question.id,
        id=question.id,
        turn=question.turn,
        tool=question.tool,
        input=dict(question.input),
        wants=question.wants,
        details=dict(question.details),
    )


def waiting(waiting: WaitingAsk) -> messages.Waiting:
    place = waiting.turn, waiting.priority, waiting.seconds, waiting.attempt
    return messages.Waiting(*place, waiting.prompt, waiting.at, waiting.caller)


def hold(hold: HoldStatus) -> messages.QueueHold:
    return messages.QueueHold(hold.hold, hold.priority, hold.caller, hold.at)


def receipt(receipt: Receipt) -> messages.Receipt:
    return messages.Receipt(receipt.stopped, str(receipt.by), receipt.kept, list(receipt.queued))


ID = "/v1/sessions/{id}"
ROUTES = (
    Route(
        method="POST",
        path=f"{ID}/turns",
        action=Action.ASK,
        handle=ask,
        to_owner=OwnerFallback.KEYED,
        summary="Ask for a turn. The response comes when the ask is durable.",
        body=messages.Ask,
        answer=messages.Accepted,
        status=202,
        has_key=True,
        problems=(409, 422, 429),
    ),
    Route(
        method="GET",
        path=f"{ID}/turns/{{turn}}",
        action=Action.READ,
        handle=look,
        to_owner=OwnerFallback.READS,
        summary="Show a turn and its outcome; with `wait`, wait for the outcome.",
        query=WaitFor,
        answer=messages.Turn,
        waits=True,
    ),
    Route(
        method="POST",
        path=f"{ID}/turns/{{turn}}/interrupt",
        action=Action.INTERRUPT,
        handle=interrupt,
        to_owner=OwnerFallback.NAMED,
        summary="Interrupt a turn, or withdraw it from the queue.",
        answer=messages.Receipt,
        problems=(409, 422),
    ),
    Route(
        method="POST",
        path=f"{ID}/interrupt",
        action=Action.INTERRUPT,
        handle=interrupt_now,
        to_owner=OwnerFallback.NOW,
        summary="Interrupt the turn that runs now.",
        answer=messages.Receipt,
        problems=(409, 422),
    ),
    Route(
        method="PATCH",
        path=f"{ID}/turns/{{turn}}",
        action=Action.ASK,
        handle=edit,
        to_owner=OwnerFallback.NAMED,
        summary="Edit the prompt or the priority of a waiting ask. Only its asker and operators.",
        body=messages.EditTurn,
        answer=messages.MovedQueue,
        problems=(409, 422),
    ),
    Route(
        method="POST",
        path=f"{ID}/turns/{{turn}}/move",
        action=Action.STEER,
        handle=move,
        to_owner=OwnerFallback.NAMED,
        summary="Move a turn in the queue: before another one of its priority, or to the head.",
        body=messages.MoveTurn,
        answer=messages.MovedQueue,
        problems=(409, 422),
    ),
    Route(
        method="GET",
        path=f"{ID}/questions",
        action=Action.READ,
        handle=list_questions,
        to_owner=OwnerFallback.READS,
        summary="List the questions that wait for an answer.",
        answer=messages.Questions,
    ),
    Route(
        method="POST",
        path=f"{ID}/questions/{{question}}",
        action=Action.ANSWER,
        handle=answer,
        to_owner=OwnerFallback.NAMED,
        summary=(
            "Answer a question. Only the first answer counts; "
            "a later one gets the first in its response."
        ),
        body=messages.Answer,
        answer=messages.Answered,
        problems=(409, 422),
    ),
)
