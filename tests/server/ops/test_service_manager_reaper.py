"""Process 1 of a pid namespace reaps orphans and takes no child from the code that waits for it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from banksman.server.ops import service_manager

# The program is process 1. Its children report by a pipe, and it looks for them in the /proc of its namespace.
PROGRAM = """
import asyncio, os, subprocess, sys, time
from banksman.process import attributes
from banksman.process.zygote_client import spawner
from banksman.server.ops import service_manager as adopted

def state(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(") ")[2][0]
    except OSError:
        return None

async def is_now(pid, wanted):
    while state(pid) != wanted:
        await asyncio.sleep(0.01)

async def orphan(seconds=0):
    # A child that leaves a grandchild behind, which is ours from then on, and then a zombie.
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            os.close(writing)
            time.sleep(seconds)
            os._exit(7)
        os.write(writing, str(pid).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    pid = int(os.read(reading, 20))
    os.close(reading)
    return pid

async def main():
    assert os.getpid() == 1
    loop = asyncio.get_running_loop()
    early = await orphan()
    await is_now(early, "Z")
    reaper = adopted.install(loop)
    await globals()[sys.argv[1]](reaper, early)
    reaper.close()

async def orphans(reaper, early):
    await is_now(early, None)
    pids = [await orphan() for _ in range(50)]
    pids += [await orphan(0.3)]
    for pid in pids:
        await is_now(pid, None)
    assert reaper.reaped == 52, reaper.reaped

async def zygote(reaper, early):
    await is_now(early, None)
    zygote = spawner.current(attributes.take_inherited().fingerprint)
    zygote.kill()
    await is_now(zygote.pid, "Z")
    # It is at the head of those who can be waited for, and must not hide those behind it.
    behind = [await orphan() for _ in range(3)]
    for pid in behind:
        await is_now(pid, None)
    later = await orphan()
    await is_now(later, None)
    assert state(zygote.pid) == "Z"
    assert os.waitpid(zygote.pid, os.WNOHANG)[0] == zygote.pid

async def popen(reaper, early):
    # Somebody in another thread waits for children that nobody has told us of; each wait is there before the exit.
    codes = await asyncio.gather(
        *(asyncio.to_thread(subprocess.call, ["sh", "-c", f"sleep 0.{n}; exit {n}"]) for n in range(8))
    )
    assert codes == list(range(8)), codes
    await is_now(early, None)

async def late(reaper, early):
    # Somebody has not come to it yet, and is given a moment: it is not taken at first sight.
    child = subprocess.Popen(["sh", "-c", "exit 5"])
    await is_now(child.pid, "Z")
    reaper._look()
    assert state(child.pid) == "Z"
    assert child.wait() == 5
    await is_now(early, None)

async def host(reaper, early):
    # The real thing: commands run, and what a command leaves is its keeper's and not ours.
    from banksman import Host
    async with Host("memory:") as own:
        for number in range(3):
            finished = await (await own.start(["sh", "-c", f"sleep 60 & exit {number}"])).wait()
            assert (finished.code, len(finished.swept)) == (number, 1), finished
    await is_now(early, None)

asyncio.run(main())
"""


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["orphans", "zygote", "popen", "late", "host"])
def test_server_as_process_1_reaps_orphans(case: str) -> None:
    if os.geteuid():
        pytest.skip("a pid namespace needs root")
    words = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", PROGRAM, case]
    result = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")


async def test_reaper_is_not_installed_outside_process_1() -> None:
    loop = asyncio.get_running_loop()
    assert service_manager.install(loop) is None
    assert loop.remove_signal_handler(17) is False
