"""Show events on a screen. Display only; makes no decisions.

Text of the model arrives twice: in pieces while it is generated (`partial`), and complete. The
pieces are shown as they come, and of the complete text only the part that the pieces lacked. An ACP
agent sends everything once, in pieces without that mark. Each of these pieces continues the
previous one, until another kind of update or another message begins.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, cast

from banksman.cli.tui.screen import Screen, TextStyle, duration_in_words
from banksman.cli.tui.session_table import cap_in_words

Event = dict[str, Any]

TITLE_CHARACTERS_MAX = 200
THOUGHT_CHARACTERS_MAX = 160
PROMPT_CHARACTERS_MAX = 2000
PLAN_ENTRIES_MAX = 50
# Maximum number of running tools and waiting prompts to remember. More are shown with less detail.
KNOWN_MAX = 1000
# Events that tell why nothing happens. They are shown with one turn, too.
LIMIT_KINDS = frozenset(
    (
        "provider.retrying",
        "limits.changed",
        "session.fell_back",
        "budget.warning",
        "budget.exceeded",
    )
)
_TEXT, _THOUGHT = "agent_message_chunk", "agent_thought_chunk"
_OVER = ("completed", "failed", "cancelled")
# Agents whose updates contain complete texts only.
_IN_BLOCKS = ("claude", "codex")


@dataclass(frozen=True, slots=True)
class _Tool:
    title: str
    began: float


class EventPrinter:
    """Print the events of a turn or a session.

    `agent`: the agent of the session. `is_whole_session`: also show prompts, outcomes and changes
    of the session.
    """

    def __init__(self, screen: Screen, agent: str, *, is_whole_session: bool = False) -> None:
        self._screen = screen
        self._is_in_blocks = agent in _IN_BLOCKS
        self._is_whole_session = is_whole_session
        # The text that the pieces of the current block have shown, by kind.
        self._pieces: dict[str, str] = {}
        # The id of the message whose text is open, in a tuple; None if no text is open.
        self._message: tuple[Any] | None = None
        self._tools: dict[str, _Tool] = {}
        self._prompts: dict[str, str] = {}
        self._started: dict[str, float] = {}
        self.said_any = False

    def tell(self, event: Event) -> None:
        """Print one event."""
        kind, body = event["kind"], event["body"]
        match kind:
            case "update":
                for update in body.get("partial") or ():
                    self._piece(update)
                for update in body.get("updates") or ():
                    self._whole(update, event["at"])
            case "turn.started":
                self._begin(event)
            case "turn.ended":
                self.end(event["at"])
                if self._is_whole_session:
                    began = self._started.pop(event["turn"], None)
                    self._screen.line(
                        outcome_in_words(body["outcome"], body, event["at"], began), _look_of(body)
                    )
            case _ if kind in LIMIT_KINDS:
                self._tell_limits(kind, body)
            case _ if self._is_whole_session:
                self._tell_session(event)
            case _:
                pass

    def end(self, at: float) -> None:
        """End the turn: close its text and its unfinished tools."""
        self._end_text()
        self._pieces.clear()
        for tool in self._tools.values():
            self._screen.line(f"- {tool.title}, not finished, {duration_in_words(at - tool.began)}")
        self._tools.clear()
        self._screen.busy(None)

    # -- the agent's updates ----------------------------------------------------------------------
    def _piece(self, update: Event) -> None:
        kind, text = str(update.get("sessionUpdate")), _text_of(update)
        self._pieces[kind] = self._pieces.get(kind, "") + text
        if kind == _TEXT:
            if self._pieces[kind] == text:
                self._end_text()
            self._say(text)
        elif kind == _THOUGHT:
            self._screen.busy("thinking")

    def _whole(self, update: Event, at: float) -> None:
        kind = str(update.get("sessionUpdate"))
        match kind:
            case "agent_message_chunk":
                self._whole_text(update)
            case "agent_thought_chunk":
                self._thought(update)
            case "tool_call":
                self._call(update, at)
            case "tool_call_update":
                self._call_goes_on(update, at)
            case "plan":
                self._plan(update)
            case _:
                pass

    def _whole_text(self, update: Event) -> None:
        text, before = _text_of(update), self._pieces.pop(_TEXT, "")
        message = (update.get("messageId"),)
        if before and text.startswith(before):
            self._say(text[len(before) :])
        else:
            if before or message != self._message:
                self._end_text()
            self._say(text)
        self._message = message
        if self._is_in_blocks:
            self._end_text()

    def _say(self, text: str) -> None:
        if text:
            self._screen.text(text)
            self._screen.busy("waiting for the agent")
            self.said_any = True
            self._message = self._message or (None,)

    def _end_text(self) -> None:
        self._message = None
        self._screen.end_text()

    def _thought(self, update: Event) -> None:
        self._pieces.pop(_THOUGHT, "")
        text = " ".join(_text_of(update).split())
        # ACP agents send thoughts in pieces, and each piece would become a line.
        if text and self._screen.is_roomy and self._is_in_blocks:
            self._end_text()
            self._screen.line(f"· {_cut(text, THOUGHT_CHARACTERS_MAX)}")
        self._screen.busy("thinking")

    def _call(self, update: Event, at: float) -> None:
        id, title = (
            str(update.get("toolCallId")),
            _cut(str(update.get("title")), TITLE_CHARACTERS_MAX),
        )
        self._end_text()
        if id not in self._tools and not self._screen.is_watched:
            # Without a live status line, the output must record which tool was started, and when.
            self._screen.line(f"[{title}]")
        if len(self._tools) < KNOWN_MAX:
            self._tools[id] = _Tool(title, at)
        self._screen.busy(title)
        self._call_goes_on(update, at)

    def _call_goes_on(self, update: Event, at: float) -> None:
        id, status = str(update.get("toolCallId")), update.get("status")
        tool = self._tools.get(id)
        if tool is None:
            return
        if isinstance(update.get("title"), str):
            self._tools[id] = tool = _Tool(_cut(update["title"], TITLE_CHARACTERS_MAX), tool.began)
        if status not in _OVER:
            return
        del self._tools[id]
        took = duration_in_words(at - tool.began)
        if status == "completed":
            if self._screen.is_watched:
                self._end_text()
                self._screen.line(f"✓ {tool.title}, {took}")
        else:
            self._end_text()
            self._screen.line(f"✗ {tool.title}, {status}, {took}", TextStyle.BAD)
        running = list(self._tools.values())
        self._screen.busy(running[-1].title if running else "waiting for the agent")

    def _plan(self, update: Event) -> None:
        if not self._screen.is_roomy:
            return
        entries: Any = update.get("entries")
        self._end_text()
        for entry in (
            cast("list[Any]", entries)[:PLAN_ENTRIES_MAX] if isinstance(entries, list) else ()
        ):
            if isinstance(entry, dict):
                said = cast("Event", entry)
                sign = {"completed": "✓", "in_progress": "→"}.get(str(said.get("status")), "·")
                self._screen.line(
                    f"  {sign} {_cut(str(said.get('content')), TITLE_CHARACTERS_MAX)}"
                )

    # -- events of the session --------------------------------------------------------------------
    def _begin(self, event: Event) -> None:
        turn = event["turn"]
        if len(self._started) < KNOWN_MAX:
            self._started[turn] = event["at"]
        self._screen.busy("waiting for the agent")
        if self._is_whole_session and turn in self._prompts:
            self._end_text()
            self._screen.line(f"> {self._prompts[turn]}", TextStyle.BOLD)
            if event["body"].get("into"):
                del self._prompts[turn]

    def _keep_prompt(self, event: Event) -> None:
        said = event["body"].get("prompt")
        if said is None:
            return  # Only the priority was edited.
        prompt = _cut(" ".join(prompt_of(said).split()), PROMPT_CHARACTERS_MAX)
        if event["turn"] in self._prompts or len(self._prompts) < KNOWN_MAX:
            self._prompts[event["turn"]] = prompt
        if self._started:
            what = event["kind"].removeprefix("turn.")
            self._note(f"{what}: {_cut(prompt, TITLE_CHARACTERS_MAX)}")

    def _tell_session(self, event: Event) -> None:
        body = event["body"]
        match event["kind"]:
            case "turn.queued" | "turn.edited":
                self._keep_prompt(event)
            case "turn.interrupted":
                self._note(f"stopping the turn: {body.get('cause')}")
                self._screen.busy("stopping")
            case "turn.requeued":
                self._started.pop(event["turn"], None)
                is_limited = body.get("reason") == "limit"
                why = "met a limit of the account" if is_limited else "was preempted"
                self._note(f"the turn {why}, and is queued again")
                self._screen.busy(None)
            case "session.closed":
                self._note("the session is closed; the next ask opens it again")
            case "session.left":
                self._note("the host has released the session; the next owner continues it")
            case "session.handed_over":
                self._note("the host has released the session; the next host continues its turn")
            case "process.adopted":
                self._note("another host has taken the session over, with its running process")
            case "session.context_lost":
                self._note("the agent has lost the conversation", TextStyle.BAD)
            case "session.context_restored":
                missing = body.get("missing")
                note = f", without the last {missing} turns" if missing else ""
                self._note(
                    f"another host has taken the session over, with the agent's transcript{note}",
                    TextStyle.BAD if missing else TextStyle.DIM,
                )
            case "session.recovered":
                self._note("the server has recovered the session after a crash")
            case "process.backed_off":
                self._note("the agent failed to start; trying again", TextStyle.BAD)
            case "clock.warning":
                self._note(f"half of the {body.get('clock')} clock has passed")
            case "tasks.changed" if body.get("tasks"):
                self._note(f"{len(body['tasks'])} background tasks run")
            case _:
                pass

    def _tell_limits(self, kind: str, body: dict[str, Any]) -> None:
        """Tell what the provider or a budget prevents."""
        match kind:
            case "provider.retrying":
                self._note(
                    f"the provider failed, and the agent tries again ({body.get('attempt')}): "
                    f"{_cut(str(body.get('cause')), TITLE_CHARACTERS_MAX)}"
                )
            case "limits.changed" if body.get("limited_until"):
                until = time.strftime("%Y-%m-%d %H:%M", time.localtime(body["limited_until"]))
                self._note(f"the agent's account is limited until {until}", TextStyle.BAD)
            case "session.fell_back":
                why = f"{body.get('from')}: {body.get('why')}"
                self._note(f"{body.get('to')} serves the next turns ({why})", TextStyle.BAD)
            case "budget.warning" | "budget.exceeded":
                is_over = kind == "budget.exceeded"
                word = "over budget" if is_over else "most of a budget is used"
                look = TextStyle.BAD if is_over else TextStyle.DIM
                self._note(f"{word}: {cap_in_words(body)}", look)
            case _:
                pass

    def _note(self, text: str, look: TextStyle = TextStyle.DIM) -> None:
        self._end_text()
        self._screen.line(text, look)


def outcome_in_words(
    kind: str,
    told: Event,
    at: float | None = None,
    began: float | None = None,
    *,
    cause: str = "",
) -> str:
    """Describe an outcome in one line.

    `told`: the outcome, or the body of a `turn.ended`. `cause`: replaces the name of the clock.
    """
    clock = cause or (f" by the {told['clock']} clock" if told.get("clock") else "")
    money = "" if told.get("cost") is None else f", ${told['cost']:.4f}"
    tokens = tokens_of(told.get("usage"))
    used = f", {tokens}" if tokens else ""
    took = "" if at is None or began is None else f", {duration_in_words(at - began)}"
    error = f": {told['error']}" if told.get("error") else ""
    return f"{kind}{clock}{money}{used}{took}{error}"


def prompt_of(prompt: Any) -> str:
    """Return the prompt as text. A prompt is text, or a list of content blocks."""
    if isinstance(prompt, str):
        return prompt
    blocks = cast("list[Any]", prompt) if isinstance(prompt, list) else []
    return " ".join(
        _block(cast("dict[str, Any]", each)) for each in blocks if isinstance(each, dict)
    )


def _block(block: dict[str, Any]) -> str:
    return str(block["text"]) if isinstance(block.get("text"), str) else f"[{block.get('type')}]"


def tokens_of(usage: Any) -> str:
    """Describe the token counts; empty if the agent does not report them."""
    if not isinstance(usage, dict):
        return ""
    used = cast("dict[str, Any]", usage)
    # Claude counts cached tokens separately. Other agents include them in the input.
    beside = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    read = [count for name in (*beside, "inputTokens") if isinstance(count := used.get(name), int)]
    written = [
        count
        for name in ("output_tokens", "outputTokens")
        if isinstance(count := used.get(name), int)
    ]
    return f"{sum(read)} tokens in, {sum(written)} out" if read and written else ""


def _look_of(body: Event) -> TextStyle:
    return TextStyle.DIM if body.get("outcome") == "done" else TextStyle.BAD


def _text_of(update: Event) -> str:
    content = update.get("content")
    return str(content.get("text") or "") if isinstance(content, dict) else ""  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else text[: characters - 1] + "…"
