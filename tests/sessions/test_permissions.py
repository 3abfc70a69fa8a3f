"""Tool rules of a session and of an ask, for permission requests and for the hook before each use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.sessions.helpers import Case, answers, bodies, opened, requesting, requests, sent

from banksman import Host, Kind, Question, UsageError
from banksman.core.session import event as kinds
from banksman.core.session.permissions import RULES_MAX
from banksman.testing import fake_agent


def permission(tool: str, **arguments: Any) -> str:
    return requesting("can_use_tool", tool_name=tool, input=arguments)


def ruling(tool: str) -> str:
    """Return the request by which the agent announces a tool use to Banksman's hook."""
    said = {"hook_event_name": "PreToolUse", "tool_name": tool, "tool_input": {"command": "ls"}}
    return requesting("hook_callback", callback_id="banksman-rules", input=said, tool_use_id="toolu_1")


def verdicts(case: Case) -> list[str | None]:
    """Return the decision of each answer, for permissions and for the hook."""
    found: list[str | None] = []
    for answer in answers(case):
        response = answer["response"]
        specific = response.get("hookSpecificOutput", {})
        found.append(response.get("behavior", specific.get("permissionDecision")))
    return found


async def _nobody(question: Question) -> str:
    raise AssertionError(f"somebody was asked about {question.tool}")


# -- permission requests ---------------------------------------------------------------------------------------------
async def test_rule_decides_without_question_and_is_logged(tmp_path: Path) -> None:
    async with opened(tmp_path, on_question=_nobody, rules={"Bash": "deny", "Read": "allow"}) as case:
        turn = await case.ask(f"{permission('Bash', command='ls')}\n{permission('Read', path='x')}\n@@say went on")
        assert (await case.outcome(turn)).text == "went on"
        assert [answer["response"] for answer in answers(case)] == [
            {"behavior": "deny", "message": "denied by a rule"},
            {"behavior": "allow", "updatedInput": {"path": "x"}},
        ]
        events = await case.events()
        asked = [event for event in events if event.kind == kinds.QUESTION_ASKED]
        answered = [event for event in events if event.kind == kinds.QUESTION_ANSWERED]
        assert [(event.turn, event.body["tool"]) for event in asked] == [(turn.id, "Bash"), (turn.id, "Read")]
        assert [event.body["question"] for event in asked] == [event.body["question"] for event in answered]
        assert [(event.body["answer"], event.body["by"]) for event in answered] == [("deny", "rule"), ("allow", "rule")]
        assert case.session.questions() == []


@pytest.mark.parametrize("rules", [{"Bash": "ask"}, {"Read": "allow"}, None])
async def test_rule_ask_or_no_match_asks_callback(tmp_path: Path, rules: dict[str, str] | None) -> None:
    asked: list[str] = []

    def on_question(question: Question) -> str:
        asked.append(question.tool)
        return "allow"

    async with opened(tmp_path, on_question=on_question, rules=rules) as case:
        assert (await case.answer(f"{permission('Bash')}\n@@say went on")).text == "went on"
        assert asked == ["Bash"]
        assert verdicts(case) == ["allow"]


async def test_ask_rules_precede_session_rules_and_end_with_ask(tmp_path: Path) -> None:
    asked: list[str] = []

    def on_question(question: Question) -> str:
        asked.append(question.tool)
        return "allow"

    uses = "\n".join(permission(tool) for tool in ("Bash", "Read", "Write"))
    rules = {"Bash": "deny", "Read": "allow", "Write": "deny"}
    async with opened(tmp_path, on_question=on_question, rules=rules) as case:
        await case.answer(uses, rules={"Bash": "allow", "Read": "ask"})
        assert (verdicts(case), asked) == (["allow", "allow", "deny"], ["Read"])
        await case.answer(uses)
        assert (verdicts(case)[3:], asked) == (["deny", "allow", "deny"], ["Read"])
        await case.answer(uses, rules={})
        assert (verdicts(case)[6:], asked) == (["deny", "allow", "deny"], ["Read"])


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"mcp__github__*": "deny"}, ["deny", "deny", None]),
        ({"mcp__github__get": "allow", "mcp__github__*": "deny"}, ["allow", "deny", None]),
        # The first rule that matches, in the given order.
        ({"mcp__github__*": "deny", "mcp__github__get": "allow"}, ["deny", "deny", None]),
        ({"*": "allow"}, ["allow", "allow", "allow"]),
        ({"mcp__github__get*": "ask", "*": "deny"}, ["ask", "deny", "deny"]),
        # A pattern without a star does not match a prefix.
        ({"mcp__github__": "deny", "Bas": "deny"}, [None, None, None]),
    ],
)
async def test_rule_star_matches_any_suffix(tmp_path: Path, rules: dict[str, str], expected: list[str]) -> None:
    tools = ("mcp__github__get", "mcp__github__put", "Bash")
    async with opened(tmp_path, rules=rules) as case:
        assert (await case.answer("\n".join(ruling(tool) for tool in tools))).kind is Kind.DONE
        assert verdicts(case) == expected


