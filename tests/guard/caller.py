"""Program that starts a guard and is killed by a test: `python -I -S caller.py MODE ARGV…`.

It prints the pid of the guard and waits. The modes:
- `keeps`: the guard gets the streams of this program.
- `pipes`: the guard gets pipes of this program, as the far end of an ssh connection does.
- `terminal`: this program makes fd 0 its controlling terminal and becomes the guard.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import termios

LIFE_SECONDS_MAX = 60


def main(mode: str, argv: list[str]) -> None:
    signal.alarm(LIFE_SECONDS_MAX)
    if mode == "terminal":
        # An alarm survives exec().
        signal.alarm(0)
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        os.execv(argv[0], argv)
    theirs_in, ours_in = os.pipe()
    ours_out, theirs_out = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(0)
        if mode == "pipes":
            os.dup2(theirs_in, 0)
            os.dup2(theirs_out, 1)
            os.dup2(theirs_out, 2)
        os.execv(argv[0], argv)
    os.close(theirs_in)
    os.close(theirs_out)
    os.write(1, f"{pid}\n".encode())
    assert ours_in
    assert ours_out
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
