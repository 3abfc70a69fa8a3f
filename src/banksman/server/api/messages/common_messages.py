"""Types that the other messages share: enumerations, limits, and the base classes of requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from msgspec import Meta, Struct

from banksman.commands.result import Ended
from banksman.commands.running_command import State
from banksman.errors import ErrorKind
from banksman.sessions.arguments import CALLER_CHARACTERS_MAX, WORDS
from banksman.sessions.ask_arguments import ON_BUSY, ON_PREEMPT
from banksman.sessions.questions import PLACES

# Strings with a fixed set of values, each a named schema of the OpenAPI description.
#
# The fields stay plain strings. The code that uses a value checks it, and its error names the valid
# values.


def one_of(title: str, values: Iterable[str], description: str) -> Meta:
    """Return the schema annotation of a string with these values."""
    return Meta(min_length=1, max_length=255, extra_json_schema=_enum(title, values, description))


def _enum(title: str, values: Iterable[str], description: str) -> dict[str, Any]:
    return {"title": title, "enum": [str(value) for value in values], "description": description}


# Copies of enumerations of the core, which the server does not import. A test compares them
# (tests/server/api/test_openapi.py).
TURN_STATES = ("queued", "starting", "running", "interrupting", "ended")
OUTCOME_KINDS = ("done", "interrupted", "preempted", "withdrawn", "failed", "refused", "unknown")
ENDED_BY = ("boundary", "ladder", "exit", "withdrawn", "already_over")
INTERRUPT_CAUSES = ("interrupt", "preempt", "clock", "close", "replace", "budget")
CLOCK_NAMES = ("start", "bytes", "progress", "tool", "human", "overall", "deadline")
PRIORITY_NAMES = ("background", "normal", "interactive")
RULINGS = ("allow", "deny", "ask")
PHASES = (
    *(
        "idle",
        "backing_off",
        "starting",
        "running",
        "interrupting",
        "stopping",
        "draining",
        "closing",
        "closed",
    ),
    *(
        "leaving",
        "handing",
        "parting",
        "left",
        "failed",
        "fenced",
        "deleted",
        "elsewhere",
        "lost",
        "asleep",
    ),
)
STATES = (
    "running",
    "asks",
    "queued",
    "idle",
    "wedged",
    "gone",
    "elsewhere",
    "unreachable",
    "not movable",
)
SIGNALS = (
    *(
        "HUP",
        "INT",
        "QUIT",
        "ABRT",
        "KILL",
        "USR1",
        "USR2",
        "PIPE",
        "ALRM",
        "TERM",
        "CHLD",
        "CONT",
        "STOP",
        "TSTP",
    ),
    *("TTIN", "TTOU", "URG", "XCPU", "XFSZ", "VTALRM", "PROF", "WINCH", "IO", "SYS"),
)

SessionPhase = Annotated[
    str,
    one_of(
        "SessionPhase",
        PHASES,
        "What a session is doing, in detail. "
        "`fenced`: another writer has claimed it. `left`: this host has handed it over. "
        "`elsewhere`: another live host owns it. `lost`: its host died, and no host owns it yet. "
        "`asleep`: its host released it, and no host owns it; the next ask or open claims it. "
        "A list shows a closed session as `asleep`, too.",
    ),
]
SessionState = Annotated[
    str,
    one_of(
        "SessionState",
        STATES,
        "The phase in one word. `asks`: a question waits for an answer. "
        "`wedged`: it is stuck, or seems to be. `queued`: asks wait and none runs. "
        "`elsewhere`: another live host owns it. "
        "`gone`: its phase is `asleep`, `lost`, `closed`, `left` or `deleted`, "
        "and no ask is known to wait in it. `unreachable`: its host is silent. "
        "`not movable`: its host died and no other host can take it over.",
    ),
]
TurnState = Annotated[str, one_of("TurnState", TURN_STATES, "The progress of a turn.")]
OutcomeKind = Annotated[
    str,
    one_of(
        "OutcomeKind",
        OUTCOME_KINDS,
        "How a turn ended. `done`: the agent finished it. "
        "`interrupted`: a client stopped it. `preempted`: a more urgent ask stopped it. "
        "`withdrawn`: it ended in the queue. `failed`: the agent or the log failed. "
        "`refused`: Banksman declined it before it was sent. "
        "`unknown`: the host died while it was open.",
    ),
]
EndedBy = Annotated[
    str,
    one_of(
        "EndedBy",
        ENDED_BY,
        "What ended a turn. `boundary`: the agent said that it was over. "
        "`ladder`: its process was stopped. `exit`: its process exited. "
        "`withdrawn`: it was still queued. `already_over`: it had ended before.",
    ),
]
InterruptCause = Annotated[
    str, one_of("InterruptCause", INTERRUPT_CAUSES, "Why a turn is stopped before its end.")
]
ClockName = Annotated[
    str,
    one_of(
        "ClockName",
        CLOCK_NAMES,
        "A watchdog. `start`: the handshake. `bytes`: no output. `progress`: no meaningful frame. "
        "`tool`: a tool runs. `human`: a question waits. `overall`: the whole turn. "
        "`deadline`: the deadline of the ask.",
    ),
]
ErrorKindName = Annotated[
    str,
    one_of(
        "ErrorKind",
        tuple(ErrorKind),
        "Cause of an agent's failure. `rate_limited`: a short throttle. `usage_limit`: the account "
        "has used up a window. `overloaded`: the provider fails. `auth`: key or login. `billing`: "
        "payment. `invalid_request`: the provider refuses the request. `context_overflow`: the "
        "conversation is too long. `max_turns`, `budget`: limits of the agent itself. `network`: "
        "no connection. `out_of_memory`: the kernel killed its process, mostly at its limit. "
        "`agent_exited`: its process ended. `protocol`: the agent broke its protocol.",
    ),
]
PriorityName = Annotated[
    str,
    one_of("PriorityName", PRIORITY_NAMES, "A priority class by name: 0, 10 and 20."),
]
OnBusy = Annotated[
    str,
    one_of(
        "OnBusy",
        ON_BUSY,
        "What happens if the session is busy. "
        "`enqueue`: wait. `reject`: fail with 409. `interrupt`: stop the turn that runs. "
        "`steer`: add the prompt to the turn that runs. `collect`: join other asks that wait.",
    ),
]
OnLimit = Annotated[
    str,
    one_of(
        "OnLimit",
        WORDS["on_limit"],
        "What asks do while the agent's account is limited. "
        "`fail`: they are sent, and fail. `wait`: they wait for the end of the limit.",
    ),
]
OnPreempt = Annotated[
    str,
    one_of(
        "OnPreempt",
        ON_PREEMPT,
        "What happens if a more urgent ask stops this turn. "
        "`end`: it ends as `preempted`. `requeue`: it waits again.",
    ),
]
Ruling = Annotated[str, one_of("Ruling", RULINGS, "Decision of a rule about a tool.")]
QuestionWants = Annotated[
    str,
    one_of(
        "QuestionWants",
        ("permission", "elicitation", "budget"),
        "`permission`: may the agent use a tool? `elicitation`: the agent asks for input. "
        "`budget`: a budget is used up, and the session asks what to do.",
    ),
]
# Besides `allow` and `deny`: the agent chooses the ids of the options that it offers.
Decision = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=255,
        extra_json_schema={
            "anyOf": [
                {"type": "string", **_enum("YesOrNo", ("allow", "deny"), "Yes or no.")},
                {"type": "string"},
            ]
        },
    ),
]
GivenAnswer = Annotated[
    str,
    one_of(
        "GivenAnswer",
        ("allow", "deny", "cancelled", "withdrawn"),
        "The answer to a question. `cancelled`: its turn was stopped. "
        "`withdrawn`: it no longer needs an answer.",
    ),
]
Remember = Annotated[
    str,
    one_of(
        "Remember",
        PLACES,
        "Where the agent stores the permission, so that it does not ask again. "
        "`session`: in its process, until that exits. "
        "`local`, `project`, `user`: in its settings file of this scope.",
    ),
]
CommandState = Annotated[str, one_of("CommandState", State, "The progress of a command.")]
CommandEnded = Annotated[
    str,
    one_of(
        "CommandEnded",
        Ended,
        "Why a command ended. `exited`: by itself, or by a signal from outside. "
        "`out_of_memory`: the kernel killed it, mostly at its limit `memory_bytes`.",
    ),
]
OutputStream = Annotated[
    str, one_of("OutputStream", ("stdout", "stderr"), "An output stream of a command.")
]
OutputEncoding = Annotated[
    str, one_of("OutputEncoding", ("text", "base64"), "How output is shown.")
]
SignalName = Annotated[str, one_of("SignalName", SIGNALS, "A signal, without `SIG`.")]
HealthStatus = Annotated[str, one_of("HealthStatus", ("ok",), "The health of the server.")]

# Limit of a waiting request, so that no proxy on the way takes the connection for dead.
WAIT_SECONDS_MAX = 60.0
# Limit of items of a list or a mapping: more than any client needs, and still quick to check.
ITEMS_MAX = 10_000

Text = Annotated[str, Meta(max_length=1 << 20)]
Texts = Annotated[list[Text], Meta(max_length=ITEMS_MAX)]
Variables = Annotated[dict[str, str], Meta(max_length=ITEMS_MAX)]
Rules = Annotated[dict[str, Ruling], Meta(max_length=ITEMS_MAX)]
Objects = Annotated[list[dict[str, Any]], Meta(max_length=ITEMS_MAX)]
Word = Annotated[str, Meta(min_length=1, max_length=255)]
CallerName = Annotated[str, Meta(min_length=1, max_length=CALLER_CHARACTERS_MAX)]


class Tokens(Struct):
    """Token counts by kind.

    Attributes:
        input: Input that was not cached.
        output: Everything that the model wrote, its thinking included.
        cache_read: Input that the provider read from its cache.
        cache_write: Input that the provider stored in its cache.
    """

    input: int
    output: int
    cache_read: int
    cache_write: int


class Usage(Struct):
    """Usage of a turn, or a sum of many.

    Attributes:
        tokens: Token counts by kind.
        usd: Cost in US dollars, the agent's own estimate; null if no agent reported one.
        working_seconds: Time in which a turn was open and did not wait for an answer.
        turns: Number of turns.
    """

    tokens: Tokens
    usd: float | None
    working_seconds: float
    turns: int


Seconds = Annotated[float, Meta(ge=0, le=1e8)]
Wait = Annotated[float, Meta(ge=0)]

_CONTENT = {
    "required": ["type"],
    "properties": {
        "type": {
            "type": "string",
            "enum": ["text", "image", "audio", "resource", "resource_link"],
            "description": "Kind of content; it decides which other members are required.",
        },
        "text": {"type": "string", "description": "`text`: the text."},
        "data": {"type": "string", "description": "`image` and `audio`: the content in base64."},
        "mimeType": {
            "type": "string",
            "description": "`image` and `audio`: the media type of `data`.",
        },
        "uri": {"type": "string", "description": "`resource_link`: where it is."},
        "name": {"type": "string", "description": "`resource_link`: its name."},
        "resource": {
            "type": "object",
            "additionalProperties": True,
            "description": "`resource`: an embedded file, with `uri` and `text` or `blob`.",
        },
    },
    "additionalProperties": True,
}
ContentBlock = Annotated[
    dict[str, Any],
    Meta(
        title="ContentBlock",
        description="One part of a prompt, as ACP defines it.",
        extra_json_schema=_CONTENT,
    ),
]
SessionUpdate = Annotated[
    dict[str, Any],
    Meta(
        title="SessionUpdate",
        description="One update of a conversation, as ACP defines it.",
        extra_json_schema={
            "required": ["sessionUpdate"],
            "properties": {
                "sessionUpdate": {
                    "type": "string",
                    "description": (
                        "Kind of update, such as `agent_message_chunk`, `tool_call` or `plan`."
                    ),
                },
            },
            "additionalProperties": True,
        },
    ),
]


class Body(Struct, forbid_unknown_fields=True, kw_only=True):
    """Base class of request bodies."""


class Query(Struct, forbid_unknown_fields=True, kw_only=True):
    """Base class of URL queries."""


class WaitFor(Query):
    """How long to wait for the end.

    Attributes:
        wait: Seconds to wait for the end, at most 60.
    """

    wait: Wait = 0.0


UNITS = ("tokens", "usd", "working_seconds", "turns")
Unit = Annotated[
    str,
    one_of(
        "BudgetUnit",
        UNITS,
        "What a cap counts. `tokens`: of all kinds. `usd`: the agent's own estimate. "
        "`working_seconds`: time in which a turn is open and waits for no answer. `turns`.",
    ),
]
BudgetScope = Annotated[
    str,
    one_of(
        "BudgetScope",
        ("session", "host", "caller"),
        "What a cap covers: a session over its whole life, or all turns, or the turns of a caller, "
        "of one day in UTC.",
    ),
]
OnBudget = Annotated[
    str,
    one_of(
        "OnBudget",
        ("queue", "stop", "ask"),
        "What happens at a cap. `queue`: the turn finishes, and no other is sent. `stop`: the turn "
        "is interrupted, too. `ask`: a question asks what to do.",
    ),
]
Caps = dict[Unit, Annotated[float, Meta(ge=0)]]


class CapUse(Struct):
    """A cap of a budget, and what is used of it.

    Attributes:
        scope: Scope of the cap.
        unit: Unit of its count.
        used: The used amount.
        cap: The cap.
        caller: The caller, if the cap is that of a caller; null: asks without a caller.
        reached: Whether no turn is sent because of it.
    """

    scope: BudgetScope
    unit: Unit
    used: float
    cap: float
    caller: str | None
    reached: bool
