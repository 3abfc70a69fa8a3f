"""Changes of the model and the permission mode: sent to the process, or applied at the next start."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.sessions.helpers import Case, bodies, exists, opened, requests, touch

from banksman import AgentError, Closed, Kind, QueueFull, UsageError
from banksman.core.session import event as kinds
from banksman.core.session.settings import CHANGES_MAX

# An unanswered setting is given up after a short time.
SHORT = {"setting_seconds": 0.2}
# So long that the test would time out first.
LONG = {"setting_seconds": 600.0}


def models(case: Case) -> list[list[str]]:
    """Return the model that each process was started with."""
    return [flags(process.argv, "--model") for process in case.processes]


def flags(argv: list[str], name: str) -> list[str]:
    return [word.partition("=")[2] for word in argv if word.startswith(f"{name}=")]


async def settings(case: Case) -> list[tuple[str, str, str]]:
    """Return the accepted settings, in order, with the way in which each was accepted."""
    found = bodies(await case.events(), kinds.SESSION_SETTING)
    return [(body["name"], body["value"], body["by"]) for body in found]


def told(case: Case, text: str) -> Any:
    """Wait until this text was sent to the agent."""
    return case.wait_event(lambda e: e.kind == kinds.SENT and text.encode() in e.data)


# -- a process that answers ------------------------------------------------------------------------------------------
async def test_setting_waits_for_answer_of_running_process(tmp_path: Path) -> None:
    go = tmp_path / "go"
    # After its first turn the agent does not read until the file exists.
    script = {"prompt 1": ["say one", f"at idle stop_reading {go}", f"at idle touch {tmp_path / 'deaf'}"]}
    async with opened(tmp_path, script, memory=True, options=LONG) as case:
        await case.answer("one")
        await exists(tmp_path / "deaf")
        setting = asyncio.ensure_future(case.session.set_model("other"))
        await told(case, "set_model")
        assert not setting.done()
        assert await settings(case) == []
        touch(go)
        await setting
        await case.session.set_permission_mode("plan")
        assert requests(case, "set_model") == [{"subtype": "set_model", "model": "other"}]
        assert requests(case, "set_permission_mode") == [{"subtype": "set_permission_mode", "mode": "plan"}]
        assert await settings(case) == [("model", "other", "reply"), ("permission_mode", "plan", "reply")]
        # The next process is started with the settings, and needs no request.
        assert (await case.answer("@@exit 1")).kind is Kind.FAILED
        assert (await case.answer("next")).text == "next"
        assert models(case) == [[], ["other"]]
        assert flags(case.processes[1].argv, "--permission-mode") == ["plan"]
        assert len(requests(case, "set_model")) == 1


async def test_setting_before_first_process_applies_at_start(tmp_path: Path) -> None:
    async with opened(tmp_path, model="first", permission_mode="default") as case:
        await case.session.set_model("second")
        await case.session.set_model("-third model\nwith lines")
        assert case.processes == []
        await case.answer("one")
        # The last value counts, and is one word whatever it contains.
        assert models(case) == [["-third model\nwith lines"]]
        assert flags(case.processes[0].argv, "--permission-mode") == ["default"]
        assert requests(case, "set_model") == []
        assert [by for _, _, by in await settings(case)] == ["start", "start"]


async def test_setting_during_process_start_is_sent_when_ready(tmp_path: Path) -> None:
    go = tmp_path / "go"
    script = {"process 1": [f"at initialize touch {tmp_path / 'starting'}", f"at initialize wait {go}"]}
    async with opened(tmp_path, script, memory=True) as case:
        turn = await case.ask("one")
        await exists(tmp_path / "starting")
        setting = [asyncio.ensure_future(case.session.set_model(model)) for model in ("other", "another")]
        touch(go)
        await asyncio.gather(*setting)
        assert (await case.outcome(turn)).text == "one"
        assert len(case.processes) == 1
        assert [request["model"] for request in requests(case, "set_model")] == ["other", "another"]


async def test_setting_can_change_while_turn_runs(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        turn = await case.running("one")
        await case.session.set_permission_mode("acceptEdits")
        assert turn.state == "running"
        await turn.interrupt()
        await case.outcome(turn)
        assert (await case.answer("next")).text == "next"
        assert len(case.processes) == 1


async def test_setting_refused_by_agent_is_error_and_changes_nothing(tmp_path: Path) -> None:
    script = ["refuse set_model", "refuse set_permission_mode"]
    async with opened(tmp_path, script, memory=True, model="first") as case:
        await case.answer("one")
        with pytest.raises(AgentError, match=r"model 'no such': refused by the script"):
            await case.session.set_model("no such")
        with pytest.raises(AgentError, match="permission_mode"):
            await case.session.set_permission_mode("plan")
        assert await settings(case) == []
        assert (await case.answer("@@exit 1")).kind is Kind.FAILED
        await case.answer("next")
        assert models(case) == [["first"], ["first"]]
        assert flags(case.processes[1].argv, "--permission-mode") == []


# -- a process that does not answer ----------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "flag"), [("set_model", "--model"), ("set_permission_mode", "--permission-mode")])
async def test_process_that_ignores_setting_is_replaced_before_next_prompt(
    tmp_path: Path, name: str, flag: str
) -> None:
    script = {"process 1": ["omit set_model", "omit set_permission_mode"]}
    async with opened(tmp_path, script, memory=True, options=SHORT) as case:
        await case.answer("one")
        setting = asyncio.ensure_future(getattr(case.session, name)("other"))
        await told(case, name)
        turn = await case.ask("two")
        await setting
        assert (await case.outcome(turn)).text == "two"
        first, second = case.processes
        assert [frame["message"]["content"] for frame in first.frames if frame["type"] == "user"] == ["one"]
        assert flags(second.argv, flag) == ["other"]
        assert flags(second.argv, "--resume") == [case.session.status().conversation]
        assert [by for _, _, by in await settings(case)] == ["respawn"]
        assert [body["reason"] for body in bodies(await case.events(), kinds.PROCESS_RETIRED)] == ["stale"]


async def test_unanswered_setting_does_not_end_running_turn(tmp_path: Path) -> None:
    go = tmp_path / "go"
    async with opened(tmp_path, memory=True, options=SHORT) as case:
        turn = await case.reaches(f"@@omit set_model\n@@say so far\n@@wait {go}")
        await case.session.set_model("other")
        assert turn.state == "running"
        later = await case.ask("two")
        touch(go)
        assert (await case.outcome(turn)).kind is Kind.DONE
        assert (await case.outcome(later)).text == "two"
        assert models(case) == [[], ["other"]]


@pytest.mark.parametrize("when", ["waiting", "dead"])
async def test_setting_applies_to_next_process_when_process_dies_unanswered(tmp_path: Path, when: str) -> None:
    async with opened(tmp_path, ["omit set_model"], memory=True, options=LONG) as case:
        await case.answer("one")
        if when == "waiting":
            setting = asyncio.ensure_future(case.session.set_model("other"))
            await told(case, "set_model")
            os.kill(case.session.status().pids[0], signal.SIGKILL)
            await setting
        else:
            os.kill(case.session.status().pids[0], signal.SIGKILL)
            await case.session.set_model("other")
        assert (await case.answer("two")).text == "two"
        assert models(case) == [[], ["other"]]


async def test_late_answer_to_setting_is_ignored(tmp_path: Path) -> None:
    go, reached = tmp_path / "go", tmp_path / "reached"
    late = '{"type":"control_response","response":{"subtype":"error","request_id":"setting-1-1","error":"late"}}'
    async with opened(tmp_path, memory=True, options=SHORT) as case:
        turn = await case.ask(f"@@omit set_model\n@@touch {reached}\n@@wait {go}\n@@raw {late}\n@@say went on")
        await case.reached(reached)
        await case.session.set_model("other")
        touch(go)
        assert (await case.outcome(turn)).text == "went on"
        assert (await case.answer("two")).text == "two"
        assert models(case) == [[], ["other"]]


# -- cancelled and late callers --------------------------------------------------------------------------------------
async def test_cancelled_setting_call_only_stops_waiting(tmp_path: Path) -> None:
    go = tmp_path / "go"
    script = {"prompt 1": ["say one", f"at idle stop_reading {go}", f"at idle touch {tmp_path / 'deaf'}"]}
    async with opened(tmp_path, script, memory=True, options=LONG) as case:
        await case.answer("one")
        await exists(tmp_path / "deaf")
        setting = asyncio.ensure_future(case.session.set_model("other"))
        await told(case, "set_model")
        setting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await setting
        touch(go)
        assert (await case.answer("two")).text == "two"
        assert await settings(case) == [("model", "other", "reply")]
        assert len(case.processes) == 1


async def test_closed_session_refuses_setting(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        await case.answer("one")
        case.session.close_nowait()
        with pytest.raises(Closed):
            await case.session.set_model("other")
        await case.session.close()
        with pytest.raises(Closed):
            await case.session.set_model("other")
        assert await settings(case) == []
        assert requests(case, "set_model") == []


async def test_close_fails_pending_setting_call(tmp_path: Path) -> None:
    async with opened(tmp_path, ["omit set_model"], options=LONG) as case:
        await case.answer("one")
        setting = asyncio.ensure_future(case.session.set_model("other"))
        await told(case, "set_model")
        await case.session.close()
        with pytest.raises(Closed):
            await setting
        assert await settings(case) == []


async def test_settings_beyond_maximum_pending_are_refused(tmp_path: Path) -> None:
    async with opened(tmp_path, ["omit set_model"], memory=True, options=LONG) as case:
        await case.answer("one")
        waiting = [asyncio.ensure_future(case.session.set_model(f"model {number}")) for number in range(CHANGES_MAX)]
        await told(case, f"model {CHANGES_MAX - 1}")
        with pytest.raises(QueueFull):
            await case.session.set_model("one too many")
        assert not any(setting.done() for setting in waiting)
        os.kill(case.session.status().pids[0], signal.SIGKILL)
        await asyncio.gather(*waiting)
        await case.answer("two")
        assert models(case) == [[], [f"model {CHANGES_MAX - 1}"]]


@pytest.mark.parametrize("value", ["", None, 3, b"other", "\ud800", "a\0b"])
async def test_invalid_setting_is_refused(tmp_path: Path, value: Any) -> None:
    async with opened(tmp_path) as case:
        for name in ("set_model", "set_permission_mode"):
            with pytest.raises(UsageError):
                await getattr(case.session, name)(value)
        assert await case.kinds() == ["session.opened"]
