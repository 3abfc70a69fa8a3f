"""A chat bot: several chats share one session with an agent.

It shows priorities, preemption, idempotency keys, and one outcome for each message. A person never
waits for the bot's chores: a message of a person preempts a running chore, which runs again later.

Run it in the folder that the agent works in, and type updates, one JSON object a line:

    python chat_bot.py
    {"update_id": 1, "chat": "chores", "text": "Tidy up the imports"}
    {"update_id": 2, "chat": "alice", "text": "Why is CI red?"}

Without Claude Code, set AGENT="python -m banksman.testing.fake_agent", which repeats each message.

You see the answer to alice first, then the result of the chore. Send update 2 again, also after a
restart: the bot repeats its answer and does not ask the agent. `/stop` as a text stops the chat's
last message. The end of the input ends the bot, after every accepted message has its outcome.
"""

import asyncio
import json
import os
import sys
from typing import NamedTuple

import banksman

AGENT = os.environ.get("AGENT", "claude")
STORE = "sqlite:chat_bot.db"


class Update(NamedTuple):
    """A message of a chat. `update_id` is unique, and a server may deliver an update twice."""

    update_id: int
    chat: str
    text: str


async def next_update() -> Update | None:
    """Wait for the next update: the place of Telegram's `getUpdates`. None: the input has ended."""
    line = await asyncio.to_thread(sys.stdin.readline)
    return Update(**json.loads(line)) if line else None


def send(chat: str, text: str) -> None:
    """Send a message to a chat: the place of Telegram's `sendMessage`."""
    print(f"{chat}: {text}", flush=True)


async def ask(session: banksman.Session, update: Update) -> banksman.Turn:
    """Queue a message. The key makes a second delivery of the update return the same turn."""
    key = f"update-{update.update_id}"
    if update.chat == "chores":
        return await session.ask(
            update.text, key=key, priority=banksman.BACKGROUND, on_preempt="requeue"
        )
    return await session.ask(update.text, key=key, priority=banksman.INTERACTIVE)


async def answer(chat: str, turn: banksman.Turn) -> None:
    """Wait for the outcome of a message and send it to its chat."""
    outcome = await turn.outcome()
    if outcome.kind is banksman.Outcome.DONE:
        send(chat, outcome.text or "done")
    else:
        send(chat, f"({outcome.kind}: {outcome.error or outcome.text or 'no answer'})")


async def main() -> None:
    last: dict[str, banksman.Turn] = {}  # The last turn of each chat, for /stop.
    async with banksman.Host(STORE) as host, asyncio.TaskGroup() as answers:
        session = await host.open("claude", name="bot", command=AGENT)
        while update := await next_update():
            if update.text == "/stop":
                if update.chat in last:
                    await last[update.chat].interrupt()
                continue
            try:
                # `ask` returns when the store has the message, so this loop never waits for the
                # agent. The session decides which message runs next.
                turn = last[update.chat] = await ask(session, update)
            except banksman.BanksmanError as error:  # For example QueueFull: not accepted.
                send(update.chat, f"(not accepted: {error})")
            else:
                answers.create_task(answer(update.chat, turn))


asyncio.run(main())
