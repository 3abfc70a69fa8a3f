"""Failure 1: the reader is destroyed under its consumer.

A pool keeps one reader per agent, and a task logs what the agent writes to stderr. `stop` ends the
agent and deletes the reader while that task still waits for a line. The task dies with a KeyError
(or an AttributeError, if the field is set to None), and the agent's last words are lost.

    python reader_destroyed.py naive       # one line of two, then the consumer dies
    python reader_destroyed.py banksman    # both lines, then the stream ends
"""

import asyncio
import sys

import banksman

# On TERM, this agent writes two lines before it exits. The alarm ends it if nothing else does.
SCRIPT = r"""
import signal, sys
signal.alarm(60)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("ready", file=sys.stderr, flush=True)
signal.sigwait([signal.SIGTERM])
print("saving the conversation\nsaved as 42", file=sys.stderr, flush=True)
"""
AGENT = [sys.executable, "-c", SCRIPT]


async def naive() -> None:
    agent = await asyncio.create_subprocess_exec(*AGENT, stderr=asyncio.subprocess.PIPE)
    assert agent.stderr is not None
    readers = {"fix-ci": agent.stderr}
    ready = asyncio.Event()

    async def consume() -> None:
        while line := await readers["fix-ci"].readline():
            print("log:", line.decode().rstrip())
            ready.set()

    consumer = asyncio.create_task(consume())
    await ready.wait()  # The consumer now waits for the next line.
    agent.terminate()
    del readers["fix-ci"]  # The pool forgets the reader. Its consumer still needs it.
    await agent.wait()
    (error,) = await asyncio.gather(consumer, return_exceptions=True)
    print("the consumer died:", repr(error))


async def with_banksman() -> None:
    agent = await banksman.start(AGENT, grace=30)
    ready = asyncio.Event()

    async def consume() -> None:
        async for line in agent.stderr:
            print("log:", line.decode().rstrip())
            ready.set()

    consumer = asyncio.create_task(consume())
    await ready.wait()
    done = await agent.stop()  # The reader stays valid. It ends where the stream ends.
    await consumer
    print("the consumer read to the end; exit code:", done.code)


if __name__ == "__main__":
    asyncio.run({"naive": naive, "banksman": with_banksman}[sys.argv[1]]())
