"""One session of one editor: its prompts, and the events that the editor gets.

One thread follows the session's log and sends everything about the session to the editor, in the
order of the log: updates, questions, and at the end of a turn the answer to its prompt. An answer
therefore never overtakes an update that belongs before it. Loading a session means following it
from its first event, and answering the request when the former end of the log is passed.
`session_updates.py` translates the events.

Each prompt gets a key before it is sent, and the log records that key. The prompt of a turn is thus
known at the first event of the turn, even if the event arrives before the server's reply.

Requests to the server block, so each has a thread. One lock protects all state that these threads
share.
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
from banksman.cli.client.client import segment
from banksman.cli.client.event_stream import Event, EventFollower, seq_of
from banksman.cli.client.exchange import ClientError, NoServer
from banksman.cli.output import say_aside
from banksman.core.wire.jsonrpc import Id
from banksman.errors import BanksmanError

# How often to check for the end of a turn that the log does not report, perhaps because the log
# could not be written.
LOOK_SECONDS, LOOK_AGAIN_SECONDS = 30.0, 5.0


class SessionListener(QuestionSender, Protocol):
    """The editor connection, as a session uses it."""

    def tell(self, session: str, update: Update) -> None: ...
    def answer(self, id: Id, result: dict[str, Any]) -> None: ...
    def refuse(self, id: Id, refusal: EditorRefusal) -> None: ...


class EditorPrompt:
    """A prompt of the editor, from its request to the answer.

    `before`: set when the previous prompt was sent or has failed. Each prompt has a thread, but
    prompts are sent in the order in which they came.
    """

    def __init__(self, request: Id, before: threading.Event | None) -> None:
        self.request = request
        self.before = before
        self.is_asked = threading.Event()
        self.key = uuid.uuid4().hex
        self.turn: str | None = None
        self.is_cancelled = False
        self.is_over = threading.Event()


class EditorSession:
    """One session of one editor.

    `session`: the session as the server shows it. `head`: the end of its log, from which it is
    followed. `load`: a load request; the history up to `head` is sent first, and then the request
    is answered.
    """

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
        # When the session was last used, to choose which one stops being followed.
        self.used = time.monotonic()
        self._editor = editor
        self._backend = backend
        self._path = f"/v1/sessions/{segment(self.id)}"
        self._load = load
        self._head = _seq(head)
        # Used only by the following thread, of which there is at most one.
        self._telling = UpdateProjection(projector_of(backend.dialect_of(session["agent"])))
        self._joined = JoinedUpdates()
        # The settings and their values. Immutable, so other threads may read it.
        self.settings = session_updates.known(backend.dialect_of(session["agent"]))
        if load is None:
            for event in backend.own_events(self.id, head):
                self.settings = session_updates.after(self.settings, event)
        self._questions = EditorQuestions(editor, backend, self.id, self._telling.title_of)
        after = head if load is None else None
        self._follower = EventFollower(
            backend.client, self.id, after=after, raw=True, is_over=self._is_enough
        )
        self._seq = _seq(after)
        # Protects the members below. No function is called while it is held.
        self._lock = threading.Lock()
        self._is_following = False
        self._is_resting = False
        self._prompts: dict[str, EditorPrompt] = {}
        self._last_asked: threading.Event | None = None

    @property
    def is_busy(self) -> bool:
        """Whether the editor waits for something in this session."""
        with self._lock:
            is_awaited = bool(self._prompts) or self._load is not None
        return is_awaited or self._questions.are_open

    @property
    def is_following(self) -> bool:
        """Whether a thread follows the session."""
        with self._lock:
            return self._is_following

    # -- called for the editor --------------------------------------------------------------------
    def begin(self, request: Id) -> EditorPrompt:
        """Register a prompt. From now on it can be cancelled, even before the server has it."""
        self.used = time.monotonic()
        with self._lock:
            prompt = EditorPrompt(request, self._last_asked)
            self._last_asked = prompt.is_asked
            self._prompts[prompt.key] = prompt
        return prompt

    def ask(self, prompt: EditorPrompt, content: list[Any]) -> None:
        """Send the prompt and wait until it is answered."""
        if prompt.before is not None:
            prompt.before.wait()
            prompt.before = None
        try:
            try:
                accepted = self._backend.client.post(
                    f"{self._path}/turns", {"prompt": content}, key=prompt.key
                )
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
            # This is a bug in Banksman. The editor still needs an answer.
            self._fail(prompt, bug(exc))
            raise

    def cancel(self, request: Id | None = None) -> list[str]:
        """Mark a prompt as cancelled; None for all prompts of this session.

        Return the turns to interrupt. A prompt that the server has not accepted yet is interrupted
        as soon as it is.
        """
        with self._lock:
            meant = [
                prompt
                for prompt in self._prompts.values()
                if request is None or prompt.request == request
            ]
            for prompt in meant:
                prompt.is_cancelled = True
            return [prompt.turn for prompt in meant if prompt.turn is not None]

    def interrupt(self, turns: list[str]) -> None:
        """Interrupt turns and wait until they are over."""
        for turn in turns:
            try:
                self._backend.insist(f"{self._path}/turns/{segment(turn)}/interrupt")
            except ClientError as exc:
                # The log still reports the end of the turn.
                say_aside(f"banksman: cannot stop turn {turn}: {exc}")

    def has(self, request: Id) -> bool:
        """Return whether this request is a pending prompt of the session."""
        with self._lock:
            return any(prompt.request == request for prompt in self._prompts.values())

    # -- end of prompts ---------------------------------------------------------------------------
    def _watch(self, prompt: EditorPrompt) -> None:
        """Wait until the prompt is answered.

        Nearly always the log reports the end. If the log could not be written, this poll finds it.
        """
        path = f"{self._path}/turns/{segment(prompt.turn or '')}"
        outcome: dict[str, Any] | None = None
        head = 0
        while not prompt.is_over.wait(LOOK_SECONDS if outcome is None else LOOK_AGAIN_SECONDS):
            if outcome is None:
                with contextlib.suppress(NoServer):
                    outcome = self._backend.client.get(path)["outcome"]
                    head = _seq(self._backend.head(self.id))
            # The follower has passed the end of the log and did not answer the prompt, so the log
            # lacks the end.
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
        """Return whether the caller may answer the prompt. Each prompt is answered once."""
        with self._lock:
            is_ours = self._prompts.pop(prompt.key, None) is not None
        prompt.is_over.set()
        return is_ours

    # -- following --------------------------------------------------------------------------------
    def follow(self) -> None:
        """Follow the session from its last position. Does nothing if it is already followed."""
        with self._lock:
            self._is_resting = False
            if self._is_following:
                return
            self._is_following = True
        threading.Thread(target=self._follow, name=f"banksman-acp {self.id}", daemon=True).start()

    def rest(self) -> None:
        """Stop following at the server's next sign of life, when no prompt is pending."""
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
                # `follow` or `begin` was called in this very moment.
                continue
            except NoServer as exc:
                now = time.monotonic()
                away_since = now if away_since is None or self._seq > seq else away_since
                if now - away_since > AWAY_SECONDS_MAX:
                    self._lose(exc)
                    away_since = None
            except BanksmanError as exc:
                # The session was deleted, or the stream makes no sense. Clear the flag first: a
                # prompt that begins after this starts a new follower, which fails separately.
                # Prompts that exist now fail below.
                with self._lock:
                    self._is_following = False
                self._lose(exc)
                return
            time.sleep(AWAY_SECONDS)

    def _lose(self, error: BanksmanError) -> None:
        """Fail everything that waits, because no further event will come."""
        say_aside(f"banksman: cannot follow session {self.id}: {error}")
        refusal = refusal_of(error)
        with self._lock:
            waiting, load, self._load = list(self._prompts.values()), self._load, None
        for prompt in waiting:
            self._fail(prompt, refusal)
        if load is not None:
            self._editor.refuse(load, refusal)

    def _hear(self, event: Event) -> None:
        """Handle one event, in the following thread."""
        if event["kind"] == "stream.gap":
            say_aside(
                f"banksman: session {self.id}: "
                f"events {event['first']} to {event['last']} are no longer kept"
            )
            self._seq = event["last"]
        else:
            if event["kind"] == "turn.queued":
                self._bind(event)
            updates = self._telling.updates(event, own=self._own_turns())
            self._tell(
                [
                    each
                    for each in updates
                    if each.get("sessionUpdate") not in session_updates.UPDATES
                ]
            )
            self._note_settings(event)
            match event["kind"]:
                case "question.asked":
                    self._questions.on_asked(
                        event["body"]["question"], waits=self._load is not None
                    )
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
        """Send changed settings to the editor. A load sends them with its answer instead."""
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
        """Answer the load request: the history is sent.

        From now on updates are sent as they come.
        """
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
            found = [
                prompt
                for prompt in self._prompts.values()
                if prompt.turn == turn and turn is not None
            ]
        for prompt in found:
            self._end(prompt, body)


def _seq(cursor: str | None) -> int:
    return 0 if cursor is None else seq_of(cursor) or 0
