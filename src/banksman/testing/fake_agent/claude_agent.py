"""Process of the fake Claude: reads frames, answers control requests, runs turns, and exits.

The process has one thread and one `select`, so it reads while it streams. One task takes in the
prompts in the order in which they were read. Another task runs the turns. It takes all queued
prompts as one turn, as Claude merges the prompts that it receives while it is busy. Further tasks
answer control requests concurrently.

The process always ends without help: soon after the end of stdin, later if a turn is still busy,
and by an alarm in every other case.
"""

from __future__ import annotations

import json
import os
import signal
import time

from banksman.testing.fake_agent import frames
from banksman.testing.fake_agent.claude_turn import (
    READ_BYTES_MAX,
    FakeClaudeProcess,
    FakeClaudeTurn,
    FakePhase,
    FakePrompt,
    FakeSettings,
    Plan,
    Script,
    echo,
)
from banksman.testing.fake_agent.verbs import VERBS
from banksman.testing.fake_process import CutShort, FakeRecord, Memory, Wait
from banksman.testing.fake_script import ScriptError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import NoReturn

    from banksman.testing.fake_agent.frames import Frame
    from banksman.testing.fake_process import Act

# A process that reads nothing for this time ends. Each read restarts the time, so a process in a
# soak test continues to live.
SILENCE_SECONDS_MAX = 120
# A real agent that is busy outlives its stdin and its parent. The fake does too, long enough for a
# test to see which processes are left.
EOF_SECONDS_MAX = 30.0
ORPHAN_SECONDS_MAX = 20.0
LINE_BYTES_MAX = 64 * 1024 * 1024
EXIT_USAGE = 64
REFUSAL = "refused by the script"


