"""Detection of a write-ahead log that lost acknowledged commits, after a kill of its writer or a truncation.

Each case also shows SQLite's behaviour: it opens the store without an error.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.thorough import thorough

from banksman.errors import StoreDamaged
from banksman.store.sqlite import store_health, wal_check
from banksman.store.sqlite.open_file import StoreOpening
from banksman.store.sqlite.wal_check import check_file, check_tail, closed, opened

pytestmark = thorough

LOG_HEADER = 32
FRAME = 24 + 4096
# Rows of 5000 bytes: one page of the table and one overflow page. Half of the rows have only zeros.
_WRITER = """
import os, signal, sqlite3, sys
signal.alarm(60)
path, rows, *pragmas = sys.argv[1:]
connection = sqlite3.connect(path, isolation_level=None)
for pragma in (*pragmas, "journal_mode=wal", "wal_autocheckpoint=0"):
    connection.execute(f"PRAGMA {pragma}").fetchall()
connection.execute("CREATE TABLE IF NOT EXISTS rows (number INTEGER PRIMARY KEY, data BLOB)")
def insert(count):
    for number in range(count):
        data = os.urandom(5000) if number % 2 else bytes(5000)
        connection.execute("INSERT INTO rows (data) VALUES (?)", (data,))
"""
_DIE = "\nos.kill(os.getpid(), signal.SIGKILL)\n"


def killed_writer(path: Path, rows: int, *pragmas: str, code: str = "insert(int(rows))") -> None:
    """Run a process that commits this many rows and is killed. It leaves the store, the WAL and the index."""
    argv = [sys.executable, "-c", _WRITER + code + _DIE, str(path), str(rows), *pragmas]
    assert subprocess.run(argv, timeout=60, check=False).returncode == -signal.SIGKILL
    assert os.path.exists(f"{path}-shm")


def rows_in(path: Path) -> int:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT count(*) FROM rows").fetchone()[0]


def log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def index_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-shm")


def files_beside(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.parent.iterdir()}


def write_at(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def left(path: Path) -> Path:
    """Return the store of a killed writer of ten rows.

    The WAL has at least one frame per row, and the store has none of them.
    """
    killed_writer(path, 10)
    assert (os.path.getsize(log_of(path)) - LOG_HEADER) % FRAME == 0
    return path


@pytest.fixture(autouse=True)
def counts_nothing() -> Iterator[None]:
    yield
    assert not +wal_check._logs  # pyright: ignore[reportPrivateUsage]


def cut(amount: int) -> Callable[[Path], None]:
    return lambda log: os.truncate(log, max(os.path.getsize(log) - amount, 0))


def cut_to(size: int) -> Callable[[Path], None]:
    return lambda log: os.truncate(log, size)


def zero_tail(amount: int) -> Callable[[Path], None]:
    return lambda log: write_at(log, os.path.getsize(log) - amount, bytes(amount))


def flip(offset: int) -> Callable[[Path], None]:
    def change(log: Path) -> None:
        offset_found = offset if offset >= 0 else os.path.getsize(log) + offset
        write_at(log, offset_found, bytes([log.read_bytes()[offset_found] ^ 1]))

    return change


LOSSES: dict[str, Callable[[Path], None]] = {
    "cut by a byte": cut(1),
    "cut by a frame": cut(FRAME),
    "cut in a frame's header": cut(FRAME - 10),
    "cut by half": cut(10 * FRAME),
    "cut to its header": cut_to(LOG_HEADER),
    "cut within its header": cut_to(LOG_HEADER - 1),
    "cut to nothing": cut_to(0),
    "last byte zeroed, if it was not": flip(-1),
    "last page zeroed": zero_tail(4096),
    "last frame zeroed": zero_tail(FRAME),
    "last three frames zeroed": zero_tail(3 * FRAME),
    "a byte of the first page": flip(LOG_HEADER + 24 + 100),
    "a byte of a page in the middle": flip(LOG_HEADER + 6 * FRAME + 3000),
    "a frame in the middle": lambda log: write_at(log, LOG_HEADER + 5 * FRAME, bytes(FRAME)),
    "a salt of a frame": flip(LOG_HEADER + 4 * FRAME + 9),
    "header zeroed": lambda log: write_at(log, 0, bytes(LOG_HEADER)),
    "a byte of the header": flip(9),
    "removed": os.unlink,
}


@pytest.mark.parametrize("loss", LOSSES)
def test_wal_that_lost_a_commit_raises_store_damaged(left: Path, loss: str) -> None:
    LOSSES[loss](log_of(left))
    with pytest.raises(StoreDamaged, match="has lost its end") as caught:
        check_tail(str(left))
    assert "restore a backup" in caught.value.hint
    ids = caught.value.ids
    assert isinstance(ids["whole"], int)
    assert isinstance(ids["frames"], int)
    assert 0 <= ids["whole"] < ids["frames"]
    # The check changed nothing: it raises again, also for the next caller.
    with pytest.raises(StoreDamaged):
        check_tail(str(left))
    # The control: SQLite reports nothing, and committed rows are missing.
    with contextlib.suppress(sqlite3.OperationalError):  # "no such table": the table is lost too.
        assert rows_in(left) < 10


@pytest.mark.parametrize("loss", [cut_to(0), os.unlink], ids=["empty", "missing"])
@pytest.mark.parametrize("has_index", [True, False])
def test_empty_store_beside_its_wal_raises_store_damaged(
    left: Path, loss: Callable[[Path], None], has_index: bool
) -> None:
    loss(left)
    if not has_index:
        index_of(left).unlink()
    before = files_beside(left)
    for _ in range(2):
        with pytest.raises(StoreDamaged, match=r"its write-ahead log .* is not") as caught:
            StoreOpening(str(left), level="normal").open()
        assert f"{left}-wal" in caught.value.hint
        with pytest.raises(StoreDamaged):
            store_health.look(left)
    assert files_beside(left) == before
    # The control: SQLite reports nothing, and deletes the WAL.
    with contextlib.closing(sqlite3.connect(left)) as connection:
        assert connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
    assert not log_of(left).exists()


def test_empty_store_without_a_wal_passes(path: Path) -> None:
    check_file(str(path))
    path.touch()
    check_file(str(path))
    log_of(path).touch()
    check_file(str(path))


def test_wal_as_the_writer_left_it_passes(left: Path) -> None:
    check_tail(str(left))
    check_tail(str(left), is_synced=True)
    assert rows_in(left) == 10


def test_wal_check_follows_a_symlinked_store(left: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(left)
    cut(1)(log_of(left))
    with pytest.raises(StoreDamaged):
        check_tail(str(tmp_path / "link"))


@pytest.mark.parametrize("extra", [b"\0" * 2 * FRAME, os.urandom(3 * FRAME), os.urandom(17)], ids=len)
def test_wal_check_ignores_bytes_behind_the_last_commit(left: Path, extra: bytes) -> None:
    """The tail can be an incomplete transaction, frames of an older generation, or padding of the file system."""
    with open(log_of(left), "ab") as file:
        file.write(extra)
    check_tail(str(left))
    assert rows_in(left) == 10


def test_wal_check_ignores_an_uncommitted_transaction(path: Path) -> None:
    """The transaction has spilled into the WAL because the cache is small, and its writer died in it."""
    code = "insert(10)\nconnection.execute('BEGIN')\ninsert(200)"
    killed_writer(path, 0, "cache_size=2", code=code)
    assert os.path.getsize(log_of(path)) > LOG_HEADER + 100 * FRAME
    check_tail(str(path))
    assert rows_in(path) == 10


def test_restarted_wal_passes_until_it_is_cut(path: Path) -> None:
    """The frames behind the last commit are intact, but belong to the previous generation. They must not count."""
    code = "insert(50)\nconnection.execute('PRAGMA wal_checkpoint(RESTART)').fetchall()\ninsert(3)"
    killed_writer(path, 0, code=code)
    check_tail(str(path))
    # The first few frames are of this generation. The last of them is replaced by the old frame that was there before.
    with open(log_of(path), "rb") as file:
        salts = file.read(LOG_HEADER)[16:24]
        data = file.read()
    own = next(number for number in range(len(data) // FRAME) if data[number * FRAME + 8 :][:8] != salts)
    assert 0 < own < 20
    write_at(log_of(path), LOG_HEADER + (own - 1) * FRAME, data[own * FRAME :][:FRAME])
    with pytest.raises(StoreDamaged) as caught:
        check_tail(str(path))
    assert (caught.value.ids["frames"], caught.value.ids["whole"]) == (own, own - 1)


def test_checkpointed_wal_may_be_missing_but_a_cut_one_is_damage(path: Path) -> None:
    """From the rest of the WAL, SQLite would read pages that are older than those of the store."""
    code = "insert(10)\nconnection.execute('PRAGMA wal_checkpoint(PASSIVE)').fetchall()"
    killed_writer(path, 0, code=code)
    check_tail(str(path))
    kept = log_of(path).read_bytes()
    cut(3 * FRAME)(log_of(path))
    with pytest.raises(StoreDamaged) as caught:
        check_tail(str(path))
    assert "the store itself has every commit" in caught.value.hint
    for damaged in (b"", kept[: LOG_HEADER - 1], bytes(LOG_HEADER)):
        log_of(path).write_bytes(damaged)
        check_tail(str(path))
    log_of(path).unlink()
    check_tail(str(path))
    assert rows_in(path) == 10


def test_wal_damage_hint_recovers_a_sound_store(path: Path, tmp_path: Path) -> None:
    """Half of the WAL is checkpointed.

    A WAL cut behind that point still gives a sound store with a prefix of the commits.

    A WAL cut before that point gives no guarantee, because the pages of the store are then of different times.
    """
    code = """
