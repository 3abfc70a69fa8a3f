"""Record of a session whose process waits for the next host, and the claim of both by that host.

    old host:   write the record ──► hand over the process ──► log `session.handed_over`, release
    next host:  claim the session, read the record, claim the process ──► log `process.adopted`

A host that is killed has kept a record too, if the process is to survive it: `crash_record.py`.

The log has the name of the hold. A private file (`process/hold_record.py`) has the secret of the
hold and the live state of the session. The state is not in the log, because it may contain secrets
that the log must not store: a queued prompt, or half a line of the agent.

If the old host is killed before the log has the name, the next host finds the record by the id of
the session (`unlogged`). The state in it is still that of the end of the log.

The store decides between two hosts, because each host claims the session first. If a host cannot
take the process over, it settles the session as after the death of the old host.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from banksman.core.process_facts import Stream
from banksman.core.session import live_state
from banksman.core.session.ask_queue import Hold
from banksman.core.session.event import PROCESS_ADOPTED, Entry, entry
from banksman.core.session.history import SessionHistory
from banksman.core.session.session_config import Config
from banksman.core.session.state import ProcessPhase, Replacement, Session
from banksman.errors import BanksmanError, MachineError, Refused, StoreTooNew
from banksman.process import adoption, hold_record
from banksman.process.adoption import Claimed
from banksman.process.lease_page import LeasePage
from banksman.process.orphans import trace
from banksman.sessions import crash_record
from banksman.sessions.crash_record import Beginning, Header, Kept, Lines, Moment, RecordFile

log = logging.getLogger("banksman")

# Two event loops of one machine read the same clock. A loop may cache its time for a while.
CLOCKS_APART_MAX = 5.0
# Change the number with every change that another version cannot read.
FORMAT = "banksman-held-1"


class HeldHeader(msgspec.Struct, frozen=True, kw_only=True):
    """First line of the record of a process that was handed over.

    `store`: see `Log.identity`. Older versions wrote the record as one line, which has neither
    format nor store.
    """

    session: str
    format: str = ""
    store: str = ""


_header_decoder = msgspec.json.Decoder(HeldHeader)


class HeldSession(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """State that the next host needs beyond the log.

    `head`: the last seq before `session.handed_over`. `clock`: what the event loop's time was ahead
    of CLOCK_MONOTONIC. `partial`: the incomplete line of the agent. `timers`: those of the event
    loop, by kind, subject and time. `walls`: the same by the wall clock. `turns`: where the events
    of each open and each waiting ask begin. `redaction`: see `StreamedRedactor.memory`. `offset`:
    the bytes of stdout that were read, if the process can survive its host.
    """

    secret: bytes
    session: str
    head: int
    clock: float
    state: Any
    partial: bytes
    timers: tuple[tuple[str, str, float], ...] = ()
    walls: tuple[tuple[str, str, float], ...] = ()
    turns: Mapping[str, int] = {}
    redaction: Any = None
    offset: int | None = None


def encode(held: HeldSession, store: str) -> bytes:
    """Encode a record. Raises if the state has something that cannot be encoded."""
    header = HeldHeader(session=held.session, format=FORMAT, store=store)
    return msgspec.json.encode(header) + b"\n" + msgspec.json.encode(held)


def read(name: str) -> HeldSession:
    """Read the record of a hold. `NotFound`: it has none."""
    line = hold_record.read(name).rpartition(b"\n")[2]
    try:
        return msgspec.json.decode(line, type=HeldSession)
    except msgspec.MsgspecError as exc:
        message = f"cannot read the record of held process {name}: {exc}"
        raise StoreTooNew(message, hint="use the version of Banksman that wrote it") from exc


def clock() -> float:
    """Return how far the event loop's time is ahead of CLOCK_MONOTONIC."""
    return asyncio.get_running_loop().time() - time.monotonic()


class Adopted(NamedTuple):
    """A process that this host has claimed, and the state in which its session continues.

    `hold`: the name of its hold. `begins`: where its journal begins, if it can survive this host.
    Of a host that was killed: `unsent`: a frame that it has logged and not written. `is_written`:
    it had not noticed that a frame was written.
    """

    claimed: Claimed
    held: HeldSession
    session: Session
    hold: str
    begins: Beginning | None = None
    unsent: bytes | None = None
    is_written: bool = False

    def entries(self, past: SessionHistory, others: Sequence[Entry]) -> list[Entry]:
        """Return the entry of the take-over, the first one of the new owner.

        `others`: the entries that follow it in the same append. Raises `MachineError` if the record
        cannot be written.
        """
        adopted = entry(
            None,
            PROCESS_ADOPTED,
            process=self.session.process.number,
            pid=self.claimed.pid,
            hold=self.hold,
            born=trace(self.claimed.pid),
        )
        begins = self.begins
        if begins is not None and begins.record is not None and begins.last is not None:
            # This host may be killed before or after this append.
            after = begins.last._replace(head=past.session.head + 1 + len(others))
            begins.record.rewrite((begins.last, after))
        return [adopted]

    def behind(self, past: SessionHistory) -> Session:
        """Return the state with the log as it is now."""
        head = past.session.head
        # Effects that waited for the log of a host that was killed are still due.
        committed = self.session.committed if self.session.deferred else head
        return replace(self.session, head=head, committed=committed)

    def started_otherwise(self) -> Adopted:
        """Return it with a process that was started with another spec than the current one."""
        process = replace(self.session.process, stale=Replacement.NOW)
        return self._replace(session=replace(self.session, process=process))


