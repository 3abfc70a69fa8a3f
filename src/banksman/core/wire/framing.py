r"""Split an agent's output bytes into lines, with a limit on the length of a line.

This is the first step for every byte that an agent writes. The framer keeps the incomplete last
line, and decides when a line is too large to keep. The borders of the chunks never show: the lines,
the blanks and the oversize lines depend on the bytes alone. (Only the borders of an `OversizePiece`
follow the chunks.) The framer interprets no byte except `\n` and `\r`. NUL, bad UTF-8 and half a
JSON value pass through unchanged.

    line        the bytes between two newlines; `\n` and `\r\n` are newlines. Never empty.
    blank       an empty line: no frame, dropped and counted.
    oversize    a line of more than `frame_bytes_max` bytes, its newline not counted.

**Past the limit.** An oversize line ends neither the stream nor the process: a tool that prints too
much is normal. The framer does not keep the line either. It emits the line in pieces as they
arrive, and the caller writes them to a file:

    OversizeBegan(head)  OversizePiece(data) …  OversizeEnded(length, head, tail)

The pieces together are the whole line. Head and tail are copies of its two ends. From them a
dialect can tell the kind of the frame in most cases, without the file. Lines before and after an
oversize line are framed as usual.

**Cost.** Every token passes through here, so `feed` is `bytes.split` and two passes in C: one looks
for a `\r`, one for a blank. It returns a plain list, or a `MixedChunk` if part of the chunk is
oversize. So the caller checks the type once per chunk, never once per line. No line is measured
either: a chunk is at most as long as the limit, and a longer one is cut. So only a line that began
in an earlier chunk can be oversize, and that line is counted piece by piece.

**A slow trickle** costs linear time. Bytes that were searched for a newline are not searched again.
Held bytes are copied when they are gathered and when the newline comes, not with each chunk. Small
pieces are gathered because an object of two bytes costs forty. The limit must bound memory, not
only the sum of the lengths.

`Framing` is a mutable object, while the rest of the core is `step(state, fact)`. A new state per
chunk would hold the same list of pieces. If the list is copied, a trickle is quadratic. If it is
shared, the old state is wrong. No caller needs an old state: a replay feeds the bytes again.
"""

from __future__ import annotations

from msgspec import Struct

# Far above a frame that contains a large file or picture. Small enough that a session can afford it
# twice: for a moment both the pieces of a line and the joined line exist.
FRAME_BYTES_MAX = 32 << 20
# Bytes kept of an oversize line. They are enough to find the kind and the addressee of the frame,
# provided that those stand before or after the large part.
HEAD_BYTES = 64 << 10
TAIL_BYTES = 4 << 10

# Any two neighbouring pieces of an incomplete line are together longer than this. So the overhead
# of the objects is under a tenth of their content, however small the chunks are.
_GATHER_BYTES = 4096


class OversizeBegan(Struct, frozen=True):
    """A line has passed the limit; its pieces follow.

    `head`: a copy of its first bytes, at most HEAD_BYTES.
    """

    head: bytes


class OversizePiece(Struct, frozen=True):
    """The next part of the oversize line, never empty."""

    data: bytes


class OversizeEnded(Struct, frozen=True):
    """The oversize line is complete: `length` bytes came in pieces.

    `tail`: a copy of its last bytes, at most TAIL_BYTES. `head`: the same as in `OversizeBegan`, so
    that a dialect can judge this value alone.
    """

    length: int
    head: bytes
    tail: bytes


OversizePart = OversizeBegan | OversizePiece | OversizeEnded
Framed = bytes | OversizePart


class MixedChunk(Struct, frozen=True):
    """Content of a chunk that is partly oversize, in order. Rare."""

    items: tuple[Framed, ...]


