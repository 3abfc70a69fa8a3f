"""A scripted CLI for the SDK: it answers control requests, and runs the code of a test for each prompt.

The file has the test's marker in its command line, and so have its forks. Each process ends by an alarm after two
minutes, whatever happens.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from claude_agent_sdk import ClaudeAgentOptions, ClaudeSDKClient, Message

PRELUDE = """
import json, os, signal, sys, time
signal.alarm(120)

def emit(type, **fields):
    os.write(1, (json.dumps({"type": type, **fields}) + "\\n").encode())

def say(text):
    emit("assistant", message={"role": "assistant", "model": "m", "content": [{"type": "text", "text": text}]})

def result():
    emit("result", subtype="success", is_error=False, duration_ms=1, duration_api_ms=1, num_turns=1, session_id="s")

def complain(text):
    os.write(2, text.encode())

def ask(id, **request):
    emit("control_request", request_id=id, request=request)

def fork():
    pid = os.fork()
    if pid == 0:
        signal.alarm(120)
    return pid

def stay():
    while True:
        time.sleep(1)

def prompts():
    # Yield the prompts and the answers to requests of this CLI, and accept every control request.
    for line in sys.stdin:
        message = json.loads(line)
        if message["type"] == "control_request":
            answer = {"subtype": "success", "request_id": message["request_id"], "response": {}}
            emit("control_response", response=answer)
        elif message["type"] == "user":
            yield message["message"]["content"]
        else:
            yield message
"""
# Answers each prompt with its text.
ECHO = """
for prompt in prompts():
    say(prompt)
    result()
"""


def scripted(folder: Path, marker: str, code: str = ECHO, **options: Any) -> ClaudeAgentOptions:
    """Return options of the SDK with a CLI that runs `code`."""
    program, script = folder / "cli", folder / "cli.py"
    script.write_text(PRELUDE + code)
    program.write_text(f"#!/bin/sh\nexec '{sys.executable}' -X {marker} -I -S '{script}' \"$@\"\n")
    program.chmod(0o700)
    return ClaudeAgentOptions(cli_path=program, **options)


async def ask(client: ClaudeSDKClient, prompt: str) -> list[Message]:
    """Send a prompt, and return the messages up to the result."""
    await client.query(prompt)
    return [message async for message in client.receive_response()]
