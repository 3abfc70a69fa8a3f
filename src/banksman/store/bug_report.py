"""Zip archive for a bug report: the bundle of a session, and facts about its host.

The archive is made while it is sent. A part is compressed in pieces, in a thread, so the memory
does not grow with the log. The last part, `manifest.json`, lists the parts and says which are
incomplete. Every part passes the scrubber of `bundle.py`. Without the text, JSON parts are masked
like frames, and other parts are left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import zipfile
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, cast

from banksman.core.redaction.redactor import in_strings
from banksman.errors import BanksmanError
from banksman.store import bundle
from banksman.store.bundle import Scrub
from banksman.store.log import Log
from banksman.store.transfer import found

VERSION = 1
# The newest events of a session, and how much of them. A bug is near the end of a log.
EVENTS_MAX = 200_000
SESSION_BYTES_MAX = 256 << 20
PART_BYTES_MAX = 4 << 20
# Bytes that are compressed in one go.
PIECE_BYTES = 256 << 10
# Lines, and their bytes, that are made without a pause. Other tasks of the loop wait for them.
LINES_AT_ONCE = 16
BYTES_AT_ONCE = 16 << 10
# Members of Banksman's own messages whose strings stay without the text: words, ids and numbers.
FACTS = bundle.STRUCTURE | frozenset(
    (
        *("agent", "banksman_version", "phase", "holder", "hold", "turn", "question", "questions"),
        *("command", "version", "group", "verdict", "log_level", "log_format", "survive", "clock"),
    )
)

Part = Callable[[], Awaitable[bytes]]


class _Sent:
    """File that only grows: collects what a zip archive writes until it is taken."""

    def __init__(self) -> None:
        self._data = bytearray()

    def write(self, data: bytes) -> int:
        self._data += data
        return len(data)

    def flush(self) -> None: ...

    def take(self) -> bytes:
        data = bytes(self._data)
        self._data.clear()
        return data


async def archive(
    log: Log, session: str, parts: Mapping[str, Part], *, scrub: Scrub, text: bool
) -> AsyncGenerator[bytes]:
    """Yield the archive of a session, in pieces.

    `parts`: the contents of further members, by name. A part that fails is listed with its error.
    Raises `UsageError` before the first piece if the session does not exist or has no events.
    """
    known = await found(log, session)
    first = max(known.first, known.seq - EVENTS_MAX + 1)
    is_cut = first > known.first
    sent = _Sent()
    listed: list[dict[str, Any]] = []
    file = zipfile.ZipFile(cast("Any", sent), "w", zipfile.ZIP_DEFLATED)
    lines = bundle.lines(log, known._replace(first=first), scrub, is_text_kept=text)
    async with contextlib.aclosing(_member(file, sent, scrub, "session.ndjson", lines)) as pieces:
        async for piece in pieces:
            if isinstance(piece, dict):
                listed.append({**piece, "complete": piece["complete"] and not is_cut})
            else:
                yield piece
    for name, make in parts.items():
        if not text and not name.endswith(".json"):
            continue
        try:
            made = await make()
        except Exception as exc:  # The report may be about this very bug.
            words = scrub(f"{type(exc).__name__}: {exc}")
            listed.append({"name": name, "complete": False, "error": words})
            continue
        # The stacks or the metrics of a large server take seconds.
        data = await asyncio.to_thread(_clean, name, made, scrub, text=text)
        async for piece in _member(file, sent, scrub, name, _once(data[:PART_BYTES_MAX])):
            if isinstance(piece, dict):
                listed.append({**piece, "complete": len(data) <= PART_BYTES_MAX})
            else:
                yield piece
    told = {
        **{"banksman": "bug report", "version": VERSION, "session": known.id},
        **{"agent": known.agent, "at": time.time(), "text": text, **bundle.versions()},
        "parts": listed,
    }
    file.writestr("manifest.json", json.dumps(told, indent=2))
    file.close()
    yield sent.take()


async def _member(
    file: zipfile.ZipFile, sent: _Sent, scrub: Scrub, name: str, content: AsyncIterator[bytes]
) -> AsyncGenerator[bytes | dict[str, Any]]:
    """Yield the pieces of one member, then its entry for the manifest."""
    told: dict[str, Any] = {"name": name, "complete": True}
    size = lines = made = 0
    waiting = bytearray()
    info = zipfile.ZipInfo(name, time.localtime()[:6])
    info.compress_type = zipfile.ZIP_DEFLATED
    info.external_attr = 0o600 << 16
    with file.open(info, "w", force_zip64=True) as member:
        try:
            async for data in content:
                if size + len(data) > SESSION_BYTES_MAX:
                    told["complete"] = False
                    break
                size += len(data)
                waiting += data
                lines, made = lines + 1, made + len(data)
                if lines >= LINES_AT_ONCE or made >= BYTES_AT_ONCE:
                    await asyncio.sleep(0)
                    lines = made = 0
                if len(waiting) >= PIECE_BYTES:
                    await asyncio.to_thread(member.write, bytes(waiting))
                    waiting.clear()
                    yield sent.take()
        except BanksmanError as exc:
            # Retention or a deletion has taken events meanwhile.
            told |= {"complete": False, "error": scrub(str(exc))}
        await asyncio.to_thread(member.write, bytes(waiting))
    yield sent.take()
    yield {**told, "bytes": size}


async def _once(data: bytes) -> AsyncGenerator[bytes]:
    yield data


def _clean(name: str, data: bytes, scrub: Scrub, *, text: bool) -> bytes:
    if not name.endswith(".json"):
        return scrub(data.decode(errors="replace")).encode()
    if not text:
        data = bundle.masked(data, kept=FACTS)
    return in_strings(data, scrub)
