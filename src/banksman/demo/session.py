"""A session in the terminal: what the agent says as it says it, its questions, an interrupt, a preemption.

The agent of the tour is the scripted one of `banksman.testing`, run as the process it is. After the tour, and with any
other agent from the beginning, whoever sits at the terminal has the word: a line is an ask, one that is typed while the
agent works is an urgent one, Ctrl-C interrupts the turn or, with none, ends the session. Without a terminal there is
only the tour.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import banksman
from banksman import BACKGROUND, INTERACTIVE, Host, Question, Session, Turn

# Works on its first prompt until it is interrupted, and needs a permission for its fourth; repeats what it is told
# otherwise.
SCRIPT = {
    "prompt 1": ["stream 1000 0.02"],
    "prompt 4": ['ask Bash {"command": "make test"}', "say All green."],
}
AGENT = [
    *(sys.executable, "-I", "-S", str(Path(banksman.__file__).parent / "testing" / "fake_agent" / "__main__.py")),
    f"--fake-script={json.dumps(SCRIPT)}",
]


class DemoScreen:
    """Prints what happens, with the time since the session began."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        # Whoever is in the middle of a line.
        self._speaker: str | None = None

    def say(self, who: str, text: str) -> None:
        self.stream(who, text)
        self.end_line()

    def stream(self, who: str, text: str) -> None:
        """Text as it comes, on one line as long as the same one speaks."""
        if self._speaker != who:
            self.end_line()
            print(f"   {time.monotonic() - self._began:5.2f} s  {who:9} ", end="")
            self._speaker = who
        print(text, end="", flush=True)

    def end_line(self) -> None:
        if self._speaker is not None:
            self._speaker = None
            print(flush=True)

    async def show(self, turn: Turn, name: str) -> None:
        """A turn as it goes: what the agent says and does in it, and how it ends."""
        async for update in turn:
            match update["sessionUpdate"]:
                case "agent_message_chunk":
                    self.stream("agent", update["content"]["text"])
                case "agent_thought_chunk":
                    self.stream("thinks", update["content"]["text"])
                case "tool_call":
                    self.say("tool", update["title"])
                case _:
                    pass
        self.end_line()
        outcome = await turn.outcome()
        cost = "" if outcome.cost is None else f", ${outcome.cost:.4f}"
        error = "" if outcome.error is None else f": {outcome.error}"
        self.say(name, f"is {outcome.kind}{cost}{error}")


def has_terminal() -> bool:
    # There may be no stdin at all.
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()


async def tour() -> None:
    """One agent, three asks, and a question."""
    print('4. host.open("claude"): a chore in the background, and somebody who does not want to wait for it')
    screen = DemoScreen()

    def allow(question: Question) -> str:
        screen.say("question", f"may it run {question.input.get('command')!r}? The bot that we play says yes.")
        return "allow"

    async with Host("memory:") as host:
        session = await host.open("claude", command=AGENT, on_question=allow)
        chore = await session.ask("Tidy up.", priority=BACKGROUND, on_preempt="requeue")
        async for event in session.follow():
            if event.kind == "update" and b"tick9 " in event.data:
                break
        screen.say("chore", f"is {chore.state}; an urgent question comes")
        urgent = await session.ask("What time is it?", priority=INTERACTIVE)
        await screen.show(urgent, "question")
        screen.say("chore", "had given way, and has run again:")
        await screen.show(chore, "chore")
        await screen.show(await session.ask("Run the tests."), "tests")
        print("   What the log says of it, each with its cursor:")
        names = {chore.id: "chore", urgent.id: "question"}
        async for event in session.events(0, waits=False):
            if event.kind.startswith(("turn.", "question.")):
                print(f"     {event.cursor:>6}  {event.kind:18} {names.get(event.turn or '', 'tests')}")
        if has_terminal():
            await DemoConversation(session, screen).run()


async def talk(agent: str) -> None:
    """A session with an agent of the user's own."""
    if not has_terminal():
        raise banksman.UsageError("there is nobody to talk to it", hint="run it in a terminal")
    screen = DemoScreen()
    async with Host("memory:") as host:
        conversation = DemoConversation(None, screen)
        session = await host.open(agent, on_question=conversation.decide)
        conversation.session = session
        await conversation.run()


class DemoConversation:
    """Whoever sits at the terminal, and the session."""

    def __init__(self, session: Session | None, screen: DemoScreen) -> None:
        self.session = session
        self._screen = screen
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        self._turns: set[asyncio.Task[None]] = set()
        self._interrupts: set[asyncio.Task[object]] = set()
        self._question: asyncio.Future[str] | None = None
        # Serialises the questions: there is one person, and one line at a time. Held while it is waited for.
        self._asking = asyncio.Lock()

    async def run(self) -> None:
        print("Your turn. A line is an ask, while it works an urgent one; Ctrl-C interrupts, Ctrl-D ends.")
        loop = asyncio.get_running_loop()
        loop.add_reader(0, self._read)
        loop.add_signal_handler(signal.SIGINT, self._on_interrupt)
        try:
            while (line := await self._lines.get()) is not None:
                if line:
                    await self._ask(line)
            if self._question is not None and not self._question.done():
                self._question.set_result("")
            if self._turns:
                # Whoever leaves does not want to wait.
                await self.session.interrupt() if self.session is not None else None
                await asyncio.wait(self._turns)
        finally:
            loop.remove_reader(0)
            loop.remove_signal_handler(signal.SIGINT)
            for task in (*self._turns, *self._interrupts):
                task.cancel()

    async def _ask(self, line: str) -> None:
        assert self.session is not None
        turn = await self.session.ask(line, priority=INTERACTIVE, on_busy="interrupt")
        task = asyncio.ensure_future(self._screen.show(turn, "it"))
        self._turns.add(task)
        task.add_done_callback(self._turns.discard)

    async def decide(self, question: Question) -> str:
        """A question of the agent's takes the next line; of several at once each in its turn."""
        async with self._asking:
            return await self._decide(question)

    async def _decide(self, question: Question) -> str:
        self._screen.say("question", f"may it use {question.tool} with {dict(question.input)}? [y/N]")
        self._question = asyncio.get_running_loop().create_future()
        try:
            return "allow" if (await self._question).lower().startswith("y") else "deny"
        finally:
            self._question = None

    def _read(self) -> None:
        # A terminal gives whole lines, and an empty read is Ctrl-D.
        text = os.read(0, 65536).decode(errors="replace")
        for line in text.splitlines() if text else [None]:
            if line is not None and self._question is not None and not self._question.done():
                self._question.set_result(line)
            else:
                self._lines.put_nowait(line)

    def _on_interrupt(self) -> None:
        assert self.session is not None
        if self.session.status().holder is None:
            self._lines.put_nowait(None)
            return
        task: asyncio.Task[object] = asyncio.ensure_future(self.session.interrupt())
        self._interrupts.add(task)
        task.add_done_callback(self._interrupts.discard)
