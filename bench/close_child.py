"""A child that is hard to close: `close_child.py blocked|deaf SOCKET`. Imports nothing it does not need.

blocked   writes 1 MiB to its stdout and then leaves at the end of its stdin; if nobody reads, it never gets that far.
deaf      ignores TERM and the end of its stdin.

It sends its pid to SOCKET when it is in that state. After a minute it ends whatever happens.
"""

import os
import select
import signal
import socket
import sys

TOTAL_BYTES = 1 << 20
# A pipe that takes nothing for so long has a reader that does not read.
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
