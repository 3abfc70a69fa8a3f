"""Sessions of one editor, without the editor: which of them are followed, and answers that the log does not give.

The tests use a real server, and a listener that records its messages.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server.kit import TOKEN, Served, shared
from tests.thorough import thorough

from banksman.cli.acp import editor_session as talk_module
from banksman.cli.acp import methods as talks_module
from banksman.cli.acp.backend import Backend, BundledServer, MainThreadRequests
from banksman.cli.acp.editor import EditorConnection, Outbox
from banksman.cli.acp.editor_session import EditorSession
from banksman.cli.acp.methods import EditorSessions, SessionDefaults
from banksman.cli.acp.session_updates import EditorRefusal
from banksman.core.wire.jsonrpc import JSONRPC, Id

pytestmark = thorough

SECONDS_MAX = 60.0


class Ear:
    """Records the messages to an editor."""

    def __init__(self) -> None:
        self.updates: list[tuple[str, dict[str, Any]]] = []
        self.answers: queue.SimpleQueue[tuple[Id, Any]] = queue.SimpleQueue()

    def tell(self, session: str, update: dict[str, Any]) -> None:
        self.updates.append((session, update))

    def ask(self, method: str, params: dict[str, Any], on_reply: Any) -> int | None:
        raise AssertionError("nothing is asked here")

    def withdraw(self, id: int) -> None:
        raise AssertionError("nothing was asked")

    def answer(self, id: Id, result: dict[str, Any]) -> None:
        self.answers.put((id, result))

    def refuse(self, id: Id, refusal: EditorRefusal) -> None:
        self.answers.put((id, refusal))

    def said(self, session: str) -> list[str]:
        return [
            update["content"]["text"]
            for told, update in self.updates
            if told == session and update["sessionUpdate"] == "agent_message_chunk"
        ]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with shared(tmp_path_factory.mktemp("server"), heartbeat_seconds=0.05) as served:
        yield served


@pytest.fixture
def backend(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    monkeypatch.setenv("BANKSMAN_TOKEN", TOKEN)
    wishes = MainThreadRequests()
    yield Backend(served.url, BundledServer(wishes, install=lambda _: None))
    wishes.close()


def opened(served: Served, backend: Backend, ear: Ear) -> EditorSession:
    session = served.get(f"/v1/sessions/{served.open()}")
    return EditorSession(ear, backend, session, backend.head(session["id"]))


def wait_left(talk: EditorSession) -> None:
    """Wait until the session is not followed: its thread ends."""
    for thread in threading.enumerate():
        if thread.name == f"banksman-acp {talk.id}":
            thread.join(SECONDS_MAX)
    assert not talk.is_following


def prompt(talks: EditorSessions, talk: EditorSession, text: str) -> threading.Thread:
    asked = talk.begin(text)
    talks.follow(talk)
    thread = threading.Thread(target=talk.ask, args=(asked, [{"type": "text", "text": text}]))
    thread.start()
    return thread


@pytest.mark.thorough
def test_least_recently_used_session_is_unfollowed_and_misses_nothing(
    served: Served, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(talks_module, "FOLLOWED_MAX", 2)
    talks, ear = EditorSessions(), Ear()
    first, second, third = (opened(served, backend, ear) for _ in range(3))
    for talk in (first, second, third):
        talks.add(talk)
        talks.follow(talk)
    wait_left(first)
    assert second.is_following
    assert third.is_following
    # Said while the session was not followed, and delivered when it is followed again.
    served.outcome(first.id, served.ask(first.id, "@@say meanwhile"))
    assert ear.said(first.id) == []
    asking = prompt(talks, first, "@@say now")
    assert ear.answers.get(timeout=SECONDS_MAX)[1]["stopReason"] == "end_turn"
    assert ear.said(first.id) == ["meanwhile", "now"]
    asking.join(SECONDS_MAX)
    wait_left(second)
    for talk in (first, third):
        talks.remove(talk.id)
        wait_left(talk)


def test_session_with_a_pending_prompt_stays_followed(
    served: Served, backend: Backend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(talks_module, "FOLLOWED_MAX", 1)
    talks, ear = EditorSessions(), Ear()
    first, second = (opened(served, backend, ear) for _ in range(2))
    talks.add(first)
    talks.add(second)
    asking = prompt(talks, first, "@@hang")
    talks.follow(second)
    assert first.is_following
    # Removed, and still answered: the pending prompt is followed to its end.
    talks.remove(first.id)
    asked_and_stopped(served, first)
    request, result = ear.answers.get(timeout=SECONDS_MAX)
    assert (request, result["stopReason"]) == ("@@hang", "cancelled")
    asking.join(SECONDS_MAX)
    wait_left(first)
    talks.remove(second.id)
    wait_left(second)


def asked_and_stopped(served: Served, talk: EditorSession) -> None:
    with served.stream(f"/v1/sessions/{talk.id}/events") as stream:
        for message in stream.messages():
            if message.data["kind"] == "turn.started":
                served.post(f"/v1/sessions/{talk.id}/turns/{message.data['turn']}/interrupt")
                return


def test_prompt_is_answered_when_the_log_misses_the_end_of_its_turn(
    served: Served, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server knows the outcome, and the follower is past the end of the log: no event will come."""
    monkeypatch.setattr(talk_module, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(talk_module, "LOOK_AGAIN_SECONDS", 0.05)
    ear = Ear()
    talk = opened(served, backend, ear)
    talk._seq = 1 << 40  # pyright: ignore[reportPrivateUsage]
    asked = talk.begin("request")
    talk.ask(asked, [{"type": "text", "text": "hello"}])
    assert ear.answers.get(timeout=SECONDS_MAX)[1]["stopReason"] == "end_turn"


@pytest.mark.thorough
def test_prompt_fails_when_its_session_is_deleted(served: Served, backend: Backend) -> None:
    talks, ear = EditorSessions(), Ear()
    talk = opened(served, backend, ear)
    talks.add(talk)
    asking = prompt(talks, talk, "@@hang")
    with served.stream(f"/v1/sessions/{talk.id}/events") as stream:
        next(message for message in stream.messages() if message.data["kind"] == "turn.started")
    assert served.request("DELETE", f"/v1/sessions/{talk.id}?forget=1").status == 204
    # Stopped by the close, if the log could still be read to its end. Otherwise the session is unknown.
    request, result = ear.answers.get(timeout=SECONDS_MAX)
    assert request == "@@hang"
    assert isinstance(result, EditorRefusal) or result["stopReason"] == "cancelled"
    asking.join(SECONDS_MAX)
    wait_left(talk)


def test_cancel_applies_to_prompts_before_it_in_line_order(
    served: Served, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late the worker threads are, a cancel stops the prompts before it, and none after it."""
    begun: list[tuple[Any, ...]] = []
    monkeypatch.setattr(EditorConnection, "_spawn", lambda _, *work: begun.append(work))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    talk = opened(served, backend, Ear())
    monkeypatch.setattr(EditorSession, "follow", lambda _: None)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    with nowhere() as outbox:
        editor = EditorConnection(backend, outbox, SessionDefaults("claude"))
        editor._methods.talks.add(talk)  # pyright: ignore[reportPrivateUsage]
        asks = {"sessionId": talk.id, "prompt": [{"type": "text", "text": "x"}]}
        editor.hear(JSONRPC.call(1, "session/prompt", asks))
        editor.hear(JSONRPC.notice("session/cancel", {"sessionId": talk.id}))
        editor.hear(JSONRPC.call(2, "session/prompt", asks))
    prompts = [work[1] for work in begun]
    assert [(prompt.request, prompt.is_cancelled) for prompt in prompts] == [(1, True), (2, False)]


@contextlib.contextmanager
def nowhere() -> Generator[Outbox]:
    """Yield an outbox whose thread ends when its reader is gone."""
    gone = threading.Event()
    read, write = os.pipe()
    outbox = Outbox(write, on_gone=gone.set)
    try:
        yield outbox
    finally:
        os.close(read)
        outbox.put(b"the end\n")
        assert gone.wait(SECONDS_MAX)
        os.close(write)
