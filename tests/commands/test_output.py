"""Output of a command: bounded memory, spill files, output limits, and writes that never block.

Output up to the cap is kept whole. Beyond the cap memory has the head and the tail, and a file has everything. A
command can always write, whether or not a reader reads.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from tests.process.helpers import (
    REPOSITORY,
    Heard,
    alive,
    child,
    program,
    run_program,
    rungs,
    start,
    wait_said,
    wait_until,
)

import banksman
from banksman import Ended, Host
from banksman.commands import output as spill_file
from banksman.commands.output import OUTPUT_BYTES_MAX
from banksman.process.pipes import READ_BYTES_MAX

# Writes numbered lines, so that a missing, repeated or misplaced byte is detected. The arguments are the number of
# bytes, the fd, and how often each line is repeated.
WRITES = """
left = int(WORDS[0])
times = int(WORDS[2]) if len(WORDS) > 2 else 1
number = 0
while left:
    line = b"%08d\\n" % number * times
    number += 1
    while line and left:
        taken = os.write(int(WORDS[1]), line[:left])
        line, left = line[taken:], left - taken
"""


def numbered(size: int) -> bytes:
    return b"".join(b"%08d\n" % number for number in range(size // 9 + 1))[:size]


@pytest.fixture
def spill_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder for spill files, so that the test sees every spill file."""
    folder = tmp_path / "spill"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


# -- the caps --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cap", [1, 2, 9, 10, 101, 4096, 100_000])
@pytest.mark.parametrize("fd", [1, 2])
async def test_output_at_cap_is_whole_and_larger_one_is_head_and_tail(
    marker: str, spill_folder: Path, cap: int, fd: int
) -> None:
    at_limit = await banksman.execute(child(WRITES, marker, cap, fd), output_bytes_max=cap)
    output = at_limit.stdout if fd == 1 else at_limit.stderr
    assert (output.head + output.tail, output.total, output.dropped) == (numbered(cap), cap, 0)
    assert output.text == numbered(cap).decode()
    assert output.file is None
    assert output.keep() is None
    assert os.listdir(spill_folder) == []

    past = await banksman.execute(child(WRITES, marker, cap + 1, fd), output_bytes_max=cap)
    output = past.stdout if fd == 1 else past.stderr
    whole = numbered(cap + 1)
    assert (output.total, output.dropped) == (cap + 1, 1)
    assert len(output.head) + len(output.tail) == cap
    assert whole.startswith(output.head)
    assert whole.endswith(output.tail)
    # The head gets the larger half, because the beginning shows what was done.
    assert len(output.head) - len(output.tail) in (0, 1)
    assert "1 bytes left out" in output.text
    assert output.file is not None
    assert Path(output.file).read_bytes() == whole
    other = past.stderr if fd == 1 else past.stdout
    assert (other.total, other.file) == (0, None)


async def test_output_cap_of_zero_keeps_all_in_file(marker: str, spill_folder: Path) -> None:
    done = await banksman.execute(child(WRITES, marker, 1000, 1), output_bytes_max=0)
    assert (done.stdout.head, done.stdout.tail, done.stdout.dropped) == (b"", b"", 1000)
    assert done.stdout.file is not None
    assert Path(done.stdout.file).read_bytes() == numbered(1000)
    silent = await banksman.execute(child("", marker), output_bytes_max=0)
    assert (silent.stdout.total, silent.stdout.file) == (0, None)


