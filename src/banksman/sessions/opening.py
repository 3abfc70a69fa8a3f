"""How a session is opened: the profile, the caller's wishes, and what they make of a process. Checked at once, so that
a wrong word is an error of the call and not of the first turn. The numbers among the wishes are in session_options.py.
"""

from __future__ import annotations

import copy
import hashlib
import os
import shlex
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from banksman.core.dialects.dialect import Setup
from banksman.core.session import permissions
from banksman.core.session.effects import StartProcess
from banksman.core.session.event import storable
from banksman.errors import ProgramNotFound, UsageError
from banksman.process import environment
from banksman.process.launch import Launch, prepare
from banksman.process.lease_page import LeasePage
from banksman.sessions import host_requirements, profiles, session_options, transcript_path
from banksman.sessions.agent_process import OnEvent, RealAgent
from banksman.sessions.hooks import Hooks
from banksman.sessions.session_options import check_text
from banksman.sessions.tools import Tool, ToolServer
from banksman.sessions.workspace import Workspace, start_command

# The server that the caller's own tools are behind; the agent calls them `mcp__banksman__NAME`.
TOOLS_SERVER = "banksman"


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
        mcp_servers: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any] | None,
        resume: str | None,
        forks: bool,
        hooks: Mapping[str, Any] | None,
        tools: Sequence[Tool],
        rules_wanted: Mapping[str, str] | None,
        labels: Sequence[str] = (),
    ) -> None:
        self.profile = profiles.load(agent)
        self._resume = _conversation(resume)
        self.forks = forks
        if forks and resume is None:
            raise UsageError("there is nothing to fork", hint="resume= names the conversation")
        # A relative folder means the one of the call, also for a process that is started later.
        self._cwd: str = os.path.abspath(os.fspath(cwd if cwd is not None else "."))
        self._command = _command(command, self.profile)
        self._wishes: dict[str, Any] = {
            "model": model,
            "permission_mode": permission_mode,
            "system_prompt": system_prompt,
        }
        for wish, text in (("cwd", self._cwd), *self._wishes.items()):
            if isinstance(text, str):
                check_text(wish, text)
        self._args = _words("args", args)
        # Copies: whatever the caller does to its own, the next process is started as this one.
        self._env = None if env is None else dict(env)
        self._all_env = {**self.profile.variables, **(env or {})}
        self._inherit_env = inherit_env
        self._options = dict(options or {})
        self.hooks = Hooks(hooks or {})
        self._hooks: dict[str, Any] = dict(hooks or {})
        self._tools = tuple(tools)
        self.server = ToolServer(self._tools, name=TOOLS_SERVER)
        self._check_capabilities(
            hooks=bool(hooks),
            tools=bool(tools),
            mcp_servers=bool(mcp_servers),
            resume=resume is not None,
            fork=forks,
            **{name: wish is not None for name, wish in self._wishes.items()},
        )
        self._servers = _servers(mcp_servers)
        self._mcp_config = self._mcp_file()
        found = session_options.read(self.profile, options or {})
        self.frame_bytes_max = found.frame_bytes_max
        self._timings = found.timings
        self.config = found.config(
            rules=permissions.parse(rules_wanted),
            serves_terminals="terminal" in self._serves,
            setup=Setup(
                hooks=self.hooks.registrations(),
                servers=(TOOLS_SERVER,) if tools else (),
                cwd=self._cwd,
                mcp_servers=self._servers,
                **self._wishes,
            ),
        )
        self._rules = dict(rules_wanted or {})
        self._labels = host_requirements.checked(labels)
        self._prepare(StartProcess(0, self._resume, forks))
        self.fingerprint = self._fingerprint()

    @property
    def cwd(self) -> str:
        return self._cwd

    @property
    def stop_seconds_max(self) -> float:
        """By when a process of it that was told to stop is gone, or stuck."""
        return self._timings.seconds_max

    @property
    def resumes(self) -> str | None:
        """The conversation to go on with."""
        return None if self.forks else self._resume

    @property
    def resume(self) -> str | None:
        """The conversation that it was opened with, to go on with or to copy."""
        return self._resume

    def record(self) -> dict[str, Any]:
        """How it was opened, in words that a log can keep. What may be a secret (the values of variables, the
        configuration of servers) and what lives in this process only (hooks, tools) is named, and no more."""
        return {
            "agent": self.profile.name,
            "cwd": self._cwd,
            "command": self._command,
            "args": self._args,
            "env": sorted(self._env or ()),
            "inherit_env": self._inherit_env,
            **self._wishes,
            "options": storable(self._options),
            "rules": self._rules,
            "mcp_servers": [server["name"] for server in self._servers],
            "hooks": sorted(self._hooks),
            "tools": [tool.name for tool in self._tools],
            **({"labels": self._labels} if self._labels else {}),
        }

    def settings_unlike(self, other: Opening) -> list[str]:
        """Those that can be changed while it lives, and are wished for otherwise than in the other."""
        return [name for name in ("model", "permission_mode") if self._wishes[name] != other._wishes[name]]

    def settings_asked_anew(self, record: Mapping[str, Any] | None) -> list[str]:
        """Those that are wished for otherwise than the last time, as the log has that."""
        last: Mapping[str, Any] = {} if record is None else record
        return [name for name in ("model", "permission_mode") if name in last and self._wishes[name] != last[name]]

    def forked(self, conversation: str) -> Opening:
        """The same, for another session that begins as a copy of this conversation."""
        other = copy.copy(self)
        other._resume, other.forks = conversation, True
        # Each has its own, to call and to close.
        other.hooks = Hooks(self._hooks)
        other.server = ToolServer(self._tools, name=TOOLS_SERVER)
        other._mcp_config = self._mcp_file()
        return other

    def close(self) -> None:
        """No process will be started with it any more."""
        if self._mcp_config is not None:
            self._mcp_config.close()

    def spawn(self, effect: StartProcess, on_event: OnEvent, lease: LeasePage | None = None) -> RealAgent:
        return RealAgent(self._prepare(effect), self._timings, on_event, lease)

    def transcript(self, conversation: str) -> Path | None:
        """Where a process of it keeps this conversation, as far as its profile knows. Looks at the file system."""
        patterns = self.profile.transcripts
        return transcript_path.place(patterns, cwd=self._cwd, conversation=conversation, env=self._environment())

    def workspace(self, lease: LeasePage | None = None) -> Workspace | None:
        """What one process of it may ask us for; None: nothing, its dialect has no words for that."""
        if not self._serves:
            return None
        return Workspace(
            self._cwd,
            partial(start_command, lease=lease),
            env=self._all_env,
            inherit_env=self._inherit_env,
            scrub=self._scrub,
            serves=self._serves,
        )

    @property
    def _serves(self) -> tuple[str, ...]:
        return self.profile.quirks.serves if self.profile.dialect.name == "acp" else ()

    @property
    def _scrub(self) -> tuple[str, ...]:
        # Whatever the profile says: our variables may hold a token, with which an agent could answer its own questions.
        return (*self.profile.scrub, "banksman")

    def _prepare(self, effect: StartProcess) -> Launch:
        argv = self._argv(
            resume=effect.conversation,
            forks=effect.forks,
            mcp_config=None if self._mcp_config is None else self._mcp_config.path,
            **{**self._wishes, **dict(effect.settings)},
        )
        try:
            return prepare(
                argv,
                cwd=self._cwd,
                env=self._all_env,
                inherit_env=self._inherit_env,
                scrub=self._scrub,
                is_agents=True,
                pass_fds=() if self._mcp_config is None else (self._mcp_config.fd,),
            )
        except ProgramNotFound as exc:
            # Of an agent's own program it is known how one gets it.
            if not self.profile.install or self._command != list(self.profile.command):
                raise
            hint = f"{self.profile.install}; `banksman agents` shows which agents are here"
            raise ProgramNotFound(str(exc.args[0]), hint=hint, agent=self.profile.name, **exc.ids) from exc

    def _mcp_file(self) -> _Private | None:
        text = self.profile.dialect.mcp_file(self._servers) if self._servers else None
        return None if text is None else _Private(text)

    def _argv(self, **wishes: Any) -> list[str]:
        return self.profile.dialect.argv(self._command, args=self._args, **wishes)

    def _environment(self) -> dict[bytes, bytes]:
        return environment.build(self._all_env, inherit=self._inherit_env, scrub=self._scrub)

    def _fingerprint(self) -> str:
        """What every process is started with, and told at its start, in one word: another word is another process. Not
        the conversation, which changes by itself, nor the number of an fd, which is an accident."""
        env = self._environment()
        tools = [(tool.name, tool.description, tool.schema) for tool in self._tools]
        told = (self.config.setup, tools)
        seen = (self._argv(**self._wishes), self._cwd, sorted(env.items()), told)
        return hashlib.sha256(repr(seen).encode(errors="surrogateescape")).hexdigest()[:16]

    def check_fork(self) -> None:
        self._check_capabilities(fork=True)

    def _check_capabilities(self, **wanted: bool) -> None:
        for name, is_wanted in wanted.items():
            if is_wanted and name not in self.profile.capabilities:
                hint = "leave it out, or set it in the agent's own configuration"
                raise UsageError(f"{self.profile.title} has no {name}", hint=hint, agent=self.profile.name)


