"""The script of the fake Claude: its sections, the points of its turns, and which step is done when.

A script is what a test says shall happen. It is a mapping of sections to steps, or only the steps of the process:

    {"process": ["split 7"], "process 2": […], "prompt": […], "prompt 2": […], "prompt what is 2+2?": […]}

`process` holds for every process of a conversation and `process N` for its Nth; their steps are performed once, at the
start. `prompt TEXT` is for the prompts with exactly that text, else `prompt N` for the Nth prompt that the conversation
has read, else `prompt` for any. Processes and prompts are counted over the conversation when the agent has a memory,
else within the process. Lines of a prompt that begin with `@@` are steps too, and come after those of the script.

A step is `VERB ARGUMENTS`, or `at POINT VERB ARGUMENTS` for what is to happen at a point of the turn instead of in its
content. A turn without content says its prompt back. Each step is done once: one of the process that names a point, the
first time that any turn passes it. Settings (`omit`, `refuse`, `on_interrupt`) hold from before `read`, wherever they
stand.
"""

from __future__ import annotations

from banksman.testing.fake_script import ScriptError, ScriptStep, VerbTable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# Each point is passed just after what it names: a frame was written, or a request was read and not yet answered.
POINTS = {
    "start": "the process has started and has read nothing; the only point of a process's step that names none",
    "initialize": "initialize was read",
    "read": "the prompt was read, before it is `queued`",
    "queued": "the prompt was `queued`, before it is `started`",
    "started": "the prompts of the turn were `started`, before init",
    "init": "init was written",
    "result": "the first result of the turn was written, before `completed`",
    "completed": "the turn is over but for this",
    "idle": "initialize was answered or a turn is over; what is done here does not keep the next turn waiting",
    "interrupt": "an interrupt was read, before its ack",
    "acked": "an interrupt was acked, before the boundary",
    "eof": "stdin came to its end",
}

# `verbs` enters them.
VERBS = VerbTable(POINTS)


class Plan:
    """The steps of one process or turn, by when they are done."""

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
        """The steps of several, as if one had them all."""
        whole = cls()
        for plan in plans:
            whole.settings += plan.settings
            whole.content += plan.content
            for point, steps in plan.hooks.items():
                whole.hooks.setdefault(point, []).extend(steps)
        return whole

    def take(self, point: str) -> list[ScriptStep]:
        """What is hooked to a point, once: the next time that the point is passed there is nothing."""
        return self.hooks.pop(point, [])


class Script:
    """All sections, parsed."""

    __slots__ = ("sections",)

    def __init__(self, script: Mapping[str, Sequence[str]] | Sequence[str]) -> None:
        self.sections: dict[str, list[ScriptStep]] = {}
        for section, texts in sections_of(script).items():
            kind, _, which = section.partition(" ")
            if kind not in ("process", "prompt") or (kind == "process" and which and not which.isdigit()):
                raise ScriptError(f"no section {section!r}: process, process N, prompt, prompt N, prompt TEXT")
            self.sections[section] = [VERBS.parse(text, f"{section}#{index}") for index, text in enumerate(texts)]

    def of_process(self, number: int) -> list[ScriptStep]:
        return [*self.sections.get("process", []), *self.sections.get(f"process {number}", [])]

    def of_prompt(self, number: int, text: str) -> list[ScriptStep]:
        for section in (f"prompt {text}", f"prompt {number}", "prompt"):
            if section in self.sections:
                return self.sections[section]
        return []

    def steps(self) -> Iterator[ScriptStep]:
        """Every step, with those nested in others."""
        for steps in self.sections.values():
            for step in steps:
                yield step
                yield from step.nested


def sections_of(script: Mapping[str, Sequence[str]] | Sequence[str]) -> dict[str, list[str]]:
    """The long form of a script: steps alone are those of the process."""
    if isinstance(script, str):
        raise ScriptError(f"a script is a mapping or a list of steps, not the one text {script!r}")
    if hasattr(script, "items"):
        return {section: list(texts) for section, texts in script.items()}  # type: ignore[union-attr]
    return {"process": list(script)} if script else {}


def echo(words: str) -> ScriptStep:
    """What a prompt gets that asks for nothing: itself."""
    return ScriptStep("", VERBS["say"], [words or "ok"], nested=[], text="say", where="echo")
