"""Checks of the arguments of an open: names, options, budgets, the agent's command and servers.

A wrong argument is an error of the call. It must not reach the session state machine, where it
would fail every caller of the session. `session_spec.py` uses these checks, and `ask_arguments.py`
checks the arguments of an ask.

**Options.** In seconds unless the name says otherwise. Missing options come from the profile or
from `Config`:

- turns: `drain_seconds`, `settle_seconds`, `start_seconds`, `write_seconds`, `collect_seconds`,
  `setting_seconds`; `quiet_seconds`: how long the agent must be quiet after its boundary before the
  turn is over; `after_interrupt`: tools that the agent leaves running when it is interrupted are
  ended ("sweep") or only reported ("keep"); `clocks`: a mapping from the watchdog's name;
  `background_seconds`: how long a drain waits for background tasks of the agent
- the queue: `ageing_seconds`, `hold_idle_seconds`, `queue_max`, `when_full` ("refuse" or "drop"),
  `attempts_max`: how often a preempted ask is queued again; `on_limit`: while the agent's account
  is limited, asks "fail" or "wait" for the end of the limit
- questions: `question_seconds` (None: no limit), `question_default`: the answer after that time
  ("deny" or "allow"), `question_after_crash`: "withdraw", or "keep" for the host that takes the
  session over; that host gives the answer when the agent asks the same question again
- the process: `idle_seconds` (None: the process is kept), `recycle_seconds` (None: no age limit)
  with `save_prompt`, `backoff_seconds`, `backoff_seconds_max`, and the ladder's `eof_grace`,
  `grace`, `linger` and `drain`
- `budget`, `on_budget`: see `Host.open`
- `frame_bytes_max`: a longer frame of the agent is written to a file
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

from msgspec import Struct
from msgspec.structs import replace

from banksman.commands.options import SECONDS_MAX, check_seconds
from banksman.core.dialects.dialect import PLAIN
from banksman.core.redaction.redactor import Redactor
from banksman.core.session import budget as budgets
from banksman.core.session.budget import Budget
from banksman.core.session.event import storable
from banksman.core.session.session_config import Config
from banksman.core.session.watchdogs import ClockName
from banksman.core.stop_ladder import Timings
from banksman.core.wire.framing import FRAME_BYTES_MAX
from banksman.errors import NotFound, UsageError
from banksman.sessions.budget_ledger import ANY_CALLER, SharedBudgets
from banksman.sessions.profile import AFTER_INTERRUPT, QUIET_SECONDS_MAX, Profile

# -- names ----------------------------------------------------------------------------------------
NAME_CHARACTERS_MAX = 200
# What the process of a session can survive.
SURVIVES_CRASH = "crash"
# A name must not look like a generated id. Otherwise a lookup by id could find another session by
# its name.
ID = re.compile(r"s-[0-9a-f]{16}")

# -- options --------------------------------------------------------------------------------------
LADDER = {"eof_grace": "eof", "grace": "grace", "linger": "linger", "drain": "drain"}
# Each new ask is placed by a scan of the whole queue. A longer queue indicates another problem.
QUEUE_MAX_MAX = 4096
COUNTS = ("queue_max", "attempts_max", "frame_bytes_max")
WORDS = {
    "when_full": ("refuse", "drop"),
    "question_default": ("deny", "allow"),
    "question_after_crash": ("withdraw", "keep"),
    "after_interrupt": AFTER_INTERRUPT,
    "on_limit": ("fail", "wait"),
    "on_budget": ("queue", "stop", "ask"),
}
# Timeouts that may be None.
OPTIONAL = ("question_seconds", "idle_seconds", "recycle_seconds")
SECONDS = tuple(
    name for name in Config.__struct_fields__ if name.endswith(("_seconds", "_seconds_max"))
)
KNOWN = (*SECONDS, *COUNTS, *LADDER, *WORDS, "clocks", "save_prompt", "budget", "hook_seconds")
# How long `on_open` and `on_close` may take. A checkout or an image may need a minute.
HOOK_SECONDS = 120.0
# Options arrive from Python and as JSON.
_OFF_HINT = "use None (JSON: null) to turn it off"
# -- callers and budgets ---------------------------------------------------------------------------
# Long enough for a name, an address or a UUID.
CALLER_CHARACTERS_MAX = 200
# Callers that a host may have a budget for.
CALLERS_MAX = 10_000
# -- how a session is opened -----------------------------------------------------------------------
# More agents than anybody has accounts for.
FALLBACKS_MAX = 8
# The MCP server of the caller's tools. The agent calls them `mcp__banksman__NAME`.
TOOLS_SERVER = "banksman"


def checked_name(name: Any, redactor: Redactor | None = None) -> str | None:
    """Return a valid session name; None means no name."""
    if name is None:
        return None
    if (
        not isinstance(name, str)
        or not 1 <= len(name) <= NAME_CHARACTERS_MAX
        or not name.isprintable()
    ):
        hint = f"use 1 to {NAME_CHARACTERS_MAX} printable characters"
        raise UsageError(f"a session cannot be named {name!r:.60}", hint=hint)
    if ID.fullmatch(name):
        message = f"a session cannot be named {name}: it looks like an id"
        raise UsageError(message, hint="choose another name")
    check_no_secret("name", name, redactor)
    return name


def check_no_secret(what: str, text: str, redactor: Redactor | None) -> None:
    """Raise `UsageError` if the text contains a secret."""
    if redactor is not None and redactor.redact_text(text) != text:
        hint = f"leave the secret out; the {what} is written to the store"
        raise UsageError(f"a {what} cannot contain a secret", hint=hint)


def checked_id(session: Any) -> str:
    """Return an id or a name that a caller wants to look up."""
    if not isinstance(session, str):
        hint = "pass its id or its name"
        raise UsageError(f"cannot find a session by {session!r:.60}", hint=hint)
    try:
        session.encode()
    except UnicodeEncodeError as exc:
        raise NotFound(f"there is no session {session!r:.60}", hint="list the sessions") from exc
    return session


class OptionValues(Struct, frozen=True, kw_only=True):
    """Values of the options of one session."""

    timings: Timings
    frame_bytes_max: int
    hook_seconds: float
    _config: Config

    @property
    def on_limit(self) -> str:
        return self._config.on_limit

    def config(self, **more: Any) -> Config:
        return replace(self._config, **more)


def read_options(profile: Profile, options: Mapping[str, Any]) -> OptionValues:
    """Check the options and fill missing ones from the profile."""
    clocks: dict[str, float | None] = dict(profile.clocks)
    ladder: dict[str, float] = {}
    found: dict[str, Any] = {
        "drain_seconds": profile.drain_seconds,
        "quiet_seconds": profile.quiet_seconds,
        "leaves_tools": profile.leaves_tools,
        "after_interrupt": profile.after_interrupt,
    }
    for key, value in options.items():
        if key == "clocks":
            clocks.update(_clocks(value))
        elif key == "budget":
            found[key] = budgets.parse(value)
        elif key == "hook_seconds":
            check_seconds(key, value)
            found[key] = min(value, SECONDS_MAX)
        elif key in LADDER:
            check_seconds(key, value)
            ladder[LADDER[key]] = min(value, SECONDS_MAX)
        else:
            _check(key, value)
            if key == "save_prompt" and value is not None:
                # Reject a prompt that cannot be encoded now, and not when it is due.
                profile.dialect.begin(PLAIN).prompt("", value)
            found[key] = value
    start = clocks.pop(ClockName.START, None)
    if start is not None:
        found.setdefault("start_seconds", start)
    return OptionValues(
        timings=dataclasses.replace(profile.timings, **ladder),
        frame_bytes_max=found.pop("frame_bytes_max", FRAME_BYTES_MAX),
        hook_seconds=found.pop("hook_seconds", HOOK_SECONDS),
        _config=Config(dialect=profile.dialect, clocks=clocks, **found),
    )


def _check(key: str, value: Any) -> None:
    if key in WORDS:
        if value not in WORDS[key]:
            hint = "use " + " or ".join(f'"{word}"' for word in WORDS[key])
            raise UsageError(f"{key} cannot be {value!r:.60}", hint=hint)
    elif key in COUNTS:
        _check_count(key, value)
    elif key == "save_prompt":
        if value is not None and (not isinstance(value, str) or not value):
            raise UsageError(
                f"save_prompt cannot be {value!r:.60}", hint="use text, or leave it out"
            )
    elif key not in SECONDS:
        hint = f"use one of: {', '.join(sorted(KNOWN))}"
        raise UsageError(f"there is no option {key!r}", hint=hint)
    elif value is not None or key not in OPTIONAL:
        check_seconds(key, value)
        if key == "recycle_seconds" and value == 0:
            raise UsageError("recycle_seconds cannot be 0", hint=_OFF_HINT)
        seconds_max = QUIET_SECONDS_MAX if key == "quiet_seconds" else SECONDS_MAX
        if value is not None and value > seconds_max:
            hint = _OFF_HINT if key in OPTIONAL else f"use at most {seconds_max:g}"
            raise UsageError(f"{key} cannot be {value!r:.60}", hint=hint)


def _check_count(key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{key} cannot be {value!r:.60}", hint="use a whole number, 1 or more")
    if key == "queue_max" and value > QUEUE_MAX_MAX:
        hint = "use a smaller number, or open more sessions"
        raise UsageError(f"queue_max cannot be more than {QUEUE_MAX_MAX}", hint=hint)


def _clocks(value: Any) -> dict[str, float | None]:
    names = [str(name) for name in ClockName]
    if not isinstance(value, Mapping) or not all(key in names for key in value):  # pyright: ignore[reportUnknownVariableType]
        hint = f"use a mapping from {', '.join(names)} to seconds, or to None (JSON: null)"
        raise UsageError(f"clocks cannot be {value!r:.60}", hint=hint)
    wanted: Mapping[str, Any] = value  # pyright: ignore[reportUnknownVariableType]
    for key, seconds in wanted.items():
        if seconds is not None:
            check_seconds(key, seconds)
            if not 0 < seconds <= SECONDS_MAX:
                raise UsageError(f"the clock {key} cannot be {seconds!r:.60}", hint=_OFF_HINT)
    return dict(wanted)


# A budget of a command line or a settings file: `tokens=100000,usd=5`.
parse_budget = budgets.parse_words


def with_budget(
    options: Mapping[str, Any] | None, budget: Any, on_budget: Any
) -> Mapping[str, Any] | None:
    """Add the budget of a session, which has its own arguments in a call, to its options."""
    caps = budgets.parse(budget)
    more = {"budget": None if caps is None else caps.caps, "on_budget": on_budget}
    more = {name: value for name, value in more.items() if value is not None}
    return {**(options or {}), **more} if more else options


def check_caller(caller: Any) -> None:
    """Raise `UsageError` if usage cannot be counted under this name; None means no name."""
    if caller is None:
        return
    if (
        not isinstance(caller, str)
        or not 1 <= len(caller) <= CALLER_CHARACTERS_MAX
        or not caller.isprintable()
    ):
        hint = f"use 1 to {CALLER_CHARACTERS_MAX} printable characters"
        raise UsageError(f"caller cannot be {caller!r:.60}", hint=hint)


def checked_budgets(budget: Any, callers: Any) -> SharedBudgets | None:
    """Check the budgets of a host. None: there are none. Raises `UsageError`."""
    hint = f"use a mapping from callers, or {ANY_CALLER!r} for any caller, to budgets"
    if callers is not None and not isinstance(callers, Mapping):
        raise UsageError(f"caller_budgets cannot be {callers!r:.60}", hint=hint)
    found: dict[str, Budget] = {}
    for name, value in cast(Mapping[Any, Any], callers or {}).items():
        if not isinstance(name, str) or not name:
            raise UsageError(f"caller_budgets cannot have the caller {name!r:.60}", hint=hint)
        check_caller(name)
        caps = budgets.parse(value, f"the budget of {name[:CALLER_CHARACTERS_MAX]}")
        if caps is not None:
            found[name] = caps
    if len(found) > CALLERS_MAX:
        raise UsageError(f"too many callers have a budget: {len(found)}", hint=hint)
    caps = budgets.parse(budget)
    return None if caps is None and not found else SharedBudgets(caps, found)


def check_text(name: str, value: str) -> None:
    """Raise `UsageError` for a text that cannot be encoded as UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError as exc:
        hint = "a lone surrogate is not text; decode with errors='replace'"
        raise UsageError(f"cannot send {name} as UTF-8: {exc.reason}", hint=hint) from exc


