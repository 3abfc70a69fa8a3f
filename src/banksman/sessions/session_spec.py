"""Session spec: the checked arguments of an open, from which the agent's process is started.

`SessionSpec` starts the process again and again, always as the caller asked for it. The log keeps
its `record`, from which `spec_record.py` rebuilds the spec. `arguments.py` has the checks of single
arguments, `containment.py` what the agent may use, and `host_needs.py` the needs for a host.
"""

from __future__ import annotations

import copy
import hashlib
import os
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from banksman.core.dialects.dialect import Setup
from banksman.core.session import permissions
from banksman.core.session.effects import StartProcess
from banksman.core.session.event import storable
from banksman.errors import ProgramNotFound, UsageError
from banksman.process import launch
from banksman.process.adoption import Claimed
from banksman.process.launch import Launch, prepare
from banksman.process.lease_page import LeasePage
from banksman.process.tree_hand_over import Survival
from banksman.sessions import command_prefix, containment, known_agents
from banksman.sessions.agent_process import OnReport, RealAgent
from banksman.sessions.arguments import (
    TOOLS_SERVER,
    check_caller,
    check_text,
    checked_agent,
    checked_command,
    checked_conversation,
    checked_fallback,
    checked_mcp_servers,
    checked_survive,
    checked_words,
    read_options,
)
from banksman.sessions.containment import Containment
from banksman.sessions.hooks import Hooks
from banksman.sessions.host_needs import checked_labels
from banksman.sessions.limit_callback import OnLimit
from banksman.sessions.profile import transcript_path
from banksman.sessions.tools import Tool, ToolServer
from banksman.sessions.workspace import Workspace, start_command


class NotPermitted(Exception):
    """A session may not be opened as its log records. No bug: the host logs it without a stack."""


