"""Agent profile: measured properties of an agent program, checked as tables of a TOML file.

A profile describes a program, not a session. A caller's choices for one session (a model, a folder,
another command) are not part of it. `known_agents.py` finds and reads the files, and resolves
duplicate names. `transcript_path` finds the agent's file of a conversation.

`parse` checks all tables before a process is started with them. An error names the file, the key,
the value and the allowed values. An unknown key is an error too, because a misspelt key would
silently mean the default.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, cast

from msgspec import structs

from banksman.commands.options import SECONDS_MAX
from banksman.core.dialects.acp import acp
from banksman.core.dialects.claude import CLAUDE
from banksman.core.dialects.codex import CODEX
from banksman.core.dialects.dialect import SERVICES, Dialect, Quirks, fault
from banksman.core.session.watchdogs import ClockName
from banksman.core.stop_ladder import Timings
from banksman.errors import UsageError
from banksman.process import launch
from banksman.sessions import containment
from banksman.sessions.containment import Containment

# Capabilities that a caller can request from a session. Agents differ in them.
CAPABILITIES = frozenset(
    (
        *(
            "audio",
            "fork",
            "hooks",
            "images",
            "interrupt",
            "mcp_servers",
            "model",
            "permission_mode",
            "questions",
        ),
        *("resume", "schema", "steer", "system_prompt", "tools"),
    )
)
# Capabilities that a dialect cannot express.
_WORDLESS = {
    "acp": ("hooks", "schema", "steer", "tools"),
    "codex": ("audio", "hooks", "tools"),
    "claude": ("audio",),
}
AFTER_INTERRUPT = ("sweep", "keep")
# No prompt is sent in this time after each turn. A longer time is a mistake and would be felt as
# slowness.
QUIET_SECONDS_MAX = 5.0
_TOP = frozenset(
    (
        *(
            "title",
            "command",
            "dialect",
            "install",
            "website",
            "capabilities",
            "drain_seconds",
            "quiet_seconds",
        ),
        *("after_interrupt", "transcripts", "extends", "ladder", "clocks", "env", "quirks"),
        "containment",
    )
)
_NONE = Quirks()
_LADDER = frozenset(("eof_grace", "grace", "linger", "drain"))
_CLOCKS = frozenset(str(name) for name in ClockName)
# Watchdogs of a turn that every agent has, unless its profile or the caller says otherwise. Without
# them, a turn that hangs would block its queue until a person acts. They are long: a model may
# think for minutes, and both stand still while a tool runs or a question waits.
TURN_CLOCKS = MappingProxyType({"bytes": 1800.0, "progress": 7200.0})
_ENV = frozenset(("scrub", "keep", "set", "account"))
# Removed from the environment of an agent unless its profile or the caller says otherwise.
SCRUB = ("nesting", "secrets")
_CONTAINMENT = frozenset(("user", "limits", "wrap", "sandbox", *containment.HOOKS))
_QUIRKS = frozenset(
    (
        "leaves_tools",
        "cancel_may_say",
        "error_texts",
        "silence_is_error",
        "recites_late",
        "usage_is_total",
        "serves",
        "note",
    )
)
# -- transcripts -----------------------------------------------------------------------------------
# A pattern such as `~/.house/{cwd_slug}/{conversation}.jsonl` begins with the agent's home, or with
# a folder that is named by a variable of its environment. So the path is always below one of these
# folders. The name of the conversation comes from the agent or from a log. It must be a single
# word; otherwise there is no path.
TRANSCRIPT_HINT = "use ~/… or $VARIABLE/… with {conversation}, optionally {cwd_slug}, without .."
# Claude truncates a longer folder name and appends a hash that other programs cannot compute.
SLUG_CHARACTERS_MAX = 200
_PATTERN = re.compile(
    r"(?:~|\$(?P<variable>[A-Z][A-Z0-9_]*))/(?P<rest>[^{}]*(?:\{(?:cwd_slug|conversation)\}[^{}]*)+)"
)
_CONVERSATION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_NO_WORD = re.compile(r"[^A-Za-z0-9]")


class ProfileTable:
    """Table of the file with typed access. Errors name the key.

    `path`: the prefix of its keys, such as `ladder.`
    """

    def __init__(
        self, source: str, path: str, data: Mapping[str, Any], known: Iterable[str]
    ) -> None:
        self.source = source
        self.path = path
        self.data = data
        known = sorted(known)
        for key in data:
            if key not in known:
                # No cutoff for similarity: the nearest key is suggested first, and the list of all
                # keys follows.
                nearest = difflib.get_close_matches(key, known, 1, 0)[0]
                hint = f"do you mean {path}{nearest}? known keys: {', '.join(known)}"
                raise self.wrong(f"there is no key {path}{key:.60}", hint)

    def wrong(self, what: str, hint: str) -> UsageError:
        """Return an error that names the file."""
        return UsageError(f"{self.source}: {what}", hint=hint)

    def cannot_be(self, key: str, hint: str) -> UsageError:
        """Return an error for the value of a key."""
        return self.wrong(f"{self.path}{key} cannot be {self.data.get(key)!r:.60}", hint)

    def cannot_hold(self, key: str, item: object, hint: str) -> UsageError:
        """Return an error for an item of a list."""
        return self.wrong(f"{self.path}{key} cannot hold {item!r:.60}", hint)

    def table(self, key: str, known: Iterable[str]) -> ProfileTable:
        """Return a subtable."""
        return ProfileTable(self.source, f"{self.path}{key}.", self._mapping(key), known)

    def text(self, key: str, default: str = "") -> str:
        """Return a text."""
        value = self.data.get(key, default)
        if not isinstance(value, str):
            raise self.cannot_be(key, "use text")
        return value

    def one_of(self, key: str, known: Iterable[str], default: str = "") -> str:
        """Return a text that is one of the known values."""
        value = self.text(key, default)
        if value not in known:
            raise self.cannot_be(key, f"use one of: {', '.join(sorted(known))}")
        return value

    def flag(self, key: str) -> bool:
        """Return a boolean."""
        value = self.data.get(key, False)
        if not isinstance(value, bool):
            raise self.cannot_be(key, "use true or false")
        return value

    def words(
        self,
        key: str,
        default: tuple[str, ...] = (),
        *,
        among: Iterable[str] | None = None,
        hint: str = "",
    ) -> tuple[str, ...]:
        """Return a list of words."""
        value = self.data.get(key, list(default))
        items: list[Any] = cast(list[Any], value) if isinstance(value, list) else [None]
        if not all(isinstance(item, str) and item for item in items):
            raise self.cannot_be(key, hint or "use a list of words")
        for item in items:
            if among is not None and item not in among:
                raise self.cannot_hold(key, item, f"use one of: {', '.join(sorted(among))}")
        return tuple(items)

    def texts(self, key: str) -> dict[str, str]:
        """Return a table that maps names to texts."""
        mapping = self._mapping(key)
        for name, value in mapping.items():
            if not isinstance(value, str):
                raise self.wrong(f"{self.path}{key}.{name} cannot be {value!r:.60}", "use text")
        return dict(mapping)

    def seconds(self, key: str, default: float) -> float:
        """Return a number of seconds."""
        value = self.data.get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # Every wait is finite, so infinity is rejected. NaN fails the comparison and is rejected
        # too.
        if not is_number or not 0 <= value <= SECONDS_MAX:
            raise self.cannot_be(key, "use a number of seconds, 0 or more")
        return float(value)

    def _mapping(self, key: str) -> dict[str, Any]:
        value = self.data.get(key, {})
        if not isinstance(value, dict):
            raise self.cannot_be(key, f"use a table: [{self.path}{key}]")
        return cast(dict[str, Any], value)


class AgentDialect(Dialect, Protocol):
    """Dialect that can also build the command line of its program."""

    def mcp_file(self, servers: Sequence[Mapping[str, Any]]) -> str | None:
        """Return the content of a private configuration file for the agent.

        None: the dialect sends the servers in its protocol.
        """
        ...

    def argv(
        self,
        command: Sequence[str],
        *,
        resume: str | None = None,
        forks: bool = False,
        mcp_config: str | None = None,
        model: str | None = None,
        permission_mode: str | None = None,
        system_prompt: str | None = None,
        args: Sequence[str] = (),
    ) -> list[str]: ...


def _claude(_: Quirks) -> AgentDialect:
    return CLAUDE


def _codex(_: Quirks) -> AgentDialect:
    return CODEX


# Factories of dialects by name. A factory gets the quirks of the program.
DIALECTS: Mapping[str, Callable[[Quirks], AgentDialect]] = MappingProxyType(
    {"acp": acp, "claude": _claude, "codex": _codex}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Known properties of an agent.

    - `source`: the file of the profile; None for a profile of the package
    - `clocks`: seconds by the watchdog's name; see `TURN_CLOCKS`
    - `scrub`, `keep`, `variables`: variables to remove from its environment, to keep although they
      may be secrets, and to add; see process/launch.py
    - `containment`: what the agent may use, if the caller says nothing else
    - `account`: variables that decide which account of the provider the agent uses; empty: all that
      the caller sets
    - `quiet_seconds`: how long the agent must be quiet after a boundary
    - `leaves_tools`: processes that the agent has started keep running after an interrupt
    - `transcripts`: patterns of the file that the agent needs to resume a conversation, see
      `transcript_path`; empty if unknown
    - `note`: other remarks, for people
    """

    name: str
    title: str
    source: str | None = None
    # Empty: the caller that opens a session must pass the command.
    command: tuple[str, ...]
    dialect: AgentDialect
    install: str = ""
    website: str = ""
    capabilities: frozenset[str] = frozenset()
    # How long an interrupted turn may take until its boundary.
    drain_seconds: float = 5.0
    quiet_seconds: float = 0.0
    leaves_tools: bool = False
    after_interrupt: str = "sweep"
    transcripts: tuple[str, ...] = ()
    timings: Timings
    clocks: Mapping[str, float]
    scrub: tuple[str, ...] = SCRUB
    keep: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    account: tuple[str, ...] = ()
    containment: Containment = containment.NOTHING
    quirks: Quirks = _NONE
    note: str = ""

    def own_command(self) -> tuple[str, ...]:
        """Return the command to run if the caller passes none."""
        if not self.command:
            message = f"cannot start the agent {self.name!r}: its profile has no command"
            raise UsageError(message, hint="pass command=", agent=self.name)
        return self.command

    def without_services(self) -> Profile:
        """Return the profile of an agent for which Banksman reads no files and runs no commands."""
        quirks = structs.replace(self.quirks, serves=())
        return replace(self, quirks=quirks, dialect=DIALECTS[self.dialect.name](quirks))

    def repairs(self) -> list[str]:
        """Describe the agent's known defects and how Banksman corrects them, for people."""
        ended = "ended" if self.after_interrupt == "sweep" else "reported and kept"
        said = " or ".join(self.quirks.cancel_may_say)
        silent = "a turn that ends successfully without output is reported as a failure"
        quiet = f"output up to {self.quiet_seconds:g} s after a turn's end belongs to that turn"
        quirks = {
            f"tools that are still running after an interrupt are {ended}": self.leaves_tools,
            f"{said} after an interrupt is reported as cancelled": bool(said),
            "an error that arrives as an answer is reported as a failure": bool(
                self.quirks.error_texts
            ),
            silent: self.quirks.silence_is_error,
            quiet: self.quiet_seconds,
        }
        return [words for words, holds in quirks.items() if holds]