def checked_mcp_servers(servers: Any) -> tuple[Mapping[str, Any], ...]:
    """Check the MCP servers and return a copy.

    The copy ensures that every process starts with the same servers.
    """
    hint = (
        'use the form of ACP: {"name": …, "command": …, "args": […]} '
        'or {"type": "http", "name": …, "url": …}'
    )
    if isinstance(servers, str | bytes | Mapping) or not isinstance(servers, Sequence):
        raise UsageError(f"mcp_servers cannot be {servers!r:.60}", hint=hint)
    items = cast(Sequence[Any], servers)
    names: set[str] = {TOOLS_SERVER}
    for server in items:
        if not _is_server(server) or server["name"] in names:
            hint = f"{hint}, each with a unique name"
            raise UsageError(f"an MCP server cannot be {server!r:.120}", hint=hint)
        names.add(server["name"])
    return tuple(_copy(server) for server in items)


def _copy(server: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return storable(server)
    except (TypeError, ValueError, RecursionError) as exc:
        message = f"an MCP server cannot be {server!r:.120}: {exc}"
        raise UsageError(message, hint="use plain JSON") from exc


def _is_server(server: Any) -> bool:
    if not isinstance(server, Mapping):
        return False
    members = cast(Mapping[str, Any], server)
    needed = ("name", "command") if "command" in members else ("name", "type", "url")
    words, *pairs = (members.get(name, ()) for name in ("args", "env", "headers"))
    if not all(isinstance(each, list | tuple) for each in (words, *pairs)):
        return False
    texts = (*(members.get(name) or None for name in needed), *words)
    return all(isinstance(text, str) for text in texts) and all(
        _is_pair(pair) for each in pairs for pair in each
    )


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, Mapping) and all(
        isinstance(cast(Any, pair).get(name), str) for name in ("name", "value")
    )


