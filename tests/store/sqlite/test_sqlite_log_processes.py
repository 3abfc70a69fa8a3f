"""SQLite engine in several processes: one winner of each claim, sessions of dead processes, missing closes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from banksman.errors import NotOwner
from banksman.store.sqlite import SqliteLog

pytest.register_assert_rewrite("tests.store.conformance")

from tests.store.conformance import Writer, data, everything, known  # noqa: E402

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


RACER = """
import asyncio, sys
from banksman.errors import NotOwner
from banksman.store.sqlite import SqliteLog

async def main(path, rounds):
    log = SqliteLog(path)
    for number in range(rounds):
        print("ready", flush=True)
        sys.stdin.readline()
        try:
            print(await log.claim(f"s{number}", agent="claude"), flush=True)
        except NotOwner as exc:
            assert exc.ids["pid"] > 0
            print("refused", flush=True)
    sys.stdin.readline()
    await log.close()

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src")},
    )


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str], line: str = "") -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def ended(process: subprocess.Popen[str], seconds: float = 30) -> int:
    """Wait for the end of the process, and close its pipes."""
    process.communicate(timeout=seconds)
    return process.returncode


@pytest.mark.thorough
def test_concurrent_claims_from_processes_have_one_winner(path: Path) -> None:
    rounds = 20
    # The store does not exist yet, so the processes race for its creation too.
    racers = [start(RACER, str(path), str(rounds)) for _ in range(4)]
    for number in range(rounds):
        assert [said(racer) for racer in racers] == ["ready"] * 4
        for racer in racers:
            tell(racer)
        answers = sorted(said(racer) for racer in racers)
        assert answers == ["1", "refused", "refused", "refused"], number
    assert [ended(racer) for racer in racers] == [0] * 4


HOLDER = """
import asyncio, sys
from banksman.store.sqlite import SqliteLog

async def main(path):
    log = SqliteLog(path, address="there")
    epoch = await log.claim("s", agent="claude")
    leased = asyncio.get_running_loop().create_future()
    log.lease("s", epoch, "claude:x", leased.set_result)
    assert await leased is None
    print(epoch, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)

asyncio.run(main(sys.argv[1]))
"""


async def test_session_of_dead_process_is_claimable_at_once(path: Path) -> None:
    holder = start(HOLDER, str(path))
    epoch = int(said(holder))
    log = SqliteLog(path)
    with pytest.raises(NotOwner, match="there") as raised:
        await log.claim("s", agent="claude")
    assert raised.value.ids == {"session": "s", "pid": holder.pid, "address": "there"}
    mine = await Writer.claim(log, "mine")
    assert isinstance(await mine.take("claude:x"), NotOwner)
    with pytest.raises(NotOwner):
        await log.delete("s")
    owner = known(log).owner
    assert owner is not None
    assert (owner.pid, owner.address, owner.is_here, owner.is_alive) == (holder.pid, "there", False, True)
    holder.send_signal(signal.SIGKILL)
    assert ended(holder) == -signal.SIGKILL
    owner = known(log).owner
    assert owner is not None
    assert not owner.is_alive
    assert await mine.take("claude:x") is None
    assert await log.claim("s", agent="claude") > epoch
    await log.close()


UNCLOSED = """
import asyncio, atexit, gc, os, sys
from banksman.store.sqlite import SqliteLog

async def main(path):
    global log
    log = SqliteLog(path)
    epoch = await log.claim("s", agent="claude")
    committed = asyncio.get_running_loop().create_future()
    log.append("s", epoch, 0, 1.0, [(None, "update", b"a")], committed.set_result)
    assert await committed is None
    if sys.argv[2] == "fork":
        pid = os.fork()
        if not pid:
            # All that an exit runs, but for what asyncio itself would undo of the loop that it shares with the parent.
            del log
            gc.collect()
            atexit._run_exitfuncs()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        await log.claim("t", agent="claude")
    log.append("s", epoch, 1, 1.0, [(None, "update", b"b")], lambda error: None)

asyncio.run(main(sys.argv[1]))
if sys.argv[2] == "collected":
    del log
"""


FORKED = """
import asyncio, os, sys
from banksman.store.sqlite import SqliteLog

async def main(path):
    loop = asyncio.get_running_loop()

    def append(seq):
        committed = loop.create_future()
        log.append("s", epoch, seq, 1.0, [("t", "queue.changed", b"%d" % seq)], committed.set_result)
        return committed

    log = SqliteLog(path)
    epoch = await log.claim("s", agent="claude")
    assert await append(0) is None
    pid = os.fork()
    if not pid:
        committed = append(1)
        for _ in range(3):
            await asyncio.sleep(0)
        os._exit(committed.done())
    assert os.waitpid(pid, 0)[1] == 0
    assert await append(1) is None
    await log.close()

asyncio.run(main(sys.argv[1]))
"""


async def test_forked_child_commits_nothing_to_the_store_of_its_parent(path: Path) -> None:
    assert ended(start(FORKED, str(path))) == 0
    log = SqliteLog(path)
    assert data(await everything(log)) == [b"0", b"1"]
    await log.close()


@pytest.mark.parametrize("how", ["exit", "collected", "fork"])
async def test_program_that_never_closes_its_log_still_exits(path: Path, how: str) -> None:
    assert ended(start(UNCLOSED, str(path), how)) == 0
    log = SqliteLog(path)
    assert data(await everything(log))[:1] == [b"a"]
    assert await log.claim("s", agent="claude") > 1
    await log.close()
