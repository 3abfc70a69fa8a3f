"""File requests of an agent: only inside the root, only whole files, and only regular files."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from banksman.errors import BanksmanError, Closed, NotFound, Refused, UsageError
from banksman.sessions.workspace import Workspace, files, safe_paths
from banksman.sessions.workspace.request_handler import BlockingCalls

NOBODY = 65534
# Enough to hit each window of the race many times, within a second or two.
RACES = 5000
OFTEN = 100
PATIENCE_SECONDS = 60.0

libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a root folder, beside a folder that the agent must not reach."""
    folder, outside = tmp_path / "root", tmp_path / "outside"
    (folder / "sub").mkdir(parents=True)
    outside.mkdir()
    (folder / "text").write_text("one\ntwo\nthree\n")
    (outside / "text").write_text("SECRET")
    return folder


@contextlib.asynccontextmanager
async def working(root: Path) -> AsyncGenerator[Workspace]:
    workspace = Workspace(str(root))
    try:
        yield workspace
    finally:
        workspace.end()
        await workspace.wait_ended()


def read(root: Path, path: object, **how: Any) -> str:
    async def serve() -> str:
        async with working(root) as workspace:
            return (await workspace.serve("fs/read_text_file", {"path": path, **how}))["content"]

    return asyncio.run(serve())


def write(root: Path, path: object, content: Any = "new") -> None:
    async def serve() -> None:
        async with working(root) as workspace:
            await serve_write(workspace, path, content)

    asyncio.run(serve())


async def serve_write(workspace: Workspace, path: object, content: Any = "new") -> None:
    assert await workspace.serve("fs/write_text_file", {"path": path, "content": content}) == {}


@contextlib.contextmanager
def opened_root(root: Path) -> Generator[safe_paths.Root]:
    opened = safe_paths.open_root(str(root))
    with contextlib.closing(opened.folder):
        yield opened


def partials(root: Path) -> list[Path]:
    return [path for path in root.rglob(".*") if path.name.startswith(".banksman")]


# -- reading ---------------------------------------------------------------------------------------------------------
def test_file_is_read_whole(root: Path) -> None:
    (root / "sub" / "ü").write_bytes("\ufeffä\r\n\0\u2028x".encode())
    assert read(root, f"{root}/sub/ü", sessionId="any") == "\ufeffä\r\n\0\u2028x"
    assert read(root, f"{root}//sub/./../text", line=None, limit=None) == "one\ntwo\nthree\n"


@pytest.mark.parametrize(
    ("how", "content"),
    [
        ({"line": 1}, "one\ntwo\nthree\n"),
        ({"line": 0}, "one\ntwo\nthree\n"),
        ({"line": 2}, "two\nthree\n"),
        ({"line": 2, "limit": 1}, "two\n"),
        ({"line": 3, "limit": 1}, "three\n"),
        ({"limit": 2}, "one\ntwo\n"),
        ({"limit": 0}, ""),
        ({"line": 3, "limit": 10**30}, "three\n"),
        ({"line": 4}, ""),
        ({"line": 10**30, "limit": 1}, ""),
    ],
)
def test_file_is_read_by_lines(root: Path, how: dict[str, int], content: str) -> None:
    assert read(root, f"{root}/text", **how) == content


def test_file_read_by_lines_accepts_last_line_without_newline(root: Path) -> None:
    (root / "text").write_text("one\ntwo")
    assert read(root, f"{root}/text", line=2, limit=1) == "two"
    assert read(root, f"{root}/text", line=1, limit=1) == "one\n"


def test_file_is_read_up_to_its_bound(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "FILE_BYTES_MAX", 14)
    assert len(read(root, f"{root}/text")) == 14
    monkeypatch.setattr(files, "FILE_BYTES_MAX", 13)
    with pytest.raises(UsageError, match="larger than 13 bytes"):
        read(root, f"{root}/text")


def test_file_that_is_not_utf8_is_refused(root: Path) -> None:
    (root / "text").write_bytes(b"caf\xe9")
    with pytest.raises(UsageError, match="not UTF-8"):
        read(root, f"{root}/text")


