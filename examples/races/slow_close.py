"""Failure 3: the close that takes ten seconds.

The program no longer reads the agent's stdout, and closes it. The agent is blocked in a write to
the full pipe, so it sees neither the end of its input nor TERM. A close that waits five seconds for
each takes ten, ends with KILL, and loses the answer.

    python slow_close.py naive [SECONDS]    # SECONDS for each wait, 5 by default
    python slow_close.py banksman           # the agent finishes its answer and exits by itself
"""

import asyncio
import subprocess
import sys

import banksman

# The agent answers with one long line, like an image, and then exits at the end of its input. Its
# TERM handler waits for the end of the answer, so that the line is not cut.
SCRIPT = r"""
import signal, sys
signal.alarm(60)
signal.signal(signal.SIGTERM, lambda number, frame: None)
print("answering", flush=True)
print("x" * 4_000_000, flush=True)
sys.stdin.read()
"""
AGENT = [sys.executable, "-c", SCRIPT]


def naive(seconds: float) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(AGENT, stdin=pipe, stdout=pipe) as agent:
        assert agent.stdin is not None
        assert agent.stdout is not None
        print("agent:", agent.stdout.readline().decode().rstrip())
        steps = {"end of input": agent.stdin.close, "TERM": agent.terminate, "KILL": agent.kill}
        for name, step in steps.items():
            step()
            try:
                # KILL always works. A pipe that nothing reads makes the other two wait in vain.
                code = agent.wait(timeout=None if name == "KILL" else seconds)
                print(f"{name}: exit code {code}")
            except subprocess.TimeoutExpired:
                print(f"{name}: no exit within {seconds:g} s")
        print("whole answer:", agent.stdout.read().endswith(b"x\n"))


async def with_banksman() -> None:
    agent = await banksman.start(AGENT, stdin="pipe", eof=30, grace=30)
    print("agent:", (await agent.stdout.readline()).decode().rstrip())
    done = await agent.stop()  # Reads the pipe until the agent is gone, so the agent can finish.
    print(f"first step: {done.ladder[0].rung}, exit code {done.code}")
    print("whole answer:", done.stdout.text.endswith("x\n"))


if __name__ == "__main__":
    if sys.argv[1] == "naive":
        naive(float(sys.argv[2]) if len(sys.argv) > 2 else 5.0)
    else:
        asyncio.run(with_banksman())
