"""The script of the fake agent: its grammar, and the table of verbs as data.

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

This module is imported by the agent at its start, so it imports nothing that is slow to load.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from banksman.testing.fake_agent.claude_turn import FakeClaudeTurn
    from banksman.testing.fake_agent.loop import Act

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

# Nothing a script asks for is without a bound: a mistake in a test must not fill the machine.
COUNT_MAX = 1_000_000
BYTES_MAX = 64 * 1024 * 1024
SECONDS_MAX = 120.0
NESTED = ";;"


class ScriptError(ValueError):
    """The script cannot be meant: an unknown verb, point or section, or arguments that do not fit."""


class ScriptVerb:
    """One word of the script language."""

    __slots__ = ("arguments", "doc", "is_setting", "name", "perform")

    def __init__(
        self,
        name: str,
        arguments: str,
        doc: str,
        perform: Callable[[FakeClaudeTurn, ScriptStep], Act],
        is_setting: bool,
    ) -> None:
        self.name = name
        self.arguments = arguments
        self.doc = doc
        self.perform = perform
        self.is_setting = is_setting

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that the first argument may be, where it is one of a few."""
        first = self.arguments.partition(" ")[0]
        return tuple(first.split("|")) if "|" in first else ()

    def __repr__(self) -> str:
        return f"{self.name} {self.arguments}".rstrip()


VERBS: dict[str, ScriptVerb] = {}


def verb(
    name: str, arguments: str = "", *, is_setting: bool = False
) -> Callable[[Callable[[FakeClaudeTurn, ScriptStep], Act]], Callable[[FakeClaudeTurn, ScriptStep], Act]]:
    """Enter a function into the table, with its docstring's first line. A setting is done before its turn begins."""

    def enter(perform: Callable[[FakeClaudeTurn, ScriptStep], Act]) -> Callable[[FakeClaudeTurn, ScriptStep], Act]:
        assert name not in VERBS
        VERBS[name] = ScriptVerb(name, arguments, (perform.__doc__ or "").partition("\n")[0], perform, is_setting)
        return perform

    return enter


class ScriptStep:
    """A verb with its arguments, checked; where it stands in the script, and at which point it is to be done."""

    __slots__ = ("nested", "point", "text", "verb", "where", "words")

    def __init__(
        self, point: str, verb: ScriptVerb, words: list[str], *, nested: list[ScriptStep], text: str, where: str
    ) -> None:
        self.point = point
        self.verb = verb
        self.words = words
        self.nested = nested
        self.text = text
        self.where = where

    def word(self, index: int, default: str = "") -> str:
        return self.words[index] if index < len(self.words) else default

    def integer(self, index: int) -> int:
        return int(self.words[index])

    def seconds(self, index: int, default: float = 0.0) -> float:
        return float(self.words[index]) if index < len(self.words) else default

    def __repr__(self) -> str:
        return f"{self.where}: {self.text}"


def parse(text: str, where: str = "") -> ScriptStep:
    """One step from its text. Whatever is wrong with it is wrong now, and not when it is reached."""
    rest, point = text.strip(), ""
    if rest.startswith("at "):
        point, _, rest = rest[3:].lstrip().partition(" ")
        if point not in POINTS:
            raise ScriptError(f"{where}: no point {point!r} in {text!r}; there are {', '.join(POINTS)}")
    name, _, rest = rest.partition(" ")
    found = VERBS.get(name)
    if found is None:
        raise ScriptError(f"{where}: no verb {name!r} in {text!r}; there are {', '.join(sorted(VERBS))}")
    words: list[str] = []
    nested: list[ScriptStep] = []
    kinds = found.arguments.split()
    for index, kind in enumerate(kinds):
        rest = rest.strip(" ")
        if not rest:
            if not kind.startswith("["):
                raise ScriptError(f"{where}: {text!r} lacks {kind}; it is {found!r}")
            break
        if kind == "STEPS":
            inner = [part for part in rest.split(NESTED) if part.strip()]
            nested = [parse(part, f"{where}{NESTED}{number}") for number, part in enumerate(inner)]
            rest = ""
            break
        is_last = index == len(kinds) - 1
        word, _, rest = (rest, "", "") if is_last else rest.partition(" ")
        fault = _fault(kind.strip("[]"), word)
        if fault:
            raise ScriptError(f"{where}: {word!r} of {text!r} is {fault}; it is {found!r}")
        words.append(word)
    if rest.strip():
        raise ScriptError(f"{where}: {rest!r} of {text!r} is too much; it is {found!r}")
    return ScriptStep(point, found, words, nested=nested, text=text, where=where)


def _fault(kind: str, word: str) -> str:
    """What is wrong with an argument of this kind, if anything."""
    if "|" in kind:
        return "" if word in kind.split("|") else f"none of {kind}"
    if kind == "POINT":
        return "" if word in POINTS else "no point"
    most = {"COUNT": COUNT_MAX, "BYTES": BYTES_MAX, "CODE": 255, "SIGNAL": 64}.get(kind)
    if most is not None:
        return "" if word.isdigit() and int(word) <= most else f"no whole number up to {most}"
    if kind == "SECONDS":
        try:
            return "" if 0 <= float(word) <= SECONDS_MAX else f"not within 0 and {SECONDS_MAX:g} seconds"
        except ValueError:
            return "no number"
    return ""


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
            self.sections[section] = [parse(text, f"{section}#{index}") for index, text in enumerate(texts)]

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


def directives(prompt: str) -> tuple[str, list[ScriptStep]]:
    """A prompt's text without its `@@` lines, and the steps that those are."""
    lines = prompt.split("\n")
    steps = [parse(line[2:], f"@@{index}") for index, line in enumerate(lines) if line.startswith("@@")]
    return "\n".join(line for line in lines if not line.startswith("@@")).strip(), steps


def echo(words: str) -> ScriptStep:
    """What a prompt gets that asks for nothing: itself."""
    return ScriptStep("", VERBS["say"], [words or "ok"], nested=[], text="say", where="echo")