def checked_agent(agent: Any) -> str:
    """Return the name of an agent, or raise `UsageError`."""
    if not isinstance(agent, str):
        hint = "pass a name; see banksman agents"
        raise UsageError(f"agent cannot be {agent!r:.60}", hint=hint)
    return agent


def checked_survive(survive: Any) -> str | None:
    """Return what a session survives. Raises `UsageError`."""
    if survive not in (None, SURVIVES_CRASH):
        hint = f'pass "{SURVIVES_CRASH}", or leave it out'
        raise UsageError(f"survive cannot be {survive!r:.60}", hint=hint)
    if survive is not None and sys.platform != "linux":
        hint = "leave survive out: a process ends with its host here"
        raise UsageError(f"cannot survive a crash of the host on {sys.platform}", hint=hint)
    return survive


def checked_fallback(fallback: Any, agent: str) -> list[str]:
    """Return the names of the fall-backs of an agent, or raise `UsageError`."""
    hint = "pass a list of names of agents; see banksman agents"
    if isinstance(fallback, str | bytes | Mapping) or not isinstance(fallback, Sequence):
        raise UsageError(f"fallback cannot be {fallback!r:.60}", hint=hint)
    names = cast(Sequence[Any], fallback)
    for name in names:
        if not isinstance(name, str):
            raise UsageError(f"fallback cannot contain {name!r:.60}", hint=hint)
        if name == agent:
            message = f"fallback cannot contain {name}: it is the agent of the session"
            raise UsageError(message, hint="name other agents")
    if len(set(names)) < len(names):
        raise UsageError("fallback names an agent twice", hint="name each agent once")
    if len(names) > FALLBACKS_MAX:
        raise UsageError("fallback names too many agents", hint=f"use at most {FALLBACKS_MAX}")
    return list(names)


