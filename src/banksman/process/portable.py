"""Child process without a keeper, for systems without subreapers (macOS). Best effort.

`PortableProcess` has the interface of `ChildProcess` and keeps the promises that are possible
without the kernel's help. `PortableSweep` is the counterpart of `keeper/newer_sweep.py`. The
command runs in a separate session. A stop signals its group, and then each descendant that `ps`
shows, after a check of its start time. Two promises are missing. A process is never found if it
left the group and its parent died before a look. When this program is killed, its commands keep
running.

The same holds for leases. A host that loses its claims ends its commands by its ladder, in time.
But a host that is stopped, blocked or killed does nothing, and no keeper acts in its place. Such
commands outlive the lease until the host resumes or a person ends them.

A thread waits for each child, since the loop must not block, and reports its death to the loop. A
pid is signalled only while its process is known to be unreaped, or while its start time still
matches.
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
from banksman.errors import Refused, no_room
from banksman.process import syscalls
from banksman.process.keeper.newer_sweep import NEWER_GRACE_SECONDS, NEWER_KILL_SECONDS_MAX
from banksman.process.launch import PIPES, Launch, Source, Target
from banksman.process.lease_page import LeasePage
from banksman.process.start_errors import start_error
from banksman.process.stdio import TAKE_TERMINAL, ChildStreams, Size

# Interval of the looks with `ps`, and the time after KILL until the survivors are reported.
LOOK_SECONDS = 0.05
KILL_SECONDS_MAX = 5.0
_MONTHS = "JanFebMarAprMayJunJulAugSepOctNovDec"

# pid, parent, group, start time as `ps` prints it, command
Row = tuple[int, int, int, str, str]


class PortableProcess:
    """One child without a keeper."""

    def __init__(
        self,
        launch: Launch,
        *,
        stdin: Source,
        grace: float,
        linger: float,
        deadline: float | None,
        on_fact: Callable[[ProcessFact], None],
        terminal: Size | None = None,
        lease: LeasePage | None = None,
        outputs: tuple[Target, Target] = PIPES,
    ) -> None:
        del linger, deadline, lease  # Only a keeper could act on these.
        self.pid: int | None = None
        # There is no keeper.
        self.keeper_pid: int | None = None
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

    # -- events -----------------------------------------------------------------------------------
    def _wait(self) -> None:
        result = self._child.wait()
        with contextlib.suppress(RuntimeError):  # The loop is closed, so no callback can run.
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
        """Does nothing: the waiting thread reports the exit."""

    def _look(self) -> None:
        """Check whether processes are left, until none is, or until KILL has had its time."""
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

    # -- orders -----------------------------------------------------------------------------------
    def term(self, seconds: float) -> None:
        """Send TERM to the group. The ladder of the host keeps the time."""
        del seconds
        self._has_touched = True
        # Record the members now. While the leader lives, its descendants can be found by their
        # parents. Afterwards only recorded members are known.
        self._members()
        self._signal_group(signal.SIGTERM)
        self._signal_group(signal.SIGCONT)

    def term_rest(self, seconds: float) -> None:
        """Send TERM to the recorded members that are left."""
        del seconds
        self._signal_members(signal.SIGTERM)
        self._look_soon()

    def kill(self) -> None:
        """Send KILL to the group and to all members."""
        self._has_touched = True
        self._kill_began = time.monotonic()
        self._members()
        self._signal_group(signal.SIGKILL)
        self._signal_members(signal.SIGKILL)
        self._look_soon()

    def kill_keeper(self) -> None:
        """Does nothing: there is no keeper."""

    def signal(self, number: int, *, to_group: bool) -> None:
        """Signal the child, or its group."""
        if to_group:
            self._signal_group(number)
        else:
            self._child.send_signal(number)  # Popen ignores this once the child is reaped.

    def renew(self, seconds: float | None) -> None:
        """Does nothing: no keeper would act on it."""

    def hurry(self, term_at: float, kill_at: float) -> None:
        """Does nothing: no keeper would act on it."""

    def hand_over(
        self, hold_seconds: float, secret: bytes, record: bytes = b""
    ) -> asyncio.Future[str]:
        """Raise: without a keeper nothing could hold the process between two hosts."""
        del hold_seconds, secret, record
        message = f"cannot hand over process {self.pid}: this system has no subreapers"
        raise Refused(message, hint="use Linux", pid=self.pid)

    def note_time(self) -> None:
        """Does nothing: `ps` shows start times by the clock of the day."""

    def sweep(self, since: float, *, ends: bool) -> None:
        """Like `ChildProcess.sweep`, as far as `ps` shows the start times."""

        def tell(fact: SweepEnded) -> None:
            if not (self._is_over or self._is_gone):
                self._on_fact(fact)

        PortableSweep(self._loop, self._members, tell).begin(since, ends=ends)

    def _look_soon(self) -> None:
        if self._has_exited and self._look_timer is None:
            self._look_timer = self._loop.call_later(LOOK_SECONDS, self._look)

    def _signal_group(self, number: int) -> None:
        # After the child is reaped its group id may be reused. It is safe as long as a known member
        # is still in the group.
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
        """Return the living members of the tree except the leader.

        A member is found by its parent, by its group, or because it was recorded before and is
        still the same process.
        """
        rows = {row[0]: row for row in _ps()}
        children: dict[int, list[int]] = {}
        for row in rows.values():
            children.setdefault(row[1], []).append(row[0])
        known = {
            pid: row for pid, row in self._known.items() if pid in rows and rows[pid][3] == row[3]
        }
        members = dict(known)
        # A group id stays in use as long as the group has a member. If a process has the leader's
        # pid after the leader was reaped, the pid was reused, and the group belongs to another
        # program.
        if self._child.returncode is None or self._child.pid not in rows:
            members |= {row[0]: row for row in rows.values() if row[2] == self._child.pid}
        # A member of the group may have a child that has left the group.
        waiting = [self._child.pid, *members]
        while waiting:
            for pid in children.get(waiting.pop(), ()):
                if pid not in members:
                    members[pid] = rows[pid]
                    waiting.append(pid)
        members.pop(self._child.pid, None)
        self._known = members
        return list(members.values())

    # -- streams, and the end ---------------------------------------------------------------------
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
        """End the tree and close every fd."""
        if self._is_over:
            return
        self._end_all()
        if self._look_timer is not None:
            self._look_timer.cancel()
        self._streams.close()

    def let_go(self) -> None:
        """End the tree. The fds stay open."""
        self._end_all()

    def abandon(self) -> None:
        """End the tree and close every fd without touching the loop."""
        self._end_all()
        self._streams.forget()

    def forget(self) -> None:
        """Close every fd without touching the loop or the tree."""
        self._is_over = True
        self._streams.forget()

    def _end_all(self) -> None:
        """Kill the whole tree, unless it is gone."""
        self._is_over = True
        if not self._is_gone:
            self._signal_group(signal.SIGKILL)
            for row in self._members():
                with contextlib.suppress(OSError):
                    os.kill(row[0], signal.SIGKILL)


def _spawn(launch: Launch, fds: dict[int, int], *, takes_terminal: bool) -> subprocess.Popen[bytes]:
    """Start the command in a new session."""
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
            # Unsafe in general, because locks of other threads may be held in the child. `prepare`
            # takes no locks.
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
    """Return a function that prepares the child before exec(); None if nothing is to be done."""
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
    """List every process, as `ps` shows it on Linux and macOS alike."""
    argv = ["ps", "-axo", "pid=,ppid=,pgid=,stat=,lstart=,command="]
    # The environment of this program, except for the language: start times are compared as text,
    # and `born` parses them.
    output = subprocess.run(
        argv, stdout=subprocess.PIPE, check=False, env={**os.environ, "LC_ALL": "C"}
    ).stdout
    rows: list[Row] = []
    for line in output.decode("utf-8", "replace").splitlines():
        pid, parent, group, state, *rest = line.split(None, 9)
        if not state.startswith("Z"):
            rows.append(
                (
                    int(pid),
                    int(parent),
                    int(group),
                    " ".join(rest[:5]),
                    rest[5] if len(rest) > 5 else "",
                )
            )
    return rows


class PortableSweep:
    """One partial sweep, as precise as the start times of `ps`.

    `ps` shows start times in seconds. A process that started in the very second of the request may
    be older, and is spared. Leaving a tool running is bad, ending an agent's server is worse.

    `members`: returns the living members of the tree except its leader.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        members: Callable[[], list[Row]],
        tell: Callable[[SweepEnded], None],
    ) -> None:
        self._loop = loop
        self._members = members
        self._tell = tell
        self._met: dict[int, Row] = {}
        self._left: dict[int, Row] = {}
        self._began = time.monotonic()

    def begin(self, since: float, *, ends: bool) -> None:
        """Signal the newer processes, or with `ends` False only report them."""
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
        """Check which targets are left, and which processes they have started meanwhile."""
        rows = self._members() if self._left else []
        # The start time excludes a process that got the pid of a dead target.
        same = [row for row in rows if row[0] in self._left and row[3] == self._left[row[0]][3]]
        self._left = _with_descendants(same, rows)
        self._met |= self._left
        seconds = time.monotonic() - self._began
        if not self._left or seconds > NEWER_GRACE_SECONDS + NEWER_KILL_SECONDS_MAX:
            swept = tuple(Swept(row[0], row[4]) for row in self._met.values())
            self._tell(
                SweepEnded(
                    swept,
                    tuple(Survivor(row[0], row[4], "still dying") for row in self._left.values()),
                )
            )
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
    """Return these processes and all their descendants, by pid."""
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
    """Return the start time in seconds since the epoch.

    Parsed by hand: `ps` prints English here, and strptime would expect the language of this
    program.
    """
    _day, month, day, clock, year = row[3].split()
    hours, minutes, seconds = clock.split(":")
    date = (
        int(year),
        _MONTHS.index(month) // 3 + 1,
        int(day),
        int(hours),
        int(minutes),
        int(seconds),
        0,
        0,
        -1,
    )
    return time.mktime(date)
