"""Editor for tests: a real `banksman acp` with its stdin and stdout, and a list of the messages that it sent.

A thread reads as an editor does, and keeps every message in order. Every wait is for a message, and all waits share one
deadline. The editor answers no request without a call of the test.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.server.kit import TOKEN, Served

from banksman.testing import fake_agent

SECONDS_MAX = 60.0
Message = dict[str, Any]


def environment(state: Path, **more: str) -> dict[str, str]:
    """Return the environment. `state`: the folder in which servers are announced and found."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BANKSMAN_")}
    return {**kept, "XDG_STATE_HOME": str(state), "XDG_CONFIG_HOME": str(state / "config"), **more}


class Editor:
    """A process of `banksman acp`, for a `with` block."""

    def __init__(
        self,
        folder: Path,
        script: Mapping[str, Sequence[str]] | None = None,
        *,
        served: Served | None = None,
        words: Sequence[str] = (),
        command: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        state = folder / "state" if served is None else served.folder / "state"
        token = {} if served is None else {"BANKSMAN_TOKEN": TOKEN}
        agent = fake_agent.command(script or {}, memory=folder / "memory") if command is None else command
        # The port of a server is known only when it runs.
        words = words if served is None else [word.format(port=served.port) for word in words]
        self.stderr = folder / f"stderr-{time.monotonic_ns()}.txt"
        with self.stderr.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "banksman", "acp", *words, *(["--", *agent] if agent else [])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment(state, **token, **(env or {})),
            )
        self.messages: list[Message] = []
        # Reentrant: a waiting thread may look.
        self._changed = threading.Condition(threading.RLock())
        self._may_read = threading.Event()
        self._may_read.set()
        self._is_ended = False
        self._count = 0
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def __enter__(self) -> Editor:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.leave()
        self._close()

    # -- its end -----------------------------------------------------------------------------------------------------
    def leave(self) -> int:
        """Close its stdin and return the exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self._ended()

    def kill(self) -> None:
        self.process.kill()
        self._ended()

    def signal(self, number: int) -> int:
        self.process.send_signal(number)
        return self._ended()

    def _ended(self) -> int:
        try:
            return self.process.wait(SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            raise
        finally:
            self._may_read.set()
            self._thread.join(SECONDS_MAX)

    def _close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        self.process.stdout.close()

    # -- its messages ------------------------------------------------------------------------------------------------
    def pause(self) -> None:
        """Stop reading after the next line."""
        self._may_read.clear()

    def go_on(self) -> None:
        self._may_read.set()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._may_read.wait()
            # Every line on stdout is a message. Otherwise this thread fails, and so does the waiting test.
            message = json.loads(line)
            assert message["jsonrpc"] == "2.0"
            with self._changed:
                self.messages.append(message)
                self._changed.notify_all()
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()

    def wait(self, is_it: Callable[[Message], bool], after: int = 0) -> Message:
        """Return the first message from index `after` on that satisfies `is_it`."""
        found: list[Message] = []

        def look() -> bool:
            found[:] = [message for message in self.messages[after:] if is_it(message)][:1]
            return bool(found) or self._is_ended

        with self._changed:
            self._changed.wait_for(look, SECONDS_MAX)
            if not found:
                tail = self.stderr.read_text(errors="replace")[-2000:]
                raise AssertionError(f"it never said that; it said {self.messages[after:][-10:]}\n{tail}")
            return found[0]

    # -- requests to it ----------------------------------------------------------------------------------------------
    def send(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def notify(self, method: str, **params: Any) -> None:
        self.send(json.dumps({"jsonrpc": "2.0", "method": method, "params": params}).encode())

    def begin(self, method: str, **params: Any) -> int:
        """Send a request and return its id."""
        self._count += 1
        self.send(json.dumps({"jsonrpc": "2.0", "id": self._count, "method": method, "params": params}).encode())
        return self._count

    def reply(self, request: Message, result: Any) -> None:
        self.send(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}).encode())

    def refuse(self, request: Message, code: int, message: str) -> None:
        error = {"code": code, "message": message}
        self.send(json.dumps({"jsonrpc": "2.0", "id": request["id"], "error": error}).encode())

    def response(self, id: Any) -> Message:
        return self.wait(lambda message: "method" not in message and message.get("id") == id)

    def call(self, method: str, **params: Any) -> Any:
        """Send a request and return its result."""
        response = self.response(self.begin(method, **params))
        assert "result" in response, response
        return response["result"]

    def fail(self, method: str, **params: Any) -> Message:
        """Send a request and return its error."""
        response = self.response(self.begin(method, **params))
        assert "error" in response, response
        return response["error"]

    # -- sessions ----------------------------------------------------------------------------------------------------
    def initialize(self) -> Any:
        return self.call("initialize", protocolVersion=1, clientCapabilities={})

    def new(self, **more: Any) -> str:
        return self.call("session/new", **{"cwd": str(self.folder), "mcpServers": [], **more})["sessionId"]

    def load(self, session: str) -> None:
        self.call("session/load", sessionId=session, cwd=str(self.folder), mcpServers=[])

    def begin_prompt(self, session: str, text: str) -> int:
        return self.begin("session/prompt", sessionId=session, prompt=[{"type": "text", "text": text}])

    def prompt(self, session: str, text: str) -> str:
        """Send a prompt and return its stop reason."""
        response = self.response(self.begin_prompt(session, text))
        assert "result" in response, response
        return response["result"]["stopReason"]

    def updates(self, session: str) -> list[Message]:
        with self._changed:
            return [m["params"]["update"] for m in self.messages if is_update(m, session)]

    def texts(self, session: str, kind: str = "agent_message_chunk") -> list[str]:
        return [update["content"]["text"] for update in self.updates(session) if update["sessionUpdate"] == kind]

    def said(self, session: str) -> str:
        return "".join(self.texts(session))

    def wait_said(self, session: str, text: str) -> None:
        """Wait until the agent's text contains `text`, in whatever pieces it came."""
        self.wait(lambda message: is_update(message, session) and text in self.said(session))

    def wait_asked(self, after: int = 0) -> Message:
        return self.wait(lambda message: message.get("method") == "session/request_permission", after)


def is_update(message: Message, session: str) -> bool:
    return message.get("method") == "session/update" and message["params"]["sessionId"] == session


def selected(option: str) -> Message:
    return {"outcome": {"outcome": "selected", "optionId": option}}
