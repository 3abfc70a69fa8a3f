"""Copies of agents' transcripts in the store, so that a take-over keeps the agent's memory.

The log has the conversation. The agent remembers it by a file on the machine where it ran. If the
agent's profile names that file (sessions/profile.py), the owner stores a copy after each turn. The
next owner writes the copy to the place where its agent looks, before it starts a process. Without a
known file, or without a copy, the agent is asked to resume a conversation that it does not know. It
reports that, and the log gets `session.context_lost`. `ClusterTranscripts` stores the copies
(`cluster/log/message_codec.py`).

A turn never waits for its copy. So a copy may be behind the log: its host died first, or could not
write it. A copy states the last event that it covers. When it is restored, the later turns are
counted and the log gets `session.context_restored` with their number. So nothing is lost silently.

A copy is exactly the agent's file, or it does not exist. An agent may not accept a redacted
transcript, so a file that contains one of the host's secrets is not copied.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import json
import logging
import os
import stat
import tempfile
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from banksman.cluster import interfaces
from banksman.core.redaction.redactor import Redactor
from banksman.core.session import event as kinds
from banksman.core.session.event import Entry, entry
from banksman.core.session.history import SessionHistory
from banksman.core.session.outcome import Kind
from banksman.errors import BanksmanError, Refused, StoreError
from banksman.store.log import Log
from banksman.tasks import OwnedTasks

if TYPE_CHECKING:
    from banksman.sessions.session import Session
    from banksman.sessions.session_spec import SessionSpec

log = logging.getLogger("banksman")

# A longer transcript is not copied, and a copy that claims to be longer is rejected.
FILE_BYTES_MAX = 16 << 20
# Concurrent copies of all sessions of a host: other traffic to the servers is more urgent.
COPIES_MAX = 2
# An agent may write the end of a turn a moment after it reported the boundary. So the file is read
# once more after this time.
SETTLE_SECONDS = 1.0
COPY_SECONDS_MAX = 60.0
# Attempts to fetch a copy. If the cluster is away, the take-over cannot continue anyway.
BRING_ATTEMPTS_MAX = 2
BRING_SECONDS_MAX = 15.0
# How long a leaving session waits for its last copy, and a closing host for all copies.
WAIT_SECONDS_MAX = 5.0

# How many pages of a log are read to count the turns that a copy lacks. More are not counted.
PAGES_MAX = 100

VERSION = 1
_UNSENT = frozenset((Kind.WITHDRAWN, Kind.REFUSED))


class TranscriptHead(NamedTuple):
    """The header of a copy.

    `seq`: the copy covers all turns that had ended by this event. `turn`: the last of these turns.
    `mtime_ns`: the modification time of the file.
    """

    version: int
    conversation: str
    seq: int
    turn: str
    size: int
    mtime_ns: int


class _Due(NamedTuple):
    """A finished turn whose copy has to be made."""

    conversation: str
    seq: int
    turn: str
    find: Callable[[str], Path | None]


class _File(NamedTuple):
    """A transcript as it was read. `seen`: its identity; a change means another content."""

    text: bytes
    mtime_ns: int
    seen: tuple[Path, int, int]


class _Mirror:
    """The copy state of one session."""

    def __init__(self) -> None:
        # The latest finished turn that is not copied yet.
        self.due: _Due | None = None
        self.task: asyncio.Task[None] | None = None
        # The identity of the last copied file.
        self.seen: tuple[Path, int, int] | None = None
        # The last error, so that it is not logged again after each turn.
        self.wrong = ""
        # Set when the process is gone or this host closes: the file is final, so nothing waits for
        # it to settle.
        self.is_final = asyncio.Event()


class CopyResult(enum.Enum):
    """The result of writing a copy to the place where the agent looks."""

    WRITTEN, SAME, KEPT = range(3)


class TranscriptCopies:
    """Store and restore the transcripts of one host's sessions. `close` ends copies in progress."""

    def __init__(
        self, store: Log, kept: interfaces.Transcripts, redactor: Redactor | None = None
    ) -> None:
        """Use `redactor` to find secrets that must not be written to the store."""
        self._store = store
        self._kept = kept
        self._redactor = redactor
        self._mirrors: dict[str, _Mirror] = {}
        self._copies = asyncio.Semaphore(COPIES_MAX)
        self._tasks = OwnedTasks()

    # -- to the store -----------------------------------------------------------------------------
    def mirror(self, session: Session, turn: str) -> None:
        """Copy the transcript after a turn.

        One copy per session runs at a time. A turn that ends during a copy goes into the next one.
        """
        conversation, find = session.conversation, session.transcript_of
        if conversation is None or find is None:
            return
        mirror = self._mirrors.setdefault(session.id, _Mirror())
        mirror.is_final.clear()
        mirror.due = _Due(conversation, self._store.head(session.id).seq, turn, find)
        if mirror.task is None or mirror.task.done():
            mirror.task = self._tasks.start(self._mirror(session.id, mirror))

    def finish(self, session: str) -> None:
        """Finish the copies of a session that left this host.

        A copy in progress continues, because the next host needs it.
        """
        mirror = self._mirrors.get(session)
        if mirror is not None:
            mirror.is_final.set()
            if mirror.task is None or mirror.task.done():
                del self._mirrors[session]

    async def wait_mirrored(self, session: str) -> None:
        """Wait until the finished turns are copied, up to `WAIT_SECONDS_MAX`."""
        mirror = self._mirrors.get(session)
        if mirror is not None and mirror.task is not None:
            await asyncio.wait((mirror.task,), timeout=WAIT_SECONDS_MAX)

    def stop(self) -> None:
        """Cancel all copies: this host lost its sessions.

        The store does not compare writers, so a late copy would overwrite that of the new owner.
        """
        self._tasks.cancel()
        self._mirrors.clear()

    async def close(self) -> None:
        """End all copies, after waiting for up to `WAIT_SECONDS_MAX`."""
        for mirror in self._mirrors.values():
            mirror.is_final.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT_SECONDS_MAX):
                await self._tasks.wait()
        await self._tasks.end()

    async def _mirror(self, session: str, mirror: _Mirror) -> None:
        """Copy until no finished turn is left.

        Each turn is copied immediately, in case this host dies, and once more after the file has
        settled.
        """
        while (due := mirror.due) is not None:
            mirror.due = None
            await self._copy(session, mirror, due)
            with suppress(TimeoutError):
                async with asyncio.timeout(SETTLE_SECONDS):
                    await mirror.is_final.wait()
            if mirror.due is None:
                await self._copy(session, mirror, due)
        if mirror.is_final.is_set() and self._mirrors.get(session) is mirror:
            del self._mirrors[session]

    async def _copy(self, session: str, mirror: _Mirror, due: _Due) -> None:
        """Make one copy. Errors are only logged: the next copy, after another turn, may succeed."""
        try:
            async with self._copies, asyncio.timeout(COPY_SECONDS_MAX):
                found = await asyncio.to_thread(_find, due, mirror.seen)
                if found is None:
                    return
                data = await asyncio.to_thread(pack, due, found, self._redactor)
                await self._kept.put(session, data)
                mirror.seen, mirror.wrong = found.seen, ""
                if self._store.find(session) is None:
                    # The session was deleted during the copy, and its copy with it.
                    await self._kept.forget(session)
        except (OSError, BanksmanError) as exc:  # TimeoutError is an OSError.
            why = str(exc) or "timeout"
            if why != mirror.wrong:
                mirror.wrong = why
                log.warning("session %s: cannot copy its transcript to the store: %s", session, why)

    # -- from the store ---------------------------------------------------------------------------
    async def bring(self, session: str, spec: SessionSpec, past: SessionHistory) -> Sequence[Entry]:
        """Write the copy of a conversation to the place where its agent looks.

        Returns the log entries about it. Without a copy it returns nothing: the agent reports the
        loss.
        """
        conversation = past.session.conversation
        find = spec.of(past.session.agent).transcript
        path = None if conversation is None else await asyncio.to_thread(find, conversation)
        copy = None if path is None else await self._get(session)
        if path is None or copy is None or copy[0].conversation != conversation:
            return ()
        head, text = copy
        try:
            put = await asyncio.to_thread(write, path, head, text)
        except OSError as exc:
            log.warning("session %s: cannot write its transcript to %s: %s", session, path, exc)
            return ()
        missing = 0 if put is CopyResult.KEPT else await self._missing(session, head.seq, past)
        if put is CopyResult.WRITTEN or missing:
            said = {"conversation": conversation, "turn": head.turn, "missing": missing}
            log.info("session %s: transcript restored (missing_turns=%d)", session, missing)
            return (entry(None, kinds.SESSION_CONTEXT_RESTORED, **said),)
        return ()

    async def _get(self, session: str) -> tuple[TranscriptHead, bytes] | None:
        why = ""
        for _ in range(BRING_ATTEMPTS_MAX):
            try:
                async with asyncio.timeout(BRING_SECONDS_MAX):
                    data = await self._kept.get(session)
                return None if data is None else await asyncio.to_thread(unpack, data)
            except (StoreError, TimeoutError, ValueError) as exc:
                why = str(exc) or "timeout"
        log.warning("session %s: cannot read the copy of its transcript: %s", session, why)
        return None

    async def _missing(self, session: str, seq: int, past: SessionHistory) -> int:
        """Count the turns that began after an event, according to the log.

        The turn during which the host died counts too.
        """
        turns = {turn.id for turn in (past.session.turn, past.session.own) if turn is not None}
        for _ in range(PAGES_MAX):
            events = (await self._store.read(session, seq)).events
            if not events:
                break
            ended = (
                event
                for event in events
                if event.kind == kinds.TURN_ENDED and event.turn is not None
            )
            turns |= {str(event.turn) for event in ended if event.body["outcome"] not in _UNSENT}
            seq = events[-1].seq
        return len(turns)


