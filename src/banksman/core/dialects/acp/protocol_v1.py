"""Build and read the fields of ACP version 1: opening, capabilities, settings, errors, costs.

The functions also choose the method that opens a conversation, check whether the agent can fulfil a
setup, and recognise an unknown or too long conversation by the agent's error text. `writer.py`
builds the prompts, and `client_requests.py` answers the agent's requests. `conversation.py` decides
the order of messages, and what an update or a reply means for the turn. A value from an agent
counts only if it has the right type. Otherwise the field is treated as missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec

from banksman.core.dialects.dialect import Quirks, Setup, client
from banksman.core.wire.elided_text import cut
from banksman.core.wire.jsonrpc import INVALID_PARAMS, Failure
from banksman.core.wire.partial_json import mapping, mappings, number, text

VERSION = 1

INITIALIZE = "initialize"
NEW, LOAD, RESUME, FORK = "session/new", "session/load", "session/resume", "session/fork"
PROMPT, CANCEL = "session/prompt", "session/cancel"
SET_MODEL, SET_MODE, SET_OPTION = (
    "session/set_model",
    "session/set_mode",
    "session/set_config_option",
)
# A method that no agent implements. An agent answers an unknown method in order, so the answer
# marks a point in its output. See conversation.py.
FENCE = "_banksman/fence"

AUTH_REQUIRED = -32000
RESOURCE_NOT_FOUND = -32002

CONVERSATION_CHARACTERS_MAX = 256
NAME_CHARACTERS_MAX = 100
# Maximum number of values for one setting. One agent has fifty models.
CHOICES_MAX = 1000
# Limits of an error message: items of a long list, and characters of an agent's text.
SHOWN_MAX = 20
SHOWN_CHARACTERS_MAX = 1000
# Stop reasons that leave the request unfulfilled. A text cut at a token limit is no error: the text
# exists.
STOP_ERRORS = {
    "refusal": "the agent refused to continue",
    "max_turn_requests": "the agent reached its limit of model requests in one turn",
}
# Phrases by which agents report an unknown conversation. Their error codes all differ.
_UNKNOWN = (
    *("not found", "no such", "does not exist", "doesn't exist", "unknown session", "no rollout"),
    *("no previous session", "invalid session identifier"),
)
# The agents' words for a conversation.
_CONVERSATIONS = ("session", "conversation", "thread")
# Phrases by which agents report that the conversation exceeds the model's context.
_OVERFLOWS = ("prompt is too long", "context_length_exceeded", "maximum context length")


# -- capabilities --------------------------------------------------------------------------------
class AcpAgentInfo(msgspec.Struct, frozen=True):
    """Capabilities that an agent announced. `logins`: its login methods, as text."""

    name: str = "the agent"
    loads: bool = False
    resumes: bool = False
    forks: bool = False
    takes_image: bool = False
    takes_audio: bool = False
    takes_resource: bool = False
    takes_http: bool = False
    takes_sse: bool = False
    takes_instructions: bool = False
    logins: tuple[str, ...] = ()


UNKNOWN_AGENT = AcpAgentInfo()


def initialize(quirks: Quirks) -> dict[str, Any]:
    """Build the parameters of `initialize`."""
    files = "fs" in quirks.serves
    return {
        "protocolVersion": VERSION,
        "clientInfo": client(),
        "clientCapabilities": {
            "fs": {"readTextFile": files, "writeTextFile": files},
            "terminal": "terminal" in quirks.serves,
            "elicitation": {"form": {}},
        },
    }


def agent(result: Mapping[str, Any]) -> AcpAgentInfo:
    """Read the agent's name and capabilities from the result of `initialize`."""
    can = mapping(result.get("agentCapabilities"))
    sessions = mapping(can.get("sessionCapabilities"))
    prompts = mapping(can.get("promptCapabilities"))
    servers = mapping(can.get("mcpCapabilities"))
    info = mapping(result.get("agentInfo"))
    name = text(info.get("title")) or text(info.get("name"))
    return AcpAgentInfo(
        name=name
        if name and name.isprintable() and len(name) <= NAME_CHARACTERS_MAX
        else "the agent",
        loads=can.get("loadSession") is True,
        # A capability is present as an object, which may be empty. Null counts as missing.
        resumes=isinstance(sessions.get("resume"), dict),
        forks=isinstance(sessions.get("fork"), dict),
        takes_image=prompts.get("image") is True,
        takes_audio=prompts.get("audio") is True,
        takes_resource=prompts.get("embeddedContext") is True,
        takes_http=servers.get("http") is True,
        takes_sse=servers.get("sse") is True,
        takes_instructions=isinstance(sessions.get("systemPrompt"), dict),
        logins=tuple(_login(method) for method in mappings(result.get("authMethods"))[:SHOWN_MAX]),
    )