class _Private:
    """Text that a process can read by a path, and nobody else: its file has no name. It may hold keys, and words of a
    command line are there for every user of the machine to see."""

    def __init__(self, text: str) -> None:
        with tempfile.TemporaryFile() as file:
            file.write(text.encode())
            file.flush()
            self.fd = os.dup(file.fileno())
        # Also for whoever made it and then failed to open the session.
        self.close = weakref.finalize(self, os.close, self.fd)
        # By this path it is opened anew each time, and so read from its beginning.
        self.path = f"/dev/fd/{self.fd}"


def _servers(servers: Any) -> tuple[Mapping[str, Any], ...]:
    hint = 'as ACP has them: {"name": …, "command": …, "args": […]} or {"type": "http", "name": …, "url": …}'
    if isinstance(servers, str | bytes | Mapping) or not isinstance(servers, Sequence):
        raise UsageError(f"mcp_servers cannot be {servers!r:.60}", hint=hint)
    items = cast(Sequence[Any], servers)
    names: set[str] = {TOOLS_SERVER}
    for server in items:
        if not _is_server(server) or server["name"] in names:
            raise UsageError(f"an MCP server cannot be {server!r:.120}", hint=f"{hint}, each with a name of its own")
        names.add(server["name"])
    # Copies, for the same reason as above; what cannot be copied could not be told either.
    return tuple(_told(server) for server in items)


def _told(server: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return storable(server)
    except (TypeError, ValueError, RecursionError) as exc:
        raise UsageError(f"an MCP server cannot be {server!r:.120}: {exc}", hint="plain JSON") from exc


def _is_server(server: Any) -> bool:
    if not isinstance(server, Mapping):
        return False
    members = cast(Mapping[str, Any], server)
    needed = ("name", "command") if "command" in members else ("name", "type", "url")
    words, *pairs = (members.get(name, ()) for name in ("args", "env", "headers"))
    if not all(isinstance(each, list | tuple) for each in (words, *pairs)):
        return False
    texts = (*(members.get(name) or None for name in needed), *words)
    return all(isinstance(text, str) for text in texts) and all(_is_pair(pair) for each in pairs for pair in each)


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, Mapping) and all(isinstance(cast(Any, pair).get(name), str) for name in ("name", "value"))


def _conversation(resume: Any) -> str | None:
    if resume is not None and (not isinstance(resume, str) or not resume):
        raise UsageError(f"resume cannot be {resume!r:.60}", hint="the agent's own name for a conversation")
    return resume


def _command(command: Any, profile: profiles.Profile) -> list[str]:
    if command is None:
        return list(profile.own_command())
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
