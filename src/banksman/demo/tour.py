"""Guided tour in a terminal: a stubborn process tree, a killed host, and a session to talk to.

The tree. The tour ends a tree of processes twice. The first attempt uses the common way
(`subprocess` with `start_new_session`, then `killpg`). The second uses `banksman.execute`. The tour
counts and shows the processes that the first attempt leaves behind, then kills them by pid.

The killed host. A host runs in a separate process with its store in a file. SIGKILL ends it while
its agent speaks and a second ask waits. The tour then opens the session by its name. The open turn
is UNKNOWN, the waiting ask runs, and no process of the first host is left.

The session. It shows streamed text, questions, an interrupt and a preemption. Its agent is the
scripted one of `banksman.testing`, run as a process. Afterwards the user takes over; with any other
agent the user starts immediately:

- A line is an ask. A line typed while the agent works is an urgent ask.
- Ctrl-C interrupts the turn, or ends the session if no turn runs.

Without a terminal the user cannot take over, and only the tour runs.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import banksman
from banksman import BACKGROUND, INTERACTIVE, Host, Question, Session, Turn
from banksman.core.session import event as kinds
from banksman.demo import fake_agent

# A leader with four children. Each child survives the death of the leader in a different way. All
# processes exit after a minute, so a crashed tour leaves nothing behind.
TREE = """
import os, signal, sys, time
kind = sys.argv[1]
if kind == "leader":
    for child in ("plain", "own-session", "daemon", "deaf-to-TERM"):
        if os.fork() == 0:
            if child != "plain":
                os.setsid()
            if child == "daemon" and os.fork():
                os._exit(0)
            python = [sys.executable, "-I", "-S", "-c", os.environ["TREE"]]
            os.execv(sys.executable, [*python, child, sys.argv[2]])
if kind == "deaf-to-TERM":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(kind, flush=True)
time.sleep(60)
"""
MEMBERS = 5
# The agent speaks for a long time on its first prompt and echoes every other prompt.
CRASH_SCRIPT = {"prompt 1": ["stream 1000 0.02"]}
# The agent works on its first prompt until it is interrupted. It needs a permission for its fourth.
# It echoes every other prompt.
SESSION_SCRIPT = {
    "prompt 1": ["stream 1000 0.02"],
    "prompt 4": ['ask Bash {"command": "make test"}', "say All green."],
}


def run() -> None:
    """Run all parts of the tour."""
    print(
        "A command with four children: "
        "one plain, one in a new session, a daemon, one that ignores TERM.\n"
    )
    _with_subprocess()
    print()
    asyncio.run(_with_banksman())
    print()
    _crash()
    print()
    asyncio.run(_session())
    print("\nCommands from a shell:  banksman exec --timeout 60 -- make test")


# ── The tree ──


def _tree(marker: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", TREE, "leader", marker]


def _alive(marker: str) -> dict[int, str]:
    """Find the live processes of the tree, by a marker word in their argv. Return names by pid."""
    found: dict[int, str] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/cmdline", "rb") as file:
                    words = file.read().split(b"\0")
            except OSError:
                continue
            if marker.encode() in words:
                found[int(entry)] = words[words.index(marker.encode()) - 1].decode()
    return found


def _show(title: str, left: dict[int, str]) -> None:
    names = ", ".join(f"{name} ({pid})" for pid, name in left.items()) or "none"
    print(f"   {title}: {len(left)}: {names}")


def _with_subprocess() -> None:
    marker = f"demo-{uuid.uuid4().hex}"
    print("1. The usual way: subprocess.Popen(start_new_session=True), then killpg(SIGKILL)")
    with subprocess.Popen(
        _tree(marker),
        env={**os.environ, "TREE": TREE},
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as child:
        assert child.stdout is not None
        for _ in range(MEMBERS):
            child.stdout.readline()
        _show("started", _alive(marker))
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        left = _alive(marker)
        _show("left after the kill", left)
        for pid in left:
            os.kill(pid, signal.SIGKILL)


async def _with_banksman() -> None:
    marker = f"demo-{uuid.uuid4().hex}"
    print("2. banksman.execute(…, timeout=1, grace=1)")
    lines = 0
    started: dict[int, str] = {}

    def on_output(_stream: str, data: bytes) -> None:
        nonlocal lines
        lines += data.count(b"\n")
        if lines == MEMBERS and not started:
            started.update(_alive(marker))
            _show("started", started)

    began = time.monotonic()
    done = await banksman.execute(
        _tree(marker), env={"TREE": TREE}, timeout=1, grace=1, on_output=on_output
    )
    print(f"   {done.ended.value} after {time.monotonic() - began:.1f} s")
    for step in done.ladder:
        print(f"     {step.at:4.1f} s  {step.rung}")
    for process in done.swept:
        print(f"            swept {started.get(process.pid, '')} ({process.pid})")
    _show("left", _alive(marker))
    print(f"   survivors: {len(done.survivors)}, output read to its end: {done.drained}")


# ── The killed host ──


async def _speak(folder: str) -> None:
    """Run the first host, which the tour kills. Prints a line when its agent starts to speak."""
    async with Host(f"sqlite:{folder}/store.db") as owner:
        session = await owner.open(
            "claude", name="tour", command=fake_agent(CRASH_SCRIPT, Path(folder, "memory"))
        )
        turn = await session.ask("Tell me everything")
        await session.ask("And now the short version")
        async for _ in turn:
            print("speaking", flush=True)


async def _take_over(folder: str) -> None:
    """Run the second host: open the session by its name and wait for the queued ask."""
    async with Host(f"sqlite:{folder}/store.db") as owner:
        session = await owner.open(
            "claude", name="tour", command=fake_agent(CRASH_SCRIPT, Path(folder, "memory"))
        )
        status = session.status()
        [waiting] = [ask.turn for ask in status.queue] or [status.holder or ""]
        await (await session.turn(waiting)).outcome()
        async for event in session.events():
            if event.kind == kinds.TURN_ENDED:
                body = event.body
                print(
                    f"   {event.cursor:6} {event.kind}  "
                    f"{body['outcome']:8} {body['text'] or body['error']}"
                )


def _crash() -> None:
    print("3. SIGKILL ends a host in the middle of a turn, and another host continues")
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, "-m", "banksman.demo.tour", folder]
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as first:
            assert first.stdout is not None
            first.stdout.readline()
            first.kill()
        print(
            f"   the first host (process {first.pid}) "
            "was killed while its agent spoke and a second ask waited"
        )
        asyncio.run(_take_over(folder))
    print(
        "   the open turn is UNKNOWN, because it may have been done; "
        "the queued ask was kept, and has run"
    )


# ── The session ──


class DemoScreen:
    """Print the events of a session with the seconds since it began."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        # The speaker of the current, unfinished line.
        self._speaker: str | None = None

    def say(self, who: str, text: str) -> None:
        self.stream(who, text)
        self.end_line()

    def stream(self, who: str, text: str) -> None:
        """Print text as it arrives, on one line until the speaker changes."""
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
        """Print a turn live: the agent's text and tool calls, then the outcome."""
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


