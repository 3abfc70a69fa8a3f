r"""Bytes → lines: the first thing that happens to all an agent says.

It owns the line that is not complete yet, and the decision that a line is too large to be kept. It promises that how
the bytes were cut into chunks never shows: the lines, the blanks and what an oversize line is are a matter of the bytes
alone. (Only the borders of an `OversizePiece` follow the chunks.) It looks at no byte but `\n` and `\r`; NUL, bad UTF-8
and half a JSON value pass through as they came.

    line        what stands between two newlines; `\n` and `\r\n` are newlines. Never empty.
    blank       an empty line: no frame, dropped and counted.
    oversize    a line of more than `frame_bytes_max` bytes, its newline not counted.

**What happens past the limit.** An oversize line is no reason to end anything: a tool that printed too much is an
agent's normal day. It is not kept either. It comes out in pieces as they arrive, for the shell to write to a file:

    OversizeBegan(head)  OversizePiece(data) …  OversizeEnded(length, head, tail)

The pieces put together are the whole line; head and tail are copies of its two ends, so that a dialect can tell what
it was, as far as that can be told, without the file. Lines before and after it are framed as ever.

**Cost.** This is on the path of every token, so `feed` is `bytes.split` and two passes in C (is there a `\r`, is there
a blank). Its answer is a plain list, or a `MixedChunk` if there is something oversize: the caller asks once a chunk,
never once a line. No line is measured either: a chunk is at most as long as the limit (a longer one is cut), so only
the line that was begun in an earlier chunk can be oversize, and that one is counted piece by piece.

**A slow trickle** is linear: what was searched for a newline is not searched again, and what is held is copied when it
is gathered and when its newline comes, not with each chunk. Small pieces are gathered because an object of two bytes
costs forty, and the limit is there to bound memory, not only the sum of lengths.

This is a mutable object, where the rest of the core is `step(state, fact)`: a new state a chunk would hold the same
list of pieces, either copied (then a trickle is quadratic) or shared (then the old state is a lie). Nothing is ever
asked of an old one; who wants to replay feeds the bytes again.
"""

from __future__ import annotations

from msgspec import Struct

# Far above a frame with a large file or picture in it, and small enough that a session can pay for it twice: for a
# moment the pieces of a line and the line itself are both there.
FRAME_BYTES_MAX = 32 << 20
# Kept of an oversize line: enough to find what kind of frame it was and whom it was for, should that stand in front of
# what makes it large, or behind.
HEAD_BYTES = 64 << 10
TAIL_BYTES = 4 << 10

# Two neighbours among the pieces of an incomplete line are longer than this together, so what the objects cost is
# under a tenth of what they hold, however small the chunks.
_GATHER_BYTES = 4096


class OversizeBegan(Struct, frozen=True):
    """A line has passed the limit; its pieces follow. `head` is a copy of its first bytes (at most HEAD_BYTES)."""

    head: bytes


class OversizePiece(Struct, frozen=True):
    """The next part of the oversize line, never empty."""

    data: bytes


class OversizeEnded(Struct, frozen=True):
    """The oversize line is complete: `length` bytes came in pieces. `tail` is a copy of the last (at most TAIL_BYTES).

    `head` is the one it began with, so that this value can be judged by itself.
    """

    length: int
    head: bytes
    tail: bytes


Framed = bytes | OversizeBegan | OversizePiece | OversizeEnded


class MixedChunk(Struct, frozen=True):
    """What a chunk held, in order, if part of it is oversize. Rare."""

    items: tuple[Framed, ...]


