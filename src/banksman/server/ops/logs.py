"""What the server says about itself, to stderr: one record a line, as JSON or as text, and never a secret.

Whoever reads stderr may be slow, stuck or gone, and the server must not be. So lines are written by a thread of their
own, from a queue with a bound; past it they are lost, and counted, and the next one that gets through says how many. No
error of writing is anybody's.

Secrets are taken out where a record becomes text: of the message as it was formatted, the text of the exception and
every value that came with it. Taking them out of the arguments would miss what two of them make together.
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

FORMATS = ("json", "text")
LEVELS = ("debug", "info", "warning", "error", "critical")
# What waits for a reader of stderr, at most: some thousand lines.
WAITING_BYTES_MAX = 4 << 20
# A message, an exception or a value is cut behind this: a line must fit where logs are kept.
TEXT_CHARACTERS_MAX = 32 << 10
# At the end of the program, for a reader that is only slow.
FLUSH_SECONDS_MAX = 1.0
HIDDEN = "[secret]"

# What every record has; all else was given as `extra`.
_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure(format: str, level: str, secrets: Sequence[str] = ()) -> None:  # noqa: A002
    """From here on all that is logged in this process goes to stderr, and nowhere else. May be called again."""
    if format not in FORMATS:
        raise UsageError(f"there is no log format {format!r:.60}", hint=" or ".join(FORMATS))
    if level not in LEVELS:
        raise UsageError(f"there is no log level {level!r:.60}", hint=", ".join(LEVELS))
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    redactor = LogRedactor(secrets)
    handler = StderrHandler(JsonForm(redactor) if format == "json" else TextForm(redactor))
    root.addHandler(handler)
    root.setLevel(level.upper())


def close() -> None:
    """Write what waits, for a moment, and log nothing more. The end of the program does the same."""
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, StderrHandler)]:
        root.removeHandler(handler)
        handler.close()
    # Without any, errors would go to stderr by a way of Python's own: by the one that may be broken, and with secrets.
    root.addHandler(logging.NullHandler())


def write(text: str) -> None:
    """Several lines for people, such as the stacks: as they are, or as the one message of a JSON record."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, StderrHandler):
            handler.put(handler.form.block(text))
            return
    with contextlib.suppress(OSError, ValueError, AttributeError):  # Nobody listens, or there is no stderr at all.
        sys.stderr.write(text if text.endswith("\n") else f"{text}\n")
        sys.stderr.flush()


class LogRedactor:
    """Replaces secrets in text, also as a repr, as JSON and as a part of a URL have them."""

    def __init__(self, secrets: Sequence[str]) -> None:
        forms = {
            form
            for secret in secrets
            if secret
            for form in (secret, repr(secret)[1:-1], json.dumps(secret)[1:-1], quote(secret, safe="", errors="replace"))
        }
        # The longest first: one may begin with another.
        words = "|".join(map(re.escape, sorted(forms, key=len, reverse=True)))
        self._pattern = re.compile(words) if forms else None

    def redact(self, text: str) -> str:
        return text if self._pattern is None else self._pattern.sub(HIDDEN, text)

    def clean(self, text: str) -> str:
        """Without secrets, then cut: the other way round, half of one could stay."""
        text = self.redact(text)
        left = len(text) - TEXT_CHARACTERS_MAX
        return text if left <= 0 else f"{text[:TEXT_CHARACTERS_MAX]}… ({left} characters more)"


class LogForm(ABC):
    """How a record becomes a line, or a few, each with its end."""

    def __init__(self, redactor: LogRedactor) -> None:
        self._clean = redactor.clean
        self._redact = redactor.redact

    def line(self, record: logging.LogRecord) -> str:
        extra = {name: self._value(value) for name, value in vars(record).items() if name not in _PLAIN}
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
        """Several lines for people, as one thing."""

    @abstractmethod
    def _line(
        self, *, at: str, level: str, logger: str, message: str, extra: Mapping[str, Any], exception: str
    ) -> str: ...

    def _value(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float):
            return value
        return self._clean(value if isinstance(value, str) else _text(value))


class JsonForm(LogForm):
    """One object a line, in ASCII: nothing in it can be taken for the end of the line."""

    def _line(self, *, at: str, level: str, logger: str, message: str, extra: Mapping[str, Any], exception: str) -> str:
        record = {**extra, "at": at, "level": level, "logger": logger, "message": message}
        if exception:
            record["exception"] = exception
        first = ("at", "level", "logger", "message")
        ordered = {name: record[name] for name in first} | record
        # A number that JSON does not have is shown as text.
        return json.dumps({name: _finite(value) for name, value in ordered.items()}) + "\n"

    def block(self, text: str) -> str:
        message = self._redact(text.rstrip("\n"))
        return self._line(at=_at(time.time()), level="info", logger="banksman", message=message, extra={}, exception="")


class TextForm(LogForm):
    """For people. Whatever somebody else has put into a message, it stays on its line: what cannot be printed is
    escaped. Only an exception has more lines, each set in, so that none can be taken for a record."""

    def _line(self, *, at: str, level: str, logger: str, message: str, extra: Mapping[str, Any], exception: str) -> str:
        ids = "".join(f" {name}={escaped(str(value))}" for name, value in extra.items())
        line = f"{at} {level:<7} {logger}: {escaped(message)}{ids}\n"
        return line + "".join(f"    {escaped(one)}\n" for one in exception.split("\n") if one)

    def block(self, text: str) -> str:
        return "".join(f"{escaped(one)}\n" for one in self._redact(text.rstrip("\n")).split("\n"))


class StderrHandler(logging.Handler):
    """One thread that writes, and a queue before it."""

    def __init__(self, form: LogForm) -> None:
        super().__init__()
        self.form = form
        # Each counted on one side only, so that neither waits for the other: what was put is written under the
        # handler's own lock, what was taken by the thread.
        self._put_bytes = 0
        self._taken_bytes = 0
        self._lost = 0
        self._queue: queue.SimpleQueue[bytes | threading.Event | None] = queue.SimpleQueue()
        # Where the program has no stderr, its number is or will be something else's.
        self._fd = 2 if sys.stderr is not None else -1
        self._thread: threading.Thread | None = threading.Thread(target=self._run, name="banksman-logs", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.put(self.form.line(record))
        except Exception:
            # Whatever is wrong with a record, who logs it has other work to do.
            self._lost += 1

    def put(self, text: str) -> None:
        data = text.encode("utf-8", "backslashreplace")
        with self.lock or contextlib.nullcontext():
            if self._put_bytes - self._taken_bytes + len(data) > WAITING_BYTES_MAX:
                self._lost += 1
                return
            if self._lost:
                lost, self._lost = self._lost, 0
                message = f"! {lost} log lines were lost: there were too many at once, or stderr was not read"
                told = {"name": "banksman", "levelname": "WARNING", "msg": message}
                data = self.form.line(logging.makeLogRecord(told)).encode() + data
            self._put_bytes += len(data)
            self._queue.put(data)

    def flush(self) -> None:
        """Until all is written, or a moment has passed."""
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
        """The whole of it. If nobody reads any more, or the disk is full, it is lost: there is nobody to tell."""
        view = memoryview(data)
        while view and self._fd >= 0:
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:
                # Somebody has made it so that it does not wait, and it may be theirs too: so we wait here.
                select.select((), (self._fd,), ())
            except OSError:
                self._lost += 1
                return


def escaped(text: str) -> str:
    """On one line, and without what a terminal would take for a command."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def _at(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception as exc:
        # The arguments do not fit, or one cannot be shown: a bug of who logs it, and still worth a line.
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
