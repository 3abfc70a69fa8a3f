"""Log of the server: one line per record, no secret, and no failure that stops the server."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from banksman.errors import UsageError
from banksman.server.ops import logs

SECRET = "tok-EN_of~mine"

# The tests observe logging from outside: a real stderr, and the real exit of a process.
PROGRAM = """
import logging, os, sys, threading
from banksman.server.ops import logs
log = logging.getLogger("banksman.test")
"""


def run(code: str, *, stderr: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """Run the program and check that it succeeds."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM + code],
        stderr=stderr,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.returncode == 0, result
    return result


def record(message: Any, *args: Any, **extra: Any) -> logging.LogRecord:
    return logging.getLogger("banksman.test").makeRecord(
        "banksman.test", logging.WARNING, __file__, 1, message, args, extra.pop("exc_info", None), extra=extra
    )


def as_json(*args: Any, **extra: Any) -> dict[str, Any]:
    line = logs.JsonForm(logs.LogRedactor([SECRET])).line(record(*args, **extra))
    assert line.endswith("\n")
    assert len(line.splitlines()) == 1
    return json.loads(line, parse_constant=pytest.fail)


def as_text(*args: Any, **extra: Any) -> str:
    return logs.TextForm(logs.LogRedactor([SECRET])).line(record(*args, **extra))


def raised(error: Exception) -> Any:
    try:
        raise error
    except Exception:
        return sys.exc_info()


def test_json_log_line_has_time_level_logger_message_and_extra() -> None:
    found = as_json("turn %s of %d", "t-1", 3, session="s-1", seconds=1.5, is_open=True, missing=None, where=Path("/x"))
    at = found.pop("at")
    assert at[10:11] + at[19:20] + at[23:] == "T.Z"
    assert found == {
        "level": "warning",
        "logger": "banksman.test",
        "message": "turn t-1 of 3",
        "session": "s-1",
        "seconds": 1.5,
        "is_open": True,
        "missing": None,
        "where": "/x",
    }


def test_json_log_extra_cannot_override_record_fields() -> None:
    found = as_json("true", level="debug", at="yesterday", logger="me")
    assert (found["level"], found["logger"], found["message"]) == ("warning", "banksman.test", "true")
    assert found["at"] != "yesterday"


def test_json_log_line_includes_the_exception() -> None:
    found = as_json("failed", exc_info=raised(ValueError("bad value")))
    assert found["exception"].startswith("Traceback")
    assert found["exception"].endswith("ValueError: bad value")


def test_text_log_escapes_line_breaks_in_a_message() -> None:
    line = as_text("a\nb\r\x1b[31m\u2028\x85\u202e\0%s", "\n2026 info banksman: forged", id="x\ny")
    assert line.count("\n") == 1
    assert line.endswith("\n")
    expected = r"a\nb\r\x1b[31m\u2028\x85\u202e\x00\n2026 info banksman: forged id=x\ny"
    assert line[:-1].endswith(f"warning banksman.test: {expected}")


def test_text_log_indents_the_lines_of_an_exception() -> None:
    first, *rest = as_text("failed", exc_info=raised(ValueError("bad\n2026 info\x1b"))).splitlines()
    assert first.endswith("banksman.test: failed")
    assert rest[-2:] == ["    ValueError: bad", r"    2026 info\x1b"]
    assert all(line.startswith("    ") for line in rest)


class Hostile:
    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __str__


@pytest.mark.parametrize(
    ("message", "args", "extra"),
    [
        pytest.param("%d", ("x",), {}, id="wrong type"),
        pytest.param("%s %s", ("x",), {}, id="too few"),
        pytest.param("%s", (Hostile(),), {}, id="hostile argument"),
        pytest.param(Hostile(), (), {}, id="hostile message"),
        pytest.param("x", (), {"value": Hostile()}, id="hostile value"),
        pytest.param("x", (), {"value": float("nan")}, id="no number"),
        pytest.param("\ud800", (), {"value": "\udfff"}, id="half a character"),
    ],
)
def test_log_formats_any_value_as_one_line(message: Any, args: tuple[Any, ...], extra: dict[str, Any]) -> None:
    assert as_json(message, *args, **extra)["level"] == "warning"
    assert as_text(message, *args, **extra).count("\n") == 1


