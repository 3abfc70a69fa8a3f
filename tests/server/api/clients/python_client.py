# The package is generated while the test runs.
# pyright: basic, reportMissingImports=false
"""Program that uses the client of openapi-python-client: `python python_client.py URL TOKEN COMMAND`."""

from __future__ import annotations

import json
import sys

import httpx
from banksman_client import AuthenticatedClient
from banksman_client.api.events import events_of_session
from banksman_client.api.questions import turns_answer, turns_list_questions
from banksman_client.api.sessions import sessions_look, sessions_open_session
from banksman_client.api.turns import turns_ask, turns_look
from banksman_client.models import (
    Accepted,
    Answer,
    Answered,
    Ask,
    ContentBlock,
    ContentBlockType,
    Events,
    GivenAnswer,
    OpenSession,
    OtherEvent,
    OutcomeKind,
    PriorityName,
    Problem,
    QuestionAskedEvent,
    Questions,
    Session,
    Turn,
    TurnEndedEvent,
    TurnState,
    YesOrNo,
)
from httpx_sse import connect_sse


def followed_question(client: AuthenticatedClient, session: str) -> str:
    """Return the id of the first question in the event stream."""
    http = client.get_httpx_client()
    with connect_sse(http, "GET", f"/v1/sessions/{session}/events") as source:
        for sent in source.iter_sse():
            if sent.event == "message":
                (event,) = Events.from_dict({"events": [sent.json()], "next": None, "head": None}).events
                if isinstance(event, QuestionAskedEvent):
                    return event.body.question
    raise AssertionError("the stream ended")


def main(url: str, token: str, command: str) -> None:
    with AuthenticatedClient(base_url=url, token=token, timeout=httpx.Timeout(60)) as client:
        opened = sessions_open_session.sync(client=client, body=OpenSession(command=json.loads(command)))
        assert isinstance(opened, Session), opened

        blocks = [ContentBlock(type_=ContentBlockType.TEXT, text="go")]
        ask = Ask(prompt=blocks, priority=PriorityName.INTERACTIVE)
        accepted = turns_ask.sync(opened.id, client=client, body=ask, idempotency_key="once")
        assert isinstance(accepted, Accepted), accepted

        question = followed_question(client, opened.id)
        waiting = turns_list_questions.sync(opened.id, client=client)
        assert isinstance(waiting, Questions), waiting
        assert [(each.question, each.id) for each in waiting.questions] == [(question, question)]
        answer = Answer(decision=YesOrNo.ALLOW)
        answered = turns_answer.sync(opened.id, question, client=client, body=answer)
        assert isinstance(answered, Answered), answered
        assert answered.answer is GivenAnswer.ALLOW

        turn = turns_look.sync(opened.id, accepted.turn, client=client, wait=60.0)
        assert isinstance(turn, Turn), turn
        assert turn.state is TurnState.ENDED
        assert turn.outcome is not None
        assert turn.outcome.kind is OutcomeKind.DONE

        page = events_of_session.sync(opened.id, client=client, limit=1000)
        assert isinstance(page, Events), page
        assert not [event for event in page.events if isinstance(event, OtherEvent)]
        (ended,) = [event for event in page.events if isinstance(event, TurnEndedEvent)]
        assert ended.body.outcome is OutcomeKind.DONE

        missing = sessions_look.sync("no-such-session", client=client)
        assert isinstance(missing, Problem), missing
        assert missing.status == 404
        print(turn.outcome.text)


if __name__ == "__main__":
    main(*sys.argv[1:])
