"""A session as it is attached to a bug report: what was said both ways, without what is nobody else's affair.

    {"banksman": "bundle", "version": 1, "agent": …, "banksman_version": …, "python": …, "platform": …, "text": true}
    {"at": 0.0, "seq": 1, "turn": "t-1", "kind": "turn.queued"}
    {"at": 0.04, "seq": 2, "turn": null, "kind": "process.started", "body": {"process": 1}}
    {"at": 0.05, "seq": 3, "turn": null, "kind": "sent", "frame": "{\\"type\\":\\"control_request\\"…"}
    …

The frames are whole, so that the bundle can be played: `python -m banksman.testing.fake_agent --replay FILE` is an
agent that says them again. Of our own events there is what happened and to which turn, with the few members that say
how (`SHOWN`); no prompt, and no text of anybody's. Times count from the first event.

**What is taken out**, in every string of every frame: the secrets that were configured (core/wire/redaction.py); what
looks like a key, a token or a password in an address; e-mail addresses; the user's home folder and name in paths. An
agent that streams says a key in pieces, each in a frame of its own: so the pieces that follow each other are also
looked at as one text, and if that has something to take out, all of them are replaced by as many `x`.

With `text=False` every string is replaced by as many `x`, but for those by which the frames are understood: types, ids,
the names of tools and models (`STRUCTURE`), and of what goes into a tool and comes out of it not even these. It still
plays. That is a list of what stays, not of what goes: a member that we do not know does not show. Names of members do.

**Limits.** No pattern knows every key. A bundle is to be read before it is given away, which is why it is plain text.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import pwd
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from typing import Any, cast

from banksman.core.session.event import UPDATE, Event
from banksman.core.wire.redaction import REDACTED, Redactor, in_strings
from banksman.store.log import KnownSession, Log
from banksman.store.private_file import write_new
from banksman.store.transfer import events_of, found, frame_of, line_of

VERSION = 1
# Of our own events: how it went, in words and numbers of ours.
SHOWN = frozenset(
    ("answer", "attempt", "by", "clock", "code", "origin", "outcome", "process", "reason", "retries", "signal", "wants")
)
# Pieces of a streamed text that are held to be looked at together. Past it, the rest is looked at by itself.
RUN_FRAMES_MAX = 20_000
RUN_BYTES_MAX = 16 << 20

# The members whose strings stay: without them a frame is not understood, or its answer not found.
STRUCTURE = frozenset(
    (
        *("type", "subtype", "role", "kind", "state", "status", "model", "name", "stop_reason", "terminal_reason"),
        *("id", "uuid", "session_id", "request_id", "tool_use_id", "parent_tool_use_id", "task_id", "api_message_id"),
        *("command_uuid", "user_message_uuid", "user_message_uuids", "still_queued", "callback_id", "server_name"),
        *("mcp_server_name", "tool_name", "display_name", "toolName", "behavior", "destination", "action", "jsonrpc"),
        *("method", "compact_result", "permissionMode", "mode", "claude_code_version", "capabilities", "tools"),
        *("hookEventName", "hook_event_name", "permissionDecision", "hookCallbackIds", "onFailure", "error_code"),
    )
)
# What is a user's whatever its members are called; but for what a hook is asked about.
OPAQUE = frozenset(
    (
        *("input", "updatedInput", "tool_input", "tool_response", "tool_use_result", "structured_output", "arguments"),
        *("structuredContent", "rawInput", "rawOutput"),
    )
)
HOOKED = frozenset(("hook_event_name", "tool_name", "session_id", "tool_use_id"))

# Each begins where no word goes on, so that a long text without a key in it is looked through once.
_KEYS = re.compile(
    # Or after a newline that is written as in JSON: what tools print is often that.
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
# What is kept of these is the word before it.
_AFTER_WORD = re.compile(
    r"(?i:(\bbearer\s{1,8}|\bauthorization\W{1,8}basic\s{1,8})[A-Za-z0-9._~+/=-]{8,})"
    r"|((?i:\b[\w-]{0,60}(?:key|token|secret|password|passwd)\\?[\"']?\s{0,3}[=:]\s{0,3}\\?[\"']?))[^\s\"'\\&,;]{6,}"
    r"|(://[^\s/:@\"']{0,100}:)[^\s/@\"']{1,200}(?=@)"
)
_EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}(?![\w-])")
_HOMES = re.compile(r"((?:/home|/Users|\\Users|\\\\Users)[/\\]{1,2})[^/\\\s\"':]{1,64}")

Scrub = Callable[[str], str]


async def bundle(
    log: Log, session: str, path: str | os.PathLike[str], *, secrets: Iterable[str] = (), text: bool = True
) -> None:
    """Write the bundle of a session, by its id or its name, to a new file that only its owner can read.

    `UsageError` if there is no such session, nothing in it, or a file of that name. It ends at the session's head as it
    is now. Whatever goes wrong, no part of a file is left.
    """
    known = found(log, session)
    await write_new(path, _lines(log, known, scrubber(secrets), is_text_kept=text))


def scrubber(secrets: Iterable[str] = ()) -> Scrub:
    """What is done to each string."""
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
    """The home folder, as it is and as agents name folders after it, with dashes; and the user's name in paths."""
    users = {os.environ.get("USER", ""), os.environ.get("LOGNAME", "")}
    homes = {os.path.expanduser("~")}
    try:
        account = pwd.getpwuid(os.getuid())
    except KeyError:
        pass  # A container's user without a line in any table.
    else:
        users.add(account.pw_name)
        homes.add(account.pw_dir)
    homes = {home.rstrip("/") for home in homes if home.startswith("/") and home.rstrip("/")}
    patterns: list[tuple[re.Pattern[str], str]] = []
    for home in sorted(homes, key=len, reverse=True):
        patterns.append((re.compile(rf"(?<![\w.]){re.escape(home)}(?!\w)"), "[home]"))
        # Of a home like /root nothing but a flag's name would be left.
        if home.count("/") > 1:
            dashed = re.escape(re.sub(r"[^A-Za-z0-9]", "-", home))
            patterns.append((re.compile(rf"(?<![\w.]){dashed}(?!\w)"), "-[home]"))
    names = [re.compile(rf"(?<=[/\\]){re.escape(user)}(?=[/\\]|$)") for user in sorted(filter(None, users))]
    return [*patterns, *((name, "[user]") for name in names)]


