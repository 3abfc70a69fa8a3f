"""Frames to Claude Code: prompts, control messages, command-line values and JSON schemas.

Each frame is one line. A user's value is always inside a JSON string or in the same word as its
flag. No value can become a frame or a flag. `Claude.argv` in `__init__.py` builds the whole command
line.

**Schemas.** Claude Code silently drops a schema that it does not accept, and works without one. Its
validator is strict and implements draft 7. It refuses a whole schema for a keyword of another
draft, an unknown word, a duplicate choice, or a pattern that JavaScript cannot parse. Therefore
`told` keeps only the keywords that are known to work (tested with 2.1.325). Banksman validates the
answer against the caller's full schema in any case. A dropped keyword only means that the model
does not see it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from banksman.core.dialects.dialect import Prompt, Setup
from banksman.core.json_schema.json_value import canonical
from banksman.core.wire.jsonrpc import encode
from banksman.errors import UsageError

_TOLD = frozenset(
    (
        *(
            "type",
            "const",
            "enum",
            "title",
            "description",
            "default",
            "format",
            "$ref",
            "$defs",
            "definitions",
        ),
        *(
            "properties",
            "required",
            "additionalProperties",
            "patternProperties",
            "minProperties",
            "maxProperties",
        ),
        *(
            "items",
            "additionalItems",
            "minItems",
            "maxItems",
            "uniqueItems",
            "minLength",
            "maxLength",
            "pattern",
        ),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("anyOf", "oneOf", "allOf", "not", "if", "then", "else"),
    )
)
_TEXTS = frozenset(("title", "description", "format"))
# These keywords hold schemas by name, and the names are no keywords.
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions"))
# These keywords hold plain values, which are never schemas, even if they look like one.
_VALUES = frozenset(("const", "default"))
# Lists without duplicates.
_CHOICES = frozenset(("enum", "required", "type"))
# Patterns with the same meaning in Python and JavaScript: characters, classes and groups, each with
# at most one quantifier. This expression is unambiguous, so matching it never backtracks. A
# possessive quantifier would have a bug before Python 3.11.5.
_ESCAPED = r"\\[dDwWsSnrtfv/^$.*+?()\[\]{}|\\]"
_ATOM = rf"[^\\()\[\]{{}}*+?|^$]|{_ESCAPED}|\[\^?(?:[^\\\[\]]|{_ESCAPED}|\\-)+\]|\)"
_QUANTIFIED = rf"(?:{_ATOM})(?:(?:[*+?]|\{{\d+(?:,\d*)?\}})\??)?"
_PLAIN_PATTERN = re.compile(
    rf"(?:{_QUANTIFIED}|\((?:\?:)?(?![*+?])|[|^$](?![*+?{{])|\\[bB](?![*+?{{]))*"
)
# The hook before each tool call that applies the rules. The agent requests permission only where
# its own settings have not decided already, so permission requests alone are not enough.
RULES_HOOK = "banksman-rules"
# Hooks that the agent calls before it acts. A hook that fails, times out or is refused must block
# the action. Without `onFailure` the agent continues as if the hook had not objected. Versions that
# do not know the member ignore it.
_GUARDS = frozenset(("PreToolUse", "PermissionRequest"))
_GUARD = {"onFailure": "block"}
_SETTINGS = {"model": ("set_model", "model"), "permission_mode": ("set_permission_mode", "mode")}


def told(schema: Any) -> Any:
    """Reduce a schema to the keywords that Claude Code accepts."""
    if isinstance(schema, list | tuple):
        return [told(item) for item in cast(Sequence[Any], schema)]
    if not isinstance(schema, Mapping):
        return schema
    members = _as_draft_7(cast(Mapping[str, Any], schema))
    kept: dict[str, Any] = {}
    for keyword, given in members.items():
        if keyword in _VALUES:
            kept[keyword] = given
        elif keyword in _CHOICES and isinstance(given, list | tuple):
            kept[keyword] = list(
                {canonical(choice): choice for choice in cast(Sequence[Any], given)}.values()
            )
        elif keyword in _NAMED:
            kept[keyword] = {
                name: told(each) for name, each in cast(Mapping[str, Any], given).items()
            }
        else:
            kept[keyword] = told(given)
    return kept


def _as_draft_7(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the accepted keywords of one schema, in the form of draft 7."""
    members = dict(schema)
    if "prefixItems" in members:
        rest = members.pop("items", True)
        members |= {"items": members.pop("prefixItems"), "additionalItems": rest}
    untold = {keyword for keyword in members if keyword not in _TOLD}
    untold |= {keyword for keyword in _TEXTS if not isinstance(members.get(keyword, ""), str)}
    if "if" not in members or not members.keys() & {"then", "else"}:
        untold |= {"if", "then", "else"}
    if not is_plain_pattern(members.get("pattern", "")):
        untold.add("pattern")
    patterns: Mapping[str, Any] = members.get("patternProperties") or {}
    named: Mapping[str, Any] = members.get("properties") or {}
    are_apart = all(
        is_plain_pattern(each) and not any(re.search(each, name) for name in named)
        for each in patterns
    )
    if not are_apart:
        # Both keywords go together: if a pattern were dropped, `additionalProperties` would apply
        # to the members that the pattern covers.
        untold |= {"patternProperties", "additionalProperties"}
    return {keyword: given for keyword, given in members.items() if keyword not in untold}


