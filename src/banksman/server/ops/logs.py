"""Server log on stderr: one record per line, as JSON or text, without secrets.

The reader of stderr may be slow, stuck or gone, and must not block the server. So a separate thread
writes the lines from a bounded queue. Lines beyond the bound are dropped and counted. The next line
that fits is preceded by that count. A write error never reaches the caller.

Secrets are removed where a record becomes text: from the formatted message, from the text of the
exception, and from every extra value. Removing them from the arguments would miss a secret that two
arguments form together.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import re
import select
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from banksman.errors import UsageError
from banksman.server.access.named_tokens import PREFIX

FORMATS = ("json", "text")
LEVELS = ("debug", "info", "warning", "error", "critical")
# Limit of the queue to stderr: some thousand lines.
WAITING_BYTES_MAX = 4 << 20
# A message, an exception or a value is truncated to this length, so that log stores accept it.
TEXT_CHARACTERS_MAX = 32 << 10
# How long the exit of the program waits for a slow reader.
FLUSH_SECONDS_MAX = 1.0
HIDDEN = "[secret]"
# Named tokens and page tokens. The server has no list of them, and a client may send one in the
# wrong place: a path is logged.
_TOKENS = (rf"{PREFIX}[\w-]{{20,}}", r"bmp_[\w-]{16}\.[0-9]{1,12}\.[\w-]{43}")

# Attributes of every record. All other attributes come from `extra`.
_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure(format: str, level: str, secrets: Sequence[str] = ()) -> None:  # noqa: A002
    """Send all log records of this process to stderr only. May be called again."""
    if format not in FORMATS:
        raise UsageError(f"unknown log format {format!r:.60}", hint=f"use {' or '.join(FORMATS)}")
    if level not in LEVELS:
        raise UsageError(f"unknown log level {level!r:.60}", hint=f"use {', '.join(LEVELS)}")
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    redactor = LogRedactor(secrets)
    handler = StderrHandler(JsonForm(redactor) if format == "json" else TextForm(redactor))
    root.addHandler(handler)
    root.setLevel(level.upper())


def close() -> None:
    """Write the queued lines for a moment, then log nothing.

    The exit of the program does the same.
    """
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, StderrHandler)]:
        root.removeHandler(handler)
        handler.close()
    # Without a handler, Python's last-resort handler would write errors to stderr: to a stream that
    # may be broken, and with secrets.
    root.addHandler(logging.NullHandler())


def write(text: str) -> None:
    """Write several lines, such as stacks: as they are, or as the message of one JSON record."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, StderrHandler):
            handler.put(handler.form.block(text))
            return
    # Stderr is closed or broken, or does not exist.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text if text.endswith("\n") else f"{text}\n")
        sys.stderr.flush()


class LogRedactor:
    """Replace secrets in text, also in their repr, JSON and URL-quoted forms, and all tokens."""

    def __init__(self, secrets: Sequence[str]) -> None:
        forms = {
            form
            for secret in secrets
            if secret
            for form in (
                secret,
                repr(secret)[1:-1],
                json.dumps(secret)[1:-1],
                quote(secret, safe="", errors="replace"),
            )
        }
        # The longest first: a secret may be the prefix of another.
        words = map(re.escape, sorted(forms, key=len, reverse=True))
        self._pattern = re.compile("|".join((*words, *_TOKENS)))

    def redact(self, text: str) -> str:
        return self._pattern.sub(HIDDEN, text)

    def clean(self, text: str) -> str:
        """Remove secrets, then truncate. In the other order half of a secret could stay."""
        text = self.redact(text)
        left = len(text) - TEXT_CHARACTERS_MAX
        return text if left <= 0 else f"{text[:TEXT_CHARACTERS_MAX]}… ({left} characters more)"


class LogForm(ABC):
    """Format of a log record: one or more lines, each with its line end."""

    def __init__(self, redactor: LogRedactor) -> None:
        self._clean = redactor.clean
        self._redact = redactor.redact

    def line(self, record: logging.LogRecord) -> str:
        """Format a record, without secrets."""
        extra = {
            name: self._value(value) for name, value in vars(record).items() if name not in _PLAIN
        }
        return self._line(
            at=_at(record.created),
            level=record.levelname.lower(),
            logger=record.name,
            message=self._clean(_message(record)),
            extra=extra,
            exception=self._clean(_exception(record)),
        )

    @abstractmethod
    def block(self, text: str) -> str:
        """Format several lines as one unit."""

    @abstractmethod
    def _line(
        self,
        *,
        at: str,
        level: str,
        logger: str,
        message: str,
        extra: Mapping[str, Any],
        exception: str,
    ) -> str: ...

    def _value(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float):
            return value
        return self._clean(value if isinstance(value, str) else _text(value))


