"""A stubborn tree is ended twice: first with what everybody writes (`subprocess`, a session of its own, `killpg`), then
with `banksman.execute`.

Nothing is left running afterwards: what the first way leaves behind is counted, shown, and then killed pid by pid.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import uuid

import banksman

# A leader with four children, each of which outlives it in its own way. All of them end by themselves after a minute.
TREE = """
import os, signal, sys, time
kind = sys.argv[1]
if kind == "leader":
    for child in ("plain", "own-session", "daemon", "deaf-to-TERM"):
        if os.fork() == 0:
            if child != "plain":
                os.setsid()
            if child == "daemon" and os.fork():
                os._exit(0)
            os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", os.environ["TREE"], child, sys.argv[2]])
if kind == "deaf-to-TERM":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(kind, flush=True)
time.sleep(60)
"""
MEMBERS = 5


def argv(marker: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", TREE, "leader", marker]


def alive(marker: str) -> dict[int, str]:
    """Who of the tree is alive, by a word in its argv: pid and what it is."""
    found: dict[int, str] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/cmdline", "rb") as file:
                    words = file.read().split(b"\0")
            except OSError:
                continue
            if marker.encode() in words:
                found[int(entry)] = words[words.index(marker.encode()) - 1].decode()
    return found


def show(title: str, left: dict[int, str]) -> None:
    names = ", ".join(f"{name} ({pid})" for pid, name in left.items()) or "none"
    print(f"   {title}: {len(left)}: {names}")


def with_subprocess() -> None:
    marker = f"demo-{uuid.uuid4().hex}"
    print("1. The usual way: subprocess.Popen(start_new_session=True), then killpg(SIGKILL)")
    with subprocess.Popen(
        argv(marker), env={**os.environ, "TREE": TREE}, stdout=subprocess.PIPE, start_new_session=True
    ) as child:
        assert child.stdout is not None
        for _ in range(MEMBERS):
            child.stdout.readline()
        show("started", alive(marker))
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        left = alive(marker)
        show("left after the kill", left)
        for pid in left:
            os.kill(pid, signal.SIGKILL)


async def with_banksman() -> None:
    marker = f"demo-{uuid.uuid4().hex}"
    print("2. banksman.execute(…, timeout=1, grace=1)")
    lines = 0
    started: dict[int, str] = {}

    def on_output(_stream: str, data: bytes) -> None:
        nonlocal lines
        lines += data.count(b"\n")
        if lines == MEMBERS and not started:
            started.update(alive(marker))
            show("started", started)

    began = time.monotonic()
    done = await banksman.execute(argv(marker), env={"TREE": TREE}, timeout=1, grace=1, on_output=on_output)
    print(f"   {done.ended.value} after {time.monotonic() - began:.1f} s")
    for step in done.ladder:
        print(f"     {step.at:4.1f} s  {step.rung}")
    for process in done.swept:
        print(f"            swept {started.get(process.pid, '')} ({process.pid})")
    show("left", alive(marker))
    print(f"   survivors: {len(done.survivors)}, output read to its end: {done.drained}")


def main() -> None:
    print("A command with four children: one plain, one in a session of its own, a daemon, one that ignores TERM.\n")
    with_subprocess()
    print()
    asyncio.run(with_banksman())
