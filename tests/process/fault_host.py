"""Host in which one system call fails: `python fault_host.py SCENARIO MARKER PLAN…` prints a JSON object per plan.

For each plan the program runs the scenario with the fault, removes the fault, and runs a plain command to prove that it
has recovered. It prints the caller's result and the open fds.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import os
import sys
import time

import banksman
from banksman.commands import running_command
from banksman.commands.options import Options
from banksman.core.process_facts import Stream
from banksman.process import fault_plan
from banksman.process.adoption import claim
from banksman.process.process import ChildProcess
from banksman.process.tree_hand_over import Survival
from banksman.process.zygote_client import spawner

HOLD_SECONDS = 1.0
# A leader with a child that left its group and ignores TERM: stopping it takes every rung.
STUBBORN = (
    "import os, signal, sys, time\n"
    "if os.fork() == 0:\n"
    "    os.setsid(); signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "    os.write(1, b'up'); time.sleep(60)\n"
    "time.sleep(60)\n"
)


async def scenario(name: str, marker: str) -> banksman.Finished:
    if name == "tree":
        async with banksman.Host() as host:
            command = await host.start([sys.executable, "-I", "-S", "-c", STUBBORN, marker], grace=0.1, linger=0.05)
            assert isinstance(command, banksman.Command)
            await command.read()
            return await command.stop()
    if name == "hand_over":
        return await hand_over(marker)
    if name == "survive":
        return await survive(marker)
    limits = {"core": 0, "nice": 1} if name == "limits" else None
    with open("/dev/null") as null:
        passed = (null.fileno(),) if name == "plain" else ()
        return await banksman.execute(
            ["sh", "-c", "cat; exit 7", marker], stdin=b"said", limits=limits, pass_fds=passed, linger=0.05, grace=0.2
        )


async def hand_over(marker: str) -> banksman.Finished:
    """Hand a tree over to this same program, and stop it."""
    secret = os.urandom(32)
    async with banksman.Host() as host:
        command = await host.start([sys.executable, "-I", "-S", "-c", STUBBORN, marker], grace=0.1, linger=0.05)
        assert isinstance(command, banksman.Command)
        await command.read()
        name = await command.hand_over_nowait(HOLD_SECONDS, secret)
        try:
            claimed = await claim(name, secret, argv=(b"stubborn",))
        except banksman.BanksmanError:
            await asyncio.sleep(HOLD_SECONDS + 1)  # Until the keeper has ended the tree.
            raise
        adopted = banksman.Command(claimed, Options(grace=0.1, linger=0.05), id="adopted", on_end=lambda _: None)
        return await adopted.stop()


async def survive(marker: str) -> banksman.Finished:
    """Start a tree that would survive this program, and stop it."""
    survival = Survival(HOLD_SECONDS, os.urandom(32))
    running_command.PROCESS = functools.partial(ChildProcess, survival=survival)
    try:
        async with banksman.Host() as host:
            command = await host.start([sys.executable, "-I", "-S", "-c", STUBBORN, marker], grace=0.1, linger=0.05)
            assert isinstance(command, banksman.Command)
            process = command._process  # pyright: ignore[reportPrivateUsage]
            assert isinstance(process, ChildProcess)
            try:
                assert process.place is not None
                # An error says that the tree ends with this program, as trees usually do.
                with contextlib.suppress(banksman.BanksmanError):
                    await process.place
                process.settle(Stream.STDOUT, len((await command.read()).data))
                return await command.stop()
            finally:
                process.close()
    finally:
        running_command.PROCESS = ChildProcess


def open_fds() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def is_reaped() -> bool:
    """Wait for the zygotes that were still busy with a tree that this program had handed over."""
    deadline = time.monotonic() + 20
    while spawner._retired and time.monotonic() < deadline:  # pyright: ignore[reportPrivateUsage]
        spawner._reap_retired()  # pyright: ignore[reportPrivateUsage]
        time.sleep(0.005)
    return not spawner._retired  # pyright: ignore[reportPrivateUsage]


async def run_plan(name: str, marker: str, text: str) -> dict[str, object]:
    before = open_fds()
    plan = fault_plan.FaultPlan(text)
    spawner.plan_text = text
    plan.follow("host")
    seen: dict[str, object] = {"plan": text}
    try:
        done = await asyncio.wait_for(scenario(name, marker), 40)
        seen["finished"] = {
            **{"ended": done.ended.value, "code": done.code, "signal": done.signal},
            **{"stdout": done.stdout.text, "survivors": [str(left) for left in done.survivors]},
        }
    except banksman.BanksmanError as exc:
        seen["error"] = type(exc).__name__
    except Exception as exc:
        seen["crash"] = repr(exc)
    fault_plan.follow_no_plan()
    spawner.plan_text = ""
    seen["has_ended"] = spawner.shutdown() and is_reaped()
    seen["fds_more"] = open_fds() - before
    return seen


async def main() -> None:
    name, marker, *texts = sys.argv[1:]
    await banksman.execute(["true"])  # Now the loop has its fds, and the imports are done.
    spawner.shutdown()
    for text in texts:
        seen = await run_plan(name, marker, text)
        seen["next"] = (await banksman.execute(["sh", "-c", "exit 5"])).code
        spawner.shutdown()
        print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
