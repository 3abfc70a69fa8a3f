"""Run a command on a busy machine: with busy loops beside it, six unless --loops says otherwise.

    python3 tools/busy.py [--loops 6] [--minutes 60] COMMAND [ARGUMENT ...]

The exit code is that of the command. The loops end in every case:

- The command ends, or this program is interrupted or terminated: this program kills its loops.
- This program is killed: each loop notices that its parent has changed, and ends.
- The command hangs: after --minutes this program terminates it, and each loop ends shortly after by
  its own time limit.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence

EXIT_TIMEOUT = 124  # Same code as timeout(1).
STOP_SECONDS = 30.0

# Uses one core. Every few milliseconds it checks its parent's pid and its time limit, both from
# argv.
LOOP = """
import os, sys, time
parent, end = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
while os.getppid() == parent and time.monotonic() < end:
    for _ in range(100_000):
        pass
"""


@contextlib.contextmanager
def busy(loops: int, seconds: float) -> Generator[None]:
    """Run this many busy loops while the block runs."""
    children: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(loops):
            command = [sys.executable, "-I", "-S", "-c", LOOP, str(os.getpid()), str(seconds)]
            children.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
            )
        yield
    finally:
        for child in children:
            child.kill()
        for child in children:
            child.wait()


def run(command: Sequence[str], seconds: float) -> int:
    """Run a command and return its exit code; terminate it when its time is over."""
    with subprocess.Popen(command) as child:
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            print(
                f"busy.py: the command took more than {seconds / 60:g} minutes: terminating it",
                file=sys.stderr,
            )
            code = EXIT_TIMEOUT
        finally:
            if child.poll() is None:
                child.terminate()
                try:
                    child.wait(STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    child.kill()
    return code if code >= 0 else 128 - code


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a command with busy loops beside it.")
    parser.add_argument("--loops", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    wanted = parser.parse_args()
    if not wanted.command:
        parser.error("COMMAND is missing")
    # TERM ends the block like an interrupt, so that the loops are killed.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(128 + signal.SIGTERM))
    seconds = wanted.minutes * 60
    with busy(wanted.loops, seconds + 2 * STOP_SECONDS):
        return run(wanted.command, seconds)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