@pytest.mark.parametrize("form", [as_json, as_text])
def test_log_line_never_contains_a_secret(form: Any) -> None:
    half, other = SECRET[:5], SECRET[5:]
    found = str(
        form(
            f"a {SECRET} %s %s%s %r",
            SECRET,
            half,
            other,
            {"token": SECRET.encode()},
            header=f"Bearer {SECRET}",
            headers=[SECRET],
            exc_info=raised(ValueError(SECRET)),
        )
    )
    assert SECRET not in found
    assert found.count("[secret]") >= 6


@pytest.mark.parametrize("secret", ['quo"te\\d', "ünïcode/%", "a\nb", "\ud800half"])
def test_log_redactor_finds_a_secret_in_every_quoting(secret: str) -> None:
    redactor = logs.LogRedactor([secret, ""])
    assert redactor.clean("nothing to hide") == "nothing to hide"
    for dressed in (secret, repr(secret), json.dumps(secret), repr([secret])):
        found = redactor.clean(f"x {dressed} y")
        assert "[secret]" in found
        assert secret not in found


def test_log_redactor_prefers_the_longer_secret_and_cuts_no_half() -> None:
    assert logs.LogRedactor(["abc", "abcdef"]).clean("abcdef abc") == "[secret] [secret]"
    text = "x" * (logs.TEXT_CHARACTERS_MAX - 3) + SECRET
    assert SECRET[:3] not in logs.LogRedactor([SECRET]).clean(text)


def test_log_truncates_a_long_message_and_says_so() -> None:
    message = as_json("x" * (logs.TEXT_CHARACTERS_MAX + 7))["message"]
    assert message == "x" * logs.TEXT_CHARACTERS_MAX + "… (7 characters more)"
    assert as_json("x" * logs.TEXT_CHARACTERS_MAX)["message"] == "x" * logs.TEXT_CHARACTERS_MAX


def test_log_writes_every_logger_to_stderr_once() -> None:
    found = run(
        f"""
logging.basicConfig()
logs.configure("text", "info")
logs.configure("json", "warning", [{SECRET!r}])
log.info("not this")
log.warning("this, %s", {SECRET!r}, extra={{"session": "s-1"}})
logging.getLogger("some.library").error("that")
logs.write("a\\nb {SECRET}\\n")
"""
    ).stderr
    lines = [json.loads(line) for line in found.splitlines()]
    assert [line["message"] for line in lines] == ["this, [secret]", "that", "a\nb [secret]"]
    assert lines[0]["session"] == "s-1"


def test_log_write_keeps_lines_in_text_and_unconfigured() -> None:
    assert run('logs.write("a\\nb"); logs.configure("text", "info"); logs.write("c\\n d\\x1b\\n")').stderr == (
        "a\nb\nc\n d\\x1b\n"
    )


@pytest.mark.parametrize("closes", ["logs.close()", ""], ids=["closed", "left to the exit"])
def test_log_loses_no_line_at_exit(closes: str) -> None:
    code = f'logs.configure("text", "info")\nfor number in range(2000): log.info("line %d", number)\n{closes}'
    assert [line.rpartition(" ")[2] for line in run(code).stderr.splitlines()] == [str(n) for n in range(2000)]


