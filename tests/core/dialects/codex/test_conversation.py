"""Assignment of turns to prompts in the Codex dialect, when the agent's frames come reordered, twice, late or never."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

import banksman
from banksman.core.dialects.codex import CODEX
from banksman.core.dialects.codex.conversation import ENDED_TURNS_MAX, CodexProtocolState
from banksman.core.dialects.dialect import Decision, ProtocolOutput, Setup
from banksman.core.dialects.meaning import (
    Meaning,
    NeedsConversation,
    Noise,
    PromptRefused,
    PromptSettled,
    PromptTaken,
    ProviderFailure,
    Replied,
    Requested,
    RequestPurpose,
    RequestWithdrawn,
    Retrying,
    ToolBegan,
    TurnOpened,
    TurnOver,
    UsageReported,
)
from banksman.core.dialects.tokens import Tokens
from banksman.core.wire import jsonrpc
from banksman.core.wire.pending_requests import OURS_MAX, THEIRS_MAX
from banksman.errors import ErrorKind, UsageError

THREAD = "t-1"


class Talk:
    """A conversation with a scripted agent."""

    def __init__(self, setup: Setup | None = None, *, is_begun: bool = True) -> None:
        self.protocol = CODEX.begin(setup or Setup(cwd="/srv"))
        self.sent: list[dict[str, Any]] = []
        if is_begun:
            self.do(self.protocol.handshake("h"))
            self.reply({})
            assert self.reply({"thread": {"id": THREAD}}) == [Replied("h")]

    def do(self, output: ProtocolOutput) -> list[Meaning]:
        self.protocol = output.protocol
        self.sent += map(json.loads, output.frames)
        return list(output.meanings)

    def prompt(self, ref: str, text: Any = "do") -> None:
        assert self.do(self.protocol.prompt(ref, text)) == []

    def hears(self, frame: Any, *, tail: bytes | None = None) -> list[Meaning]:
        line = frame if isinstance(frame, bytes) else json.dumps(frame).encode()
        meaning = CODEX.read(line) if tail is None else CODEX.read_head(line, tail)
        if isinstance(meaning, NeedsConversation):
            return self.do(self.protocol.hear(meaning))
        return [] if meaning is None else [meaning]

    def last(self, method: str) -> dict[str, Any]:
        return next(frame for frame in reversed(self.sent) if frame.get("method") == method)

    def reply(self, result: Any, *, to: str | None = None) -> list[Meaning]:
        """Answer the last request, or the last request with the method `to`."""
        requests = [frame for frame in self.sent if "id" in frame and "method" in frame]
        request = requests[-1] if to is None else self.last(to)
        return self.hears({"id": request["id"], "result": result})

    def fail(self, message: str, code: int = -32600, *, to: str | None = None) -> list[Meaning]:
        requests = [frame for frame in self.sent if "id" in frame and "method" in frame]
        request = requests[-1] if to is None else self.last(to)
        return self.hears({"error": {"code": code, "message": message}, "id": request["id"]})

    def notice(self, method: str, **params: Any) -> list[Meaning]:
        return self.hears({"method": method, "params": {"threadId": THREAD} | params})

    def started(self, turn: str) -> list[Meaning]:
        return self.notice("turn/started", turn={"id": turn, "status": "inProgress"})

    def completed(self, turn: str, status: str = "completed", **members: Any) -> list[Meaning]:
        return self.notice("turn/completed", turn={"id": turn, "items": [], "status": status} | members)

    def opens(self, ref: str, turn: str) -> None:
        """Open a turn in the usual order of frames."""
        self.prompt(ref)
        assert self.reply({"turn": {"id": turn}}) == [PromptTaken(ref)]
        assert self.started(turn) == [opened(ref)]


def opened(*refs: str) -> TurnOpened:
    return TurnOpened(refs, conversation=THREAD, can_interrupt=True)


LOST, REFUSED = ErrorKind.PROTOCOL, ErrorKind.INVALID_REQUEST


def over(*refs: str, **members: Any) -> list[Meaning]:
    """The boundary of a turn, with the meanings that settle each of its prompts."""
    members = {"conversation": THREAD, "stop_reason": "completed"} | members
    if "kind" in members:
        members["failure"] = ProviderFailure(members.pop("kind"), raw=members.pop("raw", None))
    return [TurnOver(refs, **members), *(PromptSettled(ref) for ref in reversed(refs))]


# -- the handshake ---------------------------------------------------------------------------------------------------
def test_thread_start_has_every_option() -> None:
    server = {"name": "files", "command": "serve", "args": ["-x"], "env": [{"name": "A", "value": "1"}]}
    remote = {"type": "http", "name": "far", "url": "http://h", "headers": [{"name": "H", "value": "2"}]}
    setup = Setup(cwd="/srv", model="m", permission_mode="never", system_prompt="be kind", mcp_servers=(server, remote))
    talk = Talk(setup)
    assert [frame["method"] for frame in talk.sent] == ["initialize", "initialized", "thread/start"]
    assert talk.sent[0]["params"]["clientInfo"]["version"] == banksman.__version__
    assert talk.last("thread/start")["params"] == {
        "cwd": "/srv",
        "model": "m",
        "approvalPolicy": "never",
        "developerInstructions": "be kind",
        "config": {
            "mcp_servers": {
                "files": {"command": "serve", "args": ["-x"], "env": {"A": "1"}},
                "far": {"url": "http://h", "http_headers": {"H": "2"}},
            }
        },
    }
    assert talk.protocol.conversation == THREAD


@pytest.mark.parametrize(("forks", "method"), [(False, "thread/resume"), (True, "thread/fork")])
def test_conversation_is_resumed_or_forked(forks: bool, method: str) -> None:
    talk = Talk(Setup(conversation="old", forks=forks))
    assert talk.last(method)["params"] == {"threadId": "old"}


def test_resumed_conversation_is_known_from_oversized_reply() -> None:
    talk = Talk(Setup(conversation="old"), is_begun=False)
    talk.do(talk.protocol.handshake("h"))
    talk.reply({})
    id = talk.last("thread/resume")["id"]
    assert talk.hears(b'{"id":%d,"result":{"turns":["' % id, tail=b'"]}}') == [Replied("h")]
    assert talk.protocol.conversation == "old"


def test_handshake_can_be_refused_at_each_step() -> None:
    talk = Talk(is_begun=False)
    talk.do(talk.protocol.handshake("h"))
    (refused,) = talk.fail("no")
    assert isinstance(refused, Replied)
    assert refused.error == "no (-32600)"
    results: list[Any] = [
        {},
        {"thread": {}},
        {"thread": {"id": ""}},
        {"thread": {"id": "a\nb"}},
        {"thread": {"id": 7}},
        None,
    ]
    for result in results:
        talk = Talk(is_begun=False)
        talk.do(talk.protocol.handshake("h"))
        talk.reply({})
        (refused,) = talk.reply(result)
        assert isinstance(refused, Replied)
        assert refused.error is not None
        assert talk.protocol.conversation is None


# -- prompts ---------------------------------------------------------------------------------------------------------
def test_prompt_converts_content_blocks() -> None:
    talk = Talk(Setup(schema={"type": "object"}))
    talk.prompt(
        "r",
        [
            {"type": "text", "text": "look"},
            {"type": "image", "mimeType": "image/png", "data": "AAAA"},
            {"type": "resource_link", "uri": "file:///srv/a.png", "name": "a", "mimeType": "image/png"},
            {"type": "resource_link", "uri": "file:///srv/a.py", "name": "a.py"},
            {"type": "resource", "resource": {"uri": "file:///b", "text": "words"}},
        ],
    )
    assert talk.last("turn/start")["params"] == {
        "threadId": THREAD,
        "clientUserMessageId": "r",
        "input": [
            {"type": "text", "text": "look"},
            {"type": "image", "url": "data:image/png;base64,AAAA"},
            {"type": "localImage", "path": "/srv/a.png"},
            {"type": "text", "text": "[@a.py](file:///srv/a.py)"},
            {"type": "text", "text": '<context ref="file:///b">\nwords\n</context>'},
        ],
        "outputSchema": {"type": "object"},
    }


@pytest.mark.parametrize(
    "prompt",
    ["", [], b"x", 7, {"type": "text"}, [7], [{"type": "audio"}], [{"type": "text"}], [{"type": "resource"}], "\ud800"],
    ids=repr,
)
@pytest.mark.parametrize("is_begun", [True, False])
def test_prompt_refuses_unsendable_content(prompt: Any, is_begun: bool) -> None:
    with pytest.raises(UsageError):
        Talk(is_begun=is_begun).protocol.prompt("r", prompt)


def test_prompt_length_is_bounded() -> None:
    Talk().prompt("r", "x" * (1 << 20))
    with pytest.raises(UsageError):
        Talk().prompt("r", "x" * ((1 << 20) + 1))


def test_setting_is_sent_with_next_turn() -> None:
    talk = Talk()
    assert talk.do(talk.protocol.setting("s-1", "model", "other")) == [Replied("s-1")]
    assert talk.do(talk.protocol.setting("s-2", "permission_mode", "untrusted")) == [Replied("s-2")]
    (refused,) = talk.do(talk.protocol.setting("s-3", "permission_mode", "bypass"))
    assert isinstance(refused, Replied)
    assert "on-request" in (refused.error or "")
    talk.opens("r", "u")
    params = talk.last("turn/start")["params"]
    assert (params["model"], params["approvalPolicy"]) == ("other", "untrusted")


# -- turns and their prompts -----------------------------------------------------------------------------------------
def test_turn_opens_and_ends_with_last_text() -> None:
    talk = Talk()
    talk.opens("r", "u")
    talk.notice("item/completed", turnId="u", item={"type": "agentMessage", "id": "m", "text": "first"})
    talk.notice("item/completed", turnId="u", item={"type": "agentMessage", "id": "n", "text": "last"})
    assert talk.completed("u") == over("r", text="last")
    assert talk.completed("u") == [Noise()], "said twice"
    assert talk.started("u") == [Noise()], "late"


def test_late_messages_about_ended_turn_open_no_turn() -> None:
    talk = Talk()
    for number in range(ENDED_TURNS_MAX + 1):
        talk.opens(f"r-{number}", f"u-{number}")
        assert talk.completed(f"u-{number}") == over(f"r-{number}")
    talk.opens("r", "u")
    for number in range(1, ENDED_TURNS_MAX + 1):
        assert talk.completed(f"u-{number}") == [Noise()]
        assert talk.started(f"u-{number}") == [Noise()]
    assert talk.completed("u") == over("r")
    assert isinstance(talk.protocol, CodexProtocolState)
    assert len(talk.protocol.ended) == ENDED_TURNS_MAX, "it remembers a bounded number"


def test_turn_that_starts_before_its_prompt_reply_is_matched() -> None:
    talk = Talk()
    talk.prompt("r")
    assert talk.started("u") == [], "it may be the agent's own"
    assert talk.reply({"turn": {"id": "u"}}) == [opened("r")]
    assert talk.completed("u") == over("r")


def test_turn_that_ends_before_its_prompt_reply_is_matched() -> None:
    talk = Talk()
    talk.prompt("r")
    assert talk.started("u") == []
    assert talk.completed("u") == []
    assert talk.reply({"turn": {"id": "u"}}) == [opened("r"), *over("r")]
    assert talk.reply({"turn": {"id": "u"}}) == [Noise()], "said twice"


def test_turn_is_matched_by_client_id_of_its_item() -> None:
    talk = Talk()
    talk.prompt("r")
    talk.started("u")
    assert talk.notice("item/started", turnId="u", item={"type": "userMessage", "id": "i", "clientId": "r"}) == [
        opened("r")
    ]
    assert talk.completed("u") == over("r")
    assert talk.reply({"turn": {"id": "u"}}) == [Noise()], "it is known"


def test_agent_initiated_turn_has_no_refs() -> None:
    talk = Talk()
    assert talk.started("own") == [opened()]
    assert talk.completed("own") == over()
    # An agent-initiated turn begins while the prompt is on its way, and ends before the prompt's turn begins.
    talk.prompt("r")
    assert talk.started("own-2") == []
    assert talk.completed("own-2") == []
    assert talk.reply({"turn": {"id": "u"}}) == [PromptTaken("r"), opened(), *over()]
    assert talk.started("u") == [opened("r")]
    assert talk.completed("u") == over("r")


def test_prompt_can_join_agent_initiated_turn() -> None:
    talk = Talk()
    talk.prompt("r")
    talk.started("own")
    assert talk.reply({"turn": {"id": "own"}}) == [opened("r")]
    assert talk.completed("own") == over("r")


def test_boundary_without_start_opens_and_ends_turn() -> None:
    talk = Talk()
    talk.prompt("r")
    talk.reply({"turn": {"id": "u"}})
    assert talk.completed("u") == [opened("r"), *over("r")]
    assert talk.completed("strange") == [opened(), *over()]


def test_unfinished_turn_is_failed_when_another_starts() -> None:
    talk = Talk()
    talk.opens("r", "u")
    lost = over(
        "r", is_error=True, error="the agent began another turn", stop_reason=None, conversation=None, kind=LOST
    )
    assert talk.started("v") == [*lost, opened()]


def test_messages_of_another_thread_do_not_affect_turn() -> None:
    talk = Talk()
    talk.opens("r", "u")
    assert talk.notice("turn/completed", threadId="sub", turn={"id": "u", "status": "failed"}) == []
    assert talk.notice("turn/started", threadId="sub", turn={"id": "v"}) == []
    talk.notice("item/completed", threadId="sub", turnId="u", item={"type": "agentMessage", "id": "m", "text": "sub"})
    assert talk.completed("u") == over("r")


def test_refused_prompt_fails_its_turn() -> None:
    talk = Talk()
    talk.prompt("r")
    refused = over("r", is_error=True, error="too long (-32602)", stop_reason=None, conversation=None, kind=REFUSED)
    assert talk.fail("too long", -32602) == refused
    talk.opens("s", "u")


@pytest.mark.parametrize("id", [3, "3", 99, None], ids=repr)
def test_unexpected_reply_is_noise(id: jsonrpc.Id | None) -> None:
    talk = Talk()
    talk.opens("r", "u")
    before = talk.protocol
    assert talk.hears({"id": id, "result": {"turn": {"id": "v"}}}) == [Noise()]
    assert talk.protocol == before
    assert talk.completed("u") == over("r")


# -- ends of turns ---------------------------------------------------------------------------------------------------
def test_failed_turn_reports_error_and_overflow() -> None:
    talk = Talk()
    talk.opens("r", "u")
    error = {"message": "too much", "codexErrorInfo": "contextWindowExceeded", "additionalDetails": "by far"}
    assert talk.completed("u", "failed", error=error) == over(
        "r",
        is_error=True,
        is_overflow=True,
        error="too much\nby far",
        stop_reason="failed",
        kind=ErrorKind.CONTEXT_OVERFLOW,
        raw={"codexErrorInfo": "contextWindowExceeded"},
    )


def test_retried_error_is_a_retry() -> None:
    talk = Talk()
    talk.opens("r", "u")
    assert talk.notice("error", turnId="u", willRetry=True, error={"message": "again"}) == [Retrying(1, "again")]
    assert talk.notice("warning", message="hm") == [Noise()]
    assert talk.completed("u") == over("r")
    talk.opens("s", "v")
    talk.notice("error", turnId="v", willRetry=False, error={"message": "gone"})
    assert talk.completed("v", "failed") == over(
        "s", is_error=True, error="gone", stop_reason="failed", kind=ErrorKind.OTHER, raw={"codexErrorInfo": ""}
    )


@pytest.mark.parametrize(("text", "value"), [('{"a":1}', {"a": 1}), ("words", None), ("[1", None)])
def test_structured_value_is_whole_text(text: str, value: Any) -> None:
    talk = Talk(Setup(schema={"type": "object"}))
    talk.opens("r", "u")
    talk.notice("item/completed", turnId="u", item={"type": "agentMessage", "id": "m", "text": text})
    assert talk.completed("u") == over("r", text=text, structured=value)


def test_oversized_boundary_ends_turn_as_failed() -> None:
    talk = Talk()
    talk.opens("r", "u")
    head = b'{"method":"turn/completed","params":{"threadId":"t-1","turn":{"id":"u","items":[{"text":"'
    lost = over("r", is_error=True, error="frame_too_large", stop_reason=None, kind=LOST)
    assert talk.hears(head, tail=b'"}],"status":"completed"}}}') == lost


@pytest.mark.parametrize("is_started", [True, False])
def test_oversized_unknown_frame_ends_turn_as_failed(is_started: bool) -> None:
    talk = Talk()
    talk.prompt("r")
    talk.reply({"turn": {"id": "u"}})
    if is_started:
        talk.started("u")
    lost = over("r", is_error=True, error="frame_too_large", stop_reason=None, conversation=None, kind=LOST)
    assert talk.hears(b'{"result":{"a":"', tail=b'"}}') == lost
    assert Talk().hears(b'{"result":{"a":"', tail=b'"}}') == [Noise()]


# -- steering --------------------------------------------------------------------------------------------------------
def test_steered_prompt_ends_with_running_turn() -> None:
    talk = Talk()
    talk.opens("r", "u")
    talk.prompt("s")
    assert talk.last("turn/steer")["params"]["expectedTurnId"] == "u"
    assert talk.reply({"turnId": "u"}) == [PromptTaken("s")]
    assert talk.completed("u") == over("r", "s")


def test_steered_prompt_before_turn_is_known_joins_it() -> None:
    talk = Talk()
    talk.prompt("r")
    first = talk.sent[-1]["id"]
    talk.prompt("s")
    assert talk.sent[-1]["method"] == "turn/start"
    assert talk.hears({"id": first, "result": {"turn": {"id": "u"}}}) == [PromptTaken("r")]
    assert talk.reply({"turn": {"id": "u"}}) == [PromptTaken("s")]
    assert talk.started("u") == [opened("r", "s")]
    assert talk.completed("u") == over("r", "s")


def test_late_steered_prompt_is_refused() -> None:
    talk = Talk()
    talk.opens("r", "u")
    talk.prompt("s", "more")
    assert talk.completed("u") == over("r")
    assert talk.fail("no active turn to steer") == [PromptRefused("s")]
    talk.opens("s", "v")
    assert talk.completed("v") == over("s")


def test_steered_prompt_before_turn_is_known_can_be_refused() -> None:
    talk = Talk()
    talk.prompt("r")
    first = talk.sent[-1]["id"]
    talk.prompt("s")
    assert talk.fail("not steerable") == [PromptRefused("s")]
    assert talk.hears({"id": first, "result": {"turn": {"id": "u"}}}) == [PromptTaken("r")]
    assert talk.started("u") == [opened("r")]
    assert talk.completed("u") == over("r")


def test_steered_prompt_taken_by_ended_turn_ends_at_once() -> None:
    talk = Talk()
    talk.opens("r", "u")
    talk.prompt("s")
    assert talk.completed("u") == over("r")
    assert talk.reply({"turnId": "u"}) == over("s")


def test_steered_prompt_can_be_refused_by_turn() -> None:
    talk = Talk()
    talk.opens("r", "u")
    talk.prompt("s")
    assert talk.fail("too long", -32602) == [PromptRefused("s")]
    assert talk.completed("u") == over("r")


# -- interrupts ------------------------------------------------------------------------------------------------------
def test_interrupt_names_its_turn() -> None:
    talk = Talk()
    talk.opens("r", "u")
    assert talk.do(talk.protocol.interrupt("i")) == []
    assert talk.last("turn/interrupt")["params"] == {"threadId": THREAD, "turnId": "u"}
    assert talk.reply({}) == [Replied("i")]
    assert talk.completed("u", "interrupted") == over("r", is_aborted=True, stop_reason="interrupted")


def test_interrupt_waits_for_its_turn_to_start() -> None:
    talk = Talk()
    talk.prompt("r")
    assert talk.do(talk.protocol.interrupt("i")) == []
    talk.reply({"turn": {"id": "u"}})
    assert talk.sent[-1]["method"] == "turn/start"
    assert talk.started("u") == [opened("r")]
    assert talk.sent[-1]["method"] == "turn/interrupt"
    assert talk.reply({}) == [Replied("i")]


def test_interrupt_fails_when_its_turn_never_starts() -> None:
    talk = Talk()
    talk.prompt("r")
    talk.do(talk.protocol.interrupt("i"))
    assert talk.fail("no")[-1] == Replied("i", error="no turn is running")


def test_interrupt_without_turn_fails_at_once() -> None:
    talk = Talk()
    count = len(talk.sent)
    assert talk.do(talk.protocol.interrupt("i")) == [Replied("i", error="no turn is running")]
    assert len(talk.sent) == count


def test_interrupt_fails_when_refused_or_unanswered() -> None:
    talk = Talk()
    talk.opens("r", "u")
    talk.do(talk.protocol.interrupt("i"))
    assert talk.fail("no active turn to interrupt") == [Replied("i", error="no active turn to interrupt (-32600)")]
    talk.do(talk.protocol.interrupt("j"))
    *ended, answered = talk.completed("u")
    assert ended == over("r")
    assert answered == Replied("j", error="the turn ended before the agent answered the request")
    assert talk.reply({}) == [Noise()], "late"


# -- questions -------------------------------------------------------------------------------------------------------
def ask(talk: Talk, method: str, params: Mapping[str, Any], id: jsonrpc.Id = 0) -> Requested:
    (asked,) = talk.hears({"method": method, "id": id, "params": {"threadId": THREAD, "turnId": "u"} | dict(params)})
    assert isinstance(asked, Requested)
    return asked


def answered(talk: Talk, asked: Requested, decision: Decision) -> dict[str, Any]:
    count = len(talk.sent)
    assert talk.do(talk.protocol.answer(asked, decision)) == []
    (frame,) = talk.sent[count:]
    return frame


AMENDED = {"acceptWithExecpolicyAmendment": {"execpolicy_amendment": ["touch"]}}
COMMAND = {
    "itemId": "c",
    "command": "touch a",
    "cwd": "/srv",
    "reason": None,
    "availableDecisions": ["accept", AMENDED, "cancel"],
}
ALLOW, DENY = Decision(allows=True), Decision(allows=False)


def test_command_approval_becomes_question_with_options() -> None:
    asked = ask(Talk(), "item/commandExecution/requestApproval", COMMAND)
    assert (asked.request, asked.wants, asked.tool) == ("0", RequestPurpose.PERMISSION, "commandExecution")
    assert asked.input == {"command": "touch a", "cwd": "/srv"}
    assert asked.details["title"] == "touch a"
    assert [(option["optionId"], option["kind"]) for option in asked.details["options"]] == [
        ("accept", "allow_once"),
        ("acceptWithExecpolicyAmendment", "allow_always"),
        ("decline", "reject_once"),
        ("cancel", "reject_once"),
    ]


@pytest.mark.parametrize(
    ("decision", "word"),
    [
        (ALLOW, "accept"),
        (DENY, "decline"),
        (Decision(allows=False, interrupts=True), "cancel"),
        (Decision(allows=True, remember="session"), "acceptForSession"),
        (Decision(allows=True, remember="user"), AMENDED),
        (Decision(allows=True, option="acceptWithExecpolicyAmendment"), AMENDED),
        (Decision(allows=False, option="cancel"), "cancel"),
        (Decision(allows=True, option="unheard of"), "accept"),
    ],
    ids=repr,
)
def test_answer_has_expected_decision(decision: Decision, word: Any) -> None:
    talk = Talk()
    asked = ask(talk, "item/commandExecution/requestApproval", COMMAND, "id-7")
    assert answered(talk, asked, decision) == {"id": "id-7", "result": {"decision": word}}


def test_file_change_approval_names_its_changes() -> None:
    talk = Talk()
    talk.opens("r", "u")
    changes = [{"path": "a", "kind": {"type": "add"}, "diff": "x"}]
    item = {"type": "fileChange", "id": "f", "changes": changes, "status": "inProgress"}
    assert talk.notice("item/started", turnId="u", item=item) == [ToolBegan(("f",))]
    asked = ask(talk, "item/fileChange/requestApproval", {"itemId": "f"})
    assert asked.input == {"itemId": "f", "changes": changes}
    assert answered(talk, asked, Decision(allows=True, remember="session"))["result"] == {
        "decision": "acceptForSession"
    }


def test_permissions_approval_grants_requested_rights() -> None:
    rights = {"network": {"enabled": True}}
    grants: list[tuple[Decision, dict[str, Any]]] = [
        (ALLOW, {"permissions": rights, "scope": "turn"}),
        (Decision(allows=True, remember="session"), {"permissions": rights, "scope": "session"}),
        (DENY, {"permissions": {}, "scope": "turn"}),
    ]
    for decision, granted in grants:
        talk = Talk()
        asked = ask(talk, "item/permissions/requestApproval", {"permissions": rights, "cwd": "/srv"})
        assert answered(talk, asked, decision)["result"] == granted


@pytest.mark.parametrize("method", ["execCommandApproval", "applyPatchApproval"])
def test_approval_of_older_protocol_is_answered(method: str) -> None:
    talk = Talk()
    asked = ask(talk, method, {"command": ["touch", "a"], "fileChanges": {}})
    assert asked.wants is RequestPurpose.PERMISSION
    assert answered(talk, asked, ALLOW)["result"] == {"decision": "approved"}


def test_elicitation_and_user_input_are_answered() -> None:
    talk = Talk()
    asked = ask(talk, "mcpServer/elicitation/request", {"serverName": "s", "message": "who?"})
    assert (asked.wants, asked.tool) == (RequestPurpose.ELICITATION, "s")
    entered = Decision(allows=True, content={"name": "x"})
    assert answered(talk, asked, entered)["result"] == {"action": "accept", "content": {"name": "x"}}
    asked = ask(talk, "item/tool/requestUserInput", {"questions": [{"id": "q"}]}, 1)
    assert asked.wants is RequestPurpose.ELICITATION
    entered = Decision(allows=True, content={"q": "yes", "p": ["a", "b"]})
    assert answered(talk, asked, entered)["result"] == {
        "answers": {"q": {"answers": ["yes"]}, "p": {"answers": ["a", "b"]}}
    }


@pytest.mark.parametrize(
    ("method", "result"),
    [
        ("item/commandExecution/requestApproval", {"decision": "cancel"}),
        ("item/fileChange/requestApproval", {"decision": "cancel"}),
        ("execCommandApproval", {"decision": "abort"}),
        ("mcpServer/elicitation/request", {"action": "cancel", "content": None}),
        ("item/tool/requestUserInput", {"answers": {}}),
        ("item/permissions/requestApproval", {"permissions": {}, "scope": "turn"}),
    ],
)
def test_question_of_interrupted_turn_is_cancelled(method: str, result: Any) -> None:
    talk = Talk()
    asked = ask(talk, method, {})
    talk.do(talk.protocol.cancel(asked))
    assert talk.sent[-1] == {"id": 0, "result": result}


def test_unknown_request_is_refused() -> None:
    talk = Talk()
    asked = ask(talk, "currentTime/read", {}, "x")
    assert asked.wants is RequestPurpose.UNKNOWN
    talk.do(talk.protocol.refuse(asked, "no"))
    assert talk.sent[-1] == {"id": "x", "error": {"code": -32601, "message": "no"}}


def test_question_is_answered_once() -> None:
    talk = Talk()
    asked = ask(talk, "item/commandExecution/requestApproval", COMMAND)
    assert talk.hears({"method": "item/commandExecution/requestApproval", "id": 0, "params": COMMAND}) == []
    answered(talk, asked, ALLOW)
    count = len(talk.sent)
    talk.do(talk.protocol.answer(asked, DENY))
    talk.do(talk.protocol.cancel(asked))
    assert talk.notice("serverRequest/resolved", requestId=0) == [], "it has its answer"
    assert len(talk.sent) == count


def test_withdrawn_question_wants_no_answer() -> None:
    talk = Talk()
    asked = ask(talk, "item/commandExecution/requestApproval", COMMAND)
    assert talk.notice("serverRequest/resolved", requestId="0") == [], "another one"
    assert talk.notice("serverRequest/resolved", requestId=0) == [RequestWithdrawn("0")]
    count = len(talk.sent)
    talk.do(talk.protocol.answer(asked, ALLOW))
    assert len(talk.sent) == count


def test_request_ids_of_agent_and_client_are_separate() -> None:
    talk = Talk()
    talk.prompt("r")
    id = talk.sent[-1]["id"]
    asked = ask(talk, "item/commandExecution/requestApproval", COMMAND, id)
    assert talk.hears({"id": id, "result": {"turn": {"id": "u"}}}) == [PromptTaken("r")]
    assert answered(talk, asked, ALLOW)["id"] == id


def test_oversized_question_is_declined() -> None:
    talk = Talk()
    head = b'{"method":"item/commandExecution/requestApproval","id":4,"params":{"command":"'
    assert talk.hears(head, tail=b'"}}') == []
    assert talk.sent[-1] == {"id": 4, "result": {"decision": "decline"}}


def test_questions_beyond_maximum_are_refused() -> None:
    talk = Talk()
    for number in range(THEIRS_MAX):
        ask(talk, "item/commandExecution/requestApproval", COMMAND, number)
    assert talk.hears({"method": "x", "id": "one more", "params": {}}) == []
    assert talk.sent[-1]["error"]["code"] == jsonrpc.INTERNAL_ERROR


def test_allow_with_updated_input_is_never_sent() -> None:
    talk = Talk()
    asked = ask(talk, "item/commandExecution/requestApproval", COMMAND)
    with pytest.raises(AssertionError):
        talk.protocol.answer(asked, Decision(allows=True, updated_input={"command": "ls"}))


def test_request_with_invalid_id_is_answered_under_null_id() -> None:
    talk = Talk()
    assert talk.hears({"method": "item/commandExecution/requestApproval", "id": 1.5, "params": {}}) == [Noise()]
    assert (talk.sent[-1]["id"], talk.sent[-1]["error"]["code"]) == (None, jsonrpc.INVALID_REQUEST)


def test_unanswered_requests_to_agent_are_bounded() -> None:
    talk = Talk()
    talk.opens("r", "u")
    count = len(talk.sent)
    for number in range(OURS_MAX):
        talk.prompt(f"r{number}")
    assert talk.do(talk.protocol.prompt("one more", "do")) == [PromptRefused("one more")]
    [reply] = talk.do(talk.protocol.interrupt("stop"))
    assert isinstance(reply, Replied)
    assert reply.error is not None
    assert len(talk.sent) == count + OURS_MAX
    # No pending request was dropped in favour of another.
    assert talk.hears({"id": talk.sent[count]["id"], "result": {"turnId": "u"}}) == [PromptTaken("r0")]


def test_ended_turn_frees_its_unanswered_prompt() -> None:
    """An agent that never answers prompts, but names them in its items, can run any number of turns."""
    talk = Talk()
    for number in range(OURS_MAX + 1):
        ref, turn = f"r{number}", f"u{number}"
        talk.prompt(ref)
        talk.started(turn)
        talk.notice("item/started", turnId=turn, item={"type": "userMessage", "id": "i", "clientId": ref})
        assert talk.completed(turn) == over(ref)


def test_message_of_another_thread_is_an_aside() -> None:
    talk = Talk(is_begun=False)
    line = json.dumps({"method": "item/agentMessage/delta", "params": {"threadId": THREAD, "delta": "x"}}).encode()
    other = line.replace(THREAD.encode(), b"another")
    assert not talk.protocol.is_aside(other), "which one is ours is not known yet"
    talk = Talk()
    assert not talk.protocol.is_aside(line)
    assert talk.protocol.is_aside(other)
    assert not talk.protocol.is_aside(b'{"method":"warning","params":{}}')
    assert not talk.protocol.is_aside(b"garbage")


# -- batches and other messages --------------------------------------------------------------------------------------
def test_batch_is_read_in_order() -> None:
    talk = Talk()
    talk.prompt("r")
    id = talk.sent[-1]["id"]
    batch = [
        {"id": id, "result": {"turn": {"id": "u"}}},
        7,
        {"method": "turn/started", "params": {"threadId": THREAD, "turn": {"id": "u"}}},
        {"method": "item/started", "params": {"item": {"type": "webSearch", "id": "w"}}},
        {"method": "turn/completed", "params": {"threadId": THREAD, "turn": {"id": "u", "status": "completed"}}},
    ]
    assert talk.hears(batch) == [PromptTaken("r"), Noise(), opened("r"), ToolBegan(("w",)), *over("r")]


def test_protocol_state_is_immutable() -> None:
    talk = Talk()
    before = talk.protocol
    talk.opens("r", "u")
    assert isinstance(before, CodexProtocolState)
    assert before.running is None
    assert before == Talk().protocol


def test_argv_has_no_session_options() -> None:
    argv = CODEX.argv(["codex", "app-server"], resume="t", model="m", permission_mode="never", args=["-c", "x=1"])
    assert argv == ["codex", "app-server", "-c", "x=1"]


# -- usage -----------------------------------------------------------------------------------------------------------
def counts(read: int, written: int, cached: int = 0) -> dict[str, int]:
    total = {"inputTokens": read, "cachedInputTokens": cached, "outputTokens": written}
    return {**total, "totalTokens": read + written}


def test_usage_of_turn_is_growth_of_thread_total_and_reported_as_it_grows() -> None:
    """In a resumed thread the total before the turn is unknown: the first report has the last call beside it."""
    talk = Talk()
    reports: list[Meaning] = []
    overs: list[TurnOver] = []
    totals = iter(((110, 11, 50), (130, 13, 60), (200, 20, 60)))
    for turn, calls in (("t1", 2), ("t2", 1)):
        talk.prompt(turn)
        talk.reply({"turn": {"id": turn}})
        talk.started(turn)
        for _ in range(calls):
            usage = {"total": counts(*next(totals)), "last": counts(10, 1, 5)}
            reports += talk.notice("thread/tokenUsage/updated", turnId=turn, tokenUsage=usage)
        told = talk.notice("turn/completed", turn={"id": turn, "status": "completed"})
        overs += [meaning for meaning in told if isinstance(meaning, TurnOver)]
    assert reports == [
        UsageReported("t1", Tokens(5, 1, 5)),
        UsageReported("t1", Tokens(15, 3, 15)),
        UsageReported("t2", Tokens(70, 7)),
    ]
    assert [over.tokens for over in overs] == [Tokens(15, 3, 15), Tokens(70, 7)]


def test_usage_of_another_thread_is_not_reported() -> None:
    talk = Talk()
    talk.prompt("p1")
    talk.reply({"turn": {"id": "t1"}})
    talk.started("t1")
    usage = {"total": counts(9, 9), "last": counts(9, 9)}
    assert talk.notice("thread/tokenUsage/updated", threadId="a subagent's", tokenUsage=usage) == []
