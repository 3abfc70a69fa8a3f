"""Containment of an agent: its user, its resource limits, its environment, and its command prefix.

A caller states it in `Host.open`, a server in its settings, and a person in a profile. The first of
them that says something about a part decides that part (`Containment.over`). It belongs to the
session's spec, and the log keeps it: every process of the session starts with it, also after a
crash, a take-over or a fall-back.

**The prefix** (`wrap`) is a command that runs the agent's command, such as `bwrap …`: see
command_prefix.py.

**The hooks** (`on_open`, `on_close`) are programs that make and remove what the session works in:
see session_hooks.py. A caller in this process may pass functions, which the log cannot keep. The
agent's process does not depend on them.

**Work of the host.** Banksman itself reads files and runs commands for an agent that asks for it
(ACP). That work would be outside of the other user or the prefix, so Banksman does not offer it to
such an agent (`Containment.confines`).
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from msgspec import Struct, structs

from banksman.errors import UsageError
from banksman.process import attributes, cgroups, launch
from banksman.process.cgroups import CgroupUsage
from banksman.sessions import command_prefix

log = logging.getLogger("banksman")

# Ids need no quotes in a shell, so a check before the session has an id can take this one.
ANY_SESSION = "s"
# More than any prefix needs. The log keeps the words.
WRAP_WORDS_MAX = 256
# In `scrub`. A pattern, or two names in one word, would look as if it removed variables.
_NO_NAME = re.compile(r"^$|[=*?,\s\0]")
NAMES_HINT = 'pass whole names of variables, "nesting" or "secrets": there are no patterns'
HOOKS = ("on_open", "on_close")
# With --scope it moves itself, and without it systemd starts the command.
_MOVER = "systemd-run"
PARTS = ("user", "limits", "scrub", "wrap", *HOOKS)

# The words of a command, or a function: see `session_hooks.HookFunction`.
Hook = tuple[str, ...] | Callable[..., Any]


class Containment(Struct, frozen=True, kw_only=True):
    """User, limits, environment, prefix and hooks of an agent. A part that is None is not stated.

    - `user`: the user that it runs as, by name or number
    - `limits`: resource limits and priorities, see `attributes.parse_limits`
    - `scrub`: variables to remove from its environment, see `process/launch.py`
    - `wrap`: the prefix of its command, or the name of a sandbox: see `prefix`; empty: none
    - `on_open`, `on_close`: the words of a command, or a function; empty: none
    """

    user: str | int | None = None
    limits: Mapping[str, Any] | None = None
    scrub: tuple[str, ...] | None = None
    wrap: str | tuple[str, ...] | None = None
    on_open: Hook | None = None
    on_close: Hook | None = None

    @property
    def confines(self) -> bool:
        """Whether work of the host for the agent would be outside of the containment."""
        return self.user is not None or bool(self.wrap)

    def parts(self) -> dict[str, Any]:
        """Return the stated parts."""
        stated = {name: getattr(self, name) for name in PARTS}
        return {name: value for name, value in stated.items() if value is not None}

    def over(self, other: Containment) -> Containment:
        """Return the parts of this containment, and those of the other that it does not state."""
        return Containment(**{**other.parts(), **self.parts()})

    @property
    def functions(self) -> list[str]:
        """The hooks that are functions of this process."""
        return [name for name in HOOKS if callable(getattr(self, name))]

    @property
    def of_process(self) -> Containment:
        """The parts that an agent's process depends on."""
        return structs.replace(self, on_open=None, on_close=None)

    def record(self) -> dict[str, Any]:
        """Return the stated parts as plain JSON, without functions."""
        return {
            name: list(cast("tuple[str, ...]", value)) if isinstance(value, tuple) else value
            for name, value in self.parts().items()
            if not callable(value)
        }

    def words(self, argv: Sequence[str], *, cwd: str, session: str) -> list[str]:
        """Return the command behind its prefix."""
        wrap, hides = self.wrap or (), self._has_our_rights
        return command_prefix.prefixed(wrap, argv, cwd=cwd, session=session, hides=hides)

    def hook_words(self, name: str, *, cwd: str, session: str) -> list[str]:
        """Return the command of a hook."""
        return command_prefix.filled(name, getattr(self, name) or (), cwd=cwd, session=session)

    def check_folder(self, cwd: str) -> None:
        """Raise `UsageError` if a text of a program would have this folder in it."""
        wrap = self.wrap or ()
        command_prefix.prefixed(wrap, (), cwd=cwd, session=ANY_SESSION, hides=False)
        for name in HOOKS:
            if name not in self.functions:
                self.hook_words(name, cwd=cwd, session=ANY_SESSION)

    def check_limits(self, *, is_recorded: bool = False) -> None:
        """Raise `UsageError` if the prefix moves the agent out of the group that has its limits.

        `is_recorded`: for a session that was opened so. Earlier versions accepted it, and the
        session must stay resumable. So it is only logged.
        """
        wanted = ", ".join(cgroups.limits_of_group(self.limits))
        words = command_prefix.prefix(self.wrap or ())
        if not wanted or not any(os.path.basename(word) == _MOVER for word in words):
            return
        why = f"{_MOVER} moves the agent to a control group of systemd"
        if is_recorded:
            log.warning("a recorded session's limits have no effect (%s): %s", wanted, why)
            return
        hint = f"pass them to {_MOVER}, such as -p MemoryMax=2G"
        raise UsageError(f"cannot set the limits {wanted}: {why}", hint=hint)

    @property
    def _has_our_rights(self) -> bool:
        """Whether the agent runs as the user of this process."""
        return self.user is None or attributes.is_our_user(attributes.find_user(self.user))

    def variables(self) -> dict[bytes, bytes | None]:
        """Return the variables that name the agent's user."""
        return (
            {} if self.user is None else attributes.user_variables(attributes.find_user(self.user))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainmentStatus:
    """Control group of the agent's processes.

    `cgroup`: None if they have none; then `why_not` is the reason.
    """

    cgroup: CgroupUsage | None
    why_not: str | None


def containment_of(limits: Mapping[str, Any] | None, pid: int | None) -> ContainmentStatus:
    """Return the control group of a session with these limits, whose process is `pid`."""
    if not cgroups.needs_cgroup(limits):
        return ContainmentStatus(cgroup=None, why_not="no limit of the session needs one")
    if pid is None:
        return ContainmentStatus(cgroup=None, why_not="the session has no process")
    usage = cgroups.usage(pid)
    return ContainmentStatus(cgroup=usage, why_not=None if usage else "the process has left it")


NOTHING = Containment()


def checked(
    *,
    user: Any = None,
    limits: Any = None,
    scrub: Any = None,
    wrap: Any = None,
    on_open: Any = None,
    on_close: Any = None,
) -> Containment:
    """Check the parts of a containment. Raises `UsageError`."""
    # A profile and a log may name a user of another machine. The start of a process finds the user.
    if isinstance(user, bool) or not isinstance(user, str | int | None) or user == "":
        hint = "pass a user of this machine, by name or by number"
        raise UsageError(f"user cannot be {user!r:.60}", hint=hint)
    return Containment(
        user=user,
        limits=None if limits is None else attributes.named_limits(limits),
        scrub=None if scrub is None else _scrub(scrub),
        wrap=None if wrap is None else _wrap(wrap),
        on_open=None if on_open is None else _hook("on_open", on_open),
        on_close=None if on_close is None else _hook("on_close", on_close),
    )


def from_record(record: Mapping[str, Any] | None) -> Containment:
    """Return the containment that a `session.opened` event records.

    Earlier versions recorded none.
    """
    parts = dict((record or {}).get("containment") or {})
    if parts.get("scrub"):
        # Earlier versions took names that no variable has.
        parts["scrub"] = [name for name in parts["scrub"] if may_be_name(name)]
    return checked(**parts)


def parse_limits(pairs: Iterable[str], where: str) -> dict[str, float] | None:
    """Parse the limits of a command line or a settings file: `nofile=64`. None: there are none."""
    found: dict[str, float] = {}
    for pair in pairs:
        name, _, number = pair.partition("=")
        try:
            # Only `cpus` can have a fraction; `attributes.parse_limits` checks that.
            found[name.strip()] = float(number) if "." in number else int(number)
        except ValueError:
            hint = "use NAME=NUMBER, such as nofile=256"
            raise UsageError(f"{where} cannot be {pair!r:.60}", hint=hint) from None
    return found or None


def may_be_name(word: str) -> bool:
    """Whether a variable can have this name."""
    return _NO_NAME.search(word) is None


def names(
    words: Sequence[str], wrong: Callable[[str], UsageError], *, is_recorded: bool
) -> tuple[str, ...]:
    """Return names of variables, or raise the error for the first that is none.

    `is_recorded`: for a session that was opened before. Earlier versions accepted such names, which
    had no effect, and the session must stay resumable. So they are logged and left out.
    """
    for name in words:
        if not may_be_name(name):
            if not is_recorded:
                raise wrong(name)
            _warn(str(wrong(name)))
    return tuple(filter(may_be_name, words))


@functools.lru_cache(64)
def _warn(error: str) -> None:
    """Log an error once. A profile is read again for each session."""
    log.warning("a name in a profile is ignored for recorded sessions: %s", error)


def _scrub(scrub: Any) -> tuple[str, ...]:
    launch.build(None, inherit=False, scrub=scrub)
    scrub = tuple(scrub)
    for name in scrub:
        if not may_be_name(name):
            message = f"scrub cannot hold {name!r:.60}: no variable has it"
            raise UsageError(message, hint=NAMES_HINT)
    return tuple(scrub)


def _wrap(wrap: Any) -> str | tuple[str, ...]:
    hint = f"pass the words of a command, or the name of a sandbox: {command_prefix.KNOWN}"
    if isinstance(wrap, str):
        if wrap not in command_prefix.SANDBOXES and not (
            command_prefix.is_far(wrap) and _is_text(wrap)
        ):
            raise UsageError(f"there is no sandbox {wrap!r:.60}", hint=hint)
        return wrap
    return _words("wrap", wrap, hint)


def _hook(name: str, hook: Any) -> Hook:
    if callable(hook):
        return cast(Hook, hook)
    return _words(name, hook, "pass the words of a command, or a function")


def _words(name: str, value: Any, hint: str) -> tuple[str, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        raise UsageError(f"{name} cannot be {value!r:.60}", hint=hint)
    words = cast(Sequence[Any], value)
    if len(words) > WRAP_WORDS_MAX:
        hint = f"use at most {WRAP_WORDS_MAX} words, or a script"
        raise UsageError(f"{name} cannot have {len(words)} words", hint=hint)
    for word in words:
        if not isinstance(word, str) or not word or "\0" in word or not _is_text(word):
            raise UsageError(f"{name} cannot hold {word!r:.60}", hint=hint)
    return tuple(words)


def _is_text(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:
        return False  # A lone surrogate, which the log cannot store.
    return True
