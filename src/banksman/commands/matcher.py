"""A search in a process of its own: `python -I -S matcher.py`, told what to do on stdin, answering on stdout.

Python's `re` can take a lifetime for a bad pattern on a short text, and cannot be interrupted meanwhile: in the host it
would stop everything. Here it costs one process, which is killed when its time is up.

Each message is a marshalled value behind its length. A pattern begins a new search. A piece `(data, begin, is_end)` is
answered by what was found in it, or None. So one process serves one search after the other, until its stdin ends.
"""

from __future__ import annotations

import marshal
import sys
from typing import Any, BinaryIO

LENGTH_BYTES = 4


def pack(value: Any) -> bytes:
    data = marshal.dumps(value)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def read_message(source: BinaryIO) -> Any:
    """The next one; EOFError if there is none, or not a whole one."""
    length = int.from_bytes(source.read(LENGTH_BYTES), "big")
    return marshal.loads(source.read(length))


def main() -> None:
    # An isolated interpreter does not know where we are.
    sys.path.append(__file__.rsplit("/banksman/", 1)[0])
    from banksman.commands.pattern_search import Search  # noqa: PLC0415

    search: Search | None = None
    while True:
        try:
            message = read_message(sys.stdin.buffer)
        except EOFError:
            return
        if isinstance(message, str | bytes):
            search = Search(message)
            continue
        assert search is not None
        sys.stdout.buffer.write(pack(search.feed(*message)))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