class FakeClaudeAgent(FakeClaudeProcess):
    """One process of the fake Claude."""

    def __init__(
        self, script: Script, memory: Memory, record: FakeRecord, argv: Sequence[str]
    ) -> None:
        super().__init__(script, memory, record, argv)
        self.script = script
        self.inbox: list[Frame] = []  # User frames that were read and not yet taken in.
        self.queue: list[FakePrompt] = []
        self.is_taking_in = False
        self.has_started = False
        self.input = bytearray()
        self.next_read_at = 0.0
        self.orphan_at: float | None = None
        # Number of tasks that must end before the end of stdin may end the process.
        self.holding = 0
        self.parent = os.getppid()
        self.wakeup = -1

    # ── Event loop ──

    def run(self, missing: str) -> None:
        """Serve until the process has a reason to end.

        `missing`: the id of the conversation to resume, if that conversation does not exist.
        """
        self._hear_signals()
        self.spawn(self._start(missing))
        while True:
            self.settle()
            self._end_if_over()
            sources = [self.wakeup]
            if self._may_read():
                sources.append(0)
            readable = self.select(sources, not_before=self.next_read_at)
            self.settle(readable)
            if self.wakeup in readable:
                os.read(self.wakeup, READ_BYTES_MAX)
                self.spawn(self._interrupted_by_signal())
            if 0 in readable and self._may_read():
                self._read()

    def _start(self, missing: str) -> Act:
        if missing:
            text = f"No conversation found with session ID: {missing}"
            self.err.put(text.encode() + b"\n")
            index = self.count_result()
            frame = frames.result(
                "error_during_execution", is_error=True, terminal_reason=None, index=index
            )
            self.write({**frame, "num_turns": 0, "errors": [text], "session_id": missing})
            yield from self.leave(1)
        for step in (
            *self.process.plan.settings,
            *self.process.plan.content,
            *self.process.plan.take("start"),
        ):
            yield from self.perform(step, self.process)
        self.has_started = True
        self.spawn(self._take_in())
        self.spawn(self._run_turns())

    def _may_read(self) -> bool:
        return (
            self.has_started
            and self.is_reading
            and self.eof_at is None
            and time.monotonic() >= self.next_read_at
        )

    def _read(self) -> None:
        data = os.read(0, self.read_bytes)
        signal.alarm(SILENCE_SECONDS_MAX)
        self.record.stdin(data)
        self.next_read_at = time.monotonic() + self.read_seconds if self.read_seconds else 0.0
        # At the end of stdin, an unterminated last line counts as a line.
        self.input += data or b"\n"
        if b"\n" in (data or b"\n"):
            *lines, rest = self.input.split(b"\n")
            self.input = rest
            for line in lines:
                if line.strip():
                    self._understand(line)
                    self.settle()
        assert len(self.input) <= LINE_BYTES_MAX
        if not data:
            self.eof_at = time.monotonic()
            self.spawn(self._at_eof())

    def _at_eof(self) -> Act:
        self.holding += 1
        yield from self.process.pass_point("eof")
        self.holding -= 1

    def _end_if_over(self) -> None:
        now = time.monotonic()
        if "eof" in self.ignored:
            return
        if self.eof_at is not None:
            is_busy = self.turn or self.queue or self.inbox or self.is_taking_in or self.holding
            if not is_busy and not self.out.buffer and not self.err.buffer:
                os._exit(0)
            if now > self.eof_at + EOF_SECONDS_MAX:
                self.fail("stdin ended long ago", 75)
        if os.getppid() != self.parent:
            self.orphan_at = self.orphan_at or now
            if now > self.orphan_at + ORPHAN_SECONDS_MAX:
                self.fail("the parent went long ago", 75)

    def _hear_signals(self) -> None:
        """Install signal handlers: TERM and HUP end Claude silently, INT interrupts it."""
        # SIGALRM keeps its default action, which the kernel performs. It ends the process even if
        # the process is blocked.
        signal.alarm(SILENCE_SECONDS_MAX)
        signal.signal(signal.SIGTERM, lambda _number, _frame: os._exit(143))
        signal.signal(signal.SIGHUP, lambda _number, _frame: os._exit(129))
        self.wakeup, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end)
        signal.signal(signal.SIGINT, lambda _number, _frame: None)

    def _interrupted_by_signal(self) -> Act:
        if "int" in self.ignored:
            return
        self.holding += 1
        if self.turn is not None:
            turn = self.turn
            self.cut(turn, "aborted")
            yield Wait(when=lambda: turn.phase is FakePhase.OVER)
        yield from self.leave(0)

    # ── Input ──

    def _understand(self, line: bytearray) -> None:
        """Parse one line.

        Claude exits at a line that is not JSON, and ignores JSON that is not an object.
        """
        try:
            frame: object = json.loads(line.decode(errors="replace"))
        except ValueError:
            self.fail(f"Error parsing streaming input line: {bytes(line[:100])!r}", 1)
        if not isinstance(frame, dict):
            return
        self._dispatch(frame)  # pyright: ignore[reportUnknownArgumentType]

    def _dispatch(self, frame: Frame) -> None:
        match frame.get("type"):
            case "user":
                if not isinstance(frame.get("message"), dict):
                    self.fail("Error: Expected message in a user frame", 1)
                self.inbox.append(frame)
            case "control_request":
                self.spawn(self._answer(str(frame.get("request_id")), frame.get("request") or {}))
            case "control_response":
                response: Frame = frame.get("response") or {}
                question = self.questions.get(str(response.get("request_id")))
                if question is not None:
                    question.answer = response.get("response") or {}
            case "control_cancel_request":
                question = self.questions.get(str(frame.get("request_id")))
                if question is not None:
                    question.answer = {"behavior": "deny", "message": "cancelled"}
            case _:
                pass

    def _take_in(self) -> Act:
        """Take in each prompt in its order: read it, report it as `queued`, then queue it."""
        while True:
            yield Wait(when=lambda: bool(self.inbox))
            frame = self.inbox.pop(0)
            self.is_taking_in = True
            text = _text_of(frame["message"].get("content"))
            self.memory.append("read", text)
            words, steps = VERBS.directives(text)
            plan = Plan([*self.script.of_prompt(self.memory.reads, text), *steps])
            plan.content = plan.content or [echo(words)]
            uuid = frame.get("uuid")
            settings = FakeSettings([self.process.settings])
            prompt = FakePrompt(text, uuid if isinstance(uuid, str) else None, plan, settings)
            waiting = FakeClaudeTurn(self, plan, prompt.settings, prompts=[prompt])
            for step in plan.settings:
                yield from self.perform(step, waiting)
            yield from waiting.pass_point("read")
            waiting.lifecycle("queued")
            self.queue.append(prompt)
            yield from waiting.pass_point("queued")
            self.is_taking_in = False

    def _run_turns(self) -> Act:
        """Run one turn after the other; each takes all prompts that are queued when it begins."""
        while True:
            yield Wait(
                when=lambda: bool(self.queue) and self.turn is None and not self.is_taking_in
            )
            prompts, self.queue = self.queue, []
            plan = Plan.joined([prompt.plan for prompt in prompts])
            settings = FakeSettings([prompt.settings for prompt in prompts])
            yield from FakeClaudeTurn(self, plan, settings, prompts=prompts).run()

    # ── Control requests ──

    def _answer(self, request_id: str, request: Frame) -> Act:
        match request.get("subtype"):
            case "initialize":
                yield from self.process.pass_point("initialize")
                if "initialize" in self.process.settings.refused:
                    self.write(frames.refused(request_id, REFUSAL))
                elif not self.process.is_omitted("initialize"):
                    self.write(frames.initialized(request_id, self.mode))
                    self.become_idle(self.process)
            case "interrupt":
                yield from self._interrupt(
                    request_id, is_dropping=bool(request.get("cancel_queued"))
                )
            case "set_model" | "set_permission_mode" as subtype:
                self._set(request_id, subtype, request)
            case "mcp_status":
                self.write(frames.answered(request_id, {"mcpServers": []}))
            case subtype:
                self.write(frames.unsupported(request_id, str(subtype)))

    def _set(self, request_id: str, subtype: str, request: Frame) -> None:
        settings = (self.turn or self.process).settings
        if subtype in settings.omitted:
            return
        if subtype in settings.refused:
            self.write(frames.refused(request_id, REFUSAL))
        elif subtype == "set_model":
            self.model = str(request.get("model") or frames.MODEL)
            self.write(frames.answered(request_id, {"model": self.model}))
        else:
            self.mode = str(request.get("mode"))
            self.write(frames.answered(request_id, {"mode": self.mode}))

    def _interrupt(self, request_id: str, *, is_dropping: bool) -> Act:
        """Ack an interrupt, then write the boundary; the script may omit or reorder them."""
        yield from (self.turn or self.process).pass_point("interrupt")
        turn = self.turn
        how = (turn or self.process).settings.on_interrupt
        if how == "unanswered":
            return
        is_open = turn is not None and turn.phase < FakePhase.CUT
        if how == "ignored" or (
            how == "ignored_early" and turn is not None and turn.phase < FakePhase.OPEN
        ):
            is_open = False
        if turn is None or not is_open:
            yield from self._ack(request_id, turn, is_dropping=is_dropping)
            return
        for question in turn.questions:
            self.write({"type": "control_cancel_request", "request_id": question.id})
        match how:
            case "unacked":
                self.cut(turn, "aborted")
            case "late_ack" | "finished":
                self.cut(turn, "aborted" if how == "late_ack" else "finished")
                yield Wait(when=lambda: turn.phase is FakePhase.OVER)
                yield from self._ack(request_id, turn, is_dropping=is_dropping)
            case _:
                yield from self._ack(request_id, turn, is_dropping=is_dropping)
                self.cut(turn, "silence" if how == "ack_only" else "aborted")

    def _ack(self, request_id: str, turn: FakeClaudeTurn | None, *, is_dropping: bool) -> Act:
        dropped: list[FakePrompt] = []
        if is_dropping:
            dropped = [prompt for prompt in self.queue if prompt.uuid]
            self.queue = [prompt for prompt in self.queue if not prompt.uuid]
        still_queued = [prompt.uuid for prompt in self.queue if prompt.uuid]
        self.write(frames.answered(request_id, {"still_queued": still_queued}))
        for prompt in dropped:
            FakeClaudeTurn(self, Plan(), prompt.settings, prompts=[prompt]).lifecycle("cancelled")
        yield from (turn or self.process).pass_point("acked")

    def cut(self, turn: FakeClaudeTurn, how: str) -> None:
        """End the content of a turn inside its current wait.

        Does nothing if the turn has already ended.
        """
        if (
            turn is self.turn
            and turn.phase < FakePhase.CUT
            and turn.task is not None
            and turn.task.wait is not None
        ):
            self.advance(turn.task, CutShort(how))

    def fail(self, why: str, code: int = EXIT_USAGE) -> NoReturn:
        """Write the reason to stderr and end the process immediately."""
        os.write(2, f"fake_agent: {why}\n".encode(errors="replace"))
        os._exit(code)