def version_fault(result: Mapping[str, Any], name: str) -> str | None:
    """Return why Banksman cannot talk to this agent version, or None."""
    version = result.get("protocolVersion")
    if type(version) is int and version == VERSION:
        return None  # True equals 1 in Python, but is no version number.
    return (
        f"{name} speaks ACP version {version!r:.40}, and Banksman speaks version {VERSION}:"
        " install versions of both that speak the same"
    )


def login_needed(agent: AcpAgentInfo, failure: Failure) -> str:
    """Return the error for an agent that requires a login.

    Banksman never logs a user in. A login may open a browser or ask for a key, and a person must
    choose the account.
    """
    ways = "; ".join(agent.logins) if agent.logins else "the agent does not say how"
    reason = failure_text(failure)
    return shown(f"{agent.name} requires a login outside Banksman ({ways}): {reason}")


def _login(method: dict[str, Any]) -> str:
    name = text(method.get("name")) or text(method.get("id")) or "unnamed login"
    about = text(method.get("description"))
    variables = [text(each.get("name")) or "" for each in mappings(method.get("vars"))]
    said = name if about is None else f"{name}: {about}"
    return f"{said} [{', '.join(variables)}]"[:300] if variables else said[:300]


# -- conversation --------------------------------------------------------------------------------
def way_in(setup: Setup, agent: AcpAgentInfo) -> str | None:
    """Return the method that opens the conversation, or None if the agent cannot resume one."""
    if setup.conversation is None:
        return NEW
    if setup.forks:
        return FORK if agent.forks else None
    if agent.resumes:
        # Resume does not replay the history, and the log already has it.
        return RESUME
    return LOAD if agent.loads else None


def opening(setup: Setup, method: str) -> dict[str, Any]:
    """Build the parameters of the request that opens the conversation."""
    params: dict[str, Any] = {
        "cwd": setup.cwd,
        "mcpServers": [_server(server) for server in setup.mcp_servers],
    }
    if method != NEW:
        params["sessionId"] = setup.conversation
    if setup.system_prompt is not None:
        # An ACP extension that some agents support. The text is appended to the agent's system
        # prompt and never replaces it.
        params["_meta"] = {"systemPrompt": {"append": setup.system_prompt}}
    return params


def opening_fault(setup: Setup, agent: AcpAgentInfo) -> str | None:
    """Return why the agent cannot fulfil the setup, or None."""
    for server in setup.mcp_servers:
        kind = server.get("type", "stdio")
        if (kind == "http" and not agent.takes_http) or (kind == "sse" and not agent.takes_sse):
            way_out = f"leave {server.get('name')!r:.60} out, or start it with a command"
            return f"{agent.name} does not support MCP servers over {kind}: {way_out}"
    if setup.system_prompt is not None and not agent.takes_instructions:
        return (
            f"{agent.name} does not support a system prompt over ACP:"
            " open the session without one, or use the agent's settings"
        )
    return None


def _server(server: Mapping[str, Any]) -> dict[str, Any]:
    """Return an MCP server for the wire. ACP requires the lists, even when they are empty."""
    needed: dict[str, Any] = {"args": [], "env": []} if "command" in server else {"headers": []}
    return {**needed, **{name: value for name, value in server.items() if value is not None}}


def conversation(value: Any) -> str | None:
    """Return a conversation identifier from the agent, or None if the value is not usable."""
    name = text(value)
    return (
        name if name and len(name) <= CONVERSATION_CHARACTERS_MAX and name.isprintable() else None
    )


def is_unknown(failure: Failure, conversation: str | None) -> bool:
    """Return whether this failure says that the agent does not know the conversation.

    "Invalid params" may concern any parameter, such as an unsupported server or a missing folder.
    In that case the conversation still exists. It is abandoned only if the error text mentions it.
    """
    data = b"" if failure.data is None else msgspec.json.encode(failure.data)[:SHOWN_CHARACTERS_MAX]
    said = f"{failure.message[:SHOWN_CHARACTERS_MAX]} {data.decode(errors='replace')}".lower()
    if failure.code == INVALID_PARAMS:
        names = (*_CONVERSATIONS, *(() if conversation is None else (conversation.lower(),)))
        return any(name in said for name in names)
    return failure.code == RESOURCE_NOT_FOUND or any(words in said for words in _UNKNOWN)


# -- settings ------------------------------------------------------------------------------------
class OfferedChoice(msgspec.Struct, frozen=True):
    """One setting of the agent.

    `method`: the method that changes it. `option`: its id, for a config option. `current`: its
    present value. `values`: the allowed values, each with its display name.
    """

    method: str
    option: str = ""
    current: str | None = None
    values: tuple[tuple[str, str], ...] = ()

    def find(self, wish: str) -> str | None:
        """Return the value for a wish, which is either a value or its display name."""
        if any(value == wish for value, _ in self.values):
            return wish
        named = [value for value, name in self.values if name.lower() == wish.lower()]
        return named[0] if len(named) == 1 else None

    def params(self, conversation: str, value: str) -> dict[str, Any]:
        """Build the parameters of the request that sets this value."""
        match self.method:
            case "session/set_model":
                return {"sessionId": conversation, "modelId": value}
            case "session/set_mode":
                return {"sessionId": conversation, "modeId": value}
            case _:
                return {"sessionId": conversation, "configId": self.option, "value": value}


