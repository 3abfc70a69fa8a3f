"""The start-up of `banksman`, as ratios against the interpreter it runs in."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys

from bench.measure import table, take_turns

ROUNDS = 30
PYTHON = sys.executable
BANKSMAN = (PYTHON, "-m", "banksman")


def runs(*argv: str) -> None:
    subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=30)


async def main() -> None:
    if importlib.util.find_spec("banksman.cli") is None:
        print("skipped: there is no banksman.cli yet")
        return

    def contestant(*argv: str):
        async def call() -> None:
            runs(*argv)

        return call

    empty, loop = "python -c pass", "python -c 'import asyncio'"
    contestants = {
        empty: contestant(PYTHON, "-c", "pass"),
        "banksman --help": contestant(*BANKSMAN, "--help"),
        loop: contestant(PYTHON, "-c", "import asyncio"),
        "banksman exec -- true": contestant(*BANKSMAN, "exec", "--", "true"),
    }
    seconds = await take_turns(contestants, rounds=ROUNDS, warm_up=2)
    for name, base in (("banksman --help", empty), ("banksman exec -- true", loop)):
        table(name, {base: seconds[base], name: seconds[name]}, against=base)


if __name__ == "__main__":
    asyncio.run(main())
