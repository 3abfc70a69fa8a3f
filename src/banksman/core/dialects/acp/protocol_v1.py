"""The words of ACP, version 1: what is said to open a conversation, and what the answers mean.

What is said to the agent is here, in acp_content (prompts) and in acp_answering (what the agent asks); the order in
which it is said is in acp_speech, which also knows the few words of an update and of an answer that a turn is made of.
What agents say is believed as far as it has the right type, and else as if it were not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec

from banksman.core.dialects.dialect import Quirks, Setup, client
from banksman.core.wire.jsonrpc import INVALID_PARAMS, Failure
from banksman.core.wire.partial_json import mapping, mappings, text

VERSION = 1

INITIALIZE = "initialize"
NEW, LOAD, RESUME, FORK = "session/new", "session/load", "session/resume", "session/fork"
PROMPT, CANCEL = "session/prompt", "session/cancel"
SET_MODEL, SET_MODE, SET_OPTION = "session/set_model", "session/set_mode", "session/set_config_option"
# Not a method of anybody's: agents answer a method that they do not know, in its turn. See acp_speech.
FENCE = "_banksman/fence"

AUTH_REQUIRED = -32000
RESOURCE_NOT_FOUND = -32002

CONVERSATION_CHARACTERS_MAX = 256
NAME_CHARACTERS_MAX = 100
# Values of one thing that can be set. One agent has fifty models.
CHOICES_MAX = 1000
# What is told of a long list, or of what an agent says about an error.
SHOWN_MAX = 20
SHOWN_CHARACTERS_MAX = 1000
# Reasons to stop by which nobody has got what was asked for. That a text was cut at a limit is no error: it is there.
STOP_ERRORS = {
    "refusal": "the agent refused to go on",
    "max_turn_requests": "the agent has reached the most requests that it may make in one turn",
}
# How agents say, in words, that they do not know a conversation. Their codes for it are all different.
_UNKNOWN = (
    *("not found", "no such", "does not exist", "doesn't exist", "unknown session", "no rollout"),
    *("no previous session", "invalid session identifier"),
)
# What they call one.
_CONVERSATIONS = ("session", "conversation", "thread")
# And that the conversation does not fit into the model any more.
_OVERFLOWS = ("prompt is too long", "context_length_exceeded", "maximum context length")


# -- who it is -------------------------------------------------------------------------------------------------------
class AcpAgentInfo(msgspec.Struct, frozen=True):
    """What an agent said about itself. `logins`: the ways to log in that it knows, in words."""

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
    can = mapping(result.get("agentCapabilities"))
    sessions = mapping(can.get("sessionCapabilities"))
    prompts = mapping(can.get("promptCapabilities"))
    servers = mapping(can.get("mcpCapabilities"))
    info = mapping(result.get("agentInfo"))
    name = text(info.get("title")) or text(info.get("name"))
    return AcpAgentInfo(
        name=name if name and name.isprintable() and len(name) <= NAME_CHARACTERS_MAX else "the agent",
        loads=can.get("loadSession") is True,
        # A capability is there as an object, which may be empty. Null is as good as missing.
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
    """Why we cannot speak with it at all."""
    version = result.get("protocolVersion")
    if type(version) is int and version == VERSION:
        return None  # True is equal to 1, and is no number of a version.
    return (
        f"{name} speaks version {version!r:.40} of ACP, and Banksman version {VERSION}: use a version of the agent that"
        f" speaks {VERSION}, or of Banksman that speaks the other"
    )


def login_needed(agent: AcpAgentInfo, failure: Failure) -> str:
    """Nobody is logged in by us: a login may open a browser, or ask for a key, and whose account it is to be is for a
    person to say."""
    ways = "; ".join(agent.logins) if agent.logins else "it does not say how"
    return shown(f"{agent.name} wants you to log in first, outside of Banksman ({ways}): {failure_text(failure)}")


def _login(method: dict[str, Any]) -> str:
    name = text(method.get("name")) or text(method.get("id")) or "a login without a name"
    about = text(method.get("description"))
    variables = [text(each.get("name")) or "" for each in mappings(method.get("vars"))]
    said = name if about is None else f"{name}: {about}"
    return f"{said} [{', '.join(variables)}]"[:300] if variables else said[:300]


# -- the conversation ------------------------------------------------------------------------------------------------
def way_in(setup: Setup, agent: AcpAgentInfo) -> str | None:
    """The method by which the conversation is opened; None: the agent cannot go on with one."""
    if setup.conversation is None:
        return NEW
    if setup.forks:
        return FORK if agent.forks else None
    if agent.resumes:
        # Without all that was said before: the log has it.
        return RESUME
    return LOAD if agent.loads else None


def opening(setup: Setup, method: str) -> dict[str, Any]:
    params: dict[str, Any] = {"cwd": setup.cwd, "mcpServers": [_server(server) for server in setup.mcp_servers]}
    if method != NEW:
        params["sessionId"] = setup.conversation
    if setup.system_prompt is not None:
        # An extension, where the agent has it. It is added to the agent's own words, never put in their place.
        params["_meta"] = {"systemPrompt": {"append": setup.system_prompt}}
    return params


def opening_fault(setup: Setup, agent: AcpAgentInfo) -> str | None:
    """What was wished for, and this agent cannot do."""
    for server in setup.mcp_servers:
        kind = server.get("type", "stdio")
        if (kind == "http" and not agent.takes_http) or (kind == "sse" and not agent.takes_sse):
            name = server.get("name")
            return f"{agent.name} takes no MCP server over {kind}: leave {name!r:.60} out, or start it by a command"
    if setup.system_prompt is not None and not agent.takes_instructions:
        return (
            f"{agent.name} takes no system prompt over ACP: open the session without, or use the agent's own settings"
        )
    return None


def _server(server: Mapping[str, Any]) -> dict[str, Any]:
    """The lists must be there, empty or not."""
    needed: dict[str, Any] = {"args": [], "env": []} if "command" in server else {"headers": []}
    return {**needed, **{name: value for name, value in server.items() if value is not None}}


def conversation(value: Any) -> str | None:
    """Its name for the conversation, if it can be one."""
    name = text(value)
    return name if name and len(name) <= CONVERSATION_CHARACTERS_MAX and name.isprintable() else None


def is_unknown(failure: Failure, conversation: str | None) -> bool:
    """Whether this says that there is no such conversation (any more).

    That a parameter is invalid may be said of any of them: a server that is not taken, a folder that is gone. Then the
    conversation is still there, and is thrown away only where the words are about it.
    """
    data = b"" if failure.data is None else msgspec.json.encode(failure.data)[:SHOWN_CHARACTERS_MAX]
    said = f"{failure.message[:SHOWN_CHARACTERS_MAX]} {data.decode(errors='replace')}".lower()
    if failure.code == INVALID_PARAMS:
        names = (*_CONVERSATIONS, *(() if conversation is None else (conversation.lower(),)))
        return any(name in said for name in names)
    return failure.code == RESOURCE_NOT_FOUND or any(words in said for words in _UNKNOWN)


# -- what can be set -------------------------------------------------------------------------------------------------
class OfferedChoice(msgspec.Struct, frozen=True):
    """One thing that can be set: by which method, what it is now, and what it can be: each a value and its name."""

    method: str
    option: str = ""
    current: str | None = None
    values: tuple[tuple[str, str], ...] = ()

    def find(self, wish: str) -> str | None:
        """The value that is meant: by itself, or by the name that a person sees."""
        if any(value == wish for value, _ in self.values):
            return wish
        named = [value for value, name in self.values if name.lower() == wish.lower()]
        return named[0] if len(named) == 1 else None

    def params(self, conversation: str, value: str) -> dict[str, Any]:
        match self.method:
            case "session/set_model":
                return {"sessionId": conversation, "modelId": value}
            case "session/set_mode":
                return {"sessionId": conversation, "modeId": value}
            case _:
                return {"sessionId": conversation, "configId": self.option, "value": value}


class Offers(msgspec.Struct, frozen=True):
    """What can be set, by our word for it: `model`, `permission_mode`."""

    choices: tuple[tuple[str, OfferedChoice], ...] = ()

    def get(self, name: str) -> OfferedChoice | None:
        return dict(self.choices).get(name)

    def now(self, name: str, value: str) -> Offers:
        """With one of them set."""
        return Offers(
            tuple(
                (other, OfferedChoice(choice.method, choice.option, value, choice.values) if other == name else choice)
                for other, choice in self.choices
            )
        )


NO_OFFERS = Offers()


def offers(result: Mapping[str, Any], before: Offers) -> Offers:
    """What a conversation offers, by what was said last; what it does not speak of stays as it was.

    Options are the newer way, and where an agent has both, they are meant to be used.
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
    what = name.replace("_", " ")
    if choice is None:
        return f"{agent.name} offers no {what} to choose: leave it out, or set it by the agent's own arguments"
    known = [value for value, _ in choice.values]
    more = "" if len(known) <= SHOWN_MAX else f" and {len(known) - SHOWN_MAX} more"
    return shown(f"{agent.name} has no {what} {wish!r:.60}: choose among {', '.join(known[:SHOWN_MAX])}{more}")