# -- copy format ---------------------------------------------------------------------------------
def pack(due: _Due, found: _File, redactor: Redactor | None) -> bytes:
    """Build a copy. Raises `Refused` if the file contains a secret."""
    if redactor is not None and any(
        redactor.redact(line) is not line for line in found.text.split(b"\n")
    ):
        raise Refused("it contains a secret")
    head = TranscriptHead(
        VERSION, due.conversation, due.seq, due.turn, len(found.text), found.mtime_ns
    )
    # Compress it: transcripts are repetitive text, and the whole file is sent after each turn.
    return json.dumps(head).encode() + b"\n" + zlib.compress(found.text, 1)


def unpack(data: bytes) -> tuple[TranscriptHead, bytes]:
    """Decode a copy. Raises `ValueError` if it is invalid."""
    line, _, body = data.partition(b"\n")
    found = json.loads(line)
    if not isinstance(found, list) or found[:1] != [VERSION]:
        raise ValueError("it has another version")
    if [type(each) for each in cast(list[object], found)] != [int, str, int, str, int, int]:
        raise ValueError("its header is invalid")
    head = TranscriptHead(*cast(list[Any], found))
    if head.seq < 0 or not 0 <= head.size <= FILE_BYTES_MAX or not 0 <= head.mtime_ns < 1 << 62:
        raise ValueError("its header has invalid values")
    inflating = zlib.decompressobj()
    try:
        text = inflating.decompress(body, FILE_BYTES_MAX + 1)
    except zlib.error as exc:
        raise ValueError(f"cannot decompress it: {exc}") from exc
    if len(text) != head.size or not inflating.eof:
        raise ValueError("its length differs from its header")
    return head, text