def parse(
    data: Mapping[str, Any],
    *,
    name: str,
    said_as: str,
    source: str | None = None,
    is_recorded: bool = False,
) -> Profile:
    """Parse the content of a profile.

    `said_as`: the name of the profile in error messages. `is_recorded`: for a session that was
    opened before. What earlier versions accepted, without an effect, does not stop it.
    """
    top = ProfileTable(said_as, "", data, _TOP)
    ladder, clocks = top.table("ladder", _LADDER), top.table("clocks", _CLOCKS)
    env, quirks = top.table("env", _ENV), top.table("quirks", _QUIRKS)
    # The defaults of the ladder are defined only in `Timings`.
    usual = Timings()
    spoken = top.one_of("dialect", DIALECTS)
    dialect = DIALECTS[spoken]
    read = _quirks(quirks)
    return Profile(
        name=name,
        title=top.text("title", name),
        source=source,
        command=_command(top),
        dialect=dialect(read),
        install=top.text("install"),
        website=top.text("website"),
        capabilities=frozenset(
            top.words("capabilities", among=CAPABILITIES.difference(_WORDLESS[spoken]))
        ),
        drain_seconds=top.seconds("drain_seconds", 5.0),
        quiet_seconds=_quiet(top),
        leaves_tools=quirks.flag("leaves_tools"),
        after_interrupt=top.one_of("after_interrupt", AFTER_INTERRUPT, "sweep"),
        transcripts=_transcripts(top),
        timings=Timings(
            grace=ladder.seconds("grace", usual.grace),
            linger=ladder.seconds("linger", usual.linger),
            drain=ladder.seconds("drain", usual.drain),
            eof=ladder.seconds("eof_grace", 0.0) if "eof_grace" in ladder.data else None,
        ),
        clocks=MappingProxyType(_clock_seconds(clocks)),
        scrub=_names(env, "scrub", SCRUB, is_recorded=is_recorded),
        keep=_names(env, "keep", is_recorded=is_recorded),
        variables=MappingProxyType(_variables(env)),
        account=env.words("account"),
        containment=_containment(top, is_recorded=is_recorded),
        quirks=read,
        note=quirks.text("note"),
    )


