"""Base of the public `Host`: owner of every command and every session of one event loop.

The host promises that nothing it started outlives it. Closing it, leaving its `async with`, or the
end of its loop ends every session and every command by the ladder. This module opens sessions,
drains and closes. `loop_bound.py` binds the host to its loop. `stored_sessions.py` has the other
calls on sessions, and `commands/command_starter.py` those on commands. `banksman/host.py` chooses
the store.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from banksman.commands.command_starter import CommandStarter
from banksman.commands.options import check_seconds, clamp_timeout
from banksman.commands.result import Ended
from banksman.errors import BanksmanError, Closed, StoreError, UsageError
from banksman.runtime.loop_bound import LoopBound
from banksman.runtime.stored_sessions import StoredSessions

if TYPE_CHECKING:
    from banksman.core.session.budget import Budget, OnBudget
    from banksman.sessions.limit_callback import OnLimit
    from banksman.sessions.questions import OnQuestion
    from banksman.sessions.session import Session
    from banksman.sessions.session_hooks import HookFunction
    from banksman.sessions.session_opener import SessionOpener
    from banksman.sessions.session_spec import Permit
    from banksman.sessions.tools import Tool
    from banksman.store.log import Log

log = logging.getLogger("banksman")

# How long the next host may take, and how long a session may take until it can be handed over: a
# write to its agent, the sweep after an interrupt, a call of the agent into this host.
HOLD_SECONDS = 60.0
HAND_OVER_SECONDS_MAX = 10.0


class SettleTime(enum.Enum):
    """When the host settles the leftovers of dead hosts in the store.

    That is on entry, or with the first session.
    """

    AT_START = enum.auto()
    # A store that cannot be opened is only logged, because a caller without sessions does not need
    # it.
    AT_START_IF_IT_CAN = enum.auto()
    WHEN_NEEDED = enum.auto()


class Host(LoopBound, StoredSessions, CommandStarter):
    """Owns sessions and commands. Use `async with Host() as host`, or call `close()`.

    A host belongs to the loop in which it is first used.
    """

    def __init__(
        self,
        store: Callable[[], Log] | None = None,
        *,
        settles: SettleTime = SettleTime.WHEN_NEEDED,
        secrets: Sequence[str] = (),
        processes_max: int | None = None,
        starts_max: int | None = None,
        permit: Permit | None = None,
        finished_max: int = 256,
        finished_seconds_max: float = 3600.0,
        user_helper: Sequence[str] | None = None,
        budget: Budget | Mapping[str, float] | None = None,
        caller_budgets: Mapping[str, Budget | Mapping[str, float]] | None = None,
        survive: str | None = None,
        hold_seconds: float = HOLD_SECONDS,
    ) -> None:
        """Create a host. Nothing is opened yet.

        `store`: opens the log when the first session needs it; None: the host has no sessions. The
        first awaited call waits until the log is ready (`Log.ready`). Calls that do not await may
        be refused until then. `settles`: when the store is opened to settle the leftovers of dead
        hosts. `secrets`: removed from each event before it is stored; `core/redaction/` states the
        limits.

        `processes_max`: limit on agent processes. The session that was idle for the longest time
        makes room, and resumes its conversation at the next ask. `starts_max`: limit on
        simultaneous starts; None: one per core. `user_helper`: see `process/attributes.py`.

        `permit`: raises if a session from the store may not be opened again with its recorded spec.
        It is also called before each start of a process.

        `budget`, `caller_budgets`, `survive`, `hold_seconds`: see `banksman.Host`.
        """
        for limit_name, limit in (("processes_max", processes_max), ("starts_max", starts_max)):
            if limit is not None and (
                isinstance(limit, bool) or not isinstance(cast(object, limit), int) or limit < 1
            ):
                hint = "use a whole number, 1 or more, or leave it out"
                raise UsageError(f"{limit_name} cannot be {limit!r:.60}", hint=hint)
        super().__init__(
            finished_max=finished_max,
            finished_seconds_max=finished_seconds_max,
            user_helper=user_helper,
        )
        self._open_store = store
        self._settles = settles
        self._secrets = secrets
        self._limits = processes_max, starts_max
        self._permit = permit
        self._budgets = budget, caller_budgets
        self._survival = survive, hold_seconds
        # When the last attempt to open the store failed. None: there was no attempt, or the store
        # is open.
        self._open_failed_at: float | None = None
        self._draining: asyncio.Task[None] | None = None
        self._deadlines: list[asyncio.TimerHandle] = []

    async def __aenter__(self) -> Self:
        self._bind()
        if self.settles_at_start:
            try:
                await self._own_sessions().settle()
            except BaseException as exc:
                if self._settles is SettleTime.AT_START_IF_IT_CAN and isinstance(exc, StoreError):
                    log.warning("cannot open the store, sessions are not available: %s", exc)
                else:
                    # The host was not entered, so `__aexit__` will not close it.
                    await self.close()
                    raise
        return self

    @property
    def settles_at_start(self) -> bool:
        """Whether entering the host opens the store."""
        return self._settles is not SettleTime.WHEN_NEEDED

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        sessions = sum(not session.is_closed for session in self.our_sessions())
        return (
            f"<Host {sessions} sessions, {self._command_registry}{', closing' * self._is_closing}>"
        )

    # -- sessions ---------------------------------------------------------------------------------
    async def open(
        self,
        agent: str = "claude",
        *,
        cwd: str | os.PathLike[str] | None = None,
        name: str | None = None,
        command: str | Sequence[str] | None = None,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        inherit_env: bool = True,
        model: str | None = None,
        permission_mode: str | None = None,
        system_prompt: str | None = None,
        mcp_servers: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        resume: str | None = None,
        fork: bool = False,
        on_question: OnQuestion | None = None,
        hooks: Mapping[str, Any] | None = None,
        tools: Sequence[Tool] = (),
        rules: Mapping[str, str] | None = None,
        labels: Sequence[str] = (),
        id: str | None = None,
        on_limit: str | OnLimit | None = None,
        budget: Budget | Mapping[str, float] | None = None,
        on_budget: OnBudget | None = None,
        fallback: Sequence[str] = (),
        user: str | int | None = None,
        limits: Mapping[str, Any] | None = None,
        scrub: Sequence[str] | None = None,
        wrap: str | Sequence[str] | None = None,
        on_open: Sequence[str] | HookFunction | None = None,
        on_close: Sequence[str] | HookFunction | None = None,
        survive: str | None = None,
        caller: str | None = None,
        only_own: bool = False,
    ) -> Session:
        """Open a session with an agent. Its process starts with the first ask.

        `command`: replaces the whole command of the profile; the options that the dialect needs are
        still added, then `args`. `resume`: an existing conversation of the agent to resume;
        `NotOwner` if another session of this store has it. `fork`: start as a copy of that
        conversation and leave the original as it is. `mcp_servers`: in the format of ACP.
        `options`: see `sessions/arguments.py`.

        `on_question`: gets the questions of the agent. `hooks`: gets its hooks (by event: a
        callable, a `Hook`, or several). `tools`: offered to the agent. All of these live in this
        process. `rules`: map names of tools to "allow", "deny" or "ask", and so decide which tools
        need no question. With Claude Code, "deny" and "ask" hold regardless of the settings of
        Claude Code. With other agents they hold for their questions and for the work that they
        delegate to Banksman: see docs/agents.md.

        Names are unique in a store. If `name` belongs to a session that is open here, that session
        is returned, reopened with the new arguments. Callbacks, rules and numbers apply
        immediately, except those of the ladder and `frame_bytes_max`, which belong to a process.
        The arguments of the process apply from its next turn. If `name` belongs to any other
        session of the store, this host claims it and takes it over. The conversation continues,
        waiting asks are served, and a turn that was open when its host died has the outcome
        UNKNOWN. `NotOwner`: a live host elsewhere has the session.

        `labels`: the labels that a host must have to take the session over, in a store that many
        hosts share: docs/server.md.

        `id`: the id of a new session, for a caller that must find the session again even if this
        call's result is lost. `UsageError` if the store already has a session with that id.

        `on_limit`: what asks do while the agent's account is limited: "fail" (default), "wait" for
        the end of the limit, or a function that gets a `LimitReached` and returns one of these
        words. It may be a coroutine function. See docs/how-to/provider-errors.md.

        `budget`: caps on what the session may use over its whole life: `tokens`, `usd` (the agent's
        own estimate), `working_seconds`, `turns`. `on_budget`: what happens at a cap. "queue" (the
        default): the turn finishes, and no other is sent. "stop": the turn is interrupted too.
        "ask": a question asks to raise the budget, finish the turn, or stop it. See
        docs/how-to/budgets.md.

        `fallback`: names of other agents. While `agent` is limited or not installed, the next ask
        goes to the first of them that is neither, in a conversation of its own. An ask that was
        sent never goes to another agent. `command`, `args`, `model`, `permission_mode`, `resume`
        and `fork` are for `agent` alone.

        `user`, `limits`: as for a command. `scrub`: which inherited variables the agent does not
        get; None: what its profile says, usually all that may hold secrets but the keys of its
        provider. `wrap`: a prefix of the agent's command, such as `["bwrap", …]`, with the
        placeholders `{cwd}`, `{session}` and `{command}`, or the name of a sandbox, such as
        "bwrap". `on_open`, `on_close`: a command that makes, or removes, what the session works in,
        such as a worktree, with the placeholders `{cwd}` and `{session}`; or a function that gets a
        `HookCall`. `HookFailed`: `on_open` failed, and the session was not opened. A part that
        is None is as the session had it, else as the profile says. See docs/agents.md.
        `survive`: "crash": the agent survives the death of this host, and the next host that opens
        the session continues its turn. None: as the host says. `UsageError` if no other host could
        open the session: with `env`, `mcp_servers`, `hooks`, `tools` or functions. Linux only.
        `caller`: the name of the person or program on whose behalf the session is opened. The first
        one is its owner for `banksman serve`: see docs/security.md. `only_own`: raise `NameTaken`,
        and change nothing, if `name` belongs to a session that `caller` does not own.
        """
        # Loaded with the first session, so that a program that only runs commands does not pay for
        # it.
        from banksman.sessions import containment  # noqa: PLC0415
        from banksman.sessions.arguments import with_budget  # noqa: PLC0415
        from banksman.sessions.session_spec import SessionSpec  # noqa: PLC0415

        self._bind()
        if self._is_closing or self._is_draining:
            raise Closed("cannot open a session: the host is closing", hint="open another Host")
        spec = SessionSpec(
            agent,
            cwd=cwd,
            command=command,
            args=args,
            env=env,
            inherit_env=inherit_env,
            model=model,
            permission_mode=permission_mode,
            system_prompt=system_prompt,
            mcp_servers=mcp_servers,
            options=with_budget(options, budget, on_budget),
            resume=resume,
            forks=fork,
            hooks=hooks,
            tools=tools,
            rules_wanted=rules,
            labels=labels,
            on_limit=on_limit,
            fallback=fallback,
            contained=containment.checked(
                user=user,
                limits=limits,
                scrub=scrub,
                wrap=wrap,
                on_open=on_open,
                on_close=on_close,
            ),
            user_helper=self._user_helper,
            survive=survive,
            caller=caller,
            only_own=only_own,
        )
        sessions = self._own_sessions()
        try:
            return await sessions.open(spec, name=name, on_question=on_question, id=id)
        except BaseException:
            spec.close()
            raise

    async def fork(
        self,
        session: Session | str,
        *,
        name: str | None = None,
        on_question: OnQuestion | None = None,
    ) -> Session:
        """Open a session that begins as a copy of another session's conversation.

        The new session has the same settings, and the same `on_question` unless another one is
        given. The copy is made when the fork's process starts, at its first ask. It contains the
        conversation up to that moment, and nothing after it.
        """
        self._bind()
        if self._is_closing or self._is_draining:
            raise Closed("cannot open a session: the host is closing", hint="open another Host")
        id = session if isinstance(session, str) else session.id
        return await self._own_sessions().fork(self.session(id), name, on_question)

    def _own_sessions(self) -> SessionOpener:
        """Return the registry of sessions. Opens the store if necessary."""
        if self._sessions is None:
            if self._is_closing:
                raise Closed("the host is closed", hint="open another Host")
            self._bind()
            from banksman.core.redaction.redactor import Redactor  # noqa: PLC0415
            from banksman.sessions.arguments import checked_budgets  # noqa: PLC0415
            from banksman.sessions.pool import Pool, starts_at_once  # noqa: PLC0415
            from banksman.sessions.session_opener import SessionOpener  # noqa: PLC0415

            assert self._open_store is not None
            processes_max, starts_max = self._limits
            pool = Pool(
                processes_max=processes_max, starts_max=starts_max or starts_at_once(), host=self
            )
            redactor = Redactor(self._secrets) if self._secrets else None
            shared = checked_budgets(*self._budgets)
            try:
                store = self._open_store()
            except BanksmanError:
                self._open_failed_at = time.monotonic()
                raise
            self._open_failed_at = None
            survive, hold_seconds = self._survival
            self._sessions = SessionOpener(
                store,
                pool,
                redactor,
                self._permit,
                shared,
                user_helper=self._user_helper,
                survive=survive,
                hold_seconds=hold_seconds,
            )
        return self._sessions

    async def drain(
        self,
        *,
        timeout: float | None = None,
        hand_over: bool = False,
        hold_seconds: float = HOLD_SECONDS,
    ) -> None:
        """Accept nothing new, finish running work, then close.

        `timeout`: seconds until work that is still running is stopped. Cancelling only stops the
        waiting; the draining continues.

        `hand_over`: leave the work to the next host on this machine that opens the same store. A
        session goes there with its process, in the middle of its turn, and waiting asks stay in the
        store. `timeout` is at most `HAND_OVER_SECONDS_MAX` then. The processes are ended if no host
        comes within `hold_seconds`. A session is finished here, as far as the time allows, if
        another program cannot open it from the store alone: with `env`, `mcp_servers`, `hooks`,
        `tools` or functions such as `on_question`. See docs/concepts.md.
        """
        if hand_over:
            self._hand_over_nowait(timeout, hold_seconds)
        else:
            self._finish_nowait(timeout)
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._finish_and_close())
        await asyncio.shield(self._draining)

    async def finish(self, *, timeout: float | None = None) -> None:
        """Accept nothing new and finish running work, like `drain`, but do not close.

        The history can still be read afterwards. Cancelling only stops the waiting.
        """
        self._finish_nowait(timeout)
        await self._wait_finished()

    def _finish_nowait(self, timeout: float | None) -> None:
        self._bind()
        if timeout is not None:
            check_seconds("timeout", timeout)
        self._is_draining = True
        self._open_no_more()
        loop = asyncio.get_running_loop()
        for session in self.our_sessions():
            session.drain_nowait()
        seconds = clamp_timeout(timeout)
        if seconds is not None:
            # Timers belong to the host and not to a caller, so a cancelled caller does not lift its
            # deadline. Of several deadlines the first one counts.
            self._deadlines.append(loop.call_later(seconds, self._stop_all))

    def _hand_over_nowait(self, timeout: float | None, hold_seconds: float) -> None:
        self._bind()
        check_seconds("hold_seconds", hold_seconds)
        if timeout is not None:
            check_seconds("timeout", timeout)
        self._is_draining = True
        self._open_no_more()
        seconds = min(HAND_OVER_SECONDS_MAX, HAND_OVER_SECONDS_MAX if timeout is None else timeout)
        for session in self.our_sessions():
            assert self._sessions is not None
            self._sessions.hand_over(session, seconds, hold_seconds)
        loop = asyncio.get_running_loop()
        self._deadlines.append(loop.call_later(seconds, self._stop_all))

    async def _finish_and_close(self) -> None:
        await self._wait_finished()
        await self.close()

    async def _wait_finished(self) -> None:
        # All together: a command whose output is held for a reader continues only while its end is
        # awaited.
        closed = (session.wait_closed() for session in self.our_sessions())
        await asyncio.gather(self._command_registry.wait_empty(), *closed)
        # While a session finished, a `watch` may have started a search, which is a process too.
        await self._command_registry.wait_empty()
        self._command_registry.end_waits()
        for deadline in self._deadlines:
            deadline.cancel()

    def _open_no_more(self) -> None:
        if self._sessions is not None:
            self._sessions.open_no_more()

    def _stop_all(self) -> None:
        self._is_closing = True
        self._open_no_more()
        for session in self.our_sessions():
            session.end_nowait()
        for command in self._command_registry.running():
            command.stop_nowait(Ended.HOST_CLOSED)

    # -- closing ----------------------------------------------------------------------------------
    async def close(self) -> None:
        """Close every session, stop every command by the ladder, and return when all have ended.

        It may be called again, also concurrently. Cancelling only stops the waiting.
        """
        self._bind()
        await self._drain()
        if self._draining is not None and self._draining is not asyncio.current_task():
            # The drain task has nothing left to wait for, and ends together with this call.
            await asyncio.shield(self._draining)
        self.dismiss_guard()

    async def _drain(self) -> None:
        self._stop_all()
        await asyncio.gather(*(session.wait_closed() for session in self.our_sessions()))
        await self._command_registry.wait_empty()
        self._command_registry.end_waits()
        if self._sessions is not None:
            await self._sessions.close()
            # If this is cancelled, the next close closes the log. A log may be closed more than
            # once.
            await self._sessions.store.close()

    def _abandon(self) -> None:
        # The commands end with the loop: the keepers end the remaining trees.
        self._is_closing = True
        for session in self.our_sessions():
            session.abandon()
        if self._sessions is not None:
            self._sessions.abandon()
        self._command_registry.abandon()
