"""Frames that are written to Claude, member by member; test_reader.py has the other direction."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.core.dialects.recordings import corpus
from tests.core.dialects.recordings.corpus import frames

from banksman.core.dialects.claude import CLAUDE, writer
from banksman.core.dialects.dialect import DENIED, Decision, Registration, Setup, Verdict
from banksman.core.dialects.meaning import Requested, RequestPurpose
from banksman.errors import UsageError

REF = "0b5f7f2e-0000-4000-8000-000000000001"


# -- frames to the agent ---------------------------------------------------------------------------------------------
def sent(line: bytes) -> Any:
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    return json.loads(line)


def test_frames_equal_recorded_ones() -> None:
    recorded = {name: frames(name, "in") for name in corpus.NAMES}
    handshake, prompt = recorded["claude-L-queue"][:2]
    ours = sent(CLAUDE.handshake(handshake["request_id"]))
    # The recorded client registered no hook. Banksman always registers one, for the rules.
    hooks = ours["request"].pop("hooks")
    assert handshake["request"].pop("hooks") is None
    assert ours == handshake
    assert hooks == {"PreToolUse": [{"matcher": None, "hookCallbackIds": [writer.RULES_HOOK], "onFailure": "block"}]}
    assert sent(CLAUDE.prompt(prompt["uuid"], prompt["message"]["content"])) == prompt
    interrupt = recorded["claude-B-interrupt-stream"][2]
    assert sent(CLAUDE.interrupt(interrupt["request_id"])) == interrupt
    changes = [frame for frame in recorded["claude-A-lifecycle"] if "_set_" in str(frame.get("request_id"))]
    assert [frame["request"]["subtype"] for frame in changes] == ["set_model", "set_permission_mode"]
    for frame, (name, member) in zip(changes, (("model", "model"), ("permission_mode", "mode")), strict=True):
        assert sent(CLAUDE.setting(frame["request_id"], name, frame["request"][member])) == frame
    answers = [frame for frame in recorded["claude-D-permission"] if frame["type"] == "control_response"]
    # The last answer was a recorded test with a nonsense value.
    assert [frame["response"]["response"].get("behavior") for frame in answers] == ["allow", "deny", "deny", None]
    asked = {
        meaning.request: meaning
        for meaning in map(CLAUDE.read, corpus.lines("claude-D-permission"))
        if isinstance(meaning, Requested)
    }
    decisions = (
        Decision(allows=True),
        Decision(allows=False, message="no thanks"),
        Decision(allows=False, message="stop", interrupts=True),
    )
    for frame, decision in zip(answers, decisions, strict=False):
        assert sent(CLAUDE.answer(asked[frame["response"]["request_id"]], decision)) == frame


def test_handshake_registers_hooks_servers_and_schema() -> None:
    hooks = (
        Registration("PreToolUse", "Bash", "h1", 70.0),
        Registration("Stop", None, "h2", 5.0),
    )
    schema = {"type": "object"}
    request = sent(CLAUDE.handshake("r", Setup(hooks=hooks, servers=("s",), schema=schema)))["request"]
    assert request == {
        "subtype": "initialize",
        "hooks": {
            # The rules hook is first: a call that a rule forbids stays forbidden, whatever a later hook decides.
            "PreToolUse": [
                {"matcher": None, "hookCallbackIds": [writer.RULES_HOOK], "onFailure": "block"},
                {"matcher": "Bash", "hookCallbackIds": ["h1"], "timeout": 70.0, "onFailure": "block"},
            ],
            "Stop": [{"matcher": None, "hookCallbackIds": ["h2"], "timeout": 5.0}],
        },
        "sdkMcpServers": ["s"],
        "jsonSchema": schema,
    }


def body(line: bytes) -> Any:
    response = sent(line)["response"]
    assert response["subtype"] == "success"
    assert response["request_id"] == "r"
    return response["response"]


PERMISSION = Requested("r", RequestPurpose.PERMISSION, "can_use_tool", "Bash", {"command": "true"})


@pytest.mark.parametrize(
    ("decision", "expected"),
    [
        (Decision(allows=True), {"behavior": "allow", "updatedInput": {"command": "true"}}),
        (Decision(allows=True, updated_input={"a": 1}), {"behavior": "allow", "updatedInput": {"a": 1}}),
        # An input that was emptied on purpose is not replaced by the original one.
        (Decision(allows=True, updated_input={}), {"behavior": "allow", "updatedInput": {}}),
        (DENIED, {"behavior": "deny", "message": "denied"}),
        (Decision(allows=False, message=""), {"behavior": "deny", "message": "denied"}),
        (
            Decision(allows=False, message="why", interrupts=True),
            {"behavior": "deny", "message": "why", "interrupt": True},
        ),
        (
            Decision(allows=True, remember="project"),
            {
                "behavior": "allow",
                "updatedInput": {"command": "true"},
                "updatedPermissions": [
                    {
                        "type": "addRules",
                        "rules": [{"toolName": "Bash"}],
                        "behavior": "allow",
                        "destination": "projectSettings",
                    }
                ],
            },
        ),
    ],
)
def test_answer_has_expected_body(decision: Decision, expected: dict[str, Any]) -> None:
    assert body(CLAUDE.answer(PERMISSION, decision)) == expected


def test_answer_remembers_suggested_rules_at_given_destination() -> None:
    suggested = [
        {"type": "addRules", "rules": [{"toolName": "Bash", "ruleContent": "true"}], "destination": "localSettings"},
        "no suggestion",
        {"type": "setMode", "mode": "acceptEdits"},
    ]
    asked = Requested("r", RequestPurpose.PERMISSION, "can_use_tool", "Bash", {}, {"permission_suggestions": suggested})
    kept = body(CLAUDE.answer(asked, Decision(allows=True, remember="user")))["updatedPermissions"]
    assert kept == [
        {"type": "addRules", "rules": [{"toolName": "Bash", "ruleContent": "true"}], "destination": "userSettings"},
        {"type": "setMode", "mode": "acceptEdits", "destination": "userSettings"},
    ]


def test_elicitation_is_accepted_with_content_or_declined() -> None:
    asked = Requested("r", RequestPurpose.ELICITATION, "elicitation", "server")
    accepted = CLAUDE.answer(asked, Decision(allows=True, content={"name": "x"}))
    assert body(accepted) == {"action": "accept", "content": {"name": "x"}}
    assert body(CLAUDE.answer(asked, Decision(allows=True))) == {"action": "accept", "content": {}}
    assert body(CLAUDE.answer(asked, DENIED)) == {"action": "decline"}


@pytest.mark.parametrize("verdict", list(Verdict))
def test_rule_verdict_is_sent_as_hook_decision(verdict: Verdict) -> None:
    asked = Requested("r", RequestPurpose.RULING, "hook_callback", "Bash")
    decided = body(CLAUDE.rule(asked, verdict))["hookSpecificOutput"]
    assert decided["hookEventName"] == "PreToolUse"
    assert decided["permissionDecision"] == verdict.value
    assert "Bash" in decided["permissionDecisionReason"]
    # If no rule matches, the agent's own settings decide, as if there were no hook.
    assert body(CLAUDE.rule(asked, None)) == {}


def test_callback_result_is_sent_as_response() -> None:
    hook = Requested("r", RequestPurpose.HOOK, "hook_callback", "h")
    assert body(CLAUDE.respond(hook, {"decision": "block"})) == {"decision": "block"}
    tool = Requested("r", RequestPurpose.TOOL, "mcp_message", "s")
    assert body(CLAUDE.respond(tool, {"id": 1, "result": {}})) == {"mcp_response": {"id": 1, "result": {}}}


def test_refusal_is_error_response_with_request_id() -> None:
    response = {"subtype": "error", "request_id": "r", "error": "no\nnever"}
    assert sent(CLAUDE.refuse("r", "no\nnever")) == {"type": "control_response", "response": response}


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
@example("two\nlines\r\nand \u2028 \u0085 \x00")
def test_prompt_keeps_any_text_in_one_line(text: str) -> None:
    assert sent(CLAUDE.prompt(REF, text))["message"]["content"] == text


def test_prompt_converts_content_blocks() -> None:
    blocks = [
        {"type": "text", "text": "look"},
        {"type": "image", "data": "aGk=", "mimeType": "image/png", "uri": None},
        {"type": "resource_link", "uri": "file:///a.py", "name": "a.py"},
        {"type": "resource", "resource": {"uri": "file:///b", "text": "inside", "mimeType": "text/plain"}},
    ]
    assert sent(CLAUDE.prompt(REF, blocks))["message"]["content"] == [
        {"type": "text", "text": "look"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}},
        {"type": "text", "text": "[@a.py](file:///a.py)"},
        {"type": "text", "text": '<context ref="file:///b">\ninside\n</context>'},
    ]


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("\ud800", "UTF-8"),
        ([{"type": "text", "text": "\udfff"}], "UTF-8"),
        ("", "empty"),
        ([], "no blocks"),
        (None, "a prompt cannot be None"),
        (b"bytes", "a prompt cannot be"),
        ({"type": "text", "text": "one block is no list"}, "a prompt cannot be"),
        (["text"], "a content block cannot be 'text'"),
        ([{"type": "audio", "data": "", "mimeType": "audio/wav"}], "does not accept content of type 'audio'"),
        ([{"text": "no type"}], "does not accept content of type None"),
        ([{"type": "text"}], "the text of a content block cannot be None"),
        ([{"type": "image", "data": b"raw", "mimeType": "image/png"}], "the data of a content block"),
        ([{"type": "resource", "resource": {"uri": "a:b", "blob": "aGk="}}], "the text of a content block"),
        ([{"type": "resource"}], "has no resource"),
    ],
)
def test_prompt_refuses_invalid_content(prompt: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        CLAUDE.prompt(REF, prompt)


@pytest.mark.parametrize("value", [object(), {1, 2j}, "\ud800"])
def test_answer_refuses_value_that_is_no_json(value: Any) -> None:
    with pytest.raises(UsageError, match="cannot encode the frame"):
        CLAUDE.answer(PERMISSION, Decision(allows=True, updated_input={"command": value}))


# -- the command -----------------------------------------------------------------------------------------------------
OURS = [
    *("--print", "--input-format", "stream-json", "--output-format", "stream-json", "--verbose"),
    *("--include-partial-messages", "--permission-prompt-tool", "stdio"),
]


def test_argv_has_flags_the_dialect_needs() -> None:
    assert CLAUDE.argv(["claude"]) == ["claude", *OURS]
    assert CLAUDE.argv(["node", "cli.js"], args=["--bare", "x"]) == ["node", "cli.js", *OURS, "--bare", "x"]


def test_argv_keeps_every_value_from_becoming_a_flag() -> None:
    argv = CLAUDE.argv(
        ["claude"],
        resume="--dangerously-skip-permissions",
        model="-m",
        permission_mode="plan",
        system_prompt="-- be\nkind",
        mcp_config="--strict",
        forks=True,
    )
    assert argv == [
        "claude",
        *OURS,
        "--resume=--dangerously-skip-permissions",
        "--mcp-config=--strict",
        "--model=-m",
        "--permission-mode=plan",
        "--append-system-prompt=-- be\nkind",
        "--fork-session",
    ]


@pytest.mark.parametrize("value", ["", 5, ["a"]])
def test_argv_refuses_value_that_is_no_text(value: Any) -> None:
    argv: Callable[..., list[str]] = CLAUDE.argv
    with pytest.raises(UsageError, match="--model cannot be"):
        argv(["claude"], model=value)
