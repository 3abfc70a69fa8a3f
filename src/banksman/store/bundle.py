"""Export a session for a bug report: all frames, without known secrets and personal data.

The result, a *bundle*, is for people to read and for a fake agent to replay. It cannot be imported:
`transfer.py` exports sessions for that. No pattern knows every key, so read a bundle before you
give it away. `text=False` masks all text that is not structural.

    {"banksman": "bundle", "version": 1, "agent": …, "banksman_version": …, "python": …,
     "platform": …, "text": true}
    {"at": 0.0, "seq": 1, "turn": "t-1", "kind": "turn.queued"}
    {"at": 0.04, "seq": 2, "turn": null, "kind": "process.started", "body": {"process": 1}}
    {"at": 0.05, "seq": 3, "turn": null, "kind": "sent",
     "frame": "{\\"type\\":\\"control_request\\"…"}
    …

The frames are complete, so that the bundle can be replayed: `python -m banksman.testing.fake_agent
--replay FILE` is an agent that sends them again. Banksman's own events appear with their kind,
their turn and the few members that describe the result (`SHOWN`). They contain no prompt and no
other free text. Times count from the first event.

**Removed** from every string of every frame:

- the configured secrets (core/redaction/redactor.py),
- strings that look like a key, a token, or a password in a URL,
- e-mail addresses,
- the user's home folder, and the user's name in paths.

An agent that streams may split a key into pieces, each in a separate frame. So consecutive pieces
are also examined as one text. If that text contains something to remove, each piece is replaced by
as many `x`.

With `text=False` every string is replaced by as many `x`, except the structural ones (`STRUCTURE`):
types, ids, the names of tools and models. In the input and output of a tool these are replaced too.
The bundle can still be replayed. The list names the members that stay, not the ones that go, so the
text of an unknown member does not appear. The names of members do.

**Limits.** No pattern knows every key. Read a bundle before you give it away; for this purpose it
is plain text.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import json
import os
import platform
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from typing import Any, cast

from banksman.core.redaction.redactor import in_strings
from banksman.core.session.event import UPDATE, Event
from banksman.store.export_file import frame_of, line_of
from banksman.store.log import Log
from banksman.store.log_values import KnownSession
from banksman.store.private_file import write_new
from banksman.store.scrubber import Scrub, scrubber
from banksman.store.transfer import events_of, found, in_thread

VERSION = 1
# Members of Banksman's own events that describe the result, in fixed words and numbers.
SHOWN = frozenset(
    (
        "answer",
        "attempt",
        "by",
        "clock",
        "code",
        "origin",
        "outcome",
        "process",
        "reason",
        "retries",
        "signal",
        "wants",
    )
)
# Limits of the streamed pieces that are examined together. Beyond them a new text begins.
RUN_FRAMES_MAX = 20_000
RUN_BYTES_MAX = 16 << 20

# Pieces that are collected without a pause. Other tasks of the loop wait for them.
PIECES_AT_ONCE = 256

# Members whose strings stay: without them a frame cannot be understood, or matched to its answer.
STRUCTURE = frozenset(
    (
        *(
            "type",
            "subtype",
            "role",
            "kind",
            "state",
            "status",
            "model",
            "name",
            "stop_reason",
            "terminal_reason",
        ),
        *(
            "id",
            "uuid",
            "session_id",
            "request_id",
            "tool_use_id",
            "parent_tool_use_id",
            "task_id",
            "api_message_id",
        ),
        *(
            "command_uuid",
            "user_message_uuid",
            "user_message_uuids",
            "still_queued",
            "callback_id",
            "server_name",
        ),
        *(
            "mcp_server_name",
            "tool_name",
            "display_name",
            "toolName",
            "behavior",
            "destination",
            "action",
            "jsonrpc",
        ),
        *(
            "method",
            "compact_result",
            "permissionMode",
            "mode",
            "claude_code_version",
            "capabilities",
            "tools",
        ),
        *(
            "hookEventName",
            "hook_event_name",
            "permissionDecision",
            "hookCallbackIds",
            "onFailure",
            "error_code",
        ),
    )
)
# Members that hold user data, whatever their own members are called. `HOOKED` are the exceptions,
# for the input of a hook.
OPAQUE = frozenset(
    (
        *(
            "input",
            "updatedInput",
            "tool_input",
            "tool_response",
            "tool_use_result",
            "structured_output",
            "arguments",
        ),
        *("structuredContent", "rawInput", "rawOutput"),
    )
)
HOOKED = frozenset(("hook_event_name", "tool_name", "session_id", "tool_use_id"))


async def bundle(
    log: Log,
    session: str,
    path: str | os.PathLike[str],
    *,
    secrets: Iterable[str] = (),
    text: bool = True,
) -> None:
    """Write the bundle of a session to a new file that only its owner can read.

    `session`: its id or its name. The bundle ends at the current head of the session. Raises
    `UsageError` if the session does not exist or has no events, or if the file exists. After a
    failure no partial file remains.
    """
    known = await found(log, session)
    await write_new(path, lines(log, known, scrubber(secrets), is_text_kept=text))


# -- the lines -----------------------------------------------------------------------------------
async def lines(
    log: Log, known: KnownSession, scrub: Scrub, *, is_text_kept: bool
) -> AsyncGenerator[bytes]:
    """Yield the lines of a bundle: the events from `first` to the head in `known`."""
    yield line_of(
        {
            **{"banksman": "bundle", "version": VERSION, "agent": known.agent},
            **versions(),
            **{"text": is_text_kept, "first": known.first, "last": known.seq},
        }
    )
    begin: float | None = None
    async for run in _runs(events_of(log, known)):
        begin = run[0].at if begin is None else begin
        if len(run) == 1 or not is_text_kept:
            shown = [event.data for event in run]
        else:
            size = sum(len(event.data) for event in run)
            shown = await in_thread(size, functools.partial(masked_pieces, run, scrub))
        for event, data in zip(run, shown, strict=True):
            at = round(event.at - begin, 6)
            make = functools.partial(_line, event, at, data, scrub, is_text_kept=is_text_kept)
            yield await in_thread(len(data), make)


def _line(event: Event, at: float, data: bytes, scrub: Scrub, *, is_text_kept: bool) -> bytes:
    line: dict[str, Any] = {"at": at, "seq": event.seq, "turn": event.turn, "kind": event.kind}
    if event.is_frame:
        line |= frame_of(_clean(data, scrub, is_text_kept=is_text_kept))
    elif body := _shown(data):
        line["body"] = body
    return line_of(line)


def _clean(data: bytes, scrub: Scrub, *, is_text_kept: bool) -> bytes:
    return in_strings(data if is_text_kept else masked(data), scrub)


async def _runs(events: AsyncIterator[Event]) -> AsyncGenerator[list[Event]]:
    """Group consecutive pieces of streamed text. Every other event comes alone."""
    run: list[Event] = []
    weight = 0
    async for event in events:
        look = functools.partial(piece_of, event.data)
        is_piece = event.kind == UPDATE and await in_thread(len(event.data), look) is not None
        if len(run) % PIECES_AT_ONCE == 1:
            await asyncio.sleep(0)
        if run and (not is_piece or len(run) >= RUN_FRAMES_MAX or weight >= RUN_BYTES_MAX):
            yield run
            run, weight = [], 0
        if is_piece:
            run.append(event)
            weight += len(event.data)
        else:
            yield [event]
    if run:
        yield run


def masked_pieces(run: list[Event], scrub: Scrub) -> list[bytes]:
    """Return the frames of a run. If their joined text contains a secret, every piece is masked."""
    pieces = [piece_of(event.data) or "" for event in run]
    whole = "".join(pieces)
    if scrub(whole) == whole:
        return [event.data for event in run]
    return [masked(event.data, only=piece) for event, piece in zip(run, pieces, strict=True)]


def piece_of(frame: bytes) -> str | None:
    """Return the piece of text that a frame streams: a delta of Claude, a chunk of ACP, or None."""
    if b"delta" not in frame and b"_chunk" not in frame:
        return None
    match _decoded(frame):
        case {
            "event": {
                "delta": {"text": str(text)} | {"thinking": str(text)} | {"partial_json": str(text)}
            }
        }:
            return text
        case {"params": {"update": {"sessionUpdate": str(), "content": {"text": str(text)}}}}:
            return text
        case {"params": {"delta": str(text)}}:
            return text
        case _:
            return None


def masked(frame: bytes, *, only: str | None = None, kept: frozenset[str] = STRUCTURE) -> bytes:
    """Replace the strings of a frame by as many `x`, except those of the members in `kept`.

    `only`: this string alone.
    """
    value = _decoded(frame)
    if value is None:
        return b"x" * len(frame)
    try:
        # ASCII output, because a lone surrogate has no other encoding.
        return json.dumps(_masked(value, "", kept, only), separators=(",", ":")).encode()
    except RecursionError:
        return b"x" * len(frame)  # Deeper than any known frame.


def _masked(value: Any, name: str, kept: frozenset[str], only: str | None) -> Any:
    match value:
        case str():
            return value if name in kept or only not in (None, value) else "x" * len(value)
        case list():
            return [_masked(item, name, kept, only) for item in cast(list[Any], value)]
        case dict():
            if name in OPAQUE:
                kept = HOOKED
            members = cast(dict[str, Any], value)
            return {key: _masked(item, key, kept, only) for key, item in members.items()}
        case _:
            return value


def _decoded(frame: bytes) -> dict[str, Any] | None:
    try:
        value: Any = json.loads(frame)
    except (ValueError, RecursionError):
        return None
    return cast(dict[str, Any], value) if isinstance(value, dict) else None


def _shown(data: bytes) -> dict[str, Any]:
    body = _decoded(data) or {}
    return {name: value for name, value in body.items() if name in SHOWN and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    # A text of Banksman is a word. A longer one may be user data.
    return (
        value is None
        or isinstance(value, bool | int | float)
        or (isinstance(value, str) and len(value) <= 40)
    )


def versions() -> dict[str, str]:
    """Return what the package runs on."""
    return {
        "banksman_version": _own_version(),
        "python": platform.python_version(),
        "platform": _platform(),
    }


def _own_version() -> str:
    try:
        return importlib.metadata.version("banksman")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _platform() -> str:
    """Return system, release and machine type, without the machine's name."""
    system = os.uname()
    return f"{system.sysname} {system.release} {system.machine}"
