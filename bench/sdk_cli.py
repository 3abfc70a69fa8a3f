"""Scripted CLI for the comparison with claude-agent-sdk (bench/sdk.py).

    sdk_cli.py KIND MARK [flags of the SDK]

Each kind answers control requests, and is hard to end in another way:

flood     After the first prompt it writes to stdout without end, and does not look at stdin.
session   Starts a tool in a session of its own, waits for it, and does not look at stdin.
holder    Starts a tool that holds stdout, and exits after the first prompt.

A tool that runs is announced by a message. An alarm ends each process after two minutes.
"""

import json
import os
import signal
import sys
import time


def emit(kind: str, **fields: object) -> None:
    os.write(1, (json.dumps({"type": kind, **fields}) + "\n").encode())


def start_tool(*, own_session: bool) -> None:
    if os.fork() == 0:
        signal.alarm(120)
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        if own_session:
            os.setsid()
        emit("system", subtype="tool_started")
        while True:
            time.sleep(1)


def on_prompt(kind: str) -> None:
    if kind in ("session", "holder"):
        start_tool(own_session=kind == "session")
    else:
        emit("system", subtype="prompt_taken")
    if kind == "holder":
        sys.exit(0)
    if kind == "session":
        signal.pause()
    while kind == "flood":
        emit("system", subtype="flood", text="x" * 8000)


def main(kind: str) -> None:
    signal.alarm(120)
    for line in sys.stdin:
        message = json.loads(line)
        if message["type"] == "control_request":
            answer = {"subtype": "success", "request_id": message["request_id"], "response": {}}
            emit("control_response", response=answer)
        elif message["type"] == "user":
            on_prompt(kind)


main(sys.argv[1])