def checked_conversation(resume: Any) -> str | None:
    """Return the conversation to resume, or raise `UsageError`."""
    if resume is not None and (not isinstance(resume, str) or not resume):
        hint = "use the agent's id of a conversation"
        raise UsageError(f"resume cannot be {resume!r:.60}", hint=hint)
    return resume


def checked_command(command: Any, profile: Profile) -> list[str]:
    """Return the command as a list of words; None means the profile's command."""
    if command is None:
        return list(profile.own_command())
    if isinstance(command, str):
        try:
            command = shlex.split(command)
        except ValueError as exc:
            message = f"command cannot be {command!r}: {exc}"
            raise UsageError(message, hint="use a list of words") from exc
    words = checked_words("command", command)
    if not words:
        raise UsageError("command is empty", hint="name the program as its first word")
    return words


def checked_words(name: str, value: Any) -> list[str]:
    """Return a list of words, or raise `UsageError`."""
    if isinstance(value, str | bytes):
        raise UsageError(f"{name} must be a list of words, not {value!r:.60}")
    words: list[str] = []
    for word in value:
        if not isinstance(word, str | os.PathLike):
            raise UsageError(f"{name} cannot contain {word!r:.60}", hint="use text")
        words.append(os.fsdecode(word))  # pyright: ignore[reportUnknownArgumentType]
    return words
