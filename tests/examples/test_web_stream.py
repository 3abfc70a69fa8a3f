"""Read a turn from examples/web_stream.py as a browser does, with connections that end too early."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from tests.examples.programs import SECONDS_MAX, Program


class Sent(NamedTuple):
    """One server-sent event."""

    id: str
    data: dict[str, Any]

    @property
    def text(self) -> str:
        return "".join(update["content"]["text"] for update in self.data["partial"])


@contextmanager
def served(folder: Path, script: dict[str, list[str]]) -> Generator[httpx.Client]:
    with Program("web_stream.py", folder, "0", script=script) as app:
        assert app.process.stderr is not None
        for line in app.process.stderr:
            if found := re.search(r"running on (http://127\.0\.0\.1:\d+)", line):
                break
        else:
            raise AssertionError("the app did not start")
        with httpx.Client(base_url=found[1], timeout=SECONDS_MAX, trust_env=False) as client:
            yield client
        app.process.send_signal(signal.SIGTERM)
        app.process.wait(SECONDS_MAX)


def stream(client: httpx.Client, address: str, last: str | None = None) -> Generator[Sent]:
    """Yield the events of one connection. Closing the generator closes the connection."""
    headers = {} if last is None else {"Last-Event-ID": last}
    with client.stream("GET", address, headers=headers) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        id = ""
        for line in response.iter_lines():
            if line.startswith("id: "):
                id = line.removeprefix("id: ")
            elif line.startswith("data: "):
                yield Sent(id, json.loads(line.removeprefix("data: ")))


def ask(client: httpx.Client, prompt: str) -> str:
    asked = client.post("/turns", json={"prompt": prompt})
    assert asked.status_code == 202
    return asked.json()["events"]


def test_web_stream_resumes_a_turn_by_its_last_event_id(tmp_path: Path) -> None:
    go = tmp_path / "go"
    script = {"prompt count": ["speak 0 one two three", f"wait {go}", "say four"]}
    with served(tmp_path, script) as client:
        address = ask(client, "count")
        seen: list[Sent] = []
        connection = stream(client, address)
        for sent in connection:
            seen.append(sent)
            if "two" in sent.text:
                break
        connection.close()
        go.touch()
        seen += stream(client, address, seen[-1].id)
        assert seen == list(stream(client, address))
        assert "".join(sent.text for sent in seen) == "one two three"
        assert [sent.data["kind"] for sent in seen].count("turn.ended") == 1
        assert seen[-1].data["body"]["outcome"] == "done"
        assert "EventSource" in client.get("/").text


@pytest.mark.thorough
def test_web_stream_continues_after_a_restart_of_the_app(tmp_path: Path) -> None:
    script = {"prompt wait": ["say one", "hang"]}
    with served(tmp_path, script) as client:
        address = ask(client, "wait")
        connection = stream(client, address)
        first = next(sent for sent in connection if sent.data["body"].get("updates"))
        connection.close()
    with served(tmp_path, {}) as client:
        rest = list(stream(client, address, first.id))
    assert rest[-1].data["kind"] == "turn.ended"
    assert rest[-1].data["body"]["outcome"] == "interrupted"
