"""How a session is opened: the profile, the caller's wishes, and what they make of a process. Checked at once, so that
a wrong word is an error of the call and not of the first turn.

`options` are the session's numbers (seconds, unless they say otherwise): `drain_seconds`, `settle_seconds`,
`start_seconds`, `write_seconds`, `ageing_seconds`, `hold_idle_seconds`, `collect_seconds`, `queue_max`, `when_full`
("refuse" or "drop"), `clocks` (a mapping from the watchdog's name), the ladder's `eof_grace`, `grace`, `linger`, and
`frame_bytes_max`, beyond which a frame from the agent goes to a file. `drain` is the ladder's last wait, and
`attempts_max` how often an ask that gives way comes back.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from banksman.core.clocks import Name
from banksman.core.framing import FRAME_BYTES_MAX
from banksman.core.ladder import Timings
from banksman.core.state import Config, Session
from banksman.errors import UsageError
from banksman.run import profiles
from banksman.run.agent import OnEvent, RealAgent
from banksman.run.launch import Launch, prepare
from banksman.run.options import SECONDS_MAX, check_seconds

LADDER = {"eof_grace": "eof", "grace": "grace", "linger": "linger", "drain": "drain"}
# Each ask is placed by a look at all that wait: a queue of more is a sign of something else.
QUEUE_MAX_MAX = 4096
NUMBERS = {field.name for field in fields(Config)} - {"dialect", "clocks", "when_full"}


class Opening:
    """What is needed to start the agent's process, again and again, always as it was asked for."""

    def __init__(
        self,
        agent: str,
        *,
        cwd: str | os.PathLike[str] | None,
        command: str | Sequence[str] | None,
        args: Sequence[str],
        env: Mapping[str, str] | None,
        inherit_env: bool,
        model: str | None,
        permission_mode: str | None,
        system_prompt: str | None,
        options: Mapping[str, Any] | None,
        resume: str | None,
    ) -> None:
        self.profile = profiles.load(agent)
        self._resume = resume
        # A relative folder means the one of the call, also for a process that is started later.
        self._cwd: str = os.path.abspath(os.fspath(cwd if cwd is not None else "."))
        self._command = _command(command, self.profile)
        self._wishes: dict[str, Any] = {
            "model": model,
            "permission_mode": permission_mode,
            "system_prompt": system_prompt,
            "args": _words("args", args),
        }
        self._env = env
        self._inherit_env = inherit_env
        wanted = dict(options or {})
        self.frame_bytes_max: int = wanted.pop("frame_bytes_max", FRAME_BYTES_MAX)
        _check_count("frame_bytes_max", self.frame_bytes_max)
        self._config, self._timings = _configure(self.profile, wanted)
        self._prepare(resume)

    def state(self) -> Session:
        return Session(config=self._config, conversation=self._resume)

    def spawn(self, conversation: str | None, on_event: OnEvent) -> RealAgent:
        return RealAgent(self._prepare(conversation), self._timings, on_event)

    def _prepare(self, conversation: str | None) -> Launch:
        argv = self.profile.dialect.argv(self._command, resume=conversation, **self._wishes)
        return prepare(argv, cwd=self._cwd, env=self._env, inherit_env=self._inherit_env, scrub=self.profile.scrub)


def _command(command: Any, profile: profiles.Profile) -> list[str]:
    if command is None:
        return list(profile.command)
    if isinstance(command, str):
        try:
            command = shlex.split(command)
        except ValueError as exc:
            raise UsageError(f"command cannot be {command!r}: {exc}", hint="a list of words says it exactly") from exc
    words = _words("command", command)
    if not words:
        raise UsageError("command is empty", hint="its first word is the program")
    return words


def _words(name: str, value: Any) -> list[str]:
    if isinstance(value, str | bytes):
        raise UsageError(f"{name} must be a list of words, not {value!r:.60}")
    words: list[str] = []
    for word in value:
        if not isinstance(word, str | os.PathLike):
            raise UsageError(f"{name} holds {word!r:.60}", hint="text")
        words.append(os.fsdecode(word))  # pyright: ignore[reportUnknownArgumentType]
    return words


def _configure(profile: profiles.Profile, options: Mapping[str, Any]) -> tuple[Config, Timings]:
    clocks: dict[str, float | None] = dict(profile.clocks)
    numbers: dict[str, Any] = {"drain_seconds": profile.drain_seconds}
    ladder: dict[str, float] = {}
    for key, value in options.items():
        if key == "clocks":
            clocks.update(_clocks(value))
        elif key == "when_full":
            if value not in ("refuse", "drop"):
                raise UsageError(f"when_full cannot be {value!r:.60}", hint='"refuse" or "drop"')
            numbers[key] = value
        elif key in LADDER:
            check_seconds(key, value)
            ladder[LADDER[key]] = min(value, SECONDS_MAX)
        elif key in NUMBERS:
            _check_number(key, value)
            numbers[key] = value
        else:
            known = ", ".join(sorted((*NUMBERS, *LADDER, "clocks", "frame_bytes_max", "when_full")))
            raise UsageError(f"there is no option {key!r}", hint=f"known are: {known}")
    start = clocks.pop(Name.START, None)
    if start is not None:
        numbers.setdefault("start_seconds", start)
    return Config(dialect=profile.dialect, clocks=clocks, **numbers), replace(profile.timings, **ladder)


def _check_number(key: str, value: Any) -> None:
    if key in ("queue_max", "attempts_max"):
        _check_count(key, value)
        return
    check_seconds(key, value)
    if value > SECONDS_MAX:
        raise UsageError(f"{key} cannot be {value!r:.60}", hint="every wait has an end")


def _check_count(key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{key} cannot be {value!r:.60}", hint="a whole number, 1 or more")
    if key == "queue_max" and value > QUEUE_MAX_MAX:
        raise UsageError(f"queue_max cannot be more than {QUEUE_MAX_MAX}", hint="refuse earlier, or open more sessions")


def _clocks(value: Any) -> dict[str, float | None]:
    names = [str(name) for name in Name]
    if not isinstance(value, Mapping) or not all(key in names for key in value):  # pyright: ignore[reportUnknownVariableType]
        raise UsageError(
            f"clocks cannot be {value!r:.60}", hint=f"a mapping from {', '.join(names)} to seconds or None"
        )
    wanted: Mapping[str, Any] = value  # pyright: ignore[reportUnknownVariableType]
    for key, seconds in wanted.items():
        if seconds is not None:
            check_seconds(key, seconds)
            if seconds == 0:
                raise UsageError(f"the clock {key} cannot be 0", hint="None turns it off")
    return dict(wanted)
