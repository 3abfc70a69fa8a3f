"""The same child without a keeper, where there is no subreaper: macOS, by best effort.

It has the face of `process.Process` and keeps what can be kept without the kernel's help: the command runs in a session
of its own, its group is ended by group, and the descendants that `ps` shows are ended one by one, each checked by its
start time. What it cannot know, it does not promise: a process that left the group and whose parent died before we
looked is nobody's, and when this program is killed, its commands live on.

So with a lease, too: a host that loses what it has claimed ends its commands by its own ladder, in time. But one that
is stopped, blocked or killed does nothing, and there is no keeper to do it in its place: until it goes on, or until
somebody ends them, such commands outlive the lease.

A thread waits for each child, since the loop must not, and its death is told to the loop. A pid is signalled only while
its process is known to be unreaped, or its start time still matches.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from banksman.core.process_facts import (
    Exited,
    ProcessesSwept,
    ProcessFact,
    Started,
    Stream,
    Survivor,
    SweepEnded,
    Swept,
    TreeEnded,
)
from banksman.errors import no_room
from banksman.process import syscalls
from banksman.process.keeper.sweep import NEWER_GRACE_SECONDS, NEWER_KILL_SECONDS_MAX
from banksman.process.launch import PIPES, Launch, Target
from banksman.process.lease_page import LeasePage
from banksman.process.process import start_error
from banksman.process.stdio import TAKE_TERMINAL, ChildStreams, Size, Stdin

# How often `ps` is asked whether the tree is gone, and how long after KILL until those who are left are named.
LOOK_SECONDS = 0.05
KILL_SECONDS_MAX = 5.0
_MONTHS = "JanFebMarAprMayJunJulAugSepOctNovDec"

# pid, parent, group, start time as `ps` writes it, command
Row = tuple[int, int, int, str, str]


class PortableProcess:
    """One child of our own."""

    def __init__(
        self,
        launch: Launch,
        *,
        stdin: Stdin,
        grace: float,
        linger: float,
        deadline: float | None,
        on_fact: Callable[[ProcessFact], None],
        terminal: Size | None = None,
        lease: LeasePage | None = None,
        outputs: tuple[Target, Target] = PIPES,
    ) -> None:
        del linger, deadline, lease  # For a keeper that goes on alone; there is none.
        self.pid: int | None = None
        self.grace = grace
        self._loop = asyncio.get_running_loop()
        self._on_fact = on_fact
        self._has_exited = self._has_touched = self._is_gone = self._is_over = False
        self._kill_began: float | None = None
        self._known: dict[int, Row] = {}
        self._look_timer: asyncio.TimerHandle | None = None
        try:
            self._streams = ChildStreams(stdin, on_fact, terminal, outputs)
        except OSError as exc:
            raise no_room("fds", exc) from exc
        self.stdin = self._streams.stdin
        try:
            fds = {target: fd for fd, target in self._streams.theirs}
            if terminal is not None:
                fds |= {1: fds[0], 2: fds[0]}
            self._child = _spawn(launch, fds, takes_terminal=terminal is not None)
        except BaseException:
            self._streams.close()
            raise
        self._streams.close_theirs()
        self.pid = self._child.pid
        self._streams.resume()
        self._loop.call_soon(self._on_fact, Started(self.pid, time.monotonic()))
        threading.Thread(target=self._wait, name=f"banksman-{self.pid}", daemon=True).start()

    # -- what is heard -----------------------------------------------------------------------------------------------
    def _wait(self) -> None:
        result = self._child.wait()
        with contextlib.suppress(RuntimeError):  # The loop is closed; nobody wants to know.
            self._loop.call_soon_threadsafe(self._on_exit, result, time.monotonic())

    def _on_exit(self, result: int, at: float) -> None:
        if self._is_over:
            return
        self._has_exited = True
        self._streams.read_now()
        code, number = (result, None) if result >= 0 else (None, -result)
        self._on_fact(Exited(code, number, at, by_itself=not self._has_touched))
        self._look()

    def hear_now(self) -> None:
        """Nothing to ask: the waiting thread tells."""

    def _look(self) -> None:
        """Is anybody left? Asked again until not, or until KILL has had its time."""
        self._look_timer = None
        if self._is_gone or not self._has_exited:
            return
        left = self._members()
        now = time.monotonic()
        is_given_up = self._kill_began is not None and now > self._kill_began + KILL_SECONDS_MAX
        if left and not is_given_up:
            self._look_timer = self._loop.call_later(LOOK_SECONDS, self._look)
            return
        self._is_gone = True
        survivors = tuple(Survivor(row[0], row[4], "still dying") for row in left)
        self._on_fact(TreeEnded(survivors, now))

    # -- what is done ------------------------------------------------------------------------------------------------
    def term(self, seconds: float) -> None:
        del seconds
        self._has_touched = True
        # While the leader lives its descendants can be found by their parents. Afterwards only those noted here.
        self._members()
        self._signal_group(signal.SIGTERM)
        self._signal_group(signal.SIGCONT)

    def term_rest(self, seconds: float) -> None:
        del seconds
        self._signal_members(signal.SIGTERM)
        self._look_soon()

    def kill(self) -> None:
        self._has_touched = True
        self._kill_began = time.monotonic()
        self._members()
        self._signal_group(signal.SIGKILL)
        self._signal_members(signal.SIGKILL)
        self._look_soon()

    def kill_keeper(self) -> None:
        """There is none."""

    def signal(self, number: int, *, to_group: bool) -> None:
        if to_group:
            self._signal_group(number)
        else:
            self._child.send_signal(number)  # Does nothing once it is reaped.

    def renew(self, seconds: float | None) -> None:
        """Nobody would act on it."""

    def hurry(self, term_at: float, kill_at: float) -> None:
        """Nobody would act on that either."""

    def note_time(self) -> None:
        """`ps` shows the time of day."""

    def sweep(self, since: float, *, ends: bool) -> None:
        """As `Process.sweep`, as far as `ps` tells."""

        def tell(fact: SweepEnded) -> None:
            if not (self._is_over or self._is_gone):
                self._on_fact(fact)

        PortableSweep(self._loop, self._members, tell).begin(since, ends=ends)

    def _look_soon(self) -> None:
        if self._has_exited and self._look_timer is None:
            self._look_timer = self._loop.call_later(LOOK_SECONDS, self._look)

    def _signal_group(self, number: int) -> None:
        if self._child.returncode is None or any(row[2] == self.pid for row in self._members()):
            with contextlib.suppress(OSError):
                os.killpg(self._child.pid, number)

    def _signal_members(self, number: int) -> None:
        swept: list[Swept] = []
        for row in self._members():
            if row[0] != self.pid:
                with contextlib.suppress(OSError):
                    os.kill(row[0], number)
                    swept.append(Swept(row[0], row[4]))
        if swept:
            self._on_fact(ProcessesSwept(tuple(swept)))

    def _members(self) -> list[Row]:
        """Who of the tree is alive: by parent, by group, and those we knew that are still the same process."""
        rows = {row[0]: row for row in _ps()}
        children: dict[int, list[int]] = {}
        for row in rows.values():
            children.setdefault(row[1], []).append(row[0])
        known = {pid: row for pid, row in self._known.items() if pid in rows and rows[pid][3] == row[3]}
        members = dict(known)
        # A group's number is in use as long as it has a member. Only if a process with the leader's own number is there
        # after the leader was reaped, the number was given away, and the group is somebody else's.
        if self._child.returncode is None or self._child.pid not in rows:
            members |= {row[0]: row for row in rows.values() if row[2] == self._child.pid}
        # One of the group may have a child that has left it.
        waiting = [self._child.pid, *members]
        while waiting:
            for pid in children.get(waiting.pop(), ()):
                if pid not in members:
                    members[pid] = rows[pid]
                    waiting.append(pid)
        members.pop(self._child.pid, None)
        self._known = members
        return list(members.values())

    # -- reading, and the end ----------------------------------------------------------------------------------------
    def read_now(self) -> None:
        self._streams.read_now()

    def widen_stdout(self) -> None:
        self._streams.widen_stdout()

    def resize(self, size: Size) -> None:
        self._streams.resize(size)

    def pause_reading(self, stream: Stream | None = None) -> None:
        self._streams.pause(stream)

    def resume_reading(self, stream: Stream | None = None) -> None:
        self._streams.resume(stream)

    def close_output(self) -> None:
        self._streams.close_output()

    def close(self) -> None:
        if self._is_over:
            return
        self._end_all()
        if self._look_timer is not None:
            self._look_timer.cancel()
        self._streams.close()

    def let_go(self) -> None:
        self._end_all()

    def abandon(self) -> None:
        self._end_all()
        self._streams.forget()

    def forget(self) -> None:
        self._is_over = True
        self._streams.forget()

    def _end_all(self) -> None:
        self._is_over = True
        if not self._is_gone:
            self._signal_group(signal.SIGKILL)
            for row in self._members():
                with contextlib.suppress(OSError):
                    os.kill(row[0], signal.SIGKILL)


def _spawn(launch: Launch, fds: dict[int, int], *, takes_terminal: bool) -> subprocess.Popen[bytes]:
    uid, gid, groups = launch.user[:3] if launch.user is not None else (None, None, None)
    try:
        return subprocess.Popen(
            launch.argv,
            executable=launch.path,
            stdin=fds.get(0, subprocess.DEVNULL),
            stdout=fds.get(1, subprocess.DEVNULL),
            stderr=fds.get(2, subprocess.DEVNULL),
            cwd=launch.cwd,
            env=launch.env,
            umask=launch.inherited.umask,
            pass_fds=launch.pass_fds,
            start_new_session=True,
            # Unsafe in general, because another thread's locks may be held in the child; this one takes none.
            preexec_fn=_preparer(launch.limits, takes_terminal=takes_terminal),  # noqa: PLW1509
            user=uid,
            group=gid,
            extra_groups=groups,
        )
    except subprocess.SubprocessError as exc:
        raise start_error("limits", 22) from exc
    except OSError as exc:
        raise start_error("exec", exc.errno or 0) from exc


def _preparer(limits: dict[str, Any] | None, *, takes_terminal: bool) -> Callable[[], None] | None:
    if limits is None and not takes_terminal:
        return None

    def prepare() -> None:
        if takes_terminal:
            syscalls.ioctl(0, TAKE_TERMINAL, 0)
        if limits is not None and limits["nice"] is not None:
            os.setpriority(os.PRIO_PROCESS, 0, limits["nice"])
        for number, pair in () if limits is None else limits["rlimits"]:
            resource.setrlimit(number, pair)

    return prepare


def _ps() -> list[Row]:
    """Every process, as `ps` shows it on Linux and macOS alike."""
    argv = ["ps", "-axo", "pid=,ppid=,pgid=,stat=,lstart=,command="]
    # Its environment is ours but for the language: the date is compared as text and read by nobody.
    output = subprocess.run(argv, stdout=subprocess.PIPE, check=False, env={**os.environ, "LC_ALL": "C"}).stdout
    rows: list[Row] = []
    for line in output.decode("utf-8", "replace").splitlines():
        pid, parent, group, state, *rest = line.split(None, 9)
        if not state.startswith("Z"):
            rows.append((int(pid), int(parent), int(group), " ".join(rest[:5]), rest[5] if len(rest) > 5 else ""))
    return rows


class PortableSweep:
    """One order to sweep, as far as `ps` tells who was born when. `members`: who of the tree is alive, but for its
    leader.

    `ps` counts births in seconds. Who was born in the very second that is asked about may have been there before, and
    is spared: to leave a tool running is bad, to end an agent's server is worse.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, members: Callable[[], list[Row]], tell: Callable[[SweepEnded], None]
    ) -> None:
        self._loop = loop
        self._members = members
        self._tell = tell
        self._met: dict[int, Row] = {}
        self._left: dict[int, Row] = {}
        self._began = time.monotonic()

    def begin(self, since: float, *, ends: bool) -> None:
        second = int(time.time() - (time.monotonic() - since))
        rows = self._members()
        self._left = _with_descendants((row for row in rows if born(row) > second), rows)
        if not ends:
            left = tuple(Survivor(row[0], row[4], "left as it is") for row in self._left.values())
            self._loop.call_soon(self._tell, SweepEnded(survivors=left))
            return
        self._met = dict(self._left)
        self._signal(signal.SIGTERM, signal.SIGCONT)
        self._loop.call_later(LOOK_SECONDS if self._left else 0, self._look)

    def _look(self) -> None:
        """Who is left of them, and what have they started meanwhile?"""
        rows = self._members() if self._left else []
        same = [row for row in rows if row[0] in self._left and row[3] == self._left[row[0]][3]]
        self._left = _with_descendants(same, rows)
        self._met |= self._left
        seconds = time.monotonic() - self._began
        if not self._left or seconds > NEWER_GRACE_SECONDS + NEWER_KILL_SECONDS_MAX:
            swept = tuple(Swept(row[0], row[4]) for row in self._met.values())
            self._tell(SweepEnded(swept, tuple(Survivor(row[0], row[4], "still dying") for row in self._left.values())))
            return
        if seconds > NEWER_GRACE_SECONDS:
            self._signal(signal.SIGKILL)
        self._loop.call_later(LOOK_SECONDS, self._look)

    def _signal(self, *numbers: int) -> None:
        for pid in self._left:
            for number in numbers:
                with contextlib.suppress(OSError):
                    os.kill(pid, number)


def _with_descendants(roots: Iterable[Row], rows: list[Row]) -> dict[int, Row]:
    children: dict[int, list[Row]] = {}
    for row in rows:
        children.setdefault(row[1], []).append(row)
    found: dict[int, Row] = {}
    waiting = list(roots)
    while waiting:
        row = waiting.pop()
        if row[0] not in found:
            found[row[0]] = row
            waiting.extend(children.get(row[0], ()))
    return found


def born(row: Row) -> float:
    """The second of its birth. Read by hand: `ps` writes it in English here, whatever language this program speaks."""
    _day, month, day, clock, year = row[3].split()
    hours, minutes, seconds = clock.split(":")
    date = (int(year), _MONTHS.index(month) // 3 + 1, int(day), int(hours), int(minutes), int(seconds), 0, 0, -1)
    return time.mktime(date)
