"""The agents that are known, one TOML file each: what to run, how it speaks, and how long it needs to stop.

A profile is data about a program, measured once. What is asked of one session (a model, a folder, another command) is
not here. A file is checked whole before anything is started with it, and a wrong one says which key of which file.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, cast

from banksman.core.clocks import Name
from banksman.core.dialects.claude import CLAUDE
from banksman.core.dialects.dialect import Dialect
from banksman.core.ladder import Timings
from banksman.errors import UsageError
from banksman.run.commands.options import SECONDS_MAX

CAPABILITIES = frozenset(
    (
        *("fork", "hooks", "images", "interrupt", "mcp_servers", "model", "permission_mode", "questions", "resume"),
        *("schema", "steer", "system_prompt", "tools"),
    )
)
_TOP = frozenset(("title", "command", "dialect", "install", "capabilities", "drain_seconds", "ladder", "clocks", "env"))
_LADDER = frozenset(("eof_grace", "grace", "linger", "drain"))
_CLOCKS = frozenset(str(name) for name in Name)
_ENV = frozenset(("scrub",))


class AgentDialect(Dialect, Protocol):
    """A dialect that also knows its program's flags."""

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


DIALECTS: Mapping[str, AgentDialect] = MappingProxyType({"claude": CLAUDE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What is known about an agent. `clocks`: seconds by the watchdog's name. `scrub`: see environment.py."""

    name: str
    title: str
    command: tuple[str, ...]
    dialect: AgentDialect
    install: str = ""
    capabilities: frozenset[str] = frozenset()
    # How long an interrupted turn may take to its boundary.
    drain_seconds: float = 5.0
    timings: Timings
    clocks: Mapping[str, float]
    scrub: tuple[str, ...] = ()


def names() -> list[str]:
    """The agents that come with the package."""
    return sorted(entry.name.removesuffix(".toml") for entry in _folder().iterdir() if entry.name.endswith(".toml"))


def load_or_plain(agent: str) -> Profile:
    """Of an agent whose profile is gone: its sessions can be read all the same, if not as nicely."""
    try:
        return load(agent)
    except UsageError:
        return replace(load("claude"), name=agent)


def load(name: str) -> Profile:
    """The profile of an agent that comes with the package."""
    known = names()
    # Membership, and not the file system, decides: a name is no path.
    if name not in known:
        raise UsageError(f"there is no agent {name!r}", hint=f"known are: {', '.join(known)}", agent=name)
    return parse((_folder() / f"{name}.toml").read_text(encoding="utf-8"), name=name, source=f"the profile {name!r}")


def load_file(path: str | os.PathLike[str]) -> Profile:
    """A profile of the caller's own; its name is the file's."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as exc:
        raise UsageError(f"cannot read the profile {file}: {exc.strerror}", hint="the path of a TOML file") from exc
    except UnicodeDecodeError as exc:
        raise UsageError(f"the profile {file} is not UTF-8: {exc.reason}", hint="TOML is always UTF-8") from exc
    return parse(text, name=file.stem, source=str(file))


def parse(text: str, *, name: str, source: str) -> Profile:
    """`source` is what an error calls it."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise UsageError(f"{source} is not TOML: {exc}", hint="see https://toml.io", agent=name) from exc
    top = _Table(source, "", data, _TOP)
    ladder, clocks, env = top.table("ladder", _LADDER), top.table("clocks", _CLOCKS), top.table("env", _ENV)
    # One source for the numbers that are not given: the ladder's own.
    usual = Timings()
    return Profile(
        name=name,
        title=top.text("title", name),
        command=top.words("command", required=True),
        dialect=DIALECTS[top.one_of("dialect", DIALECTS)],
        install=top.text("install", ""),
        capabilities=frozenset(top.words("capabilities", among=CAPABILITIES)),
        drain_seconds=top.seconds("drain_seconds", 5.0),
        timings=Timings(
            grace=ladder.seconds("grace", usual.grace),
            linger=ladder.seconds("linger", usual.linger),
            drain=ladder.seconds("drain", usual.drain),
            eof=ladder.seconds("eof_grace", 0.0) if "eof_grace" in ladder.data else None,
        ),
        clocks=MappingProxyType({key: clocks.seconds(key, 0.0) for key in clocks.data}),
        scrub=env.words("scrub"),
    )


def _folder() -> Any:
    return resources.files("banksman") / "profiles"


class _Table:
    """A table of the file, and the checks that name the key they are about."""

    def __init__(self, source: str, path: str, data: Mapping[str, Any], known: Iterable[str]) -> None:
        self.source = source
        self.path = path
        self.data = data
        for key in data:
            if key not in known:
                raise self._wrong(f"there is no key {path}{key}", f"known are: {', '.join(sorted(known))}")

    def _wrong(self, what: str, hint: str) -> UsageError:
        return UsageError(f"{self.source}: {what}", hint=hint)

    def _not(self, key: str, hint: str) -> UsageError:
        return self._wrong(f"{self.path}{key} cannot be {self.data.get(key)!r:.60}", hint)

    def table(self, key: str, known: Iterable[str]) -> _Table:
        value = self.data.get(key, {})
        if not isinstance(value, dict):
            raise self._not(key, f"a table: [{key}]")
        return _Table(self.source, f"{key}.", cast(dict[str, Any], value), known)

    def text(self, key: str, default: str) -> str:
        value = self.data.get(key, default)
        if not isinstance(value, str):
            raise self._not(key, "text")
        return value

    def one_of(self, key: str, known: Iterable[str]) -> str:
        value = self.text(key, "")
        if value not in known:
            raise self._not(key, f"one of: {', '.join(sorted(known))}")
        return value

    def words(self, key: str, *, required: bool = False, among: Iterable[str] | None = None) -> tuple[str, ...]:
        value = self.data.get(key, [])
        items: list[Any] = cast(list[Any], value) if isinstance(value, list) else [value]
        if not isinstance(value, list) or not all(isinstance(item, str) and item for item in items):
            raise self._not(key, "a list of words")
        if required and not items:
            raise self._not(key, "a list of words, the program first")
        for item in items:
            if among is not None and item not in among:
                raise self._wrong(f"{self.path}{key} cannot hold {item!r}", f"known are: {', '.join(sorted(among))}")
        return tuple(items)

    def seconds(self, key: str, default: float) -> float:
        value = self.data.get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # Every wait has an end, so infinity is none of them; and NaN is not between any two numbers.
        if not is_number or not 0 <= value <= SECONDS_MAX:
            raise self._not(key, "a number of seconds, 0 or more")
        return float(value)
