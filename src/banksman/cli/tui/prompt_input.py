"""What is asked, as it is given on the command line: in words, or on stdin."""

from __future__ import annotations

import argparse
import sys
from typing import Any, TextIO, cast

from banksman.errors import UsageError


def body_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Of an ask: `prompt`, `priority` and, where the verb has it, `on_busy`."""
    prompt: str | None = arguments.prompt
    body: dict[str, Any] = {"prompt": _on_stdin() if prompt in (None, "-") else prompt}
    if arguments.priority is not None:
        try:
            body["priority"] = int(arguments.priority)
        except ValueError:
            body["priority"] = arguments.priority
    if getattr(arguments, "on_busy", None) is not None:
        body["on_busy"] = arguments.on_busy
    return body


def _on_stdin() -> str:
    stdin = cast("TextIO | None", sys.stdin)
    if stdin is None:
        raise UsageError("the prompt is to be read from stdin, and that is closed")
    try:
        return stdin.buffer.read().decode()
    except UnicodeDecodeError as exc:
        raise UsageError("what is on stdin is not UTF-8") from exc
