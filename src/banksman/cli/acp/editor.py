"""Connection to one editor: JSON-RPC lines over stdin and stdout, requests in both directions.

`Outbox` queues the lines to the editor, and a thread writes them. `EditorConnection` keeps the open
requests of both sides. It answers invalid messages, and starts a thread for each request that needs
the server. `methods.py` performs the methods. `editor_session.py` sends the updates, and
`open_questions.py` the questions.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from banksman.cli.acp.backend import Backend
from banksman.cli.acp.editor_session import EditorSession
from banksman.cli.acp.methods import Method, Methods, SessionDefaults, text_of
from banksman.cli.acp.open_questions import Answer
from banksman.cli.acp.session_updates import EditorRefusal, Update, bug, refusal_of
from banksman.cli.output import say_aside
from banksman.core.wire.jsonrpc import (
    INVALID_REQUEST,
    JSONRPC,
    METHOD_NOT_FOUND,
    PARSE_ERROR,
    Id,
    InvalidMessage,
    Notification,
    RpcCall,
    RpcReply,
    decode,
    withdrawn,
)
from banksman.errors import BanksmanError, UsageError

# The two pipes to the editor: whole lines in, whole lines out.
#
# Only messages go to stdout. Fd 1 is redirected at the start, so that a stray print of a library
# goes to /dev/null.
#
# A thread writes the lines, because an editor that does not read must not stop this process from
# reading. The queue is bounded. A full queue blocks the followers of sessions, which then fall
# behind the log. That loses nothing: the log is the buffer. Answers have extra room, so that an
# editor that sends much before it reads cannot cause a deadlock.

READ_BYTES_MAX = 1 << 16
# A prompt with pictures has some megabytes, and the server accepts 32 MiB.
LINE_BYTES_MAX = 64 << 20
# Limits on the queued bytes: for updates, which the log has anyway, and for answers.
UPDATES_BYTES_MAX = 1 << 20
ANSWERS_BYTES_MAX = 8 << 20

# Maximum number of open requests from the editor. Each has a thread.
REQUESTS_MAX = 256
# Maximum number of requests to the editor that it has not answered.
ASKED_MAX = 1024


def take_stdio() -> tuple[int, int]:
    """Take stdin and stdout for exclusive use, and put /dev/null in their place.

    Child processes do not inherit the returned fds, and no other code writes to them. Raises
    OSError if one is missing.
    """
    # Check both before duplicating either: dup() returns the lowest free number, which may be the
    # missing one.
    os.fstat(0)
    os.fstat(1)
    stdin, stdout = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    return stdin, stdout


def lines(fd: int, *, line_bytes_max: int = LINE_BYTES_MAX) -> Iterator[bytes | None]:
    """Yield lines without their newline; None for a line that was too long to keep.

    Bytes after the last newline are an incomplete message and are dropped.
    """
    pieces: list[bytes] = []
    size = 0
    while data := _read(fd):
        first, *rest = data.split(b"\n")
        for index, piece in enumerate((first, *rest)):
            if index:
                yield b"".join(pieces) if size <= line_bytes_max else None
                pieces, size = [], 0
            size += len(piece)
            if size <= line_bytes_max:
                pieces.append(piece)
            else:
                pieces = []


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, READ_BYTES_MAX)
    except OSError:
        # The terminal was hung up, for example: the editor is gone.
        return b""


class Outbox:
    """Ordered queue of lines to the editor, written by a thread.

    `on_gone`: called once when a write fails, because the editor is gone.
    """

    def __init__(self, fd: int, on_gone: Callable[[], None]) -> None:
        self._fd = fd
        self._on_gone = on_gone
        # Protects the members below. No function is called and no lock is taken while it is held.
        self._changed = threading.Condition()
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._is_gone = False
        # A daemon like all threads here: it may block in a write forever, and the program must
        # still exit.
        threading.Thread(target=self._write, name="banksman-acp-out", daemon=True).start()

    def put(self, line: bytes, *, is_answer: bool = False) -> bool:
        """Queue a line; waits for room. Returns False if the editor is gone."""
        bytes_max = ANSWERS_BYTES_MAX if is_answer else UPDATES_BYTES_MAX
        with self._changed:
            self._changed.wait_for(lambda: self._is_gone or self._bytes < bytes_max)
            if self._is_gone:
                return False
            self._lines.append(line)
            self._bytes += len(line)
            self._changed.notify_all()
            return True

    def flush(self, seconds: float) -> None:
        """Wait until everything is written, the editor is gone, or the time is up."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_gone or not self._bytes, seconds)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                line = self._lines.popleft()
            try:
                _write_all(self._fd, line)
            except OSError:
                with self._changed:
                    self._is_gone = True
                    self._changed.notify_all()
                self._on_gone()
                return
            with self._changed:
                self._bytes -= len(line)
                self._changed.notify_all()


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class EditorConnection:
    """Connection to one editor. One thread calls `hear`; all other methods are thread-safe.

    Each request is answered once, and requests are sent to the editor.

    One thread reads the lines and never waits. A request that needs the server gets a thread, so
    that the editor can stop a turn while another request waits. Steps that depend on the order of
    the lines happen before that thread starts. A prompt must be registered before the cancel that
    stops it, and a prompt after the cancel must not be stopped by it.
    """

    def __init__(self, backend: Backend, outbox: Outbox, usual: SessionDefaults) -> None:
        self._outbox = outbox
        self._methods = Methods(self, backend, usual)
        # Protects the members below. No function is called while it is held.
        self._lock = threading.Lock()
        self._open: set[Id] = set()
        self._asked: dict[int, Answer] = {}
        self._count = 0

    # -- from the editor --------------------------------------------------------------------------
    def hear(self, line: bytes | None) -> None:
        """Handle one line; None for a line that was too long to keep."""
        if line is None:
            reason = f"cannot read the line: it is longer than {LINE_BYTES_MAX} bytes"
            self._send(JSONRPC.error(None, PARSE_ERROR, reason))
            return
        if not line.strip():
            return
        if line.lstrip().startswith(b"["):
            # No editor sends batches. One line could hold millions of messages, and each needs an
            # answer.
            self._send(
                JSONRPC.error(
                    None, INVALID_REQUEST, "cannot read a batch: send one message per line"
                )
            )
            return
        (message,) = decode(line)
        match message:
            case RpcCall():
                self._begin(message)
            case Notification():
                self._note(message)
            case RpcReply():
                self._settle(message)
            case InvalidMessage(reason, is_json=is_json):
                code = INVALID_REQUEST if is_json else PARSE_ERROR
                self._send(JSONRPC.error(None, code, f"cannot read the message: {reason}"))

    def _begin(self, call: RpcCall) -> None:
        with self._lock:
            is_known, is_full = call.id in self._open, len(self._open) >= REQUESTS_MAX
            if not is_known and not is_full:
                self._open.add(call.id)
        if is_known or is_full:
            reason = (
                "a request with this id is already open"
                if is_known
                else f"too many requests are open ({REQUESTS_MAX})"
            )
            self._send(JSONRPC.error(call.id, INVALID_REQUEST, reason))
        elif call.is_cut:
            self.refuse(
                call.id, EditorRefusal(INVALID_REQUEST, "cannot read the request: it is cut off")
            )
        elif call.method == "session/prompt":
            self._begin_prompt(call)
        elif call.method in self._methods.named:
            self._spawn(self._perform, self._methods.named[call.method], call)
        else:
            self.refuse(
                call.id, EditorRefusal(METHOD_NOT_FOUND, f"unknown method {call.method!r:.100}")
            )

    def _begin_prompt(self, call: RpcCall) -> None:
        try:
            talk, prompt, content = self._methods.begin_prompt(call)
        except EditorRefusal as exc:
            self.refuse(call.id, exc)
        else:
            self._spawn(talk.ask, prompt, content)

    def _perform(self, method: Method, call: RpcCall) -> None:
        try:
            result = method(call)
        except EditorRefusal as exc:
            self.refuse(call.id, exc)
        except BanksmanError as exc:
            self.refuse(call.id, refusal_of(exc))
        except Exception as exc:
            # This is a bug in Banksman. The editor still needs an answer, and the next request may
            # succeed.
            self.refuse(call.id, bug(exc))
            raise
        else:
            if result is not None:
                self.answer(call.id, result)

    def _note(self, notice: Notification) -> None:
        request = withdrawn(notice)
        if request is not None:
            talk = self._methods.talks.of_request(request)
            if talk is not None:
                self._stop(talk, request)
        elif notice.method == "session/cancel":
            try:
                self._stop(self._methods.talks.find(text_of(notice, "sessionId")))
            except EditorRefusal as exc:
                say_aside(f"banksman: session/cancel: {exc.message}")

    def _stop(self, talk: EditorSession, request: Id | None = None) -> None:
        turns = talk.cancel(request)
        if turns:
            self._spawn(talk.interrupt, turns)

    def _settle(self, reply: RpcReply) -> None:
        with self._lock:
            answer = self._asked.pop(reply.id, None) if isinstance(reply.id, int) else None
        if answer is not None:
            self._spawn(answer, reply)

    # -- to the editor ----------------------------------------------------------------------------
    def tell(self, session: str, update: Update) -> None:
        """Send an update. Waits while the editor does not read."""
        try:
            line = JSONRPC.notice("session/update", {"sessionId": session, "update": update})
        except UsageError as exc:
            say_aside(f"banksman: session {session}: cannot send an update: {exc}")
        else:
            self._outbox.put(line)

    def ask(self, method: str, params: dict[str, Any], on_reply: Answer) -> int | None:
        """Send a request to the editor and return its id.

        Returns None if too many requests are open. Other clients can still answer then.
        """
        with self._lock:
            if len(self._asked) >= ASKED_MAX:
                return None
            self._count += 1
            id = self._count
            self._asked[id] = on_reply
        self._outbox.put(JSONRPC.call(id, method, params))
        return id

    def withdraw(self, id: int) -> None:
        """Cancel a request to the editor. A late reply is ignored."""
        with self._lock:
            is_open = self._asked.pop(id, None) is not None
        if is_open:
            self._outbox.put(JSONRPC.notice("$/cancel_request", {"requestId": id}))

    def answer(self, id: Id, result: dict[str, Any]) -> None:
        """Answer a request with a result."""
        self._close(id)
        self._send(JSONRPC.reply(id, result))

    def refuse(self, id: Id, refusal: EditorRefusal) -> None:
        """Answer a request with an error."""
        self._close(id)
        self._send(JSONRPC.error(id, refusal.code, refusal.message, refusal.data or None))

    def _close(self, id: Id) -> None:
        with self._lock:
            assert id in self._open, "a request has one answer"
            self._open.discard(id)

    def _send(self, line: bytes) -> None:
        self._outbox.put(line, is_answer=True)

    def _spawn(self, function: Callable[..., None], *arguments: Any) -> None:
        # A daemon: a request that the editor has abandoned must not keep the program alive.
        threading.Thread(
            target=function, args=arguments, name="banksman-acp request", daemon=True
        ).start()
