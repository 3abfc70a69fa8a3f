"""Start-up time of `banksman`, as ratios to the start of the Python interpreter.

Each goal is a multiple of the interpreter's time plus a constant: the multiple follows the speed of
the machine, and the constant bounds the work of Banksman.
"""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
from pathlib import Path

from bench.measure import goal, p50, span, table, take_turns

ROUNDS = 30
RATIO_MAX = 1.5
MORE_SECONDS_MAX = 0.060
PYTHON = sys.executable
# The installed script, as a user runs it.
BANKSMAN = str(Path(PYTHON).with_name("banksman"))


def runs(*argv: str) -> None:
    subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=30)


async def main() -> None:
    if importlib.util.find_spec("banksman.cli") is None:
        print("skipped: banksman.cli is not installed")
        return

    def contestant(*argv: str):
        async def call() -> None:
            runs(*argv)

        return call

    guarded = "banksman guard -- true"
    empty, loop = "python -c pass", "python -c 'import asyncio'"
    contestants = {
        empty: contestant(PYTHON, "-c", "pass"),
        "banksman --help": contestant(BANKSMAN, "--help"),
        loop: contestant(PYTHON, "-c", "import asyncio"),
        "banksman exec -- true": contestant(BANKSMAN, "exec", "--", "true"),
        guarded: contestant(BANKSMAN, "guard", "--", "true"),
    }
    seconds = await take_turns(contestants, rounds=ROUNDS, warm_up=2)
    for name, base in (("banksman --help", empty), ("banksman exec -- true", loop)):
        table(name, {base: seconds[base], name: seconds[name]}, against=base)
        taken, bound = p50(seconds[name]), RATIO_MAX * p50(seconds[base]) + MORE_SECONDS_MAX
        text = f"{name}, within {RATIO_MAX:g} × {base} + {MORE_SECONDS_MAX * 1000:.0f} ms"
        goal(text, f"{span(taken)} of {span(bound)}", taken <= bound)
    table(guarded, {empty: seconds[empty], guarded: seconds[guarded]}, against=empty)
    more = p50(seconds[guarded]) - p50(seconds[empty])
    text = f"{guarded}, within {MORE_SECONDS_MAX * 1000:.0f} ms above {empty}"
    goal(text, span(more), more <= MORE_SECONDS_MAX)


if __name__ == "__main__":
    asyncio.run(main())
