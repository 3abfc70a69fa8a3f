"""Hooks of the agent, passed to callbacks: the agent stops at an event, says what is about to happen, and waits.

**A hook that fails harms nobody.** One that raises, or takes too long, or answers what cannot be sent, is logged once
and answered for. Where the agent asks before it acts, the answer is no, with the reason: an action that the hook could
not look at must not run. Elsewhere the answer is empty, and the agent goes on.

**Ownership.** Each call runs in a task that `CallbackRunner` keeps until it is over, because a callable may take its
time after it was cancelled, or not obey at all. The agent is not made to wait for that. The session's end is: see
`wait_ended`. `CallbackRunner` serves the tools too (tools.py): all callables of the user are called in one way.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from banksman.commands import options
from banksman.core import json_schema
from banksman.core.dialects.dialect import Registration
from banksman.errors import UsageError

log = logging.getLogger("banksman")

EVENTS = (
    *("PreToolUse", "PostToolUse", "PostToolUseFailure", "UserPromptSubmit", "Stop", "SubagentStop", "PreCompact"),
    *("Notification", "SubagentStart", "PermissionRequest", "SessionStart"),
)
# How much longer than a hook's own time the agent is told to wait. When the agent's time runs out it withdraws the
# question and goes on, as if nobody had minded: our "no" must be there before.
AGENT_GRACE_SECONDS = 5.0
# How long the end of a session waits for a callable that was cancelled and does not end.
ENDING_SECONDS_MAX = 5.0
REASON_CHARS_MAX = 2000

_NAMES = r"[A-Za-z0-9_.:/-]+(?:\.\*)?|\*|\.\*"
_MATCHER = re.compile(rf"(?:{_NAMES})(?:\|(?:{_NAMES}))*")

HookCall = Callable[[Mapping[str, Any]], "Mapping[str, Any] | Awaitable[Mapping[str, Any] | None] | None"]


@dataclass(frozen=True, slots=True)
class Hook:
    """A callback for an event, and for which of them it is.

    `call` gets the event as the agent has it, and returns the hook's output in the agent's words or None. It runs in
    the loop and must not block; it may be a coroutine function. `matcher` is the agent's: for a tool event the names
    of tools, such as "Write|Edit"; None is all. After `seconds` it is cancelled and counts as failed.
    """

    call: HookCall
    matcher: str | None = None
    seconds: float = 60.0

    def __post_init__(self) -> None:
        if not callable(self.call):
            raise UsageError(f"a hook cannot call {self.call!r:.60}", hint="a function of one argument, or a coroutine")
        if not _is_matcher(self.matcher):
            hint = 'names of tools, as "Write|Edit" or "mcp__.*", or None for all'
            raise UsageError(f"the matcher of a hook cannot be {self.matcher!r:.60}", hint=hint)
        check_wait(self.seconds)


def _is_matcher(matcher: object) -> bool:
    """One that the agent cannot read matches nothing, and what was to be guarded is not. So only what any regular
    expression engine reads alike."""
    return matcher is None or (isinstance(matcher, str) and _MATCHER.fullmatch(matcher) is not None)


class Hooks:
    """The hooks of one session: what to register, and what to call. Made of what a user passes as `hooks=`."""

    def __init__(self, hooks: Mapping[str, HookCall | Hook | Sequence[HookCall | Hook]]) -> None:
        self._calls = CallbackRunner()
        self._hooks: dict[str, tuple[str, Hook]] = {}
        if not isinstance(cast(object, hooks), Mapping):
            raise UsageError(f"hooks cannot be {hooks!r:.60}", hint="a mapping from the name of an event to callbacks")
        for event, given in hooks.items():
            if event not in EVENTS:
                raise UsageError(f"there is no event {event!r:.60} to hook", hint=f"known are {', '.join(EVENTS)}")
            for hook in _hooks(given):
                self._hooks[f"hook-{len(self._hooks) + 1}"] = (event, hook)

    def __repr__(self) -> str:
        return f"<Hooks {', '.join(f'{id} {event}' for id, (event, _) in self._hooks.items()) or 'none'}>"

    def registrations(self) -> tuple[Registration, ...]:
        """In the order given. The ids follow from it, so that they are the same for the next process."""
        return tuple(
            Registration(event, hook.matcher, id, hook.seconds + AGENT_GRACE_SECONDS)
            for id, (event, hook) in self._hooks.items()
        )

    async def call(self, id: str, input: Mapping[str, Any]) -> dict[str, Any]:  # noqa: A002
        """The output of a hook, ready to be sent. Raises for an unknown id only. Cancelled, it cancels the hook."""
        if id not in self._hooks:
            raise UsageError(f"there is no hook {id!r:.60}", hint=f"known are {', '.join(self._hooks) or 'none'}")
        event, hook = self._hooks[id]
        try:
            output = await self._calls.result(hook.call, input, seconds=hook.seconds)
            if output is None:
                return {}
            if not isinstance(output, Mapping):
                raise UsageError(f"a hook cannot answer {output!r:.60}", hint="a mapping, or None")
            return json_copy(cast(object, output))
        except CallUnfinished as exc:
            log.error("! %s of %s %s", id, event, exc)
            return _failed(event, f"the hook {exc}")
        except Exception as exc:
            log.exception("! %s of %s failed", id, event)
            return _failed(event, f"the hook failed: {error_text(exc)}")

    @property
    def is_running(self) -> bool:
        return self._calls.is_running

    async def wait_ended(self) -> None:
        """Until no hook runs any more, but for the one that asks, and not for ever."""
        await self._calls.wait_ended()


def _hooks(given: Any) -> list[Hook]:
    each = cast(Sequence[Any], given) if isinstance(given, list | tuple) else [given]
    return [one if isinstance(one, Hook) else Hook(one) for one in each]


def _failed(event: str, why: str) -> dict[str, Any]:
    match event:
        case "PreToolUse":
            answer = {"permissionDecision": "deny", "permissionDecisionReason": why}
        case "PermissionRequest":
            answer = {"decision": {"behavior": "deny", "message": why}}
        case _:
            return {}
    return {"hookSpecificOutput": {"hookEventName": event, **answer}}


# -- what a user hands in to be called -------------------------------------------------------------------------------
class RequestTasks:
    """Tasks that each answer one request of the agent. Every one is kept until it is over, also after its request is
    closed: it may have something to clean up, and the loop alone would not keep it. `what`: their name in the log."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._by_request: dict[str, asyncio.Task[None]] = {}
        self.running: set[asyncio.Task[None]] = set()

    def start(self, request: str, work: Coroutine[Any, Any, None]) -> None:
        task = self._by_request[request] = asyncio.ensure_future(work)
        self.running.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self.running.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            # What is no error of the callable's (an exit, say) is told here: nobody waits for the task.
            log.error("! %s ended by %s", self._what, type(exc).__name__)
        # By the task and not by its request, which another one may have by now.
        for request in [request for request, other in self._by_request.items() if other is task]:
            del self._by_request[request]

    def cancel(self, request: str) -> None:
        """Unless it is the task that asks."""
        task = self._by_request.pop(request, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def cancel_all(self) -> None:
        for request in list(self._by_request):
            self.cancel(request)


class CallUnfinished(Exception):
    """The callable neither returned nor raised: its time was over, or it was cancelled by somebody else."""


class CallbackRunner:
    """Calls of what a user handed in: in the loop, each in a task of its own that is kept until it is over."""

    def __init__(self) -> None:
        self._running: dict[asyncio.Task[Any], object] = {}

    async def result(self, call: Callable[[Any], Any], argument: object, *, seconds: float, key: object = None) -> Any:
        """What the callable returns or raises; NoAnswer after `seconds`. Cancelled, it cancels the callable."""
        task = asyncio.ensure_future(_called(call, argument))
        self._running[task] = key
        task.add_done_callback(self._over)
        try:
            await asyncio.wait({task}, timeout=seconds)
        finally:
            if not task.done():
                task.add_done_callback(_over_late)
                task.cancel()
        if not task.done():
            raise CallUnfinished(f"did not answer within {seconds:g} seconds")
        if task.cancelled():
            raise CallUnfinished("was cancelled")
        return task.result()

    @property
    def is_running(self) -> bool:
        return bool(self._running)

    def cancel(self, key: object) -> None:
        """Cancel the calls that were given this key."""
        for task, its_key in self._running.items():
            if its_key == key:
                task.cancel()

    def _over(self, task: asyncio.Task[Any]) -> None:
        del self._running[task]
        # Looked at here too: nobody may wait any more, and asyncio complains of what nobody looked at.
        if not task.cancelled():
            task.exception()

    async def wait_ended(self) -> None:
        """Until no callable runs any more, but for the one that asks, and not for ever."""
        running = self._running.keys() - {asyncio.current_task()}
        if running:
            _, late = await asyncio.wait(running, timeout=ENDING_SECONDS_MAX)
            if late:
                log.warning("! %d callbacks go on after the end of their session", len(late))


async def _called(call: Callable[[Any], Any], argument: object) -> Any:
    answer = call(argument)
    return await answer if inspect.isawaitable(answer) else answer


def _over_late(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (exc := task.exception()) is not None:
        log.error("! a callback that was cancelled raised", exc_info=exc)


def error_text(exc: BaseException) -> str:
    """An exception in words that can be sent, and not too many."""
    try:
        words = f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
    except Exception:
        # Its __str__ is the user's, too.
        words = type(exc).__name__
    return words[:REASON_CHARS_MAX].encode(errors="replace").decode()


def json_copy(value: object) -> Any:
    """A value as JSON has it: a copy that nobody can change, of which it is certain that it can be sent."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_members)
        # Half of a surrogate pair is no UTF-8.
        text.encode()
        copy = json.loads(text)
    except (TypeError, ValueError, RecursionError) as exc:
        hint = "text, finite numbers, lists and mappings"
        raise UsageError(f"this cannot be sent as JSON: {error_text(exc)}", hint=hint) from exc
    # What is deeper could be written here, and not once it stands inside a message.
    if (fault := json_schema.fault(copy, True)) is not None:
        raise UsageError(f"this cannot be sent as JSON: {fault}", hint="less of it")
    return copy


def _members(value: object) -> Any:
    """A mapping that is no dict; anything else is refused as it should be."""
    if isinstance(value, Mapping):
        return dict(cast(Mapping[Any, Any], value))
    raise TypeError(f"a {type(value).__name__} is not of JSON")


def check_wait(seconds: float) -> None:
    """Of a wait for a callback: it must end, and not before it began."""
    options.check_seconds("seconds", seconds)
    if not 0 < seconds <= options.SECONDS_MAX:
        raise UsageError(f"seconds cannot be {seconds!r}", hint="above 0, and with an end: every callback has one")
