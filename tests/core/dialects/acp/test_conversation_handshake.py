"""Opening a conversation with an ACP agent, and its settings."""

from __future__ import annotations

from typing import Any

import pytest
from tests.core.dialects.acp.acp_talk import CAPABLE, MODELS, MODES, SESSION, Talk, begun, ready, refused

import banksman
from banksman.core.dialects.acp import protocol_v1
from banksman.core.dialects.dialect import Quirks, Setup
from banksman.core.dialects.meaning import Forgot, Noise, Replied


# -- the handshake ---------------------------------------------------------------------------------------------------
def test_handshake_names_client_and_its_capabilities() -> None:
    talk = Talk()
    talk.take(talk.protocol.handshake("hand"))
    frame = talk.told()
    assert frame["jsonrpc"] == "2.0"
    assert frame["method"] == "initialize"
    assert frame["params"]["protocolVersion"] == 1
    assert frame["params"]["clientInfo"]["version"] == banksman.__version__
    can = frame["params"]["clientCapabilities"]
    assert (can["fs"], can["terminal"]) == ({"readTextFile": True, "writeTextFile": True}, True)
    none = protocol_v1.initialize(Quirks(serves=()))["clientCapabilities"]
    assert (none["fs"], none["terminal"]) == ({"readTextFile": False, "writeTextFile": False}, False)


def test_handshake_opens_new_conversation() -> None:
    servers: tuple[dict[str, Any], ...] = (
        {"name": "files", "command": "/bin/files"},
        {"type": "http", "name": "web", "url": "http://127.0.0.1/", "headers": []},
    )
    talk = begun(Setup(cwd="/srv/ws", mcp_servers=servers))
    assert talk.sent[0]["method"] == "session/new"
    assert talk.sent[0]["params"] == {
        "cwd": "/srv/ws",
        "mcpServers": [{"args": [], "env": [], "name": "files", "command": "/bin/files"}, servers[1]],
    }
    assert talk.protocol.conversation is None
    assert talk.replies({"sessionId": SESSION}) == [Replied("hand")]
    assert talk.protocol.conversation == SESSION


@pytest.mark.parametrize("version", [2, 0, None, "1", True, 1.0])
def test_handshake_refuses_other_protocol_version_and_says_who_must_act(version: Any) -> None:
    talk = Talk()
    talk.take(talk.protocol.handshake("hand"))
    error = refused(talk.replies({"protocolVersion": version, "agentInfo": {"title": "Toy"}}))
    assert "Toy speaks ACP version" in error
    assert "install versions of both" in error
    assert not talk.sent


@pytest.mark.parametrize(
    ("can", "method"),
    [
        ({"loadSession": True, "sessionCapabilities": {"resume": {}}}, "session/resume"),
        ({"loadSession": True, "sessionCapabilities": {"resume": None}}, "session/load"),
        ({"loadSession": True}, "session/load"),
        ({"loadSession": False, "sessionCapabilities": {"resume": {}}}, "session/resume"),
    ],
)
def test_handshake_resumes_by_the_method_agent_offers(can: dict[str, Any], method: str) -> None:
    talk = begun(Setup(cwd="/srv/ws", conversation=SESSION), can=can)
    assert talk.sent[0]["method"] == method
    assert talk.sent[0]["params"] == {"sessionId": SESSION, "cwd": "/srv/ws", "mcpServers": []}


def test_handshake_reports_forgotten_when_agent_cannot_resume() -> None:
    talk = begun(Setup(conversation=SESSION), can={})
    [forgot] = talk.meanings
    assert isinstance(forgot, Forgot)
    assert not talk.sent


