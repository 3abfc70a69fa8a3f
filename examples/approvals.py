"""An approval flow in a team channel: the agent asks before it uses a tool, and a person decides.

It shows questions that are posted from the log and answered by any person, with one answer each. A
turn waits for its answer as long as it takes; its time limits stand still meanwhile.

Run it in the folder that the agent works in, and type what people send and click:

    python approvals.py
    alice ask Deploy the release
    bob deny QUESTION not on a Friday
    bob approve QUESTION

Without Claude Code, take the scripted agent. It follows the lines of a prompt that begin with @@:

    AGENT="python -m banksman.testing.fake_agent" python approvals.py
    alice ask @@ask Bash {"command": "make deploy"}

You see the question with its id, the decision, and the outcome of the turn. If two people decide at
the same time, the first decision counts, and the other person is told so. The end of the input ends
the program.
"""

import asyncio
import logging
import os
import sys

import banksman

AGENT = os.environ.get("AGENT", "claude")
# This program answers questions without `on_question`, so the warning about that is not needed.
logging.getLogger("banksman.questions").setLevel(logging.ERROR)


def post(text: str) -> None:
    """Post a message to the channel: the place of Slack's `chat.postMessage`."""
    print(text, flush=True)


async def post_events(session: banksman.Session, after: str | None) -> None:
    """Post each question, each decision and each outcome, until the session is closed."""
    async for event in session.follow(after):
        body = event.body
        match event.kind:
            case "question.asked":
                post(f"{body['question']}: may the agent use {body['tool']} with {body['input']}?")
            case "question.answered":
                post(f"{body['question']}: {body['answer']}")
            case "turn.ended":
                post(f"{body['outcome']}: {body['text'] or body['error'] or ''}")
            case _:
                pass  # The other kinds, among them the agent's output.


async def decide(session: banksman.Session, person: str, verb: str, rest: str) -> None:
    """Answer a question: the place of the request that Slack sends for a clicked button."""
    question, _, reason = rest.partition(" ")
    decision = "allow" if verb == "approve" else "deny"
    # The agent reads the message of a denial, and can choose another way.
    message = f"{person}: {reason or 'no'}" if decision == "deny" else None
    answered = await session.answer(question, decision, message=message)
    if not answered.is_first:
        post(f"{person}: {question} already has an answer: {answered.answer}")


async def main() -> None:
    async with asyncio.TaskGroup() as tasks, banksman.Host("sqlite:approvals.db") as host:
        # Reading needs no approval. A question without an answer is denied after a day.
        rules, options = {"Read": "allow"}, {"question_seconds": 86_400, "question_default": "deny"}
        session = await host.open(
            "claude", name="approvals", command=AGENT, rules=rules, options=options
        )
        tasks.create_task(post_events(session, await session.head()))
        while line := await asyncio.to_thread(sys.stdin.readline):
            person, verb, rest = [*line.strip().split(" ", 2), "", ""][:3]
            try:
                match verb:
                    case "ask":
                        await session.ask(rest)
                    case "approve" | "deny":
                        await decide(session, person, verb, rest)
                    case _:
                        post("usage: NAME ask PROMPT, NAME approve ID, NAME deny ID [REASON]")
            except banksman.BanksmanError as error:  # For example NotFound: no such question.
                post(f"{person}: {error}")


asyncio.run(main())
