"""CPU per read of a child's output: by a spool that survives the host, against plain reads.

A writer puts pieces of one size into a pipe, and a reader of this process takes each of them, for
two sizes: a line of 400 bytes, and 64 KiB. The spool is settled after each piece, as after a
commit. Both readers take turns in one run. The result is the minimum of the CPU time (user and
system) of the reads, without the writes.

A third contestant reads as `tee` would: copy into a second pipe, read that, and then move the
original to /dev/null. It is the design that was not chosen (`docs/decisions/0017`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from banksman.process import syscalls
from banksman.process.spool import Spool
from bench.measure import goal

SIZES = (400, 65536)
READS = 4_000
ROUNDS = 7
US_MORE_MAX = 10.0

_libc = syscalls._libc()


def plain(pipe: int) -> Callable[[], bytes]:
    return lambda: os.read(pipe, 65536)


def spooled(pipe: int) -> Callable[[], bytes]:
    spool = Spool.create()

    def read() -> bytes:
        data = spool.take(pipe, 65536)
        spool.settle(spool.delivered)
        return data

    return read


def teed(pipe: int) -> Callable[[], bytes]:
    scratch, scratch_in = os.pipe()
    null = os.open("/dev/null", os.O_WRONLY)

    def read() -> bytes:
        size = _libc.tee(pipe, scratch_in, 65536, 0)
        data = os.read(scratch, size)
        while size:
            size -= os.splice(pipe, null, size)
        return data

    return read


def seconds_per_read(make: Callable[[int], Callable[[], bytes]], size: int) -> float:
    pipe, write = os.pipe()
    read, piece = make(pipe), b"x" * size
    total = 0.0
    for _ in range(READS):
        os.write(write, piece)
        began = time.process_time()
        data = read()
        total += time.process_time() - began
        assert len(data) == size
    os.close(pipe)
    os.close(write)
    return total / READS


def main() -> None:
    readers = {"plain": plain, "spool": spooled, "tee": teed}
    print("CPU per read, minimum of the rounds")
    for size in SIZES:
        taken = {
            name: min(seconds_per_read(make, size) for _ in range(ROUNDS))
            for name, make in readers.items()
        }
        for name, seconds in taken.items():
            ratio = seconds / taken["plain"]
            print(f"  {size:6} bytes  {name:6} {seconds * 1e6:7.2f} µs   {ratio:5.2f} x")
        more = (taken["spool"] - taken["plain"]) * 1e6
        if size == SIZES[0]:
            text = f"a read of {size} bytes by a spool costs at most {US_MORE_MAX:.0f} µs more"
            goal(text, f"{more:.1f} µs", more <= US_MORE_MAX)


if __name__ == "__main__":
    main()