def _command(top: ProfileTable) -> tuple[str, ...]:
    hint = "use a list of words, the program first, or [] if the caller passes the command"
    if "command" not in top.data:
        # A missing key is probably a mistake. An empty list is a deliberate choice.
        raise top.cannot_be("command", hint)
    return top.words("command", hint=hint)


def _quiet(top: ProfileTable) -> float:
    seconds = top.seconds("quiet_seconds", 0.0)
    if seconds > QUIET_SECONDS_MAX:
        hint = f"use at most {QUIET_SECONDS_MAX:g}: the next turn begins after that time"
        raise top.cannot_be("quiet_seconds", hint)
    return seconds


def _transcripts(top: ProfileTable) -> tuple[str, ...]:
    patterns = top.words("transcripts")
    for pattern in patterns:
        if not is_transcript_pattern(pattern):
            raise top.cannot_hold("transcripts", pattern, TRANSCRIPT_HINT)
    return patterns


def _containment(top: ProfileTable, *, is_recorded: bool) -> Containment:
    table = top.table("containment", _CONTAINMENT)
    if {"wrap", "sandbox"} <= table.data.keys():
        raise table.cannot_be("wrap", "leave out wrap or sandbox")
    parts = {name: value for name, value in table.data.items() if name != "sandbox"}
    if "sandbox" in table.data:
        parts["wrap"] = table.text("sandbox")
    for name in {"wrap", *containment.HOOKS} & table.data.keys():
        parts[name] = table.words(name)
    try:
        found = containment.checked(**parts)
        if not is_recorded:  # The session checks its own, which may be another.
            found.check_limits()
    except UsageError as exc:
        raise table.wrong(f"containment: {exc.args[0]}", exc.hint) from exc
    return found