async def test_output_far_beyond_cap_is_counted_and_whole_in_file(marker: str, spill_folder: Path) -> None:
    """The output is several times the bytes that one readiness callback reads, in pieces of all sizes."""
    size = 3 * READ_BYTES_MAX + 12_345
    done = await banksman.execute(child(WRITES, marker, size, 1, 777))
    output = done.stdout
    assert output.total == size
    assert (len(output.head), len(output.tail)) == (OUTPUT_BYTES_MAX // 2, OUTPUT_BYTES_MAX // 2)
    assert output.dropped == size - OUTPUT_BYTES_MAX
    assert output.file is not None
    whole = Path(output.file).read_bytes()
    assert len(whole) == size
    assert whole.startswith(output.head)
    assert whole.endswith(output.tail)


async def test_output_of_single_bytes_is_kept(marker: str) -> None:
    """The command writes byte by byte. The bytes stay in order, and head and tail have exactly their size."""
    code = WRITES.replace("line[:left]", "line[:1]")
    done = await banksman.execute(child(code, marker, 5000, 1), output_bytes_max=1000)
    assert done.stdout.head == numbered(5000)[:500]
    assert done.stdout.tail == numbered(5000)[-500:]


async def test_spill_file_is_bounded_and_lost_bytes_are_counted(marker: str, spill_folder: Path) -> None:
    """Beyond the file's bound a reader learns the number of missed bytes. No byte is invented or repeated."""
    from banksman.commands.options import Options
    from banksman.process.launch import prepare

    size, in_file, kept = 10_000, 3000, 1000
    async with Host() as host:
        options = Options(output_bytes_max=kept, spill_bytes_max=in_file)
        command = host.launch(prepare(child(WRITES, marker, size, 1)), options)
        done = await command.wait()
        assert done.stdout.file is not None
        assert Path(done.stdout.file).read_bytes() == numbered(size)[:in_file]
        assert done.stdout.dropped == size - kept
        read, after, missed = b"", 0, 0
        while True:
            piece = await command.read(after=after, bytes_max=700)
            read, after, missed = read + piece.data, piece.next, missed + piece.missed
            if piece.is_end:
                break
        assert after == size
        assert read[:in_file] == numbered(size)[:in_file]
        assert numbered(size).endswith(read[in_file:])
        assert len(read) + missed == size
        assert missed <= size - in_file - kept // 2


async def test_reader_of_running_command_gets_all_from_spill_file(marker: str, spill_folder: Path) -> None:
    """The reader is far behind the head and before the tail.

    It reads the bytes that left memory from the growing file.
    """
    size = 50_000
    async with Host() as host:
        command = await start(host, child(WRITES + "stay()", marker, size, 1), output_bytes_max=100)
        read = b""
        while len(read) < size:
            piece = await command.read(after=len(read), bytes_max=999)
            assert piece.missed == 0
            read += piece.data
        assert read == numbered(size)


async def test_output_that_is_not_utf8_is_replaced_in_text_only(marker: str) -> None:
    done = await banksman.execute(child(r"os.write(1, b'\xff\xfe ok \xc3')", marker))
    assert done.stdout.head == b"\xff\xfe ok \xc3"
    assert done.stdout.text == "�� ok �"


# -- spill files and their end ---------------------------------------------------------------------------------------
async def test_spill_file_is_removed_with_result(marker: str, spill_folder: Path) -> None:
    done = await banksman.execute(child(WRITES, marker, 1000, 1), output_bytes_max=10)
    assert done.stdout.file is not None
    assert os.path.exists(done.stdout.file)
    assert os.stat(done.stdout.file).st_mode & 0o077 == 0, "what a command wrote is nobody else's business"
    del done
    gc.collect()
    assert os.listdir(spill_folder) == []


@pytest.mark.thorough
async def test_spill_file_lives_as_long_as_any_part_of_result(marker: str, spill_folder: Path) -> None:
    done = await banksman.execute(child(WRITES, marker, 1000, 1), output_bytes_max=10)
    output = done.stdout
    del done
    gc.collect()
    assert output.file is not None
    assert Path(output.file).read_bytes() == numbered(1000)
    del output
    gc.collect()
    assert os.listdir(spill_folder) == []


async def test_kept_spill_file_belongs_to_caller(marker: str, spill_folder: Path) -> None:
    done = await banksman.execute(child(WRITES, marker, 1000, 1), output_bytes_max=10)
    path = done.stdout.keep()
    assert path is not None
    del done
    gc.collect()
    assert Path(path).read_bytes() == numbered(1000)


async def test_spill_file_of_background_command_is_removed_when_command_is_forgotten(
    marker: str, spill_folder: Path
) -> None:
    """A kept command can still be read from its file. A forgotten command removes its file."""
    async with Host(finished_max=1) as host:
        command = await start(host, child(WRITES, marker, 1000, 1), output_bytes_max=10)
        await command.wait()
        del command
        gc.collect()
        (kept,) = host.commands()
        assert (await kept.read(after=500, bytes_max=100)).data == numbered(1000)[500:600]
        del kept
        host.take_ended()
        await host.start(child("", marker), yield_after=30)
        gc.collect()
        assert os.listdir(spill_folder) == []


SPILLS = """
async def main():
    done = await banksman.execute(child("os.write(1, b'x' * 1000)", MARKER), output_bytes_max=10)
    kept = await banksman.execute(child("os.write(1, b'y' * 1000)", MARKER), output_bytes_max=10)
    print(done.stdout.file, kept.stdout.keep(), flush=True)
    WORDS[0] == "killed" and os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


async def test_spill_files_of_killed_process_are_removed_by_next_one(marker: str, spill_folder: Path) -> None:
    env = {"TMPDIR": str(spill_folder)}
    ours = await banksman.execute(child(WRITES, marker, 1000, 1), output_bytes_max=10)
    killed = await asyncio.to_thread(run_program, SPILLS, marker, "killed", env=env)
    left, kept = (Path(path) for path in killed.stdout.split())
    assert (killed.returncode, left.exists(), kept.exists()) == (-signal.SIGKILL, True, True)
    (dead,) = spill_file.find_dead(str(spill_folder))
    assert (dead.files, dead.size) == ((str(left),), 1000)
    other = await asyncio.to_thread(run_program, SPILLS, marker, "exits", env=env)
    gone, also_kept = (Path(path) for path in other.stdout.split())
    assert not left.exists()
    assert not gone.exists()
    # The files that were kept, and those of live processes, stay.
    assert ours.stdout.file is not None
    assert sorted(path.name for path in spill_folder.glob("*.out")) == sorted(
        (kept.name, also_kept.name, Path(ours.stdout.file).name)
    )
    assert list(spill_file.find_dead(str(spill_folder))) == []
    assert len(list(spill_folder.glob("*.owner"))) == 1


async def test_owner_file_is_removed_with_last_spill_file(marker: str, spill_folder: Path) -> None:
    first, second = [await banksman.execute(child(WRITES, marker, 1000, 1), output_bytes_max=10) for _ in range(2)]
    assert len(list(spill_folder.glob("*.owner"))) == 1
    del first
    gc.collect()
    assert len(list(spill_folder.glob("*.owner"))) == 1
    path = second.stdout.keep()
    del second
    gc.collect()
    assert [str(each) for each in spill_folder.iterdir()] == [path]


async def test_cancelled_command_leaves_no_spill_file(marker: str, spill_folder: Path) -> None:
    heard = Heard()
    argv = child(WRITES + "say('written', to=2)\nstay()", marker, 1000, 1)
    running = asyncio.create_task(banksman.execute(argv, output_bytes_max=10, on_output=heard))
    await heard.wait("written")
    assert len(list(spill_folder.glob("*.out"))) == 1
    running.cancel()
    await asyncio.wait([running])
    del running

    def is_gone() -> bool:
        gc.collect()
        return not os.listdir(spill_folder)

    await asyncio.to_thread(wait_until, is_gone, "the file to go with the command")


EXITS = """
async def main():
    heard = Heard()
    argv = child("os.write(1, bytes(100000)); say('written', to=2); %s", MARKER)
    running = asyncio.create_task(banksman.execute(argv, output_bytes_max=10, on_output=heard))
    await heard.wait("written")
    if WORDS[0] == "finished":
        return await running
    return running

loop = asyncio.new_event_loop()
done = loop.run_until_complete(main())
if WORDS[0] == "kept":
    done = loop.run_until_complete(done)
    print(done.stdout.keep())
"""


@pytest.mark.parametrize("how", ["finished", "running", "kept"])
def test_interpreter_exit_leaves_only_kept_spill_files(marker: str, tmp_path: Path, how: str) -> None:
    code = EXITS % ("stay()" if how == "running" else "")
    done = run_program(code, marker, how, env={"TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert [str(tmp_path / name) for name in os.listdir(tmp_path)] == done.stdout.split()
    assert bool(done.stdout) is (how == "kept")
    assert alive(marker) == []


def test_forked_program_does_not_delete_spill_file_of_parent(marker: str, tmp_path: Path) -> None:
    """The fork has copies of all objects, and finalizes them at its exit or when it collects them.

    The file belongs to the parent.
    """
    code = """
done = asyncio.run(banksman.execute(child("os.write(1, bytes(100000))", MARKER), output_bytes_max=10))
path = done.stdout.file
for is_collected in (False, True):
    pid = os.fork()
    if pid == 0:
        if is_collected:
            del done
            gc.collect()
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert os.path.exists(path)
print("still there")
"""
    done = run_program(code, marker, env={"TMPDIR": str(tmp_path)})
    assert (done.stdout, done.stderr) == ("still there\n", "")
    assert os.listdir(tmp_path) == []


async def test_unwritable_spill_folder_does_not_fail_command(
    marker: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent/folder")
    with caplog.at_level(logging.WARNING, logger="banksman"):
        done = await banksman.execute(child(WRITES, marker, 100_000, 1), output_bytes_max=1000)
    assert (done.ended, done.code) == (Ended.EXITED, 0)
    assert (done.stdout.total, done.stdout.dropped, done.stdout.file) == (100_000, 99_000, None)
    assert done.stdout.head == numbered(100_000)[:500]
    assert done.stdout.tail == numbered(100_000)[-500:]
    assert len(caplog.records) == 1, "said once, not once per piece"
    # The failed attempt is collected here and not in a later test, because an error in its finalizer belongs to this
    # test.
    caplog.clear()
    gc.collect()


def test_full_disk_does_not_fail_command(marker: str, tmp_path: Path) -> None:
    """A real full disk: a tmpfs of 64 KiB, mounted in the namespace of this program.

    ENOSPC comes in the middle of the file.
    """
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare(1)")
    code = f"""
async def main():
    argv = child({WRITES!r}, MARKER, 300000, 1)
    host = banksman.Host()
    command = await host.start(argv, output_bytes_max=1000)
    done = await command.wait()
    assert os.listdir(WORDS[0]) == [], os.listdir(WORDS[0])
    piece = await command.read(after=100_000)
    print(done.ended, done.code, done.stdout.total, done.stdout.dropped, done.stdout.file)
    print(piece.missed, len(piece.data))
    # With room again, the next command has a file again.
    done = await banksman.execute(child({WRITES!r}, MARKER, 20000, 1), output_bytes_max=1000)
    assert os.path.getsize(done.stdout.file) == 20000
    await host.close()

asyncio.run(main())
"""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = 'mount -t tmpfs -o size=64k tmpfs "$0" 2>/dev/null || exit 99; shift 0; exec "$@"'
    namespace = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    done = subprocess.run(
        [*namespace, "sh", "-c", mount, str(folder), *program(code, marker, folder)],
        cwd=REPOSITORY,
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode == 99 or "unshare" in done.stderr.partition("\n")[0]:
        pytest.skip("this machine lets nobody mount")
    assert done.returncode == 0, done.stderr
    # From byte 100,000 on only the tail remains. Its chunks can hold slightly more than its 500 bytes.
    ended, exit_code, total, dropped, file, missed, read = done.stdout.split()
    assert (ended, exit_code, total, dropped, file) == ("exited", "0", "300000", "299000", "None")
    assert int(missed) + int(read) == 200_000
    assert int(read) >= 500
    assert done.stderr.count("No space left") == 1


# -- timeouts and limits that count output ---------------------------------------------------------------------------
@pytest.mark.thorough
async def test_output_on_either_stream_resets_idle_clock(marker: str) -> None:
    """The child writes only to stderr for a while, then falls silent, and the idle timeout ends it.

    The test fails on a machine so slow that the child cannot write once in four seconds.
    """
    code = """
say("begun")
for number in range(30):
    say(number, to=2)
    time.sleep(0.05)
say("silent", to=2)
stay()
"""
    done = await banksman.execute(child(code, marker), idle_timeout=4.0, grace=0.2)
    assert alive(marker) == []
    assert done.ended is Ended.IDLE_TIMEOUT
    assert done.stderr.text.endswith("silent\n")
    assert done.ladder[0].at >= 30 * 0.05 + 4.0


async def test_silent_command_ends_by_idle_clock_from_its_start(marker: str) -> None:
    done = await banksman.execute(child("stay()", marker), idle_timeout=0.3, timeout=60)
    assert done.ended is Ended.IDLE_TIMEOUT
    assert done.ladder[0].at >= 0.3


async def test_timeout_ends_command_that_never_falls_silent(marker: str) -> None:
    code = """
while True:
    say("x")
    time.sleep(0.01)
"""
    done = await banksman.execute(child(code, marker), idle_timeout=30, timeout=0.5)
    assert done.ended is Ended.TIMEOUT


async def test_output_read_late_by_busy_loop_resets_idle_clock(marker: str, tmp_path: Path) -> None:
    """The timer runs late behind a busy loop.

    The output that arrived in the meantime counts before the timer decides.
    """
    idle_seconds = 4.0
    code = 'say("ready"); hear(); say("more"); touch(WORDS[0]); hear()'
    said = tmp_path / "said"
    async with Host() as host:
        command = await start(host, child(code, marker, said), stdin="pipe", idle_timeout=idle_seconds)
        await wait_said(command, "ready")
        await command.write(b"go\n")
        # The loop is busy for longer than the idle timeout, and the child's line waits in the pipe.
        busy_until = time.monotonic() + idle_seconds + 0.2
        while time.monotonic() < busy_until or not said.exists():
            time.sleep(0.01)
        await wait_said(command, "more")
        assert command.state == "running"
        await command.write(b"go\n")
        assert (await command.wait()).ended is Ended.EXITED


async def test_output_total_max_ends_command_one_byte_past_limit(marker: str) -> None:
    """Both streams count. Without the limit a command can write forever."""
    code = """
say("x" * 49)
say("x" * (int(WORDS[0]) - 51), to=2)
hear()
"""
    async with Host() as host:
        command = await start(host, child(code, marker, 100), stdin="pipe", output_total_max=100)
        await wait_said(command, "\n")
        await wait_said(command, "\n", stream="stderr")
        await command.close_stdin()
        done = await command.wait()
        assert (done.ended, done.stdout.total + done.stderr.total) == (Ended.EXITED, 100)
        command = await start(host, child(code, marker, 101), stdin="pipe", output_total_max=100)
        done = await command.wait()
        assert (done.ended, done.stdout.total + done.stderr.total) == (Ended.OUTPUT_LIMIT, 101)
        assert rungs(done)[0] == "term"


async def test_output_total_max_ends_flood_that_ignores_term(marker: str) -> None:
    done = await banksman.execute(
        child("be_deaf()\nwhile True: os.write(1, bytes(65536))", marker), output_total_max=1 << 20, grace=0.2
    )
    assert alive(marker) == []
    assert done.ended is Ended.OUTPUT_LIMIT
    assert done.stdout.total > 1 << 20


# -- a command can always write --------------------------------------------------------------------------------------
@pytest.mark.parametrize("fd", [1, 2])
async def test_unread_stream_never_deadlocks_command(marker: str, fd: int) -> None:
    """Scenario 19: many times the capacity of a pipe on the unread stream, before a word on the other stream."""
    size = 5_000_000
    async with Host() as host:
        argv = child(WRITES + "say('done', to=3 - int(WORDS[1]))", marker, size, fd, 777)
        command = await start(host, argv)
        await wait_said(command, "done", stream="stderr" if fd == 1 else "stdout")
        done = await command.wait()
        assert (done.stdout if fd == 1 else done.stderr).total == size


@pytest.mark.parametrize("error", [ValueError("the caller's bug"), asyncio.CancelledError()])
async def test_raising_output_callback_still_gets_later_output(
    marker: str, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    """Scenario 27, for both streams: a bug of the callback costs its caller no output, and is logged once."""
    heard = Heard()

    def callback(stream: str, data: bytes) -> None:
        heard(stream, data)
        raise error

    code = """
for number in range(5):
    say("out", number)
    say("err", number, to=2)
    hear()
"""
    loop = asyncio.get_running_loop()
    # Banksman must not swallow a CancelledError: asyncio's handler gets it, and the command continues.
    loop.set_exception_handler(lambda _loop, _context: None)
    async with Host() as host:
        command = await start(host, child(code, marker), stdin="pipe", on_output=callback)
        for number in range(5):
            await heard.wait(f"out {number}\n")
            await heard.wait(f"err {number}\n")
            await command.write(b"go\n")
        done = await command.wait()
    assert done.code == 0
    assert done.stdout.text == "".join(f"out {number}\n" for number in range(5))
    if isinstance(error, Exception):
        assert len([record for record in caplog.records if record.name == "banksman"]) == 1


async def test_output_callback_may_stop_command_and_gets_nothing_after_end(marker: str) -> None:
    """The callback calls back into the dispatcher. The stop is queued, and the pieces keep their order."""
    heard = Heard()
    async with Host() as host:

        def callback(stream: str, data: bytes) -> None:
            heard(stream, data)
            for command in host.commands():
                command.stop_nowait()

        command = await start(host, child('say("one")\nwhile True: say("more")', marker), on_output=callback)
        done = await command.wait()
        count = len(heard.pieces)
    assert (done.ended, alive(marker)) == (Ended.STOPPED, [])
    assert len(heard.text) == done.stdout.total
    await asyncio.sleep(0)
    assert len(heard.pieces) == count


async def test_output_callback_has_everything_before_result(marker: str) -> None:
    heard = Heard()
    done = await banksman.execute(child(WRITES, marker, 300_000, 1), on_output=heard, output_bytes_max=10)
    assert b"".join(data for _stream, data in heard.pieces) == numbered(300_000)
    assert {stream for stream, _data in heard.pieces} == {"stdout"}
    assert done.stdout.total == 300_000


def test_capture_memory_does_not_grow_with_output(marker: str) -> None:
    """200 MB pass through the capture, three times the bound of the file.

    A separate program has its own peak memory.
    """
    code = """
import resource

async def main():
    await banksman.execute(child("", MARKER))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    done = await banksman.execute(child("block = bytes(1 << 16)\\nfor _ in range(3200): os.write(1, block)", MARKER))
    print(done.stdout.total >> 16, os.path.getsize(done.stdout.file) >> 20)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)

asyncio.run(main())
"""
    done = run_program(code, marker)
    blocks, megabytes, grown_kilobytes = (int(word) for word in done.stdout.split())
    assert (blocks, megabytes) == (3200, 64)
    # Head and tail are 1 MiB together, and the result copies them once.
    assert grown_kilobytes < 20_000


def test_numbered_helper_equals_output_of_child() -> None:
    """Check `numbered` against the child, without Banksman."""
    written = subprocess.run(child(WRITES, "marked-none", 1234, 1), capture_output=True, check=True).stdout
    assert written == numbered(1234)