def _text_of(content: object) -> str:
    """Return the text of a message; its content is a string or a list of blocks."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for block in content if isinstance(content, list) else ():  # pyright: ignore[reportUnknownVariableType]
        if isinstance(block, dict) and block.get("type") == "text":  # pyright: ignore[reportUnknownMemberType]
            texts.append(str(block.get("text")))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]  # noqa: PERF401
    return "\n".join(texts)


def main(argv: Sequence[str]) -> None:
    """Run as the process that `argv` describes.

    Unknown flags are recorded and otherwise ignored.
    """
    options = _options(argv)
    record = FakeRecord(options.get("--fake-evidence"), argv)
    memory = Memory(
        _folder(options.get("--fake-memory")),
        options.get("--resume") or options.get("--session-id") or "",
    )
    try:
        script = Script(_mapping(options.get("--fake-script", "{}")))
    except ScriptError as error:
        _refuse(f"fake_agent: {error}", EXIT_USAGE)
    if options.get("--session-id") and not options.get("--resume") and memory.is_known:
        _refuse(f"Error: Session ID {memory.id} is already in use.", 1)
    missing = memory.id if options.get("--resume") and not memory.is_known else ""
    if not missing:
        if "--fork-session" in argv and options.get("--resume"):
            memory = memory.forked()
        memory.append("process", str(os.getpid()))
    agent = FakeClaudeAgent(script, memory, record, argv)
    try:
        agent.run(missing)
    except ScriptError as error:
        agent.fail(str(error))


def _refuse(why: str, code: int) -> NoReturn:
    os.write(2, f"{why}\n".encode())
    os._exit(code)


def _folder(memory: str | None) -> str | None:
    """Return the folder of conversations; "~" means the place that Claude uses.

    Claude keeps one folder for each working directory, named after its path.
    """
    if memory != "~":
        return memory
    named = "".join(each if each.isascii() and each.isalnum() else "-" for each in os.getcwd())
    return os.path.join(os.environ["HOME"], ".claude", "projects", named)


def _mapping(text: str) -> Mapping[str, Sequence[str]]:
    return json.loads(text)


def _options(argv: Sequence[str]) -> dict[str, str]:
    """Parse the flags that the fake agent uses, as `--flag=value` or `--flag value`."""
    ours = ("--fake-script", "--fake-evidence", "--fake-memory", "--resume", "--session-id")
    found: dict[str, str] = {}
    for index, word in enumerate(argv):
        flag, equals, value = word.partition("=")
        if flag in ours:
            found[flag] = value if equals else "".join(argv[index + 1 : index + 2])
    return found