insert(10)
reader = sqlite3.connect(path, isolation_level=None)
reader.execute("BEGIN")
reader.execute("SELECT count(*) FROM rows").fetchall()
insert(10)
connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
"""
    killed_writer(path, 0, code=code)
    frames = (os.path.getsize(log_of(path)) - LOG_HEADER) // FRAME
    (folded,) = struct.unpack_from("=I", index_of(path).read_bytes(), 96)
    assert 0 < folded < frames
    for kept in (frames - 1, folded + 6, folded, folded - 1, 0):
        copy = tmp_path / f"copy-{kept}"
        for suffix in ("", "-wal", "-shm"):
            shutil.copy(f"{path}{suffix}", f"{copy}{suffix}")
        os.truncate(log_of(copy), LOG_HEADER + kept * FRAME)
        with pytest.raises(StoreDamaged) as caught:
            check_tail(str(copy))
        assert (f"remove {copy}-shm to continue" in caught.value.hint) == (kept >= folded)
        assert f"remove {copy}-wal" not in caught.value.hint
        if kept >= folded:
            index_of(copy).unlink()
            check_tail(str(copy))
            assert 10 <= rows_in(copy) < 20
            with contextlib.closing(sqlite3.connect(copy)) as connection:
                assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_wal_check_passes_without_an_index(left: Path) -> None:
    cut(FRAME)(log_of(left))
    kept = index_of(left).read_bytes()
    for index in (b"", kept[:135], bytes(len(kept))):
        index_of(left).write_bytes(index)
        check_tail(str(left))
    index_of(left).unlink()
    check_tail(str(left))


def test_wal_check_needs_only_one_whole_copy_in_the_index(left: Path) -> None:
    """The writer was killed between the two copies, or in one of them."""
    cut(FRAME)(log_of(left))
    kept = index_of(left).read_bytes()
    for offset in (16, 48 + 16):
        index_of(left).write_bytes(kept[:offset] + bytes([kept[offset] ^ 1]) + kept[offset + 1 :])
        with pytest.raises(StoreDamaged):
            check_tail(str(left))
    torn = bytearray(kept)
    torn[16] ^= 1
    torn[48 + 16] ^= 1
    index_of(left).write_bytes(torn)
    check_tail(str(left))


def test_wal_index_from_before_boot_is_trusted_only_if_commits_were_synced(left: Path) -> None:
    cut(FRAME)(log_of(left))
    before = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) - 1
    os.utime(index_of(left), (before, before))
    check_tail(str(left))
    with pytest.raises(StoreDamaged):
        check_tail(str(left), is_synced=True)
    os.utime(index_of(left), (before + 2, before + 2))
    with pytest.raises(StoreDamaged):
        check_tail(str(left))


def test_wal_check_of_new_store_makes_no_file(path: Path) -> None:
    check_tail(str(path))
    assert os.listdir(path.parent) == []


def test_wal_check_passes_while_another_process_has_the_store_open(left: Path) -> None:
    """The WAL cannot be checked from outside, because the other process may write to it at this moment."""
    code = "insert(1)\nos.write(1, b'open\\n')\nos.read(0, 1)"
    argv = [sys.executable, "-c", _WRITER + code, str(left), "0"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        kept = log_of(left).read_bytes()
        cut(FRAME)(log_of(left))
        check_tail(str(left))
        process.kill()
        process.wait()
        with pytest.raises(StoreDamaged):
            check_tail(str(left))
        log_of(left).write_bytes(kept)
        check_tail(str(left))


def test_wal_check_opens_no_file_and_drops_no_lock_of_its_own_process(left: Path) -> None:
    """The control closes the index in the same process, which drops the locks of the connection."""
    is_locked_outside = (
        "import sqlite3, sys; c = sqlite3.connect(sys.argv[1], timeout=0, isolation_level=None)\n"
        "try: c.execute('BEGIN IMMEDIATE'); print('free')\n"
        "except sqlite3.OperationalError as exc: print(exc)"
    )

    def seen_from_outside() -> str:
        argv = [sys.executable, "-c", is_locked_outside, str(left)]
        return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout.strip()

    with contextlib.closing(sqlite3.connect(left, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        check_tail(str(left))  # The check does not know of this connection.
        assert seen_from_outside() == "database is locked"
        opened(str(left))
        check_tail(str(left))
        closed(str(left))
        assert seen_from_outside() == "database is locked"
        os.close(os.open(index_of(left), os.O_RDONLY))
        assert seen_from_outside() == "free"


def test_wal_check_waits_until_this_process_closed_its_last_log(left: Path) -> None:
    cut(FRAME)(log_of(left))
    opened(str(left))
    opened(str(left))
    check_tail(str(left))
    closed(str(left))
    check_tail(str(left))
    closed(str(left))
    with pytest.raises(StoreDamaged):
        check_tail(str(left))
    with pytest.raises(AssertionError, match="closed more often"):
        closed(str(left))


def test_wal_check_of_long_wal_sees_each_frame_and_verifies_the_newest(path: Path) -> None:
    """Past the bound the check detects a frame of another generation or of zeros, but not a changed byte.

    This is documented.
    """
    killed_writer(path, 600)
    frames = (os.path.getsize(log_of(path)) - LOG_HEADER) // FRAME
    assert frames > wal_check.VERIFIED_FRAMES_MAX + 100
    check_tail(str(path))
    kept = log_of(path).read_bytes()
    # The oldest verified frame, and the frame before it.
    first = frames - wal_check.VERIFIED_FRAMES_MAX
    for number, is_seen in ((first, True), (first - 1, False)):
        flip(LOG_HEADER + number * FRAME + 24 + 100)(log_of(path))
        if is_seen:
            with pytest.raises(StoreDamaged) as caught:
                check_tail(str(path))
            assert caught.value.ids["whole"] == number
        else:
            check_tail(str(path))
        log_of(path).write_bytes(kept)
    old = next(place for place in range(LOG_HEADER + FRAME, len(kept), FRAME) if any(kept[place + 24 : place + FRAME]))
    assert old < LOG_HEADER + (first - 1) * FRAME
    for changed in (bytes(FRAME), kept[old : old + 24] + bytes(4096)):
        write_at(log_of(path), old, changed)
        with pytest.raises(StoreDamaged):
            check_tail(str(path))
    log_of(path).write_bytes(kept)
    check_tail(str(path))


def test_wal_diverged_from_its_index_raises_store_damaged(left: Path, tmp_path: Path) -> None:
    """The other WAL is intact, has as many frames, and belongs to the same generation.

    Only the index shows that it is another one.
    """
    other = tmp_path / "other"
    for suffix in ("", "-wal", "-shm"):
        shutil.copy(f"{left}{suffix}", f"{other}{suffix}")
    for path in (left, other):
        killed_writer(path, 0, code="insert(2)")
        check_tail(str(path))
    assert log_of(left).stat().st_size == log_of(other).stat().st_size
    shutil.copy(log_of(other), log_of(left))
    with pytest.raises(StoreDamaged):
        check_tail(str(left))


@pytest.mark.parametrize("page_bytes", [512, 8192, 65536])
def test_wal_check_reads_other_page_sizes(path: Path, page_bytes: int) -> None:
    killed_writer(path, 5, f"page_size={page_bytes}")
    check_tail(str(path))
    assert (os.path.getsize(log_of(path)) - LOG_HEADER) % (24 + page_bytes) == 0
    cut(1)(log_of(path))
    with pytest.raises(StoreDamaged):
        check_tail(str(path))


def test_wal_check_reads_big_endian_checksums(left: Path) -> None:
    """The checksums are sums of words in the byte order of the machine that wrote them.

    A bit in the first word names the order.

    Such a WAL has an index of the same machine, so the test writes the new sum into the index.
    """
    data = bytearray(log_of(left).read_bytes())
    index = bytearray(index_of(left).read_bytes())
    other = ">" if sys.byteorder == "little" else "<"

    def summed(part: bytearray, sums: tuple[int, int], order: str) -> tuple[int, int]:
        words = struct.unpack(f"{order}{len(part) // 4}I", part)
        for place in range(0, len(words), 2):
            first = (sums[0] + words[place] + sums[1]) & 0xFFFFFFFF
            sums = first, (sums[1] + words[place + 1] + first) & 0xFFFFFFFF
        return sums

    data[3] ^= 1
    sums = summed(data[:24], (0, 0), other)
    data[24:32] = struct.pack(">2I", *sums)
    for offset in range(LOG_HEADER, len(data), FRAME):
        sums = summed(data[offset : offset + 8] + data[offset + 24 : offset + FRAME], sums, other)
        data[offset + 16 : offset + 24] = struct.pack(">2I", *sums)
    index[24:32] = struct.pack("=2I", *sums)
    index[40:48] = struct.pack("=2I", *summed(index[:40], (0, 0), "="))
    log_of(left).write_bytes(data)
    index_of(left).write_bytes(index)
    check_tail(str(left))
    flip(LOG_HEADER + 7 * FRAME + 99)(log_of(left))
    with pytest.raises(StoreDamaged):
        check_tail(str(left))
