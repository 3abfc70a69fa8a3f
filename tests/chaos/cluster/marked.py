"""The beginning of every agent of the storm: it takes its session's lock, and becomes the agent.

The lock is the kernel's (`flock`): it is held for exactly as long as some process of the tree has it open, however that
process ends. So that two agents of one session live at the same time is not sampled but known: the second one finds the
lock taken, and writes down who had it.

Usage: `marked.py FOLDER WORD…`: FOLDER is the session's own; the rest is the agent's command.
"""

import fcntl
import json
import os
import sys
import time


def main(folder: str, words: list[str]) -> None:
    fd = os.open(os.path.join(folder, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
    me = {"pid": os.getpid(), "life": os.environ.get("CHAOS_LIFE", "?"), "at": time.monotonic()}
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        line = json.dumps({"holder": os.pread(fd, 4096, 0).decode(), "second": me})
        faults = os.open(os.path.join(folder, "overlaps"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(faults, f"{line}\n".encode())
        os.close(faults)
    else:
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(me).encode(), 0)
    # What the agent starts holds it too.
    os.set_inheritable(fd, True)
    os.execv(words[0], words)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
