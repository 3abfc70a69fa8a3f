"""Time from the call to the result of `true`: the cost of a keeper, against plain subprocesses."""

from __future__ import annotations

import asyncio
import shutil
import subprocess

import banksman
from bench.measure import goal, p50, span, table, take_turns

ROUNDS = 400
AT_ONCE = 100
EXTRA_SECONDS_MAX = 0.002


async def main() -> None:
    # An absolute path: otherwise each contestant would search PATH in a different way, and that is
    # not the subject.
    true = shutil.which("true")
    assert true is not None

    async def by_subprocess() -> None:
        subprocess.run([true], capture_output=True, check=True)

    async def by_asyncio() -> None:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(true, stdout=pipe, stderr=pipe)
        await process.communicate()
        assert process.returncode == 0

    async def by_banksman() -> None:
        assert (await banksman.execute([true])).code == 0

    contestants = {
        "subprocess.run": by_subprocess,
        "asyncio.create_subprocess_exec": by_asyncio,
        "banksman.execute": by_banksman,
    }
    # The warm-up starts the zygote. A program starts it only once.
    seconds = await take_turns(contestants, rounds=ROUNDS, warm_up=10)
    table("one at a time", seconds, against="subprocess.run")
    ours = p50(seconds.pop("banksman.execute"))
    extra = ours - min(p50(taken) for taken in seconds.values())
    text = f"p50 of execute within {span(EXTRA_SECONDS_MAX)} of the faster one"
    goal(text, f"{extra * 1000:+.2f} ms", extra <= EXTRA_SECONDS_MAX)

    async def many_by_asyncio() -> None:
        await asyncio.gather(*(by_asyncio() for _ in range(AT_ONCE)))

    async def many_by_banksman() -> None:
        await asyncio.gather(*(by_banksman() for _ in range(AT_ONCE)))

    contestants = {
        "asyncio.create_subprocess_exec": many_by_asyncio,
        "banksman.execute": many_by_banksman,
    }
    seconds = await take_turns(contestants, rounds=10, warm_up=1)
    each = {name: [one / AT_ONCE for one in taken] for name, taken in seconds.items()}
    table(f"{AT_ONCE} at a time, time per command", each, against="asyncio.create_subprocess_exec")


if __name__ == "__main__":
    asyncio.run(main())
