"""Hooks: registration, calls, and failures. A failing hook denies where it must, and harms no other call."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from banksman.core.json_schema import VALUE_DEPTH_MAX
from banksman.errors import UsageError
from banksman.sessions import hooks
from banksman.sessions.hooks import (
    AGENT_GRACE_SECONDS,
    ENDING_SECONDS_MAX,
    EVENTS,
    CallbackRunner,
    CallUnfinished,
    Hook,
    Hooks,
    Registration,
    RequestTasks,
)
from banksman.testing import sim

INPUT = {"tool_name": "Bash", "tool_input": {"command": "ls"}}
ASKING = ("PreToolUse", "PermissionRequest")


def quiet(said: Mapping[str, Any]) -> None:
    """Return nothing."""


def denial(event: str, output: Mapping[str, Any]) -> str:
    """Check the agent's format of a denial for this event, and return the reason."""
    specific = dict(output["hookSpecificOutput"])
    assert list(output) == ["hookSpecificOutput"]
    assert specific.pop("hookEventName") == event
    if event == "PreToolUse":
        assert specific.pop("permissionDecision") == "deny"
        return specific.pop("permissionDecisionReason")
    assert specific["decision"]["behavior"] == "deny"
    return specific["decision"]["message"]


# -- registration ----------------------------------------------------------------------------------------------------
def test_hooks_are_registered_in_order_however_given() -> None:
    given = Hooks({"PreToolUse": [quiet, Hook(quiet, matcher="Bash", seconds=5)], "Stop": quiet, "Notification": ()})
    grace = AGENT_GRACE_SECONDS
    assert given.registrations() == (
        Registration("PreToolUse", None, "hook-1", 60.0 + grace),
        Registration("PreToolUse", "Bash", "hook-2", 5 + grace),
        Registration("Stop", None, "hook-3", 60.0 + grace),
    )
    # The agent must wait longer than the hook, so that the denial arrives.
    assert grace > 0
    assert repr(given) == "<Hooks hook-1 PreToolUse, hook-2 PreToolUse, hook-3 Stop>"
    assert Hooks({}).registrations() == ()


@pytest.mark.parametrize(
    "given", [{"PreToolUsed": quiet}, {3: quiet}, {"PreToolUse": "quiet"}, {"PreToolUse": [None]}, [quiet], None]
)
def test_hooks_refuse_invalid_mapping(given: Any) -> None:
    with pytest.raises(UsageError):
        Hooks(given)


@pytest.mark.parametrize(
    "how",
    [
        {"call": None},
        {"call": quiet, "matcher": 3},
        {"call": quiet, "matcher": "["},
        {"call": quiet, "matcher": "(?i)bash"},
        {"call": quiet, "matcher": "Bash("},
        {"call": quiet, "matcher": "Bash(rm *)"},
        *(
            {"call": quiet, "seconds": seconds}
            for seconds in (0, -1, True, float("inf"), float("nan"), 10**400, "1", None)
        ),
    ],
)
def test_hook_refuses_invalid_arguments(how: Any) -> None:
    with pytest.raises(UsageError):
        Hook(**how)


def test_hooks_error_for_unknown_event_lists_known_ones() -> None:
    with pytest.raises(UsageError) as caught:
        Hooks({"PreTool": quiet})
    assert all(event in caught.value.hint for event in EVENTS)


async def test_hook_call_with_unknown_id_is_usage_error() -> None:
    with pytest.raises(UsageError, match="hook-2"):
        await Hooks({"Stop": quiet}).call("hook-2", {})


# -- calls -----------------------------------------------------------------------------------------------------------
def _plainly(output: Any) -> Any:
    def call(said: Mapping[str, Any]) -> Any:
        return output

    return call


def _async(output: Any) -> Any:
    async def call(said: Mapping[str, Any]) -> Any:
        await asyncio.sleep(0)
        return output

    return call


@pytest.mark.parametrize("kind", [_plainly, _async])
@pytest.mark.parametrize(
    ("output", "sent"),
    [
        (None, {}),
        ({}, {}),
        ({"continue": False, "stopReason": "enough"}, {"continue": False, "stopReason": "enough"}),
        (MappingProxyType({"a": (1, MappingProxyType({"b": None}))}), {"a": [1, {"b": None}]}),
    ],
)
async def test_hook_output_is_sent_to_agent(kind: Any, output: Any, sent: dict[str, Any]) -> None:
    given = Hooks({"PreToolUse": kind(output)})
    assert await given.call("hook-1", INPUT) == sent


async def test_hooks_get_their_own_events() -> None:
    got: list[tuple[str, Mapping[str, Any]]] = []

    def keep(name: str) -> Any:
        def call(said: Mapping[str, Any]) -> None:
            got.append((name, said))

        return call

    given = Hooks({"PreToolUse": [keep("a"), keep("b")], "Stop": keep("c")})
    for id in ("hook-3", "hook-1", "hook-2"):
        await given.call(id, {"for": id})
    assert got == [("c", {"for": "hook-3"}), ("a", {"for": "hook-1"}), ("b", {"for": "hook-2"})]


async def test_hook_answer_is_a_copy_of_its_output() -> None:
    output = {"systemMessage": "one"}
    answer = await Hooks({"Stop": lambda said: output}).call("hook-1", {})
    output["systemMessage"] = "two"
    assert answer == {"systemMessage": "one"}


