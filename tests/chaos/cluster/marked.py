"""Take the session's lock, then become the agent: the start of every agent in the storm.

The lock is a kernel lock (`flock`). It is held for exactly as long as some process of the tree has the file open,
however that process ends. Two agents of one session that live at the same time are therefore always detected, not
sampled: the second agent finds the lock taken and records the holder.

Usage: `marked.py FOLDER WORD…`. FOLDER belongs to the session; the rest is the command of the agent.
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
    # The processes that the agent starts hold the lock too.
    os.set_inheritable(fd, True)
    os.execv(words[0], words)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