@pytest.mark.thorough
def test_log_does_not_block_on_full_stderr() -> None:
    """The pipe is full from the start and stays so. The program logs more than the queue holds, and ends."""
    reading, writing = os.pipe()
    try:
        os.set_blocking(writing, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writing, b"x" * 4096)
        os.set_blocking(writing, True)
        code = """
logs.configure("text", "info")
for number in range(20000):
    log.info("%d %s", number, "y" * 500)
print("went on")
"""
        assert run(code, stderr=writing).stdout == "went on\n"
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.thorough
def test_log_reports_lost_lines_when_stderr_is_read_again() -> None:
    code = """
logs.configure("text", "info")
for number in range(20000):
    log.info("%d %s", number, "y" * 500)
os.write(1, b"!")
sys.stdin.read(1)
logging.getLogger().handlers[0].flush()
log.info("the last one")
"""
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM + code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert program.stdout is not None
    assert program.stdout.read(1) == b"!"
    lines = program.communicate(b"x")[1].decode().splitlines()
    assert program.returncode == 0
    # The loss is reported when there is room: at the end, and earlier if the pipe took bytes meanwhile.
    told = [re.search(r" (\d+) log lines lost: too many at once, or stderr is not read$", line) for line in lines]
    lost = [int(match[1]) for match in told if match is not None]
    kept = len(lines) - len(lost) - 1
    assert 1000 < kept < 19000
    assert sum(lost) == 20000 - kept
    assert told[-2] is not None
    assert lines[-1].endswith("the last one")


@pytest.mark.parametrize("kind", ["broken pipe", "full disk", "closed", "does not wait"])
def test_log_does_not_fail_on_broken_stderr(kind: str) -> None:
    code = """
for number in range(100):
    log.info("%d", number)
logs.write("block")
logs.close()
log.error("behind the close")
print("went on" if threading.active_count() == 1 else threading.enumerate())
"""
    with ExitStack() as opened:
        match kind:
            case "broken pipe":
                reading, writing = os.pipe()
                opened.callback(os.close, writing)
                os.close(reading)
                result = run('logs.configure("text", "info")' + code, stderr=writing)
            case "full disk":
                with open("/dev/full", "wb") as full:
                    result = run('logs.configure("json", "info")' + code, stderr=full.fileno())
            case "closed":
                result = run('os.close(2); sys.stderr = None; logs.configure("text", "info")' + code)
            case _:
                result = run('os.set_blocking(2, False); logs.configure("text", "info")' + code)
                assert len(result.stderr.splitlines()) == 101
    assert result.stdout == "went on\n"


def test_log_reports_missed_lines_to_a_returning_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "stderr")
    reading = os.open(tmp_path / "stderr", os.O_RDONLY | os.O_NONBLOCK)
    writing = os.open(tmp_path / "stderr", os.O_WRONLY)
    code = """
logs.configure("text", "info")
for word in sys.stdin:
    log.info(word.strip())
    logging.getLogger().handlers[0].flush()
    print("said", flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM + code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=writing,
        text=True,
    ) as program:
        os.close(writing)
        assert program.stdin is not None
        assert program.stdout is not None
        for word in ("heard", "missed", "heard again"):
            if word == "missed":
                os.close(reading)
            elif word == "heard again":
                reading = os.open(tmp_path / "stderr", os.O_RDONLY | os.O_NONBLOCK)
            program.stdin.write(f"{word}\n")
            program.stdin.flush()
            assert program.stdout.readline() == "said\n"
            if word == "heard":
                assert os.read(reading, 4096).endswith(b"heard\n")
        lost, again = os.read(reading, 4096).decode().splitlines()
        os.close(reading)
    assert lost.endswith(" 1 log lines lost: too many at once, or stderr is not read")
    assert again.endswith("heard again")


def test_log_to_non_blocking_stderr_loses_no_line() -> None:
    code = """
os.set_blocking(2, False)
logs.configure("text", "info")
for number in range(2000): log.info("%d %s", number, "y" * 500)
"""
    lines = run(code).stderr.splitlines()
    assert [line.split()[3] for line in lines] == [str(number) for number in range(2000)]


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield root
    assert (root.handlers, root.level) == (handlers, level)


@pytest.mark.parametrize(("form", "level"), [("xml", "info"), ("json", "loud"), ("json", "INFO")])
def test_log_configure_refuses_unknown_format_or_level(root_logger: logging.Logger, form: str, level: str) -> None:
    del root_logger  # The root logger stays unchanged.
    with pytest.raises(UsageError, match="unknown log"):
        logs.configure(form, level)