class JsonForm(LogForm):
    """One JSON object per line, in ASCII: no character in it can pass for a line end."""

    def _line(
        self,
        *,
        at: str,
        level: str,
        logger: str,
        message: str,
        extra: Mapping[str, Any],
        exception: str,
    ) -> str:
        record = {**extra, "at": at, "level": level, "logger": logger, "message": message}
        if exception:
            record["exception"] = exception
        first = ("at", "level", "logger", "message")
        ordered = {name: record[name] for name in first} | record
        # JSON has no NaN and no infinity: they become text.
        return json.dumps({name: _finite(value) for name, value in ordered.items()}) + "\n"

    def block(self, text: str) -> str:
        message = self._redact(text.rstrip("\n"))
        return self._line(
            at=_at(time.time()),
            level="info",
            logger="banksman",
            message=message,
            extra={},
            exception="",
        )


class TextForm(LogForm):
    """Text format for people.

    A message stays on one line: unprintable characters are escaped, whatever the message quotes.
    Only an exception takes more lines. Each of them is indented, so that none passes for a record.
    """

    def _line(
        self,
        *,
        at: str,
        level: str,
        logger: str,
        message: str,
        extra: Mapping[str, Any],
        exception: str,
    ) -> str:
        ids = "".join(f" {name}={escaped(str(value))}" for name, value in extra.items())
        line = f"{at} {level:<7} {logger}: {escaped(message)}{ids}\n"
        return line + "".join(f"    {escaped(one)}\n" for one in exception.split("\n") if one)

    def block(self, text: str) -> str:
        return "".join(f"{escaped(one)}\n" for one in self._redact(text.rstrip("\n")).split("\n"))


class StderrHandler(logging.Handler):
    """Log handler with a bounded queue and one writer thread."""

    def __init__(self, form: LogForm) -> None:
        super().__init__()
        self.form = form
        # Each counter has one writer, so that neither side waits for the other. `_put_bytes`
        # changes under the handler's lock, `_taken_bytes` in the writer thread.
        self._put_bytes = 0
        self._taken_bytes = 0
        self._lost = 0
        self._queue: queue.SimpleQueue[bytes | threading.Event | None] = queue.SimpleQueue()
        # In a program without stderr, fd 2 is or becomes something else.
        self._fd = 2 if sys.stderr is not None else -1
        self._thread: threading.Thread | None = threading.Thread(
            target=self._run, name="banksman-logs", daemon=True
        )
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.put(self.form.line(record))
        except Exception:
            # A faulty record must not disturb the code that logs it.
            self._lost += 1

    def put(self, text: str) -> None:
        """Queue text for the writer thread, or drop it and count it if the queue is full."""
        data = text.encode("utf-8", "backslashreplace")
        with self.lock or contextlib.nullcontext():
            if self._put_bytes - self._taken_bytes + len(data) > WAITING_BYTES_MAX:
                self._lost += 1
                return
            if self._lost:
                lost, self._lost = self._lost, 0
                message = f"{lost} log lines lost: too many at once, or stderr is not read"
                told = {"name": "banksman", "levelname": "WARNING", "msg": message}
                data = self.form.line(logging.makeLogRecord(told)).encode() + data
            self._put_bytes += len(data)
            self._queue.put(data)

    def flush(self) -> None:
        """Wait until the queue is written, at most for `FLUSH_SECONDS_MAX`."""
        if self._thread is not None:
            written = threading.Event()
            self._queue.put(written)
            written.wait(FLUSH_SECONDS_MAX)

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join(FLUSH_SECONDS_MAX)
        super().close()

    def _run(self) -> None:
        while (data := self._queue.get()) is not None:
            if isinstance(data, threading.Event):
                data.set()
                continue
            self._write(data)
            self._taken_bytes += len(data)

    def _write(self, data: bytes) -> None:
        """Write all of this data, or drop it on a write error (no reader, disk full)."""
        view = memoryview(data)
        while view and self._fd >= 0:
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:
                # Another process has set O_NONBLOCK on this open file. That process may rely on the
                # flag, so the flag stays and this thread waits.
                select.select((), (self._fd,), ())
            except OSError:
                self._lost += 1
                return


def escaped(text: str) -> str:
    """Escape line ends and terminal control characters."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def _at(seconds: float) -> str:
    return (
        datetime.fromtimestamp(seconds, UTC)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception as exc:
        # The arguments do not match the format, or `str()` of one fails: a bug of the caller, which
        # still deserves a line.
        return f"{_text(record.msg)} (could not be formatted: {type(exc).__name__})"


def _exception(record: logging.LogRecord) -> str:
    text = ""
    if record.exc_info and record.exc_info[0] is not None:
        try:
            text = "".join(traceback.format_exception(*record.exc_info))
        except Exception as exc:
            text = f"{record.exc_info[0].__name__} (could not be formatted: {type(exc).__name__})"
    return f"{text}{record.stack_info or ''}".rstrip("\n")


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception as exc:
        return f"<{type(value).__name__} that cannot be shown: {type(exc).__name__}>"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):  # noqa: PLR0124
        return str(value)
    return value
