"""Turns, scripts and process state of the fake Claude.

`Script` parses a script, `FakeClaudeTurn` runs a turn and writes its frames, and
`FakeClaudeProcess` is the state that turns share. `claude_agent.py` reads the input, and `verbs.py`
has the verbs.

A turn passes these stages:

    read → queued → started → init → content → result → completed

The agent may open a turn without a prompt. That turn has neither lifecycle frames nor
user_message_uuids. A script may also write frames outside of any turn. These belong to the
`FakeClaudeTurn` of the process, which never runs. Every turn starts with a copy of its settings.

A script defines the behaviour of the agent. It is a mapping from sections to steps, or only the
steps of the process:

    {"process": ["split 7"], "process 2": […],
     "prompt": […], "prompt 2": […], "prompt what is 2+2?": […]}

- `process` applies to every process of a conversation, and `process N` to the Nth. The agent
  performs their steps once, when the process starts.
- `prompt TEXT` applies to the prompts with exactly that text. Otherwise `prompt N` applies to the
  Nth prompt that the conversation has read. Otherwise `prompt` applies.
- The agent counts processes and prompts over the conversation if it has a memory, else within the
  process.
- Lines of a prompt that begin with `@@` are steps too. They follow the steps of the script.

A step is `VERB ARGUMENTS` and belongs to the content of the turn. `at POINT VERB ARGUMENTS` is
performed at a point of the turn instead. A turn without content echoes its prompt. Each step is
performed once. A step of the process that names a point is performed the first time that any turn
passes that point. Settings (`omit`, `refuse`, `on_interrupt`) apply from before `read`, at any
place in the script.
"""

from __future__ import annotations

import enum
import json

from banksman.testing.fake_agent import frames
from banksman.testing.fake_process import NEVER, AgentTask, CutShort, new_id
from banksman.testing.fake_script import ScriptAgent, ScriptError, ScriptStep, VerbTable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from banksman.testing.fake_agent.frames import Frame
    from banksman.testing.fake_process import Act, FakeRecord, Memory
    from banksman.testing.fake_script import ScriptStep


# A turn passes each point just after the event it names: a frame was written, or a request was read
# and not yet answered.
POINTS = {
    "start": (
        "the process has started and has read nothing; "
        "the only point of a process's step that names none"
    ),
    "initialize": "initialize was read",
    "read": "the prompt was read, before it is `queued`",
    "queued": "the prompt was `queued`, before it is `started`",
    "started": "the prompts of the turn were `started`, before init",
    "init": "init was written",
    "result": "the first result of the turn was written, before `completed`",
    "completed": "the turn is over but for this",
    "idle": (
        "initialize was answered or a turn is over; "
        "what is done here does not keep the next turn waiting"
    ),
    "interrupt": "an interrupt was read, before its ack",
    "acked": "an interrupt was acked, before the boundary",
    "eof": "stdin came to its end",
}

# The `verbs` module registers the verbs.
VERBS = VerbTable(POINTS)

READ_BYTES_MAX = 65536


class Plan:
    """Steps of one process or turn: settings, content, and hooks by point."""

    __slots__ = ("content", "hooks", "settings")

    def __init__(self, steps: Sequence[ScriptStep] = ()) -> None:
        self.settings = [step for step in steps if step.verb.is_setting]
        self.content = [step for step in steps if not step.verb.is_setting and not step.point]
        self.hooks: dict[str, list[ScriptStep]] = {}
        for step in steps:
            if not step.verb.is_setting and step.point:
                self.hooks.setdefault(step.point, []).append(step)

    @classmethod
    def joined(cls, plans: Sequence[Plan]) -> Plan:
        """Return one plan with the steps of all `plans`."""
        whole = cls()
        for plan in plans:
            whole.settings += plan.settings
            whole.content += plan.content
            for point, steps in plan.hooks.items():
                whole.hooks.setdefault(point, []).extend(steps)
        return whole

    def take(self, point: str) -> list[ScriptStep]:
        """Remove and return the steps of a point, so that each step is performed once."""
        return self.hooks.pop(point, [])