def is_plain_pattern(pattern: Any) -> bool:
    """Return whether a pattern is safe to send to the agent."""
    return isinstance(pattern, str) and _PLAIN_PATTERN.fullmatch(pattern) is not None


def control_request(request: str, body: dict[str, Any]) -> bytes:
    """Write a request to the agent."""
    return encode({"type": "control_request", "request_id": request, "request": body})


def control_response(request: str, body: Mapping[str, Any]) -> bytes:
    """Write a successful answer to a request of the agent."""
    response = {"subtype": "success", "request_id": request, "response": dict(body)}
    return encode({"type": "control_response", "response": response})


def control_error(request: str, error: str) -> bytes:
    """Write an error answer to a request of the agent."""
    response = {"subtype": "error", "request_id": request, "error": error}
    return encode({"type": "control_response", "response": response})


def initialize(request: str, setup: Setup) -> bytes:
    """Write the handshake: hooks, in-process MCP servers and the schema."""
    rules = {"matcher": None, "hookCallbackIds": [RULES_HOOK], **_GUARD}
    hooks: dict[str, list[dict[str, Any]]] = {"PreToolUse": [rules]}
    for hook in setup.hooks:
        entry = {"matcher": hook.matcher, "hookCallbackIds": [hook.id], "timeout": hook.seconds}
        if hook.event in _GUARDS:
            entry |= _GUARD
        hooks.setdefault(hook.event, []).append(entry)
    body: dict[str, Any] = {"subtype": "initialize", "hooks": hooks}
    if setup.servers:
        body["sdkMcpServers"] = list(setup.servers)
    if setup.schema is not None:
        body["jsonSchema"] = told(setup.schema)
    return control_request(request, body)


def user(ref: str, prompt: Prompt) -> bytes:
    """Write a prompt."""
    return encode(
        {
            "type": "user",
            "message": {"role": "user", "content": _content(prompt)},
            "parent_tool_use_id": None,
            # The process knows its conversation. This name is only a placeholder.
            "session_id": "default",
            "uuid": ref,
        }
    )


def setting(request: str, name: str, value: str) -> bytes:
    """Write a change of the model or the permission mode."""
    subtype, member = _SETTINGS[name]
    return control_request(request, {"subtype": subtype, member: value})


def mcp_config(servers: Sequence[Mapping[str, Any]]) -> str:
    """Return the content of the file for `--mcp-config`, from servers as ACP describes them."""
    return encode({"mcpServers": dict(_server(server) for server in servers)}).decode()


def _server(server: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Convert an MCP server: ACP has a list of named values where Claude has an object."""
    name = server["name"]
    pairs = {
        member: {pair["name"]: pair["value"] for pair in server.get(member, ())}
        for member in ("env", "headers")
    }
    if "command" in server:
        return name, {
            "command": server["command"],
            "args": list(server.get("args", ())),
            "env": pairs["env"],
        }
    return name, {"type": server["type"], "url": server["url"], "headers": pairs["headers"]}


def flag(name: str, value: Any) -> str:
    """Return a command-line flag and its value in one word."""
    if not isinstance(value, str) or not value:
        hint = "use text that is not empty, or None"
        raise UsageError(f"--{name} cannot be {value!r:.60}", hint=hint)
    return f"--{name}={value}"


def _content(prompt: Any) -> str | list[dict[str, Any]]:
    """Check a prompt and convert it to text or content blocks."""
    hint = "use text, or a list of ACP content blocks"
    if isinstance(prompt, str):
        # The model's API accepts no empty text: the agent would fail or wait.
        if not prompt:
            raise UsageError("the prompt is empty", hint=hint)
        return prompt
    if isinstance(prompt, bytes | bytearray | Mapping) or not isinstance(prompt, Sequence):
        raise UsageError(f"a prompt cannot be {prompt!r:.60}", hint=hint)
    blocks = [_block(block) for block in cast(Sequence[Any], prompt)]
    if not blocks:
        raise UsageError("the prompt has no blocks", hint=hint)
    return blocks


def _block(block: Any) -> dict[str, Any]:
    if not isinstance(block, Mapping):
        hint = 'use a mapping with a "type"'
        raise UsageError(f"a content block cannot be {block!r:.60}", hint=hint)
    members = cast(Mapping[str, Any], block)
    match members.get("type"):
        case "text":
            return {"type": "text", "text": _member(members, "text")}
        case "image":
            media_type, data = _member(members, "mimeType"), _member(members, "data")
            return {
                "type": "image",
                "source": {"type": "base64", "media_type": media_type, "data": data},
            }
        case "resource_link":
            return {
                "type": "text",
                "text": f"[@{members.get('name') or 'file'}]({_member(members, 'uri')})",
            }
        case "resource":
            resource = members.get("resource")
            if not isinstance(resource, Mapping):
                hint = 'add "resource": {"uri": …, "text": …}'
                raise UsageError("a resource block has no resource", hint=hint)
            inner = cast(Mapping[str, Any], resource)
            uri, text = _member(inner, "uri"), _member(inner, "text")
            return {"type": "text", "text": f'<context ref="{uri}">\n{text}\n</context>'}
        case unknown:
            hint = "use text, image, resource with a text, or resource_link"
            message = f"this agent does not accept content of type {unknown!r:.60}"
            raise UsageError(message, hint=hint)


def _member(block: Mapping[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        message = f"the {name} of a content block cannot be {value!r:.60}"
        raise UsageError(message, hint="use text")
    return value
