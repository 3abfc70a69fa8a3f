"""Failure 5: a timeout without grace, and a wait without a bound.

After a timeout the program kills the agent's process group and collects the rest of the output.
The agent cannot save its work. A tool that left the group survives. The tool holds the agent's
stdout open, so the last `communicate()` waits as long as the tool lives.

    python no_grace.py naive       # nothing is saved, the tool survives, the wait does not end
    python no_grace.py banksman    # TERM first: the work is saved, and no process is left
"""

import asyncio
import os
import signal
import subprocess
import sys

import banksman

# The agent starts a tool in a session of its own, as Claude Code does, and saves its work on TERM.
# The alarm ends the agent if nothing else does.
SCRIPT = r"""
import signal, subprocess, sys
signal.alarm(60)
tool = subprocess.Popen(["sleep", "60"], start_new_session=True)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print(tool.pid, flush=True)
signal.sigwait([signal.SIGTERM])
print("work saved", flush=True)
"""
AGENT = [sys.executable, "-c", SCRIPT]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def naive() -> None:
    agent = subprocess.Popen(AGENT, stdout=subprocess.PIPE, start_new_session=True)
    assert agent.stdout is not None
    tool = int(agent.stdout.readline())  # Both run now.
    try:
        agent.communicate(timeout=0.1)
    except subprocess.TimeoutExpired:
        os.killpg(agent.pid, signal.SIGKILL)
    print("exit code:", agent.wait())
    print("tool is running:", is_running(tool))
    try:
        agent.communicate(timeout=0.5)  # Without this timeout, the call waits for the tool.
    except subprocess.TimeoutExpired:
        print("communicate() still waits: the tool holds stdout open")
    os.kill(tool, signal.SIGKILL)
    output, _ = agent.communicate()
    print("output:", output.decode().splitlines())


async def with_banksman() -> None:
    # `banksman.execute(AGENT, timeout=600)` does all of this in one call. Here the time begins when
    # the tool runs, so that the example does not depend on the speed of the machine.
    agent = await banksman.start(AGENT, grace=30)
    tool = int(await agent.stdout.readline())
    try:
        done = await asyncio.wait_for(agent.wait(), timeout=0.1)
    except TimeoutError:
        done = await agent.stop()  # TERM, grace, KILL. Returns when no process is left.
    print("exit code:", done.code)
    print("tool is running:", is_running(tool))
    print("ended with the agent:", [process.pid == tool for process in done.swept])
    print("output:", done.stdout.text.splitlines()[1:])


if __name__ == "__main__":
    if sys.argv[1] == "naive":
        naive()
    else:
        asyncio.run(with_banksman())
