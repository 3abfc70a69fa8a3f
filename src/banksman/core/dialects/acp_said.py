"""What a turn has said and done so far, as far as it takes to know an error that is told as if it were an answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from banksman.core.dialects import acp_reading as reading
from banksman.core.dialects.acp_updates import said
from banksman.core.dialects.quirks import ERROR_CHARACTERS_MAX


class Said(Struct, frozen=True):
    """`text`: the last message, or the beginning of one too long to be that of an error. `message`: its name. `call`:
    the tool that was told of last."""

    text: str = ""
    message: str | None = None
    is_nothing: bool = True
    is_over: bool = False
    call: str = ""

    def told(self, update: Mapping[str, Any]) -> Said:
        """With one more update."""
        if update["sessionUpdate"] != reading.MESSAGE:
            # What is said after another tool was used is another message.
            call = update.get("toolCallId")
            is_other = isinstance(call, str) and call != self.call
            return replace(
                self, is_nothing=False, is_over=self.is_over or is_other, call=call if is_other else self.call
            )
        text = said(dict(update))
        if not text:
            return self  # One agent hangs its numbers on a chunk that says nothing.
        name = update.get("messageId")
        message = name if isinstance(name, str) else None
        before = "" if self.is_over or message != self.message else self.text
        # One character more than an error may have: then it is known to be none.
        return Said((before + text)[: ERROR_CHARACTERS_MAX + 1], message, is_nothing=False, call=self.call)


NOTHING = Said()
