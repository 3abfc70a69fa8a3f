"""What callers may start over HTTP, if whoever runs the server has said so.

A program is the path that it resolves to here, by this server's PATH, and that path is what is started: a caller's own
PATH or folder must not make another of it. While programs are named a caller sets only the variables that are named
too, because a variable (`LD_PRELOAD`, say) can make any program do anything. What an allowed program does then is its
own affair.
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

log = logging.getLogger("banksman.serve")


class StartPolicy:
    def __init__(self, settings: ServerSettings) -> None:
        self._roots = None if settings.roots is None else [os.path.realpath(root) for root in settings.roots]
        for root in self._roots or ():
            if not os.path.isdir(root):
                log.warning("! roots names %r, and there is no such folder: nothing can be started there", root)
        self._env = frozenset(settings.env)
        self._allowed: list[list[str]] | None = None
        if settings.programs is not None:
            self._allowed = []
            for entry in settings.programs:
                program, *words = [entry] if isinstance(entry, str) else entry
                resolved = _resolve(program)
                if resolved is None:
                    log.warning("! programs names %r, and there is no such program: nobody can start it", program)
                else:
                    self._allowed.append([resolved, *words])

    def command(self, words: Sequence[str]) -> list[str]:
        """These words as they may be started."""
        if self._allowed is None or not words:
            return list(words)
        resolved = _resolve(words[0]) or ""
        for allowed in self._allowed:
            if resolved == allowed[0] and list(words[1 : len(allowed)]) == allowed[1:]:
                return [resolved, *words[1:]]
        raise _forbidden(
            f"this server does not start {words[0]!r:.200}", "programs = […] in its settings says what it does"
        )

    def env(self, env: Mapping[str, str] | None) -> Mapping[str, str] | None:
        if self._allowed is not None:
            for name in env or ():
                if name not in self._env:
                    raise _forbidden(f"{name!r:.200} cannot be set here", "env = […] in the settings says what can be")
        return env

    def user(self, user: str | None) -> str | None:
        """Who may start only some programs may start them only as us: another's files are another's programs."""
        if self._allowed is not None and user is not None:
            raise _forbidden("nothing is started as another user here", "leave user out")
        return user

    def reopen(self, record: Mapping[str, Any]) -> None:
        """A session that is found in the store is opened again only as it could be opened now."""
        command: list[str] = record["command"]
        self.command(command)
        # It is started by these very words, and a path that is not absolute, or a name without our PATH, would be
        # looked for elsewhere than it was here.
        is_certain = os.path.isabs(command[0]) or ("/" not in command[0] and record["inherit_env"])
        if self._allowed is not None and not is_certain:
            raise _forbidden("the session was opened with a program of its folder", "open it by its name")
        self.folder(record["cwd"])

    def folder(self, cwd: str | None) -> str | None:
        """With links followed: what is started there must not be led elsewhere by one that is put there later."""
        if self._roots is None:
            return cwd
        if cwd is None and self._roots:
            return self._roots[0]
        try:
            found = os.path.realpath(cwd or ".")
        except (OSError, ValueError) as exc:
            raise _forbidden("this is no folder", "one that is in the roots") from exc
        if not any(found == root or found.startswith(root.rstrip("/") + "/") for root in self._roots):
            raise _forbidden("nothing is started in that folder", "roots = […] in the settings says where something is")
        return found

    def servers(self, servers: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """MCP servers are programs that the agent starts for us."""
        return [self._server(server) if "command" in server else server for server in servers]

    def _server(self, server: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._allowed is None:
            return server
        args: Any = server.get("args") or []
        words: list[Any] = [server["command"], *(cast("list[Any]", args) if isinstance(args, list) else [None])]
        if not all(isinstance(word, str) for word in words):
            raise _forbidden("this is no MCP server", "a name, a command and its args, all of them text")
        if server.get("env"):
            raise _forbidden("an MCP server cannot be given an environment here", "leave env out")
        resolved, *args = self.command(words)
        return {**server, "command": resolved, "args": args}

    def agent(self, command: str | Sequence[str] | None, usual: Sequence[str]) -> str | Sequence[str] | None:
        """The command of a session; None: the profile's own, which must be allowed too."""
        if self._allowed is None:
            return command
        try:
            words = usual if command is None else shlex.split(command) if isinstance(command, str) else command
        except ValueError as exc:
            raise UsageError(f"this is no command: {exc}", hint="a list of words says it exactly") from exc
        return self.command(words)


def _resolve(program: str) -> str | None:
    try:
        found = program if "/" in program else shutil.which(program)
        # Links are not followed: many a program is told by its name what it is to be.
        return None if found is None else os.path.abspath(found)
    except (OSError, ValueError):
        return None


def _forbidden(detail: str, hint: str) -> Problem:
    return Problem(403, "Forbidden", detail, hint=hint)
