"""Framing against a small model: any bytes, cut anywhere, at any limit; and its cost in work and memory."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from banksman.core.wire.framing import (
    FRAME_BYTES_MAX,
    HEAD_BYTES,
    TAIL_BYTES,
    Framed,
    Framing,
    MixedChunk,
    OversizeBegan,
    OversizeEnded,
    OversizePiece,
)

# A small alphabet, so that newlines, blank lines and returns meet often. It includes NUL and a byte invalid in UTF-8.
BYTES = st.lists(st.sampled_from([b"\n", b"\r", b"\r\n", b"a", b"\x00", b"\xff", b"bcdef"]), max_size=40).map(b"".join)
LIMITS = st.sampled_from([1, 2, 3, 5, 8, 1000])


def lines_of(data: bytes) -> tuple[list[bytes], int]:
    """The model: return the lines of these bytes, and the number of blank lines among them."""
    found = data.split(b"\n")
    if not found[-1]:
        found.pop()
    lines = [line.removesuffix(b"\r") for line in found]
    return [line for line in lines if line], lines.count(b"")


@st.composite
def chunked(draw: st.DrawFn) -> list[bytes]:
    data = draw(BYTES)
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=12)))
    return [data[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def in_order(answer: list[bytes] | MixedChunk) -> list[Framed]:
    return list(answer.items) if isinstance(answer, MixedChunk) else list(answer)


def framed(chunks: Iterable[bytes], frame_bytes_max: int = FRAME_BYTES_MAX) -> list[Framed]:
    """Return all items of a stream, up to its end."""
    one = Framing(frame_bytes_max=frame_bytes_max)
    return [item for chunk in chunks for item in in_order(one.feed(chunk))] + in_order(one.end())


@dataclass
class Shell:
    """Consume framed items as the shell does: keep lines as they are, and write an oversize line to a file."""

    lines: list[bytes] = field(default_factory=list[bytes])
    spilled: list[OversizeEnded] = field(default_factory=list[OversizeEnded])
    file: bytearray | None = None
    head: bytes = b""

    def take(self, items: Iterable[Framed]) -> None:
        for item in items:
            match item:
                case OversizeBegan(head):
                    assert self.file is None
                    self.file, self.head = bytearray(), head
                case OversizePiece(data):
                    assert self.file is not None
                    assert data
                    self.file += data
                case OversizeEnded(length, head, tail):
                    assert self.file is not None
                    assert length == len(self.file)
                    assert head == self.head
                    assert self.file.startswith(head)
                    assert self.file[-TAIL_BYTES:] == tail
                    self.lines.append(bytes(self.file))
                    self.spilled.append(item)
                    self.file = None
                case _:
                    assert self.file is None, "a line inside an oversize one"
                    self.lines.append(item)


# -- lines -----------------------------------------------------------------------------------------------------------
@given(chunked())
@example([b"a\r", b"\n"])
@example([b"a\r", b"\r\n"])
@example([b"a\r", b"b\r\n\r", b"\n\r"])
@example([b"\n", b"", b"\n"])
def test_framing_is_independent_of_cuts(chunks: list[bytes]) -> None:
    data = b"".join(chunks)
    one = Framing()
    got: list[Framed] = []
    for count, chunk in enumerate(chunks, 1):
        got += in_order(one.feed(chunk))
        # No line waits for a later chunk: it is delivered with its newline.
        so_far = b"".join(chunks[:count])
        assert got == lines_of(so_far[: so_far.rfind(b"\n") + 1])[0]
    got += in_order(one.end())
    lines, blank = lines_of(data)
    assert got == lines
    assert (one.bytes_in, one.lines, one.blank, one.oversize) == (len(data), len(lines), blank, 0)


def test_framing_passes_any_bytes_through() -> None:
    strange = bytes(byte for byte in range(256) if byte != ord("\n")) + b"\xed\xa0\x80\xc0\x80"
    assert framed([strange + b"\n" + strange]) == [strange, strange]
    # Only `\n` ends a line, not the other characters at which str.splitlines splits.
    assert framed([b"a\x0bb\x0cc\x1cd\xc2\x85e\xe2\x80\xa8f\rg\n"]) == [b"a\x0bb\x0cc\x1cd\xc2\x85e\xe2\x80\xa8f\rg"]


def test_framing_drops_one_return_only_before_newline() -> None:
    assert framed([b"a\r\nb\r\r\n\rc\n\r\n"]) == [b"a", b"b\r", b"\rc"]
    assert framed([b"a\r", b"\r", b"\n", b"\r\n", b"b\r"]) == [b"a\r", b"b"]


def test_framing_returns_plain_list_owned_by_caller() -> None:
    one = Framing()
    first = one.feed(b"a\nb\n")
    assert type(first) is list
    first.clear()
    assert one.feed(b"c\n") == [b"c"]


# -- the end of the stream -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("data", "last"),
    [
        (b"", []),
        (b"a\n", []),
        (b"a\nbc", [b"bc"]),
        (b"bc\r", [b"bc"]),
        (b"\r", []),
        (b"1234", [b"1234"]),
        (b"1234\r", [b"1234"]),
        (b"12345", MixedChunk((OversizeEnded(5, b"1234", b"12345"),))),
        (b"12345\r", MixedChunk((OversizeEnded(5, b"1234", b"12345"),))),
        (b"12345\n", []),
    ],
)
def test_framing_accepts_last_line_without_newline(data: bytes, last: list[bytes] | MixedChunk) -> None:
    one = Framing(frame_bytes_max=4)
    one.feed(data)
    assert one.end() == last
    assert one.bytes_in == len(data)


def test_framing_refuses_input_after_end() -> None:
    one = Framing()
    one.feed(b"a")
    one.end()
    before = repr(one)
    for late in (lambda: one.feed(b"b"), lambda: one.feed(b""), one.end):
        with pytest.raises(AssertionError):
            late()
    assert repr(one) == before == "<Framing open=ended bytes_in=1 lines=1 oversize=0>"


# -- beyond the limit ------------------------------------------------------------------------------------------------
@given(chunked(), LIMITS)
@example([b"abc\r", b"\n"], 3)
@example([b"abc\r", b"\r\n"], 3)
@example([b"abcd\r", b"\r", b"e\n"], 3)
@example([b"a\n\nabcdef\n\nb\nabc"], 3)
def test_framing_passes_oversize_line_whole_and_in_place(chunks: list[bytes], limit: int) -> None:
    data = b"".join(chunks)
    one, shell = Framing(frame_bytes_max=limit), Shell()
    for chunk in chunks:
        answer = one.feed(chunk)
        items = in_order(answer)
        assert isinstance(answer, MixedChunk) is any(not isinstance(item, bytes) for item in items)
        shell.take(items)
        assert one.is_oversize is (shell.file is not None)
        assert one.held_bytes <= limit + 1
    shell.take(in_order(one.end()))
    lines, blank = lines_of(data)
    large = [line for line in lines if len(line) > limit]
    assert shell.lines == lines
    assert shell.file is None
    # The place at which the limit was passed does not depend on the chunks either.
    assert shell.spilled == [OversizeEnded(len(line), line[:limit], line) for line in large]
    assert (one.bytes_in, one.blank) == (len(data), blank)
    assert (one.lines, one.oversize) == (len(lines) - len(large), len(large))


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b""])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_framing_limit_is_longest_kept_line(newline: bytes, size: int) -> None:
    limit = 100
    for length, is_kept in ((limit - 1, True), (limit, True), (limit + 1, False)):
        line = b"x" * length
        data = line + newline
        got = framed((data[at : at + size] for at in range(0, len(data), size)), limit)
        assert (got == [line]) is is_kept
        assert isinstance(got[-1], OversizeEnded) is not is_kept


def test_framing_limit_excludes_newline_that_comes_alone() -> None:
    # The held pieces are too large to be joined, and the chunk with the newline adds no bytes to the line.
    limit = 10_000
    assert framed([b"x", b"x" * (limit - 1) + b"\r", b"", b"\n"], limit) == [b"x" * limit]


def test_framing_default_limit_is_32_mib() -> None:
    line = bytes(FRAME_BYTES_MAX)
    assert FRAME_BYTES_MAX == 32 << 20
    assert framed([line, b"\nnext\n"]) == [line, b"next"]
    began, *pieces, ended, after = framed([line, b"x", b"\nnext\n"])
    assert began == OversizeBegan(bytes(HEAD_BYTES))
    assert pieces == [OversizePiece(line), OversizePiece(b"x")]
    assert ended == OversizeEnded(FRAME_BYTES_MAX + 1, bytes(HEAD_BYTES), bytes(TAIL_BYTES - 1) + b"x")
    assert after == b"next"


@pytest.mark.parametrize("size", [1, 100, 5000, 70_000, 300_000])
def test_framing_head_and_tail_are_ends_of_oversize_line(size: int) -> None:
    line = b"".join(b"%07d " % number for number in range(25_000))
    data = line + b"\nnext\n"
    shell = Shell()
    shell.take(framed((data[at : at + size] for at in range(0, len(data), size)), HEAD_BYTES + 1))
    assert shell.lines == [line, b"next"]
    assert shell.spilled == [OversizeEnded(len(line), line[:HEAD_BYTES], line[-TAIL_BYTES:])]


def test_framing_repr_shows_its_state() -> None:
    one = Framing(frame_bytes_max=4)
    assert repr(one) == "<Framing open=none bytes_in=0 lines=0 oversize=0>"
    one.feed(b"a\nbc")
    assert repr(one) == "<Framing open=partial(2) bytes_in=4 lines=1 oversize=0>"
    one.feed(b"def")
    assert repr(one) == "<Framing open=oversize(5) bytes_in=7 lines=1 oversize=1>"


# -- work and memory -------------------------------------------------------------------------------------------------
class Counted(bytes):
    """Bytes that count the work on them: each search and each concatenation adds its length."""

    work = 0

    def split(self, sep: bytes | None = None, maxsplit: int = -1) -> list[bytes]:  # pyright: ignore[reportIncompatibleMethodOverride]
        Counted.work += len(self)
        return [Counted(piece) for piece in bytes.split(self, sep, maxsplit)]

    def __add__(self, other: bytes) -> Counted:  # pyright: ignore[reportIncompatibleMethodOverride]
        Counted.work += len(self) + len(other)
        return Counted(bytes(self) + bytes(other))

    def __radd__(self, other: bytes) -> Counted:
        Counted.work += len(self) + len(other)
        return Counted(bytes(other) + bytes(self))


def trickle(length: int, size: int, make: Callable[[bytes], bytes] = bytes) -> list[bytes]:
    return [make(b"x" * size)] * (length // size)


@pytest.mark.parametrize("size", [1, 2, 100])
def test_framing_searches_trickled_bytes_once(size: int) -> None:
    for length in (20_000, 40_000):
        Counted.work = 0
        assert framed([*trickle(length, size, Counted), Counted(b"\n")]) == [b"x" * length]
        assert Counted.work == length + 1


@pytest.mark.parametrize(("length", "size"), [(1 << 18, 1), (1 << 20, 64), (8 << 20, 4000), (8 << 20, 5000)])
def test_framing_cost_of_trickle_is_linear(length: int, size: int) -> None:
    def seconds(chunks: list[bytes]) -> float:
        one = Framing()
        before = time.thread_time()
        for chunk in chunks:
            one.feed(chunk)
        lines = one.feed(b"\n")
        spent = time.thread_time() - before
        assert isinstance(lines, list)
        assert len(lines[0]) == size * len(chunks)
        return spent

    # CPU time of this thread, which load on the machine disturbs little. Three tries allow for that. Quadratic work
    # would give a ratio of 16.
    short, long = trickle(length // 4, size), trickle(length, size)
    ratios: list[float] = []
    for _ in range(3):
        ratios.append(seconds(long) / seconds(short))
        if ratios[-1] < 8:
            return
    pytest.fail(f"four times the bytes cost {ratios} times the work")


@pytest.mark.thorough
@pytest.mark.parametrize("size", [2, 3, 1000, 4096, 5000])
def test_framing_memory_is_bounded_for_any_piece_size(size: int) -> None:
    limit = 4 * HEAD_BYTES
    chunk = b"x" * size
    # Fresh objects, as a pipe delivers them. The last one passes the limit.
    count = limit // size + 1
    gc.collect()
    tracemalloc.start()
    try:
        one = Framing(frame_bytes_max=limit)
        for _ in range(count - 1):
            assert one.feed(bytes(bytearray(chunk))) == []
        assert one.held_bytes == size * (count - 1)
        assert tracemalloc.get_traced_memory()[0] < 1.25 * limit
        # The hand-over does not copy the held pieces, and none is held afterwards.
        tracemalloc.reset_peak()
        answer = one.feed(chunk)
        assert isinstance(answer, MixedChunk)
        assert tracemalloc.get_traced_memory()[1] < 1.25 * limit + 2 * HEAD_BYTES
        del answer
        assert one.held_bytes == 0
        assert one.is_oversize
        assert tracemalloc.get_traced_memory()[0] < 2 * HEAD_BYTES
        # From here on, memory is constant for a line of any length.
        tracemalloc.reset_peak()
        for _ in range(1000):
            one.feed(bytes(bytearray(chunk)))
        assert tracemalloc.get_traced_memory()[1] < 3 * HEAD_BYTES
    finally:
        tracemalloc.stop()


def test_framing_passes_oversize_chunks_without_copy() -> None:
    one = Framing(frame_bytes_max=1 << 20)
    chunks = [bytes(256 << 10) for _ in range(5)]
    for chunk in chunks[:4]:
        assert one.feed(chunk) == []
    answer = one.feed(chunks[4])
    assert isinstance(answer, MixedChunk)
    pieces = [item.data for item in answer.items if isinstance(item, OversizePiece)]
    assert [id(piece) for piece in pieces] == [id(chunk) for chunk in chunks]


def test_framing_cuts_chunk_longer_than_limit() -> None:
    # `feed` does not measure the lines of a chunk within the limit, so a longer chunk must take the other path.
    assert Framing(frame_bytes_max=4).feed(b"ab\ncd\n\nef\n") == [b"ab", b"cd", b"ef"]
    assert framed([b"ab\n12345\ncd\n"], 4) == [
        b"ab",
        OversizeBegan(b"1234"),
        OversizePiece(b"12345"),
        OversizeEnded(5, b"1234", b"12345"),
        b"cd",
    ]