def is_held(store: str, session: str, past: SessionHistory) -> bool:
    """Whether the process of a session may still wait for its next host."""
    if past.held is None:
        is_handed = unlogged(store, session) is not None
    else:
        is_handed = time.time() < past.held.until
    return is_handed or bool(crash_record.find(store, session))


def unlogged(store: str, session: str) -> str | None:
    """Return the hold of a session whose host died before it could log the hand-over."""
    return _unlogged(hold_record.first_lines(msgspec.json.encode(session)), store, session)


def _unlogged(lines: Lines, store: str, session: str) -> str | None:
    return next((hold for id, hold in _recorded(lines, store) if id == session), None)


class WaitingProcesses(NamedTuple):
    """Sessions whose process may wait for a host: it was handed over, or survives its host."""

    handed_over: frozenset[str]
    surviving: frozenset[str]


def waiting(store: str) -> WaitingProcesses:
    """Return the sessions of a store whose process may wait for a host. Never raises."""
    lines = list(hold_record.first_lines())
    handed_over = frozenset(session for session, _hold in _recorded(lines, store))
    return WaitingProcesses(handed_over, frozenset(crash_record.sessions(lines, store)))


def _recorded(lines: Lines, store: str) -> Iterator[tuple[str, str]]:
    for name, line in lines:
        header = _header(line)
        if header is not None and header.store in ("", store):
            yield header.session, name


def _header(line: bytes) -> HeldHeader | None:
    # The record of something else has another first line.
    with contextlib.suppress(msgspec.MsgspecError):
        header = _header_decoder.decode(line)
        if header.format in ("", FORMAT):
            return header
    return None


def _is_of_another_store(hold: str, store: str) -> bool:
    """Whether the log with this hold is a copy: the process belongs to the original."""
    header = _header(hold_record.first_line(hold))
    return header is not None and header.store not in ("", store)


async def claim(
    store: str, session: str, past: SessionHistory, config: Config, lease: LeasePage | None
) -> Adopted | None:
    """Claim the held process of a claimed session; None if there is none to continue.

    `store`: see `Log.identity`.

    Never raises for a process that cannot be continued: that one is ended by its keeper. Raises
    `MachineError` if this host has too few fds to claim it: the process still waits for a host.
    """
    argv = tuple(os.fsencode(word) for word in (past.opened or {}).get("command") or ("agent",))
    adopted: Adopted | None = None
    # Once: this host owns the session, so no other one adds a record of it.
    lines = list(hold_record.first_lines(msgspec.json.encode(session)))
    hold = None if past.held is None else past.held.hold
    if hold is None and past.process is not None:
        hold = _unlogged(lines, store, session)
    if hold is not None and not _is_of_another_store(hold, store):
        adopted = await _claim_handed(session, past, config, hold, argv, lease)
        hold_record.remove(hold)
    try:
        for name, header in crash_record.among(lines, store, session):
            with_state = None if adopted is not None else (past, config)
            try:
                found = await _claim_kept(name, header, with_state, argv, lease)
            except MachineError:
                if adopted is None:
                    raise
                continue  # A process before that one. Its keeper ends it.
            if found is None:
                hold_record.remove(name)
            adopted = adopted or found
    except BaseException:
        if adopted is not None:
            adopted.claimed.close()
        raise
    return adopted


async def end(store: str, session: str) -> None:
    """End what waits for a host of a deleted session: no host can continue it."""
    argv = (b"agent",)
    lines = list(hold_record.first_lines(msgspec.json.encode(session)))
    for id, name in _recorded(lines, store):
        if id == session:
            with _closing_unless_continued(session, "was handed over") as processes:
                processes.append(
                    await adoption.claim(name, read(name).secret, argv=argv, lease=None)
                )
                processes[0].close()
            hold_record.remove(name)
    for name, header in crash_record.among(lines, store, session):
        await _claim_kept(name, header, None, argv, None)
        hold_record.remove(name)


@contextmanager
def _closing_unless_continued(session: str, what: str) -> Generator[list[Claimed]]:
    """Close the claimed process of the block if an exception leaves it.

    Its keeper ends the process. The block adds the process to the list. An error of the claim is
    logged and suppressed; any other exception leaves this block too. So does a lack of fds before
    the claim: the hold goes on, and this host or another one can try again.
    """
    claimed: list[Claimed] = []
    try:
        yield claimed
    except BaseException as exc:
        for process in claimed:
            process.close()
        if not isinstance(exc, BanksmanError) or (not claimed and _is_lack_of_fds(exc)):
            raise
        log.warning("session %s: its process %s and is lost: %s", session, what, exc)


