"""Session spec: the checked arguments of an open, process starts, and needs for a host.

`SessionSpec` starts the agent's process again and again, always as the caller asked for it. The log
keeps its `record`, and `SessionSpec.from_record` rebuilds the spec from it. The functions at the
top compare the needs of a session with the labels and agents of a host. `arguments.py` has the
checks of single arguments.

**Needs.** A session needs a host that has its labels and its agent. Needs and offers are lists of
the same words. A host satisfies a need if it offers every word of it.

A session with a custom command needs no agent, because only the command is started. A label
`workspace=…` describes the session and not a host: it says how to find the session's folder on
another host.
"""

from __future__ import annotations

import copy
import hashlib
import os
import re
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from banksman.core.dialects.dialect import Setup
from banksman.core.session import permissions
from banksman.core.session.effects import StartProcess
from banksman.core.session.event import storable
from banksman.core.wire.redaction import REDACTED
from banksman.errors import ProgramNotFound, UsageError
from banksman.process import launch
from banksman.process.launch import Launch, prepare
from banksman.process.lease_page import LeasePage
from banksman.sessions import known_agents, recovery
from banksman.sessions.agent_process import OnReport, RealAgent
from banksman.sessions.arguments import (
    TOOLS_SERVER,
    check_text,
    checked_agent,
    checked_command,
    checked_conversation,
    checked_fallback,
    checked_mcp_servers,
    checked_words,
    read_options,
)
from banksman.sessions.hooks import Hooks
from banksman.sessions.limit_callback import OnLimit
from banksman.sessions.profile import transcript_path
from banksman.sessions.tools import Tool, ToolServer
from banksman.sessions.workspace import Workspace, start_command
from banksman.store.log import KnownSession, Log

LABELS_MAX = 32
_LABEL = re.compile(r"[\w.+@:/=-]{1,100}")
_POLICY = "workspace="

# Arguments that the log must not keep: possible secrets, and objects of this process only.
UNKEPT = {"env": "variables", "mcp_servers": "MCP servers", "hooks": "hooks", "tools": "tools"}


def checked(labels: Sequence[Any]) -> list[str]:
    """Return the labels sorted and without duplicates, so that equal needs are equal lists."""
    hint = "use a word such as gpu or repo=x: at most 100 letters, digits and . _ + @ : / = -"
    if isinstance(labels, str | bytes):
        raise UsageError(f"labels cannot be {labels!r:.60}", hint="use a list of words")
    for label in labels:
        if (
            not isinstance(label, str)
            or _LABEL.fullmatch(label) is None
            or label.startswith("agent=")
        ):
            raise UsageError(f"a label cannot be {label!r:.60}", hint=hint)
    found = sorted(set(labels))
    if len(found) > LABELS_MAX:
        raise UsageError(f"too many labels: {len(found)}", hint=f"use at most {LABELS_MAX}")
    return found


def need(labels: Iterable[str], agent: str | None) -> list[str]:
    """Return the words that a session needs.

    `agent`: None for a session with a custom command.
    """
    words = {label for label in labels if not label.startswith(_POLICY)}
    return sorted(words if agent is None else {*words, agent_word(agent)})


def need_of(agent: str, record: Mapping[str, Any] | None) -> list[str]:
    """Return the words that a session needs, from the spec that its log records."""
    if record is None:
        return need((), agent)
    is_own = list(record["command"]) != list(known_agents.load_or_plain(agent).command)
    return need(record.get("labels") or (), None if is_own else agent)


def offered(labels: Iterable[str], agents: Iterable[str]) -> list[str]:
    """Return the words that a host offers."""
    return sorted({*labels, *map(agent_word, agents)})


def lacking(wanted: Iterable[str], labels: Iterable[str], agents: Iterable[str]) -> list[str]:
    """Return the needed words that a host does not offer; empty if it satisfies the need."""
    return sorted(set(wanted) - set(offered(labels, agents)))