def test_file_must_be_regular(root: Path) -> None:
    os.mkfifo(root / "fifo")
    os.symlink("fifo", root / "link")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(root / "socket"))
        for name in ("fifo", "link", "socket"):
            with pytest.raises(UsageError, match="not a regular file"):
                read(root, f"{root}/{name}")
            with pytest.raises(UsageError, match="not a regular file"):
                write(root, f"{root}/{name}")
    for name in ("sub", "", "sub/..", "sub/"):
        with pytest.raises(UsageError, match="a folder"):
            read(root, f"{root}/{name}")
        with pytest.raises(UsageError, match="a folder"):
            write(root, f"{root}/{name}")
    for device in ("/dev/null", "/dev/zero", "/dev/tty"):
        with pytest.raises(UsageError, match="not a regular file"):
            read(Path("/dev"), device)


def test_file_that_is_a_device_is_not_opened(root: Path) -> None:
    try:
        os.mknod(root / "zero", stat.S_IFCHR | 0o600, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("making a device takes root")
    with pytest.raises(UsageError, match="not a regular file"):
        read(root, f"{root}/zero")
    with pytest.raises(UsageError, match="not a regular file"):
        write(root, f"{root}/zero")


def test_file_path_through_proc_link_is_refused(root: Path) -> None:
    """The kernel follows such a link to its target, wherever that is.

    The workspace reads the text of the link instead.
    """
    with open(root.parent / "outside" / "text") as held:
        os.symlink(f"/proc/self/fd/{held.fileno()}", root / "link")
        with pytest.raises(Refused):
            read(root, f"{root}/link")
    here = Path(f"/proc/{os.getpid()}")
    with pytest.raises(Refused):
        read(here, f"{here}/cwd/pyproject.toml")


# -- location --------------------------------------------------------------------------------------------------------
def ways_out(root: Path) -> dict[str, str]:
    outside = root.parent / "outside"
    os.symlink("../outside", root / "away")
    os.symlink(outside, root / "away_by_name")
    os.symlink("away", root / "twice")
    os.symlink("../outside/text", root / "file_away")
    os.symlink("../../outside/text", root / "sub" / "file_away")
    os.symlink("../outside/new", root / "dangling")
    os.symlink("sub/../..", root / "up")
    return {
        "by its path": f"{outside}/text",
        "by a beginning": f"{root}side/text",
        "up": f"{root}/../outside/text",
        "up from below": f"{root}/sub/../../outside/text",
        "up and back": f"{root}/../root/text",
        "a link": f"{root}/away/text",
        "an absolute link": f"{root}/away_by_name/text",
        "a link to a link": f"{root}/twice/text",
        "a file's link": f"{root}/file_away",
        "a file's link, from below": f"{root}/sub/file_away",
        "a link to nothing": f"{root}/dangling",
        "a link that climbs": f"{root}/up/outside/text",
        "the root of all": "/etc/passwd",
        "one that is not there": "/nowhere/text",
    }


def test_file_outside_root_is_neither_read_nor_written(root: Path) -> None:
    for way, path in ways_out(root).items():
        with pytest.raises(Refused, match="not inside the session's folder"):
            print(way, read(root, path))
        with pytest.raises(Refused, match="not inside the session's folder"):
            print(way, write(root, path))
    assert [(file.name, file.read_text()) for file in (root.parent / "outside").iterdir()] == [("text", "SECRET")]


def test_links_inside_root_are_followed(root: Path) -> None:
    os.symlink("../text", root / "sub" / "relative")
    os.symlink(root / "text", root / "sub" / "absolute")
    os.symlink("sub", root / "folder")
    os.symlink(root, root / "sub" / "round")
    for path in ("sub/relative", "sub/absolute", "folder/relative", "folder/../text", "sub/round/folder/round/text"):
        assert read(root, f"{root}/{path}") == "one\ntwo\nthree\n"
    write(root, f"{root}/folder/relative", "through a link")
    assert (root / "text").read_text() == "through a link"
    assert (root / "sub" / "relative").is_symlink()


def test_root_that_is_a_link_is_known_by_both_names(root: Path) -> None:
    other = root.parent / "other"
    os.symlink(root, other)
    for named in (root, other):
        assert read(other, f"{named}/text") == "one\ntwo\nthree\n"
    with pytest.raises(Refused):
        read(root, f"{other}/text")


def test_root_stays_the_same_folder_when_renamed(root: Path) -> None:
    """Another folder is put in its place. The agent's process still works in the old one."""

    async def both() -> None:
        async with working(root) as workspace:
            await serve_write(workspace, f"{root}/first")
            root.rename(root.parent / "moved")
            os.symlink("outside", root)
            await serve_write(workspace, f"{root}/second")

    asyncio.run(both())
    assert sorted(os.listdir(root.parent / "outside")) == ["text"]
    assert (root.parent / "moved" / "second").read_text() == "new"


def test_link_cycles_are_refused(root: Path) -> None:
    os.symlink("b", root / "a")
    os.symlink("a", root / "b")
    with pytest.raises(UsageError, match="more than 40 links"):
        read(root, f"{root}/a/text")
    os.symlink("text", root / "link-1")
    for number in range(2, safe_paths.LINKS_MAX + 2):
        os.symlink(f"link-{number - 1}", root / f"link-{number}")
    assert read(root, f"{root}/link-{safe_paths.LINKS_MAX}") == "one\ntwo\nthree\n"
    with pytest.raises(UsageError, match="more than 40 links"):
        read(root, f"{root}/link-{safe_paths.LINKS_MAX + 1}")


def test_folder_depth_is_bounded(root: Path) -> None:
    deepest = "a/" * (safe_paths.FOLDERS_MAX - 1)
    write(root, f"{root}/{deepest}text", "deep")
    assert read(root, f"{root}/{deepest}text") == "deep"
    with pytest.raises(UsageError, match="too deep"):
        write(root, f"{root}/{deepest}a/text")


@pytest.mark.parametrize(
    "path", [None, 1, True, [], {}, "", "text", "./text", "/x\0y", "/\ud800", "/" + "x" * 5000, "~/text", b"/x"]
)
def test_invalid_path_is_refused(root: Path, path: object) -> None:
    with pytest.raises(UsageError) as told:
        read(root, path)
    assert len(str(told.value).encode()) < 500
    with pytest.raises(UsageError):
        write(root, path)


def test_path_that_kernel_refuses_is_refused(root: Path) -> None:
    for name in ("x" * 300, "text/below", "sub/text/"):
        with pytest.raises(UsageError):
            read(root, f"{root}/{name}")
        with pytest.raises(UsageError):
            write(root, f"{root}/{name}")
    for name in ("nothing", "nothing/text"):
        with pytest.raises(NotFound):
            read(root, f"{root}/{name}")


def test_missing_root_is_reported(root: Path) -> None:
    with pytest.raises(NotFound, match="cannot work in"):
        read(root / "nothing", f"{root}/nothing/text")


@pytest.mark.parametrize("how", [{"line": "1"}, {"line": -1}, {"limit": True}, {"limit": 1.5}, {"limit": [1]}])
def test_invalid_line_or_limit_is_refused(root: Path, how: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        read(root, f"{root}/text", **how)


# -- writing ---------------------------------------------------------------------------------------------------------
def test_file_is_written_whole(root: Path) -> None:
    write(root, f"{root}/text", "ä\r\n")
    assert (root / "text").read_bytes() == "ä\r\n".encode()
    write(root, f"{root}/text", "")
    assert (root / "text").read_bytes() == b""
    assert not partials(root)


def test_file_write_makes_missing_folders(root: Path) -> None:
    os.symlink("sub/later", root / "link")
    write(root, f"{root}/a/b/c/new")
    assert (root / "a/b/c/new").read_text() == "new"
    write(root, f"{root}/link/d/new")
    assert (root / "sub/later/d/new").read_text() == "new"
    many = "/".join("abcdefghij" * 6)
    write(root, f"{root}/{many}/new")
    assert (root / many / "new").read_text() == "new"


def test_file_write_keeps_mode_and_gives_new_file_the_default(root: Path) -> None:
    (root / "text").chmod(0o4751)
    before = os.umask(0o027)
    try:
        write(root, f"{root}/text")
        write(root, f"{root}/new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((root / "text").stat().st_mode) == 0o751
    assert stat.S_IMODE((root / "new").stat().st_mode) == 0o640


def test_file_write_leaves_open_readers_the_old_text(root: Path) -> None:
    with open(root / "text") as held:
        write(root, f"{root}/text", "new")
        assert held.read() == "one\ntwo\nthree\n"


def test_file_write_leaves_hard_links_the_old_text(root: Path) -> None:
    other = root.parent / "outside" / "other"
    os.link(root / "text", other)
    write(root, f"{root}/text")
    assert (root / "text").read_text() == "new"
    assert other.read_text() == "one\ntwo\nthree\n"


@pytest.mark.parametrize("content", [None, 1, b"x", ["x"], "half \ud800"])
def test_file_write_refuses_content_that_is_no_text(root: Path, content: Any) -> None:
    with pytest.raises(UsageError):
        write(root, f"{root}/text", content)
    assert (root / "text").read_text() == "one\ntwo\nthree\n"


def test_file_write_refuses_content_beyond_bound(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "FILE_BYTES_MAX", 4)
    write(root, f"{root}/text", "ää")
    with pytest.raises(UsageError, match="larger than 4 bytes"):
        write(root, f"{root}/text", "ääx")
    assert (root / "text").read_text() == "ää"


def test_failed_file_write_leaves_old_text(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no device that is full")
    full = os.open("/dev/full", os.O_WRONLY)
    try:

        def write_all(_: int, data: bytes) -> None:
            os.write(full, data)  # Behaves like a full disk.

        monkeypatch.setattr(files, "_write_all", write_all)
        with pytest.raises(BanksmanError, match="No space left"):
            write(root, f"{root}/text")
    finally:
        os.close(full)
    assert (root / "text").read_text() == "one\ntwo\nthree\n"
    assert not partials(root)


def as_nobody(call: Callable[[], object]) -> BaseException | None:
    """Return the error of a call as a user who is not root. The kernel keeps the filesystem uid per thread."""
    raised: list[BaseException] = []

    def run() -> None:
        libc.setfsgid(NOBODY)
        libc.setfsuid(NOBODY)
        try:
            call()
        except BaseException as exc:
            raised.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None


@pytest.fixture
def foreign(root: Path) -> Generator[safe_paths.Root]:
    """Return the root, for a user who owns none of it."""
    if os.geteuid():
        pytest.skip("to be another user takes root")
    with opened_root(root) as opened:
        yield opened


def test_file_in_unwritable_folder_is_written_in_place(root: Path, foreign: safe_paths.Root) -> None:
    (root / "text").chmod(0o666)
    root.chmod(0o755)
    inode = (root / "text").stat().st_ino
    assert as_nobody(lambda: files.write(foreign, f"{root}/text", b"by nobody")) is None
    assert ((root / "text").read_text(), (root / "text").stat().st_ino) == ("by nobody", inode)
    os.link(root / "text", root.parent / "outside" / "other")
    assert isinstance(as_nobody(lambda: files.write(foreign, f"{root}/text", b"again")), Refused)
    assert (root / "text").read_text() == "by nobody"


def test_file_of_another_user_keeps_its_owner(root: Path, foreign: safe_paths.Root) -> None:
    (root / "text").chmod(0o666)
    root.chmod(0o777)
    assert as_nobody(lambda: files.write(foreign, f"{root}/text", b"by nobody")) is None
    assert ((root / "text").read_text(), (root / "text").stat().st_uid) == ("by nobody", os.getuid())
    assert not partials(root)


def test_unwritable_file_is_not_replaced(root: Path, foreign: safe_paths.Root) -> None:
    (root / "text").chmod(0o444)
    root.chmod(0o777)
    assert isinstance(as_nobody(lambda: files.write(foreign, f"{root}/text", b"by nobody")), UsageError)
    assert (root / "text").read_text() == "one\ntwo\nthree\n"


# -- order and cancellation ------------------------------------------------------------------------------------------
async def test_file_requests_run_in_order(root: Path) -> None:
    async with working(root) as workspace:
        writes = [serve_write(workspace, f"{root}/text", str(number)) for number in range(50)]
        reads = workspace.serve("fs/read_text_file", {"path": f"{root}/text"})
        *_, last = await asyncio.gather(*writes, reads)
    assert last == {"content": "49"}


async def test_blocking_calls_run_one_at_a_time() -> None:
    lane = BlockingCalls()
    at_once = [0, 0]

    def call(_: Callable[[], bool]) -> None:
        at_once[0] += 1
        at_once[1] = max(at_once)
        os.sched_yield()
        at_once[0] -= 1

    await asyncio.gather(*(lane.run(call) for _ in range(200)))
    assert at_once == [0, 1]
    assert not lane.is_running


async def test_cancelled_file_write_is_not_done(root: Path) -> None:
    workspace = Workspace(str(root))
    fifo = root / "fifo"
    os.mkfifo(fifo)
    # The queue is blocked until a write to the fifo. Then it finds the write cancelled.
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    def busy(_: Callable[[], bool]) -> str:
        loop.call_soon_threadsafe(begun.set)
        return fifo.read_text()

    blocking = asyncio.ensure_future(workspace._blocking.run(busy))  # pyright: ignore[reportPrivateUsage]
    await begun.wait()
    writing = asyncio.ensure_future(serve_write(workspace, f"{root}/text"))
    await asyncio.sleep(0)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    with open(fifo, "w") as end:
        end.write("go on")
    assert await blocking == "go on"
    workspace.end()
    await workspace.wait_ended()
    assert (root / "text").read_text() == "one\ntwo\nthree\n"
    with pytest.raises(Closed):
        await serve_write(workspace, f"{root}/text")


async def test_file_write_pending_at_close_is_not_done(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_go_on = threading.Event(), threading.Event()
    write_all = files._write_all  # pyright: ignore[reportPrivateUsage]

    def write_slowly(fd: int, data: bytes) -> None:
        begun.set()
        may_go_on.wait(PATIENCE_SECONDS)
        write_all(fd, data)

    monkeypatch.setattr(files, "_write_all", write_slowly)
    async with working(root) as workspace:
        writing = asyncio.ensure_future(serve_write(workspace, f"{root}/text"))
        await asyncio.to_thread(begun.wait, PATIENCE_SECONDS)
        workspace.end()
        may_go_on.set()
        with pytest.raises(Closed):
            await writing
    assert (root / "text").read_text() == "one\ntwo\nthree\n"
    assert not partials(root)


def test_file_write_stopped_half_way_leaves_old_text(root: Path) -> None:
    with opened_root(root) as opened:
        for name in ("text", "new"):
            with pytest.raises(Closed):
                files.write(opened, f"{root}/{name}", b"new", lambda: False)
    assert (root / "text").read_text() == "one\ntwo\nthree\n"
    assert sorted(os.listdir(root)) == ["sub", "text"]


# -- races -----------------------------------------------------------------------------------------------------------
_FLIP = """
import ctypes, os, select, sys
libc = ctypes.CDLL(None)
one, other = map(os.fsencode, sys.argv[1:])
flips = 0
while flips % 64 or not select.select([0], [], [], 0)[0]:
    assert libc.renameat2(-100, one, -100, other, 2) == 0
    flips += 1
    if flips == 64:
        print("at it", flush=True)
print(flips)
"""


@contextlib.contextmanager
def flipping(one: Path, other: Path) -> Generator[list[int]]:
    """Exchange two names atomically, as fast as possible, in another process. Threads of one Python would take turns.

    The yielded list gets the number of exchanges at the end.
    """
    flips: list[int] = []
    argv = [sys.executable, "-I", "-S", "-c", _FLIP, one, other]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "at it\n"
            yield flips
        finally:
            flips.append(int(process.communicate()[0]))


def race(*calls: Callable[[int], object], races: int = RACES, often: int = OFTEN) -> None:
    """Repeat the calls until each succeeded and was refused many times. Otherwise there was no race."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    done, refused = [0] * len(calls), [0] * len(calls)
    number = 0
    while number < races or min(*done, *refused) < often:
        assert time.monotonic() < deadline, f"done {done}, refused {refused}"
        for index, call in enumerate(calls):
            number += 1
            try:
                call(number)
                done[index] += 1
            except BanksmanError:
                refused[index] += 1


def test_folder_swapped_for_link_leads_nowhere_else(root: Path) -> None:
    (root / "d").mkdir()
    (root / "d" / "text").write_text("INSIDE")
    os.symlink("../outside", root / "e")
    inside = (root / "d").stat()
    read_texts: set[str] = set()

    def enter(_: int) -> None:
        with contextlib.closing(safe_paths.open_folder(opened, f"{root}/d")) as folder:
            assert os.path.samestat(os.fstat(folder.fd), inside)

    with flipping(root / "d", root / "e"), opened_root(root) as opened:
        race(
            lambda _: read_texts.add(files.read(opened, f"{root}/d/text")),
            lambda number: files.write(opened, f"{root}/d/new-{number % 7}", b"x"),
            lambda number: files.write(opened, f"{root}/d/made-{number % 50}/below/new", b"x"),
            enter,
        )
    assert read_texts == {"INSIDE"}
    assert [(file.name, file.read_text()) for file in (root.parent / "outside").iterdir()] == [("text", "SECRET")]
    assert not partials(root)


def test_file_swapped_for_link_is_not_followed(root: Path) -> None:
    os.symlink("../outside/text", root / "other")
    read_texts: set[str] = set()

    def put_both() -> None:
        """Restore the link and the file.

        A write may have replaced the link, as a rename does, and two files would not race.
        """
        os.symlink("../outside/text", root / "fresh")
        os.rename(root / "fresh", root / "other")
        (root / "fresh").write_text("INSIDE")
        os.rename(root / "fresh", root / "text")

    def write_it(number: int) -> None:
        put_both()
        files.write(opened, f"{root}/text", f"INSIDE {number}".encode())

    with flipping(root / "text", root / "other"), opened_root(root) as opened:
        race(lambda _: read_texts.add(files.read(opened, f"{root}/text")), write_it, races=500, often=10)
    assert all(text.startswith(("INSIDE", "one")) for text in read_texts)
    assert (root.parent / "outside" / "text").read_text() == "SECRET"


def test_link_retargeted_outside_is_not_followed(root: Path) -> None:
    (root / "d").mkdir()
    (root / "d" / "text").write_text("INSIDE")
    os.symlink("d", root / "a")
    os.symlink("../outside", root / "b")
    read_texts: set[str] = set()
    with flipping(root / "a", root / "b"), opened_root(root) as opened:
        race(
            lambda _: read_texts.add(files.read(opened, f"{root}/a/text")),
            lambda number: files.write(opened, f"{root}/a/new", str(number).encode()),
        )
    assert read_texts == {"INSIDE"}
    assert os.listdir(root.parent / "outside") == ["text"]


def test_folder_moved_outside_is_not_climbed_out_of(root: Path) -> None:
    """The parent of a moved folder can be outside. The workspace returns to the folder from which it came."""
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "text").write_text("INSIDE")
    away = root.parent / "outside" / "b"
    away.mkdir()
    read_texts: set[str] = set()
    with flipping(root / "a" / "b", away) as flips, opened_root(root) as opened:
        for _ in range(RACES):
            read_texts.add(files.read(opened, f"{root}/a/b/../text"))
    assert read_texts == {"INSIDE"}
    assert flips[0] > OFTEN
