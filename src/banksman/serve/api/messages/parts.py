"""What bodies and queries are made of, whatever they are about."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

# A request that waits is answered after so long, so that nobody between here and there takes it for dead.
WAIT_SECONDS_MAX = 60.0
# Of a list or a mapping: more than anybody means, and few enough to be looked at in a moment.
ITEMS_MAX = 10_000

Text = Annotated[str, Meta(max_length=1 << 20)]
Texts = Annotated[list[Text], Meta(max_length=ITEMS_MAX)]
Variables = Annotated[dict[str, str], Meta(max_length=ITEMS_MAX)]
Objects = Annotated[list[dict[str, Any]], Meta(max_length=ITEMS_MAX)]
Word = Annotated[str, Meta(min_length=1, max_length=255)]
Seconds = Annotated[float, Meta(ge=0, le=1e8)]
Wait = Annotated[float, Meta(ge=0)]


class Body(Struct, forbid_unknown_fields=True, kw_only=True):
    """What a client sends."""


class Query(Struct, forbid_unknown_fields=True, kw_only=True):
    """What a client asks for in the URL."""


class WaitFor(Query):
    wait: Wait = 0.0