class Framing:
    """One stream's framing. Feed it every chunk in order, then `end()` it, once.

    `bytes_in`, `lines`, `blank` and `oversize` count what came in and what came of it; an oversize line counts when it
    begins, and is not among `lines`.
    """

    __slots__ = ("_frame_bytes_max", "_open", "blank", "bytes_in", "lines", "oversize")

    def __init__(self, *, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        assert frame_bytes_max > 0
        self._frame_bytes_max = frame_bytes_max
        # The line whose newline has not come; None between lines.
        self._open: _Partial | _Oversize | _Ended | None = None
        self.bytes_in = 0
        self.lines = 0
        self.blank = 0
        self.oversize = 0

    def __repr__(self) -> str:
        open_ = "none" if self._open is None else repr(self._open)
        return f"<Framing open={open_} bytes_in={self.bytes_in} lines={self.lines} oversize={self.oversize}>"

    @property
    def held_bytes(self) -> int:
        """How many bytes are kept for the incomplete line: at most the limit, and one for a `\\r`."""
        return self._open.held_bytes if isinstance(self._open, _Partial) else 0

    @property
    def is_oversize(self) -> bool:
        """Whether we are inside an oversize line: it began, and has not ended."""
        return isinstance(self._open, _Oversize)

    def feed(self, data: bytes) -> list[bytes] | MixedChunk:
        """The lines that these bytes complete, and what they add to an oversize one. The list is the caller's."""
        assert self._open is not _ENDED, "bytes after the end"
        if len(data) > self._frame_bytes_max:
            return self._feed_in_parts(data)
        self.bytes_in += len(data)
        lines = data.split(b"\n")
        rest = lines.pop()
        oversize: list[Framed] = []
        if self._open is not None:
            if not lines:
                oversize = self._continue(rest)
                return MixedChunk(tuple(oversize)) if oversize else lines
            oversize = self._complete(lines)
        if rest:
            # It is no longer than the chunk, hence within the limit.
            self._open = _Partial(rest)
        # Of the first line the `\r` may have come with an earlier chunk.
        if b"\r" in data or (lines and lines[0].endswith(b"\r")):
            lines = [line.removesuffix(b"\r") for line in lines]
        if not all(lines):
            count = len(lines)
            lines = [line for line in lines if line]
            self.blank += count - len(lines)
        self.lines += len(lines)
        return MixedChunk((*oversize, *lines)) if oversize else lines

    def end(self) -> list[bytes] | MixedChunk:
        """No more bytes will come: the last line, if its newline never came. A half-written `\\r\\n` counts as one."""
        assert self._open is not _ENDED, "the end came twice"
        # Agents do exit without a last newline, and a result must count however its process went. So the end of the
        # stream is a newline, if there is anything for it to end; it is not a byte that came in.
        answer: list[bytes] | MixedChunk = []
        if self._open is not None:
            answer = self.feed(b"\n")
            self.bytes_in -= 1
        assert self._open is None
        self._open = _ENDED
        return answer

    def _feed_in_parts(self, data: bytes) -> list[bytes] | MixedChunk:
        """Keep `feed`'s promise to itself, that no line inside a chunk can be oversize."""
        size = self._frame_bytes_max
        lines: list[bytes] = []
        mixed: list[Framed] = []
        for start in range(0, len(data), size):
            answer = self.feed(data[start : start + size])
            if isinstance(answer, MixedChunk):
                # What came so far comes first.
                mixed += [*lines, *answer.items]
                lines = []
            else:
                lines += answer
        return MixedChunk((*mixed, *lines)) if mixed else lines

    def _continue(self, piece: bytes) -> list[Framed]:
        """Add to the open line what has no newline in it, and say what is to be spilled of it."""
        if isinstance(self._open, _Oversize):
            return self._open.add(piece)
        assert isinstance(self._open, _Partial)
        self._open.add(piece)
        if self._open.line_bytes <= self._frame_bytes_max:
            return []
        self.oversize += 1
        # Not more than the limit, or the head would depend on how much has come by now.
        head = self._open.head(min(HEAD_BYTES, self._frame_bytes_max))
        pieces, self._open = self._open.pieces, _Oversize(head)
        spilled: list[Framed] = [OversizeBegan(head)]
        # Each gathered piece is let go as it is copied, so that there is never more than the line.
        pieces.reverse()
        while pieces:
            spilled += self._open.add(bytes(pieces.pop()))
        return spilled

    def _complete(self, lines: list[bytes]) -> list[Framed]:
        """The first of these ends the open line: put the whole in its place, or say what is to be spilled of it."""
        spilled = self._continue(lines[0])
        if isinstance(self._open, _Oversize):
            spilled.append(self._open.ended())
            del lines[0]
        else:
            assert isinstance(self._open, _Partial)
            assert not spilled
            lines[0] = b"".join(self._open.pieces)
        self._open = None
        return spilled


class _Partial:
    """An incomplete line within the limit. Never empty."""

    __slots__ = ("held_bytes", "pieces")

    def __init__(self, piece: bytes) -> None:
        assert piece
        self.pieces: list[bytes | bytearray] = [piece]
        self.held_bytes = len(piece)

    def __repr__(self) -> str:
        return f"partial({self.held_bytes})"

    @property
    def line_bytes(self) -> int:
        """How long the line is at least: a `\\r` at its end may be half a newline, as the next byte will tell."""
        return self.held_bytes - self.pieces[-1].endswith(b"\r")

    def add(self, piece: bytes) -> None:
        if not piece:
            return
        self.held_bytes += len(piece)
        last = self.pieces[-1]
        if len(last) + len(piece) > _GATHER_BYTES:
            self.pieces.append(piece)
        elif isinstance(last, bytearray):
            last.extend(piece)
        else:
            # Once for each gathered piece. A bytearray grows in place, in steps that make its growth linear.
            self.pieces[-1] = bytearray(last)
            self.pieces[-1].extend(piece)

    def head(self, size: int) -> bytes:
        # Not the join of all, which would need the line's size again at the very moment it is too large.
        assert self.held_bytes >= size
        head = bytearray()
        for piece in self.pieces:
            head += piece[: size - len(head)]
            if len(head) == size:
                break
        return bytes(head)


class _Oversize:
    """An incomplete line beyond the limit: what came of it is with the shell."""

    __slots__ = ("_has_return", "head", "length", "tail")

    def __init__(self, head: bytes) -> None:
        self.head = head
        self.length = 0
        self.tail = b""
        # A `\r` that came last is held back: it belongs to the line only if no `\n` follows.
        self._has_return = False

    def __repr__(self) -> str:
        return f"oversize({self.length})"

    def add(self, piece: bytes) -> list[Framed]:
        if not piece:
            return []
        spilled: list[Framed] = []
        if self._has_return:
            spilled.append(self._spill(b"\r"))
        self._has_return = piece.endswith(b"\r")
        if piece := piece.removesuffix(b"\r"):
            spilled.append(self._spill(piece))
        return spilled

    def ended(self) -> OversizeEnded:
        assert self.length > 0
        return OversizeEnded(length=self.length, head=self.head, tail=self.tail)

    def _spill(self, piece: bytes) -> OversizePiece:
        self.length += len(piece)
        self.tail = (self.tail + piece[-TAIL_BYTES:])[-TAIL_BYTES:]
        return OversizePiece(piece)


class _Ended:
    """The stream has ended; there is nothing after it."""

    def __repr__(self) -> str:
        return "ended"


_ENDED = _Ended()
