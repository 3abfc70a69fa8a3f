"""Child process that is hard to close.

    close_child.py blocked|deaf SOCKET

blocked   Writes 1 MiB to stdout, then exits at the end of stdin. Without a reader, the write hangs.
deaf      Ignores TERM and the end of stdin.

The child sends its pid to SOCKET when it is in that state. An alarm ends it after a minute in any
case. The script imports as little as possible, so that it starts fast.
"""

import os
import select
import signal
import socket
import sys

TOTAL_BYTES = 1 << 20
# If the pipe stays full for this time, its reader does not read.
FULL_MS = 200


def say_ready(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(str(os.getpid()).encode(), path)


def block(path: str) -> None:
    writable = select.poll()
    writable.register(1, select.POLLOUT)
    left, is_ready = TOTAL_BYTES, False
    while left > 0:
        if not is_ready and not writable.poll(FULL_MS):
            is_ready = True
            say_ready(path)
        left -= os.write(1, b"\n" * min(left, 4096))
    while os.read(0, 4096):
        pass


def main(kind: str, path: str) -> None:
    signal.alarm(60)
    if kind == "blocked":
        block(path)
    else:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say_ready(path)
        while True:
            signal.pause()


main(sys.argv[1], sys.argv[2])