class Script:
    """A parsed script: steps by section."""

    __slots__ = ("sections",)

    def __init__(self, script: Mapping[str, Sequence[str]] | Sequence[str]) -> None:
        self.sections: dict[str, list[ScriptStep]] = {}
        for section, texts in sections_of(script).items():
            kind, _, which = section.partition(" ")
            if kind not in ("process", "prompt") or (
                kind == "process" and which and not which.isdigit()
            ):
                raise ScriptError(
                    f"no section {section!r}: process, process N, prompt, prompt N, prompt TEXT"
                )
            self.sections[section] = [
                VERBS.parse(text, f"{section}#{index}") for index, text in enumerate(texts)
            ]

    def of_process(self, number: int) -> list[ScriptStep]:
        return [*self.sections.get("process", []), *self.sections.get(f"process {number}", [])]

    def of_prompt(self, number: int, text: str) -> list[ScriptStep]:
        for section in (f"prompt {text}", f"prompt {number}", "prompt"):
            if section in self.sections:
                return self.sections[section]
        return []

    def steps(self) -> Iterator[ScriptStep]:
        """Yield every step, including nested steps."""
        for steps in self.sections.values():
            for step in steps:
                yield step
                yield from step.nested


def sections_of(script: Mapping[str, Sequence[str]] | Sequence[str]) -> dict[str, list[str]]:
    """Return the long form of a script: a plain list of steps becomes the section `process`."""
    if isinstance(script, str):
        raise ScriptError(f"a script is a mapping or a list of steps, not the one text {script!r}")
    if hasattr(script, "items"):
        return {section: list(texts) for section, texts in script.items()}  # type: ignore[union-attr]
    return {"process": list(script)} if script else {}


def echo(words: str) -> ScriptStep:
    """Return the step for a prompt without steps: say the prompt back."""
    return ScriptStep("", VERBS["say"], [words or "ok"], nested=[], text="say", where="echo")


class FakePhase(enum.IntEnum):
    """Progress of a turn.

    CUT: an interrupt has ended the content, and the boundary is not written yet.
    """

    NEW, STARTED, OPEN, CUT, ENDED, OVER = range(6)


class FakePrompt:
    """A user frame that the agent has read, with its plan and settings."""

    __slots__ = ("plan", "settings", "text", "uuid")

    def __init__(self, text: str, uuid: str | None, plan: Plan, settings: FakeSettings) -> None:
        self.text = text
        self.uuid = uuid
        self.plan = plan
        self.settings = settings


class FakeSettings:
    """Frames that a turn omits, requests that it refuses, and its reaction to an interrupt."""

    __slots__ = ("omitted", "on_interrupt", "refused")

    def __init__(self, before: Sequence[FakeSettings] = ()) -> None:
        self.omitted: set[str] = set()
        self.refused: set[str] = set()
        self.on_interrupt = "boundary"
        for settings in before:
            self.omitted |= settings.omitted
            self.refused |= settings.refused
            if settings.on_interrupt != "boundary":
                self.on_interrupt = settings.on_interrupt


class FakeQuestion:
    """A pending permission or other request to the host, and its answer once it arrives."""

    __slots__ = ("answer", "id")

    def __init__(self) -> None:
        self.id = new_id()
        self.answer: Frame | None = None


class FakeClaudeProcess(ScriptAgent):
    """State that the turns of one process share; `claude_agent` adds the input."""

    def __init__(
        self, script: Script, memory: Memory, record: FakeRecord, argv: Sequence[str]
    ) -> None:
        super().__init__(record)
        self.memory = memory
        self.session_id = memory.id
        self.is_partial = "--include-partial-messages" in argv
        self.is_replaying = "--replay-user-messages" in argv
        self.model, self.mode = frames.MODEL, "default"
        self.process = FakeClaudeTurn(
            self, Plan(script.of_process(memory.processes)), FakeSettings()
        )
        self.turn: FakeClaudeTurn | None = None
        self.questions: dict[str, FakeQuestion] = {}
        self.results = 0
        self.ignored: set[str] = set()
        self.has_stdin = True
        self.is_reading, self.read_bytes, self.read_seconds = True, READ_BYTES_MAX, 0.0
        self.eof_at: float | None = None

    def write(self, frame: Frame) -> None:
        text = json.dumps(frame, ensure_ascii=False, separators=(",", ":"))
        self.out.put(text.encode(errors="replace") + b"\n")

    def count_result(self) -> int:
        self.results += 1
        return self.results - 1

    def become_idle(self, turn: FakeClaudeTurn) -> None:
        steps = [*turn.plan.take("idle"), *self.process.plan.take("idle")]

        def act() -> Act:
            self.signal("idle")
            for step in steps:
                yield from self.perform(step, turn)

        self.spawn(act())


