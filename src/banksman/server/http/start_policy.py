"""Start policy: which programs, variables and folders HTTP callers may use, by the settings.

A program is the path that it resolves to with this server's PATH, and exactly that path is started:
a caller's PATH or folder must not select another program. While `programs` is set, a caller may set
only the variables in `env`, because a variable such as `LD_PRELOAD` can make any program do
anything. The policy does not restrict what an allowed program does.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, cast

from banksman.errors import UsageError
from banksman.server.problems import Problem
from banksman.server.server_settings import ServerSettings
from banksman.sessions import command_prefix, containment, known_agents
from banksman.sessions.containment import Containment
from banksman.sessions.session_spec import NotPermitted

log = logging.getLogger("banksman.serve")

# The parts of a containment that are programs.
PROGRAMS = ("wrap", *containment.HOOKS)


class StartPolicy:
    """Check what HTTP callers want to start.

    Each method raises a 403 Problem if the settings forbid it.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._roots = (
            None if settings.roots is None else [os.path.realpath(root) for root in settings.roots]
        )
        for root in self._roots or ():
            if not os.path.isdir(root):
                log.warning("folder %r in roots does not exist: nothing can be started there", root)
        self._env = frozenset(settings.env)
        self._containment = settings.containment()
        self._choices = frozenset(settings.callers_choose)
        self._survive = settings.survive
        self._allowed: list[list[str]] | None = None
        if settings.programs is not None:
            self._allowed = []
            for entry in settings.programs:
                program, *words = [entry] if isinstance(entry, str) else entry
                resolved = _resolve(program)
                if resolved is None:
                    log.warning(
                        "program %r in programs not found: clients cannot start it",
                        program,
                    )
                else:
                    self._allowed.append([resolved, *words])

    def command(self, words: Sequence[str]) -> list[str]:
        """Return this command with its program resolved, if the settings allow it."""
        if self._allowed is None or not words:
            return list(words)
        resolved = _resolve(words[0]) or ""
        for allowed in self._allowed:
            if resolved == allowed[0] and list(words[1 : len(allowed)]) == allowed[1:]:
                return [resolved, *words[1:]]
        raise _forbidden(
            f"cannot start {words[0]!r:.200}: the settings do not allow this program",
            "add it to programs = […] in the settings",
        )

    def env(self, env: Mapping[str, str] | None) -> Mapping[str, str] | None:
        """Return these variables, if the settings allow all of them."""
        if self._allowed is not None:
            for name in env or ():
                if name not in self._env:
                    raise _forbidden(
                        f"cannot set {name!r:.200}: the settings do not allow this variable",
                        "add it to env = […] in the settings",
                    )
        return env

    def user(self, user: str | int | None) -> str | int | None:
        """Return this user, if the settings allow it.

        With restricted programs only the server's own user is allowed: a file of another user is
        another user's program.
        """
        if self._allowed is not None and user is not None:
            raise _forbidden(
                "cannot start a program as another user: the settings restrict programs",
                "leave user out",
            )
        return user

    def reopen(self, record: Mapping[str, Any]) -> None:
        """Check a session from the store against the present settings before it is opened again."""
        self._recheck(record["command"], record)
        self.folder(record["cwd"])
        self._recontain(record)

    def _recheck(self, words: Sequence[str], record: Mapping[str, Any]) -> None:
        """Check a command that the record of a session has."""
        self.command(words)
        # The host starts these exact words. A relative path, or a name without the server's PATH,
        # would resolve differently there than in the check above.
        is_certain = os.path.isabs(words[0]) or ("/" not in words[0] and record["inherit_env"])
        if self._allowed is not None and not is_certain:
            raise _forbidden(
                "cannot reopen the session: the path of its program is not absolute",
                "open the session by its name",
            )

    def containment(
        self, usual: Containment = containment.NOTHING, /, **parts: Any
    ) -> dict[str, Any]:
        """Return what an agent may use: the parts that a caller chooses, and those of the settings.

        A part that is None is not chosen. `usual`: of the agent's profile. A session that is opened
        again keeps what it had, so the parts that are not for callers are stated: the profile may
        have changed.
        """
        chosen = {name: value for name, value in parts.items() if value is not None}
        for name in chosen:
            self._check_choice(name)
        for name, value in chosen.items():
            # The path that was checked is the one that is started.
            if self._allowed is not None and (words := _program(name, value)):
                chosen[name] = self.command(words)
        fixed = {name: value for name, value in usual.parts().items() if name not in self._choices}
        return {**fixed, **self._containment.parts(), **chosen}

    def survive(self, wanted: str | None) -> str | None:
        """Return what an agent survives, if callers may choose that."""
        if wanted is not None:
            self._check_choice("survive")
        return wanted

    def _check_choice(self, name: str) -> None:
        if name not in self._choices:
            raise _forbidden(
                f"cannot choose {name} of an agent: the settings do not allow it",
                f'leave it out, or add "{name}" to callers_choose = […] in the settings',
            )

    def _recontain(self, record: Mapping[str, Any]) -> None:
        """Check what the agent of a session from the store may use.

        The settings, and else the profile, decide each part that callers may not choose. The part
        of a caller that could choose it earlier is refused.
        """
        recorded = containment.from_record(record)
        profile = known_agents.load_or_plain(record["agent"])
        usual = self._containment.over(profile.containment)
        survive = record.get("survive")
        is_chosen = survive is not None and survive != self._survive
        foreign = ["survive"] if is_chosen and "survive" not in self._choices else []
        for name in containment.PARTS:
            value = getattr(recorded, name)
            if name in self._choices:
                if words := _program(name, value):
                    self._recheck(words, record)
            elif not _is_same(name, value, getattr(usual, name)):
                foreign.append(name)
        if not foreign:
            return
        hint = "open the session by its name"
        # An open by name replaces the parts that are stated now, and keeps the others.
        if kept := [name for name in foreign if name != "survive" and getattr(usual, name) is None]:
            hint = (
                f"add {', '.join(kept)} to callers_choose = […] in the settings, or state "
                f"agent_{kept[0]} there and open the session by its name, or delete the session"
            )
        raise _forbidden(
            f"cannot reopen the session: its {', '.join(foreign)} "
            f"{'are not those' if len(foreign) > 1 else 'is not the one'} of the settings",
            hint,
        )

    def folder(self, cwd: str | None) -> str | None:
        """Return the working folder with symbolic links resolved, if it lies in the roots.

        The resolved path is used, so that a link that is created later cannot redirect it.
        """
        if self._roots is None:
            return cwd
        if cwd is None and self._roots:
            return self._roots[0]
        try:
            found = os.path.realpath(cwd or ".")
        except (OSError, ValueError) as exc:
            raise _forbidden(
                "invalid folder", "pass a folder inside roots = […] of the settings"
            ) from exc
        if not any(
            found == root or found.startswith(root.rstrip("/") + "/") for root in self._roots
        ):
            raise _forbidden(
                "cannot start anything in that folder: it is outside the roots",
                "pass a folder inside roots = […] of the settings",
            )
        return found

    def servers(self, servers: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Check MCP servers: they are programs that the agent starts on behalf of the caller."""
        return [self._server(server) if "command" in server else server for server in servers]

    def _server(self, server: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._allowed is None:
            return server
        args: Any = server.get("args") or []
        words: list[Any] = [
            server["command"],
            *(cast("list[Any]", args) if isinstance(args, list) else [None]),
        ]
        if not all(isinstance(word, str) for word in words):
            raise _forbidden(
                "invalid MCP server", "pass a name, a command and its args, all as text"
            )
        if server.get("env"):
            raise _forbidden(
                "cannot set env of an MCP server: the settings restrict programs", "leave env out"
            )
        resolved, *args = self.command(words)
        return {**server, "command": resolved, "args": args}

    def agent(
        self, command: str | Sequence[str] | None, usual: Sequence[str]
    ) -> str | Sequence[str] | None:
        """Return the agent command of a session, if it is allowed.

        `command`: None stands for the profile's own command `usual`, which must be allowed, too.
        """
        if self._allowed is None:
            return command
        try:
            words = (
                usual
                if command is None
                else shlex.split(command)
                if isinstance(command, str)
                else command
            )
        except ValueError as exc:
            hint = "pass a list of words"
            raise UsageError(f"cannot parse the command: {exc}", hint=hint) from exc
        return self.command(words)


def _is_same(name: str, value: Any, usual: Any) -> bool:
    """Whether two values of a part have the same effect. For most parts, empty is none."""
    return value == usual or (name not in ("user", "scrub") and not value and not usual)


def _program(name: str, value: Any) -> Sequence[str]:
    """Return the words of a prefix or a hook that the settings must allow.

    None for a sandbox on this machine, which is one that Banksman knows. The far end of a sandbox
    has programs that the settings do not know.
    """
    if name not in PROGRAMS or (isinstance(value, str) and not command_prefix.is_far(value)):
        return ()
    return command_prefix.prefix(value or ())


def _resolve(program: str) -> str | None:
    try:
        found = program if "/" in program else shutil.which(program)
        # Links are not resolved: many programs choose their function by the name they are called
        # by.
        return None if found is None else os.path.abspath(found)
    except (OSError, ValueError):
        return None


class _Forbidden(Problem, NotPermitted):
    """A start that the policy refuses, for an HTTP client and for the host."""


def _forbidden(detail: str, hint: str) -> Problem:
    return _Forbidden(403, "Forbidden", detail, hint=hint)
