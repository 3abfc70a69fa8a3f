"""Download a file from a server: to a new private file, or to stdout."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from banksman.cli import OK
from banksman.cli.client.client import Client
from banksman.cli.output import CannotWrite, as_line, say, say_json
from banksman.errors import UsageError

PIECE_BYTES = 1 << 16
# The server may check its machine before it sends the next part.
SILENCE_SECONDS_MAX = 90.0


def download(client: Client, path: str, target: str, query: Mapping[str, Any] | None = None) -> int:
    """Write what the server sends to `target`, and return the number of bytes. "-": stdout.

    The file appears under its name only when it is complete. Only this user can read it. Raises
    `UsageError` if the name exists or cannot be written.
    """
    pieces = _pieces(client, path, query)
    if target == "-":
        return _to_stdout(pieces)
    target = os.path.abspath(target)
    _check_absent(target)
    partial = f"{target}.{os.getpid()}.part"
    try:
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "wb") as file:
                size = sum(file.write(piece) for piece in pieces)
            _check_absent(target)
            os.rename(partial, target)
        finally:
            # Not a file of this name that was there before: then `os.open` has failed.
            with contextlib.suppress(OSError):
                os.unlink(partial)
    except OSError as exc:
        hint = "use a path in a folder that this user may write"
        raise UsageError(f"cannot write {target}: {exc.strerror}", hint=hint) from exc
    return size


def say_written(arguments: argparse.Namespace, size: int) -> int:
    """Say that the file is written, unless it went to stdout."""
    if arguments.file != "-":
        match arguments.format:
            case "json":
                say_json({"file": arguments.file, "bytes": size})
            case "quiet":
                pass
            case _:
                say(as_line(f"wrote {arguments.file}, {size} bytes"))
    return OK


def _to_stdout(pieces: Iterator[bytes]) -> int:
    size = 0
    for piece in pieces:
        try:
            size += sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            raise
        except OSError as exc:
            raise CannotWrite(f"cannot write to stdout: {exc.strerror or exc}") from exc
    return size


def _pieces(client: Client, path: str, query: Mapping[str, Any] | None) -> Iterator[bytes]:
    with client.stream(
        path, query=query, headers={}, silence_seconds_max=SILENCE_SECONDS_MAX
    ) as response:
        while piece := response.read1(PIECE_BYTES):
            yield piece


def _check_absent(target: str) -> None:
    if os.path.lexists(target):
        hint = "remove it, or use another name"
        raise UsageError(f"cannot write {target}: it exists already", hint=hint)
