"""`banksman acp`: ACP agent for an editor. The protocol is in `banksman.cli.acp`.

The main thread handles signals and runs the bundled server if one is needed, because only the main
thread can do both. It waits on one pipe for either. All other work runs in other threads. The end
of stdin or a signal ends the program. A bundled server then gives running turns a moment to finish,
and stops them. A separate server continues, and so do its turns.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from types import FrameType

from banksman.cli import INTERRUPTED, OK, USAGE
from banksman.cli.acp.backend import Backend, BundledServer, MainThreadRequest, MainThreadRequests
from banksman.cli.acp.editor import EditorConnection, Outbox, lines, take_stdio
from banksman.cli.acp.methods import SessionDefaults
from banksman.cli.arguments import Parser, split_command
from banksman.cli.output import as_line, say_aside
from banksman.errors import UsageError

# How long the last messages may take to be written at exit, if the editor reads.
FLUSH_SECONDS = 1.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_NOTES = """\
An editor (Zed, JetBrains, acpx …) starts this verb and speaks ACP with it on stdin and stdout. The
server is the first of: --url, BANKSMAN_URL, url in the settings, this user's running server. Without
a server, acp starts one in this process. docs/editors.md has the settings of editors.

exit codes: 0 the editor disconnected or TERM was received, 2 wrong usage, 130 Ctrl-C. Any other
failure is sent to the editor, as the error of its request.
"""  # noqa: E501


def parser() -> Parser:
    flags = Parser(
        "acp",
        "[--agent AGENT] [--url URL] [-- COMMAND …]",
        "Act as an ACP agent for an editor, with supervised sessions. "
        "COMMAND replaces the agent's command.",
        "banksman acp --agent claude",
        notes=_NOTES,
    )
    flags.add_argument(
        "--agent",
        default="claude",
        metavar="AGENT",
        help="an agent that the server knows (default: claude)",
    )
    flags.add_argument(
        "--url", metavar="URL", help="URL of the server, or unix:PATH for its socket"
    )
    return flags


def main(words: list[str]) -> int:
    flags = parser()
    before, command = split_command(words)
    arguments = flags.parse_args(before)
    if command == []:
        flags.error("no command after --")
    try:
        stdin, stdout = take_stdio()
    except OSError as exc:
        flags.error(f"cannot use stdin and stdout for the editor: {exc.strerror}")
    try:
        stage = _Stage(arguments.url, SessionDefaults(arguments.agent, command))
    except UsageError as exc:
        # The settings are invalid. An editor may show stderr.
        say_aside(f"banksman acp: {as_line(exc)}")
        return USAGE
    return stage.run(stdin, stdout)


class _Stage:
    """The part of the program that runs in the main thread."""

    def __init__(self, url: str | None, usual: SessionDefaults) -> None:
        self._wishes = MainThreadRequests()
        self._own = BundledServer(self._wishes, self._hear_in_loop)
        self._backend = Backend(url, self._own)
        self._usual = usual
        self._code: int | None = None
        self._signals = 0

    def run(self, stdin: int, stdout: int) -> int:
        """Serve the editor until it leaves. Return the exit code."""
        self._hear_signals()
        outbox = Outbox(stdout, on_gone=self._leave)
        editor = EditorConnection(self._backend, outbox, self._usual)
        threading.Thread(
            target=self._read, args=(stdin, editor), name="banksman-acp in", daemon=True
        ).start()
        while self._wishes.get() is MainThreadRequest.SERVE:
            if not self._own.run():
                self._code = OK if self._code is None else self._code
                break
            # The server's loop has removed its handlers and restored none.
            self._hear_signals()
        outbox.flush(FLUSH_SECONDS)
        return OK if self._code is None else self._code

    def _read(self, stdin: int, editor: EditorConnection) -> None:
        for line in lines(stdin):
            editor.hear(line)
        self._leave()

    def _leave(self, code: int = OK) -> None:
        """End the program. The first exit code counts.

        May be called from any thread and from a signal handler.
        """
        if self._code is None:
            self._code = code
        self._wishes.put(MainThreadRequest.LEAVE)
        # In a separate thread: `end` waits for the server, which may run in this very thread.
        threading.Thread(target=self._own.end, name="banksman-acp end", daemon=True).start()

    # -- signals ----------------------------------------------------------------------------------
    def _hear_signals(self) -> None:
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)
        self._wishes.wake_on_signals()

    def _hear_in_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number, None)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        code = INTERRUPTED if number == signal.SIGINT else OK
        self._signals += 1
        if self._signals > 1:
            # A second signal exits immediately. The keepers see that this process is dead and end
            # the running processes.
            os._exit(code)
        self._leave(code)