# -- failures --------------------------------------------------------------------------------------------------------
def _raises(exc: BaseException) -> Any:
    def call(said: Mapping[str, Any]) -> None:
        raise exc

    return call


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def _deep() -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(VALUE_DEPTH_MAX):
        value = {"a": value}
    return value


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize(
    ("call", "why"),
    [
        (_raises(RuntimeError("I am broken")), "RuntimeError: I am broken"),
        (_raises(RuntimeError()), "RuntimeError"),
        (_raises(Mute()), "Mute"),
        (_raises(RuntimeError("half \ud800")), "RuntimeError: half ?"),
        (_raises(TimeoutError("of its own")), "TimeoutError: of its own"),
        (_plainly("allow"), "a hook cannot return 'allow'"),
        (_async(True), "a hook cannot return True"),
        (_plainly({"a": object()}), "a object is not a JSON value"),
        (_plainly({"a": float("nan")}), "JSON"),
        (_plainly({"a": "\ud800"}), "surrogates not allowed"),
        (_plainly(_deep()), "must not be nested deeper"),
        (_raises(asyncio.CancelledError()), "the hook was cancelled"),
    ],
)
async def test_failing_hook_denies_where_agent_asks(
    event: str, call: Any, why: str, unreported: list[logging.LogRecord]
) -> None:
    given = Hooks({event: call, **({"Stop": quiet} if event != "Stop" else {})})
    output = await given.call("hook-1", INPUT)
    if event in ASKING:
        assert why in denial(event, output)
        assert json.dumps(output).encode()
    else:
        assert output == {}
    errors = [record for record in unreported if record.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert f"(hook=hook-1 event={event})" in errors[0].getMessage()


async def test_hook_denial_reason_is_cut_when_long() -> None:
    output = await Hooks({"PreToolUse": _raises(RuntimeError("x" * 10_000_000))}).call("hook-1", INPUT)
    assert len(denial("PreToolUse", output)) < hooks.REASON_CHARS_MAX + 100


@pytest.mark.parametrize("event", EVENTS)
def test_hanging_hook_is_cancelled_after_its_timeout(event: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        over: list[float] = []

        async def call(said: Mapping[str, Any]) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                over.append(asyncio.get_running_loop().time())

        given = Hooks({event: Hook(call, seconds=7)})
        begun = asyncio.get_running_loop().time()
        output = await given.call("hook-1", INPUT)
        assert asyncio.get_running_loop().time() == begun + 7
        if event in ASKING:
            assert denial(event, output) == "the hook did not answer within 7 seconds"
        else:
            assert output == {}
        await given.wait_ended()
        assert over == [begun + 7]

    sim.replay(scenario, "")
    assert "did not answer within 7 seconds" in caplog.text


def test_stubborn_hook_does_not_delay_answer_to_agent(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        loop, free = asyncio.get_running_loop(), asyncio.Event()

        async def stubborn(said: Mapping[str, Any]) -> None:
            while not free.is_set():
                try:
                    await free.wait()
                except asyncio.CancelledError:
                    continue
            raise RuntimeError("too late")

        given = Hooks({"PreToolUse": Hook(stubborn, seconds=1)})
        begun = loop.time()
        assert "within 1 seconds" in denial("PreToolUse", await given.call("hook-1", INPUT))
        assert loop.time() == begun + 1
        await given.wait_ended()
        assert loop.time() == begun + 1 + ENDING_SECONDS_MAX
        assert "callbacks still run after the end of their session (callbacks=1)" in caplog.text
        free.set()
        await given.wait_ended()

    sim.replay(scenario, "")
    assert "too late" in caplog.text


def test_cancelled_hook_call_cancels_hook() -> None:
    async def scenario() -> None:
        ended: list[str] = []
        started = asyncio.Event()

        async def call(said: Mapping[str, Any]) -> None:
            started.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise

        given = Hooks({"PreToolUse": call})
        task = asyncio.ensure_future(given.call("hook-1", INPUT))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await given.wait_ended()
        assert ended == ["cancelled"]

    sim.replay(scenario, "")


def test_hook_that_waits_for_end_does_not_wait_for_itself() -> None:
    async def scenario() -> None:
        async def call(said: Mapping[str, Any]) -> None:
            await given.wait_ended()

        given, begun = Hooks({"Stop": call}), asyncio.get_running_loop().time()
        assert await given.call("hook-1", {}) == {}
        assert asyncio.get_running_loop().time() == begun

    sim.replay(scenario, "")


def test_callback_answer_deadline_and_cancel_in_any_order_leave_one_outcome_and_no_task() -> None:
    async def scenario() -> None:
        loop, calls = sim.current(), CallbackRunner()

        async def call(argument: object) -> object:
            await asyncio.sleep(1)
            return argument

        asked = loop.create_lane_task(calls.result(call, "answer", seconds=1), lane="agent")
        loop.call_later(1, asked.cancel)
        done, _ = await asyncio.wait({asked})
        assert asked in done
        assert asked.cancelled() or isinstance(asked.exception(), CallUnfinished) or asked.result() == "answer"
        await calls.wait_ended()

    assert sim.explore(scenario, departures_max=3).is_complete


async def test_request_task_that_ends_by_an_exception_is_logged_with_its_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fails() -> None:
        raise ValueError

    tasks = RequestTasks("on_question")
    tasks.start("r-1", fails())
    await asyncio.wait(tasks.running)
    await asyncio.sleep(0)
    assert caplog.messages == ["task of an agent's request ended by ValueError (task=on_question request=r-1)"]