def _has_terminal() -> bool:
    # sys.stdin can be None: the process may have been started without it.
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()


async def _session() -> None:
    """Show one agent, three asks and a question."""
    print('4. host.open("claude"): a background chore, and an urgent question that preempts it')
    screen = DemoScreen()

    def allow(question: Question) -> str:
        screen.say(
            "question",
            f"may it run {question.input.get('command')!r}? The bot of this tour says yes.",
        )
        return "allow"

    async with Host("memory:") as host:
        session = await host.open("claude", command=fake_agent(SESSION_SCRIPT), on_question=allow)
        chore = await session.ask("Tidy up.", priority=BACKGROUND, on_preempt="requeue")
        async for event in session.follow():
            if event.kind == "update" and b"tick9 " in event.data:
                break
        screen.say("chore", f"is {chore.state}; an urgent question arrives")
        urgent = await session.ask("What time is it?", priority=INTERACTIVE)
        await screen.show(urgent, "question")
        screen.say("chore", "was preempted, and has run again:")
        await screen.show(chore, "chore")
        await screen.show(await session.ask("Run the tests."), "tests")
        print("   The events in the log, each with its cursor:")
        names = {chore.id: "chore", urgent.id: "question"}
        async for event in session.events(0, waits=False):
            if event.kind.startswith(("turn.", "question.")):
                print(
                    f"     {event.cursor:>6}  {event.kind:18} "
                    f"{names.get(event.turn or '', 'tests')}"
                )
        if _has_terminal():
            await DemoConversation(session, screen).run()


async def talk(agent: str) -> None:
    """Open a session with an agent that the user named, and let the user talk to it."""
    if not _has_terminal():
        raise banksman.UsageError(
            "cannot talk to the agent: stdin is not a terminal", hint="run it in a terminal"
        )
    screen = DemoScreen()
    async with Host("memory:") as host:
        conversation = DemoConversation(None, screen)
        session = await host.open(agent, on_question=conversation.decide)
        conversation.session = session
        await conversation.run()


class DemoConversation:
    """Connect the user at the terminal to the session."""

    def __init__(self, session: Session | None, screen: DemoScreen) -> None:
        self.session = session
        self._screen = screen
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        self._turns: set[asyncio.Task[None]] = set()
        self._interrupts: set[asyncio.Task[object]] = set()
        self._question: asyncio.Future[str] | None = None
        # Serialises the questions: one user answers one line at a time. Held while an answer is
        # pending.
        self._asking = asyncio.Lock()

    async def run(self) -> None:
        print(
            "Your turn. Each line is an ask, urgent while the agent works; "
            "Ctrl-C interrupts, Ctrl-D ends."
        )
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
                # A user who leaves does not want to wait for the turn.
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
        """Ask the user. The next line is the answer; concurrent questions wait for each other."""
        async with self._asking:
            return await self._decide(question)

    async def _decide(self, question: Question) -> str:
        self._screen.say(
            "question", f"may it use {question.tool} with {dict(question.input)}? [y/N]"
        )
        self._question = asyncio.get_running_loop().create_future()
        try:
            return "allow" if (await self._question).lower().startswith("y") else "deny"
        finally:
            self._question = None

    def _read(self) -> None:
        # A terminal delivers whole lines. An empty read means Ctrl-D.
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


if __name__ == "__main__":
    asyncio.run(_speak(sys.argv[1]))
