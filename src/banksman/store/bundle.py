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
import pwd
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from typing import Any, cast

from banksman.core.redaction.redactor import Redactor, in_strings
from banksman.core.session.event import UPDATE, Event
from banksman.core.wire.elided_text import REDACTED
from banksman.store.export_file import frame_of, line_of
from banksman.store.log import Log
from banksman.store.log_values import KnownSession
from banksman.store.private_file import write_new
from banksman.store.transfer import events_of, found

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

# A larger frame is cleaned in a thread: the patterns need 0.3 s for a MiB.
THREAD_BYTES_MIN = 16 << 10

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

# Each pattern begins at a word boundary, so that a long text without a key is scanned once.
_KEYS = re.compile(
    # Also after a newline that is escaped as in JSON, which the output of tools often contains.
    r"(?:(?<![A-Za-z0-9_-])|(?<=\\[nrt]))(?:"
    r"sk-[A-Za-z0-9_-]{12,}|sk_(?:live|test)_[A-Za-z0-9]{12,}|npm_[A-Za-z0-9]{16,}|hf_[A-Za-z0-9]{16,}|pypi-[\w-]{16,}"
    r"|gh[oprsu]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{16,}|glpat-[A-Za-z0-9_-]{16,}"
    r"|xox[a-z]-[A-Za-z0-9-]{8,}"
    r"|A(?:KIA|SIA)[A-Z0-9]{12,}"
    r"|AIza[A-Za-z0-9_-]{30,}"
    r"|eyJ[A-Za-z0-9_-]{6,}\.[A-Za-z0-9_-]{6,}\.[A-Za-z0-9_-]*"
    r")"
    r"|-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----[^-]*(?:-----END [A-Z ]{0,40}-----)?"
)
# The replacement keeps the word before the secret.
_AFTER_WORD = re.compile(
    r"(?i:(\bbearer\s{1,8}|\bauthorization\W{1,8}basic\s{1,8})[A-Za-z0-9._~+/=-]{8,})"
    r"|((?i:\b[\w-]{0,60}(?:key|token|secret|password|passwd)\\?[\"']?\s{0,3}[=:]\s{0,3}\\?[\"']?))[^\s\"'\\&,;]{6,}"
    r"|(://[^\s/:@\"']{0,100}:)[^\s/@\"']{1,200}(?=@)"
)
_EMAIL = re.compile(
    r"(?<![\w.+-])[\w.+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}(?![\w-])"
)
_HOMES = re.compile(r"((?:/home|/Users|\\Users|\\\\Users)[/\\]{1,2})[^/\\\s\"':]{1,64}")

Scrub = Callable[[str], str]


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


def scrubber(secrets: Iterable[str] = ()) -> Scrub:
    """Return the function that removes secrets and personal data from a string."""
    redactor = Redactor(secrets)
    personal = _personal()

    def scrub(text: str) -> str:
        text = redactor.redact_text(text)
        text = _KEYS.sub(REDACTED, text)
        text = _AFTER_WORD.sub(lambda match: (match[1] or match[2] or match[3]) + REDACTED, text)
        if "@" in text:
            text = _EMAIL.sub("[email]", text)
        for pattern, replacement in personal:
            text = pattern.sub(replacement, text)
        return _HOMES.sub(r"\1[user]", text)

    return scrub


def _personal() -> list[tuple[re.Pattern[str], str]]:
    """Return the patterns for the home folder and for the user's name in paths.

    The home folder also appears with dashes, because agents name folders after it.
    """
    users = {os.environ.get("USER", ""), os.environ.get("LOGNAME", "")}
    homes = {os.path.expanduser("~")}
    try:
        account = pwd.getpwuid(os.getuid())
    except KeyError:
        pass  # A container's user without an entry in the user database.
    else:
        users.add(account.pw_name)
        homes.add(account.pw_dir)
    homes = {home.rstrip("/") for home in homes if home.startswith("/") and home.rstrip("/")}
    patterns: list[tuple[re.Pattern[str], str]] = []
    for home in sorted(homes, key=len, reverse=True):
        patterns.append((re.compile(rf"(?<![\w.]){re.escape(home)}(?!\w)"), "[home]"))
        # For a home like /root the pattern would match option names.
        if home.count("/") > 1:
            dashed = re.escape(re.sub(r"[^A-Za-z0-9]", "-", home))
            patterns.append((re.compile(rf"(?<![\w.]){dashed}(?!\w)"), "-[home]"))
    names = [
        re.compile(rf"(?<=[/\\]){re.escape(user)}(?=[/\\]|$)")
        for user in sorted(filter(None, users))
    ]
    return [*patterns, *((name, "[user]") for name in names)]


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
        shown = (
            masked_pieces(run, scrub)
            if len(run) > 1 and is_text_kept
            else [event.data for event in run]
        )
        for event, data in zip(run, shown, strict=True):
            line: dict[str, Any] = {"at": round(event.at - begin, 6), "seq": event.seq}
            line |= {"turn": event.turn, "kind": event.kind}
            if event.is_frame:
                clean = functools.partial(_clean, data, scrub, is_text_kept=is_text_kept)
                is_small = len(data) < THREAD_BYTES_MIN
                line |= frame_of(clean() if is_small else await asyncio.to_thread(clean))
            elif body := _shown(event.data):
                line["body"] = body
            yield line_of(line)


def _clean(data: bytes, scrub: Scrub, *, is_text_kept: bool) -> bytes:
    return in_strings(data if is_text_kept else masked(data), scrub)


async def _runs(events: AsyncIterator[Event]) -> AsyncGenerator[list[Event]]:
    """Group consecutive pieces of streamed text. Every other event comes alone."""
    run: list[Event] = []
    weight = 0
    async for event in events:
        is_piece = event.kind == UPDATE and piece_of(event.data) is not None
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
