"""Spans of a turn, made from its events in the log: the turn, its queue time, and its tools.

The names and attributes are those of the GenAI conventions of OpenTelemetry. This module knows no
package of OpenTelemetry; `telemetry.py` exports the spans.

- `invoke_agent {agent}`: from the acceptance of the ask to the end of the turn. Its parent is that
  of the ask's `traceparent`. Its id is in the `TRACEPARENT` of the agent.
- `queue`: from the acceptance to the last start of the turn.
- `execute_tool {tool}`: from a tool's call to its result.

If another host takes the session over in the middle of the turn, the span of the turn ends there,
and the next one begins. It has the same parent, and a link to the span before it.

All ids follow from the log. So a host that reports a turn twice reports the same spans.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from banksman import Event
from banksman.sessions import traces
from banksman.sessions.traces import NO_PARENT, TraceContext

# Tools of one turn that are reported. A turn with more has `banksman.tools_omitted`.
TOOLS_MAX = 1000
# Content that is added on request is truncated to this length.
CONTENT_CHARACTERS_MAX = 16 << 10
# The outcomes that are errors.
ERRORS = ("failed", "unknown", "refused")
# A frame without this text begins or ends no tool. Codex has no such mark.
MARKS = {"claude": b'"tool_', "acp": b'"tool_call'}

Attributes = dict[str, str | int | float | bool]


@dataclass(slots=True)
class SpanData:
    """One span. The ids are hexadecimal, and the times are seconds since 1970."""

    name: str
    id: str
    parent: str | None
    start: float
    end: float
    attributes: Attributes
    error: str | None = None
    # The span that this one continues.
    continues: str | None = None


@dataclass(slots=True)
class _ToolTimes:
    start: float
    attributes: Attributes
    # The owner that the tool began under.
    owner: int
    end: float | None = None
    is_failed: bool = False


@dataclass(slots=True)
class TurnSpans:
    """Collects the events of one turn, in their order. `has_content`: prompts and outputs, too."""

    session: str
    agent: str
    dialect: str
    turn: str
    has_content: bool = False
    _context: TraceContext | None = None
    _began: float | None = None
    _started: float | None = None
    _ended: float = 0.0
    _adopted: list[float] = field(default_factory=list[float])
    _tools: dict[str, _ToolTimes] = field(default_factory=dict[str, _ToolTimes])
    _omitted: int = 0
    _attributes: Attributes = field(default_factory=dict[str, str | int | float | bool])
    _error: str | None = None
    _is_whole: bool = False

    def add(self, event: Event) -> None:
        """Take the next event of the session."""
        if event.kind == "process.adopted" and self._began is not None:
            self._adopted.append(event.at)
        if event.turn != self.turn:
            return
        if self._began is None:
            self._began = event.at
            is_own = event.kind == "turn.started" and "origin" in event.body
            self._is_whole = event.kind == "turn.queued" or is_own
        match event.kind:
            case "turn.queued":
                body = event.body
                trace = body.get("trace")
                self._context = None if trace is None else traces.parse(trace)
                self._add_content("gen_ai.input.messages", body["prompt"])
            case "turn.started":
                self._started = event.at
            case "update":
                mark = MARKS.get(self.dialect)
                if mark is None or mark in event.data:
                    for update in event.body["updates"]:
                        self._add_update(update, event.at)
            case "turn.ended":
                self._end(event)
            case _:
                pass

    @property
    def is_whole(self) -> bool:
        """Whether the first event was that of the ask, or of a turn without one."""
        return self._is_whole

    @property
    def context(self) -> TraceContext:
        """The trace of the turn. A turn without one begins its own."""
        if self._context is not None:
            return self._context
        return context_of(self.session, self.turn, None)

    def spans(self) -> list[SpanData]:
        """Return the spans; none if the trace is not recorded."""
        if self._began is None or not self.context.is_sampled:
            return []
        return [*self._owners(), *self._queue(), *self._tool_spans()]

    # -- the events -------------------------------------------------------------------------------
    def _end(self, event: Event) -> None:
        body, said = event.body, self._attributes
        failure: dict[str, Any] = body.get("failure") or {}
        used: dict[str, Any] = body.get("used") or {}
        tokens: dict[str, int] = used.get("tokens") or {}
        self._ended = event.at
        outcome = str(body["outcome"])
        said["banksman.outcome"] = outcome
        for name, key in (
            ("input_tokens", "input"),
            ("output_tokens", "output"),
            ("cache_read.input_tokens", "cache_read"),
            ("cache_creation.input_tokens", "cache_write"),
        ):
            if (count := tokens.get(key)) is not None:
                said[f"gen_ai.usage.{name}"] = count
        if outcome in ERRORS:
            self._error = str(failure.get("kind") or outcome)
        self._add_content("gen_ai.output.messages", body.get("text"))

    def _add_content(self, name: str, value: Any) -> None:
        if self.has_content and value is not None:
            self._attributes[name] = _text(value)

    def _add_update(self, update: dict[str, Any], at: float) -> None:
        kind, id = update.get("sessionUpdate"), str(update.get("toolCallId"))
        if kind == "tool_call" and id not in self._tools:
            if len(self._tools) >= TOOLS_MAX:
                self._omitted += 1
                return
            title = str(update.get("title") or "")
            # Only Claude's titles begin with the name of the tool. Others may be content.
            is_named = self.dialect == "claude" and title
            name = title.partition(":")[0] if is_named else str(update.get("kind") or "other")
            said: Attributes = {"gen_ai.tool.name": name, "gen_ai.tool.call.id": id}
            if self.has_content and update.get("rawInput") is not None:
                said["gen_ai.tool.call.arguments"] = _text(update["rawInput"])
            self._tools[id] = _ToolTimes(at, said, len(self._adopted))
        tool = self._tools.get(id)
        if tool is not None and update.get("status") in ("completed", "failed"):
            tool.end, tool.is_failed = at, update["status"] == "failed"
            if self.has_content and update.get("content") is not None:
                tool.attributes["gen_ai.tool.call.result"] = _text(update["content"])

    # -- the spans --------------------------------------------------------------------------------
    def _owner_id(self, number: int) -> str:
        if not number:
            return id_of(self.session, self.turn)
        return _hash(f"{self.session}/{self.turn}/{number}", 16)

    def _owners(self) -> list[SpanData]:
        """Return the spans of the turn: one for each host that had it."""
        assert self._began is not None
        parent = None if self.context.parent == NO_PARENT else self.context.parent
        ends = [*self._adopted, self._ended]
        starts = [self._began, *self._adopted]
        said: Attributes = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": self.agent,
            "gen_ai.conversation.id": self.session,
            "banksman.turn.id": self.turn,
        }
        found = [
            SpanData(
                f"invoke_agent {self.agent}",
                self._owner_id(number),
                parent,
                *(start, end, dict(said)),
                continues=self._owner_id(number - 1) if number else None,
            )
            for number, (start, end) in enumerate(zip(starts, ends, strict=True))
        ]
        last = found[-1]
        last.error = self._error
        last.attributes |= self._attributes
        if self._omitted:
            last.attributes["banksman.tools_omitted"] = self._omitted
        return found

    def _queue(self) -> list[SpanData]:
        assert self._began is not None
        end = self._ended if self._started is None else self._started
        id = _hash(f"{self.session}/{self.turn}/queue", 16)
        return [SpanData("queue", id, self._owner_id(0), self._began, end, {})]

    def _tool_spans(self) -> list[SpanData]:
        found: list[SpanData] = []
        for id, tool in self._tools.items():
            name = tool.attributes["gen_ai.tool.name"]
            error = "tool_error" if tool.is_failed else None
            found.append(
                SpanData(
                    f"execute_tool {name}",
                    _hash(f"{self.session}/{self.turn}/tool/{id}", 16),
                    self._owner_id(tool.owner),
                    tool.start,
                    self._ended if tool.end is None else tool.end,
                    {"gen_ai.operation.name": "execute_tool", **tool.attributes},
                    # A tool that the end of the turn has cut off.
                    "unfinished" if tool.end is None else error,
                )
            )
        return found


def context_of(session: str, turn: str, trace: str | None) -> TraceContext:
    """Return the trace of a turn. `trace`: the `traceparent` of its ask; None begins another."""
    found = None if trace is None else traces.parse(trace)
    return found or TraceContext(_hash(f"{session}/{turn}", 32), NO_PARENT)


def id_of(session: str, turn: str) -> str:
    """Return the id of the span of a turn, on its first host."""
    return traces.span_of(turn) or _hash(f"{session}/{turn}/0", 16)


def _hash(text: str, digits: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text[:CONTENT_CHARACTERS_MAX]