def _names(
    env: ProfileTable, key: str, usual: tuple[str, ...] = (), *, is_recorded: bool
) -> tuple[str, ...]:
    def wrong(name: str) -> UsageError:
        return env.cannot_hold(key, name, containment.NAMES_HINT)

    return containment.names(env.words(key, usual), wrong, is_recorded=is_recorded)


def _variables(env: ProfileTable) -> dict[str, str]:
    found = env.texts("set")
    try:
        launch.build(found, inherit=False)
    except UsageError as exc:
        raise env.wrong(f"env.set: {exc.args[0]}", exc.hint) from exc
    return found


def _quirks(table: ProfileTable) -> Quirks:
    patterns = table.words("error_texts")
    for pattern in patterns:
        problem = fault(pattern)
        if problem is not None:
            raise table.cannot_hold("error_texts", pattern, f"it {problem}")
    return Quirks(
        cancel_may_say=table.words("cancel_may_say"),
        error_texts=patterns,
        silence_is_error=table.flag("silence_is_error"),
        serves=table.words("serves", SERVICES, among=SERVICES),
        recites_late=table.flag("recites_late"),
        usage_is_total=table.flag("usage_is_total"),
    )


def is_transcript_pattern(text: str) -> bool:
    """Return whether a text is a valid pattern of a transcript's path."""
    found = _PATTERN.fullmatch(text)
    return found is not None and "{conversation}" in text and ".." not in text and "\0" not in text


def transcript_path(
    patterns: Sequence[str], *, cwd: str, conversation: str, env: Mapping[bytes, bytes]
) -> Path | None:
    """Return the file of a conversation, by the first pattern whose variable is set.

    None: the path cannot be determined. Reads the file system, because the agent names its folder
    by the real path.
    """
    if not _CONVERSATION.fullmatch(conversation):
        return None
    for pattern in patterns:
        found = _PATTERN.fullmatch(pattern)
        assert found is not None, "it was checked when the profile was read"
        below = env.get(os.fsencode(found["variable"] or "HOME"))
        if not below:
            continue
        slug = _NO_WORD.sub("-", os.path.realpath(cwd))
        if not os.path.isabs(below) or (
            "{cwd_slug}" in pattern and len(slug) > SLUG_CHARACTERS_MAX
        ):
            return None
        rest = found["rest"].replace("{cwd_slug}", slug).replace("{conversation}", conversation)
        return Path(os.fsdecode(below), rest)
    return None


def _clock_seconds(clocks: ProfileTable) -> dict[str, float]:
    """Return the watchdogs of a profile. TOML has no null, so 0 turns a watchdog of a turn off."""
    said = {key: clocks.seconds(key, 0.0) for key in clocks.data}
    found = {**TURN_CLOCKS, **said}
    return {key: seconds for key, seconds in found.items() if seconds or key == ClockName.START}