def _is_lack_of_fds(exc: BanksmanError) -> bool:
    return isinstance(exc, MachineError) and exc.errno in {errno.EMFILE, errno.ENFILE}


async def _claim_handed(  # noqa: PLR0917
    session: str,
    past: SessionHistory,
    config: Config,
    name: str,
    argv: tuple[bytes, ...],
    lease: LeasePage | None,
) -> Adopted | None:
    """Claim a process that its host has handed over. None: it cannot be continued."""
    with _closing_unless_continued(session, "was handed over") as processes:
        held = read(name)
        claimed = await adoption.claim(name, held.secret, argv=argv, lease=lease)
        processes.append(claimed)
        head = held.head + (past.held is not None)
        if (held.session, head) != (session, past.session.head):
            raise _of_another_moment()
        state = _checked(live_state.decode(held.state, config), past, held.clock)
        return Adopted(claimed, held, state, name, _begin_again(claimed, held))
    return None


def _begin_again(claimed: Claimed, held: HeldSession) -> Beginning | None:
    """Return where the journal of a process begins that was handed over."""
    mark = claimed.input_state()
    if held.offset is None or mark is None:
        return None  # It was started without spools.
    claimed.offsets = {Stream.STDOUT: held.offset}
    return Beginning(offset=held.offset, line=held.partial, finished=mark.finished)


async def _claim_kept(
    name: str,
    header: Header,
    with_state: tuple[SessionHistory, Config] | None,
    argv: tuple[bytes, ...],
    lease: LeasePage | None,
) -> Adopted | None:
    """Claim a process whose host was killed. None: it cannot be continued, and its keeper ends it.

    `with_state`: the log of the session; None: another process is the one to continue.
    """
    with _closing_unless_continued(header.session, "has survived its host") as processes:
        claimed = await adoption.claim(name, header.secret, argv=argv, lease=lease)
        processes.append(claimed)
        if with_state is not None:
            return _continued(name, header, claimed, *with_state)
        claimed.close()
    return None


def _continued(
    name: str, header: Header, claimed: Claimed, past: SessionHistory, config: Config
) -> Adopted:
    """Continue where the log ends. Raises if that is not possible."""
    kept = crash_record.read(name, past.session.head)
    row = kept.row
    state = _checked(kept.session(config), past, header.clock)
    if not state.process.is_there:
        raise Refused("its session has no process any more, or does not know it yet")
    unsent, is_written = _frames(claimed, kept, state)
    claimed.offsets = {Stream.STDOUT: row.offset}
    held = HeldSession(
        secret=header.secret,
        session=header.session,
        head=row.head,
        clock=header.clock,
        state=None,
        partial=kept.line,
        timers=kept.timers,
        walls=kept.walls,
        turns=kept.turns,
        redaction=kept.redaction,
        offset=row.offset,
    )
    last = Moment(
        head=row.head,
        state=state,
        offset=row.offset,
        line=kept.line,
        line_bytes=len(kept.line),
        timers=kept.timers,
        walls=kept.walls,
        turns=kept.turns,
        redaction=kept.redaction,
        finished=row.finished,
        writing=row.writing,
    )
    record = RecordFile(name, header, (last,))
    begins = Beginning(record, last, row.offset, kept.line, row.finished)
    return Adopted(claimed, held, state, name, begins, unsent, is_written)


def _frames(claimed: Claimed, kept: Kept, state: Session) -> tuple[bytes | None, bool]:
    """Return the frame that was not written, and whether one was written without a note.

    Raises if that is unknown.
    """
    mark, row = claimed.input_state(), kept.row
    if mark is None:
        if state.process.phase is not ProcessPhase.STOPPING:
            raise Refused("its stdin is closed")
        return None, False
    if mark.is_writing:
        raise Refused("a frame was being written to it")
    if mark.finished == row.finished:
        return row.writing, False
    if mark.finished == row.finished + 1 and row.writing is not None:
        return None, True
    raise Refused("it has got a frame that the log does not have")


def _checked(state: Session, past: SessionHistory, old_clock: float) -> Session:
    """Compare a state with the log. Raises if it is that of another moment."""
    if abs(clock() - old_clock) > CLOCKS_APART_MAX:
        hint = "use the same kind of event loop"
        raise Refused("the clock of this host is not that of the old one", hint=hint)
    if _asks(state) != _asks(past.session):
        raise _of_another_moment()
    return state


def _of_another_moment() -> StoreTooNew:
    return StoreTooNew("its record is not that of the log", hint="report this as a bug")


def _asks(state: Session) -> tuple[list[str], list[str]]:
    """Return the ids of the open turns and of the waiting asks, by their class."""
    opened = [turn.id for turn in (state.own, state.turn) if turn is not None]
    # The log has the order within a class only. A requeued turn stands before a waiting hold of its
    # class, and the log knows no holds.
    turns = [turn for turn in state.queue if not isinstance(turn, Hold)]
    turns.sort(key=lambda turn: turn.priority)
    return opened, [ask.id for turn in turns for ask in turn.asks]
