"""What bodies and queries are made of, whatever they are about."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from banksman.serve.api.messages.words import Ruling

# A request that waits is answered after so long, so that nobody between here and there takes it for dead.
WAIT_SECONDS_MAX = 60.0
# Of a list or a mapping: more than anybody means, and few enough to be looked at in a moment.
ITEMS_MAX = 10_000

Text = Annotated[str, Meta(max_length=1 << 20)]
Texts = Annotated[list[Text], Meta(max_length=ITEMS_MAX)]
Variables = Annotated[dict[str, str], Meta(max_length=ITEMS_MAX)]
Rules = Annotated[dict[str, Ruling], Meta(max_length=ITEMS_MAX)]
Objects = Annotated[list[dict[str, Any]], Meta(max_length=ITEMS_MAX)]
Word = Annotated[str, Meta(min_length=1, max_length=255)]
Seconds = Annotated[float, Meta(ge=0, le=1e8)]
Wait = Annotated[float, Meta(ge=0)]

_CONTENT = {
    "required": ["type"],
    "properties": {
        "type": {
            "type": "string",
            "enum": ["text", "image", "audio", "resource", "resource_link"],
            "description": "Kind of content: it says which other members are needed.",
        },
        "text": {"type": "string", "description": "`text`: the text."},
        "data": {"type": "string", "description": "`image` and `audio`: the content in base64."},
        "mimeType": {"type": "string", "description": "`image` and `audio`: the media type of `data`."},
        "uri": {"type": "string", "description": "`resource_link`: where it is."},
        "name": {"type": "string", "description": "`resource_link`: its name."},
        "resource": {
            "type": "object",
            "additionalProperties": True,
            "description": "`resource`: an embedded file, with `uri` and `text` or `blob`.",
        },
    },
    "additionalProperties": True,
}
ContentBlock = Annotated[
    dict[str, Any],
    Meta(title="ContentBlock", description="One part of a prompt, as ACP defines it.", extra_json_schema=_CONTENT),
]
SessionUpdate = Annotated[
    dict[str, Any],
    Meta(
        title="SessionUpdate",
        description="One update of a conversation, as ACP defines it.",
        extra_json_schema={
            "required": ["sessionUpdate"],
            "properties": {
                "sessionUpdate": {
                    "type": "string",
                    "description": "Kind of update, such as `agent_message_chunk`, `tool_call` or `plan`.",
                },
            },
            "additionalProperties": True,
        },
    ),
]


class Body(Struct, forbid_unknown_fields=True, kw_only=True):
    """What a client sends."""


class Query(Struct, forbid_unknown_fields=True, kw_only=True):
    """What a client asks for in the URL."""


class WaitFor(Query):
    """Whether to wait for the end.

    Attributes:
        wait: Seconds to wait for the end, at most 60.
    """

    wait: Wait = 0.0
