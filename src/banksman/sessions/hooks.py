"""Call the caller's hooks for an agent's hook events; run user callables in tasks.

At a hook event, the agent stops, describes the next action and waits for the answer. `Hooks` has
the registrations and the calls. `CallbackRunner` also runs the tools (tools.py), so hooks and tools
are called in the same way. `RequestTasks` also keeps the tasks of questions (questions.py).

**A failed hook affects only its own event.** A hook fails if it raises, takes too long, or returns
a value that cannot be sent. The failure is logged once and answered. Where the agent asks before an
action, the answer is a denial with the reason, because an unchecked action must not run. For other
events the answer is empty, and the agent continues.

**Ownership.** Each call runs in a task that `CallbackRunner` keeps until the task ends. A callable
may need time after its cancellation, or ignore it. The agent does not wait for that, but the end of
the session does: see `wait_ended`.
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
    *(
        "PreToolUse",
        "PostToolUse",
        "PostToolUseFailure",
        "UserPromptSubmit",
        "Stop",
        "SubagentStop",
        "PreCompact",
    ),
    *("Notification", "SubagentStart", "PermissionRequest", "SessionStart"),
)
# The agent's timeout for a hook is longer than the hook's timeout by this time. When its timeout
# expires, the agent cancels the request and continues as if the hook had no objection. The denial
# must arrive before that.
AGENT_GRACE_SECONDS = 5.0
# Time that the end of a session waits for a cancelled callable that does not end.
ENDING_SECONDS_MAX = 5.0
REASON_CHARS_MAX = 2000

_NAMES = r"[A-Za-z0-9_.:/-]+(?:\.\*)?|\*|\.\*"
_MATCHER = re.compile(rf"(?:{_NAMES})(?:\|(?:{_NAMES}))*")

HookCall = Callable[
    [Mapping[str, Any]], "Mapping[str, Any] | Awaitable[Mapping[str, Any] | None] | None"
]


@dataclass(frozen=True, slots=True)
class Hook:
    """Callback for a hook event, with a filter.

    `call`: gets the event in the agent's format and returns the hook's output in the agent's
    format, or None. It runs in the event loop and must not block; it may be a coroutine function.
    `matcher`: the agent's filter; for a tool event the names of tools, such as "Write|Edit"; None
    matches all. `seconds`: timeout, after which the call is cancelled and counts as failed.
    """

    call: HookCall
    matcher: str | None = None
    seconds: float = 60.0

    def __post_init__(self) -> None:
        if not callable(self.call):
            hint = "use a function of one argument, or a coroutine function"
            raise UsageError(f"a hook cannot call {self.call!r:.60}", hint=hint)
        if not _is_matcher(self.matcher):
            hint = 'use names of tools, such as "Write|Edit" or "mcp__.*", or None for all'
            raise UsageError(f"the matcher of a hook cannot be {self.matcher!r:.60}", hint=hint)
        check_wait(self.seconds)


def _is_matcher(matcher: object) -> bool:
    """Return whether every regular expression engine reads the matcher in the same way.

    A matcher that the agent cannot parse matches nothing, and the tool would run unguarded.
    """
    return matcher is None or (isinstance(matcher, str) and _MATCHER.fullmatch(matcher) is not None)


class Hooks:
    """Hooks of one session: registrations for the agent, and calls.

    Created from the `hooks=` argument.
    """

    def __init__(self, hooks: Mapping[str, HookCall | Hook | Sequence[HookCall | Hook]]) -> None:
        self._calls = CallbackRunner()
        self._hooks: dict[str, tuple[str, Hook]] = {}
        if not isinstance(cast(object, hooks), Mapping):
            hint = "use a mapping from event names to callbacks"
            raise UsageError(f"hooks cannot be {hooks!r:.60}", hint=hint)
        for event, given in hooks.items():
            if event not in EVENTS:
                hint = f"use one of: {', '.join(EVENTS)}"
                raise UsageError(f"there is no hook event {event!r:.60}", hint=hint)
            for hook in _hooks(given):
                self._hooks[f"hook-{len(self._hooks) + 1}"] = (event, hook)

    def __repr__(self) -> str:
        return (
            "<Hooks "
            f"{', '.join(f'{id} {event}' for id, (event, _) in self._hooks.items()) or 'none'}>"
        )

    def registrations(self) -> tuple[Registration, ...]:
        """Return the registrations in the given order.

        The ids follow from the order, so they are the same for the next process.
        """
        return tuple(
            Registration(event, hook.matcher, id, hook.seconds + AGENT_GRACE_SECONDS)
            for id, (event, hook) in self._hooks.items()
        )

    async def call(self, id: str, input: Mapping[str, Any]) -> dict[str, Any]:  # noqa: A002
        """Call a hook and return its output in a form that can be sent.

        Raises only for an unknown id. Cancelling this call cancels the hook.
        """
        if id not in self._hooks:
            hint = f"known hooks: {', '.join(self._hooks) or 'none'}"
            raise UsageError(f"there is no hook {id!r:.60}", hint=hint)
        event, hook = self._hooks[id]
        try:
            output = await self._calls.result(hook.call, input, seconds=hook.seconds)
            if output is None:
                return {}
            if not isinstance(output, Mapping):
                hint = "return a mapping or None"
                raise UsageError(f"a hook cannot return {output!r:.60}", hint=hint)
            return json_copy(cast(object, output))
        except CallUnfinished as exc:
            log.error("hook %s (hook=%s event=%s)", exc, id, event)
            return _failed(event, f"the hook {exc}")
        except Exception as exc:
            log.exception("hook failed (hook=%s event=%s)", id, event)
            return _failed(event, f"the hook failed: {error_text(exc)}")

    @property
    def is_running(self) -> bool:
        return self._calls.is_running

    async def wait_ended(self) -> None:
        """Wait a limited time until the hooks have ended.

        The hook that calls this function is not waited for.
        """
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


# -- calls of user callables ---------------------------------------------------------------------
class RequestTasks:
    """Tasks that each answer one request of the agent.

    A task is kept until it ends, even after its request is closed, because it may still clean up.
    The event loop alone holds only a weak reference to it. `what`: the name of the tasks in the
    log.
    """

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
        # Compared by task, because another task may have the same request meanwhile.
        ended = [request for request, other in self._by_request.items() if other is task]
        if not task.cancelled() and (exc := task.exception()) is not None:
            # No code awaits the task. So an exception that is not an error of the callable, for
            # example SystemExit, is logged here.
            log.error(
                "task of an agent's request ended by %s (task=%s request=%s)",
                type(exc).__name__,
                self._what,
                ",".join(ended) or "closed",
            )
        for request in ended:
            del self._by_request[request]

    def cancel(self, request: str) -> None:
        """Cancel the task of a request, unless it is the current task."""
        task = self._by_request.pop(request, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def cancel_all(self) -> None:
        for request in list(self._by_request):
            self.cancel(request)


class CallUnfinished(Exception):
    """The callable neither returned nor raised.

    Its timeout expired, or it was cancelled by other code.
    """


class CallbackRunner:
    """Runs user callables in the event loop, each in a separate task.

    A task is kept until it ends.
    """

    def __init__(self) -> None:
        self._running: dict[asyncio.Task[Any], object] = {}

    async def result(
        self, call: Callable[[Any], Any], argument: object, *, seconds: float, key: object = None
    ) -> Any:
        """Return the callable's result or raise its exception.

        Raises `CallUnfinished` after `seconds`. Cancelling this call cancels the callable.
        """
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
        """Cancel the calls with this key."""
        for task, its_key in self._running.items():
            if its_key == key:
                task.cancel()

    def _over(self, task: asyncio.Task[Any]) -> None:
        del self._running[task]
        # Retrieve the exception, because the caller may be gone. Otherwise asyncio logs a warning.
        if not task.cancelled():
            task.exception()

    async def wait_ended(self) -> None:
        """Wait a limited time until the callables have ended.

        The callable that calls this function is not waited for.
        """
        running = self._running.keys() - {asyncio.current_task()}
        if running:
            _, late = await asyncio.wait(running, timeout=ENDING_SECONDS_MAX)
            if late:
                message = "callbacks still run after the end of their session (callbacks=%d)"
                log.warning(message, len(late))


async def _called(call: Callable[[Any], Any], argument: object) -> Any:
    answer = call(argument)
    return await answer if inspect.isawaitable(answer) else answer


def _over_late(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (exc := task.exception()) is not None:
        log.error("a cancelled callback raised an exception", exc_info=exc)


def error_text(exc: BaseException) -> str:
    """Return a bounded text for an exception that can be sent as UTF-8."""
    try:
        words = f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
    except Exception:
        # `__str__` is user code and may raise.
        words = type(exc).__name__
    return words[:REASON_CHARS_MAX].encode(errors="replace").decode()


def json_copy(value: object) -> Any:
    """Return an independent copy of a JSON value.

    `UsageError`: the value cannot be sent as JSON.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_members)
        # A lone surrogate cannot be encoded as UTF-8.
        text.encode()
        copy = json.loads(text)
    except (TypeError, ValueError, RecursionError) as exc:
        hint = "use text, finite numbers, lists and mappings"
        raise UsageError(f"cannot send the value as JSON: {error_text(exc)}", hint=hint) from exc
    # A deeper value could be encoded here, but not inside the message that contains it.
    if (fault := json_schema.fault(copy, True)) is not None:
        hint = "use a smaller value with less nesting"
        raise UsageError(f"cannot send the value as JSON: {fault}", hint=hint)
    return copy


def _members(value: object) -> Any:
    """Convert a mapping that is not a dict. `json` rejects any other type."""
    if isinstance(value, Mapping):
        return dict(cast(Mapping[Any, Any], value))
    raise TypeError(f"a {type(value).__name__} is not a JSON value")


def check_wait(seconds: float) -> None:
    """Check the timeout of a callback: positive and finite."""
    options.check_seconds("seconds", seconds)
    if not 0 < seconds <= options.SECONDS_MAX:
        raise UsageError(f"seconds cannot be {seconds!r}", hint="use a finite number above 0")
