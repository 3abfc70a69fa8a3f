"""One session as one editor has it: what the editor asks in it, and what it is told of it.

The session's log is followed by one thread, and everything that the editor hears of the session is said by that thread,
in the log's order: updates, the agent's questions, and at the end of a turn the answer to the prompt that asked for it.
So an answer never overtakes what belongs before it. To load a session is to follow it from its first event on, and to
answer when the place has been passed where its log ended.

A prompt is known by a key of its own before it is asked, and the log has that key. So whose turn it is is known at its
first event, even if that comes before the server's answer.

Requests to the server wait, so each has a thread of its own. Whatever those threads share is behind one lock.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from typing import Any, Protocol

from banksman.cli.acp import session_updates
from banksman.cli.acp.backend import AWAY_SECONDS, AWAY_SECONDS_MAX, Backend
from banksman.cli.acp.open_questions import EditorQuestions, QuestionSender
from banksman.cli.acp.session_updates import (
    EditorRefusal,
    JoinedUpdates,
    Update,
    UpdateProjection,
    bug,
    ending,
    projector_of,
    refusal_of,
)
from banksman.cli.client.client import ClientError, NoServer, segment
from banksman.cli.client.event_stream import Event, EventFollower, seq_of
from banksman.cli.output import say_aside
from banksman.core.wire.jsonrpc import Id
from banksman.errors import BanksmanError

# How often it is looked whether a turn is over that the log says nothing of: it could not be written, perhaps.
LOOK_SECONDS, LOOK_AGAIN_SECONDS = 30.0, 5.0


class SessionListener(QuestionSender, Protocol):
    """The editor, as a talk speaks to it."""

    def tell(self, session: str, update: Update) -> None: ...
    def answer(self, id: Id, result: dict[str, Any]) -> None: ...
    def refuse(self, id: Id, refusal: EditorRefusal) -> None: ...


class EditorPrompt:
    """A prompt of the editor's, from its request to the answer. `before`: when the one before it was asked, or failed:
    they are asked in the order in which they came, though each has a thread."""

    def __init__(self, request: Id, before: threading.Event | None) -> None:
        self.request = request
        self.before = before
        self.is_asked = threading.Event()
        self.key = uuid.uuid4().hex
        self.turn: str | None = None
        self.is_cancelled = False
        self.is_over = threading.Event()


class EditorSession:
    """`session`: as the server shows it. `head`: where its log ends, and it is followed from there; or, with `load`,
    until where it is told again before that request is answered."""

    def __init__(
        self,
        editor: SessionListener,
        backend: Backend,
        session: dict[str, Any],
        head: str | None,
        *,
        load: Id | None = None,
    ) -> None:
        self.id: str = session["id"]
        # When it was last used, for whoever has to choose.
        self.used = time.monotonic()
        self._editor = editor
        self._backend = backend
        self._path = f"/v1/sessions/{segment(self.id)}"
        self._load = load
        self._head = _seq(head)
        # Only the following thread uses these, and one is there at most.
        self._telling = UpdateProjection(projector_of(backend.dialect_of(session["agent"])))
        self._joined = JoinedUpdates()
        # What can be set in it. A value, which others may read.
        self.settings = session_updates.known(backend.dialect_of(session["agent"]))
        if load is None:
            for event in backend.own_events(self.id, head):
                self.settings = session_updates.after(self.settings, event)
        self._questions = EditorQuestions(editor, backend, self.id, self._telling.title_of)
        after = head if load is None else None
        self._follower = EventFollower(backend.client, self.id, after=after, raw=True, is_over=self._is_enough)
        self._seq = _seq(after)
        # For all that is below. Nothing is called while it is held.
        self._lock = threading.Lock()
        self._is_following = False
        self._is_resting = False
        self._prompts: dict[str, EditorPrompt] = {}
        self._last_asked: threading.Event | None = None

    @property
    def is_busy(self) -> bool:
        """The editor waits for something of it."""
        with self._lock:
            is_awaited = bool(self._prompts) or self._load is not None
        return is_awaited or self._questions.are_open

    @property
    def is_following(self) -> bool:
        with self._lock:
            return self._is_following

    # -- what the editor does ----------------------------------------------------------------------------------------
    def begin(self, request: Id) -> EditorPrompt:
        """A prompt, from this moment on: also one that is stopped before the server has it is stopped."""
        self.used = time.monotonic()
        with self._lock:
            prompt = EditorPrompt(request, self._last_asked)
            self._last_asked = prompt.is_asked
            self._prompts[prompt.key] = prompt
        return prompt

    def ask(self, prompt: EditorPrompt, content: list[Any]) -> None:
        """Ask for the turn, and see to it that it is answered. Waits until then."""
        if prompt.before is not None:
            prompt.before.wait()
            prompt.before = None
        try:
            try:
                accepted = self._backend.client.post(f"{self._path}/turns", {"prompt": content}, key=prompt.key)
            finally:
                prompt.is_asked.set()
            with self._lock:
                prompt.turn = accepted["turn"]
                is_cancelled = prompt.is_cancelled
            if is_cancelled:
                self.interrupt([accepted["turn"]])
            self._watch(prompt)
        except BanksmanError as exc:
            self._fail(prompt, refusal_of(exc))
        except Exception as exc:
            # A bug of ours. The editor waits for an answer all the same.
            self._fail(prompt, bug(exc))
            raise

    def cancel(self, request: Id | None = None) -> list[str]:
        """This prompt of the editor's is to stop; None: all that it has in this session. The turns to `interrupt`: one
        that the server has not accepted yet is stopped as soon as it has."""
        with self._lock:
            meant = [prompt for prompt in self._prompts.values() if request is None or prompt.request == request]
            for prompt in meant:
                prompt.is_cancelled = True
            return [prompt.turn for prompt in meant if prompt.turn is not None]

    def interrupt(self, turns: list[str]) -> None:
        """Waits until they are over."""
        for turn in turns:
            try:
                self._backend.insist(f"{self._path}/turns/{segment(turn)}/interrupt")
            except ClientError as exc:
                # How the turn ends is told by the log all the same.
                say_aside(f"banksman: turn {turn} could not be stopped: {exc}")

    def has(self, request: Id) -> bool:
        with self._lock:
            return any(prompt.request == request for prompt in self._prompts.values())

    # -- how prompts end ---------------------------------------------------------------------------------------------
    def _watch(self, prompt: EditorPrompt) -> None:
        """Until it is answered. Nearly always the log says when; but a log that could not be written does not."""
        path = f"{self._path}/turns/{segment(prompt.turn or '')}"
        outcome: dict[str, Any] | None = None
        head = 0
        while not prompt.is_over.wait(LOOK_SECONDS if outcome is None else LOOK_AGAIN_SECONDS):
            if outcome is None:
                with contextlib.suppress(NoServer):
                    outcome = self._backend.client.get(path)["outcome"]
                    head = _seq(self._backend.head(self.id))
            elif self._seq >= head:
                self._end(prompt, {**outcome, "outcome": outcome["kind"]})

    def _end(self, prompt: EditorPrompt, outcome: dict[str, Any]) -> None:
        try:
            result = ending(prompt.turn or "", outcome)
        except EditorRefusal as exc:
            self._fail(prompt, exc)
        else:
            if self._take(prompt):
                self._editor.answer(prompt.request, result)

    def _fail(self, prompt: EditorPrompt, refusal: EditorRefusal) -> None:
        if self._take(prompt):
            self._editor.refuse(prompt.request, refusal)

    def _take(self, prompt: EditorPrompt) -> bool:
        """Whether it is for us to answer it: each is answered once."""
        with self._lock:
            is_ours = self._prompts.pop(prompt.key, None) is not None
        prompt.is_over.set()
        return is_ours

    # -- following ---------------------------------------------------------------------------------------------------
    def follow(self) -> None:
        """From where it was left, or from the beginning; nothing, if it is followed already."""
        with self._lock:
            self._is_resting = False
            if self._is_following:
                return
            self._is_following = True
        threading.Thread(target=self._follow, name=f"banksman-acp {self.id}", daemon=True).start()

    def rest(self) -> None:
        """Do not follow it any more: from the next sign of life of the server's on, and when no prompt waits."""
        with self._lock:
            self._is_resting = True

    def _is_enough(self) -> bool:
        with self._lock:
            return self._is_resting and not self._prompts

    def _follow(self) -> None:
        away_since: float | None = None
        while True:
            seq = self._seq
            try:
                with contextlib.closing(self._follower.events()) as events:
                    for event in events:
                        self._hear(event)
                with self._lock:
                    if self._is_resting and not self._prompts:
                        self._is_following = False
                        return
                continue  # It was woken in this very moment.
            except NoServer as exc:
                now = time.monotonic()
                away_since = now if away_since is None or self._seq > seq else away_since
                if now - away_since > AWAY_SECONDS_MAX:
                    self._lose(exc)
                    away_since = None
            except BanksmanError as exc:
                # The session was deleted, or what comes makes no sense. First this: a prompt that is begun from here on
                # begins to follow anew, and fails by itself; those that are there already fail now.
                with self._lock:
                    self._is_following = False
                self._lose(exc)
                return
            time.sleep(AWAY_SECONDS)

    def _lose(self, error: BanksmanError) -> None:
        """Nothing more will be heard of it: whoever waits for something is told so."""
        say_aside(f"banksman: session {self.id} can no longer be followed: {error}")
        refusal = refusal_of(error)
        with self._lock:
            waiting, load, self._load = list(self._prompts.values()), self._load, None
        for prompt in waiting:
            self._fail(prompt, refusal)
        if load is not None:
            self._editor.refuse(load, refusal)

    def _hear(self, event: Event) -> None:
        """One event, in the following thread."""
        if event["kind"] == "stream.gap":
            say_aside(f"banksman: session {self.id}: events {event['first']} to {event['last']} are no longer kept")
            self._seq = event["last"]
        else:
            if event["kind"] == "turn.queued":
                self._bind(event)
            updates = self._telling.updates(event, own=self._own_turns())
            self._tell([each for each in updates if each.get("sessionUpdate") not in session_updates.UPDATES])
            self._note_settings(event)
            match event["kind"]:
                case "question.asked":
                    self._questions.on_asked(event["body"]["question"], waits=self._load is not None)
                case "question.answered":
                    self._questions.on_answered(event["body"]["question"])
                case "turn.ended":
                    self._on_ended(event["turn"], event["body"])
                case _:
                    pass
            self._seq = event["seq"]
        if self._load is not None and self._seq >= self._head:
            self._loaded()

    def _note_settings(self, event: Event) -> None:
        """Tell the editor what can be set, and what is, when that has changed. One that loads is told at the end."""
        before, self.settings = self.settings, session_updates.after(self.settings, event)
        options = session_updates.config_options(self.settings)
        if self._load is not None or options == session_updates.config_options(before):
            return
        mode, mode_before = self.settings.get("permission_mode"), before.get("permission_mode")
        if (
            mode is not None
            and mode.current is not None
            and (mode_before is None or mode.current != mode_before.current)
        ):
            self._tell([{"sessionUpdate": "current_mode_update", "currentModeId": mode.current}])
        self._tell([{"sessionUpdate": "config_option_update", "configOptions": options}])

    def _tell(self, updates: list[Update]) -> None:
        if self._load is not None:
            updates = self._joined.add(updates)
        for update in updates:
            self._editor.tell(self.id, update)

    def _loaded(self) -> None:
        """All that was said until it was asked for is told: now it is answered, and what comes is told as it comes."""
        for update in self._joined.flush():
            self._editor.tell(self.id, update)
        with self._lock:
            load, self._load = self._load, None
        assert load is not None
        self._editor.answer(load, session_updates.told(self.settings))
        self._questions.put_all()

    def _bind(self, queued: Event) -> None:
        with self._lock:
            prompt = self._prompts.get(str(queued["body"].get("key")))
            if prompt is not None:
                prompt.turn = queued["turn"]

    def _own_turns(self) -> set[str]:
        with self._lock:
            return {prompt.turn for prompt in self._prompts.values() if prompt.turn is not None}

    def _on_ended(self, turn: str | None, body: dict[str, Any]) -> None:
        with self._lock:
            found = [prompt for prompt in self._prompts.values() if prompt.turn == turn and turn is not None]
        for prompt in found:
            self._end(prompt, body)


def _seq(cursor: str | None) -> int:
    return 0 if cursor is None else seq_of(cursor) or 0