class Framing:
    """Framer of one stream. Call `feed` with every chunk in order, then `end` once.

    `bytes_in`, `lines`, `blank` and `oversize` count the input and the results. An oversize line
    counts when it begins, and is not among `lines`.
    """

    __slots__ = ("_frame_bytes_max", "_open", "blank", "bytes_in", "lines", "oversize")

    def __init__(self, *, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        assert frame_bytes_max > 0
        self._frame_bytes_max = frame_bytes_max
        # The line whose newline has not arrived; None between lines.
        self._open: _Partial | _Oversize | _Ended | None = None
        self.bytes_in = 0
        self.lines = 0
        self.blank = 0
        self.oversize = 0

    def __repr__(self) -> str:
        open_ = "none" if self._open is None else repr(self._open)
        return (
            f"<Framing open={open_} bytes_in={self.bytes_in} "
            f"lines={self.lines} oversize={self.oversize}>"
        )

    @property
    def held_bytes(self) -> int:
        """Number of bytes kept for the incomplete line: at most the limit, plus one for a `\\r`."""
        return self._open.held_bytes if isinstance(self._open, _Partial) else 0

    @property
    def partial(self) -> bytes | None:
        """The incomplete line; None if it is oversize, or if the stream has ended."""
        if isinstance(self._open, _Partial):
            return b"".join(self._open.pieces)
        return b"" if self._open is None else None

    @property
    def is_oversize(self) -> bool:
        """Whether an oversize line has begun and not ended."""
        return isinstance(self._open, _Oversize)

    def feed(self, data: bytes) -> list[bytes] | MixedChunk:
        """Return the lines that these bytes complete, and their part of an oversize line.

        The caller owns the returned list.
        """
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
            # The rest is at most as long as the chunk, hence within the limit.
            self._open = _Partial(rest)
        # The `\r` of the first line may have come with an earlier chunk.
        if b"\r" in data or (lines and lines[0].endswith(b"\r")):
            lines = [line.removesuffix(b"\r") for line in lines]
        if not all(lines):
            count = len(lines)
            lines = [line for line in lines if line]
            self.blank += count - len(lines)
        self.lines += len(lines)
        return MixedChunk((*oversize, *lines)) if oversize else lines

    def end(self) -> list[bytes] | MixedChunk:
        """End the stream, and return the last line if its newline never came.

        A `\\r` at the very end counts as a newline.
        """
        assert self._open is not _ENDED, "the end came twice"
        # Some agents exit without a last newline, and a result must count however its process
        # ended. So the end of the stream acts as a newline if a line is open. It does not count as
        # a received byte.
        answer: list[bytes] | MixedChunk = []
        if self._open is not None:
            answer = self.feed(b"\n")
            self.bytes_in -= 1
        assert self._open is None
        self._open = _ENDED
        return answer

    def _feed_in_parts(self, data: bytes) -> list[bytes] | MixedChunk:
        """Cut a long chunk, because `feed` relies on chunks in which no line can be oversize."""
        size = self._frame_bytes_max
        lines: list[bytes] = []
        mixed: list[Framed] = []
        for start in range(0, len(data), size):
            answer = self.feed(data[start : start + size])
            if isinstance(answer, MixedChunk):
                # Earlier lines come first.
                mixed += [*lines, *answer.items]
                lines = []
            else:
                lines += answer
        return MixedChunk((*mixed, *lines)) if mixed else lines

    def _continue(self, piece: bytes) -> list[Framed]:
        """Add bytes without a newline to the open line, and return the pieces to spill."""
        if isinstance(self._open, _Oversize):
            return self._open.add(piece)
        assert isinstance(self._open, _Partial)
        self._open.add(piece)
        if self._open.line_bytes <= self._frame_bytes_max:
            return []
        self.oversize += 1
        # At most the limit: otherwise the head would depend on how the bytes were chunked.
        head = self._open.head(min(HEAD_BYTES, self._frame_bytes_max))
        pieces, self._open = self._open.pieces, _Oversize(head)
        spilled: list[Framed] = [OversizeBegan(head)]
        # Release each gathered piece once it is copied, so that memory never exceeds the line
        # itself.
        pieces.reverse()
        while pieces:
            spilled += self._open.add(bytes(pieces.pop()))
        return spilled

    def _complete(self, lines: list[bytes]) -> list[Framed]:
        """End the open line with the first of `lines`.

        The joined line replaces the first item. If the line is oversize, return the pieces to
        spill.
        """
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
        """Minimal length of the line.

        A `\\r` at its end does not count: it may be half of a newline, which the next byte decides.
        """
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
            # This happens once for each gathered piece. A bytearray grows in place, in steps that
            # make its growth linear.
            self.pieces[-1] = bytearray(last)
            self.pieces[-1].extend(piece)

    def head(self, size: int) -> bytes:
        # Do not join all pieces: a join needs the size of the line again, just when the line is too
        # large.
        assert self.held_bytes >= size
        head = bytearray()
        for piece in self.pieces:
            head += piece[: size - len(head)]
            if len(head) == size:
                break
        return bytes(head)


class _Oversize:
    """An incomplete line beyond the limit. The caller has received its earlier bytes as pieces."""

    __slots__ = ("_has_return", "head", "length", "tail")

    def __init__(self, head: bytes) -> None:
        self.head = head
        self.length = 0
        self.tail = b""
        # A trailing `\r` is held back: it belongs to the line only if no `\n` follows.
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
    """Marker for a stream that has ended."""

    def __repr__(self) -> str:
        return "ended"


_ENDED = _Ended()
