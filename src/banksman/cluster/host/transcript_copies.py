"""The agent's own memory of a conversation, for whoever takes the session over: a copy of its transcript in the store.

The log has what was said; the agent remembers by a file of its own, on the machine that it ran on. Where its profile
says which file that is (sessions/profile.py), the owner puts a copy into the store after each turn, and the
next owner puts it where its agent looks for it, before a process is started. Where nobody knows the file, or nothing
was copied, the agent is asked to go on with a conversation that it does not know, says so, and the log has
`session.context_lost`.

A turn never waits for its copy, so a copy may be behind the log: its host died before, or could not write it. A copy
says up to which event of the log it goes; what was said since is counted when it is brought along, and the log has it
(`session.context_restored`). What is brought is never silently less than what was there.

A copy is as the agent wrote it, or there is none: an agent may not know its own words again if something was redacted
from them, so what holds one of the host's secrets is not copied.
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
from banksman.core.session import event as kinds
from banksman.core.session.event import Entry, entry
from banksman.core.session.history import SessionHistory
from banksman.core.session.outcome import Kind
from banksman.core.wire.redaction import Redactor
from banksman.errors import BanksmanError, Refused, StoreError
from banksman.store.log import Log
from banksman.tasks import OwnedTasks

if TYPE_CHECKING:
    from banksman.sessions.session import Session
    from banksman.sessions.session_spec import SessionSpec

log = logging.getLogger("banksman")

# A transcript that is longer is not copied, and a copy that says it is longer is not believed.
FILE_BYTES_MAX = 16 << 20
# On their way at a time, of all sessions of a host: what else goes to the servers is more urgent.
COPIES_MAX = 2
# An agent may write the last of a turn a moment after it has said that it is over: so the file is looked at once more.
SETTLE_SECONDS = 1.0
COPY_SECONDS_MAX = 60.0
# To bring one along is tried so often. If the cluster is away, whoever takes over cannot go on anyway.
BRING_ATTEMPTS_MAX = 2
BRING_SECONDS_MAX = 15.0
# How long a session that leaves may wait for its last copy, and a host that closes for all of them.
WAIT_SECONDS_MAX = 5.0

# What is looked at of a log that its copy is behind of. Beyond this there are more turns missing than are counted.
PAGES_MAX = 100

VERSION = 1
_UNSENT = frozenset((Kind.WITHDRAWN, Kind.REFUSED))


class TranscriptHead(NamedTuple):
    """What a copy is of. `seq`: all turns that had ended by this event of the log are in it; `turn`: the last of them.
    `mtime_ns`: of the file."""

    version: int
    conversation: str
    seq: int
    turn: str
    size: int
    mtime_ns: int


class _Due(NamedTuple):
    """A turn that is over: what the copy is of that is to be made."""

    conversation: str
    seq: int
    turn: str
    find: Callable[[str], Path | None]


class _File(NamedTuple):
    """A transcript, as it was found. `seen`: it is another one when this has changed."""

    text: bytes
    mtime_ns: int
    seen: tuple[Path, int, int]


class _Mirror:
    """Of one session."""

    def __init__(self) -> None:
        # The last one that is not copied yet.
        self.due: _Due | None = None
        self.task: asyncio.Task[None] | None = None
        # What was copied last.
        self.seen: tuple[Path, int, int] | None = None
        # What was last wrong: the same is not said after each turn.
        self.wrong = ""
        # Its process is gone, or we go: nothing more will be written, and nothing is waited for.
        self.is_final = asyncio.Event()


class CopyResult(enum.Enum):
    """What became of a copy that was to be put where the agent looks."""

    WRITTEN, SAME, KEPT = range(3)


class TranscriptCopies:
    """Of one host. `close` ends what is on its way."""

    def __init__(self, store: Log, kept: interfaces.Transcripts, redactor: Redactor | None = None) -> None:
        """`redactor`: of what must not be written to the store."""
        self._store = store
        self._kept = kept
        self._redactor = redactor
        self._mirrors: dict[str, _Mirror] = {}
        self._copies = asyncio.Semaphore(COPIES_MAX)
        self._tasks = OwnedTasks()

    # -- out ---------------------------------------------------------------------------------------------------------
    def mirror(self, session: Session, turn: str) -> None:
        """The turn is over. One copy at a time: what ends meanwhile is in the next one."""
        conversation, find = session.conversation, session.transcript_of
        if conversation is None or find is None:
            return
        mirror = self._mirrors.setdefault(session.id, _Mirror())
        mirror.is_final.clear()
        mirror.due = _Due(conversation, self._store.head(session.id).seq, turn, find)
        if mirror.task is None or mirror.task.done():
            mirror.task = self._tasks.start(self._mirror(session.id, mirror))

    def finish(self, session: str) -> None:
        """It is here no more. What is on its way goes on, for it is what the next host needs."""
        mirror = self._mirrors.get(session)
        if mirror is not None:
            mirror.is_final.set()
            if mirror.task is None or mirror.task.done():
                del self._mirrors[session]

    async def wait_mirrored(self, session: str) -> None:
        """Until what is over is copied, as far as that takes no longer than a bound."""
        mirror = self._mirrors.get(session)
        if mirror is not None and mirror.task is not None:
            await asyncio.wait((mirror.task,), timeout=WAIT_SECONDS_MAX)

    def stop(self) -> None:
        """What is here is not ours any more."""
        self._tasks.cancel()
        self._mirrors.clear()

    async def close(self) -> None:
        for mirror in self._mirrors.values():
            mirror.is_final.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT_SECONDS_MAX):
                await self._tasks.wait()
        await self._tasks.end()

    async def _mirror(self, session: str, mirror: _Mirror) -> None:
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
        """Whatever is wrong is a warning: the turn is over, and the next one may go better."""
        try:
            async with self._copies, asyncio.timeout(COPY_SECONDS_MAX):
                found = await asyncio.to_thread(_find, due, mirror.seen)
                if found is None:
                    return
                data = await asyncio.to_thread(pack, due, found, self._redactor)
                await self._kept.put(session, data)
                mirror.seen, mirror.wrong = found.seen, ""
                if self._store.find(session) is None:
                    await self._kept.forget(session)  # It was deleted meanwhile, with all that was kept of it.
        except (OSError, BanksmanError) as exc:  # A timeout is an OSError.
            why = str(exc) or "it takes too long"
            if why != mirror.wrong:
                mirror.wrong = why
                log.warning("! session %s: its transcript is not copied, and stays on this host: %s", session, why)

    # -- in ----------------------------------------------------------------------------------------------------------
    async def bring(self, session: str, spec: SessionSpec, past: SessionHistory) -> Sequence[Entry]:
        """Put the conversation that it is to go on with where its agent looks for it. What is to be said of that; what
        is not brought the agent will say itself."""
        conversation = past.session.conversation
        path = None if conversation is None else await asyncio.to_thread(spec.transcript, conversation)
        copy = None if path is None else await self._get(session)
        if path is None or copy is None or copy[0].conversation != conversation:
            return ()
        head, text = copy
        try:
            put = await asyncio.to_thread(write, path, head, text)
        except OSError as exc:
            log.warning("! session %s: its transcript cannot be put to %s: %s", session, path, exc)
            return ()
        missing = 0 if put is CopyResult.KEPT else await self._missing(session, head.seq, past)
        if put is CopyResult.WRITTEN or missing:
            said = {"conversation": conversation, "turn": head.turn, "missing": missing}
            log.info("session %s: its transcript is brought along, without its last %d turns", session, missing)
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
                why = str(exc) or "it takes too long"
        log.warning("! session %s: the copy of its transcript cannot be read: %s", session, why)
        return None

    async def _missing(self, session: str, seq: int, past: SessionHistory) -> int:
        """The turns that were begun since that event, as far as the log says; also the one that its host died over."""
        turns = {turn.id for turn in (past.session.turn, past.session.own) if turn is not None}
        for _ in range(PAGES_MAX):
            events = (await self._store.read(session, seq)).events
            if not events:
                break
            ended = (event for event in events if event.kind == kinds.TURN_ENDED and event.turn is not None)
            turns |= {str(event.turn) for event in ended if event.body["outcome"] not in _UNSENT}
            seq = events[-1].seq
        return len(turns)


# -- copies ------------------------------------------------------------------------------------------------------------
def pack(due: _Due, found: _File, redactor: Redactor | None) -> bytes:
    if redactor is not None and any(redactor.redact(line) is not line for line in found.text.split(b"\n")):
        raise Refused("it holds a secret")
    head = TranscriptHead(VERSION, due.conversation, due.seq, due.turn, len(found.text), found.mtime_ns)
    # It is text that repeats itself, and all of it goes over the wire after each turn.
    return json.dumps(head).encode() + b"\n" + zlib.compress(found.text, 1)


def unpack(data: bytes) -> tuple[TranscriptHead, bytes]:
    """`ValueError`: it is none."""
    line, _, body = data.partition(b"\n")
    found = json.loads(line)
    if not isinstance(found, list) or found[:1] != [VERSION]:
        raise ValueError("it is of another version")
    if [type(each) for each in cast(list[object], found)] != [int, str, int, str, int, int]:
        raise ValueError("its head cannot be read")
    head = TranscriptHead(*cast(list[Any], found))
    if head.seq < 0 or not 0 <= head.size <= FILE_BYTES_MAX or not 0 <= head.mtime_ns < 1 << 62:
        raise ValueError("its head does not make sense")
    inflating = zlib.decompressobj()
    try:
        text = inflating.decompress(body, FILE_BYTES_MAX + 1)
    except zlib.error as exc:
        raise ValueError(f"it cannot be unpacked: {exc}") from exc
    if len(text) != head.size or not inflating.eof:
        raise ValueError("it is not as long as its head says")
    return head, text


# -- files, in a thread, for a home may be on a network ----------------------------------------------------------------
def _find(due: _Due, seen: tuple[Path, int, int] | None) -> _File | None:
    """None: there is nothing to copy. An agent need not have written anything, or may do so elsewhere."""
    path = due.find(due.conversation)
    return None if path is None else read(path, seen)


def read(path: Path, seen: tuple[Path, int, int] | None = None) -> _File | None:
    """None: there is none, or it is as it was seen."""
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
            raise OSError(errno.EINVAL, f"{path} is no plain file")
        text = file.read(FILE_BYTES_MAX + 1)
    if len(text) > FILE_BYTES_MAX:
        raise OSError(errno.EFBIG, f"{path} has more than {FILE_BYTES_MAX >> 20} MiB")
    if path.suffix == ".jsonl":
        # The agent may be in the middle of a line.
        text = text[: text.rfind(b"\n") + 1]
    return _File(text, found.st_mtime_ns, now)


def write(path: Path, head: TranscriptHead, text: bytes) -> CopyResult:
    """Whole or not at all, for its user only. What is there is kept if it goes on where the copy ends, or is newer, as
    far as two machines have one time; what the copy goes on from is replaced."""
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
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        with suppress(FileExistsError):
            each.mkdir(mode=0o700)