def test_history_is_recited_until_fence_is_answered_and_quiet() -> None:
    talk = begun(Setup(conversation=SESSION), can={"loadSession": True}, quirks=Quirks(recites_late=True))
    assert talk.protocol.recites
    assert talk.says("long ago") == []
    assert talk.update("tool_call", toolCallId="old", status="pending") == []
    assert talk.replies({}) == []
    # The agent has answered, and continues to recite the history.
    assert talk.protocol.recites
    assert talk.says("longer ago") == []
    assert talk.protocol.quiet_seconds > 1
    assert talk.fails(-32601) == []
    # The agent may still recite.
    assert talk.protocol.recites
    assert talk.says("not so long ago") == []
    assert 0 < talk.protocol.quiet_seconds < 1
    assert talk.take(talk.protocol.hurry()) == [Replied("hand")]
    assert not talk.protocol.recites
    assert not talk.protocol.quiet_seconds
    assert talk.protocol.conversation == SESSION


def test_history_ends_with_load_reply_without_quirks() -> None:
    talk = begun(Setup(conversation=SESSION), can={"loadSession": True})
    assert talk.protocol.recites
    assert talk.replies({}) == [Replied("hand")]
    assert not talk.protocol.recites
    assert not talk.sent


def test_handshake_does_not_wait_forever_for_fence_reply() -> None:
    talk = begun(Setup(conversation=SESSION, model="big"), can={"loadSession": True}, quirks=Quirks(recites_late=True))
    assert talk.protocol.hurry().protocol is talk.protocol, "the conversation is not there yet"
    talk.replies({"models": MODELS})
    fence = talk.told()
    assert talk.take(talk.protocol.hurry()) == []
    assert not talk.protocol.recites
    assert talk.protocol.hurry().protocol is talk.protocol, "there is nothing more to do without"
    # A late answer of the agent is noise.
    assert talk.hears({"id": fence["id"], "error": {"code": -32601, "message": "no"}}) == [Noise()]
    assert talk.sent[0]["params"] == {"sessionId": SESSION, "modelId": "big"}
    assert talk.replies({}) == [Replied("hand")]


def test_current_state_update_during_recital_is_applied() -> None:
    setup = Setup(conversation=SESSION, permission_mode="code")
    talk = begun(setup, can={"loadSession": True}, quirks=Quirks(recites_late=True))
    talk.replies({"modes": {**MODES, "currentModeId": "code"}})
    assert talk.update("current_mode_update", currentModeId="ask") == []
    assert talk.fails(-32601) == []
    assert talk.take(talk.protocol.hurry()) == []
    assert talk.told()["params"] == {"sessionId": SESSION, "modeId": "code"}


def test_resume_without_replay_recites_nothing() -> None:
    talk = begun(Setup(conversation=SESSION))
    assert not talk.protocol.recites
    assert talk.replies({}) == [Replied("hand")]
    assert talk.protocol.conversation == SESSION


@pytest.mark.parametrize(
    ("code", "message", "data"),
    [
        (-32002, "Resource not found", None),
        (-32602, "Invalid params", "Session not found: s-1"),
        (-32602, "Invalid params", {"session_id": "not found"}),
        (-32602, "unknown conversation", None),
        (-32602, "Invalid params", [SESSION]),
        (-32603, "Internal error", {"details": "Session not found: s-1"}),
        (-32603, "Internal error", "no rollout found for thread"),
        (-32600, "the session does not exist", None),
    ],
)
@pytest.mark.parametrize("can", [CAPABLE, {"loadSession": True}], ids=["resume", "load"])
def test_unknown_conversation_is_forgotten(code: int, message: str, data: Any, can: dict[str, Any]) -> None:
    talk = begun(Setup(conversation=SESSION), can=can)
    [forgot] = talk.fails(code, message, data)
    assert isinstance(forgot, Forgot)
    assert message in forgot.error
    assert not talk.protocol.recites


def test_transient_resume_error_is_not_forgotten() -> None:
    talk = begun(Setup(conversation=SESSION))
    for data in (None, {"details": "mcpServers.0: expected a url"}, ["cwd does not exist"]):
        assert "Invalid" in refused(begun(Setup(conversation=SESSION)).fails(-32602, "Invalid params", data))
    assert "disk" in refused(talk.fails(-32603, "Internal error", {"details": "the disk is full"}))