class Offers(msgspec.Struct, frozen=True):
    """Settings that the agent offers, by Banksman's names: `model`, `permission_mode`."""

    choices: tuple[tuple[str, OfferedChoice], ...] = ()

    def get(self, name: str) -> OfferedChoice | None:
        return dict(self.choices).get(name)

    def now(self, name: str, value: str) -> Offers:
        """Return the offers with one setting changed."""
        return Offers(
            tuple(
                (
                    other,
                    OfferedChoice(choice.method, choice.option, value, choice.values)
                    if other == name
                    else choice,
                )
                for other, choice in self.choices
            )
        )


NO_OFFERS = Offers()


def offers(result: Mapping[str, Any], before: Offers) -> Offers:
    """Merge the offers of a result into the offers known before.

    A setting that the result does not mention keeps its state. Config options are the newer
    mechanism, so they win over `models` and `modes` where an agent sends both.
    """
    found = dict(before.choices)
    models, modes = mapping(result.get("models")), mapping(result.get("modes"))
    if models:
        found["model"] = _older(SET_MODEL, models, "availableModels", "modelId", "currentModelId")
    if modes:
        found["permission_mode"] = _older(SET_MODE, modes, "availableModes", "id", "currentModeId")
    for option in mappings(result.get("configOptions")):
        name = {"model": "model", "mode": "permission_mode"}.get(str(option.get("category")))
        id = text(option.get("id"))
        if name is not None and id is not None:
            found[name] = OfferedChoice(
                SET_OPTION, id, text(option.get("currentValue")), _values(option.get("options"))
            )
    return Offers(tuple(found.items()))


def not_offered(agent: AcpAgentInfo, name: str, wish: str, choice: OfferedChoice | None) -> str:
    """Return the error for a setting or a value that the agent does not offer."""
    what = name.replace("_", " ")
    if choice is None:
        way_out = "leave it out, or set it with the agent's arguments"
        return f"{agent.name} offers no choice of {what}: {way_out}"
    known = [value for value, _ in choice.values]
    more = "" if len(known) <= SHOWN_MAX else f" and {len(known) - SHOWN_MAX} more"
    return shown(
        f"{agent.name} has no {what} {wish!r:.60}: "
        f"choose among {', '.join(known[:SHOWN_MAX])}{more}"
    )


def _older(
    method: str, offered: dict[str, Any], listed: str, id: str, current: str
) -> OfferedChoice:
    pairs = ((text(each.get(id)), text(each.get("name"))) for each in mappings(offered.get(listed)))
    values = tuple((value, name or value) for value, name in pairs if value is not None)[
        :CHOICES_MAX
    ]
    return OfferedChoice(method, "", text(offered.get(current)), values)


def _values(options: Any) -> tuple[tuple[str, str], ...]:
    """Return the values of a config option, which may be grouped."""
    found: list[tuple[str, str]] = []
    for option in mappings(options):
        grouped = mappings(option.get("options")) if "value" not in option else [option]
        for each in grouped:
            value = text(each.get("value"))
            if value is not None:
                found.append((value, text(each.get("name")) or value))
    return tuple(found[:CHOICES_MAX])


# -- failures and costs --------------------------------------------------------------------------
def failure_text(failure: Failure) -> str:
    """Return the error text of a failure with its extra data, which often holds the only reason."""
    data = failure.data
    if isinstance(data, dict):
        members = cast(dict[str, Any], data)
        words = (text(members.get(name)) for name in ("details", "message", "error", "reason"))
        data = next((word for word in words if word), None)
    return shown(
        f"{failure}: {data}"
        if isinstance(data, str) and data and data != failure.message
        else str(failure)
    )


def is_overflow(failure: Failure) -> bool:
    """Return whether a failure means that the conversation exceeds the model's context."""
    said = failure_text(failure).lower()
    return any(words in said for words in _OVERFLOWS)


def usage_beside(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the token counts that some agents put into `_meta`, for want of a standard field."""
    return mapping(mapping(mapping(result.get("_meta")).get("quota")).get("token_count"))


def spent(update: Mapping[str, Any]) -> float | None:
    """Return the cost of the conversation until now in US dollars, if the agent reports it."""
    cost = mapping(update.get("cost"))
    amount = number(cost.get("amount"))
    return None if amount is None or cost.get("currency") != "USD" else amount


def shown(words: str) -> str:
    """Truncate a text for display."""
    return cut(words, SHOWN_CHARACTERS_MAX)