def _older(method: str, offered: dict[str, Any], listed: str, id: str, current: str) -> OfferedChoice:
    pairs = ((text(each.get(id)), text(each.get("name"))) for each in mappings(offered.get(listed)))
    values = tuple((value, name or value) for value, name in pairs if value is not None)[:CHOICES_MAX]
    return OfferedChoice(method, "", text(offered.get(current)), values)


def _values(options: Any) -> tuple[tuple[str, str], ...]:
    """Of a choice, which may be in groups."""
    found: list[tuple[str, str]] = []
    for option in mappings(options):
        grouped = mappings(option.get("options")) if "value" not in option else [option]
        for each in grouped:
            value = text(each.get("value"))
            if value is not None:
                found.append((value, text(each.get("name")) or value))
    return tuple(found[:CHOICES_MAX])


# -- what went wrong -------------------------------------------------------------------------------------------------
def failure_text(failure: Failure) -> str:
    """What the agent says, with what it says besides: the reason is often only there."""
    data = failure.data
    if isinstance(data, dict):
        members = cast(dict[str, Any], data)
        words = (text(members.get(name)) for name in ("details", "message", "error", "reason"))
        data = next((word for word in words if word), None)
    return shown(f"{failure}: {data}" if isinstance(data, str) and data and data != failure.message else str(failure))


def is_overflow(failure: Failure) -> bool:
    said = failure_text(failure).lower()
    return any(words in said for words in _OVERFLOWS)


def usage_beside(result: Mapping[str, Any]) -> dict[str, Any]:
    """Where some agents say how many tokens it took, for want of a member for it."""
    return mapping(mapping(mapping(result.get("_meta")).get("quota")).get("token_count"))


def spent(update: Mapping[str, Any]) -> float | None:
    """What the conversation has cost until now, where an agent tells."""
    cost = mapping(update.get("cost"))
    amount = cost.get("amount")
    if not isinstance(amount, int | float) or isinstance(amount, bool) or cost.get("currency") != "USD":
        return None
    # An int of JSON may be larger than any float; a cost of that size, or below nothing, is none.
    return float(amount) if 0 <= amount < 1e12 else None


def shown(words: str) -> str:
    return words if len(words) <= SHOWN_CHARACTERS_MAX else f"{words[:SHOWN_CHARACTERS_MAX]}…"
