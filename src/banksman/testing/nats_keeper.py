"""Parent process of the `nats-server` nodes of `nats_servers`: ends them when the test dies.

    python nats_keeper.py PARENT FOLDER PROGRAM

This keeper is a test tool, not the keeper of `banksman.process`. It reads one request a line from
stdin and answers each with one line; see `_Keeper.told`. When its parent dies or stdin ends, it
kills every node, removes the folder and exits. It watches both signs, because the end of stdin
alone is not enough: a fork of the parent keeps the pipe open.

If the keeper itself is killed, the kernel kills the nodes, because each node has a parent-death
signal. That signal fires when the *thread* that forked the node ends. A thread of the test process
could end before the test does, so the keeper is a separate process with one thread.

The keeper imports neither the package nor site-packages, so it starts within a few milliseconds.
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
# The process name under which the tests of processes see the keeper.
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
        """Perform one command and return its answer.

        - `start NODE`: start it and return its pid.
        - `kill NODE`: kill and reap it.
        - `stop NODE`: suspend it (SIGSTOP).
        - `cont NODE`: resume it (SIGCONT).
        - `look NODE`: return its pid, or how it ended.

        FOLDER/NODE.conf is the configuration of a node.
        """
        word, node = line.split()
        match word:
            case "start":
                assert node not in self._pids, f"{node} runs"
                self._pids[node] = self._start(node)
                return str(self._pids[node])
            case "stop" if node not in self._stopped:
                # The signal cannot reach an unrelated process: the kernel does not reuse the pid of
                # a child that this process has not reaped.
                os.kill(self._pids[node], signal.SIGSTOP)
                # Each thread of the node stops when it next enters the kernel. `waitpid` with
                # WUNTRACED returns when all threads have stopped.
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
            # The keeper may have died before the `prctl` call. The kernel then sends no death
            # signal, so the child checks its parent itself.
            if os.getppid() == us:
                os.chdir(self._folder)
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                nothing = os.open(os.devnull, os.O_RDONLY)
                # A Go program writes its crash report to stderr and not to its log file.
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
    # Ctrl-C on the terminal is for the test, which then ends the keeper through stdin.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keeper = _Keeper(folder, program)
    try:
        watched = os.pidfd_open(parent)
        # If the parent died before `pidfd_open`, the pid may belong to another process by that
        # time. The keeper would then watch the wrong process forever.
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
