"""Run the fake model as a process: `python -m banksman.testing.fake_model [--port N] [--log FILE]`.

Prints its URL on stdout once it listens, and ends with SIGTERM or SIGINT.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

from banksman.testing.fake_model.model import FakeModel


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m banksman.testing.fake_model", description="A scripted model API."
    )
    parser.add_argument(
        "--port", type=int, default=0, help="listen on this port of 127.0.0.1 (default: any)"
    )
    parser.add_argument(
        "--log", type=Path, help="append each request and its outcome to this file, as JSON lines"
    )
    arguments = parser.parse_args()
    ends = {signal.SIGTERM, signal.SIGINT}
    # Blocked before any thread starts: all threads inherit the mask, so the signal waits for
    # sigwait().
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    with FakeModel(port=arguments.port, log=arguments.log) as model:
        print(model.url, flush=True)
        signal.sigwait(ends)


if __name__ == "__main__":
    main()
