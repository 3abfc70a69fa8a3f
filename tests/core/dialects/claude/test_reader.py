"""Claude dialect, frame by frame: recorded frames, malformed frames and oversize frames.

test_recordings.py has the whole recordings, with their bytes cut at any place.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.core.dialects.recordings import corpus
from tests.core.dialects.recordings.corpus import frames
from tests.core.dialects.recordings.corpus import line as compact

from banksman.core.dialects.claude import CLAUDE, reader, updates, writer
from banksman.core.dialects.dialect import Dialect
from banksman.core.dialects.meaning import (
    BackgroundTask,
    Meaning,
    Noise,
    PromptSettled,
    PromptTaken,
    ProviderFailure,
    Replied,
    Requested,
    RequestPurpose,
    RequestWithdrawn,
    TasksChanged,
    Thought,
    ToolBegan,
    ToolEnded,
    TurnOpened,
    TurnOver,
    UsageReported,
)
from banksman.core.dialects.tokens import Tokens
from banksman.core.wire.framing import HEAD_BYTES
from banksman.core.wire.partial_json import split
from banksman.errors import ErrorKind

NOISE = Noise()
TOLD = (Replied, PromptTaken, TurnOpened, TurnOver, PromptSettled, Requested, RequestWithdrawn)
REF = "0b5f7f2e-0000-4000-8000-000000000001"
CHECKED: Dialect = CLAUDE


def said(lines: Iterable[bytes]) -> str | None:
    transcript = CLAUDE.transcript()
    for line in lines:
        transcript.add(line)
    return transcript.text()


def meanings(name: str) -> list[Meaning]:
    """Meanings of a recorded conversation: turns, prompts and requests, without the events inside a turn."""
    heard = map(CLAUDE.read, corpus.lines(name))
    return [meaning for meaning in heard if isinstance(meaning, TOLD)]


def over(meaning: Meaning | None) -> TurnOver:
    assert isinstance(meaning, TurnOver)
    return meaning


def shape(meaning: Meaning) -> Any:
    """Reduce a boundary to the fields that the turn machine reads; return other meanings whole."""
    if isinstance(meaning, TurnOver):
        return ("over", meaning.refs, meaning.is_error, meaning.is_aborted, meaning.text)
    return meaning


# -- recorded conversations ------------------------------------------------------------------------------------------
def test_recorded_queue_is_merged_and_interrupt_spares_next_prompt() -> None:
    one, two, three, four, five = (f"aaaaaaaa-0000-4000-8000-00000000000{n}" for n in range(1, 6))
    conversation = "77c70b6c-9ed3-44a3-82a3-db27604975ff"

    def init(*refs: str) -> TurnOpened:
        return TurnOpened(refs=refs, conversation=conversation, can_interrupt=True)

    ticks = "".join(f"tick{n} " for n in range(40))
    assert [shape(meaning) for meaning in meanings("claude-L-queue")] == [
        Replied("req_7_initialize"),
        PromptTaken(one),
        TurnOpened(refs=(one,)),
        init(one),
        PromptTaken(two),
        PromptTaken(three),
        ("over", (one,), False, False, ticks),
        PromptSettled(one),
        TurnOpened(refs=(two,)),
        TurnOpened(refs=(three,)),
        init(two, three),
        ("over", (two, three), False, False, "secondthird"),
        PromptSettled(two),
        PromptSettled(three),
        PromptTaken(four),
        TurnOpened(refs=(four,)),
        init(four),
        PromptTaken(five),
        Replied("req_8_interrupt", still_queued=(five,)),
        ("over", (four,), True, True, None),
        PromptSettled(four, is_cancelled=True),
        TurnOpened(refs=(five,)),
        init(five),
        ("over", (five,), False, False, "queued-after-int"),
        PromptSettled(five),
    ]


def test_recorded_interrupt_is_acknowledged_before_boundary() -> None:
    conversation = "1e931dda-67ee-4e30-848e-2ca560e70f2e"
    init = TurnOpened(conversation=conversation, can_interrupt=True)
    assert [shape(meaning) for meaning in meanings("claude-B-interrupt-stream")] == [
        Replied("req_7_initialize"),
        init,
        Replied("req_8_interrupt"),
        ("over", (), True, True, None),
        init,
        ("over", (), False, False, "after interrupt"),
    ]


def test_recorded_result_is_read_whole() -> None:
    conversation, ref = "11111111-1111-4111-8111-111111111111", "22222222-2222-4222-8222-222222222222"
    heard = meanings("claude-A-lifecycle")
    assert heard[0] == Replied("req_1_initialize")
    assert heard[3:8] == [
        Replied("req_2_set_model"),
        Replied("req_3_set_permission_mode"),
        Replied("req_4_mcp_status"),
        Replied("req_5_nonsense", error="Unsupported control request subtype: nonsense"),
        Replied("req_6_interrupt"),
    ]
    result = frames("claude-A-lifecycle", "out")[-2]
    assert result["usage"]["output_tokens"] == 2
    assert heard[-2] == TurnOver(
        refs=(ref,),
        conversation=conversation,
        text="second",
        stop_reason="end_turn",
        usage=result["usage"],
        # The cost of the conversation so far, and of this turn alone.
        spent=0.00028000000000000003,
        cost=6e-05,
        tokens=Tokens(10, 2),
    )


def test_recorded_questions_and_withdrawal_are_read() -> None:
    heard = meanings("claude-D-permission")
    asked = [meaning for meaning in heard if isinstance(meaning, Requested)]
    assert [(question.wants, question.subtype, question.tool) for question in asked] == [
        (RequestPurpose.PERMISSION, "can_use_tool", "Bash")
    ] * 6
    assert asked[0].input == {"command": "touch /srv/project/perm-allow", "description": "x"}
    assert asked[0].details["blocked_path"] == "/srv/project/perm-allow"
    assert asked[0].details["permission_suggestions"][0]["type"] == "addRules"
    assert not {"subtype", "tool_name", "input"} & set(asked[0].details)
    withdrawn = heard.index(RequestWithdrawn(asked[3].request))
    assert heard[withdrawn + 1] == Replied("req_2_interrupt")
    assert over(heard[withdrawn + 2]).is_aborted


@pytest.mark.parametrize("name", ["claude-C-interrupt-bash", "claude-D-permission"])
def test_recorded_tool_abort_is_aborted_turn(name: str) -> None:
    aborted = [meaning for meaning in meanings(name) if isinstance(meaning, TurnOver) and meaning.is_aborted]
    assert aborted
    assert {meaning.stop_reason for meaning in aborted} == {"tool_use"}


def test_recorded_missing_conversation_is_failed_turn() -> None:
    lost = over(meanings("claude-G-resume-missing")[0])
    assert lost.is_error
    assert not lost.is_aborted
    assert lost.error == "No conversation found with session ID: 44444444-4444-4444-8444-444444444444"


def test_recorded_frame_types_have_expected_meanings() -> None:
    """Check by type and subtype, so that no kind of frame changes its meaning unnoticed."""
    kinds: dict[str, set[str]] = {}
    for name in corpus.NAMES:
        for frame in frames(name, "out"):
            kind = f"{frame['type']}/{frame.get('subtype', '')}"
            kinds.setdefault(kind, set()).add(type(CLAUDE.read(compact(frame))).__name__)
    assert kinds == {
        "assistant/": {"UsageReported", "ToolBegan"},
        "user/": {"NoneType", "ToolEnded"},
        "stream_event/": {"NoneType", "Thought", "UsageReported"},
        "system/init": {"TurnOpened"},
        "system/status": {"Noise"},
        "system/api_retry": {"Retrying"},
        "system/thinking_tokens": {"Thought"},
        "system/permission_denied": {"NoneType"},
        "command_lifecycle/": {"PromptTaken", "TurnOpened", "PromptSettled"},
        "control_response/": {"Replied"},
        "control_request/": {"Requested"},
        "control_cancel_request/": {"RequestWithdrawn"},
        "result/success": {"TurnOver"},
        "result/error_during_execution": {"TurnOver"},
    }


def test_recorded_model_call_is_reported_as_it_grows() -> None:
    """The frames of a message have the input of its model call, and the last one has the output."""
    read = [CLAUDE.read(compact(frame)) for frame in frames("claude-A-lifecycle", "out")]
    reported = [meaning for meaning in read if isinstance(meaning, UsageReported)]
    first = reported[0].call
    counts = [report.tokens for report in reported if report.call == first]
    assert counts == [Tokens(10, 1), Tokens(10, 1), Tokens(0, 9)]


def test_tokens_of_result_include_all_models() -> None:
    models = {
        "big": {"inputTokens": 1, "outputTokens": 2, "cacheReadInputTokens": 3, "cacheCreationInputTokens": 4},
        "small": {"inputTokens": 10, "outputTokens": 20, "costUSD": 0.5},
    }
    result = {"type": "result", "subtype": "success", "usage": {"input_tokens": 1, "output_tokens": 2}}
    over = CLAUDE.read(compact({**result, "model_usage_since_last_result": models}))
    assert isinstance(over, TurnOver)
    assert over.tokens == Tokens(11, 22, 3, 4)
    over = CLAUDE.read(compact(result))
    assert isinstance(over, TurnOver)
    assert over.tokens == Tokens(1, 2)


def test_tool_call_reports_usage_of_its_model_call() -> None:
    message = {"id": "m1", "content": [{"type": "tool_use", "id": "t1"}], "usage": {"input_tokens": 7}}
    began = CLAUDE.read(compact({"type": "assistant", "message": message}))
    assert began == ToolBegan(("t1",), UsageReported("m1", Tokens(7)))


def test_read_ignores_member_order_and_blanks() -> None:
    for name in corpus.NAMES:
        for frame in frames(name, "out"):
            expected = CLAUDE.read(compact(frame))
            turned = dict(reversed(frame.items()))
            assert CLAUDE.read(compact(turned)) == expected
            assert CLAUDE.read(b" " + json.dumps(turned).encode() + b"\r") == expected


# -- single frames ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("line", "meaning"),
    [
        (b"", NOISE),
        (b"  ", NOISE),
        (b"Warning: no stdin data received", NOISE),
        (b"[1,2]", NOISE),
        (b'"result"', NOISE),
        (b"null", NOISE),
        (b"{}", NOISE),
        (b"{", NOISE),
        (b'{"type":5}', NOISE),
        (b'{"type":null}', NOISE),
        (b'{"type":["result"]}', NOISE),
        (b'{"type":{"a":1},"x":"\\ud800"}', NOISE),
        (b'{"type":"keep_alive"}', NOISE),
        (b'{"type":"never_heard_of"}', NOISE),
        (b'{"type":"rate_limit_event","rate_limit_info":{}}', NOISE),
        (b'{"type":"system"}', NOISE),
        (b'{"type":"system","subtype":["init"]}', NOISE),
        (b'{"type":"system","subtype":"never_heard_of"}', NOISE),
        (b'{"type":"system","subtype":"task_notification"}', None),
        # Thinking shows that the agent is alive, but is no progress. The order of the members does not matter.
        (b'{"type":"system","subtype":"thinking_tokens"}', Thought()),
        (b'{"type":"stream_event","event":{"delta":{"type":"thinking_delta","thinking":"hm"}}}', Thought()),
        (b'{"event":{"delta":{"type":"thinking_delta"}},"type":"stream_event"}', Thought()),
        (b'{"type":"stream_event","event":{"delta":{"type":"text_delta","text":"\\"thinking_delta\\""}}}', None),
        (b'{"event":{"delta":{"type":"text_delta"}},"type":"stream_event"}', None),
        # Tool calls.
        (
            b'{"type":"assistant","message":{"content":[{"type":"tool_use","id":"a"},{"type":"text"},'
            b'{"type":"tool_use","id":"b"},{"type":"tool_use","id":3}]}}',
            ToolBegan(("a", "b")),
        ),
        (b'{"type":"assistant","message":{"content":[{"type":"tool_use"}]}}', None),
        (b'{"type":"assistant","message":{"content":"of \\"tool_use\\""}}', None),
        # First bytes and quoted words decide about most messages.
        (b'{"type":"assistant","message":{"content":"of \\"usage\\""}}', None),
        (b'{"type":"assistant","message":{"id":"m","usage":{"input_tokens":3}}}', UsageReported("m", Tokens(input=3))),
        (b'{"type":"assistant","message":{"id":"m","usage":{"other":3}}}', None),
        (b'{"message":{"content":[{"type":"tool_use","id":"a"}]},"type":"assistant"}', ToolBegan(("a",))),
        (
            b'{"type":"user","message":{"content":[{"type":"tool_result","tool_use_id":"a"}]}}',
            ToolEnded(("a",)),
        ),
        (b'{"type":"user","message":{"content":[{"type":"tool_result"}]}}', None),
        (b'{"type":"user","message":"tool_result"}', None),
        # A compaction is silent for minutes, like a tool.
        (b'{"type":"system","subtype":"status","status":"compacting"}', ToolBegan(("compaction",))),
        (b'{"type":"system","subtype":"compact_boundary"}', ToolEnded(("compaction",))),
        (b'{"type":"system","subtype":"status","status":"requesting"}', NOISE),
        # Each frame lists all background tasks.
        (
            b'{"type":"system","subtype":"background_tasks_changed","tasks":[{"task_id":"t"},{"task_id":4},"t"]}',
            TasksChanged((BackgroundTask("t"),)),
        ),
        (b'{"type":"system","subtype":"background_tasks_changed","tasks":[]}', TasksChanged(())),
        (b'{"type":"system","subtype":"background_tasks_changed"}', TasksChanged(())),
        (b'{"type":"command_lifecycle","state":"started","command_uuid":null}', NOISE),
        (b'{"type":"command_lifecycle","state":"pondering","command_uuid":"u"}', None),
        (b'{"type":"command_lifecycle","state":7,"command_uuid":"u"}', None),
        (b'{"type":"command_lifecycle","command_uuid":"u","state":"queued"}', PromptTaken("u")),
        (b'{"type":"control_response","response":{"subtype":"success","request_id":7}}', NOISE),
        (b'{"type":"control_response","response":"success"}', NOISE),
        (b'{"type":"control_response","response":{"subtype":"success","request_id":"r","response":[]}}', Replied("r")),
        (
            b'{"type":"control_response","response":{"subtype":"success","request_id":"r","response":{"still_queued":[1,"a"]}}}',
            Replied("r", still_queued=("a",)),
        ),
        (
            b'{"type":"control_response","response":{"subtype":"error","request_id":"r"}}',
            Replied("r", error="the agent gave no reason"),
        ),
        (b'{"type":"control_request","request_id":7,"request":{"subtype":"can_use_tool"}}', NOISE),
        (b'{"type":"control_request","request_id":"r"}', Requested("r", RequestPurpose.UNKNOWN)),
        (
            b'{"type":"control_request","request_id":"r","request":{"subtype":"elicitation"}}',
            Requested("r", RequestPurpose.ELICITATION, "elicitation"),
        ),
        (
            b'{"type":"control_request","request_id":"r","request":'
            b'{"subtype":"elicitation","mcp_server_name":"m","message":"?"}}',
            Requested(
                "r", RequestPurpose.ELICITATION, "elicitation", "m", details={"mcp_server_name": "m", "message": "?"}
            ),
        ),
        (
            b'{"type":"control_request","request_id":"r","request":{"subtype":"can_use_tool","tool_name":4,"input":"x"}}',
            Requested("r", RequestPurpose.UNKNOWN, "can_use_tool"),
        ),
        (
            b'{"type":"control_request","request_id":"r","request":'
            b'{"subtype":"can_use_tool","tool_name":"T","input":"x","title":"t"}}',
            Requested("r", RequestPurpose.PERMISSION, "can_use_tool", "T", {}, {"title": "t"}),
        ),
        # The `banksman-rules` hook is for the permission rules. Any other hook belongs to the caller.
        (
            b'{"type":"control_request","request_id":"r","request":{"subtype":"hook_callback",'
            b'"callback_id":"banksman-rules","input":{"tool_name":"T","tool_input":{"a":1}}}}',
            Requested("r", RequestPurpose.RULING, "hook_callback", "T", {"a": 1}),
        ),
        (
            b'{"type":"control_request","request_id":"r","request":{"subtype":"hook_callback",'
            b'"callback_id":"banksman-rules","input":{"tool_name":5,"tool_input":[]}}}',
            Requested("r", RequestPurpose.RULING, "hook_callback"),
        ),
        (
            b'{"type":"control_request","request_id":"r","request":{"subtype":"hook_callback",'
            b'"callback_id":"h","input":{"hook_event_name":"Stop","a":1}}}',
            Requested("r", RequestPurpose.HOOK, "hook_callback", "h", {"hook_event_name": "Stop", "a": 1}),
        ),
        (
            b'{"type":"control_request","request_id":"r","request":{"subtype":"hook_callback","callback_id":1}}',
            Requested("r", RequestPurpose.UNKNOWN, "hook_callback"),
        ),
        (
            b'{"type":"control_request","request_id":"r","request":{"subtype":"mcp_message",'
            b'"server_name":"s","message":{"id":1}}}',
            Requested("r", RequestPurpose.TOOL, "mcp_message", "s", {"id": 1}),
        ),
        (
            b'{"type":"control_request","request_id":"r","request":{"subtype":"mcp_message","message":{"id":1}}}',
            Requested("r", RequestPurpose.UNKNOWN, "mcp_message"),
        ),
        (b'{"type":"control_cancel_request","request_id":null}', NOISE),
        # If two members have the same name, the last one counts.
        (b'{"type":"user ","type":"control_cancel_request","request_id":"r"}', RequestWithdrawn("r")),
        (b'{"t\\u0079pe":"control_cancel_request","request_id":"r"}', RequestWithdrawn("r")),
        (
            b'{"type":"system","subtype":"init","session_id":4,"origin":{"kind":"task-notification"}}',
            TurnOpened(origin="task-notification", can_interrupt=True),
        ),
        (b'{"type":"system","subtype":"init","origin":{"kind":"human"}}', TurnOpened(can_interrupt=True)),
        (b'{"type":"system","subtype":"init","origin":"human"}', TurnOpened(can_interrupt=True)),
        (
            b'{"type":"system","subtype":"init","user_message_uuids":[null,"u",3]}',
            TurnOpened(refs=("u",), can_interrupt=True),
        ),
    ],
)
def test_line_has_expected_meaning(line: bytes, meaning: Meaning | None) -> None:
    assert CLAUDE.read(line) == meaning


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        ({}, TurnOver()),
        ({"subtype": "success", "is_error": False, "result": ""}, TurnOver(text="")),
        # A failed model call has the subtype `success` and `is_error`.
        (
            {"subtype": "success", "is_error": True, "result": "API Error: 400", "api_error_status": 400},
            TurnOver(is_error=True, text="API Error: 400", error="API Error: 400"),
        ),
        (
            {
                "subtype": "success",
                "is_error": True,
                "terminal_reason": "api_error",
                "api_error_status": 404,
                "errors": [],
            },
            TurnOver(is_error=True, error="api_error 404"),
        ),
        ({"subtype": "error_max_turns", "is_error": False}, TurnOver(is_error=True, error="error_max_turns")),
        ({"is_error": True, "errors": ["one", 2, "three"]}, TurnOver(is_error=True, error="one\nthree")),
        ({"is_error": True}, TurnOver(is_error=True, error="error")),
        ({"is_error": "yes"}, TurnOver()),
        ({"terminal_reason": "aborted_tools"}, TurnOver(is_aborted=True)),
        ({"terminal_reason": ["aborted"]}, TurnOver()),
        ({"user_message_uuid": "u"}, TurnOver(refs=("u",))),
        ({"user_message_uuids": [], "user_message_uuid": "u"}, TurnOver(refs=("u",))),
        ({"user_message_uuids": ["t", "u"], "user_message_uuid": "u"}, TurnOver(refs=("t", "u"))),
        ({"origin": {"kind": "auto-continuation"}}, TurnOver(origin="auto-continuation")),
        ({"origin": {"kind": "human"}}, TurnOver()),
        ({"total_cost_usd": True, "usage": [1], "stop_reason": 4, "session_id": {}}, TurnOver()),
        ({"total_cost_usd": 2, "usage": {"a": 1}}, TurnOver(spent=2.0, usage={"a": 1})),
        # The cost of this turn alone, if the frame gives it for each model.
        ({"model_usage_since_last_result": {"m": {"costUSD": 1}, "n": {"costUSD": 0.5}}}, TurnOver(cost=1.5)),
        ({"model_usage_since_last_result": {}}, TurnOver(cost=0.0)),
        # No cost is negative or beyond every bound.
        ({"total_cost_usd": -100, "model_usage_since_last_result": {"m": {"costUSD": -1}}}, TurnOver()),
        ({"total_cost_usd": 10**400}, TurnOver()),
        ({"model_usage_since_last_result": {"m": {"costUSD": 1}, "n": {}}}, TurnOver()),
        ({"model_usage_since_last_result": {"m": 1}}, TurnOver()),
        ({"model_usage_since_last_result": [1], "total_cost_usd": 1}, TurnOver(spent=1.0)),
        ({"structured_output": {"a": [1]}}, TurnOver(structured={"a": [1]})),
        # The conversation is too long for the model: the agent's word for it, or the model's.
        (
            {"is_error": True, "terminal_reason": "prompt_too_long", "result": "sorry"},
            TurnOver(is_error=True, is_overflow=True, text="sorry", error="sorry"),
        ),
        (
            {"is_error": True, "result": "API Error: Prompt is too long"},
            TurnOver(
                is_error=True,
                is_overflow=True,
                text="API Error: Prompt is too long",
                error="API Error: Prompt is too long",
            ),
        ),
        # Text about an overflow is no overflow unless the turn failed.
        ({"result": "Prompt is too long"}, TurnOver(text="Prompt is too long")),
        ({"terminal_reason": "prompt_too_long"}, TurnOver()),
    ],
)
def test_result_frame_has_expected_meaning(frame: dict[str, Any], expected: TurnOver) -> None:
    meaning = over(CLAUDE.read(compact({**frame, "type": "result"})))
    # test_provider_errors.py has the cause of a failure.
    assert (meaning.failure is not None) == expected.is_error
    assert msgspec.structs.replace(meaning, failure=None) == expected


# -- undecodable values ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("odd", "text"),
    [
        (rb'"cut in an emoji \ud83d"', "cut in an emoji \ufffd"),
        (rb'"\ude00 and \ud83d\ude00 and \\ud83d"', "\ufffd and 😀 and \\ud83d"),
        (b'"not \xff UTF-8 \xe2\x82"', "not \ufffd UTF-8 \ufffd"),
        (b"[" * 5000 + b"]" * 5000, None),
        (b"1e999999", None),
        (b"9" * 400, None),
        (b"9" * 5000, None),
    ],
)
def test_boundary_with_odd_value_is_still_the_boundary(odd: bytes, text: str | None) -> None:
    line = b'{"result":%s,"total_cost_usd":1.5,"type":"result","is_error":false,"user_message_uuid":"u"}' % odd
    assert CLAUDE.read(line) == TurnOver(refs=("u",), text=text, spent=1.5)
    # An odd value in an unread member has no effect either.
    line = b'{"permission_denials":%s,"type":"result","result":"done"}' % odd
    assert CLAUDE.read(line) == TurnOver(text="done")


def test_half_a_frame_is_noise() -> None:
    line = compact({"subtype": "success", "result": "done", "type": "result", "usage": {"a": [1, 2]}})
    assert isinstance(CLAUDE.read(line), TurnOver)
    assert {CLAUDE.read(line[:length]) for length in range(len(line))} == {NOISE}
    assert CLAUDE.read(line + b"}") == NOISE
    assert CLAUDE.read(line + line) == NOISE
    deep = b'{"type":"result","a":' + b"[" * 5000
    assert CLAUDE.read(deep) == NOISE


def test_undecodable_large_line_is_judged_by_its_head() -> None:
    deep = b"[" * 200_000 + b"]" * 200_000
    line = b'{"type":"result","a":%s,"pad":"%s"}' % (deep, b"x" * reader.SALVAGE_BYTES_MAX)
    assert over(CLAUDE.read(line)).error == "frame_too_large"
    line = line.replace(b'"result"', b'"tool_progress"')
    assert CLAUDE.read(line) == NOISE


# -- heads of oversize frames ----------------------------------------------------------------------------------------
BIG = "x" * 200_000


def head(frame: Any) -> bytes:
    line = compact(frame)
    assert len(line) > HEAD_BYTES
    return line[:HEAD_BYTES]


@pytest.mark.parametrize(
    ("frame", "refs"),
    [
        ({"type": "result", "user_message_uuids": ["u"], "result": BIG}, ("u",)),
        ({"user_message_uuid": "u", "result": BIG, "type": "result"}, ("u",)),
        ({"modelUsage": {"a": [1, {"b": "}"}]}, "user_message_uuid": "u", "errors": [BIG, "["]}, ("u",)),
        ({"errors": [[[BIG]]], "type": "result"}, ()),
        ({BIG: 1, "type": "result"}, ()),
        ({"a": 'an escaped "quote\\', "type": "result", "result": BIG}, ()),
        ({"message": BIG, "type": "assistant"}, ()),
    ],
)
def test_read_head_ends_turn_when_it_may_be_the_boundary(frame: Any, refs: tuple[str, ...]) -> None:
    assert CLAUDE.read_head(head(frame)) == TurnOver(
        refs=refs, is_error=True, error="frame_too_large", failure=ProviderFailure(ErrorKind.PROTOCOL)
    )


def test_read_head_keeps_members_before_large_part() -> None:
    frame = {
        "stop_reason": "end_turn",
        "session_id": "s",
        "total_cost_usd": 0.5,
        "usage": {"a": 1},
        "terminal_reason": "aborted_tools",
        "origin": {"kind": "peer"},
        "result": BIG,
    }
    assert CLAUDE.read_head(head(frame)) == TurnOver(
        origin="peer",
        conversation="s",
        is_error=True,
        is_aborted=True,
        error="frame_too_large",
        stop_reason="end_turn",
        usage={"a": 1},
        spent=0.5,
        failure=ProviderFailure(ErrorKind.PROTOCOL),
    )


@pytest.mark.parametrize(
    ("frame", "meaning"),
    [
        ({"type": "assistant", "message": {"type": "result", "content": BIG}}, None),
        ({"parent_tool_use_id": None, "type": "user", "message": BIG}, None),
        ({"type": "stream_event", "event": {"delta": BIG}}, None),
        ({"type": "keep_alive", "a": BIG}, NOISE),
        ({"type": 5, "a": BIG}, NOISE),
        (
            {"type": "system", "subtype": "init", "session_id": "s", "tools": [BIG]},
            TurnOpened(conversation="s", can_interrupt=True),
        ),
        # An oversize permission request still gets an answer: no.
        (
            {"type": "control_request", "request_id": "r", "request": {"subtype": "can_use_tool", "input": {"a": BIG}}},
            Requested("r", RequestPurpose.UNKNOWN, "can_use_tool"),
        ),
        # The rules also apply to an oversize call: by its tool name, or, if the name is cut off, by the absence of a
        # name.
        (
            {
                "type": "control_request",
                "request_id": "r",
                "request": {
                    "subtype": "hook_callback",
                    "callback_id": writer.RULES_HOOK,
                    "input": {"tool_name": "Write", "tool_input": {"content": BIG}},
                },
            },
            Requested("r", RequestPurpose.RULING, "hook_callback", "Write"),
        ),
        (
            {
                "type": "control_request",
                "request_id": "r",
                "request": {
                    "subtype": "hook_callback",
                    "callback_id": writer.RULES_HOOK,
                    "input": {"tool_input": {"content": BIG}, "tool_name": "Write"},
                },
            },
            Requested("r", RequestPurpose.RULING, "hook_callback"),
        ),
        # A caller's hook is not called with a part of its input.
        (
            {
                "type": "control_request",
                "request_id": "r",
                "request": {"subtype": "hook_callback", "callback_id": "h", "input": {"a": BIG}},
            },
            Requested("r", RequestPurpose.UNKNOWN, "hook_callback"),
        ),
        (
            {"type": "control_response", "response": {"subtype": "success", "request_id": "r", "response": {"a": BIG}}},
            Replied("r"),
        ),
        (
            {"type": "control_response", "response": {"subtype": "error", "request_id": "r", "error": BIG}},
            Replied("r", error="the agent gave no reason"),
        ),
        ([BIG], NOISE),
        (BIG, NOISE),
    ],
)
def test_read_head_recognises_frames_that_are_no_boundary(frame: Any, meaning: Meaning | None) -> None:
    assert CLAUDE.read_head(head(frame)) == meaning


@pytest.mark.parametrize("start", [b"progress: ", b"{oops ", b'{"a":1}{"b":', b'{"a" 1', b'{"a":"b" "c":', b'{"a":1,,'])
def test_read_head_without_json_is_noise(start: bytes) -> None:
    assert CLAUDE.read_head(start + b"x" * HEAD_BYTES) == NOISE


def test_read_head_of_result_cut_anywhere_ends_turn() -> None:
    line = compact(next(frame for frame in frames("claude-L-queue", "out") if frame["type"] == "result"))
    assert line.index(b'"type":"result"') > 100
    for length in range(len(line)):
        assert over(CLAUDE.read_head(line[:length])).error == "frame_too_large"


def test_read_head_ignores_half_a_number() -> None:
    assert over(CLAUDE.read_head(b'{"type":"result","total_cost_usd":12.5,')).spent == 12.5
    assert over(CLAUDE.read_head(b'{"type":"result","total_cost_usd":12.5')).spent is None


# -- arbitrary input -------------------------------------------------------------------------------------------------
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "id", "text", "x"]), inner),
    max_leaves=6,
)
KNOWN = ("result", "system", "control_response", "control_request", "command_lifecycle", "assistant", "user")
NAMES = (
    *("status", "tasks", "structured_output", "model_usage_since_last_result"),
    *("subtype", "state", "message", "event", "response", "request", "request_id", "command_uuid", "origin", "errors"),
    *(
        "user_message_uuids",
        "user_message_uuid",
        "usage",
        "modelUsage",
        "total_cost_usd",
        "is_error",
        "terminal_reason",
    ),
    *("result", "session_id"),
)
FRAMES: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"type": st.sampled_from(KNOWN) | VALUES}, optional=dict.fromkeys(NAMES, VALUES)
)


# No deadline for one input: it would measure the load of the machine.
def survives(line: bytes) -> None:
    for read in (CLAUDE.read, CLAUDE.read_head):
        meaning = read(line)
        assert meaning is None or isinstance(meaning, Meaning)
        # The fields have their declared types for any input.
        if isinstance(meaning, TurnOver):
            assert all(isinstance(ref, str) for ref in meaning.refs)
            assert isinstance(meaning.text, str | None)
            assert isinstance(meaning.spent, float | None)
            assert isinstance(meaning.cost, float | None)
        if isinstance(meaning, ToolBegan | ToolEnded):
            assert all(isinstance(call, str) for call in meaning.calls)
        if isinstance(meaning, TasksChanged):
            assert all(isinstance(task, str) for task in meaning.tasks)
        if isinstance(meaning, Requested):
            assert isinstance(meaning.tool, str)
            assert isinstance(meaning.input, dict)
    for update in CLAUDE.project(line):
        assert isinstance(update["sessionUpdate"], str)
        msgspec.json.encode(update)
    assert isinstance(said([line]), str | None)


@settings(deadline=None)
@given(st.binary())
@example(b"\x00")
@example(b'{"type":"result","a":"\\u12"}')
@example(b"{" * 100_000)
@example(b'{"type":"result","total_cost_usd":' + b"9" * 400 + b"}")
@example(b'{"a":' * 100_000)
@example(b'{"type":"assistant","message":{"content":[{"type":"tool_use","id":"a","name":[]}]}}')
def test_read_survives_any_bytes(line: bytes) -> None:
    survives(line)


@settings(deadline=None)
@given(FRAMES, st.integers(min_value=0), st.binary(min_size=1, max_size=2))
@example({"type": "result", "model_usage_since_last_result": {}}, 0, b"x")
def test_read_survives_any_frame(frame: dict[str, Any], at: int, noise: bytes) -> None:
    line = json.dumps(frame).encode()
    survives(line)
    survives(line[: at % len(line)])
    at %= len(line)
    survives(line[:at] + noise + line[at + 1 :])


@settings(deadline=None)
@given(FRAMES)
def test_split_finds_same_members_as_decoder(frame: dict[str, Any]) -> None:
    line = json.dumps(frame).encode()
    members = split(line)
    assert members.is_whole
    assert {name: json.loads(raw) for name, raw in members.found.items()} == frame


# -- the projection --------------------------------------------------------------------------------------------------
def projected(name: str) -> list[dict[str, Any]]:
    return [update for line in corpus.lines(name) for update in CLAUDE.project(line)]


def chunk(kind: str, text: str, message: str) -> dict[str, Any]:
    return {"sessionUpdate": kind, "content": {"type": "text", "text": text}, "messageId": message}


def test_project_tells_streamed_text_once() -> None:
    first, second = "msg_fc3a1b8739424a878bfb0639", "msg_fd643602337d443b851d1737"
    assert projected("claude-A-lifecycle") == [
        chunk("agent_thought_chunk", "hmm", first),
        chunk("agent_message_chunk", "hellotick0 tick1 tick2 tick3 tick4 ", first),
        {
            "sessionUpdate": "usage_update",
            "used": 19,
            "size": 1_000_000,
            "cost": {"amount": 0.00022, "currency": "USD"},
        },
        chunk("agent_message_chunk", "second", second),
        {
            "sessionUpdate": "usage_update",
            "used": 12,
            "size": 1_000_000,
            "cost": {"amount": 0.00028000000000000003, "currency": "USD"},
        },
    ]


@pytest.mark.parametrize("id", [b'"msg_01"', b"null", b"7"])
@pytest.mark.parametrize(
    "content",
    [
        b'[{"type":"text","text":"one"}]',
        b'[{"type":"text","text":""}]',
        b'[{"type":"text","text":"\xff"}]',
        b'[{"type":"text","text":7}]',
        b'[{"type":"text"}]',
        b'[{"type":"text","text":"one"},{"type":"text","text":"two"}]',
        b'[{"type":"thinking","thinking":"hm"}]',
        b'[{"text":"one"}]',
        b'"one"',
        b"[]",
        b"null",
    ],
)
def test_project_of_one_text_is_that_of_any_frame(content: bytes, id: bytes) -> None:
    """A message of one text is decoded in a faster way, if the frame begins with its type."""
    message = b'"message":{"id":%b,"content":%b}' % (id, content)
    assert CLAUDE.project(b'{"type":"assistant",%b}' % message) == CLAUDE.project(b'{%b,"type":"assistant"}' % message)


def test_project_tells_tool_begin_and_end() -> None:
    began, ended = (update for update in projected("claude-D-noprompt") if "toolCallId" in update)
    assert began == {
        "sessionUpdate": "tool_call",
        "toolCallId": "toolu_321e752a29dd40538768f60e",
        "title": "Bash: x",
        "kind": "execute",
        "status": "in_progress",
        "rawInput": {"command": "touch /srv/project/perm-none", "description": "x"},
    }
    assert ended["sessionUpdate"] == "tool_call_update"
    assert ended["toolCallId"] == began["toolCallId"]
    assert ended["status"] == "failed"
    assert ended["content"][0]["content"]["text"].startswith("touch in '/srv/project/perm-none' needs approval")


def assistant(*blocks: Any, **rest: Any) -> bytes:
    return compact({"type": "assistant", "message": {"content": list(blocks)}, **rest})


def test_project_tells_tool_output_in_parts() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    parts = [{"type": "text", "text": "a"}, image, {"type": "tool_reference", "tool_name": "x"}]
    result = {"type": "tool_result", "tool_use_id": "t", "content": parts}
    [update] = CLAUDE.project(compact({"type": "user", "message": {"content": [result]}}))
    assert update["status"] == "completed"
    assert [part["content"] for part in update["content"]] == [
        {"type": "text", "text": "a"},
        {"type": "image", "data": "aGk=", "mimeType": "image/png"},
    ]


def test_project_tells_todos_as_plan() -> None:
    todos = [
        {"content": "look", "status": "completed", "activeForm": "Looking"},
        {"content": "leap", "status": "in_progress"},
        {"content": "land", "status": "wondering"},
        {"status": "pending"},
        "no todo",
    ]
    call = {"type": "tool_use", "id": "t", "name": "TodoWrite", "input": {"todos": todos}}
    began, plan = CLAUDE.project(assistant(call))
    assert began["kind"] == "other"
    assert plan == {
        "sessionUpdate": "plan",
        "entries": [
            {"content": "look", "priority": "medium", "status": "completed"},
            {"content": "leap", "priority": "medium", "status": "in_progress"},
            {"content": "land", "priority": "medium", "status": "pending"},
        ],
    }


@pytest.mark.parametrize("name", ["user", "system", "control_response", "stream_event", "keep_alive"])
def test_project_tells_nothing_for_other_frames(name: str) -> None:
    assert CLAUDE.project(compact({"type": name, "message": {"content": "plain"}})) == []
    assert CLAUDE.project(assistant({"type": "thinking", "thinking": ""}, {"type": "novel"}, 5)) == []


def test_project_mends_half_an_emoji() -> None:
    line = rb'{"type":"assistant","message":{"content":"cut \ud83d"}}'
    assert [update["content"]["text"] for update in CLAUDE.project(line)] == ["cut \ufffd"]


def test_transcript_keeps_text_of_cut_off_turn() -> None:
    def delta(text: str, **rest: Any) -> bytes:
        event = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": text}}
        return compact({"type": "stream_event", "event": event, **rest})

    whole = assistant({"type": "text", "text": "One. "})
    lines = [delta("On"), delta("e. "), whole, delta("T"), delta("w"), delta("subagent", parent_tool_use_id="t")]
    assert said(lines) == "One. Tw"
    assert said([*lines, assistant({"type": "text", "text": "sub"}, parent_tool_use_id="t")]) == "One. Tw"
    # A retried request begins its block again.
    again = compact({"type": "stream_event", "event": {"type": "content_block_start"}})
    assert said([*lines, again, delta("Tw")]) == "One. Tw"
    assert said([b"", b"{}"]) is None


def test_transcript_keeps_end_of_long_turn() -> None:
    part = "x" * (updates.SAID_CHARACTERS_MAX // 4)
    lines = [assistant({"type": "text", "text": f"{number}{part}"}) for number in range(9)]
    text = said(lines)
    assert text is not None
    assert text.startswith("5")
    assert text.endswith(f"8{part}")