class FakeClaudeTurn:
    """State of a turn, and the only writer of its frames."""

    def __init__(
        self,
        agent: FakeClaudeProcess,
        plan: Plan,
        settings: FakeSettings,
        *,
        prompts: Sequence[FakePrompt] = (),
        origin: str = "",
    ) -> None:
        self.agent = agent
        self.plan = plan
        self.settings = settings
        self.prompts = prompts
        self.origin = origin
        self.phase = FakePhase.NEW
        self.task: AgentTask | None = None
        self.remaining: list[ScriptStep] = [*plan.content]
        self.answer = ""
        self.streamed = ""  # Streamed part of an incomplete message.
        self.message_id = f"msg_{new_id()}"
        self.is_streaming = False
        self.tool_use_id = ""
        self.questions: list[FakeQuestion] = []
        self.denials: list[Frame] = []
        self.last_state = ""
        # Tokens that `used` has reported: input and output.
        self.tokens = (0, 0)

    # ── Stages of a turn ──

    def run(self) -> Act:
        """Run the whole turn.

        Only the runner of the agent and the verb `own` call this.
        """
        agent = self.agent
        assert agent.turn is None
        agent.turn, self.task = self, agent.current
        try:
            yield from self._begin()
            yield from self.perform()
        except CutShort as cut:
            self.phase = FakePhase.CUT
            self.remaining = []
            if cut.how == "silence":
                while True:
                    yield NEVER
            if cut.how == "aborted":
                yield from self._abort()
        if self.phase < FakePhase.ENDED and not self.is_omitted("result"):
            yield from self.succeed(self.answer)
        if not self.last_state:
            self.lifecycle("completed")
        yield from self.pass_point("completed")
        self.phase = FakePhase.OVER
        assert agent.turn is self
        agent.turn = None
        agent.become_idle(self)

    def _begin(self) -> Act:
        for prompt in self.prompts:
            self.agent.memory.append("prompt", prompt.text)
            self._emit_lifecycle(prompt, "started")
        self.phase = FakePhase.STARTED
        yield from self.pass_point("started")
        if not self.is_omitted("init"):
            self.emit(frames.init(self.agent.model, self.agent.mode), uuids=True)
        self.phase = FakePhase.OPEN
        yield from self.pass_point("init")
        if self.agent.is_partial and not self.is_omitted("init"):
            self.emit(frames.status(), uuids=True)
        if self.agent.is_replaying:
            for prompt in self.prompts:
                replay: Frame = {
                    "type": "user",
                    "message": {"role": "user", "content": prompt.text},
                }
                self.emit(
                    {**replay, "parent_tool_use_id": None, "uuid": prompt.uuid, "isReplay": True}
                )

    def perform(self) -> Act:
        """Perform the content step by step; the verb `detach` removes the remaining steps."""
        while self.remaining:
            yield from self.agent.perform(self.remaining.pop(0), self)

    def pass_point(self, point: str) -> Act:
        """Run the tasks that wait for this point, then perform the steps hooked to it."""
        self.agent.signal(point)
        for step in (*self.plan.take(point), *self.agent.process.plan.take(point)):
            yield from self.agent.perform(step, self)

    def _abort(self) -> Act:
        """Write the end of an interrupted turn, with the same frames as a recorded one."""
        suffix = ""
        if self.is_streaming and self.streamed:
            self.assistant({"type": "text", "text": self.streamed})
        if self.tool_use_id:
            suffix = " for tool use"
            self.emit(frames.tool_result(self.tool_use_id, frames.REJECTED, is_error=True))
        self.emit(frames.user([{"type": "text", "text": f"[Request interrupted by user{suffix}]"}]))
        self.stream_end(None)
        if not self.is_omitted("result"):
            reason = "aborted_tools" if self.tool_use_id else "aborted_streaming"
            diagnostic = "[ede_diagnostic] result_type=user last_content_type=n/a stop_reason=null"
            yield from self.fail(diagnostic, reason)
        self.lifecycle("cancelled")

    # ── Output ──

    def emit(self, frame: Frame, *, uuids: bool = False) -> None:
        """Write a frame with the session id.

        `uuids`: also add the uuids of the prompts that the frame answers.
        """
        frame["session_id"] = self.agent.session_id
        known = [prompt.uuid for prompt in self.prompts if prompt.uuid]
        if uuids and known and not self.is_omitted("uuids"):
            if frame["type"] != "system":
                frame["user_message_uuid"] = known[-1]
            frame["user_message_uuids"] = known
        self.agent.write(frame)

    def is_omitted(self, what: str) -> bool:
        return what in self.settings.omitted

    def lifecycle(self, state: str) -> None:
        """Report a state for each prompt of this turn."""
        for prompt in self.prompts:
            if state != "completed" or not self.is_omitted("completed"):
                self._emit_lifecycle(prompt, state)
        if state in ("completed", "cancelled"):
            self.last_state = state

    def _emit_lifecycle(self, prompt: FakePrompt, state: str) -> None:
        if prompt.uuid and not self.is_omitted("lifecycle"):
            self.emit(frames.lifecycle(prompt.uuid, state))

    def assistant(self, block: Frame) -> None:
        self.emit(frames.assistant(self.message_id, block, self.agent.model), uuids=True)

    def say(self, text: str) -> None:
        self.assistant({"type": "text", "text": text})
        self.answer = text

    def stream_event(self, event: Frame) -> None:
        self.emit(frames.stream_event(self.message_id, event))

    def stream_begin(self) -> None:
        self.is_streaming, self.streamed, self.message_id = True, "", f"msg_{new_id()}"
        self.stream_event(
            {
                "type": "message_start",
                "message": frames.message(self.message_id, [], self.agent.model),
            }
        )
        self.stream_event(
            {
                "type": "content_block_start",
                "index": 0,
                "content_block": {"type": "text", "text": ""},
            }
        )

    def stream_chunk(self, text: str) -> None:
        self.streamed += text
        self.stream_event(
            {
                "type": "content_block_delta",
                "index": 0,
                "delta": {"type": "text_delta", "text": text},
            },
        )

    def think_chunk(self, text: str) -> None:
        self.stream_event(
            {
                "type": "content_block_delta",
                "index": 0,
                "delta": {"type": "thinking_delta", "thinking": text},
            },
        )

    def stream_end(self, stop_reason: str | None) -> None:
        if not self.is_streaming:
            return
        self.is_streaming = False
        self.stream_event({"type": "content_block_stop", "index": 0})
        delta = {"stop_reason": stop_reason, "stop_sequence": None}
        self.stream_event({"type": "message_delta", "delta": delta, "usage": frames.USAGE})
        self.stream_event({"type": "message_stop"})

    def tool_use(self, name: str, arguments: Frame) -> None:
        self.tool_use_id = f"toolu_{new_id()}"
        self.assistant(
            {"type": "tool_use", "id": self.tool_use_id, "name": name, "input": arguments}
        )

    def tool_result(self, text: str, *, is_error: bool = False) -> None:
        self.emit(frames.tool_result(self.tool_use_id, text, is_error=is_error))
        self.tool_use_id = ""

    def used(self, read: int, written: int) -> None:
        """Report a model call. The boundary has the sum of all calls."""
        self.message_id = f"msg_{new_id()}"
        self.tokens = (self.tokens[0] + read, self.tokens[1] + written)
        usage = {"input_tokens": read, "output_tokens": written}
        self.stream_event({"type": "message_delta", "delta": {}, "usage": usage})

    def succeed(
        self, text: str, *, api_error_status: int | None = None, members: Frame | None = None
    ) -> Act:
        """Write the boundary of a successful turn.

        Claude also uses the subtype `success` for a turn whose model call failed. `members`:
        replace members of the frame.
        """
        is_error = api_error_status is not None
        reason = "api_error" if is_error else "completed"
        frame = frames.result(
            "success", is_error=is_error, terminal_reason=reason, index=self.agent.count_result()
        )
        yield from self._bound(
            {**frame, "api_error_status": api_error_status, "result": text, **(members or {})}
        )

    def fail(self, text: str, terminal_reason: str | None = None) -> Act:
        """Write the boundary of a turn that did not run to its end: errors and no text."""
        index = self.agent.count_result()
        frame = frames.result(
            "error_during_execution", is_error=True, terminal_reason=terminal_reason, index=index
        )
        yield from self._bound({**frame, "errors": [text]})

    def _bound(self, frame: Frame) -> Act:
        if self.origin not in ("", "none"):
            frame["origin"] = {"kind": self.origin}
        frame["permission_denials"] = self.denials
        if any(self.tokens):
            frame["usage"] = {"input_tokens": self.tokens[0], "output_tokens": self.tokens[1]}
        self.emit(frame, uuids=True)
        if self.phase < FakePhase.ENDED:
            self.phase = FakePhase.ENDED
            yield from self.pass_point("result")