# -- files, read and written in a thread because a home may be on a network ----------------------
def _find(due: _Due, seen: tuple[Path, int, int] | None) -> _File | None:
    """Read the transcript of a turn; None if there is nothing to copy.

    An agent may have written nothing, or may have written elsewhere.
    """
    path = due.find(due.conversation)
    return None if path is None else read(path, seen)


def read(path: Path, seen: tuple[Path, int, int] | None = None) -> _File | None:
    """Read a transcript; None if it does not exist or equals `seen`."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        now = path, found.st_size, found.st_mtime_ns
        if now == seen:
            return None
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, f"{path} is not a regular file")
        text = file.read(FILE_BYTES_MAX + 1)
    if len(text) > FILE_BYTES_MAX:
        raise OSError(errno.EFBIG, f"{path} is larger than {FILE_BYTES_MAX >> 20} MiB")
    if path.suffix == ".jsonl":
        # The agent may be in the middle of writing a line.
        text = text[: text.rfind(b"\n") + 1]
    return _File(text, found.st_mtime_ns, now)


def write(path: Path, head: TranscriptHead, text: bytes) -> CopyResult:
    """Write a copy atomically, readable by its user only.

    A local file is kept if it continues where the copy ends, or if it is newer. The second test
    trusts the clocks of two machines to agree. A local file that is a prefix of the copy is
    replaced.
    """
    there = read(path)
    if there is not None:
        if there.text == text:
            return CopyResult.SAME
        is_ahead = there.text.startswith(text) or there.mtime_ns >= head.mtime_ns
        if is_ahead and not text.startswith(there.text):
            return CopyResult.KEPT
    _make_folders(path.parent)
    fd, name = tempfile.mkstemp(prefix=".banksman-", dir=path.parent)
    try:
        with open(fd, "wb") as file:
            file.write(text)
        os.utime(name, ns=(head.mtime_ns, head.mtime_ns))
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
    return CopyResult.WRITTEN


def _make_folders(folder: Path) -> None:
    """Create missing folders, accessible by their user only."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        with suppress(FileExistsError):
            each.mkdir(mode=0o700)