def agent_word(agent: str) -> str:
    return f"agent={agent}"


async def read(store: Log, known: KnownSession) -> list[str]:
    """Return the words that a session of the store needs."""
    return need_of(known.agent, (await recovery.load_known(store, known)).opened)


# Raises if a session may not be opened as a `session.opened` event of its log records.
Permit = Callable[[Mapping[str, Any]], None]


class SessionSpec:
    """Everything needed to start the agent's process repeatedly and always in the same way."""

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
        on_limit: str | OnLimit | None = None,
        fallback: Sequence[str] = (),
        is_fallback: bool = False,
    ) -> None:
        """Check the arguments of an open.

        `fallback`: other agents, which get the arguments that belong to the session and not to its
        first agent. `is_fallback`: this is the spec of one of them. Its program may be missing.
        """
        self.profile = known_agents.load(checked_agent(agent))
        # The conversation to resume or to copy.
        self.resume = checked_conversation(resume)
        self.forks = forks
        if forks and resume is None:
            hint = "pass resume= with the conversation"
            raise UsageError("cannot fork: no conversation is given", hint=hint)
        # A relative folder refers to the current folder of this call, also for processes started
        # later.
        self.cwd: str = os.path.abspath(os.fspath(cwd if cwd is not None else "."))
        self._command = checked_command(command, self.profile)
        self._wishes: dict[str, Any] = {
            "model": model,
            "permission_mode": permission_mode,
            "system_prompt": system_prompt,
        }
        for wish, text in (("cwd", self.cwd), *self._wishes.items()):
            if isinstance(text, str):
                check_text(wish, text)
        self._args = checked_words("args", args)
        # Copies, so that later changes by the caller do not affect the next process.
        self._env = None if env is None else dict(env)
        self._all_env = {**self.profile.variables, **(env or {})}
        self._inherit_env = inherit_env
        self._options = dict(options or {})
        # A function exists in this process only. The next owner of the session waits instead.
        self.on_limit = on_limit if callable(on_limit) else None
        if on_limit is not None:
            self._options["on_limit"] = "wait" if callable(on_limit) else on_limit
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
        self._servers = checked_mcp_servers(mcp_servers)
        self._mcp_config = self._mcp_file()
        found = read_options(self.profile, self._options)
        self.frame_bytes_max = found.frame_bytes_max
        self._timings = found.timings
        config = found.config(
            agent=self.profile.name,
            capabilities=frozenset(self.profile.capabilities),
            on_limit=found.on_limit if self.on_limit is None else "call",
            rules=permissions.parse(rules_wanted),
            serves_terminals="terminal" in self._serves,
            setup=Setup(
                hooks=self.hooks.registrations(),
                servers=(TOOLS_SERVER,) if tools else (),
                cwd=self.cwd,
                mcp_servers=self._servers,
                **self._wishes,
            ),
        )
        self._rules = dict(rules_wanted or {})
        self._labels = checked(labels)
        self._fallback = checked_fallback(fallback, self.profile.name)
        self.fallbacks = tuple(
            SessionSpec(
                name,
                cwd=self.cwd,
                command=None,
                args=(),
                env=env,
                inherit_env=inherit_env,
                model=None,
                permission_mode=None,
                system_prompt=system_prompt,
                mcp_servers=mcp_servers,
                options=options,
                resume=None,
                forks=False,
                hooks=hooks,
                tools=tools,
                rules_wanted=rules_wanted,
                on_limit=on_limit,
                is_fallback=True,
            )
            for name in self._fallback
        )
        roster = (config, *(each.config for each in self.fallbacks))
        self.config = config if is_fallback else replace(config, roster=roster)
        if not is_fallback:
            self._check_programs()
        self.fingerprint = self._fingerprint()

    def of(self, agent: str | None) -> SessionSpec:
        """Return the spec of an agent of the session; None or an unknown one: of the first."""
        return next((each for each in self.fallbacks if each.profile.name == agent), self)

    def _check_programs(self) -> None:
        """Raise `ProgramNotFound` if no agent of the session is installed."""
        missing: list[ProgramNotFound] = []
        for spec in (self, *self.fallbacks):
            try:
                spec._prepare(StartProcess(0, spec.resume, spec.forks))
            except ProgramNotFound as exc:
                missing.append(exc)
        if len(missing) > len(self.fallbacks):
            raise missing[0]

    @classmethod
    def from_record(cls, agent: str, record: Mapping[str, Any] | None) -> SessionSpec:
        """Rebuild the spec of the last open.

        `UsageError`: the session had arguments that the log does not keep. An agent without its
        variables, servers or tools would not do the same work.
        """
        if record is None:
            message = "cannot open the session: its log does not record how it was opened"
            raise UsageError(message, hint="open it by its name")
        missing = [
            f"{what} ({', '.join(record[name])})" for name, what in UNKEPT.items() if record[name]
        ]
        missing += [
            f"{name} (which contained a secret)"
            for name, value in record.items()
            if REDACTED in repr(value)
        ]
        if missing:
            hint = (
                f"open it by its name and pass its {' and '.join(missing)}: "
                "the log does not keep them"
            )
            raise UsageError("cannot open the session from its log alone", hint=hint)
        return cls(
            agent,
            cwd=record["cwd"],
            command=record["command"],
            args=record["args"],
            env=None,
            inherit_env=record["inherit_env"],
            model=record["model"],
            permission_mode=record["permission_mode"],
            system_prompt=record["system_prompt"],
            mcp_servers=(),
            options=record["options"],
            resume=None,
            forks=False,
            hooks=None,
            tools=(),
            rules_wanted=record["rules"],
            labels=record.get("labels") or (),
            fallback=record.get("fallback") or (),
        )

    @property
    def stop_seconds_max(self) -> float:
        """Seconds until a process that was asked to stop is gone or stuck."""
        return max(each._timings.seconds_max for each in (self, *self.fallbacks))

    @property
    def resumes(self) -> str | None:
        """The conversation to resume."""
        return None if self.forks else self.resume

    def record(self) -> dict[str, Any]:
        """Return the spec as plain values for the log.

        Possible secrets (values of variables, configuration of servers) are recorded only by name.
        The same applies to objects that exist in this process only (hooks, tools).
        """
        return {
            "agent": self.profile.name,
            "cwd": self.cwd,
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
            **({"fallback": self._fallback} if self._fallback else {}),
        }

    def settings_unlike(self, other: SessionSpec) -> list[str]:
        """Return the changeable settings whose value differs from the other spec."""
        return self.settings_asked_anew(other._wishes)

    def settings_asked_anew(self, record: Mapping[str, Any] | None) -> list[str]:
        """Return the changeable settings whose value differs from the recorded last open."""
        last: Mapping[str, Any] = {} if record is None else record
        return [
            name
            for name in ("model", "permission_mode")
            if name in last and self._wishes[name] != last[name]
        ]

    def forked(self, conversation: str) -> SessionSpec:
        """Return a copy of the spec for a session that begins as a copy of this conversation."""
        other = self._again()
        other.resume, other.forks = conversation, True
        return other

    def _again(self) -> SessionSpec:
        """Return a copy of the spec for another session, which calls and closes its own parts."""
        other = copy.copy(self)
        other.hooks = Hooks(self._hooks)
        other.server = ToolServer(self._tools, name=TOOLS_SERVER)
        other._mcp_config = self._mcp_file()
        other.fallbacks = tuple(each._again() for each in self.fallbacks)
        return other

    def close(self) -> None:
        """Release the resources. No process may be started with this spec afterwards."""
        for spec in (self, *self.fallbacks):
            if spec._mcp_config is not None:
                spec._mcp_config.close()

    def spawn(
        self, effect: StartProcess, on_report: OnReport, lease: LeasePage | None = None
    ) -> RealAgent:
        return RealAgent(self._prepare(effect), self._timings, on_report, lease)

    def transcript(self, conversation: str) -> Path | None:
        """Return the file in which the agent keeps this conversation, if its profile defines one.

        Reads the file system.
        """
        patterns = self.profile.transcripts
        return transcript_path(
            patterns, cwd=self.cwd, conversation=conversation, env=self._environment()
        )

    def workspace(self, lease: LeasePage | None = None) -> Workspace | None:
        """Return a new workspace for one process; None if its dialect has no such requests."""
        if not self._serves:
            return None
        return Workspace(
            self.cwd,
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
        # Always, whatever the profile says. Banksman's variables may hold a token, and with it an
        # agent could answer its own questions.
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
                cwd=self.cwd,
                env=self._all_env,
                inherit_env=self._inherit_env,
                scrub=self._scrub,
                is_agents=True,
                pass_fds=() if self._mcp_config is None else (self._mcp_config.fd,),
            )
        except ProgramNotFound as exc:
            # For the agent's program, the profile knows how to install it.
            if not self.profile.install or self._command != list(self.profile.command):
                raise
            hint = f"{self.profile.install}; run `banksman agents` to list the installed agents"
            raise ProgramNotFound(
                str(exc.args[0]), hint=hint, agent=self.profile.name, **exc.ids
            ) from exc

    def _mcp_file(self) -> _Private | None:
        text = self.profile.dialect.mcp_file(self._servers) if self._servers else None
        return None if text is None else _Private(text)

    def _argv(self, **wishes: Any) -> list[str]:
        return self.profile.dialect.argv(self._command, args=self._args, **wishes)

    def _environment(self) -> dict[bytes, bytes]:
        return launch.build(self._all_env, inherit=self._inherit_env, scrub=self._scrub)

    def _fingerprint(self) -> str:
        """Return a hash of everything that a process is started with or receives at its start.

        A different hash requires a new process. The hash excludes the conversation, which changes
        while the session runs, and the number of the file descriptor, which is arbitrary.
        """
        env = self._environment()
        tools = [(tool.name, tool.description, tool.schema) for tool in self._tools]
        told = (self.config.setup, tools)
        seen = (self._argv(**self._wishes), self.cwd, sorted(env.items()), told)
        return hashlib.sha256(repr(seen).encode(errors="surrogateescape")).hexdigest()[:16]

    @property
    def accounts(self) -> dict[str, str]:
        """The names of the accounts of the session's agents, by agent."""
        return {each.profile.name: each.account for each in (self, *self.fallbacks)}

    @property
    def account(self) -> str:
        """The name of the agent's account: a hash, because variables may hold keys.

        Sessions with the same name share the limits of the provider: see accounts.py.
        """
        env, names = self._environment(), self.profile.account
        told = [env.get(os.fsencode(name)) for name in names] or sorted(self._all_env.items())
        seen = repr((self.profile.name, told)).encode(errors="surrogateescape")
        return hashlib.sha256(seen).hexdigest()

    def check_fork(self) -> None:
        self._check_capabilities(fork=True)

    def _check_capabilities(self, **wanted: bool) -> None:
        for name, is_wanted in wanted.items():
            if is_wanted and name not in self.profile.capabilities:
                hint = "leave it out, or set it in the agent's own configuration"
                message = f"{self.profile.title} does not support {name}"
                raise UsageError(message, hint=hint, agent=self.profile.name)


class _Private:
    """Text in an unnamed file that only a child process can read, by a path.

    The text may hold keys, and command lines are visible to every user of the machine.
    """

    def __init__(self, text: str) -> None:
        with tempfile.TemporaryFile() as file:
            file.write(text.encode())
            file.flush()
            self.fd = os.dup(file.fileno())
        # The finalizer also closes the fd if the open of the session fails.
        self.close = weakref.finalize(self, os.close, self.fd)
        # Each open of this path creates a new file description, so it is read from the beginning.
        self.path = f"/dev/fd/{self.fd}"
