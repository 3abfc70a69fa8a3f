"""The parent of the nodes of `nats_servers`: a process of its own, so that no node outlives whoever started it.

    python nats_keeper.py PARENT FOLDER PROGRAM

It is told on stdin what to do, a line each, and answers each with a line; see `_Keeper.told`. When its parent dies, or
stdin ends, it kills every node, removes the folder, and goes. It watches both signs, because neither is enough: a fork
of the parent keeps the pipe open. When it is killed itself, the kernel kills the nodes: they carry the death signal of
this one thread, which is why this is a process and not a thread of the parent, where the thread that happened to start
a node could end before the test does.

It runs without the package and without site-packages: it is there in a few milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import sys

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
# As the tests of processes see it.
NAME = b"banksman-nats"


class _Keeper:
    def __init__(self, folder: str, program: str) -> None:
        self._folder = folder
        self._program = program
        self._pids: dict[str, int] = {}
        self._stopped: set[str] = set()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.prctl(PR_SET_NAME, NAME, 0, 0, 0)

    def told(self, line: str) -> str:
        """`start NODE`: its pid. `kill NODE`: it is dead and reaped. `stop NODE`: it stands still. `cont NODE`: it goes
        on. `look NODE`: its pid, or how it ended. A node is named by its configuration, FOLDER/NODE.conf."""
        word, node = line.split()
        match word:
            case "start":
                assert node not in self._pids, f"{node} runs"
                self._pids[node] = self._start(node)
                return str(self._pids[node])
            case "stop" if node not in self._stopped:
                # Never to a number that somebody else may have by now: it is ours until we reap it.
                os.kill(self._pids[node], signal.SIGSTOP)
                # Each of its threads stops when it next comes by the kernel; this is told when all have.
                _, status = os.waitpid(self._pids[node], os.WUNTRACED)
                if not os.WIFSTOPPED(status):
                    return self._ended(node, status)
                self._stopped.add(node)
                return "done"
            case "stop":
                return "done"
            case "cont":
                os.kill(self._pids[node], signal.SIGCONT)
                self._stopped.discard(node)
                return "done"
            case "kill":
                self._kill(node)
                return "done"
            case "look":
                return self._look(node)
            case _:
                raise AssertionError(f"{line!r} means nothing here")

    def end(self) -> None:
        for node in list(self._pids):
            self._kill(node)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, node: str) -> int:
        us = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            self._libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            # We may have died before the line above; then nobody would have told the kernel.
            if os.getppid() == us:
                os.chdir(self._folder)
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                nothing = os.open(os.devnull, os.O_RDONLY)
                # What a Go program says when it crashes goes to stderr and into no log.
                crash = os.open(f"{node}.stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                os.dup2(nothing, 0)
                os.dup2(crash, 1)
                os.dup2(crash, 2)
                os.execv(self._program, [self._program, "-c", f"{node}.conf"])
        finally:
            os._exit(127)

    def _kill(self, node: str) -> None:
        pid = self._pids.pop(node, None)
        self._stopped.discard(node)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _look(self, node: str) -> str:
        pid = self._pids.get(node)
        if pid is None:
            return "was killed"
        found, status = os.waitpid(pid, os.WNOHANG)
        return self._ended(node, status) if found else str(pid)

    def _ended(self, node: str, status: int) -> str:
        del self._pids[node]
        self._stopped.discard(node)
        return f"ended with {os.waitstatus_to_exitcode(status)}"


def main(parent: int, folder: str, program: str) -> None:
    # The terminal's Ctrl-C is for the test; it ends us in its own order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keeper = _Keeper(folder, program)
    try:
        watched = os.pidfd_open(parent)
        # A pid that was somebody else's by then would be watched for ever.
        if os.getppid() != parent:
            return
        pending = b""
        while True:
            ready, _, _ = select.select([0, watched], [], [])
            if watched in ready:
                return
            heard = os.read(0, 4096)
            if not heard:
                return
            *lines, pending = (pending + heard).split(b"\n")
            for line in lines:
                os.write(1, keeper.told(line.decode()).encode() + b"\n")
    finally:
        keeper.end()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:4])