# -- the hook before each use ----------------------------------------------------------------------------------------
async def test_rules_hook_is_registered_and_precedes_agent_settings(tmp_path: Path) -> None:
    rules = {"Bash": "deny", "Read": "allow", "Write": "ask"}
    async with opened(tmp_path, on_question=_nobody, rules=rules) as case:
        uses = "\n".join(ruling(tool) for tool in ("Bash", "Read", "Write", "Glob"))
        assert (await case.answer(f"{uses}\n@@say went on")).text == "went on"
        (initialize,) = requests(case, "initialize")
        assert initialize["hooks"] == {
            "PreToolUse": [{"matcher": None, "hookCallbackIds": ["banksman-rules"], "onFailure": "block"}]
        }
        responses = [answer["response"] for answer in answers(case)]
        # Without a rule the hook has no output.
        assert responses.pop() == {}
        for response, (tool, word) in zip(responses, rules.items(), strict=True):
            specific = response["hookSpecificOutput"]
            assert (specific["hookEventName"], specific["permissionDecision"]) == ("PreToolUse", word)
            assert tool in specific["permissionDecisionReason"]
        # There was no question, so the log has none.
        assert kinds.QUESTION_ASKED not in await case.kinds()


async def test_rules_hook_applies_rules_of_ask(tmp_path: Path) -> None:
    async with opened(tmp_path, rules={"Bash": "deny"}) as case:
        await case.answer(ruling("Bash"), rules={"Bash": "allow"})
        await case.answer(ruling("Bash"))
        assert verdicts(case) == ["allow", "deny"]


async def test_agent_initiated_turn_has_session_rules_only(tmp_path: Path) -> None:
    own = ruling("Bash").removeprefix("@@")
    script = {"prompt 1": [ruling("Bash").removeprefix("@@"), f"at idle own task-notification {own}"]}
    async with opened(tmp_path, script, rules={"Bash": "deny"}) as case:
        await case.answer("first", rules={"Bash": "allow"})
        ended = await case.wait_event(lambda e: e.kind == kinds.TURN_ENDED and "origin" in e.body)
        assert ended.body["origin"] == "task-notification"
        assert verdicts(case) == ["allow", "deny"]


async def test_agent_initiated_turn_ignores_rules_of_pending_ask(tmp_path: Path) -> None:
    own = ruling("Bash").removeprefix("@@")
    script = {"prompt 2": [f"at read own auto-continuation {own}", own]}
    async with opened(tmp_path, script, rules={"Bash": "deny"}) as case:
        await case.answer("first")
        assert (await case.answer("second", rules={"Bash": "allow"})).kind is Kind.DONE
        assert verdicts(case) == ["deny", "allow"]


async def test_question_between_turns_has_session_rules_only(tmp_path: Path) -> None:
    script = {"prompt 1": ["say one", f"at idle {permission('Bash').removeprefix('@@')}"]}
    async with opened(tmp_path, script, on_question=_nobody, rules={"Bash": "deny"}) as case:
        await case.answer("first", rules={"Bash": "allow"})
        answered = await case.wait_kind(kinds.QUESTION_ANSWERED)
        assert (answered.turn, answered.body["answer"]) == (None, "deny")
        await case.answer("next")
        assert verdicts(case) == ["deny"]


# -- invalid rules ---------------------------------------------------------------------------------------------------
BAD = [
    "Bash",
    ["Bash"],
    3,
    {"Bash": "perhaps"},
    {"Bash": "ALLOW"},
    {"Bash": None},
    {"Bash": True},
    {"": "allow"},
    {3: "allow"},
    {"mcp__*__get": "allow"},
    {"**": "allow"},
    {"Bash(rm -rf /)": "deny"},
    {"Bash ": "deny"},
    {f"tool-{number}": "allow" for number in range(RULES_MAX + 1)},
]


@pytest.mark.parametrize("rules", BAD)
async def test_invalid_rules_are_refused(tmp_path: Path, rules: Any) -> None:
    async with Host() as host:
        with pytest.raises(UsageError):
            await host.open("claude", command=fake_agent.command(), rules=rules)
    async with opened(tmp_path) as case:
        with pytest.raises(UsageError):
            await case.ask("one", rules=rules)
        assert await case.kinds() == ["session.opened"]


async def test_rules_up_to_maximum_are_accepted(tmp_path: Path) -> None:
    rules = {f"tool-{number}": "deny" for number in range(RULES_MAX)}
    async with opened(tmp_path) as case:
        await case.answer(ruling(f"tool-{RULES_MAX - 1}"), rules=rules)
        assert verdicts(case) == ["deny"]


async def test_steered_prompt_cannot_have_rules(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        turn = await case.running("one")
        hows: list[dict[str, Any]] = [{"rules": {"Bash": "allow"}}, {"rules": {}}, {"schema": {"type": "object"}}]
        for how in hows:
            with pytest.raises(UsageError, match="a steered prompt cannot have"):
                await case.ask("two", on_busy="steer", **how)
        assert len([frame for frame in sent(case) if frame["type"] == "user"]) == 1
        await turn.interrupt()
        await case.outcome(turn)
        assert bodies(await case.events(), kinds.TURN_QUEUED)[0]["rules"] == []


async def test_asks_with_different_rules_are_not_collected(tmp_path: Path) -> None:
    async with opened(tmp_path, options={"collect_seconds": 0.0}) as case:
        running = await case.running("first")
        wanted = [None, {"Bash": "allow"}, {"Bash": "allow"}, {"Bash": "deny"}]
        turns = [await case.ask("say", on_busy="collect", rules=rules) for rules in wanted]
        await running.interrupt()
        await case.outcome(running)
        for turn in turns:
            assert (await case.outcome(turn)).kind is Kind.DONE
        first, *started = bodies(await case.events(), kinds.TURN_STARTED)
        assert [len(body["joined"]) for body in started] == [0, 1, 0]
        assert first["joined"] == []