# Raises `NotPermitted` if a session may not be opened as a `session.opened` event of its log says.
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
        survive: str | None = None,
        is_fallback: bool = False,
        contained: Containment = containment.NOTHING,
        user_helper: Sequence[str] = (),
        caller: str | None = None,
        only_own: bool = False,
        is_recorded: bool = False,
    ) -> None:
        """Check the arguments of an open.

        `fallback`: other agents, which get the arguments that belong to the session and not to its
        first agent. `survive`: see `Host.open`. `is_fallback`: this is the spec of one of the other
        agents. Its program may be missing. `contained`: the profile decides the parts that it does
        not state. `user_helper`: of the host, see `process/attributes.py`. `caller`: the name under
        which the session is opened; no part of the record. `only_own`: see `Host.open`.
        `is_recorded`: wrap and limits are those of the log. What is refused for a new session
        alone is logged.
        """
        # The arguments, from which the same spec can be built again.
        self.given: dict[str, Any] = {
            name: value for name, value in locals().items() if name != "self"
        }
        check_caller(caller)
        self.caller = caller
        self.only_own = only_own
        profile = known_agents.load(checked_agent(agent), is_recorded=is_recorded)
        self.containment = contained.over(profile.containment)
        self.profile = profile.without_services() if self.containment.confines else profile
        self._user_helper = tuple(user_helper)
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
        self.containment.check_folder(self.cwd)
        if not (is_fallback and is_recorded):  # Logged once for a session.
            self.containment.check_limits(is_recorded=is_recorded)
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
        self.hook_seconds = found.hook_seconds
        env_built = self._environment()
        config = found.config(
            agent=self.profile.name,
            capabilities=frozenset(self.profile.capabilities),
            on_limit=found.on_limit if self.on_limit is None else "call",
            rules=permissions.parse(rules_wanted),
            serves_terminals="terminal" in self._serves,
            scrubbed=launch.removed_secrets(env_built) if inherit_env else (),
            setup=Setup(
                hooks=self.hooks.registrations(),
                servers=(TOOLS_SERVER,) if tools else (),
                cwd=self.cwd,
                mcp_servers=self._servers,
                **self._wishes,
            ),
        )
        self._rules = dict(rules_wanted or {})
        self._labels = checked_labels(labels)
        self.survive = checked_survive(survive)
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
                contained=self.containment,
                user_helper=user_helper,
                is_recorded=is_recorded,
            )
            for name in self._fallback
        )
        roster = (config, *(each.config for each in self.fallbacks))
        self.config = config if is_fallback else replace(config, roster=roster)
        if not is_fallback and not self._makes_folder:
            self.check_programs()
        # The name of the agent's account. Sessions with the same name share the limits of the
        # provider: see accounts.py.
        self.account = self._account(env_built)
        self.fingerprint = self._fingerprint(env_built)

    def of(self, agent: str | None) -> SessionSpec:
        """Return the spec of an agent of the session; None or an unknown one: of the first."""
        return next((each for each in self.fallbacks if each.profile.name == agent), self)

    @property
    def _makes_folder(self) -> bool:
        """Whether a hook makes the folder, which does not exist now."""
        hooks = self.containment.on_open or self.containment.on_close
        return bool(hooks) and not os.path.isdir(self.cwd)

    def check_programs(self) -> None:
        """Raise `ProgramNotFound` if no agent of the session is installed."""
        missing: list[ProgramNotFound] = []
        for spec in (self, *self.fallbacks):
            try:
                start = StartProcess(0, spec.resume, spec.forks)
                spec._prepare(start, containment.ANY_SESSION)
                wrap = spec.containment.wrap
                if isinstance(wrap, str) and not command_prefix.is_far(wrap):
                    # A sandbox has the programs of this machine.
                    spec._prepare(start, containment.ANY_SESSION, is_wrapped=False)
            except ProgramNotFound as exc:
                missing.append(exc)
        if len(missing) > len(self.fallbacks):
            raise missing[0]

    @property
    def stop_seconds_max(self) -> float:
        """Seconds until a process that was asked to stop is gone or stuck."""
        return max(each._timings.seconds_max for each in (self, *self.fallbacks))

    @property
    def grace(self) -> float:
        """Seconds between TERM and KILL."""
        return self._timings.grace

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
            **({"containment": told} if (told := self.containment.record()) else {}),
            **({"functions": names} if (names := self.containment.functions) else {}),
            **({"survive": self.survive} if self.survive else {}),
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
        self,
        effect: StartProcess,
        on_report: OnReport,
        lease: LeasePage | None = None,
        session: str = "",
        survival: Survival | None = None,
    ) -> RealAgent:
        """Start a process. `session`: the id of the session."""
        launch = self._prepare(effect, session)
        return RealAgent(launch, self._timings, on_report, lease, survival)

    def adopt(
        self, claimed: Claimed, on_report: OnReport, survival: Survival | None = None
    ) -> RealAgent:
        """Continue a process that another host has started with this spec."""
        return RealAgent(claimed, self._timings, on_report, survival=survival)

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
            keep=self.profile.keep,
            limits=self.containment.limits,
            serves=self._serves,
        )

    @property
    def _serves(self) -> tuple[str, ...]:
        return self.profile.quirks.serves if self.profile.dialect.name == "acp" else ()

    @property
    def _scrub(self) -> tuple[str, ...]:
        # Always, whatever the profile says. Banksman's variables may hold a token, and with it an
        # agent could answer its own questions.
        scrub = self.containment.scrub
        return (*(self.profile.scrub if scrub is None else scrub), "banksman")

    def _prepare(self, effect: StartProcess, session: str, *, is_wrapped: bool = True) -> Launch:
        argv = self._argv(
            resume=effect.conversation,
            forks=effect.forks,
            mcp_config=None if self._mcp_config is None else self._mcp_config.path,
            **{**self._wishes, **dict(effect.settings)},
        )
        if is_wrapped:
            argv = self.containment.words(argv, cwd=self.cwd, session=session)
        # Not in the fingerprint: another trace needs no new process.
        traced = {} if effect.traceparent is None else {"TRACEPARENT": effect.traceparent}
        try:
            return prepare(
                argv,
                cwd=self.cwd,
                env={**traced, **self._all_env},
                inherit_env=self._inherit_env,
                scrub=self._scrub,
                keep=self.profile.keep,
                limits_wanted=self.containment.limits,
                user=self.containment.user,
                helper=self._user_helper,
                is_agents=True,
                pass_fds=() if self._mcp_config is None else (self._mcp_config.fd,),
            )
        except ProgramNotFound as exc:
            # For the agent's program, the profile knows how to install it.
            is_profiles = self._command == list(self.profile.command)
            is_prefix = is_wrapped and bool(self.containment.wrap)
            if not self.profile.install or not is_profiles or is_prefix:
                raise
            hint = f"{self.profile.install}; run `banksman agents` to list the installed agents"
            raise ProgramNotFound(
                str(exc.args[0]), hint=hint, agent=self.profile.name, **exc.ids
            ) from exc

    def hook_launch(self, name: str, session: str) -> Launch:
        """Return the order for a hook. It works in the session's folder, or the nearest above."""
        folder = self.cwd
        while not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        return prepare(
            self.containment.hook_words(name, cwd=self.cwd, session=session),
            cwd=folder,
            env={**self._all_env, "BANKSMAN_CWD": self.cwd, "BANKSMAN_SESSION": session},
            inherit_env=self._inherit_env,
            scrub=self._scrub,
            keep=self.profile.keep,
        )

    def _mcp_file(self) -> _Private | None:
        text = self.profile.dialect.mcp_file(self._servers) if self._servers else None
        is_others = self.containment.user is not None
        return None if text is None else _Private(text, is_others=is_others)

    def _argv(self, **wishes: Any) -> list[str]:
        return self.profile.dialect.argv(self._command, args=self._args, **wishes)

    def _environment(self) -> dict[bytes, bytes]:
        return launch.build(
            self._all_env,
            inherit=self._inherit_env,
            scrub=self._scrub,
            keep=self.profile.keep,
            ours=self.containment.variables(),
        )

    def _fingerprint(self, env: Mapping[bytes, bytes]) -> str:
        """Return a hash of everything that a process is started with or receives at its start.

        A different hash requires a new process. The hash excludes the conversation, which changes
        while the session runs, and the number of the file descriptor, which is arbitrary.
        """
        tools = [(tool.name, tool.description, tool.schema) for tool in self._tools]
        told = (self.config.setup, tools, self.containment.of_process)
        seen = (self._argv(**self._wishes), self.cwd, sorted(env.items()), told)
        return hashlib.sha256(repr(seen).encode(errors="surrogateescape")).hexdigest()[:16]

    @property
    def accounts(self) -> dict[str, str]:
        """The names of the accounts of the session's agents, by agent."""
        return {each.profile.name: each.account for each in (self, *self.fallbacks)}

    def _account(self, env: Mapping[bytes, bytes]) -> str:
        """Return the name of the account: a hash, because variables may hold keys."""
        names = self.profile.account
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

    def __init__(self, text: str, *, is_others: bool) -> None:
        """Write the text. `is_others`: the child runs as another user."""
        with tempfile.TemporaryFile() as file:
            if is_others:
                # The file has no name, so only a process that was given the fd can open it.
                os.fchmod(file.fileno(), 0o444)
            file.write(text.encode())
            file.flush()
            self.fd = os.dup(file.fileno())
        # The finalizer also closes the fd if the open of the session fails.
        self.close = weakref.finalize(self, os.close, self.fd)
        # Each open of this path creates a new file description, so it is read from the beginning.
        self.path = f"/dev/fd/{self.fd}"