def test_handshake_loads_when_agent_cannot_resume_as_announced() -> None:
    talk = begun(Setup(conversation=SESSION))
    assert talk.fails(-32601) == []
    assert talk.sent[0]["method"] == "session/load"
    assert talk.fails(-32601, "Method not found") != []


def test_fork_gets_its_own_conversation_name() -> None:
    setup = Setup(conversation="s-0", forks=True)
    talk = begun(setup)
    assert talk.sent[0]["method"] == "session/fork"
    assert talk.sent[0]["params"]["sessionId"] == "s-0"
    assert talk.replies({"sessionId": SESSION}) == [Replied("hand")]
    assert talk.protocol.conversation == SESSION
    # The old conversation id is not valid for the fork.
    assert "no id for its new conversation" in refused(begun(setup).replies({}))
    assert "does not support forks" in refused(begun(setup, can={"loadSession": True}).meanings)


def test_login_requirement_is_reported_with_methods_and_never_performed() -> None:
    ways = [
        {"id": "google", "name": "Log in with Google", "description": "Opens a browser"},
        {"id": "key", "type": "env_var", "name": "Use a key", "vars": [{"name": "TOY_API_KEY"}]},
    ]
    talk = begun(authMethods=ways)
    error = refused(talk.fails(-32000, "Authentication required"))
    for word in ("requires a login", "Log in with Google: Opens a browser", "TOY_API_KEY", "Authentication required"):
        assert word in error
    assert not talk.sent
    # A login requirement is not reported as a lost conversation either.
    assert "requires a login" in refused(begun(Setup(conversation=SESSION)).fails(-32000))


@pytest.mark.parametrize(
    ("setup", "words"),
    [
        (Setup(mcp_servers=({"type": "http", "name": "web", "url": "u"},)), "over http: leave 'web' out"),
        (Setup(mcp_servers=({"type": "sse", "name": "web", "url": "u"},)), "over sse"),
        (Setup(system_prompt="be brief"), "does not support a system prompt"),
    ],
)
def test_handshake_refuses_option_that_agent_lacks(setup: Setup, words: str) -> None:
    talk = begun(setup, can={"mcpCapabilities": {}})
    assert words in refused(talk.meanings)
    assert not talk.sent
    assert begun(setup).sent[0]["method"] == "session/new"


def test_system_prompt_is_appended() -> None:
    talk = begun(Setup(system_prompt="be brief"))
    assert talk.told()["params"]["_meta"] == {"systemPrompt": {"append": "be brief"}}


@pytest.mark.parametrize("name", [None, "", "x" * 257, "a\nb", 7])
def test_conversation_without_usable_name_is_refused(name: Any) -> None:
    assert "no id for its new conversation" in refused(begun().replies({"sessionId": name}))


def test_failed_step_ends_handshake() -> None:
    talk = Talk()
    talk.take(talk.protocol.handshake("hand"))
    assert refused(talk.fails(-32603, "broken")) == "broken (-32603)"
    assert refused(begun().fails(-32603, "broken")) == "broken (-32603)"


# -- settings --------------------------------------------------------------------------------------------------------
OPTIONS = [
    {"id": "m", "category": "model", "currentValue": "small", "options": [{"value": "small"}, {"value": "big"}]},
    {
        "id": "how",
        "category": "mode",
        "currentValue": "ask",
        "options": [{"group": "g", "options": [{"value": "ask", "name": "Ask"}, {"value": "code", "name": "Code"}]}],
    },
    {"id": "effort", "category": "thought_level", "currentValue": "low", "options": [{"value": "low"}]},
]


@pytest.mark.parametrize(
    ("offered", "model", "mode"),
    [
        (
            {"models": MODELS, "modes": MODES},
            ("session/set_model", {"modelId": "big"}),
            ("session/set_mode", {"modeId": "code"}),
        ),
        (
            {"models": MODELS, "modes": MODES, "configOptions": OPTIONS},
            ("session/set_config_option", {"configId": "m", "value": "big"}),
            ("session/set_config_option", {"configId": "how", "value": "code"}),
        ),
    ],
    ids=["older", "options"],
)
def test_handshake_sets_model_and_mode_in_sequence(offered: Any, model: Any, mode: Any) -> None:
    talk = begun(Setup(model="big", permission_mode="Code"))
    assert talk.replies({"sessionId": SESSION, **offered}) == []
    for is_last, (method, params) in enumerate((model, mode)):
        assert talk.sent[0]["method"] == method
        assert talk.sent[0]["params"] == {"sessionId": SESSION, **params}
        assert talk.replies(None) == ([Replied("hand")] if is_last else [])


