"""Successive processes of a session: after a new configuration, by age, after crashes, after a hang.

The session and its conversation stay, and no prompt reaches an agent twice.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.sessions.crowd import Crowd, argv, crowd, recalled, retired, tasks
from tests.sessions.helpers import QUICK, SHORT_DRAIN, Case, Script, bodies, ended, opened, prompts, touch
from tests.thorough import one_in

from banksman import BACKGROUND, By, Kind, ProgramNotFound, Question, Tool, UsageError, threads
from banksman.core.session import event as kinds
from banksman.sessions import known_agents
from banksman.testing import fake_agent
from banksman.testing.fake_agent import Evidence

PERMISSION = '@@ask Bash {"command":"ls"}\n@@say went on'


async def gated(case: Case, name: str, **how: Any) -> tuple[Any, Path]:
    """Start a turn that ends when a file exists."""
    gate = case.path(f"gate-{name}")
    return await case.reaches(f"{name}\n@@say {name}\n@@wait {gate}", **how), gate


# -- a changed configuration -----------------------------------------------------------------------------------------
async def test_changed_configuration_starts_new_process_with_next_turn(tmp_path: Path) -> None:
    async with crowd(tmp_path) as them:
        case = await them.open("a", name="x", model="one")
        turn, gate = await gated(case, "first")
        pids = case.session.status().pids
        again = await them.open("a", name="x", model="two")
        assert again.session is case.session
        assert turn.state == "running"
        touch(gate)
        outcome = await case.outcome(turn)
        assert (outcome.kind, outcome.text) == (Kind.DONE, "first")
        assert case.session.status().pids in (pids, ())
        assert len(await recalled(case)) == 1
        assert bodies(await case.events(), kinds.PROCESS_RETIRED) == [{"process": 1, "reason": "stale"}]
        assert "--model=one" in argv(case, 1)
        assert [word for word in argv(case, 2) if word.startswith("--model")] == ["--model=two"]
        assert f"--resume={case.session.status().conversation}" in argv(case, 2)
        # No further process is started for it.
        await case.answer("last")
        assert len(case.processes) == 2


async def test_queued_ask_gets_new_configuration(tmp_path: Path) -> None:
    async with crowd(tmp_path) as them:
        case = await them.open("a", name="x", model="one")
        turn, gate = await gated(case, "first")
        waiting = await case.ask("second")
        await them.open("a", name="x", model="two")
        touch(gate)
        assert (await case.outcome(turn)).text == "first"
        assert (await case.outcome(waiting)).text == "second"
        assert [[*map(_first_line, _said(process))] for process in case.processes] == [["first"], ["second"]]


def _said(process: fake_agent.Process) -> list[str]:
    return [frame["message"]["content"] for frame in process.frames if frame["type"] == "user"]


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def silent(_: object) -> None:
    """Hook without output."""


def allow(_: object) -> str:
    return "allow"


def look(_: object) -> str:
    return "nothing"


OTHER: Mapping[str, Mapping[str, Any]] = {
    "model": {"model": "two"},
    "permission_mode": {"permission_mode": "plan"},
    "system_prompt": {"system_prompt": "be brief"},
    "args": {"args": ["--more"]},
    "env": {"env": {"MORE": "1"}},
    "inherit_env": {"inherit_env": False},
    "a file for MCP": {"args": ["--mcp-config=mine.json"]},
    "hooks": {"hooks": {"PreToolUse": silent}},
    "tools": {"tools": [Tool("look", "Looks.", {"type": "object"}, look)]},
}


@pytest.mark.parametrize("what", one_in(3, OTHER))
async def test_changed_launch_option_starts_new_process(tmp_path: Path, what: str) -> None:
    async with crowd(tmp_path) as them:
        case = await them.open("a", name="x")
        await case.answer("one")
        assert await them.open("a", name="x", **OTHER[what]) is case
        assert await recalled(case) == ["one"]
        assert len(case.processes) == 2
        # The old options are another change.
        await them.open("a", name="x")
        await case.answer("two")
        assert len(case.processes) == 3


async def test_changed_tool_starts_new_process(tmp_path: Path) -> None:
    """The agent knows the names of the first tools, and would never see the second."""
    one, two = (Tool(name, "Looks.", {"type": "object"}, look) for name in ("one", "two"))
    async with crowd(tmp_path) as them:
        case = await them.open("a", name="x", tools=[one])
        await case.answer("one")
        await them.open("a", name="x", tools=[two])
        await case.answer("two")
        assert len(case.processes) == 2


async def test_changed_folder_or_command_starts_new_process(tmp_path: Path) -> None:
    async with crowd(tmp_path) as them:
        case = await them.open("a", name="x")
        await case.answer("one")
        await them.open("a", name="x", cwd=tmp_path)
        await case.answer("two")
        await them.open("a", ["stderr other"], name="x", cwd=tmp_path)
        assert await recalled(case) == ["one", "two"]
        assert len(case.processes) == 3


SAME: Mapping[str, Mapping[str, Any]] = {
    "nothing": {},
    "on_question": {"on_question": allow},
    "rules": {"rules": {"Bash": "deny"}},
    "options": {"options": {"drain_seconds": 1.0, "idle_seconds": 60.0}},
}


@pytest.mark.parametrize("what", one_in(2, SAME))
async def test_unchanged_launch_options_keep_process(tmp_path: Path, what: str) -> None:
    async with crowd(tmp_path) as them:
        how: dict[str, Any] = {"name": "x", "model": "one", "env": {"A": "1"}}
        case = await them.open("a", **how)
        await case.answer("one")
        pids = case.session.status().pids
        assert await them.open("a", **how, **SAME[what]) is case
        await case.answer("two")
        assert case.session.status().pids == pids
        assert kinds.PROCESS_RETIRED not in await case.kinds()


async def test_resume_of_own_conversation_keeps_process(tmp_path: Path) -> None:
    async with crowd(tmp_path) as them:
        case = await them.open("a", name="x")
        await case.answer("one")
        assert await them.open("a", name="x", resume=case.session.status().conversation) is case
        await case.answer("two")
        assert len(case.processes) == 1


async def test_callback_of_last_open_is_asked(tmp_path: Path) -> None:
    asked: list[str] = []

    def by(name: str) -> Any:
        def on_question(question: Question) -> str:
            asked.append(f"{name} {question.tool}")
            return "allow"

        return on_question

    async with crowd(tmp_path) as them:
        case = await them.open("a", name="x", on_question=by("first"))
        await case.answer(PERMISSION)
        await them.open("a", name="x", on_question=by("second"))
        assert (await case.answer(PERMISSION)).text == "went on"
        assert asked == ["first Bash", "second Bash"]
        assert len(case.processes) == 1


async def test_changed_limits_apply_to_running_process(tmp_path: Path) -> None:
    async with crowd(tmp_path) as them:
        case = await them.open("a", name="x", options={"queue_max": 1})
        await case.answer("one")
        pids = case.session.status().pids
        numbers = {"clocks": {"tool": 0.2}, "queue_max": 2}
        await them.open("a", name="x", options=numbers)
        turn = await case.ask("@@tool_use Bash\n@@hang")
        waiting = [await case.ask(f"ask {number}") for number in range(2)]
        assert case.session.status().pids == pids
        outcome = await case.outcome(turn)
        assert (outcome.kind, outcome.clock) == (Kind.INTERRUPTED, "tool")
        for each in waiting:
            assert (await case.outcome(each)).kind is Kind.DONE
        await them.open("a", name="x", options={**numbers, "idle_seconds": 0.1})
        assert await retired(case) == "idle"
        assert len(case.processes) == 1


async def test_changed_idle_time_applies_to_idle_process(tmp_path: Path) -> None:
    async with crowd(tmp_path) as them:
        soon, never = (
            await them.open("a", name="soon"),
            await them.open("b", name="never", options={"idle_seconds": 1.0}),
        )
        await soon.answer("one")
        await never.answer("one")
        await them.open("a", name="soon", options={"idle_seconds": 1.0})
        await them.open("b", name="never", options={"idle_seconds": None})
        # The timer of one is set, and that of the other is not.
        assert any(name.startswith("idle ") for name in soon.session.status().timers)
        assert not any(name.startswith("idle ") for name in never.session.status().timers)
        assert await retired(soon) == "idle"
        assert kinds.PROCESS_RETIRED not in await never.kinds()


async def test_changed_frame_size_applies_to_next_process(tmp_path: Path) -> None:
    async with crowd(tmp_path) as them:
        case = await them.open("a", name="x")
        await case.answer("one")
        await them.open("a", name="x", model="two", options={"frame_bytes_max": 4096})
        assert (await case.answer("@@huge 100000\n@@say two")).text == "two"
        assert max(len(event.data) for event in await case.events()) < 50_000


async def test_changed_rules_apply_to_next_question(tmp_path: Path) -> None:
    async with crowd(tmp_path) as them:
        case = await them.open("a", name="x", rules={"Bash": "allow"})
        await case.answer(PERMISSION)
        await them.open("a", name="x", rules={"Bash": "deny"})
        await case.answer(PERMISSION)
        answers = [body["answer"] for body in bodies(await case.events(), kinds.QUESTION_ANSWERED)]
        assert answers == ["allow", "deny"]
        assert len(case.processes) == 1


async def test_open_with_conflicting_identity_is_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with crowd(tmp_path) as them:
        case = await them.open("a", name="x")
        await case.answer("one")
        with pytest.raises(UsageError, match="another conversation"):
            await them.open("a", name="x", resume="11111111-2222-4333-8444-555555555555")
        with pytest.raises(UsageError):
            await them.open("a", name="x", resume=case.session.status().conversation, fork=True)
        claude = known_agents.load("claude")

        def load(name: str, **_: bool) -> known_agents.Profile:
            return replace(claude, name=name)

        monkeypatch.setattr(known_agents, "load", load)
        words = "belongs to the agent claude .use another name, or run `banksman close x --forget`"
        with pytest.raises(UsageError, match=words):
            await them.host.open("other", name="x", command=them.command("a"), options=QUICK)
        # The refused opens changed nothing.
        await case.answer("two")
        assert len(case.processes) == 1
        assert len(them.host.sessions()) == 1
        # A closed session keeps its agent. The hint is the same, and its verb deletes the session.
        await case.session.close()
        with pytest.raises(UsageError, match=words):
            await them.host.open("other", name="x", command=them.command("a"), options=QUICK)


async def test_latest_of_open_and_set_model_wins(tmp_path: Path) -> None:
    async with crowd(tmp_path) as them:
        case = await them.open("a", name="x", model="one")
        await case.answer("one")
        await case.session.set_model("two")
        await them.open("a", name="x", model="three")
        await case.answer("three")
        assert [word for word in argv(case, 2) if word.startswith("--model")] == ["--model=three"]


async def test_waiting_process_starts_once_with_latest_configuration(tmp_path: Path) -> None:
    async with crowd(tmp_path, processes_max=1) as them:
        other, case = await them.open("other"), await them.open("a", name="x", model="one")
        running = await other.running("long")
        turn = await case.ask("first")
        await them.open("a", name="x", model="two")
        await running.interrupt()
        assert (await case.outcome(turn)).text == "first"
        assert "--model=two" in argv(case, 1)
        assert len(case.processes) == 1


async def test_running_turn_keeps_hooks_of_its_process(tmp_path: Path) -> None:
    """A process knows its hooks by number.

    The hooks of another open must not answer for the one that would have denied.
    """
    called: list[str] = []
    hook = {"subtype": "hook_callback", "callback_id": "hook-1", "input": {"tool_name": "Bash"}}

    def first(_: object) -> None:
        called.append("first")

    def second(_: object) -> None:
        called.append("second")

    async with crowd(tmp_path) as them:
        case = await them.open("a", name="x", hooks={"PreToolUse": first})
        mark, gate = case.path("mark"), case.path("gate")
        turn = await case.ask(f"@@touch {mark}\n@@wait {gate}\n@@request {json.dumps(hook)}\n@@say done")
        await case.reached(mark)
        # Twice: the second open changes nothing, but the running process still has the old hooks.
        for _ in range(2):
            await them.open("a", name="x", hooks={"PostToolUse": second})
        touch(gate)
        assert (await case.outcome(turn)).text == "done"
        assert called == ["first"]
        await case.answer(f"@@request {json.dumps(hook)}\n@@say done")
        assert called == ["first", "second"]


@pytest.mark.parametrize("is_closed", [True, False])
async def test_reopened_name_resumes_conversation_of_closed_session(tmp_path: Path, is_closed: bool) -> None:
    async with crowd(tmp_path) as them:
        first = await them.open("a", name="x")
        await first.answer("one")
        conversation = first.session.status().conversation
        first.session.close_nowait()
        if is_closed:
            await first.session.wait_closed()
        second = await them.open("b", name="x")
        assert second.session is not first.session
        assert second.session.id == first.session.id
        assert second.session.status().conversation == conversation
        assert (await second.answer("two")).text == "two"
        assert f"--resume={conversation}" in second.processes[-1].argv
        assert them.host.session("x") is second.session
        assert them.host.sessions() == [second.session]


# -- old processes ---------------------------------------------------------------------------------------------------
OLD = {"recycle_seconds": 0.2}


async def wait_old(them: Crowd, times: int = 1) -> None:
    """Wait until another, younger process is replaced for its age. An older process is then old too."""
    for _ in range(times):
        control = await them.open(f"control-{len(them.cases)}", options=OLD)
        await control.answer("nothing")
        assert await retired(control) == "old"


async def is_kept(case: Case) -> bool:
    return kinds.PROCESS_RETIRED not in await case.kinds() and len(case.session.status().pids) == 1


async def test_old_process_is_replaced_and_conversation_resumes(tmp_path: Path) -> None:
    async with crowd(tmp_path) as them:
        case = await them.open("a", options=OLD)
        await case.answer("one")
        assert await retired(case) == "old"
        assert prompts(case) == ["one"]
        assert await recalled(case) == ["one"]
        assert kinds.SESSION_CONTEXT_LOST not in await case.kinds()


async def test_old_process_is_replaced_between_turns(tmp_path: Path) -> None:
    async with crowd(tmp_path) as them:
        case = await them.open("a", options=OLD)
        turn, gate = await gated(case, "long")
        waiting = await case.ask("next")
        await wait_old(them)
        assert await is_kept(case)
        touch(gate)
        assert (await case.outcome(turn)).text == "long"
        assert (await case.outcome(waiting)).text == "next"
        assert [[*map(_first_line, _said(process))] for process in case.processes] == [["long"], ["next"]]
        assert bodies(await case.events(), kinds.PROCESS_RETIRED)[0] == {"process": 1, "reason": "old"}


async def test_old_process_is_kept_until_background_work_ends(tmp_path: Path) -> None:
    async with crowd(tmp_path) as them:
        case = await them.open("a", options=OLD)
        gate = case.path("gate")
        await case.answer(f"one\n@@raw {tasks('b1')}\n@@at idle wait {gate}\n@@at idle raw {tasks()}")
        await wait_old(them)
        assert await is_kept(case)
        # A turn uses the process as it is.
        await case.answer("two")
        assert len(case.processes) == 1
        touch(gate)
        assert await retired(case) == "old"


SAVE = {**OLD, "save_prompt": "save now"}


async def test_old_process_is_asked_to_save_before_replacement(tmp_path: Path) -> None:
    async with crowd(tmp_path) as them:
        case = await them.open("a", options=SAVE)
        await case.answer("one")
        event = await case.wait_kind(kinds.PROCESS_RETIRED)
        assert event.body == {"process": 1, "reason": "old"}
        events = [before for before in await case.events() if before.seq < event.seq]
        queued = [before for before in events if before.kind == kinds.TURN_QUEUED]
        assert [before.body["prompt"] for before in queued] == ["one", "save now"]
        assert queued[1].body["priority"] == BACKGROUND
        over = [before.body["outcome"] for before in events if before.kind == kinds.TURN_ENDED]
        assert over == ["done", "done"]
        assert (await recalled(case))[:2] == ["one", "save now"]
        assert _said(case.processes[0]) == ["one", "save now"]
        assert _said(case.processes[1])[0] == "@@recall"


async def test_busy_session_is_asked_to_save_once(tmp_path: Path) -> None:
    async with crowd(tmp_path) as them:
        case = await them.open("a", options=SAVE)
        turn, gate = await gated(case, "long")
        waiting = await case.ask("next")
        await wait_old(them, times=3)
        assert await is_kept(case)
        queued = [body["prompt"] for body in bodies(await case.events(), kinds.TURN_QUEUED)]
        assert queued[2:] == ["save now"]
        touch(gate)
        assert (await case.outcome(turn)).text == "long"
        assert (await case.outcome(waiting)).text == "next"
        await case.wait_kind(kinds.PROCESS_RETIRED)
        assert [*map(_first_line, _said(case.processes[0]))] == ["long", "next", "save now"]
        assert (await recalled(case))[1:3] == ["next", "save now"]
        # The next process is new, and has nothing to save.
        assert _said(case.processes[1])[0] == "@@recall"


async def test_process_kept_by_background_work_is_asked_to_save_once(tmp_path: Path) -> None:
    async with crowd(tmp_path) as them:
        case = await them.open("a", options=SAVE)
        gate = case.path("gate")
        await case.answer(f"one\n@@raw {tasks('b1')}\n@@at idle wait {gate}\n@@at idle raw {tasks()}")
        await wait_old(them, times=3)
        assert await is_kept(case)
        assert [*map(_first_line, _said(case.processes[0]))] == ["one", "save now"]
        touch(gate)
        assert await retired(case) == "old"


# -- crashes ---------------------------------------------------------------------------------------------------------
BACKOFF = {"backoff_seconds": 0.05}


def guarded(them: Crowd, folder: str, script: Script = ()) -> tuple[list[str], Path]:
    """Return the command of an agent that cannot start before a file exists, and the path of the file."""
    works = them.folder / f"{folder}-works"
    program = '[ -e "$0" ] || { echo no key >&2; exit 3; }; exec "$@"'
    return ["/bin/sh", "-c", program, str(works), *them.command(folder, script)], works


async def test_failing_starts_back_off_with_growing_intervals(tmp_path: Path) -> None:
    async with crowd(tmp_path) as them:
        command, works = guarded(them, "a")
        case = await them.open("a", command=command, options=BACKOFF)
        turns = [await case.ask(f"ask {number}") for number in range(5)]
        for turn in turns:
            outcome = await case.outcome(turn)
            assert outcome.kind is Kind.FAILED
            assert outcome.error is not None
            assert "no key" in outcome.error.hint
        backed_off = bodies(await case.events(), kinds.PROCESS_BACKED_OFF)
        assert [body["crashes"] for body in backed_off] == [2, 3, 4, 5]
        assert [body["seconds"] for body in backed_off] == pytest.approx([0.05, 0.1, 0.2, 0.4])
        started = [event.at for event in await case.events() if event.kind == kinds.PROCESS_STARTED]
        assert len(started) == 5
        # The second start comes immediately, and each later one after its delay. The test uses wall time, which can be
        # set back slightly.
        for wait, body in zip((after - before for before, after in pairwise(started[1:])), backed_off, strict=False):
            assert wait > body["seconds"] * 0.9
        # After a successful start the session works again, and the crash count is reset.
        touch(works)
        assert (await case.answer("now")).text == "now"
        assert case.state().crashes == 0
        assert prompts(case) == ["now"]


async def test_backoff_interval_is_bounded(tmp_path: Path) -> None:
    async with crowd(tmp_path) as them:
        command, _ = guarded(them, "a")
        case = await them.open("a", command=command, options={**BACKOFF, "backoff_seconds_max": 0.07})
        for number in range(4):
            assert (await case.answer(f"ask {number}")).kind is Kind.FAILED
        backed_off = bodies(await case.events(), kinds.PROCESS_BACKED_OFF)
        assert [body["seconds"] for body in backed_off] == pytest.approx([0.05, 0.07, 0.07])


async def test_agent_that_dies_of_every_prompt_gets_each_prompt_once(tmp_path: Path) -> None:
    async with crowd(tmp_path) as them:
        case = await them.open("a", {"prompt": ["exit 3"], "prompt 4": ["say well"]}, options=BACKOFF)
        turns = [await case.ask(f"ask {number}", on_preempt="requeue") for number in range(4)]
        kinds_of = [(await case.outcome(turn)).kind for turn in turns]
        assert kinds_of == [Kind.FAILED] * 3 + [Kind.DONE]
        assert prompts(case) == [f"ask {number}" for number in range(4)]
        backed_off = bodies(await case.events(), kinds.PROCESS_BACKED_OFF)
        assert [body["crashes"] for body in backed_off] == [2, 3]


async def test_session_in_backoff_closes_at_once(tmp_path: Path) -> None:
    async with crowd(tmp_path) as them:
        command, _ = guarded(them, "a")
        case = await them.open("a", command=command, options={"backoff_seconds": 3600.0, "backoff_seconds_max": 3600.0})
        turns = [await case.ask(f"ask {number}") for number in range(3)]
        assert [(await case.outcome(turn)).kind for turn in turns[:2]] == [Kind.FAILED] * 2
        assert turns[2].state == "queued"
        await case.session.close()
        assert (await case.outcome(turns[2])).kind is Kind.REFUSED


async def test_missing_program_counts_as_crash(tmp_path: Path) -> None:
    async with crowd(tmp_path) as them:
        program = tmp_path / "agent"
        words = " ".join(f"'{word}'" for word in them.command("a"))
        program.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        program.chmod(0o700)
        case = await them.open("a", command=[str(program)], options=BACKOFF)
        program.rename(tmp_path / "away")
        turns = [await case.ask(f"ask {number}") for number in range(3)]
        for turn in turns:
            outcome = await case.outcome(turn)
            assert outcome.kind is Kind.FAILED
            assert isinstance(outcome.error, ProgramNotFound)
        assert [body["crashes"] for body in bodies(await case.events(), kinds.PROCESS_BACKED_OFF)] == [2, 3]
        (tmp_path / "away").rename(program)
        assert (await case.answer("now")).text == "now"
        with pytest.raises(ProgramNotFound):
            await them.open("b", command=[str(tmp_path / "none")])


# -- hung processes --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", one_in(3, ["ignored", "unanswered", "ack_only"]))
async def test_wedged_agent_is_replaced_and_conversation_resumes(tmp_path: Path, how: str) -> None:
    options = {**SHORT_DRAIN, "clocks": {"bytes": 1.0}}
    async with opened(tmp_path, memory=True, options=options) as case:
        await case.answer("one")
        before = case.session.status()
        turn = await case.ask(f"wedged\n@@on_interrupt {how}\n@@hang")
        outcome = await case.outcome(turn)
        assert (outcome.kind, outcome.clock) == (Kind.INTERRUPTED, "bytes")
        assert ended(await case.events(), turn)["by"] == By.LADDER
        assert [_first_line(text) for text in await recalled(case)] == ["one", "wedged"]
        after = case.session.status()
        assert after.epoch > before.epoch
        assert after.conversation == before.conversation
        assert prompts(case) == ["one", "wedged", "@@recall"]
        assert f"--resume={before.conversation}" in argv(case, 2)
        assert kinds.SESSION_CONTEXT_LOST not in await case.kinds()
        assert kinds.PROCESS_BACKED_OFF not in await case.kinds()


TOOL_RAN = '@@tool_use Bash {"command":"rm x"}\n@@tool_result gone'


@pytest.mark.parametrize("end", one_in(2, ["@@hang", "@@exit 0", "@@kill 9", "@@on_interrupt ignored\n@@hang"]))
async def test_turn_whose_tools_may_have_run_is_not_resent(tmp_path: Path, end: str) -> None:
    """The turn timed out or its agent died, with and without an answer to the interrupt.

    It is not sent again, although it asked to be requeued after a preemption.
    """
    options = {**SHORT_DRAIN, "clocks": {"bytes": 1.0}}
    async with opened(tmp_path, memory=True, options=options) as case:
        turn = await case.ask(f"dangerous\n{TOOL_RAN}\n{end}", on_preempt="requeue")
        waiting = await case.ask("next")
        outcome = await case.outcome(turn)
        assert outcome.kind is (Kind.INTERRUPTED if "hang" in end else Kind.FAILED)
        assert (await case.outcome(waiting)).text == "next"
        assert [_first_line(text) for text in await recalled(case)] == ["dangerous", "next"]
        assert prompts(case) == ["dangerous", "next", "@@recall"]
        assert kinds.TURN_REQUEUED not in await case.kinds()


async def test_conversation_lost_between_processes_is_logged(tmp_path: Path) -> None:
    async with opened(tmp_path, memory=True) as case:
        await case.answer("one\n@@say one\n@@at idle exit 0")
        await case.wait_kind(kinds.PROCESS_EXITED)
        lost = case.session.status().conversation
        (tmp_path / "memory" / f"{lost}.jsonl").unlink()
        assert await recalled(case) == []
        events = await case.events()
        assert [body["conversation"] for body in bodies(events, kinds.SESSION_CONTEXT_LOST)] == [lost]
        known = [body["conversation"] for body in bodies(events, kinds.SESSION_CONVERSATION)]
        assert known == [lost, case.session.status().conversation]
        assert lost != case.session.status().conversation
        # The loss costs no outcome and no back-off.
        assert prompts(case) == ["one", "@@recall"]
        assert kinds.PROCESS_BACKED_OFF not in [event.kind for event in events]


async def test_conversation_lost_before_handshake_is_logged_once(tmp_path: Path) -> None:
    says = 'exec 0<&-; echo "No conversation found with session ID: x" >&2; sleep 0.2; exit 1'
    program = f'case "$*" in *--resume=*) {says};; esac; exec "$@"'
    async with crowd(tmp_path) as them:
        command = ["/bin/sh", "-c", program, "sh", *them.command("a")]
        case = await them.open("a", command=command, resume="unknown", options={"eof_grace": 5.0})
        outcomes = [await case.answer(f"ask {number}") for number in range(2)]
        assert outcomes[1].kind is Kind.DONE
        assert len(bodies(await case.events(), kinds.SESSION_CONTEXT_LOST)) == 1


# -- from a thread ---------------------------------------------------------------------------------------------------
def test_blocking_session_supports_settings_forks_schemas_and_rules(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    found: dict[str, Any] = {}

    def work() -> None:
        with threads.Host(processes_max=2) as host:
            command = fake_agent.command(evidence=tmp_path / "evidence", memory=tmp_path / "memory")
            session = host.open("claude", command=command, options=QUICK)
            session.ask("one").outcome()
            session.set_model("two")
            session.set_permission_mode("plan")
            session.ask(PERMISSION, rules={"Bash": "deny"}).outcome()
            found["structured"] = session.ask('@@boundary {"structured_output":{"n":1}}', schema=schema).outcome()
            fork = host.fork(session, name="fork")
            found["recalled"] = fork.ask("@@recall").outcome().text
            found["found"] = host.session("fork") == fork

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found["structured"].structured == {"n": 1}
    assert json.loads(found["recalled"])[0] == "one"
    assert found["found"]
    first, second, third = Evidence(tmp_path / "evidence").processes
    subtypes = [frame["request"]["subtype"] for frame in first.frames if frame["type"] == "control_request"]
    assert subtypes == ["initialize", "set_model", "set_permission_mode"]
    (answer,) = [frame["response"] for frame in first.frames if frame["type"] == "control_response"]
    assert answer["response"]["behavior"] == "deny"
    assert "--model=two" in second.argv
    assert second.frames[0]["request"]["jsonSchema"] == schema
    assert "--fork-session" in third.argv