# -- the lines -------------------------------------------------------------------------------------------------------
async def _lines(log: Log, known: KnownSession, scrub: Scrub, *, is_text_kept: bool) -> AsyncGenerator[bytes]:
    yield line_of(
        {
            **{"banksman": "bundle", "version": VERSION, "agent": known.agent, "banksman_version": _own_version()},
            **{"python": platform.python_version(), "platform": _platform(), "text": is_text_kept},
            **{"first": known.first, "last": known.seq},
        }
    )
    begin: float | None = None
    async for run in _runs(events_of(log, known)):
        begin = run[0].at if begin is None else begin
        shown = masked_pieces(run, scrub) if len(run) > 1 and is_text_kept else [event.data for event in run]
        for event, data in zip(run, shown, strict=True):
            line: dict[str, Any] = {"at": round(event.at - begin, 6), "seq": event.seq}
            line |= {"turn": event.turn, "kind": event.kind}
            if event.is_frame:
                line |= frame_of(in_strings(data if is_text_kept else masked(data), scrub))
            elif body := _shown(event.data):
                line["body"] = body
            yield line_of(line)


async def _runs(events: AsyncIterator[Event]) -> AsyncGenerator[list[Event]]:
    """Pieces of a streamed text that follow each other come together; every other event by itself."""
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
    """The frames of a run: as they are, or, if their text has something to take out, with every piece of it masked."""
    pieces = [piece_of(event.data) or "" for event in run]
    whole = "".join(pieces)
    if scrub(whole) == whole:
        return [event.data for event in run]
    return [masked(event.data, only=piece) for event, piece in zip(run, pieces, strict=True)]


def piece_of(frame: bytes) -> str | None:
    """The piece of a text that a frame streams: of Claude's a delta, of ACP's a chunk. None: it streams nothing."""
    if b"delta" not in frame and b"_chunk" not in frame:
        return None
    match _decoded(frame):
        case {"event": {"delta": {"text": str(text)} | {"thinking": str(text)} | {"partial_json": str(text)}}}:
            return text
        case {"params": {"update": {"sessionUpdate": str(), "content": {"text": str(text)}}}}:
            return text
        case {"params": {"delta": str(text)}}:
            return text
        case _:
            return None


def masked(frame: bytes, *, only: str | None = None) -> bytes:
    """A frame with its strings replaced by as many `x`, but for what it is understood by. `only`: this string alone."""
    value = _decoded(frame)
    if value is None:
        return b"x" * len(frame)
    try:
        # In ASCII: half of a surrogate pair can be written in no other way.
        return json.dumps(_masked(value, "", STRUCTURE, only), separators=(",", ":")).encode()
    except RecursionError:
        return b"x" * len(frame)  # Deeper than any frame that we know.


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
    # A text of ours is a word; what is longer is somebody's.
    return value is None or isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= 40)


def _own_version() -> str:
    try:
        return importlib.metadata.version("banksman")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _platform() -> str:
    """Without the machine's name."""
    system = os.uname()
    return f"{system.sysname} {system.release} {system.machine}"