def test_handshake_skips_setting_that_already_holds() -> None:
    talk = begun(Setup(model="small", permission_mode="ask"))
    assert talk.replies({"sessionId": SESSION, "models": MODELS, "modes": MODES}) == [Replied("hand")]
    assert not talk.sent


def test_handshake_lists_offers_when_wish_is_not_offered() -> None:
    many = {"currentModelId": "m0", "availableModels": [{"modelId": f"m{number}"} for number in range(50)]}
    error = refused(begun(Setup(model="huge")).replies({"sessionId": SESSION, "models": many}))
    assert "no model 'huge'" in error
    assert "m0, m1" in error
    assert "30 more" in error
    assert "offers no choice of model" in refused(begun(Setup(model="huge")).replies({"sessionId": SESSION}))


def test_handshake_fails_when_agent_refuses_setting() -> None:
    talk = begun(Setup(model="big"))
    talk.replies({"sessionId": SESSION, "models": MODELS})
    assert refused(talk.fails(-32603, "not today")) == "not today (-32603)"


def test_setting_is_answered_after_agent_reply() -> None:
    talk = ready(models=MODELS, modes=MODES)
    assert talk.take(talk.protocol.setting("set-1", "model", "big")) == []
    assert talk.sent[0]["params"] == {"sessionId": SESSION, "modelId": "big"}
    assert talk.replies({}) == [Replied("set-1")]
    # The setting has that value already.
    assert talk.take(talk.protocol.setting("set-2", "model", "big")) == [Replied("set-2")]
    assert not talk.sent
    talk.take(talk.protocol.setting("set-3", "permission_mode", "code"))
    assert talk.fails(-1, "no") == [Replied("set-3", error="no (-1)")]


def test_setting_that_is_not_offered_is_refused_at_once() -> None:
    talk = ready(modes=MODES)
    [reply] = talk.take(talk.protocol.setting("set-1", "permission_mode", "yolo"))
    assert isinstance(reply, Replied)
    assert reply.request == "set-1"
    assert "ask, code" in (reply.error or "")
    assert not talk.sent


def test_setting_knows_changes_made_by_agent() -> None:
    talk = ready(modes=MODES)
    assert talk.update("current_mode_update", currentModeId="code") == []
    assert talk.take(talk.protocol.setting("a", "permission_mode", "code")) == [Replied("a")]
    assert talk.update("config_option_update", configOptions=OPTIONS) == []
    talk.take(talk.protocol.setting("b", "model", "big"))
    assert talk.told()["method"] == "session/set_config_option"


def test_agent_offers_and_name_are_bounded() -> None:
    many = {"currentModelId": "m0", "availableModels": [{"modelId": f"m{number}"} for number in range(5000)]}
    choice = protocol_v1.offers({"models": many}, protocol_v1.NO_OFFERS).get("model")
    assert choice is not None
    assert len(choice.values) == protocol_v1.CHOICES_MAX
    options = [{"id": "m", "category": "model", "options": [{"value": f"m{number}"} for number in range(5000)]}]
    choice = protocol_v1.offers({"configOptions": options}, protocol_v1.NO_OFFERS).get("model")
    assert choice is not None
    assert len(choice.values) == protocol_v1.CHOICES_MAX
    for name in ("x" * (protocol_v1.NAME_CHARACTERS_MAX + 1), "red \x1b[31m", "", 5):
        assert protocol_v1.agent({"agentInfo": {"name": name}}).name == "the agent"
    assert protocol_v1.agent({"agentInfo": {"name": "x" * protocol_v1.NAME_CHARACTERS_MAX}}).name.startswith("xxx")
